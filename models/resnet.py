"""ResNet of basic blocks, the variant of 1026 layers that Harmony calls ResNet1K, and ResNet-101,
of which mu-TWO trains several.

Parameters as counted by ``jax.eval_shape``:

    size  blocks of a group     parameters
    tiny         1, 2, 1, 1         83,504
    34L          3, 4, 6, 3     21,797,672
    101L        3, 4, 23, 3     44,549,160
    1026L 128, 128, 128, 128   801,800,232

Two 3x3 convolutions around a shortcut, of 64, 128, 256 and 512 channels; every group but the first
halves height and width. Images 224 x 224, 1000 classes, SGD with momentum 0.9; tiny has 8 to 64
channels, images 32 x 32 and 8 classes. The stem, every block, the head and the loss are layers of
their own, as in the profile of Harmony's authors. 101L is the network of ``wide_resnet.py``, of
three convolutions in a block, with the channels of the original; there the stem and the head belong
to the first and the last block. What that module says of batch statistics holds here, too:
micro-batches of another size are another loss.

Source: He et al. 2016 (ResNet), Table 1; Goyal et al. 2017, section 5.1 (initialisation); Li et al.
2022 (Harmony), 5.1, whose profile says the groups. Departure: no running averages, the authors'
buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import flax.linen as nn
import jax
import optax
from wide_resnet import BatchNorm, WideResNet, WideResNetConfig, head, stem
from zoo import (
    Workload,
    check_options,
    config_of,
    image_workload,
    layer_boundary,
    optimizer_of,
)


@dataclass(frozen=True)
class ResNetConfig:
    """One size, with the options of the workload.

    Attributes:
        groups: Residual blocks of each group.
        channels: Of the stem and the first group; doubled for each further group.
        image_size: Height and width of an image in pixels.
        num_classes: Of the labels.
        learning_rate: Of SGD.
        dtype: Dtype of the computation; batch statistics are float32.
    """

    groups: tuple[int, ...]
    channels: int = 64
    image_size: int = 224
    num_classes: int = 1000
    learning_rate: float = 0.1
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": ResNetConfig((1, 2, 1, 1), 8, image_size=32, num_classes=8),
        "34L": ResNetConfig((3, 4, 6, 3)),
        "101L": WideResNetConfig(64, width=1, blocks=(3, 4, 23, 3), num_classes=1000),
        "1026L": ResNetConfig((128, 128, 128, 128)),
    }
)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut: [B, H, W, C'] -> [B, H/stride, W/stride, C].

    Attributes:
        config: Of the network.
        channels: C.
        stride: Of the first convolution.
    """

    config: ResNetConfig
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, strides = self.config, (self.stride, self.stride)
        conv = partial(
            nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal(), dtype=config.dtype
        )
        norm = partial(BatchNorm, config.dtype)
        y = nn.relu(norm(name="norm_in")(conv(self.channels, (3, 3), strides, name="conv_in")(x)))
        if x.shape[-1] != self.channels:
            x = norm(name="norm_shortcut")(
                conv(self.channels, (1, 1), strides, name="conv_shortcut")(x)
            )
        # A block starts as the identity (Goyal et al. 2017, section 5.1).
        y = norm(zero_scale=True, name="norm_out")(conv(self.channels, (3, 3), name="conv_out")(y))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, num_classes]."""

    config: ResNetConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config = self.config
        x = stem(images, config.channels, config.dtype)
        for group, num_blocks in enumerate(config.groups):
            for i in range(num_blocks):
                block = Block(
                    config,
                    config.channels * 2**group,
                    stride=2 if group and i == 0 else 1,
                    name=f"block_{group}_{i}",
                )
                x = block(layer_boundary(x))
        return layer_boundary(head(layer_boundary(x), config.num_classes, config.dtype))


def resnet(*, size: str = "tiny", dtype: str = "float32", injected: bool = False) -> Workload:
    """Classification of random images with SGD and momentum.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        injected: Whether the numbers of SGD are part of its state, so that an array of models may
            vary them.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size], and the loss about ``log(num_classes)`` at first. Its mean over micro-batches
        is not the loss of the batch (see the module).

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("resnet", SIZES, size)
    check_options(dtype, {})
    config = replace(base, dtype=dtype)
    network = WideResNet(config) if isinstance(config, WideResNetConfig) else ResNet(config)
    workload = image_workload(network, config.image_size, config.num_classes, config.learning_rate)
    optimizer = optimizer_of(optax.sgd, injected, learning_rate=config.learning_rate, momentum=0.9)
    return replace(workload, optimizer=optimizer)
