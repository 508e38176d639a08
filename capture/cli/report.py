"""Show a plan: a table for an issue, one HTML page with figures that needs no network, and a trace
of the schedule for Perfetto.

A plan without a prediction, such as one written by hand, is predicted from --profile. The model is
never loaded.
"""

from __future__ import annotations

import argparse

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table, write_files
from capture.measured.profile import Profile
from capture.options import add
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.report.documents import PageReport
from recommender.money import account_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan_alone(parser)
    measured = (
        "measurements of the model: adds memory over time, and times where it has them; of a plan "
        "of packs its layer profile, for the trace"
    )
    add(
        parser,
        shared.file("profile", measured),
        shared.LIMIT,
        shared.output(None, "write the page (.html); without it, a table is printed"),
        shared.file("trace", "write the schedule for ui.perfetto.dev (.json)"),
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    report, lines = kind_of(plan).verb("report")(options, plan)
    emit(options, report, *lines)
    return 0


def stages(options: argparse.Namespace, plan: Plan) -> tuple[PageReport, list[str]]:
    """Report a plan of stages: as a table, or as the page."""
    from capture.report.data import report_facts
    from capture.report.difference import needs_of
    from capture.report.page import page
    from capture.report.words import HEADER, last_lines, paragraph, rows, title

    limit = options.memory
    profile = None if options.profile is None else Profile.load(options.profile)
    facts = report_facts(*asked.with_prediction(plan, profile), limit)
    account = account_of(plan)
    costs = [] if account is None else [*account.lines()]
    report = PageReport(
        kind="stages",
        title=title(facts),
        summary=paragraph(facts),
        needs=needs_of(facts),
        written=write_files(options, lambda: page(facts, costs), lambda: facts.schedule),
        account=account,
        **facts.rows(),
    )
    if options.output:
        return report, [paragraph(facts), *costs]
    return report, [title(facts), table(HEADER, rows(facts)), *last_lines(facts), *costs]
