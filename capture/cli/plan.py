"""Recommend the plan of least peak memory; profiles first, unless --profile is given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from capture.cli import options as shared
from capture.cli.compiled import PlanCompiler, add_no_compile
from capture.cli.output import emit, peak_line, say, stage_table, table
from capture.cli.progress import progress
from capture.cli.suggest import cheapest_change
from capture.errors import PlanError, ProfileError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.model.workload import WorkloadSpec
from capture.plan.schedule import SCHEDULES
from capture.predictor.step_time import describe_time, has_times, predicted_timeline, time_summary
from capture.quantities import format_bytes, parse_bytes
from recommender.capture.recommendation import (
    AUTOSTAGE,
    MODES,
    OBJECTIVES,
    SEARCH_NAMES,
    question_violations,
    search_names,
)
from recommender.capture.result import SearchResult

NAME = "plan"
HELP = "recommend the plan of least peak memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_question(parser, remats=shared.REMATS_OF_A_SEARCH)
    shared.add_backend(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        metavar="FILE",
        help="use this profile instead of measuring; again: put several together",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help=(
            "limit per device, such as 40GB (default: what the target can use); exit code 1 if "
            "nothing fits"
        ),
    )
    parser.add_argument(
        "--verify",
        type=shared.at_least(0),
        default=0,
        metavar="K",
        help="compile the stages of the best plans, up to K, and rank again",
    )
    add_no_compile(parser)
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="least peak; least step time that fits; that and the front of both. Times need an "
        "accelerator target "
        "(default: memory, or that of --algorithm)",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--smallest-cluster",
        action="store_true",
        help="the fewest devices of the cluster on which a plan fits",
    )
    asked.add_argument(
        "--largest-batch",
        action="store_true",
        help="the largest global batch that fits with so many micro-batches",
    )
    asked.add_argument(
        "--try-microbatches",
        type=shared.several(1),
        metavar="M,M,...",
        help="numbers of micro-batches to choose the best of",
    )
    parser.add_argument(
        "--try-schedules", action="store_true", help="choose the best of all schedules"
    )
    parser.add_argument(
        "--mode", choices=MODES, default="default", help="paper: the paper's predictor and space"
    )
    parser.add_argument(
        "--algorithm",
        choices=SEARCH_NAMES,
        help="; ".join(
            f"{objective}: {', '.join(search_names(objective))}" for objective in OBJECTIVES
        )
        + (
            f". {AUTOSTAGE} is Alpa's, for step time, on this cost model: the plan to compare "
            "with (default: the first of its objective)"
        ),
    )
    parser.add_argument(
        "--merge-layers",
        type=int,
        metavar="L",
        help="the paper's layer merger: cut between L merged layers only",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("plan.json"),
        metavar="FILE",
        help="default: %(default)s",
    )


def main(options: argparse.Namespace) -> int:
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    limit = None if options.memory is None else parse_bytes(options.memory)
    shared.check_backend(options)
    PlanError.check(_question_violations(options))
    measurements = None
    if options.profile is not None:
        shared.check_profiles_nothing(options)
        profile = _read_profile(options)
    else:
        paper = (options.schedule, num_microbatches) if options.mode == "paper" else None
        if _compiles(options):
            measurements = shared.open_question_measurements(options, cluster, progress(options))
            if (
                refused := _refused(
                    options, measurements, cluster, global_batch, num_microbatches, limit
                )
            ) is not None:
                return refused
        profile = shared.make_profile(
            options,
            cluster,
            global_batch // num_microbatches,
            progress(options),
            paper=paper,
            measurements=measurements,
        )
    knowledge = _knowledge(options, profile, cluster)
    chosen, attempts, found = _chosen(
        options, knowledge, cluster, global_batch, num_microbatches, limit
    )
    result = knowledge.answer(partial(_ask, options, limit, *chosen), known=found)
    cluster, global_batch = chosen[:2]
    document = {
        **result.to_json(),
        "warnings": list(profile.warnings),
        "failures": list(profile.failures),
    }
    summary = f"{result.status}{', extrapolated' * result.extrapolated}: {result.why['summary']}"
    lines = [*shared.layers_note(options, profile), summary]
    if attempts:
        document["attempts"] = [attempt.to_json() for attempt in attempts]
        lines = [attempts_table(attempts), *lines]
    may_ask_on = options.mode == "default" and options.algorithm != AUTOSTAGE
    if result.plan is not None and result.prediction is not None:
        lines += [
            stage_table(result.plan, result.prediction.stages),
            peak_line(result.plan, result.prediction),
        ]
        lines += [str(result.headroom)] if result.headroom else []
        if has_times(profile):
            graph = profile.graph_at(result.plan.microbatch_size)
            document["time"] = time_summary(
                predicted_timeline(result.plan, knowledge.profile), result.plan, graph
            )
            lines.append(describe_time(document["time"]))
        if result.why.get("front", {}).get("points"):
            lines += front_table(result.why["front"])
        if result.status == "ok":
            result.plan.save(options.output)
            lines.append(
                f"plan -> {options.output} (search: {result.search.algorithm}, "
                f"{result.search.seconds * 1e3:.1f} ms)"
            )
    lines += [f"warning: {warning}" for warning in profile.warnings] + [
        f"failed: {failure}" for failure in profile.failures
    ]
    if result.status == "infeasible" and result.memory_limit_bytes is not None and may_ask_on:
        _tell(options, lines)  # what follows may measure, for as long as the answer took
        tried = max([attempt.num_microbatches for attempt in attempts] or [num_microbatches])
        change = cheapest_change(
            options,
            knowledge,
            profile.graph.num_layers,
            cluster,
            global_batch,
            tried,
            result.memory_limit_bytes,
            reprofile=_reprofile(options, cluster, measurements) if measurements else None,
            least_state=partial(
                _least_state_bytes, options, measurements, global_batch // num_microbatches
            )
            if measurements
            else _unknown,
        )
        document["why"] = {**document["why"], "cheapest_change": change}
        lines = [
            f"cheapest change: {change['summary']}"
            if change
            else "no single change of those that were tried fits"
        ]
    emit(options, document, "\n".join(lines))
    return 0 if result.status == "ok" else 1


def _compiles(options: argparse.Namespace) -> bool:
    return options.backend == "compile" and options.mode == "default"


def _tell(options: argparse.Namespace, lines: Sequence[str]) -> None:
    """The answer as far as it is known; with ``--json``, whose document comes at the end, as
    progress."""
    if options.json:
        say(options, "\n".join(lines))
    else:
        print("\n".join(lines), flush=True)
    say(options, "looking for the cheapest change that fits; interrupt where the answer is enough")


def _least_state(
    options: argparse.Namespace,
    measurements: Any,
    size: int,
    cluster: Cluster,
    limit: int | None,
    **asks: Any,
) -> SearchResult:
    """The least that any plan needs for its state, at the cost of tracing
    (``recommender.capture.least_state``)."""
    from profiling_runs.collect import Question
    from recommender.capture.least_state import least_state

    asked = shared.asked(options, asks.pop("microbatch_size", size), **asks)
    names = ("remat", "shard_optimizer", "shard_params", "space")
    question = Question.of(
        cluster, asked["microbatch_size"], **{name: asked[name] for name in names}, paper=None
    )
    backend = measurements.backend
    sharding = backend.sharding(size)
    return least_state(
        backend.traced(size).graph,
        {
            split: sharding.param_bytes(split)
            for split in {choice.param_split for choice in question.choices}
        },
        backend.state_bytes(size),
        question.choices,
        cluster,
        memory_limit_bytes=limit,
        space=shared.read_space(options),
    )


def _least_state_bytes(
    options: argparse.Namespace, measurements: Any, size: int, cluster: Cluster, **asks: Any
) -> int | None:
    result = _least_state(options, measurements, size, cluster, None, **asks)
    return result.peak_bytes if result.stages else None


def _unknown(cluster: Cluster, **asks: Any) -> None:
    return None


def _refused(
    options: argparse.Namespace,
    measurements: Any,
    cluster: Cluster,
    global_batch: int,
    num_microbatches: int,
    limit: int | None,
) -> int | None:
    """The exit code where no plan can exist or fit, which is told at once; None if one may, and is
    worth measuring for."""
    from recommender.capture.least_state import beyond_memory

    memory, size = Target.load(cluster.target).memory, global_batch // num_microbatches
    limit = memory.usable_bytes if limit is None and memory is not None else limit
    found = _least_state(options, measurements, size, cluster, limit)
    if found.stages and limit is not None:
        needs = (
            "parameters, gradients and optimizer state alone need at least "
            f"{format_bytes(found.peak_bytes)} per device"
        )
        say(options, f"{needs}; limit {format_bytes(limit)}")
    if found.status == "ok" or (
        not found.stages and options.smallest_cluster
    ):  # on fewer devices a plan may exist
        return None
    result = beyond_memory(found)
    document, lines = {**result.to_json(), "warnings": []}, [f"infeasible: {result.why['summary']}"]
    if found.stages and limit is not None:
        change = cheapest_change(
            options,
            None,
            measurements.backend.traced(size).graph.num_layers,
            cluster,
            global_batch,
            num_microbatches,
            limit,
            reprofile=_reprofile(options, cluster, measurements),
            least_state=partial(_least_state_bytes, options, measurements, size),
        )
        document["why"] = {**document["why"], "cheapest_change": change}
        lines.append(
            f"cheapest change: {change['summary']}"
            if change
            else "no single change of those that were tried can fit"
        )
    emit(options, document, "\n".join(lines))
    return 1


def _question_violations(options: argparse.Namespace) -> Sequence[Violation]:
    return question_violations(
        options.schedule,
        options.objective,
        options.mode,
        options.algorithm,
        merge_layers=options.merge_layers,
        any_divisor=options.any_divisor,
    )


def _ask(
    options: argparse.Namespace,
    limit: int | None,
    cluster: Cluster,
    global_batch: int,
    num_microbatches: int,
    schedule: str,
    profile: Profile,
) -> Any:
    """One recommendation."""
    from recommender import recommend

    return recommend(
        profile,
        cluster,
        global_batch_size=global_batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        memory_limit_bytes=limit,
        objective=options.objective,
        mode=options.mode,
        algorithm=options.algorithm,
        space=shared.read_space(options),
        merge_layers=options.merge_layers,
    )


def _knowledge(options: argparse.Namespace, profile: Profile, cluster: Cluster) -> Any:
    """What is known, and what compiles the rest (``recommender.capture.verified.Knowledge``).

    Raises:
        ProfileError: ``verify-mode`` for ``--verify`` with the paper's predictor, or with
            ``--no-compile``.
    """
    from recommender.capture.verified import MOST_PLANS, Knowledge

    if options.verify and options.mode != "default":
        raise ProfileError.of(
            "--verify looks compiled stages up in the default predictor; leave out --mode paper.",
            "verify-mode",
        )
    if options.verify and options.no_compile:
        raise ProfileError.of(
            "--verify compiles what --no-compile does not; leave out one of them.", "verify-mode"
        )
    if (
        options.no_compile or not profile.measurements
    ):  # executed runs alone: what a compiler says is not what they measure
        return Knowledge(profile)
    compiler = PlanCompiler(
        options,
        profile,
        lambda: shared.open_profile_measurements(options, profile, cluster, progress(options)),
    )
    return Knowledge(profile, compiler, options.verify or MOST_PLANS, always=bool(options.verify))


def _chosen(
    options: argparse.Namespace,
    knowledge: Any,
    cluster: Cluster,
    global_batch: int,
    num_microbatches: int,
    limit: int | None,
) -> tuple[tuple[Cluster, int, int, str], Sequence[Any], Any]:
    """(cluster, global batch, micro-batches, schedule) to plan for, what was tried to find them,
    and the answer that they were chosen for.

    Raises:
        PlanError: ``plan-extent`` for the largest batch without a limit.
    """
    from recommender.capture.extent import best_of, largest_batch, smallest_cluster

    asked = (cluster, global_batch, num_microbatches, options.schedule)

    def ask(cluster: Cluster, global_batch: int, num_microbatches: int, schedule: str) -> Any:
        return _ask(
            options, limit, cluster, global_batch, num_microbatches, schedule, knowledge.profile
        )

    def settled(*about: Any) -> Any:
        return knowledge.answer(partial(_ask, options, limit, *about), any_that_fits=True)

    if options.smallest_cluster:
        best, attempts = smallest_cluster(settled, *asked)
    elif options.largest_batch:
        if limit is None and Target.load(cluster.target).memory is None:
            raise PlanError.of(
                f"target={cluster.target!r} has no limit, so no batch is the largest; give "
                "--memory.",
                "plan-extent",
            )
        step = min(knowledge.profile.microbatch_sizes)
        best, attempts = largest_batch(
            ask, settled, cluster, step, num_microbatches, options.schedule
        )
    elif options.try_microbatches or options.try_schedules:
        counts = [num_microbatches]
        if options.try_microbatches:
            counts = list(options.try_microbatches)
        schedules = tuple(SCHEDULES) if options.try_schedules else (options.schedule,)
        best, attempts = best_of(ask, settled, cluster, global_batch, counts, schedules)
    else:
        return asked, (), None
    if best is None:
        return asked, attempts, None
    return (
        (best.cluster, best.global_batch_size, best.num_microbatches, best.schedule),
        attempts,
        best.result,
    )


def attempts_table(attempts: Sequence[Any]) -> str:
    """What was tried, one line each."""
    rows = [
        [
            f"{attempt.cluster}, batch {attempt.global_batch_size}, {attempt.num_microbatches} "
            f"micro-batches, {attempt.schedule}",
            attempt.result.status,
            format_bytes(attempt.result.peak_bytes) if attempt.result.plan else "-",
            attempt.rests_on if attempt.result.plan else "-",
            "-"
            if attempt.result.search.step_seconds is None
            else f"{attempt.result.search.step_seconds:.4g} s",
        ]
        for attempt in attempts
    ]
    return table(["tried", "status", "peak", "is", "step"], rows)


def front_table(front: Mapping[str, Any]) -> list[str]:
    """The front of peak memory against step time, smallest peak first."""
    rows = [
        [
            format_bytes(point["peak_bytes"]),
            f"{point['step_seconds']:.4g} s",
            ", ".join(
                f"{s['layers'][0]}-{s['layers'][1]} ({s['data_parallel']}x{s['tensor_parallel']})"
                for s in point["stages"]
            ),
        ]
        for point in front["points"]
    ]
    said = "every plan that none beats in both" if front["complete"] else "a sample with both ends"
    said += ", extrapolated" * front["extrapolated"]
    return [
        f"front of memory and time ({said}):",
        table(["peak", "step", "layers (dp x tp)"], rows),
    ]


def _reprofile(
    options: argparse.Namespace, cluster: Cluster, measurements: Any
) -> Callable[..., Profile]:
    global_batch, num_microbatches = shared.read_batch(options)

    def reprofile(*, microbatch_size: int | None = None, **changes: Any) -> Profile:
        size = microbatch_size or global_batch // num_microbatches
        # Of a plan that is not made, no interval is shown: nothing is compiled to calibrate it.
        return shared.make_profile(
            options,
            cluster,
            size,
            progress(options),
            measurements=measurements,
            calibration_plans=0,
            **changes,
        )

    return reprofile


def _read_profile(options: argparse.Namespace) -> Profile:
    """The profile of one file or several, for the workload as it is named now.

    Raises:
        ProfileError: ``profile-mixture`` if several do not belong together, ``profile-other-model``
            if it is of another workload or number of layers, ``profile-choice`` if nothing was
            profiled with the options of the stages.
    """
    profiles, named = (
        [Profile.load(path) for path in options.profile],
        WorkloadSpec.parse(options.workload),
    )
    profile = (
        profiles[0]
        if len(profiles) == 1
        else merge_profiles(profiles, shared.read_cluster(options).target)
    )
    files = ", ".join(map(str, options.profile))
    if profile.workload is not None and not _same_workload(profile.workload, named):
        raise ProfileError.of(
            f"profile {files!r} is of {profile.workload}, and the workload is {named}; profile "
            "that one.",
            "profile-other-model",
        )
    if options.num_layers not in (None, profile.graph.num_layers):
        raise ProfileError.of(
            f"profile {files!r} has num_layers={profile.graph.num_layers}, and --num-layers asks "
            f"for {options.num_layers}; "
            "profile with that number.",
            "profile-other-model",
        )
    if options.tensor_parallel_rule != profile.tensor_parallel_rule:
        raise ProfileError.of(
            f"profile {files!r} has tensor_parallel_rule={profile.tensor_parallel_rule!r}, and "
            "--tensor-parallel-rule is "
            f"{options.tensor_parallel_rule!r}; ask for that of the profile, or profile again.",
            "profile-choice",
        )
    policies = shared.remat_policies(options)
    measurements = {
        config: cost
        for config, cost in profile.measurements.items()
        if config.choice.remat in policies
        and (
            options.shard_params
            if config.choice.shard_params
            else config.choice.shard_optimizer == options.shard_optimizer
        )
    }
    kinds = {(c.remat, c.shard_optimizer) for c in profile.choices if not c.shard_params}
    if not profile.measurements and profile.paper is not None:  # executed runs alone
        kinds = {(row["remat"], row["shard_optimizer"]) for row in profile.paper["statistics"]}
    if not {(policy, options.shard_optimizer) for policy in policies} <= kinds:
        profiled = sorted(f"remat={remat}, shard_optimizer={shard}" for remat, shard in kinds)
        raise ProfileError.of(
            f"profile {files!r} has no stage with remat={options.remat}, "
            f"shard_optimizer={options.shard_optimizer}; it has "
            f"{'; '.join(profiled) or 'none'}. Ask for those, or profile again.",
            "profile-choice",
        )
    has_replicas = any(
        choice.data_parallel > 1 for choice in profile.choices
    )  # without them there is nothing to split
    if (
        options.shard_params
        and has_replicas
        and not any(choice.shard_params for choice in profile.choices)
    ):
        raise ProfileError.of(
            f"profile {files!r} has no stage that splits its parameters over replicas, and "
            "--shard-params asks for some; profile with it.",
            "profile-choice",
        )
    return replace(profile, workload=named, measurements=measurements)


def _same_workload(one: WorkloadSpec, other: WorkloadSpec) -> bool:
    """Whether two names mean the same function; a file may have moved with its profile."""
    return (Path(one.location).name, one.function, dict(one.arguments)) == (
        Path(other.location).name,
        other.function,
        dict(other.arguments),
    )
