"""The policy of ``refine`` for speed: the fastest plan that fits, and the front of memory against
time.

A lower bound of seconds says what cannot be, and not which of two plans is faster. So plans are
proposed by the closed form over estimates, which are what tracing expects times what compiled
stages with the same choice took beyond it, and what is sent; they are proven by the bound of
``least_step``;
and ranked by their simulated steps, which are the seconds that are shown.

Of the front, the plan of the estimated one is compiled that is farthest from all compiled ones, the
fastest first, until each is near enough to one of them. Source of the measure of nearness:
Papadimitriou and Yannakakis, On the approximability of trade-offs (FOCS 2000), section 2: of an
approximate front some plan is at most 1 + x times as large and as slow as any given plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.schedule import SCHEDULES
from capture.plan.why import (
    PROVES_NOTHING,
    Bracket,
    ByLayers,
    CompiledPlans,
    Front,
    FrontPoint,
    PlanNotes,
    Why,
    fastest_possible,
)
from capture.quantities import counted, format_bytes, format_seconds
from recommender.answer import StageAnswer
from recommender.capture import grouped, offload
from recommender.capture.by_layers import LayerProof
from recommender.capture.estimates import (
    Ratios,
    estimated_front,
    fastest_of_any_size,
    proposed,
    ratios,
    slowness,
)
from recommender.capture.lowest_peak import (
    answer,
    beyond,
    compiled,
    expected,
    finite,
    open_others,
    peak_of,
)
from recommender.capture.nearness import Corner, above, far
from recommender.capture.pareto import undominated
from recommender.capture.parts import (
    Found,
    OpenPart,
    Part,
    least_of_any_size,
    posed,
    posed_both,
)
from recommender.capture.possible import corners, next_possible
from recommender.capture.problem import NEVER
from recommender.capture.recommendation import predict_plan
from recommender.capture.refine import Look, Policy, Search
from recommender.capture.refuted import Refuted
from recommender.capture.throughput import throughput

#: What is expected of parts is not known better.
NEARLY = 0.01
#: So many plans are compiled of which none fits, though all were expected to, unless the best of
#: all is asked for.
MOST_UNFIT = 18
#: Of every bound of seconds that is said.
NO_TRANSFERS = "by a bound that leaves transfers out"


class Timed(Policy):
    """The policy that finds the fastest plan that fits; with ``front`` also the plans that are
    smaller, or faster than all smaller ones (``why.front``)."""

    def __init__(self, front: bool = False):
        self._has_front, self.objective = front, "pareto" if front else "throughput"
        #: Where the best of all is asked for, a plan that may be it.
        self._candidate: Found | None = None
        #: Of a front, whether other schedules were looked at.
        self._knows_others = False
        #: By kind of schedule, what the best plan of each part takes over what is expected before
        #: it is open, and whether it was looked for to the end; if not, it takes more.
        self._beyond = defaultdict[Hashable, dict[Part | OpenPart, tuple[float, bool]]](dict)
        #: Those of which a plan is estimated to be faster than all plain ones and other rivals
        #: before.
        self.rivals = set[OpenPart]()

    def corner(self, nbytes: int, seconds: float) -> Corner:
        return float(nbytes) * self._has_front, seconds

    def corners(self, search: Search, part: OpenPart) -> Sequence[Corner]:
        if not self.is_bounded(part):
            return []
        if not part.is_plain and search.sibling(part) is not None:
            return [(0.0, part.least_seconds)]  # its floor has what that part says of it
        return part.once(corners)

    def is_bounded(self, part: Part | OpenPart) -> bool:
        """Return whether answers are proven of a part: bounds of a front need plain schedules."""
        return part.is_plain or not self._has_front

    def refuted_by(
        self, part: OpenPart, compiled: Mapping[StageConfig, StageCost]
    ) -> Iterable[Refuted]:
        yield from super().refuted_by(part, compiled)
        for config, cost in compiled.items():
            if (times := part.bounded.model.stage_times(cost)) is not None:
                least = part.bounded.microbatch_seconds(config)
                if above(least, seconds := times.least_microbatch_seconds):
                    yield Refuted(config, "seconds", least, seconds)

    def least_seconds(self, search: Search, part: Part) -> float:
        """Return the floor of an unopened part; of a schedule not plain, no less than what an open
        plain part with as many micro-batches says of it. With offload, a step takes no less than
        without and with endless memory."""
        known = search.sibling(part)
        if known is None or (part.is_plain and not part.has_offload):
            return part.least_seconds
        if part.has_offload:
            return max(part.least_seconds, known.once(least_of_any_size)[0])
        return max(part.least_seconds, grouped.least_seconds(known, part.question))

    def nearly(self, search: Search) -> float:
        """Return by which part a plan has to be expected to be faster to be worth a look."""
        return NEARLY

    def is_promising(self, search: Search, part: Part) -> bool:
        if not part.is_plain and not search.fitting:
            return False
        is_sure = self._has_front or (part.is_plain and not search.effort.within_fraction)
        if is_sure or not part.expected_seconds or not search.open_corners:
            return True
        seconds = self.hoped(search, part)

        def is_faster(than: Iterable[Found]) -> bool:
            return seconds < (1 - self.nearly(search)) * min(map(seconds_of, than), default=inf)

        # Whether a plan needs offload, its compiled bytes say soon.
        fits = _is_estimated_to_fit if part.has_offload else may_fit
        return is_faster(search.fitting) and is_faster(filter(fits, self._points(search)))

    def hoped(self, search: Search, part: Part | OpenPart) -> float:
        """Return the seconds that the best plan of a part may take: as many as when it was last
        looked for, or those expected, and more the more parts with such a schedule, since the best
        of them, took more than that. With offload, as many as without and with endless memory,
        where more than there is makes it faster."""
        if part.has_offload and (like := search.sibling(part)) is not None:
            endless = like.once(fastest_of_any_size, self.ratios(search, like))
            if endless.peak_bytes <= (like.question.limit_bytes or inf):
                return inf
            return max(endless.step_seconds or 0.0, least_slowness(search) * part.expected_seconds)
        of_parts = self._beyond[_kind(part)]
        if (own := of_parts.get(part)) is not None:
            return least_slowness(search) * own[0] * part.expected_seconds
        known = [each for each in of_parts.values() if each[0] < inf]
        found = [each for each in known if each[1]]
        best = min(found) if found else max(known, default=(1.0, False))
        share = 1 - 0.5 ** (len(known) - known.index(best) if found else len(known))
        return least_slowness(search) * (1 + share * (best[0] - 1)) * part.expected_seconds

    def beforehand(self, search: Search) -> Bracket | None:
        least = min((seconds for _, seconds in search.floors.values()), default=inf)
        if self._has_front or not 0 < least < inf:
            return None
        return Bracket(search.seconds, 0, 0, 0, compiled=False, least_step_seconds=least)

    def look(self, search: Search) -> Look:
        if not search.open_corners:
            none = [Found(part, part.once(_nothing_fits)) for part in search.parts.values()]
            smallest = min(none, key=lambda found: found.answer.proof.peak_bytes or NEVER)
            return Look(smallest, None, {"memory": search.to_open() is None})
        if not search.effort.within_fraction:
            self._candidate = next_possible(search)
        corners, plans, within = [*self._bounds(search)], search.fitting, self.within(search)
        if self._has_front:  # a plan of a schedule that has no bounds may be below them
            corners += search.values
        fastest, told = min(plans, key=seconds_of, default=None), plans
        # Estimates are not asked for what is compiled already.
        best = self._points(search)[-1] if fastest is None else fastest
        if not (self._has_front and plans):
            told = self._points(search)[:1] if self._has_front else [best]
        least, peak = int(min(corners)[0]), min(found.answer.peak_bytes for found in told)
        bracket = Bracket(
            search.seconds,
            search.num_compiled,
            least if self._has_front else peak,
            max(least, peak),
            bool(plans),
            min(seconds for _, seconds in corners),
            None if fastest is None else seconds_of(fastest),
            len(_undominated(plans)) if self._has_front else None,
            within if self._has_front else None,
            None if self._has_front or fastest is not None else seconds_of(best),
        )
        near = within is not None and within <= search.effort.within_fraction
        if near and self._has_front and self._other(search) is not None:
            return Look(best, bracket, {})
        return Look(best, bracket, {"proven": within == 0, "within": near})

    def _other(self, search: Search) -> Found | None:
        """Return the estimated plan of another schedule that is farthest from compiled ones, once
        the front of plain schedules is near enough; with the micro-batches of a compiled plan."""
        if search.is_spent:
            return None
        if not self._knows_others:
            self._knows_others = True
            for found in search.fitting:
                open_others(search, found)
        return self._farthest(search, [p for p in self._points(search) if not p.part.is_plain])

    def early(self, search: Search, look: Look) -> Found | None:
        return look.found if look.bracket is not None and may_fit(look.found) else None

    def within(self, search: Search) -> float | None:
        """Return how near compiled plans are to all (``Proven.within_fraction``), or None."""
        return finite(max(far(corner, search.values) for corner in self._bounds(search)))

    def _bounds(self, search: Search) -> Sequence[Corner]:
        """Return lower bounds: every plan that fits is at least as large and as slow as one of
        them. Compiled plans bound plain schedules once all of these that may be better are
        compiled."""
        if search.effort.within_fraction or self._candidate or not search.fitting:
            return search.corners
        unopened, floors = search.unopened, search.floors.items()
        others = [each for n, each in floors if each[1] < inf and not unopened[n].is_plain]
        for number, part in search.parts.items():
            others += [] if part.is_plain else search.corners_of(number)
        return [*search.values, *others]

    def _points(self, search: Search) -> list[Found]:
        """Return the front as it is estimated, or the fastest plan alone, by ascending peak."""
        of_part, points = estimated_front if self._has_front else proposed, list[Found]()
        self.rivals.clear()

        def least(part: OpenPart) -> float:
            if not self.is_bounded(part):
                return part.least_seconds
            return min((seconds for _, seconds in self.corners(search, part)), default=inf)

        for part in sorted(search.parts.values(), key=lambda e: (not e.is_plain, least(e))):
            best = inf if self._has_front else min(map(seconds_of, points), default=inf)
            if least(part) == inf or least(part) >= best:
                continue
            worth = (1 - self.nearly(search)) * best
            if not part.is_plain and self.hoped(search, part) >= worth:
                continue
            enough = [best] if best < inf and not part.is_plain else []
            is_last = search.effort.compiles == 0
            # The closed form that proposes plans is not the simulation that ranks them.
            plans = [
                *map(search.known, part.once(of_part, self.ratios(search, part), is_last, *enough))
            ]
            points += plans
            fit = [seconds_of(found) for found in plans if may_fit(found)]
            fastest, hoped = min(fit, default=best), least_slowness(search) * part.expected_seconds
            if enough and not plans:
                fastest = grouped.given_up_seconds(part, self.ratios(search, part)[0], *enough)
            if hoped and (fit or enough):
                self._beyond[_kind(part)][part] = fastest / hoped, bool(fit)
            self.rivals |= {part} if fastest < best and not part.is_plain else set()
        if search.effort.compiles == 0:
            points = [found for found in points if may_fit(found)] or points
        front = _undominated(points)
        return front if self._has_front else front[-1:]

    def ratios(self, search: Search, part: OpenPart) -> Ratios:
        """Return what stages of a part are taken to need of the seconds that are expected."""
        return ratios(part, {each.size: each.once(slowness) for each in search.parts.values()})

    def next(self, search: Search, look: Look) -> Found | None:
        """Return the estimated plan farthest from compiled ones; without a front, the fastest. None
        once so many were compiled that none is likely to fit."""
        if not search.fitting and self.gives_up(search, None, MOST_UNFIT):
            return None
        chosen = self._farthest(search, self._points(search))
        if chosen is None and self._has_front:
            chosen = self._other(search)
        return self._candidate if chosen is None else chosen

    def _farthest(self, search: Search, points: Sequence[Found]) -> Found | None:
        """Return the estimated plan farthest from compiled ones; None if all are near enough."""
        farthest = search.effort.within_fraction if self._has_front else -1.0
        chosen, values = None, search.values
        for found in reversed(points):
            proof = found.answer.proof
            distance = far(self.corner(proof.peak_bytes, seconds_of(found)), values)
            if distance > farthest and not search.is_asked(found):
                farthest, chosen = distance, found
        return chosen

    def by_layers(self, search: Search) -> ByLayers | None:
        if self._has_front or not search.fitting:
            return None
        return self.layer_proof(search).run()

    def layer_proof(self, search: Search) -> LayerProof:
        """Return the second proof, from compiled layers, of the fastest compiled plan that fits."""
        fastest = min(map(seconds_of, search.fitting))
        enough = fastest / (1 + search.effort.within_fraction)
        return LayerProof(search, posed_both, enough)

    def answer(self, search: Search, look: Look, ended: str) -> StageAnswer:
        found = self._answer(search, look, ended)
        best = min(search.fitting, key=_rank, default=look.found)
        endless = offload.endless_seconds(search, best, self.ratios)
        if endless is None:
            return found
        summary = f"{found.why.summary} {offload.said(search, best, self.ratios)}".rstrip()
        why = replace(found.why, summary=summary, endless_step_seconds=endless)
        return replace(found, why=why, plan=found.plan and found.plan.with_(why=why))

    def _answer(self, search: Search, look: Look, ended: str) -> StageAnswer:
        bracket, plans = look.bracket, search.fitting
        if bracket is None:
            needs = [part.least_bytes for part in search.unopened.values() if part.is_plain]
            return beyond(search, look.found, min([look.found.answer.proof.peak_bytes, *needs]))
        within, fastest = self.within(search), min(s for _, s in self._bounds(search))
        proven = search.proven(within, ended)
        step = fastest_possible(fastest) + f", {NO_TRANSFERS}" * (fastest > 0)
        if not plans:
            said = step
            if self._has_front:
                said = f"every plan needs at least {format_bytes(bracket.least_bytes)}, and {said}"
            about = format_seconds(seconds_of(look.found))
            tried = "nothing that fits was compiled"
            if search.compiled:
                peak = min(found.answer.peak_bytes for found in search.compiled)
                tried = (
                    f"of {counted(len(search.compiled), 'compiled plan')} none fits, the smallest "
                    f"needs {format_bytes(peak)}"
                )
            said = f"{tried}: this plan is estimated to take {about}; {said}."
            return answer(search, look.found, Why(said, uncompiled=said, proven=proven), None)
        front = self.front(search) if self._has_front else None
        best = min(plans, key=_rank)
        are_plain = all(question.is_plain for question in search.questions)
        if front is not None:
            said = f", {len(front.points)} of them on the front; not proven: {step}"
            if within is not None and within <= PROVES_NOTHING:
                more = f"at most {within:.1%} more" if within else "no more"
                said = (
                    f", {len(front.points)} of them on the front; proven: for every plan"
                    f"{'' if are_plain else ' of 1F1B'} that fits, one of them needs {more} bytes "
                    f"and seconds, {NO_TRANSFERS}"
                )
        elif within is None or within > PROVES_NOTHING:
            said = f"; the fastest of these, not proven: {step}"
        elif within:
            said = (
                f"; proven: no plan that fits is faster by more than {within:.1%}, {NO_TRANSFERS}"
            )
        else:
            said = f"; proven fastest of the plans that fit, {NO_TRANSFERS}"
        nearer = search.by_layers
        if nearer is not None and nearer.least_step_seconds > fastest:
            said += f" ({_by_layers(nearer, seconds_of(best))})"
        questions = [each for each in search.questions if front is None or each.is_plain]
        summary = compiled(search, f"{said},", questions)
        verified = CompiledPlans(len(search.compiled), ended == "search" or within == 0, summary)
        what = f"{peak_of(best)} {summary}"
        why = Why(what, front=front, verified=verified, proven=proven)
        return answer(search, best, why, finite(above(seconds_of(best), fastest)))

    def front(self, search: Search) -> Front:
        """Return the front of compiled plans, each with how near to the best it is proven."""
        corners, names, points = self._bounds(search), len(search.questions) > 1, list[FrontPoint]()
        for found in _undominated(search.fitting):
            plan, peak, seconds = found.answer.plan, found.answer.peak_bytes, seconds_of(found)
            assert plan is not None, "it was compiled"
            point = FrontPoint(
                peak,
                seconds,
                above(seconds, min((s for p, s in corners if p <= peak), default=seconds)),
                plan.stages,
                plan.schedule if names else "",
                plan.num_microbatches if names else 0,
                within_fraction=max(min(above(peak, p), above(seconds, s)) for p, s in corners),
                notes=PlanNotes(
                    plan.model_hash, predict_plan(found.part.known, plan), plan.verification
                ),
            )
            points.append(point)
        is_whole = self.within(search) == 0 and not any(each.within_fraction for each in points)
        return Front(tuple(points), is_whole, False, search.seconds)


def _by_layers(said: ByLayers, step_seconds: float) -> str:
    """Return a second proof in words, the one from layers compiled alone."""
    layers = counted(said.num_layers, "compiled layer")
    return (
        f"by estimates{f', corrected by {layers},' * (said.num_layers > 0)} no plan that fits is "
        f"faster by more than {said.within_fraction(step_seconds):.1%}; they are at most "
        f"{said.error_fraction:.1%} above what compiles"
    )


def seconds_of(found: Found) -> float:
    """Return the seconds of a plan's step, simulated if it is compiled."""
    seconds = found.answer.proof.step_seconds
    assert seconds is not None, "it was searched for speed"
    return seconds


def _rank(found: Found) -> tuple[float, int]:
    return seconds_of(found), found.answer.peak_bytes


def _undominated(plans: Iterable[Found]) -> list[Found]:
    """Return the plans of which none is both smaller and faster than another, by ascending peak."""

    def values(found: Found) -> tuple[int, float]:
        known = found.answer.compiled
        peak = found.answer.peak_bytes if known else found.answer.proof.peak_bytes
        return peak, seconds_of(found)

    return undominated(plans, values)


def _nothing_fits(part: OpenPart) -> StageAnswer:
    return expected(part, throughput(part.once(posed)))


def least_slowness(search: Search) -> float:
    """Return the least ratio of compiled to expected seconds of any choice; 1 if unknown."""
    known = [found for part in search.plain_parts for found in part.once(slowness).values()]
    return min(known, default=1.0)


def _kind(part: Part | OpenPart) -> Hashable:
    """Return what decides how long devices wait for each other, and hold what is kept."""
    schedule = SCHEDULES[part.question.schedule]
    return schedule.stages_per_group, schedule.splits_backward


def _is_estimated_to_fit(found: Found) -> bool:
    return found.answer.status == "ok"


def may_fit(found: Found) -> bool:
    """Return whether a plan fits if it needs what is expected of it at most, which is mostly more
    than it does."""
    headroom = found.answer.headroom
    return headroom is None or headroom.verdict != "does not fit"
