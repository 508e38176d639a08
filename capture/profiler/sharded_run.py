"""A sharding plan, compiled for its target or executed here: its whole train step, the user's loss
and optimizer in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capture import environment
from capture.compiler.executable import Executable
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol, takes_key
from capture.plan.files import other_model
from capture.plan.sharding import ShardingPlan
from capture.profiler.sharded_step import StepCompiler
from capture.runtime.losses import LossWarnings
from capture.runtime.meter import AllocatorMeter, buffers
from capture.runtime.process_memory import ResidentSetMeter
from capture.runtime.reference import ReferenceStep, max_relative_error
from capture.runtime.run_report import RunReport
from capture.runtime.sharded import Sharded, shard
from capture.runtime.sharded.mesh import mesh_of
from capture.tracing import trace


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """The train step of a sharding plan as a compiler made it.

    Attributes:
        sharded: A workload with the plan on a mesh.
        target: What it was compiled for.
        peak_bytes: Need of every device, by the compiler: arguments, results and temporaries.
        program: The step; it runs where it was compiled for devices of this process.
    """

    sharded: Sharded
    target: Target
    peak_bytes: int
    program: Executable

    @property
    def source(self) -> dict[str, Any]:
        """Backend, target and versions."""
        versions = environment.versions(self.target.platform)
        name = self.target.name
        return {"backend": f"compile:{name}", "target": name, "versions": versions}


def compile_plan(plan: ShardingPlan, workload: WorkloadProtocol) -> CompiledPlan:
    """Compile the whole train step for the plan's target; nothing is allocated, nothing runs.

    Raises:
        PlanError: ``plan-cluster`` for a plan of an earlier version, ``plan-other-model``.
        TargetError: ``target-refused``, and as ``devices_of``.
    """
    cluster = plan.known_cluster
    return _compiled(plan, workload, Target.load(cluster.target), cluster)


def execute_plan(
    plan: ShardingPlan,
    workload: WorkloadProtocol,
    *,
    num_steps: int,
    seed: int = 0,
    check: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train some steps on the devices of this process, the first under the meters; the document of
    ``capture run --json``.

    Raises:
        PlanError: as ``compile_plan``.
        ExecutionError: ``osdp-devices`` if there are too few.
    """
    cluster = plan.known_cluster
    mesh, target = mesh_of(cluster), Target.load(cluster.target)
    is_target = (target.platform == "cpu") == (mesh.devices.flat[0].platform == "cpu")
    report("compiling the train step")
    # On other devices it is the same program, for what is here.
    step = _compiled(plan, workload, target if is_target else Target.load("cpu"), mesh)
    keys = jax.random.split(jax.random.key(seed), 3)
    num_examples = plan.batch_size * cluster.num_devices
    params = workload.init(keys[0])
    batches, step_keys, inputs = [], [], []
    for i in range(num_steps):
        batch = workload.batch(jax.random.fold_in(keys[1], i), num_examples)
        key = jax.random.fold_in(keys[2], i) if takes_key(workload) else None
        batches.append(batch)
        step_keys.append(key)
        # As the only micro-batch of the step, see ``split_microbatches``.
        inputs.append((batch,) if key is None else (batch, jax.random.fold_in(key, 0)))
    document: dict[str, Any] = {}
    if check:
        report("comparing with one device")
        reference = ReferenceStep(
            workload, trace(workload, num_examples, at_products=True), (num_examples,)
        )
        gradients = _gradients(step.sharded, params, inputs[0])
        document |= reference.compare(gradients, params, batches, step_keys)
        del gradients
    document |= _train(step, params, inputs, report)
    if check:
        document["max_relative_loss_error"] = max_relative_error(
            document["losses"], document["reference_losses"]
        )
    document |= {
        "kind": "sharding",
        "predicted_peak_bytes_per_device": [plan.known_peak_bytes] * cluster.num_devices,
        "num_devices": cluster.num_devices,
        "target": cluster.target,
        "platform": mesh.devices.flat[0].platform,
        "is_target": is_target,
        "versions": environment.versions(),
    }
    return RunReport(**document).document()


def _compiled(
    plan: ShardingPlan, workload: WorkloadProtocol, target: Target, where: Any
) -> CompiledPlan:
    compiler = StepCompiler(target, where)
    sharded = shard(workload, plan, compiler.mesh)
    if plan.model_hash not in ("", sharded.model_hash):
        raise other_model(plan, workload, f"has model_hash={sharded.model_hash}")
    return CompiledPlan(sharded, target, *compiler.measure(sharded))


def _placed(sharded: Sharded, inputs: tuple[Any, ...]) -> list[jax.Array]:
    """The leaves of a batch, and its key, on the devices."""
    batch, *key = inputs
    whole = NamedSharding(sharded.mesh, PartitionSpec())
    leaves = jax.device_put(jax.tree.leaves(batch), sharded.batch_sharding)
    return [*leaves, *jax.device_put(key, whole)]


def _gradients(sharded: Sharded, params: Any, inputs: tuple[Any, ...]) -> Any:
    """Of one step, shaped like the parameters, on the host."""
    own = jax.device_put(sharded.split(params), sharded.shardings())
    given = jax.tree.unflatten(jax.tree.structure(inputs), _placed(sharded, inputs))
    _, gradients = jax.jit(sharded.loss_and_gradients)(own, *given)
    return jax.tree.map(np.asarray, sharded.join(gradients))


def _train(
    step: CompiledPlan, params: Any, inputs: list[tuple[Any, ...]], report: Callable[[str], None]
) -> dict[str, Any]:
    """Losses, seconds and measured bytes."""
    sharded, devices = step.sharded, list(step.sharded.mesh.devices.flat)
    params = sharded.split(params)
    state = jax.device_put(
        [jax.tree.leaves(params), jax.tree.leaves(sharded.workload.optimizer.init(params))],
        [jax.tree.leaves(sharded.shardings()), jax.tree.leaves(sharded.opt_state_shardings)],
    )
    del params
    allocator, resident = AllocatorMeter(devices), ResidentSetMeter()
    losses, seconds, peaks, meter = [], [], (0,) * len(devices), ""
    warnings = LossWarnings(report)
    for i, given in enumerate(inputs):
        leaves = _placed(sharded, given)
        jax.block_until_ready((state, leaves))
        if i == 0:
            resident.start()
            held = Counter[jax.Device]()
            for (device, *_), nbytes in buffers([*state[0], *state[1], *leaves]).items():
                held[device] += nbytes
            peaks = tuple(held[device] + step.program.transient_bytes for device in devices)
            meter = "live arrays + XLA buffer assignment of the running program"
            meter += f" ({devices[0].platform})"
        start = time.perf_counter()
        *state, loss = step.program.call(*state, leaves)
        losses.append(float(np.float64(loss)))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
        report(f"step {i + 1}: loss {losses[-1]:.6f}")
        warnings.step(i + 1, losses[-1:])
        if i == 0 and (allocated := allocator.peak_bytes_per_device) is not None:
            peaks, meter = allocated, allocator.meter
    return {
        # Both need the step as one of ``capture.step``, whose ledger books what is allocated.
        "replayed_peak_bytes_per_device": None,
        "measured_peak_bytes_per_device": list(peaks),
        "meter": meter,
        "ledger_checks": 0,
        "resident_set_peak_bytes": resident.peak_bytes,
        "resident_set_before_bytes": resident.before_bytes,
        "losses": losses,
        "warnings": warnings.said,
        "step_seconds": seconds,
    }
