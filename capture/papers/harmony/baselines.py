"""What Harmony is compared with, by the same profiles and links: data and pipeline parallelism over
virtual memory, sharded states on the host, and training that swaps nothing or activations alone.

Source: Li et al. 2022 (Harmony), 5.1 to 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from capture.papers.harmony.estimate import update_bytes
from capture.papers.harmony.swapping import GpuMemory, Swapped, run
from capture.papers.harmony.virtual_memory import GpuOperation, LayerTensors
from capture.plan.schedule import make_schedule
from capture.plan.task_graph import Configuration, Span, microbatches
from capture.quantities import format_bytes
from recommender.harmony.packing import LeastMaxTime
from recommender.harmony.problem import PacksProblem
from recommender.harmony.result import Baseline

#: What DeepSpeed's own estimate multiplies states on the host with (estimate_zero3_model_states,
#: additional_buffer_factor).
ZERO_BUFFER_FACTOR = 1.5


def dp_swap(problem: PacksProblem, *, remat: bool = False, always: bool = True) -> Baseline:
    """Estimate data parallelism over virtual memory: every GPU has all layers, its share of the
    batch, and a manager.

    Args:
        problem: Layers, server, minibatch.
        remat: Whether the backward pass computes the forward pass of a layer again.
        always: Whether managers write back what did not change, too.
    """
    name = f"DP Swap{' (R)' if remat else ''}"
    run_at = partial(_data_parallel, problem, remat=remat, always=always)
    return _best(name, problem, run_at)


def gp_swap(problem: PacksProblem, *, remat: bool = False) -> Baseline:
    """Estimate GPipe over virtual memory: a stage per GPU, all forward, then all backward
    passes."""
    name = f"GP Swap{' (R)' if remat else ''}"
    return _best(name, problem, partial(_pipelined, problem, _Pipelined("gpipe", remat)))


def two_bw_swap(problem: PacksProblem, *, remat: bool = False) -> Baseline:
    """Estimate PipeDream-2BW over virtual memory: one pass forward, one backward, two versions of
    the weights, and no flush: in its steady state a step takes as long as its slowest GPU."""
    name = f"2BW Swap{' (R)' if remat else ''}"
    return _best(name, problem, partial(_pipelined, problem, _Pipelined("1f1b", remat, 2)))


def zero_infinity(problem: PacksProblem, configuration: Configuration) -> Baseline:
    """Estimate ZeRO-Infinity with Harmony's packs and sizes: states are sharded over the GPUs and
    lie on the host; every micro-batch gathers every pack, forward and backward; the host updates.

    Per micro-batch of every GPU, its shard of the weights comes in twice and its shard of the
    gradients goes out; gathers and reduce-scatters go from GPU to GPU. Transfers hide computation
    and the other way round, so a pass takes what is longer.
    """
    profile, server = problem.profile, problem.server
    devices = server.devices
    size = configuration.backward.microbatch_size
    swap = server.swap_bytes_per_second.value / devices
    p2p = server.p2p_bytes_per_second.value
    share = max(1, problem.minibatch_size // devices)
    sizes = microbatches(share, min(size, share))
    packs = configuration.backward.packs
    seconds = 0.0
    weights = profile.weight_bytes(0, profile.num_layers)
    for u in sizes:
        forward, backward = profile.at("forward", u), profile.at("backward", u)
        for pack in packs:
            nbytes = profile.weight_bytes(*pack)
            gather = nbytes * (devices - 1) / devices / p2p
            come, kept = nbytes / devices / swap, forward.inputs[pack[0]] / swap
            seconds += max(forward.time(*pack), come + gather, kept)
            seconds += max(backward.time(*pack), come + kept + gather)
    seconds += sum(profile.update_cpu_time) / devices
    count = len(sizes)
    stash = problem.minibatch_size * sum(profile.x_bytes_per_sample[first] for first, _ in packs)
    volumes = {
        "W in": 2 * count * weights,
        "dW out": count * weights,
        "sX out": stash,
        "sX in": stash,
        "p2p": 3 * count * weights * (devices - 1),
    }
    states = update_bytes(profile, (0, profile.num_layers))
    # A micro-batch goes back before the next one comes.
    live = devices * sizes[0] * sum(profile.x_bytes_per_sample[first] for first, _ in packs)
    host = int(ZERO_BUFFER_FACTOR * states) + live
    device = max(profile.at("backward", sizes[0]).pack_bytes(*pack) for pack in packs)
    have = server.host_memory_bytes.value
    if host > have:
        reason = f"the host needs {format_bytes(host)} and has {format_bytes(have)}"
        return Baseline("ZeRO-Infinity", None, size, {}, device, host, reason)
    return Baseline("ZeRO-Infinity", seconds, size, volumes, device, host)


def resident(problem: PacksProblem, *, offload_activations: bool = False) -> Baseline:
    """Estimate data parallelism without swaps, activations recomputed layer by layer; or with the
    inputs of layers on the host."""
    name = "activation offload" if offload_activations else "resident"
    profile, limit = problem.profile, problem.limit_bytes
    devices, share = problem.server.devices, problem.shares[-1]
    if problem.mode == "pp":
        share = max(1, problem.minibatch_size // devices)
    states = update_bytes(profile, (0, profile.num_layers))
    swap = problem.server.swap_bytes_per_second.value / devices
    best: Baseline | None = None
    need = 0
    for u in range(profile.smallest("backward"), min(share, profile.largest("backward")) + 1):
        backward, x = profile.at("backward", u), profile.at("forward", u).inputs
        work = max(
            int(backward.memory_bytes[i]) - 2 * profile.w_bytes[i] - x[i]
            for i in range(profile.num_layers)
        )
        kept = max(x) * 2 if offload_activations else sum(x)
        need = states + kept + max(0, work)
        if need > limit:
            break
        count = -(-share // u)
        compute = (
            profile.at("forward", u).time(0, profile.num_layers)
            + backward.time(0, profile.num_layers)
        ) * count
        moved = 2 * sum(x) * count if offload_activations else 0
        reduce = 2 * (devices - 1) / devices * sum(profile.w_bytes)
        seconds = (
            max(compute, moved / 2 / swap) + reduce / problem.server.p2p_bytes_per_second.value
        )
        volumes = {"X out": moved // 2 * devices, "X in": moved // 2 * devices} if moved else {}
        if best is None or best.seconds is None or seconds < best.seconds:
            best = Baseline(name, seconds, u, volumes, need, sum(volumes.values()) // 2)
    if best is not None:
        return best
    reason = (
        f"a device needs {format_bytes(need)}, {format_bytes(states)} of it weights, gradients and "
        f"optimizer state, and has {format_bytes(limit)}"
    )
    return Baseline(name, None, device_bytes=need, reason=reason)


def all_baselines(
    problem: PacksProblem, configuration: Configuration | None = None
) -> list[Baseline]:
    """Return the baselines over virtual memory, ZeRO-Infinity if a configuration is given, and data
    parallelism without swaps of weights."""
    found = [
        dp_swap(problem),
        gp_swap(problem),
        gp_swap(problem, remat=True),
        two_bw_swap(problem),
        two_bw_swap(problem, remat=True),
    ]
    found += [zero_infinity(problem, configuration)] if configuration else []
    return [*found, resident(problem), resident(problem, offload_activations=True)]


# ---- over virtual memory -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pipelined:
    """The options of a pipeline over virtual memory.

    Attributes:
        schedule: Of ``make_schedule``.
        remat: Whether the backward pass computes the forward pass of a layer again.
        versions: Of the weights; with two there is no flush.
    """

    schedule: str
    remat: bool
    versions: int = 1


def _layers_of(problem: PacksProblem, size: int, *, remat: bool) -> LayerTensors:
    """Return the tensors and times of layers at a micro-batch size, from their profile."""
    profile = problem.profile
    forward, backward = profile.at("forward", size), profile.at("backward", size)
    every = range(profile.num_layers)
    weights = [profile.weight_bytes(i, i + 1) for i in every]
    x, memory, most = forward.inputs, forward.memory_bytes.tolist(), backward.memory_bytes.tolist()
    kept = [max(0, memory[i] - weights[i] - x[i] - x[i + 1]) for i in every]
    again = [0 if remat else kept[i] for i in every]
    ahead = [forward.time(i, i + 1) for i in every]
    return LayerTensors(
        weights,
        profile.k_bytes,
        x[:-1],
        x[:-1],
        kept,
        [kept[i] if remat else 0 for i in every],
        [max(0, most[i] - 2 * weights[i] - 2 * x[i] - x[i + 1] - again[i]) for i in every],
        ahead,
        [backward.time(i, i + 1) - (0 if remat else ahead[i]) for i in every],
        remat,
    )


def _best(name: str, problem: PacksProblem, run_at: Callable[[int], Swapped]) -> Baseline:
    """Return the baseline at its fastest power-of-two micro-batch size within the host's memory."""
    share = max(1, problem.minibatch_size // problem.server.devices)
    sizes = [1 << i for i in range(share.bit_length())]
    most = min(problem.profile.largest("backward"), problem.profile.largest("forward"))
    sizes = [u for u in sizes if problem.profile.smallest("backward") <= u <= min(most, share)]
    found = {size: run_at(size) for size in sizes}
    runs = {size: one for size, one in found.items() if one.missing is None}
    if not runs:
        layer, nbytes = next(iter(found.values())).missing or (0, 0)
        reason = f"layer {layer} alone needs {format_bytes(nbytes)} for {sizes[0]} examples"
        return Baseline(name, None, sizes[0], reason=reason)
    have = problem.server.host_memory_bytes.value
    held = {size: one for size, one in runs.items() if one.host_bytes <= have}
    size = min(held or runs, key=lambda size: runs[size].seconds)
    best = runs[size]
    if not held:
        reason = f"the host needs {format_bytes(best.host_bytes)} and has {format_bytes(have)}"
        return Baseline(name, None, size, {}, max(best.peak_bytes), best.host_bytes, reason)
    volumes = dict(best.volumes_bytes)
    return Baseline(name, best.seconds, size, volumes, max(best.peak_bytes), best.host_bytes)


def _memory(problem: PacksProblem, *, always: bool) -> GpuMemory:
    server = problem.server
    return GpuMemory(
        problem.limit_bytes,
        server.swap_bytes_per_second.value / server.devices,
        server.p2p_bytes_per_second.value,
        always,
    )


def _data_parallel(problem: PacksProblem, size: int, *, remat: bool, always: bool) -> Swapped:
    """Run one GPU and count it for all, which do the same."""
    devices = problem.server.devices
    share = max(1, problem.minibatch_size // devices)
    count = -(-share // size)
    layers = _layers_of(problem, size, remat=remat)
    rate = problem.server.p2p_bytes_per_second.value
    reduce = [2 * (devices - 1) / devices * weights / rate for weights in layers.weights]
    operations = layers.data_parallel(count, reduce)
    initial = [(0, tensor) for tensor in layers.initial(count)]
    memory = _memory(problem, always=always)
    found = run(operations, layers.nbytes(count), initial, memory)
    for name in found.volumes_bytes:
        found.volumes_bytes[name] *= devices
    found.host_bytes *= devices
    return found


def _pipelined(problem: PacksProblem, options: _Pipelined, size: int) -> Swapped:
    devices, layers = problem.server.devices, _layers_of(problem, size, remat=options.remat)
    count = -(-problem.minibatch_size // size)
    stages = _stages(problem, size, min(devices, layers.count))
    schedule = make_schedule(options.schedule, len(stages), count)
    operations: list[GpuOperation] = []
    last: dict[tuple[str, int, int], int] = {}
    x = [*layers.inputs, 0]
    for clock in schedule.clocks:
        for task in clock:
            s, m = task.stage_id, task.microbatch
            first, stop = stages[s]
            ahead = task.kind == "forward"
            other = last.get((task.kind, s - 1 if ahead else s + 1, m))
            after: tuple[tuple[int, int], ...] = ()
            if other is not None:
                after = ((other, x[first] if ahead else x[stop]),)
            for i in range(first, stop) if ahead else reversed(range(first, stop)):
                make = layers.ahead if ahead else layers.back
                operations.append(make(s, i, m, after))
                after = ()
            last[task.kind, s, m] = len(operations) - 1
    for s, (first, stop) in enumerate(stages):
        operations += [layers.update(s, i, 0.0, options.versions) for i in range(first, stop)]
    states = ("W", "K") if options.versions == 1 else ("W", "K", "W2")
    initial = [
        (s, (what, i, 0))
        for s, (first, stop) in enumerate(stages)
        for i in range(first, stop)
        for what in states
    ]
    initial += [(0, ("X", 0, m)) for m in range(count)]
    found = run(operations, layers.nbytes(count), initial, _memory(problem, always=True))
    if options.versions > 1 and found.missing is None:
        found.seconds = max(found.busy_seconds)
    return found


def _stages(problem: PacksProblem, size: int, num_stages: int) -> tuple[Span, ...]:
    """Return stages of nearly equal time, as layers [first, stop)."""
    count = problem.profile.num_layers
    anything = ~np.tri(count + 1, dtype=bool)
    splits = LeastMaxTime(problem.profile.at("backward", size), anything).packs(count)
    found = next(split for n, split in enumerate(splits, 1) if n == num_stages)
    assert found is not None, "any split is allowed"
    return found
