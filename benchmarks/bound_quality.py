"""How near bounds from tracing are to what compilers say: peaks of stages, bounded as the search of
``capture plan`` bounds them, and compiled.

    python -m benchmarks.bound_quality h100 "models/gpt.py:gpt?size=125M&dtype=bfloat16" 4
    python -m benchmarks.bound_quality h100 "models/moe.py:moe?size=7.1B" --store FILE -o RESULT

The first compiles a sample of stages of one layer and two; the second takes those that a store has
(``capture plan --store``; again with other models to put several together) and that are the same
programs today. Per stage, the peak in a step of 1F1B with two micro-batches in flight: the least
and the most that tracing says, over what the compiler says; and the least seconds of a micro-batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment
from capture.machine.links import Layout
from capture.machine.target import Target

#: What stages of the sample do with their devices, as degrees and remat.
CHOICES = ((1, 1, "none"), (1, 1, "cheap"), (1, 1, "full"), (2, 1, "cheap"), (1, 2, "cheap"))
NUM_DEVICES = 64


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("workload")
    parser.add_argument("microbatch_size", type=int, nargs="?", default=4)
    parser.add_argument("--store", type=Path, help="with compiled stages of the workload")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the document here; other workloads in it stay"
    )
    options = parser.parse_args()
    environment.prepare(num_devices=NUM_DEVICES, platform=Target.load(options.target).platform)
    from capture.measured.store import Store
    from profiling_runs.measurements import open_measurements

    asked = asking(options.workload, options.target, options.microbatch_size)
    store = Store(options.store)
    if options.store is None:
        measurements = open_measurements(asked, store=store)
        found = compiled(measurements, sample(measurements.backend, options.microbatch_size))
    else:
        found = recorded(store, options.workload, options.target)
    rows = []
    for size in sorted({config.microbatch_size for config in found}):
        of_size = {config: cost for config, cost in found.items() if config.microbatch_size == size}
        rows += measured(asking(options.workload, options.target, size, of_size), of_size)
    print(json.dumps(rows), file=sys.stderr)
    document = {
        "benchmark": "bound_quality",
        "date": date.today().isoformat(),
        "versions": environment.versions(Target.load(options.target).platform),
        "workloads": {},
    }
    if options.output is not None and options.output.exists():
        document["workloads"] = json.loads(options.output.read_text())["workloads"]
    document["workloads"][f"{options.workload} for {options.target}"] = {
        **summary(rows),
        "stages": rows,
    }
    every = [row for each in document["workloads"].values() for row in each["stages"]]
    document = {**document, "all": summary(every)}
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["all"]))
    return 1 if document["all"]["num_above"] else 0


def asking(workload: str, target: str, size: int, configs: Iterable[Any] = ()) -> Any:
    """The question of the bounds of all stages with these choices."""
    from capture.machine.cluster import Cluster
    from capture.model.workload import WorkloadSpec
    from profiling_runs.question import ProfileQuestion

    return ProfileQuestion(
        WorkloadSpec.parse(workload),
        Cluster((8,) * (NUM_DEVICES // 8), target),
        size,
        choices=tuple(sorted({config.choice for config in configs})) or None,
        calibration_plans=0,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ends of the ratios."""
    found: dict[str, Any] = {
        "num_stages": len(rows),
        "num_above": sum(bool(row["above"]) for row in rows),
    }
    for name, of in (("least", ""), ("most", ""), ("least", "_seconds")):
        known = [row for row in rows if f"compiled{of}" in row]
        ratios = [row[f"{name}{of}"] / row[f"compiled{of}"] for row in known] or [1.0]
        name += of
        found[f"{name}_over_compiled"] = {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    return found


def sample(backend: Any, microbatch_size: int) -> list[Any]:
    """Stages of one layer and two."""
    from capture.measured.profile import StageConfig
    from capture.plan.choices import StageChoice

    num_layers = backend.traced(microbatch_size).graph.num_layers
    middle = num_layers // 2
    spans = ((0, 1), (middle, middle + 1), (middle, middle + 2), (num_layers - 1, num_layers))
    return [
        StageConfig(first, stop, StageChoice(dp, tp, remat), microbatch_size)
        for dp, tp, remat in CHOICES
        for first, stop in spans
    ]


def compiled(measurements: Any, configs: list[Any]) -> dict[Any, Any]:
    """What the compiler says of stages."""
    measurements.require({"stages": configs})
    return dict(measurements.costs)


def recorded(store: Any, workload: str, target: str) -> dict[Any, Any]:
    """What it said of those that a store has."""
    from capture.documents import read
    from capture.measured.profile import StageConfig
    from capture.measured.stage_cost import StageCost
    from capture.plan.choices import StageChoice
    from profiling_runs.measurements import open_measurements

    names = [field.name for field in fields(StageChoice)]
    backend = open_measurements(asking(workload, target, 1)).backend
    found = {}
    for row in store.rows("done"):
        job = row.job
        if (job.get("workload"), job.get("backend")) != (workload, f"compile:{target}"):
            continue
        if job["part"] != "stage":
            continue
        choice = StageChoice(**{name: job[name] for name in names if name in job})
        first, last = job["layers"]
        config = StageConfig(first, last + 1, choice, job["microbatch_size"])
        if backend.key(config) == row.key:  # else its programs were others
            found[config] = read(row.value, StageCost)
    return found


def measured(asked: Any, costs: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Of stages of one micro-batch size: bytes, and what of the lower bound is above the compiler's
    number."""
    from capture.measured.store import Store
    from capture.predictor import AdditivePredictor
    from capture.predictor.step_time import has_times
    from capture.predictor.times import TimePredictor
    from profiling_runs.bounds import bounds
    from profiling_runs.measurements import open_measurements
    from profiling_runs.verify import with_stages

    measurements, start = open_measurements(asked, store=Store()), time.process_time()
    between = bounds(asked, measurements)
    print(f"bounds: {time.process_time() - start:.1f} s of the processor", file=sys.stderr)
    measurements.costs.update(costs)
    times = TimePredictor(between.least, Layout(8)) if has_times(between.least) else None
    predictors = {
        "least": AdditivePredictor(between.least),
        "compiled": AdditivePredictor(with_stages(between.least, list(costs), measurements)),
        "most": AdditivePredictor(between.most),
    }
    rows = []
    for config in costs:
        choice, span = config.choice, (config.first, config.stop)
        memories = {n: p.memory(choice, asked.microbatch_size) for n, p in predictors.items()}
        parts = {
            n: {part: int(getattr(memory, part)[span]) for part in PARTS}
            for n, memory in memories.items()
        }
        peaks = {
            name: int(predictor.peaks(choice, asked.microbatch_size, "1f1b", 8, 2)[1][span])
            for name, predictor in predictors.items()
        }
        rows.append(
            {
                "layers": [config.first, config.stop - 1],
                "choice": [choice.data_parallel, choice.tensor_parallel, choice.remat],
                "microbatch_size": asked.microbatch_size,
                **peaks,
                "above": [p for p in PARTS if parts["least"][p] > parts["compiled"][p]],
            }
        )
        if times is not None and (took := times.model.stage_times(costs[config])) is not None:
            table = times.table(choice, asked.microbatch_size)
            seconds = table.at(*span).microbatch_seconds, took.microbatch_seconds
            rows[-1].update(zip(("least_seconds", "compiled_seconds"), seconds, strict=True))
            rows[-1]["above"] += ["seconds"] * (seconds[0] > seconds[1])
    return rows


#: Of a stage's memory, what only the compiler knows.
PARTS = ("kept", "forward", "backward", "update", "optimizer")


if __name__ == "__main__":
    sys.exit(main())
