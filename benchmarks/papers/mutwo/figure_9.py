"""Figure 9: what BERT and ViT arrays spend their time on, and Tables D and E from the same numbers.

    python -m benchmarks.papers.mutwo.figure_9 -o RESULT.json

From the newest result of ``figure_8``, simulated for an A100-40G: (a) an update; (b) what is made
again over all programs; (c) fetches that run behind programs, over all programs; (d) the peak with
everything retained over what the device lets programs use. Of ``multiplexed`` sub-arrays, as mu-TWO
does, and of the search's answer.

Paper: less than half of HFTA-Capuchin's part of recomputation, two to three times as much of the
swaps behind computation, and a lower peak.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.documents import arguments
from benchmarks.drawing import ALPA, COLORS, OURS, PAPER, Panel, draw, grouped_bars
from benchmarks.papers.mutwo.settings import finish, newest

MODELS = ("BERT", "ViT")
SERIES = {
    "HFTA-NoMemOpt": ALPA,
    "HFTA-Capuchin": PAPER,
    "multiplexed": COLORS[3],
    "mu-TWO": OURS,
}
#: The three strategies of Table E, and what weighs them here.
TABLE_E = {
    "swapping (vDNN)": "HFTA-Capuchin swap",
    "recomputation (Checkmate)": "full rematerialisation",
    "hybrid (Capuchin)": "HFTA-Capuchin",
    "mu-TWO, multiplexed": "multiplexed",
    "mu-TWO, the search's answer": "mu-TWO",
}


def parts_of(row: dict[str, Any], name: str) -> dict[str, float] | None:
    """Of an update; None for what does not fit, or is known as a whole only."""
    one = row["systems"][name]
    if not one["fits"] or "compute_seconds" not in one:
        return None
    again = one["recompute_seconds"]
    return {
        "programs": one["compute_seconds"] - again,
        "recomputation": again,
        "waiting": one["step_seconds"] - one["compute_seconds"],
        "recompute_fraction": again / one["compute_seconds"],
        "overlap_fraction": one["overlapped_seconds"] / one["compute_seconds"],
        "hidden_fetches": (
            one["overlapped_seconds"] / one["fetch_seconds"] if one["fetch_seconds"] else None
        ),
        "peak_over_limit": one["unlimited_peak_bytes"] / row["limit_bytes"],
    }


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    whole = row["systems"]["HFTA-NoMemOpt"]
    return {
        "model": row["model"],
        "num_models": row["num_models"],
        "kernel_seconds": row["kernel_seconds"],
        "rounds_seconds": whole["step_seconds"] if whole["fits"] else None,
        **{name: parts_of(row, name) for name in ("HFTA-Capuchin", "multiplexed", "mu-TWO")},
    }


def panels_of(model: str, rows: Sequence[dict[str, Any]]) -> list[Panel]:
    def bars(title: str, label: str, of: Callable[[dict[str, Any]], Any], names: Sequence[str]):
        groups = [
            (
                f"{row['num_models']} models",
                {name: "-" if (value := of(row, name)) is None else value for name in names},
            )
            for row in rows
        ]
        return grouped_bars(title, label, groups, 400, 290, colors=SERIES)

    def part(key: str) -> Callable[[dict[str, Any], str], float | None]:
        return lambda row, name: row[name] and row[name][key]

    def latency(row: dict[str, Any], name: str) -> float | None:
        if name == "HFTA-NoMemOpt":
            return row["rounds_seconds"] and 1e3 * row["rounds_seconds"]
        own = row[name]
        return own and 1e3 * (own["programs"] + own["recomputation"] + own["waiting"])

    memory = ("HFTA-Capuchin", "multiplexed", "mu-TWO")
    return [
        bars(f"{model} (a) an update", "ms", latency, list(SERIES)),
        bars(f"{model} (b) recomputation", "of programs", part("recompute_fraction"), memory),
        bars(f"{model} (c) hidden fetches", "of programs", part("overlap_fraction"), memory),
        bars(f"{model} (d) peak, all retained", "of the memory", part("peak_over_limit"), memory),
    ]


def table_e(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a strategy adds to the programs of an update without a limit, and how long it waits; of
    the largest array of each model that all of them train."""
    found: dict[str, Any] = {}
    for model in MODELS:
        named = [row for row in rows if row["model"] == model]
        own = [row for row in named if all(parts_of(row, of) for of in TABLE_E.values())]
        if not own:
            continue
        row = max(own, key=lambda one: one["num_models"])
        parts = {label: parts_of(row, name) for label, name in TABLE_E.items()}
        found[f"{model}, {row['num_models']} models"] = {
            label: one
            and {
                "compute overhead": one["recomputation"] / one["programs"],
                "stalling": one["waiting"] / one["programs"],
            }
            for label, one in parts.items()
        }
    return found


def table_d(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest array of a model whose all-retained peak exceeds the memory: which system trains
    it as one step of all models."""
    return {
        f"{row['model']}, {row['num_models']} models": {
            "of the memory": row["systems"]["one vmap"]["peak_bytes"] / row["limit_bytes"],
            "HFTA, one step of all": row["systems"]["one vmap"]["fits"],
            "mu-TWO": row["systems"]["mu-TWO"]["fits"],
            "of the memory, used": row["systems"]["mu-TWO"]["peak_bytes"] / row["limit_bytes"],
        }
        for row in rows
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    source, document = newest("mutwo-figure-8")
    least = min(row["kernel_seconds"] for row in document["rows"])
    given = [
        row
        for row in document["rows"]
        if row["target"] == "a100-40g" and row["kernel_seconds"] == least
    ]
    rows = [row_of(row) for row in given if row["model"] in MODELS]
    panels = [
        panel
        for model in MODELS
        for panel in panels_of(model, [row for row in rows if row["model"] == model])
    ]
    svg = draw(
        "What an update spends its time on (mu-TWO, Figure 9)",
        "Simulated for an A100-40G that is not there, with the link of Table C.",
        panels,
        4,
        [(color, name) for name, color in SERIES.items()],
    )
    claims = {"table D": table_d(given), "table E": table_e(given)}
    paper = {
        "recomputation over HFTA-Capuchin's": "less than half",
        "overlap over HFTA-Capuchin's": "2 to 3",
        "table D": "mu-TWO trains what does not fit; HFTA does not",
        "table E": {
            "swapping": "no overhead, stalls much",
            "recomputation": "much overhead, no stalls",
            "hybrid": "much overhead, few stalls",
            "mu-TWO": "little overhead, no stalls",
        },
    }
    return finish(
        "mutwo_figure_9", rows, options, svg, claims=claims, paper=paper, source=source.name
    )


if __name__ == "__main__":
    sys.exit(main())
