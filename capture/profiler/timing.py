"""Seconds of executions on the devices of this process, arrays to execute with, and copies between
the first device and the memory of its host, timed: each direction alone, and both at once.

Source: Purandare et al. 2023 (mu-TWO), 4.1 (swap_time of the intermediates).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from capture.compiler.executable import HOST_MEMORY
from capture.machine.link_fit import MeasuredCopies
from capture.profiler.asked import CopyWay, HostCopy
from capture.profiler.executing import ExecutingMachine
from capture.tracing.keys import is_key

#: What JAX says where a device has no room.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
DIRECTIONS: tuple[CopyWay, ...] = ("to device", "to host", "both")
#: To which a link is fitted.
COPY_BYTES = (2**20, 2**22, 2**24, 2**26)


def machine_here() -> ExecutingMachine:
    """Return the devices of this process as a machine that executes."""
    devices = jax.devices()
    return ExecutingMachine(devices[0].platform, devices[0].device_kind, len(devices))


def out_of_memory(error: BaseException | None) -> str:
    """Return the first line of an error that says that a device has no room; empty for others."""
    said = str(error).strip()
    return said.splitlines()[0] if _OUT_OF_MEMORY in said else ""


def median_seconds(
    call: Callable[..., Any],
    num_executions: int,
    clock: Callable[[], float],
    prepare: Callable[[], tuple[Any, ...]] = lambda: (),
    end: Callable[[Any], None] = lambda used: None,
) -> float:
    """Return the median seconds of ``num_executions`` calls, after one that is not counted.

    Args:
        call: The function that is timed, until its results are there.
        num_executions: Number of executions whose median counts.
        clock: Clock, in seconds.
        prepare: Function that makes the arguments of each execution, before it is timed.
        end: Function that is told what each execution was given and made, when it is over.
    """
    found = []
    for _ in range(num_executions + 1):
        arguments = jax.block_until_ready(prepare())
        start = clock()
        made = jax.block_until_ready(call(*arguments))
        found.append(clock() - start)
        end((arguments, made))
    return median(found[1:])


def filled(struct: jax.ShapeDtypeStruct) -> Any:
    """Return an array with values that make no operation quicker than others would."""
    if is_key(struct):
        return jax.random.split(jax.random.key(0), prod(struct.shape)).reshape(struct.shape)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        return jax.random.normal(jax.random.key(0), struct.shape).astype(struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def copies_of(sizes: Sequence[int]) -> list[HostCopy]:
    """Return the copies whose seconds a host link is fitted to: each size in each direction, and in
    both."""
    return [HostCopy(way, nbytes) for nbytes in sizes for way in DIRECTIONS]


def rows_of(seconds: Mapping[HostCopy, float]) -> list[MeasuredCopies]:
    """Return one row of seconds per size of copy, for each direction and for both at once."""
    sizes = dict.fromkeys(what.nbytes for what in seconds)
    return [MeasuredCopies(n, *(seconds[HostCopy(way, n)] for way in DIRECTIONS)) for n in sizes]


def copy_seconds(
    what: HostCopy,
    num_executions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time a copy: the median seconds of ``num_executions`` copies, after one that is not
    counted."""
    device = jax.devices()[0]
    here, there = (SingleDeviceSharding(device, memory_kind=k) for k in (None, HOST_MEMORY))
    array = jax.device_put(jnp.ones(max(1, what.nbytes // 4), jnp.float32), here)
    copied = jax.device_put(array, there, may_alias=False)
    given = {"to device": [copied], "to host": [array], "both": [copied, array]}[what.direction]
    places = {"to device": [here], "to host": [there], "both": [here, there]}[what.direction]

    def end(used: tuple[object, list[jax.Array]]) -> None:
        for made in used[1]:
            made.delete()

    jax.block_until_ready(given)
    return median_seconds(
        lambda: jax.device_put(given, places, may_alias=False), num_executions, clock, end=end
    )
