"""Eight models of GPT-2 within a third of the memory that they would take, and the time of a plan.

    python -m benchmarks.mutwo_limit [--targets NAME ...] [--store FILE] (--json | -o RESULT.json)

GPT-2 of 124 million parameters with Adam, 8 examples of 1,024 tokens each, float32, all partitions.
The limit is a third of the peak of the fastest way without a limit; and, as that may hold little by
itself, a third of the peak of all models fused. Beside the answer stand the best of multiplexed and
of other ways, full rematerialisation, and offload without multiplexing. Programs are compiled for
the target, which need not be there; seconds are simulated.

Times of this machine: ``cold`` traces and compiles all programs that searches ask for first, into a
store that is empty unless ``--store`` names one; ``planned`` traces the loss of one model and
searches from it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.documents import arguments
from benchmarks.papers.mutwo.settings import (
    UNLIMITED,
    ZOO,
    Compiled,
    finish,
    prepare,
    profile_of,
    result_of,
)
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.papers.mutwo.baselines import all_baselines
from capture.plan.array import Order
from recommender.mutwo.descent import descend
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.search import search
from recommender.mutwo.ways import Way, placed, ways

if TYPE_CHECKING:
    from capture.profiler.array import ArrayProfile

WORKLOAD, BATCH_SIZE, COUNT = "gpt2.py:gpt2?size=small&injected=true", 8, 8
REMATERIALISATION = ("full rematerialisation", "full rematerialisation, one by one")
OFFLOAD = "offload without multiplexing"


def cold(profile: ArrayProfile, compiled: Compiled) -> dict[str, Any]:
    """Trace and compile what every search asks for first."""
    begun, busy = time.perf_counter(), time.process_time()
    profile.prepare(range(1, COUNT + 1))
    return {
        "num_compiled": compiled.num_compiled,
        "seconds": time.perf_counter() - begun,
        "processor_seconds": time.process_time() - busy,
    }


def planned(profile: ArrayProfile, compiled: Compiled, limit: int) -> dict[str, Any]:
    """Trace the loss, read what is known of the arrays, and search."""
    begun, busy = time.perf_counter(), time.process_time()
    profile.prepare(range(1, COUNT + 1))
    traced = time.perf_counter() - begun
    found = search(_problem(profile, limit))
    return {
        "limit_bytes": limit,
        "way": found.best.way.name,
        "num_compiled": compiled.num_compiled,
        "trace_seconds": traced,
        "search_seconds": found.seconds,
        "processor_seconds": time.process_time() - busy,
    }


def _problem(profile: ArrayProfile, limit: int) -> ArrayProblem:
    return ArrayProblem(profile, COUNT, profile.host, limit, rule="all")


def limit_rows(profile: ArrayProfile) -> Iterator[dict[str, Any]]:
    """At both limits."""
    free = _problem(profile, UNLIMITED)
    fastest = search(free).best
    whole = free.space(Way(placed((COUNT,)), "in turn"))
    peaks = {
        "the fastest": fastest.weighed.peak_bytes,
        "all fused": whole.weigh(whole.retained).peak_bytes,
    }
    for name, peak in peaks.items():
        limit = peak // 3
        problem = _problem(profile, limit)
        best = search(problem).best
        systems = {"mu-TWO": result_of(best.space, best.chosen, limit)}
        for order in ("multiplexed", "in turn"):
            systems[order] = best_of(problem, order)
        for one in all_baselines(problem):
            systems[one.name] = one.to_json()
        row = {
            "limit": f"a third of {name}",
            "limit_bytes": limit,
            "unlimited": {
                "way": fastest.way.name,
                "step_seconds": fastest.weighed.seconds,
                "peak_bytes": fastest.weighed.peak_bytes,
            },
            "systems": systems,
        }
        yield {**row, **ratios(row)}


def best_of(problem: ArrayProblem, order: Order) -> dict[str, Any]:
    """Of the ways in an order, into equal sub-arrays."""
    spaces = [problem.space(way) for way in ways(COUNT, "equal") if way.order == order]
    found = {space: descend(space, budget=400) for space in spaces}
    space = min(spaces, key=lambda space: found[space][1])
    return result_of(space, found[space][0], problem.limit_bytes)


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    systems, free = row["systems"], row["unlimited"]["step_seconds"]

    def seconds(name: str) -> float | None:
        return systems[name]["step_seconds"] if systems[name]["fits"] else None

    ours, others = seconds("mu-TWO"), [*REMATERIALISATION, OFFLOAD, "in turn"]
    known = {name: of for name in others if (of := seconds(name)) is not None}
    return {
        "over_unlimited": ours and ours / free,
        "faster_than": {name: of / ours for name, of in known.items()} if ours else {},
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--targets", nargs="*", default=["h200", "gh200"], help="default: both")
    parser.add_argument("--store", type=Path, help="of compiled programs; default: a new one")
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    options = parser.parse_args()
    if not (options.json or options.output):
        parser.error("give --json, or -o FILE")
    prepare(options.targets)
    workload = WorkloadSpec.parse(f"{ZOO}/{WORKLOAD}").load()
    rows, claims = list[dict[str, Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(options.store or Path(folder) / "store.sqlite")
        for target in options.targets:
            compiled, no_more = Compiled(), Compiled()
            profile = profile_of(workload, BATCH_SIZE, target, store, compiled)
            first = cold(profile, compiled)
            print(f"{target}: {first}", file=sys.stderr, flush=True)
            own = list(limit_rows(profile))
            again = profile_of(workload, BATCH_SIZE, target, store, no_more)
            second = planned(again, no_more, own[0]["limit_bytes"])
            print(f"{target}: {second}", file=sys.stderr, flush=True)
            rows += [{"target": target, **row} for row in own]
            claims[target] = {
                "cold": first,
                "planned": second,
                **{
                    row["limit"]: {
                        "way": row["systems"]["mu-TWO"].get("way"),
                        "over_unlimited": row["over_unlimited"],
                        "faster_than": row["faster_than"],
                    }
                    for row in own
                },
            }
    return finish("mutwo_limit", rows, options, claims=claims)


if __name__ == "__main__":
    sys.exit(main())
