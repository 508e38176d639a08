"""Operators of traced workloads: which there are, what belongs to each, and that nothing is lost or
counted twice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
import tracing_models as models

from capture.machine.target import Target
from capture.model.operators import Operator
from capture.model.workload import Workload
from capture.tracing.operators import traced_operators

D = 8


def mlp(num_layers: int = 3, scan: bool = False) -> Workload:
    """An embedding, equal layers (in a scan over stacked weights on request), a convolution and a
    head."""

    def init(key):
        return {
            "table": jnp.ones((16, D)),
            "layers": {"w": jnp.ones((num_layers, D, D)), "b": jnp.ones((num_layers, D))},
            "kernel": jnp.ones((3, D, D)),
            "head": jnp.ones((D, 5)),
        }

    def layer(x, p):
        return jnp.sin(x @ p["w"] + p["b"]), None

    def loss(p, batch):
        x = p["table"][batch["tokens"]]
        if scan:
            x, _ = jax.lax.scan(layer, x, p["layers"])
        else:
            for i in range(num_layers):
                x, _ = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]))
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.mean((x @ p["head"]) ** 2)

    return Workload(loss, init, lambda key, n: {"tokens": jnp.zeros((n, 4), int)}, optax.adam(1e-3))


def test_a_scan_over_stacked_layers_has_the_operators_of_the_layers():
    model = traced_operators(mlp(scan=True), "scan").model
    assert [operator.kind for operator in model.operators] == [
        "embedding",
        *["matmul"] * 3,
        "conv",
        "matmul",
    ]
    assert model.counts[1] == (1, 3)
    layer, stream = model.operators[1], 4 * D * 4
    expected = {
        "activation_bytes": 2 * stream,
        "input_bytes": stream,
        "output_bytes": stream,
        "flops": 2 * 4 * D * D + 2 * 4 * D,
    }
    # Its input is kept, and of the sine the product that the cosine follows from.
    assert layer == Operator(
        layer.name, "matmul", (D * D + D) * 4, tail_bytes=stream, crossing_bytes=stream, **expected
    )
    assert model.state_bytes_per_parameter_byte == pytest.approx(4, abs=0.01)  # Adam, and its count


def test_parameters_and_flops_are_those_of_the_model():
    for workload in (mlp(), models.unet()):
        model = traced_operators(workload, "model").model
        params = jax.eval_shape(workload.init, jax.random.key(0))
        assert model.parameter_bytes == sum(leaf.size * 4 for leaf in jax.tree.leaves(params))


def test_values_that_two_operators_save_count_once():
    """A value that two products read: its 4 D floats are saved once, as an input of the first."""

    def loss(p, batch):
        x = jnp.sin(batch["x"] @ p["a"])
        return jnp.mean((x @ p["b"]) * (x @ p["c"]))

    workload = Workload(
        loss,
        lambda key: dict.fromkeys("abc", jnp.ones((D, D))),
        lambda key, n: {"x": jnp.ones((n, D))},
        optax.sgd(0.1),
    )
    first, second, third = traced_operators(workload, "shared").model.operators
    assert first.activation_bytes == 4 * D  # what comes before the sine; its input is a batch leaf
    assert second.activation_bytes == 4 * D  # x
    # The factors of the product, each made by one of the two.
    assert third.activation_bytes == 2 * 4 * D


@pytest.mark.parametrize(("precision", "item"), [(None, 2), ("highest", 4)])
def test_a_tpu_gathers_and_keeps_what_only_products_read_in_bfloat16_and_fuses_operands(
    precision, item
):
    def loss(p, batch):
        x = jnp.matmul(batch["x"], p["a"], precision=precision)
        x = jnp.sin(x - x.mean(-1, keepdims=True))
        return jnp.mean(jnp.matmul(x, p["b"], precision=precision) ** 2)

    workload = Workload(
        loss,
        lambda key: dict.fromkeys("ab", jnp.ones((D, D))),
        lambda key, n: {"x": jnp.ones((n, D))},
        optax.sgd(0.1),
    )
    on_gpu, on_tpu = (
        traced_operators(workload, "two", products=Target.load(name).products)
        for name in ("h100", "v5e")
    )
    assert [o.activation_bytes for o in on_gpu.model.operators] == [4 * D + 4, 2 * 4 * D]
    first, second = on_tpu.model.operators
    # The result of the product and its sum.
    assert (first.activation_bytes, first.fused_bytes) == (
        4 * D + 4,
        0,
    )
    # Its operand: the sum keeps it from being fused.
    assert (second.activation_bytes, second.fused_bytes) == (
        item * D + 4 * D,
        0,
    )
    assert [o.gathered_fraction for o in on_tpu.sharded_over(2, 0).operators] == [
        item / 4,
        item / 4,
    ]
    assert {o.gathered_fraction for o in on_gpu.sharded_over(2, 0).operators} == {1.0}


def test_a_tpu_computes_operands_again_from_results_that_are_kept():
    first, second = traced_operators(
        mlp(1), "one", products=Target.load("v5e").products
    ).model.operators[1:3]
    stream = 4 * D * 4
    assert first.tail_bytes == stream  # float32, what comes before the sine
    assert second.fused_bytes == stream // 2  # the sine


def test_sizes_are_of_one_example():
    one, three = (traced_operators(mlp(), "model", microbatch_size=n).model for n in (1, 3))
    for a, b in zip(one.operators, three.operators, strict=True):
        assert (a.activation_bytes, a.input_bytes, a.output_bytes) == (
            b.activation_bytes,
            b.input_bytes,
            b.output_bytes,
        )


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, ("float32", "default")),
        ("tensorfloat32", ("float32", "high")),
        ("highest", ("float32", "highest")),
        ("TF32_TF32_F32", ("tf32", "highest")),
        ("TF32_TF32_F32_X3", ("float32", "highest")),
    ],
)
def test_what_most_flops_are_computed_in_is_that_of_the_products(precision, expected):
    def loss(p, batch):
        return jnp.mean(
            jnp.dot(batch["x"], p, precision=precision).astype(jnp.bfloat16)
            @ jnp.ones((D, 2), jnp.bfloat16)
        )

    workload = Workload(
        loss, lambda key: jnp.ones((D, D)), lambda key, n: {"x": jnp.zeros((n, D))}, optax.sgd(1e-3)
    )
    operators = traced_operators(workload, "product")
    assert (operators.dtype, operators.precision) == expected


GELU = {
    "tanh": partial(jax.nn.gelu, approximate=True),
    "erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize(
    ("activation", "dtype", "arrays"),
    [
        (GELU["tanh"], "float32", 1),
        (GELU["erf"], "float32", 2),
        (GELU["silu"], "float32", 1),
        (jax.nn.relu, "float32", 1),  # not the mask, a quarter of it
        (GELU["tanh"], "bfloat16", 2),
        (GELU["erf"], "bfloat16", 3),
        (GELU["silu"], "bfloat16", 1),
    ],
)
def test_what_is_kept_between_two_products_is_what_programs_for_h100_keep(
    activation, dtype, arrays
):
    """The result of the first product, and what of the activation is too long to be computed again;
    the operand is the second's."""

    def loss(p, batch):
        return jnp.mean(activation(batch["x"] @ p["up"].astype(dtype)) @ p["down"].astype(dtype))

    params = {"up": jnp.ones((D, 4 * D)), "down": jnp.ones((4 * D, D))}
    workload = Workload(
        loss, lambda key: params, lambda key, n: {"x": jnp.zeros((n, D), dtype)}, optax.sgd(1e-3)
    )
    up, down = traced_operators(workload, "mlp").model.operators
    one = 4 * D * jnp.dtype(dtype).itemsize
    assert up.tail_bytes == arrays * one and down.activation_bytes == one


def test_labels_are_looked_up_in_memory_and_their_gradient_is_as_large():
    def loss(p, batch):
        return -jnp.take_along_axis(
            jax.nn.log_softmax((batch["x"] @ p).astype(jnp.float32)), batch["y"], -1
        ).mean()

    batch = {"x": jnp.zeros((1, D), jnp.bfloat16), "y": jnp.zeros((1, 1), int)}
    workload = Workload(
        loss,
        lambda key: jnp.ones((D, 64), jnp.bfloat16),
        lambda key, n: jax.tree.map(lambda x: x.repeat(n, 0), batch),
        optax.sgd(1e-3),
    )
    (head,) = traced_operators(workload, "head").model.operators
    # Log-probabilities, their gradient, that of the result.
    assert head.output_bytes == 64 * 2 and head.backward_bytes == 64 * 4 + 64 * 4 + 4


def test_a_remat_region_holds_its_inputs_and_has_the_rest_computed_again():
    def block(p, x):
        return x + jnp.sin(jnp.sin(x @ p["up"]) @ p["down"])

    def loss(p, batch):
        x = batch["x"] @ p["first"]
        for _ in range(2):
            x = jax.checkpoint(block)(p, x)
        return jnp.mean(x @ p["head"])

    params = {
        "first": jnp.ones((D, D)),
        "up": jnp.ones((D, 4 * D)),
        "down": jnp.ones((4 * D, D)),
        "head": jnp.ones((D, 1)),
    }
    workload = Workload(
        loss, lambda key: params, lambda key, n: {"x": jnp.zeros((n, D))}, optax.sgd(1e-3)
    )
    first, up, down, again_up, again_down, head = traced_operators(
        workload, "blocks"
    ).model.operators
    stream, wide = D * 4, 4 * D * 4
    # Held are the inputs of the regions and of the head.
    assert (
        sum(operator.activation_bytes for operator in (first, up, down, again_up, again_down, head))
        == 3 * stream
    )
    # A block's: the product that the first sine follows from, its result, and the second product.
    assert up.again_bytes == again_up.again_bytes == wide
    assert down.again_bytes == again_down.again_bytes == 2 * wide + stream
    assert first.again_bytes == head.again_bytes == 0
