"""Execute a step: its instructions bound to executables and transfers once, so that every execution
only calls them in order.

Programs, copies and feeds are enqueued, and the host runs ahead of the devices; it waits for them
only where the step says so (``Wait``), and, if it is to hold no more than is booked, where
``capture.step.run_ahead`` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.compiler.executable import Executable
from capture.runtime.fast_paths import Put, flat_call, to_devices
from capture.runtime.frame import Action, Call, Frame, Layout, Observer
from capture.runtime.reshard import plan_moves, reshard
from capture.step.behind import Touches
from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait, replay
from capture.step.run_ahead import waits, with_scratch
from capture.tracing.keys import is_key

if TYPE_CHECKING:
    from capture.runtime.hosts.part import StepPart

#: Instructions that may wait for copies while the host goes on with those of other memories.
_MOST_BEHIND = 64

#: POSIX; elsewhere the host just goes on.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class BoundStep:
    """A step that can be executed.

    Args:
        executable: Gives what a ``Run`` calls; it is not asked for those of other processes.
        part: What this process executes of it, where several share the step; all if None.
        calls: Programs, by name, whose executables are not called on the arrays of their slots one
            after the other.
    """

    def __init__(
        self,
        step: Step,
        executable: Callable[[Run], Executable],
        layout: Layout,
        part: StepPart | None = None,
        calls: Mapping[str, Call] = MappingProxyType({}),
    ):
        self.step, self._part, self._executable, self._layout = step, part, executable, layout
        self._calls, self._runs = dict(calls), dict[str, Run]()
        self._persistent = frozenset(step.persistent.values())
        self._reported = frozenset(step.reported)
        self._actions = [
            (part and part.bind(number, each)) or self._bind(each)
            for number, each in enumerate(step.instructions)
        ]

    @cached_property
    def state_shardings(self) -> dict[str, list[Any]]:
        """The shardings of the arrays of each persistent slot of this process, by name."""
        held = {name: self.step.slots[slot] for name, slot in self.step.persistent.items()}
        return {
            name: [struct.sharding for struct in self._layout(slot)]
            for name, slot in held.items()
            if self._part is None or self._part.has(slot.place)
        }

    @cached_property
    def waits(self) -> list[tuple[int, ...]]:
        """The slots, per instruction, whose arrays must be ready before it is issued. Devices that
        have finished nothing else then hold no more than is booked, and together with the scratch
        of their kernels no more than a step in program order takes."""
        with_kernels = self._waits(self._scratch_bytes)
        return [
            tuple(dict.fromkeys((*arrays, *kernels)))
            for arrays, kernels in zip(self._waits(lambda name: 0), with_kernels, strict=True)
        ]

    @cached_property
    def _waiting_actions(self) -> list[Action]:
        return [
            _after(slots, action) if slots else action
            for slots, action in zip(self.waits, self._actions, strict=True)
        ]

    def _waits(self, scratch_bytes: Callable[[str], int]) -> list[tuple[int, ...]]:
        ledger, part = replay(with_scratch(self.step, scratch_bytes)), self._part
        memories = part.memories if part else self.step.users
        budget = {memory: ledger.peak_of(memory).peak_bytes for memory in memories}
        return waits(with_scratch(part.view if part else self.step, scratch_bytes), budget)

    def __call__(
        self,
        state: Mapping[str, list[jax.Array]],
        microbatches: Sequence[Sequence[Any]],
        *,
        stop: int | None = None,
        bound_run_ahead: bool = False,
        observer: Observer | None = None,
    ) -> tuple[dict[str, list[jax.Array]], list[jax.Array]]:
        """Execute the instructions.

        Args:
            state: Per persistent slot its arrays; consumed. Of several processes, each has those
                of its places.
            stop: Before this instruction; None for all.
            bound_run_ahead: Whether the host waits so that devices hold no more than is booked.

        Returns:
            The state after the step, by slot, and what it reports; they need not be ready yet.
            Where it was stopped, every slot that is then alive stands beside the state.
        """
        step = self.step
        frame = Frame([None] * len(step.slots), microbatches, [])
        for name, slot in step.persistent.items():
            frame.slots[slot] = state[name] if self._part is None else state.get(name)
        if self._part is not None:
            self._part.begin()
        actions = (self._waiting_actions if bound_run_ahead else self._actions)[:stop]
        if observer is None and self._held and self._part is None and not bound_run_ahead:
            self._issue_by_place(frame, actions)
        elif observer is None:
            for action in actions:
                action(frame)
        else:
            for instruction, action in zip(step.instructions, actions, strict=False):
                observer(instruction, frame.slots)
                action(frame)
        left: Mapping[str, int] = step.persistent | step.made
        if stop is not None:
            left = {slot.name: number for number, slot in enumerate(step.slots)}
        found = ((name, frame.slots[slot]) for name, slot in left.items())
        alive = {name: arrays for name, arrays in found if arrays is not None}
        return alive, frame.reported

    @cached_property
    def _held(self) -> dict[int, int]:
        """The slot of each wait that only some memories wait for, by number of the wait."""
        return {
            number: each.slot
            for number, each in enumerate(self.step.instructions)
            if isinstance(each, Wait) and each.place is not None
        }

    @cached_property
    def _touches(self) -> list[Touches]:
        return [Touches.of(self.step, each) for each in self.step.instructions]

    def _issue_by_place(self, frame: Frame, actions: Sequence[Action]) -> None:
        """Issue in order, but for waits of some memories and what comes behind these. That is
        issued when the copies have ended, or when so much waits that the host does, too."""
        behind, busy = list[int](), Touches()
        for number, action in enumerate(actions):
            full = len(behind) > _MOST_BEHIND
            if full or any(self._over(frame, n) for n in behind):
                behind, busy = self._issue_behind(frame, actions, behind, full)
            if not busy.hold_up(self._touches[number]) and self._over(frame, number) is not False:
                action(frame)
            else:
                behind.append(number)
                busy |= self._touches[number]
        while behind:
            behind, busy = self._issue_behind(frame, actions, behind, True)

    def _issue_behind(
        self, frame: Frame, actions: Sequence[Action], behind: Sequence[int], first: bool
    ) -> tuple[list[int], Touches]:
        """Issue what can be of the instructions that are held back, with ``first`` the first one in
        any case: that is a wait. Return the rest, and what these hold up."""
        rest, busy = list[int](), Touches()
        for number in behind:
            free = not busy.hold_up(self._touches[number])
            if first or (free and self._over(frame, number) is not False):
                actions[number](frame)
            else:
                rest.append(number)
                busy |= self._touches[number]
            first = False
        return rest, busy

    def _over(self, frame: Frame, number: int) -> bool | None:
        """Return whether a wait's copy has ended; None for what is no wait of some memories."""
        if number not in self._held:
            return None
        arrays: Any = frame.slots[self._held[number]]  # JAX's stubs leave a method out
        return arrays is not None and all(array.is_ready() for array in arrays)

    def _scratch_bytes(self, name: str) -> int:
        """Return what kernels of a program allocate per device beside its temporaries."""
        run = self._runs.get(name)
        return 0 if run is None else self._executable(run).scratch.nbytes

    def _bind(self, instruction: Instruction) -> Action:
        slots, layout = self.step.slots, self._layout
        match instruction:
            case Feed():
                return _bind_feed(instruction, layout(slots[instruction.slot]))
            case Run():
                return self._bind_run(instruction, self._call(instruction))
            case Copy(source=source, target=target):
                return _bind_copy(instruction, layout(slots[source]), layout(slots[target]))
            case Wait(slot=slot):
                return lambda frame: _ready(frame, slot)
            case Free(slots=freed):
                return self._bind_free(freed)

    def _call(self, run: Run) -> Call:
        """Return the call of a run's program, which is the same wherever it runs."""
        name = run.program
        self._runs[name] = run
        if name not in self._calls:
            call = flat_call(self._executable(run).call)
            counts = (len(self._layout(self.step.slots[slot])) for slot in run.outputs)
            parts = list(pairwise(accumulate(counts, initial=0)))

            def on_slots(flat: list[jax.Array]) -> list[list[jax.Array]]:
                results = call(flat)
                return [results[first:stop] for first, stop in parts]

            self._calls[name] = on_slots
        return self._calls[name]

    def _bind_run(self, run: Run, call: Call) -> Action:
        """Bind a run. The caller still refers to the old state, so dropping the step's reference
        does not free it: what is donated of it is deleted.

        The call itself deletes only what XLA reuses, and it may reuse a residual of the same shape
        for the new gradients instead of the old.
        """
        inputs, donated, outputs = run.read, run.donated, run.outputs
        consumed = [slot for slot in donated if slot in self._persistent]
        reported = [slot for slot in outputs if slot in self._reported]

        def action(frame: Frame) -> None:
            slots = frame.slots
            flat: list[Any] = []
            for slot in inputs:
                flat += slots[slot]  # type: ignore[arg-type]  # alive, by the step's check
            results = call(flat)
            for slot in consumed:
                _delete(slots[slot])
            for slot in donated:
                slots[slot] = None
            for slot, arrays in zip(outputs, results, strict=True):
                slots[slot] = arrays
            for slot in reported:
                frame.reported += slots[slot] or ()

        return action

    def _bind_free(self, freed: Sequence[int]) -> Action:
        """Bind a free. Dropping the reference frees a slot, but the arrays of the old state are
        still the caller's: those are deleted."""
        consumed = [slot for slot in freed if slot in self._persistent]

        def action(frame: Frame) -> None:
            for slot in consumed:
                _delete(frame.slots[slot])
            for slot in freed:
                frame.slots[slot] = None

        return action


def to_device(leaf: object, sharding: jax.sharding.Sharding) -> jax.Array:
    """Put a host array or a random key on the devices, in buffers of their own; where some devices
    are of other processes, each process puts its part there."""
    if isinstance(leaf, jax.Array):
        if sharding.is_fully_addressable:
            return reshard(leaf, sharding)
        data = to_device(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return to_devices(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))(array)


def placed(
    arrays: Iterable[jax.Array], shardings: Iterable[jax.sharding.Sharding]
) -> list[jax.Array]:
    """Return arrays of any device as ``to_device`` puts each, over the host."""
    pairs = zip(arrays, shardings, strict=True)
    return [to_device(to_host(array), sharding) for array, sharding in pairs]


def to_host(array: jax.Array) -> Any:
    """Return a NumPy array; typed random keys stay JAX arrays, on the default device."""
    if is_key(array):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(array))), impl=jax.random.key_impl(array)
        )
    return np.asarray(array)


def _after(slots: Sequence[int], action: Action) -> Action:
    """Let an action wait for slots, for the last array of each: arrays of a slot are ready
    together, and asking each would take longer than the instruction itself.

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


def _ready(frame: Frame, slot: int) -> None:
    """Wait for the arrays of a copy, each of which is ready on its own."""
    arrays = frame.slots[slot]
    assert arrays is not None, f"slot {slot} is awaited and not alive"
    for array in arrays:
        array.block_until_ready()


def _bind_feed(feed: Feed, structs: Sequence[jax.ShapeDtypeStruct]) -> Action:
    slot, microbatch = feed.slot, feed.microbatch
    puts = [(b, _put(struct)) for b, struct in zip(feed.batch, structs, strict=True)]

    def action(frame: Frame) -> None:
        leaves = frame.microbatches[microbatch]
        frame.slots[slot] = [put(leaves[b]) for b, put in puts]

    return action


def _put(struct: jax.ShapeDtypeStruct) -> Put:
    sharding = struct.sharding
    assert sharding is not None
    if is_key(struct):
        return lambda key: to_device(key, sharding)
    return to_devices(struct)


def _bind_copy(
    copy: Copy, sources: Sequence[jax.ShapeDtypeStruct], targets: Sequence[jax.ShapeDtypeStruct]
) -> Action:
    first, last = copy.source, copy.target
    move = plan_moves(copy.taken(sources), [target.sharding for target in targets])

    def action(frame: Frame) -> None:
        arrays = frame.slots[first]
        assert arrays is not None, f"{copy.label}: the source is not alive"
        frame.slots[last] = list(move(copy.taken(arrays)))

    return action


def _delete(arrays: Sequence[jax.Array] | None) -> None:
    for array in arrays or ():
        if not array.is_deleted():
            array.delete()
