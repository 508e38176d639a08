"""Wide-ResNet: a bottleneck ResNet-50 with wider channels, in the sizes of Alpa's benchmark suite
and of CAPTURE's Table I.

Parameters as counted by ``jax.eval_shape``; ``channels`` are those of the stem, ``width``
multiplies the middle convolution of a block:

    size   channels  width  blocks  parameters
    tiny          8      2       4         60,456
    250M        160      2      16    254,123,104
    500M        224      2      16    495,046,176
    1B          320      2      16  1,005,653,184
    2B          448      2      16  1,965,011,008   (1.965 billion)
    4B          640      2      16  4,000,937,344
    6.8B        320     16      16  6,727,679,424

Images 224 x 224, 1024 classes, float32, SGD with momentum 0.9; tiny has images 32 x 32 and 16
classes. One layer is one residual block (stem with the first, head and loss with the last), 16 in
all; ``layers=32`` cuts each block in two after its middle convolution, where the branch (half as
wide as the output) and the shortcut cross. The projection of a shortcut is in the first half, so
that the input of a block that halves the image, twice as large as its output, does not. In FLOPs
the halves are 22 : 8, of such a block 34 : 8.

**Batch statistics.** Batch normalisation uses the statistics of the batch it is given and keeps no
running averages. The loss of a micro-batch therefore depends on which examples it holds: it is
*not* a mean over examples, and the mean over micro-batches differs from the loss of the whole
batch, as in every pipeline that trains such a network. The library warns of it.

Source: Zagoruyko and Komodakis 2016 (Wide Residual Networks); He et al. 2016 (ResNet-50); Goyal et
al. 2017, section 5.1 (initialisation); Alpa 0.2.3, Wide-ResNet benchmark suite (sizes); CAPTURE,
Table I.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
from zoo import Workload, check_options, config_of, image_workload, layer_boundary


@dataclass(frozen=True)
class WideResNetConfig:
    """One size, with the options of the workload.

    Attributes:
        channels: Of the stem and the first group of blocks; doubled for each further group.
        width: Factor of the channels of a block's middle convolution.
        blocks: Residual blocks of each group; every group but the first halves height and width.
        image_size: Height and width of an image in pixels.
        num_classes: Of the labels.
        split_blocks: Whether each block is two layers.
        learning_rate: Of SGD.
        dtype: Dtype of the computation; batch statistics are float32.
    """

    channels: int
    width: int = 2
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image_size: int = 224
    num_classes: int = 1024
    split_blocks: bool = False
    learning_rate: float = 0.1
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": WideResNetConfig(8, blocks=(1, 2, 1), image_size=32, num_classes=16),
        "250M": WideResNetConfig(160),
        "500M": WideResNetConfig(224),
        "1B": WideResNetConfig(320),
        "2B": WideResNetConfig(448),
        "4B": WideResNetConfig(640),
        "6.8B": WideResNetConfig(320, width=16),
    }
)


class BatchNorm(nn.Module):
    """Normalise each channel by its mean and variance over the batch and the pixels: [B, H, W, C]
    -> [B, H, W, C]."""

    dtype: str
    zero_scale: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param(
            "scale",
            nn.initializers.zeros if self.zero_scale else nn.initializers.ones,
            (x.shape[-1],),
        )
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        centred = x.astype(jnp.float32) - x.mean((0, 1, 2), dtype=jnp.float32)
        variance = jnp.square(centred).mean((0, 1, 2))
        return (centred * (jax.lax.rsqrt(variance + 1e-5) * scale) + bias).astype(self.dtype)


class Block(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a shortcut: [B, H, W, C'] -> [B, H/stride, W/stride, 4
    C].

    Attributes:
        config: Of the network.
        channels: C.
        stride: Of the 3x3 convolution.
    """

    config: WideResNetConfig
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, strides = self.config, (self.stride, self.stride)
        conv = partial(
            nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal(), dtype=config.dtype
        )
        norm = partial(BatchNorm, config.dtype)
        y = nn.relu(norm(name="norm_in")(conv(self.channels, (1, 1), name="conv_in")(x)))
        y = nn.relu(
            norm(name="norm_mid")(
                conv(config.width * self.channels, (3, 3), strides, name="conv_mid")(y)
            )
        )
        if self.stride != 1 or x.shape[-1] != 4 * self.channels:
            x = norm(name="norm_shortcut")(
                conv(4 * self.channels, (1, 1), strides, name="conv_shortcut")(x)
            )
        if config.split_blocks:
            y = layer_boundary(y)
        # A block starts as the identity (Goyal et al. 2017, section 5.1).
        y = norm(zero_scale=True, name="norm_out")(
            conv(4 * self.channels, (1, 1), name="conv_out")(y)
        )
        return nn.relu(x + y)


def stem(images: jax.Array, channels: int, dtype: str) -> jax.Array:
    """Before the blocks of every residual network, inside of its module: [B, H, W, 3] -> [B, H/4,
    W/4, C]."""
    conv = nn.Conv(
        channels,
        (7, 7),
        (2, 2),
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        dtype=dtype,
        name="conv_stem",
    )
    x = nn.relu(BatchNorm(dtype, name="norm_stem")(conv(images.astype(dtype))))
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def head(x: jax.Array, num_classes: int, dtype: str) -> jax.Array:
    """Behind them: [B, H, W, C] -> [B, num_classes]."""
    dense = nn.Dense(
        num_classes, kernel_init=nn.initializers.normal(0.01), dtype=dtype, name="head"
    )
    return dense(x.mean((1, 2)))


class WideResNet(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, num_classes]."""

    config: WideResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        x = stem(images, config.channels, config.dtype)
        for group, num_blocks in enumerate(config.blocks):
            for i in range(num_blocks):
                block = Block(
                    config,
                    config.channels * 2**group,
                    stride=2 if group and i == 0 else 1,
                    name=f"block_{group}_{i}",
                )
                x = block(layer_boundary(x) if group or i else x)
        return head(x, config.num_classes, config.dtype)


def wide_resnet(
    *, size: str = "tiny", dtype: str = "float32", layers: int | None = None
) -> Workload:
    """Classification of random images with SGD and momentum.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        layers: As many as the size has blocks (16; tiny: 4; the default), or twice as many.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size], and the loss about ``log(num_classes)`` at first. Its mean over micro-batches
        is not the loss of the batch (see the module).

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("wide_resnet", SIZES, size)
    check_options(dtype, {})
    num_blocks = sum(base.blocks)
    if layers not in (None, num_blocks, 2 * num_blocks):
        raise ValueError(
            f"layers={layers!r} does not cut the {num_blocks} blocks of size={size!r}; "
            f"give {num_blocks} or {2 * num_blocks}. [workload-option]"
        )
    config = replace(base, dtype=dtype, split_blocks=layers == 2 * num_blocks)
    return image_workload(
        WideResNet(config), config.image_size, config.num_classes, config.learning_rate
    )
