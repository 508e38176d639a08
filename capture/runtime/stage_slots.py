"""The arrays of the slots of a pipeline's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from capture.compiler.executable import HOST_MEMORY
from capture.runtime.programs import StagePrograms
from capture.runtime.split_backward import SplitStagePrograms
from capture.step.holds import KeptPart, Leaves, Params, State, Summary, Values
from capture.step.program import Slot, Step


def layout_of(step: Step, stages: Sequence[StagePrograms], slot: Slot) -> Sequence[Any]:
    """Return the structures of the arrays of a slot; compiles what makes it, if that is not known
    else. In the memory of a host they lie as on the devices."""
    found = _structs(stages, step.places.index(slot.place) % len(stages), slot)
    return found if slot.place.host is None else [on_host(struct) for struct in found]


def on_host(struct: Any) -> jax.ShapeDtypeStruct:
    """Return the structure of an array in the memory of the host of its devices."""
    sharding = struct.sharding.with_memory_kind(HOST_MEMORY)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def _structs(stages: Sequence[StagePrograms], s: int, slot: Slot) -> Sequence[Any]:
    stage = stages[s]
    match slot.holds:
        case Params(ids):
            return stage.param_structs(ids)
        case State():
            return stage.state_structs()
        case Leaves(ids):
            return stage.batch_structs(ids)
        case Values(ids):
            return stage.value_structs(ids)
        case Summary(int(of)):
            return stage.summary_structs(stages[of].optimizer.summary)
        case KeptPart("deferred"):
            assert isinstance(stage, SplitStagePrograms), "only a split backward pass defers"
            return stage.backward_inputs.outputs[1]
        case KeptPart(part):
            return stage.forward.outputs[1 if part == "residuals" else 2]
    raise AssertionError(f"{slot} holds nothing that a stage has")
