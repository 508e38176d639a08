"""The plans of a recorded figure, compiled and counted again: when the account of memory has
changed and the choice of plans has not.

    python -m benchmarks.papers.capture.count_again FIGURE.json --only "GPT-3 6.7B" -o again.json

Needs no profile: only the stages of the plans are compiled, a few minutes per model. Rows of other
models stay as they were recorded, and keep their date. Whether Alpa would choose another plan is
not asked. Where memory does not bind its choice it would not: so for GPT-3 6.7B, MoE 7.1B and
Wide-ResNet 1B (``tests/command_line/test_alpa.py``, on the tables of these profiles).
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.papers.capture import figure_6, figure_8
from benchmarks.papers.capture.scenarios import (
    CLUSTER,
    SCENARIOS,
    Planned,
    Scenario,
    arguments,
    counted,
    is_chosen,
    measurements_of,
    prepare,
)
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from profiling_runs.measurements import Measurements

FIGURES: dict[str, ModuleType] = {"paper_figure_6": figure_6, "paper_figure_8": figure_8}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("record", type=Path, help="the document of figure_6.py or figure_8.py")
    parser.add_argument(
        "--hybrid",
        action=argparse.BooleanOptionalAction,
        help="only the rows with, or without, hybrid parallelism",
    )
    options = parser.parse_args()
    prepare()
    document = json.loads(options.record.read_text())
    figure = FIGURES[document["benchmark"]]
    for i, row in enumerate(document["rows"]):
        scenario = scenario_of(row)
        if not is_chosen(scenario.model, options) or options.hybrid not in (
            None,
            scenario.is_hybrid,
        ):
            continue
        print(f"({scenario.panel}) {scenario.name}", file=sys.stderr)
        document["rows"][i] = again(row, scenario, measurements_of(scenario.model, options))
        if options.output:  # after every row: interrupted, what was counted is kept
            options.output.write_text(json.dumps(document, indent=2) + "\n")
            options.output.with_suffix(".svg").write_text(figure.figure(document["rows"]))
    print(json.dumps(document, indent=2) if options.json else figure.as_text(document["rows"]))
    return 0


def scenario_of(row: dict[str, Any]) -> Scenario:
    """Of a row of Figure 6 or 8."""
    asked = row["model"], row["schedule"], row.get("is_hybrid", True)
    return next(s for s in SCENARIOS if (s.model.name, s.schedule, s.is_hybrid) == asked)


def again(row: dict[str, Any], scenario: Scenario, measurements: Measurements) -> dict[str, Any]:
    """The row with its plans counted today."""

    def planned(who: str) -> Planned:
        recorded = row[who]
        stages = tuple(map(Stage.from_json, recorded["stages"]))
        model = scenario.model
        plan = Plan(
            CLUSTER,
            stages[-1].stop,
            stages,
            model.global_batch,
            model.num_microbatches,
            scenario.schedule,
        )
        # What was predicted of Alpa's plan was of our runtime.
        predicted = None if who == "alpa" else recorded["predicted_peak_bytes_per_device"]
        return counted(plan, model, measurements, predicted, is_alpas=who == "alpa")

    alpa, ours = planned("alpa"), planned("ours")
    found = {
        **row,
        "counted": date.today().isoformat(),
        "alpa": alpa.to_json(),
        "ours": ours.to_json(),
    }
    if "gain_fraction" in row:
        return {**found, **figure_6.gains(ours, alpa)}
    found |= figure_8.against(ours, alpa)
    if row["keeps"] is not None:
        keeps = planned("keeps")
        found["keeps"] = {**keeps.to_json(), **figure_8.against(keeps, alpa)}
    return found


if __name__ == "__main__":
    sys.exit(main())
