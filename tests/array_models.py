"""A tiny array of models, and each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

from capture.machine.cluster import Cluster
from capture.model.workload import Workload
from capture.plan.array import ArrayPlan, Member
from capture.runtime.array_state import ArrayState
from capture.runtime.asked import Training
from capture.runtime.meter import Measurement, measure_step
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.train_step import Fed
from capture.runtime.training import follow

VOCABULARY, SEQUENCE, WIDTH = 16, 8, 8
BATCH = 2


def tiny_gpt(num_blocks: int = 4, tied: bool = False, dead: bool = False) -> Workload:
    """Attention and a product per block; momentum, whose rate and decay can be set per model."""

    def init(key):
        keys = jax.random.split(key, num_blocks + 3)
        shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
        blocks = [
            {
                name: 0.3 * jax.random.normal(jax.random.fold_in(k, n), shape)
                for n, (name, shape) in enumerate(shapes.items())
            }
            for k in keys[3:]
        ]
        head = {} if tied else {"head": 0.3 * jax.random.normal(keys[2], (WIDTH, VOCABULARY))}
        unread = {"unread": jnp.ones(3)} if dead else {}
        table = 0.3 * jax.random.normal(keys[0], (VOCABULARY, WIDTH))
        return {"table": table, "blocks": blocks, **head, **unread}

    def block(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, v)
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss_fn(params, batch):
        x = params["table"][batch["tokens"]]
        for i, p in enumerate(params["blocks"]):
            x = block(p, x if i == 0 else checkpoint_name(x, "layer_boundary"))
        logits = x @ (params["table"].T if tied else params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batch(key, size):
        tokens = jax.random.randint(key, (size, SEQUENCE + 1), 0, VOCABULARY)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    return Workload(loss_fn, init, batch, optimizer)


def tiny_lora(noisy: bool = False) -> Workload:
    """A base that stays, and adapters of its products, trained with momentum; if noisy, with
    dropout, and all their gradients cut to one norm."""
    num_blocks = 2

    def init(key):
        keys = iter(jax.random.split(key, 3 * num_blocks + 2))

        def draw(*shape):
            return 0.4 * jax.random.normal(next(keys), shape)

        base = {
            "table": draw(VOCABULARY, WIDTH),
            "blocks": [draw(WIDTH, WIDTH) for _ in range(num_blocks)],
            "head": draw(WIDTH, VOCABULARY),
        }
        own = [{"a": draw(WIDTH, 2), "b": draw(2, WIDTH)} for _ in range(num_blocks)]
        return {"base": base, "own": own}

    def loss_fn(params, batch, key=None):
        base = params["base"]
        x = base["table"][batch["tokens"]]
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
        for i, (w, own) in enumerate(zip(base["blocks"], params["own"], strict=True)):
            x = x if i == 0 else checkpoint_name(x, "layer_boundary")
            x = x + jax.nn.gelu(x @ w + x @ own["a"] @ own["b"])
        logits = x @ base["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    momentum = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    own = optax.chain(optax.clip_by_global_norm(0.05), momentum) if noisy else momentum
    optimizer = optax.multi_transform(
        {"own": own, "base": optax.set_to_zero()}, {"own": "own", "base": "base"}
    )
    quiet = lambda params, batch: loss_fn(params, batch)  # noqa: E731
    noisily = lambda params, batch, key: loss_fn(params, batch, key)  # noqa: E731
    return Workload(noisily if noisy else quiet, init, tiny_gpt(0).batch, optimizer)


def mlp() -> Workload:
    """Another model, of other numbers of layers and leaves of a batch, and another optimizer."""

    def init(key):
        return {
            "a": jax.random.normal(key, (4, 6)),
            "b": 0.4 * jax.random.normal(key, (6, 6)),
            "c": jax.random.normal(key, (6, 1)),
        }

    def loss_fn(params, batch, key):
        hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden, 0)
        return jnp.mean(batch["weight"][:, None] * (hidden @ params["c"] - batch["y"]) ** 2)

    def batch(key, size):
        x = jax.random.normal(key, (size, 4))
        return {"weight": jnp.abs(x[:, 0]), "x": x, "y": x.sum(1, keepdims=True)}

    return Workload(loss_fn, init, batch, optax.inject_hyperparams(optax.adam)(learning_rate=0.01))


MEMBERS = tuple(
    Member(seed, {"learning_rate": rate, "momentum": decay})
    for seed, (rate, decay) in enumerate([(0.3, 0.9), (0.1, 0.8), (0.03, 0.95), (0.01, 0.0)])
)


def array_plan(**changes) -> ArrayPlan:
    """Two sub-arrays of two models."""
    plain = {
        "cluster": Cluster((1,), "cpu"),
        "batch_size": BATCH,
        "models": MEMBERS,
        "partition": ((0, 1), (2, 3)),
        "order": "multiplexed",
        "bundle_bytes": 2048,
    }
    return ArrayPlan(**plain | changes)


def batches_of(workload: Workload, num_steps: int, num_models: int = 4) -> list[list]:
    """One batch per model."""
    return [
        [workload.batch(jax.random.key(100 * t + m), BATCH) for m in range(num_models)]
        for t in range(num_steps)
    ]


@cache
def alone(num_steps: int = 3, **options) -> list[tuple[list[float], dict]]:
    """Losses and parameters of each model, trained by itself with plain JAX."""
    workload = tiny_gpt(**options)

    @jax.jit
    def update(params, state, batch):
        loss, grads = jax.value_and_grad(workload.loss_fn)(params, batch)
        updates, state = workload.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    found = []
    for m, member in enumerate(MEMBERS):
        params = workload.init(jax.random.key(member.seed))
        state = workload.optimizer.init(params)
        values = {name: jnp.float32(value) for name, value in member.hyperparameters.items()}
        state = state._replace(hyperparams={**state.hyperparams, **values})
        losses = []
        for batches in batches_of(workload, num_steps):
            params, state, loss = update(params, state, batches[m])
            losses.append(float(loss))
        found.append((losses, jax.tree.map(np.asarray, params)))
    return found


def checked(training: ArrayTraining, num_steps: int = 2) -> dict[str, Any]:
    """Return the document of a training under the meters, compared with each model alone."""
    return follow(training, training.plan, Training(num_steps=num_steps, check=True))


def measured(
    training: ArrayTraining, batches: Sequence[Any]
) -> tuple[Measurement, ArrayState, list[list[float]]]:
    """Train with the ledger compared with live arrays before every instruction; what was measured of
    all, the last state and the losses."""
    state, found, losses = training.init(), None, []
    fed = training.fed(batches, 0, 0)
    for execution in training.executions(len(batches)):
        batch, key = next(fed) if execution.reads_batch else Fed()
        one = measure_step(execution, state, batch, key, strict=True)
        state, losses = one.state, losses + ([] if one.loss is None else [one.loss])
        found = one if found is None else found.then(one)
    return found, state, losses
