"""Programs and feeds by JAX's private parts and by its public ones are the same step, and what the
public ones refuse is still refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pipeline_models import mlp, pipeline, tied

from capture.errors import ExecutionError
from capture.runtime import fast_paths
from capture.runtime.pipeline import pipeshard
from capture.runtime.state import PipelineState

SHARDING = NamedSharding(
    Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), PartitionSpec("a")
)


def compiled(function, *structs):
    return jax.jit(function, keep_unused=True).lower(*structs).compile()


def without_private_parts(monkeypatch):
    monkeypatch.setattr(fast_paths, "_fast_call", lambda compiled: None)
    monkeypatch.setattr(fast_paths, "_batched_device_put", None)


def steps(num_steps: int = 3):
    """Tied weights, dropout keys, and stages of one, two and four devices."""
    workload, plan = tied(), pipeline((1, 2, 1), ((1, 1), (2, 1), (2, 2)))
    step = pipeshard(workload, plan)
    batch = workload.batch(jax.random.key(1), plan.global_batch_size)
    state, losses = step.init(jax.random.key(0)), []
    for i in range(num_steps):
        state, metrics = step(state, batch, jax.random.key(i))
        losses.append(metrics.loss)
    return losses, jax.tree.leaves((step.params(state), step.optimizer_state(state)))


def test_this_jax_has_the_private_parts():
    """Else nothing here would be tested, and steps would be slow."""
    struct = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=SHARDING)
    assert fast_paths._fast_call(compiled(jnp.tanh, struct)) is not None
    assert fast_paths._batched_device_put is not None


def test_a_step_is_the_same_by_public_parts(monkeypatch):
    losses, leaves = steps()
    without_private_parts(monkeypatch)
    same_losses, same_leaves = steps()
    assert losses == same_losses
    for leaf, same in zip(leaves, same_leaves, strict=True):
        np.testing.assert_array_equal(leaf, same)


@pytest.mark.parametrize("private", (True, False))
def test_a_put_array_is_a_copy_on_every_device(private, monkeypatch):
    if not private:
        without_private_parts(monkeypatch)
    struct = jax.ShapeDtypeStruct((4, 1024), jnp.float32, sharding=SHARDING)
    given = np.arange(4096, dtype=np.float32).reshape(4, 1024)
    expected = given.copy()
    array = fast_paths.to_devices(struct)(given)
    given[:] = np.nan
    assert array.sharding == SHARDING and array.committed
    np.testing.assert_array_equal(array, expected)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


def test_calls_take_and_give_leaves_and_leave_unused_arguments_out():
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)

    def function(a, unused, b):
        return {"sum": a["x"] + b, "difference": (a["x"] - b,)}

    program = jax.jit(function).lower({"x": struct}, struct, struct).compile()
    call = fast_paths.flat_call(program)
    for k in range(3):
        flat = [jnp.full(3, float(v)) for v in (k, 7, 2)]
        difference, total = call(flat)  # by name
        assert total[0] == k + 2 and difference[0] == k - 2


@pytest.mark.parametrize("what", ("callback", "key"))
def test_what_is_more_than_an_execution_is_called_publicly(what):
    def with_callback(x):
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((), x.dtype), x)

    function, argument = {
        "callback": (with_callback, jnp.float32(3)),
        "key": (lambda key: jax.random.uniform(key), jax.random.key(5)),
    }[what]
    program = compiled(function, jax.ShapeDtypeStruct(argument.shape, argument.dtype))
    assert fast_paths._fast_call(program) is None
    call = fast_paths.flat_call(program)
    assert [call([argument])[0] for _ in range(2)] == [function(argument)] * 2


def test_other_shapes_are_refused_by_the_first_call():
    call = fast_paths.flat_call(compiled(jnp.tanh, jax.ShapeDtypeStruct((4,), jnp.float32)))
    with pytest.raises(TypeError, match="float32\\[4\\]"):
        call([jnp.zeros(5)])
    assert call([jnp.zeros(4)])[0].shape == (4,)


def test_a_nan_is_found_where_jax_is_told_to_look_for_it():
    call = fast_paths.flat_call(compiled(jnp.log, jax.ShapeDtypeStruct((), jnp.float32)))
    for _ in range(2):
        assert np.isnan(call([jnp.float32(-1)])[0])
    with jax.debug_nans(True), pytest.raises(Exception, match="nan") as raised:
        call([jnp.float32(-1)])
    assert "FloatingPointError" in type(raised.value).__name__


def test_a_state_whose_arrays_were_moved_is_refused():
    """Programs do not look at their arguments again."""
    step = pipeshard(mlp(), pipeline((2, 2), ((1, 1), (1, 1))))
    batch = np.zeros((8, 16), np.float32)
    state, _ = step(step.init(jax.random.key(0)), batch)
    moved = jax.device_put(state.slots["params@1"], jax.devices()[5])
    with pytest.raises(ExecutionError, match="params@1") as raised:
        step(PipelineState(state.slots | {"params@1": moved}, 1, state.unused), batch)
    assert raised.value.violations[0].code == "run-state"


def test_the_calling_threads_time_is_reported():
    step = pipeshard(mlp(), pipeline((4,), ((1, 1),)))
    _, metrics = step(step.init(jax.random.key(0)), np.zeros((8, 16), np.float32))
    assert 0 < metrics.dispatch_seconds < 60
