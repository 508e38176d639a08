"""Plans over two hosts of two devices, and what a training of them gives: for the processes of
``tests/programs/host_process.py``, and for one that has all devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from pipeline_models import mlp, pipeline, tied

from capture.machine.cluster import Cluster
from capture.model.workload import Workload, takes_key
from capture.plan.stages import Plan
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import PipelinedStep

NODES = (2, 2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


def _plan(*arguments, nodes: tuple[int, ...] = NODES, **options) -> Plan:
    return pipeline(*arguments, **options).with_(cluster=Cluster(nodes))


#: Workload, plan, window.
CASES: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    # Tied parameters, dropout, a value that skips a stage, clipping, and layouts that are not alike.
    "unequal": lambda: (tied(CLIPPED), _plan((2, 2), ((2, 1), (1, 2)), remat="full"), 1),
    # Several stages on a host; what is sharded over replicas.
    "shared": lambda: (
        mlp(optax.adam(1e-2)),
        _plan(
            (1, 1, 2),
            ((1, 1), (1, 1), (2, 1)),
            schedule="gpipe",
            shard_optimizer=True,
            shard_params=True,
        ),
        2,
    ),
}

SLOW_CASES: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    "data": lambda: (tied(), _plan((2, 2), ((2, 1), (2, 1))), 2),
    "tensor": lambda: (mlp(CLIPPED), _plan((2, 2), ((1, 2), (1, 2)), schedule="gpipe"), 1),
    "interleaved": lambda: (
        mlp(),
        _plan((1, 1, 1, 1), ((2, 1), (2, 1)), schedule="interleaved", remat="full"),
        1,
    ),
    "split": lambda: (mlp(), _plan((2, 2), ((2, 1), (1, 2)), schedule="zb-h1"), 2),
}

THREE_HOSTS: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    "three": lambda: (
        tied(CLIPPED),
        _plan((1, 2, 1), ((1, 2), (2, 1), (1, 2)), nodes=(2, 2, 2)),
        1,
    ),
}

ALL = CASES | SLOW_CASES | THREE_HOSTS


def train(
    step: PipelinedStep, workload: Workload, observer: Any = None, num_steps: int = 3
) -> dict[str, Any]:
    """Losses, parameters and optimizer state after some steps, of which the first is measured; and
    the loss of an evaluation before them."""
    state = step.init(jax.random.key(0))
    found: dict[str, Any] = {}
    for i in range(num_steps):
        batch = workload.batch(jax.random.key(100 + i), step.plan.global_batch_size)
        key = jax.random.key(1000 + i) if takes_key(workload) else None
        if i == 0:
            found["evaluation"] = np.float64(step.evaluate(state, batch, key).loss)
            gradients, _ = step.accumulate(state, batch, key)
            found |= _named("gradients", gradients)
            measured = measure_step(step, state, batch, key, strict=True)
            state, loss = measured.state, measured.loss
            found["peaks"] = np.array(measured.peak_bytes_per_device)
            found["num_checks"] = np.array(measured.num_checks)
        else:
            state, metrics = step(state, batch, key, observer=observer)
            loss = metrics.loss
        found[f"loss {i}"] = np.float64(loss)
    found["replayed"] = np.array(step.replay().peak_bytes_per_device)
    return (
        found
        | _named("params", step.params(state))
        | _named("optimizer", step.optimizer_state(state))
    )


def _named(what: str, tree: Any) -> dict[str, np.ndarray]:
    return {f"{what} {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
