"""Measure a model's layers (M_i, M_a) for every way in which a stage may use the cluster's devices.

The same command resumes after an interruption: finished measurements are in the store.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.cli import options as shared
from capture.cli.output import emit, progress
from capture.quantities import parse_bytes

NAME = "profile"
HELP = "measure a model's layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_question(parser, remats=shared.REMATS_OF_A_SEARCH)
    shared.add_backend(parser)
    parser.add_argument("--memory", metavar="SIZE", help="with --backend run: runs that need more on a device, such as 40GB, are left out")
    parser.add_argument("--mode", choices=("default", "paper"), default="default", help="paper: make the paper's profiling runs as well")
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="default: %(default)s")


def main(options: argparse.Namespace) -> int:
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    shared.check_backend(options)
    paper = (options.schedule, num_microbatches) if options.mode == "paper" else None
    limit = None if options.memory is None else parse_bytes(options.memory)
    result = shared.make_profile(
        options, cluster, global_batch // num_microbatches, progress(options), paper=paper, memory_limit_bytes=limit
    )
    result.save(options.output)
    graph = result.graph
    low, high = result.calibration.interval() if result.calibration else (None, None)
    document = {
        "profile": str(options.output),
        "num_layers": graph.num_layers,
        "num_parameters": graph.num_parameters,
        "num_measurements": len(result.measurements),
        "num_runs": None if result.paper is None else result.paper["num_runs"],
        "num_failed_runs": None if result.paper is None else result.paper["num_failed_runs"],
        "microbatch_sizes": list(result.microbatch_sizes),
        "interval_factors": [low, high],
        "warnings": list(result.warnings),
        "failures": list(result.failures),
        "provenance": dict(result.provenance),
    }
    text = (
        f"{graph.num_layers} layers, {graph.num_parameters:,} parameters: {len(result.measurements)} measurements at micro-batch "
        f"sizes {', '.join(map(str, result.microbatch_sizes))} -> {options.output}"
    )
    if result.paper is not None:
        how = "compiled and replayed" if options.backend == "compile" else "executed"
        text += f"\nthe paper's profiling runs, {how}: {result.paper['num_runs']}, of which {result.paper['num_failed_runs']} failed"
    notes = [f"warning: {warning}" for warning in result.warnings] + [f"failed: {failure}" for failure in result.failures]
    emit(options, document, "\n".join([text, *notes]))
    return 0
