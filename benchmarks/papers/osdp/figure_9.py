"""Figure 9: OSDP and FSDP on eight GPUs with rematerialised activations ("checkpointing").

    python -m benchmarks.papers.osdp.figure_9 -o benchmarks/results/2026-01-31-osdp-figure-9.json

What is sharded is gathered once more for the repeated forward pass, what is replicated is not, so a
replica is worth half as much again. Against that, batches grow until communication is a small part
of a step; gains at FSDP's best power of two are given beside.

Paper: up to 108.3 %, 52.9 % on average.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.papers.osdp.figure_5_6 import at_powers_of_two
from benchmarks.papers.osdp.settings import (
    arguments,
    chosen,
    costs,
    finish,
    gain,
    gain_statistics,
    throughput_picture,
    titan,
)
from benchmarks.papers.osdp.strategies import STRATEGIES

NAMES = ("FSDP", "OSDP-base", "OSDP")
PAPER = {"over FSDP": {"mean": 0.529, "max": 1.083}}


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = []
    for setting, limit in chosen(options):
        cost = costs(setting, titan(limit), remat=True)
        found = {name: STRATEGIES[name](cost) for name in NAMES}
        own = gain(found["OSDP"].examples_per_second, found["FSDP"].examples_per_second)
        rows.append(
            {
                "family": setting.family,
                "model": setting.name,
                "limit_gib": limit,
                "strategies": {name: outcome.to_json() for name, outcome in found.items()},
                "over_fsdp": {"own_batch": own, **at_powers_of_two(cost)},
            }
        )
    claims = {
        batch: gain_statistics([r["over_fsdp"][batch] for r in rows])
        for batch in ("own_batch", "powers_of_two", "same_batch")
    }
    return finish("osdp_figure_9", rows, options, picture(rows), claims=claims, paper=PAPER)


def picture(rows: list[dict[str, Any]]) -> str:
    note = (
        "Simulated: 8 RTX TITAN, all activations but the operators' inputs computed again; "
        "examples of 128 tokens."
    )
    return throughput_picture(
        "With rematerialisation (OSDP, Figure 9)", note, rows, "strategies", NAMES
    )


if __name__ == "__main__":
    sys.exit(main())
