"""What the lowering of packs asks of a model: what its layers read, and how many bytes that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from capture.measured.layer_profile import LayerProfile
from capture.model.graph import LayerGraph
from capture.plan.task_graph import Span
from capture.step.holds import Leaves, Params, State, Summary, Values

#: Of what layers need one by one beside weights and inputs, what packs of them need more: twice
#: what was seen, statistics of rows that stay where in a layer alone they did not (0.08 %, a small
#: GPT on CPU; ``benchmarks/harmony_memory.py``).
_MORE_IN_PACKS = 1 / 512

PackPass = Literal[
    "forward", "backward", "accumulate", "update", "reduce", "gather", "scatter", "summarize",
    "widen", "cast",
]  # fmt: skip
"""``accumulate`` is a backward pass that adds its gradients to those that are there; ``update`` is
that of a device or a host, and ``reduce`` adds the gradients of all devices. Where each has a
share, ``gather`` makes weights whole, and ``scatter`` adds gradients. The others run on hosts."""


@dataclass(frozen=True)
class PackLayers:
    """The parameters, values and batch leaves that layers read, in packs of layers [first, stop).

    A parameter belongs to the first layer that reads it, and is *shared* in the packs of others.

    Attributes:
        params: By layer, the parameters that it reads.
        values: By layer, what enters it, ascending in the order in which it is made; what skips
            over several layers enters each. One more, what leaves the last.
        batch: By layer, the leaves of the batch that it reads.
        casts: Parameters that devices get as casts.
    """

    params: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    batch: tuple[tuple[int, ...], ...]
    casts: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: LayerGraph, casts: Iterable[int] = ()) -> PackLayers:
        """Return the layers of a graph as packs read them."""
        layers, values = graph.layers, map(graph.crossing, range(graph.num_layers + 1))
        params = tuple(layer.params for layer in layers)
        return cls(params, tuple(values), tuple(one.batch for one in layers), frozenset(casts))

    def __len__(self) -> int:
        return len(self.params)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The layer that each parameter belongs to."""
        numbered = reversed([*enumerate(self.params)])
        return {param: layer for layer, params in numbered for param in params}

    def read(self, span: Span) -> Iterator[int]:
        """Yield the parameters that layers read, each once."""
        return iter(dict.fromkeys(p for params in self.params[slice(*span)] for p in params))

    def owned(self, span: Span) -> tuple[int, ...]:
        """Return the parameters that belong to layers, as their weights hold them."""
        return tuple(p for p in self.read(span) if self.owner[p] >= span[0])

    def shared(self, span: Span) -> tuple[int, ...]:
        """Return the parameters that layers read and that belong to earlier ones."""
        return tuple(p for p in self.read(span) if self.owner[p] < span[0])

    def cast(self, span: Span) -> tuple[int, ...]:
        """Return the parameters that belong to layers and that devices get as casts."""
        return tuple(p for p in self.owned(span) if p in self.casts)

    def leaves(self, span: Span) -> tuple[int, ...]:
        """Return the leaves of the batch that layers read."""
        return tuple(sorted({leaf for leaves in self.batch[slice(*span)] for leaf in leaves}))


class PackSizes(Protocol):
    """The bytes of a model in packs."""

    @property
    def layers(self) -> PackLayers: ...

    def nbytes(self, holds: object) -> int:
        """Return the bytes of the arrays of a slot that holds this (``capture.step.holds``)."""
        ...

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """Return the temporaries and results of a pass, less what they are written over.

        Args:
            size: Examples of the micro-batch; 0 of what has none.
            output_bytes: Results that are written over nothing, without the sum of the gradients.
        """
        ...


@dataclass(frozen=True)
class ProfileSizes:
    """The bytes of packs from a layer profile, which knows the sizes of layers and none of their
    arrays but for shared parameters. To every layer belong two more parameters: what devices get as
    it is and what they get as casts. The batch is the input of the first layer. Buffers of profiles
    that name no shared parameters belong to their layers.

    Attributes:
        num_shares: Into which weights are cut, one for each device.
    """

    profile: LayerProfile
    num_shares: int = 1

    @cached_property
    def layers(self) -> PackLayers:
        count, params = range(self.profile.num_layers), self._params
        shared = [(p, {*readers}) for p, (_, *readers) in enumerate(self.profile.shared)]
        leaves = [(leaf, {*readers}) for leaf, (_, *readers) in enumerate(self._batch)]
        return PackLayers(
            tuple(
                (*(p for p, by in shared if i in by), *(p for p in self._own(i) if p in params))
                for i in count
            ),
            tuple((i,) for i in (*count, len(count))),
            tuple(tuple(leaf for leaf, by in leaves if i in by) for i in count),
            frozenset(p for p, of in params.items() if of["sent"] < of["whole"]),
        )

    def _own(self, layer: int) -> tuple[int, int]:
        """Return the ids of a layer's two unshared parameters: sent as it is, and sent as casts."""
        first = len(self.profile.shared) + 2 * layer
        return first, first + 1

    @cached_property
    def _params(self) -> Mapping[int, Mapping[str, int]]:
        """The bytes of every parameter in each form (``Params.form``), by its id."""
        profile, sent = self.profile, self.profile.as_sent
        found: dict[int, Mapping[str, int]] = {
            p: {"whole": whole, "sent": as_sent, "alone": whole}
            for p, ((whole, *_), as_sent) in enumerate(
                zip(profile.shared, sent.shared, strict=True)
            )
        }
        for i in range(profile.num_layers):
            at, (own, cast) = (i, i + 1), self._own(i)
            all_casts = casts = profile.cast_bytes(*at)
            left = Counter(whole=profile.weight_bytes(*at), sent=profile.streamed_bytes(*at))
            left["alone"] = profile.gradient_bytes(*at, alone=True)
            if profile.shared:  # buffers are those of other layers
                borrowed = profile.b_bytes[i]
                left.subtract({"whole": borrowed, "sent": sent.b_bytes[i], "alone": borrowed})
            for of in [found[p] for p, (_, owner, *_) in enumerate(profile.shared) if owner == i]:
                left.subtract(of)
                casts -= of["sent"] if of["sent"] < of["whole"] else 0
            as_it_is = left["sent"] - casts if all_casts else left["whole"]
            found[own] = dict.fromkeys(left, as_it_is)
            if all_casts:
                found[cast] = {form: n - as_it_is for form, n in left.items()}
        return found

    def nbytes(self, holds: object) -> int:
        profile = self.profile
        match holds:
            case Params(ids, form, share):
                whole = sum(self._params[p][form] for p in ids)
                if share is None:
                    return whole
                cuts = [(share + i) * whole // self.num_shares for i in (0, 1)]
                return cuts[1] - cuts[0]
            case State(params):
                layers = {self.layers.owner[p] for p in params}
                return sum(profile.state_bytes(layer, layer + 1) for layer in layers)
            case Summary():
                return profile.summary_bytes
            case Values(ids, (first, stop)):
                x = (*profile.x_bytes_per_sample, 0)
                return (stop - first) * sum(x[layer] for layer in ids)
            case Leaves(ids, (first, stop)):
                return (stop - first) * sum(self._batch[leaf][0] for leaf in ids)
        return 4  # a loss

    @property
    def _batch(self) -> Sequence[tuple[int, ...]]:
        return self.profile.batch or ((self.profile.x_bytes_per_sample[0], 0),)

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """Return the temporaries and results of a pass, less what they are written over, from the
        peaks of its layers. A layer's peak holds its weights and input; backward, also its
        gradients. A pass that adds to gradients makes them layer by layer, as compiled programs do;
        the released profiles are of a framework that adds in place. What is read of the batch is
        there before, and compilers keep a little more in a pack than in its layers. An update
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
        whole = self.nbytes(Params(tuple(self.layers.read(pack))))
        return max(own, output_bytes + whole)
