"""Calls of compiled programs and copies to devices that skip what JAX checks anew each time.

A step calls the same programs on arrays of the same shapes and shardings again and again. JAX's
public calls ask every argument every time, which with 100 arguments takes twice as long as the call
itself, and ``jax.device_put`` spends about 110 us of Python on a call, the function of jaxlib that
it ends in 8 us (jax 0.10.2, one array, CPU). What is used here instead is private to JAX: all of it
is in this module, every part is looked for before it is used, and where one is missing the public
call serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxlib import xla_client

FlatCall = Callable[[list[jax.Array]], list[jax.Array]]
"""A program on the leaves of its arguments, one list, gives the leaves of its results."""

Put = Callable[[Any], jax.Array]
"""Takes a host array of one shape to the devices, into buffers of its own."""


Copier = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]

_batched_device_put: Callable[..., jax.Array] | None = getattr(
    xla_client, "batched_device_put", None
)


def flat_call(compiled: object) -> FlatCall:
    """Return the call of a compiled program without the trees of its arguments and results.

    The first call goes through JAX's own checks of shapes and shardings; the later ones do not, so
    the caller must go on giving arrays of the same.

    Args:
        compiled: As ``jax.jit(function).lower(...).compile()`` returns it.
    """
    public = _public_call(compiled)
    fast = _fast_call(compiled)
    if fast is None:
        return public
    checked = False

    def call(flat: list[jax.Array]) -> list[jax.Array]:
        nonlocal checked
        if checked and not _looks_at_results():
            return fast(flat)
        results = public(flat)
        checked = True
        return results

    return call


def _looks_at_results() -> bool:
    """Return whether JAX is to find the program that makes a NaN; its public calls do."""
    config: Any = jax.config  # its stubs leave the options out
    return config.jax_debug_nans or config.jax_debug_infs


def _public_call(compiled: Any) -> FlatCall:
    def call(flat: list[jax.Array]) -> list[jax.Array]:
        args, kwargs = jax.tree.unflatten(compiled.in_tree, flat)
        return jax.tree.leaves(compiled(*args, **kwargs))

    return call


def _fast_call(compiled: Any) -> FlatCall | None:
    """Return the call that skips JAX's checks; None where this JAX has other insides. None also
    where a call is more than an execution: effects, callbacks, constants that are arguments, or
    random keys, which are objects around arrays."""
    try:
        mesh_executable = compiled._executable
        replicated = mesh_executable.unsafe_call
        if (
            replicated.ordered_effects
            or replicated.has_unordered_effects
            or replicated.has_host_callbacks
            or replicated.mut
            or compiled._params.const_args
        ):
            return None
        avals = [*mesh_executable.in_avals, *mesh_executable.out_avals]
        if any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
            return None
        kept = sorted(mesh_executable._kept_var_idx)
        execute = replicated.xla_executable.execute_sharded
        handlers = replicated.out_handler.handlers
    except AttributeError:
        return None
    if kept == list(range(compiled.in_tree.num_leaves)):
        return lambda flat: execute(flat).consume_with_handlers(handlers)
    return lambda flat: execute([flat[i] for i in kept]).consume_with_handlers(handlers)


def to_devices(struct: jax.ShapeDtypeStruct) -> Put:
    """Return a function that takes host arrays of a shape to the devices of a sharding.

    On CPU ``jax.device_put`` aliases aligned host memory, ``may_alias=False`` or not (jax 0.10.2
    and 0.12): without the copy, a caller that refills its batch would change a step that is still
    running.

    Args:
        struct: Shape, dtype and sharding of the array on the devices; no random keys.
    """
    sharding, shape = struct.sharding, tuple(struct.shape)
    assert sharding is not None
    put = _batched_device_put
    if put is None:
        return lambda leaf: jax.make_array_from_callback(
            shape, sharding, lambda index: np.array(leaf[index])
        )
    aval = jax.core.ShapedArray(shape, struct.dtype)
    parts = sharding.addressable_devices_indices_map(shape)
    indices, devices = list(parts.values()), list(parts)
    return lambda leaf: put(aval, sharding, [np.array(leaf[i]) for i in indices], devices, True)


def of_shards(struct: jax.ShapeDtypeStruct) -> Callable[[list[jax.Array]], jax.Array]:
    """Return a function that makes one array of those on the devices of a sharding, in the order of
    its devices and in the same buffers.

    Args:
        struct: Shape, dtype and sharding of the array; no random keys.
    """
    sharding, shape = struct.sharding, tuple(struct.shape)
    assert sharding is not None
    put = _batched_device_put
    if put is None:
        return lambda shards: jax.make_array_from_single_device_arrays(shape, sharding, shards)
    aval = jax.core.ShapedArray(shape, struct.dtype)
    devices = list(sharding.addressable_devices_indices_map(shape))
    return lambda shards: put(aval, sharding, shards, devices, True)


def plan_copies(shardings: Sequence[Sharding]) -> Copier:
    """Work out copies once, to be made many times; the copies of one call are enqueued together,
    and nothing waits for them.

    Args:
        shardings: Shardings of the results, in the order of the arrays; each has as many devices as
            its array, and gives shard i of the array to device i. All devices are of this process.

    Returns:
        A function of as many arrays. Results are in buffers of their own, also on a device that has
        the data already.
    """
    targets = list(shardings)
    try:
        devices = [sharding._internal_device_list.addressable_device_list for sharding in targets]  # type: ignore[attr-defined]
        copy = xla_client.batched_copy_array_to_devices_with_sharding
        semantics = [xla_client.ArrayCopySemantics.ALWAYS_COPY] * len(targets)
    except AttributeError:
        return lambda arrays: jax.device_put(list(arrays), targets, may_alias=False)
    return lambda arrays: copy(list(arrays), devices, targets, semantics)
