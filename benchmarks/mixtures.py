"""What stages gain that recompute only some of their layers as a whole.

    python -m benchmarks.mixtures -o benchmarks/results/2026-01-31-mixtures.json
    python -m benchmarks.mixtures --only "GPT 125M" --verify middle

The fastest 1F1B plan for four H100 that are not there, whose stages choose among ``cheap`` and
``full``, and the same with mixtures of both (``full:K``), at three memory limits: a quarter, a half
and three quarters of the way from the least peak to that of the fastest plan. Steps are counted as
the search does. The stages of plans with mixtures are compiled at the limits of ``--verify``,
beside what was predicted of them from windows of one and two layers of either kind.

What was compiled is kept in the store, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.documents import arguments, finish
from capture import environment
from capture.cli.asked import prepare
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from profiling_runs.measurements import Measurements, open_measurements, unmeasured
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify
from recommender.answer import StageAnswer
from recommender.capture.recommendation import recommend
from recommender.question import PlanQuestion

CLUSTER = Cluster((4,), "h100")
NUM_MICROBATCHES = 16
LIMITS = {"tight": 0.25, "middle": 0.5, "loose": 0.75}


@dataclass(frozen=True)
class Case:
    """A model, with the examples of a micro-batch."""

    workload: str
    microbatch_size: int


CASES = {
    "GPT 125M": Case("models/gpt.py:gpt?size=125M&dtype=bfloat16", 8),
    "GPT 1.3B": Case("models/gpt.py:gpt?size=1.3B&dtype=bfloat16", 8),
}


def measured(case: Case, options: argparse.Namespace) -> tuple[Profile, Measurements]:
    """Windows of one and two layers at one size: no interval is shown here."""
    size, choices = case.microbatch_size, (StageChoice(remat="cheap"), StageChoice(remat="full"))
    asked = ProfileQuestion(WorkloadSpec.parse(case.workload), CLUSTER, size, choices=choices)
    where = Where(options.workers)
    measurements = open_measurements(asked, store=Store(options.store), where=where)
    facts = unmeasured(asked, measurements)
    num_layers = facts.graph.num_layers
    windows = [
        StageConfig(first, first + n, choice, size)
        for choice in choices
        for n in (1, 2)
        for first in range(num_layers - n + 1)
    ]
    measurements.require({"layer windows": windows})
    costs = {config: measurements.costs[config] for config in windows}
    return replace(facts, measurements=costs, microbatch_sizes=(size,)), measurements


def names_alone(profile: Profile, asked: PlanQuestion) -> StageAnswer:
    with patch("recommender.capture.posed.with_mixtures", lambda choices, _: list(choices)):
        return recommend(profile, asked)


def told(answer: StageAnswer) -> dict[str, Any]:
    assert answer.plan is not None and answer.status == "ok", "names alone fit"
    return {
        "step_seconds": answer.proof.step_seconds,
        "predicted_peak_bytes": answer.peak_bytes,
        "search_seconds": answer.proof.seconds,
        "stages": [f"{s.first}-{s.stop - 1} {s.choice.remat}" for s in answer.plan.stages],
    }


def row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    print(name, file=sys.stderr, flush=True)
    profile, measurements = measured(case, options)
    batch = case.microbatch_size * NUM_MICROBATCHES
    asked = PlanQuestion(CLUSTER, batch, NUM_MICROBATCHES, "1f1b", objective="throughput")
    least = names_alone(profile, replace(asked, objective="memory")).peak_bytes
    most = names_alone(profile, asked).peak_bytes
    found: dict[str, Any] = {}
    for limit, part in LIMITS.items():
        at = replace(asked, memory_limit_bytes=least + int((most - least) * part))
        names, mixed = names_alone(profile, at), recommend(profile, at)
        found[limit] = {
            "memory_limit_bytes": at.memory_limit_bytes,
            "names": told(names),
            "mixtures": told(mixed),
            "gain_fraction": 1 - told(mixed)["step_seconds"] / told(names)["step_seconds"],
        }
        if limit in options.verify and mixed.plan is not None and mixed.prediction is not None:
            print(f"compiling the stages at the {limit} limit", file=sys.stderr, flush=True)
            compiled = verify(mixed.plan, measurements).peak_bytes_per_device
            found[limit]["compiled_bytes_per_device"] = list(compiled)
            found[limit]["predicted_bytes_per_device"] = list(
                mixed.prediction.peak_bytes_per_device
            )
    return {"model": name, "microbatch_size": case.microbatch_size, "limits": found}


def claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    every = [at for one in rows for at in one["limits"].values()]
    pairs = [
        (predicted, compiled)
        for at in every
        for predicted, compiled in zip(
            at.get("predicted_bytes_per_device", ()),
            at.get("compiled_bytes_per_device", ()),
            strict=True,
        )
    ]
    return {
        "times": "counted for a chip that was not there",
        "never_slower": all(at["gain_fraction"] >= 0 for at in every),
        "gain_fraction": {
            one["model"]: [round(at["gain_fraction"], 4) for at in one["limits"].values()]
            for one in rows
        },
        "num_compiled": len(pairs),
        "lowest_error_fraction": min((p / c - 1 for p, c in pairs), default=None),
        "highest_error_fraction": max((p / c - 1 for p, c in pairs), default=None),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=tuple(CASES), metavar="MODEL")
    parser.add_argument("--verify", nargs="*", choices=LIMITS, default=tuple(LIMITS))
    parser.add_argument("--workers", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    prepare(CLUSTER)
    rows = [row(name, options) for name in options.only]
    return finish(
        "mixtures", rows, options, versions=environment.versions("cuda"), claims=claims(rows)
    )


if __name__ == "__main__":
    sys.exit(main())
