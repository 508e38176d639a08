"""Plans over two hosts of two devices, and what a training of them gives: for the processes of
``tests/programs/host_process.py``, and for one that has all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pipeline_models import mlp, pipeline, tied

from capture.machine.cluster import Cluster
from capture.model.workload import Workload, takes_key
from capture.plan.stages import Plan
from capture.runtime import checkpoint
from capture.runtime.hosts.saving import Saver
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import PipelinedStep

NODES = (2, 2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


def _plan(*arguments, nodes: tuple[int, ...] = NODES, **options) -> Plan:
    return pipeline(*arguments, **options).with_(cluster=Cluster(nodes))


def _spoilt() -> Workload:
    """A number that is none in the last layer; clipping by the norm takes it to every host."""
    whole = mlp(CLIPPED)

    def init(key):
        *others, last = whole.init(key)
        return [*others, last | {"bias": last["bias"].at[0].set(jnp.nan)}]

    return replace(whole, init=init)


def _offloading() -> Plan:
    """All that can rests on both hosts."""
    plan = _plan((1, 1, 1, 1), ((1, 1),) * 4, schedule="gpipe", num_microbatches=8)
    both = ("activations", "optimizer")
    return plan.with_(stages=[replace(stage, offload=both) for stage in plan.stages])


#: Workload, plan, window.
CASES: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    # Tied parameters, dropout, a value that skips a stage, clipping, and layouts that are not alike.
    "unequal": lambda: (tied(CLIPPED), _plan((2, 2), ((2, 1), (1, 2)), remat="full"), 1),
}

#: Little to compile: what differs is how arrays travel.
SMALL: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    "small": lambda: (mlp(), _plan((2, 2), ((2, 1), (1, 2))), 1),
}

SLOW_CASES: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
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
    "data": lambda: (tied(), _plan((2, 2), ((2, 1), (2, 1))), 2),
    "tensor": lambda: (mlp(CLIPPED), _plan((2, 2), ((1, 2), (1, 2)), schedule="gpipe"), 1),
    "interleaved": lambda: (
        mlp(),
        _plan((1, 1, 1, 1), ((2, 1), (2, 1)), schedule="interleaved", remat="full"),
        1,
    ),
    # A stage on all devices of both hosts.
    "span": lambda: (tied(CLIPPED), _plan((4,), ((2, 2),), shard_optimizer=True), 1),
    "split": lambda: (mlp(), _plan((2, 2), ((2, 1), (1, 2)), schedule="zb-h1"), 2),
    "offload": lambda: (mlp(optax.adam(1e-2)), _offloading(), 2),
    "nan": lambda: (_spoilt(), _plan((2, 2), ((2, 1), (2, 1))), 1),
}

THREE_HOSTS: dict[str, Callable[[], tuple[Workload, Plan, int]]] = {
    "three": lambda: (
        tied(CLIPPED),
        _plan((1, 2, 1), ((1, 2), (2, 1), (1, 2)), nodes=(2, 2, 2)),
        1,
    ),
    # A stage on two hosts, and one on the third.
    "span of three": lambda: (
        tied(CLIPPED),
        _plan((2, 2), ((2, 2), (2, 1)), nodes=(2, 2, 2), remat="full"),
        1,
    ),
}

ALL = CASES | SMALL | SLOW_CASES | THREE_HOSTS


def case(name: str) -> tuple[Workload, Plan, int]:
    """By its name, with or without a transport in front of it."""
    return ALL[name.rpartition(":")[2]]()


def widest(names: Iterable[str]) -> Plan:
    """The plan of these cases that has the stage of most devices."""
    plans = (case(name)[1] for name in names)
    return max(plans, key=lambda plan: max(stage.num_devices for stage in plan.stages))


def transport(name: str) -> str:
    """With which a case is run."""
    return name.rpartition(":")[0] or "sockets"


#: The case whose training is saved, and restored.
SAVED = "unequal"


def train(
    step: PipelinedStep, workload: Workload, observer: Any = None, directory: Path | None = None
) -> dict[str, Any]:
    """Losses, parameters and optimizer state after three steps, of which the first is measured; and
    the loss of an evaluation before them.

    Args:
        step, workload: Of a plan.
        observer: As for the step.
        directory: To save the training in after two steps, while it goes on, and at its end; what
            is read from there again is compared with it.
    """
    state = step.init(jax.random.key(0))
    saver = None if directory is None else Saver(step, directory)
    found: dict[str, Any] = {}
    for i in range(3):
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
            found["waiting"] = np.array(measured.waiting_peak_bytes)
        else:
            if i == 1:  # only what this process reads; of one process that is all
                batch = jax.tree.map(lambda need, leaf: need.part(leaf), step.needs(), batch)
                found["examples read"] = _examples_read(step)
            state, metrics = step(state, batch, key, observer=observer)
            loss = metrics.loss
        found[f"loss {i}"] = np.float64(loss)
        if saver is not None and i > 0:
            saver.save(state)
    if saver is not None and directory is not None:
        saver.finish()
        read = checkpoint.restore(step, directory)
        again = _named("optimizer", step.optimizer_state(read)) | _named(
            "params", step.params(read)
        )
        held = _named("optimizer", step.optimizer_state(state))
        held |= _named("params", step.params(state))
        assert read.num_steps == 3 and all((again[what] == held[what]).all() for what in held)
    found["replayed"] = np.array(step.replay().peak_bytes_per_device)
    return (
        found
        | _named("params", step.params(state))
        | _named("optimizer", step.optimizer_state(state))
    )


def _examples_read(step: PipelinedStep) -> np.ndarray:
    """Of each leaf of a batch."""
    return np.array([need.num_examples for need in jax.tree.leaves(step.needs())])


def _named(what: str, tree: Any) -> dict[str, np.ndarray]:
    return {f"{what} {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
