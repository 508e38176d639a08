"""The paper's own profiling runs: generated partitionings, two batch sizes, pipeline-only and 2-
and 4-way data and tensor parallel.

A run gives one number per stage, its peak. With the backend ``run`` the partitioning is executed
(``run``); with one that compiles, the run is the replay of the partitioning's own
schedule over its compiled stages. The micro-batch size stays and their number is halved and
quartered.

Source: CAPTURE III-A, Description 1; READINGS.md, C-a to C-f.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from capture.documents import read
from capture.errors import ProfileError
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import NO_COST, StageCost
from capture.model.graph import LayerGraph
from capture.papers.capture.partitionings import pipeline_partitionings
from capture.plan.choices import ChoiceRow, ParamSplit, Remat, StageChoice
from capture.plan.schedule import make_schedule
from capture.predictor.formula import of_interfaces, peak_parts
from capture.step.interface import stage_interface
from recommender.capture.problem import NEVER

#: The five sets of runs: no parallelism inside a stage, and 2- and 4-way data or tensor
#: parallelism.
PROFILED_CHOICES = (
    StageChoice(),
    StageChoice(2, 1),
    StageChoice(4, 1),
    StageChoice(1, 2),
    StageChoice(1, 4),
)

#: Of a run, where the model has more layers.
_LEAST_STAGES = 4


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics M_i and M_a of every layer in bytes, from runs at one batch size and choice;
    NaN where no run gave one.

    Attributes:
        isolated: M_i(l): the peak of layer l alone on a device.
        added: M_a(l): what adding layer l to its neighbours before it adds; of layer 0, NaN.
    """

    isolated: np.ndarray
    added: np.ndarray


@dataclass(frozen=True)
class PaperStatistics:
    """The paper's profile of a model: statistics of its layers, and the runs they are from.

    Attributes:
        statistics: Per choice, per number of micro-batches of the run.
        num_runs: Runs that were needed.
        schedule: Name of the runs' schedule.
        microbatch_size: Examples in a micro-batch of the runs.
        failed: Runs that went out of memory or could not be compiled, by name.
        num_failed_runs: Runs that lack the peak of a stage.
    """

    statistics: Mapping[StageChoice, Mapping[int, LayerStatistics]]
    num_runs: int
    schedule: str
    microbatch_size: int
    failed: tuple[str, ...] = ()
    num_failed_runs: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "num_runs": self.num_runs,
            "schedule": self.schedule,
            "microbatch_size": self.microbatch_size,
            "num_failed_runs": self.num_failed_runs,
            "failed": list(self.failed),
            "statistics": [
                {
                    "data_parallel": choice.data_parallel,
                    "tensor_parallel": choice.tensor_parallel,
                    "remat": choice.remat,
                    "shard_optimizer": choice.shard_optimizer,
                    "num_microbatches": m,
                    "isolated_bytes": _to_list(layer.isolated),
                    "added_bytes": _to_list(layer.added),
                }
                for choice, by_batch in self.statistics.items()
                for m, layer in by_batch.items()
            ],
        }

    @classmethod
    def from_json(cls, data: object) -> PaperStatistics:
        """Read the statistics that ``to_json`` wrote.

        Raises:
            FieldError: naming the field that is missing or wrong.
        """
        document = read(data, _PaperFile)
        statistics: dict[StageChoice, dict[int, LayerStatistics]] = {}
        for row in document.statistics:
            layer = LayerStatistics(_to_array(row.isolated_bytes), _to_array(row.added_bytes))
            statistics.setdefault(row.choice, {})[row.num_microbatches] = layer
        return cls(
            statistics,
            document.num_runs,
            document.schedule,
            document.microbatch_size,
            document.failed,
            len(document.failed) if document.num_failed_runs is None else document.num_failed_runs,
        )


@dataclass(frozen=True, kw_only=True)
class _StatisticsRow(ChoiceRow):
    num_microbatches: int
    isolated_bytes: tuple[int | None, ...]
    added_bytes: tuple[int | None, ...]


@dataclass(frozen=True)
class _PaperFile:
    num_runs: int
    schedule: str
    microbatch_size: int
    failed: tuple[str, ...]
    statistics: tuple[_StatisticsRow, ...]
    num_failed_runs: int | None = None


def _to_list(values: np.ndarray) -> list[int | None]:
    return [None if np.isnan(v) else round(float(v)) for v in values]


def _to_array(values: Sequence[int | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], np.float64)


@dataclass(frozen=True)
class PaperRuns:
    """The runs of one set.

    Attributes:
        choice: What every stage does with its devices.
        partitionings: Layers per stage.
    """

    choice: StageChoice
    partitionings: tuple[tuple[int, ...], ...]

    def configs(self, microbatch_size: int) -> list[StageConfig]:
        """Return the stages of all runs."""
        return [
            StageConfig(first, stop, self.choice, microbatch_size)
            for p in self.partitionings
            for first, stop in ranges(p)
        ]


@dataclass(frozen=True)
class RunPeaks:
    """The peaks of one run, or why some of them are missing.

    Attributes:
        peak_bytes: Per stage, on each of its devices; None where there is none.
        failures: What there is no peak of, and why.
    """

    peak_bytes: tuple[int | None, ...]
    failures: tuple[str, ...] = ()


def paper_runs(
    num_layers: int,
    num_devices: int,
    microbatch_size: int,
    remat: Remat = "none",
    shard_optimizer: bool = False,
) -> list[PaperRuns]:
    """Return the five sets of runs for a model and a cluster.

    Each set places the layers on S = D / k sub-meshes; on at least 4, since fewer than 3 isolate no
    inner layer, and on at most L - 1, since L stages add no layer to another (3 layers or fewer get
    no M_a at all).

    Args:
        num_layers: L.
        num_devices: D; a choice that needs more is left out.
        microbatch_size: A choice whose replicas do not divide it is left out.
        remat, shard_optimizer: As of every stage to be planned.
    """
    runs = []
    for choice in PROFILED_CHOICES:
        if microbatch_size % choice.data_parallel == 0 and choice.num_devices <= num_devices:
            num_stages = min(
                num_layers if num_layers <= 3 else num_layers - 1,
                max(_LEAST_STAGES, num_devices // choice.num_devices),
            )
            partitionings = tuple(map(tuple, pipeline_partitionings(num_layers, num_stages)))
            own = StageChoice(choice.data_parallel, choice.tensor_parallel, remat, shard_optimizer)
            runs.append(PaperRuns(own, partitionings))
    return runs


def most_run_devices(num_devices: int) -> int:
    """Return the most devices that a run for a cluster of ``num_devices`` takes.

    Example:
        >>> most_run_devices(1), most_run_devices(8), most_run_devices(32)
        (4, 16, 32)
    """
    degrees = [
        choice.num_devices for choice in PROFILED_CHOICES if choice.num_devices <= num_devices
    ]
    return max(k * max(_LEAST_STAGES, num_devices // k) for k in degrees)


def ranges(partitioning: Sequence[int]) -> list[tuple[int, int]]:
    """Return the stages [first, stop) of a partitioning.

    Example:
        >>> ranges([2, 1, 3])
        [(0, 2), (2, 3), (3, 6)]
    """
    return list(pairwise([0, *accumulate(partitioning)]))


def profile_batches(num_microbatches: int) -> tuple[int, ...]:
    """Return a quarter and half of the target number of micro-batches, ascending (III-A2); fewer
    where the target is small."""
    return tuple(sorted({max(1, num_microbatches // 4), max(1, num_microbatches // 2)}))


def run_paper_profile(
    runs: Iterable[PaperRuns],
    graph: LayerGraph,
    param_bytes: Mapping[ParamSplit, Sequence[int]],
    schedule: str,
    num_microbatches: int,
    measure: Callable[[StageConfig], StageCost | None],
) -> PaperStatistics:
    """Compute M_i and M_a from runs that are replayed over compiled stages.

    Args:
        runs: From ``paper_runs``.
        graph: At the micro-batch size of the runs.
        param_bytes: Per way to split parameters.
        schedule: Name of the runs' schedule.
        num_microbatches: Number to plan for; the runs use half and a quarter.
        measure: The cost of a stage config; None if it could not be measured, and the run is named
            as failed.
    """
    runs = list(runs)
    costs = {
        run.choice: {(c.first, c.stop): measure(c) for c in run.configs(graph.microbatch_size)}
        for run in runs
    }

    def replayed(
        choice: StageChoice, partitioning: Sequence[int], num_microbatches: int
    ) -> RunPeaks:
        moments = make_schedule(schedule, len(partitioning), num_microbatches).moments
        found = [costs[choice][stage] for stage in ranges(partitioning)]
        interfaces = [
            stage_interface(
                graph,
                first,
                stop,
                (),
                choice,
                param_bytes[choice.param_split],
                cost or NO_COST,
            )
            for (first, stop), cost in zip(ranges(partitioning), found, strict=True)
        ]
        peaks = [
            None if cost is None else sum(peak_parts([memory], of_group)[1][0].values())
            for cost, memory, of_group in zip(
                found, of_interfaces(interfaces), moments, strict=True
            )
        ]
        failures = [
            f"{list(partitioning)} with {choice}, stage {s}"
            for s, peak in enumerate(peaks)
            if peak is None
        ]
        return RunPeaks(tuple(peaks), tuple(failures))

    return form_statistics(
        runs, graph.num_layers, graph.microbatch_size, schedule, num_microbatches, replayed
    )


def form_statistics(
    runs: Iterable[PaperRuns],
    num_layers: int,
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    peaks_of_run: Callable[[StageChoice, tuple[int, ...], int], RunPeaks],
) -> PaperStatistics:
    """Compute M_i and M_a for every choice and number of micro-batches, whatever a run is.

    A stage that several partitionings hold counts as in the first of them that gives its peak.

    Args:
        runs: From ``paper_runs``.
        num_layers: L.
        microbatch_size, schedule: What the runs were made with.
        num_microbatches: Number to plan for; the runs use half and a quarter.
        peaks_of_run: Called with the choice, the partitioning and the number of micro-batches of
            each run.
    """
    statistics: dict[StageChoice, dict[int, LayerStatistics]] = {}
    num_runs, num_failed, failures = 0, 0, list[str]()
    for run in runs:
        for m in profile_batches(num_microbatches):
            peaks: dict[tuple[int, int], int] = {}
            for partitioning in run.partitionings:
                outcome = peaks_of_run(run.choice, partitioning, m)
                num_runs += 1
                num_failed += None in outcome.peak_bytes
                failures += outcome.failures
                for stage, peak in zip(ranges(partitioning), outcome.peak_bytes, strict=True):
                    if peak is not None:
                        peaks.setdefault(stage, peak)
            statistics.setdefault(run.choice, {})[m] = layer_statistics(peaks, num_layers)
    return PaperStatistics(
        statistics, num_runs, schedule, microbatch_size, tuple(dict.fromkeys(failures)), num_failed
    )


def layer_statistics(
    peaks: Mapping[tuple[int, int], int], num_layers: int, *, average: bool = False
) -> LayerStatistics:
    """Compute M_i(l) = PM(l), M_a(l) = PM(l - n, l) - PM(l - n, l - 1).

    Args:
        peaks: PM by (first, stop).
        num_layers: L.
        average: Over every n that the runs give, instead of the smallest (CAPTURE IV-B).

    Example:
        >>> layer_statistics({(0, 1): 5, (1, 2): 7, (0, 2): 9}, 2).added.tolist()
        [nan, 4.0]
    """
    isolated = np.array(
        [peaks.get((layer, layer + 1), np.nan) for layer in range(num_layers)], np.float64
    )
    added = np.full(num_layers, np.nan)
    for layer in range(1, num_layers):
        found = [
            peaks[first, layer + 1] - peaks[first, layer]
            for first in range(layer - 1, -1, -1)
            if (first, layer + 1) in peaks and (first, layer) in peaks
        ]
        if found:
            added[layer] = np.mean(found) if average else found[0]
    return LayerStatistics(isolated, added)


def merge_layers(statistics: LayerStatistics, num_merged: int) -> list[tuple[int, int]]:
    """Merge layers: join the two neighbours whose merged M_i is least, until ``num_merged`` layers
    are left.

    M_i(l, l + 1) = M_i(l) + M_a(l + 1);  M_a(l, l + 1) = M_a(l) + M_a(l + 1).

    Returns:
        The merged layers as (first, stop).

    Raises:
        ProfileError: ``profile-missing`` if the runs gave no M_i and M_a to merge by.

    Source: CAPTURE III-A3; READINGS.md, C-u: neighbours only.

    Example:
        >>> isolated, added = np.array([9.0, 2.0, 3.0]), np.array([np.nan, 1.0, 1.0])
        >>> merge_layers(LayerStatistics(isolated, added), 2)
        [(0, 1), (1, 3)]
    """
    groups = [(i, i + 1) for i in range(len(statistics.isolated))]
    isolated, added = list(statistics.isolated), list(statistics.added)
    while len(groups) > max(1, num_merged):
        merged = [isolated[i] + added[i + 1] for i in range(len(groups) - 1)]
        if np.isnan(merged).all():
            raise ProfileError.of(
                f"the layer merger cannot go from {len(groups)} to {num_merged} layers: the "
                "paper's runs gave no M_i and M_a for those "
                "left (4 layers or more are needed, and runs that did not fail).",
                "profile-missing",
            )
        i = int(np.nanargmin(merged))
        groups[i : i + 2] = [(groups[i][0], groups[i + 1][1])]
        isolated[i : i + 2] = [merged[i]]
        added[i : i + 2] = [added[i] + added[i + 1]]
    return groups


def merged_bounds(alone: np.ndarray, num_merged: int) -> set[int]:
    """Return where stages may begin and end once the layer merger has left ``num_merged`` layers.

    Args:
        alone: Bytes of every stage on the fewest devices, with one micro-batch in flight: M_i and
            M_a are read from it.
        num_merged: Layers that are left.
    """
    num_layers = len(alone)
    windows = [(first, first + n) for n in (1, 2) for first in range(num_layers - n + 1)]
    statistics = layer_statistics(
        {window: int(alone[window]) for window in windows if alone[window] < NEVER}, num_layers
    )
    return {first for first, _ in merge_layers(statistics, num_merged)} | {num_layers}
