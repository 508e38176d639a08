"""How long it takes to plan large models for accelerators that are not there: seconds, processor
time of all processes, memory.

    python benchmarks/planning_time.py --cases bounds -o RESULT.json
    python benchmarks/planning_time.py --cases table1 -o RESULT.json
    python benchmarks/planning_time.py --cases h100 --folder planning

A folder keeps stores and plans; an interrupted benchmark resumes in it.

Each case runs the commands that a user would, one process after the other. Of ``bounds`` and
``tpu``, with an empty store, ``capture plan --within 5% --seconds 120`` (240 for TPUs); from the
same store, with another limit of time, until the plan is proven; and, with another empty one, a
limit of one byte less than the least that tracing knows of. Of the others ``capture profile`` with
an empty store (cold), the same again (warm), and ``capture plan --verify 3`` from the profile.
Resident memory is the largest of any process; with W workers there are W + 1. Peaks are compiled,
none was measured on a device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment

#: Of a narrow question for the lowest peak; micro-batches, schedule and remat are said apart.
NARROW = (
    "--objective",
    "memory",
    "--no-shard-params",
    "--no-shard-optimizer",
    "--no-sequence-parallel",
    "--no-whole-nodes",
)


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    name: str
    workload: str
    cluster: str
    target: str
    global_batch: int
    microbatches: int
    remat: str = "none"
    near_seconds: int = 120  # for a plan that is near enough


_GPT, _MOE, _WRN = "models/gpt.py:gpt", "models/moe.py:moe", "models/wide_resnet.py:wide_resnet"
_LLAMA = "models/llama.py:llama"
CASES = {
    "bounds": (
        Case("GPT-3 6.7B", f"{_GPT}?size=6.7B&dtype=bfloat16", "8x8", "h100", 1024, 64, "cheap"),
        Case("LLaMA-like 70B", f"{_LLAMA}?size=70B&dtype=bfloat16", "8x8", "h100", 512, 64, "full"),
        Case("MoE 7.1B", f"{_MOE}?size=7.1B&dtype=bfloat16", "8x8", "h100", 1024, 32, "cheap"),
        Case("Wide-ResNet 2B", f"{_WRN}?size=2B", "8x8", "h100", 1536, 24, "cheap"),
        Case(
            "LLaMA-like 8B, sequence 8,192",
            f"{_LLAMA}?size=8B&dtype=bfloat16&seq_len=8192&attention=flash",
            "1x8",
            "h100",
            64,
            16,
            "full",
        ),
    ),
    "tpu": tuple(
        Case(
            f"{name}, {target}",
            workload,
            "8x8",
            target,
            batch,
            microbatches,
            "cheap",
            near_seconds=240,
        )
        for target in ("v5e", "v5p")
        for name, workload, batch, microbatches in (
            ("GPT-3 6.7B", f"{_GPT}?size=6.7B&dtype=bfloat16", 1024, 64),
            ("MoE 7.1B", f"{_MOE}?size=7.1B&dtype=bfloat16", 1024, 32),
            ("Wide-ResNet 2B", f"{_WRN}?size=2B", 1536, 24),
        )
    ),
    "table1": (
        Case("GPT 2.6B", f"{_GPT}?size=2.6B&dtype=bfloat16", "4x4", "a100-40g", 1024, 64),
        Case("MoE 2.4B", f"{_MOE}?size=2.4B&dtype=bfloat16", "4x4", "a100-40g", 1024, 32),
        Case("Wide-ResNet 1B", f"{_WRN}?size=1B", "4x4", "a100-40g", 768, 24),
    ),
    "h100": (
        Case("GPT 6.7B", f"{_GPT}?size=6.7B&dtype=bfloat16", "8x8", "h100", 1024, 32),
        Case("MoE 7.1B", f"{_MOE}?size=7.1B&dtype=bfloat16", "8x8", "h100", 1024, 32),
        Case("Wide-ResNet 2B", f"{_WRN}?size=2B", "8x8", "h100", 1536, 24),
        Case(
            "LLaMA-like 70B",
            f"{_LLAMA}?size=70B&dtype=bfloat16",
            "8x8",
            "h100",
            512,
            64,
            "full",
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=tuple(CASES), default="table1")
    parser.add_argument(
        "--only", metavar="TEXT", help="of the cases those whose name contains this"
    )
    parser.add_argument(
        "--folder", type=Path, help="for stores, profiles and plans (default: a temporary one)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--seconds", type=int, default=600, help="for a proof, where bounds are searched"
    )
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the document here; rows of other cases in it stay"
    )
    options = parser.parse_args()
    chosen = [
        case for case in CASES[options.cases] if not options.only or options.only in case.name
    ]
    with tempfile.TemporaryDirectory(prefix="planning-") as scratch:
        rows = []
        for case in chosen:
            folder = (options.folder or Path(scratch)) / case.name.replace(" ", "-").lower()
            folder.mkdir(parents=True, exist_ok=True)
            rows.append(
                measure_bounds(case, folder, options.workers, options.seconds)
                if options.cases in ("bounds", "tpu")
                else measure(case, folder, options.workers)
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.output and options.output.exists():
        names = {row["name"] for row in rows}
        kept = json.loads(options.output.read_text())["rows"]
        rows = [*(row for row in kept if row["name"] not in names), *rows]
    document = {
        "benchmark": "planning_time",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg()[2],
        "versions": environment.versions("cuda"),
        "num_workers": options.workers,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if options.json else as_text(document))
    return 0


def measure(case: Case, folder: Path, workers: int) -> dict[str, Any]:
    """The three commands of a case."""
    asked = asking(case, folder / "store.sqlite", workers)
    was_there = (folder / "store.sqlite").exists()
    profile = [*asked, "-o", str(folder / "profile.json")]
    steps = {"profile_cold": run("profile", *profile), "profile_warm": run("profile", *profile)}
    if was_there:  # resumed, or done before: its time says nothing
        steps["profile_cold"] = {**steps["profile_cold"], "resumed": True}
    planned = run(
        "plan",
        *asked,
        "--profile",
        str(folder / "profile.json"),
        "--verify",
        "3",
        "-o",
        str(folder / "plan.json"),
        "--json",
    )
    document = json.loads(planned.pop("printed"))
    for step in steps.values():
        del step["printed"]
    prediction = document["plan"]["prediction"]
    return {
        **asdict(case),
        **steps,
        "plan_and_verify": planned,
        "status": document["status"],
        "num_stages": len(document["plan"]["stages"]),
        "predicted_peak_bytes": max(prediction["peak_bytes_per_device"]),
        "compiled_peak_bytes": max(document["plan"]["verification"]["peak_bytes_per_device"]),
        "headroom": document["needs"]["headroom"],
        "step_seconds": document["needs"]["step_seconds"],
    }


def asking(case: Case, store: Path, workers: int) -> list[str]:
    """What every command of a case is asked."""
    batch = ["--global-batch", str(case.global_batch), "--microbatches", str(case.microbatches)]
    cluster = ["--cluster", case.cluster, "--target", case.target, "--remat", case.remat]
    kept = ["--workers", str(workers), "--store", str(store)]
    return [case.workload, *cluster, *batch, *kept]


def measure_bounds(case: Case, folder: Path, workers: int, seconds: int) -> dict[str, Any]:
    """Planned on bounds: near enough, proven, and with a limit that is too low."""
    store, plan = folder / "store.sqlite", str(folder / "plan.json")
    asked = [*asking(case, store, workers), *NARROW, "--schedule", "1f1b"]
    limited = ["--within", "5%", "--seconds", str(case.near_seconds)]
    near = run("plan", *asked, *limited, "-o", plan, "--json")
    proven = run("plan", *asked, "--seconds", str(seconds), "-o", plan, "--json")
    found, best = (json.loads(step.pop("printed")) for step in (near, proven))
    trail = found["why"]["proven"]["trail"]
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        asked = [*asking(case, Path(empty) / "store.sqlite", workers), *NARROW]
        asked += ["--schedule", "1f1b"]
        limit = ["--memory", str(trail[0]["least_bytes"] - 1), "--quick"]
        beyond = run("plan", *asked, *limit, "-o", plan, "--json")
    refused = json.loads(beyond.pop("printed"))
    return {
        **asdict(case),
        "within_5_percent": {**near, **as_proven(found)},
        "proven": {**proven, **as_proven(best)},
        "too_little_memory": {**beyond, "status": refused["status"], "why": refused["why"]},
    }


def as_proven(document: dict[str, Any]) -> dict[str, Any]:
    """Of an answer on bounds: what it is, and how it came about."""
    proven = document["why"]["proven"]
    return {
        "status": document["status"],
        "num_compiled": proven["trail"][-1]["num_compiled"],
        "within_fraction": proven["within_fraction"],
        "ended": proven["ended"],
        "first_bracket_bytes": [proven["trail"][0][name] for name in ("least_bytes", "most_bytes")],
        "peak_bytes": max(document["plan"]["prediction"]["peak_bytes_per_device"]),
        "step_seconds": document["needs"]["step_seconds"],
    }


def run(verb: str, *arguments: str) -> dict[str, Any]:
    """One command of ``capture``: its seconds, and until it says the first lower bound;
    the processor time of all its processes, the memory of the largest."""
    print(f"capture {verb} {' '.join(arguments)}", file=sys.stderr)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "capture", verb, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    printed: list[str] = []
    reading = threading.Thread(
        target=lambda stream: printed.append(stream.read()), args=(process.stdout,)
    )
    reading.start()
    first_bracket = None
    for line in process.stderr:
        if first_bracket is None and "lower bound" in line:
            first_bracket = time.perf_counter() - start
        print(line, end="", file=sys.stderr, flush=True)
    reading.join()
    # The usage of this process and of those that it waited for.
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # 1: no plan fits, which is a result
        raise RuntimeError(f"capture {verb} ended with exit code {code}")
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "resident_bytes": usage.ru_maxrss * 1024,
        "first_bracket_seconds": first_bracket,
        "printed": "".join(printed),
    }


def as_text(document: dict[str, Any]) -> str:
    from capture.cli.output import table
    from capture.quantities import format_bytes

    if "proven" in document["rows"][0]:
        return as_text_of_bounds(document)
    rows = [
        [
            f"{row['name']}, {row['cluster']} {row['target']}",
            *(
                f"{row[step]['seconds']:.0f} s"
                for step in ("profile_cold", "profile_warm", "plan_and_verify")
            ),
            format_bytes(
                max(row[step]["resident_bytes"] for step in ("profile_cold", "plan_and_verify"))
            ),
            row["status"],
            format_bytes(row["compiled_peak_bytes"]),
        ]
        for row in document["rows"]
    ]
    header = [
        "case",
        "profile, cold",
        "again, warm",
        "plan --verify 3",
        "largest process",
        "status",
        "compiled peak",
    ]
    return table(header, rows)


def as_text_of_bounds(document: dict[str, Any]) -> str:
    from capture.cli.output import table
    from capture.quantities import format_bytes

    def spent(step: dict[str, Any]) -> str:
        return f"{step['seconds']:.0f} s ({step['processor_seconds']:.0f})"

    header = ["case", "first bracket", "too little memory", "within 5%", "stages", "peak"]
    header += ["within", "from there, proven", "stages", "peak", "within"]
    rows = []
    for row in document["rows"]:
        cells = [f"{row['name']}, {row['cluster']} {row['target']}"]
        cells += [f"{row['within_5_percent']['first_bracket_seconds']:.0f} s"]
        cells += [spent(row["too_little_memory"])]
        for step in (row["within_5_percent"], row["proven"]):
            cells += [spent(step), str(step["num_compiled"]), format_bytes(step["peak_bytes"])]
            cells += [f"{step['within_fraction']:.1%}"]
        rows.append(cells)
    return f"seconds, and of the processor in brackets\n{table(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
