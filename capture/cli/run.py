"""Execute a plan here, on virtual CPU devices or accelerators: measured memory beside predicted,
loss beside that of one device.

Measured is only what was executed: live arrays of this process and the buffer assignment of the
running program (on CPU), or the allocator (on GPU). On CPU, two counters that know neither ledger
nor compiler stand beside the sum: malloc during an ordinary step, and the process's resident set.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from capture import environment
from capture.cli import asked, sharding
from capture.cli import options as shared
from capture.cli.output import emit, say, table
from capture.errors import PlanError
from capture.plan.kinds import load_plan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import Plan
from capture.quantities import format_bytes

NAME = "run"
HELP = "execute a plan on the devices of this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    parser.add_argument(
        "--steps",
        type=shared.at_least(1),
        default=3,
        metavar="N",
        help="updates (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of parameters and data (default: %(default)s)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare loss and gradients with one device, and the ledger with live arrays",
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="save the state with Orbax at the end"
    )
    parser.add_argument(
        "--restore",
        type=Path,
        metavar="DIR",
        help="continue from a saved state, also of another plan of the model",
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    if isinstance(plan, ShardingPlan):
        return sharding.run(options, plan)
    spec = asked.workload_of(plan, options.workload)
    environment.prepare(num_devices=plan.cluster.num_devices)
    document = execute(
        plan,
        spec.load(),
        num_steps=options.steps,
        seed=options.seed,
        check=options.check,
        report=lambda text: say(options, text),
        save=options.save,
        restore=options.restore,
    )
    emit(options, document, as_text(document))
    return 0


def execute(
    plan: Plan,
    workload: Any,
    *,
    num_steps: int,
    seed: int = 0,
    check: bool = False,
    report: Any = lambda text: None,
    save: Path | None = None,
    restore: Path | None = None,
    fast_compile: bool = False,
) -> dict[str, Any]:
    """Run some steps, the first under the meters and, of several, the last under malloc's; the
    document of ``capture run --json``."""
    import jax
    import numpy as np

    from capture.model.workload import takes_key
    from capture.runtime import checkpoint
    from capture.runtime.meter import measure_heap, measure_step
    from capture.runtime.pipeline import pipeshard
    from capture.runtime.reference import ReferenceStep

    if check and restore is not None:
        raise PlanError.of(
            "--check compares a training from its beginning with one device, and --restore "
            "continues one; give one of them.",
            "run-check-restored",
        )
    report("compiling the stages")
    step = pipeshard(workload, plan, fast_compile=fast_compile)
    keys = jax.random.split(jax.random.key(seed), 3)
    params = workload.init(keys[0])
    restored = None if restore is None else checkpoint.restore(step, restore)
    done = (
        0 if restored is None else restored.num_steps
    )  # a restored training goes on with the data that come next
    batches = [
        workload.batch(jax.random.fold_in(keys[1], done + i), plan.global_batch_size)
        for i in range(num_steps)
    ]
    step_keys = [
        jax.random.fold_in(keys[2], done + i) if takes_key(workload) else None
        for i in range(num_steps)
    ]
    document: dict[str, Any] = {}
    if check:
        report("comparing with one device")
        reference = ReferenceStep(workload, step.traced, plan.num_microbatches)
        document |= _check(step, reference, params, batches, step_keys)
    state = step.init_from(params) if restored is None else restored
    losses, seconds = [], []
    measured = heap = None
    for i, (batch, key) in enumerate(zip(batches, step_keys, strict=True)):
        start = time.perf_counter()
        if measured is None:
            measured = measure_step(step, state, batch, key, strict=check)
            state, loss = measured.state, measured.loss
        elif i + 1 < num_steps:
            state, metrics = step(state, batch, key)
            loss = metrics.loss
        else:
            state, metrics, heap = measure_heap(step, state, batch, key)
            loss = metrics.loss
        losses.append(loss)
        seconds.append(time.perf_counter() - start)
        report(f"step {done + i}: loss {loss:.6f}")
    if save is not None:
        document["saved"] = str(checkpoint.save(step, state, save))
    predicted = (
        plan.prediction or plan.verification
    )  # of a plan by hand that was verified alone, what its compiler says
    document |= {
        "predicted_peak_bytes_per_device": None
        if predicted is None
        else predicted["peak_bytes_per_device"],
        "replayed_peak_bytes_per_device": list(step.replay().peak_bytes_per_device),
        "measured_peak_bytes_per_device": None
        if measured is None
        else list(measured.peak_bytes_per_device),
        "meter": None if measured is None else measured.meter,
        "ledger_checks": 0 if measured is None else measured.num_checks,
        "allocator": None
        if heap is None
        else {
            "source": heap.source,
            "before_bytes": heap.before_bytes,
            "peak_bytes": heap.peak_bytes,
            "step_bytes": heap.step_bytes,
            "booked_bytes": heap.booked_bytes,
        },
        "resident_set_peak_bytes": None if measured is None else measured.resident_set_peak_bytes,
        "resident_set_before_bytes": None
        if measured is None
        else measured.resident_set_before_bytes,
        "loss": [float(np.float64(loss)) for loss in losses],
        "step_seconds": seconds,
        "num_devices": plan.cluster.num_devices,
        "target": plan.cluster.target,
        "platform": jax.devices()[0].platform,
        # What one compiler reports says little about another's: such numbers stand beside each
        # other, and are not compared.
        "is_target": (plan.cluster.target == "cpu") == (jax.devices()[0].platform == "cpu"),
        "versions": environment.versions(),
    }
    if "reference_loss" in document:
        pairs = zip(document["loss"], document["reference_loss"], strict=True)
        document["max_relative_loss_error"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return document


def _check(
    step: Any, reference: Any, params: Any, batches: list[Any], keys: list[Any]
) -> dict[str, Any]:
    """Loss of every step and gradients of the first, on one device."""
    from capture.runtime.reference import relative_errors, rounding_floor

    state, _ = step.accumulate(step.init_from(params), batches[0], keys[0])
    mine = step.gradients(state)
    del state
    own, optimizer = reference.init(params)
    _, gradients = reference.loss_and_gradients(own, batches[0], keys[0])
    losses = []
    for batch, key in zip(batches, keys, strict=True):
        own, optimizer, loss = reference(own, optimizer, batch, key)
        losses.append(float(loss))
    errors = relative_errors(mine, gradients, rounding_floor(step.traced.graph))
    worst = max(errors, key=errors.__getitem__)
    return {
        "reference_loss": losses,
        "max_relative_gradient_error": errors[worst],
        "worst_gradient": worst,
    }


def as_text(document: dict[str, Any]) -> str:
    """A table of devices and the losses."""
    predicted, measured = (
        document["predicted_peak_bytes_per_device"],
        document["measured_peak_bytes_per_device"] or [],
    )
    compared = predicted and document["is_target"]
    rows = [
        [
            d,
            format_bytes(predicted[d]) if predicted else "-",
            format_bytes(peak),
            f"{predicted[d] / peak - 1:+.2%}" if compared else "-",
        ]
        for d, peak in enumerate(measured)
    ]
    lines = [
        table(["device", "predicted peak", "measured peak", "prediction off by"], rows),
        f"measured by {document['meter']}",
    ]
    if (heap := document["allocator"]) is not None:
        added, booked = format_bytes(heap["step_bytes"]), format_bytes(heap["booked_bytes"])
        lines.append(
            f"an ordinary step added {added} to malloc's bytes, all devices together; at most "
            f"{booked} are booked"
        )
    if not document["is_target"]:
        lines.append(
            f"predicted for target {document['target']}, measured on {document['platform']}: not "
            "to be compared"
        )
    if not predicted:
        lines.append(
            "the plan has no prediction; capture predict PLAN --profile FILE -o PLAN adds one, "
            "capture verify PLAN -o PLAN the peaks"
        )
    lines.append("loss " + " ".join(f"{loss:.6f}" for loss in document["loss"]))
    if "reference_loss" in document:
        lines.append("one device " + " ".join(f"{loss:.6f}" for loss in document["reference_loss"]))
        errors = []
        if "max_relative_loss_error" in document:
            errors.append(f"loss {document['max_relative_loss_error']:.1e}")
        if "max_relative_gradient_error" in document:
            worst = document["worst_gradient"]
            errors.append(f"gradients {document['max_relative_gradient_error']:.1e} ({worst})")
        lines.append(f"largest relative error: {', '.join(errors)}")
    return "\n".join(lines)
