"""Algorithm B as a search of a way: its choices for the feature maps, judged as those of every
other search are, by the step that will run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from capture.papers.mutwo.policy import CycleSchedule, schedule_cycle
from capture.papers.mutwo.readings import CORRECTED, PAPER, Readings
from capture.papers.mutwo.sub_arrays import Posed, pose, resident_bytes
from capture.plan.array import Decision
from recommender.mutwo.problem import RECOMPUTE, RETAIN, Choice, Chosen, Space, Weighed


def by_policy(
    space: Space, enough_seconds: float = 0.0, *, readings: Readings
) -> tuple[Chosen, Weighed]:
    """Return the choices of mu-TWO's algorithms for the feature maps of a way, and their weight.

    The paper puts forward operations where they hide copies, and the rest behind the backward pass;
    the step that will run has one of each in turn, so only choices and prompts are taken over.
    Where that order needs more, the policy is asked again with as much less. Sub-arrays of a kind
    have the same choices: what is moved in one of them is moved in all.

    Args:
        space: The choices of a way.
        enough_seconds: Of no meaning here: nothing is revised.
        readings: Of the algorithms.

    Returns:
        The choices, and what they weigh as a step; where Algorithm G says that they do not keep the
        limit, that they do not, by as much (M-f).
    """
    problem = space.problem
    posed = tuple(
        pose(
            problem.sub_array(kind),
            problem.programs,
            problem.host,
            f"sub-array {n}",
            problem.by_bundle,
        )
        for n, kind in enumerate(space.kinds)
    )
    graphs, static = [one.graph for one in posed], resident_bytes(posed)
    limit = problem.limit_bytes
    while True:
        cycle = schedule_cycle(graphs, limit, readings, static)
        chosen = _chosen(space, posed, cycle)
        if not cycle.fits:
            peak = cycle.peak_bytes + problem.limit_bytes - limit
            return chosen, Weighed(peak - problem.limit_bytes, inf, peak)
        weighed = space.weigh(chosen)
        more = weighed.peak_bytes - problem.limit_bytes
        if more <= 0:
            return chosen, weighed
        # Less than it stopped at, or it would choose the same.
        limit = min(limit - more, cycle.peak_bytes - 1)


def _chosen(space: Space, posed: Sequence[Posed], cycle: CycleSchedule) -> Chosen:
    decided = [
        {decision.bundle: decision for decision in one.decisions(policy.schedule)}
        for one, policy in zip(posed, cycle.policies, strict=True)
    ]
    chosen: list[Choice] = []
    for n, unit in enumerate(space.units):
        found: list[Decision] = []
        for one, of, kind in zip(posed, decided, space.kinds, strict=True):
            if kind == unit.kind:
                name = one.sub_array.bundles[unit.bundles[0]].name
                found += [of[name]] if name in of else []
        ahead = [decision.ahead for decision in found if decision.choice == "swap"]
        if ahead:
            chosen.append(space.swap(n, max(1, *ahead)))
        else:
            chosen.append(RECOMPUTE if found else RETAIN)
    return tuple(chosen)


#: The algorithms as printed, and with their doubtful places corrected.
as_printed = partial(by_policy, readings=PAPER)
corrected = partial(by_policy, readings=CORRECTED)
