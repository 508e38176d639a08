"""Figure 6: how the overhead of four swaps is found, one after the other.

    python -m benchmarks.papers.mutwo.figure_6 -o RESULT.json

The five layers of Figure 2, one second an operation, two seconds a copy, a limit of 18 bytes: Z1 is
hidden behind forward operations of the other sub-array (case 2a), Z2 behind one of them and a
backward one (2b), Z3 behind one in part, as the peak interval begins (3), Z4 behind nothing (1a).
The algorithms are the paper's, corrected (``capture/papers/mutwo``); what they schedule is run
by the paper's engine (H), and ``tests/unit/test_mutwo_cases.py`` holds it word for word.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.drawing import ALPA, COLORS, OURS, Panel, draw
from capture.papers.mutwo.engine import Engine
from capture.papers.mutwo.memory import memory_of
from capture.papers.mutwo.policy import SwapPolicy
from capture.papers.mutwo.readings import CORRECTED
from capture.papers.mutwo.schedule import PairSchedule
from tests.merged_graphs import figure_six

LIMIT = 18
STREAMS = {"compute": 1.0, "in": 0.0}
PAPER = {"Z1": ("2a", 0.0), "Z2": ("2b", 0.0), "Z3": ("3", "some"), "Z4": ("1a", "its swap time")}


def rows_of() -> list[dict[str, Any]]:
    """After every choice, its case and overhead, and when what runs."""
    policy, rows = SwapPolicy(PairSchedule(figure_six(), CORRECTED), LIMIT), []
    while not policy.fits:
        choice = policy.decide()
        run = Engine(CORRECTED).run(policy.schedule.graph, policy.schedule.merged())
        rows.append(
            {
                "tensor": policy.schedule.graph.values[choice.tensor].name,
                "case": choice.case,
                "overhead_seconds": choice.seconds,
                "stall_seconds": run.stall_seconds,
                "peak_bytes": memory_of(policy.schedule).peak_bytes,
                "events": [
                    [event.stream, event.label, event.start, event.end]
                    for event in run.events
                    if event.stream in STREAMS
                ],
            }
        )
    return rows


def panel_of(row: dict[str, Any]) -> Panel:
    title = f"{row['tensor']}: case {row['case']}, stalls {row['stall_seconds']:g} s"
    ticks = [(second, str(second)) for second in range(0, 19, 3)]
    panel = Panel(title, "seconds", "", (0, 18.5), (0, 2), ticks, width=760, height=150)
    panel.y_ticks = [(1.5, "run"), (0.5, "fetch")]
    for stream, label, start, end in row["events"]:
        sub_array, *words = label.split()
        low = STREAMS[stream] + 0.1
        color = COLORS[3] if stream == "in" else ALPA if sub_array == "one" else OURS
        about = f"{label}: {start:g} to {end:g} s"
        panel.box((start + 0.04, end - 0.04), (low, low + 0.8), color, about, 0.8)
        panel.note((start + end) / 2, low + 0.3, words[-1], fontsize=9)
    return panel


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = rows_of()
    svg = draw(
        "Four swaps, one after the other (mu-TWO, Figure 6)",
        "Programs above, copies from the host below; by the paper's algorithms, corrected.",
        [panel_of(row) for row in rows],
        1,
        [(ALPA, "backward, sub-array 1"), (OURS, "forward, sub-array 2"), (COLORS[3], "fetch")],
    )
    claims = {row["tensor"]: [row["case"], row["overhead_seconds"]] for row in rows}
    return finish("mutwo_figure_6", rows, options, svg, simulated=True, claims=claims, paper=PAPER)


if __name__ == "__main__":
    sys.exit(main())
