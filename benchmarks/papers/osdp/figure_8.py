"""Figure 8: OSDP with and without operator splitting on eight GPUs, and with the granularity chosen
per operator.

    python -m benchmarks.papers.osdp.figure_8 -o benchmarks/results/2026-01-31-osdp-figure-8.json

Paper: splitting gains 3 to 92 %; about 25 % of the operators are split in N&D, all in W&S, about 50
% in I&C.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

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
from benchmarks.papers.osdp.strategies import Outcome, osdp

GRANULARITIES = {"none": (1,), "4": (1, 4), "chosen of 2, 4, 8, 16": (1, 2, 4, 8, 16)}
PAPER = {
    "gain": {"min": 0.03, "max": 0.92},
    "split_fraction": {"N&D": 0.25, "W&S": 1.0, "I&C": 0.5},
}


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = []
    for setting, limit in chosen(options):
        found = {
            name: osdp(costs(setting, titan(limit), granularities=slices))
            for name, slices in GRANULARITIES.items()
        }
        rows.append(
            {"family": setting.family, "model": setting.name, "limit_gib": limit, **row(found)}
        )
    claims: dict[str, Any] = {
        name: gain_statistics([r["gains"][name] for r in rows]) for name in list(GRANULARITIES)[1:]
    }
    for family in ("N&D", "W&S", "I&C"):
        split = [
            r["split_fraction"]
            for r in rows
            if r["family"] == family and r["split_fraction"] is not None
        ]
        claims[f"{family} split_fraction"] = float(np.mean(split)) if split else None
    claims["only with splitting"] = [
        f"{r['model']}, {r['limit_gib']} GB" for r in rows if r["only_with_splitting"]
    ]
    return finish("osdp_figure_8", rows, options, picture(rows), claims=claims, paper=PAPER)


def row(found: dict[str, Outcome]) -> dict[str, Any]:
    none, *others = found.values()
    four = found["4"].plan
    return {
        "granularity": {name: outcome.to_json() for name, outcome in found.items()},
        "gains": {
            name: gain(outcome.examples_per_second, none.examples_per_second)
            for name, outcome in found.items()
        },
        "split_fraction": None if four is None else four.split_fraction,
        "only_with_splitting": none.status == "oom"
        and any(outcome.status == "ok" for outcome in others),
    }


def picture(rows: list[dict[str, Any]]) -> str:
    note = "Simulated: 8 RTX TITAN, slices per operator; examples of 128 tokens."
    return throughput_picture(
        "Operator splitting (OSDP, Figure 8)", note, rows, "granularity", list(GRANULARITIES)
    )


if __name__ == "__main__":
    sys.exit(main())
