"""The programs of a pipeline's stages as its step names them, and the arrays of its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from capture.runtime.dispatch import Call
from capture.runtime.fast_paths import flat_call
from capture.runtime.programs import StagePrograms
from capture.runtime.split_backward import SplitStagePrograms
from capture.step.holds import Leaves, Params, Summary, Values
from capture.step.program import Run, Slot, Step


def stage_calls(step: Step, stages: Sequence[StagePrograms | None]) -> dict[str, Call]:
    """What a step calls, by name; compiles every program of it.

    Args:
        step: The step of these stages, as ``capture.step.pipeline.build_step`` makes it.
        stages: In pipeline order; None for those of other processes, which are left out.
    """
    calls = {}
    for name in {each.program for each in step.instructions if isinstance(each, Run)}:
        program = step.programs[name]
        stage = stages[step.places.index(program.place)]
        if stage is not None:
            calls[name] = _CALLS[program.kind](stage)
    return calls


def layout_of(step: Step, stages: Sequence[StagePrograms], slot: Slot) -> list[Any]:
    """The structures of the arrays of a slot that is fed or copied."""
    stage = stages[step.places.index(slot.place)]
    match slot.holds:
        case Params(ids):
            return stage.param_structs(ids)
        case Leaves(ids):
            return stage.batch_structs(ids)
        case Values(ids):
            return stage.value_structs(ids)
        case Summary(int(of)):
            return stage.summary_structs(stages[of].optimizer.summary)
    raise AssertionError(f"{slot} is neither fed nor copied")


def _forward(stage: StagePrograms) -> Call:
    call = flat_call(stage.forward.call)
    outputs, *residuals = stage.forward.outputs
    sizes = [*[1] * len(outputs), *map(len, residuals)]
    return lambda flat: _cut(call(flat), sizes)


def _zero_gradients(stage: StagePrograms) -> Call:
    call = flat_call(stage.zero_gradients.call)
    sizes = [len(stage.owned), *[1] * len(stage.borrowed)]
    return lambda flat: _cut(call(flat), sizes)


def _backward(stage: StagePrograms) -> Call:
    call = flat_call(stage.backward.call)
    sizes = [*[1] * len(stage.differentiable_inputs), len(stage.owned), *[1] * len(stage.borrowed)]
    return lambda flat: _cut(call(flat), sizes)


def _backward_inputs(stage: StagePrograms) -> Call:
    assert isinstance(stage, SplitStagePrograms)
    call = flat_call(stage.backward_inputs.call)
    gradients, deferred = stage.backward_inputs.outputs
    sizes = [*[1] * len(gradients), len(deferred)]
    return lambda flat: _cut(call(flat), sizes)


def _backward_weights(stage: StagePrograms) -> Call:
    assert isinstance(stage, SplitStagePrograms)
    call = flat_call(stage.backward_weights.call)
    sizes = [len(stage.owned), *[1] * len(stage.borrowed)]
    return lambda flat: _cut(call(flat), sizes)


def _summarize(stage: StagePrograms) -> Call:
    assert stage.summarize is not None
    call = flat_call(stage.summarize.call)
    return lambda flat: [call(flat)]


def _update(stage: StagePrograms) -> Call:
    """The values of other stages arrive one after the other; parameters that no stage reads are the
    last, and send none."""
    call = flat_call(stage.update.call)
    sizes = [len(stage.owned), len(stage.optimizer.state)]
    return lambda flat: _cut(call(flat), sizes)


def _cut(results: list[jax.Array], sizes: Sequence[int]) -> list[list[jax.Array]]:
    """One list per output slot."""
    found, start = [], 0
    for size in sizes:
        found.append(results[start : start + size])
        start += size
    return found


_CALLS: dict[str, Callable[[StagePrograms], Call]] = {
    "forward": _forward,
    "zero_gradients": _zero_gradients,
    "backward": _backward,
    "backward_inputs": _backward_inputs,
    "backward_weights": _backward_weights,
    "summarize": _summarize,
    "update": _update,
}
