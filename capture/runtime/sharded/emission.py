"""A sharding plan becomes a program: shardings for the user's arrays, and their loss with gathers
where the plan wants them.

The loss stays the user's: it is traced where it is called, with whatever batch, and evaluated
operation by operation. One that reads a parameter of the plan is run by ``gathering``; all others
as they are. Arrays are global (``jax.jit`` with shardings), so the meaning of the loss does not
depend on the number of devices. The model's own ``jax.checkpoint`` regions stay what they are.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.errors import ClusterError, ExecutionError, PlanError, Violation, WorkloadError
from capture.machine.cluster import Cluster
from capture.plan.sharding import Mode, ParameterLeaf, ShardingPlan
from capture.runtime.optimizer import SlicedOptimizer, TracedOptimizer
from capture.runtime.sharded.gathering import (
    ParamArray,
    Part,
    Piece,
    Rows,
    Taken,
    awaited,
    run_gathered,
    with_token,
)
from capture.tracing.cut import product_cuts
from capture.tracing.layers import LayerOps, assign_layers
from capture.tracing.leaf_uses import LAYOUT, ORDERED, Slicing, slicing_of
from capture.tracing.model import flatten_loss
from capture.tracing.operators import TracedOperators
from capture.tracing.program import Op, Program
from capture.tracing.slices import run_op, run_steps, steps_of

_CASTS = ("convert_element_type", "reduce_precision", "copy")
_TOKEN = -1  # where an environment holds the token of ``run_gathered``; values are numbered from 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitLeaf:
    """A parameter leaf of whose g slices k are sharded: what stands in its place in the user's
    tree.

    Attributes:
        replicated: The rows that every device has.
        sharded: The rows that are sharded.
    """

    replicated: Any
    sharded: Any


@dataclass(frozen=True)
class _LeafPlan:
    """How one leaf of the user's tree is held.

    Attributes:
        name: For people.
        parts: Of a leaf stacked over the steps of a scan, those of each step.
        slice_dim: Dimension that parts and slices are along; of a step's part of the leaf.
        stacked: Dimension of the steps; None of an ordinary leaf.
        is_small: Whether operations read it as any other array: what a barrier would cost is more
            than what it saves.
    """

    name: str
    parts: tuple[Part, ...]
    slice_dim: int | None
    stacked: int | None
    is_small: bool

    @property
    def shardings(self) -> list[NamedSharding]:
        """Of the user's array, or of the two of a ``SplitLeaf``."""
        if self.stacked is None:
            return [part.stored for part in self.parts]
        (part,) = self.parts
        axes = list(part.stored.spec)
        axes = [*axes, *[None] * (self.stacked - len(axes))]
        return [
            NamedSharding(
                part.stored.mesh, PartitionSpec(*axes[: self.stacked], None, *axes[self.stacked :])
            )
        ]

    def split(self, leaf: Any) -> Any:
        if self.slice_dim is None or len(self.parts) == 1:
            return leaf
        return SplitLeaf(
            *(
                lax.slice_in_dim(leaf, part.first, part.stop, axis=self.slice_dim)
                for part in self.parts
            )
        )

    def held(self, leaf: Any) -> list[Any]:
        """What an evaluation of the loss starts from: one value per step."""
        rows = [leaf] if self.stacked is None else _unstacked(leaf, self.stacked)
        if self.is_small:
            return rows
        if self.stacked is not None:
            return [_Held((row,), self.parts, self.slice_dim) for row in rows]
        return [
            _Held(
                (leaf.replicated, leaf.sharded) if isinstance(leaf, SplitLeaf) else (leaf,),
                self.parts,
                self.slice_dim,
            )
        ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Held:
    """A parameter as it is stored, and what the program does to it before an operation reads it.

    Attributes:
        arrays: One per part.
        parts, slice_dim: As in ``_LeafPlan``.
        chain: Ops that keep its elements.
    """

    arrays: tuple[Any, ...]
    parts: tuple[Part, ...] = field(metadata={"static": True})
    slice_dim: int | None = field(metadata={"static": True})
    chain: tuple[Op, ...] = field(default=(), metadata={"static": True})

    @property
    def _num_casts(self) -> int:
        """Ops that come before the gather, so that less is sent."""
        return next(
            (i for i, op in enumerate(self.chain) if op.primitive.name not in _CASTS),
            len(self.chain),
        )

    @property
    def sources(self) -> list[ParamArray]:
        return [
            ParamArray(part, partial(_applied, self.chain[: self._num_casts]))
            for part in self.parts
        ]

    def read(self, gathered: Sequence[Any]) -> Any:
        """What the operation reads, from all of the leaf or from a slice of it."""
        whole = (
            gathered[0] if len(gathered) == 1 else jnp.concatenate(gathered, axis=self.slice_dim)
        )
        return _applied(self.chain[self._num_casts :], whole)

    @property
    def plain(self) -> Any:
        """The value as an ordinary array, sharded as XLA likes."""
        return self.read(
            [source.cast(array) for source, array in zip(self.sources, self.arrays, strict=True)]
        )

    @property
    def has_slices(self) -> bool:
        return len(self.parts) > 1 or self.parts[0].num_slices > 1

    def dims_as_read(self) -> tuple[int, ...] | None:
        """Of each dimension that the operation reads, that of the leaf; None if slices do not stay
        slices."""
        dims = tuple(range(self.arrays[0].ndim))
        for op in self.chain:
            if op.primitive.name not in ORDERED:
                return None
            dims = tuple(dims[d] for d in op.params.get("permutation", range(len(dims))))
        return dims


class Emission:
    """What a plan is for one model on one mesh.

    Args:
        plan: With the names of its operators' parameters.
        mesh: All of its axes are data-parallel; groups are the devices along the last of them.
        operators: The model's.
        optimizer: The optax transformation of the training loop, for ``opt_state_shardings``.

    Raises:
        PlanError: ``osdp-plan-params`` if the plan names other parameters, ``osdp-mesh`` if groups
            do not follow the mesh's axes, ``osdp-scan`` if operators that share a scanned leaf have
            several modes, or have a part of it sharded.
    """

    def __init__(self, plan: ShardingPlan, mesh: Mesh, operators: TracedOperators, optimizer: Any):
        # What operations give is for XLA to say, also on a mesh that was made to have every
        # operation say it (``jax.make_mesh``).
        self.plan, self.mesh, self._optimizer = plan, Mesh(mesh.devices, mesh.axis_names), optimizer
        self._struct, self._stacked = operators.traced.params_struct, operators.traced.stacked
        modes, named = plan.mode_of_param, {leaf.name for leaf in operators.leaves}
        if wrong := sorted(set(modes) ^ named):
            raise PlanError.of(
                f"the plan and the model differ in {len(wrong)} parameters, such as {wrong[0]!r}; "
                "plan for this model.",
                "osdp-plan-params",
            )
        PlanError.check(_group_violations(plan, mesh))
        self._leaves = list(self._planned(operators.leaves))

    def _planned(self, leaves: Sequence[ParameterLeaf]) -> Iterator[_LeafPlan]:
        modes, rows = self.plan.mode_of_param, iter(leaves)
        for i, struct in enumerate(jax.tree.leaves(self._struct)):
            stacked = self._stacked.get(i)
            num_steps = 1 if stacked is None else struct.shape[stacked]
            own = [next(rows) for _ in range(num_steps)]
            name = own[0].name if stacked is None else own[0].name.rpartition("[")[0]
            found = {modes[leaf.name] for leaf in own}
            can_shard = own[0].can_shard(self.mesh.size, self.plan.smallest_bytes)
            if (
                stacked is not None
                and can_shard
                and (
                    len(found) > 1 or any(0 < mode.num_sharded < mode.num_slices for mode in found)
                )
            ):
                raise PlanError.of(
                    f"the steps of a scan share the parameter {name!r}, but the plan has "
                    f"{', '.join(sorted(map(str, found)))} for it; "
                    "give them one mode that shards all slices or none.",
                    "osdp-scan",
                )
            is_small = own[0].nbytes < self.plan.smallest_bytes
            yield _LeafPlan(
                name, self._parts_of(own[0], found.pop()), own[0].split_dim, stacked, is_small
            )

    def _parts_of(self, leaf: ParameterLeaf, mode: Mode) -> tuple[Part, ...]:
        whole = NamedSharding(self.mesh, PartitionSpec())
        size = 0 if leaf.split_dim is None else leaf.shape[leaf.split_dim]
        if not mode.num_sharded or not leaf.can_shard(self.mesh.size, self.plan.smallest_bytes):
            return (Part(0, size, whole, (whole,)),)
        if leaf.split_dim is None:  # what an operator has beside its product is not split with it
            mode = replace(mode, num_slices=1, num_sharded=1)
        dim = leaf.shard_dim(self.mesh.size)
        assert dim is not None, "a leaf that can be sharded has a dimension for it"
        stored = self._along(dim, _group_axes(self.mesh, mode.group_size))
        # Shared by a group, gradients go to all devices first, as a reduce-scatter, and are then
        # gathered between groups.
        reduced = (
            (stored,)
            if mode.group_size is None
            else (self._along(dim, self.mesh.axis_names), stored)
        )
        first, num_blocks = size * (mode.num_slices - mode.num_sharded) // mode.num_slices, 1
        if dim == leaf.split_dim:
            first, num_blocks = first - first % self.mesh.size, mode.group_size or self.mesh.size
        sharded = Part(first, size, stored, reduced, mode.num_sharded, num_blocks)
        return (sharded,) if not first else (Part(0, first, whole, (whole,)), sharded)

    def _along(self, dim: int, axes: tuple[Any, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * dim, axes))

    # ---- shardings
    # ----------------------------------------------------------------------------------------------

    @property
    def replicated(self) -> tuple[str, ...]:
        """Parameters that stay whole although their operator is sharded: too small, or the devices
        divide none of their dimensions."""
        sharded = {
            name
            for names, mode in zip(self.plan.params, self.plan.modes, strict=True)
            if mode.num_sharded
            for name in names
        }
        return tuple(
            leaf.name
            for leaf in self._leaves
            if not any(part.is_sharded for part in leaf.parts)
            and {leaf.name, f"{leaf.name}[0]"} & sharded
        )

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Of batch leaves whose first dimension is that of the examples."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def shardings(self, params: Any = None) -> Any:
        """Of every parameter, in a tree of the parameters' structure.

        Args:
            params: Arrays or shapes, to check that they are the model's: as ``init`` or as
                ``split`` returns them.

        Raises:
            PlanError: ``osdp-params``.
        """
        found = self._tree.unflatten([_node(leaf.shardings) for leaf in self._leaves])
        if params is not None:
            self._check(params)
        return found

    @cached_property
    def opt_state_shardings(self) -> Any:
        """Of the optimizer's state: what belongs to one parameter and has its shape is sharded as
        that is; all else is replicated."""
        traced = TracedOptimizer(self._optimizer, self._split_struct)
        param_of_state = SlicedOptimizer(traced, [range(len(traced.params))]).param_of_state
        shardings = [sharding for leaf in self._leaves for sharding in leaf.shardings]
        whole = NamedSharding(self.mesh, PartitionSpec())
        found = [
            shardings[param]
            if (param := param_of_state.get(i)) is not None
            and struct.shape == traced.params[param].shape
            else whole
            for i, struct in enumerate(traced.state)
        ]
        return jax.tree.unflatten(traced.state_tree, found)

    def split(self, params: Any) -> Any:
        """The parameters with a ``SplitLeaf`` for every leaf of which a part is sharded; the same
        tree where there is none."""
        self._check(params)
        return self._tree.unflatten(
            [leaf.split(x) for leaf, x in zip(self._leaves, jax.tree.leaves(params), strict=True)]
        )

    def join(self, params: Any) -> Any:
        """The inverse of ``split``."""
        self._check(params)
        leaves = zip(self._leaves, self._tree.flatten_up_to(params), strict=True)
        return self._tree.unflatten(
            [
                jnp.concatenate([x.replicated, x.sharded], leaf.slice_dim)
                if isinstance(x, SplitLeaf)
                else x
                for leaf, x in leaves
            ]
        )

    @property
    def _tree(self) -> Any:
        return jax.tree.structure(self._struct)

    @cached_property
    def _split_struct(self) -> Any:
        leaves = zip(self._leaves, jax.tree.leaves(self._struct), strict=True)
        return self._tree.unflatten([jax.eval_shape(leaf.split, struct) for leaf, struct in leaves])

    def _check(self, params: Any) -> None:
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

    # ---- the loss
    # ----------------------------------------------------------------------------------------------

    def transform(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """The loss with the plan's gathers; call it, and differentiate it, inside ``jax.jit``.

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

        @wraps(loss_fn)
        def sharded_loss(params, *arguments):
            self._check(params)
            closed, result = jax.make_jaxpr(loss_fn, return_shape=True)(self._struct, *arguments)
            _check_results(result, has_aux)
            params, token = with_token(params)
            found = self._evaluate(
                closed, self._tree.flatten_up_to(params), jax.tree.leaves(arguments), token
            )
            return jax.tree.unflatten(jax.tree.structure(result), found)

        return sharded_loss

    def _evaluate(
        self, closed: Any, params: Sequence[Any], batch: Sequence[Any], token: Any
    ) -> list[Any]:
        program, _, stacked = flatten_loss(closed, len(params), sys.maxsize)
        if stacked != self._stacked:
            raise WorkloadError.of(
                "the loss scans over other parameters than the one that the plan was made for; "
                "transform the same computation.",
                "osdp-loss",
            )
        held = [
            value for leaf, x in zip(self._leaves, params, strict=True) for value in leaf.held(x)
        ]
        env = (
            dict(zip(program.params, held, strict=True))
            | dict(zip(program.batch, batch, strict=True))
            | program.consts
        )
        env[_TOKEN] = token
        look_ahead = self.plan.look_ahead and not self.plan.remat
        layers = assign_layers(
            program, product_cuts(program) if self.plan.remat else [0, len(program.ops)]
        )
        for layer in layers:
            run: Callable[..., Any] = partial(_run_layer, layer, program, look_ahead)
            inputs = {v: env[v] for v in (*layer.params, *layer.batch, *layer.inputs, _TOKEN)}
            if layer is not layers[-1]:  # what goes backwards at once is not computed again
                run = jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
            if self.plan.remat:
                small = [v for v in layer.params if not isinstance(env[v], _Held)]
                values, inputs[_TOKEN] = awaited([env[v] for v in small], env[_TOKEN])
                inputs.update(zip(small, values, strict=True))
            env |= run(inputs)
        if look_ahead:  # of a token that nobody reads, XLA would drop all that was tied to it
            env[program.loss] += lax.stop_gradient(env[_TOKEN]).astype(
                program.avals[program.loss].dtype
            )
        return [_plain(env[v]) for v in (program.loss, *program.aux)]


def _run_layer(
    layer: LayerOps, program: Program, look_ahead: bool, inputs: dict[int, Any]
) -> dict[int, Any]:
    differentiated = [op for op in layer.ops if not program.toward_loss.isdisjoint(op.outputs)]
    run = _Runner(frozenset(differentiated), _read_again(layer.params, differentiated), look_ahead)
    env = {**{v: program.consts[v] for v in layer.consts}, **inputs}
    run_steps(steps_of(layer), env, program.consts, run, (_TOKEN,))
    return {v: env[v] for v in (*layer.outputs, _TOKEN)}


@dataclass(frozen=True)
class _Runner:
    """Runs operations of a layer, where parameters may be held.

    Attributes:
        differentiated: Those that a gradient of the loss goes through.
        read_again: See ``_read_again``.
        look_ahead: Whether gathers may start with the operation before; not in the model's remat
            regions.
    """

    differentiated: frozenset[Op]
    read_again: frozenset[Op]
    look_ahead: bool

    def __call__(self, op: Op, inputs: Sequence[Any], env: dict[int, Any]) -> Sequence[Any]:
        held = [i for i, value in enumerate(inputs) if isinstance(value, _Held)]
        if not held:
            return run_op(op, inputs)
        if op.primitive.name in LAYOUT:
            return [replace(inputs[0], chain=(*inputs[0].chain, op))]
        others = [
            i
            for i, v in enumerate(op.inputs)
            if i not in held and not isinstance(v, jex_core.Literal)
        ]
        if not others:  # of parameters alone, such as a penalty on their size: nothing to gather
            return run_op(op, [_plain(value) for value in inputs])
        arrays, given, token = (
            [array for i in held for array in inputs[i].arrays],
            [inputs[i] for i in others],
            env[_TOKEN],
        )
        if (
            op not in self.differentiated
        ):  # or the token would take it backwards, with gradients of 0
            arrays, given, token = lax.stop_gradient((arrays, given, token))
        results, token, first = run_gathered(
            [source for i in held for source in inputs[i].sources],
            _pieces(op, inputs, held, others),
            arrays,
            given,
            token,
            keep_results=op.primitive.name
            not in ("dot_general", "conv_general_dilated", "ragged_dot"),
            hand_on=op in self.read_again,
            look_ahead=self.look_ahead and op in self.differentiated and not op.regions,
        )
        if op in self.differentiated:
            env[_TOKEN] = token
        operand = op.inputs[others[0]]
        if op in self.read_again and isinstance(operand, int):
            env[operand] = first
        return results


def _read_again(params: Sequence[int], ops: Sequence[Op]) -> frozenset[Op]:
    """Operations with a parameter whose first other operand a later one reads with another:
    queries, keys and values, for example."""
    from_params, found = set(params), set()
    last: dict[Any, Op] = {}
    for op in ops:
        params = [v for v in op.reads if v in from_params]
        others = [v for v in op.reads if v not in from_params]
        if params and not others:
            from_params.update(op.outputs)
        elif params:
            key = others[0], op.regions
            if key in last:
                found.add(last[key])
            last[key] = op
    return frozenset(found)


def _pieces(
    op: Op, inputs: Sequence[Any], held: Sequence[int], others: Sequence[int]
) -> list[Piece]:
    """The operation in slices where its parameter has some and it can be split along them; else
    whole."""
    first: _Held = inputs[held[0]]
    dims = (
        first.dims_as_read()
        if len(held) == 1 and first.has_slices and first.slice_dim is not None
        else None
    )
    if dims is not None:
        shape = tuple(
            first.parts[-1].stop if d == first.slice_dim else first.arrays[0].shape[d] for d in dims
        )
        slicing = slicing_of(op, held[0], shape)
        if slicing is not None and dims[slicing.dim] == first.slice_dim:
            return [
                _slice(
                    op,
                    inputs,
                    held[0],
                    others,
                    first,
                    slicing,
                    Taken(array, first.slice_dim, of_array),
                    of_leaf,
                )
                for array, part in enumerate(first.parts)
                for of_array, of_leaf in zip(part.slices(), part.slices(part.first), strict=True)
            ]
    counts = [len(inputs[i].arrays) for i in held]
    starts = [sum(counts[:n]) for n in range(len(counts))]

    def compute(gathered, operands):
        given = list(inputs)
        for i, start, count in zip(held, starts, counts, strict=True):
            given[i] = inputs[i].read(gathered[start : start + count])
        for i, value in zip(others, operands, strict=True):
            given[i] = value
        return list(run_op(op, given))

    return [Piece(tuple(Taken(i) for i in range(sum(counts))), None, compute)]


def _slice(
    op: Op,
    inputs: Sequence[Any],
    position: int,
    others: Sequence[int],
    param: _Held,
    slicing: Slicing,
    taken: Taken,
    rows: Rows,
) -> Piece:
    """The piece of a split operation that reads what is taken from one of its parameter's arrays,
    these rows of the whole parameter."""

    def compute(gathered, operands):
        given, of_slice = list(inputs), op
        given[position] = param.read(gathered)
        for i, value in zip(others, operands, strict=True):
            given[i] = value
        if slicing.partner_dim is None:  # a lookup: rows of other slices are filled with zeros
            indices = given[slicing.partner]
            if op.params["mode"] == lax.GatherScatterMode.CLIP:
                indices = jnp.clip(indices, 0, param.parts[-1].stop - 1)
            given[slicing.partner] = rows.position(indices)
            of_slice = replace(
                op,
                params={**op.params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0},
            )
        return list(run_op(of_slice, given))

    partner = None
    if slicing.partner_dim is not None:
        partner = Taken(
            others.index(slicing.partner), slicing.partner_dim, rows, is_activation=True
        )
    return Piece((taken,), partner, compute)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, _Held) else value


def _applied(chain: Sequence[Op], value: Any) -> Any:
    for op in chain:
        (value,) = run_op(op, [value])
    return value


def _unstacked(leaf: Any, dim: int) -> list[Any]:
    """The parts of a leaf along a dimension; their gradients are put together once, not added
    up."""

    @jax.custom_vjp
    def run(leaf):
        return [lax.index_in_dim(leaf, i, dim, keepdims=False) for i in range(leaf.shape[dim])]

    run.defvjp(lambda leaf: (run(leaf), None), lambda _, gradients: (jnp.stack(gradients, dim),))
    return run(leaf)


def _node(shardings: Sequence[NamedSharding]) -> Any:
    return shardings[0] if len(shardings) == 1 else SplitLeaf(*shardings)


def _group_axes(mesh: Mesh, group_size: int | None) -> tuple[Any, ...]:
    """The last axes of a mesh, with so many devices together; none if there are no such."""
    if group_size is None:
        return mesh.axis_names
    sizes = list(mesh.shape.values())
    fitting = [i for i in range(len(sizes)) if math.prod(sizes[i:]) == group_size]
    return mesh.axis_names[fitting[0] :] if fitting else ()


def _check_results(result: Any, has_aux: bool) -> None:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise WorkloadError.of(
            f"has_aux=True, but the loss returns {_described(result)}; return (loss, aux).",
            "osdp-loss",
        )
    loss = result[0] if has_aux else result
    if [leaf.shape for leaf in jax.tree.leaves(loss)] != [()]:
        raise WorkloadError.of(
            f"the loss {'is' if has_aux else 'returns'} {_described(loss)}; return one scalar"
            + ("." if has_aux else ", or (scalar, aux), and pass has_aux=True to transform."),
            "osdp-loss",
        )


def _described(result: Any) -> str:
    shapes = [str(leaf.shape) for leaf in jax.tree.leaves(result)]
    return (
        f"1 array of shape {shapes[0]}"
        if len(shapes) == 1
        else f"{len(shapes)} arrays of shapes {', '.join(shapes)}"
    )


def _group_violations(plan: ShardingPlan, mesh: Mesh) -> Iterator[Violation]:
    for group in sorted({mode.group_size for mode in plan.modes if mode.group_size is not None}):
        if not _group_axes(mesh, group):
            yield Violation(
                f"the plan shares parameters among groups of {group} devices, and no last axes of "
                f"the mesh {dict(mesh.shape)} have so "
                f"many; give a mesh with the axes (nodes, {group}).",
                "osdp-mesh",
            )


def _difference(params: Any, struct: Any) -> str:
    """The first leaf that is another one."""

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


def mesh_of(cluster: Cluster) -> Mesh:
    """The devices of this process as a cluster: the axis ``data`` along the devices of a node,
    ``node`` before it where there are several.

    Raises:
        ExecutionError: ``osdp-devices`` if there are too few.
    """
    devices = jax.devices()
    if len(devices) < cluster.num_devices:
        raise ExecutionError.of(
            f"the plan is for {cluster.num_devices} devices and this process has {len(devices)}; "
            "plan for a mesh of theirs, or start it "
            "with more (capture.environment.prepare for virtual CPU devices).",
            "osdp-devices",
        )
    shape, names = mesh_axes(cluster)
    return Mesh(np.asarray(devices[: cluster.num_devices]).reshape(shape), names)


def mesh_axes(where: Mesh | Cluster) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Sizes and names of the axes of a mesh, or of that which ``mesh_of`` makes of a cluster."""
    if not isinstance(where, Cluster):
        return where.devices.shape, where.axis_names
    if len(where.nodes) == 1:
        return (where.num_devices,), ("data",)
    return (len(where.nodes), where.num_devices // len(where.nodes)), ("node", "data")


def cluster_of(mesh: Mesh, target: str, devices_per_node: int | None) -> Cluster:
    """A mesh as nodes of devices, by the processes that its devices belong to unless the size of a
    node is given.

    Raises:
        ClusterError: ``osdp-nodes`` if nodes do not come out equal.
    """
    processes = Counter(device.process_index for device in mesh.devices.flat)
    per_node = devices_per_node or min(processes.values())
    if mesh.size % per_node or (devices_per_node is None and len(set(processes.values())) > 1):
        raise ClusterError.of(
            f"{mesh.size} devices of {len(processes)} processes are no equal nodes of {per_node}; "
            "give devices_per_node.",
            "osdp-nodes",
        )
    return Cluster((per_node,) * (mesh.size // per_node), target)


def has_groups(mesh: Mesh, group_size: int) -> bool:
    """Whether the last axes of a mesh have so many devices together."""
    return bool(_group_axes(mesh, group_size))
