"""What of a question is left to the search: whatever an option of ``capture plan`` does not say,
where seconds are known to choose by."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.fixed import Fixed
from capture.errors import PlanError
from capture.machine.target import Target
from capture.options import Option
from profiling_runs.question import ProfileQuestion
from recommender.whole import WholeQuestion


def close(options: argparse.Namespace, defaults: Sequence[Option]) -> None:
    """Give options that were left open their defaults."""
    for option in defaults:
        if getattr(options, option.name) is None:
            setattr(options, option.name, option.default)


def whole_question(options: argparse.Namespace, fixed: Fixed | None = None) -> WholeQuestion | None:
    """Return the whole question of the options as they were given, with what is fixed. None where
    the target's speed is not known: nothing but memory would decide, which asks for as many
    micro-batches as there are examples.

    Raises:
        PlanError: ``plan-fix`` where something is fixed and the speed is not known, and the codes
            of ``WholeQuestion``.
    """
    said = vars(options)
    cluster, counts = asked.read_cluster(said), options.microbatches
    if Target.load(cluster.target).rates is None:
        if fixed is not None:
            raise PlanError.of(
                f"--fix searches for speed, and the target {cluster.target!r} has no rates; name "
                "an accelerator, such as --target h100.",
                "plan-fix",
            )
        return None
    if counts is not None and options.try_microbatches not in (None, (counts,)):
        raise PlanError.of(
            f"--microbatches {counts} is what --try-microbatches chooses; leave out one of them.",
            "plan-batch",
        )
    if options.largest_batch and counts is None:
        counts = shared.MICROBATCHES.default  # with enough of them any batch fits
    if options.global_batch is None or counts is not None:
        num = shared.MICROBATCHES.default if counts is None else counts
        asked_for = {**said, "microbatches": num}
        global_batch, _ = asked.read_batch(asked_for)
    else:
        global_batch = options.global_batch
    default = options.parser.get_default
    return WholeQuestion(
        cluster,
        global_batch,
        options.objective or "throughput",
        options.memory,
        options.try_microbatches or (None if counts is None else (counts,)),
        options.schedule,
        None if options.remat == shared.AUTO else options.remat,
        options.shard_optimizer,
        options.shard_params,
        options.sequence_parallel,
        options.whole_nodes,
        options.any_divisor,
        tuple(name for name, value in said.items() if value != default(name))
        + (fixed.decisions if fixed else ()),
        None if fixed is None else fixed.kept,
    )


def of_whole(question: ProfileQuestion, whole: WholeQuestion) -> ProfileQuestion:
    """Return the question of what is measured of a model for the whole question, at its largest
    micro-batches."""
    size = whole.question().microbatch_size
    return replace(
        question, microbatch_size=size, choices=tuple(whole.choices(size)), space=whole.space
    )
