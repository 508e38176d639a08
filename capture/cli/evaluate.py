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
from capture.cli.output import emit, table
from capture.documents import write
from capture.options import Option, add, options_of, taken
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.space import StageSpace
from capture.predictor.accuracy import DeviceErrors
from profiling_runs.collect import split_warnings
from profiling_runs.evaluate import EvaluateReport, EvaluationQuestion, evaluate

#: Fractions of a row, by the name of their column.
_COLUMNS = {
    "within 2 %": "within_2pct",
    "within 5 %": "within_5pct",
    "within 11 %": "within_11pct",
    "mean |error|": "mean_abs_error_fraction",
    "max |error|": "max_abs_error_fraction",
    "mean error": "mean_error_fraction",
    "lowest": "lowest_error_fraction",
    "in interval": "interval_coverage_fraction",
}


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
    report = replace(found.report, warnings=warnings)
    if options.output is not None:
        document = {**write(report), "predictions": found.predictions}
        options.output.write_text(json.dumps(document))
    emit(options, report, as_text(report))
    return 0


def as_text(report: EvaluateReport) -> str:
    """Return a table of both modes side by side; the paper's, which does not know schedules, also
    per schedule."""
    default, paper = report.default, report.paper
    rows: list[tuple[str, DeviceErrors]] = [
        ("default, not compiled before", default),
        ("default, all devices", default.all_devices),
    ]
    if paper is not None and report.default_where_paper_predicts is not None:
        rows.append(("default, where the paper predicts", report.default_where_paper_predicts))
        rows.append(("paper, not compiled before", paper))
        rows.append(("paper, all devices", paper.all_devices))
        if len(report.by_schedule) > 1:
            rows += [
                (f"paper, {schedule}", modes["paper"])
                for schedule, modes in report.by_schedule.items()
            ]
    lines = [
        f"{report.num_plans} random plans of {report.workload} on {report.cluster}, target "
        f"{report.target}, {' and '.join(report.schedules)}; {default.num_compiled_before} device "
        "predictions are of stages compiled before"
    ]
    if not default.num_predictions:
        lines.append(
            "nothing was predicted: draw more plans (--plans), or ask for more devices (--cluster)"
        )
    cells = [[name, *_cells(found)] for name, found in rows]
    return "\n".join([*lines, table(["mode", "predictions", *_COLUMNS, "above it"], cells)])


def _cells(found: DeviceErrors) -> list[Any]:
    fractions = (getattr(found, name) for name in _COLUMNS.values())
    above = "-" if found.interval_coverage_fraction is None else found.num_above_interval
    return [found.num_predictions, *map(_percent, fractions), above]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}".replace("-0.00%", "0.00%")
