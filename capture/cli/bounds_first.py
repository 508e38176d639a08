"""``capture plan --algorithm bounds-first``: the plan of least peak in compiled bytes, without a
profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from capture.cli import options as shared
from capture.cli.options import Option
from capture.cli.output import emit, peak_line, say, stage_table
from capture.cli.progress import progress
from capture.errors import PlanError, Violation
from capture.plan.why import Bracket
from capture.quantities import counted, format_bytes
from profiling_runs.bounds import bounds
from profiling_runs.measurements import Measurements
from profiling_runs.question import DEFAULT_CALIBRATION_PLANS, ProfileQuestion
from profiling_runs.verify import PlanCompiler
from recommender.answer import StageAnswer
from recommender.capture.bounds_first import Effort, bounds_first
from recommender.question import BOUNDS_FIRST, PlanQuestion


def _percent(text: str) -> float:
    """The type of a part, such as 5%.

    Example:
        >>> _percent("5%")
        0.05
    """
    number = text.removesuffix("%")
    if not number.replace(".", "", 1).isdecimal() or not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 5%. [option-number]")
    return float(number) / 100


#: Of this algorithm alone.
OPTIONS = (
    Option(
        "within",
        f"{BOUNDS_FIRST}: end once no plan is better than the compiled one by more, such as 5%%",
        read=_percent,
        metavar="PART",
    ),
    Option(
        "compiles",
        f"{BOUNDS_FIRST}: compile the stages of no further plan after so many stages; 0 says what "
        "bounds alone say",
        read=shared.at_least(0),
        metavar="N",
    ),
    Option(
        "seconds",
        f"{BOUNDS_FIRST}: compile the stages of no further plan after so long",
        read=shared.at_least(1),
        metavar="S",
    ),
)
#: Options of ``capture plan`` that need a profile, or ask several questions.
_OF_PROFILES = (
    "profile",
    "verify",
    "no_compile",
    "merge_layers",
    "smallest_cluster",
    "largest_batch",
    "try_microbatches",
    "try_schedules",
)


def is_asked(options: argparse.Namespace, of_profile: ProfileQuestion) -> bool:
    """Whether the options ask for this algorithm.

    Raises:
        PlanError: ``plan-algorithm`` for its options with another algorithm, and for those of
            others with it; all at once.
    """
    is_bounded = options.algorithm == BOUNDS_FIRST
    if is_bounded:
        given = [name for name in _OF_PROFILES if getattr(options, name) not in (None, False, 0)]
        given += ["backend"] * (of_profile.backend != "compile")
        if of_profile.calibration_plans != DEFAULT_CALIBRATION_PLANS:
            given.append("calibration_plans")
    else:
        given = [each.name for each in OPTIONS if getattr(options, each.name) is not None]
    PlanError.check(
        Violation(
            f"--{name.replace('_', '-')}={getattr(options, name)} does not go with "
            f"algorithm={options.algorithm!r}; leave it out"
            f"{'' if is_bounded else f', or give --algorithm {BOUNDS_FIRST}'}.",
            "plan-algorithm",
        )
        for name in given
    )
    return is_bounded


def plan(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    measurements: Measurements,
) -> int:
    """Search, compile, tell. The exit code is 1 where no plan fits, and where none was compiled, so
    that it is not known."""
    between = bounds(of_profile, measurements, progress(options))
    result = bounds_first(
        between.least,
        between.most,
        question,
        PlanCompiler(between.least, lambda: measurements),
        Effort(options.within or 0.0, options.compiles, options.seconds),
        told=lambda bracket: say(options, in_words(bracket)),
    )
    document: dict[str, Any] = {**result.to_json(), "warnings": [], "failures": []}
    emit(options, document, "\n".join(_lines(options, result)))
    return 0 if result.status == "ok" and result.compiled else 1


def in_words(bracket: Bracket) -> str:
    """A line of the trail."""
    compiled = counted(bracket.num_compiled, "stage")
    return (
        f"{bracket.seconds:.1f} s, {compiled} compiled: the least peak is between "
        f"{format_bytes(bracket.least_bytes)} and {format_bytes(bracket.most_bytes)}"
        f"{'' if bracket.compiled else ' (expected)'}"
    )


def _lines(options: argparse.Namespace, result: StageAnswer) -> Sequence[str]:
    lines = [f"{result.status}: {result.why.summary}"]
    if result.plan is None or result.prediction is None:
        return lines
    lines += [
        stage_table(result.plan, result.prediction.stages),
        peak_line(result.plan, result.prediction),
    ]
    lines += [str(result.headroom)] if result.headroom else []
    if result.status == "ok" and result.compiled:
        result.plan.save(options.output)
        lines.append(
            f"plan -> {options.output} (search: {result.proof.algorithm}, "
            f"{result.proof.seconds:.1f} s)"
        )
    return lines
