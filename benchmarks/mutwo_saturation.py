"""Throughput per model against the degree of fusion, and where it stops paying.

    python -m benchmarks.mutwo_saturation [--store FILE] [--target NAME] (--json | -o RESULT.json)

So many models as one program (``vmap``), everything retained and no limit: seconds of an update of
one of them, beside one model alone. Programs are compiled for the target, which need not be there;
seconds are simulated, a roofline by kernel in which none takes less than a launch, and products
fill the device with whole tiles (``capture.machine.tiles``). So what fusion saves here is launches,
and what idle cores could do.

Models of mu-TWO's Table 1 at its smaller batches, and two that leave a device idle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.drawing import COLORS, Panel, draw
from benchmarks.papers.mutwo.settings import (
    MODELS,
    SMALL,
    UNLIMITED,
    Case,
    arguments,
    finish,
    kernels_of,
    prepare,
)
from capture.measured.store import Store
from recommender.mutwo.ways import Way, placed

DEGREES = (1, 2, 4, 8)
#: A degree that saves less of a model's time than this does not pay.
PAYS = 0.02
CASES = {name: batch_sizes[0] for name, (_, batch_sizes) in (MODELS | SMALL).items()}


def rows_of(case: Case, store: Store) -> Iterator[dict[str, Any]]:
    """Of a model, by the degree of fusion."""
    profile, alone = case.profile(store), 0.0
    for degree in DEGREES:
        problem = case.problem(profile, degree)
        space = problem.space(Way(placed((degree,)), "in turn"))
        weighed = space.weigh(space.retained, UNLIMITED)
        kernels, seconds_of = kernels_of(profile, degree), profile.times.kernel_seconds
        floor = profile.machine.rates.kernel_seconds.value
        least = sum(one.count for one in kernels if seconds_of(one) <= floor)
        alone = alone or weighed.seconds
        yield {
            "model": case.model,
            "batch_size": case.batch_size,
            "target": case.target,
            "degree": degree,
            "step_seconds": weighed.seconds,
            "seconds_of_a_model": weighed.seconds / degree,
            "of_one_alone": weighed.seconds / degree / alone,
            "peak_bytes": weighed.peak_bytes,
            "num_kernels": sum(one.count for one in kernels),
            "num_least_kernels": least,
        }


def stops_at(rows: Sequence[dict[str, Any]]) -> int:
    """The degree from which on twice as many save less than ``PAYS``."""
    for row, more in pairwise(rows):
        if more["seconds_of_a_model"] > (1 - PAYS) * row["seconds_of_a_model"]:
            return row["degree"]
    return rows[-1]["degree"]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--target", default="a100-40g", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="*", choices=CASES, help="instead of all")
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    options = parser.parse_args()
    if not (options.json or options.output):
        parser.error("give --json, or -o FILE")
    prepare([options.target])
    store, rows = Store(options.store), list[dict[str, Any]]()
    for name in options.models or CASES:
        rows += rows_of(Case(name, CASES[name], options.target), store)
        print(rows[-1], file=sys.stderr, flush=True)
    by_model = {name: [row for row in rows if row["model"] == name] for name in CASES}
    by_model = {name: own for name, own in by_model.items() if own}
    claims = {
        name: {
            "of_one_alone": {row["degree"]: round(row["of_one_alone"], 3) for row in own},
            "stops_paying_at": stops_at(own),
            "least_kernels_alone": own[0]["num_least_kernels"] / own[0]["num_kernels"],
        }
        for name, own in by_model.items()
    }
    ticks = [(x, str(degree)) for x, degree in enumerate(DEGREES)]
    panel = Panel(
        f"on {options.target}", "models that are one program", "time of a model, of one alone",
        (-0.2, len(DEGREES) - 0.8), (0, 1.1), ticks, width=620, height=380,
    )  # fmt: skip
    colors = dict(zip(by_model, COLORS, strict=False))
    for name, own in by_model.items():
        points = [(x, row["of_one_alone"]) for x, row in enumerate(own)]
        panel.line(points, colors[name], name)
        for x, value in points:
            about = f"{name}, {own[x]['degree']} fused: {value:.3f}"
            panel.point(x, value, colors[name], about)
    svg = draw(
        "Where fusion stops paying",
        "Simulated: compiled for a device that is not there, a roofline by kernel.",
        [panel],
        1,
        [(color, name) for name, color in colors.items()],
    )
    return finish("mutwo_saturation", rows, options, svg, claims=claims)


if __name__ == "__main__":
    sys.exit(main())
