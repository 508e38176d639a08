"""Figure 8: speed of an update over HFTA-NoMemOpt, against the number of models.

    python -m benchmarks.papers.mutwo.figure_8 [--store FILE] [--cases NAME ...] -o RESULT.json

Models of Table 1 on an A100-40G and a V100-32G with the links and hosts of Table C, and on a B200,
an H200 and a GH200 with their own; float32 as the compiler computes it (TF32 on an A100). Programs
are compiled for their target, seconds are simulated: a roofline by kernel, in which no kernel takes
less than a launch, and products fill the device with whole tiles. What launches cost decides what
fusion is for, so BERT and ViT are also weighed as if no kernel took less than 100 us, as where a
framework issues operations one by one.

HFTA-NoMemOpt trains the largest subsets that fit, one after the other; HFTA-Capuchin all models
fused, with swaps and recomputation; ``multiplexed`` is the best of multiplexed sub-arrays,
``mu-TWO`` the answer of the search, in which sub-arrays may also take turns.

Paper: up to 3x over HFTA-NoMemOpt, rising with the number of models, and always above
HFTA-Capuchin; less than half of its part of recomputation, and two to three times as much of its
swaps behind computation.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.drawing import ALPA, COLORS, OURS, PAPER, Panel, draw
from benchmarks.papers.mutwo.settings import (
    Case,
    Compiled,
    arguments,
    finish,
    prepare,
    result_of,
    with_floor,
)
from capture.measured.store import Store
from capture.papers.mutwo.baselines import all_baselines
from recommender.mutwo.descent import descend
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.search import ArrayBaseline, search
from recommender.mutwo.ways import ways

#: Name -> the case, numbers of models, and least seconds of kernels beside the target's.
CASES: dict[str, tuple[Case, Sequence[int], Sequence[float]]] = {
    "a BERT": (Case("BERT", 16, "a100-40g"), (2, 4, 8, 16), (100e-6,)),
    "b GPT2": (Case("GPT2", 8, "a100-40g"), (2, 4, 8), ()),
    "c ViT": (Case("ViT", 8, "a100-40g"), (8, 16, 32, 64), (100e-6,)),
    "d Recommender": (Case("Recommender", 512, "a100-40g"), (32, 64, 128), ()),
    "e ResNet101": (Case("ResNet101", 48, "a100-40g"), (2, 4, 8), ()),
    "f MobileNet": (Case("MobileNet", 64, "a100-40g"), (2, 4, 8), ()),
    "g BERT, V100": (Case("BERT", 12, "v100-32g"), (2, 4, 8, 16), ()),
    "h Recommender, V100": (Case("Recommender", 384, "v100-32g"), (32, 64, 128), ()),
    "BERT, H200": (Case("BERT", 24, "h200"), (8, 16), ()),
    "BERT, B200": (Case("BERT", 24, "b200"), (8, 16), ()),
    "BERT, GH200": (Case("BERT", 24, "gh200"), (8, 16), ()),
}
SERIES = {
    "HFTA-NoMemOpt": ALPA,
    "HFTA-Capuchin": PAPER,
    "multiplexed": COLORS[3],
    "mu-TWO": OURS,
}


def rows_of(name: str, store: Store) -> Iterator[dict[str, Any]]:
    """Of a case, at every number of models."""
    case, counts, floors = CASES[name]
    compiled = Compiled()
    plain = case.profile(store, compiled)
    for count in counts:
        for floor in (None, *floors):
            profile = plain if floor is None else with_floor(plain, floor)
            begun = time.perf_counter()
            row = row_of(case.problem(profile, count))
            yield {
                "name": name,
                "model": case.model,
                "batch_size": case.batch_size,
                "target": case.target,
                "num_models": count,
                "kernel_seconds": profile.times.rates.kernel_seconds.value,
                **row,
                "num_compiled": compiled.num_compiled,
                "compile_seconds": compiled.compile_seconds,
                "seconds": time.perf_counter() - begun,
            }


def row_of(problem: ArrayProblem) -> dict[str, Any]:
    """All systems on the same models."""
    limit = problem.limit_bytes
    best = search(problem).best
    spaces = [problem.space(way) for way in ways(problem.num_models, problem.rule)]
    merged = [space for space in spaces if space.way.order == "multiplexed"]
    found = {space: descend(space, budget=400) for space in merged}
    space = min(merged, key=lambda space: found[space][1])
    systems = {
        "mu-TWO": result_of(best.space, best.chosen, limit),
        "multiplexed": result_of(space, found[space][0], limit),
    }
    baselines = all_baselines(problem)
    systems |= {one.name: _result(one, limit) for one in baselines}
    free = replace(problem, limit_bytes=10**15)
    unlimited = search(free).best
    return {
        "limit_bytes": limit,
        "host_bytes": problem.host_bytes,
        "unlimited_step_seconds": unlimited.weighed.seconds,
        "unlimited_peak_bytes": unlimited.weighed.peak_bytes,
        "systems": systems,
    }


def _result(one: ArrayBaseline, limit: int) -> dict[str, Any]:
    """Rounds have no step of all models; what is too large has no seconds."""
    if not one.in_rounds and one.fits:
        return result_of(one.space, one.chosen, limit) | {"sizes": list(one.sizes)}
    return one.to_json()


def speedup(row: dict[str, Any], name: str) -> float | None:
    """Over HFTA-NoMemOpt; None where one of both does not fit."""
    seconds = row["systems"][name]["step_seconds"]
    others = row["systems"]["HFTA-NoMemOpt"]["step_seconds"]
    fits = row["systems"][name]["fits"] and row["systems"]["HFTA-NoMemOpt"]["fits"]
    return others / seconds if fits and seconds and others else None


def claims_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The text's, of arrays of every case; ratios where both have some."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        for floor in sorted({row["kernel_seconds"] for row in rows if row["name"] == name}):
            own = [row for row in rows if (row["name"], row["kernel_seconds"]) == (name, floor)]
            found[f"{name}, kernels of {1e6 * floor:g} us or more"] = {
                "mu-TWO over HFTA-NoMemOpt": _by_count(own, lambda row: speedup(row, "mu-TWO")),
                "multiplexed over HFTA-NoMemOpt": _by_count(
                    own, lambda row: speedup(row, "multiplexed")
                ),
                "HFTA-Capuchin over HFTA-NoMemOpt": _by_count(
                    own, lambda row: speedup(row, "HFTA-Capuchin")
                ),
                "recomputation of multiplexed over that of HFTA-Capuchin": _by_count(
                    own, lambda row: _ratio(row, "recompute_seconds", "compute_seconds")
                ),
                "overlap of multiplexed over that of HFTA-Capuchin": _by_count(
                    own, lambda row: _ratio(row, "overlapped_seconds", "compute_seconds")
                ),
                "unlimited peak over the memory": _by_count(
                    own,
                    lambda row: (
                        row["systems"]["one vmap"]["unlimited_peak_bytes"] / row["limit_bytes"]
                        if "unlimited_peak_bytes" in row["systems"]["one vmap"]
                        else row["systems"]["one vmap"]["peak_bytes"] / row["limit_bytes"]
                    ),
                ),
            }
    return found


def _by_count(
    rows: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float | None]
) -> dict[str, float | None]:
    values = {str(row["num_models"]): of(row) for row in rows}
    return {n: None if value is None else round(value, 3) for n, value in values.items()}


def _ratio(row: dict[str, Any], part: str, whole: str) -> float | None:
    """Of multiplexed sub-arrays over HFTA-Capuchin, as a part of what programs take."""
    ours, others = (row["systems"][name] for name in ("multiplexed", "HFTA-Capuchin"))
    if not (ours["fits"] and others["fits"]) or not others.get(part):
        return None
    return (ours[part] / ours[whole]) / (others[part] / others[whole])


def panels_of(rows: Sequence[dict[str, Any]]) -> Iterator[Panel]:
    for key in dict.fromkeys((row["name"], row["kernel_seconds"]) for row in rows):
        own = [row for row in rows if (row["name"], row["kernel_seconds"]) == key]
        counts = [str(row["num_models"]) for row in own]
        lines = {name: [speedup(row, name) for row in own] for name in SERIES}
        top = max([1.0, *(v for line in lines.values() for v in line if v is not None)])
        title = f"{key[0]}" + (f", {1e6 * key[1]:g} us" if key[1] > 1e-5 else "")
        ticks = list(enumerate(counts))
        panel = Panel(title, "models", "speedup", (-0.3, len(own) - 0.7), (0, 1.12 * top), ticks)
        panel.level(1.0, "#aaaaaa")
        for name, line in lines.items():
            points = [(x, value) for x, value in enumerate(line) if value is not None]
            if len(points) > 1:
                panel.line(points, SERIES[name], name)
            for x, value in points:
                panel.point(x, value, SERIES[name], f"{name}, {counts[x]} models: {value:.3f}")
        yield panel


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--cases", nargs="*", help="instead of all; what the output has of others stays in it"
    )
    options = parser.parse_args()
    names = list(CASES) if options.cases is None else options.cases
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    if names:
        prepare(CASES[name][0].target for name in names)
    rows: list[dict[str, Any]] = []
    if options.output is not None and options.output.exists():  # of cases that are not asked for
        rows = json.loads(options.output.read_text())["rows"]
    store = Store(options.store)
    for name in names:
        rows = [row for row in rows if row["name"] != name]
        for row in rows_of(name, store):
            rows.append(row)
            at = f"{name}, {row['num_models']} models, {1e6 * row['kernel_seconds']:g} us"
            said = {one: round(speedup(row, one) or 0, 3) for one in SERIES}
            print(f"{at}: {said}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    order = list(CASES)
    rows.sort(key=lambda row: (order.index(row["name"]), row["kernel_seconds"], row["num_models"]))
    svg = draw(
        "Speed of an update over HFTA-NoMemOpt (mu-TWO, Figure 8)",
        "Simulated: programs compiled for devices that are not there, a roofline by kernel.",
        list(panels_of(rows)),
        4,
        [(color, name) for name, color in SERIES.items()],
    )
    paper = {
        "mu-TWO over HFTA-NoMemOpt": "up to 3, rising with the number of models",
        "mu-TWO and HFTA-Capuchin": "consistently above",
        "recomputation over that of HFTA-Capuchin": "less than half",
        "overlap over that of HFTA-Capuchin": "2 to 3",
    }
    return finish("mutwo_figure_8", rows, options, svg, claims=claims_of(rows), paper=paper)


if __name__ == "__main__":
    sys.exit(main())
