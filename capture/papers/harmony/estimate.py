"""How long a step of packs takes by the rules of Harmony's released scheduler, and what every
device holds: its Runtime Estimator on our simulator.

Every rank has six streams, first in first out: SwapIn, SwapOut, P2PIn, P2POut, Compute, CPU. A
transfer between devices holds the sender's P2POut and the receiver's P2PIn. Items are made task by
task, micro-batch by micro-batch; a task comes after those that it reads from, so that every item
waits for earlier ones only. Where no such order exists, the step never ends.

    WB        weights and buffers of a pack, in         X, sX, dY   its inputs; sX was kept
    FWD       forward pass, cut where an input is kept  REC, BWD    forward pass again, and backward
    Y, dX     its outputs                               sX          an input that is kept, out
    MSGsX, MSGY   from process to process               ARD         all-reduce of gradients
    AGW, RSD      where WB and dWB are shares of devices: weights gathered, gradients scattered
    dWB       gradients, out                            DEL         the task's memory is given back
    Update    of the weights, by the host

Swaps share the host's link between the devices that work. Memory is that of single tasks; see
``task_bytes``.

Source: Li et al. 2022 (Harmony), 4.3.1; the rules are those of the released scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from capture.machine.server import Server
from capture.measured.layer_passes import SizedLayers
from capture.measured.layer_profile import LayerProfile
from capture.papers.harmony.items import P2P_OUT, STREAMS, Items, What
from capture.plan.packs import PaperTimes
from capture.plan.task_graph import PackTask, Span, TaskGraph
from capture.step.simulator import Simulation, Work, simulate, times

_COMPUTES = ("FWD", "REC", "BWD")
#: When a rank ends that has nothing to do.
_NOTHING_SECONDS = 1e-10


@dataclass(frozen=True)
class StreamItem:
    """An item on one of its streams, as the released scheduler lists it."""

    rank: int
    stream: str
    what: What
    begin: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Estimate:
    """A step, by the paper's rules.

    Attributes:
        seconds: Until the last rank ends; infinite if they wait for each other.
        rank_ends: Seconds, per rank that was simulated.
        rank_bytes: The largest task of each.
        items: What was simulated.
        starts, ends: Per item.
    """

    seconds: float
    rank_ends: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    items: Items = field(repr=False)
    starts: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """The part of the step after each rank's end: what the released scheduler calls idle."""
        return tuple((self.seconds - end) / self.seconds for end in self.rank_ends)

    @property
    def begins(self) -> dict[tuple[int, int], float]:
        """The seconds at which the passes and updates of tasks begin, by task and micro-batch."""
        found: dict[tuple[int, int], float] = {}
        for what, start in zip(self.items.whats, self.starts, strict=True):
            if what.kind in ("FWD", "BWD", "Update"):
                found.setdefault((what.task, what.microbatch), start)
        return found

    @property
    def times(self) -> PaperTimes:
        """The estimate as a plan keeps it: times, fractions, largest tasks and volumes."""
        return PaperTimes(
            self.seconds,
            self.rank_ends,
            self.idle_fractions,
            self.gap_fractions,
            self.rank_bytes,
            self.volumes_bytes,
        )

    @cached_property
    def compute_seconds(self) -> tuple[float, ...]:
        """The seconds that each rank spends in forward and backward passes."""
        found = [0.0] * len(self.rank_ends)
        for what, seconds, streams in zip(
            self.items.whats, self.items.seconds, self.items.streams, strict=True
        ):
            if what.kind in _COMPUTES:
                found[streams[0] // len(STREAMS)] += seconds
        return tuple(found)

    @property
    def gap_fractions(self) -> tuple[float, ...]:
        """The part of the whole step in which each rank does not compute: what Figure 8 shows
        (H-r)."""
        return tuple(1 - seconds / self.seconds for seconds in self.compute_seconds)

    @cached_property
    def volumes_bytes(self) -> Mapping[str, int]:
        """The bytes that all devices move, by tensor and direction: ``"WB in"``, ``"sX out"``;
        between devices it is ``p2p``. What is per example counts all examples, what is per device
        all devices."""
        found: Counter[str] = Counter()
        items = self.items
        for what, streams, seconds in zip(items.whats, items.streams, items.seconds, strict=True):
            on = STREAMS[streams[0] % len(STREAMS)]
            if on in ("SwapIn", "SwapOut"):
                count = items.num_alike if what.size is None else items.examples_alike
                nbytes = seconds * items.swap_bytes_per_second
                found[f"{what.kind} {on[4:].lower()}"] += round(nbytes * count)
            elif on == "P2POut":
                found["p2p"] += round(seconds * items.p2p_bytes_per_second)
        return dict(found)

    @cached_property
    def events(self) -> tuple[StreamItem, ...]:
        """The items as the released scheduler lists them: one per item and stream."""
        found = []
        rows = zip(self.items.whats, self.items.streams, self.items.seconds, strict=True)
        for i, (what, streams, seconds) in enumerate(rows):
            for stream in streams:
                rank, kind = divmod(stream, len(STREAMS))
                shown = what
                if what.sender is not None and kind == P2P_OUT:
                    task, name, layer = what.sender
                    shown = What(task, name, what.microbatch, what.size, layer, layer + 1)
                found.append(StreamItem(rank, STREAMS[kind], shown, self.starts[i], seconds))
        return tuple(found)

    def simulation(self) -> Simulation:
        """Simulate the items again with names, for traces."""
        work = [
            Work(
                f"task {what.task} {what.kind} layers {what.first} to {what.stop - 1}"
                + ("" if what.size is None else f", micro-batch {what.microbatch}"),
                tuple(f"rank {s // len(STREAMS)} {STREAMS[s % len(STREAMS)]}" for s in streams),
                seconds,
                tuple(after),
                kind=what.kind,
            )
            for what, streams, seconds, after in zip(
                self.items.whats,
                self.items.streams,
                self.items.seconds,
                self.items.after,
                strict=True,
            )
        ]
        return simulate(work)


def estimate(graph: TaskGraph, profile: LayerProfile, server: Server) -> Estimate:
    """Estimate the time and memory of a step.

    Args:
        graph: Its tasks, and which of Harmony's optimizations are off.
        profile: Seconds and bytes of layers.
        server: Bandwidths.
    """
    profile = profile.as_streamed(graph.swaps.stream)
    num_ranks = 1 if graph.alone else graph.num_devices
    found: list[list[PackTask]] = [[] for _ in range(num_ranks)]
    for task in graph.tasks:
        if task.rank < num_ranks:
            found[task.rank].append(task)
    on_device = [
        [task for task in on if task.kind != "update" or not graph.switches.offload] for on in found
    ]
    rank_bytes = tuple(
        max((task_bytes(task, profile) for task in on), default=0) for on in on_device
    )
    items = Items(graph, profile, server)
    ordered = _ordered(found)
    if ordered is None:
        never = float("inf")
        return Estimate(never, (never,) * num_ranks, rank_bytes, items, (), ())
    for task in ordered:
        items.add(task)
    starts, ends = times(items.seconds, items.after, items.streams)
    rank_ends = [_NOTHING_SECONDS if not on else 0.0 for on in found]
    width = len(STREAMS)
    for end, streams in zip(ends, items.streams, strict=True):
        for stream in streams:
            rank = stream // width
            if end > rank_ends[rank]:
                rank_ends[rank] = end
    return Estimate(max(rank_ends), tuple(rank_ends), rank_bytes, items, starts, ends)


def _ordered(ranks: Sequence[Sequence[PackTask]]) -> list[PackTask] | None:
    """Return tasks in an order in which each comes after those of its rank before it and those that
    it reads from; None where there is none."""
    ordered = sorted((task for on in ranks for task in on), key=lambda task: task.id)
    ours = {task.id for task in ordered}
    done: set[int] = set()
    waiting = [list(reversed(on)) for on in ranks]
    found: list[PackTask] = []
    while len(found) < len(ordered):
        ready = [
            (on[-1].id, rank)
            for rank, on in enumerate(waiting)
            if on and all(of in done or of not in ours for of in _read_from(on[-1]))
        ]
        if not ready:
            return None
        _, rank = min(ready)
        task = waiting[rank].pop()
        done.add(task.id)
        found.append(task)
    return found


def _read_from(task: PackTask) -> list[int]:
    kept = [channel for _, channel in task.stashes] if task.gradient else []
    channels = (task.source, task.gradient, *kept)
    return [channel.task for channel in channels if channel and channel.task is not None]


def task_bytes(task: PackTask, profile: LayerProfile) -> int:
    """Return the bytes that a task needs at the size of its first micro-batch: C of its pack,
    beside what it reads and writes.

        forward     X(first) + C + X(behind) + the inputs that it keeps
        backward    2 X(first) + X(behind) + C, and dX unless it is the first pack
        update      weights, gradients and optimizer state, where a device has it

    A search holds C alone below its limit, so this may exceed it (H-m).
    """
    pack = task.first, task.stop
    if task.kind == "update":
        return update_bytes(profile, pack)
    size = task.sizes[0]
    if task.kind == "backward":
        return backward_bytes(profile.at("backward", size), pack)
    kept = [layer for layer, _ in task.stashes]
    return profile.at("forward", size).forward_bytes(pack, kept)


def backward_bytes(layers: SizedLayers, pack: Span) -> int:
    """Return a backward task's bytes: 2 X(first) + X(behind) + C, and dX but for the first pack."""
    x, (first, stop) = layers.inputs, pack
    return 2 * x[first] + x[stop] + layers.pack_bytes(*pack) + (x[first] if first else 0)


def update_bytes(profile: LayerProfile, pack: Span) -> int:
    """Return the bytes of an update on a device: weights, gradients and optimizer state."""
    gradients = sum(profile.w_bytes[slice(*pack)])
    return profile.weight_bytes(*pack) + gradients + profile.state_bytes(*pack)
