"""GPT-2 of Hugging Face Transformers, whose last version with models in Flax is 4.57.

capture plan docs/examples/hugging_face.py:gpt2 --cluster 1x2 --global-batch 16
capture estimate docs/examples/hugging_face.py:gpt2 --target h100
"""

import jax
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from capture import Workload


def gpt2(width: int = 32, layers: int = 2, heads: int = 2, length: int = 16) -> Workload:
    config = GPT2Config(
        vocab_size=128, n_positions=length, n_embd=width, n_layer=layers, n_head=heads
    )
    # _do_init=False: nothing is allocated and nothing downloaded. `init` may return the parameters
    # of a checkpoint instead: FlaxGPT2LMHeadModel.from_pretrained("...", _do_init=False) returns
    # the model and those.
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, length), _do_init=False)

    def init(key):
        return model.init_weights(key, (1, length))

    def loss_fn(params, batch, key):
        tokens = batch["tokens"]
        logits = model(tokens, params=params, dropout_rng=key, train=True).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def batch(key, batch_size):
        return {"tokens": jax.random.randint(key, (batch_size, length), 0, config.vocab_size)}

    return Workload(loss_fn, init, batch, optax.adamw(1e-3))
