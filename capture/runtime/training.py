"""Some steps of a plan on the devices of this process: what was measured, beside what was
predicted; loss beside that of one device.

Measured is only what was executed: live arrays of this process and the buffer assignment of the
running program (on CPU), or the allocator (on GPU). On CPU, two counters that know neither ledger
nor compiler stand beside the sum: malloc during an ordinary step, and the process's resident set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jax

from capture import environment
from capture.errors import PlanError
from capture.machine.rates import Rates
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol, named_workload
from capture.options import listed
from capture.plan.array import ArrayPlan
from capture.plan.kinds import AnyPlan
from capture.plan.packs import PacksPlan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import Plan
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.heap import HeapMeasurement, measure_heap
from capture.runtime.hosts.saved import check_folders, set_aside
from capture.runtime.hosts.saving import Saver
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import Measurement, measure_step
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.reference import max_relative_error
from capture.runtime.run_report import RunReport
from capture.runtime.sharded.step import sharded_step
from capture.runtime.step_record import Records, StepRecord, StepWork
from capture.runtime.streamed import streamed
from capture.runtime.trace import StepTrace
from capture.runtime.train_step import TrainStep, Turn
from capture.step.program import Step, replay

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts


def train(
    plan: AnyPlan,
    workload: WorkloadProtocol,
    training: Training,
    report: Callable[[str], None] = lambda text: None,
    hosts: Hosts | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> dict[str, Any]:
    """Compile a plan's step and run it; return the document of ``capture run --json``.

    Args:
        plan, workload, training: What is executed.
        report: Takes lines of progress.
        hosts: The processes that share it.
        on_step: Takes the record of each step that is finished.

    Of several processes each runs this: what was measured is then of this one's devices, and host 0
    compares with one device (``capture.runtime.hosts.documents`` joins what they say).

    Raises:
        PlanError: ``array-run`` for a seed of an array, whose models have their own.
        ExecutionError: For folders that cannot be used, before anything is compiled: those of
            ``checkpoint.check_restorable``, and ``checkpoint-exists`` if checkpoints of another
            training are where this one's would go.
    """
    check_folders(
        training.save,
        training.restore,
        training.num_steps,
        often=training.save_every is not None,
        until=training.until,
        num_models=plan.num_models,
    )
    report("compiling the step")
    step = _step(plan, workload, training, hosts)
    if step.updates_last:
        report(
            "the optimizer needs all gradients: they wait on the host, and every update comes last"
        )
    return follow(step, plan, training, report, hosts, on_step)


def follow(
    step: TrainStep | ArrayTraining,
    plan: AnyPlan,
    training: Training,
    report: Callable[[str], None] = lambda text: None,
    hosts: Hosts | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> dict[str, Any]:
    """Run some steps under the meters (``_Meters``), and return the document of ``capture run
    --json``.

    Args:
        step: Compiled, of the plan.
        plan, training, report, hosts, on_step: As of ``train``.
    """
    restored = None
    if training.restore is not None:
        restored = checkpoint.restore(step, training.restore, report=report)
    # A restored training goes on with the data that come next.
    done = 0 if restored is None else restored.num_steps
    saves = None if training.save is None else _Saves(step, training, done)
    num_steps = training.num_steps if training.until is None else training.until - done
    turns = step.turns(training.seed, done, num_steps)
    meters, warnings = _Meters(turns, training), LossWarnings(report)
    is_first = hosts is None or hosts.process == 0
    metrics = training.metrics if is_first else None
    records = Records(report, training.log_every, metrics, on_step)
    work = StepWork.of(step.graphs, len(step.devices), _rates(plan))
    if is_first:
        warnings.check(step.workload, step.microbatch_sizes)
    state, compare = (restored, None) if restored is not None else _begun(step, training, turns)
    start = time.perf_counter()
    for number, turn in enumerate(turns):
        if saves is not None and meters.counts(number):  # what is written would be counted, too
            saves.finish()
        state, loss = meters.execute(number, turn, state)
        if loss is None:
            continue
        count, seconds = done + len(records.told) + 1, time.perf_counter() - start
        is_last = count == done + num_steps
        records.add(work.record(count, loss, seconds, meters.peak_bytes), is_last=is_last)
        warnings.step(count, listed(loss))
        if saves is not None:
            saves.stepped(state, is_last=is_last)
        start = time.perf_counter()
    losses = [record.loss for record in records.told]
    facts = meters.document() | {
        "losses": losses,
        "warnings": warnings.said,
        "step_seconds": [record.seconds for record in records.told],
        "num_steps": state.num_steps,
        "num_devices": len(step.devices),
        "saved": None if saves is None else saves.finish(),
        "versions": environment.versions(),
    }
    if compare is not None and is_first:
        # Last, so that what one device needs for the whole model is in no measurement.
        report("comparing with one device")
        facts |= compare(state)
        facts["max_relative_loss_error"] = max_relative_error(losses, facts["reference_losses"])
    return RunReport(**facts, **_planned(step, plan, turns, meters.measured)).document()


def _begun(
    step: TrainStep | ArrayTraining, training: Training, turns: Sequence[Turn]
) -> tuple[Any, Callable[[Any], dict[str, Any]] | None]:
    """Return the state with which a training begins, and what compares it in the end; None where
    that is not asked for."""
    params = step.first_params(training.seed)
    compare = step.comparison(params, turns) if training.check else None
    return step.init_from(params), compare


def _planned(
    step: TrainStep | ArrayTraining,
    plan: AnyPlan,
    turns: Sequence[Turn],
    measured: Measurement | None,
) -> dict[str, Any]:
    """Return what was predicted and booked."""
    predicted = plan.predicted_bytes_per_device
    programs = {id(turn.step.program): turn.step.program for turn in turns} or {0: step.program}
    ledgers = [replay(program) for program in programs.values()]
    peaks = zip(*(ledger.peak_bytes_per_device for ledger in ledgers), strict=True)
    fullest = max((ledger.peak_of(0) for ledger in ledgers), key=lambda peak: peak.peak_bytes)
    document = {
        "kind": plan.FORMAT.kind,
        "predicted_peak_bytes_per_device": predicted and list(predicted),
        "replayed_peak_bytes_per_device": list(map(max, peaks)),
        "replayed_parts_bytes": dict(fullest.parts),
        "target": plan.target_name,
        "platform": jax.devices()[0].platform,
        # What one compiler reports says little about another's: such numbers stand beside each
        # other, and are not compared.
        "is_target": _is_target(plan),
    }
    if (together := checkpoint.shared(step)) is not None:
        document["offered_peak_bytes_per_device"] = _offered_bytes(together)
        # What the check saw of it; 0 without --check.
        waiting = () if measured is None else measured.waiting_peak_bytes
        document["waiting_peak_bytes_per_device"] = list(waiting)
    if names := {place.host.name for place in step.program.places if place.host}:
        document["moved_bytes"] = _moved_bytes(step.program)
        document["host"] = {
            "predicted_peak_bytes": plan.host_peak_bytes,
            "replayed_peak_bytes": max(
                ledger.peak_of(name).peak_bytes for ledger in ledgers for name in names
            ),
            "measured_peak_bytes": None if measured is None else measured.host_peak_bytes,
        }
    return document


def _is_target(plan: AnyPlan) -> bool:
    """Tell whether the devices here are of the plan's platform."""
    planned = plan.target_name
    if plan.cluster is not None:
        planned = Target.load(plan.cluster.target).platform
    return (planned == "cpu") == (jax.devices()[0].platform == "cpu")


def _rates(plan: AnyPlan) -> Rates | None:
    """Return the rates of the devices here, if they are the plan's and have some."""
    if plan.cluster is None or not _is_target(plan):
        return None
    return Target.load(plan.cluster.target).rates


def _moved_bytes(step: Step) -> dict[str, int]:
    """Return the bytes that a step copies to the memory of a host, and from there to devices."""
    moved = {"to_host": 0, "to_device": 0}
    for copy in step.copies:
        source, target = (step.slots[slot].place.host for slot in (copy.source, copy.target))
        if source != target:
            moved["to_device" if target is None else "to_host"] += copy.nbytes
    return moved


def _step(
    plan: AnyPlan, workload: WorkloadProtocol, training: Training, hosts: Hosts | None
) -> TrainStep | ArrayTraining:
    """Return the compiled step of a plan, once it is known that it can go on from what it is to."""
    fast = training.fast_compile
    if isinstance(plan, ArrayPlan):
        if training.seed:
            raise PlanError.of(
                f"--seed {training.seed}: models of an array have seeds of their own in the plan; "
                "leave it out.",
                "array-run",
            )
        if training.restore is not None:
            given = {"": workload}
            each = [named_workload(one.workload, given, plan.named_by) for one in plan.trained]
            checkpoint.check_restorable(training.restore, each, of_array=True)
        return train_array(workload, plan, fast_compile=fast)
    if training.restore is not None:
        checkpoint.check_restorable(training.restore, [workload], hosts)
    match plan:
        case PacksPlan():
            return streamed(workload, plan, fast_compile=fast)
        case ShardingPlan():
            return sharded_step(workload, plan, fast_compile=fast)
        case Plan():
            return pipeshard(workload, plan, fast_compile=fast, hosts=hosts)


class _Meters:
    """The measurements of a training: of each list of instructions the first execution under the
    meter of live arrays; of those after it the last under malloc's, or traced.

    Args:
        turns: The executions.
        training: With what is asked for.

    Attributes:
        measured: Of all that were measured; None if none was yet.

    Raises:
        PlanError: ``run-trace`` where a trace is asked for, and no list is executed again.
    """

    def __init__(self, turns: Sequence[Turn], training: Training):
        self._check, self._trace = training.check, training.trace
        seen, self._first, again = set[int](), list[int](), list[int]()
        for number, turn in enumerate(turns):
            (again if id(turn.step.program) in seen else self._first).append(number)
            seen.add(id(turn.step.program))
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

    def execute(self, number: int, turn: Turn, state: Any) -> tuple[Any, Any]:
        """Execute one turn, and return the state and the loss of the update that is complete."""
        step, batch, key = turn.step, turn.batch, turn.key
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


class _Saves:
    """The checkpoints of a training.

    Args:
        step: What is trained.
        training: With where and when its state is saved.
        done: Steps with which it begins.
    """

    def __init__(self, step: TrainStep | ArrayTraining, training: Training, done: int):
        assert training.save is not None, "there is a directory"
        # Refuses some of parameters that a scan stacks, before anything is trained.
        assert step.optimizer.stages, "every parameter is updated"
        self._step, self._directory, self._every = step, training.save, training.save_every
        self._last: Path | None = None
        together = checkpoint.shared(step)
        goes_on = training.restore is not None and (
            training.restore.resolve() == training.save.resolve()
        )
        if goes_on and (together is None or jax.process_index() == 0):
            set_aside(training.save, done)
        self._saver = None if together is None else Saver(together, training.save)

    def stepped(self, state: Any, *, is_last: bool) -> None:
        """Save the state where that is due; raise the error of a save that has failed."""
        if self._saver is not None:
            self._saver.check()
        if is_last or (self._every and state.num_steps % self._every == 0):
            if self._saver is not None:
                self._last = self._saver.save(state)
            else:
                self._last = checkpoint.save(self._step, state, self._directory)

    def finish(self) -> str | None:
        """Wait until the last checkpoint is complete, and return its path, if there is one."""
        if self._saver is not None:
            self._saver.finish()
        return None if self._last is None else str(self._last)


def _offered_bytes(step: PipelinedStep) -> list[int]:
    """Return, per device, the bytes that wait to be pulled: replayed peaks less one process's."""
    alone = replay(step.program_of_one_process).peak_bytes_per_device
    return [
        peak - before
        for peak, before in zip(step.replay().peak_bytes_per_device, alone, strict=True)
    ]
