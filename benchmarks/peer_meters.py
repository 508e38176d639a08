"""Meters that look at JAX alone, so that they measure every library's step in the same way.

``PythonThreads`` reads the processor time of the threads that issue a step's programs: some
libraries issue from the calling thread, some from threads of their own. Threads of XLA, which run
the programs, are not Python's and not counted.

``measure_memory`` counts programs where Python hands them to C++
(``LoadedExecutable.execute_sharded``; the C++ caches of ``jax.jit`` and of compiled calls, which
would go past it, are off). Before every program, and at the end of the step, all that was issued
is waited for, and the live arrays are added up per device, every buffer once:

    peak of a device = max over programs of  live arrays + temporaries + outputs - aliased inputs

the last three by XLA's memory report of the program, on its devices. The batch lies in host memory.
These parts of JAX are private: jax 0.10 to 0.12 have them.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.peer_libraries import LIBRARIES, Case, Trainer
from capture.runtime.meter import Buffer, buffers

NUM_STEPS = 3


def await_step(trainer: Trainer, result: Any) -> None:
    """Arrays of a library's own, too, which JAX's own function passes over."""
    for array in jax.tree.leaves((result, trainer.state)):
        array.block_until_ready()


class PythonThreads:
    """Processor time of all threads that Python started but the calling one, while it is entered;
    what ended before does not count, what ended meanwhile does."""

    def __init__(self) -> None:
        self._ended: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._ended_seconds = 0.0
        #: Held while a thread ends and while others' clocks are read: that of a thread that is gone
        #: must not be.
        self._lock = threading.Lock()

    def __enter__(self) -> PythonThreads:
        self._run = run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            try:
                run(thread)
            finally:
                with self._lock:
                    self._ended.add(thread)
                    self._ended_seconds += time.thread_time()

        threading.Thread.run = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        threading.Thread.run = self._run  # type: ignore[method-assign]

    def seconds(self) -> float:
        with self._lock:
            return self._ended_seconds + sum(
                time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                for thread in threading.enumerate()
                if thread not in self._ended and thread.ident not in (None, threading.get_ident())
            )


@dataclass(frozen=True)
class Memory:
    """What a step held.

    Attributes:
        peak_bytes_per_device: The most of ``NUM_STEPS`` steps.
        between_steps_bytes_per_device: Of what outlives a step.
        num_programs: That a step runs.
    """

    peak_bytes_per_device: tuple[int, ...]
    between_steps_bytes_per_device: tuple[int, ...]
    num_programs: int


def measure_memory(name: str, case: Case) -> Memory:
    """For a process of its own: whatever is alive before is left out, and nothing else may make or
    drop arrays meanwhile."""
    with _Meter(case.num_stages).watching() as meter:
        trainer, batch = LIBRARIES[name].make(case), case.batch()
        for _ in range(2):
            await_step(trainer, trainer.step(batch))
        gc.collect()
        between = meter.live()
        for _ in range(NUM_STEPS):
            gc.collect()
            meter.on, meter.num_programs = True, 0
            result = trainer.step(batch)
            await_step(trainer, result)
            meter.look({})
            meter.on = False
            del result
    devices = range(case.num_stages)
    return Memory(
        tuple(meter.peak[d] for d in devices),
        tuple(between[d] for d in devices),
        meter.num_programs,
    )


class _Meter:
    """Attributes:
    on: Whether it looks.
    peak: Bytes by number of the device.
    num_programs: Since the caller set it to 0.
    """

    def __init__(self, num_devices: int):
        self.on, self.num_programs = False, 0
        self.peak: Counter[int] = Counter()
        self._id = {device: d for d, device in enumerate(jax.devices()[:num_devices])}
        self._lock, self._looking = threading.RLock(), threading.local()
        #: The executable itself too, so that its id stays its own.
        self._transient: dict[int, tuple[Any, dict[int, int]]] = {}
        #: An array's addresses stay; looking them up takes longest.
        self._seen: dict[int, tuple[Any, dict[Buffer, int]]] = {}
        self._before: Counter[int] = Counter()
        self._before = self.live()

    @contextmanager
    def watching(self) -> Iterator[_Meter]:
        from jax._src import pjit
        from jax._src.interpreters import pxla
        from jaxlib import _jax

        execute = _jax.LoadedExecutable.execute_sharded

        def watched(executable, *args, **kwargs):
            if self.on:
                with self._lock:
                    self.num_programs += 1
                    self.look(self._transient_of(executable))
            return execute(executable, *args, **kwargs)

        cached = pjit._get_fastpath_data, pxla.MeshExecutable.create_cpp_call
        pjit._get_fastpath_data = lambda *args, **kwargs: None
        pxla.MeshExecutable.create_cpp_call = lambda *args: None
        _jax.LoadedExecutable.execute_sharded = watched
        try:
            yield self
        finally:
            pjit._get_fastpath_data, pxla.MeshExecutable.create_cpp_call = cached
            _jax.LoadedExecutable.execute_sharded = execute

    def look(self, transient: dict[int, int]) -> None:
        live = self.live()
        for d in self._id.values():
            self.peak[d] = max(self.peak[d], live[d] + transient.get(d, 0))

    def live(self) -> Counter[int]:
        """Bytes by number of the device, less what was there before."""
        found: dict[Buffer, int] = {}
        for array in jax.live_arrays():
            # Another thread may delete it meanwhile.
            with suppress(RuntimeError):
                found |= self._buffers(array)
        total: Counter[int] = Counter()
        for (device, *_), nbytes in found.items():
            total[self._id.get(device, -1)] += nbytes
        total.subtract(self._before)
        return total

    def _buffers(self, array: jax.Array) -> dict[Buffer, int]:
        """Once it is ready."""
        if array.is_deleted():
            return {}
        reference, known = self._seen.get(id(array), (None, {}))
        if reference is None or reference() is not array:
            array.block_until_ready()
            known = buffers([array])
            self._seen[id(array)] = weakref.ref(array), known
        return known

    def _transient_of(self, executable: Any) -> dict[int, int]:
        if id(executable) not in self._transient:
            memory = executable.get_compiled_memory_stats()
            nbytes = (
                memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            )
            devices = [self._id[d] for d in executable.local_devices() if d in self._id]
            self._transient[id(executable)] = executable, dict.fromkeys(devices, nbytes)
        return self._transient[id(executable)][1]
