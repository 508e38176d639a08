"""Training over virtual memory: every GPU runs its operations in the order of its framework, and a
manager that knows only this GPU swaps tensors when they do not fit.

What is evicted is used farthest in the future (Belady's rule: no manager that reacts swaps less),
and is written back always, or only where it changed. Operations wait for what they miss: nothing is
prefetched, since nothing is known of what comes.

Source: Li et al. 2022 (Harmony), 2 and 5.1 (IBM-LMS under each GPU).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from capture.step.simulator import times

Tensor = tuple[str, int, int]
"""(what, layer, micro-batch); what is W, dW, K, X (an input), A (what a pass keeps beside), dX."""


@dataclass(frozen=True)
class Operation:
    """One layer on one micro-batch, or an update.

    Attributes:
        gpu: Where.
        seconds: Of compute.
        reads, writes: Tensors that must be there; those that it changes or makes.
        frees: Tensors that nothing reads any more.
        workspace_bytes: While it runs.
        after: Earlier operations of other GPUs, and the bytes that each sends.
    """

    gpu: int
    seconds: float
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...] = ()
    frees: tuple[Tensor, ...] = ()
    workspace_bytes: int = 0
    after: tuple[tuple[int, int], ...] = ()


@dataclass
class Swapped:
    """What the managers did.

    Attributes:
        seconds: Until the last operation has ended.
        busy_seconds: Per GPU, from its first operation to its last, without waiting for others.
        volumes_bytes: Of all GPUs, by tensor and direction.
        peak_bytes: Per GPU.
        host_bytes: The most that was written back and not read again, of all GPUs together.
        missing: Of the operation that does not fit by itself: (layer, bytes); None if all do.
    """

    seconds: float = 0.0
    busy_seconds: list[float] = field(default_factory=list)
    volumes_bytes: Counter[str] = field(default_factory=Counter)
    peak_bytes: list[int] = field(default_factory=list)
    host_bytes: int = 0
    missing: tuple[int, int] | None = None


@dataclass(frozen=True)
class Memory:
    """Of every GPU, and its links.

    Attributes:
        limit_bytes: Of one GPU.
        swap_bytes_per_second: Of one GPU, while all swap.
        p2p_bytes_per_second: Between two.
        write_back_always: Also what did not change.
    """

    limit_bytes: float
    swap_bytes_per_second: float
    p2p_bytes_per_second: float
    write_back_always: bool = True


def run(
    operations: Sequence[Operation],
    nbytes: dict[Tensor, int],
    initial: Iterable[tuple[int, Tensor]],
    memory: Memory,
) -> Swapped:
    """Run operations on GPUs with managers, twice: what is there when a step ends serves the next
    one, so the second is told of.

    Args:
        operations: In an order in which each comes after those that it waits for.
        nbytes: Per tensor.
        initial: (GPU, tensor) of weights and state, on the host before the step.
        memory: Sizes and links.
    """
    num_gpus = 1 + max(operation.gpu for operation in operations)
    managers = [_Manager(nbytes, memory) for _ in range(num_gpus)]
    batch = [(gpu, tensor) for gpu, tensor in initial if tensor[0] == "X"]
    for gpu, tensor in initial:
        managers[gpu].on_host.add(tensor)
    for at, operation in enumerate((*operations, *operations)):
        for tensor in dict.fromkeys((*operation.reads, *operation.writes)):
            managers[operation.gpu].uses[tensor].append(at)
    found, items = Swapped(), _Items(num_gpus, memory)
    on_host = found.host_bytes = sum(nbytes[tensor] for _, tensor in initial)
    for step in range(2):
        for gpu, tensor in batch:
            managers[gpu].on_host.add(tensor)
        found.busy_seconds = [0.0] * num_gpus
        found.volumes_bytes.clear()
        for at, operation in enumerate(operations):
            manager = managers[operation.gpu]
            moved = manager.step(step * len(operations) + at, operation)
            if moved is None:
                layer = (operation.reads or operation.writes)[0][1]
                found.missing = (layer, manager.need(operation))
                return found
            for tensors, way, sign in ((moved[0], "in", -1), (moved[1], "out", 1)):
                for tensor in tensors:
                    found.volumes_bytes[f"{tensor[0]} {way}"] += nbytes[tensor]
                    if tensor[0] in ("A", "dX", "dW"):  # others have their place on the host
                        on_host += sign * nbytes[tensor]
            found.host_bytes = max(found.host_bytes, on_host)
            ins, outs = (sum(nbytes[tensor] for tensor in tensors) for tensors in moved)
            found.busy_seconds[operation.gpu] += items.add(operation, ins, outs)
            for _, sent in operation.after:
                found.volumes_bytes["p2p"] += sent
        items.end_step()
    _, ends = times(items.seconds, items.after, items.streams)
    before = max(ends[: items.first_of_last])
    found.seconds = max(ends) - before
    found.peak_bytes = [manager.peak for manager in managers]
    return found


class _Items:
    """Operations as items on the streams of their GPUs."""

    def __init__(self, num_gpus: int, memory: Memory):
        self._memory = memory
        self._computed: list[int] = []
        self._last = [-1] * num_gpus
        self._begun: tuple[int, ...] = ()
        self.first_of_last = 0
        self.seconds: list[float] = []
        self.after: list[tuple[int, ...]] = []
        self.streams: list[tuple[tuple[int, str], ...]] = []

    def end_step(self) -> None:
        """A step ends when the operations of all GPUs have."""
        if not self.first_of_last:
            self.first_of_last = len(self.seconds)
            self._computed.clear()
            self._begun = tuple(at for at in self._last if at >= 0)

    def add(self, operation: Operation, bytes_in: int, bytes_out: int) -> float:
        """Enter an operation; seconds that it takes with its swaps."""
        gpu, rate = operation.gpu, self._memory.swap_bytes_per_second
        waits = self._begun if self._last[gpu] < 0 else (self._last[gpu], *self._begun)
        out, back = bytes_out / rate, bytes_in / rate
        if bytes_out:
            waits = (self._item(out, waits, ((gpu, "out"),)),)
        if bytes_in:  # into the room that was made
            waits = (self._item(back, waits, ((gpu, "in"),)),)
        received = []
        for other, sent in operation.after:
            seconds = sent / self._memory.p2p_bytes_per_second
            sender = self.streams[self._computed[other]][0][0]
            links = ((sender, "p2p out"), (gpu, "p2p in"))
            received.append(self._item(seconds, (self._computed[other],), links))
        done = self._item(operation.seconds, (*waits, *received), ((gpu, "compute"),))
        self._computed.append(done)
        self._last[gpu] = done
        return out + back + operation.seconds

    def _item(
        self, seconds: float, after: tuple[int, ...], streams: tuple[tuple[int, str], ...]
    ) -> int:
        self.seconds.append(seconds)
        self.after.append(after)
        self.streams.append(streams)
        return len(self.seconds) - 1


class _Manager:
    """The memory of one GPU."""

    def __init__(self, nbytes: dict[Tensor, int], memory: Memory):
        self._nbytes, self._memory = nbytes, memory
        self.uses: defaultdict[Tensor, list[int]] = defaultdict(list)
        self._next: Counter[Tensor] = Counter()
        self._there: dict[Tensor, bool] = {}  # -> whether it changed since it came
        # (when it is used next, negated; how many came before it; which): the least is evicted.
        # What is no longer so is left in the heap, and known by ``_rank``.
        self._farthest: list[tuple[float, int, Tensor]] = []
        self._rank: dict[Tensor, tuple[float, int, Tensor]] = {}
        self._num_came = 0
        self.on_host: set[Tensor] = set()
        self._live = self.peak = 0

    def need(self, operation: Operation) -> int:
        """Bytes of an operation by itself."""
        tensors = {*operation.reads, *operation.writes}
        return sum(self._nbytes[tensor] for tensor in tensors) + operation.workspace_bytes

    def step(self, at: int, operation: Operation) -> tuple[list[Tensor], list[Tensor]] | None:
        """What comes in and goes out for an operation; None if it does not fit."""
        if self.need(operation) > self._memory.limit_bytes:
            return None
        tensors = list(dict.fromkeys((*operation.reads, *operation.writes)))
        missing = [tensor for tensor in tensors if tensor not in self._there]
        room = sum(self._nbytes[tensor] for tensor in missing) + operation.workspace_bytes
        outs = list(self._evicted(room, {*tensors}))
        ins = [tensor for tensor in missing if tensor in self.on_host]
        for tensor in missing:
            self._there[tensor] = False
            self._rank[tensor] = (0.0, self._num_came, tensor)
            self._num_came += 1
            self._live += self._nbytes[tensor]
        self.peak = max(self.peak, self._live + operation.workspace_bytes)
        for tensor in operation.writes:
            self._there[tensor] = True
        for tensor in tensors:
            while self.uses[tensor][self._next[tensor]] < at:
                self._next[tensor] += 1
            self._next[tensor] += 1
            rank = (-self._next_use(tensor), self._rank[tensor][1], tensor)
            self._rank[tensor] = rank
            heappush(self._farthest, rank)
        for tensor in operation.frees:
            if self._there.pop(tensor, None) is not None:
                del self._rank[tensor]
                self._live -= self._nbytes[tensor]
            self.on_host.discard(tensor)
        return ins, outs

    def _evicted(self, room: int, but: set[Tensor]) -> Iterator[Tensor]:
        """Makes room, for what is used farthest in the future first."""
        kept = []
        while self._live + room > self._memory.limit_bytes:
            rank = heappop(self._farthest)
            farthest = rank[2]
            if self._rank.get(farthest) != rank:
                continue
            if farthest in but:
                kept.append(rank)
                continue
            changed = self._there.pop(farthest)
            del self._rank[farthest]
            self._live -= self._nbytes[farthest]
            known = farthest in self.on_host
            self.on_host.add(farthest)
            if changed or self._memory.write_back_always or not known:
                yield farthest
        for rank in kept:
            heappush(self._farthest, rank)

    def _next_use(self, tensor: Tensor) -> float:
        left = self.uses[tensor][self._next[tensor] : self._next[tensor] + 1]
        return left[0] if left else float("inf")
