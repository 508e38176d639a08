"""Choose for every operator of a model whether to replicate, shard or split its parameters over
data-parallel devices (OSDP): ``capture plan --system osdp`` by another name.

In the place of WORKLOAD may stand a plan of any kind, whose workload, devices and examples per step
are asked again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from capture import environment
from capture.cli import asked
from capture.cli import options as shared
from capture.cli.diff import compared
from capture.cli.options import Asks
from capture.cli.output import SearchEnd, outcome_of, say, table
from capture.cli.question_file import noted
from capture.cli.report import shown
from capture.cli.whole import close
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.options import options_of, taken
from capture.plan.sharding import ShardingPlan
from capture.report.documents import ExplainReport, PageReport, PeakRow, PlanNeeds, VerifyReport
from capture.report.sharding import HEADER, decision, operator_rows, page, paragraph, rows
from profiling_runs.collect import split_warnings
from recommender.osdp import ShardingQuestion, osdp

SYSTEM = "osdp"
#: What it reads.
OPTIONS = (
    shared.CLUSTER,
    shared.TARGET,
    shared.GLOBAL_BATCH,
    shared.REMAT_OF_A_SEARCH,
    shared.NO_VERIFY,
    *options_of(ShardingQuestion),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from capture.cli import plan

    plan.add_arguments(parser)
    parser.set_defaults(system=SYSTEM, output=Path("sharding.json"))


def main(options: argparse.Namespace) -> int:
    from capture.cli import plan

    options.parser.typed = ("--system", SYSTEM, *options.parser.typed)
    return plan.main(options)


def plan(options: argparse.Namespace) -> SearchEnd:
    """Search modes of operators.

    Raises:
        PlanError: ``osdp-remat`` for recomputation of anything but all operators, and the codes of
            ``ShardingQuestion``.
    """
    if options.remat not in (None, "none", "full"):
        raise PlanError.of(
            f"--remat {options.remat}: --system osdp recomputes every operator or none; give full "
            "or none.",
            "osdp-remat",
        )
    asked.say_one_device(options)
    spec = asked.spec_of(vars(options))
    close(options, (shared.TARGET,))
    cluster = asked.read_cluster(vars(options))
    asked.prepare(cluster)
    asked_for = {**vars(options), "batch": _batch(options, cluster)}
    question = ShardingQuestion(
        spec.load(),
        cluster,
        remat=options.remat == "full",
        **taken(ShardingQuestion, asked_for),
    )
    result = osdp(
        question,
        verify=not options.no_verify,
        watch=lambda text: say(options, text),
        left_out="--no-verify",
    )
    size = result.plan.batch_size if result.plan else question.batch_size or 1
    warnings = split_warnings(question.workload, size, "examples of a device")
    lines = [str(result)]
    if result.plan is not None:
        lines.insert(0, table(HEADER, rows(result.plan)))
        result = noted(options, replace(result, plan=replace(result.plan, workload=spec)))
    return outcome_of("sharding", result, lines, warnings=warnings)


def _batch(options: argparse.Namespace, cluster: Cluster) -> int | None:
    """Return the examples per device, where an option says how many."""
    batch: int | None = options.batch
    if options.global_batch is None:
        return batch
    if batch is not None or options.global_batch % cluster.num_devices:
        why = f"{cluster.num_devices} devices cannot share them equally; give a multiple"
        why = why if batch is None else f"--batch {batch} says it, too; give one of them"
        raise PlanError.of(f"--global-batch {options.global_batch}: {why}.", "osdp-plan-batch")
    each: int = options.global_batch // cluster.num_devices
    return each


def verify(options: argparse.Namespace, plan: ShardingPlan) -> tuple[VerifyReport, ShardingPlan]:
    """Compile the whole train step of a sharding plan for its target, and return the exact peak."""
    asked.refuse_unread(options, "sharding", "workload", "memory", "output")
    spec = asked.workload_of(options, plan)
    if plan.cluster is not None:
        asked.prepare(plan.cluster)
    from capture.profiler.sharded_step import compiled_step

    step, target = compiled_step(plan, spec.load()), Target.load(plan.target_name)
    peak, count = step.replay().peaks[0], len(step.devices)
    verified = replace(plan, compiled_peak_bytes=peak.peak_bytes, interval_bytes=None)
    versions = environment.versions(target.platform)
    report = VerifyReport(
        "sharding",
        target.name,
        (peak.peak_bytes,) * count,
        (plan.peak_bytes,) * count,
        (PeakRow.of(range(count), peak),),
        verified.headroom(options.memory),
        source={"backend": f"compile:{target.name}", "target": target.name, "versions": versions},
        warnings=split_warnings(step.workload, plan.batch_size, "examples of a device"),
    )
    return report, verified


def explain(options: argparse.Namespace, plan: ShardingPlan) -> tuple[ExplainReport, list[str]]:
    """Explain a sharding plan: its operators, those that hold most first."""
    asked.refuse_unread(options, "sharding")
    needs = PlanNeeds.of(plan)
    found = ExplainReport(kind="sharding", needs=needs, operators=operator_rows(plan))
    return found, [table(HEADER, rows(plan, heaviest_first=True)), paragraph(plan, needs.headroom)]


def report(options: argparse.Namespace, plan: ShardingPlan) -> tuple[PageReport, list[str]]:
    """Report a sharding plan: as a table, or as the page."""
    asked.refuse_unread(options, "sharding", "memory", "output")
    needs = PlanNeeds.of(plan, options.memory)
    shows, operators = page(plan, needs.headroom), operator_rows(plan)
    return shown(options, "sharding", shows, needs, summary=shows.lines[0], operators=operators)


#: What two plans decide differently, and what each needs.
diff = partial(compared, "sharding", decision)

ASKS = Asks(
    "Sharding by operator (--system osdp; also capture osdp)",
    "one program, each operator's parameters sharded, split or replicated",
    OPTIONS,
    plan,
)
