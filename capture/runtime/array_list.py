"""One list of instructions of an array of models, as meters and training loops ask of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from capture.compiler.executable import Executable
from capture.plan.array import ArrayPlan
from capture.runtime.array_programs import ArrayPrograms
from capture.runtime.array_state import ArrayMetrics, ArrayState, Losses, check_array_state
from capture.runtime.frame import Observer
from capture.runtime.fused import FusedArray
from capture.runtime.train_step import Metered
from capture.step.multiplexed import ArraySteps
from capture.step.program import Run, Slot, Step


class ArrayList(Metered):
    """The prologue, the body or the epilogue of an array."""

    def __init__(
        self,
        plan: ArrayPlan,
        arrays: Sequence[FusedArray],
        programs: ArrayPrograms,
        steps: ArraySteps,
        program: Step,
    ):
        self._plan, self._arrays, self._programs, self._steps = plan, arrays, programs, steps
        self._program, self.devices = program, [programs.device]
        self.reads_batch = program is not steps.epilogue

    @property
    def program(self) -> Step:
        """The instructions."""
        return self._program

    def executable(self, run: Run) -> Executable:
        return self._programs.executables[run.program]

    def layout(self, slot: Slot) -> Sequence[jax.ShapeDtypeStruct]:
        array, sharding = self._arrays[slot.holds.array], self._programs.sharding(slot.place)
        return self._programs.structs(array, slot.holds.bundle, sharding)

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
        """
        check_array_state(state, self.program)
        batches = [] if state.ahead is None else [state.ahead[0]]
        batches += [] if batch is None else [batch]
        start = time.thread_time()
        slots, reported = self.bound(
            state.slots, batches, bound_run_ahead=self.bound_run_ahead, observer=observer
        )
        new, losses = self._completed(state, slots, batches, reported)
        if observer is not None and new.ahead is not None:
            # What the step reports is booked as released.
            new = replace(new, ahead=(new.ahead[0], np.array(new.ahead[1])))
        return new, ArrayMetrics(losses, time.thread_time() - start)

    def _completed(
        self,
        state: ArrayState,
        slots: dict[str, list[jax.Array]],
        batches: Sequence[Sequence[object]],
        reported: Sequence[jax.Array],
    ) -> tuple[ArrayState, Losses | None]:
        """Return the new state, and the losses of the update that is complete, if one is."""
        plan, steps, built = self._plan, self._steps, self.program
        of = [built.slots[slot].holds.array for slot in built.reported]
        losses = dict(zip(of, reported, strict=True))
        begins = steps.prologue is not None and self.reads_batch
        ahead = (batches[-1], losses[0]) if begins else None
        if built is steps.prologue:
            return ArrayState(slots, plan, state.num_steps, ahead), None
        if state.ahead is not None:
            losses[0] = state.ahead[1]
        done = Losses(plan.partition, [losses[a] for a in range(len(self._arrays))])
        return ArrayState(slots, plan, state.num_steps + 1, ahead), done
