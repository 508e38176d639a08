"""Compile every stage of a plan for its target: the exact peak of every device, beside the
prediction. Nothing is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table, warning_lines
from capture.documents import write
from capture.machine.target import Target
from capture.options import add
from capture.plan.headroom import Headroom
from capture.plan.kinds import kind_of, load_plan
from capture.plan.prediction import StepTime
from capture.plan.stages import Plan
from capture.predictor.step_time import describe_time, time_summary
from capture.quantities import format_bytes
from profiling_runs.collect import split_warnings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    add(parser, shared.LIMIT, *shared.STORE)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the plan with its verification"
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    code: int = kind_of(plan).verb("verify")(options, plan)
    return code


def stages(options: argparse.Namespace, plan: Plan) -> int:
    """Compile the stages, and replay the step."""
    limit = options.memory
    measurements = asked.plan_measurements(options, plan)
    from profiling_runs.verify import verify

    found = verify(plan, measurements)
    peaks = found.peak_bytes_per_device
    headroom = Headroom.of(
        peaks, [(peak, peak) for peak in peaks], 1.0, limit, Target.load(plan.cluster.target).memory
    )
    timeline = found.timeline()
    time = None if timeline is None else time_summary(timeline, plan, found.graph)
    if options.output is not None:
        plan.with_(verification=found.verified, time=time).save(options.output)
    document = {
        "status": "ok" if headroom is None or headroom.verdict == "fits" else "infeasible",
        **found.to_json(),
        "stages": [
            {"stage_id": s, **_stage(found.ledger.peaks[stage.devices[0]])}
            for s, stage in enumerate(plan.stages)
        ],
        "headroom": write(headroom),
        "warnings": split_warnings(measurements.backend.workload, plan.microbatch_size),
    }
    if time is not None:
        document["time"] = write(time)
    emit(options, document, as_text(plan, document, headroom, time))
    return 0 if document["status"] == "ok" else 1


def _stage(peak: Any) -> dict[str, Any]:
    return {"peak_bytes": peak.peak_bytes, "instant": peak.instant, "parts_bytes": peak.parts}


def as_text(
    plan: Plan, document: dict[str, Any], headroom: Headroom | None, time: StepTime | None = None
) -> str:
    """A line per stage: predicted, compiled, when, and most of what."""
    predicted, rows = document["predicted_peak_bytes_per_device"], []
    for stage, found in zip(plan.stages, document["stages"], strict=True):
        peak, guess = found["peak_bytes"], predicted[stage.devices[0]] if predicted else None
        rows.append(
            [
                found["stage_id"],
                f"{stage.first}-{stage.stop - 1}",
                f"{stage.devices[0]}-{stage.devices[-1]}"
                if stage.num_devices > 1
                else stage.devices[0],
                "-" if guess is None else format_bytes(guess),
                format_bytes(peak),
                "-" if guess is None else f"{guess / peak - 1:+.2%}",
                found["instant"],
                max(found["parts_bytes"], key=found["parts_bytes"].__getitem__),
            ]
        )
    header = [
        "stage",
        "layers",
        "devices",
        "predicted",
        "compiled",
        "prediction off by",
        "at",
        "most of it",
    ]
    lines = [
        table(header, rows),
        f"peak {format_bytes(max(document['peak_bytes_per_device']))} per device, target "
        f"{plan.cluster.target}",
    ]
    lines += [str(headroom)] if headroom else []
    lines += [describe_time(time)] if time else []
    lines += warning_lines(document)
    return "\n".join(lines)
