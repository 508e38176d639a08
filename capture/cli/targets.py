"""``capture plan --targets``: several targets side by side, each with the smallest cluster that
fits and the answer on the cluster that is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from math import inf
from pathlib import Path

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.bounds_first import Asking, of_a_profile, with_times
from capture.cli.output import SearchEnd, account_columns, say, table
from capture.cli.question_file import noted
from capture.cli.whole import close, of_whole, whole_question
from capture.errors import CaptureError, PlanError, Violation
from capture.machine.target import Target, check_compiler, known_name
from capture.quantities import format_bytes, format_seconds
from profiling_runs.question import ProfileQuestion
from recommender.capture.extent import Attempt, cheapest_cluster, smallest_cluster
from recommender.money import Terms
from recommender.plan_report import TargetAnswer, TargetsReport
from recommender.whole import WholeQuestion

#: Options that ask about one target, or about other clusters.
_OTHERS = ("target", "fix", "smallest_cluster", "largest_batch")
#: The options for one of the targets, what is measured, and what is searched.
_OfTarget = tuple[argparse.Namespace, ProfileQuestion, WholeQuestion]


def compare(options: argparse.Namespace, terms: Terms) -> SearchEnd:
    """Ask the question of every target, and save the answers. What goes wrong with one
    target does not lose the others. The exit code is 1 where no target has a plan that fits.

    Raises:
        PlanError: ``money-targets`` for options that ask about one target or other clusters.
        CaptureError: what is wrong with the first target, if something is with all of them.
    """
    PlanError.check(
        Violation(f"--targets and --{name.replace('_', '-')}: give one of them.", "money-targets")
        for name in _OTHERS
        if getattr(options, name)
    )
    names = tuple(dict.fromkeys(map(known_name, terms.targets)))
    terms.check(names, options.objective)
    questions, answers = dict[str, _OfTarget](), dict[str, TargetAnswer]()
    failed = dict[str, CaptureError]()
    for name in names:
        try:
            questions[name] = _question(options, name, terms)
        except CaptureError as error:
            failed[name] = error
    if questions:  # the devices of this process are decided once
        asked.prepare(*(of_profile for _, of_profile, _ in questions.values()))
    for name, question in questions.items():
        say(options, f"target {name}:")
        try:
            answers[name] = _answer(name, *question)
        except CaptureError as error:
            failed[name] = error
    if not answers:
        raise failed[names[0]]
    answers |= {name: TargetAnswer(target=name, failure=str(e)) for name, e in failed.items()}
    report = TargetsReport(
        targets=[answers[name] for name in names],
        written={
            f"plan of {name}": str(questions[name][0].output)
            for name in names
            if answers[name].account
        },
    )
    return SearchEnd(report, [*_lines(report)], int(not report.written))


def _question(options: argparse.Namespace, target: str, terms: Terms) -> _OfTarget:
    """Return the question of a target; the fastest plan is searched where nothing else is said."""
    own = copy(options)
    own.target, own.objective = target, options.objective or "throughput"
    own.output = options.output.with_stem(f"{options.output.stem}-{Path(target).stem}")
    price = {} if terms.price is None else {"price": str(terms.price_of(target))}
    own.asked = {**options.asked, **price, "target": target}
    del own.asked["targets"]
    closed = copy(own)
    close(closed, shared.LEFT_OPEN)
    of_profile = asked.profile_question({**vars(closed), "microbatches": 1})
    of_a_profile(closed)
    whole = whole_question(own)
    assert whole is not None, "targets with rates are compared"
    if not (options.quick or options.compiles == 0):
        check_compiler(Target.load(target))
    return own, of_whole(of_profile, whole), whole


def _answer(
    target: str, options: argparse.Namespace, of_profile: ProfileQuestion, whole: WholeQuestion
) -> TargetAnswer:
    """Search for a target's plans, and save the one on the cluster that is asked for."""
    measurements = asked.open_measurements(options, of_profile)
    with measurements.keeping_workers():
        Asking(options, of_profile, measurements, whole).start_workers()
        whole = whole.of_sizes(measurements.backend.takes)
        asking, every = Asking(options, of_profile, measurements, whole), whole.question()
        smallest, _ = smallest_cluster(asking.one_of_several, every)
        best, parts = Attempt(every, asking.one_of_several(every)), tuple[Attempt, ...]()
        if options.objective == "cost":
            rank = asking.accountant.rank
            cheapest, parts = cheapest_cluster(asking.one_of_several, every, rank)
            best = cheapest or best
        result, time = with_times(noted(options, best.result), measurements)
    account = asking.accountant.account
    if result.status == "ok" and result.plan is not None:
        result.plan.with_(time=time).save(options.output)
    told = replace(best, account=account(result, time))
    return TargetAnswer(
        target=target,
        smallest=smallest and replace(smallest, account=account(smallest.result)),
        asked=told,
        parts=[
            told
            if each.question.cluster == best.question.cluster
            else replace(each, account=account(each.result))
            for each in parts
        ],
    )


def _lines(report: TargetsReport) -> Iterator[str]:
    """Yield a table with a line per target and cluster (the cheapest first, where parts of the
    cluster were tried for that), the cheapest or fastest target, and failures."""
    rows = [(each.target, attempt) for each in report.targets for attempt in each.attempts]
    is_by_cost = any(each.parts for each in report.targets)
    if is_by_cost:
        rows.sort(key=lambda row: row[1].account.rank if row[1].account else inf)
    columns = account_columns([attempt.account for _, attempt in rows])
    cells = [
        [
            target,
            attempt.question.cluster,
            attempt.result.status,
            format_bytes(attempt.result.peak_bytes) if attempt.result.plan else "-",
            format_seconds(attempt.account.step_seconds) if attempt.account else "-",
            *(column[row] for column in columns.values()),
        ]
        for row, (target, attempt) in enumerate(rows)
    ]
    yield table(["target", "on", "status", "peak", "step", *columns], cells)
    best = next((each.asked for each in report.targets if each.target == report.best), None)
    if best is not None:
        is_priced = any("$" in name for name in columns)
        where = "on what was asked for" if not is_by_cost else f"of all, on {best.question.cluster}"
        yield f"{'cheapest' if is_priced else 'fastest'} {where}: {report.best}"
    yield from (f"failed: {each.target}: {each.failure}" for each in report.targets if each.failure)
