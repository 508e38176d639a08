"""Predictions of small models that are not in the zoo, against compiled truth: none may be too low
by more than its interval.

    python -m benchmarks.model_kit --fresh 2000 --store kit.sqlite -o RESULT.json
    python -m benchmarks.model_kit --models encoder_decoder vgg --rounds 2 --store kit.sqlite
    python -m benchmarks.model_kit --merge FIRST.json SECOND.json -o RESULT.json

Round by round, every model of ``tests/kit`` is drawn with sizes, an optimizer, a cluster, degrees,
remat and micro-batches of its own, profiled, and asked about random plans. The truth is the replay
of a plan's step over its compiled stages. A prediction is one stage of one plan under one schedule
and one number of micro-batches; equal ones count once. It is fresh if the stage's programs were
compiled neither for the profile nor for its calibration. Run again, also after the predictor
changed, it finds the compiled stages in the store.

A prediction below the truth by more than its interval is printed with its cause: *formula*, if the
replay of the predicted parts would have covered the truth, and else the part that is most too low
where the truth has its peak; ``--execute`` also runs a step of every model on two stages, compares
loss and gradients with one device, and live arrays with the ledger before every instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit_questions import KIT, Predicted, Question, ask, errors_of_a_step
from capture import environment
from capture.cli.output import table
from capture.errors import CaptureError
from capture.measured.store import Store


def summary(rows: Sequence[Predicted]) -> dict[str, Any]:
    """Of some predictions: how many, how low, how well covered."""
    errors, fresh = np.array([row.error for row in rows]), [row for row in rows if row.fresh]
    claimed = [row.coverage for row in fresh if row.coverage is not None]
    above = [row for row in rows if row.beyond]
    return {
        "num_predictions": len(rows),
        "num_fresh": len(fresh),
        "num_beyond": len(above),
        "num_fresh_beyond": sum(row.fresh for row in above),
        "worst_low_fraction": max(0.0, float(errors.max())) if rows else None,
        "worst_high_fraction": max(0.0, float(-errors.min())) if rows else None,
        "worst_beyond_fraction": max((row.beyond for row in rows), default=None),
        "mean_abs_error_fraction": float(np.abs(errors).mean()) if rows else None,
        "fresh_mean_abs_error_fraction": float(np.mean([abs(row.error) for row in fresh]))
        if fresh
        else None,
        "coverage_claimed_fraction": float(np.mean(claimed)) if claimed else None,
        "coverage_seen_fraction": float(
            np.mean([row.low <= row.truth <= row.high for row in fresh])
        )
        if fresh
        else None,
        "causes_beyond": dict(Counter(row.cause for row in above)),
    }


def pooled(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of several models from theirs: equal to ``summary`` of all their rows where every
    fresh one has a claimed coverage."""
    found = [s for s in summaries if s["num_predictions"]]
    causes: Counter[str] = Counter()
    for s in found:
        causes.update(s["causes_beyond"])

    def mean(name: str, weight: str) -> float | None:
        weights = [(s[name], s[weight]) for s in found if s[name] is not None]
        return (
            sum(value * n for value, n in weights) / sum(n for _, n in weights) if weights else None
        )

    return {
        **{
            f"num_{what}": sum(s[f"num_{what}"] for s in found)
            for what in ("predictions", "fresh", "beyond", "fresh_beyond")
        },
        **{
            f"worst_{what}_fraction": max(
                (s[f"worst_{what}_fraction"] for s in found), default=None
            )
            for what in ("low", "high", "beyond")
        },
        "mean_abs_error_fraction": mean("mean_abs_error_fraction", "num_predictions"),
        **{
            f"{what}_fraction": mean(f"{what}_fraction", "num_fresh")
            for what in ("fresh_mean_abs_error", "coverage_claimed", "coverage_seen")
        },
        "causes_beyond": dict(causes),
    }


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Recorded runs as one document. Where two of one seed asked about a model, the one with more
    plans counts: it holds the other.

    Raises:
        ValueError: two of one seed have equally many predictions of a model, but not the same.
    """
    documents = [json.loads(path.read_text()) for path in paths]
    largest: dict[tuple[str, int], tuple[Mapping[str, Any], int]] = {}
    for i, document in enumerate(documents):
        for name, found in document["models"].items():
            other, _ = largest.setdefault((name, document["seed"]), (found, i))
            if other["num_predictions"] == found["num_predictions"] and other != found:
                raise ValueError(
                    f"{name} of seed {document['seed']}: {paths[i]} and an earlier file differ "
                    "over the same number of predictions."
                )
            if other["num_predictions"] < found["num_predictions"]:
                largest[name, document["seed"]] = found, i

    def kept(key: str) -> list[Any]:
        every = (
            (document["seed"], i, row)
            for i, document in enumerate(documents)
            for row in document[key]
        )
        return [
            row
            for seed, i, row in every
            if largest.get((row["question"]["model"], seed), (None, i))[1] == i
        ]

    models = {
        name: pooled(found for (other, _), (found, _) in largest.items() if other == name)
        for name in KIT
    }
    models = {name: found for name, found in models.items() if found["num_predictions"]}
    steps = {name: found for document in documents for name, found in document["steps"].items()}
    rest = {"crashes": kept("crashes"), "beyond": kept("beyond"), "steps": steps}
    seeds = sorted({document["seed"] for document in documents})
    return {
        **documents[-1],
        "seed": seeds if len(seeds) > 1 else seeds[0],
        "total": pooled(models.values()),
        "models": models,
        **rest,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds over the models until there are enough fresh predictions."""
    store, start = Store(options.store), time.monotonic()
    rows: dict[str, list[Predicted]] = {model: [] for model in options.models}
    crashes, steps, beyond = [], {}, []
    document: dict[str, Any] = {
        "benchmark": "model_kit",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": environment.versions(),
        "seed": options.seed,
    }

    def written() -> dict[str, Any]:
        every = [row for found in rows.values() for row in found]
        result = {
            **document,
            "total": summary(every),
            "models": {name: summary(found) for name, found in rows.items() if found},
        }
        result |= {"crashes": crashes, "beyond": beyond, "steps": steps}
        if options.output:
            options.output.write_text(json.dumps(result, indent=2) + "\n")
        return result

    for model in options.models if options.execute else ():
        try:
            steps[model] = errors_of_a_step(model)
            print(
                f"{model}: a step differs by {', '.join(f'{e:.1e}' for e in steps[model])} (loss, "
                "gradients, parameters)",
                flush=True,
            )
        except Exception as error:
            steps[model] = f"{type(error).__name__}: {error}"
            print(f"{model}: {steps[model]}\n{traceback.format_exc(limit=-3)}", flush=True)
        written()
    # So that a part of a round has something of all.
    mixed = np.random.default_rng(options.seed).permutation(options.models).tolist()
    for turn in range(options.rounds):
        for model in mixed:
            if sum(row.fresh for found in rows.values() for row in found) >= options.fresh:
                return written()
            if options.seconds is not None and time.monotonic() - start > options.seconds:
                return written()
            generator = np.random.default_rng([options.seed, turn, *model.encode()])
            question = Question.draw(
                model,
                lambda values, generator=generator: values[int(generator.integers(len(values)))],
            )
            began = time.monotonic()
            try:
                found = ask(
                    question,
                    num_plans=options.plans,
                    calibration_plans=options.calibration_plans,
                    store=store,
                )
            except Exception as error:
                crashes.append(
                    {"question": question.to_json(), "error": f"{type(error).__name__}: {error}"}
                )
                print(
                    f"{model}, round {turn}: {question}\n    {type(error).__name__}: {error}",
                    flush=True,
                )
                if not isinstance(error, CaptureError):
                    traceback.print_exc(limit=-4)
                continue
            rows[model] += found
            bad = sorted((row for row in found if row.beyond), key=lambda row: -row.beyond)
            if bad:
                beyond.append(
                    {
                        "question": question.to_json(),
                        "command": str(question),
                        "rows": [asdict(row) for row in bad],
                    }
                )
            fresh = sum(row.fresh for row in found)
            print(
                f"{model}, round {turn}: {len(found)} predictions, {fresh} fresh, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            if bad:
                causes = ", ".join(
                    f"{n} {cause}" for cause, n in Counter(row.cause for row in bad).items()
                )
                print(
                    f"    {len(bad)} BEYOND THE INTERVAL ({causes}): {question}, degrees "
                    f"{question.degrees}\n    {bad[0]}",
                    flush=True,
                )
            written()
    return written()


def as_text(document: Mapping[str, Any]) -> str:
    header = [
        "model",
        "predictions",
        "fresh",
        "beyond",
        "worst low",
        "beyond by",
        "mean |error|",
        "fresh",
        "claimed",
        "seen",
    ]

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    def cells(name: str, s: Mapping[str, Any]) -> list[Any]:
        fractions = (
            "worst_low",
            "worst_beyond",
            "mean_abs_error",
            "fresh_mean_abs_error",
            "coverage_claimed",
            "coverage_seen",
        )
        counts = [s[f"num_{what}"] for what in ("predictions", "fresh", "beyond")]
        return [name, *counts, *(percent(s[f"{fraction}_fraction"]) for fraction in fractions)]

    rows = [cells(name, s) for name, s in document["models"].items()]
    crashed = "".join(
        f"\nFAILED {crash['question']['workload']}: {crash['error']}"
        for crash in document["crashes"]
    )
    causes = ", ".join(f"{n} {cause}" for cause, n in document["total"]["causes_beyond"].items())
    return (
        table(header, [*rows, cells("all", document["total"])])
        + crashed
        + (f"\nbeyond the interval: {causes}" if causes else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(KIT),
        metavar="NAME",
        help="file:function, or function (default: all)",
    )
    parser.add_argument(
        "--fresh",
        type=int,
        default=2000,
        help="stop at so many fresh predictions (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=10, help="at most (default: %(default)s)")
    parser.add_argument(
        "--plans", type=int, default=12, help="per model and round (default: %(default)s)"
    )
    parser.add_argument(
        "--calibration-plans", type=int, default=6, help="of a profile (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, help="start no question after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--execute", action="store_true", help="also run a step of every model on two stages"
    )
    parser.add_argument("--store", type=Path, help="of compiled stages (default: in memory)")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="ask nothing: join recorded runs"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    if options.merge:
        document = merged(options.merge)
        if options.output:
            options.output.write_text(json.dumps(document, indent=2) + "\n")
        print(as_text(document))
        return 1 if document["total"]["num_beyond"] or document["crashes"] else 0
    by_name = {name.split(":")[1]: name for name in KIT} | {name: name for name in KIT}
    options.models = [by_name[name] for name in options.models]
    CaptureError.check(environment.prepare(num_devices=4))
    document = run(options)
    print(as_text(document))
    return 1 if document["total"]["num_beyond"] or document["crashes"] else 0


if __name__ == "__main__":
    sys.exit(main())
