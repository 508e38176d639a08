"""Figure 1: what decides the time of an update: use of the device, memory and independence, by the
degree of fusion.

    python -m benchmarks.papers.mutwo.figure_1 [--store FILE] -o RESULT.json

Eight models of BERT on an A100-40G with the link of Table C, in sub-arrays of 1, 2, 4 or 8. *Use*
is FLOPs of matrix products over what the device computes in the seconds of the programs; *memory*
the peak with everything retained; *independence* the part of the programs that belong to other
sub-arrays than the one whose feature maps are fetched. The last panel is what comes of them: the
simulated update within the memory, multiplexed and in turn.

Paper: complete fusion uses the device best and needs most memory, no fusion is the other way round,
and the best lies between.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.drawing import ALPA, OURS, Panel, draw
from benchmarks.papers.mutwo.settings import (
    UNLIMITED,
    Case,
    arguments,
    finish,
    kernels_of,
    prepare,
)
from capture.measured.store import Store
from capture.plan.array import Order
from recommender.mutwo.descent import descend
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.ways import Way, placed

if TYPE_CHECKING:
    from capture.profiler.array import ArrayProfile

CASE, COUNT, DEGREES = Case("BERT", 16, "a100-40g"), 8, (1, 2, 4, 8)


def row_of(profile: ArrayProfile, problem: ArrayProblem, degree: int) -> dict[str, Any]:
    seconds = profile.seconds_of(degree)
    flops = sum(one.count * one.flops for one in kernels_of(profile, degree))
    rate = profile.machine.rates.rate_of("float32", "default").value
    parts = COUNT // degree
    orders: list[Order] = ["in turn", "multiplexed"] if parts > 1 else ["in turn"]
    spaces = {order: problem.space(Way(placed((degree,) * parts), order)) for order in orders}
    found = {order: descend(space, budget=400)[1] for order, space in spaces.items()}
    free = {
        order: space.weigh(space.retained, UNLIMITED).peak_bytes for order, space in spaces.items()
    }
    return {
        "degree": degree,
        "utilisation": flops / seconds / rate,
        "independence": 1 - 1 / parts,
        "program_seconds": parts * seconds,
        "unlimited_peak_bytes": free,
        "step_seconds": {order: one.seconds if one.fits else None for order, one in found.items()},
        "limit_bytes": problem.limit_bytes,
    }


def panels_of(rows: list[dict[str, Any]]) -> list[Panel]:
    ticks = [(x, str(row["degree"])) for x, row in enumerate(rows)]

    def panel(title: str, label: str, series: dict[str, list[float | None]]) -> Panel:
        top = max(v for values in series.values() for v in values if v is not None)
        made = Panel(title, "models fused", label, (-0.3, len(rows) - 0.7), (0, 1.15 * top), ticks)
        for name, values in series.items():
            points = [(x, value) for x, value in enumerate(values) if value is not None]
            made.line(points, COLOURS[name], name)
            for x, value in points:
                made.point(x, value, COLOURS[name], f"{name}, {ticks[x][1]} fused: {value:.4g}")
        return made

    def by_order(key: str, factor: float) -> dict[str, list[float | None]]:
        values = {order: [row[key].get(order) for row in rows] for order in COLOURS}
        return {
            order: [None if one is None else factor * one for one in own]
            for order, own in values.items()
        }

    memory = panel("memory, all retained", "GB", by_order("unlimited_peak_bytes", 1e-9))
    memory.level(rows[0]["limit_bytes"] / 1e9, "#333333")
    return [
        panel("use of the device", "of its rate", {"in turn": [r["utilisation"] for r in rows]}),
        memory,
        panel(
            "independence", "of the programs", {"multiplexed": [r["independence"] for r in rows]}
        ),
        panel("an update, within memory", "ms", by_order("step_seconds", 1e3)),
    ]


COLOURS = {"in turn": ALPA, "multiplexed": OURS}


def main() -> int:
    options = arguments(__doc__).parse_args()
    prepare([CASE.target])
    profile = CASE.profile(Store(options.store))
    problem = CASE.problem(profile, COUNT)
    rows = []
    for degree in DEGREES:
        rows.append(row_of(profile, problem, degree))
        print(rows[-1], file=sys.stderr, flush=True)
    svg = draw(
        "What decides the time of an update (mu-TWO, Figure 1)",
        f"{COUNT} models of BERT, batch {CASE.batch_size}; simulated for an A100-40G that is not "
        "there. The line is what it lets programs use.",
        panels_of(rows),
        4,
        [(color, order) for order, color in COLOURS.items()],
    )
    claims = {
        str(row["degree"]): {
            key: row[key] for key in ("utilisation", "independence", "step_seconds")
        }
        for row in rows
    }
    paper = "complete fusion: most use and most memory; none: least; the best lies between"
    return finish("mutwo_figure_1", rows, options, svg, claims=claims, paper={"trade-off": paper})


if __name__ == "__main__":
    sys.exit(main())
