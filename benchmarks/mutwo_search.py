"""How far the search of mu-TWO is from the best of all choices, and how long it takes.

    python -m benchmarks.mutwo_search [--graphs N] [--limits N] [--json | -o RESULT.json]

Random graphs of four to eight bundles (``benchmarks/mutwo_graphs.py``), two models multiplexed and
in turn, three link speeds, and limits from the unlimited peak down to the least: ours, the best of
every choice on the same clock, the paper's own algorithms, corrected and as printed, of the
multiplexed ones, and the bound, an integer programme of whole choices. What the bound proves to be
the best is not enumerated. And the chain of 12 equal blocks, whose simple plans were
measured beforehand on a simulator that lets a copy wait for its room by itself; and the time of a
search over all partitions of eight models of GPT-2.
Seconds of searches are of one processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any, TypeVar

from benchmarks.documents import arguments, finish
from benchmarks.mutwo_graphs import chain, gpt2, host_link, random_graph
from recommender.mutwo.bound import TOLERANCE, bound_seconds, floor_seconds
from recommender.mutwo.descent import descend
from recommender.mutwo.enumerate import enumerate_choices
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.search import ALGORITHMS, search
from recommender.mutwo.ways import Way

T = TypeVar("T")
#: What the rows of one graph, link and order have alike.
OF_A_SERIES = ("graph", "order", "host_bytes_per_second")
LINKS = (2e9, 8e9, 30e9)
WAYS = (Way(((0,), (1,)), "multiplexed"), Way(((0,), (1,)), "in turn"))
#: GB/s, MB -> the better of two orders with the best number of first layers swapped, in turn or
#: multiplexed, in seconds of the unlimited step; three steps, the prologue included.
BEFOREHAND = {
    2: {120: 1.20, 100: 1.61, 80: 2.28, 60: 2.72, 45: 3.08},
    4: {120: 1.00, 100: 1.06, 80: 1.26, 60: 1.40, 45: 1.62},
    8: {120: 1.00, 100: 1.00, 80: 1.02, 60: 1.04, 45: 1.06},
}


def _timed(ask: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    return ask(), time.process_time() - start


def rows_of(seed: int, num_limits: int) -> Iterator[dict[str, Any]]:
    """Of a graph, at every link and limit."""
    num_bundles = 4 + seed % 5
    costs = random_graph(seed, num_bundles)
    for rate in LINKS:
        for way in WAYS:
            free = ArrayProblem(costs, 2, host_link(rate), 10**12, by_bundle=True)
            space = free.space(way)
            most = space.weigh(space.retained).peak_bytes
            least = space.least(space.swapped).peak_bytes
            for step in range(num_limits):
                limit = round(most - (most - least) * (step + 1) / num_limits)
                asked = replace(free, limit_bytes=limit)
                found = row_of(asked, way)
                yield {
                    "graph": seed,
                    "num_bundles": num_bundles,
                    "order": way.order,
                    "host_bytes_per_second": rate,
                    "limit_bytes": limit,
                    **found,
                }


def row_of(asked: ArrayProblem, way: Way) -> dict[str, Any]:
    (_, ours), seconds = _timed(lambda: descend(asked.space(way)))
    bound, bound_took = _timed(lambda: bound_seconds(asked.space(way), whole=True))
    if ours.seconds <= bound * (1 + 2 * TOLERANCE):
        best, took = ours, 0.0
    else:
        (_, best), took = _timed(lambda: enumerate_choices(replace(asked).space(way)))
    assert bound <= best.seconds, "a bound is no more than the optimum"
    row = {
        "optimum_seconds": best.seconds if best.fits else None,
        "ours_seconds": ours.seconds if ours.fits else None,
        "bound_seconds": bound,
        "seconds": {"ours": seconds, "bound": bound_took, "enumeration": took},
    }
    if way.order == "multiplexed":  # the order that they know
        for name, key in (("corrected", "paper_seconds"), ("paper", "paper_as_printed_seconds")):
            (_, theirs), row["seconds"][name] = _timed(
                lambda ask=ALGORITHMS[name]: ask(asked.space(way), 0.0)
            )
            row[key] = theirs.seconds if theirs.fits else None
    return row


def chain_rows() -> Iterator[dict[str, Any]]:
    """Of 12 equal blocks, in seconds of the unlimited step; the prologue is in none of ours, which
    are of one step in the steady state."""
    for rate, limits in BEFOREHAND.items():
        for limit, before in limits.items():
            asked = ArrayProblem(chain(), 2, host_link(rate * 1e9), limit * 10**6)
            whole = floor_seconds(asked.space(WAYS[0]))
            found, seconds = _timed(lambda asked=asked: search(asked))
            paper = search(asked, "corrected").best
            yield {
                "host_gigabytes_per_second": rate,
                "limit_megabytes": limit,
                "simple_plans": before,
                "ours": found.best.weighed.seconds / whole,
                "paper": paper.weighed.seconds / whole if paper.fits else None,
                "bound": found.bound_seconds / whole,
                "way": found.best.way.name,
                "seconds": seconds,
            }


def gpt2_rows() -> Iterator[dict[str, Any]]:
    """Of eight models of GPT-2 over an H200's host link, all partitions, from costs that are
    there."""
    costs, link = gpt2(), host_link(52e9, latency=1e-5)
    for limit in (67, 44, 19):
        asked = ArrayProblem(costs, 8, link, limit * 10**9, rule="all")
        found, seconds = _timed(lambda asked=asked: search(asked))
        yield {
            "limit_gigabytes": limit,
            "way": found.best.way.name,
            "step_seconds": found.best.weighed.seconds,
            "bound_seconds": found.bound_seconds,
            "num_ways_searched": len(found.candidates),
            "num_evaluated": found.num_evaluated,
            "seconds": seconds,
        }


def claims_of(rows: list[dict[str, Any]], chains: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [row for row in rows if row["optimum_seconds"] is not None]
    gaps = [
        row["ours_seconds"] / row["optimum_seconds"] - 1
        for row in answered
        if row["ours_seconds"] is not None
    ]
    over = [row["ours_seconds"] / row["bound_seconds"] - 1 for row in answered]
    return {
        "num_points": len(rows),
        "num_unanswered_of_answerable": len(answered) - len(gaps),
        "mean_gap": statistics.mean(gaps),
        "worst_gap": max(gaps),
        "num_optimal": sum(gap <= 1e-9 for gap in gaps),
        "mean_over_bound": statistics.mean(over),
        "worst_over_bound": max(over),
        "falling_limits": _falling_claims(rows),
        "paper": _paper_claims(answered, "paper_seconds"),
        "paper_as_printed": _paper_claims(answered, "paper_as_printed_seconds"),
        "chain_at_least_as_fast_everywhere": all(
            row["ours"] <= row["simple_plans"] + 0.005 for row in chains
        ),
    }


def _falling_claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As limits fall, of each graph, link and order: pairs of which the lower one is faster, by how
    much at most, and answers that come back."""
    pairs = [
        (before["ours_seconds"] or inf, after["ours_seconds"] or inf)
        for before, after in pairwise(rows)
        if after["limit_bytes"] < before["limit_bytes"]
        and all(before[name] == after[name] for name in OF_A_SERIES)
    ]
    faster = [before / after - 1 for before, after in pairs if after < before]
    return {
        "num_pairs": len(pairs),
        "num_faster_with_less": sum(gap > 1e-9 for gap in faster),
        "most_faster_with_less": max(faster, default=0.0),
        "num_answers_that_come_back": faster.count(inf),
    }


def _paper_claims(answered: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of the points that the paper's algorithms are asked, and that have an answer."""
    asked = [row for row in answered if key in row]
    gaps = [row[key] / row["optimum_seconds"] - 1 for row in asked if row[key] is not None]
    return {
        "num_asked": len(asked),
        "num_answered": len(gaps),
        "mean_gap": statistics.mean(gaps) if gaps else None,
        "worst_gap": max(gaps, default=None),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--graphs", type=int, default=20, help="random graphs")
    parser.add_argument("--limits", type=int, default=10, help="limits of each")
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    options = parser.parse_args()
    if not (options.json or options.output):
        parser.error("give --json, or -o FILE")
    rows: list[dict[str, Any]] = []
    for seed in range(options.graphs):
        rows += rows_of(seed, options.limits)
        print(f"graph {seed}: {len(rows)} points", file=sys.stderr, flush=True)
    chains = list(chain_rows())
    more = {"chain": chains, "gpt2": list(gpt2_rows())}
    return finish("mutwo_search", rows, options, claims=claims_of(rows, chains), **more)


if __name__ == "__main__":
    sys.exit(main())
