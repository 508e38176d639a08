"""Plans and profiles of which reports and differences are made: synthetic, of a size that reads
like a real model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from synthetic_profiles import Planted, hybrid, make_plan

from capture.documents import read
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.measured.work import ProgramWork
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction, Verified
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.report.figures import figures

GB = 10**9
WORKLOAD = WorkloadSpec.parse("models/gpt.py:gpt?size=2.6B")
_STAGES = [
    Stage(0, 4, (0, 1, 2, 3), StageChoice(4, 1)).to_json(),
    Stage(4, 8, (4, 5, 6, 7), StageChoice(2, 2)).to_json(),
]
#: Of a front of time and memory.
FRONT_POINTS = [
    {
        "peak_bytes": (20 + 2 * i) * GB,
        "step_seconds": 1.4 - 0.1 * i,
        "bound_fraction": 0,
        "stages": _STAGES,
    }
    for i in range(4)
]


def planted_profile(num_layers: int, target: str = "a100-40g", *, max_devices: int = 2) -> Profile:
    """A profile with hundreds of megabytes per layer, and with work that is counted unless the
    target is ``cpu``."""
    profile = Planted(num_layers, 1, largest=200_000_000).profile(
        hybrid(max_devices), errors=(0.01,) * 60
    )
    measurements = profile.measurements
    if target != "cpu":
        measurements = {config: with_work(config, cost) for config, cost in measurements.items()}
    return replace(
        profile,
        measurements=measurements,
        provenance={"backend": "compile", "target": target},
        param_bytes={
            (tp, one): (400_000_000 // tp,) * len(profile.graph.params)
            for tp, one in profile.param_bytes
        },
    )


def with_work(config: StageConfig, cost: StageCost, slowness: float = 1.0) -> StageCost:
    """The cost with work that is counted, ``slowness`` times as much as predictions expect."""
    examples = slowness * config.num_layers * config.microbatch_size / config.choice.num_devices

    def work(factor: float) -> ProgramWork:
        return ProgramWork(
            int(factor * examples * 4e11), "bfloat16", int(examples * 1e8), int(examples * 2e8)
        )

    return replace(cost, forward_work=work(1), backward_work=work(2), update_work=work(0.05))


def predicted_plan(
    profile: Profile,
    layers: Sequence[int],
    nodes: Sequence[int],
    choice: StageChoice,
    **options: Any,
) -> Plan:
    """A plan of equal choices with its prediction."""
    plan = make_plan(layers, [choice] * len(layers), **options).with_(
        cluster=Cluster(tuple(nodes), profile.target), workload=WORKLOAD
    )
    return plan.with_(prediction=AdditivePredictor(profile).predict(plan))


def verified(plan: Plan, factor: float = 1.004) -> Plan:
    """The plan as if the compiler of its target had said ``factor`` times what was predicted."""
    peaks = [int(peak * factor) for peak in plan.prediction.peak_bytes_per_device]
    return plan.with_(
        verification=Verified(
            tuple(peaks), source={"backend": "compile", "target": plan.cluster.target}
        )
    )


def written_plan(
    target: str = "a100-40g", *, schedule: str = "1f1b", coverage: float | None = 0.98
) -> Plan:
    """Two stages on three devices with a prediction written by hand: 24 GB and 12 GB, each within 2
    %."""
    stages = (Stage(0, 2, (0, 1), StageChoice(2, 1)), Stage(2, 3, (2,), StageChoice(1, 1, "full")))
    parts = (
        {"parameters": 4 * GB, "gradients": 4 * GB, "activations": 10 * GB, "temporaries": 6 * GB},
        {"parameters": 2 * GB, "gradients": 2 * GB, "optimizer": 4 * GB, "temporaries": 4 * GB},
    )
    layers = (
        [
            {"parameters": GB, "gradients": GB, "activations": 10 * GB},
            {"parameters": 3 * GB, "gradients": 3 * GB, "temporaries": 6 * GB},
        ],
        [
            {"parameters": 2 * GB, "gradients": 2 * GB, "optimizer": 4 * GB}
        ],  # the temporaries are of no one layer
    )
    notes = [
        {
            "peak_bytes": sum(held.values()),
            "interval_bytes": [sum(held.values()) * 98 // 100, sum(held.values()) * 102 // 100],
            "instant": instant,
            "parts_bytes": held,
            "layers_bytes": of_layers,
        }
        for held, of_layers, instant in zip(parts, layers, ("backward", "update"), strict=True)
    ]
    prediction = {
        "peak_bytes_per_device": [24 * GB, 24 * GB, 12 * GB],
        "interval_coverage": coverage,
        "source": {"backend": "compile", "target": target},
        "stages": notes,
    }
    return Plan(
        Cluster((3,), target),
        3,
        stages,
        24,
        3,
        schedule,
        workload=WORKLOAD,
        prediction=read(prediction, Prediction),
    )


def drawn(facts: Any) -> dict[str, Any]:
    """Figures of a report by name."""
    return {figure.name: figure for figure in figures(facts)}
