"""What every layer of a model needs by itself, for several micro-batch sizes, and how its needs at
other sizes follow: what packs of layers are chosen from. Framework-free.

A file is JSON, in the form in which the profiles of Harmony's authors are kept:

    name, num_layers          the criterion counts as the last layer
    fwd, bwd                  u: profiled micro-batch sizes, ascending; time and memory: per size,
                              per layer, seconds and bytes. Memory is the peak of the layer run
                              alone, its weights and its input included. What is backward includes
                              the forward pass that is computed again
    x_bytes_per_sample        of the input of each layer
    w_bytes, b_bytes, k_bytes weights, buffers, optimizer state
    update_cpu_time           seconds of an update on the host
    units, note, source       for people; the units are seconds and bytes

and, where ``capture profile`` wrote it:

    add_seconds               of every layer, to add its gradients to those of other micro-batches
                              on the device
    workload                  location, function, arguments
    model_hashes              of the traced loss, by micro-batch size
    coupled                   why both directions need micro-batches of one size; empty if they do
                              not
    shared                    of every parameter that several layers read: bytes, the layer that it
                              belongs to, and the others; they are in b_bytes of these
    batch                     of every leaf of the batch: bytes per example, and the layers that
                              read it; without it, the batch is what the first layer reads
    summary_bytes             of what an update needs of the gradients of each other pack, such as
                              their norm; 0 if nothing, and updates need not come last
    casts                     by dtype, what devices need of layers whose parameters they get as
                              casts to it: w_bytes and b_bytes of what comes, cast_bytes of a
                              layer's own casts among that, gradient_bytes of what goes back if one
                              micro-batch makes it
    streamed                  as which of these dtypes they get them; empty: as they are
    made                      backend, versions, limit_bytes; the stride between sizes, the sizes
                              that were tried and the largest that fits, by direction; failures

Source: Li et al. 2022 (Harmony), 4.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from capture import documents
from capture.errors import ProfileError, Violation
from capture.measured.layer_passes import (
    Pass,
    PassProfile,
    SizedLayers,
    interpolated,
    pass_violations,
    row_violations,
)
from capture.memo import memo
from capture.model.workload import WorkloadSpec, of_document

LAYERS = documents.Format(
    "layer profile",
    ProfileError,
    "layers",
    "see capture/measured/layer_profile.py, which says what it holds",
    not_json="file",
    strict=True,
)

_UNITS = {"time": "seconds", "memory": "bytes"}


@dataclass(frozen=True)
class Casts:
    """The bytes per layer where devices get parameters as casts to a dtype, those that layers read
    only through this cast.

    Attributes:
        w_bytes, b_bytes: Bytes of weights and buffers, as devices get them.
        cast_bytes: Bytes of the casts among ``w_bytes``: the host keeps them beside the parameters.
        gradient_bytes: Bytes of the gradients of a single pass, where those of casts are as good.
        shared: Bytes of every parameter that several layers read, as devices get it.
    """

    w_bytes: tuple[int, ...]
    b_bytes: tuple[int, ...]
    cast_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerProfile:
    """The measurements of a model, layer by layer. Indices of layers count from 0; see the module
    for the fields."""

    name: str
    num_layers: int
    fwd: PassProfile
    bwd: PassProfile
    x_bytes_per_sample: tuple[int, ...]
    w_bytes: tuple[int, ...]
    b_bytes: tuple[int, ...]
    k_bytes: tuple[int, ...]
    update_cpu_time: tuple[float, ...]
    add_seconds: tuple[float, ...] = ()
    units: Mapping[str, str] = field(default_factory=lambda: dict(_UNITS), hash=False)
    note: str = ""
    source: str = ""
    workload: WorkloadSpec | None = None
    model_hashes: Mapping[int, str] = field(default_factory=dict, hash=False)
    coupled: str = ""
    shared: tuple[tuple[int, ...], ...] = ()
    batch: tuple[tuple[int, ...], ...] = ()
    summary_bytes: int = 0
    made: Mapping[str, Any] = field(default_factory=dict, hash=False)
    casts: Mapping[str, Casts] = field(default_factory=dict, hash=False)
    streamed: str = ""

    def __post_init__(self) -> None:
        ProfileError.check(self._violations())

    @classmethod
    def load(cls, path: Path | str) -> LayerProfile:
        """Read a layer profile from a file.

        Raises:
            ProfileError: ``layers-file`` if it cannot be read or is no JSON, and those of
                ``from_json``.
        """
        profile = of_document(LAYERS.load(path, cls.from_json), path)
        if profile.workload is None:
            return profile
        workload = profile.workload.resolved_from(Path(path).parent)
        return replace(profile, workload=workload)

    @classmethod
    def from_json(cls, data: object) -> LayerProfile:
        """Read a layer profile from the document that ``to_json`` returned.

        Raises:
            ProfileError: ``layers-corrupt`` for a missing or wrong field, ``layers-count`` where
                layers or sizes are missing, ``layers-number`` for what is negative or no number,
                ``layers-sizes`` for sizes that do not ascend from 1, ``layers-backward`` for a
                backward pass below the forward pass, ``layers-units``; of the last five all at
                once.
        """
        try:
            return of_document(documents.read(data, cls, strict=LAYERS.strict))
        except documents.FieldError as error:
            raise LAYERS.corrupt(str(error)) from None

    def to_json(self) -> dict[str, Any]:
        names = ("add_seconds", "workload", "model_hashes", "coupled", "shared", "batch")
        return documents.but_empty(self, *names, "summary_bytes", "made", "casts", "streamed")

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON; the path of the workload is stored relative to the file."""
        path, workload = Path(path), self.workload
        stored = replace(self, workload=workload and workload.relative_to(path.parent))
        path.write_text(json.dumps(stored.to_json()) + "\n")

    def largest(self, which: Pass) -> int:
        """Return the largest micro-batch size that was measured."""
        return self._of(which).u[-1]

    def smallest(self, which: Pass) -> int:
        return self._of(which).u[0]

    def as_streamed(self, dtype: str) -> LayerProfile:
        """Return the profile for devices that get parameters as casts to a dtype; empty: as they
        are.

        Raises:
            ProfileError: ``packs-stream`` where no parameter is read only through such a cast.
        """
        if dtype == self.streamed:
            return self
        if dtype and dtype not in self.casts:
            known = " and ".join(self.casts)
            raise ProfileError.of(
                f"no layer of {self.name!r} reads a parameter only through a cast to {dtype}, so "
                f"there is nothing to stream as it; "
                f"{f'stream as {known}' if known else 'stream parameters as they are'}, have the "
                "model compute in it, or profile again what an earlier version profiled.",
                "packs-stream",
            )
        return replace(self, streamed=dtype)

    def weight_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of weights and buffers of layers [first, stop), uncast."""
        return self._sum("weights", first, stop)

    def streamed_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of weights and buffers of layers [first, stop) as devices get them."""
        return self._sum("streamed", first, stop)

    def cast_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of the casts of layers [first, stop) that the host keeps beside the
        parameters."""
        return self._sum("casts", first, stop)

    def gradient_bytes(self, first: int, stop: int, *, alone: bool = False) -> int:
        """Return the bytes of gradients of layers [first, stop) that go back to the host.

        Args:
            first, stop: The layers.
            alone: Whether one micro-batch makes it, to which none is added.
        """
        return self._sum("alone" if alone else "weights", first, stop)

    def state_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of optimizer state of layers [first, stop)."""
        return self._sum("state", first, stop)

    def batch_bytes(self, first: int, stop: int) -> int:
        """Return the bytes per example of the batch that layers [first, stop) read beside their
        input; each layer counts its own."""
        return self._sum("batch", first, stop)

    def update_seconds(self, first: int, stop: int) -> float:
        """Return the seconds that the host takes to update layers [first, stop)."""
        return self._update_sums[stop] - self._update_sums[first]

    def adding_seconds(self, first: int, stop: int) -> float:
        """Return the seconds that a device takes to add gradients of layers [first, stop) to those
        of the micro-batches before."""
        return self._add_sums[stop] - self._add_sums[first] if self.add_seconds else 0.0

    def cast_seconds(self, first: int, stop: int) -> float:
        """Return the seconds that the host takes to cast the parameters of layers [first, stop), at
        the rate of their updates."""
        masters = self._sum("masters", first, stop)
        return self._host_seconds(first, stop, masters + self.cast_bytes(first, stop))

    def widen_seconds(self, first: int, stop: int) -> float:
        """Return the seconds that the host takes to turn gradients of casts into gradients of
        parameters, at the rate of updates."""
        whole, alone = (self.gradient_bytes(first, stop, alone=one) for one in (False, True))
        return self._host_seconds(first, stop, whole + alone) if alone < whole else 0.0

    def _host_seconds(self, first: int, stop: int, nbytes: int) -> float:
        """Return the seconds that the host takes to move ``nbytes`` at the rate of the updates of
        some layers. An update reads weights, gradients and state, and writes weights and state."""
        moved = self._sum("updated", first, stop)
        return self.update_seconds(first, stop) * nbytes / moved if moved else 0.0

    @memo
    def at(self, which: Pass, size: int) -> SizedLayers:
        """Return all layers at a micro-batch size between the smallest and the largest that were
        measured.

        Bytes are cut to whole numbers, as the released scheduler does.

        Raises:
            ProfileError: ``layers-range`` for a size outside.
        """
        sizes, (times, memories) = self._of(which).u, self._arrays[which]
        if not sizes[0] <= size <= sizes[-1]:
            raise ProfileError.of(
                f"{which} micro-batch size {size} of {self.name!r} was not profiled: the sizes go "
                f"from {sizes[0]} to {sizes[-1]}. Choose one between, or profile it.",
                "layers-range",
            )
        inputs = size * np.array(self.x_bytes_per_sample)
        if size in sizes:
            i = sizes.index(size)
            return SizedLayers(times[i], memories[i], inputs)
        seconds = interpolated(sizes, times, size)
        memory = interpolated(sizes, memories, size).astype(np.int64)
        return SizedLayers(seconds, memory, inputs)

    def held_out_errors(
        self,
        which: Pass,
        stride: int,
        *,
        of: Literal["time", "memory"] = "time",
    ) -> list[float]:
        """Return the relative errors of every layer at the sizes that a sweep with a wider stride
        would not have measured: all but each ``stride``-th, the first and the last.

        Raises:
            ProfileError: ``layers-range`` if the stride leaves one size.
        """
        sizes, rows = self._of(which).u, np.array(getattr(self._of(which), of), dtype=float)
        kept = sorted({*range(0, len(sizes), stride), len(sizes) - 1})
        if len(kept) < 2:
            raise ProfileError.of(
                f"stride={stride} leaves one of {len(sizes)} sizes; give a smaller one.",
                "layers-range",
            )
        left = [i for i in range(len(sizes)) if i not in kept]
        known = [sizes[i] for i in kept]
        guessed = (interpolated(known, rows[kept], sizes[i]) for i in left)
        return [
            float(error)
            for i, guess in zip(left, guessed, strict=True)
            # What takes no time is not off.
            for error in np.where(rows[i] > 0, guess / np.where(rows[i] > 0, rows[i], 1) - 1, 0)
        ]

    def _of(self, which: Pass) -> PassProfile:
        return self.fwd if which == "forward" else self.bwd

    def _sum(self, what: str, first: int, stop: int) -> int:
        return self._sums[what][stop] - self._sums[what][first]

    @cached_property
    def as_sent(self) -> Casts:
        """The bytes of the layers as devices get them now."""
        if self.streamed:
            return self.casts[self.streamed]
        shared = tuple(nbytes for nbytes, *_ in self.shared)
        return Casts(self.w_bytes, self.b_bytes, (0,) * self.num_layers, self.w_bytes, shared)

    @cached_property
    def _sums(self) -> Mapping[str, list[int]]:
        """The bytes of the first i layers together, by what the bytes are."""

        def sums(*rows: Sequence[int]) -> list[int]:
            return list(accumulate(map(sum, zip(*rows, strict=True)), initial=0))

        casts = self.as_sent
        return {
            "weights": sums(self.w_bytes, self.b_bytes),
            "streamed": sums(casts.w_bytes, casts.b_bytes),
            "casts": sums(casts.cast_bytes),
            "alone": sums(casts.gradient_bytes, self.b_bytes),
            "masters": sums(self.w_bytes, [-w for w in casts.w_bytes], casts.cast_bytes),
            "state": sums(self.k_bytes),
            "updated": sums(*[self.w_bytes] * 3, *[self.k_bytes] * 2),
            # The input of the first layer is the batch.
            "batch": sums(
                [
                    sum(nbytes for nbytes, *readers in self.batch if 0 < layer in readers)
                    for layer in range(self.num_layers)
                ]
            ),
        }

    @cached_property
    def _update_sums(self) -> list[float]:
        return list(accumulate(self.update_cpu_time, initial=0.0))

    @cached_property
    def _add_sums(self) -> list[float]:
        return list(accumulate(self.add_seconds, initial=0.0))

    @cached_property
    def _arrays(self) -> Mapping[Pass, tuple[np.ndarray, np.ndarray]]:
        casts = self.as_sent
        whole, come = (np.array(each.w_bytes) + np.array(each.b_bytes) for each in (self, casts))

        def arrays(measured: PassProfile) -> tuple[np.ndarray, np.ndarray]:
            """Return seconds and bytes; a layer that is given casts holds no parameters, and need
            not make casts."""
            memory = np.array(measured.memory) - (whole - come)
            return np.array(measured.time, dtype=float), memory

        return {"forward": arrays(self.fwd), "backward": arrays(self.bwd)}

    def _violations(self) -> Iterator[Violation]:
        num_layers = self.num_layers
        if num_layers < 1:
            yield Violation(f"num_layers={num_layers}; a model has one at least.", "layers-count")
        if dict(self.units) != _UNITS:
            yield Violation(f"units={dict(self.units)}; give {_UNITS}.", "layers-units")
        rows = ("x_bytes_per_sample", "w_bytes", "b_bytes", "k_bytes", "update_cpu_time")
        for name in (*rows, *["add_seconds"] * bool(self.add_seconds)):
            yield from row_violations(name, getattr(self, name), num_layers)
        for name in ("fwd", "bwd"):
            yield from pass_violations(name, getattr(self, name), num_layers)
        if self.streamed and self.streamed not in self.casts:
            yield Violation(
                f"streamed={self.streamed!r} is not among the casts, {list(self.casts)}.",
                "packs-stream",
            )
        for dtype, casts in self.casts.items():
            for name, row in vars(casts).items():
                if name != "shared":
                    yield from row_violations(f"casts.{dtype}.{name}", row, num_layers)
            if len(casts.shared) != len(self.shared):
                yield Violation(
                    f"casts.{dtype}.shared has {len(casts.shared)} parameters and shared "
                    f"{len(self.shared)}; give one value for each.",
                    "layers-shared",
                )
        yield from self._shared_violations()
        for nbytes, *layers in self.batch:
            ascend = all(one < other for one, other in pairwise([-1, *layers, num_layers]))
            if nbytes < 0 or not ascend:
                yield Violation(
                    f"batch has {[nbytes, *layers]}; give bytes and, ascending, some of layers 0 "
                    f"to {num_layers - 1}.",
                    "layers-batch",
                )
        for name, what in (("time", "seconds"), ("memory", "bytes")):
            for size in sorted({*self.fwd.u} & {*self.bwd.u}):
                forward = _rows(self.fwd, name).get(size, ())
                backward = _rows(self.bwd, name).get(size, ())
                low = [i for i, (f, b) in enumerate(zip(forward, backward, strict=False)) if b < f]
                if low:
                    i = low[0]
                    yield Violation(
                        f"bwd.{name} at size {size} is below fwd.{name} for layers {low[:5]}"
                        f"{'...' if len(low) > 5 else ''} ({backward[i]:g} and {forward[i]:g} "
                        f"{what} of layer {i}); what is backward includes the forward pass that is "
                        "computed again.",
                        "layers-backward",
                    )

    def _shared_violations(self) -> Iterator[Violation]:
        borrowed = [0] * self.num_layers
        for nbytes, *layers in self.shared:
            ascend = all(one < other for one, other in pairwise([-1, *layers, self.num_layers]))
            if len(layers) < 2 or not ascend or nbytes < 0:
                yield Violation(
                    f"shared has {[nbytes, *layers]}; give bytes and, ascending, two or more of "
                    f"layers 0 to {self.num_layers - 1}.",
                    "layers-shared",
                )
                return
            for layer in layers[1:]:
                borrowed[layer] += nbytes
        traced = bool(self.model_hashes)  # buffers are of profiles that were given
        if (self.shared or traced) and borrowed != list(self.b_bytes[: self.num_layers]):
            yield Violation(
                f"b_bytes={list(self.b_bytes)} and by the parameters in shared it is {borrowed}: "
                "mend the file, or profile again what an earlier version profiled.",
                "layers-shared",
            )


def _rows(measured: PassProfile, name: str) -> dict[int, Sequence[float]]:
    return dict(zip(measured.u, getattr(measured, name), strict=False))


_NOTHING = PassProfile((1,), ((0.0,),), ((0,),))
#: Of a model that is yet to be measured: one layer that needs nothing.
UNMEASURED = LayerProfile("", 1, _NOTHING, _NOTHING, (0,), (0,), (0,), (0,), (0.0,))
