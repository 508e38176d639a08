"""Memory of sharding plans: what a plan says a device needs, against the compiled train step, for
devices that are not there.

    python -m benchmarks.osdp_memory --target h100 -o benchmarks/results/2026-01-31-osdp-memory.json

Models are of the three families of OSDP's Table 1 (``models/mingpt.py``), with fewer layers and a
smaller vocabulary, so that a compile takes seconds to a minute; widths are the paper's. Every plan
comes from ``osdp`` with a limit between the least that the model can do with and what replicating
everything takes; the step is value_and_grad of the transformed loss and the optimizer, with
parameters and state donated, on eight devices. Measured are arguments + temporaries + results that
are not aliased, by the target's compiler; nothing is run.

The estimate has no fitted factor, but its rules were found by looking at compiled programs, N&D and
W&S for H100 among them, and what ``osdp`` leaves of a limit (6 %, 12 % for TPUs) was chosen after
the largest error of these cases: that none is over its limit is no test of that.
``papers/osdp/compiled.py`` has models at full size, which no rule was made for.

What a TPU does otherwise is in its target's file, and was found by looking at N&D and W&S for v5e.
At default precision it reads operands in bfloat16, and gathers and keeps so what only products read
(not with ``--precision highest``). It computes an operand again inside the product that reads it.
What is in use, up to 112 MiB, is in VMEM: of a gigabyte, that is much. The estimate does not know
whether a gather becomes a loop of permutes beside its product, as from about 1500 tokens per
device: then the operand is kept, which is counted always. Nor does it know the gaps between
buffers, up to 13 % with ``--precision highest``, where two steps need more than their limit. The
compiler was not told of the limit: with ``xla_tpu_max_hbm_size_mib`` there, a step of that kind
came down from 1.06 to 0.90 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import WorkloadSpec

NUM_DEVICES, VOCAB_SIZE = 8, 8192
#: Family and blocks, and examples per device.
MODELS = {
    ("N&D", "6x1024"): (8, 48),
    ("W&S", "2x6144"): (4, 64),
    ("I&C", "2x1024+1x2048+1x4096"): (8, 48),
}
#: Of the way from the least that a model can do with to all replicated, or all that the target can
#: use.
FRACTIONS = (0.0, 0.5, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", help="again: more than one (default: h100)")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="models whose name contains this"
    )
    parser.add_argument("--remat", action="store_true", help="with rematerialised operators")
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="F",
        help="overlap_fraction; above 0, gathers look ahead",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the computation (default: float32)",
    )
    parser.add_argument(
        "--precision",
        default="default",
        help="of products in float32, as jax_default_matmul_precision (default: the target's)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the document here, after every compile",
    )
    options = parser.parse_args()
    targets = [Target.load(name) for name in options.target or ["h100"]]
    environment.prepare(
        num_devices=NUM_DEVICES,
        platform="tpu" if any(t.platform == "tpu" for t in targets) else targets[0].platform,
    )
    import jax

    from capture.profiler.sharded_step import StepCompiler
    from capture.runtime.sharded import shard
    from recommender.osdp import ShardingQuestion
    from recommender.osdp.over_step import reserved_fraction

    jax.config.update("jax_default_matmul_precision", options.precision)
    rows: list[dict[str, Any]] = []
    for target in targets:
        compiler = StepCompiler(target, Cluster((NUM_DEVICES,), target.name), count_work=True)
        mesh = compiler.mesh
        for (family, layers), batch_sizes in MODELS.items():
            name = f"{family} {layers}"
            workload = WorkloadSpec.parse(
                f"models/mingpt.py:mingpt?size={layers}&vocab_size={VOCAB_SIZE}&dtype={options.dtype}"
            ).load()
            for batch_size in batch_sizes if options.only in name else ():
                question = ShardingQuestion(
                    workload,
                    mesh,
                    target=target.name,
                    batch_size=batch_size,
                    remat=options.remat,
                    overlap_fraction=options.overlap,
                )
                most = (
                    int(
                        planned(question, 1e15).plan.peak_bytes
                        / (1 - reserved_fraction(target.platform, options.dtype))
                    )
                    + 1
                )
                most = min(most, target.memory.usable_bytes)
                if planned(question, most).plan is None:
                    continue
                least = least_limit(question, most)
                for fraction in FRACTIONS:
                    limit = least + fraction * (most - least)
                    result = planned(question, limit)
                    start = time.perf_counter()
                    measured, program = compiler.measure(shard(workload, result.plan, mesh))
                    rows.append(
                        {
                            "target": target.name,
                            "model": name,
                            "batch_size": batch_size,
                            "remat": options.remat,
                            "overlap_fraction": options.overlap,
                            "dtype": options.dtype,
                            "precision": options.precision,
                            "limit_bytes": int(limit),
                            "plan_bytes": result.plan.peak_bytes,
                            "compiled_bytes": measured,
                            "error_fraction": result.plan.peak_bytes / measured - 1,
                            "operators_by_mode": result.plan.summary()["operators_by_mode"],
                            "collectives": sent(program.work),
                            "compile_seconds": time.perf_counter() - start,
                        }
                    )
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    write(rows, options.output, targets)
    print(json.dumps(summary(rows), indent=1))
    return 0


def planned(question: Any, limit: float) -> Any:
    """The answer of ``osdp`` within a limit, not compiled."""
    from recommender.osdp import osdp

    return osdp(replace(question, memory_limit=limit), verify=False)


def least_limit(question: Any, most: int) -> int:
    """The least limit that a plan fits, within a thousandth of ``most``."""
    low, high = 0, most
    while high - low > most // 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(question, middle).plan is not None else (middle, high)
    return high


def sent(work: Any) -> dict[str, dict[str, int]]:
    """By kind of collective, how many and their bytes; XLA joins small ones."""
    found: dict[str, dict[str, int]] = {}
    for collective in work.collectives:
        row = found.setdefault(collective.kind, {"count": 0, "bytes": 0})
        row["count"] += collective.count
        row["bytes"] += collective.count * collective.nbytes
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By target and precision: mean and largest error, and plans whose compiled step is above the
    limit."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys((row["target"], row["precision"]) for row in rows):
        own = [row for row in rows if (row["target"], row["precision"]) == kind]
        errors = [abs(row["error_fraction"]) for row in own]
        found[", ".join(kind)] = {
            "cases": len(own),
            "mean_error_fraction": sum(errors) / len(errors),
            "max_error_fraction": max(errors),
            "most_underestimated_fraction": max(0.0, *(-row["error_fraction"] for row in own)),
            "over_limit": sum(row["compiled_bytes"] > row["limit_bytes"] for row in own),
        }
    return found


def write(rows: list[dict[str, Any]], output: Path | None, targets: list[Target]) -> None:
    if output is not None:
        write_document("osdp_memory", rows, output, targets, summary(rows))


def write_document(
    name: str,
    rows: list[dict[str, Any]],
    output: Path,
    targets: Iterable[Target],
    claims: dict[str, Any],
) -> None:
    """Rows of what was compiled for targets, with what compiled them."""
    document = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "hardware": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "note": "compiled for the target, which is not there",
        },
        "versions": {
            package: version
            for target in targets
            for package, version in environment.versions(target.platform).items()
        },
        "num_devices": NUM_DEVICES,
        "claims": claims,
        "rows": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
