"""The report of ``capture profile``, alike for every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from capture.measured.layer_profile import LayerProfile
from capture.measured.profile import Profile
from profiling_runs.layers import PASSES

#: What a layer profile knows of a layer.
QUANTITIES: tuple[Literal["time"], Literal["memory"]] = ("time", "memory")


@dataclass(frozen=True, kw_only=True)
class LayersReport:
    """The facts of a layer profile that are not in its file, or hard to see there.

    Attributes:
        num_layers: The criterion counts as the last one.
        weight_bytes, state_bytes: Weights, and optimizer state, of all layers.
        forward_sizes, backward_sizes: Micro-batch sizes that were profiled.
        trials: By direction, the sizes that were tried for the largest.
        largest: By direction, the largest size that fits.
        held_out_errors: By direction and quantity, the mean and the largest error of every other
            size, were it not measured; nothing of fewer than three sizes.
        coupled: Why both directions need micro-batches of one size; empty if they do not.
        casts: By dtype, bytes of what is read as that alone.
        source: Where the numbers are from, in words.
    """

    num_layers: int
    weight_bytes: int
    state_bytes: int
    forward_sizes: Sequence[int]
    backward_sizes: Sequence[int]
    trials: Mapping[str, Sequence[int]]
    largest: Mapping[str, int]
    held_out_errors: Mapping[str, Any]
    coupled: str
    casts: Mapping[str, int]
    source: str

    @classmethod
    def of(cls, profile: LayerProfile) -> LayersReport:
        """Return the report of a layer profile that was made in this process."""
        made, count = profile.made, profile.num_layers
        return cls(
            num_layers=count,
            weight_bytes=profile.weight_bytes(0, count),
            state_bytes=profile.state_bytes(0, count),
            forward_sizes=profile.fwd.u,
            backward_sizes=profile.bwd.u,
            trials=made["trials"],
            largest=made["largest"],
            held_out_errors=_held_out(profile),
            coupled=profile.coupled,
            casts={
                dtype: profile.as_streamed(dtype).cast_bytes(0, count) for dtype in profile.casts
            },
            source=profile.source,
        )


@dataclass(frozen=True, kw_only=True)
class WindowsReport:
    """The contents of a profile of windows of layers, counted.

    Attributes:
        num_layers, num_parameters: Of the model.
        auto_layers: Whether it was cut automatically.
        notes: What was chosen because nobody did, in sentences.
        num_measurements: Windows and updates that were measured.
        num_runs, num_failed_runs: Profiling runs of the paper's mode; None without it.
        microbatch_sizes: Those that were profiled.
        interval_factors: The widest interval of a prediction, over the prediction; None without
            calibration.
        source: Backend, target and versions.
    """

    num_layers: int
    num_parameters: int
    auto_layers: bool
    notes: Sequence[str]
    num_measurements: int
    num_runs: int | None
    num_failed_runs: int | None
    microbatch_sizes: Sequence[int]
    interval_factors: tuple[float, float] | None
    source: Mapping[str, Any]

    @classmethod
    def of(cls, profile: Profile, notes: Sequence[str]) -> WindowsReport:
        """Return the report of a profile of windows; ``notes`` say what was chosen by default."""
        graph, paper = profile.graph, profile.paper or {}
        return cls(
            num_layers=graph.num_layers,
            num_parameters=graph.num_parameters,
            auto_layers=profile.auto_layers,
            notes=notes,
            num_measurements=len(profile.measurements),
            num_runs=paper.get("num_runs"),
            num_failed_runs=paper.get("num_failed_runs"),
            microbatch_sizes=profile.microbatch_sizes,
            interval_factors=profile.widest_interval(profile.choices),
            source=profile.provenance,
        )


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """The report of ``capture profile``: the file that was made, what was profiled, and how.

    Attributes:
        profile: Its file.
        workload, cluster, target: What was profiled, and for which devices.
        backend: How it was measured.
        num_set_aside: Jobs that failed again and again.
        windows: Of windows of layers; None of layers one by one.
        layers: Of layers one by one (``--system harmony``); None of windows.
        warnings: What of the loss makes a step another than that of one device, and what the
            profile cannot say.
        failures: Programs that the compiler refused.
    """

    profile: str
    workload: str
    cluster: str
    target: str
    backend: str
    num_set_aside: int = 0
    windows: WindowsReport | None = None
    layers: LayersReport | None = None
    warnings: Sequence[str] = ()
    failures: Sequence[str] = ()


def _held_out(profile: LayerProfile) -> dict[str, Any]:
    sizes = {"forward": profile.fwd.u, "backward": profile.bwd.u}
    return {
        which: {
            quantity: _summary(profile.held_out_errors(which, 2, of=quantity))
            for quantity in QUANTITIES
        }
        for which in PASSES
        if len(sizes[which]) > 2
    }


def _summary(errors: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"mean": sum(sizes) / len(sizes), "largest": max(sizes)}
