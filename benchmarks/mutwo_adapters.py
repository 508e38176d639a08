"""What eight LoRA adapters on one base need, fused, beside eight trainings of one adapter each.

    python -m benchmarks.mutwo_adapters [--size 1B] [--target h200] (--json | -o RESULT.json)

``models/llama_lora.py``, rank 16 on queries, keys, values and outputs, one example of 256 tokens
per model, everything retained. Programs are compiled for the target, which need not be there;
seconds are simulated (a roofline by kernel), bytes are replayed. The base is there once, however
many models read it.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments, finish
from capture import environment
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import WorkloadSpec
from recommender.mutwo.problem import ArrayProblem, Profiled
from recommender.mutwo.ways import Way, placed

COUNT, SEQ_LEN = 8, 256
#: Models of each sub-array, in turn; the last one is eight models that are not fused.
PARTITIONS = ((8,), (4, 4), (1,) * 8)


def rows_of(size: str, dtype: str, target: str) -> list[dict[str, Any]]:
    """Seconds and bytes of an update, by partition; that of one adapter alone comes first."""
    from capture.profiler.array import ArrayProfile
    from capture.profiler.asked import ArrayShape

    name = f"models/llama_lora.py:lora?size={size}&seq_len={SEQ_LEN}&dtype={dtype}"
    cluster = Cluster((1,), target)
    shape = ArrayShape(1, shared=("base/*",))
    profile = ArrayProfile(WorkloadSpec.parse(name).load(), cluster, shape)
    machine = profile.machine
    limit = int(machine.memory_limit_bytes)
    rows = [
        {"workload": name, "target": target, **_row(profile, sizes, machine.rates.host, limit)}
        for sizes in ((1,), *PARTITIONS)
    ]
    eight = COUNT * rows[0]["step_seconds"]
    for row in rows[1:]:
        row["of_eight_alone"] = row["step_seconds"] / eight
    return rows


def _row(profile: Profiled, sizes: tuple[int, ...], host: Any, limit: int) -> dict[str, Any]:
    problem = ArrayProblem(profile, sum(sizes), host, limit)
    space = problem.space(Way(placed(sizes), "in turn"))
    found = space.evaluate(space.retained, limit).prediction()
    return {
        "sizes": list(sizes),
        "step_seconds": found.step_seconds,
        "peak_bytes": found.peak_bytes,
        "parts_bytes": dict(found.parts_bytes),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--size", default="1B", help="of the base (default: %(default)s)")
    parser.add_argument("--target", default="h200", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    options = parser.parse_args()
    if not (options.json or options.output):
        parser.error("give --json, or -o FILE")
    environment.prepare(num_devices=1, platform=Target.load(options.target).platform)
    rows = []
    for dtype in ("bfloat16", "float32"):
        rows += rows_of(options.size, dtype, options.target)
        print(f"{dtype}: {rows[-1]}", file=sys.stderr, flush=True)
    fused = [row["of_eight_alone"] for row in rows if row["sizes"] == [COUNT]]
    by_dtype = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    claims = {
        "fused_of_eight_alone": dict(zip(("bfloat16", "float32"), fused, strict=True)),
        "base_is_stored_once": all(
            len({row["parts_bytes"]["shared parameters"] for row in own}) == 1 for own in by_dtype
        ),
    }
    return finish("mutwo_adapters", rows, options, simulated=True, claims=claims)


if __name__ == "__main__":
    sys.exit(main())
