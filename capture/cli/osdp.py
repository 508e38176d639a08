"""Choose for every operator of a model whether to replicate, shard or split its parameters over
data-parallel devices (OSDP)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, say, table
from capture.model.workload import WorkloadSpec
from capture.quantities import parse_bytes
from capture.report.sharding import HEADER, rows
from recommender.osdp import ShardingQuestion, osdp
from recommender.osdp.question import SMALLEST_BYTES

NAME = "osdp"
HELP = "shard a model's operators over data-parallel devices"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload", metavar="WORKLOAD", help="path/to/file.py:function?key=value or module:function"
    )
    parser.add_argument("--cluster", required=True, metavar="NxG", help="N nodes of G devices")
    parser.add_argument(
        "--target",
        required=True,
        metavar="NAME",
        help="device kind, such as h100, or a target file (.json)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="limit per device, such as 30GiB (default: what the target can use)",
    )
    parser.add_argument(
        "--batch",
        type=shared.at_least(1),
        metavar="B",
        help="examples per device (default: that of largest throughput)",
    )
    parser.add_argument(
        "--most",
        type=shared.at_least(1),
        metavar="B",
        help="the largest batch per device to choose from",
    )
    parser.add_argument(
        "--slices",
        type=shared.several(1),
        default="1,4",
        metavar="G,G,...",
        help="slices per operator to choose from (default: %(default)s)",
    )
    parser.add_argument(
        "--partly",
        action="store_true",
        help="some slices of an operator may be replicated, others sharded",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute every operator again from its inputs in the backward pass",
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="F",
        help=(
            "of computation and communication, the fraction of the lesser that is hidden; above "
            "0, gathers look ahead (default: 0)"
        ),
    )
    parser.add_argument(
        "--smallest",
        default=str(SMALLEST_BYTES),
        metavar="SIZE",
        help="replicate parameters that are smaller, such as 64KiB (default: 1 MiB)",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help=(
            "do not compile the plan's train step for the target: faster, and memory is an estimate"
        ),
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("sharding.json"),
        metavar="FILE",
        help="default: %(default)s",
    )


def main(options: argparse.Namespace) -> int:
    cluster = asked.read_cluster(vars(options))
    asked.prepare(cluster)
    spec = WorkloadSpec.parse(options.workload)
    question = ShardingQuestion(
        spec.load(),
        cluster,
        options.memory,
        batch_size=options.batch,
        max_batch_size=options.most,
        granularities=options.slices,
        partly=options.partly,
        remat=options.remat,
        overlap_fraction=options.overlap,
        smallest_bytes=parse_bytes(options.smallest),
    )
    result = osdp(question, verify=not options.no_verify, watch=lambda text: say(options, text))
    facts = {"status": result.status, "verified": result.compiled}
    if result.plan is None:
        emit(options, {**facts, "why": result.why.summary}, str(result))
        return 1
    plan = replace(result.plan, workload=spec)
    plan.save(options.output)
    facts |= {
        "estimated_peak_bytes": plan.peak_bytes,
        "compiled_peak_bytes": plan.compiled_peak_bytes,
        "unverified_why": result.why.uncompiled,
        "plan": plan.to_json(),
    }
    emit(options, facts, f"{table(HEADER, rows(plan))}\n{result}\nplan -> {options.output}")
    return 0
