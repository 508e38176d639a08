"""Seconds of the exact search on synthetic layer statistics.

    python benchmarks/search_time.py --layers 128 --cluster 64x8 --whole-nodes --json

``random`` statistics: random M_i and M_a of weights, activations and buffers, 15 % of M_a negative.
``uniform``: equal blocks, a 3x first and a 4x last layer, so many exact ties. ``seconds`` includes
building the cost table (``table_seconds`` alone is given too).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time

import numpy as np

from capture.machine.cluster import Cluster
from capture.papers.capture.choices import hybrid_choices, paper_choices
from capture.plan.choices import StageChoice
from capture.plan.space import StageSpace
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.search import ALGORITHMS, search


def layer_statistics(kind: str, num_layers: int, seed: int) -> np.ndarray:
    """M_i and M_a in bytes of weights, activations and buffers, (3, 2, L)."""
    scale = np.array([120, 30, 20])[:, None] * 2**20
    if kind == "uniform":
        factor = np.ones(num_layers)
        factor[0], factor[-1] = 3, 4
        isolated = (scale * factor).astype(np.int64)
        return np.stack([isolated, (isolated * [[1.0], [0.8], [0.1]]).astype(np.int64)], axis=1)
    generator = np.random.default_rng(seed)
    isolated = (scale * generator.uniform(0.5, 2, (3, num_layers))).astype(np.int64)
    added = (isolated * generator.uniform(0.3, 1, (3, num_layers))).astype(np.int64)
    return np.stack(
        [isolated, np.where(generator.random((3, num_layers)) < 0.15, -added // 4, added)], axis=1
    )


def additive(isolated: np.ndarray, added: np.ndarray) -> np.ndarray:
    """M_i of the first layer plus M_a of the others, (L, L + 1) by [first, stop]. Source: CAPTURE
    III-B1."""
    before = np.concatenate([[0], np.cumsum(added)])
    return (isolated - added)[:, None] + before - before[:-1, None]


def additive_cost(
    statistics: np.ndarray, choices: dict[int, tuple[StageChoice, ...]], in_flight: np.ndarray
) -> dict[int, np.ndarray]:
    """Weights over tensor degree and activations over both degrees, rounded up, plus buffers.
    Source: CAPTURE III-B3."""
    weights, activations, buffers = (additive(*part) for part in statistics)
    empty = np.tri(*weights.shape) > 0
    cost = {}
    for d, here in choices.items():
        static = np.stack(
            [
                np.where(empty, NEVER, -(-weights // choice.tensor_parallel) + buffers)
                for choice in here
            ]
        )
        kept = np.stack(
            [
                np.where(
                    empty, 0, -(-activations // d) + buffers // 8 * (choice.tensor_parallel > 1)
                )
                for choice in here
            ]
        )
        cost[d] = static[:, None] + in_flight[:, None, None] * kept[:, None]
    return cost


def positions(
    schedule: str, num_layers: int, num_devices: int, num_microbatches: int
) -> np.ndarray:
    """Micro-batches in flight by stages to the end, (K,): all under GPipe, one per stage to the end
    under 1F1B."""
    if schedule == "gpipe":
        return np.array([num_microbatches])
    return np.arange(1, min(num_microbatches, num_layers, num_devices) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cluster", default="4x4", help="NxG or a list such as 4+2")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--microbatches", type=int, help="default: the number of layers")
    parser.add_argument(
        "--whole-nodes", action="store_true", help="also stages on 2, 4, 8, ... whole nodes"
    )
    parser.add_argument(
        "--choices",
        choices=["paper", "hybrid"],
        default="hybrid",
        help="data or tensor parallelism, or both together",
    )
    parser.add_argument("--statistics", choices=["random", "uniform"], default="random")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="minmax")
    parser.add_argument(
        "--tie-break",
        help="for minmax and mcap: auto, full, none, or how many of the largest devices to compare",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="the median run is reported")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()

    cluster = Cluster.parse(args.cluster)
    choices = {"paper": paper_choices, "hybrid": hybrid_choices}[args.choices](cluster.num_devices)
    in_flight = positions(
        args.schedule, args.layers, cluster.num_devices, args.microbatches or args.layers
    )
    statistics = layer_statistics(args.statistics, args.layers, args.seed)
    options = {}
    if args.tie_break is not None:
        if args.algorithm not in ("minmax", "mcap"):
            parser.error(f"--tie-break is no option of --algorithm {args.algorithm}")
        options["tie_break"] = int(args.tie_break) if args.tie_break.isdigit() else args.tie_break
    runs = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        used = StageSpace(args.whole_nodes).all_degrees(cluster)
        cost = additive_cost(statistics, {d: choices[d] for d in used}, in_flight)
        table_seconds = time.perf_counter() - start
        result = search(
            SearchProblem(cluster, args.layers, choices, cost, StageSpace(args.whole_nodes)),
            args.algorithm,
            **options,
        )
        runs.append((time.perf_counter() - start, table_seconds, result))
    seconds, table_seconds, result = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    document = vars(args) | {
        "algorithm": result.algorithm,
        "seconds": seconds,
        "table_seconds": table_seconds,
        "status": result.status,
        "optimal": result.optimal,
        "peak_bytes": result.peak_bytes,
        "tie_break": result.tie_break,
        "tie_break_columns": result.tie_break_columns,
        "num_stages": len(result.stages),
        "num_explored": result.num_explored,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if args.json:
        print(json.dumps(document))
    else:
        print(
            f"{args.layers} layers, {cluster}, {args.schedule}: {seconds:.3f} s, peak "
            f"{result.peak_bytes:,} bytes, {len(result.stages)} "
            f"stages, proven least: {result.optimal}, tie-break: {result.tie_break}"
        )


if __name__ == "__main__":
    main()
