"""What every model of the zoo returns, and the few things that all of them do.

The zoo knows nothing about parallelism and imports nothing of the library: a ``Workload`` is any
object with these four members, and a layer boundary is a JAX primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

PyTree = Any
Config = TypeVar("Config")


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, key)`` where the model
            draws random numbers: a float32 scalar, the mean over the examples of the batch.
        init: ``init(key)`` makes the float32 parameters.
        batch: ``batch(key, batch_size)`` makes random data; every leaf carries the examples in
            dimension 0.
        optimizer: An optax gradient transformation; its state is float32.
    """

    loss_fn: Callable[..., jax.Array]
    init: Callable[[jax.Array], PyTree]
    batch: Callable[[jax.Array, int], PyTree]
    optimizer: optax.GradientTransformation


def layer_boundary(x: jax.Array) -> jax.Array:
    """The same value, marked as the end of a layer; k marks cut a loss into k + 1 layers."""
    return checkpoint_name(x, "layer_boundary")


def initializer(
    model: nn.Module, shape: tuple[int, ...], dtype: str
) -> Callable[[jax.Array], PyTree]:
    """``init(key)`` of a Linen module that takes one array of this shape and dtype.

    The forward pass that finds the parameters is only traced. Eagerly, each shape of a parameter is
    compiled once for all layers.
    """

    def init(key: jax.Array) -> PyTree:
        if not hasattr(nn.Module, "lazy_init"):  # the flax of Alpa's environment
            return model.init(key, jnp.zeros(shape, dtype))["params"]
        return model.lazy_init(key, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))["params"]

    return init


def forward(
    model: nn.Module, params: PyTree, inputs: jax.Array, dropout_key: jax.Array | None = None
) -> Any:
    """What a Linen module computes from its inputs, with ``params`` as its only variables."""
    return model.apply(
        {"params": params}, inputs, rngs=None if dropout_key is None else {"dropout": dropout_key}
    )


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean of ``-log softmax(logits)[label]`` over all labels, computed in float32 whatever the
    dtype of the logits.

    Args:
        logits: [..., num_classes].
        labels: int32 [...].
    """
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def random_tokens(
    key: jax.Array, batch_size: int, seq_len: int, vocab_size: int
) -> dict[str, jax.Array]:
    """Uniformly random ``tokens`` and, shifted by one, the ``labels`` to predict: int32
    [batch_size, seq_len] each."""
    tokens = jax.random.randint(key, (batch_size, seq_len + 1), 0, vocab_size, jnp.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def next_token_workload(
    model: nn.Module, seq_len: int, vocab_size: int, learning_rate: float
) -> Workload:
    """Next-token prediction on random tokens with AdamW; the model takes int32 [B, S] and returns
    logits, [B, S, V]."""

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return mean_cross_entropy(forward(model, params, batch["tokens"]), batch["labels"])

    return Workload(
        loss_fn=loss_fn,
        init=initializer(model, (1, seq_len), "int32"),
        batch=lambda key, batch_size: random_tokens(key, batch_size, seq_len, vocab_size),
        optimizer=optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1),
    )


def image_workload(
    model: nn.Module, image_size: int, num_classes: int, learning_rate: float
) -> Workload:
    """Classification of random images with SGD and momentum; the model takes float32 [B, H, W, 3]
    and returns logits, [B, num_classes]."""

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return mean_cross_entropy(forward(model, params, batch["images"]), batch["labels"])

    return Workload(
        loss_fn=loss_fn,
        init=initializer(model, (1, image_size, image_size, 3), "float32"),
        batch=lambda key, batch_size: random_images(key, batch_size, image_size, num_classes),
        optimizer=optax.sgd(learning_rate, momentum=0.9),
    )


def random_images(
    key: jax.Array,
    batch_size: int,
    image_size: int,
    num_classes: int,
    label_shape: tuple[int, ...] = (),
) -> dict[str, jax.Array]:
    """Normal ``images``, float32 [batch_size, image_size, image_size, 3], and uniform ``labels``,
    int32 [batch_size, *label_shape]."""
    image_key, label_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (batch_size, *label_shape), 0, num_classes, jnp.int32)
    return {
        "images": jax.random.normal(image_key, (batch_size, image_size, image_size, 3)),
        "labels": labels,
    }


def optimizer_of(
    make: Callable[..., optax.GradientTransformation], injected: bool, **numbers: float
) -> optax.GradientTransformation:
    """An optax transformation; if injected, its numbers are part of its state, and models that are
    trained together may differ in them."""
    return (optax.inject_hyperparams(make) if injected else make)(**numbers)


def config_of(model: str, sizes: Mapping[str, Config], size: str) -> Config:
    """The configuration of a size.

    Raises:
        ValueError: ``[workload-size]`` naming the sizes there are.

    Example:
        >>> config_of("gpt", {"tiny": 8, "2.6B": 32}, "3B")
        Traceback (most recent call last):
        ValueError: size='3B' is no size of gpt; choose one of tiny, 2.6B. [workload-size]
    """
    if size not in sizes:
        raise ValueError(
            f"size={size!r} is no size of {model}; choose one of {', '.join(sizes)}. "
            "[workload-size]"
        )
    return sizes[size]


def check_options(
    dtype: str,
    at_least_one: Mapping[str, int],
    dropout: float = 0.0,
    attention: str = "dot_product",
) -> None:
    """Refuse options that no model can have, all of them at once.

    Args:
        dtype: Dtype of the computation. float16 is for devices without bfloat16 units; the zoo
            scales no loss, which training in it needs.
        at_least_one: Name and value of each option that counts something.
        dropout: Probability of zeroing an activation.
        attention: ``"dot_product"``, or ``"flash"``, which never has the attention weights that
            dropout would be applied to.

    Raises:
        ValueError: ``[workload-option]``, one line for each bad option.
    """
    violations = []
    if dtype not in ("float32", "bfloat16", "float16"):
        meant = {
            "fp32": "float32",
            "f32": "float32",
            "bf16": "bfloat16",
            "fp16": "float16",
            "f16": "float16",
        }.get(dtype.lower())
        choose = f"write dtype={meant}" if meant else "choose float32, bfloat16 or float16"
        violations.append(f"dtype={dtype!r} is no dtype to compute in; {choose}. [workload-option]")
    for name, value in at_least_one.items():
        if not isinstance(value, int) or value < 1:
            violations.append(
                f"{name}={value!r} is no count; give a whole number, 1 or more. [workload-option]"
            )
    if not 0.0 <= dropout < 1.0:
        violations.append(
            f"dropout={dropout!r} is no probability below 1; give 0 <= dropout < 1. "
            "[workload-option]"
        )
    if attention not in ("dot_product", "flash"):
        violations.append(
            f"attention={attention!r} is no attention; choose dot_product or flash. "
            "[workload-option]"
        )
    if attention == "flash" and dropout:
        violations.append(
            f"attention='flash' has no weights to drop (dropout={dropout!r}); give dropout=0. "
            "[workload-option]"
        )
    if violations:
        raise ValueError("\n".join(violations))
