"""Some updates of an array of models under the meters, and each model beside itself alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capture import environment
from capture.errors import PlanError
from capture.machine.target import Target
from capture.model.workload import takes_key
from capture.runtime import checkpoint
from capture.runtime.array_batches import step_key
from capture.runtime.array_state import ArrayState, Losses
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import AllocatorMeter, LiveArrayMeter
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.reference import ReferenceStep, relative_errors, rounding_floor
from capture.runtime.run_report import RunReport
from capture.runtime.state import joined_params
from capture.step.ledger import Ledger
from capture.step.multiplexed import peak_of
from capture.step.program import Step

#: By so many the gradients of a model alone are off, to see what that makes of its parameters.
ROUNDINGS = 1
#: Relative error of a parameter up to which it needs no explanation.
EXACT = 1e-5


@dataclass
class ArrayMeter:
    """The peaks of all steps that were executed under it.

    Args:
        training: Whose steps.
        strict: Compare the ledger with the live arrays before every instruction.
    """

    training: ArrayTraining
    strict: bool = False
    peak_bytes: int = 0
    host_peak_bytes: int = 0
    num_checks: int = 0
    meter: str = ""

    def advance(self, state: ArrayState, batch: Any) -> tuple[ArrayState, list[float] | None]:
        """``ArrayTraining.advance``, measured.

        Raises:
            ExecutionError: ``run-ledger-mismatch`` if strict and a memory holds other bytes than
                booked.
        """
        built = self.training.step_of(state)
        return self._measured(
            built, state, lambda live: self.training.advance(state, batch, observer=live)
        )

    def finish(self, state: ArrayState) -> tuple[ArrayState, list[float] | None]:
        """``ArrayTraining.finish``, measured."""
        built = self.training.steps.epilogue
        return self._measured(built, state, lambda live: self.training.finish(state, observer=live))

    def _measured(
        self,
        built: Step | None,
        state: ArrayState,
        run: Callable[[LiveArrayMeter], tuple[ArrayState, Losses | None]],
    ) -> tuple[ArrayState, list[float] | None]:
        training = self.training
        jax.block_until_ready(state.slots)
        assert built is not None, "a state that is ahead has a step that ends its update"
        live = LiveArrayMeter(
            built,
            [training.device],
            lambda run: training.executable(run).transient_bytes,
            strict=self.strict,
        )
        state, losses = run(live)
        found = None if losses is None else list(losses)
        del losses  # live, and booked as released
        if state.ahead is not None:
            state = replace(state, ahead=(state.ahead[0], np.array(state.ahead[1])))
        live.finish()
        jax.block_until_ready(state.slots)
        allocated = AllocatorMeter([training.device]).peak_bytes_per_device
        (peak,), self.meter = live.peak_bytes_per_device, live.meter
        if allocated is not None:
            (peak,), self.meter = allocated, AllocatorMeter.meter
        self.peak_bytes = max(self.peak_bytes, peak)
        self.host_peak_bytes = max(self.host_peak_bytes, live.peak_bytes_of("host"))
        self.num_checks += live.num_checks
        return state, found


def run_array(
    training: ArrayTraining,
    num_steps: int = 3,
    *,
    check: bool = False,
    save: Path | None = None,
    restore: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train an array for some updates; the document of ``capture run --json``.

    Args:
        training: Of the array, from its beginning.
        num_steps: Updates of every model.
        check: Also train every model alone, and compare the ledger with live arrays.
        save, restore: Where the state goes at the end, and comes from, with Orbax.
        report: Says what is done.

    Raises:
        PlanError: ``run-check-restored`` for both of ``check`` and ``restore``.
    """
    if check and restore is not None:
        raise PlanError.of(
            "--check compares trainings from their beginning with each model alone, and --restore "
            "begins later; leave one of them out.",
            "run-check-restored",
        )
    report("compiling the segments")
    ledgers = training.replay()
    compiled = len(training.programs.executables)
    meter = ArrayMeter(training, check)
    state = training.init() if restore is None else checkpoint.restore(training, restore)
    batches = [_batches(training, state.num_steps + t) for t in range(num_steps)]
    losses, num_after_first, warnings = [], 0, LossWarnings(report)
    for t in range(num_steps + 1):
        if t < num_steps:
            state, found = meter.advance(state, batches[t])
        elif state.ahead is not None:
            state, found = meter.finish(state)
        else:
            break
        if found is not None:
            losses.append(found)
            report(f"step {len(losses)}: losses {' '.join(f'{loss:.6f}' for loss in found)}")
            warnings.step(len(losses), found)
        num_after_first = len(training.programs.executables) - compiled
    saved = None if save is None else str(checkpoint.save(training, state, save))
    document = _document(training, ledgers, meter, losses)
    document |= {
        "moved_bytes": _moved_bytes(training),
        "warnings": warnings.said,
        "num_compiled": compiled,
        "num_compiled_after_first_step": num_after_first,
        "num_steps": state.num_steps,
        "saved": saved,
    }
    if check:
        report("training each model alone")
        document |= _compare(training, state, losses, batches)
    return RunReport(**document).document()


def _document(
    training: ArrayTraining,
    ledgers: Sequence[Ledger],
    meter: ArrayMeter,
    losses: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Return what was measured, beside what was predicted and booked."""
    plan, platform = training.plan, training.device.platform
    predicted, (peak, _, parts) = plan.prediction, peak_of(ledgers, 0)
    return {
        "kind": "array",
        "predicted_peak_bytes_per_device": predicted and [predicted.peak_bytes],
        "replayed_peak_bytes_per_device": [peak],
        "replayed_parts_bytes": dict(parts),
        "measured_peak_bytes_per_device": [meter.peak_bytes],
        "meter": meter.meter,
        "ledger_checks": meter.num_checks,
        "host": {
            "predicted_peak_bytes": predicted and predicted.host_peak_bytes,
            "measured_peak_bytes": meter.host_peak_bytes,
        },
        "losses": losses,
        "num_devices": 1,
        "target": plan.cluster.target,
        "platform": platform,
        "is_target": (Target.load(plan.cluster.target).platform == "cpu") == (platform == "cpu"),
        "versions": environment.versions(),
    }


def _moved_bytes(training: ArrayTraining) -> dict[str, int]:
    """Return what an update copies in each direction."""
    body, moved = training.steps.body, {"to_host": 0, "to_device": 0}
    for each in body.copies:
        host = body.slots[each.target].place.host is not None
        moved["to_host" if host else "to_device"] += each.nbytes
    return moved


def _batches(training: ArrayTraining, t: int) -> Any:
    """Of an update, drawn with the seeds of the models; where all share one, with that of the
    first."""
    plan = training.plan
    drawn = [
        training.fuser(model).workload.batch(
            jax.random.fold_in(jax.random.key(plan.models[model].seed), 1 + t),
            plan.trained[model].batch_size,
        )
        for model in range(1 if plan.shared_batches else len(plan.models))
    ]
    return drawn[0] if plan.shared_batches else drawn


def _compare(
    training: ArrayTraining,
    state: ArrayState,
    losses: Sequence[Sequence[float]],
    batches: Sequence[Any],
) -> dict[str, Any]:
    """Losses of each model alone, and by how much the array's are off; of parameters also by how
    much they would be, trained alone, were their gradients off by a rounding."""
    plan = training.plan
    references = {
        task: ReferenceStep(fuser.workload, fuser.traced, [task.batch_size])
        for task, fuser in training.fusers.items()
    }
    expected: list[list[float]] = []
    # (array, rounded) by model and leaf.
    errors: dict[tuple[int, str], tuple[float, float]] = {}
    begins = training.initial_leaves()
    for model, (member, leaves) in enumerate(zip(plan.models, begins, strict=True)):
        fuser, reference = training.fuser(model), references[plan.trained[model]]
        begin = joined_params(fuser.traced, dict(enumerate(leaves)))
        keyed, floor = takes_key(fuser.workload), rounding_floor(fuser.traced.graph)
        found = []
        for roundings in (0, ROUNDINGS):
            params, own = reference.init(begin)
            own = fuser.optimizer.with_hyperparameters(own, member.hyperparameters)
            alone = []
            for update, batch in enumerate(batches):
                given = batch if plan.shared_batches else batch[model]
                key = step_key(member, update) if keyed else None
                params, own, loss = reference(params, own, given, key, roundings=roundings)
                alone.append(loss)
            found.append((params, alone))
        (exact, alone), (off, _) = found
        expected.append(alone)
        fused = relative_errors(training.params(state, model), exact, floor)
        rounded = relative_errors(off, exact, floor)
        errors |= {(model, leaf): (fused[leaf], rounded[leaf]) for leaf in fused}
    by_step = [list(step) for step in zip(*expected, strict=True)]
    loss_errors = [
        abs(a - b) / max(abs(b), 1e-30)
        for step, other in zip(losses, by_step, strict=True)
        for a, b in zip(step, other, strict=True)
    ]
    (model, leaf), (worst, of_rounding) = max(errors.items(), key=lambda one: one[1][0])
    return {
        "reference_losses": by_step,
        "max_relative_loss_error": max(loss_errors),
        "max_relative_param_error": worst,
        "worst_param": {"model": model, "leaf": leaf, "rounding_error": of_rounding},
        "max_param_error_in_roundings": max(
            error / max(other, EXACT) for error, other in errors.values()
        ),
    }
