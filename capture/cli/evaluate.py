"""How good are the predictions? Random plans, predicted from the profile alone, against their own
compiled stages.

Plans are drawn uniformly over stage count, then cuts, degrees and kind. The truth is the replay of
the plan over its compiled stages. A stage whose programs were compiled for the profile or the
calibration is counted apart: a lookup is no prediction. The statistics are those of the paper's
Figure 7. Interrupted, the same command resumes: compiled stages are in the store.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table, warning_lines
from capture.options import Option, add, options_of, taken
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.space import StageSpace
from profiling_runs.collect import split_warnings
from profiling_runs.evaluate import EvaluationQuestion, evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser)
    add(
        parser,
        shared.NUM_LAYERS,
        shared.CLUSTER,
        shared.TARGET,
        *options_of(StageSpace),
        shared.GLOBAL_BATCH,
        shared.MICROBATCHES,
        replace(shared.SCHEDULE, default="both", choices=(*SCHEDULES, "both")),
        shared.REMAT,
        *shared.CHOICES,
        *shared.STORE,
        *shared.PROFILING,
        *options_of(EvaluationQuestion),
        Option("default_only", "without the paper's mode and its profiling runs", False),
        shared.output(None, "also write every prediction, as JSON"),
    )


def main(options: argparse.Namespace) -> int:
    asked.say_one_device(options)
    of_profile = asked.profile_question(vars(options))
    schedules = tuple(PLAIN_SCHEDULES) if options.schedule == "both" else (options.schedule,)
    question = EvaluationQuestion(
        of_profile,
        options.microbatches,
        schedules,
        paper=not options.default_only,
        **taken(EvaluationQuestion, vars(options)),
    )
    measurements = asked.open_measurements(options, of_profile)
    found = evaluate(question, measurements)
    warnings = split_warnings(measurements.backend.workload, question.microbatch_size)
    document = {**found.to_json(), "workload": options.workload, "warnings": warnings}
    if options.output is not None:
        options.output.write_text(json.dumps({**document, "predictions": found.predictions}))
    emit(options, document, "\n".join([as_text(document), *warning_lines(document["warnings"])]))
    return 0


def as_text(document: dict[str, Any]) -> str:
    """Both modes side by side; the paper's, which does not know schedules, also per schedule."""
    default = document["default"]
    skipped = default["num_compiled_before"]
    rows = [
        ("default, not compiled before", default),
        ("default, all devices", default["all_devices"]),
    ]
    if paper := document.get("paper"):
        rows.append(("default, where the paper predicts", document["default_where_paper_predicts"]))
        rows.append(("paper, not compiled before", paper))
        rows.append(("paper, all devices", paper["all_devices"]))
    if paper and len(document["by_schedule"]) > 1:
        rows += [
            (f"paper, {schedule}", modes["paper"])
            for schedule, modes in document["by_schedule"].items()
        ]
    columns = [
        "within 2 %",
        "within 5 %",
        "within 11 %",
        "mean |error|",
        "max |error|",
        "mean error",
        "lowest",
        "in interval",
        "above it",
    ]
    return "\n".join(
        [
            f"{document['num_plans']} random plans of {document['workload']} on "
            f"{document['cluster']}, target {document['target']}, "
            f"{' and '.join(document['schedules'])}; {skipped} device predictions are of stages "
            "compiled before",
            *_nothing_fresh(default),
            table(
                ["mode", "predictions", *columns], [[name, *_cells(found)] for name, found in rows]
            ),
        ]
    )


def _nothing_fresh(default: dict[str, Any]) -> list[str]:
    if default["num_predictions"]:
        return []
    return ["nothing was predicted: draw more plans (--plans), or ask for more devices (--cluster)"]


def _cells(found: dict[str, Any]) -> list[Any]:
    shares = [_percent(found[f"within_{p}pct"]) for p in (2, 5, 11)]
    errors = [
        _percent(found[f"{which}_error_fraction"])
        for which in ("mean_abs", "max_abs", "mean", "lowest")
    ]
    covered = found["interval_coverage_fraction"]
    return [
        found["num_predictions"],
        *shares,
        *errors,
        _percent(covered),
        "-" if covered is None else found["num_above_interval"],
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}".replace("-0.00%", "0.00%")
