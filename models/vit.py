"""The vision transformer: an image as a sequence of patches, classified by a token of its own.

Parameters as counted by ``jax.eval_shape``:

    size  width  blocks  heads  parameters
    tiny     32       4      4      57,768
    22M     384      12      6  22,046,056
    60M     640      12     10  60,335,720
    86M     768      12     12  86,558,440

Patches of 16 x 16, images 224 x 224, 1000 classes, AdamW, whose hyperparameters are injected, so
that an array of models may vary them; tiny has patches of 8 x 8, images 32 x 32 and 8 classes.
Embedding, every block, the head and the loss are layers of their own: three more than blocks.

Source: Dosovitskiy et al. 2021 (ViT), section 3.1 and Table 1 (86M is ViT-Base); Touvron et al.
2021 (DeiT), Table 1 (22M). Purandare et al. 2023 (mu-TWO), Table 1, has one of 60M parameters and
does not say its widths; 60M is that of DeiT's and ViT's shape, 12 blocks with heads of 64 features,
which comes next to it. Departures: no dropout, and keys have no bias
(``zoo_transformer.SelfAttention``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from zoo import Workload, check_options, config_of, image_workload, layer_boundary
from zoo_transformer import INIT_STD, FeedForward, SelfAttention


@dataclass(frozen=True)
class VitConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks.
        num_heads: Attention heads; divides ``width``.
        patch_size: Height and width of a patch in pixels.
        image_size: Height and width of an image in pixels; a multiple of a patch's.
        num_classes: Of the labels.
        learning_rate: Of AdamW.
        dtype: Dtype of the computation.
    """

    width: int
    num_layers: int
    num_heads: int
    patch_size: int = 16
    image_size: int = 224
    num_classes: int = 1000
    learning_rate: float = 1e-3
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": VitConfig(32, 4, 4, patch_size=8, image_size=32, num_classes=8),
        "22M": VitConfig(384, 12, 6),
        "60M": VitConfig(640, 12, 10),
        "86M": VitConfig(768, 12, 12),
    }
)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it: [B, S, D] -> [B,
    S, D]."""

    config: VitConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        attention = SelfAttention(
            config.num_heads, INIT_STD, config.dtype, causal=False, name="attention"
        )
        feed_forward = FeedForward(4 * config.width, INIT_STD, config.dtype, name="feed_forward")
        x = x + attention(nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x))
        return x + feed_forward(nn.LayerNorm(dtype=config.dtype, name="feed_forward_norm")(x))


class Vit(nn.Module):
    """Images, [B, H, W, 3], to logits, [B, num_classes]."""

    config: VitConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        config, init = self.config, nn.initializers.normal(INIT_STD)
        patch = (config.patch_size, config.patch_size)
        x = nn.Conv(config.width, patch, patch, dtype=config.dtype, name="patches")(
            images.astype(config.dtype)
        )
        x = x.reshape(len(x), -1, config.width)
        token = self.param("class_token", nn.initializers.zeros, (config.width,))
        first = jnp.broadcast_to(token.astype(config.dtype), (len(x), 1, config.width))
        x = jnp.concatenate([first, x], axis=1)
        position = self.param("position_embedding", init, x.shape[1:])
        x = x + position.astype(config.dtype)
        for i in range(config.num_layers):
            x = Block(config, name=f"block_{i}")(layer_boundary(x))
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(layer_boundary(x)[:, 0])
        head_init = nn.initializers.normal(0.01)
        head = nn.Dense(config.num_classes, kernel_init=head_init, dtype=config.dtype, name="head")
        return layer_boundary(head(x))


def vit(*, size: str = "tiny", dtype: str = "float32", num_layers: int | None = None) -> Workload:
    """Classification of random images with AdamW.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        num_layers: Transformer blocks instead of the size's.

    Returns:
        The workload; a batch is ``{"images", "labels"}``, float32 [batch_size, H, W, 3] and int32
        [batch_size], and the loss about ``log(num_classes)`` at first.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("vit", SIZES, size)
    config = replace(
        base, dtype=dtype, num_layers=base.num_layers if num_layers is None else num_layers
    )
    check_options(dtype, {"num_layers": config.num_layers})
    workload = image_workload(
        Vit(config), config.image_size, config.num_classes, config.learning_rate
    )
    return replace(workload, optimizer=optax.inject_hyperparams(optax.adamw)(config.learning_rate))
