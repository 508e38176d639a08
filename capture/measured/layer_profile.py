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

    workload                  location, function, arguments
    model_hashes              of the traced loss, by micro-batch size
    coupled                   why both directions need micro-batches of one size; empty if they do
                              not
    shared                    of every parameter that several layers read: bytes, the layer that it
                              belongs to, and the others; they are in b_bytes of these
    summary_bytes             of what an update needs of the gradients of each other pack, such as
                              their norm; 0 if nothing, and updates need not come last
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
from capture.model.workload import WorkloadSpec

LAYERS = documents.Format(
    "layer profile",
    ProfileError,
    "layers",
    "see capture/measured/layer_profile.py, which says what it holds",
    not_json="file",
    strict=True,
)

Pass = Literal["forward", "backward"]
#: How sizes between the profiled ones follow: by the line between their neighbours, or by a
#: polynomial of degree 1 or 2 through all.
Interpolation = Literal["piecewise", "linear", "quadratic"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("piecewise", "linear", "quadratic")
_UNITS = {"time": "seconds", "memory": "bytes"}


@dataclass(frozen=True)
class PassProfile:
    """One direction, as it was measured.

    Attributes:
        u: Micro-batch sizes, ascending.
        time: Per size, per layer, seconds.
        memory: Likewise, bytes.
    """

    u: tuple[int, ...]
    time: tuple[tuple[float, ...], ...]
    memory: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class SizedLayers:
    """Every layer in one direction, at one micro-batch size.

    Attributes:
        seconds: Per layer.
        memory_bytes: Per layer, as of ``PassProfile``.
        input_bytes: Per layer.
        profiled: Whether the size was measured, not interpolated.
    """

    seconds: np.ndarray
    memory_bytes: np.ndarray
    input_bytes: np.ndarray
    profiled: bool

    @cached_property
    def sums(self) -> list[float]:
        """Seconds of the first i layers, i from 0."""
        return [0.0, *np.cumsum(self.seconds).tolist()]

    @cached_property
    def inner_sums(self) -> list[int]:
        """Bytes of the first i layers without their inputs, i from 0."""
        return [0, *np.cumsum(self.memory_bytes - self.input_bytes).tolist()]

    @cached_property
    def inputs(self) -> list[int]:
        """Bytes of the input of each layer, and none behind the last."""
        return [*self.input_bytes.tolist(), 0]

    def time(self, first: int, stop: int) -> float:
        """Seconds of layers [first, stop)."""
        return self.sums[stop] - self.sums[first]

    def pack_bytes(self, first: int, stop: int) -> int:
        """C of layers [first, stop): their memory, with the input of the first alone.

        What passes between two layers of a pack is counted by both measurements; the paper's plain
        sum counts it twice (H-i).
        """
        return self.inner_sums[stop] - self.inner_sums[first] + self.inputs[first]


@dataclass(frozen=True)
class LayerProfile:
    """A model, layer by layer. Indices of layers count from 0; see the module for the fields."""

    name: str
    num_layers: int
    fwd: PassProfile
    bwd: PassProfile
    x_bytes_per_sample: tuple[int, ...]
    w_bytes: tuple[int, ...]
    b_bytes: tuple[int, ...]
    k_bytes: tuple[int, ...]
    update_cpu_time: tuple[float, ...]
    units: Mapping[str, str] = field(default_factory=lambda: dict(_UNITS), hash=False)
    note: str = ""
    source: str = ""
    workload: WorkloadSpec | None = None
    model_hashes: Mapping[int, str] = field(default_factory=dict, hash=False)
    coupled: str = ""
    shared: tuple[tuple[int, ...], ...] = ()
    summary_bytes: int = 0
    made: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ProfileError.check(self._violations())
        object.__setattr__(self, "_sized", {})

    @classmethod
    def load(cls, path: Path | str) -> LayerProfile:
        """That of a file.

        Raises:
            ProfileError: ``layers-file`` if it cannot be read or is no JSON, and those of
                ``from_json``.
        """
        profile = cls.from_json(LAYERS.load(path))
        if profile.workload is None:
            return profile
        workload = profile.workload.resolved_from(Path(path).parent)
        return replace(profile, workload=workload)

    @classmethod
    def from_json(cls, data: Any) -> LayerProfile:
        """What ``to_json`` wrote.

        Raises:
            ProfileError: ``layers-corrupt`` for a missing or wrong field, ``layers-count`` where
                layers or sizes are missing, ``layers-number`` for what is negative or no number,
                ``layers-sizes`` for sizes that do not ascend from 1, ``layers-backward`` for a
                backward pass below the forward pass, ``layers-units``; of the last five all at
                once.
        """
        try:
            return documents.read(data, cls, strict=LAYERS.strict)
        except documents.FieldError as error:
            raise LAYERS.corrupt(str(error)) from None

    def to_json(self) -> dict[str, Any]:
        document = documents.fields_of(self)
        known = ("workload", "model_hashes", "coupled", "shared", "summary_bytes", "made")
        return {key: value for key, value in document.items() if value or key not in known}

    def save(self, path: Path | str) -> None:
        """Write JSON; the path of the workload is stored relative to the file."""
        path, workload = Path(path), self.workload
        stored = replace(self, workload=workload and workload.relative_to(path.parent))
        path.write_text(json.dumps(stored.to_json()) + "\n")

    def largest(self, which: Pass) -> int:
        """The largest micro-batch size that was measured."""
        return self._of(which).u[-1]

    def smallest(self, which: Pass) -> int:
        return self._of(which).u[0]

    def weight_bytes(self, first: int, stop: int) -> int:
        """Weights and buffers of layers [first, stop)."""
        weights = self._sums[0]
        return weights[stop] - weights[first]

    def state_bytes(self, first: int, stop: int) -> int:
        """Optimizer state of the same."""
        state = self._sums[1]
        return state[stop] - state[first]

    def update_seconds(self, first: int, stop: int) -> float:
        """Of their updates on the host."""
        return self._update_sums[stop] - self._update_sums[first]

    def at(self, which: Pass, size: int, interpolation: Interpolation = "piecewise") -> SizedLayers:
        """All layers at a micro-batch size between the smallest and the largest measured.

        Bytes are cut to whole numbers, as the released scheduler does.

        Raises:
            ProfileError: ``layers-range`` for a size outside.
        """
        known: dict[tuple[str, int, str], SizedLayers] = vars(self)["_sized"]
        key = (which, size, interpolation)
        if key not in known:
            known[key] = self._interpolated(which, size, interpolation)
        return known[key]

    def held_out_errors(
        self,
        which: Pass,
        stride: int,
        interpolation: Interpolation = "piecewise",
        *,
        of: Literal["time", "memory"] = "time",
    ) -> list[float]:
        """Relative errors of every layer at the sizes that a sweep with a wider stride would not
        have measured: at all but each ``stride``-th, the first and the last.

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
        guessed = (_at(known, rows[kept], sizes[i], interpolation) for i in left)
        return [
            float(error)
            for i, guess in zip(left, guessed, strict=True)
            # What takes no time is not off.
            for error in np.where(rows[i] > 0, guess / np.where(rows[i] > 0, rows[i], 1) - 1, 0)
        ]

    def _of(self, which: Pass) -> PassProfile:
        return self.fwd if which == "forward" else self.bwd

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """Bytes of weights and buffers, and of optimizer state, of the first i layers."""
        weights = (w + b for w, b in zip(self.w_bytes, self.b_bytes, strict=True))
        return list(accumulate(weights, initial=0)), list(accumulate(self.k_bytes, initial=0))

    @cached_property
    def _update_sums(self) -> list[float]:
        return list(accumulate(self.update_cpu_time, initial=0.0))

    @cached_property
    def _arrays(self) -> Mapping[Pass, tuple[np.ndarray, np.ndarray]]:
        def arrays(measured: PassProfile) -> tuple[np.ndarray, np.ndarray]:
            return np.array(measured.time, dtype=float), np.array(measured.memory)

        return {"forward": arrays(self.fwd), "backward": arrays(self.bwd)}

    def _interpolated(self, which: Pass, size: int, interpolation: Interpolation) -> SizedLayers:
        sizes, (times, memories) = self._of(which).u, self._arrays[which]
        if not sizes[0] <= size <= sizes[-1]:
            raise ProfileError.of(
                f"{which} micro-batch size {size} of {self.name!r} was not profiled: the sizes go "
                f"from {sizes[0]} to {sizes[-1]}. Choose one between, or profile it.",
                "layers-range",
            )
        inputs = size * np.array(self.x_bytes_per_sample)
        if size in sizes and interpolation == "piecewise":
            i = sizes.index(size)
            return SizedLayers(times[i], memories[i], inputs, True)
        seconds = _at(sizes, times, size, interpolation)
        memory = _at(sizes, memories, size, interpolation).astype(np.int64)
        return SizedLayers(seconds, memory, inputs, False)

    def _violations(self) -> Iterator[Violation]:
        num_layers = self.num_layers
        if num_layers < 1:
            yield Violation(f"num_layers={num_layers}; a model has one at least.", "layers-count")
        if dict(self.units) != _UNITS:
            yield Violation(f"units={dict(self.units)}; give {_UNITS}.", "layers-units")
        for name in ("x_bytes_per_sample", "w_bytes", "b_bytes", "k_bytes", "update_cpu_time"):
            yield from _row(name, getattr(self, name), num_layers)
        for name in ("fwd", "bwd"):
            yield from _measured(name, getattr(self, name), num_layers)
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


def _rows(measured: PassProfile, name: str) -> dict[int, Sequence[float]]:
    return dict(zip(measured.u, getattr(measured, name), strict=False))


def _measured(name: str, measured: PassProfile, num_layers: int) -> Iterator[Violation]:
    sizes = measured.u
    ascending = all(one < other for one, other in pairwise(sizes))
    if not sizes or sizes[0] < 1 or not ascending:
        yield Violation(
            f"{name}.u={list(sizes)} must be micro-batch sizes that ascend from 1 or more.",
            "layers-sizes",
        )
    for what in ("time", "memory"):
        rows = getattr(measured, what)
        if len(rows) != len(sizes):
            yield Violation(
                f"{name}.{what} has {len(rows)} rows for {len(sizes)} sizes; give one each.",
                "layers-count",
            )
        for i, row in enumerate(rows):
            yield from _row(f"{name}.{what}[{i}]", row, num_layers)


def _row(name: str, row: Sequence[float], num_layers: int) -> Iterator[Violation]:
    if len(row) != num_layers:
        yield Violation(
            f"{name} has {len(row)} layers and num_layers={num_layers}; give one value for each.",
            "layers-count",
        )
    # Not a number is not at least 0 either.
    wrong = [i for i, value in enumerate(row) if not 0 <= value < float("inf")]
    if wrong:
        yield Violation(
            f"{name} is {row[wrong[0]]} for layer {wrong[0]} ({len(wrong)} such); give 0 or more.",
            "layers-number",
        )


def _at(
    sizes: Sequence[int], rows: np.ndarray, size: int, interpolation: Interpolation
) -> np.ndarray:
    """The row of a size, from those of others."""
    if interpolation != "piecewise":
        degree = min(INTERPOLATIONS.index(interpolation), len(sizes) - 1)
        powers = np.vander(np.array(sizes, dtype=float), degree + 1)
        fitted, *_ = np.linalg.lstsq(powers, rows.astype(float), rcond=None)
        return np.maximum(np.vander(np.array([float(size)]), degree + 1)[0] @ fitted, 0)
    above = int(np.searchsorted(sizes, size))
    low, high = sizes[above - 1], sizes[above]
    share = (size - low) / (high - low)
    return rows[above - 1] + (rows[above] - rows[above - 1]) * share


_NOTHING = PassProfile((1,), ((0.0,),), ((0,),))
#: Of a model that is yet to be measured: one layer that needs nothing.
UNMEASURED = LayerProfile("", 1, _NOTHING, _NOTHING, (0,), (0,), (0,), (0,), (0.0,))
