"""What the builder of a step of packs asks of a model: how many bytes its packs read, make and
keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Span

PackPass = Literal["forward", "backward", "accumulate", "update", "reduce"]
"""``accumulate`` is a backward pass that adds its gradients to those that are there; ``update`` is
that of a device, and ``reduce`` adds the gradients of all."""


class PackSizes(Protocol):
    """Bytes of the layers of a model, in packs of layers [first, stop).

    A parameter belongs to the first layer that reads it, and is *shared* in the packs of others.
    """

    @property
    def num_layers(self) -> int: ...

    def weight_bytes(self, span: Span) -> int:
        """Parameters and buffers that belong to layers."""
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


@dataclass(frozen=True)
class ProfileSizes:
    """Those of a layer profile, which knows the sizes of layers and none of their arrays but for
    the parameters that several layers read: the batch is the input of the first layer. Buffers of
    profiles that name no such parameters belong to their layers."""

    profile: LayerProfile

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def weight_bytes(self, span: Span) -> int:
        if self.profile.shared:
            return sum(self.profile.w_bytes[span[0] : span[1]])
        return self.profile.weight_bytes(*span)

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

    def values(self, layer: int) -> tuple[int, ...]:
        return (layer,)

    def value_bytes(self, layer: int, examples: int, values: tuple[int, ...] | None = None) -> int:
        return examples * self.profile.x_bytes_per_sample[layer] if layer < self.num_layers else 0

    def gradient_bytes(self, layer: int, examples: int) -> int:
        return self.value_bytes(layer, examples)

    def batch(self, span: Span) -> tuple[int, ...]:
        return (0,) if span[0] == 0 else ()

    def batch_bytes(self, span: Span, examples: int) -> int:
        return self.value_bytes(0, examples) if span[0] == 0 else 0

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """The peak of layers holds their weights and the input; backward, also their gradients,
        which a pass that adds to those that are there makes layer by layer, as compiled programs
        do; the released profiles are of a framework that adds in place. An update writes over what
        it reads; what reduces gradients does not."""
        if which in ("update", "reduce"):
            return output_bytes
        (first, stop), weights = pack, self.profile.weight_bytes(*pack)
        layers = self.profile.at("forward" if which == "forward" else "backward", size)
        own = layers.pack_bytes(first, stop) - weights - layers.inputs[first]
        if which == "forward":
            return max(own, layers.inputs[stop], 0)
        if which == "accumulate":
            alone = range(first, stop) if self.profile.model_hashes else ()
            largest = max((self.profile.weight_bytes(i, i + 1) for i in alone), default=0)
            return max(own - weights + largest, output_bytes)
        made = self.weight_bytes(pack) + sum(map(self.param_bytes, self.shared(pack)))
        return max(own, output_bytes + made)
