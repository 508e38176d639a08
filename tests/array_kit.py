"""Sub-arrays of equal layers, with made-up bytes and seconds: what builders and searches of arrays
are tried on, without a framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from capture.machine.cluster import Cluster, Machine
from capture.step.sub_array import Bundle, Call, ProgramFacts, StepSegment

MACHINE = Machine.of(Cluster((1,), "h200"))


@dataclass(frozen=True)
class Chain:
    """L layers; each reads what the one before made, and makes two bundles for its backward pass.

    Attributes:
        num_layers: L.
        num_models: All bytes are for so many.
        border_bytes, maps_bytes: What a layer hands on, and what its own passes alone use.
        weight_bytes: Of a layer.
        shared_bytes: Of parameters that every layer reads, and all sub-arrays have alike.
        shared_batch: Whether all sub-arrays read the same batch.
    """

    num_layers: int
    num_models: int = 1
    border_bytes: int = 100
    maps_bytes: int = 400
    weight_bytes: int = 50
    shared_bytes: int = 0
    shared_batch: bool = False

    @property
    def num_leaves(self) -> int:
        return 1

    @cached_property
    def _made(self) -> tuple[list[Bundle], list[StepSegment]]:
        last, bundles = self.num_layers, list[Bundle]()
        reads: list[list[int]] = [[] for _ in range(2 * last)]
        writes: list[list[int]] = [[] for _ in range(2 * last)]

        def add(name, category, nbytes, writer, readers, updater=None, feed=(), shared=False):
            number = len(bundles)
            size = nbytes * (1 if shared else self.num_models)
            bundles.append(Bundle(name, category, size, writer, readers, updater, feed, shared))
            for reader in readers:
                reads[reader].append(number)
            for made in (writer, updater):
                if made is not None:
                    writes[made].append(number)

        readers = 0, 2 * last - 1
        add("batch 0", "batch", 10, None, readers, None, (0,), self.shared_batch)
        if self.shared_bytes:
            readers = tuple(range(2 * last))
            add("shared", "shared", self.shared_bytes, None, readers, shared=True)
        for layer in range(last):
            back = 2 * last - 1 - layer
            add(
                f"layer {layer} parameters 0",
                "parameters",
                self.weight_bytes,
                None,
                (layer, back),
                back,
            )
            for n in range(2):
                add(f"layer {layer} maps {n}", "activations", self.maps_bytes // 2, layer, (back,))
            if layer + 1 < last:
                readers = (layer + 1, back - 1, back)
                add(f"layer {layer} border", "activations", self.border_bytes, layer, readers)
                add(f"layer {layer} cotangents", "cotangents", self.border_bytes, back - 1, (back,))
        add("loss", "loss", 4, last - 1, ())
        pairs = zip(reads, writes, strict=True)
        return bundles, [StepSegment(tuple(r), tuple(w)) for r, w in pairs]

    @property
    def bundles(self) -> list[Bundle]:
        return self._made[0]

    @property
    def segments(self) -> list[StepSegment]:
        return self._made[1]

    @property
    def loss(self) -> int:
        return len(self.bundles) - 1

    def sources(self, targets: Sequence[int], available: frozenset[int]) -> tuple[int, ...]:
        """What the layer read, and what is there of its maps."""
        writer = self.bundles[targets[0]].writer
        read = set(self.segments[writer].reads)
        return tuple(
            sorted(
                read
                | {
                    n
                    for n in available
                    if self.bundles[n].writer == writer
                    and self.bundles[n].readers[0] >= self.num_layers
                }
            )
        )


@dataclass(frozen=True)
class Kit:
    """Programs whose seconds and temporaries follow from their kind.

    Attributes:
        num_layers: Of its own sub-arrays; those of others have programs, too.
        forward_seconds: Of one model; backward twice that.
        shared_bytes, shared_batch: As of ``Chain``.
    """

    num_layers: int
    forward_seconds: float = 1e-6
    shared_bytes: int = 0
    shared_batch: bool = False

    def sub_array(self, num_models: int) -> Chain:
        return _chain(self.num_layers, num_models, self.shared_bytes, self.shared_batch)

    def facts(self, sub_array: Chain, call: Call) -> ProgramFacts:
        models = sub_array.num_models
        made = sum(sub_array.bundles[n].nbytes for n in call.outputs if n not in call.donated)
        # A launch, and what grows with the models.
        seconds = self.forward_seconds * (1 + models) * (2 if call.kind == "backward" else 1)
        name = f"{call} of {models} with {sub_array.num_layers} layers"
        return ProgramFacts(name, made + 20 * models, seconds)


@cache
def _chain(num_layers: int, num_models: int, shared_bytes: int, shared_batch: bool) -> Chain:
    return Chain(num_layers, num_models, shared_bytes=shared_bytes, shared_batch=shared_batch)
