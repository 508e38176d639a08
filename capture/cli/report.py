"""Show a plan: a table for an issue, one HTML page with figures that needs no network, and a trace
of the schedule for Perfetto.

A plan without a prediction, such as one written by hand, is predicted from --profile. The model is
never loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table, write_files
from capture.measured.profile import Profile
from capture.options import add
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.report.documents import PageReport, PlanNeeds
from recommender.money import account_of

if TYPE_CHECKING:
    from capture.report.page import Page


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


def shown(
    options: argparse.Namespace,
    kind: str,
    page: Page,
    needs: PlanNeeds,
    drawn: Callable[[], Any] | None = None,
    text: Sequence[str] | None = None,
    **beside: Any,
) -> tuple[PageReport, list[str]]:
    """Return the report of a plan, and write its page and its trace where they are asked for.

    Args:
        options: Options that name the files.
        kind: Kind of the plan.
        page: What is shown of it.
        needs: What it needs.
        drawn: Makes the step of the trace; None where there is none.
        text: Lines below the table where no page is asked for; by default those of the page, and
            what is left of the memory.
        **beside: Other fields of the report.
    """
    written = write_files(options, lambda: page.html(needs.headroom), drawn)
    said = [*page.lines, *([str(needs.headroom)] if needs.headroom else [])]
    found = {"title": page.title, "summary": "\n".join(said), **beside}
    report = PageReport(kind=kind, needs=needs, written=written, **found)
    if "page" in written:
        return report, [*page.lines]
    return report, [page.title, table(page.header, page.rows), *(said if text is None else text)]


def stages(options: argparse.Namespace, plan: Plan) -> tuple[PageReport, list[str]]:
    """Report a plan of stages: as a table, or as the page."""
    from capture.report.data import report_facts
    from capture.report.difference import needs_of
    from capture.report.page import page
    from capture.report.words import last_lines, paragraph

    profile = None if options.profile is None else Profile.load(options.profile)
    facts = report_facts(*asked.with_prediction(plan, profile), options.memory)
    account = account_of(plan)
    costs = [] if account is None else [*account.lines()]
    return shown(
        options,
        "stages",
        page(facts, costs),
        needs_of(facts),
        lambda: facts.schedule,
        [*last_lines(facts), *costs],
        summary=paragraph(facts),
        account=account,
        **facts.rows(),
    )
