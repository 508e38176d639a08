"""What the verbs do with a plan of kind ``sharding``; it is no verb itself."""

from __future__ import annotations

import argparse
from dataclasses import replace

from capture import environment
from capture.cli import asked
from capture.cli.output import table, write_files
from capture.machine.target import Target
from capture.plan.sharding import ShardingPlan
from capture.report.difference import DiffReport, unequal
from capture.report.explanation import ExplainReport, PageReport
from capture.report.needs import PlanNeeds
from capture.report.verification import PeakRow, VerifyReport
from profiling_runs.collect import split_warnings


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
    from capture.report.sharding import HEADER, operator_rows, paragraph, rows

    asked.refuse_unread(options, "sharding")
    needs = PlanNeeds.of(plan)
    found = ExplainReport(kind="sharding", needs=needs, operators=operator_rows(plan))
    return found, [table(HEADER, rows(plan, heaviest_first=True)), paragraph(plan, needs.headroom)]


def report(options: argparse.Namespace, plan: ShardingPlan) -> tuple[PageReport, list[str]]:
    """Report a sharding plan: as a table, or as the page."""
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
    """Compare two sharding plans: what they decide differently, and what each needs."""
    from capture.report.sharding import decision

    asked.refuse_unread(options, "sharding", "memory")
    one, other = (PlanNeeds.of(plan, options.memory) for plan in plans)
    return DiffReport("sharding", unequal(*map(decision, plans)), (one, other))
