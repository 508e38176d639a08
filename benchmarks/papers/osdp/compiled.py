"""The choice of Figures 5 and 6 for devices of today, with the memory of the compiled train step
beside it.

    python -m benchmarks.papers.osdp.compiled --target h100 -o RESULT.json
    python -m benchmarks.papers.osdp.compiled --target v5e -o RESULT.json

Models are the paper's, at their sizes (``models/mingpt.py``), on eight devices of the target, one
server, of which 16 GB each may be used. ``osdp`` chooses batch size and modes for the traced loss;
the step of its plan is compiled by the target's compiler and not run. Beside it stands fully
sharded data parallelism at its best batch within the same memory. Throughput is simulated. Links
are faster here than the paper's, and models are traced: what is compared with the paper is the
choice, not the numbers.

A run adds to what the file has; models of the target that are in it already are left out. The deep
ones compile for minutes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.drawing import COLORS, draw, grouped_bars
from benchmarks.osdp_memory import NUM_DEVICES, summary, write_document
from benchmarks.papers.osdp.settings import GIB, SETTINGS, Setting, arguments, gain, gain_statistics
from capture import environment
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import WorkloadSpec
from capture.plan.sharding import DP, ZDP
from capture.step.operator_cost import StepCost
from capture.step.sharded import peak_bytes

LIMIT_GIB = 16


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--target", default="h100", help="to compile for (default: h100)")
    options = parser.parse_args()
    target = Target.load(options.target)
    environment.prepare(num_devices=NUM_DEVICES, platform=target.platform)
    rows = (
        json.loads(options.output.read_text())["rows"]
        if options.output and options.output.exists()
        else []
    )
    done = {(row["target"], row["model"]) for row in rows}
    order = [setting.name for setting in SETTINGS]
    from capture.profiler.sharded_step import StepCompiler

    compiler = StepCompiler(target, Cluster((NUM_DEVICES,), target.name))
    for setting in SETTINGS:
        wanted = not options.only or options.only in f"{setting.family} {setting.name}"
        if wanted and (target.name, setting.name) not in done:
            rows.append(row(setting, target, compiler))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            rows.sort(key=lambda row: (row["target"], order.index(row["model"])))
            write(rows, options.output)
    print(json.dumps(claims(rows), indent=1))
    return 0


def row(setting: Setting, target: Target, compiler: Any) -> dict[str, Any]:
    """What is chosen for one model, and what its step needs."""
    from capture.runtime.sharded import shard
    from recommender.osdp import ShardingQuestion, osdp
    from recommender.osdp.over_step import reserved_fraction
    from recommender.osdp.recommendation import costs_of

    limit = min(LIMIT_GIB * GIB, target.memory.usable_bytes)
    found: dict[str, Any] = {
        "target": target.name,
        "family": setting.family,
        "model": setting.name,
        "limit_bytes": limit,
    }
    workload = WorkloadSpec.parse(f"models/mingpt.py:mingpt?size={setting.name}").load()
    start = time.perf_counter()
    question = ShardingQuestion(workload, compiler.mesh, limit, target=target.name)
    result = osdp(question, verify=False)
    found["plan_seconds"] = time.perf_counter() - start
    fsdp = fully_sharded(
        costs_of(question)[1], limit * (1 - reserved_fraction(target.platform, "float32"))
    )
    if result.plan is None:
        return {
            **found,
            "status": "oom",
            "why": result.why.summary,
            "fsdp_examples_per_second": fsdp,
        }
    start = time.perf_counter()
    compiled, _ = compiler.measure(shard(workload, result.plan, compiler.mesh))
    return {
        **found,
        "status": "ok",
        "precision": "default",
        **result.plan.summary(),
        "plan_bytes": result.plan.peak_bytes,
        "compiled_bytes": compiled,
        "error_fraction": result.plan.peak_bytes / compiled - 1,
        "fsdp_examples_per_second": fsdp,
        "over_fsdp": gain(result.plan.examples_per_second, fsdp),
        "compile_seconds": time.perf_counter() - start,
    }


def fully_sharded(cost: StepCost, limit: float) -> float:
    """Examples per second at the best batch size with every operator in ZDP mode, whole; 0 if none
    fits."""
    operators = cost.model.operators
    modes = [ZDP if operator.parameter_bytes else DP for operator in operators]
    best, batch_size = 0.0, 1
    while peak_bytes(cost, modes, batch_size) <= limit:
        seconds = sum(
            float(cost.cost(operator, mode, batch_size).seconds)
            for operator, mode in zip(operators, modes, strict=True)
        )
        best = max(best, cost.machine.num_devices * batch_size / seconds)
        batch_size += 1
    return best


def claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ok = [row for row in rows if row["status"] == "ok"]
    found: dict[str, Any] = {"memory": summary(ok)} if ok else {}
    for target in dict.fromkeys(row["target"] for row in rows):
        found[f"{target} over FSDP"] = gain_statistics(
            [row["over_fsdp"] for row in ok if row["target"] == target]
        )
        found[f"{target}, only OSDP fits"] = [
            row["model"]
            for row in ok
            if row["target"] == target and not row["fsdp_examples_per_second"]
        ]
    return found


def write(rows: list[dict[str, Any]], output: Path | None) -> None:
    if output is None:
        return
    targets = [Target.load(name) for name in dict.fromkeys(row["target"] for row in rows)]
    write_document("osdp_compiled (throughput is simulated)", rows, output, targets, claims(rows))
    output.with_suffix(".svg").write_text(picture(rows))


def picture(rows: list[dict[str, Any]]) -> str:
    panels = []
    for target in dict.fromkeys(row["target"] for row in rows):
        groups = []
        for row in rows:
            if row["target"] == target:
                bars = (
                    {"planned": row["plan_bytes"] / 1e9, "compiled": row["compiled_bytes"] / 1e9}
                    if row["status"] == "ok"
                    else {}
                )
                groups.append(
                    (
                        f"{row['family']}\n" + row["model"].replace("+", "\n"),
                        bars or {"planned": "OOM", "compiled": "OOM"},
                    )
                )
        limit = next(row["limit_bytes"] for row in rows if row["target"] == target) / 1e9
        panels.append(
            grouped_bars(f"{target}, limit {limit:.1f} GB", "GB per device", groups, 1250, 310)
        )
    note = (
        "Eight devices that are not there: the plan's estimate, and the target's compiler on its "
        "train step."
    )
    return draw(
        "Memory of the chosen plans",
        note,
        panels,
        1,
        list(zip(COLORS, ("planned", "compiled"), strict=False)),
    )


if __name__ == "__main__":
    sys.exit(main())
