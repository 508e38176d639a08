"""Training over virtual memory: every GPU runs its operations in the order of its framework, and a
manager that knows only this GPU swaps tensors when they do not fit.

What is evicted is used farthest in the future (Belady's rule: no manager that reacts swaps less),
and is written back always, or only where it changed.

Source: Li et al. 2022 (Harmony), 2 and 5.1 (IBM-LMS under each GPU).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Tensor = tuple[str, int, int]
"""(what, layer, micro-batch); what is W, dW, K, X (an input), A (what a pass keeps beside), dX."""


@dataclass(frozen=True)
class GpuOperation:
    """A pass of one layer on one micro-batch, or an update.

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

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it reads or writes, each once."""
        return list(dict.fromkeys((*self.reads, *self.writes)))

    def need(self, nbytes: Mapping[Tensor, int]) -> int:
        """Return the bytes of the operation by itself: what it reads, writes and works in."""
        return sum(nbytes[tensor] for tensor in self.tensors) + self.workspace_bytes


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of all layers at a micro-batch size, as managers see them.

    Attributes:
        weights, state: Bytes of every layer, and of its optimizer state.
        inputs, gradients: Of what enters every layer, and of its gradient.
        kept: What a forward pass keeps beside, for the backward pass.
        forward_work, backward_work: What passes take beside what they read and write.
        forward_seconds, backward_seconds: Of the passes.
        remat: Whether the backward pass computes the forward pass of a layer again; then nothing is
            kept.
    """

    weights: Sequence[int]
    state: Sequence[int]
    inputs: Sequence[int]
    gradients: Sequence[int]
    kept: Sequence[int]
    forward_work: Sequence[int]
    backward_work: Sequence[int]
    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    remat: bool = False

    @property
    def count(self) -> int:
        return len(self.weights)

    def nbytes(self, num_microbatches: int) -> dict[Tensor, int]:
        found: dict[Tensor, int] = {}
        for i in range(self.count):
            found[("W", i, 0)] = found[("dW", i, 0)] = found[("W2", i, 0)] = self.weights[i]
            found[("K", i, 0)] = self.state[i]
            for m in range(num_microbatches):
                found[("X", i, m)], found[("dX", i, m)] = self.inputs[i], self.gradients[i]
                found[("A", i, m)] = self.kept[i]
        for m in range(num_microbatches):
            found[("X", self.count, m)] = 0
        return found

    def ahead(self, gpu: int, i: int, m: int, after: tuple[tuple[int, int], ...]) -> GpuOperation:
        """Return the forward pass of a layer on a micro-batch."""
        kept: tuple[Tensor, ...] = () if self.remat else (("A", i, m),)
        writes: tuple[Tensor, ...] = (*kept, ("X", i + 1, m))
        reads: tuple[Tensor, ...] = (("W", i, 0), ("X", i, m))
        seconds, work = self.forward_seconds[i], self.forward_work[i]
        return GpuOperation(gpu, seconds, reads, writes, (), work, after)

    def back(self, gpu: int, i: int, m: int, after: tuple[tuple[int, int], ...]) -> GpuOperation:
        """Return the backward pass of a layer on a micro-batch."""
        kept: tuple[Tensor, ...] = () if self.remat else (("A", i, m),)
        above: tuple[Tensor, ...] = (("dX", i + 1, m),) if i + 1 < self.count else ()
        dx: tuple[Tensor, ...] = (("dX", i, m),) if i else ()
        reads = (("W", i, 0), ("X", i, m), *kept, *above)
        frees = (("X", i, m), ("X", i + 1, m), *kept, *above)
        writes = (("dW", i, 0), *dx)
        seconds, work = self.backward_seconds[i], self.backward_work[i]
        return GpuOperation(gpu, seconds, reads, writes, frees, work, after)

    def update(self, gpu: int, i: int, seconds: float, versions: int) -> GpuOperation:
        """Return the update of a layer on the GPU, which adds gradients of all first; with two
        versions it writes into the other one."""
        changed: tuple[Tensor, ...] = (("K", i, 0), ("W2" if versions > 1 else "W", i, 0))
        reads = (("W", i, 0), ("dW", i, 0), *changed)
        return GpuOperation(gpu, seconds, reads, changed, (("dW", i, 0),))

    def data_parallel(
        self, num_microbatches: int, update_seconds: Sequence[float]
    ) -> list[GpuOperation]:
        """Return a step of one of the GPUs, which all do the same: passes with accumulated
        gradients, and updates."""
        operations = []
        for m in range(num_microbatches):
            operations += [self.ahead(0, i, m, ()) for i in range(self.count)]
            operations += [self.back(0, i, m, ()) for i in reversed(range(self.count))]
        updates = enumerate(update_seconds)
        return [*operations, *(self.update(0, i, seconds, 1) for i, seconds in updates)]

    def initial(self, num_microbatches: int) -> list[Tensor]:
        """Return the tensors that are on the host before a step: weights, state, and the batch."""
        kept: list[Tensor] = [(what, i, 0) for i in range(self.count) for what in ("W", "K")]
        return [*kept, *(("X", 0, m) for m in range(num_microbatches))]


class Manager:
    """The manager of one GPU's memory, which swaps tensors that do not fit.

    Args:
        nbytes: Per tensor.
        limit_bytes: Of the GPU.
        always: Whether what did not change is written back, too.

    Attributes:
        uses: Per tensor, the positions of the operations that use it, ascending; filled before the
            first.
        on_host: What has its place there, or was written back.
        peak: Bytes.
    """

    def __init__(self, nbytes: Mapping[Tensor, int], limit_bytes: float, *, always: bool = True):
        self._nbytes, self._limit_bytes, self._always = nbytes, limit_bytes, always
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

    def step(self, at: int, operation: GpuOperation) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the tensors that come in and go out for an operation; None if it does not fit."""
        if operation.need(self._nbytes) > self._limit_bytes:
            return None
        tensors = operation.tensors
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
        """Evict tensors, those used farthest in the future first, until ``room`` fits; yield those
        that are written back."""
        kept = []
        while self._live + room > self._limit_bytes:
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
            if changed or self._always or not known:
                yield farthest
        for rank in kept:
            heappush(self._farthest, rank)

    def left(self) -> list[Tensor]:
        """Return the tensors on the GPU that are written back if nothing stays between steps."""
        return [t for t, changed in self._there.items() if changed or self._always]

    def _next_use(self, tensor: Tensor) -> float:
        left = self.uses[tensor][self._next[tensor] : self._next[tensor] + 1]
        return left[0] if left else float("inf")
