"""What the schedules beside 1F1B gain, and how well their memory is predicted.

    python -m benchmarks.every_schedule plans -o benchmarks/results/2026-01-31-schedule-plans.json
    python -m benchmarks.every_schedule predictions -o RESULT.json
    python -m benchmarks.every_schedule predictions --merge FIRST.json SECOND.json -o RESULT.json

* plans: the fastest plan of every schedule on 16 A100s that are not there, at three memory limits,
  beside that of 1F1B. A step is *counted* as the search does, and *simulated*, which is told beside
  it: with the batch's way to the devices and what is exchanged at the end. The limits: what the
  device has (loose), and a quarter of the way beyond each of what 1F1B needs for its fastest plan
  (middle) and at least (tight), by how far these are apart.
* predictions: random plans, predicted from a profile alone, beside their own compiled stages
  (``capture evaluate``): remat ``cheap``, sequence parallelism, and every schedule of a table.

What was compiled is kept in the store, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.prediction_error import answer_of
from capture import environment
from capture.cli.asked import prepare
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import Remat, StageChoice
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.predictor.step_time import predicted_timeline
from profiling_runs.collect import profile
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from recommender.answer import StageAnswer
from recommender.capture.recommendation import recommend
from recommender.question import PlanQuestion

CLUSTER = "4x4"
TARGET = "a100-40g"
#: As wanted of every row of predictions.
WANTED = {
    "mean_abs_error_fraction": 0.02,
    "max_abs_error_fraction": 0.10,
    "interval_coverage_fraction": 0.95,
}


@dataclass(frozen=True)
class Family:
    """A model whose plans are searched.

    Attributes:
        degrees: (data, tensor) parallel degrees of stages.
        microbatch_size, num_microbatches: Of a step.
        remats: Every stage chooses among them.
        num_layers: If not those of the model's marks.
    """

    workload: str
    degrees: tuple[tuple[int, int], ...]
    microbatch_size: int
    num_microbatches: int
    remats: tuple[Remat, ...] = ("cheap",)
    num_layers: int | None = None


_GPT, _MOE, _WRN = "models/gpt.py:gpt", "models/moe.py:moe", "models/wide_resnet.py:wide_resnet"
FAMILIES = {
    "gpt": Family(f"{_GPT}?size=2.6B&dtype=bfloat16", ((2, 1), (4, 1)), 4, 16),
    "moe": Family(f"{_MOE}?size=2.4B&dtype=bfloat16", ((4, 1),), 4, 16),
    "wide_resnet": Family(f"{_WRN}?size=1B", ((4, 1),), 12, 16, num_layers=8),
    "gpt, remat of every stage": Family(
        f"{_GPT}?size=125M&dtype=bfloat16", ((4, 1),), 4, 16, ("cheap", "full")
    ),
}


@dataclass(frozen=True)
class Row:
    """Random plans of a model.

    Attributes:
        schedule: ``both`` for 1F1B and GPipe.
        options: Of ``capture evaluate``.
    """

    workload: str
    cluster: str
    global_batch: int
    schedule: str
    options: tuple[str, ...] = ()
    target: str = "cpu"


_TABLES = tuple(name for name in SCHEDULES if name not in PLAIN_SCHEDULES)
_TINY, _SEQUENCE = f"{_GPT}?size=tiny", ("--sequence-parallel",)
_TRANSLATOR = "tests/kit/sequences.py:encoder_decoder"
_GATED = "tests/kit/dense.py:gated?depth=10"
#: Eight micro-batches everywhere.
ROWS = {
    "gpt, cheap": Row(_TINY, "1x4", 64, "both"),
    "gpt, sequence parallel": Row(_TINY, "1x2", 64, "both", _SEQUENCE),
    **{f"gpt, {name}": Row(_TINY, "1x4", 64, name) for name in _TABLES},
    "gated, cheap": Row(_GATED, "1x2", 64, "both"),
    "gated, sequence parallel": Row(_GATED, "1x2", 64, "both", _SEQUENCE),
    **{f"gated, {name}": Row(_GATED, "1x2", 64, name) for name in _TABLES},
    "encoder-decoder, cheap": Row(_TRANSLATOR, "1x2", 64, "both"),
    "encoder-decoder, zb-v": Row(_TRANSLATOR, "1x2", 64, "zb-v"),
    "gpt h100, cheap": Row(f"{_TINY}&dtype=bfloat16", "1x2", 64, "both", target="h100"),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- plans ---------------------------------------------------------------------------------------


def profiled(family: Family, options: argparse.Namespace) -> Profile:
    """Windows and their neighbours alone: no interval is shown here."""
    question = ProfileQuestion(
        WorkloadSpec.parse(family.workload),
        Cluster.parse(CLUSTER, TARGET),
        family.microbatch_size,
        num_layers=family.num_layers,
        choices=tuple(StageChoice(*of, remat) for remat in family.remats for of in family.degrees),
        splits_backward=True,
        num_neighbours=1,
        calibration_plans=0,
    )
    return profile(question, store=Store(options.store), where=Where(options.workers))


def plans(name: str, options: argparse.Namespace) -> dict[str, Any]:
    family = FAMILIES[name]
    say(f"{name}: profiling {family.workload}")
    made = profiled(family, options)
    return at_limits(name, made, CLUSTER, family.microbatch_size, family.num_microbatches)


def recorded_plans(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """From a profile that is there, at its largest micro-batch size."""
    made = Profile.load(path)
    workload = f"{path.stem} {options.cluster}"
    return at_limits(workload, made, options.cluster, max(made.microbatch_sizes), 16)


def at_limits(
    name: str, made: Profile, cluster: str, microbatch_size: int, num_microbatches: int
) -> dict[str, Any]:
    asked = PlanQuestion(
        Cluster.parse(cluster, made.target),
        microbatch_size * num_microbatches,
        num_microbatches,
        "1f1b",
    )
    least = recommend(made, replace(asked, objective="memory"))
    fastest = recommend(made, replace(asked, objective="throughput"))
    low, high = least.peak_bytes, fastest.peak_bytes
    limits = {
        "loose": asked.limit_bytes,
        "middle": high + (high - low) // 4,
        "tight": low + (high - low) // 4,
    }
    return {
        "family": name,
        "workload": str(made.workload),
        "cluster": str(asked.cluster),
        "choices": list(map(str, made.choices)),
        "num_layers": made.graph.num_layers,
        "global_batch_size": asked.global_batch_size,
        "num_microbatches": asked.num_microbatches,
        "provenance": dict(made.provenance),
        "failures": list(made.failures),
        "limits": {
            limit: at_limit(made, replace(asked, objective="throughput", memory_limit_bytes=size))
            for limit, size in limits.items()
        },
    }


def at_limit(made: Profile, asked: PlanQuestion) -> dict[str, Any]:
    """The fastest plans that fit; what is chosen is by counted seconds, as ``--try-schedules``
    chooses."""
    found = {}
    for name in SCHEDULES:
        say(f"{asked.memory_limit_bytes} {name}")
        start = time.process_time()
        answer = recommend(made, replace(asked, schedule=name))
        found[name] = {**told(answer, made), "search_seconds": time.process_time() - start}
    fitting = {name: of for name, of in found.items() if of["status"] == "ok"}
    best = min(fitting, key=lambda name: fitting[name]["counted_seconds"])
    alone = found["1f1b"]
    return {
        "memory_limit_bytes": asked.memory_limit_bytes,
        "fastest": best,
        **{
            f"{how}_gain": 1 - fitting[best][f"{how}_seconds"] / alone[f"{how}_seconds"]
            for how in ("counted", "simulated")
        },
        "schedules": found,
    }


def told(answer: StageAnswer, made: Profile) -> dict[str, Any]:
    """Of a plan: what it needs, how long it takes, its stages."""
    if answer.plan is None or answer.prediction is None:
        return {"status": answer.status}
    return {
        "status": answer.status,
        "peak_bytes": answer.peak_bytes,
        "counted_seconds": answer.proof.step_seconds,
        "simulated_seconds": float(predicted_timeline(answer.plan, made).step_seconds),
        "stages": [
            f"{s.first}-{s.stop - 1} {s.choice.data_parallel}x{s.choice.tensor_parallel} "
            f"{s.choice.remat}"
            for s in answer.plan.stages
        ],
    }


def claims_of_plans(rows: list[dict[str, Any]]) -> dict[str, Any]:
    every = [at for row in rows for at in row["limits"].values()]
    return {
        "times": "simulated for a chip that was not there",
        "never_slower": all(at["simulated_gain"] >= 0 for at in every),
        "simulated_gain": {
            f"{row['family']}, {limit}": [round(at["simulated_gain"], 4), at["fastest"]]
            for row in rows
            for limit, at in row["limits"].items()
        },
    }


# ---- predictions ---------------------------------------------------------------------------------


def predictions(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One ``capture evaluate``."""
    row = ROWS[name]
    say(name)
    asked = ["evaluate", row.workload, "--cluster", row.cluster, "--target", row.target]
    asked += ["--global-batch", str(row.global_batch), "--microbatches", "8"]
    asked += ["--schedule", row.schedule, "--plans", str(options.plans), "--seed", "1"]
    asked += ["--workers", str(options.workers), "--default-only", "--json", *row.options]
    asked += ["--store", str(options.store)] if options.store else []
    return {"row": name, **answer_of(asked)}


def claims_of_predictions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every row: the predictions of stages that were not compiled before."""
    return {
        row["row"]: {
            "num_plans": row["num_plans"],
            "num_fresh_predictions": row["default"]["num_predictions"],
            **{name: row["default"][name] for name in WANTED},
            "lowest_error_fraction": row["default"]["lowest_error_fraction"],
            "num_above_interval": row["default"]["num_above_interval"],
            "as_wanted": row["default"]["num_predictions"] > 0
            and row["default"]["mean_abs_error_fraction"] <= WANTED["mean_abs_error_fraction"]
            and row["default"]["max_abs_error_fraction"] <= WANTED["max_abs_error_fraction"]
            and row["default"]["interval_coverage_fraction"]
            >= WANTED["interval_coverage_fraction"],
        }
        for row in rows
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("plans", "predictions"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families, or rows; default: all")
    parser.add_argument(
        "--profile", type=Path, nargs="+", metavar="FILE", help="plan from these; measure nothing"
    )
    parser.add_argument("--cluster", default=CLUSTER, help="of --profile; default: %(default)s")
    parser.add_argument("--plans", type=int, default=200, help="random ones; default: %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--store", type=Path)
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="rows of recorded runs; ask nothing"
    )
    options = parser.parse_args()
    is_plans = options.part == "plans"
    if options.merge:
        rows = [row for path in options.merge for row in json.loads(path.read_text())["rows"]]
    elif options.profile and is_plans:
        rows = [recorded_plans(path, options) for path in options.profile]
    elif is_plans:
        prepare(Cluster.parse(CLUSTER, TARGET))
        rows = [plans(name, options) for name in options.only or FAMILIES]
    else:
        rows = [predictions(name, options) for name in options.only or ROWS]
    claims = (claims_of_plans if is_plans else claims_of_predictions)(rows)
    return finish(
        f"every_schedule, {options.part}",
        rows,
        options,
        versions=environment.versions("cuda"),
        claims=claims,
    )


if __name__ == "__main__":
    sys.exit(main())
