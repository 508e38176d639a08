"""Operators of a traced workload, for the choice of sharding per operator: a layer of the trace is
one product and what follows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from capture.errors import TracingError
from capture.machine.rates import Products
from capture.machine.target import Target
from capture.model.graph import Layer, LayerGraph, item_bytes
from capture.model.operators import Block, Kind, Operator, OperatorModel
from capture.model.workload import WorkloadProtocol
from capture.plan.sharding import ParameterLeaf
from capture.tracing import fusion
from capture.tracing.cut import PRODUCTS
from capture.tracing.jaxprs import is_variable, variables
from capture.tracing.model import TracedModel, trace
from capture.tracing.program import RematRegion
from capture.tracing.segment import Segment
from capture.tracing.slices import StageSlice, struct_of


@dataclass(frozen=True, eq=False)
class TracedOperators:
    """The operators of a traced loss and their parameters.

    Attributes:
        model: The operators in program order; parameters that are shared belong to the first
            operator that reads them.
        params: Parameters that belong to each operator, as indices of ``leaves``.
        gathered_bytes: Bytes of each whole leaf as it is gathered.
        traced: The traced model that the operators were read from.
        dtype, precision: Most FLOPs are of products that read this data type and ask for this
            precision (``Rates.computed_in``).
    """

    model: OperatorModel
    params: tuple[tuple[int, ...], ...]
    gathered_bytes: tuple[int, ...]
    traced: TracedModel
    dtype: str
    precision: str

    @property
    def leaves(self) -> tuple[ParameterLeaf, ...]:
        """The parameters; a leaf that is stacked over the steps of a scan is several."""
        return self.traced.leaves

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each operator."""
        return tuple(tuple(self.leaves[p].name for p in own) for own in self.params)

    @property
    def stacked_params(self) -> list[list[int]]:
        """The parameters that are steps of one leaf of the user's tree, by leaf."""
        return [list(self.traced.rows[leaf]) for leaf in sorted(self.traced.stacked)]

    def sharded_over(self, num_devices: int, smallest_bytes: int) -> OperatorModel:
        """Return the operators as ``num_devices`` devices can shard them.

        Parameters that are smaller than ``smallest_bytes``, or of which the devices divide no
        dimension, are replicated whatever the mode.
        """
        return replace(
            self.model,
            blocks=(
                Block(
                    tuple(
                        self._sharded(i, num_devices, smallest_bytes)
                        for i in range(len(self.params))
                    )
                ),
            ),
        )

    def _sharded(self, operator_id: int, num_devices: int, smallest_bytes: int) -> Operator:
        (block,) = self.model.blocks
        operator = block.operators[operator_id]
        own = self.params[operator_id]
        leaves = {
            p: self.leaves[p] for p in own if self.leaves[p].can_shard(num_devices, smallest_bytes)
        }
        sharded = leaves.values()
        largest = max(sharded, key=lambda leaf: leaf.nbytes, default=None)
        can_split = largest is not None and largest.split_dim is not None
        nbytes = sum(leaf.nbytes for leaf in sharded)
        return replace(
            operator,
            kind=operator.kind if can_split else "other",
            parameter_bytes=nbytes,
            replicated_bytes=sum(self.leaves[p].nbytes for p in own) - nbytes,
            gathered_fraction=sum(self.gathered_bytes[p] for p in leaves) / nbytes
            if nbytes
            else 1.0,
        )


def traced_operators(
    workload: WorkloadProtocol,
    name: str,
    microbatch_size: int = 1,
    products: Products = Target.products,
) -> TracedOperators:
    """Trace a loss into operators, in program order; equal ones are found by their content.

    What an operator keeps for the backward pass is what ``jax.vjp`` of its part of the loss saves,
    less what a compiler computes again from values that are in memory anyway (``fusion.kept``).
    Parameters and what follows from them alone are not counted, and a value that several operators
    keep counts for the first. Operators have no workspace: what a kernel needs beside its results
    is the compiler's to say. They are named by their largest parameter.

    Args:
        workload: The task; nothing is allocated.
        microbatch_size: Examples to trace; sizes are divided by it.
        products: What the target's compiler makes of them.

    Raises:
        TracingError: ``trace-params`` without parameters, and those of
            ``capture.tracing.model.trace``.
    """
    traced = _at_products(workload, microbatch_size)
    graph, counted, kept = traced.graph, set[int](), set[int]()
    operators, params, fused = [], [], set[int]()
    computed = Counter[tuple[str, str]]()
    parts = _parts(traced, products)
    again = _up_to_each(traced, parts)
    for layer, part in zip(graph.layers, parts, strict=True):
        own = set(layer.params) - counted
        if layer.layer_id == graph.num_layers - 1:
            # What no operator reads has to be somewhere.
            own |= set(range(len(graph.params))) - counted
        counted |= own
        first = part.saved_values.keys() - kept
        kept |= first
        params.append(tuple(sorted(own)))
        computed[part.computed] += layer.flops
        sizes = {
            **_sizes(graph, layer, part),
            "activation_bytes": part.saved_bytes + sum(part.saved_values[v] for v in first),
            "fused_bytes": sum(part.saved_values[v] for v in first & fused),
            "again_bytes": again[layer.layer_id],
        }
        leaves = [graph.params[p] for p in own]
        operators.append(
            Operator(
                max(leaves, key=lambda leaf: leaf.nbytes).name if leaves else layer.name,
                part.kind,
                sum(leaf.nbytes for leaf in leaves),
                **{name: nbytes // microbatch_size for name, nbytes in sizes.items()},
            )
        )
        fused |= part.fused_values
    gathered = [
        max((part.read_bytes[p] for part in parts if p in part.read_bytes), default=leaf.nbytes)
        for p, leaf in enumerate(traced.leaves)
    ]
    return TracedOperators(
        OperatorModel(name, (Block(tuple(operators)),), _state_ratio(workload)),
        tuple(params),
        tuple(gathered),
        traced,
        *computed.most_common(1)[0][0],
    )


def _at_products(workload: WorkloadProtocol, microbatch_size: int) -> TracedModel:
    """Return the loss traced and cut at every product with a parameter."""
    traced = trace(workload, microbatch_size, at_products=True)
    if not traced.graph.params:
        raise TracingError.of(
            "init makes no parameters, so there is nothing to shard; give the workload of a model.",
            "trace-params",
        )
    return traced


def _sizes(graph: LayerGraph, layer: Layer, part: _Part) -> dict[str, int]:
    """Return the sizes of an operator that depend on no other one, of all examples."""
    later = [graph.values[v] for v in graph.crossing(layer.layer_id + 1)]
    read = [*(graph.values[v] for v in layer.inputs), *(graph.batch[b] for b in layer.batch)]
    return {
        "input_bytes": sum(t.nbytes for t in read if t.batch_dim is not None),
        "output_bytes": part.product_bytes,
        "flops": layer.flops,
        "tail_bytes": part.saved_bytes,
        "crossing_bytes": sum(t.nbytes for t in later if t.differentiable),
        "backward_bytes": part.backward_bytes,
    }


@dataclass(frozen=True)
class _Part:
    """The needs of one layer of the trace: its product, and what its backward pass keeps.

    Attributes:
        kind: The kind of its first product.
        computed: What that product reads and the precision that it asks for; float32 at default
            precision without one.
        product_bytes: The result of that product; 0 without one.
        saved_bytes: Values inside the layer that are saved for the backward pass.
        saved_values: Values of the graph that are saved, and their bytes.
        fused_values: Values of the graph that it makes and that follow from what it keeps.
        read_bytes: Bytes that products read of each parameter.
        backward_bytes: The most that comes and goes while what follows the product goes backwards
            (``fusion.going_backwards``).
        again_bytes: Values that are computed again, because the model says so (``jax.checkpoint``).
    """

    kind: Kind
    computed: tuple[str, str]
    product_bytes: int
    saved_bytes: int
    saved_values: dict[int, int]
    fused_values: set[int]
    read_bytes: dict[int, int]
    backward_bytes: int
    again_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        return self.saved_bytes + sum(self.saved_values.values())


def _parts(traced: TracedModel, products: Products) -> list[_Part]:
    """Return the parts of all layers. The last is made first, because the readers of a value decide
    in which data type it is kept."""
    multiplied, parts = dict[int, bool](), list[_Part]()
    inside = _inside_regions(traced)
    for layer in reversed(traced.graph.layers):
        layers, later = traced.slice(layer.layer_id, layer.layer_id + 1), dict(multiplied)
        part = _differentiated(traced, layers, products, multiplied)
        if _regions(layers):
            part = replace(
                part,
                saved_values={
                    v: nbytes for v, nbytes in part.saved_values.items() if v not in inside
                },
            )
            whole = _differentiated(traced, layers.without_remat, products, later)
            again = max(0, whole.kept_bytes - part.kept_bytes)
            part = replace(part, backward_bytes=whole.backward_bytes, again_bytes=again)
        parts.append(part)
    return parts[::-1]


def _inside_regions(traced: TracedModel) -> set[int]:
    """Return the values that only the remat region that makes them reads, and computes again."""
    made, read_elsewhere = dict[int, RematRegion](), set[int]()
    for layer in traced.graph.layers:
        (call,) = traced.slice(layer.layer_id, layer.layer_id + 1).calls
        of_graph = {
            **dict(zip(call.function.inputs, call.inputs, strict=True)),
            **dict(zip(call.function.outputs, call.outputs, strict=True)),
        }
        for op in call.function.ops:
            region = op.regions[0] if op.regions else None
            read_elsewhere.update(
                of_graph[v] for v in op.reads if v in of_graph and made.get(of_graph[v]) != region
            )
            if region is not None and region.policy is None:
                made.update((of_graph[v], region) for v in op.outputs if v in of_graph)
    return set(made) - read_elsewhere


def _up_to_each(traced: TracedModel, parts: Sequence[_Part]) -> list[int]:
    """Return, per layer, the bytes that its remat regions have computed again when its backward
    pass begins.

    A region is computed again as a whole and then goes backwards, so the values of its first layers
    stay until its last ones have gone.
    """
    found, so_far = [], Counter[RematRegion]()
    for layer, part in zip(traced.graph.layers, parts, strict=True):
        regions = _regions(traced.slice(layer.layer_id, layer.layer_id + 1))
        so_far.update(dict.fromkeys(regions, part.again_bytes))
        found.append(max((so_far[region] for region in regions), default=0))
    return found


def _regions(layers: StageSlice) -> set[RematRegion]:
    return {op.regions[0] for call in layers.calls for op in call.function.ops if op.regions}


def _differentiated(
    traced: TracedModel, layer: StageSlice, products: Products, multiplied: dict[int, bool]
) -> _Part:
    """Return the part of one layer. ``multiplied`` holds, for values that later layers read,
    whether only products do; the layer's own are added.

    What is saved is read off ``jax.vjp`` itself, traced with abstract values, and not modelled: its
    leaves are outputs of the jaxpr. What a compiler then keeps in their place is ``fusion.kept``.
    Layers come last first, because a value that only products read later is saved in their data
    type.
    """
    graph, num_params = traced.graph, len(layer.params)
    jaxpr = _forward_and_saved(graph, layer)
    outputs, saved = jaxpr.outvars[: len(layer.outputs)], jaxpr.outvars[len(layer.outputs) :]
    of_graph = dict(zip(jaxpr.invars[num_params:], layer.inputs, strict=False))
    of_graph.update(
        (var, v) for var, v in zip(outputs, layer.outputs, strict=True) if is_variable(var)
    )
    narrow = fusion.multiplied(
        jaxpr, {var: multiplied[v] for var, v in of_graph.items() if v in multiplied}
    )
    multiplied.update((v, narrow[var]) for var, v in of_graph.items() if var in narrow)

    def nbytes(var) -> int:
        dtype = str(var.aval.dtype)
        return math.prod(var.aval.shape) * item_bytes(
            products.dtypes.get(dtype, dtype) if narrow.get(var) else dtype
        )

    static = set(_static(jaxpr, num_params))
    # Batch leaves are held anyway; literals and constants cost nothing per example.
    free = (static | set(jaxpr.invars)) - set(of_graph)
    saved = [v for v in saved if is_variable(v) and v not in free]
    kept = fusion.kept(jaxpr, saved, free, set(of_graph), nbytes, products.fuse_operands)
    values = {of_graph[v]: nbytes(v) for v in kept if v in of_graph}
    read = {p: nbytes(var) for p, var in zip(layer.params, jaxpr.invars, strict=False)}
    product = _first_of(jaxpr, PRODUCTS)
    kind: Kind = "other" if product is None else PRODUCTS[product.primitive.name]
    made = None if product is None else product.outvars[0].aval
    backward_bytes = fusion.going_backwards(jaxpr, product, kept | free, nbytes)
    following = (
        fusion.following(jaxpr, (kept - fusion.sums(jaxpr)) | free)
        if products.fuse_operands
        else set()
    )
    fused = {of_graph[v] for v in following if v in of_graph}
    return _Part(
        kind,
        fusion.computed_in(_first_of(jaxpr, fusion.MULTIPLY)),
        0 if made is None else math.prod(made.shape) * item_bytes(str(made.dtype)),
        sum(nbytes(v) for v in kept - set(of_graph)),
        values,
        fused,
        read,
        backward_bytes,
    )


def _forward_and_saved(graph: LayerGraph, layer: StageSlice):
    """Return the jaxpr of a layer's outputs, and of what ``jax.vjp`` saves behind them."""
    params, inputs, batch = (
        [struct_of(tensors[i]) for i in indices]
        for tensors, indices in (
            (graph.params, layer.params),
            (graph.values, layer.inputs),
            (graph.batch, layer.batch),
        )
    )

    def forward_and_saved(params, inputs, batch):
        values = dict(zip(layer.inputs, inputs, strict=True))
        made, vjp = Segment(graph, layer).forward(
            lambda own, given: layer(own, [given[v] for v in layer.inputs], batch), params, values
        )
        return [made[v] for v in layer.outputs], jax.tree.leaves(vjp)

    return jax.make_jaxpr(forward_and_saved)(params, inputs, batch).jaxpr


def _first_of(jaxpr, names: Collection[str]):
    """Return the first equation whose primitive has one of these names, or None."""
    return next((each for each in jaxpr.eqns if each.primitive.name in names), None)


def _static(jaxpr, num_params: int) -> Iterator:
    """Yield the variables that depend on parameters and constants alone."""
    static = {*jaxpr.constvars, *jaxpr.invars[:num_params]}
    yield from static
    for equation in jaxpr.eqns:
        if all(v in static for v in variables(equation.invars)):
            static.update(equation.outvars)
            yield from equation.outvars


def _state_ratio(workload: WorkloadProtocol) -> float:
    """Return (parameters + gradients + optimizer state) / parameters, in bytes."""
    params = jax.eval_shape(workload.init, jax.random.key(0))
    state = jax.eval_shape(workload.optimizer.init, params)
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (params, state)
    ]
    return 2 + sizes[1] / sizes[0]
