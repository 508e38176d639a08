"""Flash attention: the same numbers as dot-product attention, less memory, and operations that are
split by their own rule."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line.test_target_compile import require
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multi_device.test_pipeline import compare
from pipeline_models import pipeline
from processes import REPOSITORY, environment_apart, output_of, user_model

from capture.compiler.executable import Compiler
from capture.compiler.work import LocalFlops
from capture.errors import TracingError
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.model.workload import Workload, WorkloadSpec
from capture.partition.local_calls import localize
from capture.partition.tensor_parallel import parameter_specs
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend
from capture.tracing import trace
from capture.tracing.batch_split import check_split
from capture.tracing.flops import kernel_flops
from capture.tracing.split_rule import split_rule

MODELS = REPOSITORY / "models"
MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))


def load(query: str, model: str = "gpt") -> Workload:
    return WorkloadSpec.parse(f"{MODELS}/{model}.py:{model}?size=tiny&{query}").load()


@pytest.fixture(scope="module")
def zoo_attention() -> ModuleType:
    load("attention=flash")
    return sys.modules["zoo_attention"]


def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    seq_len = query.shape[1]
    scores = jnp.einsum("bqgrk,btgk->bgrqt", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(
        jnp.where(jnp.tril(jnp.ones((seq_len, seq_len), bool)), scores, -jnp.inf)
    )
    return jnp.einsum("bgrqt,btgk->bqgrk", weights, value)


def arrays(
    seq_len: int, batch_size: int = 2, groups: int = 2, in_group: int = 2, head_dim: int = 64
) -> list[jax.Array]:
    """Queries, keys, values and the gradient of the result."""
    shapes = [
        (batch_size, seq_len, groups, *rest, head_dim)
        for rest in ((in_group,), (), (), (in_group,))
    ]
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_value_and_gradients_are_those_of_dot_product_attention(zoo_attention):
    *inputs, gradient = arrays(300, head_dim=16)
    found, pull = jax.vjp(jax.jit(zoo_attention.flash_attention), *inputs)
    expected, pull_expected = jax.vjp(dot_product_attention, *inputs)
    close((found, pull(gradient)), (expected, pull_expected(gradient)))


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_the_kernels_are_given_and_give_back_the_right_arrays(zoo_attention, monkeypatch, platform):
    """Pallas's interpreter runs the kernels of both platforms on the CPU."""
    from jax.experimental.pallas.ops.gpu import attention
    from jax.experimental.pallas.ops.tpu import flash_attention

    class Interpreted:
        def __getattr__(self, name: str) -> Any:
            if name != "pallas_call":
                return getattr(pl, name)
            return lambda *args, **options: pl.pallas_call(*args, **{**options, "interpret": True})

    for module in (attention, flash_attention):
        monkeypatch.setattr(module, "pl", Interpreted())
    *inputs, gradient = arrays(128, batch_size=1)
    forward, backward = (
        getattr(zoo_attention, f"_{platform}_{name}") for name in ("forward", "backward")
    )
    saved = forward(*inputs)
    expected, pull = jax.vjp(dot_product_attention, *inputs)
    close((saved[0], tuple(backward(*inputs, *saved, gradient))), (expected, pull(gradient)))
    jax.clear_caches()  # what was interpreted here is not what others compile


def test_outside_of_a_stage_jax_splits_it_by_its_rule(zoo_attention):
    *inputs, _ = arrays(256, groups=4, head_dim=8)
    sharding = NamedSharding(MESH, PartitionSpec("data", None, "model"))
    placed = [jax.device_put(x, sharding) for x in inputs]
    gradients = jax.jit(
        jax.grad(lambda *x: (zoo_attention.flash_attention(*x) ** 2).sum(), argnums=(0, 1, 2))
    )
    text = gradients.lower(*placed).compile().as_text()
    assert "all-gather(" not in text and "all-reduce(" not in text
    close(
        gradients(*placed),
        jax.grad(lambda *x: (dot_product_attention(*x) ** 2).sum(), argnums=(0, 1, 2))(*inputs),
        1e-4,
    )


@pytest.mark.slow
def test_a_planned_step_equals_the_reference():
    workload = load("num_layers=2&attention=flash", "llama")
    compare(workload, pipeline((2,), ((2, 2),)), num_steps=0, gradient_floor=1e-5)


@pytest.mark.slow
def test_a_stage_keeps_no_scores():
    def residual_bytes(attention: str) -> int:
        backend = CompileBackend(load(f"num_layers=3&seq_len=256&attention={attention}"))
        return backend.measure(StageConfig(1, 2, StageChoice(1, 2), 4)).residual_bytes

    scores = 4 * 2 * 256 * 256 * 4  # examples, heads of a device, queries, keys, bytes
    assert residual_bytes("dot_product") - residual_bytes("flash") > scores


def test_layers_are_equal_and_differ_from_those_with_other_attention():
    flash, plain = (
        trace(load(f"num_layers={n}&seq_len=128&attention={name}"), 2)
        for n, name in ((4, "flash"), (3, "dot_product"))
    )
    key = [flash.slice(i, i + 1).key for i in range(4)]
    assert key[1] == key[2] != plain.slice(1, 2).key
    again = trace(load("num_layers=4&seq_len=128&attention=flash"), 2)
    assert [again.slice(i, i + 1).key for i in range(4)] == key


def test_operations_are_counted_and_split_over_examples():
    flash, plain = (
        trace(load(f"num_layers=2&seq_len=256&attention={name}"), 2).graph
        for name in ("flash", "dot_product")
    )
    # Keys after the block of a query are skipped: of two blocks by two, one.
    assert 0.75 * plain.layers[0].flops < flash.layers[0].flops < plain.layers[0].flops
    assert check_split(load("num_layers=1&attention=flash"), 2).splits is not False


def test_heads_are_split_over_the_model_axis(zoo_attention):
    def attend(params, args):
        query, key, value = ((args[0] @ w).reshape(2, 16, 4, 32) for w in params[:3])
        return (
            zoo_attention.flash_attention(query[..., None, :], key, value).reshape(2, 16, 128)
            @ params[3]
        )

    struct = partial(jax.ShapeDtypeStruct, dtype="float32")
    params, args = [struct((64, 128))] * 3 + [struct((128, 64))], [struct((2, 16, 64))]
    column, row = PartitionSpec(None, "model"), PartitionSpec("model", None)
    assert parameter_specs(attend, params, args, degree=4) == [column, column, column, row]
    assert parameter_specs(attend, params, args, degree=8)[:3] == [PartitionSpec()] * 3, (
        "four heads over eight devices"
    )


# ---- custom_partitioning in general --------------------------------------------------------------


def partitioned(rule: str, **special: Any) -> Any:
    """Twice the sum over the last dimension, as an operation with a rule."""
    operation = custom_partitioning(lambda x: 2 * x.sum(-1))

    def partition(mesh, arguments, result):
        return mesh, lambda x: 2 * x.sum(-1), result.sharding, (arguments[0].sharding,)

    operation.def_partition(partition, sharding_rule=rule, **special)
    return operation


def rule_of(operation: Any, *shape: int):
    (equation,) = jax.make_jaxpr(operation)(jnp.ones(shape)).eqns
    return split_rule(equation)


def test_factors_that_may_be_split():
    assert rule_of(
        partitioned("b s k -> b s", need_replication_factors=("s", "k")), 2, 3, 4
    ).operands == (("b", None, None),)
    assert rule_of(partitioned("b s k -> b s", reduction_factors=("k",)), 2, 3, 4).operands == (
        ("b", "s", "k"),
    )
    leading = rule_of(partitioned("... k -> ...", need_replication_factors=("k",)), 2, 3, 4)
    assert (
        leading.operands[0][:2] == leading.results[0]
        and None not in leading.results[0]
        and leading.operands[0][2] is None
    )
    assert rule_of(partitioned("b s k -> b s"), 2, 3, 4).operands == (("b", "s", None),), (
        "a result lacks k"
    )
    assert rule_of(partitioned(lambda *args: "b s k -> b s"), 2, 3, 4) is None


@pytest.mark.parametrize("rule", ["b s -> b", "i i k -> i i", "b s k, b -> b s"])
def test_a_rule_that_does_not_fit_is_refused(rule):
    with pytest.raises(TracingError, match=r"does not fit its .*\[trace-split-rule\]"):
        rule_of(partitioned(rule), 4, 4, 4)


def test_a_factor_that_is_part_of_a_dimension_stays_whole():
    operation = custom_partitioning(lambda x, y: x * y.reshape(x.shape))
    operation.def_partition(lambda *args: None, sharding_rule="b h d, b (h d) -> b h d")
    (equation,) = jax.make_jaxpr(operation)(jnp.ones((2, 4, 6)), jnp.ones((2, 24))).eqns
    assert split_rule(equation).operands == (("b", None, None), ("b", None))


def test_a_sum_over_the_examples_is_added_up_by_its_author():
    """The gradient of a scale: every replica sums its own examples."""
    operation = custom_partitioning(lambda x, g: (x * g).sum(0))

    def partition(mesh, arguments, result):
        axis = arguments[0].sharding.spec[0]

        def local(x, g):
            return jax.lax.psum((x * g).sum(0), axis)

        return mesh, local, result.sharding, tuple(a.sharding for a in arguments)

    operation.def_partition(partition, sharding_rule="b k, b k -> k", reduction_factors=("b",))
    sharding = NamedSharding(MESH, PartitionSpec("data", "model"))
    args = [jax.ShapeDtypeStruct((4, 8), "float32", sharding=sharding)] * 2
    localized, _ = localize(operation, args, MESH)
    x, g = (
        jax.device_put(jax.random.normal(jax.random.key(i), (4, 8)), sharding) for i in range(2)
    )
    assert "all-gather(" not in jax.jit(localized).lower(x, g).compile().as_text()
    close(jax.jit(localized)(x, g), (x * g).sum(0))


def test_constants_of_an_operation_in_a_remat_region():
    table = np.arange(16, dtype=np.float32)
    operation = custom_partitioning(lambda x: x)
    rule = {"sharding_rule": "b s k -> b s k", "need_replication_factors": ("k",)}
    operation.def_partition(
        lambda mesh, args, result: (
            mesh,
            lambda x: x * table,
            result.sharding,
            (args[0].sharding,),
        ),
        **rule,
    )
    localized, _ = localize(
        jax.checkpoint(operation), [jax.ShapeDtypeStruct((4, 8, 16), "float32")], MESH
    )
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    close(jax.jit(localized)(x), x * table)


def test_a_layer_is_known_by_what_its_operations_do(tmp_path):
    """In every process and folder; by their rules, and by the functions that they name."""

    plain = user_model("partitioned")

    def written(name: str, text: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(text)
        return tmp_path / name / "own.py"

    def keys(seed: str, *files: Path) -> list[str]:
        env = environment_apart(JAX_PLATFORMS="cpu", PYTHONHASHSEED=seed)
        return output_of("layer_keys", *files, env=env).split()

    ruled = written("b", plain.replace('factors=("k",)', 'factors=("b", "k")'))
    scaled = written("c", plain.replace("else 1.0 * x", "else 2.0 * x"))
    found = keys("3", written("a", plain), ruled, scaled)
    assert len(set(found)) == 3
    assert keys("5", written("d", plain)) == found[:1]


@pytest.mark.parametrize("wrap", ["plain", "scan", "cond", "remat"])
def test_operations_in_bodies_run_on_their_parts(wrap):
    operation = partitioned("b s k -> b s", need_replication_factors=("k",))

    def function(x, flag):
        if wrap == "scan":
            return jax.lax.scan(
                lambda total, _: (total + operation(x), None),
                jnp.zeros(x.shape[:2]),
                None,
                length=3,
            )[0]
        if wrap == "cond":
            return jax.lax.cond(flag > 0, operation, lambda x: x.sum(-1), x)
        return jax.checkpoint(operation)(x) if wrap == "remat" else operation(x)

    sharding = NamedSharding(MESH, PartitionSpec("data", "model"))
    args = [
        jax.ShapeDtypeStruct((4, 8, 16), "float32", sharding=sharding),
        jax.ShapeDtypeStruct((), "float32"),
    ]
    localized, flops = localize(function, args, MESH)
    compiled = jax.jit(localized).lower(*args).compile()
    assert "all-gather(" not in compiled.as_text()
    x = jax.device_put(jax.random.normal(jax.random.key(0), (4, 8, 16)), sharding)
    close(compiled(x, jnp.float32(1)), function(x, 1.0))
    assert flops == LocalFlops(plain={"scan": 3}.get(wrap, 1) * (4 * 8 * 16 + 4 * 8) // 8)


def test_what_does_not_divide_is_whole():
    operation = partitioned("b s k -> b s", need_replication_factors=("k",))
    args = [jax.ShapeDtypeStruct((3, 8, 16), "float32")]
    localized, flops = localize(operation, args, MESH)
    assert flops == LocalFlops(plain=(3 * 8 * 16 + 3 * 8) // 4)
    x = jax.random.normal(jax.random.key(0), (3, 8, 16))
    close(jax.jit(localized)(x), 2 * x.sum(-1))


def kernel(x, wrap=lambda function: function):
    call = pl.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., 2 * x_ref[...]),
        out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
        cost_estimate=pl.CostEstimate(flops=1000, bytes_accessed=1, transcendentals=0),
        interpret=True,
    )
    return wrap(call)(x)


def scanned(call):
    return lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0]


def by_platform(call):
    return lambda x: jax.lax.platform_dependent(x, cuda=call, default=lambda x: x @ x)


@pytest.mark.parametrize(
    ("wrap", "flops"),
    [
        (lambda call: call, 1000),
        (jax.checkpoint, 1000),
        (scanned, 3000),
        (by_platform, 2 * 8**3),  # as without a kernel
        (lambda call: lambda x: jax.lax.cond(x[0, 0] > 0, call, lambda x: x, x), 1000),
        (lambda call: lambda x: call(call(x)) + x @ x, 2000),  # the compiler counts the product
        (lambda call: lambda x: x @ x, 0),
    ],
)
def test_work_in_kernels_counts_in_any_program(wrap, flops, monkeypatch):
    given = []
    monkeypatch.setattr(
        "capture.compiler.executable.work_of", lambda *of: given.append(of[3]) or None
    )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=here)
    Compiler(count_work=True)(partial(kernel, wrap=wrap), [struct])
    Compiler(count_work=True)(partial(kernel, wrap=wrap), [struct], local_flops=LocalFlops(1, 2))
    assert given == [LocalFlops(kernels=flops), LocalFlops(1, 2)]
    jaxpr = jax.make_jaxpr(partial(kernel, wrap=wrap))(struct).jaxpr
    assert kernel_flops(jaxpr, num_devices=2) == flops, "every device runs it whole"


def test_kernels_that_a_partitioner_splits_are_shared_out():
    operation = custom_partitioning(lambda x: kernel(x[0])[None] + 0 * x)
    operation.def_partition(lambda *of: None, sharding_rule="b s k -> b s k")
    jaxpr = jax.make_jaxpr(operation)(jnp.ones((4, 8, 8))).jaxpr
    whole = kernel_flops(jaxpr)
    assert whole > 1000 and kernel_flops(jaxpr, num_devices=2) == whole // 2


# ---- targets -------------------------------------------------------------------------------------


def measured(name: str, *attention: str) -> dict[str, Any]:
    require(Target.load(name).platform)
    return json.loads(output_of("flash_targets", name, *attention))


def check_operations(found: dict[str, Any]) -> None:
    assert found["flash"]["forward_work"]["flops"] == pytest.approx(
        found["flash flops"] / 4, rel=0.1
    )
    assert found["flash"]["backward_work"]["flops"] == pytest.approx(
        2 * found["flash flops"] / 4, rel=0.15
    )
    # A layer alone, whose backward pass has its forward pass in it.
    alone = found["flash layer"]
    assert alone["forward"] == pytest.approx(found["flash flops"], rel=0.1)
    assert alone["backward"] == pytest.approx(3 * found["flash flops"], rel=0.15)


@pytest.mark.slow
def test_a_tpu_compiles_the_kernel_and_its_operations_count():
    check_operations(measured("v5e", "flash"))


@pytest.mark.slow
def test_a_gpu_compiles_the_kernel_and_splitting_it_costs_nothing():
    found = measured("h100", "dot_product", "flash")
    check_operations(found)
    plain, flash = found["dot_product"], found["flash"]
    assert plain["residual_bytes"] - flash["residual_bytes"] > 2 * 2 * 512 * 512 * 4
    for program in ("forward_work", "backward_work"):
        assert flash[program]["collectives"] == plain[program]["collectives"]


@pytest.mark.slow
def test_a_target_without_the_kernel_says_so():
    found = measured("v100-32g", "flash")["flash"]
    assert (
        found.startswith("the model cannot be compiled for target='v100-32g': ")
        and "[target-refused]" in found
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("attention=fast", "choose dot_product or flash"),
        ("attention=flash&dropout=0.1", "dropout=0"),
    ],
)
def test_options_that_no_model_can_have(query, message):
    with pytest.raises(ValueError, match=rf"{message}.*\[workload-option\]"):
        load(query)
