"""The model zoo: parameter counts, layer marks, first losses, one optimizer step, and what a loss
does when its batch is split."""

from __future__ import annotations

import ast
import importlib
import math
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capture.model.workload import Workload, WorkloadSpec, takes_key

MODELS = Path(__file__).parents[2] / "models"
KEY = jax.random.key(0)

#: Compiling takes most of the time of these tests; the numbers stay the same.
quick_jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)

NUM_PARAMETERS = {
    ("gpt", "tiny"): 434_304,
    ("gpt", "125M"): 164_476_416,
    ("gpt", "350M"): 408_193_024,
    ("gpt", "760M"): 838_781_952,
    ("gpt", "1.3B"): 1_420_365_824,
    ("gpt", "2.6B"): 2_782_336_000,
    ("gpt", "6.7B"): 6_867_656_704,
    ("gpt", "15B"): 15_631_984_640,
    ("gpt", "39B"): 39_506_690_048,
    ("moe", "tiny"): 759_296,
    ("moe", "380M"): 408_648_192,
    ("moe", "690M"): 710_662_656,
    ("moe", "1.3B"): 1_371_385_344,
    ("moe", "2.4B"): 2_415_716_352,
    ("moe", "7.1B"): 7_109_255_680,
    ("moe", "10B"): 10_217_217_024,
    ("moe", "27B"): 26_709_446_656,
    ("wide_resnet", "tiny"): 60_456,
    ("wide_resnet", "250M"): 254_123_104,
    ("wide_resnet", "500M"): 495_046_176,
    ("wide_resnet", "1B"): 1_005_653_184,
    ("wide_resnet", "2B"): 1_965_011_008,
    ("wide_resnet", "4B"): 4_000_937_344,
    ("wide_resnet", "6.8B"): 6_727_679_424,
    ("llama", "tiny"): 427_072,
    ("llama", "8B"): 8_030_261_248,
    ("llama", "70B"): 70_553_706_496,
    ("mingpt", "tiny"): 307_712,
    ("unet", "tiny"): 29_688,
    ("unet", "31M"): 31_037_698,
}
TINY_CLASSES = {"gpt": 256, "llama": 256, "mingpt": 256, "moe": 256, "wide_resnet": 16, "unet": 8}


@cache
def load(model: str, query: str = "size=tiny") -> Workload:
    """The workload as the command line names it."""
    return WorkloadSpec.parse(f"{MODELS}/{model}.py:{model}?{query}").load()


def small(model: str, options: str = "") -> Workload:
    """The tiny model; a transformer with two blocks, which have every part of it and are compiled
    in a fraction of the time."""
    return load(
        model, f"size=tiny{'&num_layers=2' if model in ('gpt', 'llama', 'moe') else ''}{options}"
    )


@cache
def tiny_params(model: str) -> Any:
    return quick_jit(small(model).init)(KEY)


@cache
def tiny_batch(model: str) -> Any:
    """Four examples."""
    return quick_jit(small(model).batch, static_argnums=1)(jax.random.key(1), 4)


def examples(batch: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def import_model(model: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module(model)


@cache
def abstract_params(workload: Workload) -> Any:
    return jax.eval_shape(workload.init, KEY)


def num_elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def sub_jaxprs(equation: Any) -> list[Any]:
    found = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"),
    )
    return [
        getattr(value, "jaxpr", value)
        for value in found
        if hasattr(value, "eqns") or hasattr(value, "jaxpr")
    ]


def count_marks(jaxpr: Any) -> int:
    here = sum(
        e.primitive.name == "name" and e.params["name"] == "layer_boundary" for e in jaxpr.eqns
    )
    return here + sum(count_marks(sub) for e in jaxpr.eqns for sub in sub_jaxprs(e))


def marks(workload: Workload, batch_size: int = 2) -> int:
    batch = jax.eval_shape(lambda key: workload.batch(key, batch_size), KEY)
    return count_marks(jax.make_jaxpr(workload.loss_fn)(abstract_params(workload), batch).jaxpr)


@pytest.mark.parametrize(("model", "size"), NUM_PARAMETERS)
def test_parameter_count_is_that_of_the_table(model, size):
    params = abstract_params(load(model, f"size={size}"))
    count = num_elements(params)
    assert count == NUM_PARAMETERS[model, size]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.float32.dtype}
    rows = [
        line.split()
        for line in ast.get_docstring(ast.parse((MODELS / f"{model}.py").read_text())).splitlines()
    ]
    assert any(row and row[0] == size and f"{count:,}" in row for row in rows), (
        f"the docstring's table has no row {size} with {count:,}"
    )


def test_parameter_counts_of_the_families_follow_from_their_widths(monkeypatch):
    mingpt = import_model("mingpt", monkeypatch)
    rows = [line.split() for line in mingpt.__doc__.splitlines()]
    for size, config in mingpt.SIZES.items():
        widths = [block.width for block in config.blocks]
        count = sum(12 * h * h + 12 * h for h in widths) + sum(
            a * b for a, b in pairwise(widths) if a != b
        )
        count += (config.vocab_size + config.seq_len) * widths[0] + (
            config.vocab_size + 2
        ) * widths[-1]
        assert any(row and row[0] == size and row[-1] == f"{count:,}" for row in rows), (
            size,
            count,
        )
        assert size == "tiny" or size == "+".join(
            f"{count}x{width}" for count, width in config.layers
        )
        if size == "tiny":
            assert count == NUM_PARAMETERS["mingpt", "tiny"]


def test_widths_that_are_no_whole_heads_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^size='6x1000' has heads of 64 features.*\[workload-option\]$"
    ):
        import_model("mingpt", monkeypatch).mingpt(size="6x1000")


def test_published_parameter_counts():
    """Alpa's suites, as traced with Alpa itself (GPT and MoE to two decimals, Wide-ResNet to
    three)."""
    billions = {key: count / 1e9 for key, count in NUM_PARAMETERS.items()}
    assert round(billions["gpt", "2.6B"], 2) == 2.78
    assert round(billions["gpt", "6.7B"], 2) == 6.87
    assert round(billions["moe", "2.4B"], 2) == 2.42
    assert round(billions["moe", "7.1B"], 2) == 7.11
    assert round(billions["wide_resnet", "2B"], 3) == 1.965


@pytest.mark.parametrize(
    ("model", "query", "num_layers"),
    [
        ("gpt", "size=tiny", 8),
        ("gpt", "size=2.6B", 32),
        ("gpt", "size=6.7B&num_layers=3&tied=true", 3),
        ("llama", "size=70B", 80),
        ("mingpt", "size=2x64+1x128", 3),
        ("moe", "size=tiny", 4),
        ("moe", "size=7.1B", 16),
        ("wide_resnet", "size=tiny", 4),
        ("wide_resnet", "size=tiny&layers=8", 8),
        ("wide_resnet", "size=2B", 16),
        ("wide_resnet", "size=2B&layers=32", 32),
        ("unet", "size=tiny", 5),
        ("unet", "size=31M", 9),
    ],
)
def test_marks_cut_the_model_into_its_layers(model, query, num_layers):
    assert marks(load(model, query)) == num_layers - 1


def train_step(workload: Workload, params: Any, batch: Any) -> tuple[jax.Array, Any, Any, Any]:
    """The loss, its gradient, the updated parameters and the optimizer's state."""
    loss, grads = jax.value_and_grad(workload.loss_fn)(params, batch)
    updates, state = workload.optimizer.update(grads, workload.optimizer.init(params), params)
    return loss, grads, optax.apply_updates(params, updates), state


# Whose blocks are those of gpt.
@pytest.mark.parametrize("model", [model for model in TINY_CLASSES if model != "mingpt"])
def test_one_step_of_the_tiny_model(model):
    workload, params, batch = small(model), tiny_params(model), tiny_batch(model)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(batch))
    step = quick_jit(partial(train_step, workload))
    loss, grads, new_params, _ = step(params, batch)
    assert float(loss) == pytest.approx(math.log(TINY_CLASSES[model]), abs=0.1)
    assert float(step(new_params, batch)[0]) < float(loss)

    grads, old, new = named_leaves(grads), named_leaves(params), named_leaves(new_params)
    assert all(np.isfinite(leaf).all() for leaf in (*grads.values(), *new.values()))
    still = {name for name in grads if not grads[name].any()}
    # A residual branch of the Wide-ResNet starts with scale zero, so that what lies before it gets
    # no gradient yet.
    assert all(
        model == "wide_resnet" and any(part in name for part in ("_in'", "_mid'", "conv_out'"))
        for name in still
    )
    assert all((old[name] != new[name]).any() for name in grads.keys() - still)


@pytest.mark.parametrize("model", TINY_CLASSES)
def test_bfloat16_leaves_loss_parameters_and_state_in_float32(model):
    workload, params, batch = small(model, "&dtype=bfloat16"), tiny_params(model), tiny_batch(model)
    loss, grads, new_params, state = jax.eval_shape(partial(train_step, workload), params, batch)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((grads, new_params)))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    heavy = dots_and_convolutions(jax.make_jaxpr(workload.loss_fn)(params, batch).jaxpr)
    # Gates of the experts are float32.
    assert sum(dtype == jnp.bfloat16 for dtype in heavy) >= 0.9 * len(heavy) > 0
    assert float(quick_jit(workload.loss_fn)(params, batch)) == pytest.approx(
        math.log(TINY_CLASSES[model]), abs=0.1
    )


def dots_and_convolutions(jaxpr: Any) -> list[Any]:
    """Dtype of the result of each."""
    here = [
        e.outvars[0].aval.dtype
        for e in jaxpr.eqns
        if e.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    return here + [
        dtype for e in jaxpr.eqns for sub in sub_jaxprs(e) for dtype in dots_and_convolutions(sub)
    ]


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_optimizer_state_has_the_published_size():
    def state_elements(model: str, size: str) -> tuple[int, int]:
        workload = load(model, f"size={size}")
        params = abstract_params(workload)
        return num_elements(jax.eval_shape(workload.optimizer.init, params)), num_elements(params)

    adam, gpt_params = state_elements("gpt", "6.7B")
    assert adam == 2 * gpt_params + 1  # two moments and a step count
    adafactor, moe_params = state_elements("moe", "7.1B")
    # A row and a column of each matrix; in full only for attention, whose head_dim is below 128.
    assert adafactor < moe_params / 50
    momentum, resnet_params = state_elements("wide_resnet", "2B")
    assert momentum == resnet_params


def loss_and_mean_of_halves(workload: Workload, params: Any, batch: Any) -> tuple[float, float]:
    loss_fn = quick_jit(workload.loss_fn)
    first, second = (float(loss_fn(params, examples(batch, start, start + 2))) for start in (0, 2))
    return float(loss_fn(params, batch)), (first + second) / 2


@pytest.mark.parametrize("model", ["gpt", "llama", "moe", "unet"])
def test_loss_is_the_mean_over_micro_batches(model):
    whole, halves = loss_and_mean_of_halves(small(model), tiny_params(model), tiny_batch(model))
    np.testing.assert_allclose(whole, halves, rtol=1e-5)


def test_wide_resnet_loss_is_not_the_mean_over_micro_batches():
    """Batch statistics: see the module's docstring. Scales are set to one, so that the residual
    branches count."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.ones_like(leaf) if path[-1].key == "scale" else leaf,
        tiny_params("wide_resnet"),
    )
    whole, halves = loss_and_mean_of_halves(small("wide_resnet"), params, tiny_batch("wide_resnet"))
    assert abs(whole - halves) > 1e-3


def test_expert_groups_lie_within_consecutive_examples():
    """With groups of two examples, micro-batches of two examples hold whole groups and three
    examples are refused."""
    workload = load("moe", "size=tiny&num_layers=1&group_tokens=64")
    whole, halves = loss_and_mean_of_halves(workload, tiny_params("moe"), tiny_batch("moe"))
    np.testing.assert_allclose(whole, halves, rtol=1e-5)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(workload.loss_fn, tiny_params("moe"), examples(tiny_batch("moe"), 0, 3))
    assert str(error.value) == (
        "3 examples of 32 tokens are not whole expert groups of 64 tokens; use a multiple of 2 "
        "examples in each micro-batch, "
        "or another group_tokens. [workload-batch]"
    )


def test_top2_gating_against_a_queue(monkeypatch):
    """GShard's algorithm 1, token by token; the capacity is small enough that choices are
    dropped."""
    num_groups, num_tokens, num_experts, capacity = 2, 16, 4, 5
    gates = jax.nn.softmax(jax.random.normal(KEY, (num_groups, num_tokens, num_experts)))
    weights, balance = quick_jit(import_model("moe", monkeypatch).top2_gating, static_argnums=1)(
        gates, capacity
    )

    expected, balances, num_dropped = (
        np.zeros((num_groups, num_tokens, num_experts, capacity)),
        [],
        0,
    )
    for group, of_group in enumerate(np.asarray(gates, np.float64)):
        choices = np.argsort(-of_group, axis=-1)[:, :2]
        taken = [0] * num_experts
        for rank in (0, 1):
            for token, expert in enumerate(choices[:, rank]):
                if taken[expert] < capacity:
                    weight = of_group[token, expert] / of_group[token, choices[token]].sum()
                    expected[group, token, expert, taken[expert]] = weight
                else:
                    num_dropped += 1
                taken[expert] += 1
        first_fraction = np.bincount(choices[:, 0], minlength=num_experts) / num_tokens
        balances.append(num_experts * (first_fraction * of_group.mean(0)).sum())
    assert num_dropped > 0
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    np.testing.assert_allclose(balance, np.mean(balances), rtol=1e-5)


def test_balance_loss_is_one_when_uniform_and_counts_in_the_loss(monkeypatch):
    moe = import_model("moe", monkeypatch)
    # Each token prefers an expert of its own.
    gates = jnp.full((1, 4, 4), 0.25 - 1e-3) + 4e-3 * jnp.eye(4)
    assert float(moe.top2_gating(gates, 2)[1]) == pytest.approx(1.0)
    workload, params, batch = (
        load("moe", "size=tiny&num_layers=1"),
        tiny_params("moe"),
        tiny_batch("moe"),
    )
    model = moe.Moe(replace(moe.SIZES["tiny"], num_layers=1))
    logits, balance = quick_jit(model.apply)({"params": params}, batch["tokens"])
    logits, labels = np.asarray(logits, np.float64), np.asarray(batch["labels"])[..., None]
    cross_entropy = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels, -1)[..., 0]
    ).mean()
    assert float(balance) > 1.0
    assert float(quick_jit(workload.loss_fn)(params, batch)) == pytest.approx(
        cross_entropy + 0.01 * float(balance), rel=1e-6
    )


def test_gpt_reads_no_later_token(monkeypatch):
    gpt = import_model("gpt", monkeypatch)
    model = gpt.Gpt(replace(gpt.SIZES["tiny"], num_layers=2))
    tokens = np.array(tiny_batch("gpt")["tokens"][:1])
    changed = tokens.copy()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    logits = quick_jit(lambda tokens: model.apply({"params": tiny_params("gpt")}, tokens)[0])
    before, after = np.asarray(logits(tokens)), np.asarray(logits(changed))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert (before[20:] != after[20:]).any(-1).all()


def test_grouped_attention_against_sums_over_heads_and_positions(monkeypatch):
    """Rotary positions as turns of complex numbers, a query head at a time."""
    llama = import_model("llama", monkeypatch)
    config = replace(llama.SIZES["tiny"], seq_len=6)
    x = np.asarray(jax.random.normal(KEY, (1, 6, 64)), np.float64)
    weights = {
        name: np.asarray(jax.random.normal(jax.random.key(i), shape), np.float64) / 8
        for i, (name, shape) in enumerate(
            {
                "query": (64, 2, 2, 16),
                "key": (64, 2, 16),
                "value": (64, 2, 16),
                "out": (2, 2, 16, 64),
            }.items()
        )
    }
    params = {
        name: {"kernel": jnp.asarray(kernel, jnp.float32)} for name, kernel in weights.items()
    }
    made = llama.GroupedAttention(config).apply({"params": params}, jnp.asarray(x, jnp.float32))

    def turned(features):  # [S, K]
        pairs = features[:, :8] + 1j * features[:, 8:]
        angles = np.arange(6)[:, None] * config.rotary_base ** (-np.arange(8) / 8)
        pairs = pairs * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    expected = np.zeros((6, 64))
    for group in range(2):
        key, value = turned(x[0] @ weights["key"][:, group]), x[0] @ weights["value"][:, group]
        for head in range(2):
            scores = turned(x[0] @ weights["query"][:, group, head]) @ key.T / 4
            scores[np.triu_indices(6, 1)] = -np.inf
            shares = np.exp(scores - scores.max(1, keepdims=True))
            expected += (
                (shares / shares.sum(1, keepdims=True)) @ value @ weights["out"][group, head]
            )
    np.testing.assert_allclose(made[0], expected, atol=2e-5)


def test_tied_head_has_no_weights_of_its_own():
    tied, untied = (
        abstract_params(load("gpt", "size=2.6B&tied=true")),
        abstract_params(load("gpt", "size=2.6B")),
    )
    assert num_elements(untied) - num_elements(tied) == 51200 * 2560
    assert set(untied) - set(tied) == {"head"}


def test_dropout_makes_the_loss_take_a_key():
    dropping, plain = (
        load("gpt", "size=tiny&num_layers=1&dropout=0.5"),
        load("gpt", "size=tiny&num_layers=1"),
    )
    assert takes_key(dropping) and not takes_key(plain)
    params, batch = tiny_params("gpt"), tiny_batch("gpt")
    loss_fn = quick_jit(dropping.loss_fn)
    first, again, other = (
        float(loss_fn(params, batch, jax.random.key(seed))) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_sequence_length_override():
    workload = load("gpt", "size=tiny&num_layers=1&seq_len=16")
    batch = workload.batch(KEY, 2)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == dict.fromkeys(
        ("tokens", "labels"), ((2, 16), jnp.int32)
    )
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert jax.eval_shape(workload.loss_fn, abstract_params(workload), batch).shape == ()


@pytest.mark.parametrize("model", TINY_CLASSES)
def test_unknown_size_names_the_sizes(model, monkeypatch):
    sizes = import_model(model, monkeypatch).SIZES
    with pytest.raises(ValueError) as error:
        load(model, "size=3B")
    assert (
        str(error.value)
        == f"size='3B' is no size of {model}; choose one of {', '.join(sizes)}. [workload-size]"
    )


def test_bad_options_are_all_named():
    with pytest.raises(ValueError) as error:
        load("gpt", "dtype=float8&num_layers=0&seq_len=1.5&dropout=1")
    assert str(error.value).splitlines() == [
        "dtype='float8' is no dtype to compute in; choose float32, bfloat16 or float16. "
        "[workload-option]",
        "num_layers=0 is no count; give a whole number, 1 or more. [workload-option]",
        "seq_len=1.5 is no count; give a whole number, 1 or more. [workload-option]",
        "dropout=1 is no probability below 1; give 0 <= dropout < 1. [workload-option]",
    ]
    with pytest.raises(ValueError) as error:
        load("wide_resnet", "size=2B&layers=20")
    assert (
        str(error.value)
        == "layers=20 does not cut the 16 blocks of size='2B'; give 16 or 32. [workload-option]"
    )


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.py")), ids=lambda path: path.stem)
def test_the_zoo_imports_nothing_of_the_library(path):
    imports = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
    }
    neighbours = {neighbour.stem for neighbour in MODELS.glob("*.py")}
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "flax",
        "functools",
        "jax",
        "math",
        "optax",
        "re",
        "types",
        "typing",
    } | neighbours
    assert {module.partition(".")[0] for module in modules} <= allowed
