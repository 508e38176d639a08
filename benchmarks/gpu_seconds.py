"""Is a step as fast, and does it need as much, as was said before anybody had the GPU?

Training steps of several models on one GPU, simulated without it, run on it, and compared:

    python -m benchmarks.gpu_seconds predict --target h100 -o said.json    # where there is no GPU
    python -m benchmarks.gpu_seconds run -o run.json                       # where there is one
    python -m benchmarks.gpu_seconds compare said.json run.json \\
        -o benchmarks/results/2026-01-31-gpu-seconds-h100.json

Per step:

    said    seconds and peak of a plan that is compiled for the absent GPU and simulated, the lower
            bound of its seconds by tracing, and the seconds of each program
    run     seconds of the clock (the median of ten steps that wait for their losses), what the
            kernels of each program took (JAX's profiler), the span from the first kernel to the
            last, and the allocator's peak

Every step gets a process of its own, because the allocator's high-water mark cannot be reset.
``run`` compiles several at a time and keeps what was compiled, then runs one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.documents import arguments, finish
from capture import environment
from capture.machine.links import Layout
from capture.plan.stage import Offload

NUM_STEPS = 10
#: Kernels that a row names.
NUM_KERNELS = 40
#: Of JAX: keep all that is compiled.
_KEEP_COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


#: What a child does on the GPU, where it is not the name of a target.
_HERE = ("run", "compile")


@dataclass(frozen=True)
class Case:
    """A training step on one GPU: a stage of all layers."""

    workload: str
    microbatch_size: int
    num_microbatches: int
    remat: str
    #: What lies in host memory between its uses.
    offload: tuple[Offload, ...] = ()
    schedule: str = "1f1b"

    @property
    def name(self) -> str:
        model = self.workload.partition(":")[2]
        size = f"{self.num_microbatches}x{self.microbatch_size}"
        away = "".join(f", {each} on the host" for each in self.offload)
        return f"{model} {size} {self.schedule} {self.remat}{away}"


_GPT = "models/gpt.py:gpt?dtype=bfloat16&size="
_LLAMA = "models/llama.py:llama?dtype=bfloat16&size=8B&num_layers=2&seq_len=4096&attention=flash"
CASES = [
    Case(_GPT + "125M", 8, 2, "none"),
    Case(_GPT + "350M", 8, 2, "cheap"),
    Case(_GPT + "350M&attention=flash", 8, 2, "cheap"),
    Case(_GPT + "1.3B", 4, 2, "cheap"),
    Case(_LLAMA, 2, 2, "cheap"),
    Case("models/moe.py:moe?size=380M&dtype=bfloat16", 8, 2, "cheap"),
    Case("models/wide_resnet.py:wide_resnet?size=250M&dtype=bfloat16", 32, 2, "none"),
    Case("models/bert.py:bert?size=base&dtype=bfloat16", 32, 2, "none"),
    Case("models/gpt.py:gpt?size=350M", 4, 2, "cheap"),
    Case(_GPT + "350M", 8, 2, "dots"),
    Case(_GPT + "350M", 8, 2, "full"),
    Case(_GPT + "350M", 16, 1, "full"),
    Case(_GPT + "1.3B", 8, 1, "full"),
    Case(_LLAMA, 4, 1, "full"),
    Case("models/wide_resnet.py:wide_resnet?size=250M", 32, 1, "full"),
    Case("models/gpt2.py:gpt2?size=small&dtype=bfloat16", 8, 1, "none"),
    Case(_GPT + "350M", 8, 4, "cheap", schedule="gpipe"),
    Case(_GPT + "350M", 8, 4, "cheap", ("activations",), "gpipe"),
    Case(_GPT + "350M", 8, 4, "cheap", ("optimizer",)),
    Case(_GPT + "350M", 8, 4, "cheap", ("activations", "optimizer"), "gpipe"),
    Case(_GPT + "1.3B", 4, 2, "cheap", ("optimizer",)),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    common = arguments(None)
    common.add_argument("--jobs", type=int, default=2, help="processes at a time")
    common.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of cases")
    verb = verbs.add_parser("predict", parents=[common], add_help=False)
    verb.add_argument("--target", required=True)
    verbs.add_parser("run", parents=[common], add_help=False)
    verb = verbs.add_parser("compare", parents=[common], add_help=False)
    verb.add_argument("said", type=Path)
    verb.add_argument("run", type=Path)
    verb = verbs.add_parser("child", add_help=False)
    verb.add_argument("number", type=int)
    verb.add_argument("what")
    options = parser.parse_args()
    if options.verb == "child":
        case, what = CASES[options.number], options.what
        print(json.dumps(run(case, what) if what in _HERE else predicted(case, what)))
        return 0
    if options.verb == "compare":
        return compare(options)
    numbers = options.only or list(range(len(CASES)))
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(options.jobs) as pool:
        what = options.target if options.verb == "predict" else "compile"
        made = list(pool.map(lambda number: child(number, what, kept), numbers))
        if options.verb == "run":
            made = []
            for number in numbers:
                made.append(child(number, "run", kept))
                print(CASES[number].name, _short(made[-1]), file=sys.stderr, flush=True)
                _write(options, numbers, made)  # as far as it got
    return _write(options, numbers, made)


def _write(options: argparse.Namespace, numbers: list[int], found: list[dict[str, Any]]) -> int:
    done = zip(numbers[: len(found)], found, strict=True)
    rows = [{"case": asdict(CASES[number]), options.verb: each} for number, each in done]
    return finish(f"gpu_seconds_{options.verb}", rows, options)


def _short(found: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.6g}" if isinstance(value, float | int) else f"{name}={str(value)[-400:]}"
        for name, value in found.items()
        if isinstance(value, float | int | str)
    )


def child(number: int, what: str, kept: str) -> dict[str, Any]:
    """What a fresh process finds; why it failed, where it did."""
    command = [sys.executable, "-m", "benchmarks.gpu_seconds", "child", str(number), what]
    env = {**os.environ, **_KEEP_COMPILED}
    if what in _HERE:
        env["JAX_COMPILATION_CACHE_DIR"] = kept
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def planned(case: Case, target: str) -> tuple[Any, Any]:
    """The workload and the plan of a case."""
    from capture.machine.cluster import Cluster
    from capture.model.workload import WorkloadSpec
    from capture.plan.choices import StageChoice
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan
    from capture.tracing import trace

    task = WorkloadSpec.parse(case.workload).load()
    num_layers = trace(task, case.microbatch_size).graph.num_layers
    stage = Stage(0, num_layers, (0,), StageChoice(remat=case.remat), offload=case.offload)
    batch = case.microbatch_size * case.num_microbatches
    cluster = Cluster((1,), target)
    return task, Plan(cluster, num_layers, (stage,), batch, case.num_microbatches, case.schedule)


def predicted(case: Case, target: str) -> dict[str, Any]:
    """The step as it is planned: seconds, bytes, programs."""
    environment.prepare(num_devices=1, platform="cuda")
    from capture.machine.target import Target
    from capture.measured.profile import StageConfig
    from capture.profiler.bounds import BoundsBackend
    from capture.step.times import TimeModel
    from profiling_runs.measurements import open_measurements
    from profiling_runs.question import ProfileQuestion
    from profiling_runs.verify import verify

    task, plan = planned(case, target)
    measurements = open_measurements(ProfileQuestion(task, plan.cluster, plan.global_batch_size))
    found = verify(plan, measurements)
    timeline, rates = found.timeline(), Target.load(target).rates
    assert timeline is not None and rates is not None, "the target has rates"
    model = TimeModel(rates, Layout(1))
    config = StageConfig.of(plan.stages[0], plan.microbatch_size)
    least = BoundsBackend(measurements.backend).measure(config).least
    (cost,) = found.costs
    programs = {}
    for name in ("forward", "backward", "update"):
        work, bound = getattr(cost, f"{name}_work"), getattr(least, f"{name}_work")
        products = [kernel for kernel in work.kernels if kernel.flops]
        programs[name] = {
            "seconds": model.program_seconds(work),
            "product_seconds": sum(k.count * model.kernel_seconds(k) for k in products),
            "bound_seconds": model.program_seconds(bound),
            "num_products": sum(kernel.count for kernel in products),
            "num_kernels": sum(kernel.count for kernel in work.kernels),
            "flops": work.flops,
            "nbytes": sum(kernel.count * kernel.nbytes for kernel in work.kernels),
        }
    times = {"forward": case.num_microbatches, "backward": case.num_microbatches, "update": 1}
    return {
        "target": target,
        "step_seconds": timeline.step_seconds,
        "bound_seconds": sum(times[name] * one["bound_seconds"] for name, one in programs.items()),
        "peak_bytes": found.peak_bytes_per_device[0],
        "transient_bytes": {
            name: getattr(cost, f"{name}_bytes") for name in ("forward", "backward", "update")
        },
        "programs": programs,
        "versions": environment.versions("cuda"),
    }


def run(case: Case, what: str) -> dict[str, Any]:
    """The step on the GPU of this machine; only compiled and tried once, if asked."""
    environment.prepare(num_devices=1)
    import jax

    from benchmarks.gpu_kernels import profiled
    from capture.runtime.meter import measure_step
    from capture.runtime.pipeline import pipeshard

    device = jax.devices()[0]
    task, plan = planned(case, "cpu")
    start = time.perf_counter()
    step = pipeshard(task, plan)
    before = _stats(device)["bytes_in_use"]
    held = [step.init(jax.random.key(0))]
    jax.block_until_ready(held)
    after_init = _stats(device)["peak_bytes_in_use"] - before
    batch = task.batch(jax.random.key(1), plan.global_batch_size)

    def once() -> None:
        state, metrics = step(held.pop(), batch)
        held.append(state)
        jax.block_until_ready((state, metrics.losses))

    def peak_bytes() -> int:
        return _stats(device)["peak_bytes_in_use"] - before

    booked = step.replay().peak_bytes_per_device[0]
    if what == "compile":
        once()
        return {"first_seconds": time.perf_counter() - start}
    measured = measure_step(step, held.pop(), batch, strict=True)
    held.append(measured.state)
    del measured
    peaks = {"one_by_one": peak_bytes()}
    first_seconds = time.perf_counter() - start
    step.bound_run_ahead = True
    once()
    peaks["bound_run_ahead"] = peak_bytes()
    step.bound_run_ahead = False
    once()
    peak = peak_bytes()
    seconds = []
    for _ in range(NUM_STEPS):
        begun = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begun)
    done = profiled(once)
    modules: dict[str, float] = defaultdict(float)
    for kernel in done.kernels:
        modules[kernel.module] += kernel.seconds
    return {
        "device": device.device_kind,
        "step_seconds": median(seconds),
        "all_seconds": seconds,
        "span_seconds": done.span_seconds,
        "busy_seconds": done.busy_seconds,
        "num_kernels": sum(kernel.count for kernel in done.kernels),
        "module_seconds": modules,
        "kernels": [asdict(kernel) for kernel in done.kernels[:NUM_KERNELS]],
        "peak_bytes": peak,
        "peak_bytes_after_init": after_init,
        "peak_bytes_of": peaks,
        "booked_bytes": booked,
        "transient_bytes": {
            name: getattr(step.stages[0], name).transient_bytes
            for name in ("forward", "backward", "update")
        },
        "first_seconds": first_seconds,
        "versions": environment.versions("cuda"),
    }


def _stats(device: Any) -> dict[str, int]:
    return device.memory_stats() or {"bytes_in_use": 0, "peak_bytes_in_use": 0}


def compare(options: argparse.Namespace) -> int:
    """Put together what was said and what was run."""
    said, done = (json.loads(path.read_text())["rows"] for path in (options.said, options.run))
    rows = []
    for one in done:
        before = next((each["predict"] for each in said if each["case"] == one["case"]), None)
        if before is None or "failed" in before or "failed" in one["run"]:
            rows.append({**one, "said": before})
            continue
        ran = one["run"]
        errors = {
            "seconds_error": before["step_seconds"] / ran["step_seconds"] - 1,
            "busy_error": before["step_seconds"] / ran["busy_seconds"] - 1,
            "peak_error": before["peak_bytes"] / ran["peak_bytes"] - 1,
            "bound_fraction": before["bound_seconds"] / ran["step_seconds"],
        }
        rows.append({**one, "said": before, **errors})
        print(
            f"{Case(**one['case']).name}: {ran['step_seconds'] * 1e3:.1f} ms (kernels "
            f"{ran['busy_seconds'] * 1e3:.1f}), said {before['step_seconds'] * 1e3:.1f} "
            f"({errors['seconds_error']:+.1%}), at least {before['bound_seconds'] * 1e3:.1f}; "
            f"{ran['peak_bytes'] / 1e9:.2f} GB, said {before['peak_bytes'] / 1e9:.2f} "
            f"({errors['peak_error']:+.1%})",
            file=sys.stderr,
        )
    compared = [row for row in rows if "seconds_error" in row]
    summary = {
        name: {
            "mean_abs": mean(abs(row[name]) for row in compared),
            "least": min(row[name] for row in compared),
            "most": max(row[name] for row in compared),
        }
        for name in ("seconds_error", "busy_error", "peak_error", "bound_fraction")
    }
    return finish("gpu_seconds", rows, options, claims=summary)


if __name__ == "__main__":
    sys.exit(main())
