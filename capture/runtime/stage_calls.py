"""The programs of a pipeline's stages as its step names them, and the arrays of its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capture.runtime.dispatch import Call
from capture.runtime.programs import StagePrograms
from capture.runtime.split_backward import SplitStagePrograms
from capture.step.program import Run, Slot, Step


def stage_calls(step: Step, stages: Sequence[StagePrograms]) -> dict[str, Call]:
    """What a step calls, by name; compiles every program of it.

    Args:
        step: The step of these stages, as ``capture.step.pipeline.build_step`` makes it.
        stages: In pipeline order.
    """
    calls = {}
    for name in {each.program for each in step.instructions if isinstance(each, Run)}:
        program = step.programs[name]
        calls[name] = _CALLS[program.kind](stages[step.places.index(program.place)])
    return calls


def layout_of(step: Step, stages: Sequence[StagePrograms], slot: Slot) -> list[Any]:
    """The structures of the arrays of a slot that is fed or copied."""
    stage, key = stages[step.places.index(slot.place)], slot.key
    if slot.what in ("params", "gradients"):
        return stage.param_structs(stage.owned)
    assert key is not None, f"{slot} is neither fed nor copied"
    match slot.what:
        case "param" | "gradient":
            return stage.param_structs([key])
        case "batch":
            return stage.batch_structs([key])
        case "summary":
            return stage.summary_structs(stages[key].optimizer.summary)
        case _:
            return stage.value_structs([key])


def _forward(stage: StagePrograms) -> Call:
    call = stage.forward.call

    def forward(params, inputs, batch):
        outputs, *residuals = call(params, inputs, batch)
        return [*([output] for output in outputs), *residuals]

    return forward


def _backward(stage: StagePrograms) -> Call:
    call, num_owned = stage.backward.call, len(stage.owned)

    def backward(*groups):
        gradients, accumulated = call(*groups)
        owned, borrowed = accumulated[:num_owned], accumulated[num_owned:]
        return [*([array] for array in gradients), owned, *([array] for array in borrowed)]

    return backward


def _backward_inputs(stage: StagePrograms) -> Call:
    assert isinstance(stage, SplitStagePrograms)
    call = stage.backward_inputs.call

    def backward_inputs(*groups):
        gradients, deferred = call(*groups)
        return [*([array] for array in gradients), deferred]

    return backward_inputs


def _backward_weights(stage: StagePrograms) -> Call:
    assert isinstance(stage, SplitStagePrograms)
    call, num_owned = stage.backward_weights.call, len(stage.owned)

    def backward_weights(*groups):
        accumulated = call(*groups)
        return [accumulated[:num_owned], *([array] for array in accumulated[num_owned:])]

    return backward_weights


def _summarize(stage: StagePrograms) -> Call:
    assert stage.summarize is not None
    call = stage.summarize.call
    return lambda *groups: [call(*groups)]


def _update(stage: StagePrograms) -> Call:
    """The values of other stages arrive one after the other; parameters that no stage reads are the
    last, and send none."""
    call = stage.update.call
    others = [s for s in stage.optimizer.siblings if s is not stage.optimizer]
    counts = [len(other.summary) for other in others] if stage.summarize else []

    def update(params, state, gradients, borrowed, arrived, summaries):
        values = iter(summaries)
        seen = [[next(values) for _ in range(count)] for count in counts]
        *own, cleared = call(params, state, gradients, borrowed, arrived, seen)
        return [*own, *([gradient] for gradient in cleared)]

    return update


_CALLS: dict[str, Callable[[StagePrograms], Call]] = {
    "forward": _forward,
    "backward": _backward,
    "backward_inputs": _backward_inputs,
    "backward_weights": _backward_weights,
    "summarize": _summarize,
    "update": _update,
}
