"""How near bounds from tracing are to what compilers say: peaks of small stages, bounded and
compiled.

    python -m benchmarks.bound_quality h100 "models/gpt.py:gpt?size=125M&dtype=bfloat16" 4

Per stage, the peak in a step of 1F1B with two micro-batches in flight: the least and the most that
tracing says, over what the compiler says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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
    parser.add_argument("microbatch_size", type=int)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    environment.prepare(num_devices=2, platform=Target.load(options.target).platform)
    rows = measured(options.target, options.workload, options.microbatch_size, options.store)
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
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


def measured(
    target: str, workload: str, microbatch_size: int, path: Path | None
) -> list[dict[str, Any]]:
    """A row per stage: bytes, what of the lower bound is above the compiler's number, and processor
    seconds."""
    from capture.measured.profile import StageConfig
    from capture.measured.store import Store
    from capture.model.workload import WorkloadSpec
    from capture.plan.choices import StageChoice
    from capture.profiler.bounds import BoundsBackend
    from capture.profiler.compile import CompileBackend

    task, store = WorkloadSpec.parse(workload).load(), Store(path)
    backend = CompileBackend(task, store=store, target=Target.load(target), num_devices=2)
    bounds = BoundsBackend(backend)
    num_layers, rows = backend.traced(microbatch_size).graph.num_layers, []
    middle = num_layers // 2
    for dp, tp, remat in CHOICES:
        for first, stop in (
            (0, 1),
            (middle, middle + 1),
            (middle, middle + 2),
            (num_layers - 1, num_layers),
        ):
            config = StageConfig(first, stop, StageChoice(dp, tp, remat), microbatch_size)
            start = time.process_time()
            between = bounds.measure(config)
            bounded = time.process_time()
            cost = backend.measure(config)
            rows.append(
                {
                    "layers": [first, stop - 1],
                    "choice": [dp, tp, remat],
                    **{
                        name: peak(backend, config, each)
                        for name, each in (
                            ("least", between.least),
                            ("compiled", cost),
                            ("most", between.most),
                        )
                    },
                    "above": [
                        name
                        for name in ("forward_bytes", "backward_bytes", "update_bytes")
                        if getattr(between.least, name) > getattr(cost, name)
                    ],
                    "bound_seconds": bounded - start,
                    "compile_seconds": time.process_time() - bounded,
                }
            )
    return rows


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
