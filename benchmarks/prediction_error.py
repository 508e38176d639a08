"""How far predicted peaks are from compiled truth, per model family: the paper's Figure 7 for the default mode and the paper's.

    python benchmarks/prediction_error.py --plans 200 -o benchmarks/results/2026-01-31-prediction-error.json
    python benchmarks/prediction_error.py --target a100-40g --clusters 4x4 -o benchmarks/results/2026-01-31-prediction-error-a100-40g.json
    python benchmarks/prediction_error.py --default-only --fresh 1000 --families gpt sharded_params -o ROWS.json
    python benchmarks/prediction_error.py --merge ROWS.json MORE.json -o benchmarks/results/2026-01-31-prediction-error.json

Models and batches are those of the paper's Table I. On an accelerator the transformers compute in bf16, with float32 parameters and
optimizer state.

Every family is one ``capture evaluate`` per cluster (see there how plans are drawn and which predictions do not count). Compiled stages
are kept in the store, so an interrupted benchmark resumes. The paper's own profiling runs are about half of what is compiled;
``--default-only`` leaves them out, draws the same plans, as many as ``--fresh`` wants, and knows questions that ``capture evaluate``
does not ask: stages with sharded parameters, micro-batch sizes that were not profiled, and a VGG on a cluster and target of its own.

Reference: CAPTURE IV-B, Wide-ResNet 1B, GPipe, 500 plans: 44.8 % of per-GPU predictions within 2 %, 65.5 % within 5 %, 97.1 % within 11 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from capture import environment
from capture.cli.evaluate import Outcome, statistics
from capture.cli.main import main as capture
from capture.cli.output import table
from capture.cluster import Cluster
from capture.errors import CaptureError
from capture.plan import Plan
from capture.predictor import AdditivePredictor
from capture.sampling import random_plans
from capture.schedule import SCHEDULES
from capture.store import Store
from capture.workload import WorkloadSpec


@dataclass(frozen=True)
class Family:
    """A model with its batch.

    Attributes:
        dtype: On an accelerator.
        target, cluster: Instead of the options'.
        asked_sizes: Micro-batch sizes that are asked about; the profiled one if empty.
        shard_params: Whether stages may split their parameters over replicas.
    """

    workload: str
    global_batch: int
    microbatches: int
    dtype: str = "float32"
    target: str = ""
    cluster: str = ""
    asked_sizes: tuple[int, ...] = ()
    shard_params: bool = False

    def workload_on(self, target: str) -> str:
        """The workload's name on a target."""
        return self.workload if target == "cpu" or self.dtype == "float32" else f"{self.workload}&dtype={self.dtype}"


FAMILIES = {
    "gpt": Family("models/gpt.py:gpt?size=2.6B", 1024, 64, "bfloat16"),
    "moe": Family("models/moe.py:moe?size=2.4B", 1024, 32, "bfloat16"),
    "wide_resnet": Family("models/wide_resnet.py:wide_resnet?size=1B", 768, 24),
}

#: What ``capture evaluate`` does not ask.
ELSEWHERE = {
    "sharded_params": Family("models/gpt.py:gpt?size=125M", 128, 8, cluster="2x4", shard_params=True),
    "other_sizes": Family("models/gpt.py:gpt?size=2.6B", 256, 16, cluster="2x4", asked_sizes=(4, 32)),
    "vgg": Family("tests/kit/images.py:vgg?channels=64&levels=4&hidden=1024&size=64", 256, 8, target="h100", cluster="2x2"),
}


def wanted(target: str) -> dict[str, float]:
    """What the predictor should reach: a compiler that is not the host's may deviate a little more."""
    mean = 0.02 if target == "cpu" else 0.025
    return {"mean_abs_error_fraction": mean, "within_5pct": 0.95, "max_abs_error_fraction": 0.10, "interval_coverage_fraction": 0.95}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=(*FAMILIES, *ELSEWHERE), default=tuple(FAMILIES))
    parser.add_argument("--clusters", nargs="+", default=("2x4", "4x4"), metavar="NxG")
    parser.add_argument("--target", default="cpu", help="what is compiled for (default: %(default)s)")
    parser.add_argument("--plans", type=int, default=200, help="per family and cluster (default: %(default)s)")
    parser.add_argument("--default-only", action="store_true", help="without the paper's mode and its profiling runs")
    parser.add_argument("--fresh", type=int, help="with --default-only: stop at so many predictions that count, instead of --plans")
    parser.add_argument("--most-plans", type=int, default=1000, help="with --fresh (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="with --default-only: compile no plan's stages after so long; a row has those before")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="ask nothing: the rows of recorded runs as one document")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    if options.merge:
        rows = [row for path in options.merge for row in json.loads(path.read_text())["rows"]]
    elif options.default_only:
        CaptureError.check(environment.prepare(num_devices=16))
        rows = [default_only(name, cluster, options) for name in options.families for cluster in clusters_of(name, options)]
    else:
        rows = [evaluate(family, cluster, options) for family in options.families for cluster in options.clusters]
    document = {
        "benchmark": "prediction_error",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": environment.versions(),
        "targets": wanted(options.target),
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if options.json else as_text(document))
    return 0


def evaluate(family: str, cluster: str, options: argparse.Namespace) -> dict[str, Any]:
    """One ``capture evaluate``."""
    asked = FAMILIES[family]
    arguments = ["evaluate", asked.workload_on(options.target), "--cluster", cluster, "--target", options.target]
    arguments += ["--global-batch", str(asked.global_batch), "--microbatches", str(asked.microbatches)]
    arguments += ["--plans", str(options.plans), "--seed", str(options.seed)]
    arguments += ["--remat", options.remat, "--workers", str(options.workers), "--json"]
    arguments += ["--store", str(options.store)] if options.store else []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = capture(arguments)
    if code:
        sys.exit(code)
    return {"family": family, **json.loads(printed.getvalue())}


def clusters_of(family: str, options: argparse.Namespace) -> tuple[str, ...]:
    own = (FAMILIES | ELSEWHERE)[family].cluster
    return (own,) if own else tuple(options.clusters)


def default_only(family: str, cluster_text: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row with the default mode alone: the plans that ``capture evaluate`` draws, and its statistics."""
    from capture.interface import plan_interfaces
    from capture.step import build_step, replay
    from profiling_runs.profile import open_measurements, plan_of, profile, stage_config
    from profiling_runs.where import Where

    began = time.monotonic()
    asked = (FAMILIES | ELSEWHERE)[family]
    target = asked.target or options.target
    spec, cluster = WorkloadSpec.parse(asked.workload_on(target)), Cluster.parse(cluster_text, target=target)
    microbatch_size = asked.global_batch // asked.microbatches
    sizes = asked.asked_sizes or (microbatch_size,)
    measurements = open_measurements(
        spec,
        num_devices=cluster.num_devices,
        target=target,
        store=Store(options.store),
        where=Where(options.workers),
        progress=lambda kind, done, total: print(f"{family} {cluster_text}, {kind}: {done} of {total}", file=sys.stderr, flush=True),
    )
    result = profile(
        spec,
        cluster,
        microbatch_size=microbatch_size,
        remat=(options.remat,),
        shard_params=asked.shard_params,
        measurements=measurements,
    )
    known = {measurements.key(config) for config in measurements.costs}
    by_degree: dict[int, tuple[Any, ...]] = {}
    for choice in result.choices:
        by_degree[choice.num_devices] = (*by_degree.get(choice.num_devices, ()), choice)
    draws = random_plans(cluster, result.graph.num_layers, by_degree, np.random.default_rng([options.seed, 1]))

    def plans() -> Iterator[dict[tuple[int, str], Plan]]:
        """Of one drawing those of every asked size and schedule."""
        for i, stages in enumerate(draws):
            yield {
                (i, f"{size} {schedule}"): plan_of(stages, result, cluster, size * asked.microbatches, asked.microbatches, schedule)
                for size in sizes
                for schedule in SCHEDULES
            }

    wanted_plans: dict[tuple[int, str], Plan] = {}
    num_fresh = num_plans = 0
    for drawn in islice(plans(), options.plans if options.fresh is None else options.most_plans):
        if options.fresh is not None and num_fresh >= options.fresh:
            break
        wanted_plans |= drawn
        num_plans += 1
        for plan in drawn.values():
            num_fresh += sum(
                len(stage.devices) for stage in plan.stages if measurements.key(stage_config(stage, plan.microbatch_size)) not in known
            )
    if options.seconds is None:
        measurements.require({"plans": [stage_config(s, plan.microbatch_size) for plan in wanted_plans.values() for s in plan.stages]})
    else:  # in the order of drawing, so that what is left out was not chosen by what it needs
        compiled: dict[tuple[int, str], Plan] = {}
        for key, plan in wanted_plans.items():
            if time.monotonic() - began > options.seconds:
                break
            measurements.require({"plans": [stage_config(s, plan.microbatch_size) for s in plan.stages]})
            compiled[key] = plan
            print(f"{family} {cluster_text}: plan {key[0] + 1} of {num_plans}", file=sys.stderr, flush=True)
        wanted_plans, num_plans = compiled, len({i for i, _ in compiled})
    predictor, seen, stages_seen = AdditivePredictor(result), [], set()
    for key, plan in wanted_plans.items():
        configs = [stage_config(stage, plan.microbatch_size) for stage in plan.stages]
        if any(config not in measurements.costs for config in configs):
            continue
        graph = measurements.backend.traced(plan.microbatch_size).graph
        interfaces = plan_interfaces(plan, graph, result.param_bytes, [measurements.costs[config] for config in configs])
        truth = replay(build_step(interfaces, plan.schedule_table), cluster.num_devices).peak_bytes_per_device
        predicted = predictor.predict(plan)
        for s, (stage, config) in enumerate(zip(plan.stages, configs, strict=True)):
            name = measurements.key(config)
            stages_seen |= {name} - known
            for device in stage.devices:
                low, high = predicted.interval_bytes_per_device[device]
                seen.append(Outcome(key, s, predicted.peak_bytes_per_device[device], low, high, truth[device], name in known))
    by_question = {
        which: statistics([o for o in seen if which in o.plan[1].split()]) for which in (*SCHEDULES, *(str(size) for size in sizes))
    }
    return {
        "family": family,
        "workload": str(spec),
        "cluster": cluster_text,
        "target": target,
        "num_plans": num_plans,
        "seed": options.seed,
        "schedules": list(SCHEDULES),
        "remat": options.remat,
        "shard_params": asked.shard_params,
        "global_batch_size": asked.global_batch,
        "num_microbatches": asked.microbatches,
        "microbatch_size": microbatch_size,
        "asked_microbatch_sizes": list(sizes),
        "truth": "replay of the compiled programs of the plan's stages",
        "interval_factors": list(result.calibration.widest(result.choices, result.graph.num_layers)) if result.calibration else None,
        "num_fresh_stages": len(stages_seen),
        "default": statistics(seen),
        "by_schedule_and_size": by_question,
        "num_failed_stages": len(measurements.failures),
        "provenance": dict(result.provenance),
    }


def as_text(document: dict[str, Any]) -> str:
    rows = []
    for row in document["rows"]:
        for mode in ("default", "paper") if "paper" in row else ("default",):
            s = row[mode]
            shares = [f"{s[f'within_{p}pct']:.1%}" for p in (2, 5, 11)]
            coverage = s["interval_coverage_fraction"]
            rows.append(
                [
                    f"{row['family']} {row['cluster']} {mode}",
                    s["num_predictions"],
                    *shares,
                    f"{s['mean_abs_error_fraction']:.2%}",
                    f"{s['max_abs_error_fraction']:.2%}",
                    "-" if coverage is None else f"{coverage:.1%}",
                ]
            )
    return table(["family, cluster, mode", "predictions", "<= 2 %", "<= 5 %", "<= 11 %", "mean", "max", "in interval"], rows)


if __name__ == "__main__":
    sys.exit(main())
