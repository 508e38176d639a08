"""The training step of a sharding plan: ``step = sharded_step(workload, plan); state, metrics =
step(state, batch)``. Between the feed of a batch and its end it is one program on all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capture import environment
from capture.compiler.executable import AnyCompiler, Compiler, Executable
from capture.model.workload import PyTree, WorkloadProtocol, takes_key
from capture.plan.sharding import ShardingPlan
from capture.runtime.dispatch import placed, to_host
from capture.runtime.layout import shard_bytes
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer
from capture.runtime.sharded.placement import LeafPlacement
from capture.runtime.sharded.training import Sharded, shard_as_planned
from capture.runtime.state import PipelineState, joined_params
from capture.runtime.train_step import TrainStep
from capture.step.holds import Leaves, Loss, Params, State
from capture.step.program import Run, Slot, Step
from capture.step.sharded import build_training


def sharded_step(
    workload: WorkloadProtocol, plan: ShardingPlan, *, fast_compile: bool = False
) -> ShardedStep:
    """Return the training step of a sharding plan, on the first devices of this process.

    Args:
        plan: With the devices that it is for.
        fast_compile: As for ``pipeshard``.

    Raises:
        PlanError: ``plan-cluster`` for a plan of an earlier version, and as ``shard``.
        ExecutionError: ``osdp-devices`` if there are too few.
    """
    environment.warn()
    sharded = shard_as_planned(workload, plan, plan.known_cluster)
    return ShardedStep(sharded, Compiler(fast_compile=fast_compile))


class ShardedStep(TrainStep):
    """A training step of a sharding plan; compiled for absent devices, it does not run."""

    def __init__(self, sharded: Sharded, compiler: AnyCompiler):
        self.sharded, self.workload, self.traced = sharded, sharded.workload, sharded.traced
        self.devices, self._compiler = list(sharded.mesh.devices.flat), compiler
        self.microbatch_sizes = (sharded.plan.batch_size * len(self.devices),)

    # ---- the program -----------------------------------------------------------------------------

    @cached_property
    def _trees(self) -> tuple[Any, Any, Any]:
        """The shapes of parameters, of optimizer state, and of all else that the loss takes."""
        workload = self.workload
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = jax.eval_shape(self.sharded.split, jax.eval_shape(workload.init, key))
        state = jax.eval_shape(workload.optimizer.init, params)
        batch = jax.eval_shape(lambda key: workload.batch(key, *self.microbatch_sizes), key)
        return params, state, (batch, key) if takes_key(workload) else (batch,)

    @cached_property
    def _arguments(self) -> dict[type, list[jax.ShapeDtypeStruct]]:
        """The arrays of a slot that the program reads, by what it holds."""
        sharded, (params, state, (batch, *key)) = self.sharded, self._trees
        whole = NamedSharding(sharded.mesh, PartitionSpec())
        of_batch = [sharded.batch_sharding] * len(jax.tree.leaves(batch)) + [whole] * len(key)
        placed: dict[type, tuple[Any, Sequence[Any]]] = {
            Params: (params, jax.tree.leaves(sharded.shardings())),
            State: (state, jax.tree.leaves(sharded.opt_state_shardings)),
            Leaves: ((batch, key), of_batch),
        }
        return {
            holds: [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)
                for x, own in zip(jax.tree.leaves(tree), shardings, strict=True)
            ]
            for holds, (tree, shardings) in placed.items()
        }

    @cached_property
    def _executable(self) -> Executable:
        trees, arguments = self._trees, list(self._arguments.values())

        def step(*leaves):  # a program that is exported has no trees of optax
            params, state, given = (
                jax.tree.unflatten(jax.tree.structure(tree), own)
                for tree, own in zip(trees, leaves, strict=True)
            )
            params, state, loss = self.sharded.update(params, state, *given)
            return jax.tree.leaves(params), jax.tree.leaves(state), [loss]

        kept = [[struct.sharding for struct in of] for of in arguments[:2]]
        results = (*kept, [NamedSharding(self.sharded.mesh, PartitionSpec())])
        return self._compiler(step, arguments, donate=(0, 1), out_shardings=results)

    def compile(self) -> None:
        """Compile the program, which else is compiled when it is first needed."""
        self._executable  # noqa: B018  # kept from then on

    @cached_property
    def program(self) -> Step:
        """The step's instructions; compiles the program."""
        arguments, program = self._arguments, self._executable
        return build_training(
            len(self.devices),
            len(arguments[Params]),
            len(arguments[Leaves]),
            [sum(map(shard_bytes, of)) for of in (*arguments.values(), program.outputs[2])],
            program.transient_bytes,
        )

    def layout(self, slot: Slot) -> list[jax.ShapeDtypeStruct]:
        holds = type(slot.holds)
        return self._executable.outputs[2] if holds is Loss else self._arguments[holds]

    def executable(self, run: Run) -> Executable:
        return self._executable

    # ---- state -----------------------------------------------------------------------------------

    @cached_property
    def optimizer(self) -> SlicedOptimizer:  # type: ignore[override]  # only checkpoints ask for it
        """The update over the parameters of the layer graph, which plans of all kinds exchange."""
        update = traced_optimizer(self.workload.optimizer, self.traced)
        return SlicedOptimizer(update, [range(len(update.params))])

    def _leaves_in(
        self, slot: Slot, leaves: Sequence[Any], state_leaves: Sequence[object] | None
    ) -> Sequence[Any]:
        params = self.sharded.split(joined_params(self.traced, dict(enumerate(leaves))))
        if slot.category == "parameters":
            return jax.tree.leaves(params)
        if state_leaves is None:
            return jax.tree.leaves(self.workload.optimizer.init(params))
        rows, structs = iter(state_leaves), self.sharded.optimizer.state
        state = [
            next(rows) if leaf is None else leaf.split(_stacked(leaf, struct, rows))
            for leaf, struct in zip(self.sharded.state_leaves, structs, strict=True)
        ]
        return jax.tree.leaves(state)

    def params(self, state: PipelineState) -> PyTree:
        tree = jax.tree.structure(self._trees[0])
        split = jax.tree.unflatten(tree, list(map(to_host, state.slots["parameters"])))
        return jax.tree.map(np.asarray, self.sharded.join(split))

    def state_leaves(self, state: PipelineState) -> Mapping[int, Any]:
        arrays, found = list(map(to_host, state.slots["optimizer"])), list[Any]()
        split = jax.tree.unflatten(jax.tree.structure(self._trees[1]), arrays)
        tree: Any = self.sharded.optimizer.state_tree  # JAX's stubs leave its methods out
        for leaf, node in zip(self.sharded.state_leaves, tree.flatten_up_to(split), strict=True):
            whole = node if leaf is None else np.asarray(leaf.join(node))
            stacked = None if leaf is None else leaf.stacked
            found.extend([whole] if stacked is None else np.moveaxis(whole, stacked, 0))
        return dict(enumerate(found))

    # ---- execution -------------------------------------------------------------------------------

    def first_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> PyTree:
        own, given = self.init_from(params).slots["parameters"], self._split(batch, key)[0]
        shardings = (struct.sharding for struct in self._arguments[Leaves])
        trees, leaves = (self._trees[0], self._trees[2]), (own, placed(given, shardings))
        params, inputs = (
            jax.tree.unflatten(jax.tree.structure(tree), each)
            for tree, each in zip(trees, leaves, strict=True)
        )
        _, gradients = jax.jit(self.sharded.loss_and_gradients)(params, *inputs)
        return jax.tree.map(np.asarray, self.sharded.join(gradients))


def _stacked(leaf: LeafPlacement, struct: jax.ShapeDtypeStruct, rows: Any) -> Any:
    """Return the next array of the state, of a parameter that a scan stacks from its layers."""
    if leaf.stacked is None:
        return next(rows)
    return np.stack([next(rows) for _ in range(struct.shape[leaf.stacked])], leaf.stacked)
