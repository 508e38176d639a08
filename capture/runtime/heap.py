"""Measure what malloc gives out during an ordinary step on CPU, and bound it: by what the step
books, and four parts that no report of XLA names.

    booked       over all memories of this process, the replayed peak less what outlives the step
    scratch      what kernels allocate while they run (``capture.compiler.scratch``): the replayed
                 peak with it, less the peak without
    unreturned   per memory, what the largest program gives back when it ends: its thread says that
                 results are ready before it frees that, and on busy cores the next one starts
                 first
    fed          per memory, the largest feed: the host's copy of a micro-batch, which is there
                 until the device has its own; and leaves that are converted to a dtype of JAX
    objects      those of JAX and XLA, per device
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from capture.model.workload import PyTree
from capture.runtime.frame import Observer
from capture.runtime.process_memory import HeapMeter
from capture.runtime.train_step import Metered
from capture.step.ledger import Ledger, Memory, is_device
from capture.step.program import Feed, Instruction, Place, Run, Step, begin, replay
from capture.step.run_ahead import with_scratch

#: What a running program takes per device beside arrays and scratch: 0.3 to 0.5 MB were seen.
OBJECT_BYTES = 700_000


@dataclass(frozen=True)
class HeapMeasurement:
    """The bytes that malloc gave out during one ordinary step, in which nothing but the runtime
    itself waits for a device.

    Attributes:
        before_bytes, peak_bytes: What malloc had given to the whole process.
        booked_bytes, scratch_bytes, unreturned_bytes, fed_bytes, object_bytes: The most that the
            step may add, part by part; devices need not reach their peaks together.
        unbounded: Calls of libraries whose scratch nobody knows, by their names: with any, what the
            step adds has no bound.
    """

    source: str
    before_bytes: int
    peak_bytes: int
    booked_bytes: int
    scratch_bytes: int
    unreturned_bytes: int
    fed_bytes: int
    object_bytes: int
    unbounded: tuple[str, ...] = ()

    @property
    def step_bytes(self) -> int:
        """The bytes that the step added."""
        return self.peak_bytes - self.before_bytes

    @property
    def bound_bytes(self) -> int:
        """The most bytes that the step may add."""
        beyond = self.unreturned_bytes + self.fed_bytes + self.object_bytes
        return self.booked_bytes + self.scratch_bytes + beyond

    def as_document(self) -> dict[str, Any]:
        """Return the fields, what the step added, and the most that it may add: None if unknown."""
        bound = None if self.unbounded else self.bound_bytes
        named = asdict(self) | {"unbounded": list(self.unbounded)}
        return named | {"step_bytes": self.step_bytes, "bound_bytes": bound}


def measure_heap(
    step: Metered,
    state: object,
    batch: PyTree,
    key: jax.Array | None = None,
    *,
    observer: Observer | None = None,
) -> tuple[Any, Any, HeapMeasurement | None]:
    """Execute a step as usual and watch malloc, where XLA's CPU devices allocate: the meter that
    knows neither ledger nor compiler.

    It counts the whole process, so the first step of a process, which compiles, tells nothing.

    Args:
        observer: Called before every instruction, and the counter is read after it, too.

    Returns:
        The step's results, ready, and the measurement: None where there is no such counter, or the
            devices have memory of their own.
    """
    jax.block_until_ready(state)
    heap = HeapMeter()
    heap.start()

    def observe(instruction: Instruction, slots: list[object]) -> None:
        heap()
        if observer is not None:
            observer(instruction, slots)
            heap()

    state, metrics = step(state, batch, key, observer=observe)
    jax.block_until_ready((state, metrics.losses))
    heap.stop()
    if heap.before_bytes is None or heap.peak_bytes is None or step.devices[0].platform != "cpu":
        return state, metrics, None
    found = _parts(step)
    found["fed_bytes"] += sum(map(_converted_bytes, jax.tree.leaves(batch)))
    measured = HeapMeasurement(
        heap.meter, heap.before_bytes, heap.peak_bytes, **found, unbounded=_unbounded(step)
    )
    return state, metrics, measured


def _runs(step: Metered) -> dict[str, Run]:
    """Return an instruction of this process per program."""
    programs, here = step.program.programs, _memories(step)
    runs = {each.program: each for each in step.program.runs}
    return {name: run for name, run in runs.items() if here & {*programs[name].place.memories}}


def _memories(step: Metered) -> set[Memory]:
    """Return the memories of this process: its devices, and hosts where a step keeps something."""
    process = jax.process_index()
    devices = {n for n, device in enumerate(step.devices) if device.process_index == process}
    return devices | {memory for memory in step.program.users if not is_device(memory)}


def _parts(step: Metered) -> dict[str, int]:
    """Return what a step may add to malloc's bytes, in the parts of ``HeapMeasurement``."""
    program, memories, runs = step.program, _memories(step), _runs(step)
    ledger = Ledger(program.num_devices)
    begin(ledger, program)
    roomy = with_scratch(
        program, lambda name: step.executable(runs[name]).scratch.nbytes if name in runs else 0
    )
    booked, with_kernels = replay(program), replay(roomy)
    unreturned, fed = Counter[Memory](), Counter[Memory]()
    for instruction in program.instructions:
        match instruction:
            case Run(program=name):
                place = program.programs[name].place
                _most(unreturned, place, _given_back(program, instruction))
            case Feed(slot=fed_slot):
                slot = program.slots[fed_slot]
                _most(fed, slot.place, slot.nbytes)
    peaks = {memory: booked.peak_of(memory).peak_bytes for memory in memories}
    return {
        "booked_bytes": sum(peaks[memory] - ledger.live_bytes[memory] for memory in memories),
        "scratch_bytes": sum(
            with_kernels.peak_of(memory).peak_bytes - peaks[memory] for memory in memories
        ),
        "unreturned_bytes": sum(unreturned[memory] for memory in memories),
        "fed_bytes": sum(fed[memory] for memory in memories),
        "object_bytes": OBJECT_BYTES * sum(map(is_device, memories)),
    }


def _most(found: Counter[Memory], place: Place, nbytes: int) -> None:
    """Keep the most bytes per memory, of a place with so many on each of its devices."""
    for memory, count in Counter(place.memories).items():
        found[memory] = max(found[memory], count * nbytes)


def _given_back(step: Step, run: Run) -> int:
    """Return the bytes that a program frees when it ends: temporaries, and what was donated."""
    made = sum(step.slots[slot].nbytes for slot in run.outputs)
    donated = sum(step.slots[slot].nbytes for slot in run.donated)
    return max(0, step.programs[run.program].transient_bytes - made + donated)


def _unbounded(step: Metered) -> tuple[str, ...]:
    calls = (
        call for run in _runs(step).values() for call in step.executable(run).scratch.unbounded
    )
    return tuple(dict.fromkeys(calls))


def _converted_bytes(leaf: object) -> int:
    """Return the bytes of the copy that the host makes of a whole leaf of the batch."""
    if isinstance(leaf, jax.Array):
        return 0 if len(leaf.sharding.device_set) == 1 else leaf.nbytes
    array = np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    is_taken = isinstance(leaf, np.ndarray) and array.dtype == dtype
    return 0 if is_taken else array.size * (array.itemsize + dtype.itemsize)
