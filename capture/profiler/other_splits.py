"""Costs and work of stages with other replicas, or another split, than what was traced of them."""

from __future__ import annotations

from dataclasses import replace

from capture.measured.stage_cost import StageBounds, StageCost, UpdateCost
from capture.measured.work import ProgramWork
from capture.plan.choices import StageChoice
from capture.runtime import least_traffic


def keeping(cost: StageCost, nbytes: int) -> StageCost:
    """A cost that keeps so much for the backward pass, all named residuals."""
    return replace(cost, residual_bytes=nbytes, kept_inputs=(), kept_outputs=(), kept_batch=())


def of_split_params(bounds: StageBounds, choice: StageChoice) -> StageBounds:
    """Bounds of a stage that may split what its replicas have in common, where it splits parameters
    over them; of any number of replicas the same."""
    if not choice.shard_params:
        return bounds
    least = bounds.least
    nbytes = max(0, least.residual_bytes - bounds.common_bytes)
    return replace(bounds, least=replace(least, residual_bytes=nbytes), common_bytes=0)


def sending(work: ProgramWork | None, own: ProgramWork | None, degree: int) -> ProgramWork | None:
    """A program whose replicas send what those of another do, which has no tensor parallelism."""
    if work is None or own is None:
        return None
    sent = [one for one in work.collectives if one.stride != degree]
    sent += [replace(one, nbytes=one.nbytes // degree, stride=degree) for one in own.collectives]
    return replace(work, collectives=tuple(sent))


def splitting(work: ProgramWork | None, own: ProgramWork | None, degree: int) -> ProgramWork | None:
    """The least work as ``least_traffic.of_examples``, with replicas that send as ``sending``."""
    return sending(least_traffic.of_examples(work), own, degree)


def gathering_again(work: ProgramWork | None) -> ProgramWork | None:
    """A backward pass that gathers along the sequence, once more, what its products read of the
    forward pass."""
    if work is None:
        return None
    again = [
        replace(one, kind="all-gather") for one in work.collectives if one.kind == "all-reduce"
    ]
    sums = [one for one in again if one.stride == 1]
    return replace(work, collectives=(*work.collectives, *sums))


def together(least: StageCost) -> StageCost:
    """The least cost with as many kernels for the traffic as a program is sure to have."""
    return replace(
        least,
        forward_work=least_traffic.together(least.forward_work),
        backward_work=least_traffic.together(least.backward_work),
    )


def put_together(passes: StageCost, end: UpdateCost, choice: StageChoice) -> StageCost:
    """The cost of a stage from that of its passes and of the end of its step."""
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
    """The work of a program with other replicas than it was traced for."""
    if work is None:
        return None
    found = []
    for one in work.collectives:
        is_of_replicas = one.stride == choice.tensor_parallel and one.group_size > 1
        if not is_of_replicas:
            found.append(one)
        elif choice.data_parallel > 1:
            found.append(replace(one, group_size=choice.data_parallel))
    return replace(work, collectives=tuple(found))
