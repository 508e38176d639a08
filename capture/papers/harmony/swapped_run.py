"""Data parallelism over virtual memory, run: the baseline of Harmony's paper (DP Swap, with
recomputation) on the same layers, programs and meters as plans of packs."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from capture.compiler.executable import Compiler
from capture.machine.server import Server
from capture.model.workload import WorkloadProtocol
from capture.papers.harmony.swapped_step import build_swapped
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Switches
from capture.runtime.layout import first_devices
from capture.runtime.streamed import StreamedStep
from capture.tracing import trace

#: Nothing of what Harmony does, but for updates right behind all passes, on the devices.
_OFF = Switches.without(("grouping", "prefetch", "offload", "p2p"))


class SwappedStep(StreamedStep):
    """A compiled step whose devices have managers instead of packs. Made by ``swapped``."""

    build = staticmethod(build_swapped)


def swapped(
    workload: WorkloadProtocol,
    server: Server,
    minibatch_size: int,
    microbatch_size: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    fast_compile: bool = False,
) -> SwappedStep:
    """Compile plain data parallelism with gradient accumulation, a manager for each device.

    Args:
        workload: The task.
        server: Devices, and what of their memory is used.
        minibatch_size: Examples of a step.
        microbatch_size: Of one device at a time.
        devices: By default the first of ``jax.devices()``.
        fast_compile: As for ``pipeshard``.

    Returns:
        ``step(state, batch)``, like ``streamed``.

    Raises:
        PlanError: ``swap-batch``, ``swap-shared``, and those of ``PacksPlan``.
    """
    num_layers = trace(workload, microbatch_size).graph.num_layers
    packs = Packs.of_lengths(microbatch_size, (1,) * num_layers)
    configuration = Configuration(Packs(microbatch_size, packs.packs[:-1]), packs)
    plan = PacksPlan(server, num_layers, minibatch_size, "dp", configuration, _OFF)
    found = first_devices(devices, server.devices)
    return SwappedStep(workload, plan, found, Compiler(fast_compile=fast_compile))
