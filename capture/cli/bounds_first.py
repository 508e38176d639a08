"""``capture plan`` for accelerators, and ``--algorithm bounds-first``: the plan of least peak in
compiled bytes, the fastest one that fits, or the front of both, without a profile."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.fitting import measuring
from capture.cli.output import Beyond, SearchEnd, told
from capture.cli.progress import SearchProgress, progress
from capture.cli.question_file import noted
from capture.errors import PlanError
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.memo import memo
from capture.options import Option, options_of
from capture.plan.choices import StageChoice, measured_choices
from capture.plan.prediction import StepTime
from capture.plan.schedule import SCHEDULES
from profiling_runs.bounds import Bounds, ModelBounds, bounds
from profiling_runs.collect import split_warnings
from profiling_runs.failures import causes
from profiling_runs.measurements import Measurements
from profiling_runs.pools.where import DEFAULT_LOCAL_WORKERS
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import PlanCompiler, verify
from recommender.answer import StageAnswer
from recommender.capture import grouped
from recommender.capture.changes import FittingChange, cheapest_change
from recommender.capture.effort import Effort
from recommender.capture.extent import (
    Attempt,
    cheapest_cluster,
    check_limited,
    largest_batch,
    over_microbatches,
    smallest_cluster,
)
from recommender.capture.knowledge import BoundedKnowledge
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.named import Named
from recommender.capture.parts import Part
from recommender.capture.recommendation import recommend
from recommender.capture.refine import Policy, refine
from recommender.capture.speed import Timed
from recommender.money import Accountant
from recommender.question import BOUNDS_FIRST, PlanQuestion
from recommender.whole import WholeQuestion

#: How near an answer is proven, unless the user says.
DEFAULT_WITHIN = 0.05

#: Of this algorithm alone.
OPTIONS = (
    *(replace(option, default=None) for option in options_of(Effort)),
    Option(
        "quick",
        f"{BOUNDS_FIRST}: the plan that bounds alone name, as with --compiles 0; no compiler is "
        "asked, and the plan says so",
        False,
    ),
)
#: Options of ``capture plan`` that ask for a profile, and those of its windows.
_OF_PROFILES = ("profile", "verify", "no_compile", "merge_layers", "try_schedules")


def of_a_profile(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options, as the user types them, that only a profile can answer; empty where the
    search on bounds answers the question, as it does unless something needs a profile.

    Raises:
        PlanError: ``plan-algorithm`` for options of the search on bounds beside those of a profile,
            and the other way round; all at once.
    """
    is_named = options.algorithm == BOUNDS_FIRST
    said = vars(options)
    unasked = {option.name: option.default for option in (shared.BACKEND[0], *shared.PROFILING)}
    unasked |= {"algorithm": BOUNDS_FIRST if is_named else None, "mode": "default"}
    given = {name: said[name] for name in _OF_PROFILES if said[name]}
    given |= {name: said[name] for name, default in unasked.items() if said[name] != default}
    if not SCHEDULES[options.schedule].is_plain:
        given["schedule"] = options.schedule
    asked = tuple(_typed(name, value) for name, value in given.items())
    names = (*(e.name for e in OPTIONS), "fix", "mtbf", "targets", "offload", "host_memory")
    own = [name for name in names if getattr(options, name) not in (None, False, ())]
    own += ["objective"] if options.objective == "cost" else []
    if not given and options.quick and options.compiles:
        raise PlanError.of(
            f"--quick compiles nothing, and --compiles {options.compiles} does; leave one out.",
            "plan-algorithm",
        )
    if given and (own or is_named):
        ours = [_typed("algorithm", BOUNDS_FIRST)] * is_named
        ours += [_typed(name, getattr(options, name)) for name in own]
        raise PlanError.of(
            f"{', '.join(asked)} need{'s' * (len(asked) == 1)} a profile, and "
            f"{', '.join(ours)} {'is' if len(ours) == 1 else 'are'} of the search on bounds, "
            "which makes none; leave out one or the other.",
            "plan-algorithm",
        )
    return asked


def _typed(name: str, value: Any) -> str:
    """Return an option as the user types it.

    Example:
        >>> _typed("merge_layers", 4), _typed("quick", True)
        ('--merge-layers 4', '--quick')
    """
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if name == "within":
        return f"{flag} {value * 100:g}%"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


class Asking:
    """The questions about one model, each answered by bounds and compiles.

    Args:
        options: Options that say how far an answer is proven.
        of_profile: Question of what is bounded, at any micro-batch size.
        measurements: Measurements of the workload.
        whole: Question of what is searched where it is not said; None for nothing.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        of_profile: ProfileQuestion,
        measurements: Measurements,
        whole: WholeQuestion | None,
    ):
        self._options, self._of_profile, self._whole = options, of_profile, whole
        self._measurements = measurements
        self._traced = progress(options)

    @cached_property
    def _known(self) -> ModelBounds:
        """The bounds of the model at every micro-batch size that is asked about."""
        return ModelBounds(
            self._measurements,
            self._examples,
            self._of_profile.cluster.num_devices,
            lambda *done: self._traced(*done),
            self.start_workers,
            self._asked,
        )

    @cached_property
    def _asked(self) -> Mapping[int, Sequence[StageChoice]]:
        """The choices that stages may make, by micro-batch size."""
        whole, sizes = self._whole, {self._of_profile.microbatch_size}
        if whole is not None:
            sizes = {whole.question(m).microbatch_size for m in whole.microbatches}
        return {size: self._choices(size) for size in sizes}

    @property
    def _examples(self) -> set[int]:
        """The numbers of examples on a device that are asked about."""
        return {size // each.data_parallel for size, of in self._asked.items() for each in of}

    def start_workers(self) -> None:
        """Start workers in the background where something is to be compiled. They trace what they
        will need while this process traces."""
        from capture.profiler.facts import traced_sizes

        if not self._options.quick and self._options.compiles != 0:
            sizes = traced_sizes(self._examples).values()
            self._measurements.start_workers(ahead=sorted({*sizes}))

    def _choices(self, microbatch_size: int) -> Sequence[StageChoice]:
        if self._whole is not None:
            return self._whole.choices(microbatch_size)
        return replace(self._of_profile, microbatch_size=microbatch_size).stage_choices

    @memo
    def bounds(self, microbatch_size: int) -> Bounds:
        """Return the bounds of all stages at a micro-batch size."""
        return self._known.at(self._choices(microbatch_size), microbatch_size)

    def compiler(self, least: Profile | None = None) -> PlanCompiler:
        return PlanCompiler(least, lambda: self._measurements)

    def answer(self, *questions: PlanQuestion) -> StageAnswer:
        """Find the plan of lowest peak, or the fastest, or the front, over questions of one
        objective."""
        options, objective = self._options, questions[0].search[0]
        policy: Policy = LowestPeak() if objective == "memory" else Timed(objective == "pareto")
        if self._whole is not None and options.objective is None:
            policy = Named()
        parts = [self._part(each, has_floor=len(questions) > 1) for each in questions]
        effort = Effort(
            DEFAULT_WITHIN if options.within is None else options.within,
            0 if options.quick else options.compiles,
            options.seconds,
            at_once=options.workers or DEFAULT_LOCAL_WORKERS,
        )
        with self._telling() as told:
            return refine(policy, parts, self.compiler(), effort, told.known)

    def _part(self, question: PlanQuestion, has_floor: bool) -> Part:
        """Return the part of the search for one number of micro-batches and one schedule, with a
        lower bound of its step time."""
        size, limit = question.microbatch_size, question.limit_bytes
        part = Part(question, partial(self.bounds, size))
        if SCHEDULES[question.schedule].splits_backward:
            part = replace(part, open=lambda: self.bounds(size).split)
        if not has_floor or question.search[0] == "memory":
            return part
        choices = measured_choices(self._choices(size))  # of a mixture, layers are of either kind

        if part.has_offload:  # which leaves room for everything
            limit = None

        def seconds(num_devices: int | None = None) -> tuple[float, float]:
            return self._known.seconds(choices, size, question.cluster, limit, num_devices)

        if part.is_plain:
            copies = self._state_seconds(question)
            least, expected = (question.num_microbatches * each + copies for each in seconds())
            return replace(part, least_seconds=least, expected_seconds=expected)
        num_layers = self._known.facts.graph.num_layers
        least, expected = grouped.floor(question, num_layers, seconds)
        return replace(part, least_seconds=least, expected_seconds=expected)

    def _state_seconds(self, question: PlanQuestion) -> float:
        """Return the least seconds in which optimizer state that rests on hosts comes and goes."""
        rates, cluster = Target.load(question.cluster.target).rates, question.cluster
        every = question.offload_of(cluster.num_devices)
        if rates is None or "optimizer" not in every:  # or stages of several nodes keep theirs
            return 0.0
        links = rates.host.to_device, rates.host.to_host
        state = self._state_bytes / cluster.num_devices
        return state * sum(1 / e.bytes_per_second.value for e in links)

    @contextmanager
    def _telling(self) -> Iterator[SearchProgress]:
        """Report the rounds of a search, and what is compiled in them, as one progress."""
        told, before = SearchProgress(self._options), (self._measurements.progress, self._traced)
        self._measurements.progress = self._traced = told.jobs
        try:
            yield told
        finally:
            self._measurements.progress, self._traced = before
            told.end()

    def expected(self, question: PlanQuestion) -> StageAnswer:
        """Answer a question from what stages are expected to need; nothing is compiled."""
        asked = replace(question, algorithm=None)
        return recommend(self.bounds(question.microbatch_size).most, asked)

    def that_fits(self, question: PlanQuestion) -> StageAnswer:
        """Return the first compiled plan that fits, or that none does, however long that takes."""
        least = self.bounds(question.microbatch_size).least
        knowledge = BoundedKnowledge(least, compiler=self.compiler(least))
        found = knowledge.answer(question, any_that_fits=True)
        if _ended(found) == "interrupted":
            raise KeyboardInterrupt
        return found

    @cached_property
    def _state_bytes(self) -> int:
        """The bytes of the whole optimizer state."""
        return sum(self._measurements.backend.state_bytes(self._of_profile.microbatch_size))

    @cached_property
    def accountant(self) -> Accountant:
        """The maker of accounts of the model's plans, on the terms of the options."""
        size = self._of_profile.microbatch_size
        return accountant_of(self._options, self._measurements, size)

    @memo
    def one_of_several(self, question: PlanQuestion) -> StageAnswer:
        """Answer one of several questions; unlike in ``answer``, an interrupt ends all of them."""
        found = self.answer(*self.asked_of(question))
        if _ended(found) == "interrupted":
            raise KeyboardInterrupt
        return found

    def best(self, question: PlanQuestion) -> tuple[StageAnswer, Sequence[Attempt]]:
        """Return the answer to what the options ask for, and the attempts that led to it."""
        options = self._options
        if options.smallest_cluster:
            best, attempts = smallest_cluster(self.one_of_several, question)
        elif options.objective == "cost":
            rank = self.accountant.rank
            best, attempts = cheapest_cluster(self.one_of_several, question, rank)
        elif options.largest_batch:
            check_limited(question)
            best, attempts = largest_batch(
                self.expected,
                self.expected if options.quick else self.that_fits,
                replace(question, objective=None),  # whether anything fits is a matter of bytes
                min(self._of_profile.microbatch_sizes),
                is_settled=lambda result: options.quick or result.why.proven is not None,
            )
            if best is not None:
                chosen = replace(best.question, objective=question.objective)
                return self.answer(chosen), attempts
        else:
            return self.answer(*self.asked_of(question)), ()
        return (attempts[-1] if best is None else best).result, attempts

    def asked_of(self, question: PlanQuestion) -> Sequence[PlanQuestion]:
        """Return one question per schedule and number of micro-batches to try."""
        tried = self._options.try_microbatches
        if self._whole is not None and not tried:
            tried = self._whole.microbatches
        asked = over_microbatches(question, tried) if tried else [question]
        if self._whole is None:
            return asked
        whole = self._whole
        return [part for s in whole.schedules for each in asked for part in whole.parts(each, s)]

    def left_out(self) -> Sequence[str]:
        """Return a line on what was not searched although no option says so."""
        found = [] if self._whole is None else [": ".join(each) for each in self._whole.left_out()]
        return ["in no plan: " + "; ".join(found)] if found else []

    def _freed(self, whole: WholeQuestion) -> FittingChange | None:
        """Return the decision of a fixed plan whose search is expected to make another plan fit
        with the least memory. If no single one does, all of them."""
        decisions = () if whole.fixed is None else whole.fixed.decisions
        found = [self._least(f"--search {name}", whole.freed(name)) for name in decisions]
        peaks = [each for each in found if each is not None]
        if peaks:
            return min(peaks, key=lambda change: change.peak_bytes or 0)
        return self._least("leave out --fix", reduce(WholeQuestion.freed, decisions, whole))

    def _least(self, change: str, whole: WholeQuestion) -> FittingChange | None:
        """Return the peak that the smallest plan of another question is expected to have, as a
        change; None if none fits."""
        other = Asking(self._options, self._of_profile, self._measurements, whole)
        asked = [replace(whole.question(m), objective="memory") for m in whole.microbatches]
        peaks = [found.peak_bytes for found in map(other.expected, asked) if found.status == "ok"]
        return FittingChange(change, min(peaks), True) if peaks else None

    def cheapest_change(self, question: PlanQuestion) -> FittingChange | None:
        """Return the cheapest change with which a plan fits, compiled; judged by state alone where
        nothing may be compiled."""
        options, of_profile = self._options, self._of_profile
        if self._whole is not None and self._whole.fixed is not None:
            return self._freed(self._whole)
        least = self.bounds(question.microbatch_size).least

        def bounded(changed: ProfileQuestion) -> Profile:
            return bounds(changed, self._measurements, progress(options)).least

        is_limited = options.quick or options.compiles is not None or options.seconds is not None
        known = BoundedKnowledge(least, compiler=self.compiler(least))
        with self._measurements.keeping_workers():
            return cheapest_change(
                replace(question, objective=None),
                least.graph.num_layers,
                # A stage on added nodes may take more devices than this process has.
                None if is_limited or of_profile.space.whole_nodes else known,
                measuring(of_profile, self._measurements, bounded),
            )


def accountant_of(
    options: argparse.Namespace, measurements: Measurements, microbatch_size: int
) -> Accountant:
    """Return the maker of accounts of a model's plans, on the terms of the options."""
    backend, terms = measurements.backend, asked.terms_of(vars(options))
    traced = backend.traced(microbatch_size)
    return Accountant(terms, traced.graph, traced.casts, backend.model_bytes(microbatch_size))


def plan(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    measurements: Measurements,
    whole: WholeQuestion | None = None,
) -> SearchEnd:
    """Search, compile and return the outcome. The exit code is 1 where no plan fits, and where none
    was compiled though one was to be; and 130 after an interrupt, with the best plan so far."""
    asking = Asking(options, of_profile, measurements, whole)
    with ThreadPoolExecutor(1) as beside:  # this process waits for workers most of the time
        split = measurements.backend.workload, of_profile.microbatch_size
        warned = None if measurements.setting is None else beside.submit(split_warnings, *split)
        result, attempts = asking.best(question)
        warnings = [*(split_warnings(*split) if warned is None else warned.result())]
    result, time = with_times(noted(options, result), measurements)
    warnings += _refuted([*(attempt.result for attempt in attempts), result])
    beyond = Beyond(warnings, causes(measurements.failures))
    notes = [*asked.layers_note(of_profile, measurements.backend.num_layers), *asking.left_out()]
    outcome = told(options, result, time, attempts, notes, beyond, asking.accountant)
    if _ended(result) == "memory" and not attempts:
        most = max(asking.asked_of(question), key=lambda each: each.num_microbatches)
        outcome = replace(outcome, change=partial(asking.cheapest_change, most))
    asks_no_compiler = options.quick or options.compiles == 0
    is_known = result.status == "ok" and (result.compiled or asks_no_compiler)
    code = 130 if _ended(result) == "interrupted" else int(not is_known)
    return replace(outcome, exit_code=code)


def _refuted(results: Sequence[StageAnswer]) -> Sequence[str]:
    """Return the bounds that compiled stages refute, in words, each once."""
    proven = [result.why.proven for result in results if result.why.proven is not None]
    return [*dict.fromkeys(said for each in proven for said in each.refuted)]


def _ended(result: StageAnswer) -> str:
    return "" if result.why.proven is None else result.why.proven.ended


def with_times(
    result: StageAnswer, measurements: Measurements
) -> tuple[StageAnswer, StepTime | None]:
    """Return the answer with the simulated steps of the plans of its front, and the step of its own
    plan if that is compiled."""
    plan, front = result.plan, result.why.front
    if plan is None or not result.compiled:
        return result, None
    own = verify(plan, measurements).step_time
    if front is None:
        return result, own
    points = []
    for name, point in front.names.items():
        if point.notes:
            other = plan.of_front(name)
            is_own = other.decisions == plan.decisions
            time = own if is_own else verify(other, measurements).step_time
            point = replace(point, notes=replace(point.notes, time=time))
        points.append(point)
    why = replace(result.why, front=replace(front, points=tuple(points)))
    return replace(result, why=why, plan=plan.with_(why=why)), own
