"""The whole path on a small GPT and eight virtual CPU devices (2 nodes of 4): bound, compile what
decides, recommend, run, compare.

Two plans are run: the recommended one, and a baseline with equal FLOPs per stage. For both, the
table shows what was predicted for every device and what was measured while it ran, and the loss
against one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from capture import environment
from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, say, table
from capture.cli.progress import progress
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.options import add, at_least
from capture.plan.stage import Stage
from capture.plan.why import Why
from capture.quantities import counted, format_bytes
from profiling_runs import ProfileQuestion
from profiling_runs.bounds import bounds
from profiling_runs.verify import PlanCompiler, verify
from recommender import PlanQuestion, baseline_plan
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.parts import Part
from recommender.capture.refine import refine

WORKLOAD = "capture.cli.tiny_gpt:gpt"
CLUSTER = "2x4"
MICROBATCHES, MICROBATCH_SIZE, SCHEDULE = 8, 4, "1f1b"
#: Stages, after which the best plan so far is run: for a proof most of them would be compiled.
MOST_COMPILES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=3,
        metavar="N",
        help="updates (default: %(default)s)",
    )
    add(parser, *shared.STORE)


def main(options: argparse.Namespace) -> int:
    cluster = Cluster.parse(CLUSTER)
    environment.prepare(num_devices=cluster.num_devices)
    from capture.runtime.asked import Training
    from capture.runtime.training import train

    spec = WorkloadSpec.parse(WORKLOAD)
    say(options, f"planning {WORKLOAD} for {cluster}: nothing is run")
    asking = ProfileQuestion(spec, cluster, MICROBATCH_SIZE)
    question = PlanQuestion(cluster, MICROBATCHES * MICROBATCH_SIZE, MICROBATCHES, SCHEDULE)
    measurements = asked.open_measurements(options, asking)
    with measurements.keeping_workers():
        between = bounds(asking, measurements, progress(options))
        recommended = refine(
            LowestPeak(),
            [Part(question, lambda: between)],
            PlanCompiler(between.least, lambda: measurements),
            Effort(compiles=MOST_COMPILES),
            told=lambda bracket: say(options, f"  {bracket}"),
        )
        assert recommended.plan is not None, "a plan without a memory limit exists"
        baseline = verify(baseline_plan(between.least, question), measurements)
    plans = {
        "recommended": recommended.plan,
        "baseline": baseline.plan.with_(prediction=None, verification=baseline.verified),
    }
    workload = spec.load()
    ran = dict[str, RanPlan]()
    for name, plan in plans.items():
        say(options, f"running the {name} plan on {cluster.num_devices} virtual devices")
        training = Training(options.steps, check=True, fast_compile=True)
        document = train(plan, workload, training, lambda text: say(options, f"  {text}"))
        ran[name] = RanPlan(plan.stages, *(document[each.name] for each in fields(RanPlan)[1:]))
    report = DemoReport(
        workload=WORKLOAD,
        cluster=CLUSTER,
        global_batch_size=question.global_batch_size,
        num_microbatches=question.num_microbatches,
        schedule=question.schedule,
        search=recommended.proof.to_json(),
        why=recommended.why,
        **ran,
        max_relative_loss_error=max(each.max_relative_loss_error for each in ran.values()),
        versions=environment.versions(),
    )
    emit(options, report, as_text(report))
    return 0


@dataclass(frozen=True)
class RanPlan:
    """The results of a plan that was run, beside one device.

    Attributes:
        stages: Stages of the plan.
        predicted_peak_bytes_per_device, measured_peak_bytes_per_device: Peaks of the steps.
        meter: Method by which bytes were measured.
        losses, reference_losses: Loss of each step, here and on one device.
        max_relative_loss_error, max_relative_gradient_error: The largest errors beside that.
    """

    stages: tuple[Stage, ...]
    predicted_peak_bytes_per_device: Sequence[int]
    measured_peak_bytes_per_device: Sequence[int]
    meter: str
    losses: Sequence[float]
    reference_losses: Sequence[float]
    max_relative_loss_error: float
    max_relative_gradient_error: float


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The document of ``capture demo``: two plans that were run.

    Attributes:
        workload, cluster, global_batch_size, num_microbatches, schedule: What was asked.
        search: Search that found the recommended plan.
        why: The choice.
        recommended, baseline: The plan of lowest peak, and one with equal FLOPs per stage.
        max_relative_loss_error: The larger of both.
        versions: Versions of JAX and of this library.
    """

    workload: str
    cluster: str
    global_batch_size: int
    num_microbatches: int
    schedule: str
    search: Mapping[str, Any]
    why: Why
    recommended: RanPlan
    baseline: RanPlan
    max_relative_loss_error: float
    versions: Mapping[str, str]


def as_text(report: DemoReport) -> str:
    """Return a table of the predicted and the measured peak of both plans per device, and what
    follows from it."""
    both = {"recommended": report.recommended, "baseline": report.baseline}
    columns = [
        peaks
        for ran in both.values()
        for peaks in (ran.predicted_peak_bytes_per_device, ran.measured_peak_bytes_per_device)
    ]
    rows = [[d, *map(format_bytes, peaks)] for d, peaks in enumerate(zip(*columns, strict=True))]
    rows.append(["peak", *(format_bytes(max(column)) for column in columns)])
    header = ["device", *(f"{name} {kind}" for name in both for kind in ("predicted", "measured"))]
    best, other = (max(ran.measured_peak_bytes_per_device) for ran in both.values())
    layout = {
        name: ", ".join(
            f"{stage.first}-{stage.stop - 1} (dp {stage.choice.data_parallel}, tp "
            f"{stage.choice.tensor_parallel})"
            for stage in ran.stages
        )
        for name, ran in both.items()
    }
    return "\n".join(
        [
            table(header, rows),
            f"measured by {report.recommended.meter}",
            f"recommended: layers {layout['recommended']}",
            f"baseline (equal FLOPs): layers {layout['baseline']}",
            f"the recommended plan needs {1 - best / other:.1%} less at its peak; loss differs "
            f"from one device by at most {report.max_relative_loss_error:.1e} (relative) over "
            f"{counted(len(report.recommended.losses), 'step')}",
        ]
    )
