"""Search times: the exact search over all batch sizes, and nodes of the paper's depth-first search.

    python -m benchmarks.papers.osdp.search_times -o RESULT.json

Seconds of the exact search for every model of the grid, with the granularity chosen per operator,
and for a model of 70B on 64 H100; nodes of the depth-first search with each pruning off, for models
small enough to finish. Times are of the processor, since the machine may be shared.

Paper: 9 to 307 seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.papers.osdp.settings import (
    SEQ_LEN,
    VOCAB_SIZE,
    arguments,
    chosen,
    costs,
    finish,
    titan,
)
from capture.machine.cluster import Cluster, Machine
from capture.papers.osdp.paper_cost import PaperCost
from capture.papers.osdp.transformer import transformer
from capture.step.operator_cost import StepCost
from recommender.osdp import ShardingProblem, search

GRANULARITIES = (1, 2, 4, 8, 16)


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = [
        exact_row(
            f"{setting.family} {setting.name}",
            costs(setting, titan(limit), granularities=GRANULARITIES),
        )
        for setting, limit in chosen(options)
    ]
    large = transformer(
        "70B",
        [(80, 8192)],
        seq_len=4096,
        vocab_size=32000,
        item_bytes=2,
        state_bytes_per_parameter_byte=8,
    )
    rows.append(
        exact_row(
            "70B",
            StepCost(
                large,
                Machine.of(Cluster((8,) * 8, "h100"), "bfloat16"),
                GRANULARITIES,
                remat=True,
            ),
        )
    )
    claims = {
        "exact, most seconds": max(row["cpu_seconds"] for row in rows),
        "70B on 64 devices, seconds": rows[-1]["cpu_seconds"],
    }
    more = {"claims": claims, "paper": {"seconds": [9, 307]}, "depth_first": depth_first_rows()}
    return finish("osdp_search_times", rows, options, **more)


def exact_row(name: str, cost: StepCost) -> dict[str, Any]:
    start = time.process_time()
    result = search(ShardingProblem(cost))
    return {
        "model": name,
        "operators": cost.model.num_operators,
        "limit_gib": round(cost.machine.memory_limit_bytes / 2**30, 2),
        "cpu_seconds": time.process_time() - start,
        "optimal": result.optimal,
        "status": result.status,
        "num_batch_sizes": result.num_batch_sizes,
        "num_explored": result.num_explored,
    }


def depth_first_rows() -> list[dict[str, Any]]:
    """Nodes of the paper's search over the first batch sizes, with each of its prunings off."""
    rows = []
    for num_layers in (2, 4, 6):
        model = transformer(
            f"{num_layers} layers", [(num_layers, 1024)], seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE
        )
        machine = titan(8).with_limit(model.parameter_bytes * 4 * 0.55)
        problem = ShardingProblem(PaperCost(model, machine), max_batch_size=3)
        nodes = {}
        for memory, seconds in ((True, True), (False, True), (True, False), (False, False)):
            found = search(problem, "depth-first", prune_memory=memory, prune_time=seconds)
            nodes[f"memory {'on' if memory else 'off'}, time {'on' if seconds else 'off'}"] = (
                found.num_explored
            )
        rows.append({"operators": model.num_operators, "nodes": nodes})
    return rows


if __name__ == "__main__":
    sys.exit(main())
