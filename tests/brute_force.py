"""What ``refine`` says of a small whole question, against all its plans compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import numpy as np

from capture.plan.why import Bracket, FrontPoint
from recommender.answer import StageAnswer
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.named import Named
from recommender.capture.nearness import ROUNDING
from recommender.capture.parts import Part
from recommender.capture.refine import Policy, refine
from recommender.capture.speed import Timed
from recommender.question import PlanQuestion
from tests.small_spaces import Compiled, Compiler, SmallSpace

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "memory": LowestPeak,
    "throughput": Timed,
    "pareto": partial(Timed, front=True),
    "named": Named,
}
#: The best of all, and ends before it is proven.
EFFORTS = (Effort(), *(Effort(compiles=n) for n in (1, 2, 3)), Effort(within_fraction=0.2))
#: Bytes and seconds of a plan.
Value = tuple[int, float]


@dataclass(frozen=True)
class Asked:
    """A small space with a limit of memory.

    Attributes:
        floors: Of every part, as a fraction of its best plan.
        expected: The same of what is expected of it; 0 where that is not known.
        host: Memory of hosts, where plans with offload are asked for, too.
    """

    space: SmallSpace
    limit: int
    floors: Sequence[float]
    expected: Sequence[float]
    host: int | None = None

    @classmethod
    def of(cls, seed: int) -> Asked:
        """Of any limit: some bind, some nothing is within."""
        space, draw = SmallSpace(seed), np.random.default_rng(seed)
        peaks, shape = sorted(each.peak_bytes for each in space.every), len(space.sizes)
        quantile = draw.choice([0.0, 0.02, 0.2, 0.6, 1.0])
        limit = peaks[int(quantile * (len(peaks) - 1))] - int(draw.random() < 0.2)
        floors = draw.choice([0.0, 0.7, 1.0], shape).tolist()
        return cls(space, limit, floors, draw.choice([0.0, 0.9, 1.2], shape).tolist())

    @property
    def questions(self) -> list[PlanQuestion]:
        whole = replace(self.space.whole, host_memory_bytes=self.host)
        asked = map(whole.question, whole.microbatches)
        return [part for each in asked for part in whole.parts(each, whole.schedules[0])]

    @cached_property
    def every(self) -> list[Compiled]:
        return self.space.every if self.host is None else self.space.plans(self.questions)

    @property
    def fitting(self) -> list[Compiled]:
        return [each for each in self.every if each.peak_bytes <= self.limit]

    def answer(self, name: str, effort: Effort) -> tuple[StageAnswer, list[Bracket]]:
        """What a policy answers, and every bracket that was told."""
        objective, told = "throughput" if name == "named" else name, list[Bracket]()
        numbers = self.space.whole.microbatches
        rest = {m: known for m, *known in zip(numbers, self.floors, self.expected, strict=True)}
        parts = [
            self._part(
                replace(each, objective=objective, memory_limit_bytes=self.limit),
                *rest[each.num_microbatches],
            )
            for each in self.questions
        ]
        return refine(POLICIES[name](), parts, Compiler(self.space), effort, told.append), told

    def _part(self, asked: PlanQuestion, floor: float, expected: float) -> Part:
        size, what = asked.microbatch_size, (asked.microbatch_size, asked.offload or ())
        plans = [
            each
            for each in self.every
            if (each.question.microbatch_size, each.question.offload or ()) == what
        ]
        fastest = min((p.seconds for p in plans if p.peak_bytes <= self.limit), default=1.0)
        least_bytes = int(floor * min((p.peak_bytes for p in plans), default=0))
        bounds = self.space.bounds[size]
        return Part(asked, lambda: bounds, least_bytes, floor * fastest, expected * fastest)


def front_of(values: Sequence[Value]) -> list[Value]:
    """Those of which none is both smaller and faster than another."""
    left = list[Value]()
    for peak, seconds in sorted(values):
        if not left or seconds < left[-1][1] * (1 - ROUNDING):
            left.append((peak, seconds))
    return left


def wrong(asked: Asked, name: str, effort: Effort) -> Iterator[str]:
    """Yield what a policy answers and what is not so."""
    found, told = asked.answer(name, effort)
    assert found.why.proven is not None, "bounds are searched"
    fitting, ended = asked.fitting, found.why.proven.ended
    if not fitting:
        if name == "memory" or not effort.compiles:
            yield from _unlike((found.status, ended), ("infeasible", "memory"))
        return
    if ended == "memory":
        yield f"{len(fitting)} plans fit, and the answer is {found}"
        return
    yield from _wrong_brackets(asked, name, [*told, *found.why.proven.trail])
    if found.compiled and found.status == "ok":
        yield from _wrong_value(asked, name, found)
        for point in found.why.front.points if found.why.front else ():
            yield from _wrong_point(asked, found, point)
    if effort == Effort():
        yield from _no_best(asked, name, found)


def _unlike(found: object, best: object) -> Iterator[str]:
    if found != best:
        yield f"the answer is {found}, and by brute force {best}"


def _wrong_brackets(asked: Asked, name: str, brackets: Sequence[Bracket]) -> Iterator[str]:
    plans = asked.every if name == "memory" else asked.fitting
    least, fastest = min(p.peak_bytes for p in plans), min(p.seconds for p in plans)
    for bracket in brackets:
        least_step = bracket.least_step_seconds or 0.0
        if name in ("memory", "pareto") and bracket.least_bytes > least:
            yield f"the lower bound {bracket.least_bytes} is above {least} bytes"
        if name == "memory" and bracket.compiled and bracket.most_bytes < least:
            yield f"the best plan so far, {bracket.most_bytes} bytes, is below {least}"
        if least_step > fastest * (1 + ROUNDING):
            yield f"the lower bound {least_step} is above {fastest} s"
        if (bracket.most_step_seconds or inf) < fastest * (1 - ROUNDING):
            yield f"the best plan so far, {bracket.most_step_seconds} s, is below {fastest} s"


def _wrong_value(asked: Asked, name: str, found: StageAnswer) -> Iterator[str]:
    """Plans that are better by more than is said."""
    assert found.plan is not None and found.why.proven is not None, "compiled"
    size, within = found.plan.microbatch_size, found.why.proven.within_fraction
    by = (1 + (inf if within is None else within)) * (1 + ROUNDING)
    points = [(found.peak_bytes, _seconds(found))]
    if name == "pareto" and found.why.front is not None:
        points = [(p.peak_bytes, p.step_seconds) for p in found.why.front.points]
    for plan in asked.fitting:
        for peak, seconds in points:
            small = name == "throughput" or name == "named" or peak <= plan.peak_bytes * by
            if small and (name == "memory" or seconds <= plan.seconds * by):
                break
        else:
            yield f"{plan} is more than {within} better than {points} at {size}"


def _wrong_point(asked: Asked, found: StageAnswer, point: FrontPoint) -> Iterator[str]:
    """What a point of a front says of other plans, or is not itself."""
    assert found.plan is not None and point.within_fraction is not None, "compiled"
    peak, seconds = point.peak_bytes, point.step_seconds
    num_microbatches = point.num_microbatches or found.plan.num_microbatches
    if not any(
        (p.question.num_microbatches, p.peak_bytes) == (num_microbatches, peak)
        and abs(p.seconds / seconds - 1) < ROUNDING
        for p in asked.fitting
    ):
        yield f"no plan is {point}"
    below = (1 + point.within_fraction) * (1 + ROUNDING)
    faster = (1 + point.bound_fraction) * (1 + ROUNDING)
    for plan in asked.fitting:
        if plan.peak_bytes * below < peak and plan.seconds * below < seconds:
            yield f"{plan} is smaller and faster than {point}"
        if plan.peak_bytes <= peak and plan.seconds * faster < seconds:
            yield f"{plan} is faster than {point}"


def _no_best(asked: Asked, name: str, found: StageAnswer) -> Iterator[str]:
    """How an answer that is to be the best of all is not."""
    assert found.why.proven is not None, "bounds are searched"
    yield from _unlike(found.why.proven.within_fraction, 0)
    values = [(each.peak_bytes, each.seconds) for each in asked.fitting]
    least, fastest = min(peak for peak, _ in values), min(seconds for _, seconds in values)
    if name == "memory":
        yield from _unlike(found.peak_bytes, least)
    elif abs(_seconds(found) / fastest - 1) > ROUNDING:
        yield from _unlike(_seconds(found), fastest)
    if found.why.front is None:
        return
    points = [(p.peak_bytes, p.step_seconds) for p in found.why.front.points]
    expected = front_of(values) if name == "pareto" else front_of(points)
    yield from _unlike([peak for peak, _ in points], [peak for peak, _ in expected])
    if any(abs(s / e - 1) > ROUNDING for (_, s), (_, e) in zip(points, expected, strict=False)):
        yield from _unlike(points, expected)


def _seconds(found: StageAnswer) -> float:
    return found.proof.step_seconds or 0.0
