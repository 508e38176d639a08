"""Figure 6: what each of 16 GPUs needs under Alpa's plan and ours; twelve scenarios.

    python -m benchmarks.papers.capture.figure_6 -o results/2026-01-31-paper-figure-6.json

Per scenario: both plans compiled (and what was predicted), each counted as its own runtime needs
it; the saved fraction of the peak beside the paper's, and that of both plans in Alpa's runtime; and
the proof: the exact search's least peak in our runtime when stages may stand on any devices, so
also where Alpa would put them. The proof is over predicted peaks, which are the compiled ones for
stages that were compiled. See ``scenarios.py`` for what is compared.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.drawing import ALPA, INK, OURS, Panel, draw
from benchmarks.papers.capture.scenarios import (
    GIB,
    PAPER_GAINS,
    SCENARIOS,
    Planned,
    Planner,
    Scenario,
    arguments,
    finish,
    is_chosen,
    percent,
    prepare,
    profiled,
    usable_bytes,
)


def main() -> int:
    options = arguments(__doc__).parse_args()
    prepare()
    rows = []
    for scenario in SCENARIOS:
        if is_chosen(scenario.model, options):
            print(f"({scenario.panel}) {scenario.name}", file=sys.stderr)
            rows.append(row(scenario, options))
    return finish(
        "paper_figure_6", rows, options, as_text(rows), figure(rows), device_bytes=usable_bytes()
    )


def row(scenario: Scenario, options: Any) -> dict[str, Any]:
    planner = Planner(profiled(scenario.model, options), scenario)
    alpa = planner.alpa()
    alpa, restricted = (alpa, False) if not scenario.is_hybrid else fitting(planner, alpa)
    ours, found = planner.ours()
    least, proven = planner.least_bytes()
    low, high = PAPER_GAINS[scenario.schedule, scenario.is_hybrid]
    return {
        "panel": scenario.panel,
        "model": scenario.model.name,
        "schedule": scenario.schedule,
        "is_hybrid": scenario.is_hybrid,
        "num_layers": planner.profile.graph.num_layers,
        "alpa": None if alpa is None else alpa.to_json(),
        "alpa_logical_shapes": "same_as_physical" if restricted else "single_node_model_parallel",
        "ours": ours.to_json(),
        **(
            {"gain_fraction": None, "gain_in_alpas_runtime_fraction": None}
            if alpa is None
            else gains(ours, alpa)
        ),
        "paper_gain_fraction": scenario.paper_gain,
        "paper_gain_range": [low, high],
        "num_plans_compiled": found.why.verified.num_plans,
        "search_seconds": found.proof.seconds,
        "least_predicted_peak_bytes_of_any_order": least,
        "is_proven": proven and found.proof.optimal and found.why.verified.settled,
    }


def gains(ours: Planned, alpa: Planned) -> dict[str, float | None]:
    """The saved fraction of Alpa's peak: by our plan in our runtime, and in Alpa's (None where Alpa
    cannot place it)."""
    in_alpa = None if ours.in_alpa is None else max(ours.in_alpa.peak_bytes_per_device)
    return {
        "gain_fraction": 1 - ours.peak_bytes / alpa.peak_bytes,
        "gain_in_alpas_runtime_fraction": None
        if in_alpa is None
        else 1 - in_alpa / alpa.peak_bytes,
    }


def fitting(planner: Planner, alpa: Planned | None) -> tuple[Planned | None, bool]:
    """Alpa's plan, or, where that runs out of memory, the one of its space of physical shapes, as
    the paper did for Wide-ResNet 2B."""
    if alpa is not None and alpa.peak_bytes <= usable_bytes():
        return alpa, False
    other = planner.alpa(logical_shapes="same_as_physical")
    if other is None or (alpa is not None and other.peak_bytes >= alpa.peak_bytes):
        return alpa, False
    return other, True


def as_text(rows: list[dict[str, Any]]) -> str:
    from capture.cli.output import table

    lines = []
    for r in rows:
        alpa, ours = r["alpa"], r["ours"]
        paper = percent(r["paper_gain_fraction"])
        if r["paper_gain_fraction"] is None:
            paper = " to ".join(map(percent, r["paper_gain_range"]))
        lines.append(
            [
                f"{r['panel']} {r['model']}, {'hybrid' if r['is_hybrid'] else 'pipelining'}, "
                f"{r['schedule']}",
                "-"
                if alpa is None
                else f"{alpa['peak_bytes'] / GIB:.2f}" + ("" if alpa["fits"] else " OOM"),
                f"{ours['peak_bytes'] / GIB:.2f}" + ("" if ours["fits"] else " OOM"),
                percent(r["gain_fraction"]),
                percent(r.get("gain_in_alpas_runtime_fraction")),
                paper,
                f"{r['least_predicted_peak_bytes_of_any_order'] / GIB:.2f}"
                + (" proven" if r["is_proven"] else ""),
                "-"
                if alpa is None
                else f"{alpa['total_bytes'] / GIB:.0f} -> {ours['total_bytes'] / GIB:.0f}",
            ]
        )
    return table(
        [
            "scenario",
            "Alpa GiB",
            "ours GiB",
            "gain",
            "both in Alpa's",
            "paper's gain",
            "least of all plans",
            "all GPUs GiB",
        ],
        lines,
    )


def figure(rows: list[dict[str, Any]]) -> str | None:
    panels = []
    for r in rows:
        both = [("alpa", r["alpa"], ALPA, -0.4), ("ours", r["ours"], OURS, 0.0)]
        found = [
            (name, plan, color, shift) for name, plan, color, shift in both if plan is not None
        ]
        top = max(plan["peak_bytes"] for _, plan, _, _ in found) / GIB
        kind = "hybrid" if r["is_hybrid"] else "pipelining"
        gain = r["gain_fraction"]
        change = "-" if gain is None else "same peak" if abs(gain) < 0.0005 else f"{-gain:+.1%}"
        panel = Panel(
            f"({r['panel']}) {r['model'].split(',')[0]}, {kind}: {change}",
            "GPU",
            "GiB",
            (-0.6, 15.6),
            (0, 1.12 * top),
        )
        panel.x_ticks = [(device, str(device)) for device in range(16)]
        for name, plan, color, shift in found:
            predicted = plan["predicted_peak_bytes_per_device"]
            for device, nbytes in enumerate(plan["peak_bytes_per_device"]):
                about = f"{name}, GPU {device}: {nbytes / GIB:.2f} GiB compiled"
                about += f", {predicted[device] / GIB:.2f} GiB predicted" if predicted else ""
                panel.bar(device + shift, device + shift + 0.4, nbytes / GIB, color, about)
            panel.level(plan["peak_bytes"] / GIB, color)
        if r["alpa"] is not None and not r["alpa"]["fits"]:
            panel.note(7.5, 1.05 * top, "Alpa's plan does not fit", INK)
        panels.append(panel)
    note = (
        "Compiled for A100 40 GB, 4 x 4. Alpa: its algorithm on our cost model, memory by its own "
        "rules. a-c, g-i 1F1B; d-f, j-l GPipe."
    )
    title = "Peak memory per GPU (CAPTURE, Figure 6)"
    return draw(title, note, panels, 3, [(ALPA, "Alpa's plan"), (OURS, "ours")]) if panels else None


if __name__ == "__main__":
    sys.exit(main())
