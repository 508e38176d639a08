"""What differs between two plans, and peaks per device, headroom and step time side by side.

A plan without a prediction, such as one written by hand, is predicted from --profile. The model is
never loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.errors import CaptureError, PlanError, ProfileError, Violation
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.options import add
from capture.plan.files import PlanFile
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.quantities import format_bytes, ids_text
from capture.report.difference import (
    DiffReport,
    device_groups,
    difference_rows,
    differences,
    needs_of,
    unequal,
)
from capture.report.documents import PlanNeeds

if TYPE_CHECKING:
    from capture.report.data import ReportFacts

P = TypeVar("P", bound=PlanFile)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A", help="plan file")
    parser.add_argument("second", type=Path, metavar="B", help="plan file")
    measured = (
        "measurements of the model, for step times; give it twice where the plans need different "
        "ones"
    )
    add(parser, shared.file("profile", measured, again=True), shared.LIMIT)


def main(options: argparse.Namespace) -> int:
    plans = [load_plan(path) for path in (options.first, options.second)]
    one, other = map(kind_of, plans)
    if one is not other:
        raise PlanError.of(
            f"{str(options.first)!r} is a plan of kind {one.name!r}, and {str(options.second)!r} "
            f"of kind {other.name!r}; compare plans of one kind.",
            "plan-kind",
        )
    report: DiffReport = one.verb("diff")(options, *plans)
    emit(options, report, *as_text(report))
    return 0


def compared(
    kind: str,
    decided: Callable[[P], Mapping[str, object]],
    options: argparse.Namespace,
    *plans: P,
    needs: Callable[..., PlanNeeds] = PlanNeeds.of,
) -> DiffReport:
    """Compare two plans of a kind by what they decide, in words, and by what each needs."""
    asked.refuse_unread(options, kind, "memory")
    one, other = (needs(plan, options.memory) for plan in plans)
    return DiffReport(kind, unequal(*map(decided, plans)), (one, other))


def stages(options: argparse.Namespace, *plans: Plan) -> DiffReport:
    """Compare two plans of stages: what they decide differently, and what that costs."""
    first, second = _facts(options, plans)
    return DiffReport(
        "stages",
        tuple(differences(first.plan, second.plan)),
        (needs_of(first), needs_of(second)),
        tuple(device_groups(first, second)),
    )


def _facts(options: argparse.Namespace, plans: Sequence[Plan]) -> list[ReportFacts]:
    """Gather the facts of both plans; all that is wrong is raised at once, by file."""
    from capture.report.data import report_facts

    found, violations, profiles = [], list[Violation](), _profiles(options.profile or [])
    for path, plan, profile in zip((options.first, options.second), plans, profiles, strict=True):
        try:
            found.append(report_facts(*asked.with_prediction(plan, profile), options.memory))
        except CaptureError as error:
            wrong = ((f"{str(path)!r}: {each.message}", each.code) for each in error.violations)
            violations += [Violation(*each) for each in wrong]
    CaptureError.check(violations)
    return found


def _profiles(paths: list[Path]) -> list[Profile | None]:
    """Return one profile per plan, or None where none was given."""
    if len(paths) > 2:
        raise ProfileError.of(
            f"--profile was given {len(paths)} times; give it once for both plans, or twice: "
            "first for A, then for B.",
            "diff-profiles",
        )
    profiles: list[Profile | None] = [Profile.load(path) for path in paths]
    return profiles if len(paths) == 2 else (profiles or [None]) * 2


def as_text(report: DiffReport) -> Iterator[str]:
    """Yield a table of what differs, of plans of stages one of their devices, and one of what both
    plans need."""
    rows = difference_rows(report.differences)
    yield table(["differs", "A", "B"], rows) if rows else "the plans decide alike"
    yield ""
    devices = [
        [
            ids_text(range(group.devices[0], group.devices[1] + 1)),
            *("-" if stage is None else stage for stage in group.stage_ids),
            *("-" if peak is None else format_bytes(peak) for peak in group.peak_bytes),
            "-" if (more := group.change_bytes) is None else "+" * (more > 0) + format_bytes(more),
        ]
        for group in report.devices
    ]
    if devices:
        yield table(["devices", "stage A", "stage B", "peak A", "peak B", "change"], devices)
        yield ""
    one, other = (needs.rows() for needs in report.plans)
    names = dict.fromkeys([*one, *other])
    yield table(["", "A", "B"], [[n, one.get(n, "-"), other.get(n, "-")] for n in names])
    for name, needs in zip("AB", report.plans, strict=True):
        if devices and needs.step_seconds is None:
            yield f"{name} has no step time: {_without_seconds(needs.target)}."


def _without_seconds(target: str) -> str:
    """Return why a plan of stages for a target has no seconds, and what gives it some."""
    if Target.load(target).rates is None:
        return f"the target {target!r} has no rates; plan for an accelerator, such as --target h100"
    return (
        "no step of it was simulated; capture verify PLAN -o PLAN adds one, or give --profile "
        "FILE, of capture profile"
    )
