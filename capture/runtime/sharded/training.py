"""A sharding plan on a mesh: shardings for the arrays of a training loop, and its loss with the
plan's all-gathers and reduce-scatters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import PyTree, WorkloadProtocol
from capture.plan.files import other_model
from capture.plan.sharding import ShardingPlan
from capture.quantities import counted
from capture.runtime.gradients import loss_and_gradients
from capture.runtime.leaf_parts import check_rows
from capture.runtime.optimizer import TracedOptimizer
from capture.runtime.sharded.mesh import mesh_of
from capture.runtime.sharded.placement import LeafPlacement, place_leaves
from capture.runtime.sharded.transform import gathered_loss
from capture.tracing.model import TracedModel, trace


def shard(workload: WorkloadProtocol, plan: ShardingPlan | None, where: Mesh | Cluster) -> Sharded:
    """Return what trains a workload as a plan says: shardings, loss and step, in place of those of
    fully sharded data parallelism.

    Args:
        workload: The task that the plan was made for; it is traced, and nothing is allocated.
        plan: Such as ``recommender.osdp.osdp`` finds.
        where: A mesh all of whose axes are data-parallel, or a cluster, whose mesh is then made of
            this process's devices.

    Raises:
        PlanError: ``osdp-infeasible`` where a search found no plan, ``plan-other-model`` for
            parameters of another, and those of ``place_leaves``; ExecutionError:
            ``osdp-devices``; TracingError: those of ``trace``.
    """
    if plan is None:
        raise PlanError.of(
            "there is no plan to shard by: the search found none that fits, and its result's why "
            "says what is missing.",
            "osdp-infeasible",
        )
    mesh = mesh_of(where) if isinstance(where, Cluster) else where
    traced = trace(workload, 1, at_products=True)
    if wrong := sorted(set(plan.mode_of_param) ^ {leaf.name for leaf in traced.leaves}):
        has = f"differs in {counted(len(wrong), 'parameter')}, such as {wrong[0]!r}"
        raise other_model(plan, workload, has)
    return Sharded(workload, plan, mesh, traced)


def shard_as_planned(
    workload: WorkloadProtocol, plan: ShardingPlan, where: Mesh | Cluster
) -> Sharded:
    """Return what ``shard`` does, of the very loss that the plan was made for.

    Raises:
        PlanError: ``plan-other-model`` for another program too, and as ``shard``.
    """
    sharded = shard(workload, plan, where)
    if plan.model_hash not in ("", sharded.model_hash):
        raise other_model(plan, workload, f"has model_hash={sharded.model_hash}")
    return sharded


class Sharded:
    """A sharding plan of a workload on a mesh.

    Args:
        plan: With the names of its operators' parameters.
        mesh: All of its axes are data-parallel.
        traced: The workload, cut at products.
    """

    def __init__(
        self, workload: WorkloadProtocol, plan: ShardingPlan, mesh: Mesh, traced: TracedModel
    ):
        # What operations give is for XLA to say, also on a mesh that was made to have every
        # operation say it (``jax.make_mesh``).
        self.workload, self.plan, self.mesh = workload, plan, Mesh(mesh.devices, mesh.axis_names)
        self.traced, self._struct = traced, traced.params_struct
        self.leaves = place_leaves(plan, self.mesh, traced)
        in_two = {i: 2 for i, leaf in enumerate(self.leaves) if len(leaf.shardings) > 1}
        check_rows(workload.optimizer, self._struct, self._split_struct, in_two)

    # ---- shardings -------------------------------------------------------------------------------

    @property
    def replicated(self) -> tuple[str, ...]:
        """Parameters that stay whole although their operator is sharded: too small, or the devices
        divide none of their dimensions."""
        sharded = {name for name, mode in self.plan.mode_of_param.items() if mode.num_sharded}
        return tuple(
            leaf.name
            for leaf in self.leaves
            if not any(part.is_sharded for part in leaf.parts)
            and {leaf.name, f"{leaf.name}[0]"} & sharded
        )

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batch leaves whose first dimension is that of the examples."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    @property
    def model_hash(self) -> str:
        """Content hash of the traced loss, as ``ShardingPlan.model_hash``."""
        return self.traced.graph.model_hash

    def shardings(self, params: PyTree = None) -> Any:
        """Return the sharding of every parameter, in a tree of the parameters' structure.

        Args:
            params: Arrays or shapes, to check that they are the model's: as ``init`` or as
                ``split`` returns them.

        Raises:
            PlanError: ``osdp-params``.
        """
        if params is not None:
            self._check(params)
        return self._tree.unflatten([leaf.node for leaf in self.leaves])

    @cached_property
    def optimizer(self) -> TracedOptimizer:
        """The workload's optimizer, traced over the user's parameters."""
        return TracedOptimizer(self.workload.optimizer, self._struct)

    @cached_property
    def state_leaves(self) -> list[LeafPlacement | None]:
        """The placement of the parameter to which each array of the optimizer's state belongs and
        whose shape it has; None for all else, which is replicated."""
        params = self.optimizer.params
        found = map(self.optimizer.param_of_state.get, range(len(self.optimizer.state)))
        return [
            None if p is None or struct.shape != params[p].shape else self.leaves[p]
            for p, struct in zip(found, self.optimizer.state, strict=True)
        ]

    @cached_property
    def opt_state_shardings(self) -> Any:
        """Shardings of the optimizer's state: what belongs to one parameter and has its shape is
        sharded as that is; all else is replicated."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        nodes = [whole if leaf is None else leaf.node for leaf in self.state_leaves]
        return jax.tree.unflatten(self.optimizer.state_tree, nodes)

    def split(self, params: PyTree) -> Any:
        """Return the parameters with a ``SplitLeaf`` for every leaf of which a part is sharded."""
        self._check(params)
        return self._tree.unflatten(
            [leaf.split(x) for leaf, x in zip(self.leaves, jax.tree.leaves(params), strict=True)]
        )

    def join(self, params: Any) -> Any:
        """Return the parameters of which ``split`` has made this tree."""
        self._check(params)
        leaves = zip(self.leaves, self._tree.flatten_up_to(params), strict=True)
        return self._tree.unflatten([leaf.join(x) for leaf, x in leaves])

    @property
    def _tree(self) -> Any:
        return jax.tree.structure(self._struct)

    @cached_property
    def _split_struct(self) -> Any:
        leaves = zip(self.leaves, jax.tree.leaves(self._struct), strict=True)
        return self._tree.unflatten([jax.eval_shape(leaf.split, struct) for leaf, struct in leaves])

    def _check(self, params: PyTree) -> None:
        """Refuse what is neither the model's parameters nor those as ``split`` returns them."""
        shapes = jax.tree.map(jnp.shape, params)
        for struct in (self._struct, self._split_struct):
            if shapes == jax.tree.map(jnp.shape, struct):
                return
        wrong = _difference(params, self._struct)
        raise PlanError.of(
            f"these are not the parameters of the plan's model: {wrong}; give those that its init "
            "makes.",
            "osdp-params",
        )

    # ---- the step --------------------------------------------------------------------------------

    def transform(
        self, loss_fn: Callable[..., object], has_aux: bool = False
    ) -> Callable[..., Any]:
        """Return a loss with the plan's all-gathers; call and differentiate it inside ``jax.jit``.

        Args:
            loss_fn: ``loss_fn(params, batch)``, or with further array arguments; a scalar. Rows
                that a split table lacks count as 0.
            has_aux: As of ``jax.value_and_grad``: ``loss_fn`` returns ``(loss, aux)``, aux being
                any tree of arrays and numbers. The plan's memory does not count them.

        Returns:
            A function of the same arguments with the same results; the parameters are those of
            ``shardings``.

        Raises:
            WorkloadError: ``osdp-loss`` when it is called and the loss is no scalar, has results
                beside it that ``has_aux`` does not announce, or scans over other parameters than
                the workload's; PlanError: ``osdp-params``.
        """
        run = gathered_loss(loss_fn, has_aux, self.plan, self.leaves, self.traced)

        @wraps(loss_fn)
        def sharded_loss(params, *arguments):
            self._check(params)
            return run(params, *arguments)

        return sharded_loss

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return the workload's parameters and the optimizer's state, each as it is sharded."""
        params = jax.jit(
            lambda key: self.split(self.workload.init(key)), out_shardings=self.shardings()
        )(key)
        init = jax.jit(self.workload.optimizer.init, out_shardings=self.opt_state_shardings)
        return params, init(params)

    def loss_and_gradients(self, params: PyTree, *arguments: Any) -> tuple[jax.Array, Any]:
        """Return the workload's loss and its gradients, to be compiled; the arguments are the batch
        and, if the loss takes one, a random key."""
        return loss_and_gradients(self.transform(self.workload.loss_fn))(params, *arguments)

    def update(self, params: Any, state: Any, *arguments: Any) -> tuple[Any, Any, jax.Array]:
        """Make one step of the workload, to be compiled: return new parameters, new state and the
        loss; arguments as of ``loss_and_gradients``."""
        loss, gradients = self.loss_and_gradients(params, *arguments)
        updates, new = self.workload.optimizer.update(gradients, state, params)
        # An optimizer may begin the state of integers as integers, and go on in another type.
        new = jax.tree.map(
            lambda made, old: made if made.dtype == old.dtype else made.astype(old.dtype),
            new,
            state,
        )
        return optax.apply_updates(params, updates), new, loss

    @cached_property
    def step(self) -> Callable[..., tuple[Any, Any, jax.Array]]:
        """``update``, compiled; the parameters and the state that it is given become its own."""
        return jax.jit(
            self.update,
            donate_argnums=(0, 1),
            out_shardings=(self.shardings(), self.opt_state_shardings, None),
        )


def _difference(params: PyTree, struct: PyTree) -> str:
    """Name the first leaf that is another one."""

    def named(tree):
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): jnp.shape(x)
            for path, x in jax.tree.leaves_with_path(tree)
        }

    given, wanted = named(params), named(struct)
    for name in sorted(set(given) | set(wanted)):
        if given.get(name) != wanted.get(name):
            return (
                f"{name!r} has shape {given.get(name, 'none')} and should have "
                f"{wanted.get(name, 'none')}"
            )
    return "the containers differ"
