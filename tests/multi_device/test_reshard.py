"""Moves between every pair of layouts: values, donation of the source, and no way through the
host."""

from __future__ import annotations

import itertools
from functools import lru_cache
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from capture.errors import ExecutionError
from capture.runtime import fast_paths
from capture.runtime import reshard as module
from capture.runtime.fast_paths import plan_copies
from capture.runtime.reshard import plan_reshard, reshard

SHAPE = (8, 4)


def layout(
    first: int, mesh_shape: tuple[int, int], spec: P, reverse: bool = False
) -> NamedSharding:
    """A sharding on the devices from ``first`` on, with mesh axes data and model."""
    devices = jax.devices()[first : first + int(np.prod(mesh_shape))]
    return NamedSharding(
        Mesh(
            np.array(devices[::-1] if reverse else devices).reshape(mesh_shape), ("data", "model")
        ),
        spec,
    )


LAYOUTS = {
    "one-0": lambda: layout(0, (1, 1), P()),
    "one-5": lambda: layout(5, (1, 1), P("data")),
    "data2": lambda: layout(0, (2, 1), P("data")),
    "data2-reversed": lambda: layout(0, (2, 1), P("data"), reverse=True),
    "data4": lambda: layout(1, (4, 1), P("data")),
    "data2xmodel2": lambda: layout(4, (2, 2), P("data", "model")),
    "data2-over-model2": lambda: layout(2, (2, 2), P("data")),
    "both-on-dim0": lambda: layout(0, (2, 4), P(("data", "model"))),
    "replicated": lambda: layout(3, (2, 2), P()),
    "dim1": lambda: layout(0, (1, 4), P(None, "model")),
}
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def source(sharding: NamedSharding, dtype: str = "float32") -> jax.Array:
    """Values that differ everywhere, in buffers that nothing else holds."""
    return _fill(sharding, dtype)()


@lru_cache
def _fill(sharding: NamedSharding, dtype: str):
    return jax.jit(
        lambda: jnp.arange(np.prod(SHAPE)).reshape(SHAPE).astype(dtype), out_shardings=sharding
    )


_increment_in_place = jax.jit(lambda v: v + 1, donate_argnums=0)


def pointers(x: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        # Each layout is in the third that default tests move, as a source and as a target.
        pytest.param(*pair, id="->".join(pair), marks=pytest.mark.exhaustive if number % 3 else ())
        for number, pair in enumerate(PAIRS)
    ],
)
def test_every_pair(src, dst):
    """Right values, never read on the host, and still there when the source has been donated."""
    x, sharding = source(LAYOUTS[src]()), LAYOUTS[dst]()
    with jax.transfer_guard_device_to_host("disallow"), _no_host_value():
        moved = reshard(x, sharding)
    assert moved.sharding == sharding
    assert not pointers(moved) & pointers(x)
    expected = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    np.testing.assert_array_equal(np.array(x), expected)
    _increment_in_place(x).block_until_ready()
    assert x.is_deleted()
    np.testing.assert_array_equal(np.array(moved), expected)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.array(shard.data), expected[shard.index])


def test_the_check_for_host_reads_sees_the_host_path_of_device_put():
    x = source(LAYOUTS["data2"]())
    with _no_host_value(), pytest.raises(AssertionError, match="read on the host"):
        jax.device_put(x, LAYOUTS["data4"]())


def _no_host_value():
    """The transfer guard lets CPU buffers be read in place, so the property that reads them is made
    to fail as well."""

    def fail(self):
        raise AssertionError("an array was read on the host")

    return mock.patch.object(type(jnp.zeros(1)), "_value", property(fail))


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16"])
def test_other_dtypes(dtype):
    x = source(LAYOUTS["data2"](), dtype)
    moved = reshard(x, LAYOUTS["data2xmodel2"]())
    assert moved.dtype == x.dtype
    np.testing.assert_array_equal(np.array(moved), np.array(x))


def test_scalars_and_empty_arrays():
    replicated, one, pair = LAYOUTS["replicated"](), LAYOUTS["one-0"](), LAYOUTS["data2"]()
    assert float(reshard(jnp.float32(3), replicated)) == 3
    assert float(reshard(jax.device_put(3.0, replicated), one)) == 3
    assert reshard(jax.device_put(jnp.zeros((0, 4)), pair), replicated).shape == (0, 4)


def test_arrays_of_three_dimensions_cut_in_two():
    values = np.arange(4 * 2 * 8).reshape(4, 2, 8)
    x = jax.device_put(values, layout(0, (2, 2), P("data", None, "model")))
    np.testing.assert_array_equal(
        np.array(reshard(x, layout(2, (4, 1), P(None, None, "data")))), values
    )


def test_typed_random_keys():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), layout(0, (2, 1), P("data")))
    moved = reshard(keys, layout(1, (4, 1), P("data")))
    assert moved.dtype == keys.dtype and moved.sharding.device_set == set(jax.devices()[1:5])
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_a_source_on_a_single_device_sharding():
    x = jax.device_put(np.arange(8.0), SingleDeviceSharding(jax.devices()[3]))
    np.testing.assert_array_equal(
        np.array(reshard(x, layout(0, (4, 1), P("data")))), np.arange(8.0)
    )


def test_results_are_in_buffers_of_their_own():
    x, sharding = source(LAYOUTS["one-0"]()), layout(0, (2, 1), P())
    assert not pointers(reshard(x, sharding)) & pointers(x)


def test_the_same_move_is_planned_once():
    arguments = (SHAPE, jnp.dtype("float32"), LAYOUTS["data2"](), LAYOUTS["data4"]())
    assert plan_reshard(*arguments) is plan_reshard(*arguments)


def test_replicas_share_the_sending():
    x, sharding = source(layout(0, (4, 1), P())), layout(4, (4, 1), P("data"))
    used = []

    def spy(shardings):
        copy = plan_copies(shardings)

        def copy_and_note(parts):
            used.extend(next(iter(part.devices())).id for part in parts)
            return copy(parts)

        return copy_and_note

    plan_reshard.cache_clear()
    with mock.patch.object(module, "plan_copies", spy):
        reshard(x, sharding)
    plan_reshard.cache_clear()
    assert sorted(used) == [0, 1, 2, 3]


@pytest.mark.parametrize("has_function", [True, False])
def test_copies_are_whole_independent_and_also_made_without_the_private_function(
    monkeypatch, has_function
):
    if not has_function:
        monkeypatch.setattr(fast_paths, "xla_client", SimpleNamespace())
    x, to = (
        source(layout(0, (2, 1), P("data"))),
        [layout(4, (2, 1), P("data")), layout(0, (2, 1), P("data"))],
    )
    away, here = plan_copies(to)([x, x])
    for copy, sharding in ((away, to[0]), (here, to[1])):
        assert copy.sharding == sharding
        np.testing.assert_array_equal(np.array(copy), np.array(x))
    assert not pointers(here) & pointers(x)
    x.delete()
    assert np.isfinite(np.array(away)).all() and np.isfinite(np.array(here)).all(), (
        "they outlive what they were copied from"
    )


def test_devices_of_another_process_are_refused():
    far = mock.Mock(is_fully_addressable=False, __str__=lambda self: "far away")
    with pytest.raises(ExecutionError) as refused:
        plan_reshard(SHAPE, jnp.dtype("float32"), LAYOUTS["one-0"](), far)
    assert str(refused.value) == (
        "the destination sharding far away has devices of another process; reshard moves arrays "
        "within one process. [reshard-addressable]"
    )
