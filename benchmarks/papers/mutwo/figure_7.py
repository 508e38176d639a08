"""Figure 7: hours of 10,000 iterations of several BERT and ViT models.

    python -m benchmarks.papers.mutwo.figure_7 -o RESULT.json

From the updates of the newest result of ``figure_8``, times 10,000. All is simulated. Paper: 5 to
40 hours saved beside HFTA-NoMemOpt, of up to 60.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments
from benchmarks.drawing import ALPA, COLORS, OURS, draw, grouped_bars
from benchmarks.papers.mutwo.settings import finish, newest

ITERATIONS = 10_000
SERIES = {"HFTA-NoMemOpt": ALPA, "multiplexed": COLORS[3], "mu-TWO": OURS}
MODELS = ("BERT", "ViT")


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of an array, in hours; None for what does not fit."""
    systems = row["systems"]
    hours = {
        name: systems[name]["step_seconds"] * ITERATIONS / 3600 if systems[name]["fits"] else None
        for name in SERIES
    }
    before, ours = hours["HFTA-NoMemOpt"], hours["mu-TWO"]
    return {
        "name": row["name"],
        "model": row["model"],
        "num_models": row["num_models"],
        "kernel_seconds": row["kernel_seconds"],
        "hours": hours,
        "saved_hours": before - ours if before is not None and ours is not None else None,
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    source, document = newest("mutwo-figure-8")
    rows = [
        row_of(row)
        for row in document["rows"]
        if row["model"] in MODELS and row["target"] == "a100-40g"
    ]
    panels, claims = [], {}
    for model, floor in dict.fromkeys((row["model"], row["kernel_seconds"]) for row in rows):
        own = [row for row in rows if (row["model"], row["kernel_seconds"]) == (model, floor)]
        groups = [
            (
                f"{row['num_models']} models",
                {n: "-" if hours is None else hours for n, hours in row["hours"].items()},
            )
            for row in own
        ]
        title = f"{model}, kernels of {1e6 * floor:g} us or more"
        panels.append(grouped_bars(title, "hours", groups, 500, 300, colors=SERIES))
        claims[title] = {
            "hours of HFTA-NoMemOpt": {r["num_models"]: r["hours"]["HFTA-NoMemOpt"] for r in own},
            "saved hours": {row["num_models"]: row["saved_hours"] for row in own},
        }
    svg = draw(
        "Hours of 10,000 iterations (mu-TWO, Figure 7)",
        "Simulated for an A100-40G that is not there, with the link of Table C.",
        panels,
        3,
        [(color, name) for name, color in SERIES.items()],
    )
    paper = {"saved hours": "5 to 40, of up to 60"}
    return finish(
        "mutwo_figure_7", rows, options, svg, claims=claims, paper=paper, source=source.name
    )


if __name__ == "__main__":
    sys.exit(main())
