"""What cannot be traced is refused word by word; what tracing exports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from traced_models import B, loss_workload

from capture.errors import TracingError
from capture.tracing import trace
from tests import tracing_models as models

ERRORS = [
    (
        lambda: trace(loss_workload(lambda p, b: jnp.mean(models.mark(b[0]) @ p["w"])), B),
        "the loss has 1 layer marks and none of them divides it; mark the boundaries in the model "
        "with "
        'jax.ad_checkpoint.checkpoint_name(x, "layer_boundary"), or leave the marks out or give '
        "num_layers (--num-layers), to cut it "
        "automatically. [trace-no-marks]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: jnp.mean(b[0])), B),
        "the loss has no layer marks, and no operation in it applies a parameter to data, so that "
        "there is nothing to cut; check that "
        "loss_fn(params, batch) uses its parameters. [trace-no-marks]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: b[0] @ p["w"]), B),
        "loss_fn returned float32[2,4]; return one scalar float, the mean over the examples of "
        "the batch. [trace-loss-scalar]",
    ),
    (
        lambda: trace(loss_workload(lambda p, b: (jnp.mean(b[0] @ p["w"]), b[1])), B),
        "loss_fn returned float32[], int32[2]; return one scalar float, the mean over the "
        "examples of the batch. [trace-loss-scalar]",
    ),
    (
        lambda: trace(
            loss_workload(
                lambda p, b: lax.cond(
                    b[0].sum() > 0, lambda: models.mark(p["w"]), lambda: p["w"]
                ).sum()
            ),
            B,
        ),
        "a 'layer_boundary' mark stands inside cond (scope 'top level'), which cannot be cut; "
        "move the mark out of the cond. "
        "[trace-mark-position]",
    ),
    (
        lambda: trace(models.repeated(num_blocks=1), B, 50),
        "num_layers=50 is not possible: a layer needs a product with a parameter, and the loss "
        "has 2; give 1 to 2, or mark the layers in "
        "the model. [trace-num-layers]",
    ),
    (
        lambda: trace(models.repeated(), B, 0),
        "num_layers=0 is not possible: a layer needs a product with a parameter, and the loss has "
        "12; give 1 to 12, or mark the layers "
        "in the model. [trace-num-layers]",
    ),
    (
        lambda: trace(models.repeated(), 0, 2),
        "microbatch_size=0 is no batch; give at least 1. [trace-microbatch]",
    ),
    (
        lambda: trace(
            models.workload(
                lambda p, b: p["w"].sum(),
                lambda key: models.normals(key, w=(2,)),
                lambda key, n: jnp.zeros((3,)),
            ),
            B,
            1,
        ),
        "batch(key, 2) returned float32[3], and batch(key, 4) nothing larger; return arrays that "
        "carry the examples in one dimension. "
        "[trace-batch]",
    ),
    (
        lambda: trace(models.repeated(), B, 2).slice(1, 3),
        "layers [1, 3) are no slice of a model of num_layers=2; give 0 <= first < stop <= 2. "
        "[trace-slice]",
    ),
    (
        lambda: trace(models.repeated(), B, 2).slice(0, 1)([], [], [], remat="some"),
        "remat='some' is no remat mode; give 'none', 'full' or 'dots'. [trace-remat]",
    ),
    (
        lambda: trace(models.routed(), B).batch_leaves(models.tokens_batch(jax.random.key(0), B)),
        "loss_fn(params, batch, key) takes a random key, and none is given; pass key=. [trace-key]",
    ),
]


@pytest.mark.parametrize(
    ("action", "message"), ERRORS, ids=[message.rsplit("[", 1)[1][:-1] for _, message in ERRORS]
)
def test_errors(action, message):
    with pytest.raises(TracingError) as caught:
        action()
    assert str(caught.value) == message


def test_mark_inside_a_custom_rule_is_refused():
    @jax.custom_vjp
    def rule(x):
        return models.mark(jnp.sin(x))

    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (g,))
    with pytest.raises(TracingError, match="move the mark out of the custom_vjp_call"):
        trace(loss_workload(lambda p, b: jnp.mean(rule(b[0] @ p["w"]))), B)
