"""VGG, and the variant of 416 layers on which memory of GPUs is made virtual.

Parameters as counted by ``jax.eval_shape``:

    size  convolutions of a group  parameters
    tiny        1, 2, 1, 1, 1           67,176
    16L         2, 2, 3, 3, 3      138,357,544
    416L   82, 82, 83, 83, 83      577,894,184

3x3 convolutions of 64, 128, 256, 512 and 512 channels, each with a bias and ReLU, no normalisation;
every group ends in a pooling that halves height and width. Images 224 x 224, 1000 classes, SGD with
momentum 0.9; tiny has 8 to 64 channels, images 32 x 32 and 8 classes. Every convolution, every
dense product and the loss are layers of their own, as in the profile of Harmony's authors: one more
than the name says.

Source: Simonyan and Zisserman 2015 (VGG), Table 1; Rhu et al. 2016 (vDNN), 4.3 (416 layers: a
hundred more, a hundred more, ... of the same groups); Li et al. 2022 (Harmony), 5.1, whose profile
says the groups. Departure: no dropout between the dense products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
from zoo import Workload, check_options, config_of, image_workload, layer_boundary


@dataclass(frozen=True)
class VggConfig:
    """One size, with the options of the workload.

    Attributes:
        groups: Convolutions of each group.
        channels: Of the first group; doubled for each further one, up to eight times as many.
        hidden: Features of the dense products before the head.
        image_size: Height and width of an image in pixels; a multiple of 32.
        num_classes: Of the labels.
        learning_rate: Of SGD.
        dtype: Dtype of the computation.
    """

    groups: tuple[int, ...]
    channels: int = 64
    hidden: int = 4096
    image_size: int = 224
    num_classes: int = 1000
    learning_rate: float = 0.01
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": VggConfig((1, 2, 1, 1, 1), 8, 32, image_size=32, num_classes=8),
        "16L": VggConfig((2, 2, 3, 3, 3)),
        "416L": VggConfig((82, 82, 83, 83, 83)),
    }
)


class Vgg(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, num_classes]."""

    config: VggConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config, x = self.config, images.astype(self.config.dtype)
        for group, num_layers in enumerate(config.groups):
            for i in range(num_layers):
                channels = config.channels * min(2**group, 8)
                x = nn.relu(
                    nn.Conv(
                        channels,
                        (3, 3),
                        kernel_init=nn.initializers.he_normal(),
                        dtype=config.dtype,
                        name=f"conv_{group}_{i}",
                    )(layer_boundary(x) if group or i else x)
                )
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = layer_boundary(x).reshape(len(x), -1)
        for name in ("dense_0", "dense_1"):
            dense = nn.Dense(
                config.hidden,
                kernel_init=nn.initializers.he_normal(),
                dtype=config.dtype,
                name=name,
            )
            x = layer_boundary(nn.relu(dense(x)))
        head = nn.Dense(
            config.num_classes,
            kernel_init=nn.initializers.normal(0.01),
            dtype=config.dtype,
            name="head",
        )
        return layer_boundary(head(x))


def vgg(*, size: str = "tiny", dtype: str = "float32") -> Workload:
    """Classification of random images with SGD and momentum.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size], and the loss about ``log(num_classes)`` at first.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("vgg", SIZES, size)
    check_options(dtype, {})
    config = replace(base, dtype=dtype)
    return image_workload(Vgg(config), config.image_size, config.num_classes, config.learning_rate)
