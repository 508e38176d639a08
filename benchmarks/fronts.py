"""Draw the fronts of memory and time that plans hold, a panel each.

Peaks are compiled, steps are simulated.

    capture plan ... -o gpt.json
    python -m benchmarks.fronts gpt.json moe.json -o benchmarks/results/2026-01-31-fronts.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import ceil, log2
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.drawing import ALPA, FAINT, OURS, PAPER, Panel, draw
from capture.plan.stages import Plan
from capture.quantities import format_bytes, format_seconds

COLORS = {"fastest": OURS, "knee": PAPER, "lowest memory": ALPA, "": "#bbbbbb"}
LEGEND = [(color, name or "others on the front") for name, color in COLORS.items()]


def row_of(plan: Plan) -> dict[str, Any]:
    """What a plan's front says: bytes and seconds of its points, and what was asked."""
    front = plan.why.front
    assert front is not None, "it was asked for speed"
    spec = plan.workload
    name = "" if spec is None else " ".join((spec.function, *map(str, spec.arguments.values())))
    points = [
        {"name": p.name, "peak_bytes": p.peak_bytes, "step_seconds": p.step_seconds}
        for p in front.points
    ]
    return {
        "model": name,
        "cluster": str(plan.cluster),
        "target": plan.cluster.target,
        "global_batch": plan.global_batch_size,
        "points": points,
    }


def panel_of(row: dict[str, Any]) -> Panel:
    """A front: bytes to the right, and upwards how many times the fastest step, doubling."""
    points = row["points"]
    fastest = min(point["step_seconds"] for point in points)
    most = max(point["peak_bytes"] for point in points) / 1e9
    top = max(1, ceil(log2(max(point["step_seconds"] for point in points) / fastest)))
    ticks = [(float(n), f"{2**n} x" if n else format_seconds(fastest)) for n in range(top + 1)]
    panel = Panel(
        f"{row['model']}, {row['cluster']}",
        "peak per device, GB",
        "step",
        (0, 1.1 * most),
        (-0.2, top + 0.2),
        y_ticks=ticks,
    )
    placed = [(p["peak_bytes"] / 1e9, log2(p["step_seconds"] / fastest)) for p in points]
    panel.line(placed, FAINT, "front")
    for point, (x, y) in zip(points, placed, strict=True):
        said = f"{format_bytes(point['peak_bytes'])}, {format_seconds(point['step_seconds'])}"
        panel.point(x, y, COLORS[point["name"]], f"{point['name'] or 'front'}: {said}")
    return panel


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("plans", nargs="+", metavar="PLAN")
    options = parser.parse_args(argv)
    rows = [row_of(Plan.load(path)) for path in options.plans]
    note = "compiled peaks; steps are simulated, as many times the fastest one"
    svg = draw("Memory against time", note, [*map(panel_of, rows)], 3, LEGEND)
    return finish("fronts", rows, options, svg)


if __name__ == "__main__":
    sys.exit(main())
