"""How long training over virtual memory takes, and what it moves: every GPU runs its operations in
the order of its framework, and a manager swaps tensors when they do not fit
(``virtual_memory``). Operations wait for what they miss: nothing is prefetched, since
nothing is known of what comes.

Source: Li et al. 2022 (Harmony), 2 and 5.1 (IBM-LMS under each GPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from capture.papers.harmony.virtual_memory import GpuOperation, Manager, Tensor
from capture.step.simulator import times


@dataclass
class Swapped:
    """The time, transfers and memory of operations run over virtual memory.

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
class GpuMemory:
    """The memory limit of every GPU, and the bandwidths of its links.

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
    operations: Sequence[GpuOperation],
    nbytes: dict[Tensor, int],
    initial: Iterable[tuple[int, Tensor]],
    memory: GpuMemory,
    *,
    alone: bool = False,
) -> Swapped:
    """Run operations on GPUs with managers, twice, and return the second step: what is there when
    the first ends serves it.

    Args:
        operations: In an order in which each comes after those that it waits for.
        nbytes: Per tensor.
        initial: (GPU, tensor) of weights and state, on the host before the step.
        memory: Sizes and links.
        alone: Once: nothing stays on a GPU between steps, so what is left is written back.
    """
    managers = _managers(operations, nbytes, initial, memory)
    num_gpus = len(managers)
    batch = [(gpu, tensor) for gpu, tensor in initial if tensor[0] == "X"]
    found, items = Swapped(), _SwapItems(num_gpus, memory)
    on_host = found.host_bytes = sum(nbytes[tensor] for _, tensor in initial)
    for step in range(1 if alone else 2):
        for gpu, tensor in batch:
            managers[gpu].on_host.add(tensor)
        found.busy_seconds = [0.0] * num_gpus
        found.volumes_bytes.clear()
        for at, operation in enumerate(operations):
            manager = managers[operation.gpu]
            moved = manager.step(step * len(operations) + at, operation)
            if moved is None:
                layer = (operation.reads or operation.writes)[0][1]
                found.missing = (layer, operation.need(nbytes))
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
        if not alone:
            items.end_step()
    _, ends = times(items.seconds, items.after, items.streams)
    before = max(ends[: items.first_of_last], default=0.0)
    found.seconds = max(ends) - before
    for manager in managers if alone else ():
        for tensor in manager.left():
            found.volumes_bytes[f"{tensor[0]} out"] += nbytes[tensor]
            found.seconds += nbytes[tensor] / memory.swap_bytes_per_second / num_gpus
    found.peak_bytes = [manager.peak for manager in managers]
    return found


def _managers(
    operations: Sequence[GpuOperation],
    nbytes: dict[Tensor, int],
    initial: Iterable[tuple[int, Tensor]],
    memory: GpuMemory,
) -> list[Manager]:
    """Return one manager per GPU, told of what is on the host and of every use in two steps."""
    managers = [
        Manager(nbytes, memory.limit_bytes, always=memory.write_back_always)
        for _ in range(1 + max(operation.gpu for operation in operations))
    ]
    for gpu, tensor in initial:
        managers[gpu].on_host.add(tensor)
    for at, operation in enumerate((*operations, *operations)):
        for tensor in operation.tensors:
            managers[operation.gpu].uses[tensor].append(at)
    return managers


class _SwapItems:
    """The items of operations and their swaps, on the streams of their GPUs."""

    def __init__(self, num_gpus: int, memory: GpuMemory):
        self._memory = memory
        self._computed: list[int] = []
        self._last = [-1] * num_gpus
        self._begun: tuple[int, ...] = ()
        self.first_of_last = 0
        self.seconds: list[float] = []
        self.after: list[tuple[int, ...]] = []
        self.streams: list[tuple[tuple[int, str], ...]] = []

    def end_step(self) -> None:
        """End a step, once: operations of the next one wait for those of all GPUs."""
        if not self.first_of_last:
            self.first_of_last = len(self.seconds)
            self._computed.clear()
            self._begun = tuple(at for at in self._last if at >= 0)

    def add(self, operation: GpuOperation, bytes_in: int, bytes_out: int) -> float:
        """Add an operation, and return the seconds that it takes with its swaps."""
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
