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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from capture.cli import options as shared
from capture.cli.output import emit, say, table
from capture.cli.progress import progress
from capture.errors import PlanError
from capture.model.workload import WorkloadSpec
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan
from capture.quantities import parse_bytes

NAME = "evaluate"
HELP = "compare predictions of random plans with compiled truth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_question(parser, schedules=(*SCHEDULES, "both"), schedule="both")
    parser.add_argument(
        "--plans",
        type=shared.at_least(1),
        default=200,
        metavar="N",
        help="random plans (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="draw only plans that are predicted to fit this limit per device, such as 40GB",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the plans (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write every prediction, as JSON"
    )


@dataclass(frozen=True)
class Outcome:
    """One device of one plan: what was predicted and what the compiled stages need.

    Attributes:
        plan: Index of the drawn plan, schedule included.
        predicted, low, high: In bytes; NaN where a mode has no prediction.
        measured: In bytes.
        known: Whether the stage's programs were compiled for the profile or the calibration.
    """

    plan: tuple[int, str]
    stage: int
    predicted: float
    low: float
    high: float
    measured: float
    known: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        plan, schedule = self.plan
        return {
            "plan": plan,
            "schedule": schedule,
            "stage": self.stage,
            "predicted_bytes": finite(self.predicted),
            "interval_bytes": [finite(self.low), finite(self.high)],
            "measured_bytes": self.measured,
            "compiled_before": self.known,
        }


def finite(number: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if np.isnan(number) else number


def main(options: argparse.Namespace) -> int:
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    from capture.plan.sampling import random_plans
    from capture.predictor import AdditivePredictor
    from profiling_runs.collect import paper_profile, plan_of, profile, stage_config

    microbatch_size = global_batch // num_microbatches
    spec = WorkloadSpec.parse(options.workload)
    measurements = shared.open_question_measurements(options, cluster, progress(options))
    result = profile(
        spec,
        cluster,
        microbatch_size=microbatch_size,
        remat=(options.remat,),
        shard_optimizer=options.shard_optimizer,
        whole_nodes=options.whole_nodes,
        any_divisor=options.any_divisor,
        num_neighbours=options.neighbours,
        calibration_plans=options.calibration_plans,
        measurements=measurements,
    )
    by_degree: dict[int, tuple[Any, ...]] = {}
    for choice in result.choices:
        by_degree[choice.num_devices] = (*by_degree.get(choice.num_devices, ()), choice)
    # Calibration draws with a seed of its own; this keeps the two streams apart whatever seed is
    # given.
    generator = np.random.default_rng([options.seed, 1])
    draws = random_plans(
        cluster,
        result.graph.num_layers,
        by_degree,
        generator,
        whole_nodes=options.whole_nodes,
        any_divisor=options.any_divisor,
    )
    known = {measurements.key(config) for config in measurements.costs}
    schedules = tuple(SCHEDULES) if options.schedule == "both" else (options.schedule,)
    papers = {
        schedule: paper_profile(
            measurements,
            cluster,
            microbatch_size,
            schedule,
            num_microbatches,
            remat=options.remat,
            shard_optimizer=options.shard_optimizer,
        )
        for schedule in schedules
    }
    known_to_paper = {measurements.key(config) for config in measurements.costs}
    limit = None if options.memory is None else parse_bytes(options.memory)
    drawn = (
        {s: plan_of(stages, result, cluster, global_batch, num_microbatches, s) for s in schedules}
        for stages in draws
    )
    fitting = drawn if limit is None else _fitting(drawn, AdditivePredictor(result), limit)
    plans = {
        (i, s): plan
        for i, both in enumerate(islice(fitting, options.plans))
        for s, plan in both.items()
    }
    measurements.require(
        {
            "stages of the plans": [
                stage_config(s, microbatch_size) for plan in plans.values() for s in plan.stages
            ]
        }
    )
    say(options, "replaying the plans")
    default, paper = outcomes(plans, result, measurements, papers, known, known_to_paper)
    document = {
        "workload": options.workload,
        "cluster": str(cluster),
        "target": cluster.target,
        "num_plans": options.plans,
        "seed": options.seed,
        "memory_limit_bytes": limit,
        "schedules": list(schedules),
        "remat": options.remat,
        "global_batch_size": global_batch,
        "num_microbatches": num_microbatches,
        "interval_factors": list(result.calibration.widest(result.choices, result.graph.num_layers))
        if result.calibration
        else None,
        "default": statistics(default),
        "paper": statistics(paper),
        "default_where_paper_predicts": statistics(_matching(default, paper)),
        "by_schedule": {
            s: {"default": statistics(_of(default, s)), "paper": statistics(_of(paper, s))}
            for s in schedules
        },
        "num_failed_stages": len(measurements.failures),
        "provenance": dict(result.provenance),
    }
    if options.output is not None:
        predictions = [
            {**o.to_json(), "paper_predicted_bytes": finite(p.predicted)}
            for o, p in zip(default, paper, strict=True)
        ]
        options.output.write_text(json.dumps({**document, "predictions": predictions}))
    emit(options, document, as_text(document))
    return 0


def _fitting(
    drawn: Iterable[Mapping[str, Plan]], predictor: Any, limit: int
) -> Iterator[Mapping[str, Plan]]:
    """Of drawn plans those that fit under every schedule.

    Raises:
        PlanError: ``evaluate-memory`` if none of the first thousand does.
    """
    found = 0
    for tried, both in enumerate(drawn):
        if all(predictor.predict(plan).peak_bytes <= limit for plan in both.values()):
            found += 1
            yield both
        if not found and tried == 1000:
            raise PlanError.of(
                f"none of {tried} random plans is predicted to need at most {limit:,} bytes; "
                "raise --memory.",
                "evaluate-memory",
            )


def outcomes(
    plans: Any,
    result: Any,
    measurements: Any,
    papers: Any,
    known: set[str],
    known_to_paper: set[str],
) -> tuple[list[Outcome], list[Outcome]]:
    """Per device and plan, the outcome of the default mode and of the paper's."""
    from capture.errors import ProfileError
    from capture.predictor import AdditivePredictor
    from capture.predictor.paper import PaperPredictor
    from capture.step.interface import plan_interfaces
    from capture.step.pipeline import build_step
    from capture.step.program import replay
    from profiling_runs.collect import stage_config

    predictor = AdditivePredictor(result)
    paper_predictors = {
        schedule: PaperPredictor(statistics) for schedule, statistics in papers.items()
    }
    default, paper = [], []
    for key, plan in plans.items():
        configs = [stage_config(stage, plan.microbatch_size) for stage in plan.stages]
        if any(config not in measurements.costs for config in configs):
            continue
        graph = measurements.backend.traced(plan.microbatch_size).graph
        interfaces = plan_interfaces(
            plan, graph, result.param_bytes, [measurements.costs[config] for config in configs]
        )
        truth = replay(build_step(interfaces, plan.schedule_table)).peak_bytes_per_device
        predicted = predictor.predict(plan)
        for s, (stage, config) in enumerate(zip(plan.stages, configs, strict=True)):
            seen = measurements.key(config)
            try:
                by_paper = float(
                    paper_predictors[plan.schedule].peaks(config.choice, plan.num_microbatches)[
                        stage.first, stage.stop
                    ]
                )
            except ProfileError:  # data and tensor parallelism together: not in the paper's space
                by_paper = float("nan")
            for device in stage.devices:
                low, high = predicted.interval_bytes_per_device[device]
                default.append(
                    Outcome(
                        key,
                        s,
                        predicted.peak_bytes_per_device[device],
                        low,
                        high,
                        truth[device],
                        seen in known,
                    )
                )
                paper.append(
                    Outcome(
                        key,
                        s,
                        by_paper,
                        float("nan"),
                        float("nan"),
                        truth[device],
                        seen in known_to_paper,
                    )
                )
    return default, paper


def statistics(found: Sequence[Outcome]) -> dict[str, Any]:
    """The statistics of Figure 7 over the stages that were not compiled before, then over all
    devices and over plans.

    Source: CAPTURE IV-B.
    """
    predictable = [o for o in found if not np.isnan(o.predicted)]
    fresh = [o for o in predictable if not o.known]
    peaks: dict[Any, tuple[float, float]] = {}
    for o in found:
        if not np.isnan(o.predicted):
            predicted, measured = peaks.get(o.plan, (0.0, 0.0))
            peaks[o.plan] = max(predicted, o.predicted), max(measured, o.measured)
    per_plan = np.array([predicted / measured - 1 for predicted, measured in peaks.values()])
    return {
        "num_predictions": len(fresh),
        "num_compiled_before": sum(o.known for o in found),
        "num_not_predictable": len(found) - len(predictable),
        **_of_devices(fresh),
        "all_devices": {"num_predictions": len(predictable), **_of_devices(predictable)},
        "per_plan": {
            "num_predictions": len(per_plan),
            **_shares(per_plan),
            "mean_abs_error_fraction": float(np.abs(per_plan).mean()) if len(per_plan) else None,
            "max_abs_error_fraction": float(np.abs(per_plan).max()) if len(per_plan) else None,
        },
    }


def _of_devices(found: Sequence[Outcome]) -> dict[str, Any]:
    errors = np.array([o.error for o in found])
    covered = [o.low <= o.measured <= o.high for o in found if not np.isnan(o.low)]
    above = [o.measured > o.high for o in found if not np.isnan(o.high)]
    return {
        **_shares(errors),
        "mean_abs_error_fraction": float(np.abs(errors).mean()) if len(errors) else None,
        "max_abs_error_fraction": float(np.abs(errors).max()) if len(errors) else None,
        "mean_error_fraction": float(errors.mean()) if len(errors) else None,
        "lowest_error_fraction": float(errors.min()) if len(errors) else None,
        "underpredicted_fraction": float((errors < 0).mean()) if len(errors) else None,
        "interval_coverage_fraction": float(np.mean(covered)) if covered else None,
        "num_above_interval": sum(above),
    }


def _shares(errors: np.ndarray) -> dict[str, float | None]:
    return {
        f"within_{p}pct": float((np.abs(errors) <= p / 100).mean()) if len(errors) else None
        for p in (2, 5, 11)
    }


def _of(found: Sequence[Outcome], schedule: str) -> list[Outcome]:
    return [o for o in found if o.plan[1] == schedule]


def _matching(default: Sequence[Outcome], paper: Sequence[Outcome]) -> list[Outcome]:
    return [
        mine for mine, theirs in zip(default, paper, strict=True) if not np.isnan(theirs.predicted)
    ]


def as_text(document: dict[str, Any]) -> str:
    """Both modes side by side; the paper's, which does not know schedules, also per schedule."""
    default, paper = document["default"], document["paper"]
    skipped = default["num_compiled_before"]
    rows = [
        ("default, not compiled before", default),
        ("default, all devices", default["all_devices"]),
    ]
    rows.append(("default, where the paper predicts", document["default_where_paper_predicts"]))
    rows += [("paper, not compiled before", paper), ("paper, all devices", paper["all_devices"])]
    if len(document["by_schedule"]) > 1:
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
            table(
                ["mode", "predictions", *columns], [[name, *_cells(found)] for name, found in rows]
            ),
        ]
    )


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
