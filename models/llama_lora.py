"""Low-rank adapters on the LLaMA-like model: of every chosen product x W, the frozen W and the
trained A and B of ``x W + alpha / rank x A B``.

Parameters as counted by ``jax.eval_shape``, with rank 16 on queries, keys, values and outputs:

    size   width  blocks  heads  key-value heads  hidden           base    adapters
    tiny      64       8      4                2     192        427,072      57,344
    1B      2048      16     32                8    8192  1,498,482,688   3,407,872
    8B      4096      32     32                8   14336  8,030,261,248  13,631,488

``base`` is stored in the dtype of the computation, ``adapters`` in float32. AdamW trains the
adapters; its hyperparameters are injected, so that an array of models may vary them. The base is
the same in all of them, and no optimizer touches it: ``--shared 'base/*'``. The loss sees it as
``models/llama.py`` does, with its marks; 1B has the sizes of Llama 3.2 with an untied head.

Source: Hu et al. 2021 (LoRA), sections 4.1 and 4.2 (A is normal, B zero).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from llama import SIZES as LLAMA_SIZES
from llama import Llama, LlamaConfig
from zoo import (
    PyTree,
    Workload,
    check_options,
    config_of,
    forward,
    initializer,
    mean_cross_entropy,
    random_tokens,
)
from zoo_transformer import INIT_STD

SIZES = MappingProxyType(
    {
        "tiny": LLAMA_SIZES["tiny"],
        "1B": LlamaConfig(2048, 16, 32, 8, 8192, 3e-4),
        "8B": LLAMA_SIZES["8B"],
    }
)
#: Modules that get an adapter, and how many dimensions of their kernel are inputs.
ADAPTED = MappingProxyType({"query": 1, "key": 1, "value": 1, "out": 3})


def lora(
    *,
    size: str = "tiny",
    rank: int = 16,
    alpha: float = 32.0,
    dtype: str = "float32",
    num_layers: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> Workload:
    """Next-token prediction on random tokens; AdamW updates the adapters.

    Args:
        size: A key of ``SIZES``.
        rank: Columns of A.
        alpha: Adapters count alpha / rank.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation and the base.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Tokens of an example instead of the size's.
        vocab_size: Distinct tokens instead of the size's.

    Returns:
        The workload; parameters are ``{"base", "adapters"}``, a batch is ``{"tokens", "labels"}``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    given = {"num_layers": num_layers, "seq_len": seq_len, "vocab_size": vocab_size}
    config = replace(
        config_of("lora", SIZES, size),
        dtype=dtype,
        **{key: value for key, value in given.items() if value is not None},
    )
    check_options(dtype, {"rank": rank, **{key: getattr(config, key) for key in given}})
    model, scale = Llama(config), alpha / rank
    init_base = initializer(model, (1, config.seq_len), "int32")

    def init(key: jax.Array) -> PyTree:
        base = init_base(key)
        stored = jax.tree.map(lambda leaf: leaf.astype(dtype), base)
        return {"base": stored, "adapters": adapters(jax.random.fold_in(key, 1), base, rank)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        def adapted(module_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result, path = module_call(*args, **kwargs), context.module.path
            if context.method_name != "__call__" or path[-1:] == () or path[-1] not in ADAPTED:
                return result
            own = params["adapters"][path[0]][path[-1]]
            x = args[0].reshape(*args[0].shape[: -ADAPTED[path[-1]]], -1)
            low = x @ own["a"].astype(dtype) @ own["b"].astype(dtype)
            return result + scale * low.reshape(result.shape)

        with nn.intercept_methods(adapted):
            logits = forward(model, params["base"], batch["tokens"])
        return mean_cross_entropy(logits, batch["labels"])

    return Workload(
        loss_fn=loss_fn,
        init=init,
        batch=lambda key, count: random_tokens(key, count, config.seq_len, config.vocab_size),
        optimizer=optax.multi_transform(
            {
                "adapters": optax.inject_hyperparams(optax.adamw)(config.learning_rate),
                "base": optax.set_to_zero(),
            },
            {"adapters": "adapters", "base": "base"},
        ),
    )


def adapters(key: jax.Array, base: PyTree, rank: int) -> PyTree:
    """By block and product, A [inputs, rank] and B [rank, outputs]."""
    found: dict[str, dict[str, dict[str, jax.Array]]] = {}
    for block, modules in sorted(base.items()):
        for name, dims in ADAPTED.items() if "attention" in modules else ():
            kernel = modules["attention"][name]["kernel"]
            inputs, outputs = kernel.shape[:dims], kernel.shape[dims:]
            key, own = jax.random.split(key)
            a = INIT_STD * jax.random.normal(own, (_size(inputs), rank))
            found.setdefault(block, {})[name] = {"a": a, "b": jnp.zeros((rank, _size(outputs)))}
    return found


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
