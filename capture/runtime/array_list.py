"""One list of instructions of an array of models, as meters and training loops ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from capture.compiler.executable import Executable
from capture.errors import ExecutionError
from capture.quantities import format_bytes
from capture.runtime.array_state import ArrayMetrics, ArrayState, Losses
from capture.runtime.dispatch import Observer
from capture.runtime.layout import check_device_memory, check_host_memory
from capture.runtime.train_step import Metered
from capture.step.ledger import Ledger
from capture.step.multiplexed import HOST, peak_of
from capture.step.program import Run, Step

#: Executes instructions on a state, with batches of the update that was begun and of the next one.
Execute = Callable[
    [Step, ArrayState, Sequence[Sequence[Any]], Observer | None], tuple[ArrayState, Losses | None]
]


class ArrayList(Metered):
    """The prologue, the body or the epilogue of an array.

    Args:
        program: The instructions.
        devices: The device of the array.
        executable: Gives what an instruction runs.
        execute: Executes them.
        reads_batch: Whether they begin an update.
    """

    def __init__(
        self,
        program: Step,
        devices: list[Any],
        executable: Callable[[Run], Executable],
        execute: Execute,
        reads_batch: bool = True,
    ):
        self._program, self.devices, self.reads_batch = program, devices, reads_batch
        self._executable, self._execute = executable, execute

    @property
    def program(self) -> Step:
        """The instructions."""
        return self._program

    def executable(self, run: Run) -> Executable:
        """Return the compiled program that an instruction runs."""
        return self._executable(run)

    def __call__(
        self,
        state: ArrayState,
        batch: Sequence[Any] | None,
        key: jax.Array | None = None,
        *,
        observer: Observer | None = None,
    ) -> tuple[ArrayState, ArrayMetrics]:
        """Execute the instructions.

        Args:
            state: Is taken over.
            batch: The leaves of all sub-arrays (``capture.runtime.array_batches.stacked``); None
                for the end of an update that was begun.
            key: Not read: models draw by their own seeds.
            observer: Called before every instruction.
        """
        batches = [] if state.ahead is None else [state.ahead[0]]
        batches += [] if batch is None else [batch]
        start = time.thread_time()
        state, losses = self._execute(self._program, state, batches, observer)
        if observer is not None and state.ahead is not None:
            # What the step reports is booked as released.
            state = replace(state, ahead=(state.ahead[0], np.array(state.ahead[1])))
        return state, ArrayMetrics(losses, time.thread_time() - start)


def check_memory(device: jax.Device, ledgers: Sequence[Ledger], limit_bytes: int | None) -> None:
    """Refuse an array that a plan's limit, the device or the host does not hold.

    Raises:
        ExecutionError: ``array-device-memory``, ``run-device-memory``, ``run-host-memory``.
    """
    check_host_memory(device, peak_of(ledgers, HOST)[0])
    peak_bytes, instant, parts = peak_of(ledgers, 0)
    if limit_bytes is not None and peak_bytes > limit_bytes:
        listed = ", ".join(f"{what} {format_bytes(n)}" for what, n in parts.items())
        raise ExecutionError.of(
            f"the device needs {format_bytes(peak_bytes)} at {instant!r} ({listed}), and the "
            f"plan's limit is memory_limit_bytes={limit_bytes}; plan it again for this machine, or "
            "raise the limit.",
            "array-device-memory",
        )
    check_device_memory([device], [peak_bytes])
