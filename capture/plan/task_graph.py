"""The tasks of one step of a plan of packs, in the order in which they are issued, and the channel
of every tensor that goes in or out.

A task runs a pack of layers on all of its micro-batches before the next task of its device begins:
input-batch grouping. Data parallelism gives every device all tasks, for its share of the batch; in
a wrap-around pipeline task i of ``P_F + reverse(P_B)`` is on device i mod N, for all of the batch.
Updates follow their backward tasks.

Source: Li et al. 2022 (Harmony), 3 and 4.3.2, Figures 5 and 6a.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Literal

from capture.errors import PlanError, Violation
from capture.options import Asked
from capture.quantities import nearest

Span = tuple[int, int]
"""Layers [first, stop)."""

Mode = Literal["pp", "dp"]
MODES: tuple[Mode, ...] = ("pp", "dp")
Kind = Literal["forward", "backward", "update"]
Medium = Literal["data", "swap", "p2p", "message"]
"""Where a tensor comes from or goes to: the batch; the memory of the host and back; another device;
the process of another device on the host, through its memory."""


@dataclass(frozen=True)
class Switches:
    """The switches of Harmony's optimizations, each on by default (5.5).

    Attributes:
        grouping: A pack stays for all of its micro-batches. Off, each is a task of its own: weights
            come for every one, and gradients go out and in again.
        prefetch: Inputs of a task come while the task before computes.
        jit: The last pack goes backward as soon as it went forward, and weights are updated behind
            their backward pass. Off, its input is kept and its forward pass computed again, and
            updates come last.
        offload: The host updates weights. Off, optimizer state comes to the device and goes back.
        p2p: Outputs of a pack go to the next one from device to device. Off, through the host.
    """

    grouping: bool = True
    prefetch: bool = True
    jit: bool = True
    offload: bool = True
    p2p: bool = True

    @classmethod
    def without(cls, names: Iterable[str]) -> Switches:
        """Return switches that are all on but those that are named.

        Raises:
            PlanError: ``packs-switch`` for an unknown name.
        """
        names = tuple(names)
        known = [field.name for field in fields(cls)]
        PlanError.check(
            Violation(
                f"switch {name!r} is unknown; choose of {', '.join(known)}.{nearest(name, known)}",
                "packs-switch",
            )
            for name in names
            if name not in known
        )
        return cls(**dict.fromkeys(names, False))

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the optimizations that are off."""
        return tuple(field.name for field in fields(self) if not getattr(self, field.name))


ALL_ON = Switches()
#: What parameters may be streamed as.
STREAMED = ("bfloat16", "float16")


@dataclass(frozen=True)
class Swaps:
    """The forms in which weights come to devices and their gradients go back.

    Attributes:
        stream: Devices get parameters that layers read only through a cast to this dtype as the
            cast; left out, all come as they are.
        sharded: With --mode dp every device fetches a share of the weights of a pack, and all make
            them whole between them; likewise they add gradients and give back a share each.
    """

    stream: Annotated[str, Asked(metavar="DTYPE")] = ""
    sharded: Annotated[bool, Asked("shard_swaps")] = False

    def violations(self, mode: str, switches: Switches) -> Iterator[Violation]:
        """Yield a violation for what swaps cannot be: by themselves, in a mode, and with the
        optimizations that are off."""
        needed = [name for name in ("grouping", "offload", "p2p") if name in switches.off]
        if self.sharded and mode != "dp":
            yield Violation(
                f"sharded swaps in mode {mode!r}: devices hold different layers there, and have "
                "nothing to share; give mode='dp' (--mode dp), or leave out --shard-swaps.",
                "packs-shard",
            )
        if self.sharded and needed:
            yield Violation(
                "sharded swaps need micro-batches in groups, since all devices meet once per pack, "
                "updates on the host, and links between devices; without "
                f"{', '.join(needed)} leave out --shard-swaps.",
                "packs-shard",
            )
        if self.stream and self.stream not in STREAMED:
            yield Violation(
                f"stream={self.stream!r} is no dtype that parameters are streamed as; choose of "
                f"{', '.join(STREAMED)}.",
                "packs-stream",
            )
        elif self.stream and not switches.offload:
            yield Violation(
                f"stream={self.stream!r} brings casts to the devices, which without offload need "
                "the parameters themselves to update them; leave out one of both.",
                "packs-stream",
            )


AS_THEY_ARE = Swaps()


@dataclass(frozen=True, slots=True)
class Channel:
    """The way in which a tensor comes to a task or goes from it.

    Attributes:
        medium: See above.
        task: Id of the task at the other end, where there is one.
        rank: Rank of that task, where the medium joins two processes.
    """

    medium: Medium
    task: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Packs:
    """One direction of a configuration.

    Attributes:
        microbatch_size: U, examples that go through a pack at once.
        packs: P, layers [first, stop) of each, ascending. The last backward pack computes its
            forward pass itself, so forward packs end before it.
    """

    microbatch_size: int
    packs: tuple[Span, ...]

    @classmethod
    def of_lengths(cls, microbatch_size: int, lengths: Sequence[int]) -> Packs:
        """Return consecutive packs of so many layers each.

        Example:
            >>> Packs.of_lengths(4, (2, 1)).packs
            ((0, 2), (2, 3))
        """
        stops = tuple(accumulate(lengths))
        return cls(microbatch_size, tuple(zip((0, *stops), stops, strict=False)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of layers of each pack."""
        return tuple(stop - first for first, stop in self.packs)


@dataclass(frozen=True)
class Configuration:
    """The four-tuple (U_F, P_F, U_B, P_B) of 4.3.1."""

    forward: Packs
    backward: Packs

    @cached_property
    def stashes(self) -> tuple[int, ...]:
        """The layers whose inputs the forward pass keeps for the backward pass: the first of every
        backward pack but the last."""
        return tuple(first for first, _ in self.backward.packs[:-1])


@dataclass(frozen=True, slots=True)
class PackTask:
    """A pack of layers on micro-batches, or the update of their weights.

    Attributes:
        id: Position among all tasks.
        kind: What is computed.
        first, stop: Layers, from ``first`` to before ``stop``.
        sizes: Examples of each of its micro-batches; empty for an update.
        rank: Its device; of an update the process.
        station: Position of its pack in P_F + reverse(P_B).
        start: Index of its first micro-batch.
        last: Whether it has the last micro-batch.
        criterion: Whether it is the backward task of the last pack.
        source: Channel of X, for a forward task and for the one that computes the loss; None of
            others.
        gradient: Channel of dY, for other backward tasks.
        sink: Channel of Y, or of dX.
        stashes: Layers whose inputs are kept, and where for; of a backward task without criterion,
            where its X is from.
    """

    id: int
    kind: Kind
    first: int
    stop: int
    sizes: tuple[int, ...]
    rank: int
    station: int
    start: int = 0
    last: bool = True
    criterion: bool = False
    source: Channel | None = None
    gradient: Channel | None = None
    sink: Channel | None = None
    stashes: tuple[tuple[int, Channel], ...] = ()

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @property
    def sub_packs(self) -> tuple[Span, ...]:
        """The spans of layers into which a forward task is cut: at each input that is kept."""
        cuts = [layer for layer, _ in self.stashes if layer > self.first]
        return tuple(zip((self.first, *cuts), (*cuts, self.stop), strict=True))


@dataclass(frozen=True)
class TaskGraph:
    """All tasks of a step.

    Attributes:
        mode: How devices share the work.
        num_devices: N.
        minibatch_size: D.
        sizes: Micro-batch sizes of the first rank, forward and backward.
        tasks: Tasks of all ranks in a pipeline, of the first so many in data parallelism; ids
            ascend.
        switches: Which of Harmony's optimizations are off.
        swaps: How weights and gradients travel.
    """

    mode: Mode
    num_devices: int
    minibatch_size: int
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    tasks: tuple[PackTask, ...]
    switches: Switches = ALL_ON
    swaps: Swaps = AS_THEY_ARE

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        mode: Mode,
        num_devices: int,
        minibatch_size: int,
        switches: Switches = ALL_ON,
        *,
        swaps: Swaps = AS_THEY_ARE,
        num_ranks: int | None = None,
    ) -> TaskGraph:
        """Return the tasks of a configuration.

        Args:
            configuration: Packs and sizes.
            mode: ``"pp"`` or ``"dp"``.
            num_devices: N.
            minibatch_size: D, of all devices together.
            switches: What is off.
            swaps: How weights and gradients travel.
            num_ranks: In data parallelism, make the tasks of the first so many only: all do the
                same, for shares that differ by one example at most.
        """
        parts = shares(minibatch_size, num_devices) if mode == "dp" else (minibatch_size,)
        both = configuration.forward.microbatch_size, configuration.backward.microbatch_size
        sizes = [(microbatches(share, both[0]), microbatches(share, both[1])) for share in parts]
        tasks: list[PackTask] = []
        for rank, of_rank in enumerate(sizes[:num_ranks]):
            binder = _Binder(configuration, of_rank, switches, rank if mode == "dp" else None)
            tasks += binder.tasks(num_devices, len(tasks))
        return cls(mode, num_devices, minibatch_size, sizes[0], tuple(tasks), switches, swaps)

    @property
    def num_shares(self) -> int:
        """The number of shares into which weights are cut: one per device if sharded, else 1."""
        return self.num_devices if self.swaps.sharded else 1

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another: only the first, whose share is largest, is
        simulated."""
        return self.mode == "dp" or self.num_devices == 1

    def wrong_order(self, order: Sequence[int]) -> str:
        """Return what is wrong with an order of passes, each the id of its task, in words; empty if
        every pass is there once, behind those that it reads from."""
        if self.mode == "dp":
            return "devices of mode dp do the same at the same time"
        number = {task.id: max(1, len(task.sizes)) for task in self.tasks}
        if unknown := [task for task in order if task not in number]:
            return f"there is no task {unknown[0]}"
        if Counter(order) != Counter(number):
            return f"{len(order)} passes are not the {sum(number.values())} of the plan's tasks"
        sizes = {task.id: iter((*task.sizes, 0)) for task in self.tasks}
        made, tasks = Counter[int](), {task.id: task for task in self.tasks}
        for task in map(tasks.__getitem__, order):
            size, at = next(sizes[task.id]), task.station
            needs = self.minibatch_size if task.kind == "update" else made[at] + size
            made[at] += size
            if needs > made[at if task.kind == "update" else at - 1] and (at or size == 0):
                return f"a pass of task {task.id} is before what it reads"
        return ""


def shares(minibatch_size: int, num_devices: int) -> tuple[int, ...]:
    """Return each device's examples in data parallelism: the first take what is left over (H-b)."""
    least, more = divmod(minibatch_size, num_devices)
    return tuple(least + (rank < more) for rank in range(num_devices))


def microbatches(share: int, size: int) -> tuple[int, ...]:
    """Return the sizes of the micro-batches: the last takes what is left.

    Example:
        >>> microbatches(9, 4)
        (4, 4, 1)
    """
    whole, rest = divmod(share, size)
    return (size,) * whole + ((rest,) if rest else ())


def completed_by(sources: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, per micro-batch of one size, those of another that are complete when it has come: how
    one direction's micro-batches become the other's, in order, by concatenation and split.

    Example:
        >>> completed_by((4, 4, 1), (3, 3, 3))
        ((0,), (1,), (2,))
        >>> completed_by((4, 4), (2, 2, 2, 2))
        ((0, 1), (2, 3))
    """
    ends, found, target = tuple(accumulate(targets)), [], 0
    for end in accumulate(sources):
        stop = target
        while stop < len(ends) and ends[stop] <= end:
            stop += 1
        found.append(tuple(range(target, stop)))
        target = stop
    return tuple(found)


class _Binder:
    """A maker of the tasks of one rank in data parallelism, or of all in a pipeline."""

    def __init__(
        self,
        configuration: Configuration,
        sizes: tuple[tuple[int, ...], tuple[int, ...]],
        switches: Switches,
        rank: int | None,
    ):
        packs = configuration.backward.packs
        self._forward = configuration.forward.packs + (() if switches.jit else packs[-1:])
        self._stations = (*self._forward, *reversed(packs))
        self._turn, self._num_stations = len(self._forward), len(self._forward) + len(packs)
        self._kept = [first for first, _ in (packs[:-1] if switches.jit else packs)]
        self._sizes, self._switches, self._rank = sizes, switches, rank
        self._convert = (
            configuration.forward.microbatch_size != configuration.backward.microbatch_size
        )

    def tasks(self, num_devices: int, start: int) -> list[PackTask]:
        self._ranks = [
            station % num_devices if self._rank is None else self._rank
            for station in range(self._num_stations)
        ]
        issued: list[tuple[int, int | None]] = []
        for station in range(self._num_stations):
            groups = 1 if self._switches.grouping else len(self._sizes_of(station))
            issued += [(station, group) for group in range(groups)]
            if self._switches.jit and station >= self._turn:
                issued.append((station, None))
        if not self._switches.jit:
            issued += [(station, None) for station in range(self._turn, self._num_stations)]
        self._ids = {what: start + i for i, what in enumerate(issued)}
        return [self._task(station, group) for station, group in issued]

    def _sizes_of(self, station: int) -> tuple[int, ...]:
        return self._sizes[station >= self._turn]

    def _task(self, station: int, group: int | None) -> PackTask:
        (first, stop), rank = self._stations[station], self._ranks[station]
        number = self._ids[station, group]
        if group is None:
            return PackTask(number, "update", first, stop, (), rank, station)
        sizes, last = self._sizes_of(station), True
        if not self._switches.grouping:
            sizes, last = sizes[group : group + 1], group == len(sizes) - 1
        task = PackTask(number, "forward", first, stop, sizes, rank, station, group, last)
        if station < self._turn:
            ends = station + 1 == self._turn and not self._switches.jit
            return replace(
                task,
                source=self._passed(station, station - 1, group) if station else Channel("data"),
                sink=None if ends else self._passed(station, station + 1, group),
                stashes=tuple(
                    (layer, self._message(self._num_stations - 1 - i, group))
                    for i, layer in enumerate(self._kept)
                    if first <= layer < stop
                ),
            )
        ends, turn = station + 1 == self._num_stations, station == self._turn
        sink = None if ends else self._passed(station, station + 1, group)
        task = replace(task, kind="backward", criterion=turn, sink=sink)
        if turn and self._switches.jit:
            source = self._passed(station, station - 1, group) if station else Channel("data")
            return replace(task, source=source)
        holder = next(s for s, (a, b) in enumerate(self._forward) if a <= first < b)
        return replace(
            task,
            gradient=None if turn else self._passed(station, station - 1, group),
            stashes=((first, self._message(holder, group)),),
        )

    def _id(self, station: int, group: int) -> int:
        """Return the id of the task of a group at a station, or of the station's first."""
        return self._ids[station, group] if (station, group) in self._ids else self._ids[station, 0]

    def _message(self, station: int, group: int) -> Channel:
        return Channel("message", self._id(station, group), self._ranks[station])

    def _passed(self, here: int, there: int, group: int) -> Channel:
        """Return the channel of what goes from one station to the next, or comes from it."""
        if self._ranks[there] == self._ranks[here]:
            return Channel("swap", self._id(there, group))
        converts = self._convert and max(here, there) == self._turn
        if converts or not self._switches.p2p:
            return self._message(there, group)
        return Channel("p2p", self._id(there, group), self._ranks[there])
