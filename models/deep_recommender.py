"""An autoencoder of what a user rated, which fills in what the user did not: NVIDIA's deep
recommender.

Parameters as counted by ``jax.eval_shape``:

    size   items  encoder            parameters
    tiny     256  32, 32, 16             19,856
    20M    17768  512, 512, 1024     19,788,136
    40M    17768  1024, 1024, 512    39,556,968

The decoder is the encoder the other way round, SELU between dense products, and the loss is the
squared error at the items that a user rated. A row of the first product is the embedding of an
item: of a user's ratings almost all are zero. SGD with momentum, whose hyperparameters are
injected, so that an array of models may vary them. Every dense product and the loss are layers of
their own.

Source: Kuchaiev and Ginsburg 2017 (Training Deep AutoEncoders for Collaborative Filtering), section
2; 20M is the encoder of its authors' example for the items of the Netflix prize. Purandare et al.
2023 (mu-TWO), Table 1, has one of 40M parameters and does not say its widths; 40M has twice the
width next to the items. Departures: no dropout of the code; the error is the mean over users of the
mean over what each rated, so that it is a mean over examples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from zoo import (
    PyTree,
    Workload,
    check_options,
    config_of,
    forward,
    initializer,
    layer_boundary,
)

#: Of the items, that a user rated: 100 million ratings of 480 thousand users for 17,768 items.
RATED = 0.012


@dataclass(frozen=True)
class RecommenderConfig:
    """One size, with the options of the workload.

    Attributes:
        num_items: That may be rated.
        widths: Of the encoder's products.
        learning_rate: Of SGD.
        dtype: Dtype of the computation.
    """

    num_items: int
    widths: tuple[int, ...]
    learning_rate: float = 5e-3
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": RecommenderConfig(256, (32, 32, 16), 0.05),
        "20M": RecommenderConfig(17768, (512, 512, 1024)),
        "40M": RecommenderConfig(17768, (1024, 1024, 512)),
    }
)


class Recommender(nn.Module):
    """Ratings, [B, items], zero where there is none, to ratings of all items, [B, items]."""

    config: RecommenderConfig

    @nn.compact
    def __call__(self, ratings: jax.Array) -> jax.Array:
        config, x = self.config, ratings.astype(self.config.dtype)
        inner = (*config.widths, *config.widths[-2::-1])
        for i, width in enumerate(inner):
            x = layer_boundary(nn.selu(nn.Dense(width, dtype=config.dtype, name=f"dense_{i}")(x)))
        out = nn.Dense(config.num_items, dtype=config.dtype, name=f"dense_{len(inner)}")
        return layer_boundary(out(x))


def random_ratings(key: jax.Array, batch_size: int, num_items: int) -> dict[str, jax.Array]:
    """``ratings`` of 1 to 5, float32 [batch_size, num_items], zero where there is none."""
    rated_key, rating_key = jax.random.split(key)
    shape = (batch_size, num_items)
    stars = jax.random.randint(rating_key, shape, 1, 6).astype(jnp.float32)
    return {"ratings": jnp.where(jax.random.bernoulli(rated_key, RATED, shape), stars, 0)}


def deep_recommender(*, size: str = "tiny", dtype: str = "float32") -> Workload:
    """Random ratings, made again from themselves with SGD and momentum.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.

    Returns:
        The workload; a batch is ``{"ratings"}``, float32 [batch_size, items]; the first loss is
        about 11, the mean square of a rating.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("deep_recommender", SIZES, size)
    check_options(dtype, {})
    config = replace(base, dtype=dtype)
    model = Recommender(config)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        ratings = batch["ratings"]
        rated = ratings > 0
        wrong = forward(model, params, ratings).astype(jnp.float32) - ratings
        squares = jnp.where(rated, jnp.square(wrong), 0).sum(-1)
        return (squares / jnp.maximum(rated.sum(-1), 1)).mean()

    return Workload(
        loss_fn=loss_fn,
        init=initializer(model, (1, config.num_items), "float32"),
        batch=lambda key, batch_size: random_ratings(key, batch_size, config.num_items),
        optimizer=optax.inject_hyperparams(optax.sgd)(config.learning_rate, momentum=0.9),
    )
