"""Causal flash attention: the softmax of all scores is never kept, neither in the forward nor for
the backward pass.

On TPUs and on NVIDIA GPUs from the A100 on JAX's own Pallas kernels run (older GPUs refuse them);
elsewhere, and for shapes that no kernel takes, a loop over blocks of queries does the same in plain
JAX. Forward and backward are each a ``custom_partitioning`` operation whose rule says what a
partitioner may split: examples and groups of heads. Without one a compiler can only run a kernel on
whole arrays.

Source: Dao et al. 2022 (FlashAttention), algorithms 1 and 4; Ainslie et al. 2023 (grouped queries).
The kernels: ``jax.experimental.pallas.ops.gpu.attention`` and
``jax.experimental.pallas.ops.tpu.flash_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning

#: Both kernels work on blocks of this many positions.
KERNEL_BLOCK = 128


@jax.custom_vjp
def flash_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention of every position to itself and those before it; scores are scaled by
    K^-0.5.

    Args:
        query: [B, S, G, R, K]: R query heads in each of G groups.
        key: [B, S, G, K]: one head per group.
        value: [B, S, G, K].

    Returns:
        [B, S, G, R, K], in the dtype of the queries.
    """
    return _forward(query, key, value)[0]


def _saving(query: jax.Array, key: jax.Array, value: jax.Array):
    mixed, log_sums = (checkpoint_name(each, "context") for each in _forward(query, key, value))
    return mixed, (query, key, value, mixed, log_sums)


def _gradients(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_backward(*saved, gradient))


flash_attention.defvjp(_saving, _gradients)


def _partitioned(rule: str) -> Callable[[Callable[..., Any]], Any]:
    """The operation as one that is split by ``rule`` over b (examples) and g (groups of heads):
    every device runs it on its part."""

    def wrap(function: Callable[..., Any]) -> Any:
        operation = custom_partitioning(function)

        def partition(mesh, arguments, results):
            def shardings(arrays):
                return jax.tree.map(lambda array: array.sharding, arrays)

            return mesh, function, shardings(results), shardings(arguments)

        operation.def_partition(
            partition, sharding_rule=rule, need_replication_factors=("s", "r", "k", "t")
        )
        return operation

    return wrap


@_partitioned("b s g r k, b t g k, b t g k -> b s g r k, b s g r")
def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.Array]:
    """The result, and of every query the logarithm (a kernel's may be to base 2) of the sum of its
    exponentiated scores: [B, S, G, R]."""
    return _for_platform(query, _gpu_forward, _tpu_forward, _plain_forward)(query, key, value)


@_partitioned(
    "b s g r k, b t g k, b t g k, b s g r k, b s g r, b s g r k -> b s g r k, b t g k, b t g k"
)
def _backward(query, key, value, mixed, log_sums, gradient) -> list[jax.Array]:
    """Gradients of queries, keys and values."""
    function = _for_platform(query, _gpu_backward, _tpu_backward, _plain_backward)
    return function(query, key, value, mixed, log_sums, gradient)


def _for_platform(query: jax.Array, gpu, tpu, plain):
    seq_len, head_dim = query.shape[1], query.shape[-1]
    if seq_len % KERNEL_BLOCK or (head_dim > KERNEL_BLOCK and head_dim % KERNEL_BLOCK):
        return plain
    return lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=gpu, tpu=tpu, default=plain)


# ---- plain JAX -----------------------------------------------------------------------------------


def _blocks(seq_len: int) -> list[tuple[int, int]]:
    """At most 16 blocks of queries: (first, stop). Keys from ``stop`` on are never looked at."""
    size = max(KERNEL_BLOCK, -(-seq_len // 16))
    return [(first, min(first + size, seq_len)) for first in range(0, seq_len, size)]


def _scores(query: jax.Array, key: jax.Array, first: int) -> jax.Array:
    """Of queries [B, q, G, R, K] from position ``first`` on and keys [B, t, G, K]: float32 [B, G,
    R, q, t], masked."""
    scores = jnp.einsum("bqgrk,btgk->bgrqt", query * query.shape[-1] ** -0.5, key).astype(
        jnp.float32
    )
    causal = first + jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])
    return jnp.where(causal, scores, jnp.finfo(jnp.float32).min)


def _plain_forward(query, key, value) -> list[jax.Array]:
    mixed, log_sums = [], []
    for first, stop in _blocks(query.shape[1]):
        scores = _scores(query[:, first:stop], key[:, :stop], first)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - log_sum[..., None]).astype(query.dtype)
        mixed.append(jnp.einsum("bgrqt,btgk->bqgrk", weights, value[:, :stop]))
        log_sums.append(log_sum)
    return [jnp.concatenate(mixed, axis=1), jnp.moveaxis(jnp.concatenate(log_sums, axis=-1), -1, 1)]


def _plain_backward(query, key, value, mixed, log_sums, gradient) -> list[jax.Array]:
    scale = query.shape[-1] ** -0.5
    to_query = []
    to_key, to_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for first, stop in _blocks(query.shape[1]):
        of_block = [array[:, first:stop] for array in (query, mixed, log_sums, gradient)]
        q, out, log_sum, g = of_block
        k, v = key[:, :stop], value[:, :stop]
        weights = jnp.exp(_scores(q, k, first) - jnp.moveaxis(log_sum, 1, -1)[..., None])
        shift = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
        to_scores = weights * (
            jnp.einsum("bqgrk,btgk->bgrqt", g, v).astype(jnp.float32)
            - jnp.moveaxis(shift, 1, -1)[..., None]
        )
        to_scores, weights = (scale * to_scores).astype(query.dtype), weights.astype(query.dtype)
        to_query.append(jnp.einsum("bgrqt,btgk->bqgrk", to_scores, k))
        to_key = _added(to_key, jnp.einsum("bgrqt,bqgrk->btgk", to_scores, q))
        to_value = _added(to_value, jnp.einsum("bgrqt,bqgrk->btgk", weights, g))
    return [
        jnp.concatenate(to_query, axis=1),
        to_key.astype(key.dtype),
        to_value.astype(value.dtype),
    ]


def _added(total: jax.Array, part: jax.Array) -> jax.Array:
    """``part`` [B, t, G, K] added to the first t positions of ``total`` [B, S, G, K]."""
    return jax.lax.dynamic_update_slice_in_dim(total, total[:, : part.shape[1]] + part, 0, axis=1)


# ---- kernels -------------------------------------------------------------------------------------
#
# They know heads, not groups: keys and values are repeated for the query heads of a group on the
# way in, and their gradients summed on the way out. Nothing repeated is kept.


def _heads(query: jax.Array) -> jax.Array:
    """[B, S, G, R, ...] -> [B, S, G R, ...]."""
    return query.reshape(*query.shape[:2], -1, *query.shape[4:])


def _repeated(query: jax.Array, key: jax.Array) -> jax.Array:
    """[B, S, G, K] -> [B, S, G R, K]."""
    return jnp.repeat(key, query.shape[3], axis=2)


def _summed(query: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
    """[B, S, G R, K] -> [B, S, G, K]."""
    return gradient.reshape(*query.shape[:4], -1).sum(axis=3).astype(dtype)


def _gpu_forward(query, key, value) -> list[jax.Array]:
    from jax.experimental.pallas.ops.gpu.attention import mha

    heads = _heads(query), _repeated(query, key), _repeated(query, value)
    mixed, log_sums = mha(
        *heads, None, sm_scale=query.shape[-1] ** -0.5, causal=True, return_residuals=True
    )
    return [mixed.reshape(query.shape), jnp.moveaxis(log_sums, 1, 2).reshape(query.shape[:-1])]


def _gpu_backward(query, key, value, mixed, log_sums, gradient) -> list[jax.Array]:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    saved = (
        _heads(query),
        _repeated(query, key),
        _repeated(query, value),
        None,
        _heads(mixed),
        jnp.moveaxis(_heads(log_sums), 1, 2),
    )
    options = (
        query.shape[-1] ** -0.5,
        True,
        BlockSizes.get_default(),
        "triton",
        None,
        2,
        None,
        False,
        False,
        False,
    )
    to_query, to_key, to_value, _ = mha.bwd(*options, saved, _heads(gradient))
    return [
        to_query.reshape(query.shape),
        _summed(query, to_key, key.dtype),
        _summed(query, to_value, value.dtype),
    ]


def _tpu_arguments(query, key, value):
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    arrays = [
        jnp.swapaxes(array, 1, 2)
        for array in (_heads(query), _repeated(query, key), _repeated(query, value))
    ]
    batch_size, num_heads, seq_len, head_dim = arrays[0].shape
    blocks = kernel.BlockSizes.get_default(batch_size, num_heads, seq_len, seq_len, head_dim)
    return kernel._flash_attention, arrays, (True, head_dim**-0.5, blocks, False)


def _tpu_forward(query, key, value) -> list[jax.Array]:
    kernel, arrays, options = _tpu_arguments(query, key, value)
    mixed, sums, largest = kernel(*arrays, None, None, True, *options)
    log_sums = largest + jnp.log(sums)
    return [
        jnp.swapaxes(mixed, 1, 2).reshape(query.shape),
        jnp.swapaxes(log_sums, 1, 2).reshape(query.shape[:-1]),
    ]


def _tpu_backward(query, key, value, mixed, log_sums, gradient) -> list[jax.Array]:
    kernel, arrays, options = _tpu_arguments(query, key, value)
    mixed, log_sums, gradient = (
        jnp.swapaxes(_heads(array), 1, 2) for array in (mixed, log_sums, gradient)
    )
    # exp(score - log_sum) is what exp(score - largest) / sum is.
    saved = (*arrays, None, None, mixed, jnp.ones_like(log_sums), log_sums)
    to_query, to_key, to_value, *_ = kernel.bwd(False, *options, saved, gradient)
    to_query, to_key, to_value = (
        jnp.swapaxes(array, 1, 2) for array in (to_query, to_key, to_value)
    )
    return [
        to_query.reshape(query.shape),
        _summed(query, to_key, key.dtype),
        _summed(query, to_value, value.dtype),
    ]
