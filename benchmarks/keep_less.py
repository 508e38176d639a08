"""What remat ``cheap`` (a minimum cut) keeps, and what it costs, beside the other modes.

    python -m benchmarks.keep_less -o benchmarks/results/2026-01-31-keep-less.json
    python -m benchmarks.keep_less --parts peaks --models "GPT-3 1.3B" --remats none cheap dots full

Three questions (``--parts``):

* peaks: the same plan of four equal stages on eight H100 that are not there, compiled with every
  mode (``capture verify``): the largest peak of a device, what one micro-batch keeps on the first
  stage, and the simulated seconds of a step. Widths are those of the published models; blocks are
  fewer, so that they compile in minutes.
* step: processor time of a step on virtual CPU devices (all cores together), modes in turn within
  one run; losses must be equal.
* cut: processor time of finding what to keep of a model of 96 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from capture import environment
from capture.errors import CaptureError

NUM_DEVICES = 8
CaptureError.check(environment.prepare(num_devices=NUM_DEVICES))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from capture.cli.output import table  # noqa: E402
from capture.machine.cluster import Cluster  # noqa: E402
from capture.measured.profile import StageConfig  # noqa: E402
from capture.measured.store import Store  # noqa: E402
from capture.model.workload import WorkloadSpec  # noqa: E402
from capture.plan.choices import REMAT_POLICIES, Remat, StageChoice  # noqa: E402
from capture.plan.stages import Plan, Stage  # noqa: E402
from capture.predictor.formula import kept_of  # noqa: E402
from capture.profiler.compile import CompileBackend  # noqa: E402
from capture.runtime.pipeline import pipeshard  # noqa: E402
from profiling_runs.measurements import open_measurements  # noqa: E402
from profiling_runs.pools.where import Where  # noqa: E402
from profiling_runs.question import ProfileQuestion  # noqa: E402
from profiling_runs.verify import verify  # noqa: E402

TARGET = "h100"
NUM_STAGES, NUM_MICROBATCHES = 4, 8
#: By name: workload, (data, tensor) parallel degrees of every stage, examples of a micro-batch.
PEAKS = {
    "GPT-3 1.3B": ("models/gpt.py:gpt?size=1.3B&num_layers=8&dtype=bfloat16", (1, 2), 2),
    "GShard MoE 380M": ("models/moe.py:moe?size=380M&dtype=bfloat16", (2, 1), 4),
    "LLaMA 8B": ("models/llama.py:llama?size=8B&num_layers=8&dtype=bfloat16", (1, 2), 1),
    "Wide-ResNet 250M": ("models/wide_resnet.py:wide_resnet?size=250M", (2, 1), 16),
}
STEPS = {
    "gpt tiny": "models/gpt.py:gpt?size=tiny",
    "gpt tiny, sequence 256": "models/gpt.py:gpt?size=tiny&seq_len=256",
    "llama tiny": "models/llama.py:llama?size=tiny",
    "moe tiny": "models/moe.py:moe?size=tiny",
}
CUT = "models/gpt.py:gpt?size=tiny&num_layers=96"
PARTS = ("cut", "steps", "peaks")


def plan_of(
    num_layers: int, degrees: tuple[int, int], remat: Remat, microbatch_size: int, target: str
) -> Plan:
    """Equal stages on consecutive devices, 1F1B."""
    cuts = [num_layers * s // NUM_STAGES for s in range(NUM_STAGES + 1)]
    choice = StageChoice(*degrees, remat)
    stages = tuple(
        Stage(
            cuts[s],
            cuts[s + 1],
            range(s * choice.num_devices, (s + 1) * choice.num_devices),
            choice,
        )
        for s in range(NUM_STAGES)
    )
    cluster = Cluster((NUM_STAGES * choice.num_devices,), target)
    batch = microbatch_size * NUM_MICROBATCHES
    return Plan(cluster, num_layers, stages, batch, NUM_MICROBATCHES)


def peaks(name: str, store: Store, remats: Sequence[Remat]) -> dict[str, Any]:
    spec, degrees, size = PEAKS[name]
    cluster = Cluster((NUM_STAGES * degrees[0] * degrees[1],), TARGET)
    question = ProfileQuestion(WorkloadSpec.parse(spec), cluster, size)
    measurements = open_measurements(question, store=store, where=Where(0))
    num_layers = measurements.backend.traced(size).graph.num_layers
    found = {}
    for remat in remats:
        say(f"{name}, {remat}")
        verified = verify(plan_of(num_layers, degrees, remat, size, TARGET), measurements)
        timeline = verified.timeline()
        found[remat] = {
            "peak_bytes": max(verified.peak_bytes_per_device),
            "peak_bytes_per_stage": verified.peak_bytes_per_device[:: degrees[0] * degrees[1]],
            "kept_bytes_on_first_stage": kept_of(verified.stages[0]),
            "simulated_step_seconds": None if timeline is None else timeline.step_seconds,
        }
    none = found["none"]
    for row in found.values():
        row["peak_change"] = row["peak_bytes"] / none["peak_bytes"] - 1
        row["kept_change"] = (
            row["kept_bytes_on_first_stage"] / none["kept_bytes_on_first_stage"] - 1
        )
        if none["simulated_step_seconds"]:
            row["seconds_change"] = (
                row["simulated_step_seconds"] / none["simulated_step_seconds"] - 1
            )
    return {
        "model": name,
        "workload": spec,
        "data_parallel": degrees[0],
        "tensor_parallel": degrees[1],
        "microbatch_size": size,
        "modes": found,
    }


def steps(name: str, num_steps: int) -> dict[str, Any]:
    """Modes in turn, so that they meet the same load of the machine."""
    workload = WorkloadSpec.parse(STEPS[name]).load()
    params = jax.tree.map(np.asarray, workload.init(jax.random.key(0)))
    batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), 4 * NUM_MICROBATCHES))
    graph = CompileBackend(workload, store=Store()).traced(4).graph
    made, states = {}, {}
    for remat in REMAT_POLICIES:
        say(f"{name}, {remat}: compiling")
        made[remat] = pipeshard(workload, plan_of(graph.num_layers, (1, 1), remat, 4, "cpu"))
        states[remat] = made[remat].init_from(params)
    seconds: dict[str, list[float]] = {remat: [] for remat in made}
    losses: dict[str, list[float]] = {remat: [] for remat in made}
    for count in range(num_steps + 1):
        for remat, step in made.items():
            start = time.process_time()
            states[remat], metrics = step(states[remat], batch)
            jax.block_until_ready((states[remat], metrics.losses))
            if count:  # the first step makes what lasts
                seconds[remat].append(time.process_time() - start)
            losses[remat].append(float(metrics.loss))
    none = median(seconds["none"])
    return {
        "workload": STEPS[name],
        "num_steps": num_steps,
        "modes": {
            remat: {
                "processor_seconds": median(seconds[remat]),
                "change": median(seconds[remat]) / none - 1,
                "peak_bytes": max(step.replay().peak_bytes_per_device),
                "largest_relative_difference_of_losses": max(
                    abs(a / b - 1) for a, b in zip(losses[remat], losses["none"], strict=True)
                ),
            }
            for remat, step in made.items()
        },
    }


def cut() -> dict[str, Any]:
    backend = CompileBackend(WorkloadSpec.parse(CUT).load(), store=Store())
    num_layers = backend.traced(4).graph.num_layers
    found: dict[str, Any] = {"workload": CUT, "num_layers": num_layers}
    for degrees in ((1, 1), (2, 2)):
        say(f"cut, {degrees}")
        choice = StageChoice(*degrees, "cheap")
        programs = backend.programs(StageConfig(0, num_layers, choice, 4))
        found["num_operations"] = len(programs._saving_all.jaxpr.eqns)
        start = time.process_time()
        stored = programs.residuals.stored
        found[f"processor_seconds_{degrees[0]}x{degrees[1]}"] = time.process_time() - start
        found["num_kept"] = len(stored)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_text(document: dict[str, Any]) -> str:
    rows = [
        [
            of["model"],
            remat,
            f"{mode['peak_bytes'] / 1e9:.3f} GB",
            f"{mode['peak_change']:+.1%}",
            f"{mode['kept_change']:+.1%}",
            f"{mode.get('seconds_change', float('nan')):+.1%}",
        ]
        for of in document.get("peaks", ())
        for remat, mode in of["modes"].items()
    ]
    lines = table(["model", "remat", "peak", "", "kept", "seconds"], rows)
    rows = [
        [
            of["workload"],
            remat,
            f"{mode['processor_seconds'] * 1e3:.1f} ms",
            f"{mode['change']:+.1%}",
            f"{mode['peak_bytes'] / 1e6:.1f} MB",
            f"{mode['largest_relative_difference_of_losses']:.1e}",
        ]
        for of in document.get("steps", ())
        for remat, mode in of["modes"].items()
    ]
    lines += "\n" + table(["step", "remat", "processor", "", "peak", "losses"], rows)
    return f"{lines}\n{document.get('cut', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=tuple(PEAKS), default=tuple(PEAKS))
    parser.add_argument(
        "--remats", nargs="+", default=REMAT_POLICIES, help="of peaks, none first (default: names)"
    )
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument(
        "--store", type=Path, help="of what was compiled; an interrupted run resumes"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the document here")
    options = parser.parse_args()
    load_before = os.getloadavg()
    document: dict[str, Any] = {
        "benchmark": "keep_less",
        "date": date.today().isoformat(),
        "target": TARGET,
        "num_stages": NUM_STAGES,
        "num_microbatches": NUM_MICROBATCHES,
        "hardware": {
            "platform": f"{platform.system()} {platform.machine()}",
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
        },
        "versions": environment.versions("cuda"),
    }
    if "cut" in options.parts:
        document["cut"] = cut()
    if "steps" in options.parts:
        document["steps"] = [steps(name, options.steps) for name in STEPS]
    if "peaks" in options.parts:
        store = Store(options.store)
        document["peaks"] = [peaks(name, store, options.remats) for name in options.models]
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(as_text(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
