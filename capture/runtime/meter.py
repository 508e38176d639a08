"""Measure a step that is really executed, independently of the replay: live arrays, the allocator,
the process's resident set.

    meter                  what it reads                                            where
    live arrays            ``jax.live_arrays()`` + XLA's buffer assignment          any device, host
    allocator              ``device.memory_stats()["peak_bytes_in_use"]``           GPU
    heap                   glibc's ``mallinfo2``: bytes that malloc has given out   Linux with glibc
    resident set           VmHWM of the process, reset before the step              Linux

A meter that is not available here reads None, never a number of the replay.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from capture.errors import ExecutionError, Violation
from capture.model.workload import PyTree
from capture.runtime.hosts.transport import Buffer, Transport, array_buffers, buffers
from capture.runtime.process_memory import ResidentSetMeter
from capture.runtime.train_step import Metered
from capture.step.ledger import Ledger, Memory, name_of
from capture.step.program import Instruction, Run, Step, begin, book

ALLOCATOR = "allocator high-water mark since the process began (memory_stats peak_bytes_in_use)"


@dataclass(frozen=True)
class Measurement:
    """The memory, the loss and the state of one executed step.

    Attributes:
        peak_bytes_per_device: By device id of the plan; where several processes share the step,
            those of this one's devices, in the same order.
        meter: What ``peak_bytes_per_device`` was read from.
        live_peak_bytes_per_device: What the live-array meter saw; the same where there is no
            allocator to read.
        resident_set_before_bytes, resident_set_peak_bytes: Memory of the whole process on its host;
            None where they cannot be read.
        num_checks: Instructions before which the ledger was compared with the live arrays; 0 unless
            strict.
        waiting_peak_bytes: Of each of the devices of ``peak_bytes_per_device``, the most that was
            offered to other processes and not acknowledged; 0 unless strict.
        loss: What the step returned; a list of several models, None of an update that only begins.
        host_peak_bytes: Of the slots of a step that keeps some on the host; else 0.
    """

    peak_bytes_per_device: tuple[int, ...]
    meter: str
    live_peak_bytes_per_device: tuple[int, ...]
    resident_set_before_bytes: int | None
    resident_set_peak_bytes: int | None
    num_checks: int
    loss: Any
    state: Any
    host_peak_bytes: int = 0
    waiting_peak_bytes: tuple[int, ...] = ()

    def then(self, later: Measurement) -> Measurement:
        """Return what both need together, the second after the first."""
        return replace(
            later,
            peak_bytes_per_device=_most(self.peak_bytes_per_device, later.peak_bytes_per_device),
            live_peak_bytes_per_device=_most(
                self.live_peak_bytes_per_device, later.live_peak_bytes_per_device
            ),
            resident_set_before_bytes=self.resident_set_before_bytes,
            resident_set_peak_bytes=None
            if self.resident_set_peak_bytes is None or later.resident_set_peak_bytes is None
            else max(self.resident_set_peak_bytes, later.resident_set_peak_bytes),
            num_checks=self.num_checks + later.num_checks,
            host_peak_bytes=max(self.host_peak_bytes, later.host_peak_bytes),
            waiting_peak_bytes=_most(self.waiting_peak_bytes, later.waiting_peak_bytes),
        )


def _most(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(max, one, other))


def measure_step(
    step: Metered,
    state: object,
    batch: PyTree,
    key: jax.Array | None = None,
    *,
    strict: bool = False,
) -> Measurement:
    """Execute one step under every meter that works here.

    The live-array meter looks at every instruction, so the step runs slower than usual, in program
    order.

    Args:
        state: Consumed; go on with ``Measurement.state``.
        strict: Compare the booked ledger with the live arrays before every instruction and after
            the last.

    Raises:
        ExecutionError: ``run-ledger-mismatch`` if strict and a device holds other bytes than
            booked.
    """
    jax.block_until_ready(state)
    live, resident = LiveArrayMeter.of(step, strict=strict), ResidentSetMeter()
    resident.start()
    state, metrics = step(state, batch, key, observer=live)
    loss = metrics.loss
    del metrics  # its losses are live, and booked as released
    live.finish()
    jax.block_until_ready(state)
    peaks, meter = live.peak_bytes_per_device, live.meter
    if (allocated := allocator_peaks(filter(_is_here, step.devices))) is not None:
        peaks, meter = allocated, ALLOCATOR
    return Measurement(
        peaks,
        meter,
        live.peak_bytes_per_device,
        resident.before_bytes,
        resident.peak_bytes,
        live.num_checks,
        loss,
        state,
        max(map(live.peak_bytes_of, live.hosts), default=0),
        live.waiting_peak_bytes,
    )


class LiveArrayMeter:
    """The peak per memory, from live arrays and the buffer assignment of the program to run next.

    An observer of the execution of any step; then ``meter.finish()``. Arrays that were alive before
    the step and are not its state (the caller's batch, other models) are left out.

    **Assumes** that nothing else in the process makes or drops arrays during the step.

    Args:
        devices: By device id of the step.
        transient_bytes: Gives what the executable that an instruction runs needs while it runs.
        strict: Book the instructions in a ledger too, and compare the two before every instruction,
            and with the live arrays what waits to be pulled.
    """

    def __init__(
        self,
        step: Step,
        devices: Sequence[jax.Device],
        transient_bytes: Callable[[Run], int],
        *,
        strict: bool = False,
        transport: Transport | None = None,
    ):
        self._transport, self._waiting_peak = transport, Counter[Memory]()
        self.strict, self.num_checks = strict, 0
        self._step, self._devices, self._transient_bytes = step, devices, transient_bytes
        #: Where arrays of a device are that are not in its own memory.
        self._host = {
            devices[device]: place.host.name
            for place in step.places
            if place.host is not None
            for device in place.devices
            if _is_here(devices[device])
        }
        self._id = {device: number for number, device in enumerate(devices)}
        #: Those of this process.
        self._here = [number for number, device in enumerate(devices) if _is_here(device)]
        self._memories: list[Memory] = [*self._here, *dict.fromkeys(self._host.values())]
        self._ledger = Ledger(len(devices))
        self._peak: Counter[Memory] = Counter()
        self._foreign: list[jax.Array] = []
        self._seen: dict[
            int, tuple[Any, Sequence[tuple[Buffer, int]]]
        ] = {}  # an array's addresses stay; looking them up takes longest
        self._baseline: Counter[Memory] | None = None

    @classmethod
    def of(cls, step: Metered, *, strict: bool = False) -> LiveArrayMeter:
        """Return a meter for ``step(state, batch, observer=meter)``."""
        return cls(
            step.program,
            step.devices,
            lambda run: step.executable(run).transient_bytes,
            strict=strict,
            transport=step.hosts.transport if strict and step.hosts is not None else None,
        )

    @property
    def meter(self) -> str:
        return (
            "live arrays + XLA buffer assignment of the running program "
            f"({self._devices[0].platform})"
        )

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        return tuple(self._peak[number] for number in self._here)

    @property
    def waiting_peak_bytes(self) -> tuple[int, ...]:
        """The most bytes that each of this process's devices had on offer to other processes."""
        return tuple(self._waiting_peak[number] for number in self._here)

    @property
    def hosts(self) -> set[str]:
        """The memories of this process's hosts that the step uses."""
        return {*self._host.values()}

    def peak_bytes_of(self, memory: Memory) -> int:
        """Return the peak of a device's memory or of a host's, in bytes."""
        return self._peak[memory]

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        """Look before an instruction.

        Raises:
            ExecutionError: ``run-ledger-mismatch``.
        """
        if self._baseline is None:
            state = (slots[slot] for slot in self._step.persistent.values())
            self._begin([array for arrays in state for array in arrays or ()])
        live = self._look(getattr(instruction, "label", "a release"))
        if isinstance(instruction, Run):
            memories = Counter(self._step.programs[instruction.program].place.memories)
            for memory in memories.keys() & live.keys():
                running = memories[memory] * self._transient_bytes(instruction)
                self._peak[memory] = max(self._peak[memory], live[memory] + running)
        book(self._ledger, self._step, instruction)

    def _begin(self, state: list[jax.Array]) -> None:
        """Set apart what is alive and not of the step, and keep it alive, so that it counts the
        same until the end."""
        own = buffers(state)
        self._foreign = [
            array for array in jax.live_arrays() if not buffers([array]).keys() <= own.keys()
        ]
        self._baseline = self._per_memory(
            {buffer: size for buffer, size in buffers(self._foreign).items() if buffer not in own}
        )
        begin(self._ledger, self._step)
        if self._transport is not None:
            self._transport.waiting = {}

    def finish(self) -> None:
        """Look once more, after the last instruction; the new state must still be alive, and what
        the step reports no more.

        Raises:
            ExecutionError: ``run-ledger-mismatch``.
        """
        assert self._baseline is not None, "the meter observes a step before it is finished"
        self._look("the end of the step")
        if self._transport is not None:
            self._transport.waiting = None

    def _look(self, label: str) -> dict[Memory, int]:
        """Return the bytes of the step that are alive, by memory, noted and checked."""
        found = self._live()
        live, before, booked = (
            self._per_memory(found),
            self._baseline or Counter(),
            self._ledger.live_bytes,
        )
        own = {memory: live[memory] - before[memory] for memory in self._memories}
        for memory, nbytes in own.items():
            self._peak[memory] = max(self._peak[memory], nbytes)
        if self.strict:
            self.num_checks += 1
            ExecutionError.check(
                Violation(
                    f"before {label!r} {name_of(memory)} holds {nbytes} bytes of live arrays and "
                    f"the ledger has booked {booked[memory]}; an array "
                    "outlives its last use, or dies early: drop references to arrays of the step, "
                    "or report a defect of the runtime.",
                    "run-ledger-mismatch",
                )
                for memory, nbytes in own.items()
                if nbytes != booked[memory]
            )
            self._look_at_offers(label, found)
        return own

    def _look_at_offers(self, label: str, live: Mapping[Buffer, int]) -> None:
        """Check that what waits to be pulled is in arrays that are alive, and therefore booked."""
        offers = (self._transport and self._transport.waiting) or {}
        waiting = {buffer: size for offer in offers.values() for buffer, size in offer.items()}
        for memory, nbytes in self._per_memory(waiting).items():
            self._waiting_peak[memory] = max(self._waiting_peak[memory], nbytes)
        lost = {buffer: size for buffer, size in waiting.items() if live.get(buffer, 0) < size}
        ExecutionError.check(
            Violation(
                f"before {label!r} {name_of(memory)} has offered {nbytes} bytes to other "
                "processes that no array holds any more, so that the ledger has not booked them; "
                "report a defect of the runtime.",
                "run-ledger-mismatch",
            )
            for memory, nbytes in self._per_memory(lost).items()
        )

    def _live(self) -> dict[Buffer, int]:
        """Return the bytes of all buffers that arrays hold."""
        found: dict[Buffer, int] = {}
        others = {id(array) for array in (self._transport.held if self._transport else ())}
        for array in jax.live_arrays():
            if array.is_deleted() or id(array) in others:
                continue
            reference, known = self._seen.get(id(array), (None, ()))
            if reference is None or reference() is not array:
                known = array_buffers(array)
                self._seen[id(array)] = weakref.ref(array), known
            found.update(known)
        return found

    def _per_memory(self, sizes: dict[Buffer, int]) -> Counter[Memory]:
        """Sum up bytes per memory of the step, of devices and of hosts."""
        total: Counter[Memory] = Counter()
        for (device, kind, _), nbytes in sizes.items():
            if kind == device.default_memory().kind:
                total[self._id.get(device, -1)] += nbytes
            else:
                total[self._host.get(device, "")] += nbytes
        return total


def _is_here(device: jax.Device) -> bool:
    """Return whether a device is this process's."""
    return device.process_index == jax.process_index()


def allocator_peaks(devices: Iterable[jax.Device]) -> tuple[int, ...] | None:
    """Return the high-water mark of each device's allocator; None where the platform keeps no such
    statistics (CPU). It cannot be reset: it is that of the step only in a fresh process."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return None if None in peaks else tuple(int(peak) for peak in peaks if peak is not None)
