"""How long it takes to profile, plan and verify large models for accelerators that are not there:
seconds, processor time, memory.

    python benchmarks/planning_time.py --cases table1 -o RESULT.json
    python benchmarks/planning_time.py --cases h100 --folder planning

A folder keeps stores and plans; an interrupted benchmark resumes in it.

Each case runs the commands that a user would, one process after the other: ``capture profile`` with
an empty store (cold), the same again (warm), and ``capture plan --verify 3`` from the profile.
Resident memory is the largest of any process; with W workers there are W + 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment


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


_GPT, _MOE, _WRN = "models/gpt.py:gpt", "models/moe.py:moe", "models/wide_resnet.py:wide_resnet"
CASES = {
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
            "models/llama.py:llama?size=70B&dtype=bfloat16",
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
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    chosen = [
        case for case in CASES[options.cases] if not options.only or options.only in case.name
    ]
    with tempfile.TemporaryDirectory(prefix="planning-") as scratch:
        rows = [measure(case, options.folder or Path(scratch), options.workers) for case in chosen]
    document = {
        "benchmark": "planning_time",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
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
    folder = folder / case.name.replace(" ", "-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    asked = [
        case.workload,
        "--cluster",
        case.cluster,
        "--target",
        case.target,
        "--remat",
        case.remat,
        "--workers",
        str(workers),
    ]
    asked += [
        "--global-batch",
        str(case.global_batch),
        "--microbatches",
        str(case.microbatches),
        "--store",
        str(folder / "store.sqlite"),
    ]
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
    prediction = document["prediction"]
    return {
        **asdict(case),
        **steps,
        "plan_and_verify": planned,
        "status": document["status"],
        "num_stages": len(document["plan"]["stages"]),
        "predicted_peak_bytes": max(prediction["peak_bytes_per_device"]),
        "compiled_peak_bytes": max(document["plan"]["verification"]["peak_bytes_per_device"]),
        "headroom": document["headroom"],
        "step_seconds": document.get("time", {}).get("step_seconds"),
    }


def run(verb: str, *arguments: str) -> dict[str, Any]:
    """One command of ``capture``: its seconds, the processor time of all its processes, the memory
    of the largest."""
    print(f"capture {verb} {' '.join(arguments)}", file=sys.stderr)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "capture", verb, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    # The usage of this process and of those that it waited for.
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # 1: no plan fits, which is a result
        raise RuntimeError(f"capture {verb} ended with exit code {code}")
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "resident_bytes": usage.ru_maxrss * 1024,
        "printed": printed,
    }


def as_text(document: dict[str, Any]) -> str:
    from capture.cli.output import table
    from capture.quantities import format_bytes

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


if __name__ == "__main__":
    sys.exit(main())
