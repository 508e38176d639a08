"""List the jobs of a profile: how many of which kind, how many of them the store has, and what the
others are estimated to cost.

Nothing is measured and no device is needed. The options are those of ``capture profile``.
"""

from __future__ import annotations

import argparse

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.options import add
from profiling_runs.listing import Listing, list_jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser)
    add(parser, *shared.QUESTION, *shared.STORE)
    parser.add_argument(
        "--mode",
        choices=("default", "paper"),
        default="default",
        help="paper: the paper's profiling runs as well",
    )


def main(options: argparse.Namespace) -> int:
    asked.say_one_device(options)
    question = asked.profile_question(vars(options))
    asked.prepare(question)
    listing = list_jobs(question, asked.open_store(options))
    emit(options, listing, as_text(listing))
    return 0


def as_text(listing: Listing) -> str:
    """Return a table of jobs with a line per kind, and one for all."""
    rows = [
        [name, kind["num_jobs"], kind["num_done"], duration(kind["seconds"])]
        for name, kind in listing.kinds.items()
    ]
    rows.append(["all", listing.num_jobs, listing.num_done, duration(listing.worker_seconds)])
    text = table(["kind", "jobs", "done", "one worker needs about"], rows)
    return text + (
        f"\nguessed, because the store knows none of its kind: {', '.join(listing.guessed)}"
        if listing.guessed
        else ""
    )


def duration(seconds: float) -> str:
    """Return a number of seconds in words for people.

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
