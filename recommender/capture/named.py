"""The policy of ``refine`` for the default answer: the fastest plan that fits, and of the front of
memory against time two plans more, the one of lowest memory and the knee between them.

All three are compiled; only of the fastest it is proven how near it is to the best. The front they
are chosen from is estimated: the fastest plan within each of a few limits of memory. So that no
worker waits, the plan that is named next is compiled beside the one that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf, log

import numpy as np

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.plan.why import Front
from recommender.answer import StageAnswer
from recommender.capture import grouped
from recommender.capture.estimates import Ratios, estimates, proposed, ratios, slowness
from recommender.capture.lowest_peak import (
    expected,
    least_in_groups,
    likely,
    open_others,
)
from recommender.capture.minmax import least_peak
from recommender.capture.parts import (
    Found,
    OpenPart,
    Part,
    compiled_in,
    since,
)
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.refine import Look, Probe, Search
from recommender.capture.speed import (
    NEARLY,
    Timed,
    may_fit,
    seconds_of,
)
from recommender.capture.throughput import throughput

FASTEST, KNEE, LOWEST = "fastest", "knee", "lowest memory"
#: Limits of memory between the lowest peak and the fastest plan's, both included.
_NUM_LIMITS = 7
#: A stage of so few layers compiles in seconds, so that estimates need not be trusted as far: plans
#: that may be slower by this part, as they are often wrong by more, are compiled as well, so many.
FEW_LAYERS, DOUBT, MOST_DOUBTED = 12, 0.1, 6
#: Of such a model, as many times more plans may turn out slower than was expected.
SMALL_TRIES = 3
#: Plans that were expected to be faster and are not, one after the other: where estimates are too
#: low, there are many of them. After so many the other names come first, and after so many, these
#: included, no more are compiled (``missed``).
PATIENCE, MOST_MISSED = 2, 6
#: Rounds of layers that are compiled alone, begun before they are asked for.
_ROUNDS_AHEAD = 3
#: A plan may be slower by this part than another one if all of its stages use their devices alike:
#: of eight stages that differ, eight programs are compiled, else often three.
ALIKE = 0.1


class Named(Timed):
    """The policy for the fastest plan that fits, then lowest memory and the knee
    (``why.front``)."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, Found | None] = {}
        self._asked: set[str] = set()
        self._knows_fastest, self._num_doubted = False, 0
        #: The last plan of which layers alone were compiled.
        self._rehearsed: Found | None = None

    def look(self, search: Search) -> Look:
        look = super().look(search)
        if len(self._asked) < 2 and search.fitting and look.bracket is not None:
            return look._replace(reasons={})  # two are still to be named
        return look

    def is_promising(self, search: Search, part: Part) -> bool:
        """Return whether a part may have a faster plan, until the fastest is known; then False:
        what is compiled for the other names opens no part."""
        return not self._knows_fastest and super().is_promising(search, part)

    def next(self, search: Search, look: Look) -> Found | None:
        """Return a plan that may be faster, then the plans of lowest memory and of the knee; these
        come first once enough candidates for the fastest have failed."""
        ways = [self._next_faster, self._next_name]
        if search.num_missed(self._fastest(search)) >= PATIENCE:
            ways.reverse()
        return next((found for way in ways if (found := way(search, look)) is not None), None)

    def _fastest(self, search: Search) -> Found | None:
        return min(search.fitting, key=seconds_of, default=None)

    def _has_missed(self, search: Search) -> bool:
        """Return whether so many plans were not as expected that no more are compiled."""
        most = MOST_MISSED * (SMALL_TRIES if _is_small(search) else 1)
        return self.gives_up(search, self._fastest(search), most)

    def _next_faster(self, search: Search, look: Look) -> Found | None:
        has_missed = self._has_missed(search)
        if (known := self._of_compiled_stages(search)) is not None:
            return known
        found = self._sure(search) if search.compiled and not search.fitting else None
        found = found or self._after_layers(search)
        found = found or (None if has_missed else self._faster(search, look))
        self._knows_fastest |= found is None and bool(has_missed or search.fitting)
        return found

    def _next_name(self, search: Search, look: Look) -> Found | None:
        if not search.fitting:  # the smallest by what is known now may fit
            self._names.clear()
            return None if self._has_missed(search) else self._unasked(search, LOWEST)
        for name in LOWEST, KNEE:
            if name not in self._asked:
                self._asked.add(name)
                if (found := self._unasked(search, name)) is not None:
                    return found
        return None

    def _unasked(self, search: Search, name: str) -> Found | None:
        found = self._named(search, name)
        return None if found is None or search.is_asked(found) else found

    def beside(self, search: Search) -> Found | Sequence[StageConfig] | None:
        """Return what to compile beside the next plan: that of lowest memory beside one that may be
        fastest, then the knee, and beside the knee the layers that are compiled alone after it.
        Beside one that may not fit it is the fastest that fits whatever it needs."""
        if KNEE in self._asked:
            knee = self._names[KNEE]
            rounds = self.layer_proof(search).ahead(knee.configs if knee else ())
            return [layer for layers in islice(rounds, _ROUNDS_AHEAD) for layer in layers]
        is_risky = not search.fitting and not may_fit(self._points(search)[-1])
        sure = self._sure(search) if is_risky else None
        name = KNEE if LOWEST in self._asked and search.fitting else LOWEST
        return sure or self._named(search, name)

    def first(self, search: Search, found: Found) -> Probe | None:
        """Return what shows soonest that a plan is not faster than the best one: of long stages,
        their layers alone; of many, the slowest of each use of devices. None where that is most of
        it, and of a plan that is compiled whatever it takes."""
        part, known, effort = found.part, found.part.known.verified, search.effort
        asks_all = not effort.within_fraction or effort.compiles is not None
        if asks_all or not search.fitting or any(found is each for each in self._names.values()):
            return None
        if _is_small(search):  # its stages compile as soon, and say more
            return None
        seconds, of = part.expected.microbatch_seconds, dict[StageChoice, StageConfig]()
        slowest = sorted((each for each in found.configs if each not in known), key=seconds)[::-1]
        # Those that are expected to take as long are mostly the same program.
        unlike = {(each.choice, f"{seconds(each):.6g}"): each for each in slowest}
        choices = {one for each in slowest for one in each.choice.measured} - {*part.rehearsed}
        num_layers = sum(each.num_layers for each in part.windows(choices))
        if part.is_plain and 0 < num_layers < sum(each.num_layers for each in unlike.values()):
            self._rehearsed = found
            return Probe(part, (), choices)
        if len(unlike) <= effort.at_once:
            return None
        for each in slowest:
            of.setdefault(each.choice, each)
        return Probe(part, [*of.values()][: effort.at_once])

    def _after_layers(self, search: Search) -> Found | None:
        """Return the plan of which layers alone were compiled last, whose stages all use devices
        alike, if it still is faster than the best one by what they say: others of which less is
        known may only seem faster. None if not."""
        found, self._rehearsed = self._rehearsed, None
        choices = {config.choice for config in found.configs} if found is not None else ()
        if found is None or len(choices) != 1 or not search.fitting:
            return None
        part, (choice,) = found.part, choices
        problem = part.once(estimates, self.ratios(search, part))
        result = throughput(_only(problem, choice, problem.limit_bytes))
        enough = (1 - self._worth(search)) * min(map(seconds_of, search.fitting))
        if result.status != "ok" or (result.step_seconds or inf) >= enough:
            return None
        again = Found(part, expected(part, result))
        return None if search.is_asked(again) else again

    def _worth(self, search: Search) -> float:
        """Return the part by which a plan has to be estimated to be faster to be compiled: once the
        fastest seemed to be known, what is asked for."""
        asked = search.effort.within_fraction
        return asked if self._knows_fastest else min(NEARLY, asked)

    def _sure(self, search: Search) -> Found | None:
        """Return the plan that is estimated to be fastest of those that fit however much they need;
        None without one."""
        plans = (
            found
            for part in search.plain_parts
            for found in part.once(proposed, self.ratios(search, part), True)
            if may_fit(found) and not search.is_asked(found)
        )
        return min(plans, key=seconds_of, default=None)

    def _faster(self, search: Search, look: Look) -> Found | None:
        """Return the plan that is estimated to be fastest, where that is worth a compile; once the
        fastest seemed to be known, if it is faster by what is asked for. Where the best of all is
        asked for, return whatever may be it."""
        within, found = self.within(search), super().next(search, look)
        asked = search.effort.within_fraction
        best = (1 - self._worth(search)) * min(map(seconds_of, search.fitting), default=inf)
        if within is not None and within <= asked:
            return None
        if found is not None and seconds_of(found) < best:
            return self._of_another_shape(search, best) or found
        return (None if self._knows_fastest else self._doubted(search)) or self._candidate

    def _of_another_shape(self, search: Search, enough: float) -> Found | None:
        """Return the plan that is estimated to be fastest of those with other numbers of stages or
        micro-batches than all that were compiled lately, once some of these were not as fast as was
        expected: estimates of plans that are alike are wrong alike. None if none is fast enough."""
        if search.num_missed(self._fastest(search)) < PATIENCE:
            return None
        shapes = set(map(_shape, since(search.compiled, self._fastest(search))))
        plans = (
            found
            for part in search.parts.values()
            for found in part.once(proposed, self.ratios(search, part), False)
            if seconds_of(found) < enough and not search.is_asked(found)
        )
        return min((e for e in plans if _shape(e) not in shapes), key=seconds_of, default=None)

    def ratios(self, search: Search, part: OpenPart) -> Ratios:
        """Return what stages of a part are taken to need of the seconds that are expected; of a
        small model, as its own say: those of smaller micro-batches need another part."""
        if not _is_small(search):
            return super().ratios(search, part)
        return ratios(part, {part.size: part.once(slowness)})

    def nearly(self, search: Search) -> float:
        return -DOUBT if _is_small(search) and search.fitting else super().nearly(search)

    def _doubted(self, search: Search) -> Found | None:
        """Return a plan that is estimated to be hardly slower than the best one, of a small model;
        of others, one that may be faster and whose stages all use their devices alike."""
        if not search.fitting or self._num_doubted == MOST_DOUBTED:
            return None
        enough = (1 - self.nearly(search)) * min(map(seconds_of, search.fitting))
        plans = [
            found
            for part in search.plain_parts
            for parts in [self.ratios(search, part)]
            for found in (*part.once(proposed, parts, False), *part.once(_uniform, parts))
            if seconds_of(found) <= enough and not search.is_asked(found)
        ]
        self._num_doubted += bool(plans)
        return min(plans, key=seconds_of, default=None)

    def _of_compiled_stages(self, search: Search) -> Found | None:
        """Return a plan that may be faster than all compiled ones and whose stages are compiled,
        each for one of them: nothing is left to compile of it, and estimates do not decide. None
        without one."""
        # The closed form that proposes plans is not the simulation that ranks them.
        enough = (1 + DOUBT) * min(map(seconds_of, search.fitting), default=0.0)
        plans = (
            found
            for part in search.plain_parts
            if part.known.verified
            for found in part.once(_fastest_compiled, self.ratios(search, part))
        )
        new = [each for each in plans if seconds_of(each) <= enough and not search.is_asked(each)]
        return min(new, key=seconds_of, default=None)

    def _named(self, search: Search, name: str) -> Found | None:
        """Return the plan of a name, lowest or knee, as estimated when first asked for."""
        if not self._names:
            _open_smallest(search)
        if name not in self._names:
            found = self._estimated(search, name)
            if name == LOWEST and found is not None and open_others(search, found):
                found = self._estimated(search, name)
            self._names[name] = found
        return self._names[name]

    def _estimated(self, search: Search, name: str) -> Found | None:
        """Return the plan that estimates give a name; None if they have none that fits."""
        fastest, smallest = self._fastest(search), self._names.get(LOWEST)
        estimated = {part: self.ratios(search, part) for part in search.parts.values()}
        if name == KNEE and smallest is not None:
            assert fastest is not None, "it is the other end of the front"
            lowest = smallest.answer.proof.peak_bytes
            limits = _limits(lowest, max(fastest.answer.peak_bytes, lowest))
            # Of other schedules, parts are left out here that had no plan to be the fastest.
            estimated = {p: of for p, of in estimated.items() if p.is_plain or p in self.rivals}
        else:
            needs = {part: part.once(_least_expected) for part in estimated}
            limits = (min(needs.values()),)
            estimated = {part: estimated[part] for part in needs if needs[part] <= limits[0]}
        found = [self._fastest_within(search, limit, estimated) for limit in limits]
        points = [each for each in found if each is not None]
        if not points:
            return fastest
        is_lowest = name == LOWEST
        plan = points[0] if is_lowest or fastest is None else _knee([*points, fastest])
        return plan if plan is fastest else _alike(plan, self.ratios(search, plan.part))

    def _fastest_within(
        self, search: Search, limit: int, estimated: Mapping[OpenPart, Ratios]
    ) -> Found | None:
        """Return the plan that is estimated to be fastest within a limit of memory. Only parts are
        searched of which a plan may fit, and may be faster than the best one."""

        def least(part: OpenPart) -> float:
            if not part.is_plain:
                return self.hoped(search, part)
            plans = part.once(proposed, estimated[part], False)
            return min(map(seconds_of, plans), default=inf)

        floors = {
            part: least(part)
            for part in estimated
            if not part.is_plain or part.once(_least_expected) <= limit
        }
        best, enough = list[Found](), inf
        for part in sorted(floors, key=lambda each: (not each.is_plain, floors[each])):
            if floors[part] < enough:
                found = part.once(_within, limit, estimated[part], enough)
                best = sorted([*best, *found], key=seconds_of)
                enough = min(map(seconds_of, best), default=inf)
        return best[0] if best else None

    def answer(self, search: Search, look: Look, ended: str) -> StageAnswer:
        found = super().answer(search, look, ended)
        if found.plan is None or not search.fitting:
            return found
        plan = found.plan
        points = [
            each
            if each.schedule
            else replace(each, schedule=plan.schedule, num_microbatches=plan.num_microbatches)
            for each in self.front(search).points
        ]
        names = {
            other.decisions: name
            for name in (KNEE, LOWEST)  # the last stays where two are one
            if name in self._asked
            and (named := self._names[name]) is not None
            and (other := named.answer.plan) is not None
        }
        points = [
            replace(each, name=names.get((each.stages, each.num_microbatches, each.schedule), ""))
            for each in points
        ]
        points[-1] = replace(points[-1], name=FASTEST)
        why = replace(found.why, front=Front(tuple(points), False, False, search.seconds))
        return replace(found, why=why, plan=found.plan.with_(why=why))


def _uniform(part: OpenPart, known: Ratios) -> Sequence[Found]:
    """Return, for each way to use devices, a part's plan that is estimated to be fastest of those
    whose stages all use theirs so; none of those that are not expected to fit."""
    if not part.known.verified:
        return ()
    problem = part.once(estimates, known)
    results = (
        throughput(_chosen(problem, {d: [n]}))
        for d, choices in problem.choices.items()
        for n in range(len(choices))
    )
    return [Found(part, expected(part, each)) for each in results if each.status == "ok"]


def _is_small(search: Search) -> bool:
    return next(iter(search.parts.values())).known.graph.num_layers <= FEW_LAYERS


def _shape(found: Found) -> tuple[int, int]:
    """Return the numbers of micro-batches and of stages of a plan."""
    return found.part.question.num_microbatches, len(found.configs)


def _fastest_compiled(part: OpenPart, known: Ratios) -> Sequence[Found]:
    """Return a part's fastest plan that fits, of compiled stages alone; () if they make none."""
    problem = part.once(estimates, known)
    stages = list(compiled_in(problem, part))
    of = {d: sorted({choice for n, choice, _ in stages if n == d}) for d, _, _ in stages}
    few = _chosen(problem, of)
    cost = {d: np.full_like(table, NEVER) for d, table in few.cost.items()}
    for d, choice, kind in stages:
        at = of[d].index(choice), slice(None), kind
        cost[d][at] = few.cost[d][at]
    result = throughput(replace(few, cost=cost))
    return [Found(part, expected(part, result))] if result.status == "ok" else []


def _open_smallest(search: Search) -> None:
    """Open two parts whose plans are expected to need least: that with the smallest micro-batches,
    and that with the smallest that give every device an example."""
    num_devices = search.questions[0].cluster.num_devices
    parts = search.unopened.items()
    unopened = {n: part for n, part in parts if part.is_plain and not part.has_offload}
    sizes = {part.question.microbatch_size: n for n, part in unopened.items()}
    shared = [size for size in sizes if size >= num_devices]
    for size in {min(group) for group in (sizes, shared) if group}:
        search.open(sizes[size])


def _limits(least: int, most: int) -> tuple[int, ...]:
    return tuple(int(limit) for limit in np.geomspace(least, most, _NUM_LIMITS)[1:-1])


def _least_expected(part: OpenPart) -> int:
    """Return the least peak bytes expected of a part's plans; of a schedule not plain, at most."""
    if not part.is_plain:
        found = part.once(least_in_groups)
        return found.result.peak_bytes if found else 1 << 62
    return least_peak(likely(part))


def _within(part: OpenPart, limit: int, known: Ratios, enough: float = inf) -> Sequence[Found]:
    """Return a part's plan that is estimated to be fastest within a memory limit; () if none is,
    or, of a schedule that is not plain, may be faster than ``enough`` seconds."""
    if not part.is_plain:
        plans = [*grouped.fastest(part, known[0], limit, enough)]
        if enough == inf and not any(each.answer.proof.peak_bytes <= limit for each in plans):
            plans = [*grouped.smallest(part, known[0])]
        return [each for each in plans if each.answer.proof.peak_bytes <= limit]
    problem = replace(part.once(estimates, known), memory_limit_bytes=limit)
    result = throughput(_fitting(problem, limit))
    return [Found(part, expected(part, result))] if result.status == "ok" else []


def _alike(found: Found, known: Ratios) -> Found:
    """Return a plan that is as small and whose stages all use their devices alike, where one is
    hardly slower; else the one that is given."""
    part, stages = found.part, found.answer.proof.stages
    choices = dict.fromkeys(stage.choice for stage in stages)
    if len(choices) == 1 or not part.is_plain:
        return found
    problem, peak = part.once(estimates, known), max(stage.peak_bytes for stage in stages)
    results = (throughput(_only(problem, choice, peak)) for choice in choices)
    plans = [Found(part, expected(part, each)) for each in results if each.status == "ok"]
    best = min(plans, key=seconds_of, default=found)
    return best if seconds_of(best) <= (1 + ALIKE) * seconds_of(found) else found


def _fitting(problem: SearchProblem, limit: int) -> SearchProblem:
    """Return the problem without choices with which no stage fits: most, where little fits."""
    fit = {
        d: [c for c in range(len(choices)) if (problem.cost[d][c] <= limit).any()]
        for d, choices in problem.choices.items()
    }
    return _chosen(problem, {d: of for d, of in fit.items() if of})


def _only(problem: SearchProblem, choice: StageChoice, limit: int) -> SearchProblem:
    """Return the problem within a limit, whose stages all have one choice."""
    d = choice.num_devices
    one = _chosen(problem, {d: [problem.choices[d].index(choice)]})
    return replace(one, memory_limit_bytes=limit)


def _chosen(problem: SearchProblem, of: Mapping[int, Sequence[int]]) -> SearchProblem:
    """Return the problem with some choices alone, given by their number per degree."""
    seconds, once, cost = problem.seconds, problem.update_seconds, problem.cost
    assert seconds is not None and once is not None, "it has times"
    return replace(
        problem,
        choices={d: tuple(problem.choices[d][c] for c in each) for d, each in of.items()},
        cost={d: cost[d][each] for d, each in of.items()},
        seconds={d: seconds[d][each] for d, each in of.items()},
        update_seconds={d: once[d][each] for d, each in of.items()},
    )


def _knee(points: Sequence[Found]) -> Found:
    """Return the plan of a front farthest below the line between its ends, with the logarithms of
    bytes and seconds as axes; the front is by ascending peak."""

    def place(found: Found) -> tuple[float, float]:
        answer = found.answer
        peak = answer.peak_bytes if answer.compiled else answer.proof.peak_bytes
        return log(max(peak, 1)), log(seconds_of(found))

    (x0, y0), (x1, y1) = place(points[0]), place(points[-1])

    def below(found: Found) -> float:
        x, y = place(found)
        return (y0 - y) * (x1 - x0) + (y1 - y0) * (x - x0)

    return max(points, key=below)
