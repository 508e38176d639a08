"""Figure 7: what slice granularity does to one gathered operator, for small and large hidden sizes.

    python -m benchmarks.papers.osdp.figure_7 -o benchmarks/results/2026-01-31-osdp-figure-7.json

The operator is a matrix product of width h to 4 h, all of its slices in ZDP mode, on eight RTX
TITAN. Memory is what is resident and what the gather needs; granularity 0 is unsplit, as 1 is
(O-j), and "8192" and "8196" are one size (O-k).

Paper: small sizes slow down with the granularity, large ones save up to 50 % of the memory.
"""

from __future__ import annotations

import sys

from benchmarks.drawing import COLORS, Panel, draw
from benchmarks.papers.osdp.settings import SEQ_LEN, arguments, finish, fitted_overlap, titan
from capture.model.operators import Block, Operator, OperatorModel
from capture.plan.sharding import Mode
from capture.step.operator_cost import StepCost

WIDTHS = ((768, 1024), (8192, 12288))
GRANULARITIES = (0, 4, 8, 16)  # of the paper's axis
BATCH_SIZE = 8


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = [
        row(width, slices)
        for widths in WIDTHS
        for width in widths
        for slices in (*GRANULARITIES, 2)
        if str(width).startswith(options.only or "")
    ]
    rows.sort(key=lambda r: (r["width"], r["granularity"]))
    claims = {}
    for width in dict.fromkeys(r["width"] for r in rows):
        found = {r["granularity"]: r for r in rows if r["width"] == width}
        claims[f"{width}, 16 slices against none"] = {
            "memory_saved_fraction": 1 - found[16]["bytes"] / found[0]["bytes"],
            "slower_fraction": found[16]["seconds"] / found[0]["seconds"] - 1,
        }
    paper = {
        "largest memory_saved_fraction": 0.5,
        "small sizes": "slower with more slices",
        "large sizes": "no slower",
    }
    return finish("osdp_figure_7", rows, options, picture(rows), claims=claims, paper=paper)


def row(width: int, slices: int) -> dict[str, float]:
    stream = SEQ_LEN * width * 4
    product = Operator(
        "product",
        "matmul",
        4 * width * width * 4,
        stream,
        stream,
        4 * stream,
        flops=8 * SEQ_LEN * width * width,
    )
    cost = StepCost(
        OperatorModel("product", (Block((product,)),)), titan(24), overlap_fraction=fitted_overlap()
    )
    granularity = max(1, slices)
    found = cost.cost(product, Mode(granularity, granularity), BATCH_SIZE)
    return {
        "width": width,
        "granularity": slices,
        "seconds": float(found.seconds),
        "bytes": float(found.resident_bytes + found.transient_bytes),
        "transient_bytes": float(found.transient_bytes),
    }


def picture(rows: list[dict[str, float]]) -> str:
    panels, names = [], [width for widths in WIDTHS for width in widths]
    for widths in WIDTHS:
        for column, label, scale in (("seconds", "ms", 1e3), ("bytes", "MB", 1e-6)):
            lines = {
                width: [(r["granularity"], r[column] * scale) for r in rows if r["width"] == width]
                for width in widths
            }
            lines = {width: line for width, line in lines.items() if line}
            if lines:
                most = max(y for line in lines.values() for _, y in line)
                title = f"hidden {' and '.join(map(str, lines))}"
                panel = Panel(
                    title,
                    "slice granularity",
                    label,
                    (0, max(GRANULARITIES)),
                    (0, 1.08 * most),
                    width=420,
                    height=260,
                )
                panel.x_ticks = [(granularity, str(granularity)) for granularity in GRANULARITIES]
                for width, line in lines.items():
                    panel.line(line, COLORS[names.index(width)], str(width))
                panels.append(panel)
    note = (
        "Simulated: one product h x 4h in ZDP mode on eight RTX TITAN, eight examples of 128 "
        "tokens per device."
    )
    return draw(
        "Slice granularity (OSDP, Figure 7)",
        note,
        panels,
        2,
        [(color, str(w)) for color, w in zip(COLORS, names, strict=False)],
    )


if __name__ == "__main__":
    sys.exit(main())
