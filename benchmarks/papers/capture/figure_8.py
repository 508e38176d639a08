"""Figure 8: memory gained against throughput lost, for the hybrid scenarios; and the plan that
keeps 90 % of Alpa's throughput.

    python -m benchmarks.papers.capture.figure_8 -o results/2026-01-31-paper-figure-8.json

Throughput is simulated from the compiled stages of both plans. Beside the plan of least memory
stands the one of least memory on the front of memory and time that keeps at least 90 % of Alpa's
throughput. See ``scenarios.py`` for what is compared.

Paper: 1F1B 11.5 to 42.4 % lost for 18.4 to 43.9 % gained; GPipe over 60 % for 5.6 % (MoE 7.1B),
26.2 % for 20.3 % (GPT-3).
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.drawing import ALPA, OURS, PAPER, Panel, draw
from benchmarks.papers.capture.figure_6 import fitting
from benchmarks.papers.capture.scenarios import (
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

#: (schedule, model, memory gained, throughput lost) as far as the paper's text says them, and its
#: ranges for 1F1B.
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
    document = {
        "model": scenario.model.name,
        "schedule": scenario.schedule,
        "alpa": None,
        "ours": ours.to_json(),
        "keeps": None,
    }
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
                    "-"
                    if plan is None
                    else f"{plan['peak_bytes'] / GIB:.2f}, {plan['step_seconds']:.1f} s"
                    for plan in (r["alpa"], r["ours"])
                ),
                percent(r.get("memory_gained_fraction")),
                percent(r.get("throughput_lost_fraction")),
                "-"
                if keeps is None
                else f"{keeps['peak_bytes'] / GIB:.2f}, {keeps['step_seconds']:.1f} s",
                "-" if keeps is None else percent(keeps["memory_gained_fraction"]),
                "-" if keeps is None else percent(keeps["throughput_lost_fraction"]),
            ]
        )
    kept = f">= {KEPT_THROUGHPUT:.0%} of it"
    return table(
        [
            "scenario",
            "Alpa GiB, step",
            "ours GiB, step",
            "gained",
            "lost",
            f"plan with {kept}",
            "gained",
            "lost",
        ],
        lines,
    )


def figure(rows: list[dict[str, Any]]) -> str | None:
    panels = []
    for schedule, name in SCHEDULE_NAMES.items():
        shown = [r for r in rows if r["schedule"] == schedule and r["alpa"]]
        if not shown:
            continue
        panel = Panel(name, "", "%", (-0.6, len(shown) - 0.4), (0, 80), width=520, height=320)
        panel.x_ticks = [(i, r["model"]) for i, r in enumerate(shown)]
        for i, r in enumerate(shown):
            bars = [
                ("memory gained", r["memory_gained_fraction"], OURS, 1.0),
                ("throughput lost", r["throughput_lost_fraction"], ALPA, 1.0),
            ]
            if r["keeps"] is not None:
                bars += [
                    ("memory gained, fast", r["keeps"]["memory_gained_fraction"], OURS, 0.5),
                    ("throughput lost, fast", r["keeps"]["throughput_lost_fraction"], ALPA, 0.5),
                ]
            for k, (what, fraction, color, opacity) in enumerate(bars):
                left, percents = i - 0.42 + 0.21 * k, 100 * max(fraction, 0)
                panel.bar(
                    left,
                    left + 0.19,
                    percents,
                    color,
                    f"{r['model']}, {what}: {fraction:.1%}",
                    opacity,
                )
                panel.note(left + 0.095, percents + 1.5, f"{100 * fraction:.1f}")
            for known, model, *fractions in PAPER_POINTS:
                if known == schedule and r["model"].startswith(model):
                    for k, fraction in enumerate(fractions):
                        left = i - 0.42 + 0.21 * k
                        panel.box(
                            (left, left + 0.19),
                            (100 * fraction - 0.5, 100 * fraction + 0.5),
                            PAPER,
                            f"paper: {fraction:.1%}",
                            1.0,
                        )
        for k, (low, high) in enumerate(PAPER_RANGES.get(schedule, ())):
            color = (OURS, ALPA)[k]
            panel.box(
                (-0.58 + 0.06 * k, -0.53 + 0.06 * k),
                (100 * low, 100 * high),
                color,
                f"paper: {low:.1%} to {high:.1%}",
                0.6,
            )
        panels.append(panel)
    legend = [
        (OURS, "memory gained"),
        (ALPA, f"throughput lost (pale: the plan that keeps {KEPT_THROUGHPUT:.0%} of it)"),
        (PAPER, "the paper, where its text has a number; at the left its ranges"),
    ]
    note = (
        "Against Alpa's algorithm on our cost model; compiled memory, simulated throughput, A100 "
        "40 GB, 4 x 4."
    )
    return (
        draw("Memory gained against throughput lost (CAPTURE, Figure 8)", note, panels, 2, legend)
        if panels
        else None
    )


if __name__ == "__main__":
    sys.exit(main())
