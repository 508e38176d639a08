"""Costs and work of stages with other replicas, or another split, than what was traced of them."""

from __future__ import annotations

from dataclasses import replace

from capture.measured.stage_cost import StageBounds, StageCost, UpdateCost
from capture.measured.work import ProgramWork
from capture.plan.choices import StageChoice
from capture.runtime import least_traffic


def of_split_params(bounds: StageBounds, choice: StageChoice) -> StageBounds:
    """Return the bounds of a stage whose parameters are split over replicas, which may also split
    what these have in common; the same for any number of replicas."""
    if not choice.shard_params:
        return bounds
    least = bounds.least
    nbytes = max(0, least.residual_bytes - bounds.common_bytes)
    return replace(bounds, least=replace(least, residual_bytes=nbytes), common_bytes=0)


def sending(work: ProgramWork | None, own: ProgramWork | None, degree: int) -> ProgramWork | None:
    """Return the work of a program with the collectives between replicas of another, traced without
    tensor parallelism."""
    if work is None or own is None:
        return None
    sent = [one for one in work.collectives if one.stride != degree]
    sent += [replace(one, nbytes=one.nbytes // degree, stride=degree) for one in own.collectives]
    return work.sending(sent)


def splitting(work: ProgramWork | None, own: ProgramWork | None, degree: int) -> ProgramWork | None:
    """Return the least work per example (``least_traffic.of_examples``) with the collectives
    between replicas of another program (``sending``)."""
    return sending(least_traffic.of_examples(work), own, degree)


def gathering_again(work: ProgramWork | None) -> ProgramWork | None:
    """Return the work of a backward pass that gathers along the sequence once more what its
    products read of the forward pass."""
    if work is None:
        return None
    again = [
        replace(one, kind="all-gather") for one in work.collectives if one.kind == "all-reduce"
    ]
    sums = [one for one in again if one.stride == 1]
    return work.sending((*work.collectives, *sums))


def together(least: StageCost) -> StageCost:
    """Return the least cost with as many kernels for its traffic as a program is sure to have."""
    return replace(
        least,
        forward_work=least_traffic.together(least.forward_work),
        backward_work=least_traffic.together(least.backward_work),
    )


def put_together(passes: StageCost, end: UpdateCost, choice: StageChoice) -> StageCost:
    """Combine the cost of a stage's passes and that of the end of its step."""
    return replace(
        passes,
        optimizer_bytes=end.optimizer_bytes,
        update_bytes=end.update_bytes,
        summarize_bytes=end.summarize_bytes,
        summary_bytes=end.summary_bytes,
        update_work=end.update_work,
        forward_work=among_replicas(passes.forward_work, choice),
        backward_work=among_replicas(passes.backward_work, choice),
    )


def among_replicas(work: ProgramWork | None, choice: StageChoice) -> ProgramWork | None:
    """Return the work of a program for another number of replicas than it was traced for."""
    if work is None:
        return None
    found = []
    for one in work.collectives:
        is_of_replicas = one.stride == choice.tensor_parallel and one.group_size > 1
        if not is_of_replicas:
            found.append(one)
        elif choice.data_parallel > 1:
            found.append(replace(one, group_size=choice.data_parallel))
    return work.sending(found)
