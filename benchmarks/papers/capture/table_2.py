"""Table II: how long profiling and planning take, of the three largest models; and planning alone,
of all six.

    python -m benchmarks.papers.capture.table_2 -o benchmarks/results/2026-01-31-paper-table-2.json

Profiling is that of an empty store (the first run of any of these scripts makes it, and keeps the
seconds). Of a profile that was interrupted they are estimated, from the seconds of its
measurements, and marked with ~. Planning is one call of ``recommend``, the median of five. No
calibration plans are compiled, since no interval is asked for. The layer merger cuts between 16
merged layers alone; equal layers share their measurements here, so it saves no profiling. "Alpa" is
the same profile and Alpa's algorithm on it.

Paper: on 16 A100 GPUs, 1F1B; MoE's planning time is printed as 00:05:94.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.drawing import OURS, PAPER, Panel, draw
from benchmarks.papers.capture.scenarios import (
    CLUSTER,
    LARGEST,
    MODELS,
    Model,
    arguments,
    finish,
    is_chosen,
    prepare,
    profiled,
)
from capture.papers.alpa.autostage import autostage
from recommender import PlanQuestion, recommend

#: Seconds: profiling, planning, total without the merger; total with 16 merged layers; Alpa's
#: total.
PAPER_SECONDS = {
    "GPT-3 6.7B": {
        "profiling": 33607,
        "planning": 1878,
        "total": 35485,
        "total_merged": 19444,
        "alpa_total": 13992,
    },
    "MoE 7.1B": {
        "profiling": 14253,
        "planning": 394,
        "total": 14647,
        "total_merged": 14647,
        "alpa_total": 11230,
    },
    "Wide-ResNet 2B": {
        "profiling": 27910,
        "planning": 17,
        "total": 28945,
        "total_merged": 15860,
        "alpa_total": 11079,
    },
}
MERGED_LAYERS = 16
NUM_REPEATS = 5
COLUMNS = ("profiling", "planning", "total", f"total, {MERGED_LAYERS} merged", "Alpa's total")


def main() -> int:
    options = arguments(__doc__).parse_args()
    prepare()
    rows = [row(model, options) for model in MODELS.values() if is_chosen(model, options)]
    return finish("paper_table_2", rows, options, as_text(rows), figure(rows))


def row(model: Model, options: Any) -> dict[str, Any]:
    found = profiled(model, options)
    asked: dict[str, Any] = {
        "global_batch_size": model.global_batch,
        "num_microbatches": model.num_microbatches,
    }
    question = {**asked, "whole_nodes": True}
    planned = {
        s: seconds_of(
            lambda s=s: recommend(found.profile, PlanQuestion(CLUSTER, schedule=s, **question))
        )
        for s in ("1f1b", "gpipe")
    }
    merged = seconds_of(
        lambda: recommend(
            found.profile, PlanQuestion(CLUSTER, merge_layers=MERGED_LAYERS, **question)
        )
    )
    alpa = seconds_of(lambda: autostage(found.profile, PlanQuestion(CLUSTER, **asked)))
    profiling = found.seconds
    return {
        "model": model.name,
        "num_layers": found.profile.graph.num_layers,
        "num_measurements": len(found.profile.measurements),
        "profiling_seconds": profiling,
        "is_profiled_in_one_go": found.is_whole,
        "planning_seconds": planned["1f1b"],
        "planning_gpipe_seconds": planned["gpipe"],
        "planning_merged_seconds": merged,
        "total_seconds": profiling + planned["1f1b"],
        "total_merged_seconds": profiling + merged,
        "alpa_planning_seconds": alpa,
        "alpa_total_seconds": profiling + alpa,
        "paper_seconds": PAPER_SECONDS.get(model.name),
    }


def seconds_of(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)


def as_text(rows: list[dict[str, Any]]) -> str:
    from capture.cli.output import table

    lines = []
    for r in rows:
        paper = r["paper_seconds"] or {}
        pairs = [
            (r["profiling_seconds"], paper.get("profiling")),
            (r["planning_seconds"], paper.get("planning")),
            (r["total_seconds"], paper.get("total")),
            (r["total_merged_seconds"], paper.get("total_merged")),
            (r["alpa_total_seconds"], paper.get("alpa_total")),
        ]
        about = [
            "" if r["is_profiled_in_one_go"] or name == "planning" else "~" for name in COLUMNS
        ]
        lines.append(
            [
                r["model"],
                *(
                    f"{sign}{clock(ours)} ({clock(theirs)})"
                    for sign, (ours, theirs) in zip(about, pairs, strict=True)
                ),
            ]
        )
    return table(["model, ours (paper's)", *COLUMNS], lines)


def clock(seconds: float | None) -> str:
    """Minutes and seconds of what is long, the number of what is short."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def figure(rows: list[dict[str, Any]]) -> str | None:
    shown = [r for r in rows if r["model"] in LARGEST]
    if not shown:
        return None
    most = max(r["paper_seconds"]["total"] for r in shown) / 3600
    panel = Panel(
        "Time to a plan, 1F1B",
        "",
        "hours",
        (-0.6, len(shown) - 0.4),
        (0, 1.15 * most),
        width=560,
        height=330,
    )
    panel.x_ticks = [(i, r["model"]) for i, r in enumerate(shown)]
    for i, r in enumerate(shown):
        bars = [
            (PAPER, 1.0, r["paper_seconds"]["total"], "CAPTURE, paper"),
            (PAPER, 0.55, r["paper_seconds"]["alpa_total"], "Alpa, paper"),
            (OURS, 1.0, r["total_seconds"], "here"),
        ]
        for k, (color, opacity, seconds, about) in enumerate(bars):
            left = i - 0.39 + 0.26 * k
            panel.bar(
                left, left + 0.24, seconds / 3600, color, f"{about}: {clock(seconds)}", opacity
            )
            sign = "~" if color == OURS and not r["is_profiled_in_one_go"] else ""
            panel.note(left + 0.12, seconds / 3600 + 0.02 * most, sign + clock(seconds))
    note = "The paper on 16 A100 GPUs: CAPTURE, Alpa (pale). Here: on two CPU cores."
    return draw(
        "Time to a plan (CAPTURE, Table II)",
        note,
        [panel],
        1,
        [(PAPER, "the paper"), (OURS, "here")],
    )


if __name__ == "__main__":
    sys.exit(main())
