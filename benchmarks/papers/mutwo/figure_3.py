"""Figure 3: how long feature maps rest, how memory rises and falls, and what four models need.

    python -m benchmarks.papers.mutwo.figure_3 [--store FILE] -o RESULT.json

(a) and (b): one BERT of 32 examples on an A100-40G, every feature map retained: seconds between its
last use forward and its first use backward, and live bytes beside the programs of the step. (c):
four models of Table 1 as one program, at both batch sizes, beside what an A100-40G lets programs
use. Programs are compiled for a device that is not there; bytes are replayed, seconds simulated.

Paper: feature maps are idle for long, memory rises through the forward pass and falls through the
backward pass (insight I3), and four fused models exceed the memory, each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.drawing import ALPA, COLORS, OURS, Panel, draw, grouped_bars
from benchmarks.papers.mutwo.settings import (
    MODELS,
    UNLIMITED,
    Case,
    arguments,
    finish,
    prepare,
)
from capture.measured.store import Store
from capture.step.program import Run, replay
from capture.step.sub_array import Uses, movable
from recommender.mutwo.problem import Space
from recommender.mutwo.ways import Way, placed

TARGET, BATCH_SIZE, FUSED = "a100-40g", 32, 4


def all_fused(case: Case, store: Store, count: int) -> Space:
    profile = case.profile(store)
    return case.problem(profile, count).space(Way(placed((count,)), "in turn"))


def idle_rows(space: Space) -> list[dict[str, Any]]:
    """Of feature maps: when they rest, on the clock of the programs."""
    profiled = space.problem.profiled
    array = profiled.sub_array(1)
    uses = Uses(array)
    ends, clock = [], 0.0
    for issued in uses.issued:
        clock += profiled.facts(array, issued.call).seconds
        ends.append(clock)
    rows = []
    for number in movable(array):
        bundle = array.bundles[number]
        first = next(reader for reader in bundle.readers if reader >= array.num_layers)
        rests, wakes = ends[uses.last_forward[number]], ends[first - 1]
        rows.append(
            {
                "bundle": bundle.name,
                "nbytes": bundle.nbytes,
                "from_seconds": rests,
                "to_seconds": wakes,
                "step_seconds": clock,
            }
        )
    return rows


def memory_rows(space: Space) -> list[dict[str, Any]]:
    """Most bytes while every program runs."""
    step = space.evaluate(space.retained, UNLIMITED).steps.body
    runs = [one.label for one in step.instructions if isinstance(one, Run)]
    most = dict.fromkeys(runs, 0)
    for label, _, nbytes in replay(step, record_timeline=True).timeline:
        if label in most:
            most[label] = max(most[label], nbytes)
    return [{"program": label, "bytes": nbytes} for label, nbytes in most.items()]


def array_rows(store: Store, models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of four fused models."""
    for model in models:
        for batch_size in MODELS[model][1]:
            space = all_fused(Case(model, batch_size, TARGET), store, FUSED)
            peak = space.weigh(space.retained, UNLIMITED).peak_bytes
            row = {
                "model": model,
                "batch_size": batch_size,
                "peak_bytes": peak,
                "limit_bytes": space.problem.limit_bytes,
            }
            print(row, file=sys.stderr, flush=True)
            yield row


def _risen(nbytes: Sequence[int]) -> str:
    rises = sum(one < other for one, other in pairwise(nbytes))
    return f"{rises} of {len(nbytes) - 1}"


def panels_of(
    idle: Sequence[dict[str, Any]],
    memory: Sequence[dict[str, Any]],
    arrays: Sequence[dict[str, Any]],
) -> list[Panel]:
    whole = 1e3 * idle[0]["step_seconds"]
    rests = Panel(
        "(a) feature maps at rest", "ms of a step", "feature map", (0, whole), (0, len(idle)),
        width=440, height=330,
    )  # fmt: skip
    for n, row in enumerate(idle):
        span = 1e3 * row["from_seconds"], 1e3 * row["to_seconds"]
        about = f"{row['bundle']}, {row['nbytes'] / 1e6:.0f} MB: {span[1] - span[0]:.1f} ms"
        rests.box(span, (n, n + 1), ALPA, about, 0.9)
    top = max(row["bytes"] for row in memory) / 1e9
    rises = Panel(
        "(b) memory", "program of a step", "GB", (0, len(memory)), (0, 1.1 * top),
        width=440, height=330,
    )  # fmt: skip
    rises.line([(n, row["bytes"] / 1e9) for n, row in enumerate(memory)], OURS, "while it runs")
    rises.note(len(memory) / 4, 0.05 * top, "forward")
    rises.note(3 * len(memory) / 4, 0.05 * top, "backward")
    groups = []
    for model in dict.fromkeys(row["model"] for row in arrays):
        own = [row for row in arrays if row["model"] == model]
        sizes = zip(("smaller batch", "larger batch"), own, strict=False)
        groups.append((model, {name: row["peak_bytes"] / 1e9 for name, row in sizes}))
    fused = grouped_bars("(c) four models as one program", "GB", groups, 440, 330)
    fused.level(arrays[0]["limit_bytes"] / 1e9, "#333333")
    return [rests, rises, fused]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, help="of (c), instead of all")
    options = parser.parse_args()
    prepare([TARGET])
    store = Store(options.store)
    one = all_fused(Case("BERT", BATCH_SIZE, TARGET), store, 1)
    idle, memory = idle_rows(one), memory_rows(one)
    arrays = list(array_rows(store, options.models or list(MODELS)))
    panels = panels_of(idle, memory, arrays)
    svg = draw(
        "Memory of training (mu-TWO, Figure 3)",
        "Compiled for an A100-40G that is not there; bytes replayed, seconds simulated. The line "
        "is what it lets programs use.",
        panels,
        3,
        [(COLORS[0], "smaller batch"), (COLORS[1], "larger batch")],
    )
    spans = [(row["to_seconds"] - row["from_seconds"]) / row["step_seconds"] for row in idle]
    nbytes = [row["bytes"] for row in memory]
    half = len(nbytes) // 2
    claims = {
        "feature maps rest for, of a step": [min(spans), sum(spans) / len(spans), max(spans)],
        "programs forward at which memory rises": _risen(nbytes[:half]),
        "programs backward at which memory falls": _risen(nbytes[half:][::-1]),
        "four fused models over the limit": {
            f"{row['model']}, batch {row['batch_size']}": row["peak_bytes"] / row["limit_bytes"]
            for row in arrays
        },
    }
    paper = {
        "memory": "rises through the forward pass, and falls through the backward pass",
        "four fused models": "exceed an A100-40G for all of these models",
    }
    rows = [*idle, *memory, *arrays]
    return finish("mutwo_figure_3", rows, options, svg, claims=claims, paper=paper)


if __name__ == "__main__":
    sys.exit(main())
