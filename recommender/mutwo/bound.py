"""A lower bound of a way's seconds, whatever its feature maps become: a linear programme that knows
bytes, links and programs, and lets copies flow in any parts.

    least    sum of W_k + seconds of program k                        k: segments of the body
    where    W_k >= seconds of what is made again before it           y_u of a unit u
             W_k >= seconds of what goes out, or comes in, before it  o_ik, p_ik of an instance i
             seconds of k >= of what goes out, or comes in, during it
             all o_ik sum to x_i, all p_ik to x_i, and x_i + y_u <= 1
             live + bytes_i (1 - y_u - gone_ik + back_ik) <= limit

An instance is a unit in one sub-array; x_i is the part of it that is swapped, and y_u that which
is made again. Every step that is issued keeps these rules, with parts that are whole: a copy gives
its room back when it has ended (gone_ik), and takes it when it is issued (back_ik), which is before
the first program during which it flows. With ``whole``, x and y, and what is gone and back, are
whole, too: an integer programme, which where nothing is swapped is the least of all steps.

Source: Jain et al. 2020 (Checkmate), 4 (recomputation as an integer programme).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from capture.step.multiplexed import orders
from capture.step.sub_array import Call, Lifetimes
from recommender.mutwo.problem import PROMPTS, Space
from recommender.mutwo.ways import Way

#: Units of all sub-arrays up to which it is asked when copies flow; of more, only how much in all.
MOST_INSTANCES = 48
#: Relative, with which a programme is solved.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class _Instance:
    """The feature maps of a unit in one sub-array, all of equal lifetime.

    Attributes:
        unit: By number.
        nbytes, out_seconds, in_seconds: Of all of them.
        made, rests: Segments of the body from which on they may go out, and rest.
        early, used, last: From which on they may come back, have to be there, and until when.
    """

    unit: int
    nbytes: int
    out_seconds: float
    in_seconds: float
    made: int
    rests: int
    early: int
    used: int
    last: int

    @property
    def crosses(self) -> bool:
        """Whether the feature maps are used before they are made: by the body that follows."""
        return self.used < self.made


def floor_seconds(space: Space) -> float:
    """Return a lower bound: the seconds of all programs of a way in turn, nothing made twice."""
    # The same sum in another order may be one rounding less.
    return sum(_Timeline(space).seconds) * (1 - 1e-12)


def again_seconds(space: Space, u: int) -> dict[int, float]:
    """Return segment of the body -> seconds to recompute a unit before it, all else being there."""
    return _Timeline(space).again_seconds(u)


def bound_seconds(space: Space, *, whole: bool = False, swaps: bool = True) -> float:
    """Return a lower bound of a way's seconds: no choices that keep the limit are faster.

    Args:
        space: The choices.
        whole: Ask the integer programme, which takes longer and is never lower.
        swaps: Whether anything may be swapped.

    Returns:
        Seconds; infinite if nothing keeps the limit.
    """
    if space.way.order == "in turn" and len(space.way.partition) > 1:
        return _apart(space, whole, swaps)
    flows = whole or len(space.units) * len(space.way.partition) <= MOST_INSTANCES
    return _solved(_Rows(space, swaps, flows), whole)


def _apart(space: Space, whole: bool, swaps: bool) -> float:
    """Return the bound of a way in turn: the sum of each sub-array alone, with the state of the
    others. Nothing of a sub-array travels while another computes."""
    problem, total = space.problem, 0.0
    state = sum(map(space.state_bytes, space.kinds))
    groups = dict(zip(space.kinds, space.way.partition, strict=True))
    for kind, count in Counter(space.kinds).items():
        others = state - space.state_bytes(kind)
        if others >= problem.limit_bytes:
            return inf
        alone = replace(problem, limit_bytes=problem.limit_bytes - others)
        single = alone.space(Way((groups[kind],), "in turn"))
        total += count * bound_seconds(single, whole=whole, swaps=swaps)
    return total


def _solved(rows: _Rows, whole: bool) -> float:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    values = np.array(rows.values, float)
    shape = len(rows.upper), rows.num_variables
    matrix = coo_array((values, (rows.row, rows.column)), shape=shape).tocsc()
    integral = np.zeros(rows.num_variables)
    integral[rows.whole] = whole
    cost = np.zeros(rows.num_variables)
    cost[: rows.num_spans] = 1
    upper = np.ones(rows.num_variables)
    upper[: rows.num_spans] = inf
    found = milp(
        cost,
        integrality=integral,
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix, -inf, np.array(rows.upper)),
        options={"mip_rel_gap": TOLERANCE},
    )
    if found.status == 2:
        return inf
    assert found.status == 0, f"the bound was not found: {found.message}"
    return float(found.fun) * rows.scale * (1 - TOLERANCE)


class _Timeline:
    """The body of a way with everything retained: when feature maps are made, rest and are used."""

    def __init__(self, space: Space):
        self.space, self.arrays = space, space.arrays(space.retained)
        self.nodes = orders(self.arrays, space.way.order)[0].nodes
        self.place = {(a, segment): at for at, (a, segment, _) in enumerate(self.nodes)}
        programs, host = space.problem.programs, space.problem.host
        self.calls = [self.arrays[a].issued[segment].call for a, segment, _ in self.nodes]
        facts = [
            programs.facts(self.arrays[a].sub_array, call)
            for (a, _, _), call in zip(self.nodes, self.calls, strict=True)
        ]
        self.seconds = [one.seconds for one in facts]
        self.live = np.array([one.transient_bytes for one in facts], float)
        movable = {(u.kind, n) for u in space.units for n in u.bundles}
        for a, life in enumerate(self.arrays):
            for number, bundle in enumerate(life.sub_array.bundles):
                if a and bundle.shared:
                    continue  # once for all; of a batch at least as long as sub-array 0 reads it
                uses = [self.place[a, use] for use in life.uses(number)]
                if bundle.is_state:
                    self.live += bundle.nbytes
                    continue
                if bundle.feed and uses:
                    self.seconds[uses[0]] += host.to_device.seconds(bundle.nbytes)
                if (space.kinds[a], number) in movable or number == life.sub_array.loss or not uses:
                    continue
                # What a program makes is in what it needs to run.
                first = uses[0] if bundle.writer is None else self.place[a, bundle.writer] + 1
                last = max(uses, key=lambda at: life.uses(number)[uses.index(at)])
                if first <= last:
                    self.live[first : last + 1] += bundle.nbytes
                else:
                    self.live[first:] += bundle.nbytes
                    self.live[: last + 1] += bundle.nbytes

    def instances(self) -> Iterable[_Instance]:
        host = self.space.problem.host
        for a, life in enumerate(self.arrays):
            layers = life.sub_array.num_layers
            for u, unit in enumerate(self.space.units):
                if unit.kind != self.space.kinds[a]:
                    continue
                alike: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
                for n in unit.bundles:
                    used = life.first_backward(n)
                    alike[life.last_forward(n), used, life.uses(n)[-1]].append(n)
                for (rests, used, last), numbers in alike.items():
                    sizes = [life.sub_array.bundles[n].nbytes for n in numbers]
                    yield _Instance(
                        u,
                        sum(sizes),
                        sum(map(host.to_host.seconds, sizes)),
                        sum(map(host.to_device.seconds, sizes)),
                        self.place[a, unit.layer] + 1,
                        self.place[a, rests] + 1,
                        self.place[a, max(layers, used - max(PROMPTS))],
                        self.place[a, used],
                        self.place[a, last],
                    )

    def again_seconds(self, u: int) -> dict[int, float]:
        unit, programs = self.space.units[u], self.space.problem.programs
        found = dict[int, float]()
        if not unit.own:
            return {}
        for a, life in enumerate(self.arrays):
            if self.space.kinds[a] == unit.kind:
                alone = Lifetimes(life.where, {}, frozenset(unit.bundles))
                for reader, slices in alone.slices.items():
                    for writer, targets, sources in slices:
                        call = Call("recompute", writer, sources, (), targets)
                        seconds = programs.facts(life.sub_array, call).seconds
                        at = self.place[a, reader]
                        found[at] = found.get(at, 0.0) + seconds
        return found


class _Rows:
    """The rules as rows of a matrix: entries times variables sum to at most ``upper``.

    Seconds are in those of all programs, and bytes in those of the limit. Spans of time are 2 k
    before program k and 2 k + 1 during it; what is still on its way then has the last.
    """

    def __init__(self, space: Space, swaps: bool, flows: bool):
        timeline = _Timeline(space)
        self.seconds, nodes = timeline.seconds, len(timeline.nodes)
        self.num_spans = 2 * nodes + 1
        self.scale = sum(timeline.seconds) or 1.0
        self.row: list[int] = []
        self.column: list[int] = []
        self.values: list[float] = []
        self.upper: list[float] = []
        self._next = self.num_spans
        self.whole: list[int] = []
        again = [self._whole() for _ in space.units]
        makes: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for u, variable in enumerate(again):
            by_node = timeline.again_seconds(u)
            for at, seconds in by_node.items():
                makes[at][variable] = seconds / self.scale
            if not by_node:
                self._add({variable: 1.0}, 0)
        for at, seconds in enumerate(timeline.seconds):
            self._add({**makes[at], 2 * at: -1.0}, 0)
            self._add({2 * at + 1: -1.0}, -seconds / self.scale)
            self._add({2 * at + 1: 1.0}, seconds / self.scale)
        self._outs: list[dict[int, float]] = [{} for _ in range(self.num_spans)]
        self._ins: list[dict[int, float]] = [{} for _ in range(self.num_spans)]
        self._held: list[dict[int, float]] = [{} for _ in range(nodes)]
        self._limit = float(space.problem.limit_bytes)
        self._fixed = timeline.live / self._limit
        totals: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for one in timeline.instances():
            x = self._whole()
            self._add({x: 1.0, again[one.unit]: 1.0}, 1.0)
            if not swaps:
                self._add({x: 1.0}, 0)
            if flows:
                self._instance(one, again[one.unit], x)
            else:
                self._at_once(one, again[one.unit], x)
                totals[0][x] = one.out_seconds / self.scale
                totals[1][x] = one.in_seconds / self.scale
        for total in totals:
            self._add({**total, **dict.fromkeys(range(self.num_spans), -1.0)}, 0)
        for terms, fixed in zip(self._held, self._fixed, strict=True):
            self._add(terms, 1.0 - fixed)
        for at, (out, come) in enumerate(zip(self._outs, self._ins, strict=True)):
            for busy in (out, come) if space.problem.host.duplex else ({**out, **come},):
                self._add({**busy, at: -1.0}, 0)

    def _at_once(self, one: _Instance, again: int, x: int) -> None:
        """Add an instance's bytes to the memory rows as if swaps took no time: what is swapped or
        recomputed needs no room while it rests."""
        size = one.nbytes / self._limit
        for at, terms in enumerate(self._held):
            if one.crosses:
                there, rests = not one.last < at < one.made, at < one.used or one.rests <= at
            else:
                there, rests = one.made <= at <= one.last, one.rests <= at < one.used
            self._fixed[at] += size * there
            if there and rests:
                self._term(terms, again, -size)
                self._term(terms, x, -size)

    def _instance(self, one: _Instance, again: int, x: int) -> None:
        size, nodes = one.nbytes / self._limit, len(self._held)
        until = self.num_spans if one.crosses else 2 * one.used + 1
        out = {at: self._variable() for at in range(2 * one.made, until)}
        come = {at: self._variable() for at in range(2 * one.early, 2 * one.used + 1)}
        for flow, seconds, busy in (
            (out, one.out_seconds, self._outs),
            (come, one.in_seconds, self._ins),
        ):
            self._add({**dict.fromkeys(flow.values(), -1.0), x: 1.0}, 0)
            self._add({**dict.fromkeys(flow.values(), 1.0), x: -1.0}, 0)
            for at, variable in flow.items():
                busy[at][variable] = seconds / self.scale
        gone: int | None = None
        back: int | None = None
        for at in range(nodes):
            away = at < one.used if one.crosses else one.rests <= at < one.used
            if one.rests <= at and (one.crosses or at < one.used):
                gone = self._gone(one, x, out, at, gone)
            if one.early <= at < one.used:
                back = self._back(one, come, at, back)
            nowhere = one.last < at < one.made if one.crosses else not one.made <= at <= one.last
            if nowhere:
                continue
            self._fixed[at] += size
            terms = self._held[at]
            if one.rests <= at and (one.crosses or away):
                self._term(terms, again, -size)
                assert gone is not None, "what rests may be gone"
                self._term(terms, gone, -size)
            elif one.crosses and away:
                self._term(terms, again, -size)
                self._term(terms, x, -size)
            if away and one.early <= at and back is not None:
                self._term(terms, back, size)

    def _gone(
        self, one: _Instance, x: int, out: dict[int, int], at: int, before: int | None
    ) -> int:
        """Add the variable of the part of an instance that has left the device before a program: at
        most what has flowed out by then. A copy gives its room back at once, when it ends."""
        gone = self._whole()
        self._add({gone: 1.0, **{out[n]: -1.0 for n in out if n <= 2 * at}}, 0)
        if before is not None:
            self._add({before: 1.0, gone: -1.0}, 0)
        if 2 * at + 1 in out:
            part = max(1.0, one.out_seconds / max(self.seconds[at], 1e-12))
            self._add({gone: 1.0, out[2 * at + 1]: min(part, 1e6), x: -1.0}, 0)
        return gone

    def _back(self, one: _Instance, come: dict[int, int], at: int, before: int | None) -> int:
        """Add the variable of the part of an instance that has its room again at a program: at
        least what has begun to flow in. A copy takes its room at once."""
        back = self._whole()
        self._add({back: -1.0, **{come[n]: 1.0 for n in come if n <= 2 * at + 1}}, 0)
        if before is not None:
            self._add({before: 1.0, back: -1.0}, 0)
        part = max(1.0, one.in_seconds / max(self.seconds[at], 1e-12))
        self._add({back: -1.0, come[2 * at + 1]: min(part, 1e6)}, 0)
        return back

    @staticmethod
    def _term(terms: dict[int, float], variable: int, value: float) -> None:
        terms[variable] = terms.get(variable, 0.0) + value

    @property
    def num_variables(self) -> int:
        return self._next

    def _variable(self) -> int:
        self._next += 1
        return self._next - 1

    def _whole(self) -> int:
        """Add a variable that is 0 or 1 in the integer programme, and between them otherwise."""
        self.whole.append(self._variable())
        return self.whole[-1]

    def _add(self, terms: dict[int, float], upper: float) -> None:
        row = len(self.upper)
        for column, value in terms.items():
            self.row.append(row)
            self.column.append(column)
            self.values.append(value)
        self.upper.append(upper)
