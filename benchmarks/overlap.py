"""What compilers hide: of compiled stages how much of what is sent is exposed, whether the seconds
of the library are those of an independent simulation, and how near estimates are before anything
is compiled.

    python -m benchmarks.overlap h100 v5e -o benchmarks/results/2026-01-31-overlap.json
    python -m benchmarks.overlap h100 --models gpt

Stages of up to ``NUM_LAYERS`` inner layers are compiled with replicas, ZeRO and tensor parallelism;
of each forward and backward pass

    hidden      share of what is sent that no kernel waits for, of as much as kernels could hide
    events      total over that of ``tests.overlap_events``, which must be 1
    estimate    total that is expected before anything is compiled, over the compiled one
    summed      the same without overlap, as if all were exposed
    simulating  seconds that the library's simulation takes, beside ``compiling`` of the stage

Seconds are simulated. An interrupted run goes on with what OUTPUT has. The exit code is 1 if a
total is not that of the events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.bound_terms import MODELS, NUM_DEVICES, choice_of
from capture import environment
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.work import ProgramWork
from capture.step.times import TimeModel
from tests.overlap_events import Events

NUM_LAYERS = 4
Use = tuple[int, int, str, int, bool]
#: (replicas, tensor parallelism, remat, ZeRO stage, sequence parallelism)
USES: tuple[Use, ...] = (
    (8, 1, "cheap", 3, False),
    (8, 1, "full", 3, False),
    (8, 1, "none", 0, False),
    (2, 4, "cheap", 3, True),
    (1, 8, "cheap", 0, False),
)
NAMES = ("gpt", "llama", "moe", "bert")
PASSES = ("forward", "backward")
#: Examples of each replica.
NUM_EXAMPLES = 4


def of_pass(
    expected: ProgramWork, compiled: ProgramWork, model: TimeModel, use: Use
) -> dict[str, Any] | None:
    """What is found of a compiled pass; None if it sends nothing."""
    start = time.perf_counter()
    found = model.seconds_of(compiled)
    took = time.perf_counter() - start
    if not found.sending or compiled.order is None or compiled.kernels is None:
        return None
    kernels = [*map(model.kernel_seconds, compiled.kernels)]
    sent = [model.collective_seconds(replace(one, count=1)) for one in compiled.collectives]
    before = model.program_seconds(expected)
    least = max(0.0, found.sending - found.computing)
    return {
        "use": list(use),
        "computing": found.computing,
        "sending": found.sending,
        "exposed": found.exposed,
        "hidden": 1 - (found.exposed - least) / min(found.sending, found.computing),
        "events": found.total / Events(compiled.order, kernels, sent).seconds(),
        "estimate": before / found.total,
        "summed": (found.computing + found.sending) / found.total,
        "simulating": took,
    }


def rows(name: str, target: Target, uses: Sequence[Use]) -> Iterator[list[dict[str, Any]]]:
    """What is found of a model's inner layers, use by use."""
    from capture.model.workload import WorkloadSpec
    from capture.profiler.bounds import BoundsBackend
    from capture.profiler.compile import CompileBackend

    assert target.rates is not None, "its work is counted"
    backend = CompileBackend(
        WorkloadSpec.parse(MODELS[name][0]).load(), target=target, num_devices=NUM_DEVICES
    )
    bounds, model = BoundsBackend(backend), TimeModel(target.rates, Layout(NUM_DEVICES))
    for use in uses:
        size = use[0] * NUM_EXAMPLES
        last = backend.traced(size).graph.num_layers
        first = max(0, min(1, last - NUM_LAYERS))
        stage = StageConfig(first, min(last, first + NUM_LAYERS), choice_of(use), size)
        expected = bounds.measure(stage).most
        start = time.perf_counter()
        cost = backend.measure(stage)
        compiling = time.perf_counter() - start
        found = []
        for each in PASSES:
            before, after = (getattr(of, f"{each}_work") for of in (expected, cost))
            if (row := of_pass(before, after, model, use)) is not None:
                found.append({"model": name, "pass": each, "compiling": compiling, **row})
        yield found


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares by what is sent, and the errors of estimates."""

    def median(key: str, of: Sequence[Mapping[str, Any]]) -> float | None:
        return round(statistics.median(row[key] for row in of), 3) if of else None

    told: dict[str, Any] = {"num_passes": len(found)}
    kinds = {
        "replicas, ZeRO 3": [row for row in found if row["use"][1] == 1 and row["use"][3] == 3],
        "replicas": [row for row in found if row["use"][1] == 1 and row["use"][3] == 0],
        "tensors": [row for row in found if row["use"][1] > 1],
    }
    told["hidden"] = {
        f"{kind}, {each}": median("hidden", [row for row in of if row["pass"] == each])
        for kind, of in kinds.items()
        for each in PASSES
    }
    for key in ("estimate", "summed"):
        errors = [abs(row[key] - 1) for row in found]
        told[key] = {
            "median": median(key, found),
            "mean_error": round(statistics.mean(errors), 3),
            "worst_error": round(max(errors), 3),
        }
    told["largest_gap_to_events"] = max(abs(row["events"] - 1) for row in found)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(NAMES), metavar="NAME")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    targets = [Target.load(name) for name in options.targets]
    environment.prepare(
        num_devices=NUM_DEVICES, platform=max(target.platform for target in targets)
    )
    document: dict[str, Any] = {"benchmark": "overlap", "targets": {}}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    for target in targets:
        known = document["targets"].setdefault(target.name, {"rows": []})
        for name in options.models:
            done = {tuple(row["use"]) for row in known["rows"] if row["model"] == name}
            uses = [use for use in USES if use not in done]
            for found in rows(name, target, uses):
                known["rows"] += found
                known["summary"] = summary(known["rows"])
                for row in found:
                    said = {key: round(row[key], 3) for key in ("hidden", "estimate", "summed")}
                    print(target.name, name, row["use"], row["pass"], said, file=sys.stderr)
                document |= {
                    "date": date.today().isoformat(),
                    "versions": {p: environment.versions(p) for p in ("cuda", "tpu")},
                }
                if options.output is not None:
                    options.output.write_text(json.dumps(document) + "\n")
    told = {name: each["summary"] for name, each in document["targets"].items()}
    print(json.dumps(told, indent=1))
    return int(any(each["largest_gap_to_events"] > 1e-9 for each in told.values()))


if __name__ == "__main__":
    sys.exit(main())
