"""Copy arrays to other devices with little work of the host thread.

``jax.device_put`` spends about 110 us of Python on a call, the function of jaxlib that it ends in 8
us (jax 0.10.2, one array, CPU). A pipeline makes such a copy for every activation and gradient
between stages, so the function is called itself where this jaxlib has it. It is no public
interface: where it is missing, ``jax.device_put`` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Sharding
from jaxlib import xla_client

Copier = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


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
