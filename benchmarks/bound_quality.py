"""How near bounds from tracing are to what compilers say: peaks of small stages, bounded and
compiled.

    python -m benchmarks.bound_quality h100 "models/gpt.py:gpt?size=125M&dtype=bfloat16" 4
    python -m benchmarks.bound_quality h100 "models/moe.py:moe?size=2.4B" --recorded 60 --store FILE

The first compiles a sample of stages; the second takes those of up to four layers that a store has.
Per stage, the peak in a step of 1F1B with two micro-batches in flight: the least and the most that
tracing says, over what the compiler says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from capture import environment
from capture.machine.target import Target

#: What stages of the sample do with their devices, as degrees and remat.
CHOICES = ((1, 1, "none"), (1, 1, "cheap"), (1, 1, "full"), (2, 1, "cheap"), (1, 2, "cheap"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("workload")
    parser.add_argument("microbatch_size", type=int, nargs="?", default=4)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--recorded", type=int, metavar="N", help="at most N stages of the store")
    options = parser.parse_args()
    environment.prepare(num_devices=64, platform=Target.load(options.target).platform)
    from capture.measured.store import Store
    from capture.model.workload import WorkloadSpec
    from capture.profiler.compile import CompileBackend

    task, store = WorkloadSpec.parse(options.workload).load(), Store(options.store)
    target = Target.load(options.target)
    backend = CompileBackend(task, store=store, target=target, num_devices=64)
    stages = (
        sample(backend, options.microbatch_size)
        if options.recorded is None
        else recorded(store, options.workload, options.target, options.recorded)
    )
    rows = []
    for config, known in stages:
        rows.append(measured(backend, config, known))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(summary(rows)))
    return 0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ends of the ratios."""
    found: dict[str, Any] = {
        "num_stages": len(rows),
        "num_above": sum(bool(row["above"]) for row in rows),
    }
    for name in ("least", "most"):
        ratios = [row[name] / row["compiled"] for row in rows]
        found[f"{name}_over_compiled"] = {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    for name in ("bound_seconds", "compile_seconds"):
        found[name] = round(sum(row[name] for row in rows), 1)
    return found


def sample(backend: Any, microbatch_size: int) -> Iterator[tuple[Any, None]]:
    """Stages of one layer and two, to be compiled."""
    from capture.measured.profile import StageConfig
    from capture.plan.choices import StageChoice

    num_layers = backend.traced(microbatch_size).graph.num_layers
    middle = num_layers // 2
    spans = ((0, 1), (middle, middle + 1), (middle, middle + 2), (num_layers - 1, num_layers))
    for dp, tp, remat in CHOICES:
        for first, stop in spans:
            yield StageConfig(first, stop, StageChoice(dp, tp, remat), microbatch_size), None


def recorded(store: Any, workload: str, target: str, most: int) -> list[tuple[Any, Any]]:
    """Stages that the store has, as they were compiled then: drawn alike in every run."""
    from capture.documents import read
    from capture.measured.profile import StageConfig
    from capture.measured.stage_cost import StageCost
    from capture.plan.choices import StageChoice

    names = [field.name for field in fields(StageChoice)]
    found = []
    for row in store.rows("done"):
        job = row.job
        if (job.get("workload"), job.get("backend")) != (workload, f"compile:{target}"):
            continue
        if job["part"] != "stage" or job["layers"][1] - job["layers"][0] > 3:
            continue
        choice = StageChoice(**{name: job[name] for name in names if name in job})
        first, last = job["layers"]
        config = StageConfig(first, last + 1, choice, job["microbatch_size"])
        found.append((row.key, config, read(row.value, StageCost)))
    found.sort(key=lambda each: each[0])  # a hash: in no order of the model
    return [(config, cost) for _, config, cost in found[:most]]


def measured(backend: Any, config: Any, known: Any) -> dict[str, Any]:
    """Of a stage: bytes, what of the lower bound is above the compiler's number, and processor
    seconds."""
    from capture.profiler.bounds import BoundsBackend

    choice, start = config.choice, time.process_time()
    between = BoundsBackend(backend).measure(config)
    bounded = time.process_time()
    cost = backend.measure(config) if known is None else known
    costs = {"least": between.least, "compiled": cost, "most": between.most}
    return {
        "layers": [config.first, config.stop - 1],
        "choice": [choice.data_parallel, choice.tensor_parallel, choice.remat],
        **{name: peak(backend, config, each) for name, each in costs.items()},
        "above": [
            name
            for name in ("forward_bytes", "backward_bytes", "update_bytes")
            if getattr(between.least, name) > getattr(cost, name)
        ],
        "bound_seconds": bounded - start,
        "compile_seconds": time.process_time() - bounded,
    }


def peak(backend: Any, config: Any, cost: Any) -> int:
    """Of the stage as the first of two in a pipeline."""
    from capture.plan.schedule import occupancy_by_position
    from capture.predictor.formula import of_interfaces, peak_of
    from capture.step.interface import stage_interface

    choice, size = config.choice, config.microbatch_size
    stage = stage_interface(
        backend.sharding(size).graph([choice]),
        config.first,
        config.stop,
        range(choice.num_devices),
        choice,
        backend.sharding(size).param_bytes(choice.param_split),
        cost,
    )
    moments = [(o,) for o in occupancy_by_position("1f1b", 8, 2)[1]]
    return int(peak_of(of_interfaces([stage]), moments))


if __name__ == "__main__":
    sys.exit(main())
