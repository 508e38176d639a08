"""Sequence parallelism: where it is legal, what it keeps, and that a step with it is the same
step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from pipeline_models import mark, mlp, pipeline, tied
from test_pipeline import compare
from zoo_models import load

from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.model.graph import LayerGraph
from capture.model.workload import Workload
from capture.partition.sequence import SplitRun
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend
from capture.runtime.layout import shard_bytes
from capture.runtime.meter import measure_step
from capture.tracing.jaxprs import sub_jaxprs

WIDTH, LENGTH = 32, 8


def transformer(experts: bool = False, dropout: bool = False, is_tied: bool = False) -> Workload:
    """Two blocks of attention, and of a feed-forward layer or of experts that a whole router
    weighs; normalised over the features. Of vectors, or of tokens by a table that is tied."""
    shapes = {
        "qkv": (WIDTH, 3, 4, WIDTH // 4),
        "out": (4, WIDTH // 4, WIDTH),
        "up": (4, WIDTH, 4 * WIDTH) if experts else (WIDTH, 4 * WIDTH),
        "down": (4, 4 * WIDTH, WIDTH) if experts else (4 * WIDTH, WIDTH),
        "router": (WIDTH, 4),
        "scale": (WIDTH,),
    }

    def init(key):
        table = [jax.random.normal(key, (64, WIDTH)) / 4] if is_tied else []
        return table + [
            {
                name: jnp.ones(shape)
                if name == "scale"
                else jax.random.normal(jax.random.fold_in(key, 9 * i + j), shape) / 8
                for j, (name, shape) in enumerate(shapes.items())
                if experts or name != "router"
            }
            for i in range(2)
        ]

    def normal(x, scale):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def block(p, x, key):
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", normal(x, p["scale"]), p["qkv"]), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", scores, v), p["out"])
        h = normal(x, p["scale"])
        if experts:
            weights = jax.nn.softmax(h @ p["router"])
            made = jax.nn.gelu(jnp.einsum("bsd,edf->bsef", h, p["up"]))
            made = jnp.einsum("bsef,efd->bsed", made, p["down"])
            return x + jnp.einsum("bsed,bse->bsd", made, weights)
        made = jax.nn.gelu(h @ p["up"]) @ p["down"]
        return x + (made * jax.random.bernoulli(key, 0.8, made.shape) if dropout else made)

    def loss_with_key(params, x, key):
        *table, first, second = params
        tokens = x
        x = table[0][tokens] if table else x
        for i, p in enumerate((first, second)):
            x = mark(block(p, x, None if key is None else jax.random.fold_in(key, i)))
        if table:
            logits = jax.nn.log_softmax(x @ table[0].T)
            return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))
        return jnp.mean(jnp.tanh(x) ** 2)

    return Workload(
        loss_with_key if dropout else lambda params, x: loss_with_key(params, x, None),
        init,
        lambda key, n: (
            jax.random.randint(key, (n, LENGTH), 0, 64)
            if is_tied
            else jax.random.normal(key, (n, LENGTH, WIDTH))
        ),
        optax.sgd(0.1),
    )


def programs(workload, degrees=(1, 4), remat="none", layers=(0, 1), size=4, on=True):
    choice = StageChoice(*degrees, remat, sequence_parallel=on)
    backend = CompileBackend(workload, store=Store())
    config = StageConfig(*layers, choice, size)
    return backend.programs(config), backend.key(config)


def split_of(workload, layer=0, degree=4, size=4):
    backend = CompileBackend(workload, store=Store())
    call, found = backend.sharding(size).layer_splits(degree)[layer]
    return found, call.function.ops


def test_of_a_transformer_the_sequence_is_split_and_read_whole_by_products_alone():
    found, ops = split_of(transformer())
    assert found.inputs == ()
    whole = [op.primitive.name for op, reads in zip(ops, found.whole, strict=True) if reads]
    assert whole == ["dot_general", "dot_general"]
    summed = [
        dims
        for op, dims, parallel in zip(ops, found.results, found.parallel, strict=True)
        if parallel and {*dims} != {None}
    ]
    assert summed == [(1,), (1,)], "of what comes out of attention and of the feed-forward layer"
    found, _ = split_of(transformer(), layer=1)
    assert found.inputs == (1,)


def mixing(num_mixed: int = 2) -> Workload:
    """Two blocks, of which the last sort the vectors of a sequence."""

    def loss(params, x):
        for i, p in enumerate(params):
            if i < 2 - num_mixed:
                x = mark(x + jax.nn.relu(x @ p["up"]) @ p["down"])
            else:
                h = jnp.cumsum(x - jnp.mean(x, -1, keepdims=True), 1)
                x = mark(jnp.sort(x + jax.nn.relu(h @ p["up"]) @ p["down"], 1))
        return jnp.mean(x)

    return replace(transformer(), loss_fn=loss)


def test_features_are_split_where_there_is_no_sequence_or_it_is_mixed():
    found, _ = split_of(mlp(), layer=1)
    assert found.inputs == (1,), "without a sequence, its features: they are added one by one"
    found, _ = split_of(mixing(), layer=1)
    assert found.inputs == (2,), "features are split where a sequence is mixed"


@pytest.mark.parametrize(
    ("workload", "dims"),
    [
        (transformer(), (1, None, None)),
        (transformer(is_tied=True), (1, 1, None)),
        (mixing(), (2, None, None)),
        (mixing(1), (None, None, None)),
    ],
    ids=["loss alone", "tied", "both mixed", "one mixed"],
)
def test_between_stages_values_are_split_where_maker_and_reader_agree(workload, dims):
    """The layer of the loss alone has no parameters, so it reads the whole; of two blocks one may
    want the sequence and the other the features."""
    backend, choice = CompileBackend(workload, store=Store()), StageChoice(1, 4, "cheap")
    split = replace(choice, sequence_parallel=True)
    graph = backend.sharding(4).graph([choice, split])
    assert graph.value_dims == {4: dims}
    sizes = [graph.value_bytes(0, each.value_split) for each in (choice, split)]
    assert sizes[0] == graph.values[0].nbytes == sizes[1] * (1 if dims[0] is None else 4)
    assert LayerGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    ("workload", "degrees"), [(transformer(), (4, 1)), (transformer(), (1, 3)), (tied(), (1, 4))]
)
def test_where_nothing_can_be_split_programs_and_their_keys_are_the_same(workload, degrees):
    (split, key), (plain, plain_key) = (
        programs(workload, degrees, on=on, layers=(1, 2)) for on in (True, False)
    )
    assert key == plain_key
    assert str(split._saved.traced) == str(plain._saved.traced)
    assert programs(transformer())[1] != programs(transformer(), on=False)[1]


@pytest.mark.parametrize("remat", ["none", "cheap"])
def test_what_is_between_products_is_kept_in_parts(remat):
    tp = 4
    (split, _), (plain, _) = (
        programs(transformer(), (1, tp), remat, (1, 2), on=on) for on in (True, False)
    )
    wide = [
        [s for s in p.forward.outputs[1] if s.shape == (4, LENGTH, WIDTH)] for p in (split, plain)
    ]
    parts = [sorted(shard_bytes(s) for s in structs) for structs in wide]
    whole = 4 * 4 * LENGTH * WIDTH
    assert set(parts[0]) == {whole // tp}
    saved = plain.cost.residual_bytes - split.cost.residual_bytes
    # Without, the input is kept as it is.
    least = 6 if remat == "none" else 1
    assert saved >= (whole - whole // tp) * least
    # A split value that is read whole is kept once, in parts.
    equations = [split._saving_all.maker(v) for v in split.residuals.stored]
    assert all(
        tuple(e.params["sharding"].spec).count("model") == 1
        for e in equations
        if e is not None and e.primitive.name == "sharding_constraint"
    )


def equations(jaxpr):
    """With those of bodies."""
    for equation in jaxpr.eqns:
        yield equation
        for body in sub_jaxprs(equation.params):
            yield from equations(body)


def test_a_layer_that_is_run_again_gathers_once_more_and_computes_no_more(monkeypatch):
    """What attention's and the feed-forward layer's products read whole; and it takes less."""
    made, found, costs = SplitRun.__init__, [], []
    for again in (True, False):
        monkeypatch.setattr(SplitRun, "__init__", lambda *a, on=again: made(*a[:-1], on))
        stage, _ = programs(transformer(), (1, 4), "full", (1, 2))
        every = list(equations(jax.make_jaxpr(stage._backward)(*stage.backward_args).jaxpr))
        constraints = [e for e in every if e.primitive.name == "sharding_constraint"]
        found.append(Counter(e.primitive.name for e in every))
        found[-1]["gather"] = sum("model" not in e.params["sharding"].spec for e in constraints)
        costs.append(stage.backward.transient_bytes)
    more = found[0] - found[1]
    assert more["gather"] == 2 and not {"dot_general", "exp", "tanh", "rsqrt"} & more.keys()
    assert costs[0] < costs[1]


@cache
def gpt_of_three_layers() -> CompileBackend:
    """Traced once for all choices."""
    return CompileBackend(load("gpt", "size=tiny&num_layers=3"), store=Store())


def _marks_of_parts(case: tuple[str, int, bool]):
    """Three policies with sequence parallelism in default tests; slow are the other policies and
    degrees, each twice."""
    remat, *degrees = case
    if degrees == [2, True] and remat in ("none", "cheap", "full"):
        return ()
    slow = [("dots", 1, False), ("full:2", 2, False), ("none", 2, False), ("full", 1, False)]
    slow += [("dots", 2, True), ("full:2", 2, True)]
    return pytest.mark.slow if case in slow else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("remat", "tp", "on"),
    [
        pytest.param(*case, marks=_marks_of_parts(case))
        for remat in ("none", "cheap", "full", "dots", "full:2")
        for case in ((remat, 2, True), (remat, 1, False), (remat, 2, False))
    ],
)
def test_parameters_in_parts_change_nothing_of_what_is_kept(remat, tp, on):
    """Of a whole model: nothing that it is given or makes tells the compiler how values lie in the
    middle, where it would else split features as it finds parameters split."""
    backend, size = gpt_of_three_layers(), 8
    lying = []
    for shard_params in (False, True):
        choice = StageChoice(4, tp, remat, shard_params, shard_params, on)
        stage = backend.programs(StageConfig(0, 3, choice, size))
        planned = sum(map(stage.residuals._split.nbytes, stage.residuals.stored))
        kept = stage.forward.outputs[1]
        assert planned * 0.85 <= sum(map(shard_bytes, kept)) <= planned
        lying.append(Counter((s.shape, s.sharding.shard_shape(s.shape)) for s in kept))
    assert lying[0] == lying[1]


WORKLOADS = {
    "tied": lambda: transformer(is_tied=True),
    "dropout": lambda: transformer(dropout=True),
    "experts": lambda: transformer(experts=True),
    "features": mlp,
}


@pytest.mark.parametrize(
    ("name", "degrees", "remat", "schedule", "on"),
    [
        pytest.param(
            "tied", ((2, 2), (1, 4)), "cheap", "1f1b", (True, True), marks=pytest.mark.slow
        ),
        pytest.param(
            "dropout", ((1, 4), (1, 2)), "none", "zb-h1", (True, False), marks=pytest.mark.slow
        ),
        pytest.param("experts", ((2, 4),), "full", "gpipe", (True,), marks=pytest.mark.slow),
        ("features", ((2, 2), (1, 4)), "dots", "1f1b", (True,) * 2),
    ],
)
def test_a_step_is_the_single_device_step_and_its_replay(name, degrees, remat, schedule, on):
    workload = WORKLOADS[name]()
    layers = {"features": (2, 2), "dropout": (1, 2)}.get(name, (2, 1))
    plan = pipeline((sum(layers),) if len(degrees) == 1 else layers, degrees, remat=remat)
    plan = plan.with_(
        schedule=schedule,
        stages=tuple(
            replace(stage, choice=replace(stage.choice, sequence_parallel=split))
            for stage, split in zip(plan.stages, on, strict=True)
        ),
    )
    step = compare(workload, plan, num_steps=1)
    assert any(v is not None for s in step.stages for v in s._split_runs)
    # What stages receive is cut over replicas and along the sequence.
    for slot in step.program.slots:
        if slot.what in ("input", "cotangent"):
            choice = plan.stages[step.program.places.index(slot.place)].choice
            ways = choice.num_devices if choice.sequence_parallel else choice.data_parallel
            assert slot.nbytes * ways == step.traced.graph.values[slot.holds.ids[0]].nbytes
    params, batch = workload.init(jax.random.key(0)), workload.batch(jax.random.key(1), 8)
    measured = measure_step(step, step.init_from(params), batch, jax.random.key(2), strict=True)
    assert measured.peak_bytes_per_device == step.replay().peak_bytes_per_device
