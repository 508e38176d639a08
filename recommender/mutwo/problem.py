"""An array of models on one device: the ways of training it that are weighed, and what each needs.

A way is a partition, an order, and what becomes of the feature maps. It is judged as what will run:
its steps are issued, their bytes are counted and their seconds are read from a clock, thousands of
times; what is chosen is written, replayed and simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple, Protocol

from capture.machine.rates import HostLink
from capture.plan.array import ArrayPrediction, Decision
from capture.step.issue import Clock, Issue, Listener, Order
from capture.step.ledger import Ledger
from capture.step.multiplexed import (
    HOST,
    ArraySteps,
    array_seconds,
    build_array,
    lifetimes,
    orders,
    peak_of,
    recomputed_bytes,
)
from capture.step.sub_array import (
    Call,
    Lifetimes,
    ProgramFacts,
    Programs,
    SubArray,
    Uses,
    movable,
    recomputable,
)
from capture.step.timeline import StepTimeline, simulate_step
from recommender.mutwo.ways import Rule, Way, ways_of_each


class Choice(NamedTuple):
    """A decision on feature maps: retain, swap or recompute. For those swapped, ``ahead`` says how
    early they are fetched, as in ``Decision``."""

    kind: Literal["retain", "swap", "recompute"]
    ahead: int = 0


RETAIN, RECOMPUTE = Choice("retain"), Choice("recompute")
#: How many segments early what is swapped may come.
PROMPTS = (1, 2, 4)
#: Decided sub-arrays that are remembered.
MOST_LIVES = 256


class Profiled(Programs, Protocol):
    """The programs of sub-arrays of any size."""

    def sub_array(self, num_models: int) -> SubArray: ...


class SubArrayKind(NamedTuple):
    """A kind of sub-arrays that are the same program.

    Attributes:
        task: Of their models.
        num_models: Of each.
    """

    task: int
    num_models: int


class DecidedUnit(NamedTuple):
    """A group of feature maps that are decided together, in all sub-arrays of a kind alike.

    Attributes:
        kind: Of such a sub-array.
        layer: That makes them.
        own: Whether its own passes alone use them, so that they may be recomputed.
        bundles: By number.
    """

    kind: SubArrayKind
    layer: int
    own: bool
    bundles: tuple[int, ...]


#: A choice per unit of a way.
Chosen = tuple[Choice, ...]


class Weighed(NamedTuple):
    """The need and the seconds of a way with its choices, as issued; the less the better.

    Attributes:
        excess_bytes: Summed over the segments, what they need above the limit, and what the host
            needs above its own; 0 if the limits are kept.
        seconds: Of the body; infinite where they are not.
        peak_bytes: Of the device, in the body.
    """

    excess_bytes: int
    seconds: float
    peak_bytes: int

    @property
    def fits(self) -> bool:
        return not self.excess_bytes


@dataclass(frozen=True)
class WrittenWay:
    """A way with its choices, written as a step, replayed and simulated.

    Attributes:
        arrays: Decided.
        decisions: As a plan has them.
        steps: Its instructions.
        ledgers: Of them.
        timeline: Of the body.
        limit_bytes: Up to which the step lets copies go on.
    """

    arrays: tuple[Lifetimes, ...]
    decisions: tuple[tuple[Decision, ...], ...]
    steps: ArraySteps
    ledgers: tuple[Ledger, ...]
    timeline: StepTimeline
    limit_bytes: int

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> int:
        return peak_of(self.ledgers, 0)[0]

    @property
    def host_peak_bytes(self) -> int:
        return peak_of(self.ledgers, HOST)[0]

    def fits(self, limit_bytes: int, host_bytes: int | None) -> bool:
        return self.peak_bytes <= limit_bytes and (
            host_bytes is None or self.host_peak_bytes <= host_bytes
        )

    @property
    def compute_seconds(self) -> float:
        """The seconds of all programs of the body, one after the other."""
        return self._seconds(("forward", "backward", "recompute"))

    @property
    def recompute_fraction(self) -> float:
        """The part of the programs' seconds that goes into recomputation, in [0, 1]."""
        return self._seconds(("recompute",)) / self.compute_seconds if self.compute_seconds else 0.0

    def _seconds(self, kinds: Sequence[str]) -> float:
        body = self.steps.body
        return sum(
            body.programs[each.program].call.seconds
            for each in body.runs
            if body.programs[each.program].kind in kinds
        )

    def prediction(self) -> ArrayPrediction:
        """Return the prediction that a plan stores: peak bytes, seconds, and bytes retained,
        swapped and recomputed."""
        peak, _, parts = peak_of(self.ledgers, 0)
        maps = sum(
            life.sub_array.bundles[number].nbytes
            for life in self.arrays
            for number in movable(life.sub_array)
        )
        swapped = self.steps.body.moved_bytes["to_host"]
        again = recomputed_bytes(self.arrays)
        return ArrayPrediction(
            peak, parts, self.host_peak_bytes, self.seconds, maps - swapped - again, swapped, again
        )


@dataclass(frozen=True)
class ArrayProblem:
    """The problem that a search for a model array solves: models, one device, its host and limits.

    Attributes:
        profiled: The models; of several tasks, those of the first.
        num_models: How many.
        host: What joins the device and its host.
        limit_bytes: Of its memory.
        host_bytes: What may be swapped at once; None if nobody knows.
        by_bundle: Decide every bundle by itself, not those of a layer together. A layer then has
            many programs that make some of it again: for costs that are known without compiling.
        rule: Which partitions are weighed.
        others: The models of the other tasks.
        tasks: Of each model, which of the tasks; empty where there is one.
    """

    profiled: Profiled
    num_models: int
    host: HostLink
    limit_bytes: int
    host_bytes: int | None = None
    by_bundle: bool = False
    rule: Rule = "pairs"
    others: tuple[Profiled, ...] = ()
    tasks: tuple[int, ...] = ()
    _spaces: dict[Way, Space] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def models(self) -> list[list[int]]:
        """The models of each task, by number."""
        tasks = self.tasks or (0,) * self.num_models
        return [[m for m, of in enumerate(tasks) if of == task] for task in sorted(set(tasks))]

    @cached_property
    def ways(self) -> list[Way]:
        """The ways of training the models that the search weighs."""
        return ways_of_each(self.models, self.rule)

    @cached_property
    def programs(self) -> AllPrograms:
        """The programs of all sub-arrays, of every task."""
        return AllPrograms((self.profiled, *self.others))

    def sub_array(self, kind: SubArrayKind) -> SubArray:
        """Return the programs and feature maps of a kind of sub-array."""
        return self.programs.sub_array(kind)

    def kind(self, group: Sequence[int]) -> SubArrayKind:
        """Return the kind of the sub-array that some models, by number, form."""
        return SubArrayKind(self.tasks[group[0]] if self.tasks else 0, len(group))

    def space(self, way: Way) -> Space:
        """Return the choices of a way, made once."""
        if way not in self._spaces:
            self._spaces[way] = Space(self, way)
        return self._spaces[way]

    @property
    def num_evaluated(self) -> int:
        return sum(len(space.known) for space in self._spaces.values())


class AllPrograms:
    """The programs of the sub-arrays of all tasks.

    Args:
        profiled: By task.
    """

    def __init__(self, profiled: Sequence[Profiled]):
        self._profiled = profiled
        #: By the number of an object that is kept, so that it stays its own.
        self._own: dict[int, tuple[SubArray, Profiled]] = {}

    def sub_array(self, kind: SubArrayKind) -> SubArray:
        profiled = self._profiled[kind.task]
        found = profiled.sub_array(kind.num_models)
        self._own[id(found)] = found, profiled
        return found

    def facts(self, sub_array: SubArray, call: Call) -> ProgramFacts:
        return self._own[id(sub_array)][1].facts(sub_array, call)


class Space:
    """The choices of a way, weighed when they are asked for and kept.

    Attributes:
        kinds: Of the sub-arrays.
        units: What is decided, in the order of the layers.
        options: Per unit, the choices that it has.
        known: What was weighed.
    """

    def __init__(self, problem: ArrayProblem, way: Way):
        self.problem, self.way = problem, way
        self.kinds = [problem.kind(group) for group in way.partition]
        self._uses = {kind: Uses(problem.sub_array(kind)) for kind in set(self.kinds)}
        self.units = [unit for kind in dict.fromkeys(self.kinds) for unit in self._units(kind)]
        self.options = [tuple(self._options(unit)) for unit in self.units]
        self.known: dict[tuple[Chosen, int], Weighed] = {}
        self._lives: dict[tuple[SubArrayKind, Chosen], Lifetimes] = {}
        self._least: dict[Chosen, Issue] = {}
        to_device, to_host = problem.host.to_device, problem.host.to_host
        sizes = {bundle.nbytes for kind in set(self.kinds) for bundle in self._array(kind).bundles}
        self._to_device = {nbytes: to_device.seconds(nbytes) for nbytes in sizes}.__getitem__
        self._to_host = {nbytes: to_host.seconds(nbytes) for nbytes in sizes}.__getitem__

    def _array(self, kind: SubArrayKind) -> SubArray:
        return self._uses[kind].sub_array

    def _units(self, kind: SubArrayKind) -> Iterator[DecidedUnit]:
        sub_array = self._array(kind)
        again, found = set(recomputable(sub_array)), dict[tuple[int, bool, int], list[int]]()
        for number in movable(sub_array):
            layer = sub_array.bundles[number].writer
            assert layer is not None, "feature maps are made by a segment"
            one = number if self.problem.by_bundle else 0
            found.setdefault((layer, number in again, one), []).append(number)
        for (layer, own, _), numbers in sorted(found.items()):
            yield DecidedUnit(kind, layer, own, tuple(numbers))

    def _options(self, unit: DecidedUnit) -> Iterator[Choice]:
        yield RETAIN
        # Nothing comes before the backward pass begins.
        longest = self._array(unit.kind).num_layers - 1 - unit.layer
        for ahead in dict.fromkeys(min(ahead, max(1, longest)) for ahead in PROMPTS):
            yield Choice("swap", ahead)
        if unit.own:
            yield RECOMPUTE

    @property
    def retained(self) -> Chosen:
        return (RETAIN,) * len(self.units)

    @property
    def swapped(self) -> Chosen:
        """The choices with every unit swapped: no other choices need less of the device."""
        return tuple(options[1] for options in self.options)

    def swap(self, n: int, ahead: int) -> Choice:
        """Return the swap of a unit that is fetched ``ahead`` segments early, or the most below."""
        swaps = [choice for choice in self.options[n] if choice.kind == "swap"]
        return max((one for one in swaps if one.ahead <= ahead), key=lambda one: one.ahead)

    def state_bytes(self, kind: SubArrayKind) -> int:
        """Return the bytes of a sub-array's own state; what all sub-arrays share is not counted."""
        bundles = self._array(kind).bundles
        return sum(one.nbytes for one in bundles if one.is_state and not one.shared)

    def fewer(self) -> Space | None:
        """Return a smaller space, with at most two sub-arrays of each kind, or one in turn, and the
        state of the others off the limit: its choices apply here, too. None if there are no
        more."""
        most, left, gone = 2 if self.way.order == "multiplexed" else 1, Counter[SubArrayKind](), 0
        kept = list[tuple[int, ...]]()
        for kind, group in zip(self.kinds, self.way.partition, strict=True):
            left[kind] += 1
            if left[kind] <= most:
                kept.append(group)
            else:
                gone += self.state_bytes(kind)
        if len(kept) == len(self.kinds):
            return None
        fewer = replace(self.problem, limit_bytes=self.problem.limit_bytes - gone)
        return fewer.space(Way(tuple(kept), self.way.order))

    def arrays(self, chosen: Chosen) -> tuple[Lifetimes, ...]:
        """Return the sub-arrays of the way with their feature maps decided."""
        return tuple(self._life(kind, chosen) for kind in self.kinds)

    def _life(self, kind: SubArrayKind, chosen: Chosen) -> Lifetimes:
        own = [
            (unit, choice)
            for unit, choice in zip(self.units, chosen, strict=True)
            if unit.kind == kind
        ]
        key = kind, tuple(choice for _, choice in own)
        if key not in self._lives:
            if len(self._lives) >= MOST_LIVES:  # of thousands that an enumeration asks for once
                self._lives.clear()
            self._lives[key] = Lifetimes(
                self._uses[kind],
                {n: choice.ahead for unit, choice in own if choice.kind == "swap" for n in unit[3]},
                frozenset(n for unit, choice in own if choice.kind == "recompute" for n in unit[3]),
            )
        return self._lives[key]

    def decisions(self, chosen: Chosen, limit_bytes: int) -> tuple[tuple[Decision, ...], ...]:
        """Return the decisions of every sub-array in the form that a plan has."""
        issued, _ = self._issued(chosen, limit_bytes)
        return tuple(
            tuple(self._decided(a, kind, chosen, issued)) for a, kind in enumerate(self.kinds)
        )

    def _decided(
        self, a: int, kind: SubArrayKind, chosen: Chosen, issued: Issue
    ) -> Iterator[Decision]:
        bundles = self._array(kind).bundles
        found = {
            number: choice
            for unit, choice in zip(self.units, chosen, strict=True)
            if unit.kind == kind
            for number in unit.bundles
        }
        for number, choice in sorted(found.items()):
            name = bundles[number].name
            if choice.kind == "swap":
                yield Decision(name, "swap", choice.ahead, issued.behind.get((a, number)))
            elif choice.kind == "recompute":
                yield Decision(name, "recompute")

    def _body(self, chosen: Chosen) -> Order:
        return orders(self.arrays(chosen), self.way.order)[0]

    def least(self, chosen: Chosen) -> Issue:
        """Return the body with a wait for every copy: no limit below its peak can be kept."""
        key = tuple(Choice(choice.kind) for choice in chosen)
        if key not in self._least:
            self._least[key] = Issue(self._body(key), self.problem.programs, Listener())
        return self._least[key]

    def least_fits(self, chosen: Chosen) -> bool:
        """Return whether choices can keep the limits of the device and the host."""
        return not self._excess(self.least(chosen), self.problem.limit_bytes)

    def _excess(self, least: Issue, limit: int) -> int:
        host = self.problem.host_bytes
        excess = sum(need - limit for need in least.needs if need > limit)
        return excess + max(0, least.host_peak_bytes - host if host is not None else 0)

    def weigh(self, chosen: Chosen, limit_bytes: int | None = None) -> Weighed:
        """Return the need and seconds of choices within the problem's limit, or another one."""
        limit = self.problem.limit_bytes if limit_bytes is None else limit_bytes
        key = chosen, limit
        if key not in self.known:
            self.known[key] = self._weighed(chosen, limit)
        return self.known[key]

    def _weighed(self, chosen: Chosen, limit: int) -> Weighed:
        least = self.least(chosen)
        excess = self._excess(least, limit)
        if excess:
            return Weighed(excess, inf, least.peak_bytes)
        issued, clock = self._issued(chosen, limit)
        return Weighed(0, clock.seconds, issued.peak_bytes)

    def _issued(self, chosen: Chosen, limit: int) -> tuple[Issue, Clock]:
        order = self._body(chosen)
        clock = Clock(order.arrays, self._to_device, self._to_host, self.problem.host.duplex)
        needs = self.least(chosen).needs
        return Issue(order, self.problem.programs, clock, limit, needs), clock

    def evaluate(self, chosen: Chosen, limit: int) -> WrittenWay:
        """Write the step of choices, replay it and simulate it."""
        problem, decided = self.problem, self.decisions(chosen, limit)
        arrays = tuple(
            lifetimes(self._array(kind), own) for kind, own in zip(self.kinds, decided, strict=True)
        )
        steps = build_array(arrays, self.way.order, problem.programs, limit)
        seconds = array_seconds(steps.body, problem.host)
        timeline = simulate_step(steps.body, seconds, feeds_ahead=0)
        return WrittenWay(arrays, decided, steps, steps.replay(), timeline, limit)
