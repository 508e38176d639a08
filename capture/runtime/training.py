"""Some steps of a plan on the devices of this process: what was measured, beside what was
predicted; loss beside that of one device.

Measured is only what was executed: live arrays of this process and the buffer assignment of the
running program (on CPU), or the allocator (on GPU). On CPU, two counters that know neither ledger
nor compiler stand beside the sum: malloc during an ordinary step, and the process's resident set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from capture import environment
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol, takes_key
from capture.plan.packs import PacksPlan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import Plan
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.heap import measure_heap
from capture.runtime.hosts.saved import check_folders, set_aside
from capture.runtime.hosts.saving import Saver
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.reference import ReferenceStep, max_relative_error
from capture.runtime.run_report import RunReport
from capture.runtime.sharded.step import sharded_step
from capture.runtime.state import PipelineState, initial_params
from capture.runtime.streamed import streamed
from capture.runtime.trace import StepTrace
from capture.runtime.train_step import TrainStep
from capture.step.program import replay

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts


def train(
    plan: Plan | PacksPlan | ShardingPlan,
    workload: WorkloadProtocol,
    training: Training,
    report: Callable[[str], None] = lambda text: None,
    hosts: Hosts | None = None,
    stepped: Callable[[int, float, float], None] = lambda num_steps, loss, seconds: None,
) -> dict[str, Any]:
    """Run some steps, the first under the meters and, of several, the last under malloc's, or
    traced; the document of ``capture run --json``.

    Args:
        plan, workload, training: What is executed.
        report: Takes lines of progress.
        hosts: The processes that share it.
        stepped: Takes each step that is finished: its number in the training, loss, seconds.

    Of several processes each runs this: what was measured is then of this one's devices, and host 0
    compares with one device (``capture.runtime.hosts.documents`` joins what they say).

    Raises:
        ExecutionError: For folders that cannot be used, before anything is compiled: those of
            ``checkpoint.check_restorable``, and ``checkpoint-exists`` if checkpoints of another
            training are where this one's would go.
    """
    if training.restore is not None:
        checkpoint.check_restorable(training.restore, [workload], hosts)
    check_folders(
        training.save,
        training.restore,
        training.num_steps,
        often=training.save_every is not None,
        until=training.until,
    )
    report("compiling the step")
    step = _step(plan, workload, training.fast_compile, hosts)
    if step.updates_last:
        report(
            "the optimizer needs all gradients: they wait on the host, and every update comes last"
        )
    keys = jax.random.split(jax.random.key(training.seed), 3)
    params = initial_params(workload, keys[0])
    restored = (
        None
        if training.restore is None
        else checkpoint.restore(step, training.restore, report=report)
    )
    # A restored training goes on with the data that come next.
    done = 0 if restored is None else restored.num_steps
    saves = None if training.save is None else _Saves(step, training, done)
    num_steps = training.num_steps if training.until is None else training.until - done
    batches = [
        workload.batch(jax.random.fold_in(keys[1], done + i), sum(step.microbatch_sizes))
        for i in range(num_steps)
    ]
    step_keys = [
        jax.random.fold_in(keys[2], done + i) if takes_key(workload) else None
        for i in range(num_steps)
    ]
    document: dict[str, Any] = {}
    warnings = LossWarnings(report)
    if hosts is None or hosts.process == 0:
        warnings.check(workload, step.microbatch_sizes)
    gradients = step.first_gradients(params, batches[0], step_keys[0]) if training.check else None
    state = step.init_from(params) if restored is None else restored
    losses, seconds, dispatch = [], [], []
    measured = heap = None
    for i, (batch, key) in enumerate(zip(batches, step_keys, strict=True)):
        start = time.perf_counter()
        if measured is None:
            measured = measure_step(step, state, batch, key, strict=training.check)
            state, loss = measured.state, measured.loss
        elif i + 1 < num_steps:
            state, metrics = step(state, batch, key)
            loss = metrics.loss
            dispatch.append(metrics.dispatch_seconds)
        elif training.trace:
            part = step.parts.get(id(step.program))
            trace = StepTrace(step, part.crossings if part else None)
            state, metrics = step(state, batch, key, observer=trace)
            loss = metrics.loss
            document["trace"] = trace.events()
        else:
            if saves is not None:  # what is written would be in malloc's count
                saves.finish()
            state, metrics, heap = measure_heap(step, state, batch, key)
            loss = metrics.loss
        losses.append(loss)
        seconds.append(time.perf_counter() - start)
        report(f"step {done + i + 1}: loss {loss:.6f}")
        warnings.step(done + i + 1, [loss])
        stepped(done + i + 1, loss, seconds[-1])
        if saves is not None:
            saves.stepped(state, is_last=i + 1 == num_steps)
    if gradients is not None and (hosts is None or hosts.process == 0):
        # Last, so that what one device needs for the whole model is in no measurement.
        report("comparing with one device")
        reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
        document |= reference.compare(gradients, params, batches, step_keys)
    if saves is not None and (saved := saves.finish()) is not None:
        document["saved"] = saved
    replayed, target, predicted = step.replay(), plan.target_name, plan.predicted_bytes_per_device
    platform = jax.devices()[0].platform
    planned = target if plan.cluster is None else Target.load(plan.cluster.target).platform
    document |= {
        "kind": plan.FORMAT.kind,
        "predicted_peak_bytes_per_device": predicted and list(predicted),
        "replayed_peak_bytes_per_device": list(replayed.peak_bytes_per_device),
        "measured_peak_bytes_per_device": None
        if measured is None
        else list(measured.peak_bytes_per_device),
        "meter": None if measured is None else measured.meter,
        "ledger_checks": 0 if measured is None else measured.num_checks,
        "allocator": None if heap is None else heap.as_document(),
        "resident_set_peak_bytes": None if measured is None else measured.resident_set_peak_bytes,
        "resident_set_before_bytes": None
        if measured is None
        else measured.resident_set_before_bytes,
        "losses": [float(np.float64(loss)) for loss in losses],
        "warnings": warnings.said,
        "step_seconds": seconds,
        # Of steps without a meter.
        "dispatch_seconds": median(dispatch) if dispatch else None,
        "num_devices": len(step.devices),
        "target": target,
        "platform": platform,
        # What one compiler reports says little about another's: such numbers stand beside each
        # other, and are not compared.
        "is_target": (planned == "cpu") == (platform == "cpu"),
        "versions": environment.versions(),
    }
    if (together := checkpoint.shared(step)) is not None:
        document["offered_peak_bytes_per_device"] = _offered_bytes(together)
        # What the check saw of it; 0 without --check.
        waiting = () if measured is None else measured.waiting_peak_bytes
        document["waiting_peak_bytes_per_device"] = list(waiting)
    if names := {place.host.name for place in step.program.places if place.host}:
        document["host"] = {
            "predicted_peak_bytes": plan.host_peak_bytes,
            "replayed_peak_bytes": max(replayed.peak_of(name).peak_bytes for name in names),
            "measured_peak_bytes": None if measured is None else measured.host_peak_bytes,
        }
    if "reference_losses" in document:
        document["max_relative_loss_error"] = max_relative_error(
            document["losses"], document["reference_losses"]
        )
    return RunReport(**document).document()


def _step(
    plan: Plan | PacksPlan | ShardingPlan,
    workload: WorkloadProtocol,
    fast_compile: bool,
    hosts: Hosts | None,
) -> TrainStep:
    match plan:
        case PacksPlan():
            return streamed(workload, plan, fast_compile=fast_compile)
        case ShardingPlan():
            return sharded_step(workload, plan, fast_compile=fast_compile)
        case Plan():
            return pipeshard(workload, plan, fast_compile=fast_compile, hosts=hosts)


class _Saves:
    """The checkpoints of a training.

    Args:
        step: What is trained.
        training: With where and when its state is saved.
        done: Steps with which it begins.
    """

    def __init__(self, step: TrainStep, training: Training, done: int):
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

    def stepped(self, state: PipelineState, *, is_last: bool) -> None:
        """After every step."""
        if self._saver is not None:
            self._saver.check()
        if is_last or (self._every and state.num_steps % self._every == 0):
            if self._saver is not None:
                self._last = self._saver.save(state)
            else:
                self._last = checkpoint.save(self._step, state, self._directory)

    def finish(self) -> str | None:
        """The last one, once it is complete."""
        if self._saver is not None:
            self._saver.finish()
        return None if self._last is None else str(self._last)


def _offered_bytes(step: PipelinedStep) -> list[int]:
    """By how much the replayed peaks are above those of one process: what waits to be pulled."""
    alone = replay(step.program_of_one_process).peak_bytes_per_device
    return [
        peak - before
        for peak, before in zip(step.replay().peak_bytes_per_device, alone, strict=True)
    ]
