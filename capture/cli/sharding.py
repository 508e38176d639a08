"""What the verbs do with a plan of kind ``sharding``; it is no verb itself."""

from __future__ import annotations

import argparse
from dataclasses import replace

from capture.cli import asked
from capture.cli.output import say, table, write_files
from capture.plan.sharding import ShardingPlan
from capture.report.difference import DiffReport, unequal
from capture.report.explanation import ExplainReport, PageReport
from capture.report.needs import PlanNeeds
from capture.report.verification import PeakRow, VerifyReport
from profiling_runs.collect import split_warnings


def verify(options: argparse.Namespace, plan: ShardingPlan) -> tuple[VerifyReport, ShardingPlan]:
    """Compile the whole train step for the target."""
    asked.refuse_unread(options, "sharding", "workload", "memory", "output")
    spec = asked.workload_of(options, plan)
    if plan.cluster is not None:
        asked.prepare(plan.cluster)
    from capture.profiler.sharded_run import compile_plan

    found = compile_plan(plan, spec.load())
    verified = replace(plan, compiled_peak_bytes=found.peak_bytes, interval_bytes=None)
    count, own = found.sharded.mesh.size, found.program.transient_bytes
    parts = {"held": found.peak_bytes - own, "train step": own}
    report = VerifyReport(
        "sharding",
        found.target.name,
        (found.peak_bytes,) * count,
        (plan.peak_bytes,) * count,
        (PeakRow(tuple(range(count)), found.peak_bytes, parts),),
        verified.headroom(options.memory),
        source=found.source,
        warnings=split_warnings(found.sharded.workload, plan.batch_size, "examples of a device"),
    )
    return report, verified


def run(options: argparse.Namespace, plan: ShardingPlan) -> int:
    """Train on the devices of this machine."""
    from capture.cli.run import finish

    asked.refuse_unread(options, "sharding", "workload", "steps", "seed", "check")
    spec = asked.workload_of(options, plan)
    from capture.profiler.sharded_run import execute_plan

    document = execute_plan(
        plan,
        spec.load(),
        num_steps=options.steps,
        seed=options.seed,
        check=options.check,
        report=lambda text: say(options, text),
    )
    return finish(options, document)


def explain(options: argparse.Namespace, plan: ShardingPlan) -> tuple[ExplainReport, list[str]]:
    """Operators, those that hold most first."""
    from capture.report.sharding import HEADER, operator_rows, paragraph, rows

    asked.refuse_unread(options, "sharding")
    needs = PlanNeeds.of(plan)
    found = ExplainReport(kind="sharding", needs=needs, operators=operator_rows(plan))
    return found, [table(HEADER, rows(plan, heaviest_first=True)), paragraph(plan, needs.headroom)]


def report(options: argparse.Namespace, plan: ShardingPlan) -> tuple[PageReport, list[str]]:
    """A table, or the page."""
    from capture.report.sharding import HEADER, operator_rows, page, paragraph, rows, title

    asked.refuse_unread(options, "sharding", "memory", "output")
    needs = PlanNeeds.of(plan, options.memory)
    room = needs.headroom
    written = write_files(options, lambda: page(plan, room, interactive=options.interactive))
    lines = [title(plan), table(HEADER, rows(plan))] if not written else []
    found = PageReport(
        kind="sharding",
        title=title(plan),
        summary=paragraph(plan, room),
        needs=needs,
        operators=operator_rows(plan),
        written=written,
    )
    return found, [*lines, found.summary]


def diff(options: argparse.Namespace, *plans: ShardingPlan) -> DiffReport:
    """What two of them decide differently, and what each needs."""
    from capture.report.sharding import decision

    asked.refuse_unread(options, "sharding", "memory")
    one, other = (PlanNeeds.of(plan, options.memory) for plan in plans)
    return DiffReport("sharding", unequal(*map(decision, plans)), (one, other))
