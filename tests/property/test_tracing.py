from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from processes import REPOSITORY, environment_apart, output_of

from capture.errors import TracingError
from capture.model.graph import LayerGraph, item_bytes
from capture.model.workload import takes_key
from capture.tracing import LAYER_BOUNDARY, StageSlice, TracedModel, trace
from capture.tracing.cut import applied, cheapest_path, cluster_cuts, crossing_bytes
from capture.tracing.flatten import flatten
from capture.tracing.layers import assign_layers
from tests import tracing_models as models

B = 2

WORKLOADS = {
    "unet": models.unet,
    "lstm": models.lstm,
    "convnet": models.convnet,
    "linen": models.linen,
    "linen-dropout-remat": lambda: models.linen(dropout=0.2, remat=True),
    "linen-mark-in-remat": lambda: models.linen(remat=True, mark_inside=True),
    "linen-scan": lambda: models.linen(stacked=True, mark_inside=True),
    "linen-scan-remat-dropout": lambda: models.linen(
        stacked=True, mark_inside=True, remat=True, dropout=0.2
    ),
    "nnx": models.nnx_mlp,
    "pytree-module": models.pytree_module,
    "scan": models.scanned,
    "scan-penalty": lambda: models.scanned(penalty=0.01),
    "scan-unmarked": lambda: models.scanned(marked=False),
    "routed": models.routed,
    "control": models.control,
}
#: Workload and num_layers to ask for: the number of layers to get.
CASES = {
    ("unet", None): 6,
    ("unet", 3): 3,
    ("lstm", None): 2,
    ("convnet", None): 4,
    ("linen", None): 3,
    ("linen-dropout-remat", None): 3,
    ("linen-dropout-remat", 5): 5,
    ("linen-mark-in-remat", None): 3,
    ("linen-scan", None): 3,
    ("linen-scan-remat-dropout", None): 3,
    ("nnx", None): 4,
    ("pytree-module", None): 3,
    ("scan", None): 5,
    ("scan-penalty", None): 5,
    ("scan-unmarked", 3): 3,
    ("routed", None): 4,
    ("control", None): 7,
}
#: Those whose slices are also run; the others differ from one of these in nothing that runs.
COMPOSED = [
    case for case in CASES if case not in {("linen", None), ("linen-scan", None), ("unet", 3)}
]


def case_id(value):
    return f"{value[0]}-{value[1] or 'marks'}" if isinstance(value, tuple) else None


@functools.cache
def workload_of(name):
    return WORKLOADS[name]()


@functools.cache
def traced(name, num_layers=None) -> TracedModel:
    return trace(workload_of(name), B, num_layers)


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


@pytest.mark.parametrize("case", COMPOSED, ids=case_id)
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


def test_equal_blocks_have_equal_keys_and_others_do_not():
    keys = [layer.key for layer in trace(models.repeated(marked=True), B).graph.layers]
    # The first block reads the batch, the layer after the last mark is the loss.
    assert len(set(keys)) == 3 and len(set(keys[1:-1])) == 1
    model = trace(models.linen(num_blocks=4), B)
    assert len({layer.key for layer in model.graph.layers[1:4]}) == 1
    assert model.slice(1, 3).key == model.slice(2, 4).key != model.slice(1, 2).key
    scan_keys = [layer.key for layer in trace(models.scanned(num_layers=5), B).graph.layers]
    assert len(set(scan_keys[2:5])) == 1
    wider = trace(models.repeated(marked=True, width=8), B).graph
    assert wider.layers[1].key != keys[1]
    assert trace(models.repeated(marked=True), 2 * B).graph.layers[1].key != keys[1]


def test_a_parameter_that_layers_share_changes_the_stage_key():
    def make(indices):
        def loss(p, batch):
            h = batch[0]
            for i in indices:
                h = models.mark(jnp.tanh(h @ p[i]))
            return jnp.mean(h)

        return trace(
            models.workload(loss, lambda key: [jnp.eye(models.D)] * 3, models.vectors_batch), B
        )

    distinct, shared = make([0, 1, 2]), make([0, 1, 1])
    assert distinct.graph.layers[2].key == shared.graph.layers[2].key
    assert distinct.slice(1, 3).key != shared.slice(1, 3).key


def test_custom_rules_and_constants_are_part_of_the_key():
    same, other = trace(models.convnet(), B), trace(models.convnet(models.clipped_otherwise), B)
    assert [a.key == b.key for a, b in zip(same.graph.layers, other.graph.layers, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert same.graph.layers[1].key == same.graph.layers[2].key
    assert same.graph.model_hash != other.graph.model_hash

    def scaled(*tables):
        def loss(p, batch):
            h = batch[0] @ p
            for table in tables:
                h = models.mark(jnp.tanh(h * np.full(models.D, table, np.float32)))
            return jnp.mean(h)

        return trace(
            models.workload(loss, lambda key: jnp.eye(models.D), models.vectors_batch), B
        ).graph.layers

    keys = [layer.key for layer in scaled(1.0, 2.0, 2.0, 3.0)]
    assert keys[1] == keys[2] != keys[3]


def test_hashes_are_stable_over_processes():
    names = ["convnet", "linen-dropout-remat", "routed"]
    env = environment_apart(REPOSITORY / "tests", JAX_PLATFORMS="cpu", PYTHONHASHSEED="7")
    lines = output_of("model_keys", *names, env=env).strip().splitlines()
    for name, line in zip(names, lines, strict=True):
        model = traced(name)
        assert line.split() == [
            model.graph.model_hash,
            *[layer.key for layer in model.graph.layers],
            model.slice(1, 3).key,
        ]


def test_automatic_cutting_finds_the_blocks():
    model = trace(models.repeated(num_blocks=6), B, num_layers=6)
    assert [layer.params for layer in model.graph.layers] == [(2 * i, 2 * i + 1) for i in range(6)]
    assert all(len(model.graph.crossing(cut)) == 1 for cut in range(1, 6))
    keys = [layer.key for layer in model.graph.layers]
    assert len(set(keys)) == 3 and len(set(keys[1:-1])) == 1
    assert [
        len(layer.params) for layer in trace(models.repeated(num_blocks=6), B, 3).graph.layers
    ] == [4, 4, 4]
    assert trace(models.repeated(num_blocks=6), B, 1).graph.num_layers == 1


def test_automatic_cutting_unrolls_a_scan_only_if_it_must():
    whole = trace(models.scanned(marked=False), B, num_layers=1)
    assert [p.name for p in whole.graph.params] == ["head", "layers/b", "layers/w"]
    four = trace(models.scanned(marked=False), B, num_layers=4)
    assert len(four.graph.params) == 9


@pytest.mark.parametrize(
    ("blocks", "num_devices", "num_layers"),
    # The blocks themselves; a multiple that is enough for the devices; no more than 32, and then a
    # divisor; two products each, no more.
    [(12, 1, 12), (12, 16, 24), (5, 1, 10), (96, 8, 32), (40, 1, 20), (3, 1, 6), (1, 4, 2)],
)
def test_a_loss_without_marks_is_cut_into_a_sensible_number_of_layers(
    blocks, num_devices, num_layers
):
    def loss(params, batch):
        x = batch[0]
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x)

    def init(key):
        return [(jnp.zeros((models.D, 8)), jnp.zeros((8, models.D)))] * blocks

    workload = models.workload(loss, init, models.vectors_batch)
    model = trace(workload, B, num_devices=num_devices)
    assert model.auto_layers and model.graph.num_layers == num_layers
    if blocks == 12:
        same = trace(workload, B, model.graph.num_layers)
        assert (
            same.graph.model_hash
            == model.graph.model_hash
            == trace(workload, B, unmarked_layers=num_layers).graph.model_hash
        )
        assert trace(workload, 4 * B, num_devices=num_devices).graph.num_layers == num_layers


def test_the_number_sees_into_scans_and_leaves_marks_alone():
    assert trace(models.scanned(num_layers=16, marked=False), B).graph.num_layers == 16
    marked = trace(models.scanned(num_layers=4), B, num_devices=64)
    assert not marked.auto_layers
    assert marked.graph.num_layers == trace(models.scanned(num_layers=4), B).graph.num_layers


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


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.booleans()), min_size=2, max_size=8
    ),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_cheapest_path_is_the_best_of_all(steps, num_steps, tolerance):
    progress = [float(sum(f for f, _, _ in steps[:i])) for i in range(len(steps) + 1)]
    products = [sum(has for _, _, has in steps[:i]) for i in range(len(steps) + 1)]
    costs = [float(c) for _, c, _ in steps] + [0.0]
    mean = progress[-1] / num_steps
    least, most = mean / (1 + tolerance), mean * (1 + tolerance)
    feasible = {}
    for middle in combinations(range(1, len(steps)), num_steps - 1):
        path = [0, *middle, len(steps)]
        if all(
            least <= progress[b] - progress[a] <= most and products[a] < products[b]
            for a, b in pairwise(path)
        ):
            feasible[tuple(path)] = sum(costs[i] for i in middle)
    found = cheapest_path(progress, costs, num_steps, least, most, products)
    assert (found is None) == (not feasible)
    if found is not None:
        assert feasible[tuple(found)] == min(feasible.values())


@pytest.mark.parametrize(
    ("workload", "num_layers"),
    [
        (
            models.repeated(num_blocks=3),
            6,
        ),  # two products a block; the loss alone is no layer, nor is a ReLU
        (
            models.scanned(num_layers=3, marked=False),
            4,
        ),  # one an iteration, for which the scan is unrolled, and the head
        (models.lstm(), None),
    ],
)
def test_every_automatic_layer_has_a_product(workload, num_layers):
    if num_layers is None:
        with pytest.raises(TracingError) as error:
            trace(workload, B, 50)
        num_layers = int(re.search(r"give 1 to (\d+)", str(error.value))[1])
    for count in (num_layers - 1, num_layers):
        model = trace(workload, B, count)
        assert model.graph.num_layers == count
        for first in range(count):
            layer = model.slice(first, first + 1)
            args = [
                [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in group]
                for group in tensors_of(model, layer)
            ]
            assert layer.params and "dot_general" in str(jax.make_jaxpr(layer)(*args))
    with pytest.raises(
        TracingError, match=rf"give 1 to {num_layers}, or mark .*\[trace-num-layers\]"
    ):
        trace(workload, B, num_layers + 1)


def tensors_of(model: TracedModel, layer):
    graph = model.graph
    return (
        [graph.params[p] for p in layer.params],
        [graph.values[v] for v in layer.inputs],
        [graph.batch[b] for b in layer.batch],
    )


def loss_workload(loss, **shapes):
    return models.workload(
        loss,
        lambda key: models.normals(key, **(shapes or {"w": (models.D, models.D)})),
        models.vectors_batch,
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


ERRORS = [
    (
        lambda: trace(loss_workload(lambda p, b: jnp.mean(models.mark(b[0]) @ p["w"])), B),
        "the loss has 1 layer marks and none of them divides it; mark the boundaries in the model "
        "with "
        'jax.ad_checkpoint.checkpoint_name(x, "layer_boundary"), or leave the marks out or give '
        "num_layers (--num-layers), to cut it "
        "automatically. [trace-no-marks]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: jnp.mean(b[0])), B),
        "the loss has no layer marks, and no operation in it applies a parameter to data, so that "
        "there is nothing to cut; check that "
        "loss_fn(params, batch) uses its parameters. [trace-no-marks]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: b[0] @ p["w"]), B),
        "loss_fn returned float32[2,4]; return one scalar float, the mean over the examples of "
        "the batch. [trace-loss-scalar]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: (jnp.mean(b[0] @ p["w"]), b[1])), B),
        "loss_fn returned float32[], int32[2]; return one scalar float, the mean over the "
        "examples of the batch. [trace-loss-scalar]",
    ),
    (
        lambda: trace(
            loss_workload(
                lambda p, b: lax.cond(
                    b[0].sum() > 0, lambda: models.mark(p["w"]), lambda: p["w"]
                ).sum()
            ),
            B,
        ),
        "a 'layer_boundary' mark stands inside cond (scope 'top level'), which cannot be cut; "
        "move the mark out of the cond. "
        "[trace-mark-position]",
    ),
    (
        lambda: trace(models.repeated(num_blocks=1), B, 50),
        "num_layers=50 is not possible: a layer needs a product with a parameter, and the loss "
        "has 2; give 1 to 2, or mark the layers in "
        "the model. [trace-num-layers]",
    ),
    (
        lambda: trace(models.repeated(), B, 0),
        "num_layers=0 is not possible: a layer needs a product with a parameter, and the loss has "
        "12; give 1 to 12, or mark the layers "
        "in the model. [trace-num-layers]",
    ),
    (
        lambda: trace(models.repeated(), 0, 2),
        "microbatch_size=0 is no batch; give at least 1. [trace-microbatch]",
    ),
    (
        lambda: trace(
            models.workload(
                lambda p, b: p["w"].sum(),
                lambda key: models.normals(key, w=(2,)),
                lambda key, n: jnp.zeros((3,)),
            ),
            B,
            1,
        ),
        "batch(key, 2) returned float32[3], and batch(key, 4) nothing larger; return arrays that "
        "carry the examples in one dimension. "
        "[trace-batch]",
    ),
    (
        lambda: trace(models.repeated(), B, 2).slice(1, 3),
        "layers [1, 3) are no slice of a model of num_layers=2; give 0 <= first < stop <= 2. "
        "[trace-slice]",
    ),
    (
        lambda: trace(models.repeated(), B, 2).slice(0, 1)([], [], [], remat="some"),
        "remat='some' is no remat mode; give 'none', 'full' or 'dots'. [trace-remat]",
    ),
    (
        lambda: trace(models.routed(), B).batch_leaves(models.tokens_batch(jax.random.key(0), B)),
        "loss_fn(params, batch, key) takes a random key, and none is given; pass key=. [trace-key]",
    ),
]


@pytest.mark.parametrize(
    ("action", "message"), ERRORS, ids=[message.rsplit("[", 1)[1][:-1] for _, message in ERRORS]
)
def test_errors(action, message):
    with pytest.raises(TracingError) as caught:
        action()
    assert str(caught.value) == message


def test_mark_inside_a_custom_rule_is_refused():
    @jax.custom_vjp
    def rule(x):
        return models.mark(jnp.sin(x))

    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (g,))
    with pytest.raises(TracingError, match="move the mark out of the custom_vjp_call"):
        trace(loss_workload(lambda p, b: jnp.mean(rule(b[0] @ p["w"]))), B)


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
