"""What ``models/llama.py`` takes beside its sizes, against the model without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo_models import import_model, load

KEY = jax.random.key(0)


def made(options: str):
    """Loss, gradients and parameters of two examples."""
    workload = load("llama", f"num_layers=2&{options}")
    params = workload.init(KEY)
    batch = workload.batch(jax.random.key(1), 2)
    return params, *jax.jit(jax.value_and_grad(workload.loss_fn))(params, batch)


@pytest.mark.parametrize(
    "options", ["loss_chunks=4", "saved=query_proj", "saved=context&attention=flash"]
)
def test_what_is_kept_changes_no_gradient(options):
    _, loss, gradients = made(options)
    plain = "attention=flash" if "flash" in options else "seq_len=32"
    _, expected, expected_gradients = made(plain)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        gradients,
        expected_gradients,
    )


def test_only_what_is_named_is_kept():
    """A block of two layers keeps its input and what is named: counted in the backward pass."""

    def kept_names(saved: str) -> str:
        workload = load("llama", f"num_layers=2&saved={saved}")
        shapes = jax.eval_shape(workload.init, KEY)
        batch = jax.eval_shape(lambda: workload.batch(KEY, 2))
        return str(jax.make_jaxpr(jax.grad(workload.loss_fn))(shapes, batch)).count("dot_general")

    everything = "+".join(
        ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
    )
    least, one, most = (kept_names(names) for names in ("mlpwo", "query_proj", everything))
    assert least - one == 2 and most < one, "one product less to make again in each of two blocks"


def test_shapes_are_those_that_are_given():
    params, loss, _ = made(
        "width=48&num_heads=6&num_key_value_heads=3&head_dim=16&hidden=40&qk_norm=true"
        "&param_dtype=bfloat16"
    )
    block = params["block_0"]
    assert block["attention"]["query"]["kernel"].shape == (48, 3, 2, 16)
    assert block["attention"]["query_norm"]["scale"].shape == (16,)
    assert block["feed_forward"]["gate"]["kernel"].shape == (48, 40)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert np.isfinite(loss)


def test_normalised_queries_have_one_length():
    """With a scale of one, the mean square of a head's features is one."""
    workload = load("llama", "num_layers=2&qk_norm=true")
    params, batch = workload.init(KEY), workload.batch(KEY, 1)
    grown = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 3 if "query'" in jax.tree_util.keystr(path) else leaf, params
    )
    assert workload.loss_fn(params, batch) == pytest.approx(
        float(workload.loss_fn(grown, batch)), rel=1e-5
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 2}, "no count depth; choose of num_layers"),
        ({"saved": "scores"}, "no name in saved scores; choose of query_proj"),
        ({"num_heads": 3}, "num_heads is 3 and must be a multiple of num_key_value_heads, 2"),
        ({"seq_len": 30, "loss_chunks": 4}, "seq_len is 30 and must be a multiple of loss_chunks"),
        ({"param_dtype": "int8"}, "no param_dtype int8; choose of float32, bfloat16"),
        ({"loss_chunks": 0}, "loss_chunks=0 is no count"),
    ],
)
def test_bad_options_are_refused(options, said, monkeypatch):
    with pytest.raises(ValueError, match="workload-option") as error:
        import_model("llama", monkeypatch).llama(**options)
    assert said in str(error.value)
