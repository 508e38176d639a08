"""Predictions of models whose layers share parameters, near and far apart, against compiled truth:
no device of any plan may need more than its interval says.

    python -m benchmarks.shared_parameters --store kit.sqlite -o RESULT.json
    python -m benchmarks.shared_parameters --models 0 1 2 --layouts 3 --store kit.sqlite
    python -m benchmarks.shared_parameters --merge FIRST.json SECOND.json -o RESULT.json

Each of the models is profiled and asked about random plans, each under both plain schedules and
with two numbers of micro-batches; devices are compared one by one, not peaks of plans alone.
The same predictions without what gradients of shared parameters wait in stand beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.kit_questions import Predicted, Question, ask, workload_of
from benchmarks.model_kit import pooled, summary
from capture import environment
from capture.cli.output import table
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.predictor import AdditivePredictor

LAYOUTS, COUNTS, SCHEDULES = 13, (2, 4), 2
_AGAIN, _ONE = "sequences:read_again", ((1, 1),)

#: Function, arguments, degrees and remat of each.
MODELS: Sequence[tuple[str, Mapping[str, Any], tuple[tuple[int, int], ...], str]] = (
    (_AGAIN, {"readers": (0, 4), "vocab": 8000}, _ONE, "none"),
    (_AGAIN, {"readers": (1, 7), "vocab": 4000}, _ONE, "full"),
    (_AGAIN, {"readers": (0, 1, 6), "vocab": 4000}, _ONE, "none"),
    (_AGAIN, {"readers": (0, 4, 8), "vocab": 8000}, _ONE, "cheap"),
    (_AGAIN, {"readers": (2, 3, 4), "vocab": 4000}, _ONE, "none"),
    (_AGAIN, {"readers": (0, 3, 5, 8), "vocab": 2000, "optimizer": "adam"}, _ONE, "none"),
    (_AGAIN, {"readers": (0, 5), "second": (2, 7), "vocab": 4000}, _ONE, "none"),
    (_AGAIN, {"readers": (1, 2), "second": (0, 8), "vocab": 4000}, _ONE, "dots"),
    (_AGAIN, {"readers": (0, 5), "kind": "product", "vocab": 1000}, _ONE, "none"),
    (_AGAIN, {"readers": (1, 4, 8), "kind": "product", "vocab": 1000}, _ONE, "full"),
    (_AGAIN, {"readers": (0, 6), "kind": "both", "vocab": 2000}, _ONE, "none"),
    (_AGAIN, {"readers": (0, 4), "vocab": 4000}, ((1, 1), (2, 1)), "none"),
    (_AGAIN, {"readers": (0, 4), "vocab": 4000}, ((1, 1), (1, 2)), "none"),
    ("sequences:apart", {"width": 24, "depth": 7, "vocab": 8000}, _ONE, "none"),
    ("sequences:language_model", {"width": 16, "depth": 7, "vocab": 2000}, _ONE, "none"),
    ("sequences:three_readers", {"width": 16, "depth": 8, "vocab": 4000}, _ONE, "none"),
    ("sequences:every_reader", {"width": 16, "depth": 8, "vocab": 4000}, _ONE, "none"),
    ("sequences:shared_blocks", {"width": 16, "depth": 9, "period": 3}, _ONE, "none"),
    ("sequences:encoder_decoder", {"width": 16, "depth": 4, "vocab": 16_384}, _ONE, "none"),
    ("dense:one_matrix", {"width": 128, "depth": 9}, _ONE, "none"),
)


class WithoutHeld(AdditivePredictor):
    """The predictor without what gradients of shared parameters wait in."""

    def _held(self, choice, microbatch_size):
        return {}

    def unsure_bytes(self, config):
        return 0


def question(index: int) -> Question:
    """What is asked about one of the models."""
    name, arguments, degrees, remat = MODELS[index]
    sharded = len(degrees) > 1
    return Question(
        name,
        workload_of(name, **arguments),
        None,
        Cluster.parse("1x4" if sharded else ("1x2", "1x3")[index % 2]),
        degrees,
        remat,
        False,
        6 if sharded else 5,
        COUNTS,
        index,
    )


def asked(index: int, num_layouts: int, store: Store) -> dict[str, Any]:
    """Predictions of one model's devices, with the term and without it, summed up."""
    one = question(index)

    def found(predictor: Any) -> list[Predicted]:
        return ask(
            one, num_plans=num_layouts, calibration_plans=3, store=store, predictor=predictor
        )

    rows, before = found(AdditivePredictor), found(WithoutHeld)
    return {
        "question": str(one),
        "num_plans": num_layouts * SCHEDULES * len(COUNTS),
        **summary(rows),
        "beyond": [asdict(row) for row in rows if row.beyond],
        "without_held": summary(before),
    }


def document(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document of some models."""
    found = list(models.values())
    return {
        "benchmark": "shared_parameters",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": environment.versions(),
        "num_models": len(found),
        "num_plans": sum(model["num_plans"] for model in found),
        "total": pooled(found),
        "without_held": pooled([model["without_held"] for model in found]),
        "models": dict(models),
    }


def as_text(written: Mapping[str, Any]) -> str:
    columns = ["worst_beyond", "worst_low", "worst_high", "mean_abs_error"]

    def cells(name: str, s: Mapping[str, Any]) -> list[Any]:
        shares = [s[f"{column}_fraction"] for column in columns]
        return [name, s["num_predictions"], s["num_beyond"], *(f"{x:.2%}" for x in shares)]

    rows = [cells(name, s) for name, s in written["models"].items()]
    rows += [cells("all", written["total"]), cells("without", written["without_held"])]
    header = ["model", "devices", "beyond", *(c.replace("_", " ") for c in columns)]
    return f"{written['num_plans']} plans\n" + table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", type=int, default=list(range(len(MODELS))), help="by number"
    )
    parser.add_argument(
        "--layouts", type=int, default=LAYOUTS, help="random, per model (default: %(default)s)"
    )
    parser.add_argument("--store", type=Path, help="of compiled stages (default: in memory)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="join recorded runs")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    models: dict[str, Any] = {}
    if options.merge:
        for path in options.merge:
            models |= json.loads(path.read_text())["models"]
        models = {name: models[name] for name in sorted(models, key=int)}
    else:
        CaptureError.check(environment.prepare(num_devices=4))
        store = Store(options.store)
        for index in options.models:
            start = time.process_time()
            models[str(index)] = asked(index, options.layouts, store)
            print(f"{question(index)}: {time.process_time() - start:.0f} s", flush=True)
            if options.output:
                options.output.write_text(json.dumps(document(models), indent=2) + "\n")
    written = document(models)
    if options.output:
        options.output.write_text(json.dumps(written, indent=2) + "\n")
    print(as_text(written))
    return 1 if written["total"]["num_beyond"] else 0


if __name__ == "__main__":
    sys.exit(main())
