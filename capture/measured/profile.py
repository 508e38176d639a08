"""Measured facts about a model's layers, with provenance; never edited. Framework-free, JSON with a
schema version.

Every measurement is the compiler's report on the programs of one *stage config* (CAPTURE III-B):
layers, degrees, micro-batch size and what is recomputed. M_i of a layer is the measurement of that
layer alone; M_a is the difference between two measurements whose layers differ by one (III-A1).
Statistics are formed where they are needed; the profile keeps what was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from capture import documents
from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.machine.target import relative_target, resolved_target
from capture.measured.size_errors import UNCALIBRATED_FRACTION, SizeError, extrapolation_width
from capture.measured.stage_cost import StageCost
from capture.model.graph import GRAPH, LayerGraph, Tensor
from capture.model.workload import WorkloadSpec, of_document
from capture.plan.choices import ChoiceRow, ParamSplit, StageChoice, num_full_layers
from capture.plan.stage import Stage
from capture.plan.stages import Plan, TensorParallelRule

#: What a stage that the compiler refuses is said to need: above all memories, and far enough below
#: what int64 holds to be added up.
REFUSED_BYTES = 1 << 58

#: Factors (low, high) on predictions of which no errors are known. Of 200 random plans of 17 models
#: that were estimated by tracing, one needed more than 1.25 times what was said: 1.375
#: (``benchmarks/whole_space.py``).
UNCALIBRATED = 0.75, 1.4

PROFILE = documents.Format("profile", ProfileError, "profile", "make it again with capture profile")


@dataclass(frozen=True, order=True)
class StageConfig:
    """The identity of a measurement: layers [first, stop) under a choice, for a micro-batch size
    over all replicas."""

    first: int
    stop: int
    choice: StageChoice
    microbatch_size: int

    @classmethod
    def of(cls, stage: Stage, microbatch_size: int) -> StageConfig:
        """Return the stage config of a plan's stage."""
        return cls(stage.first, stage.stop, stage.choice, microbatch_size)

    def __str__(self) -> str:
        return (
            f"{layers_in_words(self.first, self.stop)}, {self.choice}, micro-batch size "
            f"{self.microbatch_size}"
        )

    @property
    def num_layers(self) -> int:
        return self.stop - self.first

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the stages that share a trace: their choice and micro-batch size."""
        return self.choice, self.microbatch_size

    def to_json(self) -> dict[str, Any]:
        """Return the stage config as JSON, for people and files."""
        return {
            "layers": [self.first, self.stop - 1],
            **self.choice.to_json(),
            "microbatch_size": self.microbatch_size,
        }


def layers_in_words(first: int, stop: int) -> str:
    """Return the layers [first, stop), at least one, in words."""
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"


#: No interval is narrower than this on either side, and so many times wider for a kind of stage of
#: which none was seen.
_FLOOR, _UNSEEN = 0.005, 8


@dataclass(frozen=True)
class StageError:
    """The error of the prediction of one stage's peak: measured / predicted - 1; above 0 the
    prediction was too low."""

    config: StageConfig
    error: float


@dataclass(frozen=True)
class Calibration:
    """The errors of predictions for stages that are not in the profile.

    Attributes:
        errors: One for each stage of each calibration plan.
        seed: What the plans were drawn with; evaluation uses others.
        num_plans: Number of plans that were drawn.
        size_errors: Errors for a few stages at micro-batch sizes that are not profiled.
    """

    errors: tuple[StageError, ...]
    seed: int
    num_plans: int
    size_errors: tuple[SizeError, ...] = ()

    @cached_property
    def num_stages(self) -> int:
        """The number of different stages that were seen: errors of one stage at several positions
        say little more than one."""
        return len({e.config for e in self.errors})

    def coverage(self, wanted: float = 0.98) -> float | None:
        """Return the probability that the errors support: (n - 1) / (n + 1) for n stages where they
        are too few for the wanted one; None if it is 0."""
        supported = (self.num_stages - 1) / (self.num_stages + 1)
        return min(wanted, supported) if supported > 0 else None

    def interval_off_sizes(
        self, config: StageConfig, num_layers: int, octaves: float
    ) -> tuple[float, float]:
        """Return the interval of a prediction at a micro-batch size so many octaves from the
        profiled ones. It is ``interval``, wider by what held-out sizes say."""
        low, high = self.interval(config, num_layers)
        width = (
            extrapolation_width(self.size_errors, octaves)[0]
            if self.size_errors
            else UNCALIBRATED_FRACTION * max(1.0, octaves)
        )
        return max(0.0, low - width), high + width

    def interval(self, config: StageConfig, num_layers: int) -> tuple[float, float]:
        """Return the factors (low, high) on a stage's prediction that hold the measured peak with
        the probability ``coverage()``.

        On each side the largest error of all, of stages at the same end of the model that recompute
        the same, and of stages of the same degrees; each stretched by 1 + 2 / sqrt(n), because the
        largest of n is not the largest there is. So the two sides are those of split conformal
        prediction over n stages, and wider. A kind of which few stages were seen has a floor: 0.5 %
        * (1 + 8 / (1 + n)).
        """
        if not self.errors:
            return UNCALIBRATED
        kinds = [
            self.errors,
            [e for e in self.errors if _kind(e.config, num_layers) == _kind(config, num_layers)],
            [e for e in self.errors if _alike(e.config.choice) == _alike(config.choice)],
        ]
        low = high = 0.0
        for kind in kinds:
            n = len({e.config for e in kind})
            floor = _FLOOR * (1 + _UNSEEN / (1 + n))
            stretch = 1 + 2 / math.sqrt(max(n, 1))
            low = max(low, floor, stretch * -min((e.error for e in kind), default=0.0))
            high = max(high, floor, stretch * max((e.error for e in kind), default=0.0))
        return max(0.0, 1 - low), 1 + high

    def widest(self, choices: Iterable[StageChoice], num_layers: int) -> tuple[float, float]:
        """Return the interval of the least certain kind of stage with one of the choices."""
        last, middle = num_layers - 1, num_layers // 2
        kinds = product({(0, 1), (0, last + 1), (last, last + 1), (middle, middle + 1)}, choices)
        found = [self.interval(StageConfig(*layers, of, 1), num_layers) for layers, of in kinds]
        return min(low for low, _ in found), max(high for _, high in found)


def _kind(config: StageConfig, num_layers: int) -> tuple[Any, ...]:
    return _alike(config.choice).remat, config.first == 0, config.stop == num_layers


def _alike(choice: StageChoice) -> StageChoice:
    """Return a choice that is equal for all mixtures, however many layers recompute."""
    return replace(choice, remat="full:1") if num_full_layers(choice.remat) else choice


@dataclass(frozen=True)
class Profile:
    """The measurements and facts that planning needs of a model on a target.

    Attributes:
        graph: The layers, at the largest profiled micro-batch size.
        measurements: Measured costs by stage config.
        param_bytes: Bytes per device of every parameter, by way to split parameters.
        provenance: Backend, target, versions, flags, date.
        workload: Name of the profiled workload; None for one made from Python objects.
        auto_layers: Whether the layers were cut automatically.
        tensor_parallel_rule: How parameters are split.
        microbatch_sizes: Profiled, ascending; ``model_hashes`` are those of the graphs at these
            sizes, and at those of ``verified``.
        paper: Statistics of the paper's profiling runs (``PaperStatistics.to_json``), if made.
        calibration: Errors on held-out plans, if made.
        warnings: What a user should know, such as a loss that does not split over micro-batches.
        failures: Stages that could not be measured, and why, in words.
        verified: Stages of plans, compiled as they are: what is looked up and not predicted.
    """

    graph: LayerGraph
    measurements: Mapping[StageConfig, StageCost]
    param_bytes: Mapping[ParamSplit, tuple[int, ...]]
    provenance: Mapping[str, Any]
    workload: WorkloadSpec | None = None
    auto_layers: bool = False
    tensor_parallel_rule: TensorParallelRule = "auto"
    microbatch_sizes: tuple[int, ...] = ()
    model_hashes: Mapping[int, str] = field(default_factory=dict)
    paper: Mapping[str, Any] | None = None
    calibration: Calibration | None = None
    warnings: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    verified: Mapping[StageConfig, StageCost] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The name of the target that was measured."""
        return str(self.provenance.get("target", "cpu"))

    @property
    def cut_into(self) -> int | None:
        """The number of layers that the model was cut into automatically; None if it was cut at its
        marks."""
        return self.graph.num_layers if self.auto_layers else None

    @property
    def is_lower_bound(self) -> bool:
        """Whether the measurements are lower bounds of compiled ones. A stage then counts as the
        most of any part of it, not as a sum."""
        return self.provenance.get("bounds") == "least"

    @cached_property
    def splits_backward(self) -> bool:
        """Whether every measurement includes split backward passes."""
        costs = self.measurements.values()
        return bool(costs) and all(cost.split is not None for cost in costs)

    @cached_property
    def choices(self) -> tuple[StageChoice, ...]:
        """The profiled choices, ascending."""
        return tuple(sorted({choice for choice, _ in self.windows}))

    @cached_property
    def windows(self) -> Mapping[tuple[StageChoice, int], Mapping[tuple[int, int], StageCost]]:
        """The measurements per choice and micro-batch size, by window (first, stop)."""
        found: dict[tuple[StageChoice, int], dict[tuple[int, int], StageCost]] = {}
        last: tuple[StageChoice | None, int] = (None, 0)
        for config, cost in self.measurements.items():
            if config.choice is not last[0] or config.microbatch_size != last[1]:
                last = key = (config.choice, config.microbatch_size)
                of_key = found.setdefault(key, {})
            of_key[config.first, config.stop] = cost
        return found

    def graph_at(self, microbatch_size: int) -> LayerGraph:
        """Return the layer graph with every batch dimension scaled to another micro-batch size."""
        return rescaled(self.graph, microbatch_size, self.model_hashes.get(microbatch_size, ""))

    def without_stages(self, refused: Mapping[StageConfig, str]) -> Profile:
        """Return the profile with some stages, which a compiler refuses, marked as too large for
        any memory. The reasons are given by stage."""
        cost = StageCost(0, REFUSED_BYTES, REFUSED_BYTES, 0, 0, (), (), ())
        said = [f"{config}: {why}" for config, why in refused.items()]
        return replace(
            self,
            verified={**self.verified, **dict.fromkeys(refused, cost)},
            failures=tuple(dict.fromkeys((*self.failures, *said))),
        )

    def widest_interval(self, choices: Iterable[StageChoice]) -> tuple[float, float] | None:
        """Return the interval of the least certain kind of stage with one of the choices; None
        without calibration."""
        if self.calibration is None:
            return None
        return self.calibration.widest(choices, self.graph.num_layers)

    def plan(
        self,
        cluster: Cluster,
        stages: Iterable[Stage],
        *,
        global_batch_size: int,
        num_microbatches: int,
        schedule: str,
    ) -> Plan:
        """Make a plan of the profiled model."""
        return Plan(
            cluster,
            self.graph.num_layers,
            tuple(Stage(s.first, s.stop, s.devices, s.choice, offload=s.offload) for s in stages),
            global_batch_size,
            num_microbatches,
            schedule,
            self.auto_layers,
            self.tensor_parallel_rule,
            model_hash=self.model_hashes.get(global_batch_size // num_microbatches, ""),
            workload=self.workload,
        )

    def to_json(self) -> dict[str, Any]:
        params = {_split_name(split): list(sizes) for split, sizes in self.param_bytes.items()}
        calibration = self.calibration
        of_others = {
            "param_bytes_by_tensor_parallel": params,
            "measurements": _rows(self.measurements),
            "verified": _rows(self.verified),
            "calibration": None if calibration is None else _calibration_to_json(calibration),
        }
        written = of_others | {name: documents.write(getattr(self, name)) for name in _SAME}
        return PROFILE.write({field.name: written[field.name] for field in fields(_ProfileFile)})

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Read a profile from the document that ``to_json`` returned.

        Raises:
            ProfileError: ``profile-schema`` or ``graph-schema`` for an unknown schema version,
                ``profile-corrupt`` for missing or wrong fields.
        """
        known = PROFILE.check(data)
        if isinstance(known.get("graph"), Mapping):
            GRAPH.check(known["graph"])
        document = of_document(PROFILE.read(data, _ProfileFile))
        calibration = document.calibration
        return cls(
            **{name: getattr(document, name) for name in _SAME},
            measurements={row.config: row.cost for row in document.measurements},
            verified={row.config: row.cost for row in document.verified},
            param_bytes={
                _read_split(name): sizes
                for name, sizes in document.param_bytes_by_tensor_parallel.items()
            },
            calibration=None if calibration is None else calibration.read(),
        )

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON; the path of a target's file is stored relative to the file."""
        path = Path(path)
        stored = replace(
            self,
            provenance={**self.provenance, "target": relative_target(self.target, path.parent)},
        )
        path.write_text(json.dumps(stored.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a profile from a file that ``save`` wrote.

        Raises:
            ProfileError: ``profile-file`` if there is no such file, ``profile-corrupt`` if it is no
                JSON, and the codes of ``from_json``.
        """
        path = Path(path)
        profile = of_document(PROFILE.load(path, cls.from_json), path)
        target = resolved_target(profile.target, path.parent)
        return (
            profile
            if target == profile.target
            else replace(profile, provenance={**profile.provenance, "target": target})
        )


def _split_name(split: ParamSplit) -> str:
    tensor_parallel, replicas = split
    return str(tensor_parallel) if replicas == 1 else f"{tensor_parallel}/{replicas}"


def _read_split(name: str) -> ParamSplit:
    tensor_parallel, _, replicas = name.partition("/")
    return int(tensor_parallel), int(replicas or 1)


def _calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    errors = [{**e.config.to_json(), "error_fraction": e.error} for e in calibration.errors]
    return {**documents.fields_of(calibration), "errors": errors}


def _rows(measurements: Mapping[StageConfig, StageCost]) -> list[dict[str, Any]]:
    return [
        {**config.to_json(), "cost": documents.write(cost)}
        for config, cost in sorted(measurements.items())
    ]


@dataclass(frozen=True, kw_only=True)
class _Row(ChoiceRow):
    """A stage config as files have it.

    Attributes:
        layers: The first and the last layer.
    """

    layers: tuple[int, int]
    microbatch_size: int

    @property
    def config(self) -> StageConfig:
        first, last = self.layers
        return StageConfig(first, last + 1, self.choice, self.microbatch_size)


@dataclass(frozen=True, kw_only=True)
class _MeasuredRow(_Row):
    cost: StageCost


@dataclass(frozen=True, kw_only=True)
class _Error(_Row):
    error_fraction: float


@dataclass(frozen=True)
class _Calibration:
    """The calibration as files hold it. Those of earlier versions are refused: their errors do not
    say what they are of and leave out what stages exchange."""

    errors: tuple[float | _Error, ...]
    seed: int
    num_plans: int
    size_errors: tuple[SizeError, ...] = ()

    def read(self) -> Calibration | None:
        rows = [row for row in self.errors if isinstance(row, _Error)]
        errors = tuple(StageError(row.config, row.error_fraction) for row in rows)
        whole = len(errors) == len(self.errors)
        return Calibration(errors, self.seed, self.num_plans, self.size_errors) if whole else None


@dataclass(frozen=True, kw_only=True)
class _ProfileFile:
    """The profile as files hold it."""

    workload: WorkloadSpec | None
    provenance: Mapping[str, Any]
    auto_layers: bool
    tensor_parallel_rule: TensorParallelRule
    microbatch_sizes: tuple[int, ...]
    model_hashes: Mapping[int, str]
    graph: LayerGraph
    param_bytes_by_tensor_parallel: Mapping[str, tuple[int, ...]]
    measurements: tuple[_MeasuredRow, ...]
    verified: tuple[_MeasuredRow, ...] = ()
    paper: Mapping[str, Any] | None
    calibration: _Calibration | None
    warnings: tuple[str, ...]
    failures: tuple[str, ...]


_DIFFERENT = ("param_bytes_by_tensor_parallel", "measurements", "verified", "calibration")
_SAME = tuple(field.name for field in fields(_ProfileFile) if field.name not in _DIFFERENT)


def rescaled(graph: LayerGraph, microbatch_size: int, model_hash: str = "") -> LayerGraph:
    """Return a graph at another micro-batch size: batch dimensions and FLOPs scale in
    proportion."""
    if microbatch_size == graph.microbatch_size:
        return graph

    def tensor(t: Tensor) -> Tensor:
        if t.batch_dim is None:
            return t
        shape = tuple(
            size * microbatch_size // graph.microbatch_size if d == t.batch_dim else size
            for d, size in enumerate(t.shape)
        )
        return Tensor(t.name, shape, t.dtype, t.batch_dim, t.differentiable)

    def tensors(group: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(tensor, group))

    layers = tuple(
        replace(layer, flops=layer.flops * microbatch_size // graph.microbatch_size)
        for layer in graph.layers
    )
    return LayerGraph(
        model_hash,
        microbatch_size,
        layers,
        graph.params,
        tensors(graph.values),
        tensors(graph.batch),
        graph.value_dims,
    )
