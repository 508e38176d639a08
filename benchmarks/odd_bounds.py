"""Whether bounds from tracing hold of odd models: dimensions of size 1, tiny contractions,
broadcasts, complex and integer numbers, scans, gathers, put together at random
(``tests/odd_models.py``), bounded and compiled with every remat.

    python -m benchmarks.odd_bounds h100 0 300 -o RESULT

Every model is one stage; a field of its cost that is below its bound is written down. The exit code
is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment
from capture.errors import CaptureError
from capture.machine.target import Target
from capture.plan.choices import REMAT_POLICIES, StageChoice

SIZES = (1, 1, 1, 2, 3, 4, 8, 16, 32, 64)
WIDTHS = (32, 64, 128, 256, 512)
ROWS = (1, 8, 64, 256, 1024, 2048, 4096)
DTYPES = ("float32", "float32", "bfloat16")
CHOICES = tuple(StageChoice(remat=remat) for remat in REMAT_POLICIES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("first", type=int, help="seed of the first model")
    parser.add_argument("stop", type=int, help="seed behind the last one")
    parser.add_argument("-o", "--output", type=Path, help="add the target's document here")
    options = parser.parse_args()
    target = Target.load(options.target)
    environment.prepare(num_devices=2, platform=target.platform)
    document: dict[str, Any] = {"benchmark": "odd_bounds", "targets": {}}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    known = document["targets"].setdefault(target.name, {"models": []})
    models = {model["seed"]: model for model in known["models"]}
    for seed in range(options.first, options.stop):
        if seed not in models:
            models[seed] = measured(seed, target)
        document["targets"][target.name] = {
            "date": date.today().isoformat(),
            "versions": environment.versions(target.platform),
            **summary([*models.values()]),
            "models": [models[each] for each in sorted(models)],
        }
        if options.output is not None:  # an interrupted run goes on where it was
            options.output.write_text(json.dumps(document) + "\n")
        print(json.dumps(models[seed]), file=sys.stderr, flush=True)
    found = summary([*models.values()])
    print(json.dumps(found))
    return 1 if found["num_models_above"] else 0


def measured(seed: int, target: Target) -> dict[str, Any]:
    """What is above of the model of a seed, and how near its bounds are."""
    from tests.odd_models import odd_model, parts_of

    layers, rows, width, dtype = drawn(seed)
    model = odd_model(layers, rows, width, dtype)
    ratios, above, refused = [], [], []
    for choice, found in parts_of(model, target, CHOICES):
        if isinstance(found, CaptureError):
            refused.append(f"{choice}: {found}")
            continue
        for part, (least, compiled) in found.items():
            if least > compiled:
                above.append(f"{choice}: {part} at least {least:,}, compiled {compiled:,}")
            if compiled and part in ("forward", "backward"):
                ratios.append(round(least / compiled, 4))
    return {
        "seed": seed,
        "layers": [f"{layer.name} {layer.size}" for layer in layers],
        "rows": rows,
        "width": width,
        "dtype": dtype,
        "ratios": ratios,
        "above": above,
        "refused": refused,
    }


def drawn(seed: int) -> tuple[list[Any], int, int, str]:
    """The layers of a model, its rows, their width and data type."""
    from tests.odd_models import LAYERS, Odd

    draw = random.Random(seed)
    layers = [Odd(draw.choice([*LAYERS]), draw.choice(SIZES)) for _ in range(draw.randint(1, 4))]
    return layers, draw.choice(ROWS), draw.choice(WIDTHS), draw.choice(DTYPES)


def summary(models: list[dict[str, Any]]) -> dict[str, Any]:
    """How many hold, and how near they are."""
    ratios = [ratio for model in models for ratio in model["ratios"]]
    return {
        "num_models": len(models),
        "num_models_above": sum(bool(model["above"]) for model in models),
        "num_refused": sum(len(model["refused"]) for model in models),
        "least_over_compiled_median": round(statistics.median(ratios or [0]), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
