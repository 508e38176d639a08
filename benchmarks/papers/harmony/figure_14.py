"""Figure 14: what every optimization of Harmony is worth, off one at a time.

    python -m benchmarks.papers.harmony.figure_14 -o RESULT.json

GPT2 on four GTX-1080Ti, minibatch 64, both modes; the configuration is that of all on, but where
the search is off: then packs of one length and a power of two, by hand (H-u). By the paper's rules,
and as instructions of our own.

Paper: grouping 2.2 (DP) and 1.5 (PP), search 1.3 to 1.4, prefetch up to 1.3, jit scheduling and
optimizer offload up to 1.2, p2p 1 (DP) and up to 1.2 (PP); Equi-FB 1.3 (4.3.1).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import bars, finish, problem_of
from capture.plan.task_graph import MODES, Configuration, Mode, Switches
from capture.predictor.pack_step import packs_timeline
from recommender.harmony import search
from recommender.harmony.packing import EXPERT

PAPER = {
    "grouping": {"dp": 2.2, "pp": 1.5},
    "search": "1.3 to 1.4",
    "prefetch": "up to 1.3",
    "jit": "up to 1.2",
    "offload": "up to 1.2",
    "p2p": {"dp": 1.0, "pp": "up to 1.2"},
    "Equi-FB": 1.3,
}
OFF = ("grouping", "search", "prefetch", "jit", "offload", "p2p", "Equi-FB")


def row_of(mode: Mode, off: str, best: Configuration) -> dict[str, Any]:
    """One optimization off; none for an empty name."""
    switches = Switches.without([off] if off and off not in ("search", "Equi-FB") else [])
    asked = replace(problem_of("GPT2", mode), switches=switches)
    configuration = best
    if off == "search":
        expert = replace(asked, forward_packings=(EXPERT,), backward_packings=(EXPERT,))
        point = search(expert).best
        assert point is not None, "a layer fits"
        configuration = point.configuration
    elif off == "Equi-FB":
        point = search(replace(asked, equal_passes=True)).best
        assert point is not None, "packs fit both ways"
        configuration = point.configuration
    found = asked.estimate(configuration)
    graph = asked.graph(configuration, None)
    timeline = packs_timeline(graph, asked.profile, asked.server)
    return {
        "mode": mode,
        "off": off,
        "step_seconds": found.seconds,
        "instructions_seconds": timeline.step_seconds,
        "volumes_bytes": found.volumes_bytes,
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows, claims = [], {}
    for mode in MODES:
        best = search(problem_of("GPT2", mode)).best
        assert best is not None, "it fits"
        of_mode = [row_of(mode, off, best.configuration) for off in ("", *OFF)]
        for row in of_mode:
            row["slowdown"] = row["step_seconds"] / of_mode[0]["step_seconds"]
            row["instructions_slowdown"] = (
                row["instructions_seconds"] / of_mode[0]["instructions_seconds"]
            )
        rows += of_mode
        claims[mode] = {
            row["off"]: {
                "by the paper's rules": round(row["slowdown"], 3),
                "as instructions": round(row["instructions_slowdown"], 3),
            }
            for row in of_mode[1:]
        }
    groups = [
        (
            off,
            {
                f"{mode.upper()}, {how}": next(
                    row[key] for row in rows if (row["mode"], row["off"]) == (mode, off)
                )
                for mode in MODES
                for how, key in (
                    ("paper's rules", "slowdown"),
                    ("instructions", "instructions_slowdown"),
                )
            },
        )
        for off in OFF
    ]
    svg = bars(
        "One optimization off at a time (Harmony, Figure 14)",
        "Estimated: GPT2, four GTX-1080Ti, minibatch 64; step time over that of all on.",
        {"slowdown": ("times", groups)},
    )
    return finish("harmony_figure_14", rows, options, svg, claims=claims, paper=PAPER)


if __name__ == "__main__":
    sys.exit(main())
