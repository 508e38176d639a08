"""From a profile to the problem that searches solve: predicted bytes and seconds of every stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from capture.errors import ProfileError, said_once
from capture.measured.profile import Profile
from capture.plan.choices import Remat, StageChoice, num_full_layers, with_mixtures
from capture.predictor import AdditivePredictor
from capture.predictor.times import TimePredictor
from capture.registered import REGISTERED
from recommender.capture.problem import NEVER, SearchProblem
from recommender.fixed import FixedPlan
from recommender.question import PlanQuestion

#: Of the cost table of one degree, all its choices together.
_LARGEST_TABLE_BYTES = 64 * 2**20


def search_problem(
    profile: Profile,
    question: PlanQuestion,
    *,
    with_times: bool = False,
    least: bool = False,
    times: TimePredictor | None = None,
) -> SearchProblem:
    """The search that a profile poses: predicted bytes of every stage, at every position, for every
    choice; with ``with_times`` also its seconds, by ``times`` where they are predicted already.

    With ``least``, the bytes are those of the best of plans behind a stage and not of the worst:
    see ``AdditivePredictor.peaks``.

    Raises:
        ProfileError: ``profile-failed`` if nothing could be measured, ``profile-missing`` if every
            choice lacks a measurement, ``profile-degrees`` if no profiled choice fits a stage of
            one device, ``profile-paper`` without paper statistics, ``profile-windows`` in the
            default mode if there is nothing else, ``profile-no-times`` without times of an
            accelerator.
    """
    cluster, microbatch_size = question.cluster, question.microbatch_size
    degrees = question.space.all_degrees(cluster)
    usable: dict[int, list[StageChoice]] = {}
    for choice in _choices(profile, question, degrees):
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0:
            usable.setdefault(choice.num_devices, []).append(choice)
    if not usable and profile.failures:
        raise ProfileError.of(
            f"no measurement succeeded: {said_once(profile.failures)}.", "profile-failed"
        )
    if not usable:
        raise ProfileError.of(
            f"the profile has no choice for stages on {degrees} devices at "
            f"microbatch_size={microbatch_size}; "
            f"profile for cluster {cluster}.",
            "profile-degrees",
        )
    num_layers = profile.graph.num_layers
    rows = (
        _default_rows(profile, question, least)
        if question.mode == "default"
        else paper_predictor(profile).rows(question.num_microbatches)
    )
    blocked = _blocked(num_layers, question.merge_layers, rows(usable[min(usable)][0])[0])
    choices = {d: tuple(found) for d, found in usable.items()}
    cost = {
        d: _cost_table(found, rows, blocked, may_reduce=not with_times)
        for d, found in choices.items()
    }
    # In a reduced table the first choice stands for the best one of its degree;
    # ``recommendation._with_best_choices`` finds which that is.
    choices = {
        d: found if len(cost[d]) == len(found) else found[:1] for d, found in choices.items()
    }
    problem = SearchProblem(
        cluster, num_layers, choices, cost, question.space, question.limit_bytes
    )
    if not with_times:
        return problem
    times = times or TimePredictor(profile, max(cluster.nodes))
    tables = {
        d: [times.table(choice, microbatch_size) for choice in found]
        for d, found in choices.items()
    }
    return replace(
        problem,
        seconds={
            d: np.stack([table.forward + table.backward for table in found])
            for d, found in tables.items()
        },
        update_seconds={
            d: np.stack([table.update for table in found]) for d, found in tables.items()
        },
        num_microbatches=question.num_microbatches,
    )


def _cost_table(
    choices: Sequence[StageChoice],
    rows: Callable[[StageChoice], np.ndarray],
    blocked: np.ndarray,
    may_reduce: bool,
) -> np.ndarray:
    """Bytes of every stage per choice; reduced to the best choice where all of them would not fit
    into memory comfortably."""
    first = rows(choices[0])
    reduce = may_reduce and len(choices) > 1 and first.nbytes * len(choices) > _LARGEST_TABLE_BYTES
    table = first.copy() if reduce else np.stack([first, *map(rows, choices[1:])])
    if reduce:
        for choice in choices[1:]:
            np.minimum(table, rows(choice), out=table)
        table = table[None]
    table[..., blocked] = NEVER
    return table


def stage_choices(
    profile: Profile, remat: Remat | None = None, fixed: FixedPlan | None = None
) -> Sequence[StageChoice]:
    """What stages of plans may have: what was measured, and mixtures; or of these what recomputes
    so, or what a plan that is fixed leaves."""
    num_layers, measured = profile.graph.num_layers, profile.choices
    known = [*with_mixtures(measured, num_layers), *(fixed.mixtures(measured) if fixed else ())]
    if remat is not None and num_full_layers(remat):
        mixed = {replace(choice, remat=remat) for choice in measured}
        known = sorted(each for each in mixed if {*each.measured} <= {*measured})
    return [
        choice
        for choice in dict.fromkeys(known)
        if remat in (None, choice.remat)
        and (fixed is None or fixed.allowed(choice, num_layers).any())
    ]


def _choices(
    profile: Profile, question: PlanQuestion, degrees: Collection[int]
) -> Sequence[StageChoice]:
    """The choices of a mode that the profile can predict; one that lacks a measurement is done
    without, as its warnings say."""
    microbatch_size = question.microbatch_size
    choices = stage_choices(profile, question.remat, question.fixed)
    if question.mode == "paper":
        known = paper_predictor(profile).choices(degrees)
        return (
            [choice for choice in known if choice in profile.choices]
            if profile.measurements
            else known
        )
    if not profile.measurements and profile.paper is not None:
        raise ProfileError.of(
            "the profile holds executed runs of the paper's kind alone, which the default "
            "predictor cannot use; plan with --mode paper, or "
            "profile with --backend compile.",
            "profile-windows",
        )
    if not profile.failures:
        return choices
    predictor = AdditivePredictor(profile)
    fitting = [
        choice
        for choice in choices
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0
    ]
    known = tuple(choice for choice in fitting if predictor.can_predict(choice, microbatch_size))
    if fitting and not known:
        predictor.table(fitting[0], microbatch_size)  # raises, and says what is missing
    return known


def _default_rows(
    profile: Profile, question: PlanQuestion, least: bool
) -> Callable[[StageChoice], np.ndarray]:
    predictor = AdditivePredictor(profile)
    most_stages = min(profile.graph.num_layers, question.cluster.num_devices)

    def rows(choice: StageChoice) -> np.ndarray:
        peaks = predictor.peaks(
            choice,
            question.microbatch_size,
            question.schedule,
            question.num_microbatches,
            most_stages,
            least=least,
        )
        if question.fixed is None:
            return peaks
        return np.where(question.fixed.allowed(choice, profile.graph.num_layers), peaks, NEVER)

    return rows


def paper_predictor(profile: Profile) -> Any:
    """The paper's predictor over the runs that a profile holds.

    Raises:
        ProfileError: ``profile-paper`` if it has none.
    """
    return REGISTERED["predictor of stages"]["paper"](profile)


def _blocked(num_layers: int, merge: int | None, alone: np.ndarray) -> np.ndarray:
    """Stages that cannot be: empty ones, and those that cut a merged layer.

    Args:
        merge: Layers that the merger leaves.
        alone: Bytes of every stage on the fewest devices, with one micro-batch in flight: M_i and
            M_a are read from it.
    """
    blocked = np.tri(num_layers, num_layers + 1, dtype=bool)
    if merge is not None:
        bounds = REGISTERED["layer merger"]["paper"](alone, merge)
        inside = np.array([cut not in bounds for cut in range(num_layers + 1)])
        blocked |= inside[:num_layers, None] | inside[None, :]
    return blocked
