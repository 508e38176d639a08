"""The programs of a pipeline's stages as its step names them, and the arrays of its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capture.runtime.dispatch import Call
from capture.runtime.fast_paths import flat_call
from capture.runtime.programs import StagePrograms
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
    call, num_outputs = flat_call(stage.forward.call), len(stage.layers.outputs)

    def forward(flat):
        results = call(flat)
        return [*([output] for output in results[:num_outputs]), results[num_outputs:]]

    return forward


def _backward(stage: StagePrograms) -> Call:
    call = flat_call(stage.backward.call)
    num_inputs = len(stage.differentiable_inputs)
    num_own = num_inputs + len(stage.owned)

    def backward(flat):
        results = call(flat)
        gradients, owned, borrowed = (
            results[:num_inputs],
            results[num_inputs:num_own],
            results[num_own:],
        )
        return [*([array] for array in gradients), owned, *([array] for array in borrowed)]

    return backward


def _summarize(stage: StagePrograms) -> Call:
    assert stage.summarize is not None
    call = flat_call(stage.summarize.call)
    return lambda flat: [call(flat)]


def _update(stage: StagePrograms) -> Call:
    """The values of other stages arrive one after the other; parameters that no stage reads are the
    last, and send none."""
    call = flat_call(stage.update.call)
    clear = None if stage.clear is None else flat_call(stage.clear.call)
    num_params, num_state = len(stage.owned), len(stage.optimizer.state)
    gradients = slice(num_params + num_state, 2 * num_params + num_state + len(stage.borrowed))

    def update(flat):
        results = call(flat)
        if clear is not None:
            results += clear(flat[gradients])
        params, rest = results[:num_params], results[num_params:]
        state, rest = rest[:num_state], rest[num_state:]
        own, borrowed = rest[:num_params], rest[num_params:]
        return [params, state, own, *([gradient] for gradient in borrowed)]

    return update


_CALLS: dict[str, Callable[[StagePrograms], Call]] = {
    "forward": _forward,
    "backward": _backward,
    "summarize": _summarize,
    "update": _update,
}
