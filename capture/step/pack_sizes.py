"""What the builder of a step of packs asks of a model: how many bytes its packs read, make and
keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Span

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

    def whole(self, span: Span) -> tuple[int, ...] | None:
        """Where those are among the parameters of the layers; None for all."""
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


@dataclass(frozen=True)
class ProfileSizes:
    """Those of a layer profile, which knows the sizes of layers and none of their arrays: nothing
    is shared, and the batch is the input of the first layer.

    Attributes:
        profile: Of the layers.
        num_shares: Into which weights are cut, one for each device.
        num_lanes: Devices that make gradients of the same parameters.
    """

    profile: LayerProfile
    num_shares: int = 1
    num_lanes: int = 1

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def weight_bytes(self, span: Span) -> int:
        return self.profile.weight_bytes(*span)

    def cast_bytes(self, span: Span) -> int:
        return self.profile.cast_bytes(*span)

    def whole_bytes(self, span: Span) -> int:
        return self.profile.streamed_bytes(*span) - self.profile.cast_bytes(*span)

    def whole(self, span: Span) -> None:
        return None

    def cast(self, span: Span) -> tuple[int, ...]:
        raise AssertionError("a layer profile has no parameters")

    def alone_bytes(self, span: Span) -> int:
        return self.profile.gradient_bytes(*span, alone=True)

    def share_bytes(self, what: PartOf, of: Span | int, which: int) -> int:
        assert isinstance(of, tuple), "a layer profile has no parameters"
        sizes = {"weights": self.weight_bytes, "whole": self.whole_bytes, "casts": self.cast_bytes}
        nbytes = sizes[what](of)
        return (which + 1) * nbytes // self.num_shares - which * nbytes // self.num_shares

    def state_bytes(self, pack: Span) -> int:
        return self.profile.state_bytes(*pack)

    def summary_bytes(self, pack: Span) -> int:
        return self.profile.summary_bytes

    def shared(self, pack: Span) -> tuple[int, ...]:
        return ()

    def owned(self, span: Span) -> tuple[int, ...]:
        raise AssertionError("a layer profile has no parameters")

    def owner(self, param: int) -> int:
        raise AssertionError("a layer profile has no parameters")

    def param_bytes(self, param: int) -> int:
        raise AssertionError("a layer profile has no parameters")

    def streamed_bytes(self, param: int) -> int:
        raise AssertionError("a layer profile has no parameters")

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
        if which == "update" and self.profile.model_hashes:
            # Parameters that later layers read may be of this pack: an update on a device then adds
            # their gradients of all devices.
            own, later = self.weight_bytes(pack), self.profile.b_bytes[pack[1] :]
            return self.num_lanes * sum(min(own, nbytes) for nbytes in later)
        if which in ("update", "reduce", "gather", "scatter"):
            return output_bytes
        (first, stop), weights = pack, self.weight_bytes(pack)
        layers = self.profile.at("forward" if which == "forward" else "backward", size)
        come = self.profile.streamed_bytes(first, stop)
        own = layers.pack_bytes(first, stop) - come - layers.inputs[first]
        if which == "forward":
            return max(own, layers.inputs[stop], 0)
        if which == "accumulate":
            made = range(first, stop) if self.profile.model_hashes else ()
            largest = max((self.profile.weight_bytes(i, i + 1) for i in made), default=0)
            return max(own - weights + largest, output_bytes)
        return max(own, output_bytes + weights)
