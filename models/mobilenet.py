"""MobileNetV3-Large: inverted residual blocks of depthwise convolutions, some of which weigh their
channels.

Parameters as counted by ``jax.eval_shape``:

    size  blocks  classes  parameters
    tiny       4        8       10,392
    5.4M      15     1000   5,483,032

A block widens its channels by a 1x1 convolution, filters each of them alone, weighs them by what
they are on average (squeeze and excite, in some), and narrows them again. Images 224 x 224, SGD
with momentum, whose hyperparameters are injected, so that an array of models may vary them; tiny
has images 32 x 32. The stem, every block, the last convolution with the pooling, the head and the
loss are layers of their own: four more than blocks. What ``wide_resnet.py`` says of batch
statistics holds here, too: micro-batches of another size are another loss.

Source: Howard et al. 2019 (MobileNetV3), Table 1; squeezed channels are a fourth of the widened
ones, rounded to a multiple of 8, as in torchvision's code, whose count of parameters it is.
Departures: no dropout, SGD in the place of RMSProp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import flax.linen as nn
import jax
import optax
from wide_resnet import BatchNorm
from zoo import Workload, check_options, config_of, image_workload, layer_boundary


class BlockConfig(NamedTuple):
    """One row of Table 1.

    Attributes:
        kernel: Height and width of the depthwise filter.
        hidden: Channels that it filters.
        channels: Of the output.
        squeeze: Whether it weighs channels.
        hard_swish: The activation; else ReLU.
        stride: Of the filter.
    """

    kernel: int
    hidden: int
    channels: int
    squeeze: bool
    hard_swish: bool
    stride: int


@dataclass(frozen=True)
class MobileNetConfig:
    """One size, with the options of the workload.

    Attributes:
        blocks: In their order.
        channels: Of the stem.
        last: Channels of the last convolution.
        hidden: Features before the classes.
        image_size: Height and width of an image in pixels.
        num_classes: Of the labels.
        learning_rate: Of SGD.
        dtype: Dtype of the computation; batch statistics are float32.
    """

    blocks: tuple[BlockConfig, ...]
    channels: int = 16
    last: int = 960
    hidden: int = 1280
    image_size: int = 224
    num_classes: int = 1000
    learning_rate: float = 0.1
    dtype: str = "float32"


def _blocks(*rows: tuple[int, int, int, bool, bool, int]) -> tuple[BlockConfig, ...]:
    return tuple(BlockConfig(*row) for row in rows)


SIZES = MappingProxyType(
    {
        "tiny": MobileNetConfig(
            _blocks(
                (3, 8, 8, False, False, 1),
                (3, 16, 12, False, False, 2),
                (5, 24, 12, True, False, 1),
                (3, 32, 16, True, True, 2),
            ),
            channels=8,
            last=64,
            hidden=64,
            image_size=32,
            num_classes=8,
        ),
        "5.4M": MobileNetConfig(
            _blocks(
                (3, 16, 16, False, False, 1),
                (3, 64, 24, False, False, 2),
                (3, 72, 24, False, False, 1),
                (5, 72, 40, True, False, 2),
                (5, 120, 40, True, False, 1),
                (5, 120, 40, True, False, 1),
                (3, 240, 80, False, True, 2),
                (3, 200, 80, False, True, 1),
                (3, 184, 80, False, True, 1),
                (3, 184, 80, False, True, 1),
                (3, 480, 112, True, True, 1),
                (3, 672, 112, True, True, 1),
                (5, 672, 160, True, True, 2),
                (5, 960, 160, True, True, 1),
                (5, 960, 160, True, True, 1),
            )
        ),
    }
)


def _conv_norm(
    x: jax.Array, channels: int, kernel: int, name: str, dtype: str, **options: object
) -> jax.Array:
    conv = nn.Conv(
        channels,
        (kernel, kernel),
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        dtype=dtype,
        name=f"conv_{name}",
        **options,
    )
    return BatchNorm(dtype, name=f"norm_{name}")(conv(x))


class Block(nn.Module):
    """Wide in its middle: [B, H, W, C'] -> [B, H/stride, W/stride, C]."""

    block: BlockConfig
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block, act = self.block, nn.hard_swish if self.block.hard_swish else nn.relu
        conv, y = partial(_conv_norm, dtype=self.dtype), x
        if block.hidden != x.shape[-1]:
            y = act(conv(y, block.hidden, 1, "in"))
        strides = (block.stride, block.stride)
        y = act(
            conv(
                y, block.hidden, block.kernel, "mid", strides=strides,
                feature_group_count=block.hidden,
            )
        )  # fmt: skip
        if block.squeeze:
            dense = partial(nn.Dense, dtype=self.dtype)
            weights = nn.relu(dense(_squeezed(block.hidden), name="squeeze")(y.mean((1, 2))))
            weights = nn.hard_sigmoid(dense(block.hidden, name="excite")(weights))
            y = y * weights[:, None, None, :]
        y = conv(y, block.channels, 1, "out")
        return x + y if x.shape == y.shape else y


def _squeezed(hidden: int) -> int:
    """A fourth, as a multiple of 8 that is at least nine tenths of it."""
    rounded = max(8, (hidden + 16) // 32 * 8)
    return rounded + 8 * (rounded < 0.9 * hidden / 4)


class MobileNet(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, num_classes]."""

    config: MobileNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        dtype, dense = config.dtype, partial(nn.Dense, dtype=config.dtype)
        x = images.astype(dtype)
        x = nn.hard_swish(_conv_norm(x, config.channels, 3, "stem", dtype, strides=(2, 2)))
        for i, block in enumerate(config.blocks):
            x = Block(block, dtype, name=f"block_{i}")(layer_boundary(x))
        x = nn.hard_swish(_conv_norm(layer_boundary(x), config.last, 1, "last", dtype))
        x = layer_boundary(x.mean((1, 2)))
        x = nn.hard_swish(dense(config.hidden, name="hidden")(x))
        head = dense(config.num_classes, kernel_init=nn.initializers.normal(0.01), name="head")
        return layer_boundary(head(x))


def mobilenet(*, size: str = "tiny", dtype: str = "float32") -> Workload:
    """Classification of random images with SGD and momentum.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size], and the loss about ``log(num_classes)`` at first. Its mean over micro-batches
        is not the loss of the batch (see the module).

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("mobilenet", SIZES, size)
    check_options(dtype, {})
    config = replace(base, dtype=dtype)
    workload = image_workload(
        MobileNet(config), config.image_size, config.num_classes, config.learning_rate
    )
    optimizer = optax.inject_hyperparams(optax.sgd)(config.learning_rate, momentum=0.9)
    return replace(workload, optimizer=optimizer)
