"""Some steps of a plan on the devices of this process: what was measured, beside what was
predicted; loss beside that of one device.

Measured is only what was executed: live arrays of this process and the buffer assignment of the
running program (on CPU), or the allocator (on GPU). On CPU, two counters that know neither ledger
nor compiler stand beside the sum: malloc during an ordinary step, and the process's resident set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax

from capture import environment
from capture.errors import PlanError
from capture.machine.rates import Rates
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol
from capture.plan.files import PlanFile
from capture.plan.kinds import kind_of
from capture.plan.step_work import StepWork
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.hosts.saved import check_folders
from capture.runtime.loop import Loop, Meters, Saves
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import Measurement
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.pipeline import PipelinedStep
from capture.runtime.reference import max_relative_error
from capture.runtime.run_report import RunReport
from capture.runtime.step_record import Records, StepRecord
from capture.runtime.train_step import Metered, TrainStep
from capture.step.program import replay

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts


def train(
    plan: PlanFile,
    workload: WorkloadProtocol,
    training: Training,
    report: Callable[[str], None] = lambda text: None,
    hosts: Hosts | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    data: Iterable[object] | None = None,
) -> dict[str, Any]:
    """Compile a plan's step, run it, and return the document of ``capture run --json``.

    Args:
        plan, workload, training: What is executed.
        report: Takes lines of progress.
        hosts: The processes that share it.
        on_step: Takes the record of each step that is finished.
        data: Global batches as ``workload.batch`` returns them; of an array, of each a sequence of
            one per model, or one for all where the plan shares them. A training that goes on takes
            them from the first on. By default the workload draws them.

    Of several processes each runs this: what was measured is then of this one's devices, and host 0
    compares with one device (``capture.runtime.hosts.documents`` joins what they say).

    Raises:
        PlanError: ``array-run`` for a seed of an array, whose models have their own; ``run-trace``
            where no step is an ordinary one.
        ExecutionError: ``run-data`` for no batch at all; for folders that cannot be used, before
            anything is compiled: those of ``checkpoint.check_restorable``, and
            ``checkpoint-exists`` if checkpoints of another training are where this one's would go.
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
    return follow(step, plan, training, report, hosts, on_step, data)


def follow(
    step: TrainStep | ArrayTraining,
    plan: PlanFile,
    training: Training,
    report: Callable[[str], None] = lambda text: None,
    hosts: Hosts | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    data: Iterable[object] | None = None,
) -> dict[str, Any]:
    """Run some steps under the meters, and return the document of ``capture run --json``."""
    restored = None
    if training.restore is not None:
        restored = checkpoint.restore(step, training.restore, report=report)
    # A restored training goes on with the data that come next.
    done = 0 if restored is None else restored.num_steps
    saves = None if training.save is None else Saves(step, training, done)
    num_steps = training.num_steps if training.until is None else training.until - done
    executions, is_first = step.executions(num_steps), hosts is None or hosts.process == 0
    meters, warnings = Meters(executions, training), LossWarnings(report)
    if is_first:
        warnings.check(step.workload, step.microbatch_sizes)
    batches = iter(step.drawn(training.seed, done) if data is None else data)
    state, compare = restored, None
    if state is None:
        params = step.first_params(training.seed)
        if training.check:  # with the same batches
            batches = iter(given := list(islice(batches, num_steps)))
            compare = step.comparison(params, given, training.seed) if given else None
        state = step.init_from(params)
        del params
    records = Records(report, training.log_every, training.metrics if is_first else None, on_step)
    models = [(traced.graph, traced.casts, examples) for traced, examples in step.models]
    work = StepWork.of(models, len(step.devices), _rates(plan))
    loop = Loop(meters, records, warnings, saves, done + num_steps)
    state = loop.run(executions, work, step.fed(batches, training.seed, done), state)
    losses = [record.loss for record in records.told]
    facts = meters.document() | {
        "losses": losses,
        "warnings": warnings.said,
        "step_seconds": [record.seconds for record in records.told],
        "num_steps": state.num_steps,
        "num_devices": len(step.devices),
        "saved": None if saves is None else saves.finish(state),
        "versions": environment.versions(),
    }
    if compare is not None and is_first:
        # Last, so that what one device needs for the whole model is in no measurement.
        report("comparing with one device")
        facts |= compare(state)
        facts["max_relative_loss_error"] = max_relative_error(losses, facts["reference_losses"])
    return RunReport(**facts, **_planned(step, plan, executions, meters.measured)).document()


def _planned(
    step: TrainStep | ArrayTraining,
    plan: PlanFile,
    executions: Sequence[Metered],
    measured: Measurement | None,
) -> dict[str, Any]:
    """Return what was predicted and booked."""
    predicted = plan.predicted_bytes_per_device
    programs = {id(each.program): each.program for each in executions} or {0: step.program}
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
        document["moved_bytes"] = step.program.moved_bytes
        document["host"] = {
            "predicted_peak_bytes": plan.host_peak_bytes,
            "replayed_peak_bytes": max(
                ledger.peak_of(name).peak_bytes for ledger in ledgers for name in names
            ),
            "measured_peak_bytes": None if measured is None else measured.host_peak_bytes,
        }
    return document


def _is_target(plan: PlanFile) -> bool:
    """Tell whether the devices here are of the plan's platform."""
    planned = plan.target_name
    if plan.cluster is not None:
        planned = Target.load(plan.cluster.target).platform
    return (planned == "cpu") == (jax.devices()[0].platform == "cpu")


def _rates(plan: PlanFile) -> Rates | None:
    """Return the rates of the devices here, if they are the plan's and have some."""
    if plan.cluster is None or not _is_target(plan):
        return None
    return Target.load(plan.cluster.target).rates


def _step(
    plan: PlanFile, workload: WorkloadProtocol, training: Training, hosts: Hosts | None
) -> TrainStep | ArrayTraining:
    """Return the compiled step of a plan, once it is known that it can go on from what it is to."""
    if plan.model_names and training.seed:
        raise PlanError.of(
            f"--seed {training.seed}: models of an array have seeds of their own in the plan; "
            "leave it out.",
            "array-run",
        )
    if training.restore is not None:
        each, of_array = plan.workloads(workload), bool(plan.model_names)
        checkpoint.check_restorable(training.restore, each, hosts, of_array=of_array)
    shared = {} if hosts is None else {"hosts": hosts}
    step: TrainStep | ArrayTraining = kind_of(plan).train(
        workload, plan, fast_compile=training.fast_compile, **shared
    )
    return step


def _offered_bytes(step: PipelinedStep) -> list[int]:
    """Return, per device, the bytes that wait to be pulled: replayed peaks less one process's."""
    alone = replay(step.program_of_one_process).peak_bytes_per_device
    return [
        peak - before
        for peak, before in zip(step.replay().peak_bytes_per_device, alone, strict=True)
    ]
