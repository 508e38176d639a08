"""``capture plan`` for accelerators, and ``--algorithm bounds-first``: the plan of least peak in
compiled bytes, the fastest one that fits, or the front of both, without a profile."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.fitting import measuring, name_change, tell
from capture.cli.options import Option
from capture.cli.output import attempts_table, emit, front_table, peak_line, say, stage_table
from capture.cli.progress import progress
from capture.documents import write
from capture.errors import PlanError, Violation
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.plan.choices import remat_time_fraction
from capture.plan.schedule import SCHEDULES
from capture.plan.why import Bracket
from capture.predictor.step_time import describe_time, time_summary
from capture.profiler.windows import DEFAULT_NEIGHBOURS
from profiling_runs.bounds import Bounds, bounds
from profiling_runs.collect import split_warnings
from profiling_runs.failures import causes
from profiling_runs.measurements import Measurements
from profiling_runs.question import DEFAULT_CALIBRATION_PLANS, ProfileQuestion
from profiling_runs.verify import PlanCompiler, verify
from recommender.answer import StageAnswer
from recommender.capture.bounds_first import BoundedKnowledge, bounds_first
from recommender.capture.changes import FittingChange, cheapest_change
from recommender.capture.extent import (
    Attempt,
    best_of,
    check_limited,
    largest_batch,
    smallest_cluster,
)
from recommender.capture.fastest_first import fastest_first
from recommender.capture.front_first import front_first
from recommender.capture.recommendation import recommend
from recommender.capture.rounds import Effort
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


class _Rounds:
    """Says what a round has found, once: most rounds of a long search move nothing that shows.

    Args:
        write: Is given the lines.
    """

    def __init__(self, write: Callable[[str], None]):
        self._write, self._said = write, ""

    def __call__(self, bracket: Bracket) -> None:
        shown = str(replace(bracket, seconds=0.0))
        if shown != self._said:
            self._write(str(bracket))
        self._said = shown


#: Of this algorithm alone.
OPTIONS = (
    Option(
        "within",
        f"{BOUNDS_FIRST}: end once no plan is better than what is compiled by more, such as 5%%",
        read=_percent,
        metavar="PART",
    ),
    Option(
        "compiles",
        f"{BOUNDS_FIRST}: compile the stages of no further plan after so many stages",
        read=shared.at_least(0),
        metavar="N",
    ),
    Option(
        "seconds",
        f"{BOUNDS_FIRST}: compile the stages of no further plan after so long",
        read=shared.at_least(1),
        metavar="S",
    ),
    Option(
        "quick",
        f"{BOUNDS_FIRST}: what bounds alone say, as with --compiles 0; no compiler is asked",
        False,
    ),
)
#: Options of ``capture plan`` that need a profile, or ask for something else than the least peak at
#: one micro-batch size.
_OF_PROFILES = (
    "profile",
    "verify",
    "no_compile",
    "merge_layers",
    "try_schedules",
)


def is_asked(options: argparse.Namespace, of_profile: ProfileQuestion) -> bool:
    """Whether the options ask for this algorithm; it is the default for an accelerator's least peak
    where nothing needs a profile.

    Raises:
        PlanError: ``plan-algorithm`` for its options with another algorithm, and for those of
            others with it; all at once.
    """
    other = [name for name in _OF_PROFILES if getattr(options, name) not in (None, False, 0)]
    other += ["backend"] * (of_profile.backend != "compile")
    other += ["calibration_plans"] * (options.calibration_plans != DEFAULT_CALIBRATION_PLANS)
    is_named = options.algorithm == BOUNDS_FIRST
    if is_named and options.objective in ("throughput", "pareto"):
        of_peaks = ("smallest_cluster", "largest_batch", "try_microbatches")
        other += [name for name in of_peaks if getattr(options, name)]
    is_bounded = is_named or (not other and _is_default(options, of_profile))
    given = [each.name for each in OPTIONS if getattr(options, each.name) not in (None, False)]
    if is_bounded and options.quick and options.compiles:
        raise PlanError.of(
            f"--quick compiles nothing, and --compiles {options.compiles} does; leave one out.",
            "plan-algorithm",
        )
    PlanError.check(
        Violation(
            f"--{name.replace('_', '-')}={getattr(options, name)} does not go with "
            f"algorithm={options.algorithm!r}; leave it out"
            f"{'' if is_named else f', or give --algorithm {BOUNDS_FIRST}'}.",
            "plan-algorithm",
        )
        for name in (other if is_named else [] if is_bounded else given)
    )
    return is_bounded


def _is_default(options: argparse.Namespace, of_profile: ProfileQuestion) -> bool:
    return (
        options.algorithm is None
        and not any(map(remat_time_fraction, of_profile.remat))  # has no bounds
        and options.neighbours == DEFAULT_NEIGHBOURS
        and options.objective in (None, "memory")
        and options.mode == "default"
        and SCHEDULES[options.schedule].is_plain
        and Target.load(of_profile.cluster.target).platform != "cpu"
    )


class _Asking:
    """Questions about one model, each answered by bounds and compiles.

    Args:
        options: How far an answer is proven.
        of_profile: What is bounded, at any micro-batch size.
        measurements: Of the workload.
    """

    def __init__(
        self, options: argparse.Namespace, of_profile: ProfileQuestion, measurements: Measurements
    ):
        self._options, self._of_profile = options, of_profile
        self._measurements, self._bounds = measurements, dict[int, Bounds]()
        self._below: int | None = None

    def bounds(self, microbatch_size: int) -> Bounds:
        """Of all stages at a micro-batch size."""
        if microbatch_size not in self._bounds:
            asked = replace(self._of_profile, microbatch_size=microbatch_size)
            found = bounds(asked, self._measurements, progress(self._options))
            self._bounds[microbatch_size] = found
        return self._bounds[microbatch_size]

    def compiler(self, least: Profile) -> PlanCompiler:
        return PlanCompiler(least, lambda: self._measurements)

    def answer(self, question: PlanQuestion) -> StageAnswer:
        """The plan of least peak, or the fastest, or the front."""
        options, between = self._options, self.bounds(question.microbatch_size)
        searches = {"throughput": fastest_first, "pareto": front_first}
        search = searches.get(question.objective or "", bounds_first)
        return search(
            between.least,
            between.most,
            question,
            self.compiler(between.least),
            Effort(
                options.within or 0.0,
                0 if options.quick else options.compiles,
                options.seconds,
                self._below,
            ),
            told=_Rounds(lambda text: say(options, text)),
        )

    def expected(self, question: PlanQuestion) -> StageAnswer:
        """What stages are expected to need decides; nothing is compiled."""
        asked = replace(question, algorithm=None)
        return recommend(self.bounds(question.microbatch_size).most, asked)

    def that_fits(self, question: PlanQuestion) -> StageAnswer:
        """The first compiled plan that fits, or that none does, however long that takes."""
        least = self.bounds(question.microbatch_size).least
        knowledge = BoundedKnowledge(least, compiler=self.compiler(least))
        found = knowledge.answer(question, any_that_fits=True)
        if _ended(found) == "interrupted":
            raise KeyboardInterrupt
        return found

    def one_of_several(self, question: PlanQuestion) -> StageAnswer:
        """As ``answer``; but an interrupt ends what it is a part of, too."""
        found = self.answer(question)
        if _ended(found) == "interrupted":
            raise KeyboardInterrupt
        return found

    def if_better(self, question: PlanQuestion) -> StageAnswer:
        """The plan of least peak, where it may be below those of the questions before."""
        found = self.one_of_several(question)
        if found.status == "ok" and found.compiled:
            self._below = min(found.peak_bytes, self._below or found.peak_bytes)
        return found

    def best(self, question: PlanQuestion) -> tuple[StageAnswer, Sequence[Attempt]]:
        """The answer to what the options ask for, and what was tried for it."""
        options = self._options
        if options.smallest_cluster:
            best, attempts = smallest_cluster(self.one_of_several, question)
        elif options.largest_batch:
            check_limited(question)
            best, attempts = largest_batch(
                self.expected,
                self.expected if options.quick else self.that_fits,
                question,
                min(self._of_profile.microbatch_sizes),
                is_settled=lambda result: options.quick or result.why.proven is not None,
            )
            if best is not None:
                return self.answer(best.question), attempts
        elif options.try_microbatches:
            best, attempts = best_of(
                self.if_better,
                self.if_better,
                question,
                options.try_microbatches,
                (question.schedule,),
            )
        else:
            return self.answer(question), ()
        return (attempts[-1] if best is None else best).result, attempts

    def cheapest_change(self, question: PlanQuestion) -> FittingChange | None:
        """What fits instead, compiled; by its state alone where nothing may be compiled."""
        options, of_profile = self._options, self._of_profile
        least = self.bounds(question.microbatch_size).least

        def bounded(changed: ProfileQuestion) -> Profile:
            return bounds(changed, self._measurements, progress(options)).least

        is_limited = options.quick or options.compiles is not None or options.seconds is not None
        known = BoundedKnowledge(least, compiler=self.compiler(least))
        return cheapest_change(
            replace(question, objective=None),
            least.graph.num_layers,
            # A stage on added nodes may take more devices than this process has.
            None if is_limited or of_profile.space.whole_nodes else known,
            measuring(of_profile, self._measurements, bounded),
        )


def plan(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    measurements: Measurements,
) -> int:
    """Search, compile, tell. The exit code is 1 where no plan fits, and where none was compiled, so
    that it is not known; and 130 after an interrupt, with the best plan so far."""
    with measurements.keeping_workers():
        return _told(options, question, of_profile, measurements)


def _told(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    measurements: Measurements,
) -> int:
    asking = _Asking(options, of_profile, measurements)
    result, attempts = asking.best(question)
    warnings = split_warnings(measurements.backend.workload, of_profile.microbatch_size)
    failures = causes(measurements.failures)
    document: dict[str, Any] = {
        **result.to_json(),
        "warnings": list(warnings),
        "failures": list(failures),
    }
    if attempts:
        document["attempts"] = [attempt.to_json() for attempt in attempts]
    least = asking.bounds(of_profile.microbatch_size).least
    lines = [
        *([attempts_table(attempts)] if attempts else []),
        *asked.layers_note(of_profile, least),
        *_lines(options, result, measurements, document),
        *(f"warning: {warning}" for warning in warnings),
        *(f"failed: {failure}" for failure in failures),
    ]
    if _ended(result) == "memory" and not attempts:
        tell(options, lines)  # what follows may compile
        lines = [name_change(document, asking.cheapest_change(question), "fits")]
    emit(options, document, "\n".join(lines))
    if _ended(result) == "interrupted":
        return 130
    return 0 if result.status == "ok" and result.compiled else 1


def _ended(result: StageAnswer) -> str:
    return "" if result.why.proven is None else result.why.proven.ended


def _lines(
    options: argparse.Namespace,
    result: StageAnswer,
    measurements: Measurements,
    document: dict[str, Any],
) -> Sequence[str]:
    """The answer for people; a compiled plan is saved, and its step simulated into the document."""
    lines = [f"{result.status}: {result.why.summary}"]
    if result.plan is None or result.prediction is None:
        return lines
    lines += [
        stage_table(result.plan, result.prediction.stages),
        peak_line(result.plan, result.prediction),
    ]
    lines += [str(result.headroom)] if result.headroom else []
    if not result.compiled:
        return lines
    known = verify(result.plan, measurements)  # compiled already
    timeline, time = known.timeline(), None
    if timeline is not None:
        time = time_summary(timeline, result.plan, known.graph)
        document["time"] = write(time)
        lines.append(describe_time(time))
    lines += front_table(result.why.front)
    if result.status == "ok":
        result.plan.with_(time=time).save(options.output)
        lines.append(
            f"plan -> {options.output} (search: {result.proof.algorithm}, "
            f"{result.proof.seconds:.1f} s)"
        )
    return lines
