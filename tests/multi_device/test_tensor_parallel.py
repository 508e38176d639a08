"""The walk against layouts written by hand, and the compiled layers against one device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capture.errors import PlanError
from capture.partition.dim_flow import reshaped_dim
from capture.partition.tensor_parallel import parameter_specs

DEGREE = 4
WIDTH, HEADS, VOCABULARY = 64, 4, 128
COLUMN, ROW = P(None, "model"), P("model", None)
Params = dict[str, Any]


def shapes(params: Params) -> Params:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}


def specs_by_name(
    fn: Callable,
    params: Params,
    *args: jax.ShapeDtypeStruct,
    degree: int = DEGREE,
    rule: Any = "auto",
) -> dict[str, P]:
    """The specs of ``fn(params, *args)`` under dotted names; every one is checked to divide."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    specs = parameter_specs(
        lambda p, a: fn(tree.unflatten(p), *a), leaves, list(args), degree, rule, names
    )
    for leaf, spec in zip(leaves, specs, strict=True):
        assert len(spec) <= leaf.ndim and all(
            leaf.shape[dim] % degree == 0 for dim, entry in enumerate(spec) if entry
        )
    return dict(zip(names, specs, strict=True))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


# Layers, and how one would shard them by hand.

GPT = shapes(
    {"ln1": (64,), "wq": (64, 64), "wk": (64, 64), "wv": (64, 64), "wo": (64, 64)}
    | {"ln2": (64,), "w1": (64, 256), "b1": (256,), "w2": (256, 64), "b2": (64,)}
)
MEGATRON = {"ln1": P(), "wq": COLUMN, "wk": COLUMN, "wv": COLUMN, "wo": ROW} | {
    "ln2": P(),
    "w1": COLUMN,
    "b1": P("model"),
    "w2": ROW,
    "b2": P(),
}


def gpt_block(p: Params, x, heads: int = HEADS, dtype=jnp.float32):
    b, t, d = x.shape
    p = {name: value.astype(dtype) for name, value in p.items()}
    h = norm(x, p["ln1"]).astype(dtype)
    q, k, v = ((h @ p[name]).reshape(b, t, heads, d // heads) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(d // heads).astype(dtype)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, jnp.asarray(-1e9, dtype))
    x = x + (
        jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(b, t, d) @ p["wo"]
    ).astype(x.dtype)
    h = norm(x, p["ln2"]).astype(dtype)
    return x + (jax.nn.gelu(h @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]).astype(x.dtype)


class FlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(HEADS)(h, h)


BOTTLENECK = shapes(
    {
        "conv1": (1, 1, 64, 32),
        "scale1": (32,),
        "conv2": (3, 3, 32, 32),
        "scale2": (32,),
        "conv3": (1, 1, 32, 64),
        "scale3": (64,),
    }
)
COLUMN_ROW_COLUMN = {
    "conv1": P(None, None, None, "model"),
    "scale1": P("model"),
    "conv2": P(None, None, "model", None),
    "scale2": P(),
    "conv3": P(None, None, None, "model"),
    "scale3": P("model"),
}


def bottleneck(p: Params, x, groups: int = 4):
    h = x
    for i in "123":
        h = jax.lax.conv_general_dilated(
            h, p["conv" + i], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        grouped = h.reshape(*h.shape[:3], groups, -1)
        mean, variance = (
            grouped.mean((1, 2, 4), keepdims=True),
            grouped.var((1, 2, 4), keepdims=True),
        )
        h = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(h.shape) * p["scale" + i]
        h = jax.nn.relu(h + x if i == "3" else h)
    return h


MOE = shapes({"gate": (256, 8), "wi": (8, 256, 64), "bi": (8, 64), "wo": (8, 64, 256)})
EXPERTS = {
    "gate": P(),
    "wi": P("model", None, None),
    "bi": P("model", None),
    "wo": P("model", None, None),
}


def moe(p: Params, x):
    """Top-1 GShard layer: groups g, tokens s, experts e, capacity c, features m, hidden h."""
    gates = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    position = jnp.cumsum(chosen, 1) * chosen - 1
    dispatch = chosen[..., None] * jax.nn.one_hot(position.astype(int), x.shape[1] // 2)
    inputs = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inputs, p["wi"]) + p["bi"][:, None, None])
    outputs = jnp.einsum("egch,ehm->egcm", hidden, p["wo"])
    return x + jnp.einsum("gsec,egcm->gsm", dispatch * gates[..., None], outputs)


ACTIVATION = floats(4, 16, WIDTH)


def test_gpt_block_is_megatron():
    assert specs_by_name(gpt_block, GPT, ACTIVATION) == MEGATRON


def test_casts_to_bfloat16_change_nothing():
    assert (
        specs_by_name(lambda p, x: gpt_block(p, x, dtype=jnp.bfloat16), GPT, ACTIVATION) == MEGATRON
    )


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda p, x: jax.lax.cond(x.sum() > 0, f, lambda p, x: x, p, x),
    ],
)
def test_calls_are_followed(wrap):
    assert specs_by_name(wrap(gpt_block), GPT, ACTIVATION) == MEGATRON


def test_layers_stacked_for_a_scan():
    stacked = {name: floats(3, *leaf.shape) for name, leaf in GPT.items()}
    specs = specs_by_name(
        lambda p, x: jax.lax.scan(lambda h, layer: (gpt_block(layer, h), None), x, p)[0],
        stacked,
        ACTIVATION,
    )
    assert specs == {name: P(None, *spec) if spec else P() for name, spec in MEGATRON.items()}


def test_parameters_closed_over_by_a_scan():
    specs = specs_by_name(
        lambda p, x: jax.lax.scan(lambda h, _: (gpt_block(p, h), None), x, length=2)[0],
        GPT,
        ACTIVATION,
    )
    assert specs == MEGATRON


def test_flax_attention_with_two_dimensional_biases():
    params = jax.eval_shape(FlaxBlock().init, jax.random.key(0), ACTIVATION)
    specs = specs_by_name(FlaxBlock().apply, params, ACTIVATION)
    attention = {
        name.split("MultiHeadDotProductAttention_0.")[1]: spec
        for name, spec in specs.items()
        if "Multi" in name
    }
    assert attention == {
        **{f"{part}.kernel": P(None, "model", None) for part in ("query", "key", "value")},
        **{f"{part}.bias": P("model", None) for part in ("query", "key", "value")},
        "out.kernel": P("model", None, None),
        "out.bias": P(),
    }
    assert specs["params.LayerNorm_0.scale"] == P()


def test_convolutions_are_column_row_column():
    assert specs_by_name(bottleneck, BOTTLENECK, floats(4, 8, 8, 64)) == COLUMN_ROW_COLUMN


def test_depthwise_convolution_follows_its_input():
    def fn(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, p["a"], (1, 1), "SAME", dimension_numbers=numbers)
        h = jax.lax.conv_general_dilated(
            h, p["b"], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=64
        )
        return jax.lax.conv_general_dilated(h, p["c"], (1, 1), "SAME", dimension_numbers=numbers)

    params = shapes({"a": (1, 1, 32, 64), "b": (3, 3, 1, 64), "c": (1, 1, 64, 32)})
    last = P(None, None, None, "model")
    assert specs_by_name(fn, params, floats(4, 8, 8, 32)) == {
        "a": last,
        "b": last,
        "c": P(None, None, "model", None),
    }


def test_experts_are_cut_and_their_router_is_whole():
    assert specs_by_name(moe, MOE, floats(4, 16, 256)) == EXPERTS


def test_experts_mapped_over_all_tokens():
    def fn(p, x):
        outputs = jax.vmap(lambda a, b: jax.nn.relu(x @ a) @ b)(p["a"], p["b"])
        return jnp.einsum("egsm,gse->gsm", outputs, jax.nn.softmax(x @ p["gate"]))

    specs = specs_by_name(
        fn, shapes({"gate": (64, 8), "a": (8, 64, 128), "b": (8, 128, 64)}), ACTIVATION
    )
    assert specs == {"gate": P(), "a": P("model", None, None), "b": P("model", None, None)}


def test_fused_query_key_value_product():
    def fn(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["bias"], 3, -1)
        q, k, v = (part.reshape(4, 16, HEADS, -1) for part in (q, k, v))
        return (
            jnp.einsum(
                "bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v
            ).reshape(x.shape)
            @ p["out"]
        )

    specs = specs_by_name(
        fn, shapes({"qkv": (64, 192), "bias": (192,), "out": (64, 64)}), ACTIVATION
    )
    assert specs == {"qkv": COLUMN, "bias": P("model"), "out": ROW}


def test_queries_and_keys_stay_whole_when_heads_do_not_divide():
    params = shapes({"q": (64, 6, 16), "k": (64, 6, 16), "v": (64, 6, 16), "out": (6, 16, 64)})

    def fn(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        mixed = jnp.einsum(
            "bhts,bshk->bthk", jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k)), v
        )
        return jnp.einsum("bthk,hkd->btd", mixed, p["out"])

    specs = specs_by_name(fn, params, ACTIVATION)
    assert specs == {"q": P(), "k": P(), "v": P(None, None, "model"), "out": P(None, "model", None)}


@pytest.mark.parametrize("weight_first", [False, True])
def test_the_weight_may_be_either_operand(weight_first):
    def fn(p, x):
        if weight_first:
            return jnp.einsum(
                "df,fbt->dbt", p["b"].T, jax.nn.relu(jnp.einsum("fd,btd->fbt", p["a"].T, x))
            )
        return jax.nn.relu(x @ p["a"]) @ p["b"]

    assert specs_by_name(fn, shapes({"a": (64, 256), "b": (256, 64)}), ACTIVATION) == {
        "a": COLUMN,
        "b": ROW,
    }


def tied_loss(p: Params, ids, labels):
    x = gpt_block(p["block"], p["table"][ids] + p["position"][: ids.shape[1]])
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ p["table"].T), labels[..., None], -1)
    return -picked.mean()


def tied(vocabulary: int) -> Params:
    return {"block": GPT, "table": floats(vocabulary, WIDTH), "position": floats(32, WIDTH)}


def test_tied_table_is_cut_by_vocabulary_and_positions_are_whole():
    specs = specs_by_name(tied_loss, tied(VOCABULARY), integers(4, 16), integers(4, 16))
    assert specs.pop("table") == ROW and specs.pop("position") == P()
    assert specs == {f"block.{name}": spec for name, spec in MEGATRON.items()}


def test_a_vocabulary_that_does_not_divide():
    ids = integers(4, 16)
    assert specs_by_name(tied_loss, tied(VOCABULARY + 1), ids, ids)["table"] == P()
    assert specs_by_name(lambda p, i: p["table"][i], shapes({"table": (129, 64)}), ids) == {
        "table": COLUMN
    }


def test_head_stays_sharded_through_the_softmax():
    def loss(p, x, labels):
        return -jnp.take_along_axis(
            jax.nn.log_softmax(norm(x, p["scale"]) @ p["head"]), labels[..., None], -1
        ).mean()

    specs = specs_by_name(
        loss, shapes({"scale": (64,), "head": (64, VOCABULARY)}), ACTIVATION, integers(4, 16)
    )
    assert specs == {"scale": P(), "head": COLUMN}


def test_second_use_of_a_parameter_keeps_the_first_decision():
    specs = specs_by_name(
        lambda p, x: jax.nn.relu(x @ p["w"]) @ p["w"], shapes({"w": (64, 64)}), ACTIVATION
    )
    assert specs == {"w": COLUMN}


@pytest.mark.parametrize("degree", [1, 3])
def test_what_does_not_divide_is_whole(degree):
    assert set(specs_by_name(gpt_block, GPT, ACTIVATION, degree=degree).values()) == {P()}


def test_largest_rule():
    specs = specs_by_name(gpt_block, GPT, ACTIVATION, rule="largest")
    assert specs["w1"] == COLUMN and specs["w2"] == specs["wq"] == ROW and specs["b1"] == P()


def test_specs_by_name_are_kept_and_the_walk_follows_them():
    specs = specs_by_name(gpt_block, GPT, ACTIVATION, rule={r"^w1$": P(), r"^b2$": P("model")})
    assert specs == {**MEGATRON, "w1": P(), "b1": P(), "w2": COLUMN, "b2": P("model")}


def test_specs_that_do_not_fit_are_all_reported():
    with pytest.raises(PlanError) as refused:
        specs_by_name(
            gpt_block, GPT, ACTIVATION, degree=3, rule={"w1": P(None, "model"), "b1": P("data")}
        )
    reason = (
        "at tensor_parallel=3; a spec names 'model' at most once, in a dimension that the degree "
        "divides. [tensor-parallel-rule]"
    )
    assert str(refused.value).splitlines() == [
        f"{P('data')} does not fit parameter 'b1' of shape (256,) {reason}",
        f"{P(None, 'model')} does not fit parameter 'w1' of shape (64, 256) {reason}",
    ]


def test_specs_by_name_need_names():
    with pytest.raises(PlanError, match="came with no names for 1 parameters") as refused:
        parameter_specs(lambda p, a: p[0], [floats(8, 8)], [], 4, {"w": P("model")})
    assert refused.value.codes == ("tensor-parallel-rule",)


def test_an_unknown_rule_is_refused():
    with pytest.raises(PlanError) as refused:
        parameter_specs(lambda p, a: p[0], [floats(8, 8)], [], 4, "larger")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "tensor-parallel rule 'larger' is unknown; use 'auto', 'largest', or specs by regular "
        "expression. [tensor-parallel-rule]"
    )


@pytest.mark.parametrize(
    ("shape", "result", "dim", "expected"),
    [
        ((4, 1, 8), (4, 8), 2, 1),
        ((8,), (1, 8, 1), 0, 1),
        ((4, 8), (32,), 1, None),
        ((4, 8), (32,), 0, 0),
        ((6, 8), (2, 3, 8), 0, None),
        ((4, 6, 8), (4, 48), 0, 0),
    ],
)
def test_reshaped_dim(shape, result, dim, expected):
    assert reshaped_dim(shape, result, dim, degree=4) == expected


# Compiled on four virtual devices.


def collectives(text: str) -> Counter[str]:
    return Counter(
        re.findall(
            r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
            text,
        )
    )


def compiled_gradients(
    fn: Callable, params: Params, specs: dict[str, P], x: jax.Array
) -> tuple[Any, Counter[str]]:
    """Output, gradients of parameters and input, and the collectives of the program."""
    mesh = Mesh(np.array(jax.devices()[:DEGREE]).reshape(1, DEGREE), ("data", "model"))
    leaves, tree = jax.tree.flatten(params)
    placed = tree.unflatten([NamedSharding(mesh, spec) for spec in specs.values()])
    data = NamedSharding(mesh, P("data"))
    program = jax.jit(
        lambda p, x: _gradients(fn, p, x),
        in_shardings=(placed, data),
        out_shardings=(data, (placed, data)),
    )
    compiled = program.lower(params, x).compile()
    return compiled(
        jax.device_put(tree.unflatten(leaves), placed), jax.device_put(x, data)
    ), collectives(compiled.as_text())


def _gradients(fn: Callable, params: Params, x: jax.Array) -> Any:
    y, pull = jax.vjp(fn, params, x)
    return y, pull(jnp.sin(y))


def random_params(params: Params) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.1 * rng.normal(size=leaf.shape) + (leaf.ndim == 1)).astype(np.float32),
        params,
    )


@pytest.mark.parametrize(
    ("fn", "params", "shape", "expected"),
    [
        pytest.param(
            gpt_block, GPT, (4, 16, 64), {"all-reduce": 4}, id="gpt"
        ),  # one per half block and direction, as in Megatron
        pytest.param(
            FlaxBlock().apply,
            jax.eval_shape(FlaxBlock().init, jax.random.key(0), ACTIVATION),
            (4, 16, 64),
            {"all-reduce": 2},
            id="flax-attention",
        ),
        pytest.param(bottleneck, BOTTLENECK, (4, 8, 8, 64), None, id="convolutions"),
        pytest.param(moe, MOE, (4, 16, 256), None, id="experts"),
    ],
)
def test_gradients_match_one_device(fn, params, shape, expected):
    values = random_params(params)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    result, counts = compiled_gradients(fn, values, specs_by_name(fn, params, floats(*shape)), x)
    for got, wanted in zip(
        jax.tree.leaves(result),
        jax.tree.leaves(jax.jit(lambda p, x: _gradients(fn, p, x))(values, x)),
        strict=True,
    ):
        # The gradient of a key bias is a sum of ones that cancel.
        scale = max(float(np.abs(wanted).max()), 1.0)
        assert float(np.abs(np.array(got) - np.array(wanted)).max()) <= 1e-5 * scale
    if expected is not None:
        assert counts == expected


def test_a_body_that_is_no_call_is_not_looked_into():
    """What runs on one device's part may have the shapes of the whole, and is not split."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))

    def product(p, a):
        return a[0] @ p[0]

    def mapped(p, a):
        return jax.shard_map(product, mesh=mesh, in_specs=(P(), P()), out_specs=P())(p, a)

    for run, spec in (
        (product, P(None, "model")),
        (jax.jit(product), P(None, "model")),
        (mapped, P()),
    ):
        assert parameter_specs(run, [floats(64, 64)], [floats(8, 64)], 4) == [spec]
