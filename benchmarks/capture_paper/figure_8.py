"""Figure 8: memory gained against throughput lost, for the hybrid scenarios; and the plan that keeps 90 % of Alpa's throughput.

    python benchmarks/capture_paper/figure_8.py -o benchmarks/results/2026-01-31-paper-figure-8.json

Throughput is simulated from the compiled stages of both plans. Beside the plan of least memory stands the one of least memory on the front
of memory and time that keeps at least 90 % of Alpa's throughput. See ``scenarios.py`` for what is compared.

Paper: 1F1B 11.5 to 42.4 % lost for 18.4 to 43.9 % gained; GPipe over 60 % for 5.6 % (MoE 7.1B), 26.2 % for 20.3 % (GPT-3).
"""

from __future__ import annotations

import sys
from typing import Any

from drawing import ALPA, OURS, PAPER, Panel, draw
from figure_6 import fitting
from scenarios import (
    GIB,
    KEPT_THROUGHPUT,
    SCENARIOS,
    SCHEDULE_NAMES,
    Planned,
    Planner,
    Scenario,
    arguments,
    finish,
    is_chosen,
    percent,
    prepare,
    profiled,
)

#: (schedule, model, memory gained, throughput lost) as far as the paper's text says them, and its ranges for 1F1B.
PAPER_POINTS = (("gpipe", "MoE 7.1B", 0.056, 0.60), ("gpipe", "GPT-3", 0.203, 0.262))
PAPER_RANGES = {"1f1b": ((0.184, 0.439), (0.115, 0.424))}


def main() -> int:
    options = arguments(__doc__).parse_args()
    prepare()
    rows = []
    for scenario in SCENARIOS:
        if scenario.is_hybrid and is_chosen(scenario.model, options):
            print(scenario.name, file=sys.stderr)
            rows.append(row(scenario, options))
    return finish("paper_figure_8", rows, options, as_text(rows), figure(rows))


def row(scenario: Scenario, options: Any) -> dict[str, Any]:
    planner = Planner(profiled(scenario.model, options), scenario)
    alpa, _ = fitting(planner, planner.alpa())
    ours, _ = planner.ours()
    document = {"model": scenario.model.name, "schedule": scenario.schedule, "alpa": None, "ours": ours.to_json(), "keeps": None}
    if alpa is None:
        return document
    keeps = planner.fast_enough(alpa)
    return {
        **document,
        "alpa": alpa.to_json(),
        **against(ours, alpa),
        "keeps": None if keeps is None else {**keeps.to_json(), **against(keeps, alpa)},
    }


def against(plan: Planned, alpa: Planned) -> dict[str, float]:
    """Memory gained and throughput lost, as fractions of Alpa's."""
    return {
        "memory_gained_fraction": 1 - plan.peak_bytes / alpa.peak_bytes,
        "throughput_lost_fraction": 1 - alpa.step_seconds / plan.step_seconds,
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    from capture.cli.output import table

    lines = []
    for r in rows:
        keeps = r["keeps"]
        lines.append(
            [
                f"{r['model']}, {r['schedule']}",
                *(
                    "-" if plan is None else f"{plan['peak_bytes'] / GIB:.2f}, {plan['step_seconds']:.1f} s"
                    for plan in (r["alpa"], r["ours"])
                ),
                percent(r.get("memory_gained_fraction")),
                percent(r.get("throughput_lost_fraction")),
                "-" if keeps is None else f"{keeps['peak_bytes'] / GIB:.2f}, {keeps['step_seconds']:.1f} s",
                "-" if keeps is None else percent(keeps["memory_gained_fraction"]),
                "-" if keeps is None else percent(keeps["throughput_lost_fraction"]),
            ]
        )
    kept = f">= {KEPT_THROUGHPUT:.0%} of it"
    return table(["scenario", "Alpa GiB, step", "ours GiB, step", "gained", "lost", f"plan with {kept}", "gained", "lost"], lines)


def figure(rows: list[dict[str, Any]]) -> str | None:
    panels = []
    lost = [r["throughput_lost_fraction"] for r in rows if r["alpa"]] + [0.65]
    for schedule, name in SCHEDULE_NAMES.items():
        panel = Panel(name, "throughput lost (%)", "memory gained (%)", (-20, 100 * max(lost) + 12), (-5, 80), width=520, height=340)
        for known, model, gained, slower in PAPER_POINTS:
            if known == schedule:
                panel.point(100 * slower, 100 * gained, PAPER, f"{model} (paper)", f"paper: {gained:.1%} for {slower:.1%}", anchor="end")
        if schedule in PAPER_RANGES:
            (low, high), (fast, slow) = PAPER_RANGES[schedule]
            panel.box((100 * fast, 100 * slow), (100 * low, 100 * high), PAPER, "the paper's range")
        for r in rows:
            if r["schedule"] != schedule or r["alpa"] is None:
                continue
            for color, plan in ((OURS, r), (ALPA, r["keeps"])):
                if plan is not None:
                    gained, slower = plan["memory_gained_fraction"], plan["throughput_lost_fraction"]
                    panel.point(100 * slower, 100 * gained, color, r["model"], f"{r['model']}: {gained:.1%} gained for {slower:.1%} lost")
        panels.append(panel)
    legend = [(OURS, "least memory"), (ALPA, f"least memory that keeps {KEPT_THROUGHPUT:.0%} of the throughput"), (PAPER, "the paper")]
    note = "Against Alpa's algorithm on our cost model; compiled memory, simulated throughput, A100 40 GB, 4 x 4."
    return draw("Memory gained against throughput lost (CAPTURE, Figure 8)", note, panels, 2, legend) if rows else None


if __name__ == "__main__":
    sys.exit(main())
