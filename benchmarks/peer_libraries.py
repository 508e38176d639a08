"""One training step of ``plain_gpt`` in each library that ``benchmarks/peers.py`` compares: the
same parameters, batch, precision and optimizer, each library by its own public interface.

    ours        ``pipeshard``: stages of equally many blocks, a device each
    SpectraX    ``sxjit`` and ``sxvalue_and_grad``; the update is the user's, a jitted one per stage
    JaxPP       ``mpmd_jit_with_loop`` and ``treduce``, in its single-process runtime
    GSPMD       one ``jax.jit`` over a mesh of as many devices, data-parallel; a device holds as
                many examples at a time as a device of the pipelines
    one device  one ``jax.jit``, which goes through the micro-batches in a scan

A library that is not installed raises ImportError when its step is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.plain_gpt import gpt
from capture.machine.cluster import Cluster
from capture.model.workload import Workload
from capture.plan.choices import REMAT_POLICIES, StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan, Stage
from capture.runtime.pipeline import pipeshard

OURS, SPECTRAX, JAXPP = "ours", "SpectraX", "JaxPP"
GSPMD, ONE_DEVICE = "GSPMD", "one device"
PIPELINES = (OURS, SPECTRAX, JAXPP)

#: By our name, what SpectraX and JaxPP call a schedule; those that all three have.
SCHEDULES_OF_PEERS = {
    name: theirs
    for name, theirs in {
        "1f1b": ("Std1F1B", "Std1F1B"),
        "gpipe": ("GPipe", "GPipe"),
        "zb-h1": ("ZeroBubbleH1", "ZeroBubble"),
    }.items()
    if name in SCHEDULES
}


@dataclass(frozen=True)
class Case:
    """What a library is to train.

    Attributes:
        model: Arguments of ``plain_gpt.gpt``.
        microbatch_size: Examples.
        schedule: By our name; of pipelines alone.
        remat: What the backward pass recomputes: of ours by name, of the others ``"none"``, or
            ``"full"`` for a ``jax.checkpoint`` around every block.
        num_stages: Each has a device.
    """

    model: Mapping[str, Any]
    microbatch_size: int
    schedule: str = "1f1b"
    remat: str = "none"
    num_stages: int = 4
    num_microbatches: int = 8

    @property
    def global_batch_size(self) -> int:
        return self.microbatch_size * self.num_microbatches

    @property
    def num_tasks(self) -> int:
        """Passes of one micro-batch through one stage, forward and backward."""
        return 2 * self.num_stages * self.num_microbatches

    @property
    def blocks_per_stage(self) -> int:
        return self.model["num_blocks"] // self.num_stages

    def workload(self) -> Workload:
        return gpt(**self.model, remat=self.remat == "full")

    def params(self) -> Any:
        """The same for every library, on the host."""
        return jax.tree.map(np.asarray, self.workload().init(jax.random.key(0)))

    def batch(self) -> Any:
        batch = self.workload().batch(jax.random.key(1), self.global_batch_size)
        return jax.tree.map(np.asarray, batch)

    def loss(self, mark: Callable[[jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
        """With a mark between stages."""

        def between(x: jax.Array, block: int) -> jax.Array:
            return x if block % self.blocks_per_stage else mark(x)

        return partial(self.workload().loss_fn, between=between)

    def parts(self, batch: Any, size: int) -> Any:
        """Micro-batches of so many examples, along a new first dimension."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)


class Trainer(Protocol):
    """A compiled step with its state.

    Attributes:
        state: Arrays that the next step takes.
    """

    state: Any

    def step(self, batch: Any) -> Any:
        """One update; its loss, or one per micro-batch, which may still be running."""
        ...

    def loss(self, result: Any) -> float:
        """Of what ``step`` returned."""
        ...


class Ours:
    def __init__(self, case: Case):
        workload = gpt(**case.model)
        loss = partial(
            workload.loss_fn, between=lambda x, block: checkpoint_name(x, "layer_boundary")
        )
        per_stage, choice = case.blocks_per_stage, StageChoice(remat=case.remat)  # type: ignore[arg-type]
        plan = Plan(
            Cluster((case.num_stages,)),
            case.model["num_blocks"],
            tuple(
                Stage(s * per_stage, (s + 1) * per_stage, (s,), choice)
                for s in range(case.num_stages)
            ),
            case.global_batch_size,
            case.num_microbatches,
            schedule=case.schedule,
        )
        self.pipeline = pipeshard(
            Workload(loss, workload.init, workload.batch, workload.optimizer), plan
        )
        self.state = self.pipeline.init_from(case.params())

    def step(self, batch: Any) -> Any:
        self.state, metrics = self.pipeline(self.state, batch)
        return metrics.losses

    def loss(self, result: Any) -> float:
        return float(np.mean([np.asarray(loss) for loss in result]))


class SpectraX:
    """Wants the parameters as a tree per stage, so that each is updated on its device."""

    def __init__(self, case: Case):
        from spectrax.runtime import schedules
        from spectrax.runtime.mpmd import sxjit, sxstage_iter, sxvalue_and_grad
        from spectrax.runtime.types import MpMdMesh

        # It reports every program that it compiles.
        logging.disable(logging.WARNING)
        mesh = MpMdMesh(_mesh(case, "stages"), "stages")
        schedule = getattr(schedules, SCHEDULES_OF_PEERS[case.schedule][0])
        optimizer, loss = case.workload().optimizer, case.loss(sxstage_iter)

        @sxjit(
            mesh=mesh,
            schedule=schedule(microbatches=case.num_microbatches),
            static_argnums=(),
            batch_argnums=(1,),
        )
        def of_stages(stages, tokens):
            return loss(_joined(stages), {"tokens": tokens})

        def update(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._gradients = sxvalue_and_grad(of_stages, argnums=(0,))
        self._update = jax.jit(update, donate_argnums=(1, 2))
        stages = _by_stage(case, case.params())
        placed = [jax.device_put(tree, mesh.sub_sharding(s)) for s, tree in enumerate(stages)]
        self.state = placed, [jax.jit(optimizer.init)(tree) for tree in placed]

    def step(self, batch: Any) -> Any:
        params, states = self.state
        loss, (grads,) = self._gradients(params, batch["tokens"])
        made = [self._update(*each) for each in zip(grads, states, params, strict=True)]
        self.state = [params for params, _ in made], [state for _, state in made]
        return loss

    def loss(self, result: Any) -> float:
        return float(result)


class JaxPP:
    """Donates its state, as the others do."""

    def __init__(self, case: Case):
        import jaxpp.api as jaxpp
        from jax._src import dtypes
        from jaxpp import schedules
        from jaxpp.array import MpmdArray

        # Its arrays come back as arguments; jax 0.10, newer than those that it supports, asks.
        dtypes.register_canonicalize_value_handler(MpmdArray, None)
        mesh = jaxpp.MpmdMesh(_mesh(case, "stages", "data"), "stages")
        schedule = getattr(schedules, SCHEDULES_OF_PEERS[case.schedule][1])(mesh.mpmd_dim)
        optimizer, mean = case.workload().optimizer, case.loss(jaxpp.mark_stage_end)

        def loss(params, batch):
            return jaxpp.mark_stage_end(mean(params, batch) / case.num_microbatches)

        @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh, donate_argnums=(0, 1))
        def step(state, params, batch):
            gradients = partial(jax.value_and_grad(loss), params)
            losses, grads = jaxpp.treduce(gradients, batch, schedule=schedule)
            updates, state = optimizer.update(grads, state, params)
            return state, optax.apply_updates(params, updates), losses

        self._case, self._step = case, step
        params = jax.tree.map(jnp.asarray, case.params())
        self.state = optimizer.init(params), params

    def step(self, batch: Any) -> Any:
        parts = self._case.parts(batch, self._case.microbatch_size)
        *state, losses = self._step(*self.state, parts)
        self.state = tuple(state)
        return losses

    def loss(self, result: Any) -> float:
        return float(np.asarray(result.to_mpmd_local_array).sum())


class OneProgram:
    """One jitted step, data-parallel over the devices."""

    def __init__(self, case: Case, num_devices: int):
        workload = case.workload()
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
        replicated, split = (
            NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(None, "data"))
        )
        num_parts = case.num_microbatches // num_devices

        def step(params, state, parts):
            def add(total, part):
                loss, grads = jax.value_and_grad(workload.loss_fn)(params, part)
                return jax.tree.map(lambda t, g: t + g / num_parts, total, grads), loss

            grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
            updates, state = workload.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, losses.mean()

        self._case, self._size = case, case.microbatch_size * num_devices
        self._step = jax.jit(
            step,
            donate_argnums=(0, 1),
            in_shardings=(replicated, replicated, split),
            out_shardings=(replicated, replicated, replicated),
        )

        def begin(params):
            return params, workload.optimizer.init(params)

        self.state = jax.jit(begin, out_shardings=replicated)(case.params())

    def step(self, batch: Any) -> Any:
        *state, loss = self._step(*self.state, self._case.parts(batch, self._size))
        self.state = tuple(state)
        return loss

    def loss(self, result: Any) -> float:
        return float(result)


@dataclass(frozen=True)
class Library:
    """A way to train.

    Attributes:
        make: Compiles a step.
        remats: That it knows, see ``Case``.
        package: Whose version counts; None for JAX's own.
    """

    make: Callable[[Case], Trainer]
    remats: tuple[str, ...] = field(default=("none", "full"))
    package: str | None = None


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        OURS: Library(Ours, REMAT_POLICIES, "capture-jax"),
        SPECTRAX: Library(SpectraX, package="spectrax-lib"),
        JAXPP: Library(JaxPP, package="jaxpp"),
        GSPMD: Library(lambda case: OneProgram(case, case.num_stages)),
        ONE_DEVICE: Library(lambda case: OneProgram(case, 1)),
    }
)


def _mesh(case: Case, *axes: str) -> Mesh:
    """A device per stage along the first axis."""
    devices = np.array(jax.devices()[: case.num_stages])
    return Mesh(devices.reshape(-1, *(1,) * (len(axes) - 1)), axes)


def _by_stage(case: Case, params: Any) -> list[dict[str, Any]]:
    per_stage = case.blocks_per_stage
    stages: list[dict[str, Any]] = [
        {"blocks": params["blocks"][s * per_stage : (s + 1) * per_stage]}
        for s in range(case.num_stages)
    ]
    stages[0] |= {name: params[name] for name in ("tokens", "positions")}
    stages[-1] |= {name: params[name] for name in ("ln", "head")}
    return stages


def _joined(stages: list[dict[str, Any]]) -> dict[str, Any]:
    blocks = [block for stage in stages for block in stage["blocks"]]
    return {**stages[0], **stages[-1], "blocks": blocks}
