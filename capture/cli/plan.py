"""Recommend the plan of least peak memory; profiles first, unless --profile is given."""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.cli import options as shared
from capture.cli.output import emit, progress, stage_table
from capture.profile import Profile
from capture.quantities import format_bytes, parse_bytes

NAME = "plan"
HELP = "recommend the plan of least peak memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser)
    shared.add_cluster(parser)
    shared.add_batch(parser)
    shared.add_store(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="use this profile instead of measuring")
    parser.add_argument("--memory", metavar="SIZE", help="limit per device, such as 40GB; exit code 1 if nothing fits")
    parser.add_argument("--mode", choices=("default", "paper"), default="default", help="paper: the paper's predictor and space")
    parser.add_argument("--algorithm", choices=("minmax", "enumerate", "mcap"), default="minmax", help="search (default: %(default)s)")
    parser.add_argument("--merge-layers", type=int, metavar="L", help="the paper's layer merger: cut between L merged layers only")
    parser.add_argument("-o", "--output", type=Path, default=Path("plan.json"), metavar="FILE", help="default: %(default)s")


def main(options: argparse.Namespace) -> int:
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    limit = None if options.memory is None else parse_bytes(options.memory)
    if options.profile is not None:
        profile = Profile.load(options.profile)
    else:
        needs_paper = options.mode == "paper" or options.merge_layers is not None
        paper = (options.schedule, num_microbatches) if needs_paper else None
        profile = shared.make_profile(options, cluster, global_batch // num_microbatches, progress(options), paper=paper)
    from recommender import recommend

    result = recommend(
        profile,
        cluster,
        global_batch_size=global_batch,
        num_microbatches=num_microbatches,
        schedule=options.schedule,
        memory_limit_bytes=limit,
        mode=options.mode,
        algorithm=options.algorithm,
        whole_nodes=options.whole_nodes,
        any_divisor=options.any_divisor,
        merge_layers=options.merge_layers,
    )
    lines = [f"{result.status}: {result.why['summary']}"]
    if result.plan is not None and result.prediction is not None:
        lines += [stage_table(result.plan, result.prediction.stages), f"peak {format_bytes(result.prediction.peak_bytes)} per device"]
        if result.status == "ok":
            result.plan.save(options.output)
            lines.append(f"plan -> {options.output} (search: {result.search.algorithm}, {result.search.seconds * 1e3:.1f} ms)")
    lines += [f"warning: {warning}" for warning in profile.warnings]
    emit(options, {**result.to_json(), "warnings": list(profile.warnings)}, "\n".join(lines))
    return 0 if result.status == "ok" else 1
