"""One loop of search and compiler: compile what decides, until the answer is near enough to what
nothing can be below.

Plans are searched in parts, each of one number of micro-batches and one schedule. Every stage has a
lower bound from tracing, or what the compiler said of it, so that exact programmes prove what no
plan of a part is below. A part is opened once its floor, known before, is the least bound of all:
one whose floor is above what matters never is. A policy (``lowest_peak``, ``speed``) says what
bounds a part, which plan or stages to compile next, and when that is enough. What is compiled is
known to all parts.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from capture import interrupts
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan
from capture.plan.why import Bracket, ByLayers, Proven
from capture.processor_time import processor_seconds
from recommender.answer import StageAnswer
from recommender.capture.compiled import of_compiler, same_model
from recommender.capture.effort import Effort, StageCompiler
from recommender.capture.nearness import Corner, far
from recommender.capture.parts import Found, OpenPart, Part, num_missed, since
from recommender.capture.refuted import Refuted, refuted
from recommender.capture.table_space import StageRows
from recommender.question import PlanQuestion

#: A plan of which layers alone were compiled counts as this part of one.
_OF_LAYERS = 1 / 3


class Probe(NamedTuple):
    """A part and what to compile of its plans.

    Attributes:
        configs: The stages.
        windows: Choices of which all kinds of layers are compiled alone, in their place.
    """

    part: OpenPart
    configs: Sequence[StageConfig]
    windows: Collection[StageChoice] = ()


class Look(NamedTuple):
    """A summary of what a search knows before it compiles something.

    Attributes:
        found: The plan to tell of as long as none is compiled.
        bracket: None where no plan of the open parts is there, or nothing bounds it.
        reasons: To end (``Proven.ended``), and whether each holds.
    """

    found: Found
    bracket: Bracket | None
    reasons: Mapping[str, bool]


class Policy(ABC):
    """The goal of a search on bounds: what counts of a plan, what to compile next, and when to end.

    Attributes:
        objective: Of the question; None leaves it as it is.
        nothing_left: Why a search ends that has nothing left to compile (``Proven.ended``).
    """

    objective: str | None = None
    nothing_left = "search"

    @abstractmethod
    def corner(self, nbytes: int, seconds: float) -> Corner:
        """Return the bytes and seconds of a plan that count; what does not matter is 0."""

    @abstractmethod
    def corners(self, search: Search, part: OpenPart) -> Sequence[Corner]:
        """Return lower bounds of a part, beside its floor: every plan of it that matters is at
        least as large and as slow as one of them."""

    def beforehand(self, search: Search) -> Bracket | None:
        """Return the bracket that is known before any part is open; None if nothing is."""
        return None

    @abstractmethod
    def look(self, search: Search) -> Look: ...

    @abstractmethod
    def next(self, search: Search, look: Look) -> Found | Probe | None:
        """Return the plan or the stages to compile next; None where nothing is left."""

    @abstractmethod
    def answer(self, search: Search, look: Look, ended: str) -> StageAnswer: ...

    def early(self, search: Search, look: Look) -> Found | None:
        """Return the plan to begin with while other parts are opened; None if nothing."""
        return None

    def beside(self, search: Search) -> Found | Sequence[StageConfig] | None:
        """Return the plan or the stages to compile beside the next plan, which does not wait for
        them; None if nothing."""
        return None

    def first(self, search: Search, found: Found) -> Probe | None:
        """Return what to compile of a plan before it is looked at again, as it may show that the
        rest is not worth it; None for nothing."""
        return None

    def gives_up(self, search: Search, best: Found | None, most: int) -> bool:
        """Return whether so many plans were compiled in vain that no more are: since the best one,
        or of which none is good. Never where the best of all is asked for."""
        if not search.effort.within_fraction or search.num_missed(best) < most:
            return False
        self.nothing_left = "missed"
        return True

    def by_layers(self, search: Search) -> ByLayers | None:
        """Return a second proof, from layers compiled one by one, once nothing is left to compile
        for the answer; None if there is none."""
        return None

    def least_seconds(self, search: Search, part: Part) -> float:
        """Return a lower bound of the seconds of every plan of a part that is not open."""
        return part.least_seconds

    def is_promising(self, search: Search, part: Part) -> bool:
        """Return whether a part that is not open may have a better plan, by what is expected of it;
        its floor bounds it if not."""
        return True

    def is_bounded(self, part: Part) -> bool:
        """Return whether an answer is proven of the plans of a part, too; if not, the policy alone
        opens the part."""
        return True

    def refuted_by(
        self, part: OpenPart, compiled: Mapping[StageConfig, StageCost]
    ) -> Iterable[Refuted]:
        """Return the lower bounds of a part that compiled stages are below."""
        return refuted(part.bounds, compiled)


def refine(
    policy: Policy,
    parts: Sequence[Part],
    compiler: StageCompiler,
    effort: Effort = Effort(),
    told: Callable[[Bracket], None] = lambda bracket: None,
) -> StageAnswer:
    """Find the best plan of some parts, in what the compiler says.

    Args:
        policy: ``LowestPeak()``, ``Timed()`` or ``Timed(front=True)``.
        parts: At least one, of one model, cluster and limit.
        compiler: An interrupt meanwhile ends the search with what is known.
        effort: When to end.
        told: Every bracket, as it is known.

    Returns:
        The best plan that was compiled, and in ``why.proven`` how near it is to the best of all.
        Where nothing was compiled, the plan that bounds and estimates name; ``why.uncompiled`` says
        so. That nothing fits is proven by bounds alone where they are above the limit.

    Raises:
        KeyboardInterrupt: While nothing is known yet.
        ProfileError: ``verify-stage`` if every plan has a stage that does not compile.
    """
    return Search(policy, parts, compiler, effort, told).run()


class Search:
    """The state of a search on bounds, and its rounds: see ``refine``.

    Attributes:
        parts: That are open, by their number.
        compiled: Plans of compiled stages, in their order.
        by_layers: What compiled layers say of the answer.
    """

    by_layers: ByLayers | None = None

    def __init__(
        self,
        policy: Policy,
        parts: Sequence[Part],
        compiler: StageCompiler,
        effort: Effort,
        told: Callable[[Bracket], None],
    ):
        self._policy, self._all, self._compiler, self._told = policy, parts, compiler, told
        self.effort, self.parts, self.num_compiled = effort, dict[int, OpenPart](), 0
        self.compiled, self._trail = list[Found](), list[Bracket]()
        self._asked, self._refuted = dict[Plan, Found](), list[Refuted]()
        self._early: Found | None = None  # compiled while parts are opened
        #: Plans of which a part was compiled first: after how many plans, and how much of one.
        self._begun = dict[Plan, tuple[int, float]]()
        #: Of a micro-batch size, layers that were compiled alone, and the choices asked for.
        self._alone = defaultdict[
            int, tuple[Mapping[StageConfig, StageCost], Collection[StageChoice]]
        ](lambda: ({}, ()))
        self._rows = defaultdict[tuple[int, bool], dict[Hashable, StageRows]](dict)
        self._profiles = dict[int, Profile]()  # of a micro-batch size, with what is compiled
        self._start, self._spent = time.perf_counter(), processor_seconds()

    def run(self) -> StageAnswer:
        """Make rounds until the search ends, and return its answer."""
        if (known := self._policy.beforehand(self)) is not None:
            self._told(known)
        self.open(self.to_open() or 0)
        self._look, ended = self._policy.look(self), ""
        while not ended:
            try:
                ended = self._round()
            except KeyboardInterrupt:
                interrupts.forget()
                if self._look.bracket is None and not self.compiled:
                    raise
                ended = "interrupted"
        if ended == self._policy.nothing_left:
            self.by_layers = self._policy.by_layers(self)
            self._see()
        return self._policy.answer(self, self._look, ended)

    def _round(self) -> str:
        """Look, and open or compile what decides; return why this was the last round, or ""."""
        interrupts.raise_noted()
        look = self._see()
        to_open = self.to_open()
        reasons = {**look.reasons, **self._is_spent(to_open is not None)}
        if ended := next((reason for reason, holds in reasons.items() if holds), ""):
            return ended
        if to_open is not None:
            if not self._take_early(look):
                self.open(to_open)
            return ""
        chosen = self._policy.next(self, look)
        if isinstance(chosen, Probe):
            self._probe(chosen)
        elif chosen is not None and (first := self._policy.first(self, chosen)):
            share = _OF_LAYERS if first.windows else 1.0
            self._begun[self._key(chosen)] = len(self.compiled), share
            self._probe(first)
        elif chosen is not None:
            self._compile(chosen)
        return "" if chosen else self._policy.nothing_left

    def _probe(self, probe: Probe) -> None:
        part, size = probe.part, probe.part.size
        if not probe.windows:
            count, known = self._compiler.probe(probe.configs, part.known)
            self.num_compiled += count
            self._learn(size, known)
            return
        alone, choices = self._alone[size]
        alone = {**alone, **self.layers(part, part.windows(probe.windows))}
        self._alone[size] = alone, {*choices, *probe.windows}
        for each in self.parts.values():
            if each.size == size:
                each.rehearse(*self._alone[size][::-1])

    def _see(self) -> Look:
        """Look at what is known now, and tell the bracket once all unopened parts have floors."""
        self._look = look = self._policy.look(self)
        # Of parts without a floor, nothing is known before they are open.
        if look.bracket is not None and all(map(any, self.floors.values())):
            self._trail.append(look.bracket)
            self._told(look.bracket)
        return look

    def _is_spent(self, opens: bool) -> Mapping[str, bool]:
        compiles, seconds = self.effort.compiles, self.effort.seconds
        spent = processor_seconds() - self._spent
        return {
            "compiles": compiles is not None and self.num_compiled >= compiles and not opens,
            "seconds": seconds is not None and spent >= seconds and bool(self._trail),
        }

    @property
    def is_spent(self) -> bool:
        """Whether so much was computed or compiled as the effort allows."""
        return any(self._is_spent(opens=False).values())

    def _compile(self, found: Found) -> None:
        self.begin(found)  # what is beside it is looked for meanwhile
        if self._may_begin:
            self.begin(self._policy.beside(self))
        self._attempt(found)

    def _attempt(self, found: Found) -> None:
        part, plan = found.part, found.answer.plan
        assert plan is not None, "a plan was found"
        said, known = self._compiler.attempt(plan, part.known)
        self._learn(part.size, known)
        if said is not None:
            self.num_compiled += said.num_stages_compiled
            found = Found(part, of_compiler(found.answer, said, part.known, part.question))
            self.compiled.append(found)
        self._asked[self._key(found)] = found

    @property
    def _may_begin(self) -> bool:
        """Whether stages may be compiled ahead, with nothing waiting for them."""
        return self.effort.compiles is None and self.effort.at_once > 1

    def _take_early(self, look: Look) -> bool:
        """Begin to compile the first plan that is estimated: other parts are opened meanwhile.
        Return whether it is compiled now."""
        if self._early is None and self._may_begin:
            self._early = self._policy.early(self, look)
            self.begin(self._early)
        early = self._early
        if early is None or self.is_asked(early) or not self._compiler.begin(()):
            return False
        self._attempt(early)
        return True

    def _go_on(self) -> None:
        """Give idle workers what waits for them, while this process works something out."""
        if self._may_begin:
            self._compiler.begin(())

    def begin(self, found: Found | Sequence[StageConfig] | None) -> None:
        """Give idle workers these stages, or those of a plan that was not compiled."""
        if isinstance(found, Found):
            found = () if self.is_asked(found) else found.configs
        if found and self._may_begin:
            self._compiler.begin(found)

    def layers(
        self, part: OpenPart, configs: Sequence[StageConfig]
    ) -> Mapping[StageConfig, StageCost]:
        """Compile layers alone and return what the compiler says. The search learns it only where
        that refutes a bound: no plan has such stages."""
        _, known = self._compiler.probe(configs, part.known)
        found = {each: known.verified[each] for each in configs if each in known.verified}
        if any(self._policy.refuted_by(part, found)):
            self._learn(part.size, known)
        return found

    def open(self, number: int) -> None:
        """Bound the stages of a part."""
        unopened = self._all[number]
        question = unopened.question
        if self._policy.objective is not None:
            question = replace(question, algorithm=None, objective=self._policy.objective)
        known = unopened.least_seconds, unopened.expected_seconds
        part = OpenPart(question, unopened.open(), *known, self._go_on)
        self.parts[number] = part
        part.trust_no({each.part for each in self._refuted})
        if part.size in self._profiles:
            self._learn(part.size, self._profiles[part.size])
        part.rehearse(*self._alone[part.size][::-1])
        # Once it knows what the others do: to learn drops the rows of all.
        part.rows = self._rows[part.size, SCHEDULES[question.schedule].splits_backward]

    def _learn(self, size: int, profile: Profile) -> None:
        """Learn what was compiled. A kind of bound that it refutes is used no longer, and nothing
        is said to be proven that rests on it."""
        self._profiles[size] = profile
        found = [
            each
            for part in self.parts.values()
            if part.size == size
            for each in self._policy.refuted_by(part, part.learn(profile))
        ]
        if found:
            self._refuted += found
            self._trail.clear()
            for part in self.parts.values():
                part.trust_no({each.part for each in found})

    @property
    def seconds(self) -> float:
        """The wall time since the search began."""
        return time.perf_counter() - self._start

    @property
    def questions(self) -> list[PlanQuestion]:
        """The questions of all parts, open or not."""
        return [part.question for part in self._all]

    @property
    def plain_parts(self) -> list[OpenPart]:
        """The open parts of plain schedules, whose plans are searched stage by stage."""
        return [part for part in self.parts.values() if part.is_plain]

    def sibling(self, part: Part | OpenPart) -> OpenPart | None:
        """Return the open part of a plain schedule with as many micro-batches, without offload;
        None if it is not open."""
        size, parts = part.question.microbatch_size, self.plain_parts
        return next((e for e in parts if e.size == size and not e.has_offload), None)

    @property
    def unopened(self) -> Mapping[int, Part]:
        """The parts that are not open, by their number."""
        return {n: part for n, part in enumerate(self._all) if n not in self.parts}

    @property
    def floors(self) -> Mapping[int, Corner]:
        """The lower bound of (bytes, seconds) of each bounded part that is not open, by number;
        infinite seconds where no plan may fit."""
        return {
            number: self.floor(number) if part.may_fit or self._refuted else (0.0, math.inf)
            for number, part in self.unopened.items()
            if self._policy.is_bounded(part)
        }

    def floor(self, number: int) -> Corner:
        """Return the (bytes, seconds) that were known of a part before it was open as a lower
        bound; 0 and 0 once a bound was refuted."""
        part = self._all[number]
        if self._refuted:
            return 0.0, 0.0
        return self._policy.corner(part.least_bytes, self._policy.least_seconds(self, part))

    @property
    def open_corners(self) -> list[Corner]:
        """The lower bounds of all open parts (``corners_of``)."""
        return [each for number in self.parts for each in self.corners_of(number)]

    def corners_of(self, number: int) -> Sequence[Corner]:
        """Return lower bounds of an open part: every plan of it that fits is at least as large and
        as slow as one of them. None is below the part's floor, though bounds of stages may be."""
        nbytes, seconds = self.floor(number)
        found = self._policy.corners(self, self.parts[number])
        return [(max(each[0], nbytes), max(each[1], seconds)) for each in found]

    @property
    def corners(self) -> list[Corner]:
        """The lower bounds of all parts: every plan that fits is at least as large and as slow as
        one of them."""
        floors = [floor for floor in self.floors.values() if floor[1] < math.inf]
        return [*floors, *self.open_corners]

    @property
    def fitting(self) -> list[Found]:
        """The compiled plans that fit."""
        return [found for found in self.compiled if found.answer.status == "ok"]

    @property
    def values(self) -> list[Corner]:
        """The bytes and seconds that count of each compiled plan that fits."""
        return [
            self._policy.corner(each.answer.peak_bytes, each.answer.proof.step_seconds or 0.0)
            for each in self.fitting
        ]

    def to_open(self) -> int | None:
        """Return the part to open next: the one expected to be fastest, or of least floor, that may
        hold a plan farther than asked from compiled ones, and below what is known of open parts.
        Other schedules have all the same floor, and parts with offload, the last to be opened, that
        of endless memory, which says nothing. None if no part is left."""
        known, values = self.open_corners, self.values
        left = [
            (self._all[number].rank, floor[::-1], number)
            for number, floor in self.floors.items()
            if floor[1] < math.inf
            and far(floor, values) > self.effort.within_fraction
            and not (
                self._all[number].has_own_floor
                and any(p <= floor[0] and s <= floor[1] for p, s in known)
            )
            and self._policy.is_promising(self, self._all[number])
        ]
        return min(left)[-1] if left else None

    def num_missed(self, best: Found | None) -> float:
        """Count the plans since the best one for which a stage was compiled, and as a part of one
        those of which layers alone, or some stages, showed that the rest is not worth it; all,
        before one is the best. The last of the second kind may still be worth it."""
        before = len(self.compiled) - max(len(since(self.compiled, best)) - 1, 0)
        begun = [(plan, *known) for plan, known in self._begun.items()][:-1]
        given_up = [of for of in begun if of[0] not in self._asked]
        shares = (share for _, at, share in given_up if best is None or at >= before)
        return num_missed(self.compiled, best) + sum(shares)

    def is_asked(self, found: Found) -> bool:
        """Return whether the compiler was asked for a plan; True without a plan."""
        return found.answer.plan is None or self._key(found) in self._asked

    def known(self, found: Found) -> Found:
        """Return a plan as it was compiled; as it was found if it was not."""
        return found if found.answer.plan is None else self._asked.get(self._key(found), found)

    def _key(self, found: Found) -> Plan:
        assert found.answer.plan is not None, "a plan was found"
        return same_model(found.answer.plan, found.part.known)

    def proven(self, within: float | None, ended: str) -> Proven:
        said = dict.fromkeys(map(str, self._refuted))
        return Proven(within, tuple(self._trail), ended, tuple(said), self.by_layers)
