"""The model zoo: parameter counts, layer marks, first losses, one optimizer step, and what a loss
does when its batch is split."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from zoo_models import (
    KEY,
    TINY_CLASSES,
    abstract_params,
    examples,
    import_model,
    load,
    num_elements,
    quick_jit,
    small,
    sub_jaxprs,
    tiny_batch,
    tiny_params,
)

from capture.model.workload import Workload, takes_key


def train_step(workload: Workload, params: Any, batch: Any) -> tuple[jax.Array, Any, Any, Any]:
    """The loss, its gradient, the updated parameters and the optimizer's state."""
    loss, grads = jax.value_and_grad(workload.loss_fn)(params, batch)
    updates, state = workload.optimizer.update(grads, workload.optimizer.init(params), params)
    return loss, grads, optax.apply_updates(params, updates), state


# Of those with one kind of block, one is tried in default tests, one in those that are slow; a step of MobileNet stands in
# tests/multi_device/test_array_zoo.py, too.
SLOW = ("moe", "unet", "wide_resnet")
EXHAUSTIVE = ("bert", "llama", "mobilenet", "resnet", "vgg", "vit")
# Leaves that the first step may leave where they are, by parts of their names. A residual branch of
# a ResNet starts with scale zero, so that what lies before it gets no gradient yet. In a
# MobileNet's block with ReLU, ``relu(scale x) = scale relu(x)`` while the bias is zero, and the
# norm after the depthwise filter divides a channel's scale out again: but for that norm's epsilon,
# the true gradient is zero.
_BEHIND_ZERO_SCALE = ("_in'", "_mid'", "conv_out'")
STILL_AT_FIRST = {
    "mobilenet": ("['norm_in']['scale']",),
    "resnet": _BEHIND_ZERO_SCALE,
    "wide_resnet": _BEHIND_ZERO_SCALE,
}


def _marks(model: str):
    if model in EXHAUSTIVE:
        return pytest.mark.exhaustive
    return pytest.mark.slow if model in SLOW else ()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=_marks(model))
        for model in sorted(TINY_CLASSES.keys() - {"mingpt", "gpt2"})
    ],
)
def test_one_step_of_the_tiny_model(model):
    workload, params, batch = small(model), tiny_params(model), tiny_batch(model)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(batch))
    step = quick_jit(partial(train_step, workload))
    loss, grads, new_params, _ = step(params, batch)
    assert float(loss) == pytest.approx(math.log(TINY_CLASSES[model]), abs=0.1)
    assert float(step(new_params, batch)[0]) < float(loss)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, new_params)))
    still = unmoved(params, grads, new_params)
    may_be_still = STILL_AT_FIRST.get(model, ())
    assert all(any(part in name for part in may_be_still) for name in still), still
    if may_be_still:
        # Away from zero biases and scales there is no such reason.
        elsewhere = jax.tree.map(lambda leaf: leaf + 0.1, params)
        _, grads, new_params, _ = step(elsewhere, batch)
        assert not still & unmoved(elsewhere, grads, new_params)


def unmoved(params: Any, grads: Any, new_params: Any) -> set[str]:
    """Leaves with no gradient at all, or with one that is lost in rounding."""
    old, of_old, new = map(named_leaves, (params, grads, new_params))
    return {name for name in old if not of_old[name].any() or (old[name] == new[name]).all()}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=() if model == "gpt" else pytest.mark.exhaustive)
        for model in TINY_CLASSES
    ],
)
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


def loss_and_mean_of_halves(workload: Workload, params: Any, batch: Any) -> tuple[float, float]:
    loss_fn = quick_jit(workload.loss_fn)
    first, second = (float(loss_fn(params, examples(batch, start, start + 2))) for start in (0, 2))
    return float(loss_fn(params, batch)), (first + second) / 2


@pytest.mark.parametrize(
    "model",
    [
        "gpt",
        pytest.param("moe", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("llama", "unet")),
    ],
)
def test_loss_is_the_mean_over_micro_batches(model):
    whole, halves = loss_and_mean_of_halves(small(model), tiny_params(model), tiny_batch(model))
    np.testing.assert_allclose(whole, halves, rtol=1e-5)


@pytest.mark.slow
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
        abstract_params(load("gpt", "size=2.6B&num_layers=1&tied=true")),
        abstract_params(load("gpt", "size=2.6B&num_layers=1")),
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
