"""The tasks of one step of a plan of packs, in the order in which they are issued, and the channel
of every tensor that goes in or out.

A task runs a pack of layers on all of its micro-batches before the next task of its device begins:
input-batch grouping. Data parallelism gives every device all tasks, for its share of the batch; in
a wrap-around pipeline task i of ``P_F + reverse(P_B)`` is on device i mod N, for all of the batch.
Updates follow their backward tasks.

Source: Li et al. 2022 (Harmony), 3 and 4.3.2, Figures 5 and 6a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

Span = tuple[int, int]
"""Layers [first, stop)."""

Mode = Literal["pp", "dp"]
MODES: tuple[Mode, ...] = ("pp", "dp")
Kind = Literal["forward", "backward", "update"]
Medium = Literal["data", "swap", "p2p", "message", "shared", "local", "pinned"]
"""Where a tensor comes from or goes to: the batch; the memory of the host and back; another device;
the process of another device on the host, through its memory; memory that the processes share; the
same process; the device itself, which keeps it for its next task."""


@dataclass(frozen=True, slots=True)
class Channel:
    """How a tensor comes or goes.

    Attributes:
        medium: See above.
        task: At the other end, where there is one.
        rank: Of that task, where the medium joins two processes.
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
        """From layers per pack.

        Example:
            >>> Packs.of_lengths(4, (2, 1)).packs
            ((0, 2), (2, 3))
        """
        stops = tuple(accumulate(lengths))
        return cls(microbatch_size, tuple(zip((0, *stops), stops, strict=False)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Layers per pack."""
        return tuple(stop - first for first, stop in self.packs)


@dataclass(frozen=True)
class Configuration:
    """The four-tuple (U_F, P_F, U_B, P_B) of 4.3.1."""

    forward: Packs
    backward: Packs

    @cached_property
    def stashes(self) -> tuple[int, ...]:
        """Layers whose inputs the forward pass keeps for the backward pass: the first of every
        backward pack but the last."""
        return tuple(first for first, _ in self.backward.packs[:-1])


@dataclass(frozen=True, slots=True)
class Task:
    """A pack of layers on micro-batches, or the update of their weights.

    Attributes:
        id: Position among all tasks.
        kind: What is computed.
        first, stop: Layers, from ``first`` to before ``stop``.
        sizes: Of its micro-batches; those of an update are empty.
        rank: Its device; of an update the process.
        criterion: Whether it is the backward task that computes the loss.
        source: Of X, for a forward task and for the one with the criterion; None of others.
        gradient: Of dY, for other backward tasks.
        sink: Of Y, or of dX.
        stashes: Layers whose inputs are kept, and where for; of a backward task without criterion,
            where its X is from.
    """

    id: int
    kind: Kind
    first: int
    stop: int
    sizes: tuple[int, ...]
    rank: int
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
        """Of a forward task: it is cut where an input is kept."""
        cuts = [layer for layer, _ in self.stashes if layer > self.first]
        return tuple(zip((self.first, *cuts), (*cuts, self.stop), strict=True))


@dataclass(frozen=True)
class TaskGraph:
    """All tasks of a step.

    Attributes:
        mode: How devices share the work.
        num_devices: N.
        sizes: Of the first rank: micro-batches forward, and backward.
        tasks: Of all ranks in a pipeline, of the first so many in data parallelism; ids ascend.
        equal_sizes: Whether U_F = U_B.
    """

    mode: Mode
    num_devices: int
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    tasks: tuple[Task, ...]
    equal_sizes: bool

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        mode: Mode,
        num_devices: int,
        minibatch_size: int,
        *,
        num_ranks: int | None = None,
    ) -> TaskGraph:
        """That of a configuration.

        Args:
            configuration: Packs and sizes.
            mode: ``"pp"`` or ``"dp"``.
            num_devices: N.
            minibatch_size: D, of all devices together.
            num_ranks: In data parallelism, make the tasks of the first so many only: all do the
                same, for shares that differ by one example at most.
        """
        both = shares(minibatch_size, num_devices) if mode == "dp" else (minibatch_size,)
        forward, backward = configuration.forward, configuration.backward
        tasks: list[Task] = []
        for rank, share in enumerate(both[:num_ranks]):
            sizes = (
                microbatches(share, forward.microbatch_size),
                microbatches(share, backward.microbatch_size),
            )
            tasks += _Binder(configuration, mode, num_devices, sizes, len(tasks), rank).tasks()
        share = both[0]
        sizes = (
            microbatches(share, forward.microbatch_size),
            microbatches(share, backward.microbatch_size),
        )
        equal = forward.microbatch_size == backward.microbatch_size
        return cls(mode, num_devices, sizes, tuple(tasks), equal)

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another: simulated is the first, with the largest share."""
        return self.mode == "dp" or self.num_devices == 1

    def of_rank(self, rank: int) -> Iterator[Task]:
        """Its tasks on the device."""
        return (task for task in self.tasks if task.rank == rank and task.kind != "update")

    @cached_property
    def pinned(self) -> dict[tuple[int, int], int]:
        """(task, layer) -> the task that shares its weights: a device's last forward task and its
        first backward task, where they have layers in common."""
        found: dict[tuple[int, int], int] = {}
        last: dict[int, Task] = {}
        for task in self.tasks:
            before = last.get(task.rank)
            if before and (before.kind, task.kind) == ("forward", "backward"):
                for layer in sorted({*before.layers} & {*task.layers}):
                    found |= {(before.id, layer): task.id, (task.id, layer): before.id}
            if task.kind != "update":
                last[task.rank] = task
        return found

    def inputs(self, task: Task) -> dict[str, dict[int, Channel]]:
        """By tensor of Figure 6a and layer. X is kept by a forward task for the backward tasks that
        need it; T are the labels."""
        shared = Channel("shared")
        layers = task.layers
        if task.kind == "update":
            gradients = dict.fromkeys(layers, Channel("local"))
            return {"dW": gradients} | {name: dict.fromkeys(layers, shared) for name in "WK"}
        x = dict(task.stashes) if task.source is None else {task.first: task.source}
        if task.kind == "forward":
            return {"X": x} | {name: dict.fromkeys(layers, shared) for name in "WB"}
        weights = {layer: self._weights(task, layer) or shared for layer in layers}
        gradient = {} if task.gradient is None else {task.stop - 1: task.gradient}
        labels = {task.stop - 1: Channel("data")} if task.criterion else {}
        return {"dY": gradient, "X": x, "W": weights, "B": weights, "T": labels}

    def outputs(self, task: Task) -> dict[str, dict[int, Channel]]:
        """Likewise; W and B are there only where the next task shares them."""
        shared = Channel("shared")
        layers = task.layers
        if task.kind == "update":
            return {name: dict.fromkeys(layers, shared) for name in "WK"}
        if task.kind == "forward":
            kept = {
                layer: pinned
                for layer in layers
                if (pinned := self._weights(task, layer)) is not None
            }
            sink = {task.stop - 1: task.sink} if task.sink else {}
            return {"Y": sink, "X": dict(task.stashes), "W": kept, "B": kept}
        return {
            "dX": {task.first: task.sink} if task.sink else {},
            "dW": dict.fromkeys(layers, Channel("local")),
            "W": {},
            "B": dict.fromkeys(layers, shared),
        }

    def _weights(self, task: Task, layer: int) -> Channel | None:
        other = self.pinned.get((task.id, layer))
        return None if other is None else Channel("pinned", other)


def shares(minibatch_size: int, num_devices: int) -> tuple[int, ...]:
    """Examples of every device in data parallelism: the first take what is left over (H-b)."""
    least, more = divmod(minibatch_size, num_devices)
    return tuple(least + (rank < more) for rank in range(num_devices))


def microbatches(share: int, size: int) -> tuple[int, ...]:
    """Sizes of the micro-batches: the last takes what is left.

    Example:
        >>> microbatches(9, 4)
        (4, 4, 1)
    """
    whole, rest = divmod(share, size)
    return (size,) * whole + ((rest,) if rest else ())


def completed_by(sources: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per micro-batch of one size, those of another that are complete when it has come: how one
    direction's micro-batches become the other's, in order, by concatenation and split.

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
    """Makes the tasks of one rank in data parallelism, or of all in a pipeline."""

    def __init__(
        self,
        configuration: Configuration,
        mode: Mode,
        num_devices: int,
        sizes: tuple[tuple[int, ...], tuple[int, ...]],
        start: int,
        rank: int,
    ):
        self._forward, self._backward = configuration.forward.packs, configuration.backward.packs
        self._stashes = configuration.stashes
        self._pipelined, self._num_devices = mode == "pp", num_devices
        self._sizes, self._start, self._rank = sizes, start, rank
        self._convert = (
            configuration.forward.microbatch_size != configuration.backward.microbatch_size
        )

    def tasks(self) -> list[Task]:
        num_forward, num_backward = len(self._forward), len(self._backward)
        made = [self._forward_task(i) for i in range(num_forward)]
        for i in range(num_backward):
            task = self._backward_task(i)
            rank, first, stop = task.rank, task.first, task.stop
            made += [task, Task(task.id + 1, "update", first, stop, (), rank)]
        return made

    def _id(self, position: int) -> int:
        """Of the task at a position of P_F + reverse(P_B)."""
        behind = max(0, position - len(self._forward))
        return self._start + position + behind

    def _rank_of(self, position: int) -> int:
        return position % self._num_devices if self._pipelined else self._rank

    def _passed(self, here: int, there: int) -> Channel:
        """What goes from one position to the next, or comes from it."""
        rank = self._rank_of(there)
        if rank == self._rank_of(here):
            return Channel("swap", self._id(there))
        at_turn = max(here, there) == len(self._forward)
        medium: Medium = "message" if self._convert and at_turn else "p2p"
        return Channel(medium, self._id(there), rank)

    def _forward_task(self, i: int) -> Task:
        first, stop = self._forward[i]
        kept = []
        for pack, layer in enumerate(self._stashes):
            if first <= layer < stop:
                position = len(self._forward) + len(self._backward) - 1 - pack
                kept.append(
                    (layer, Channel("message", self._id(position), self._rank_of(position)))
                )
        return Task(
            self._id(i),
            "forward",
            first,
            stop,
            self._sizes[0],
            self._rank_of(i),
            source=Channel("data") if i == 0 else self._passed(i, i - 1),
            sink=self._passed(i, i + 1),
            stashes=tuple(kept),
        )

    def _backward_task(self, i: int) -> Task:
        num_forward, num_backward = len(self._forward), len(self._backward)
        position = num_forward + i
        first, stop = self._backward[num_backward - 1 - i]
        task = Task(
            self._id(position), "backward", first, stop, self._sizes[1], self._rank_of(position)
        )
        sink = None if i == num_backward - 1 else self._passed(position, position + 1)
        if i == 0:
            source = self._passed(position, position - 1) if num_forward else Channel("data")
            return replace(task, criterion=True, source=source, sink=sink)
        holder = next(p for p, (a, b) in enumerate(self._forward) if a <= first < b)
        return replace(
            task,
            gradient=self._passed(position, position - 1),
            sink=sink,
            stashes=((first, Channel("message", self._id(holder), self._rank_of(holder))),),
        )
