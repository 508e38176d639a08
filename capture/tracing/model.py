"""Trace a workload's loss into a ``LayerGraph`` and executable slices; nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.environment import without_collecting
from capture.errors import TracingError
from capture.memo import memo
from capture.model.graph import Layer, LayerGraph, Tensor, content_hash, item_bytes
from capture.model.workload import PyTree, WorkloadProtocol, takes_key
from capture.plan.choices import Remat
from capture.plan.sharding import ParameterLeaf
from capture.tracing.cut import cut_loss
from capture.tracing.flatten import Flattening, flatten
from capture.tracing.growth import Growth, grown_dim, operations_of
from capture.tracing.hashing import ProgramHasher
from capture.tracing.keys import is_key
from capture.tracing.layers import LayerOps, assign_layers, layer_names
from capture.tracing.leaf_uses import Cast, casts, split_dims
from capture.tracing.program import LossProgram
from capture.tracing.slices import LayerCall, LayerFunction, StageSlice, policy_key


@dataclass(frozen=True, eq=False)
class TracedModel:
    """The traced loss of a workload, cut into layers.

    Attributes:
        graph: The layers, framework-free.
        params_struct: Shapes and dtypes of the user's parameters.
        split_struct: The same tree, where a leaf stacked over unrolled layers is a list of one leaf
            per layer; its leaves are ``graph.params``, in order.
        stacked: Dimension of the layers of such a leaf, by position in ``params_struct``.
        split_dims: Dimension that products can be split along (``leaf_uses``), by parameter of the
            graph.
        casts: Cast through which all layers read a parameter, if they do (``leaf_uses``), by
            parameter.
        auto_layers: Whether the layers were cut automatically, not at marks or products.
        remat: What the backward pass of every layer recomputes, where a stage says nothing else.
    """

    graph: LayerGraph
    params_struct: PyTree
    split_struct: PyTree
    stacked: dict[int, int]
    split_dims: tuple[int | None, ...]
    casts: tuple[Cast | None, ...]
    auto_layers: bool
    _batch_tree: Any
    _takes_key: bool
    _calls: tuple[LayerCall, ...]
    growth: Growth
    remat: Remat = "none"

    def recomputing(self, remat: Remat | None) -> TracedModel:
        """Return the model with backward passes that recompute so; None: nothing."""
        return replace(self, remat=remat) if remat else self

    @cached_property
    def leaves(self) -> tuple[ParameterLeaf, ...]:
        """The parameters of the graph, as the choice of their sharding sees them."""
        return tuple(
            ParameterLeaf(tensor.name, tensor.shape, item_bytes(tensor.dtype), dim)
            for tensor, dim in zip(self.graph.params, self.split_dims, strict=True)
        )

    @cached_property
    def rows(self) -> list[range]:
        """The parameters of the graph that each leaf of the user's tree is, or is stacked from."""
        sizes = [leaf.shape for leaf in jax.tree.leaves(self.params_struct)]
        counts = [sizes[i][self.stacked[i]] if i in self.stacked else 1 for i in range(len(sizes))]
        stops = accumulate(counts)
        return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]

    def split_params(self, params: PyTree) -> PyTree:
        """Convert the user's parameter tree to the form of ``split_struct``; arrays of NumPy or
        JAX, also while tracing."""
        return _each_stacked(self.params_struct, params, self.stacked, _unstack)

    def join_params(self, split: PyTree) -> PyTree:
        """Convert a tree back to the user's form: the inverse of ``split_params``."""
        return _each_stacked(self.params_struct, split, self.stacked, _stack)

    def batch_of(self, leaves: Sequence[object]) -> PyTree:
        """Return a tree of the batch's structure with the given leaves.

        Args:
            leaves: Leaves in the order of ``graph.batch``; a key's is left out.
        """
        return self._batch_tree.unflatten(leaves[: self._batch_tree.num_leaves])

    def batch_leaves(self, batch: PyTree, key: jax.Array | None = None) -> list[Any]:
        """Flatten a batch in the order of ``graph.batch``; last the key, if the loss takes one.

        Args:
            batch: A pytree of the structure that the workload's ``batch`` returns.
            key: The random key of the micro-batch, typed or raw.

        Raises:
            TracingError: ``trace-key`` if the loss takes a key and none is given.
        """
        leaves = self._batch_tree.flatten_up_to(batch)
        if not self._takes_key:
            return leaves
        if key is None:
            raise TracingError.of(
                "loss_fn(params, batch, key) takes a random key, and none is given; pass key=.",
                "trace-key",
            )
        return [*leaves, key if is_key(key) else jax.random.wrap_key_data(key)]

    @memo
    def slice(self, first: int, stop: int) -> StageSlice:
        """Return layers [first, stop) as one pure function.

        Raises:
            TracingError: ``trace-slice`` unless 0 <= first < stop <= num_layers.
        """
        if not 0 <= first < stop <= self.graph.num_layers:
            raise TracingError.of(
                f"layers [{first}, {stop}) are no slice of a model of "
                f"num_layers={self.graph.num_layers}; "
                f"give 0 <= first < stop <= {self.graph.num_layers}.",
                "trace-slice",
            )
        found = _stage_slice(self.graph, self._calls, first, stop)
        if self.remat == "none":
            return found
        return replace(
            found,
            remat=self.remat,
            key=content_hash([found.key, self.remat, *policy_key(self.remat)]),
        )


@without_collecting()
def trace(
    workload: WorkloadProtocol,
    microbatch_size: int,
    num_layers: int | None = None,
    *,
    unmarked_layers: int | None = None,
    num_devices: int = 1,
    at_products: bool = False,
    others: Iterable[Growth] = (),
) -> TracedModel:
    """Trace the loss for one micro-batch and cut it into layers.

    **Assumes** that the traced program does not depend on the values of parameters or data.

    Args:
        microbatch_size: Examples in one micro-batch, at least 1.
        num_layers: None to cut at the model's marks ``jax.ad_checkpoint.checkpoint_name(x,
            "layer_boundary")``: k marks make k + 1 layers, and a scan with a mark in its body is
            unrolled. A number to cut automatically, marks or not: near-equal FLOPs and the fewest
            bytes crossing, every layer with a product; scans over stacked parameters are unrolled
            where one is more than a layer.
        unmarked_layers: Number of layers of a loss that has no marks, which is cut automatically;
            None chooses it (``capture.tracing.cut.layers_without_marks``).
        num_devices: Number of devices that such a number of layers is to be enough for.
        at_products: Cut before every product with a parameter instead, so that each layer is one
            operator; all scans over stacked parameters are unrolled.
        others: Growth of traces of the same loss, cut alike, at other sizes, if there are any.

    Raises:
        TracingError: ``trace-microbatch``, ``trace-batch``, ``trace-loss-scalar``,
            ``trace-no-marks``, ``trace-mark-position`` or ``trace-num-layers``.
    """
    loss = TracedLoss.of(workload, microbatch_size)
    flat, cuts, auto_layers = cut_loss(
        loss.closed, loss.num_params, num_layers, unmarked_layers, num_devices, at_products
    )
    program, params = flat.program, loss.params
    layers = assign_layers(program, cuts)
    values = sorted(
        {v for layer in layers for v in layer.outputs}, key=lambda v: (v == program.loss, v)
    )
    growth = _growth(loss, flat, values, others)
    calls = _layer_calls(program, layers, values)
    graph = _graph(
        microbatch_size, program, layers, calls, _tensors(loss, flat, values, growth.dims)
    )
    return TracedModel(
        graph,
        params,
        _each_stacked(params, params, flat.stacked, _unstacked_structs),
        flat.stacked,
        split_dims(program),
        casts(program, layers),
        auto_layers,
        _structure(loss.batch),
        takes_key(workload),
        calls,
        growth,
    )


@dataclass(frozen=True)
class TracedLoss:
    """The loss of a workload as a program for one micro-batch, and the shapes that it takes.

    Attributes:
        key: The shape of a random key.
        params, batch: The shapes of the parameters and of a micro-batch.
        batch_dims: Per leaf of the batch, the dimension that grows with it.
    """

    workload: WorkloadProtocol
    microbatch_size: int
    key: Any
    params: PyTree
    batch: PyTree
    batch_dims: list[int | None]
    closed: Any

    @classmethod
    def of(
        cls, workload: WorkloadProtocol, microbatch_size: int, params: PyTree = None
    ) -> TracedLoss:
        """Trace the loss; ``params`` are the shapes of its parameters, where they are known.

        Raises:
            TracingError: ``trace-microbatch``, ``trace-batch``, ``trace-loss-scalar``.
        """
        if microbatch_size < 1:
            raise TracingError.of(
                f"microbatch_size={microbatch_size} is no batch; give at least 1.",
                "trace-microbatch",
            )
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = jax.eval_shape(workload.init, key) if params is None else params
        batch, batch_dims = _batch(workload, microbatch_size, key)
        closed = _loss_jaxpr(workload, params, batch, key)
        return cls(workload, microbatch_size, key, params, batch, batch_dims, closed)

    @cached_property
    def doubled(self) -> Any:
        """The program for twice as many examples, which a model may refuse in any way."""
        workload, size = self.workload, 2 * self.microbatch_size
        batch = jax.eval_shape(lambda k: workload.batch(k, size), self.key)
        return _loss_jaxpr(workload, self.params, batch, self.key)

    @property
    def num_params(self) -> int:
        """The number of leaves of the parameters."""
        return len(jax.tree.leaves(self.params))


def _tensors(
    loss: TracedLoss, flat: Flattening, values: Sequence[int], dims: Sequence[int | None]
) -> dict[str, tuple[Tensor, ...]]:
    """Return the parameters, values (which grow along ``dims``) and batch leaves of the graph."""
    program, tensor = flat.program, partial(_tensor, flat.program)
    param_names = [
        name
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(loss.params))
        for name in _split_names(_path_name(path, "params"), leaf, flat.stacked.get(i))
    ]
    batch_names = [_path_name(path, "batch") for path, _ in jax.tree.leaves_with_path(loss.batch)]
    names = [_value_name(program, v) for v in values]
    has_key = takes_key(loss.workload)
    batch = [*batch_names, *["key"] * has_key], [*loss.batch_dims, *[None] * has_key]
    return {
        "params": tuple(map(tensor, program.params, param_names)),
        "values": tuple(map(tensor, values, names, dims)),
        "batch": tuple(map(tensor, program.batch, *batch)),
    }


def _batch(
    workload: WorkloadProtocol, microbatch_size: int, key
) -> tuple[PyTree, list[int | None]]:
    """Return the shapes of a micro-batch, and the dimension of each leaf that grows with it."""
    struct, double = (
        jax.eval_shape(lambda k, n=n: workload.batch(k, n), key)
        for n in (microbatch_size, 2 * microbatch_size)
    )
    leaves, doubled = jax.tree.leaves(struct), jax.tree.leaves(double)
    if len(leaves) == len(doubled):
        dims = [grown_dim(a.shape, b.shape) for a, b in zip(leaves, doubled, strict=True)]
    else:
        dims = [0 if a.shape[:1] == (microbatch_size,) else None for a in leaves]
    if all(dim is None for dim in dims):
        shapes = ", ".join(map(_struct_text, leaves)) or "no arrays"
        raise TracingError.of(
            f"batch(key, {microbatch_size}) returned {shapes}, and batch(key, "
            f"{2 * microbatch_size}) nothing larger; "
            "return arrays that carry the examples in one dimension.",
            "trace-batch",
        )
    return struct, dims


def _loss_jaxpr(workload: WorkloadProtocol, params_struct: PyTree, batch_struct: PyTree, key):
    arguments = (
        (params_struct, batch_struct, key) if takes_key(workload) else (params_struct, batch_struct)
    )
    closed, result = jax.make_jaxpr(workload.loss_fn, return_shape=True)(*arguments)
    leaves = jax.tree.leaves(result)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not jnp.issubdtype(leaves[0].dtype, jnp.floating)
    ):
        raise TracingError.of(
            f"loss_fn returned {', '.join(map(_struct_text, leaves)) or 'nothing'}; "
            "return one scalar float, the mean over the examples of the batch.",
            "trace-loss-scalar",
        )
    return closed


def _growth(
    loss: TracedLoss, flat: Flattening, values: Sequence[int], others: Iterable[Growth]
) -> Growth:
    """Return the growth of values, from other traces or one at twice the micro-batch size."""
    operations = operations_of(flat.program)
    sizes = [flat.program.avals[v].shape for v in values]
    known = (each.at(loss.microbatch_size, operations, values, sizes) for each in others)
    dims = next((found for found in known if found is not None), None)
    if dims is None:
        grown = _grown_avals(loss, flat)
        dims = [
            grown_dim(shape, grown[v].shape) if grown else None
            for v, shape in zip(values, sizes, strict=True)
        ]
    return Growth(loss.microbatch_size, operations, values, sizes, dims)


def _grown_avals(loss: TracedLoss, flat: Flattening) -> Sequence[Any] | None:
    """Return the shapes of values at twice the micro-batch size; None of another program."""
    try:
        other = flatten(loss.doubled, loss.num_params, flat.unrolled, flat.stacked).program
    except Exception:
        # Then no dimension is known to grow.
        return None
    return other.avals if operations_of(flat.program) == operations_of(other) else None


def _graph(
    microbatch_size: int,
    program: LossProgram,
    layers: Sequence[LayerOps],
    calls: Sequence[LayerCall],
    tensors: dict[str, tuple[Tensor, ...]],
) -> LayerGraph:
    """Return the layer graph; ``tensors`` are its parameters, values and batch leaves."""
    hasher = ProgramHasher(program)
    graph_layers = tuple(
        Layer(
            i,
            name,
            call.params,
            call.inputs,
            call.outputs,
            call.batch,
            layer.flops,
            hasher.layer_key(layer),
        )
        for i, (name, layer, call) in enumerate(
            zip(layer_names(layers), layers, calls, strict=True)
        )
    )
    wiring = [
        [layer.key, layer.params, layer.inputs, layer.outputs, layer.batch]
        for layer in graph_layers
    ]
    shapes = {kind: [[t.shape, t.dtype] for t in group] for kind, group in tensors.items()}
    model_hash = content_hash([microbatch_size, wiring, shapes])
    params, values, batch = tensors.values()
    return LayerGraph(model_hash, microbatch_size, graph_layers, params, values, batch)


def _tensor(program: LossProgram, v: int, name: str, batch_dim: int | None = None) -> Tensor:
    aval = program.avals[v]
    shape = tuple(map(int, aval.shape))
    return Tensor(name, shape, str(aval.dtype), batch_dim, v in program.differentiable)


def _layer_calls(
    program: LossProgram, layers: Sequence[LayerOps], values: Sequence[int]
) -> tuple[LayerCall, ...]:
    of_param = {v: i for i, v in enumerate(program.params)}
    of_batch = {v: i for i, v in enumerate(program.batch)}
    of_value = {v: i for i, v in enumerate(values)}
    return tuple(
        LayerCall(
            LayerFunction(layer, program.consts),
            tuple(of_param[v] for v in layer.params),
            tuple(of_value[v] for v in layer.inputs),
            tuple(of_batch[v] for v in layer.batch),
            tuple(of_value[v] for v in layer.outputs),
        )
        for layer in layers
    )


def _stage_slice(
    graph: LayerGraph, calls: Sequence[LayerCall], first: int, stop: int
) -> StageSlice:
    """Return layers [first, stop) as one function: what it reads, what leaves it, and its key.

    What leaves it is what a later layer reads, be it far behind. The hash names tensors by position
    and layers by their own hash, so stages of equal layers are one program wherever they stand.
    """
    params, batch = graph.stage_params(first, stop), graph.stage_batch(first, stop)
    made = {v for call in calls[first:stop] for v in call.outputs}
    inputs = tuple(sorted({v for call in calls[first:stop] for v in call.inputs} - made))
    leaving = calls[-1].outputs if stop == graph.num_layers else graph.crossing(stop)
    outputs = tuple(v for v in leaving if v in made)
    # Named by position, so that stages of equal layers on other parameters have equal keys.
    names: dict[tuple[str, int], int] = {}
    for kind, indices in (("p", params), ("b", batch), ("v", inputs)):
        names.update({(kind, index): n for n, index in enumerate(indices)})
    wiring = []
    for layer, call in zip(graph.layers[first:stop], calls[first:stop], strict=True):
        for v in call.outputs:
            names["v", v] = len(names)
        groups = (("p", call.params), ("b", call.batch), ("v", call.inputs), ("v", call.outputs))
        wiring.append(
            [layer.key, [[names[kind, index] for index in indices] for kind, indices in groups]]
        )
    key = content_hash(
        [wiring, [names["v", v] for v in outputs], len(params), len(batch), len(inputs)]
    )
    return StageSlice(first, stop, params, batch, inputs, outputs, key, tuple(calls[first:stop]))


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree)  # JAX's stubs leave its methods out


def _each_stacked(
    struct: PyTree, tree: PyTree, stacked: dict[int, int], convert: Callable[[Any, int], Any]
) -> PyTree:
    """Return a tree of the user's parameters with each stacked leaf converted."""
    structure = _structure(struct)
    return structure.unflatten(
        [
            convert(leaf, stacked[i]) if i in stacked else leaf
            for i, leaf in enumerate(structure.flatten_up_to(tree))
        ]
    )


def _unstack(leaf: Any, dim: int) -> list[Any]:
    return [leaf[(slice(None),) * dim + (i,)] for i in range(leaf.shape[dim])]


def _stack(parts: list[Any], dim: int) -> Any:
    return (
        np.stack(parts, dim)
        if all(isinstance(part, np.ndarray) for part in parts)
        else jnp.stack(parts, dim)
    )


def _unstacked_structs(leaf, dim: int) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(leaf.shape[:dim] + leaf.shape[dim + 1 :], leaf.dtype)
    ] * leaf.shape[dim]


def _split_names(name: str, leaf, dim: int | None) -> list[str]:
    return [name] if dim is None else [f"{name}[{i}]" for i in range(leaf.shape[dim])]


def _path_name(path, root: str) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or root


def _value_name(program: LossProgram, value: int) -> str:
    op = program.ops[program.producer[value]]
    return f"{op.scope}/{op.primitive.name}" if op.scope else op.primitive.name


def _struct_text(struct) -> str:
    return f"{struct.dtype}[{','.join(map(str, struct.shape))}]"
