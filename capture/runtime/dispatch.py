"""The instructions of a step, bound to executables and transfers once, so that a step only calls
them in order.

Programs, copies and feeds are enqueued, and the host runs ahead of the devices; it waits for them
only where ``capture.step.run_ahead`` says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.partition.sharding import struct_of
from capture.runtime.programs import StagePrograms
from capture.runtime.reshard import plan_reshard, reshard
from capture.step.program import Feed, Free, Instruction, Move, Run, StepProgram


@dataclass
class Frame:
    """What one execution of a step works on.

    Attributes:
        slots: Per slot of the step program its arrays, or None while it is not alive.
        microbatches: Per micro-batch its leaves: host arrays, and the random key if the loss takes
            one.
        losses: One per micro-batch that the last stage has run.
    """

    slots: list[list[jax.Array] | None]
    microbatches: Sequence[Sequence[Any]]
    losses: list[jax.Array]


Action = Callable[[Frame], None]

#: POSIX; elsewhere the host just goes on.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def bind(program: StepProgram, stages: Sequence[StagePrograms]) -> list[Action]:
    """One action per instruction; compiles every stage that is not compiled yet.

    Args:
        program: Of these stages.
        stages: In pipeline order.
    """
    return [_bind(instruction, program, stages) for instruction in program.instructions]


def wait_before(waits: Sequence[Sequence[int]], actions: Sequence[Action]) -> list[Action]:
    """The same actions, each enqueued when its slots are ready; the rest of the host's time it runs
    ahead."""
    return [
        _after(slots, action) if slots else action
        for slots, action in zip(waits, actions, strict=True)
    ]


def _after(slots: Sequence[int], action: Action) -> Action:
    """Arrays of a slot are ready together, and asking each would take longer than the instruction
    itself.

    A program's thread says that its results are ready before it gives back what it used, and on
    busy cores the host, which that wakes, would go on first: it lets the other go (2 cores at load
    20, the fourth worst of 40 steps: 77 % above what is booked without, 8 % with).
    """

    def waiting(frame: Frame) -> None:
        for slot in slots:
            arrays = frame.slots[slot]
            assert arrays, f"slot {slot} is awaited and holds no array"
            arrays[-1].block_until_ready()
        _yield_core()
        action(frame)

    return waiting


def to_device(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array or a random key on the devices, in buffers of their own.

    On CPU ``jax.device_put`` aliases aligned host memory, ``may_alias=False`` or not (jax 0.10.2
    and 0.12): without the copy, a caller that refills its batch would change a step that is still
    running.
    """
    return (
        reshard(leaf, sharding)
        if isinstance(leaf, jax.Array)
        else jax.device_put(np.array(leaf), sharding)
    )


def to_host(array: jax.Array) -> Any:
    """A NumPy array; typed random keys, which NumPy lacks, stay JAX arrays, on the default
    device."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(array))), impl=jax.random.key_impl(array)
        )
    return np.asarray(array)


def _bind(
    instruction: Instruction, program: StepProgram, stages: Sequence[StagePrograms]
) -> Action:
    match instruction:
        case Feed():
            return _bind_feed(instruction, stages[program.slots[instruction.slot].stage_id])
        case Run():
            return _bind_run(
                instruction, stages[instruction.stage_id], frozenset(program.persistent.values())
            )
        case Move():
            source, target = (
                stages[program.slots[slot].stage_id]
                for slot in (instruction.source, instruction.target)
            )
            return _bind_move(instruction, source, target)
        case Free():
            return _bind_free(instruction, frozenset(program.persistent.values()))


def _bind_feed(feed: Feed, stage: StagePrograms) -> Action:
    slot, microbatch = feed.slot, feed.microbatch
    placements = [(b, stage.batch_sharding(b)) for b in feed.batch]

    def action(frame: Frame) -> None:
        leaves = frame.microbatches[microbatch]
        frame.slots[slot] = [to_device(leaves[b], sharding) for b, sharding in placements]

    return action


def _bind_free(free: Free, persistent: frozenset[int]) -> Action:
    """Dropping the reference frees a slot, but the arrays of the old state are still the caller's:
    those are deleted."""
    consumed = [slot for slot in free.slots if slot in persistent]

    def action(frame: Frame) -> None:
        for slot in consumed:
            _delete(frame.slots[slot])
        for slot in free.slots:
            frame.slots[slot] = None

    return action


def _delete(arrays: Sequence[jax.Array] | None) -> None:
    for array in arrays or ():
        if not array.is_deleted():
            array.delete()


def _bind_move(move: Move, source: StagePrograms, target: StagePrograms) -> Action:
    match move.kind:
        case "value":
            structs = [struct_of(source.graph.values[move.key])]
            src, dst = source.value_sharding(move.key), target.value_sharding(move.key)
        case "param":
            structs = [struct_of(source.graph.params[move.key])]
            src, dst = source.param_sharding(move.key), target.param_sharding(move.key)
        case _:
            structs = list(source.optimizer.summary)
            src, dst = source.replicated, target.replicated
    moves = [plan_reshard(tuple(struct.shape), struct.dtype, src, dst) for struct in structs]
    first, last, index = move.source, move.target, move.index

    def action(frame: Frame) -> None:
        arrays = frame.slots[first]
        assert arrays is not None, f"{move.label}: the source is not alive"
        chosen = arrays if index is None else [arrays[index]]
        frame.slots[last] = [one(array) for one, array in zip(moves, chosen, strict=True)]

    return action


def _bind_run(run: Run, stage: StagePrograms, persistent: frozenset[int]) -> Action:
    """The caller still refers to the old state, so dropping the step's reference does not free it:
    what is donated of it is deleted.

    The call itself deletes only what XLA reuses, and it may reuse a residual of the same shape for
    the new gradients instead of the old.
    """
    call = getattr(stage, run.program).call
    gathers = [_gather(group) for group in run.inputs]
    if run.program == "update":
        gathers[-1] = _gather_summaries(run.inputs[-1], len(stage.optimizer.siblings) - 1)
    scatter = _SCATTERS[run.program]
    donated, outputs, keep_loss = (
        run.donated,
        run.outputs,
        stage.is_last and run.program == "forward",
    )
    num_owned = len(stage.owned)
    consumed = [slot for slot in donated if slot in persistent]

    def action(frame: Frame) -> None:
        slots = frame.slots
        results = call(*[gather(slots) for gather in gathers])
        for slot in consumed:
            _delete(slots[slot])
        for slot in donated:
            slots[slot] = None
        for slot, arrays in zip(outputs, scatter(results, num_owned), strict=True):
            slots[slot] = arrays
        if keep_loss:
            frame.losses.append(results[0][0])

    return action


def _gather(group: tuple[int, ...]) -> Callable[[list[Any]], list[Any]]:
    """Reads the arrays of some slots into one list; that of a single slot serves as it is."""
    if len(group) == 1:
        (only,) = group
        return lambda slots: slots[only]
    return lambda slots: [array for slot in group for array in slots[slot]]


def _gather_summaries(group: tuple[int, ...], num_others: int) -> Callable[[list[Any]], list[Any]]:
    """Reads the values of every other stage as a list of its own; parameters that no stage reads
    are the last, and send none."""
    missing = num_others - len(group) if group else 0
    return lambda slots: [*(slots[slot] for slot in group), *([] for _ in range(missing))]


def _of_forward(results: Any, num_owned: int) -> list[list[jax.Array]]:
    outputs, residuals = results
    return [*([a] for a in outputs), residuals]


def _of_backward(results: Any, num_owned: int) -> list[list[jax.Array]]:
    gradients, accumulated = results
    return [
        *([a] for a in gradients),
        accumulated[:num_owned],
        *([a] for a in accumulated[num_owned:]),
    ]


def _of_update(results: Any, num_owned: int) -> list[list[jax.Array]]:
    params, optimizer, cleared, borrowed = results
    return [params, optimizer, cleared, *([a] for a in borrowed)]


def _of_summarize(results: Any, num_owned: int) -> list[list[jax.Array]]:
    return [results]


#: From what a program returns to the arrays of its output slots.
_SCATTERS = {
    "forward": _of_forward,
    "backward": _of_backward,
    "update": _of_update,
    "summarize": _of_summarize,
}
