"""The search of every choice of a way, but for those that cannot be the best: for small graphs, and
to say how good a search is."""

from __future__ import annotations

from recommender.mutwo.bound import again_seconds, floor_seconds
from recommender.mutwo.problem import Choice, Chosen, Space, Weighed


def enumerate_choices(
    space: Space, enough_seconds: float = 0.0, *, prune: bool = True
) -> tuple[Chosen, Weighed]:
    """Search all choices of all units for the best.

    Left out is what takes more than the best so far by its programs alone, or by what goes out, and
    what does not fit even if all that is not chosen yet is swapped.

    Args:
        space: The choices.
        enough_seconds: What is as fast needs nothing better.
        prune: Leave out what cannot be the best.
    """
    problem, count = space.problem, len(space.units)
    floor = floor_seconds(space)
    again = [sum(again_seconds(space, u).values()) for u in range(count)]
    times = [space.kinds.count(unit.kind) for unit in space.units]
    bundles = [problem.sub_array(unit.kind).bundles for unit in space.units]
    outs = [
        number * sum(problem.host.to_host.seconds(own[n].nbytes) for n in unit.bundles)
        for number, own, unit in zip(times, bundles, space.units, strict=True)
    ]
    best = space.swapped, space.weigh(space.swapped)

    def extend(chosen: tuple[Choice, ...], computed: float, out: float) -> None:
        nonlocal best
        n = len(chosen)
        # What is later the same sum, in another order, is not cut off by its rounding.
        if prune and max(computed, out, enough_seconds) * (1 - 1e-9) > best[1].seconds:
            return
        least = (*chosen, *space.swapped[n:])
        if prune and n < count and problem.host_bytes is None and not space.least_fits(least):
            return
        if n == count:
            best = min(best, (chosen, space.weigh(chosen)), key=lambda one: one[1])
            return
        for choice in space.options[n]:
            extend(
                (*chosen, choice),
                computed + (again[n] if choice.kind == "recompute" else 0.0),
                out + (outs[n] if choice.kind == "swap" else 0.0),
            )

    extend((), floor, 0.0)
    return best
