"""Exact search: bounds by a Lagrangian, and for what they leave open a dynamic programme over kinds
of equal operators.

For one batch size and one value of the largest transient, this is a knapsack with several options
per item: least seconds within a capacity of resident bytes. With any price p per byte,

    seconds >= L(p) = sum over operators of min over options (seconds + p bytes)  -  p capacity

and an operator that takes another option than the cheapest adds its *reduced cost*, the difference,
to that bound. So:

1. For every batch size, the best L over p, with the least transient taken off the limit, bounds the
time per example from below. Batch
   sizes are worked through in the order of these bounds until the bound is not below the best plan.
2. For a batch size, the same for every value that the largest transient can have.
3. For what is left, sums are built up operator by operator, equal operators by doubling; a sum
whose reduced costs exceed the gap between
   L and the best plan cannot be completed to a better one, nor can a sum that another one beats in
   bytes and seconds.

Every step is exact, so the plan is proven to be of least time per example, up to the rounding of
sums of floating-point seconds. One case is too much for it: where latency is next to nothing, all
modes of all operators have the same price, reduced costs tell nothing, and what is left is to fill
the memory to the byte. Sums are then thinned to a number that can be handled; the answer is still
within ``bound_fraction`` of the best, a few ten-thousandths or less.

Source: Kellerer, Pferschy, Pisinger 2004, *Knapsack Problems*, chapter 11 (multiple choice), and
5.1 (bounds of states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from capture.plan.sharding import ShardingPlan
from recommender.osdp.problem import Options, ShardingProblem
from recommender.osdp.result import ShardingResult, answer, plan_of

#: Sums of the same seconds in another order differ by less than this fraction: no gain.
ROUNDING = 1e-12
#: Pairs of sums that are looked at in one merge; beyond, both sets are thinned.
MAX_PAIRS = 1 << 20


def exact(problem: ShardingProblem) -> ShardingResult:
    """Find the plan of least time per example over all modes and batch sizes, and prove it.

    Args:
        problem: What to choose.
    """
    limit, sizes = problem.memory_limit_bytes, np.arange(1, problem.num_batch_sizes + 1)
    options = problem.options(sizes)
    bounds = (
        _relax(options, limit - options.transient_bytes.min(axis=-1).max(axis=-1)).bound / sizes
    )
    best: ShardingPlan | None = None
    num_explored, unproven = 0, np.inf
    for row in np.argsort(bounds, kind="stable"):
        if best is not None and bounds[row] >= best.seconds_per_example * (1 - ROUNDING):
            break
        batch_size = int(sizes[row])
        found = cheapest(
            options[row], limit, np.inf if best is None else best.seconds_per_example * batch_size
        )
        num_explored += found.num_explored
        unproven = min(unproven, found.unproven_seconds / batch_size)
        if found.chosen is not None:
            best = plan_of(problem, batch_size, options[row], found.chosen)
    missing = 0.0 if best is None else max(0.0, best.seconds_per_example / unproven - 1)
    return answer(
        problem,
        best,
        algorithm="exact",
        optimal=missing <= ROUNDING,
        bound_fraction=missing if missing > ROUNDING else 0.0,
        num_explored=num_explored,
        num_batch_sizes=len(sizes),
    )


@dataclass(frozen=True)
class ExactAnswer:
    """The answer of the exact search for one batch size, or one capacity.

    Attributes:
        chosen: By kind, the mode of each of its operators as an index; None if nothing (below the
            seconds of interest) fits.
        num_explored: Sums that were looked at.
        unproven_seconds: No choice that was left out takes less; infinite where none was.
    """

    chosen: list[list[int]] | None
    num_explored: int = 0
    unproven_seconds: float = np.inf


def cheapest(options: Options, limit: float, below_seconds: float = np.inf) -> ExactAnswer:
    """Find the modes of least total seconds within a memory limit, at one batch size.

    Args:
        options: At one batch size.
        limit: Bytes, for the sum of what is resident and the largest transient.
        below_seconds: Only a total below this is of interest.
    """
    levels = options.transient_levels()
    within = options.within(levels)
    relaxed = _relax(within, limit - levels)
    best, num_explored, unproven = None, 0, np.inf
    for level in np.argsort(relaxed.bound, kind="stable"):
        if relaxed.bound[level] >= below_seconds * (1 - ROUNDING):
            break
        found = _solve(within[level], relaxed[level], below_seconds)
        num_explored += found.num_explored
        unproven = min(unproven, found.unproven_seconds)
        if found.chosen is not None:
            best, below_seconds = found.chosen, _seconds(within[level], found.chosen)
    return ExactAnswer(best, num_explored, unproven)


@dataclass(frozen=True)
class _Relaxation:
    """The Lagrangian relaxation at its best price, and the bound that it proves; arrays over the
    leading dimension of the options, or one of each.

    Attributes:
        bound: L at that price: no choice within the capacity takes less; infinite where nothing
            fits.
        reduced: (..., kinds, modes): reduced costs in seconds; infinite for no mode.
        capacity: Most resident bytes.
        fits, exceeds: (..., kinds): modes of least seconds + price x bytes. The first fit together,
            the others do not; or they are equal.
    """

    bound: np.ndarray
    reduced: np.ndarray
    capacity: np.ndarray
    fits: np.ndarray
    exceeds: np.ndarray

    def __getitem__(self, index) -> _Relaxation:
        return _Relaxation(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def _relax(options: Options, capacity: np.ndarray) -> _Relaxation:
    """Return the best Lagrangian bound for every row; its price is found exactly, since L is
    concave and piecewise linear.

    The fastest choice and the lightest one span a price; the cheapest choice at that price replaces
    one of them, until it is no cheaper.
    """
    # An infinite time rules the mode out already.
    resident = np.where(np.isfinite(options.seconds), options.resident_bytes, 0)

    def total(column: np.ndarray, picks: np.ndarray) -> np.ndarray:
        return np.take_along_axis(column, picks[..., None], axis=-1)[..., 0] @ options.counts

    def least(first: np.ndarray, then: np.ndarray) -> np.ndarray:
        return np.where(first == first.min(axis=-1, keepdims=True), then, np.inf).argmin(axis=-1)

    exceeds = least(options.seconds, options.resident_bytes)
    fits = least(options.resident_bytes, options.seconds)
    decided = total(resident, exceeds) <= capacity
    fits[decided] = exceeds[decided]
    price = np.zeros(len(capacity))
    possible = total(resident, fits) <= capacity
    active = possible & ~decided
    while active.any():
        seconds, nbytes = total(options.seconds, fits), total(resident, fits)
        saved, more = seconds - total(options.seconds, exceeds), total(resident, exceeds) - nbytes
        price[active] = saved[active] / more[active]
        priced = options.seconds + price[:, None, None] * resident
        cheap = priced.argmin(axis=-1)
        active &= total(priced, cheap) < (seconds + price * nbytes) * (1 - ROUNDING)
        fit = active & (total(resident, cheap) <= capacity)
        fits[fit] = cheap[fit]
        exceeds[active & ~fit] = cheap[active & ~fit]
    bound = total(options.seconds, fits) + price * (total(resident, fits) - capacity)
    priced = options.seconds + price[:, None, None] * resident
    reduced = priced - priced.min(axis=-1, keepdims=True)
    return _Relaxation(np.where(possible, bound, np.inf), reduced, capacity, fits, exceeds)


def _seconds(options: Options, chosen: Sequence[Sequence[int]]) -> float:
    return sum(
        float(options.seconds[kind, picks].sum()) for kind, picks in enumerate(map(list, chosen))
    )


def _solve(options: Options, relaxation: _Relaxation, below_seconds: float) -> ExactAnswer:
    """Find the best choice below a time for one capacity; None if there is none.

    The relaxation's price of a byte tells what an option loses against the bound. A plan that beats
    the rounded one loses less than the gap between the two in all, so options, and sums of them,
    that lose more are dropped; what is left of the kinds is met in the middle.
    """
    rounded = _rounded(options, relaxation)
    seconds = _seconds(options, rounded)
    best: list[list[int]] | None = rounded
    if seconds >= below_seconds * (1 - ROUNDING):
        seconds, best = below_seconds, None
    gap = seconds * (1 - ROUNDING) - float(relaxation.bound)
    if gap <= 0:
        return ExactAnswer(best)
    kinds, modes = np.nonzero(relaxation.reduced <= gap)
    columns = np.stack([options.resident_bytes, options.seconds, relaxation.reduced])
    picks = np.eye(len(kinds), dtype=np.min_scalar_type(options.counts.max()))
    each = _Sums(columns[:, kinds, modes], picks)
    sums = [
        each.taken(kinds == kind).times(count, gap)
        for kind, count in enumerate(options.counts.tolist())
    ]
    # Two halves of about equal size: of two sums, the fastest that fits is found without looking at
    # all pairs.
    sums.sort(key=len)
    left, right = (
        reduce(lambda one, other: one.plus(other, gap), half, each.nothing)
        for half in (sums[::2], sums[1::2])
    )
    explored = sum(map(len, (*sums, left, right)))
    unproven = float(relaxation.bound) if left.is_thinned or right.is_thinned else np.inf
    nbytes, left_seconds, _ = left.totals
    partner = np.searchsorted(right.totals[0], relaxation.capacity - nbytes, side="right") - 1
    totals = np.where(partner >= 0, left_seconds + right.totals[1, partner], np.inf)
    row = int(np.argmin(totals))
    if totals[row] >= seconds * (1 - ROUNDING):
        return ExactAnswer(best, explored, unproven)
    counts = left.picks[row] + right.picks[partner[row]]
    better = [
        np.repeat(modes[kinds == kind], counts[kinds == kind]).tolist() for kind in range(len(sums))
    ]
    if unproven == np.inf:
        return ExactAnswer(better, explored)
    # The gap is smaller now, and may leave all that is left.
    again = _solve(options, relaxation, _seconds(options, better))
    return ExactAnswer(
        again.chosen or better, explored + again.num_explored, again.unproven_seconds
    )


def _rounded(options: Options, relaxation: _Relaxation) -> list[list[int]]:
    """Return a choice that fits: that of the relaxation, with as many operators as possible moved
    to the faster of its two modes."""
    rows = np.arange(len(options.counts))
    resident, seconds = options.resident_bytes, options.seconds
    slack = float(relaxation.capacity - resident[rows, relaxation.fits] @ options.counts)
    found = []
    for kind, slow, fast in zip(
        rows, relaxation.fits.tolist(), relaxation.exceeds.tolist(), strict=True
    ):
        more = float(resident[kind, fast] - resident[kind, slow])
        count, moved = int(options.counts[kind]), 0
        if seconds[kind, fast] < seconds[kind, slow]:
            moved = count if more <= 0 else int(min(count, slack // more))
        slack -= moved * more
        found.append([slow] * (count - moved) + [fast] * moved)
    return found


@dataclass(frozen=True)
class _Sums:
    """The totals of some operators that may belong to a better plan: bytes ascending, seconds
    descending, reduced costs within the gap.

    Attributes:
        totals: (3, entries): bytes, seconds and reduced costs.
        picks: (entries, options): operators that take each option of any kind.
        is_thinned: Whether sums were left out that may belong to the best plan.
    """

    totals: np.ndarray
    picks: np.ndarray
    is_thinned: bool = False

    def __len__(self) -> int:
        return len(self.picks)

    @property
    def nothing(self) -> _Sums:
        """The total of no operators."""
        return _Sums(np.zeros((3, 1)), np.zeros_like(self.picks[:1]))

    def taken(self, rows: np.ndarray) -> _Sums:
        """Return the sums at some positions, in that order."""
        return _Sums(self.totals[:, rows], self.picks[rows], self.is_thinned)

    def thinned(self, most: int) -> _Sums:
        """Return at most ``most`` of the sums, evenly over their order, marked as thinned."""
        if len(self) <= most:
            return self
        rows = np.linspace(0, len(self) - 1, most).astype(int)
        return replace(self.taken(rows), is_thinned=True)

    def times(self, count: int, gap: float) -> _Sums:
        """Return the sums of so many operators of a kind, built by doubling."""
        if not count:
            return self.nothing
        half = self.times(count // 2, gap)
        twice = half.plus(half, gap)
        return twice.plus(self, gap) if count % 2 else twice

    def plus(self, other: _Sums, gap: float) -> _Sums:
        """Return the sums of two entries, one of each set, within the gap that no other one beats
        in both bytes and seconds."""
        one = self
        if len(one) * len(other) > MAX_PAIRS:
            most = max(int(MAX_PAIRS**0.5), MAX_PAIRS // min(len(one), len(other)))
            one, other = one.thinned(most), other.thinned(most)
        rows, columns = np.nonzero(np.add.outer(one.totals[2], other.totals[2]) <= gap)
        nbytes, seconds, _ = totals = one.totals[:, rows] + other.totals[:, columns]
        order = np.lexsort((seconds, nbytes))
        least = np.minimum.accumulate(seconds[order])
        kept = order[np.concatenate([[True], least[1:] < least[:-1]])]
        picks = one.picks[rows[kept]] + other.picks[columns[kept]]
        return _Sums(totals[:, kept], picks, one.is_thinned or other.is_thinned)
