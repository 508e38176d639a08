"""Measured facts about a model's layers, with provenance; never edited. Framework-free, JSON with a schema version.

Every measurement is the compiler's report on the programs of one *stage config* (CAPTURE III-B): layers, degrees, micro-batch size
and what is recomputed. M_i of a layer is the measurement of that layer alone; M_a is the difference between two measurements whose
layers differ by one (III-A1). Statistics are formed where they are needed; the profile keeps what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from capture.choices import ParamSplit, StageChoice
from capture.errors import ProfileError
from capture.fields import Fields, describe
from capture.graph import LayerGraph, Tensor
from capture.interface import StageCost
from capture.plan import TensorParallelRule
from capture.target import relative_target, resolved_target
from capture.workload import WorkloadSpec

PROFILE_SCHEMA_VERSION = 1


@dataclass(frozen=True, order=True)
class StageConfig:
    """What a measurement is of: layers [first, stop) under a choice, for a micro-batch size over all replicas."""

    first: int
    stop: int
    choice: StageChoice
    microbatch_size: int

    @property
    def num_layers(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Calibration:
    """How far predictions were off for stages that are not in the profile.

    Attributes:
        errors: Per stage of the calibration plans, measured / predicted - 1 of its peak.
        seed: Of the plans; evaluation uses others.
        num_plans: Drawn.
    """

    errors: tuple[float, ...]
    seed: int
    num_plans: int

    def coverage(self, wanted: float = 0.98) -> float | None:
        """The probability that the errors support: n / (n + 1) where they are too few for the wanted one, None without errors."""
        return min(wanted, len(self.errors) / (len(self.errors) + 1)) if self.errors else None

    def interval(self, coverage: float = 0.98) -> tuple[float, float]:
        """Factors (low, high) on a prediction that hold the measured peak with the given probability.

        Split conformal: the (n + 1) * coverage-th smallest absolute error; with few errors the largest, plus half of itself. Never
        narrower than 0.5 %.
        """
        if not self.errors:
            return 0.75, 1.25
        ranked = sorted(abs(e) for e in self.errors)
        rank = int(-(-(len(ranked) + 1) * coverage // 1))
        width = ranked[rank - 1] if rank <= len(ranked) else 1.5 * ranked[-1]
        width = max(width, 0.005)
        return 1 - width, 1 + width


@dataclass(frozen=True)
class Profile:
    """Everything that planning needs to know of a model on a target.

    Attributes:
        graph: The layers, at the largest profiled micro-batch size.
        measurements: By stage config.
        param_bytes: Per way to split parameters, bytes per device of each.
        provenance: Backend, target, versions, flags, date.
        workload: By name; None for one made from Python objects.
        auto_layers: Whether the layers were cut automatically.
        tensor_parallel_rule: How parameters are split.
        microbatch_sizes: Profiled, ascending; ``model_hashes`` are those of the graphs at these sizes.
        paper: Statistics of the paper's profiling runs (``PaperStatistics.to_json``), if made.
        calibration: Errors on held-out plans, if made.
        warnings: What a user should know, such as a loss that does not split over micro-batches.
        failures: Stage configs that could not be measured, and why.
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
        """Name of what was measured."""
        return str(self.provenance.get("target", "cpu"))

    @cached_property
    def choices(self) -> tuple[StageChoice, ...]:
        """Profiled choices."""
        return tuple(sorted({config.choice for config in self.measurements}))

    def graph_at(self, microbatch_size: int) -> LayerGraph:
        """The graph with every batch dimension scaled to another micro-batch size."""
        return rescaled(self.graph, microbatch_size, self.model_hashes.get(microbatch_size, ""))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": PROFILE_SCHEMA_VERSION,
            "workload": None if self.workload is None else self.workload.to_json(),
            "provenance": dict(self.provenance),
            "auto_layers": self.auto_layers,
            "tensor_parallel_rule": self.tensor_parallel_rule,
            "microbatch_sizes": list(self.microbatch_sizes),
            "model_hashes": {str(b): h for b, h in self.model_hashes.items()},
            "graph": self.graph.to_json(),
            "param_bytes_by_tensor_parallel": {_split_name(split): list(sizes) for split, sizes in self.param_bytes.items()},
            "measurements": _rows(self.measurements),
            "verified": _rows(self.verified),
            "paper": self.paper,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "warnings": list(self.warnings),
            "failures": list(self.failures),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """The profile that ``to_json`` wrote.

        Raises:
            ProfileError: ``profile-schema`` for an unknown schema version, ``profile-corrupt`` for missing or wrong fields.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != PROFILE_SCHEMA_VERSION:
            raise ProfileError.of(
                f"profile has schema_version={version!r}; this version of capture reads {PROFILE_SCHEMA_VERSION}. "
                "Make it again with capture profile.",
                "profile-schema",
            )
        try:
            calibration = data["calibration"]
            return cls(
                graph=LayerGraph.from_json(data["graph"]),
                measurements=_read_rows(data["measurements"]),
                verified=_read_rows(data.get("verified", [])),
                param_bytes={_read_split(name): tuple(sizes) for name, sizes in data["param_bytes_by_tensor_parallel"].items()},
                provenance=data["provenance"],
                workload=None if data["workload"] is None else WorkloadSpec.from_json(Fields(data).object("workload")),
                auto_layers=data["auto_layers"],
                tensor_parallel_rule=data["tensor_parallel_rule"],
                microbatch_sizes=tuple(data["microbatch_sizes"]),
                model_hashes={int(b): h for b, h in data["model_hashes"].items()},
                paper=data["paper"],
                calibration=None
                if calibration is None
                else Calibration(tuple(calibration["errors"]), calibration["seed"], calibration["num_plans"]),
                warnings=tuple(data["warnings"]),
                failures=tuple(data["failures"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ProfileError.of(
                f"profile is not what capture profile writes: {describe(error)}. Make it again.", "profile-corrupt"
            ) from error

    def save(self, path: Path | str) -> None:
        """Write JSON; the path of a target's file is stored relative to the file."""
        path = Path(path)
        stored = replace(self, provenance={**self.provenance, "target": relative_target(self.target, path.parent)})
        path.write_text(json.dumps(stored.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read what ``save`` wrote.

        Raises:
            ProfileError: ``profile-file`` if there is no such file, ``profile-corrupt`` if it is no JSON, and the codes of ``from_json``.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise ProfileError.of(f"profile {str(path)!r} does not exist.", "profile-file") from None
        except OSError as error:
            raise ProfileError.of(f"profile {str(path)!r} cannot be read: {error.strerror}.", "profile-file") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ProfileError.of(f"profile {str(path)!r} is not JSON: {error}. Make it again.", "profile-corrupt") from None
        profile = cls.from_json(data)
        target = resolved_target(profile.target, path.parent)
        return profile if target == profile.target else replace(profile, provenance={**profile.provenance, "target": target})


def _split_name(split: ParamSplit) -> str:
    tensor_parallel, replicas = split
    return str(tensor_parallel) if replicas == 1 else f"{tensor_parallel}/{replicas}"


def _read_split(name: str) -> ParamSplit:
    tensor_parallel, _, replicas = name.partition("/")
    return int(tensor_parallel), int(replicas or 1)


def _rows(measurements: Mapping[StageConfig, StageCost]) -> list[dict[str, Any]]:
    return [
        {
            "layers": [config.first, config.stop - 1],
            **asdict(config.choice),
            "microbatch_size": config.microbatch_size,
            "cost": cost.to_json(),
        }
        for config, cost in sorted(measurements.items())
    ]


def _read_rows(rows: Sequence[Mapping[str, Any]]) -> dict[StageConfig, StageCost]:
    measurements = {}
    for row in rows:
        config = StageConfig(row["layers"][0], row["layers"][1] + 1, StageChoice.of_row(row), row["microbatch_size"])
        measurements[config] = StageCost.from_json(row["cost"])
    return measurements


def rescaled(graph: LayerGraph, microbatch_size: int, model_hash: str = "") -> LayerGraph:
    """A graph at another micro-batch size: batch dimensions and FLOPs scale in proportion."""
    if microbatch_size == graph.microbatch_size:
        return graph

    def tensor(t: Tensor) -> Tensor:
        if t.batch_dim is None:
            return t
        shape = tuple(size * microbatch_size // graph.microbatch_size if d == t.batch_dim else size for d, size in enumerate(t.shape))
        return Tensor(t.name, shape, t.dtype, t.batch_dim, t.differentiable)

    def tensors(group: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(tensor, group))

    layers = tuple(
        type(layer)(**{**asdict(layer), "flops": layer.flops * microbatch_size // graph.microbatch_size}) for layer in graph.layers
    )
    return LayerGraph(model_hash, microbatch_size, layers, graph.params, tensors(graph.values), tensors(graph.batch))
