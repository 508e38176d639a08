"""What the builder of a step of packs asks of a model: how many bytes its packs read, make and
keep."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from capture.measured.layer_profile import LayerProfile
from capture.model.graph import LayerGraph
from capture.plan.task_graph import Span

#: Of what layers need one by one beside weights and inputs, what packs of them need more: twice
#: what was seen, statistics of rows that stay where in a layer alone they did not (0.08 %, a small
#: GPT on CPU; ``benchmarks/harmony_memory.py``).
_MORE_IN_PACKS = 1 / 512

PackPass = Literal["forward", "backward", "accumulate", "update", "reduce", "gather", "scatter"]
"""``accumulate`` is a backward pass that adds its gradients to those that are there; ``update`` is
that of a device, and ``reduce`` adds the gradients of all. Where each has a share, ``gather`` makes
weights whole, and ``scatter`` adds gradients."""

PartOf = Literal["weights", "whole", "casts", "shared", "shared gradient"]
"""Of layers: parameters or the sums of their gradients, those parameters that devices get as they
are, casts of the others; a parameter of another pack as a device gets it, and its gradient."""


class PackSizes(Protocol):
    """Bytes of the layers of a model, in packs of layers [first, stop).

    A parameter belongs to the first layer that reads it, and is *shared* in the packs of others.
    """

    @property
    def num_layers(self) -> int: ...

    def weight_bytes(self, span: Span) -> int:
        """Parameters and buffers that belong to layers; the sums of their gradients."""
        ...

    def cast_bytes(self, span: Span) -> int:
        """Casts that devices get instead of some of these parameters."""
        ...

    def whole_bytes(self, span: Span) -> int:
        """The others."""
        ...

    def cast(self, span: Span) -> tuple[int, ...]:
        """Parameters that devices get as casts."""
        ...

    def alone_bytes(self, span: Span) -> int:
        """Gradients that a single pass makes, where those of casts are as good."""
        ...

    def share_bytes(self, what: PartOf, of: Span | int, which: int) -> int:
        """The share of a device, of layers or a parameter."""
        ...

    def state_bytes(self, pack: Span) -> int:
        """Their optimizer state, where the layers are updated together."""
        ...

    def summary_bytes(self, pack: Span) -> int:
        """What the updates of other packs need of their gradients; 0 where those need nothing."""
        ...

    def shared(self, pack: Span) -> tuple[int, ...]:
        """Parameters that layers read and that belong to earlier ones."""
        ...

    def owned(self, span: Span) -> tuple[int, ...]:
        """Parameters that belong to layers, as their weights hold them."""
        ...

    def owner(self, param: int) -> int:
        """The layer that a parameter belongs to."""
        ...

    def param_bytes(self, param: int) -> int: ...

    def streamed_bytes(self, param: int) -> int:
        """Of a parameter, what a device gets."""
        ...

    def values(self, layer: int) -> tuple[int, ...]:
        """What enters a layer, ascending in the order in which it is made; what skips over several
        layers enters each."""
        ...

    def value_bytes(self, layer: int, examples: int, values: tuple[int, ...] | None = None) -> int:
        """What enters a layer, or some of it."""
        ...

    def gradient_bytes(self, layer: int, examples: int) -> int:
        """Its gradient."""
        ...

    def batch(self, span: Span) -> tuple[int, ...]:
        """Leaves of the batch that layers read."""
        ...

    def batch_bytes(self, span: Span, examples: int) -> int: ...

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """Temporaries and results of a pass, less what they are written over.

        Args:
            which: The pass.
            pack: Its layers.
            size: Examples of the micro-batch; 0 of what has none.
            output_bytes: Results that are written over nothing, without the sum of the gradients.
        """
        ...


class GraphPacks:
    """What packs of the layers of a graph have, whatever their programs need. Whoever inherits it
    says which parameters layers own, and what devices get of them.

    Attributes:
        graph: At any micro-batch size.
        casts: Parameters that devices get as casts.
    """

    graph: LayerGraph
    casts: Container[int]

    def owned(self, span: Span) -> tuple[int, ...]:
        raise NotImplementedError

    def streamed_bytes(self, param: int) -> int:
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        return self.graph.num_layers

    def weight_bytes(self, span: Span) -> int:
        return sum(map(self.param_bytes, self.owned(span)))

    def cast_bytes(self, span: Span) -> int:
        return sum(map(self.streamed_bytes, self.cast(span)))

    def whole_bytes(self, span: Span) -> int:
        return sum(self.param_bytes(p) for p in self.owned(span) if p not in self.casts)

    def cast(self, span: Span) -> tuple[int, ...]:
        return tuple(p for p in self.owned(span) if p in self.casts)

    def owner(self, param: int) -> int:
        return self.graph.param_owner(param)

    def param_bytes(self, param: int) -> int:
        return self.graph.params[param].nbytes

    def values(self, layer: int) -> tuple[int, ...]:
        return self.graph.crossing(layer)


@dataclass(frozen=True)
class ProfileSizes:
    """Those of a layer profile, which knows the sizes of layers and none of their arrays but for
    the parameters that several layers read: the batch is the input of the first layer. Buffers of
    profiles that name no such parameters belong to their layers.

    Attributes:
        profile: Of the layers.
        num_shares: Into which weights are cut, one for each device.
    """

    profile: LayerProfile
    num_shares: int = 1

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def weight_bytes(self, span: Span) -> int:
        return self.profile.weight_bytes(*span) - self._borrowed(self.profile.b_bytes, span)

    def cast_bytes(self, span: Span) -> int:
        return self.profile.cast_bytes(*span)

    def whole_bytes(self, span: Span) -> int:
        borrowed = self._borrowed(self.profile.as_sent.b_bytes, span)
        return self.profile.streamed_bytes(*span) - borrowed - self.profile.cast_bytes(*span)

    def cast(self, span: Span) -> tuple[int, ...]:
        """Of those that are shared."""
        return tuple(p for p in self.owned(span) if self.streamed_bytes(p) < self.param_bytes(p))

    def alone_bytes(self, span: Span) -> int:
        borrowed = self._borrowed(self.profile.b_bytes, span)
        return self.profile.gradient_bytes(*span, alone=True) - borrowed

    def _borrowed(self, row: Sequence[int], span: Span) -> int:
        """Of parameters of other layers, which are not buffers."""
        return sum(row[span[0] : span[1]]) if self.profile.shared else 0

    def share_bytes(self, what: PartOf, of: Span | int, which: int) -> int:
        sizes: Mapping[PartOf, Callable[[Any], int]] = {
            "weights": self.weight_bytes,
            "whole": self.whole_bytes,
            "casts": self.cast_bytes,
            "shared": self.streamed_bytes,
            "shared gradient": self.param_bytes,
        }
        nbytes = sizes[what](of)
        return (which + 1) * nbytes // self.num_shares - which * nbytes // self.num_shares

    def state_bytes(self, pack: Span) -> int:
        return self.profile.state_bytes(*pack)

    def summary_bytes(self, pack: Span) -> int:
        return self.profile.summary_bytes

    def shared(self, pack: Span) -> tuple[int, ...]:
        return tuple(
            param
            for param, (_, owner, *readers) in enumerate(self.profile.shared)
            if owner < pack[0] and any(pack[0] <= layer < pack[1] for layer in readers)
        )

    def owned(self, span: Span) -> tuple[int, ...]:
        """Of those that are shared."""
        every = range(len(self.profile.shared))
        return tuple(param for param in every if span[0] <= self.owner(param) < span[1])

    def owner(self, param: int) -> int:
        return self.profile.shared[param][1]

    def param_bytes(self, param: int) -> int:
        return self.profile.shared[param][0]

    def streamed_bytes(self, param: int) -> int:
        return self.profile.as_sent.shared[param]

    def values(self, layer: int) -> tuple[int, ...]:
        return (layer,)

    def value_bytes(self, layer: int, examples: int, values: tuple[int, ...] | None = None) -> int:
        return examples * self.profile.x_bytes_per_sample[layer] if layer < self.num_layers else 0

    def gradient_bytes(self, layer: int, examples: int) -> int:
        return self.value_bytes(layer, examples)

    def batch(self, span: Span) -> tuple[int, ...]:
        return tuple(
            leaf
            for leaf, (_, *readers) in enumerate(self._batch)
            if any(span[0] <= layer < span[1] for layer in readers)
        )

    def batch_bytes(self, span: Span, examples: int) -> int:
        return examples * sum(self._batch[leaf][0] for leaf in self.batch(span))

    @property
    def _batch(self) -> tuple[tuple[int, ...], ...]:
        return self.profile.batch or ((self.profile.x_bytes_per_sample[0], 0),)

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """The peak of layers holds their weights and the input; backward, also their gradients,
        which a pass that adds to those that are there makes layer by layer, as compiled programs
        do; the released profiles are of a framework that adds in place. What is read of the batch
        is there before, and compilers keep a little more in a pack than in its layers. An update
        writes over what it reads; what reduces gradients does not."""
        if which in ("update", "reduce", "gather", "scatter"):
            return output_bytes
        (first, stop), weights = pack, self.profile.weight_bytes(*pack)
        layers = self.profile.at("forward" if which == "forward" else "backward", size)
        come = self.profile.streamed_bytes(first, stop)
        own = layers.pack_bytes(first, stop) - come - layers.inputs[first]
        own -= size * self.profile.batch_bytes(first, stop)
        if self.profile.model_hashes and stop > first + 1:
            own += int(_MORE_IN_PACKS * own)
        if which == "forward":
            return max(own, layers.inputs[stop], 0)
        if which == "accumulate":
            alone = range(first, stop) if self.profile.model_hashes else ()
            largest = max((self.profile.weight_bytes(i, i + 1) for i in alone), default=0)
            return max(own - weights + largest, output_bytes)
        made = self.weight_bytes(pack) + sum(map(self.param_bytes, self.shared(pack)))
        return max(own, output_bytes + made)
