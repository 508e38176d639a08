"""List the jobs of a profile: how many of which kind, how many of them the store has, and what the
others are estimated to cost.

Nothing is measured and no device is needed. The options are those of ``capture profile``.
"""

from __future__ import annotations

import argparse
from typing import Any

from capture.cli import options as shared
from capture.cli.output import emit, table

NAME = "jobs"
HELP = "list the jobs of a profile and what they cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_question(parser, remats=shared.REMATS_OF_A_SEARCH)
    shared.add_backend(parser)
    parser.add_argument(
        "--mode",
        choices=("default", "paper"),
        default="default",
        help="paper: the paper's profiling runs as well",
    )


def main(options: argparse.Namespace) -> int:
    listing = jobs_of(options)
    emit(
        options,
        {"workload": options.workload, "cluster": options.cluster, **listing.to_json()},
        as_text(listing),
    )
    return 0


def jobs_of(options: argparse.Namespace) -> Any:
    """The listing that the options of a profile ask for."""
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    shared.check_backend(options)
    paper = (options.schedule, num_microbatches) if options.mode == "paper" else None
    return shared.list_jobs(options, cluster, global_batch // num_microbatches, paper=paper)


def as_text(listing: Any) -> str:
    """A line per kind, and one for all."""
    rows = [
        [name, kind["num_jobs"], kind["num_done"], duration(kind["seconds"])]
        for name, kind in listing.kinds.items()
    ]
    rows.append(["all", listing.num_jobs, listing.num_done, duration(listing.seconds)])
    text = table(["kind", "jobs", "done", "one worker needs about"], rows)
    return text + (
        f"\nguessed, because the store knows none of its kind: {', '.join(listing.guessed)}"
        if listing.guessed
        else ""
    )


def duration(seconds: float) -> str:
    """For people.

    Example:
        >>> duration(42), duration(754), duration(7500)
        ('42 s', '12 min 34 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if whole < 6000
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
