"""U-Net: a convolutional network whose long skip connections cross most layer boundaries.

Parameters as counted by ``jax.eval_shape``; ``levels`` are the resolutions, each with twice the
channels of the one above it:

    size   channels  levels  image  parameters
    tiny          8       3     32         29,688
    31M          64       5    512     31,037,698

The task is a class for every pixel, with Adam. One layer is one level on the way down or one on the
way up, 2 x levels - 1 in all; the lowest level is one layer and the head belongs to the last. The
output of a level on the way down is read by the layer that follows and again by the layer at the
same level on the way up, so it passes through every layer between: the lowest layer is spanned by
``levels - 1`` skip tensors.

Source: Ronneberger et al. 2015 (U-Net), Fig. 1. Departures: padded convolutions, and group
normalisation after each (of every example by itself, so the loss is a mean over examples).
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
    mean_cross_entropy,
    random_images,
)


@dataclass(frozen=True)
class UNetConfig:
    """One size, with the options of the workload.

    Attributes:
        channels: Of the highest level; doubled for each level below.
        num_levels: Resolutions.
        image_size: Height and width of an image in pixels, divisible by ``2 ** (num_levels - 1)``.
        num_classes: Of a pixel.
        num_groups: Of channels that are normalised together.
        learning_rate: Of Adam.
        dtype: Dtype of the computation.
    """

    channels: int
    num_levels: int
    image_size: int
    num_classes: int
    num_groups: int
    learning_rate: float = 1e-3
    dtype: str = "float32"


SIZES = MappingProxyType(
    {"tiny": UNetConfig(8, 3, 32, 8, num_groups=4), "31M": UNetConfig(64, 5, 512, 2, num_groups=32)}
)


class Level(nn.Module):
    """Two 3x3 convolutions, each normalised and rectified: [B, H, W, C'] -> [B, H, W, C]."""

    config: UNetConfig
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = nn.Conv(
                self.channels,
                (3, 3),
                use_bias=False,
                kernel_init=nn.initializers.he_normal(),
                dtype=self.config.dtype,
                name=f"conv_{i}",
            )(x)
            x = nn.relu(
                nn.GroupNorm(self.config.num_groups, dtype=self.config.dtype, name=f"norm_{i}")(x)
            )
        return x


def double_resolution(x: jax.Array) -> jax.Array:
    """Repeat every pixel in a 2x2 square: [B, H, W, C] -> [B, 2H, 2W, C]."""
    batch_size, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch_size, height, 2, width, 2, channels))
    return x.reshape(batch_size, 2 * height, 2 * width, channels)


class UNet(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, H, W, num_classes]."""

    config: UNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        x, skips = images.astype(config.dtype), []
        for level in range(config.num_levels):
            if level:
                skips.append(x)
                x = nn.max_pool(layer_boundary(x), (2, 2), (2, 2))
            x = Level(config, config.channels * 2**level, name=f"down_{level}")(x)
        for level in reversed(range(config.num_levels - 1)):
            channels = config.channels * 2**level
            x = nn.Conv(channels, (2, 2), dtype=config.dtype, name=f"up_conv_{level}")(
                double_resolution(layer_boundary(x))
            )
            x = Level(config, channels, name=f"up_{level}")(jnp.concatenate([skips[level], x], -1))
        return nn.Conv(
            config.num_classes,
            (1, 1),
            kernel_init=nn.initializers.normal(0.01),
            dtype=config.dtype,
            name="head",
        )(x)


def unet(*, size: str = "tiny", dtype: str = "float32") -> Workload:
    """Classification of the pixels of random images with Adam.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size, H, W], and the loss about ``log(num_classes)`` at first.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("unet", SIZES, size)
    check_options(dtype, {})
    config = replace(base, dtype=dtype)
    model = UNet(config)
    pixels = (config.image_size, config.image_size)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return mean_cross_entropy(forward(model, params, batch["images"]), batch["labels"])

    return Workload(
        loss_fn=loss_fn,
        init=initializer(model, (1, *pixels, 3), "float32"),
        batch=lambda key, batch_size: random_images(
            key, batch_size, config.image_size, config.num_classes, label_shape=pixels
        ),
        optimizer=optax.adam(config.learning_rate),
    )
