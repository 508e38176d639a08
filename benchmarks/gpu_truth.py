"""Does a GPU's allocator need what the compile backend says? Layers and whole steps, executed on
the GPU of this machine.

    python benchmarks/gpu_truth.py -o benchmarks/results/2026-01-31-gpu-truth.json

Every program gets a process of its own, because the allocator's high-water mark
(``peak_bytes_in_use``) cannot be reset. Three numbers each:

    without a device   the compile backend for the target file of this GPU: what a planner on a
                       laptop would say
    on the device      the same programs as the GPU's own compiler, autotuning included, reports
                       them
    measured           peak_bytes_in_use after the program ran, less what was in use before its
                       arguments were made

A layer is one forward or one backward program of a middle layer on one micro-batch; a step is a
whole training step (two micro-batches, optimizer included) on one GPU by the native runtime.
Without a GPU it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from capture import environment
from profiling_runs.question import ProfileQuestion

#: Part of the name that the driver gives a GPU -> target file.
TARGET_OF = {
    "A100-SXM4-40GB": "a100-40g",
    "A100": "a100-80g",
    "H100": "h100",
    "GH200": "gh200",
    "H200": "h200",
    "B200": "b200",
    "GB300": "gb300",
    "V100": "v100-32g",
}

#: model, options, micro-batch size, a middle layer
MODELS = {
    "gpt": ("size=350M&num_layers=4", 8, 2),
    "moe": ("size=380M&num_layers=4", 8, 2),
    "wide_resnet": ("size=250M", 16, 6),
}


@dataclass(frozen=True)
class Case:
    """One program, or one training step."""

    model: str
    dtype: str
    remat: str
    what: str  # "forward", "backward" or "step"

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} remat={self.remat} {self.what}"


CASES = [
    Case(model, dtype, remat, what)
    for model, dtype, remat, what in product(
        MODELS, ("float32", "bfloat16"), ("none", "full"), ("forward", "backward", "step")
    )
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(in_child(CASES[int(options.child[0])], options.child[1])))
        return 0
    device = run_child(
        "import jax; d = jax.devices()[0]; print(__import__('json').dumps([d.platform, "
        "d.device_kind]))"
    )
    platform, kind = device
    if platform not in ("gpu", "cuda"):
        print(
            f"there is no GPU here (JAX finds {kind!r}): nothing was measured, and nothing was "
            "written."
        )
        return 0
    target = next((name for part, name in TARGET_OF.items() if part in kind), None)
    if target is None:
        print(
            f"no target file is of a {kind!r}; they are of {', '.join(TARGET_OF)}.", file=sys.stderr
        )
        return 2
    rows = []
    for number, case in enumerate(CASES):
        print(f"[{number + 1}/{len(CASES)}] {case.name}", file=sys.stderr)
        found = [run_child("", "--child", str(number), where) for where in ("here", target)]
        rows.append(
            {**asdict(case), **found[0], "without_device_bytes": found[1]["compiled_bytes"]}
        )
    document = {
        "benchmark": "gpu_truth",
        "date": date.today().isoformat(),
        "device": kind,
        "target": target,
        "versions": environment.versions("cuda"),
        "rows": rows,
        "summary": {key: summary(rows, key) for key in ("without_device_bytes", "compiled_bytes")},
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if options.json else as_text(document))
    return 0


def run_child(code: str, *arguments: str) -> Any:
    """The JSON that a fresh process prints last; its allocator holds nothing."""
    command = [sys.executable, *(["-c", code] if code else [__file__, *arguments])]
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])[:200]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_child(case: Case, where: str) -> dict[str, Any]:
    """Compile, and where there is a device run, one case.

    Args:
        case: What.
        where: ``"here"`` for the devices of this machine, else a target that is compiled for only.

    Returns:
        ``compiled_bytes``: arguments and what the program needs beside them; ``measured_bytes``:
            None if nothing was run or no allocator
        tells.
    """
    from capture.machine.target import Target

    environment.prepare(
        num_devices=1, platform="cpu" if where == "here" else Target.load(where).platform
    )
    from capture.model.workload import WorkloadSpec

    query, microbatch_size, layer = MODELS[case.model]
    workload = WorkloadSpec.parse(f"models/{case.model}.py:{case.model}?{query}&dtype={case.dtype}")
    measure = _step if case.what == "step" else _layer
    return measure(case, workload, microbatch_size, layer, where)


def _layer(
    case: Case, workload: Any, microbatch_size: int, layer: int, where: str
) -> dict[str, Any]:
    import jax

    from capture.compiler.executable import Compiler
    from capture.compiler.target_devices import devices_of
    from capture.machine.target import Target
    from capture.measured.profile import StageConfig
    from capture.plan.choices import StageChoice
    from capture.profiler.compile import CompileBackend
    from capture.runtime.layout import shard_bytes
    from capture.runtime.programs import StagePrograms

    backend = CompileBackend(
        workload.load(), target=None if where == "here" else Target.load(where)
    )
    devices = jax.devices()[:1] if where == "here" else devices_of(backend.target, 1)
    config = StageConfig(layer, layer + 1, StageChoice(remat=case.remat), microbatch_size)
    backend.traced(microbatch_size)
    programs: StagePrograms = backend.programs(
        config, devices=devices, compiler=Compiler() if where == "here" else None
    )
    executable = programs.forward if case.what == "forward" else programs.backward
    structs = programs.forward_args if case.what == "forward" else programs.backward_args
    held = sum(map(shard_bytes, jax.tree.leaves(structs)))
    measured = None
    if where == "here":
        before = _in_use(devices[0])
        arguments = jax.tree.map(
            lambda s: jax.device_put(jax.numpy.zeros(s.shape, s.dtype), s.sharding), structs
        )
        jax.block_until_ready(arguments)
        results = executable.call(*arguments)
        jax.block_until_ready(results)
        peak = _peak(devices[0])
        measured = None if peak is None else peak - before
    return {
        "compiled_bytes": held + executable.transient_bytes,
        "argument_bytes": held,
        "measured_bytes": measured,
    }


def _step(
    case: Case, workload: Any, microbatch_size: int, layer: int, where: str
) -> dict[str, Any]:
    from capture.machine.cluster import Cluster
    from capture.plan.choices import StageChoice
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan
    from profiling_runs.measurements import open_measurements
    from profiling_runs.verify import verify

    target = "cpu" if where == "here" else where
    task = workload.load()
    measurements = open_measurements(ProfileQuestion(task, Cluster((1,), target), 8))
    graph = measurements.backend.traced(microbatch_size).graph
    stage = Stage(0, graph.num_layers, (0,), StageChoice(remat=case.remat))
    plan = Plan(Cluster((1,), target), graph.num_layers, (stage,), 2 * microbatch_size, 2, "1f1b")
    if where != "here":
        found = verify(plan, measurements)
        return {
            "compiled_bytes": found.peak_bytes_per_device[0],
            "argument_bytes": None,
            "measured_bytes": None,
        }
    import jax

    from capture.runtime.pipeline import pipeshard
    from capture.step.program import replay

    step = pipeshard(task, plan)
    device = jax.devices()[0]
    before = _in_use(device)
    state = step.init(jax.random.key(0))
    batch = task.batch(jax.random.key(1), plan.global_batch_size)
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics.loss))
    peak = _peak(device)
    booked = replay(step.program).peak_bytes_per_device[0]
    return {
        "compiled_bytes": booked,
        "argument_bytes": None,
        "measured_bytes": None if peak is None else peak - before,
    }


def _in_use(device: Any) -> int:
    stats = device.memory_stats()
    return int(stats["bytes_in_use"]) if stats else 0


def _peak(device: Any) -> int | None:
    stats = device.memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else None


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Mean and largest absolute error of a number against the measured one."""
    errors = [abs(row[key] / row["measured_bytes"] - 1) for row in rows]
    return {
        "num_programs": len(errors),
        "mean_abs_error_fraction": mean(errors),
        "max_abs_error_fraction": max(errors),
    }


def as_text(document: dict[str, Any]) -> str:
    from capture.cli.output import table

    rows = [
        [
            f"{row['model']} {row['dtype']} remat={row['remat']} {row['what']}",
            f"{row['measured_bytes'] / 1e6:.1f} MB",
            *(
                f"{row[key] / 1e6:.1f} MB ({row[key] / row['measured_bytes'] - 1:+.1%})"
                for key in ("compiled_bytes", "without_device_bytes")
            ),
        ]
        for row in document["rows"]
    ]
    found = document["summary"]["without_device_bytes"]
    return "\n".join(
        [
            f"{document['device']} against target {document['target']}",
            table(["program", "measured", "compiled on it", "compiled without it"], rows),
            f"without a device: mean |error| {found['mean_abs_error_fraction']:.1%}, max "
            f"{found['max_abs_error_fraction']:.1%} of "
            f"{found['num_programs']} programs",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
