"""Show a plan: a table for an issue, one HTML page with figures that needs no network, and a trace
of the schedule for Perfetto.

A plan without a prediction, such as one written by hand, is predicted from --profile. The model is
never loaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.measured.profile import Profile
from capture.options import add
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.report.explanation import PageReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan_alone(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help=(
            "measurements of the model: adds memory over time, and times where it has them; of a "
            "plan of packs its layer profile, for the trace"
        ),
    )
    add(parser, shared.LIMIT)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page (.html); without it, a table is printed",
    )
    add(parser, shared.INTERACTIVE)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the schedule for ui.perfetto.dev (.json)"
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    code: int = kind_of(plan).verb("report")(options, plan)
    return code


def stages(options: argparse.Namespace, plan: Plan) -> int:
    """A table of the stages, or the page."""
    from capture.report.data import report_facts
    from capture.report.difference import needs_of
    from capture.report.words import HEADER, last_lines, paragraph, rows, title

    limit = options.memory
    profile = None if options.profile is None else Profile.load(options.profile)
    facts = report_facts(*asked.with_prediction(plan, profile), limit)
    written = {}
    if options.output is not None:
        from capture.report.page import page

        options.output.write_text(page(facts, interactive=options.interactive), encoding="utf-8")
        written["page"] = str(options.output)
    if options.trace is not None:
        from capture.step.trace_events import save_trace

        save_trace(facts.schedule.simulation, options.trace, facts.schedule.processes)
        written["trace"] = str(options.trace)
    report = PageReport(
        kind="stages",
        title=title(facts),
        summary=paragraph(facts),
        needs=needs_of(facts),
        written=written,
        **facts.rows(),
    )
    said = (
        [paragraph(facts)]
        if options.output
        else [title(facts), table(HEADER, rows(facts)), *last_lines(facts)]
    )
    emit(options, report, *said)
    return 0
