"""Seconds of executions on the devices of this process, and arrays to execute with."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from capture.profiler.executing import ExecutingMachine
from capture.tracing.keys import is_key

#: What JAX says where a device has no room.
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def machine_here() -> ExecutingMachine:
    """Return the devices of this process as a machine that executes."""
    devices = jax.devices()
    return ExecutingMachine(devices[0].platform, devices[0].device_kind, len(devices))


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


def filled(struct: Any) -> Any:
    """Return an array with values that make no operation quicker than others would."""
    if is_key(struct):
        return jax.random.split(jax.random.key(0), prod(struct.shape)).reshape(struct.shape)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        return jax.random.normal(jax.random.key(0), struct.shape).astype(struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)
