"""None"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from traced_models import CASES, B, case_id, loss_workload, traced, workload_of

from capture.model.graph import LayerGraph, item_bytes
from capture.model.workload import takes_key
from capture.tracing import LAYER_BOUNDARY, StageSlice, TracedModel, trace
from capture.tracing.cut import applied, cluster_cuts, crossing_bytes
from capture.tracing.flatten import flatten
from capture.tracing.layers import assign_layers
from tests import tracing_models as models

#: Those whose slices are also run; the others differ from one of these in nothing that runs.
COMPOSED = [
    case for case in CASES if case not in {("linen", None), ("linen-scan", None), ("unet", 3)}
]


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def loss_and_grads(model: TracedModel, cuts: list[int], remats: list[str]):
    """Loss and float gradients of the split leaves, by vjp of one slice after the other; stages
    take the remat modes in turn."""
    graph = model.graph
    trained = [p.differentiable for p in graph.params]

    def run(params, batch):
        values, tape = {}, []
        for i, (first, stop) in enumerate(pairwise(cuts)):
            stage, remat = model.slice(first, stop), remats[i % len(remats)]
            moving_p = [p for p in stage.params if trained[p]]
            moving_v = [v for v in stage.inputs if graph.values[v].differentiable]

            def call(
                ps,
                vs,
                stage=stage,
                remat=remat,
                moving_p=moving_p,
                moving_v=moving_v,
                values=values,
            ):
                p_of, v_of = (
                    dict(zip(moving_p, ps, strict=True)),
                    dict(zip(moving_v, vs, strict=True)),
                )
                outs = stage(
                    [p_of.get(p, params[p]) for p in stage.params],
                    [v_of.get(v, values.get(v)) for v in stage.inputs],
                    [batch[b] for b in stage.batch],
                    remat=remat,
                )
                made = dict(zip(stage.outputs, outs, strict=True))
                diff = {v: x for v, x in made.items() if graph.values[v].differentiable}
                return diff, {v: x for v, x in made.items() if v not in diff}

            diff, pull, rest = jax.vjp(
                call, [params[p] for p in moving_p], [values[v] for v in moving_v], has_aux=True
            )
            values |= diff | rest
            tape.append((pull, moving_p, moving_v, list(diff)))
        for v, x in values.items():
            assert (x.shape, str(x.dtype)) == (graph.values[v].shape, graph.values[v].dtype), (
                graph.values[v]
            )
        (loss,) = model.slice(cuts[-2], cuts[-1]).outputs
        pending = {loss: jnp.ones_like(values[loss])}
        grads = {p: jnp.zeros_like(params[p]) for p in range(len(params)) if trained[p]}
        for pull, moving_p, moving_v, made in reversed(tape):
            param_grads, value_grads = pull(
                {v: pending.pop(v, jnp.zeros_like(values[v])) for v in made}
            )
            for p, g in zip(moving_p, param_grads, strict=True):
                grads[p] += g
            for v, g in zip(moving_v, value_grads, strict=True):
                pending[v] = pending[v] + g if v in pending else g
        return values[loss], [grads[p] for p in sorted(grads)]

    return run


def example(workload, model):
    """Arrays for a workload, made without compiling its initialisers: floats small, integers valid
    tokens and labels."""
    rng = np.random.default_rng(0)

    def fill(struct):
        if is_float(struct):
            return jnp.asarray(0.5 * rng.standard_normal(struct.shape), struct.dtype)
        return jnp.asarray(rng.integers(0, 3, struct.shape), struct.dtype)

    batch = jax.eval_shape(lambda key: workload.batch(key, B), jax.random.key(0))
    return (
        jax.tree.map(fill, model.params_struct),
        jax.tree.map(fill, batch),
        (jax.random.key(3),) if takes_key(workload) else (),
    )


@functools.cache
def reference(name):
    """Arrays, loss and gradients of a workload, without any cutting."""
    workload, (params, batch, keys) = (
        workload_of(name),
        example(workload_of(name), traced(name, None if "unmarked" not in name else 3)),
    )
    tree, leaves = jax.tree.structure(params), jax.tree.leaves(params)
    trained = [is_float(x) for x in leaves]

    def whole(floats):
        remaining = iter(floats)
        return workload.loss_fn(
            tree.unflatten(
                [next(remaining) if t else x for t, x in zip(trained, leaves, strict=True)]
            ),
            batch,
            *keys,
        )

    loss, grads = compiled(jax.value_and_grad(whole))(
        [x for t, x in zip(trained, leaves, strict=True) if t]
    )
    remaining = iter(grads)
    return (
        params,
        batch,
        keys,
        float(loss),
        tree.unflatten([next(remaining) if t else x for t, x in zip(trained, leaves, strict=True)]),
    )


def check_composition(name, model: TracedModel, cuts: list[int], remats: list[str]):
    params, batch, keys, loss, grads = reference(name)
    split = jax.tree.leaves(model.split_params(params))
    got_loss, got_grads = compiled(loss_and_grads(model, cuts, remats))(
        split, model.batch_leaves(batch, *keys)
    )
    assert float(got_loss) == pytest.approx(loss, rel=1e-6)
    expected_grads = jax.tree.leaves(model.split_params(grads))
    trained = [p for p, tensor in enumerate(model.graph.params) if tensor.differentiable]
    for p, got in zip(trained, got_grads, strict=True):
        scale = float(jnp.max(jnp.abs(expected_grads[p])))
        # The floor, a few roundings of terms of size 1, is for gradients that cancel: those of an
        # attention's key bias are zero on paper.
        np.testing.assert_allclose(
            got,
            expected_grads[p],
            rtol=0,
            atol=max(1e-5 * scale, 1e-6),
            err_msg=model.graph.params[p].name,
        )


def compiled(function):
    # Compiling is what these tests wait for.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case_id(case),
            marks=pytest.mark.slow if case[0].startswith("linen-") and "remat" in case[0] else (),
        )
        for case in COMPOSED
    ],
)
def test_slices_compose_to_the_whole(case):
    model = traced(*case)
    check_composition(
        case[0], model, list(range(model.graph.num_layers + 1)), ["none", "full", "dots"]
    )


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize(("name", "cuts"), [("unet", [0, 2, 5, 6]), ("routed", [0, 1, 4])])
def test_stages_of_several_layers_compose_to_the_whole(name, cuts, remat):
    check_composition(name, traced(name), cuts, [remat])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_graph_is_consistent(case):
    model = traced(*case)
    graph = model.graph
    assert graph.num_layers == CASES[case]
    assert [layer.layer_id for layer in graph.layers] == list(range(graph.num_layers))
    assert LayerGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    assert {p for layer in graph.layers for p in layer.params} <= set(range(len(graph.params)))
    producers = {v: layer.layer_id for layer in graph.layers for v in layer.outputs}
    assert sorted(producers) == list(range(len(graph.values)))
    for layer in graph.layers:
        assert all(producers[v] < layer.layer_id for v in layer.inputs)
    read = {v for layer in graph.layers for v in layer.inputs}
    assert (
        set(range(len(graph.values))) - read
        == set(graph.layers[-1].outputs)
        == {len(graph.values) - 1}
    )
    assert graph.values[-1].shape == () and graph.values[-1].differentiable
    structs = jax.tree.leaves(model.split_struct)
    assert [(s.shape, str(s.dtype)) for s in structs] == [(p.shape, p.dtype) for p in graph.params]
    n = graph.num_layers
    for first in range(n):
        for stop in range(first + 1, n + 1):
            stage = model.slice(first, stop)
            assert stage is model.slice(first, stop)
            assert stage.params == graph.stage_params(
                first, stop
            ) and stage.batch == graph.stage_batch(first, stop)
            assert set(stage.inputs) <= set(graph.crossing(first))
            through = set(graph.crossing(first)) & set(graph.crossing(stop))
            leaving = graph.crossing(stop) if stop < n else graph.layers[-1].outputs
            assert set(stage.outputs) == set(leaving) - through


@pytest.mark.parametrize("name", ["scan", "linen-scan", "unet", "nnx"])
def test_split_params_round_trip(name):
    model = traced(name)
    params = example(workload_of(name), model)[0]
    for tree in (params, jax.tree.map(np.asarray, params)):
        split = model.split_params(tree)
        assert jax.tree.structure(split) == jax.tree.structure(model.split_struct)
        jax.tree.map(np.testing.assert_array_equal, model.join_params(split), tree)
    numpy_leaves = jax.tree.leaves(
        model.join_params(model.split_params(jax.tree.map(np.asarray, params)))
    )
    assert all(isinstance(leaf, np.ndarray) for leaf in numpy_leaves)
    shapes = jax.eval_shape(model.split_params, model.params_struct)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(model.split_struct)
    assert jax.tree.leaves(jax.eval_shape(model.join_params, shapes)) == jax.tree.leaves(
        model.params_struct
    )


def test_stacked_parameters_are_divided_through_casts_and_transposes():
    model = trace(models.scanned(num_layers=3, dtype=jnp.bfloat16), B)
    names = [p.name for p in model.graph.params]
    assert names == [
        "head",
        *(f"layers/b[{i}]" for i in range(3)),
        *(f"layers/w[{i}]" for i in range(3)),
    ]
    assert [layer.params for layer in model.graph.layers] == [(1, 4), (2, 5), (3, 6), (0,)]
    assert {p.dtype for p in model.graph.params} == {"float32"}
    assert {v.dtype for v in model.graph.values[:-1]} == {"bfloat16"}


def test_skips_cross_every_cut_they_span_and_once():
    graph = traced("unet").graph
    assert [len(graph.crossing(cut)) for cut in range(1, 6)] == [1, 3, 3, 2, 1]
    emb = next(i for i, p in enumerate(graph.params) if p.name == "emb")
    assert [layer.layer_id for layer in graph.layers if emb in layer.params] == [0, 5]
    assert {(v.shape, v.batch_dim) for v in graph.values[:-1]} == {((B, models.T, models.D), 0)}
    assert [(b.name, b.shape, b.dtype, b.batch_dim) for b in graph.batch] == [
        ("labels", (B, models.T), "int32", 0),
        ("tokens", (B, models.T), "int32", 0),
    ]


def test_batch_dim_is_where_the_batch_is():
    graph = trace(models.lstm(), B).graph
    assert [(v.shape, v.batch_dim) for v in graph.values] == [
        ((models.T, B, models.D), 1),
        ((), None),
    ]


def test_integers_cross_and_masks_and_keys_do_not():
    graph = traced("routed").graph
    crossing = {
        (graph.values[v].dtype, graph.values[v].differentiable)
        for cut in (1, 2, 3)
        for v in graph.crossing(cut)
    }
    assert crossing == {("float32", True), ("int32", False)}
    assert graph.batch[-1].name == "key" and graph.batch[-1].dtype == "key<fry>"
    assert [graph.batch[b].name for b in graph.layers[3].batch] == ["labels", "key"]


def test_a_key_that_is_dear_to_make_crosses():
    def loss(p, batch, key):
        key = lax.fori_loop(0, 3, lambda i, k: jax.random.split(k)[0], key)
        h = models.mark(jnp.tanh(batch[0] @ p["a"]) * jax.random.normal(key, (models.D,)))
        return jnp.mean(h @ p["a"] * jax.random.normal(key, (models.D,)))

    workload = models.workload(
        loss, lambda key: models.normals(key, a=(models.D, models.D)), models.vectors_batch
    )
    model = trace(workload, B)
    assert [(v.dtype, v.differentiable, v.batch_dim) for v in model.graph.values[:-1]] == [
        ("key<fry>", False, None),
        ("float32", True, 0),
    ]
    params, batch, (key,) = example(workload, model)
    loss_value, _ = loss_and_grads(model, [0, 1, 2], ["full"])(
        jax.tree.leaves(params), model.batch_leaves(batch, jax.random.key_data(key))
    )
    assert float(loss_value) == pytest.approx(float(loss(params, batch, key)), rel=1e-6)


def test_layers_are_cut_at_marks_in_program_order_and_leaf_work_moves_to_its_user():
    """A cast, a constant table and a product of parameters made up front belong to the layer that
    reads them."""

    def loss(p, batch):
        low_rank = p["a"] @ p["b"]
        table = jnp.sin(jnp.arange(models.D, dtype=jnp.float32))
        h = models.mark(jnp.tanh(batch[0] @ p["c"]))
        return jnp.mean((h @ low_rank + table) ** 2)

    shapes = {"a": (models.D, 1), "b": (1, models.D), "c": (models.D, models.D)}
    graph = trace(
        models.workload(loss, lambda key: models.normals(key, **shapes), models.vectors_batch), B
    ).graph
    assert [layer.params for layer in graph.layers] == [(2,), (0, 1)]
    assert len(graph.crossing(1)) == 1


def test_flops_count_matrix_products_twice_and_scans_by_length():
    graph = trace(models.lstm(), B).graph
    product = 2 * B * (2 * models.D) * (4 * models.D) * models.T
    assert product < graph.layers[0].flops < 2 * product
    conv = trace(models.convnet(), B).graph.layers[0]
    assert conv.flops == 2 * (B * 4 * 4 * models.D) * (3 * 3 * 2)


def test_layer_names_are_scopes_where_they_differ():
    names = [layer.name for layer in traced("linen").graph.layers]
    assert names == ["layer_0", "Transformer/Block_1", "layer_2"]
    assert [layer.name for layer in traced("unet").graph.layers] == [f"layer_{i}" for i in range(6)]


def residuals(stage: StageSlice, model: TracedModel, remat: str) -> list[tuple]:
    """Shape and dtype of everything that the backward pass of a stage keeps."""

    def struct(tensor):
        if tensor.dtype.startswith("key"):
            return jax.eval_shape(lambda: jax.random.key(0))
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    graph = model.graph
    params, inputs = (
        [struct(graph.params[p]) for p in stage.params],
        [struct(graph.values[v]) for v in stage.inputs],
    )
    batch = [struct(graph.batch[b]) for b in stage.batch]
    moving = [is_float(x) for x in inputs]

    def kept(params, floats, inputs, batch):
        def call(params, floats):
            remaining = iter(floats)
            return stage(
                params,
                [next(remaining) if m else x for m, x in zip(moving, inputs, strict=True)],
                batch,
                remat=remat,
            )

        return jax.tree.leaves(jax.vjp(call, params, floats)[1])

    leaves = jax.eval_shape(kept, params, [x for x in inputs if is_float(x)], inputs, batch)
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in leaves)


@pytest.mark.parametrize(
    "name", ["linen", "linen-dropout-remat", "linen-scan", "routed", "unet", "convnet"]
)
def test_full_remat_keeps_layer_inputs_and_nothing_else(name):
    model = traced(name)
    graph = model.graph
    for first, stop in ((1, 2), (1, 3), (0, graph.num_layers)):
        stage = model.slice(first, stop)
        allowed = []
        for layer in graph.layers[first:stop]:
            read = (
                [graph.params[p] for p in layer.params]
                + [graph.values[v] for v in layer.inputs]
                + [graph.batch[b] for b in layer.batch]
            )
            allowed += [(tensor.shape, tensor.dtype) for tensor in read]
        kept = residuals(stage, model, "full")
        for item in kept:
            assert item in allowed, f"{item} is kept and is no input of layers [{first}, {stop})"
            allowed.remove(item)
    linen = traced("linen")
    stage = linen.slice(1, 3)
    assert (
        len(residuals(stage, linen, "full"))
        < len(residuals(stage, linen, "dots"))
        < len(residuals(stage, linen, "none"))
    )


def test_remat_regions_of_the_model_are_kept():
    plain, remat, inside = (
        traced("linen"),
        traced("linen-dropout-remat"),
        traced("linen-mark-in-remat"),
    )
    for model in (remat, inside):
        stage = model.slice(1, 2)
        kept = residuals(stage, model, "none")
        assert len(kept) < len(residuals(plain.slice(1, 2), plain, "none")) / 2
        assert len(kept) <= len(stage.params) + len(stage.inputs) + len(stage.batch)
        assert model.graph.layers[1].key != plain.graph.layers[1].key


@pytest.mark.parametrize("num_layers", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["linen-dropout-remat", "routed", "control"])
def test_layers_cover_the_program_once(name, num_layers):
    workload = workload_of(name)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, batch = (
        jax.eval_shape(workload.init, key),
        jax.eval_shape(lambda k: workload.batch(k, B), key),
    )
    closed = jax.make_jaxpr(workload.loss_fn)(params, batch, key)
    program = flatten(closed, len(jax.tree.leaves(params)), frozenset(), {}).program
    num_layers = min(num_layers, sum(applied(program)))
    cuts = cluster_cuts(program, num_layers)
    assert (
        cuts[0] == 0
        and cuts[-1] == len(program.ops)
        and len(cuts) == num_layers + 1
        and cuts == sorted(set(cuts))
    )
    layers = assign_layers(program, cuts)
    assert sum(layer.own for layer in layers) == len(program.ops) - len(program.recomputed)
    times = Counter(id(op) for layer in layers for op in layer.ops)
    assert times.keys() == {id(op) for op in program.ops}
    assert all(
        times[id(op)] == 1 for i, op in enumerate(program.ops) if i not in program.recomputed
    )
    made = set()
    for op in program.ops:  # sinking kept the order of dependencies
        assert all(v in made for v in op.reads if v in program.producer)
        made.update(op.outputs)
    live = crossing_bytes(program)
    for k, cut in enumerate(cuts[1:-1], start=1):
        crossing = {v for layer in layers[k:] for v in layer.inputs} & {
            v for layer in layers[:k] for v in layer.outputs
        }
        assert live[cut] == sum(
            math.prod(program.avals[v].shape) * item_bytes(str(program.avals[v].dtype))
            for v in crossing
        )


def test_nothing_is_allocated():
    shapes = {"w": (1 << 20, 1 << 20)}
    workload = models.workload(
        lambda p, x: jnp.mean(models.mark(x @ p["w"]) ** 2),
        lambda key: models.normals(key, **shapes),
        lambda key, n: jnp.zeros((n, 1 << 20)),
    )
    model = trace(workload, 8)
    assert model.graph.params[0].nbytes == 4 << 40
    assert model.graph.num_layers == 2


def test_a_model_that_fixes_its_batch_size_still_traces():
    def loss(p, batch):
        assert batch[0].shape == (B, models.D)
        return jnp.mean(models.mark(batch[0] @ p["w"]) ** 2)

    graph = trace(loss_workload(loss), B).graph
    assert [v.batch_dim for v in graph.values] == [None, None]
    assert [b.batch_dim for b in graph.batch] == [0, 0]


def test_public_names():
    import capture.tracing

    assert sorted(capture.tracing.__all__) == [
        "LAYER_BOUNDARY",
        "StageSlice",
        "TracedModel",
        "trace",
    ]
    assert LAYER_BOUNDARY == "layer_boundary"
