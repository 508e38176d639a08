"""Models put together from layers that compilers fuse, rewrite or leave out in unusual ways:
dimensions of size 1, tiny contractions, broadcasts, complex and integer numbers, scans, gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from capture.errors import CaptureError
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.model.workload import Workload
from capture.plan.choices import StageChoice
from capture.predictor.formula import kept_bytes
from capture.profiler.bounds import BoundsBackend
from capture.profiler.compile import CompileBackend


@dataclass(frozen=True)
class Odd:
    """One layer of such a model.

    Attributes:
        name: Of ``LAYERS``.
        size: What the layer's own dimension is: a rank, a number of basis functions, a head's
            width, a kernel's.
    """

    name: str
    size: int = 1


Layer = Callable[[dict[str, Any], Any, int], Any]


def _rank(p, x, k):
    """Through ``k`` values and back: for 1, a matrix-vector product and an outer product."""
    return x + jnp.tanh(x @ p["w"][:, :k]) @ p["v"][:k]


def _outer(p, x, k):
    y = jnp.einsum("nk,nd->nkd", x[:, :k], jnp.sin(x))
    return jnp.einsum("nkd,de->ne", y * y, p["w"])


def _matvec(p, x, k):
    scores = jnp.stack([x @ p["w"][:, i] for i in range(k)])
    return x * jax.nn.softmax(scores, axis=0).sum(0)[:, None] + jnp.outer(x @ p["b"], p["b"])


def _basis(p, x, k):
    """A Kolmogorov-Arnold layer: learned functions, as sums over a basis."""
    basis = jnp.exp(-((x[..., None] - jnp.linspace(-1, 1, k)) ** 2))
    return jnp.einsum("ndk,kd->nd", basis, p["v"][:k]) @ p["w"]


def _basis_summed(p, x, k):
    basis = jnp.cos(x[..., None] * jnp.arange(1, k + 1))
    return jnp.einsum("ndk,dk->nd", basis, p["w"][:, :k])


def _tiny(p, x, k):
    """Products of ``k`` by ``k``."""
    n, d = x.shape
    parts = x[:, : d - d % k].reshape(n, -1, k)
    y = jnp.einsum("npk,kl->npl", jnp.tanh(parts), p["w"][:k, :k])
    return x.at[:, : d - d % k].add(y.reshape(n, -1))


def _grouped(p, x, k):
    n, d = x.shape
    parts = x[:, : d - d % k].reshape(n, -1, k)
    w = jnp.broadcast_to(p["w"][:k, :k], (parts.shape[1], k, k)) * p["b"][0]
    return x.at[:, : d - d % k].add(jnp.einsum("npk,pkl->npl", parts, w).reshape(n, -1))


def _complex(p, x, k):
    x, w, v = (each.astype(jnp.float32) for each in (x, p["w"], p["v"]))
    z, w = lax.complex(x, jnp.roll(x, 1, axis=-1)), lax.complex(w, v)
    return jnp.abs((z @ w[:, :k]) @ w[:k].conj()) + jnp.real(z @ w)


def _fourier(p, x, k):
    angles = p["b"][: x.shape[1] // 2 + 1].astype(jnp.float32)
    return jnp.fft.irfft(jnp.fft.rfft(x.astype(jnp.float32)) * jnp.exp(1j * angles), x.shape[1])


def _integer(p, x, k):
    q = jnp.round(lax.stop_gradient(x) * 10).astype(jnp.int32)
    w = jnp.round(lax.stop_gradient(p["w"]) * 10).astype(jnp.int32)
    return (
        x * (q @ w[:, :k]).sum(-1, keepdims=True).astype(x.dtype) + (q @ w).astype(x.dtype) * p["b"]
    )


def _bytes(p, x, k):
    q = jnp.clip(jnp.round(lax.stop_gradient(x) * 10), -127, 127).astype(jnp.int8)
    w = jnp.ones((x.shape[1], x.shape[1]), jnp.int8)
    y = lax.dot(q, w, preferred_element_type=jnp.int32)
    return x * p["b"] + y.astype(x.dtype)


def _mask(p, x, k):
    seen = (lax.stop_gradient(x) > 0).astype(jnp.float32)
    return (
        p["b"] * x * (seen @ seen.T @ x)
        + jnp.einsum("nd,md->nm", seen, seen)[:, :k].sum(-1)[:, None]
    )


def _attention(p, x, k):
    n, d = x.shape
    q, key, v = (
        (x @ p[name])[:, : d - d % k].reshape(n, -1, k).transpose(1, 0, 2)
        for name in ("w", "v", "w")
    )
    weights = jax.nn.softmax(q @ key.transpose(0, 2, 1) / np.sqrt(k))
    y = (weights @ v).transpose(1, 0, 2).reshape(n, -1)
    return x.at[:, : d - d % k].add(y)


def _scan(p, x, k):
    def body(carry, row):
        carry = jnp.tanh(carry * p["b"] + row)
        return carry, carry * row

    steps = x[: len(x) - len(x) % k].reshape(-1, k, x.shape[1])
    _, y = lax.scan(body, jnp.zeros((k, x.shape[1]), x.dtype), steps)
    return x.at[: len(x) - len(x) % k].add(y.reshape(-1, x.shape[1]))


def _scan_product(p, x, k):
    def body(carry, _):
        return jnp.tanh(carry @ p["w"]), None

    return lax.scan(body, x, None, length=k)[0] @ p["v"]


def _gather(p, x, k):
    index = jnp.argsort(lax.stop_gradient(x[:, :k]), axis=-1)[:, 0] + jnp.arange(len(x))
    return x[index % len(x)] @ p["w"] + jnp.take(p["v"], jnp.arange(len(x)) % x.shape[1], axis=0)


def _scatter(p, x, k):
    segments = jnp.arange(len(x)) // k
    sums = jax.ops.segment_sum(x * p["b"], segments, num_segments=len(x))
    return jnp.tanh(sums[segments]) @ p["w"]


def _convolution(p, x, k):
    y = lax.conv_general_dilated(
        x[:, :, None], p["w"][:k, None, :k], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return x + jnp.tanh(y).sum(-1)


def _pointwise(p, x, k):
    """A convolution of one element."""
    n, d = x.shape
    images = jnp.sin(x[:, : d - d % k]).reshape(n, -1, k)
    y = lax.conv_general_dilated(
        images, p["w"][None, :k, :k], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return x.at[:, : d - d % k].add(y.reshape(n, -1))


def _depthwise(p, x, k):
    y = lax.conv_general_dilated(
        jnp.tanh(x)[None],
        p["w"][:k, None, :],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[1],
    )
    return x + y[0]


def _padded(p, x, k):
    """Padded and reversed by operations of their own."""
    k = min(k, (x.shape[1] - 1) // 2)
    width = jnp.pad(x * p["b"], ((0, 0), (k, k)))[None]
    y = lax.conv_general_dilated(
        width.transpose(1, 2, 0),
        jnp.flip(p["w"][: 2 * k + 1, None, :8], 0),
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return x + y.max(-1)


def _cumulative(p, x, k):
    return jnp.cumsum(x * p["b"], axis=0) + jnp.sort(x, axis=-1) * lax.cummax(x, axis=1)


def _broadcast(p, x, k):
    return x + jnp.tanh(x[:, None, :] * p["v"][:k] + p["b"]).sum(1)


def _pairs(p, x, k):
    """All pairs of rows, as in distances."""
    y = x[:, None, : k + 1] - x[None, :, : k + 1]
    return x + (jnp.exp(-(y**2).sum(-1)) @ x) @ p["w"]


def _scaled(p, x, k):
    """Scaled, signed, padded and joined beside products."""
    y = jnp.concatenate([x * 0.125, -x], axis=1) @ jnp.concatenate([p["w"], p["v"]])
    z = jnp.pad(x, ((0, 0), (0, k))) @ jnp.pad(p["w"], ((0, k), (0, 0)))
    return y + z[:, ::-1] + jnp.broadcast_to(p["b"], x.shape) @ p["v"]


def _sliced(p, x, k):
    """Products of which little is read."""
    y = jnp.tanh(x) @ p["w"]
    return (
        x * y[:, :k].sum(-1, keepdims=True)
        + (jnp.sin(x) @ p["v"])[:1]
        + jnp.diagonal(x @ x.T)[:, None]
    )


def _summed(p, x, k):
    """Batched products whose results are summed up at once."""
    n, d = x.shape
    parts = jnp.tanh(x[:, : d - d % k]).reshape(n, -1, k)
    y = jnp.einsum("npk,mpk->pnm", parts, parts).sum(0)
    return x * p["b"] + y @ x


def _cast(p, x, k):
    half = jnp.bfloat16
    y = lax.dot(x.astype(half), p["w"].astype(half), preferred_element_type=jnp.float32)
    z = jnp.tanh(y.astype(half)) @ p["v"].astype(half)
    return x + z.astype(x.dtype)


def _eight(p, x, k):
    narrow = jnp.float8_e4m3fn
    w = p["w"].astype(narrow).astype(jnp.bfloat16)
    return x + (x.astype(jnp.bfloat16) @ w).astype(x.dtype)


def _twice(p, x, k):
    """The same product twice, and its factors in another order."""
    return jnp.tanh(x @ p["w"]) + jnp.sin(x @ p["w"]) * (p["w"].T @ x.T).T


def _constant(p, x, k):
    eye, ones = jnp.eye(x.shape[1], dtype=x.dtype), jnp.ones((x.shape[1], x.shape[1]), x.dtype)
    return x @ eye + (x @ ones) @ p["w"] + jnp.zeros_like(x) @ p["v"]


def _one_hot(p, x, k):
    ids = (lax.stop_gradient(jnp.abs(x[:, 0])) * 100).astype(jnp.int32) % x.shape[1]
    return x + jax.nn.one_hot(ids, x.shape[1], dtype=x.dtype) @ p["w"]


def _random(p, x, k):
    kept = jax.random.bernoulli(jax.random.key(k), 0.9, x.shape)
    return jnp.where(kept, x, 0) @ p["w"]


def _cubic(p, x, k):
    """Three operands."""
    return (
        x
        + jnp.einsum(
            "ni,nj,kij->nk", x[:, :k], x[:, : k + 1], p["w"][:, :k, None] * p["v"][:, None, : k + 1]
        )
        @ p["w"][: len(p["w"])]
    )


def _linear(p, x, k):
    return jax.nn.gelu(x @ p["w"]) @ p["v"] + p["b"]


def _wide(p, x, k):
    """Like a transformer's block of two products, wide by broadcasting."""
    return x + jax.nn.gelu(x @ jnp.tile(p["w"], (1, k))) @ jnp.tile(p["v"], (k, 1))


def _normalised(p, x, k):
    y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x + (y * p["b"]) @ p["w"]


def _branch(p, x, k):
    return lax.cond(x[0, 0] > 0, lambda y: jnp.tanh(y) @ p["w"], lambda y: y * p["b"], x)


LAYERS: dict[str, Layer] = {
    f.__name__[1:]: f
    for f in (
        _rank,
        _outer,
        _matvec,
        _basis,
        _basis_summed,
        _tiny,
        _grouped,
        _complex,
        _fourier,
        _integer,
        _bytes,
        _mask,
        _attention,
        _scan,
        _scan_product,
        _gather,
        _scatter,
        _convolution,
        _pointwise,
        _depthwise,
        _padded,
        _cumulative,
        _broadcast,
        _pairs,
        _scaled,
        _sliced,
        _summed,
        _cast,
        _eight,
        _twice,
        _constant,
        _one_hot,
        _random,
        _cubic,
        _linear,
        _wide,
        _normalised,
        _branch,
    )
}


def odd_model(
    layers: Sequence[Odd], rows: int = 128, width: int = 64, dtype: str = "float32", depth: int = 1
) -> Workload:
    """A model of these layers; ``rows`` rows of ``width`` per sample, which are never split.

    Args:
        layers: In order.
        rows, width: Of what passes between layers.
        dtype: Of parameters and batch.
        depth: How often the layers follow each other.
    """
    layers = [*layers] * depth

    def init(key):
        return [
            {
                "w": jax.random.normal(key, (width, width), dtype),
                "v": jax.random.normal(key, (width, width), dtype),
                "b": jnp.ones((width,), dtype),
            }
            for _ in layers
        ]

    def loss(params, batch):
        x = batch.reshape(-1, width)
        for i, (layer, own) in enumerate(zip(layers, params, strict=True)):
            x = LAYERS[layer.name](own, x, min(layer.size, width)).astype(dtype)
            is_marked = i + 1 < len(layers) or i == 0
            x = checkpoint_name(x, "layer_boundary") if is_marked else x
        return jnp.mean(jnp.tanh(x.astype(jnp.float32)) ** 2)

    def batch(key, n):
        return jax.random.normal(key, (n, rows, width), dtype)

    return Workload(loss, init, batch, optax.sgd(0.1))


def parts_of(
    model: Workload, target: Target, choices: Iterable[StageChoice], size: int = 2
) -> Iterator[tuple[StageChoice, dict[str, tuple[int, int]] | CaptureError]]:
    """Per choice, every part of the cost of the whole model as one stage: its lower bound and what
    the compiler says; or why it does not compile."""
    backend = CompileBackend(model, store=Store(), target=target, num_devices=2)
    for choice in choices:
        try:
            graph = backend.traced(size).graph
        except CaptureError as error:  # no layer of it applies a parameter to data
            yield choice, error
            continue
        config = StageConfig(0, graph.num_layers, choice, size)
        least = BoundsBackend(backend).measure(config).least
        try:
            cost = backend.measure(config)
        except CaptureError as error:
            yield choice, error
            continue
        found = {
            name: (getattr(least, f"{name}_bytes"), getattr(cost, f"{name}_bytes"))
            for name in ("forward", "backward", "update", "optimizer", "summarize")
        }
        kept = [kept_bytes(graph, 0, graph.num_layers, choice, each) for each in (least, cost)]
        found["kept"] = kept[0], kept[1]
        for name in ("forward_work", "backward_work"):
            works = getattr(least, name), getattr(cost, name)
            if None not in works:
                found[name] = works[0].flops, works[1].flops
        yield choice, found
