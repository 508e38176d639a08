"""Whether what tracing says of the work of a stage is below what its compiled programs do, term by
term: totals hide a term that is too high.

    python -m benchmarks.bound_terms h100 v5e -o benchmarks/results/2026-01-31-bound-terms.json
    python -m benchmarks.bound_terms h100 --models gpt moe --limit 20
    python -m benchmarks.bound_terms h100 --known benchmarks/results/2026-01-31-bound-terms.json

The last compiles nothing: it holds what is traced today against what RESULT has of compiled
programs.

Layers and pairs of layers of many models, small and large, are compiled with tensor parallelism,
replicas, ZeRO, sequence parallelism and every remat. Of each program, forward, backward and update,
every term of the lower bound is held against the same of the compiled program:

    flops, bytes     of products
    products         their seconds, as large products reach them
    traffic          bytes beside products
    reduced          seconds of reduce-scatters, and of the first half of all-reduces
    gathered         seconds of all-gathers, and of the second half of all-reduces
    total            seconds; of a bound the longer of computing and sending

``estimate`` is the total that is expected, over the compiled one. An interrupted run goes on with
what OUTPUT has. The exit code is 1 if a term is above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.work import ProgramWork
from capture.plan.choices import StageChoice
from capture.step.times import TimeModel

#: By name, workloads and examples of a micro-batch: those of the zoo, and of tests.
MODELS: dict[str, tuple[str, int]] = {
    "gpt": ("models/gpt.py:gpt?size=125M&dtype=bfloat16", 4),
    "gpt float32": ("models/gpt.py:gpt?size=125M", 2),
    "gpt tiny": ("models/gpt.py:gpt?size=tiny", 4),
    "gpt2": ("models/gpt2.py:gpt2?size=small&dtype=bfloat16", 4),
    "bert": ("models/bert.py:bert?size=base&dtype=bfloat16", 8),
    "llama": ("models/llama.py:llama?size=8B&dtype=bfloat16", 2),
    "llama tiny": ("models/llama.py:llama?size=tiny&dtype=bfloat16", 4),
    "lora": ("models/llama_lora.py:lora?size=1B&dtype=bfloat16", 2),
    "moe": ("models/moe.py:moe?size=380M&dtype=bfloat16", 4),
    "moe tiny": ("models/moe.py:moe?size=tiny", 4),
    "mingpt": ("models/mingpt.py:mingpt?size=tiny", 4),
    "vit": ("models/vit.py:vit?size=tiny", 4),
    "wide_resnet": ("models/wide_resnet.py:wide_resnet?size=250M", 16),
    "resnet": ("models/resnet.py:resnet?size=tiny", 8),
    "unet": ("models/unet.py:unet?size=31M", 4),
    "vgg": ("models/vgg.py:vgg?size=tiny", 8),
    "mobilenet": ("models/mobilenet.py:mobilenet?size=tiny", 8),
    "recommender": ("models/deep_recommender.py:deep_recommender?size=20M", 64),
    "tied": ("tests/user_models/mixed.py:model", 8),
    "recurrent": ("tests/kit/recurrent.py:gated_recurrent", 8),
}
#: (replicas, tensor parallelism, remat, ZeRO stage, sequence parallelism)
USES = (
    (1, 1, "none", 0, False),
    (1, 1, "cheap", 0, False),
    (1, 1, "full", 0, False),
    (1, 2, "cheap", 0, False),
    (1, 4, "none", 0, False),
    (2, 1, "cheap", 0, False),
    (2, 1, "none", 1, False),
    (2, 1, "cheap", 3, False),
    (4, 1, "full", 3, False),
    (2, 2, "cheap", 0, False),
    (1, 2, "cheap", 0, True),
    (2, 2, "full", 3, True),
)
PROGRAMS = ("forward", "backward", "update")
#: Of sums of the same numbers in another order.
ROUNDING = 1e-9
#: Of numbers in documents, which have seven digits.
KNOWN_ROUNDING = 1e-6
NUM_DEVICES = 8


def choice_of(use: tuple[int, int, str, int, bool]) -> StageChoice:
    replicas, tensor, remat, zero, sequence = use
    return StageChoice(replicas, tensor, remat, zero > 0, zero == 3, sequence)


def terms(work: ProgramWork, model: TimeModel) -> dict[str, float]:
    """The terms of a program that are compared."""
    kernels = work.kernels or ()
    products = [kernel for kernel in kernels if kernel.dtype]
    sent = {"reduced": 0.0, "gathered": 0.0}
    for one in work.collectives:
        seconds = model.collective_seconds(one)
        if one.kind == "all-reduce":
            sent = {name: value + seconds / 2 for name, value in sent.items()}
        elif one.kind in ("reduce-scatter", "all-gather"):
            sent["reduced" if one.kind == "reduce-scatter" else "gathered"] += seconds
    return {
        "flops": float(sum(kernel.count * kernel.flops for kernel in products)),
        "bytes": float(sum(kernel.count * kernel.nbytes for kernel in products)),
        "products": sum(
            kernel.count * model.kernel_seconds(replace(kernel, shape=())) for kernel in products
        ),
        "traffic": float(sum(k.count * k.nbytes for k in kernels if not k.dtype)),
        **sent,
        "total": model.program_seconds(work),
    }


def compared(between: Any, cost: Any, model: TimeModel) -> dict[str, dict[str, list[float]]]:
    """By program and term, what is bounded and what is compiled."""
    found = {}
    for name in PROGRAMS:
        least, most, real = (
            getattr(each, f"{name}_work") for each in (between.least, between.most, cost)
        )
        bounded, compiled = terms(least, model), terms(real, model)
        bounded["total"] = max(
            replace(model, counts=counts).program_seconds(least)
            for counts in ("computing", "sending")
        )
        found[name] = {term: [bounded[term], compiled[term]] for term in bounded}
        found[name]["estimate"] = [model.program_seconds(most), compiled["total"]]
    return found


def too_high(
    found: Mapping[str, Mapping[str, list[float]]], rounding: float = ROUNDING
) -> list[str]:
    """The terms whose bounds are above what is compiled."""
    return [
        f"{program} {term}"
        for program, each in found.items()
        for term, (least, compiled) in each.items()
        if term != "estimate" and least > compiled * (1 + rounding)
    ]


def spans(num_layers: int) -> list[tuple[int, int]]:
    """Single layers, first, inner and last, and a pair."""
    middle = num_layers // 2
    found = [(0, 1), (middle, middle + 1), (num_layers - 1, num_layers)]
    return list(dict.fromkeys([*found, (max(0, middle - 1), middle + 1)]))


def cases(names: list[str]) -> Iterator[tuple[str, tuple[int, int, str, int, bool]]]:
    return ((name, use) for use in USES for name in names)


class Stages:
    """The stages of one model, traced and compiled for a target."""

    def __init__(self, name: str, target: Target):
        from capture.model.workload import WorkloadSpec
        from capture.profiler.bounds import BoundsBackend
        from capture.profiler.compile import CompileBackend

        workload, self.size = MODELS[name]
        loaded = WorkloadSpec.parse(workload).load()
        self._backend = CompileBackend(loaded, target=target, num_devices=NUM_DEVICES)
        self._bounds = BoundsBackend(self._backend)
        assert target.rates is not None, "its work is counted"
        self._model = TimeModel(target.rates, Layout(NUM_DEVICES))

    def rows(self, use: tuple[int, int, str, int, bool]) -> Iterator[dict[str, Any]]:
        """What is found of some layers with one use of devices."""
        from capture.errors import CaptureError

        for first, stop in spans(self._backend.traced(self.size).graph.num_layers):
            config = StageConfig(first, stop, choice_of(use), self.size)
            row: dict[str, Any] = {"layers": [first, stop - 1], "use": list(use)}
            try:
                between = self._bounds.measure(config)
                cost = self._backend.measure(config)
            except CaptureError as error:
                yield row | {"refused": str(error)}
                continue
            found = compared(between, cost, self._model)
            yield row | {"programs": found, "above": too_high(found)}

    def held_against(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """A row with what is traced now, of what was compiled then."""
        first, last = known["layers"]
        [*degrees, sequence] = known["use"]
        config = StageConfig(first, last + 1, choice_of((*degrees, sequence)), self.size)
        between = self._bounds.measure(config)
        found = compared(between, between.most, self._model)
        for program, each in found.items():
            for term, pair in each.items():
                pair[1] = known["programs"][program][term][1]
        return {**known, "programs": found, "above": too_high(found, KNOWN_ROUNDING)}


def summary(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """How many terms hold, and how near they are; of estimates also the tenth that are lowest and
    highest."""
    found: dict[str, Any] = {
        "num_stages": sum("programs" in row for row in rows),
        "num_refused": sum("refused" in row for row in rows),
        "num_above": sum(len(row.get("above", ())) for row in rows),
    }
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for program, each in row.get("programs", {}).items():
            for term, (least, compiled) in each.items():
                if compiled:
                    ratios.setdefault(f"{program} {term}", []).append(least / compiled)
    for name, values in ratios.items():
        found[name] = {
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "most": round(max(values), 3),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--limit", type=int, help="so many models and uses, of every target")
    parser.add_argument("--known", type=Path, metavar="RESULT", help="take what is compiled of it")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    targets = [Target.load(name) for name in options.targets]
    platforms = {target.platform for target in targets}
    environment.prepare(num_devices=NUM_DEVICES, platform=max(platforms))
    document: dict[str, Any] = {"benchmark": "bound_terms", "targets": {}}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    compiled = json.loads(options.known.read_text())["targets"] if options.known else None
    for target in targets:
        known = document["targets"].setdefault(target.name, {"rows": []})
        done = {(row["model"], tuple(row["use"])) for row in known["rows"]}
        open_models: dict[str, Stages] = {}
        for model, use in list(cases(options.models))[: options.limit]:
            if (model, use) in done:
                continue
            start = time.perf_counter()
            stages = open_models.setdefault(model, Stages(model, target))
            if compiled is None:
                rows = [{"model": model, **row} for row in stages.rows(use)]
            else:
                rows = [
                    stages.held_against(row)
                    for row in compiled[target.name]["rows"]
                    if (row["model"], tuple(row["use"])) == (model, use) and "programs" in row
                ]
            known["rows"] += rows
            above = [f"{row['layers']} {said}" for row in rows for said in row.get("above", ())]
            took = time.perf_counter() - start
            print(f"{target.name} {model} {use}: {took:.1f} s {above}", file=sys.stderr, flush=True)
            known |= {
                "date": date.today().isoformat(),
                "versions": environment.versions(target.platform),
                "summary": summary(known["rows"]),
            } | ({"compiled_in": options.known.name} if options.known else {})
            if options.output is not None:
                options.output.write_text(json.dumps(document) + "\n")
        print(json.dumps({target.name: known.get("summary")}, indent=1))
    return int(any(t["summary"]["num_above"] for t in document["targets"].values()))


if __name__ == "__main__":
    sys.exit(main())
