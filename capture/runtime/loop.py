"""The loop over the steps of a training of any kind of plan, and what it measures.

The first execution of each list of instructions is under the meter of live arrays; of those after
it the last is under malloc's, or traced. Batches are drawn one ahead where nothing is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from capture.errors import ExecutionError, PlanError
from capture.options import listed
from capture.plan.step_work import StepWork
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.heap import HeapMeasurement, measure_heap
from capture.runtime.hosts.saved import set_aside
from capture.runtime.hosts.saving import Saver
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import Measurement, measure_step
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.step_record import Records, StepRecord
from capture.runtime.trace import StepTrace
from capture.runtime.train_step import Fed, Metered, TrainStep


@dataclass(frozen=True)
class Loop:
    """The loop over the steps of a training."""

    meters: Meters
    records: Records
    warnings: LossWarnings
    saves: Saves | None
    last: int

    def run(
        self, executions: Sequence[Metered], work: StepWork, fed: Iterator[Fed], state: object
    ) -> Any:
        """Execute all lists of instructions, and return the last state. Where the data end before,
        those are left out that would be fed. An error of the data is raised once the state before
        it is saved; several processes, of which others may go on, keep their last checkpoint.

        Raises:
            ExecutionError: ``run-data``.
        """
        ahead, count = _Ahead(fed), self.last - sum(each.reads_batch for each in executions)
        start = time.perf_counter()
        for number, execution in enumerate(executions):
            try:
                given = ahead.take() if execution.reads_batch else Fed()
            except Exception:
                if self.saves is not None and (saved := self.saves.rescue(state)) is not None:
                    self.records.say(f"an error of the data after step {count}; state -> {saved}")
                raise
            if given is None:
                continue
            if self.saves is not None and self.meters.counts(number):
                self.saves.wait()  # what is written would be counted, too
            if self.meters.leaves_alone(number):
                ahead.begin()
            state, loss = self.meters.execute(number, execution, given, state)
            if loss is None:
                continue
            count, seconds = count + 1, time.perf_counter() - start
            peak, alone = self.meters.peak_bytes, self.meters.leaves_alone(number)
            record = StepRecord.of(work, count, loss, seconds, peak, metered=not alone)
            self.records.add(record, is_last=count == self.last)
            self.warnings.step(count, listed(loss))
            if self.saves is not None:
                self.saves.stepped(state)
            start = time.perf_counter()
        if count < self.last:
            said = f"the data have ended after step {count}, of {self.last} that were asked for"
            if not self.records.told:
                raise ExecutionError.of(f"{said}; give one batch for each step.", "run-data")
            self.records.say(said)
        return state


class _Ahead:
    """The batches of a training, of which a thread may draw the next one beside a step."""

    def __init__(self, fed: Iterator[Fed]):
        self._fed = fed
        self._next: Future[Fed | None] | None = None

    def take(self) -> Fed | None:
        """Return the next; None where the data have ended."""
        begun, self._next = self._next, None
        return next(self._fed, None) if begun is None else begun.result()

    def begin(self) -> None:
        """Begin to draw the next. A process that ends does not wait for it."""
        self._next = Future()
        threading.Thread(target=self._draw, args=(self._next,), daemon=True).start()

    def _draw(self, found: Future[Fed | None]) -> None:
        try:
            found.set_result(next(self._fed, None))
        except BaseException as error:
            found.set_exception(error)


class Meters:
    """The measurements of a training: of each list of instructions the first execution under the
    meter of live arrays; of those after it the last under malloc's, or traced.

    Attributes:
        measured: Of all that were measured; None if none was yet.

    Raises:
        PlanError: ``run-trace`` where a trace is asked for, and no list is executed again.
    """

    def __init__(self, executions: Sequence[Metered], training: Training):
        self._check, self._trace = training.check, training.trace
        seen, self._first, again = set[int](), list[int](), list[int]()
        for number, each in enumerate(executions):
            (again if id(each.program) in seen else self._first).append(number)
            seen.add(id(each.program))
        self._last = again[-1] if again else None
        if training.trace and training.until is None and not again:
            raise PlanError.of(
                f"--trace draws an ordinary step, and of --steps {training.num_steps} all are "
                "under the meters: the first, and where models are multiplexed the last; run more.",
                "run-trace",
            )
        self.measured: Measurement | None = None
        self._heap: HeapMeasurement | None = None
        self._events: list[dict[str, Any]] | None = None
        self._dispatch: list[float] = []

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of a device so far; None before the first measurement."""
        found = self.measured
        return None if found is None else max(found.peak_bytes_per_device, default=None)

    def counts(self, number: int) -> bool:
        """Return whether malloc is watched in an execution."""
        return number == self._last and not self._trace

    def leaves_alone(self, number: int) -> bool:
        """Return whether nothing is measured in an execution."""
        return number not in self._first and number != self._last

    def execute(self, number: int, step: Metered, fed: Fed, state: object) -> tuple[Any, Any]:
        """Execute a list of instructions; return the state, and the loss of a complete update."""
        batch, key = fed
        if number in self._first:
            found = measure_step(step, state, batch, key, strict=self._check)
            self.measured = found if self.measured is None else self.measured.then(found)
            return found.state, found.loss
        if number != self._last:
            state, metrics = step(state, batch, key)
            loss = metrics.loss
            self._dispatch.append(metrics.dispatch_seconds)
        elif self._trace:
            part = step.parts.get(id(step.program))
            trace = StepTrace(step, part.crossings if part else None)
            state, metrics = step(state, batch, key, observer=trace)
            loss = metrics.loss
            self._events = trace.events()
        else:
            state, metrics, self._heap = measure_heap(step, state, batch, key)
            loss = metrics.loss
        return state, loss

    def document(self) -> dict[str, Any]:
        """Return what ``capture run --json`` says of the measurements."""
        found = self.measured
        return {
            "trace": self._events,
            "measured_peak_bytes_per_device": found and list(found.peak_bytes_per_device),
            "meter": found and found.meter,
            "ledger_checks": found.num_checks if found else 0,
            "allocator": self._heap and self._heap.as_document(),
            "resident_set_peak_bytes": found and found.resident_set_peak_bytes,
            "resident_set_before_bytes": found and found.resident_set_before_bytes,
            # Of steps without a meter.
            "dispatch_seconds": median(self._dispatch) if self._dispatch else None,
        }


class Saves:
    """The checkpoints of a training.

    Args:
        done: Steps with which it begins.
    """

    def __init__(self, step: TrainStep | ArrayTraining, training: Training, done: int):
        assert training.save is not None, "there is a directory"
        # Refuses some of parameters that a scan stacks, before anything is trained.
        assert step.optimizer.stages, "every parameter is updated"
        self._every = training.save_every
        self._last: Path | None = None
        self._begin, self._saved = done, -1
        self._is_alone = checkpoint.shared(step) is None
        goes_on = training.restore is not None and (
            training.restore.resolve() == training.save.resolve()
        )
        if goes_on and (self._is_alone or jax.process_index() == 0):
            set_aside(training.save, done)
        self._saver = Saver(step, training.save)

    def stepped(self, state: Any) -> None:
        """Save the state of a step, if it is one of those that are saved."""
        self._saver.check()
        if self._every and state.num_steps % self._every == 0:
            self._save(state)

    def _save(self, state: Any) -> None:
        self._saved = state.num_steps
        self._last = self._saver.save(state)

    def wait(self) -> None:
        """Wait until what is saved is complete."""
        self._saver.finish()

    def rescue(self, state: object) -> str | None:
        """Save the last state of a training that fails, unless several processes would have to
        agree on that; return where the last checkpoint is."""
        return self.finish(state) if self._is_alone else None

    def finish(self, state: Any) -> str | None:
        """Save the last state, and return where it is once it is complete."""
        if state.num_steps not in (self._saved, self._begin):
            self._save(state)
        self.wait()
        return None if self._last is None else str(self._last)
