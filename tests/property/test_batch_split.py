"""Losses that split over micro-batches, and losses that do not."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest

from capture.machine.cluster import Cluster
from capture.model.workload import Workload, WorkloadProtocol, WorkloadSpec
from capture.tracing.batch_split import SplitCheck, check_split, loss_warnings, split_warning
from profiling_runs.collect import profile
from profiling_runs.question import ProfileQuestion

FEATURES, CLASSES = 6, 5


@cache
def zoo(name: str) -> WorkloadProtocol:
    return WorkloadSpec.parse(f"models/{name}").load()


def toy(loss_fn) -> Workload:
    """Data x [n, 6], labels [n], weights [n] in (0, 1); parameters [6, 5]."""

    def batch(key, n):
        x_key, y_key, w_key = jax.random.split(key, 3)
        labels = jax.random.randint(y_key, (n,), 0, CLASSES)
        return {
            "x": jax.random.normal(x_key, (n, FEATURES)),
            "labels": labels,
            "weights": jax.random.uniform(w_key, (n,)),
        }

    return Workload(
        loss_fn, lambda key: jax.random.normal(key, (FEATURES, CLASSES)), batch, optax.sgd(0.1)
    )


def losses(w, batch):
    """Cross-entropy of each example, [n]."""
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["labels"])


def as_read(workload, size=4) -> SplitCheck:
    check = check_split(workload, size, numeric_limit_parameters=0)
    assert check.method == "read"
    return check


def numeric(workload, size=4) -> SplitCheck:
    check = check_split(workload, size)
    assert check.method == "numeric"
    return check


@pytest.mark.parametrize(
    "name",
    [
        "gpt.py:gpt?num_layers=2",
        pytest.param("moe.py:moe", marks=pytest.mark.slow),
        pytest.param("unet.py:unet", marks=pytest.mark.slow),
    ],
)
def test_the_zoo_splits(name):
    check = numeric(zoo(name))
    assert check.splits is not False, check.reason
    assert split_warning(check) is None and split_warning(as_read(zoo(name))) is None


def test_batch_statistics_do_not_split():
    check = numeric(zoo("wide_resnet.py:wide_resnet"))
    assert check.splits is False
    assert "and the mean over its halves" in check.reason
    assert split_warning(check).endswith("[workload-split]")


@pytest.mark.parametrize(
    "name",
    [
        "moe.py:moe?size=380M&num_layers=2",  # expert groups of two examples
        "gpt.py:gpt?dropout=0.1&num_layers=2",
    ],
)
def test_a_large_model_or_one_with_dropout_is_only_read(name):
    assert check_split(zoo(name), 4) == SplitCheck(None, "read", "")


def test_a_batch_that_the_model_refuses_is_undecided():
    check = check_split(
        zoo("moe.py:moe?size=380M&num_layers=2"), 3
    )  # an example is half an expert group
    assert check.splits is None
    assert "cannot be traced for 3 and 6 examples" in check.reason
    assert split_warning(check).startswith(
        "Whether the loss splits over micro-batches was not decided: "
    )


def per_layer_scan(w, batch):
    def layer(x, shift):
        return jax.nn.relu(x + shift), (x**2).mean()

    x, penalties = jax.lax.scan(layer, batch["x"], jnp.arange(3.0))
    return losses(w, {**batch, "x": x}).mean() + penalties.sum()


def summed_in_scan(w, batch):
    def chunk(total, scale):
        return total + losses(w * scale, batch).sum(), None

    return jax.lax.scan(chunk, 0.0, jnp.arange(3.0))[0] / batch["x"].shape[0]


def normalized_in_scan(w, batch):
    def layer(x, scale):
        return scale * x / jnp.sqrt((x**2).mean(0)), None

    return losses(w, {**batch, "x": jax.lax.scan(layer, batch["x"], jnp.ones(3))[0]}).mean()


def batch_norm(w, batch):
    x = batch["x"]
    return losses(w, {**batch, "x": (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)}).mean()


def own_position(index):
    def loss(w, batch):
        return -jax.nn.log_softmax(batch["x"] @ w)[
            index(batch["x"].shape[0]), batch["labels"]
        ].mean()

    return loss


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

SPLIT = {
    "mean": lambda w, b: losses(w, b).mean(),
    "sum over number": lambda w, b: losses(w, b).sum() / b["x"].shape[0],
    "each over number": lambda w, b: (losses(w, b) / b["x"].shape[0]).sum(),
    "product over number": lambda w, b: losses(w, b) @ b["weights"] / b["x"].shape[0],
    "over counted ones": lambda w, b: losses(w, b).sum() / jnp.ones_like(b["weights"]).sum(),
    "weight per example": lambda w, b: (losses(w, b) * b["weights"]).mean(),
    "penalty": lambda w, b: losses(w, b).mean() + 0.1 * (w**2).sum(),
    "penalty on each": lambda w, b: (losses(w, b) + 0.1 * (w**2).sum()).mean(),
    "mean added to each": lambda w, b: (losses(w, b) + 0.1 * (b["x"] ** 2).mean()).mean(),
    "vmap": lambda w, b: jax.vmap(lambda x: jax.nn.logsumexp(x @ w))(b["x"]).mean(),
    "batch last": lambda w, b: jnp.tanh(w.T @ b["x"].T).max(0).mean(),
    "one example at a time": lambda w, b: jax.lax.map(
        lambda x: jnp.sin(x @ w).sum(), b["x"]
    ).mean(),
    "arange": own_position(jnp.arange),
    "constant arange": own_position(lambda n: jnp.asarray(list(range(n)))),
    "scan over layers": per_layer_scan,
    "sum in a scan": summed_in_scan,
    "custom derivative": lambda w, b: doubled(losses(w, b)).mean(),
    "remat": lambda w, b: jax.checkpoint(losses)(w, b).mean(),
    "loop": lambda w, b: losses(
        w, {**b, "x": jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, b["x"])}
    ).mean(),
    "cond": lambda w, b: jax.lax.cond(
        w.sum() > 0, lambda: losses(w, b).mean(), lambda: 2 * losses(w, b).mean()
    ),
    "sort of features": lambda w, b: jnp.sort(b["x"] @ w, -1)[:, 1:].cumsum(-1).mean(),
}
NO_SPLIT = {
    "sum": lambda w, b: losses(w, b).sum(),
    "weighted mean": lambda w, b: (losses(w, b) * b["weights"]).sum() / b["weights"].sum(),
    "masked mean": lambda w, b: (
        jnp.where(b["weights"] > 0.3, losses(w, b), 0.0).sum() / (b["weights"] > 0.3).sum()
    ),
    "max": lambda w, b: losses(w, b).max(),
    "root of mean": lambda w, b: jnp.sqrt((losses(w, b) ** 2).mean()),
    "variance": lambda w, b: losses(w, b).var(),
    "unbiased": lambda w, b: losses(w, b).sum() / (b["x"].shape[0] - 1),
    "sum and mean": lambda w, b: losses(w, b).mean() + 0.1 * (b["x"] ** 2).sum(),
    "batch norm": batch_norm,
    "batch norm in a scan": normalized_in_scan,
    "product of means": lambda w, b: losses(w, b).mean() * b["weights"].mean(),
    "contrastive": lambda w, b: jax.nn.logsumexp((b["x"] @ w) @ (b["x"] @ w).T, axis=-1).mean(),
    "distances": lambda w, b: jnp.abs(losses(w, b)[:, None] - losses(w, b)[None, :]).mean(),
    "top examples": lambda w, b: jax.lax.top_k(losses(w, b), 2)[0].mean(),
    "cumulative": lambda w, b: jnp.cumsum(losses(w, b)).mean(),
    "branch on data": lambda w, b: jax.lax.cond(
        b["x"].sum() > 0, lambda: losses(w, b).mean(), lambda: 2 * losses(w, b).mean()
    ),
}
#: Of which a number tells that they are no mean, without a run.
AS_READ = ("sum", "weighted mean", "masked mean", "max", "top examples")
#: Whose halves differ by less than choices of a last bit may.
AS_ROUNDING = ("root of mean",)


@pytest.mark.parametrize("name", SPLIT)
def test_losses_that_split(name):
    task = toy(SPLIT[name])
    assert as_read(task).splits is None
    check = numeric(task)
    assert check.splits is True, check.reason
    assert split_warning(check) is None


@pytest.mark.parametrize("name", NO_SPLIT)
def test_losses_that_do_not_split(name):
    task = toy(NO_SPLIT[name])
    assert as_read(task).splits is (False if name in AS_READ else None)
    assert numeric(task).splits is (None if name in AS_ROUNDING else False)


def test_a_warning_says_what_the_loss_is():
    said = {name: split_warning(numeric(toy(NO_SPLIT[name]))) for name in ("sum", "unbiased")}
    whole = "The loss of a batch is not the mean of the losses of its micro-batches, so a step "
    whole += "depends on the number of micro-batches: "
    assert (
        said["sum"] == f"{whole}The loss is a sum over the examples, not a mean. [workload-split]"
    )
    assert said["unbiased"].startswith(f"{whole}The loss of 4 examples is ")
    assert split_warning(as_read(toy(NO_SPLIT["weighted mean"]))) == (
        f"{whole}No number in the program of the loss depends on how many examples there are: it "
        "is a sum over them or a weighted mean, not their mean. [workload-split]"
    )


def test_a_loss_with_a_random_key_is_read():
    def noisy(w, batch, key):
        return (losses(w, batch) * jax.random.bernoulli(key, 0.5, batch["weights"].shape)).mean()

    def summed(w, batch, key):
        return (losses(w, batch) * jax.random.bernoulli(key, 0.5, batch["weights"].shape)).sum()

    assert check_split(toy(noisy), 4) == SplitCheck(None, "read", "")
    assert check_split(toy(summed), 4).splits is False


@pytest.mark.parametrize(
    ("name", "scales"),
    [("scaled", True), ("added", False), ("clipped", False), ("none", None)],
)
def test_gradients_of_a_rule_of_its_own_are_proportional_or_said_not_to_be(name, scales):
    rule = {
        "scaled": lambda given: -2 * given,
        "added": lambda given: given + 0.1,
        "clipped": lambda given: jnp.clip(given, -1e-3, 1e-3),
    }.get(name)
    ruled = jax.custom_vjp(jnp.tanh)
    ruled.defvjp(lambda x: (jnp.tanh(x), None), lambda _, given: (rule(given),))
    call = jnp.tanh if rule is None else jax.checkpoint(ruled)

    def loss(params, x):
        return jnp.mean(call(x @ params["w"]) ** 2) + jnp.mean(params["b"])

    def init(key):
        return {"w": jnp.ones((8, 4)), "b": jnp.ones(3)}

    workload = Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 8)), optax.sgd(0.1))
    check = check_split(workload, 4)
    assert (check.splits, check.scales) == (True, scales)
    said = [warning[-19:] for warning in loss_warnings(check)]
    assert said == ["[workload-gradient]"] * (scales is False)
    assert loss_warnings(check, "examples of a device") == (), "backward passes begin with 1"


def test_a_profile_warns():
    def init(key):
        return {
            "a": jax.random.normal(key, (FEATURES, FEATURES)),
            "b": jax.random.normal(key, (FEATURES, CLASSES)),
        }

    def loss(params, batch):
        x = jax.ad_checkpoint.checkpoint_name(batch["x"] @ params["a"], "layer_boundary")
        return losses(params["b"], {**batch, "x": x}).sum()

    task = Workload(loss, init, toy(None).batch, optax.sgd(0.1))
    result = profile(
        ProfileQuestion(task, Cluster.parse("1x1"), microbatch_size=2, calibration_plans=0)
    )
    assert len(result.warnings) == 1
    assert "a sum over the examples, not a mean. [workload-split]" in result.warnings[0]
