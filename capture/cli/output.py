"""What verbs print: one JSON document, or tables for people; progress (``capture.cli.progress``)
goes to standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from capture.documents import as_json, write
from capture.plan.headroom import Headroom
from capture.plan.prediction import Prediction, StepTime
from capture.plan.stages import Plan
from capture.plan.strategy import strategy
from capture.plan.why import Front, distance_text
from capture.predictor.step_time import describe_time
from capture.quantities import counted, format_bytes, format_seconds, ids_text
from recommender.answer import Answer, StageAnswer
from recommender.capture.changes import FittingChange
from recommender.capture.extent import Attempt
from recommender.money import Account, Accountant
from recommender.plan_report import PlanReport


def emit(options: argparse.Namespace, report: object, *lines: str) -> None:
    """Print a report, a dataclass of ``docs/reference/files.md``: as JSON with ``--json``, else in
    lines, with the files that were written, and warnings and failures. A number that is none (the
    loss of a training that diverged) becomes null."""
    if options.json:
        print(as_json(report, indent=2))
        return
    written = [f"{what} -> {path}" for what, path in (getattr(report, "written", {}) or {}).items()]
    print("\n".join([*lines, *written, *beyond_lines(report)]))


@dataclass(frozen=True)
class SearchEnd:
    """The end of a search for a plan, before it is printed and the plan is saved.

    Attributes:
        report: What ``--json`` prints.
        lines: The same for people, without where the plan is.
        exit_code: 0 where a plan fits, as it was to be known.
        answer: The answer that the report is of; None of several targets.
        step_seconds: Seconds of the plan's step; None where nobody knows them.
        how: How the plan is known, in words.
        took: What the search did, in words.
        after: Lines behind the one that says where the plan is.
        accountant: Maker of accounts of steps of the model; None where there is none.
        change: Finds the cheapest change with which a plan fits; None where one does, or where
            changes are not searched.
        change_does: What a plan does with that change, in words.
    """

    report: Any
    lines: Sequence[str]
    exit_code: int
    answer: Answer[Any, Any] | None = None
    step_seconds: float | None = None
    how: str = ""
    took: Sequence[str] = ()
    after: Sequence[str] = ()
    accountant: Accountant | None = None
    change: Callable[[], FittingChange | None] | None = None
    change_does: str = "fits"

    @property
    def is_ok(self) -> bool:
        return self.answer is not None and self.answer.status == "ok"

    @property
    def is_compiled(self) -> bool:
        return self.answer is not None and self.answer.compiled

    def on(self, accountant: Accountant | None) -> SearchEnd:
        """Return the end with the account of its step."""
        plan = None if self.answer is None else self.answer.plan
        if accountant is None or plan is None or not self.step_seconds:
            return self
        account = accountant.of(plan.cluster, plan.step_examples, self.step_seconds)
        lines = [*self.lines, *account.lines(is_estimate=True)]
        return replace(self, report=replace(self.report, account=account), lines=lines)

    def written(self, files: Mapping[str, str]) -> SearchEnd:
        """Return the end whose report names files that were written, by what they are."""
        return replace(self, report=replace(self.report, written=files))

    def saying(self, others: Sequence[str]) -> SearchEnd:
        """Return the end whose report and plan also say what other kinds of plan give."""
        if self.answer is None or not others:
            return self
        summary = f"{self.answer.why.summary.rstrip('.')}. {' '.join(others)}"
        why = replace(self.answer.why, summary=summary)
        plan = None if self.answer.plan is None else replace(self.answer.plan, why=why)
        written = None if plan is None else plan.to_json()
        report = replace(self.report, why=why, plan=written)
        answer = replace(self.answer, plan=plan, why=why)
        return replace(self, report=report, answer=answer, lines=[*self.lines, *others])

    def told(self, options: argparse.Namespace) -> int:
        """Save the plan, or look for a change where nothing fits; print everything, and return the
        exit code."""
        report, lines, answer = self.report, [*self.lines], self.answer
        if answer is not None and self.is_ok and answer.plan is not None:
            lines += [saved(options, answer, *self.took, how=self.how), *self.after]
        if self.change is not None:
            tell(options, lines)  # what follows may compile, for as long as the answer took
            change = self.change()
            report = replace(report, cheapest_change=change)
            lines = [name_change(change, self.change_does)]
        emit(options, report, *lines)
        return self.exit_code


def tell(options: argparse.Namespace, lines: Sequence[str]) -> None:
    """Print the answer as far as it is known; with ``--json``, whose document comes at the end, as
    progress."""
    if options.json:
        say(options, "\n".join(lines))
    else:
        print("\n".join(lines), flush=True)
    say(options, "looking for the cheapest change that fits; interrupt where the answer is enough")


def name_change(change: FittingChange | None, fits: str) -> str:
    """Return the line that names the cheapest change, or says that there is none."""
    return (
        f"cheapest change: {change.summary}"
        if change
        else f"no single change of those that were tried {fits}"
    )


def write_files(
    options: argparse.Namespace,
    page: Callable[[], str] | None = None,
    drawn: Callable[[], Any] | None = None,
) -> dict[str, str]:
    """Write what was asked for, and return the files by what they are.

    Args:
        options: Options that name the files: ``output`` and ``trace``.
        page: Makes the page; None where there is none.
        drawn: Makes a step with its ``simulation`` and ``processes``, for the trace.
    """
    written = {}
    if page is not None and options.output is not None:
        options.output.write_text(page(), encoding="utf-8")
        written["page"] = str(options.output)
    if drawn is not None and options.trace is not None:
        from capture.step.trace_events import save_trace

        step = drawn()
        save_trace(step.simulation, options.trace, step.processes)
        written["trace"] = str(options.trace)
    return written


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as text with aligned columns, the first to the left.

    Example:
        >>> print(table(["a", "b"], [["x", 12], ["yy", 3]]))
        a    b
        x   12
        yy   3
    """
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def say(options: argparse.Namespace, text: str) -> None:
    """Print a line of progress on standard error, unless ``--quiet`` is given."""
    if not options.quiet:
        print(text, file=sys.stderr)


class Beyond(NamedTuple):
    """The warnings and failures that an answer says beside the plan, and whether it is from a
    profile."""

    warnings: Sequence[str]
    failures: Sequence[str]
    of_profile: bool = False


def beyond_lines(report: object) -> list[str]:
    """Return the warnings and failures of a report, where it has some, a line each."""
    said = {"warning": getattr(report, "warnings", ()), "failed": getattr(report, "failures", ())}
    return [f"{what}: {each}" for what, some in said.items() for each in some]


def told(
    options: argparse.Namespace,
    result: StageAnswer,
    time: StepTime | None,
    attempts: Sequence[Attempt],
    notes: Sequence[str],
    beyond: Beyond,
    accountant: Accountant,
) -> SearchEnd:
    """Return the end of a search by its answer, whose plan has its simulated step.

    Args:
        options: Options that say where the plan goes, and what was asked.
        result: Answer with a plan, or why there is none.
        time: The step of the plan; None where nobody knows rates.
        attempts: What was tried for it.
        notes: Lines before the answer.
        beyond: Warnings and failures.
        accountant: Maker of accounts, of the answer's step and those of its front.
    """
    account = accountant.account(result, time)
    attempts = [replace(each, account=accountant.account(each.result)) for each in attempts]
    if result.plan is not None and time is not None:
        result = replace(result, plan=result.plan.with_(time=time))
    report = PlanReport.of(
        "stages",
        result,
        attempts=write(attempts),
        warnings=beyond.warnings,
        failures=beyond.failures,
        account=account,
    )
    lines = [attempts_table(attempts)] if attempts else []
    extrapolated = ", extrapolated" * result.extrapolated
    lines += [*notes, f"{result.status}{extrapolated}: {result.why.summary}"]
    if result.plan is not None and result.prediction is not None:
        lines += stage_lines(result.plan, result.prediction)
        lines += [str(result.headroom)] if result.headroom else []
        if time is not None:
            lines.append(describe_time(time))
            # Without an objective what is faster was searched.
            if beyond.of_profile or options.objective is not None:
                lines += unused_note(options, result.headroom, time)
        if account is not None:
            lines += account.lines(is_estimate=time is None)
        if beyond.of_profile or result.compiled:
            of_plan = result.plan.cluster, result.plan.global_batch_size
            lines += front_table(result.why.front, partial(accountant.of, *of_plan))
    return SearchEnd(
        report,
        lines,
        int(result.status != "ok"),
        result,
        None if account is None else account.step_seconds,
        how="" if result.compiled else "predicted, not compiled; ",
        after=other_plans(options, result),
        accountant=accountant,
    )


def saved(options: argparse.Namespace, answer: Answer[Any, Any], *took: str, how: str = "") -> str:
    """Save an answer's plan, and return the line that says where it is, how it is known, and by
    which search and what it took."""
    assert answer.plan is not None, "what is saved was found"
    answer.plan.save(options.output)
    took = (answer.proof.algorithm, *took, format_seconds(answer.proof.seconds))
    return f"plan -> {options.output} ({how}search: {', '.join(took)})"


def outcome_of(
    kind: str,
    answer: Answer[Any, Any],
    lines: Sequence[str],
    *took: str,
    **beside: object,
) -> SearchEnd:
    """Return the end of a search by its answer.

    Args:
        kind: Kind of its plan.
        answer: With a plan or without.
        lines: The answer in lines for people.
        *took: What the search took, in words.
        **beside: What the answer does not know of its report.
    """
    is_ok = answer.status == "ok" and answer.plan is not None
    report = PlanReport.of(kind, answer, **beside)
    return SearchEnd(report, lines, int(not is_ok), answer, took=took)


def parts_text(parts: Mapping[str, int]) -> str:
    """Return the bytes of categories in words, the largest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered)


def other_plans(options: argparse.Namespace, result: StageAnswer) -> Sequence[str]:
    """Return a line with the names by which verbs take the other plans of a front."""
    front, plan = result.why.front, result.plan
    if front is None or plan is None:
        return []
    others = (name for name in front.names if plan.of_front(name).decisions != plan.decisions)
    named = ", ".join(f"{options.output}:{name}" for name in others)
    return [f"in the same file, for run, verify, report, ...: {named}"] if named else []


def stage_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a table with one line per stage of a plan, its prediction and the compiled peak where
    the plan was compiled; and the peak per device."""
    compiled = plan.verification and plan.verification.peak_bytes_per_device
    rows = [
        [
            s,
            f"{stage.first}-{stage.stop - 1}",
            ids_text(range(stage.devices[0], stage.devices[-1] + 1)),
            stage.choice.replicas_text,
            stage.choice.tensor_parallel,
            format_bytes(predicted.peak_bytes),
            *([format_bytes(compiled[stage.devices[0]])] if compiled else []),
            " to ".join(map(format_bytes, predicted.interval_bytes)),
            max(predicted.parts_bytes, key=predicted.parts_bytes.__getitem__),
        ]
        for s, (stage, predicted) in enumerate(zip(plan.stages, prediction.stages, strict=True))
    ]
    peaks = ["predicted", "compiled"] if compiled else ["predicted, not compiled"]
    header = ["stage", "layers", "devices", "dp", "tp", *peaks, "interval", "most of it"]
    lines = [table(header, rows)]
    if guessed := [str(s) for s, stage in enumerate(prediction.stages) if stage.extrapolated]:
        lines.append(
            f"predictions of stages {', '.join(guessed)} are extrapolated: degrees or a "
            "micro-batch size that were not profiled"
        )
    if compiled:
        return [*lines, f"peak {format_bytes(max(compiled))} per device, compiled"]
    high = format_bytes(max(high for _, high in prediction.interval_bytes_per_device))
    doubt = f", extrapolated: up to {high}; compile it to know (capture verify)"
    doubt = f"predicted, not compiled{doubt * prediction.extrapolated}"
    return [*lines, f"peak {format_bytes(prediction.peak_bytes)} per device, {doubt}"]


def unused_note(
    options: argparse.Namespace, headroom: Headroom | None, time: StepTime
) -> list[str]:
    """Return a line that says how to be faster, where a plan leaves more than half of the memory
    and devices wait for more than a fifth of the step; nothing elsewhere."""
    bubbles = time.bubble_fraction_per_stage
    bubble = sum(bubbles) / len(bubbles)
    if headroom is None or bubble <= 0.2 or 2 * headroom.peak_bytes >= headroom.limit_bytes:
        return []
    faster = "--objective throughput finds the fastest plan that fits"
    if options.objective in ("throughput", "pareto"):
        faster = "more micro-batches wait less (--try-microbatches M,M)"
    return [
        f"{format_bytes(headroom.spare_bytes)} of "
        f"{format_bytes(headroom.limit_bytes)} per device are not used, and devices wait "
        f"{bubble:.0%} of the step (bubble): {faster}"
    ]


def account_columns(accounts: Sequence[Account | None]) -> dict[str, list[str]]:
    """Return the columns of a table that say what accounts know, by header."""
    rows = [{} if each is None else each.cells() for each in accounts]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "-") for row in rows] for name in names}


def attempts_table(attempts: Sequence[Attempt]) -> str:
    """Return a table of what was tried, one line per attempt."""
    columns, rows = account_columns([attempt.account for attempt in attempts]), []
    for row, attempt in enumerate(attempts):
        asked, found, seconds = attempt.question, attempt.result, attempt.result.proof.step_seconds
        batches = counted(asked.num_microbatches, "micro-batch", "micro-batches")
        rows.append(
            [
                f"{asked.cluster}, batch {asked.global_batch_size}, {batches}, {asked.schedule}",
                found.status,
                format_bytes(found.peak_bytes) if found.plan else "-",
                attempt.rests_on if found.plan else "-",
                "-" if seconds is None else format_seconds(seconds),
                *(column[row] for column in columns.values()),
            ]
        )
    return table(["tried", "status", "peak", "is", "step", *columns], rows)


def front_table(front: Front | None, account: Callable[[float], Account]) -> list[str]:
    """Return the front of peak memory against step time as a table, smallest peak first, with the
    account of each step; empty without a plan."""
    if front is None or not front.points:
        return []
    columns = account_columns([account(point.step_seconds) for point in front.points])
    header, rows = (
        ["peak", "step", *columns, *(["gap at most"] * front.compiled)],
        list[list[str]](),
    )
    is_named = any(point.name for point in front.points)
    for n, p in enumerate(front.points):
        row = [format_bytes(p.peak_bytes), format_seconds(p.step_seconds)]
        row += [column[n] for column in columns.values()]
        row += [distance_text(p.within_fraction)] * front.compiled
        if is_named:
            row = [p.name or "-", *row, strategy(p.stages, p.schedule, p.num_microbatches)]
        else:
            named = f"{p.schedule}, {p.num_microbatches}" if p.schedule else "-"
            layers = (
                f"{s.first}-{s.stop - 1} ({s.choice.data_parallel}x{s.choice.tensor_parallel})"
                for s in p.stages
            )
            row += [named, ", ".join(layers)]
        rows.append(row)
    more = ["what it is"] if is_named else ["schedule, M", "layers (dp x tp)"]
    header = [*(["plan"] * is_named), *header, *more]
    said = "compiled plans" if front.compiled else "a sample with both ends"
    said = "every plan that none beats in both" if front.complete else said
    said += ", predicted, not compiled" * (not front.compiled)
    said += ", extrapolated" * front.extrapolated
    means = "gap at most: no plan that fits is both smaller and faster than that one by more"
    is_meant = front.compiled and any(point.within_fraction for point in front.points)
    return [f"front of memory and time ({said}):", table(header, rows), *([means] * is_meant)]
