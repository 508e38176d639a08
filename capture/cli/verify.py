"""Compile every program of a plan for its target: the exact peak of every device, beside the
prediction. Nothing is run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.options import add
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.predictor.step_time import describe_time
from capture.quantities import format_bytes, ids_text
from capture.report.documents import PeakRow, VerifyReport
from profiling_runs.collect import split_warnings
from recommender.money import account_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    written = shared.output(None, "write the plan with its verification")
    add(parser, shared.LIMIT, *shared.STORE, written)


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    report, verified = kind_of(plan).verb("verify")(options, plan)
    if options.output is not None:
        verified.save(options.output)
    emit(options, report, *as_text(report))
    return 0 if report.status == "ok" else 1


def stages(options: argparse.Namespace, plan: Plan) -> tuple[VerifyReport, Plan]:
    """Compile the stages of a plan for its target, replay the step, and return the exact peaks."""
    measurements = asked.plan_measurements(options, plan)
    from profiling_runs.verify import verify

    found, backend = verify(plan, measurements), measurements.backend
    peaks = found.peak_bytes_per_device
    verified = plan.with_(verification=found.verified)
    report = VerifyReport(
        "stages",
        plan.cluster.target,
        peaks,
        found.verified.predicted_peak_bytes_per_device,
        tuple(
            PeakRow.of(
                stage.devices,
                found.ledger.peaks[stage.devices[0]],
                stage_id=s,
                layers=(stage.first, stage.stop - 1),
            )
            for s, stage in enumerate(plan.stages)
        ),
        verified.headroom(options.memory),
        time=found.step_time,
        source=found.provenance,
        num_compiled=found.num_compiled,
        host_peak_bytes=found.host_peak_bytes,
        warnings=split_warnings(backend.workload, plan.microbatch_size),
        account=account_of(plan, found.step_time, backend.model_bytes(plan.microbatch_size)),
    )
    return report, verified.with_(time=report.time)


def as_text(report: VerifyReport) -> Iterator[str]:
    """Yield a table with a line per stage or device: predicted, compiled, when, and most of what;
    and then what is left."""
    guesses = report.predicted_peak_bytes_per_device
    errors = report.prediction_error_fraction_per_device
    rows = []
    for row in report.peaks:
        first, last, error = row.devices[0], row.devices[-1], errors and errors[row.devices[0]]
        cells = [
            ids_text(range(first, last + 1)),
            format_bytes(guesses[first]) if guesses else "-",
            format_bytes(row.peak_bytes),
            "-" if error is None else f"{error:+.2%}",
            row.instant,
            max(row.parts_bytes, key=row.parts_bytes.__getitem__, default="-"),
        ]
        of_stage = [] if row.layers is None else [row.stage_id, "{}-{}".format(*row.layers)]
        rows.append([*of_stage, *cells])
    header = ["devices", "predicted", "compiled", "prediction off by", "at", "most of it"]
    of_stages = ["stage", "layers"] if report.kind == "stages" else []
    yield table([*of_stages, *header], rows)
    if (alone := report.layers_alone_peak_bytes) is not None:
        yield f"{format_bytes(alone)} from layers alone: an upper bound, " + (
            "all that the plan has, for its packs were not compiled"
            if guesses and max(guesses) == alone
            else "which the plan does not go by, for its packs were compiled"
        )
    peak = format_bytes(max(report.peak_bytes_per_device))
    yield f"peak {peak} per device, target {report.target}"
    if report.host_peak_bytes is not None:
        yield f"the host holds {format_bytes(report.host_peak_bytes)}"
    if report.headroom is not None:
        yield str(report.headroom)
    if report.time is not None:
        yield describe_time(report.time)
    if report.account is not None:
        yield from report.account.lines()
