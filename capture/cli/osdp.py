"""Choose for every operator of a model whether to replicate, shard or split its parameters over
data-parallel devices (OSDP)."""

from __future__ import annotations

import argparse
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.options import Option
from capture.cli.output import emit, say, table, warning_lines
from capture.errors import ClusterError, PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.kinds import kind_of, load_plan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import Plan
from capture.quantities import parse_bytes
from capture.report.sharding import HEADER, rows
from profiling_runs.collect import split_warnings
from recommender.osdp import ShardingQuestion, osdp
from recommender.osdp.question import SMALLEST_BYTES

SYSTEM = "osdp"
_NO_VERIFY = (
    "do not compile the plan's train step for the target: faster, and memory is an estimate"
)
#: No other system has these.
OPTIONS = (
    Option(
        "batch",
        "osdp: examples per device (default: that of largest throughput; of a plan that is asked "
        "again: its own)",
        read=shared.at_least(1),
        metavar="B",
    ),
    Option(
        "most",
        "osdp: the largest batch per device to choose from",
        read=shared.at_least(1),
        metavar="B",
    ),
    Option(
        "slices",
        "osdp: slices per operator to choose from (default: 1,4)",
        (1, 4),
        shared.several(1),
        metavar="G,G,...",
    ),
    Option("partly", "osdp: some slices of an operator may be replicated, others sharded", False),
    Option(
        "overlap",
        "osdp: of computation and communication, the fraction of the lesser that is hidden; above "
        "0, gathers look ahead (default: 0)",
        0.0,
        float,
        metavar="F",
    ),
    Option(
        "smallest",
        "osdp: replicate parameters that are smaller, such as 64KiB (default: 1 MiB)",
        str(SMALLEST_BYTES),
        metavar="SIZE",
    ),
)
OWN = {option.name for option in OPTIONS}
#: And those that it shares in ``capture plan``.
SHARED = {"workload", "cluster", "target", "global_batch", "memory", "remat", "no_verify", "output"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "asked_of",
        metavar="WORKLOAD|PLAN",
        help=(
            "path/to/file.py:function?key=value or module:function; or a plan file (.json) of any "
            "kind, whose workload, devices and examples per step are asked again"
        ),
    )
    parser.add_argument(
        "--cluster", metavar="NxG", help="N nodes of G devices (default: those of PLAN)"
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="device kind, such as h100, or a target file (.json) (default: that of PLAN)",
    )
    shared.add_plan_workload(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="limit per device, such as 30GiB (default: what the target can use)",
    )
    shared.add(
        parser,
        replace(shared.GLOBAL_BATCH, help="examples in a step, in the place of --batch"),
        *OPTIONS,
        Option(
            "remat",
            "compute every operator again from its inputs in the backward pass",
            False,
        ),
        Option("no_verify", _NO_VERIFY, False),
        shared.output("sharding.json"),
    )


def plan(options: argparse.Namespace) -> int:
    """Answer ``capture plan --system osdp``.

    Raises:
        PlanError: ``plan-system`` without a workload, ``osdp-remat`` for recomputation of anything
            but all operators, and those of ``main``.
    """
    if options.workload is None:
        raise PlanError.of("--system osdp plans for a workload; give WORKLOAD.", "plan-system")
    if options.remat not in (None, "none", "full"):
        raise PlanError.of(
            f"--remat {options.remat}: --system osdp recomputes every operator or none; give full "
            "or none.",
            "osdp-remat",
        )
    asked.say_one_device(options)
    posed = copy(options)
    posed.asked_of, posed.workload, posed.remat = options.workload, None, options.remat == "full"
    posed.cluster = options.cluster or shared.ONE_DEVICE
    return main(posed)


def main(options: argparse.Namespace) -> int:
    plan = _plan(options)
    spec = (
        WorkloadSpec.parse(options.asked_of) if plan is None else asked.workload_of(options, plan)
    )
    cluster = _cluster(options, plan)
    asked.prepare(cluster)
    further = {
        "where": cluster,
        "memory_limit": options.memory,
        "batch_size": _batch(options, cluster),
        "max_batch_size": options.most,
        "granularities": options.slices,
        "partly": options.partly,
        "remat": options.remat,
        "overlap_fraction": options.overlap,
        "smallest_bytes": parse_bytes(options.smallest),
    }
    pose = ShardingQuestion if plan is None else partial(ShardingQuestion.of_plan, plan)
    question = pose(spec.load(), **further)
    result = osdp(
        question,
        verify=not options.no_verify,
        watch=lambda text: say(options, text),
        left_out="--no-verify",
    )
    size = result.plan.batch_size if result.plan else question.batch_size or 1
    facts = {
        **result.to_json(),
        "verified": result.compiled,
        "warnings": split_warnings(question.workload, size, "examples of a device"),
    }
    if result.plan is None:
        emit(options, facts, "\n".join([str(result), *warning_lines(facts)]))
        return 1
    found = replace(result.plan, workload=spec)
    found.save(options.output)
    facts |= {
        "estimated_peak_bytes": found.peak_bytes,
        "compiled_peak_bytes": found.compiled_peak_bytes,
        "interval_bytes": found.interval_bytes and list(found.interval_bytes),
        "unverified_why": result.why.uncompiled,
        "plan": found.to_json(),
    }
    lines = [table(HEADER, rows(found)), str(result), f"plan -> {options.output}"]
    emit(options, facts, "\n".join([*lines, *warning_lines(facts)]))
    return 0


def _plan(options: argparse.Namespace) -> Plan | ShardingPlan | None:
    """The plan that is asked again; None for a workload, whose arguments may end in .json, too.

    Raises:
        PlanError: ``osdp-workload`` for ``--workload`` beside a workload, ``plan-kind`` for a plan
            of packs or of an array.
    """
    named = options.asked_of
    if named.endswith(".json") and ":" not in Path(named).name:
        plan = load_plan(named)
        if not isinstance(plan, Plan | ShardingPlan):
            raise PlanError.of(
                f"{named!r} is a plan of kind {kind_of(plan).name!r}, and names no devices that "
                "share operators; give the workload and --cluster instead.",
                "plan-kind",
            )
        return plan
    if options.workload is not None:
        raise PlanError.of(
            f"{named} and --workload {options.workload} are two workloads; give one of them.",
            "osdp-workload",
        )
    return None


def _batch(options: argparse.Namespace, cluster: Cluster) -> int | None:
    """Examples per device, where an option says how many.

    Raises:
        PlanError: ``osdp-plan-batch`` for both numbers, or for examples that the devices cannot
            share equally.
    """
    batch: int | None = options.batch
    if options.global_batch is None:
        return batch
    if batch is not None or options.global_batch % cluster.num_devices:
        why = (
            f"--batch {batch} says it, too; give one of them"
            if batch is not None
            else f"{cluster.num_devices} devices cannot share them equally; give a multiple"
        )
        raise PlanError.of(f"--global-batch {options.global_batch}: {why}.", "osdp-plan-batch")
    each: int = options.global_batch // cluster.num_devices
    return each


def _cluster(options: argparse.Namespace, plan: Plan | ShardingPlan | None) -> Cluster:
    """What the options name, and for the rest the plan.

    Raises:
        ClusterError: ``osdp-cluster`` if that leaves something open.
    """
    values = {"cluster": options.cluster, "target": options.target}
    if plan is not None:
        devices = plan.known_cluster
        values["cluster"] = options.cluster or str(devices)
        values["target"] = options.target or devices.target
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if missing:
        raise ClusterError.of(
            f"without {' and '.join(missing)} the devices are not known; name them, such as "
            "--cluster 1x8 --target h100, or give a plan file, which has them.",
            "osdp-cluster",
        )
    return asked.read_cluster(values)
