"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capture import environment
from capture.cli.output import say
from capture.cli.progress import progress
from capture.errors import PlanError, ProfileError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target, resolved_target, target_names
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import (
    REMAT_POLICIES,
    TENSOR_PARALLEL_RULES,
    Plan,
    Remat,
    TensorParallelRule,
    batch_violations,
)

BACKENDS = ("compile", "run", "alpa")
#: What the backward pass recomputes is chosen per stage, by the search.
AUTO = "auto"
REMATS_OF_A_SEARCH = (*REMAT_POLICIES, AUTO)
#: Codes of errors of the machines, not of the input: the same command resumes.
ENDED_EARLY = {"store-write", "profile-worker", "ray-lost"}
DEFAULT_NEIGHBOURS = 2
DEFAULT_CALIBRATION_PLANS = 12
DEFAULT_MICROBATCHES = 16
ONE_DEVICE = "1x1"
DEFAULT_MICROBATCH_SIZE = 16


def add_workload(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "workload",
        metavar="WORKLOAD",
        nargs=None if required else "?",
        help="path/to/file.py:function?key=value or module:function",
    )
    parser.add_argument(
        "--num-layers",
        type=int,
        metavar="L",
        help=(
            "cut into L layers of nearly equal work (default: at the model's marks; without marks "
            "a number is chosen, and said)"
        ),
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", type=Path, metavar="PLAN", help="plan file, of capture plan or written by hand"
    )


def add_plan_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="WORKLOAD", help="of the plan, if it names none or the file has moved"
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        metavar="NxG",
        help="N nodes of G devices, or a list of nodes such as 4+2 (default: one device)",
    )
    parser.add_argument(
        "--target",
        default="cpu",
        metavar="NAME",
        help=(
            f"device kind: {', '.join(target_names())}, or a target file (.json); it need not be "
            "there (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--whole-nodes", action="store_true", help="stages may span 2, 4, 8, ... whole nodes"
    )
    parser.add_argument(
        "--any-divisor",
        action="store_true",
        help="degrees may be any divisor of a node, not only powers of two",
    )


def add_question(
    parser: argparse.ArgumentParser,
    schedules: Sequence[str] = tuple(SCHEDULES),
    schedule: str = "1f1b",
    remats: Sequence[str] = REMAT_POLICIES,
    required: bool = True,
) -> None:
    """What is asked (model, cluster, batch, schedule), and how its measurements are made;
    ``required`` is of the model."""
    add_workload(parser, required)
    add_cluster(parser)
    add_batch(parser, schedules, schedule, remats)
    add_store(parser)
    add_profiling(parser)


def add_batch(
    parser: argparse.ArgumentParser, schedules: Sequence[str], schedule: str, remats: Sequence[str]
) -> None:
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="B",
        help=f"examples in a step (default: {DEFAULT_MICROBATCH_SIZE} per micro-batch)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=DEFAULT_MICROBATCHES,
        metavar="M",
        help="micro-batches in a step (default: %(default)s)",
    )
    parser.add_argument(
        "--schedule",
        choices=tuple(schedules),
        default=schedule,
        help="pipeline schedule (default: %(default)s)",
    )
    parser.add_argument(
        "--remat",
        choices=remats,
        default="none",
        help="what the backward pass recomputes"
        + ("; auto: chosen per stage" if AUTO in remats else "")
        + " (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="split optimizer state over data-parallel replicas",
    )
    if AUTO in remats:
        parser.add_argument(
            "--shard-params",
            action="store_true",
            help=(
                "let stages also split parameters, gradients and optimizer state over replicas "
                "where that is better (ZeRO stage 3)"
            ),
        )
    parser.add_argument(
        "--tensor-parallel-rule",
        choices=TENSOR_PARALLEL_RULES,
        default="auto",
        help="how parameters are split (default: %(default)s)",
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="measurements, kept and reused (default: ~/.cache/capture/store.sqlite)",
    )
    parser.add_argument(
        "--workers",
        type=at_least(0),
        metavar="N",
        help="worker processes that measure, at most; 0: this one (default: 2, on Ray all)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=(
            "measure on a Ray cluster: auto (the one this machine is a part of), local, or an "
            "address"
        ),
    )
    parser.add_argument(
        "--accelerator",
        metavar="TYPE",
        help="with --ray and --backend run: Ray's name of the target's devices, such as A100",
    )
    parser.add_argument(
        "--job-timeout",
        type=at_least(1),
        metavar="S",
        help=(
            "seconds after which a worker is ended that is not done, more where the machine is "
            "busy (default: 3600)"
        ),
    )


def add_profiling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--neighbours",
        type=at_least(1),
        default=DEFAULT_NEIGHBOURS,
        metavar="N",
        help="most neighbours of M_a (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration-plans",
        type=at_least(0),
        default=DEFAULT_CALIBRATION_PLANS,
        metavar="P",
        help="random plans that calibrate the interval (default: %(default)s)",
    )


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that has a smallest value.

    Example:
        >>> at_least(1)("0")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: '0' is no whole number of at least 1. [option-number]
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number of at least {least}. [option-number]"
            )
        return int(text)

    return read


def several(least: int) -> Callable[[str], tuple[int, ...]]:
    """The type of whole numbers with commas between them.

    Example:
        >>> several(1)("2,8")
        (2, 8)
    """
    return lambda text: tuple(map(at_least(least), text.split(",")))


def read_cluster(options: argparse.Namespace) -> Cluster:
    """The cluster, of a known target; one device, and that is said, where none is named.

    Raises:
        TargetError: as ``Target.load``.
    """
    Target.load(options.target)
    if options.cluster is None:
        options.cluster = ONE_DEVICE
        say(
            options,
            f"for one device (--cluster {ONE_DEVICE}); --cluster NxG is for N nodes of G devices",
        )
    return Cluster.parse(options.cluster, resolved_target(options.target, Path()))


def prepare(*clusters: Cluster) -> None:
    """Make this process one that compiles for the clusters: as many virtual devices, and no search
    for devices that need not be there."""
    platforms = {Target.load(cluster.target).platform for cluster in clusters}
    environment.prepare(
        num_devices=max(cluster.num_devices for cluster in clusters),
        platform=max(platforms, key=lambda platform: platform != "cpu"),
    )


def read_batch(options: argparse.Namespace) -> tuple[int, int]:
    """(global batch size, number of micro-batches).

    Raises:
        PlanError: ``plan-batch``.
    """
    global_batch = (
        options.global_batch
        if options.global_batch is not None
        else DEFAULT_MICROBATCH_SIZE * max(1, options.microbatches)
    )
    PlanError.check(batch_violations(global_batch, options.microbatches))
    return global_batch, options.microbatches


def open_store(options: argparse.Namespace) -> Store:
    return Store(options.store or environment.default_store_path())


def where_of(options: argparse.Namespace) -> Any:
    """Where jobs run (``profiling_runs.Where``); ``options`` are those of ``add_store``."""
    from profiling_runs.pools.where import DEFAULT_TIMEOUT_SECONDS, Where

    return Where(
        options.workers,
        options.ray,
        options.accelerator,
        options.job_timeout or DEFAULT_TIMEOUT_SECONDS,
    )


def open_plan_measurements(options: argparse.Namespace, plan: Plan, progress: Any) -> Any:
    """Measurements of a plan's workload, for its target; ``options`` are those of
    ``add_plan_workload`` and ``add_store``."""
    return _open_measurements(
        options,
        workload_of(plan, options.workload),
        plan.cluster,
        plan.num_layers if plan.auto_layers else None,
        plan.tensor_parallel_rule,
        progress,
        unmarked_layers=plan.num_layers,
    )


def with_prediction(
    options: argparse.Namespace, plan: Plan, profile: Profile | None
) -> tuple[Plan, Profile | None]:
    """A plan with a prediction, and the profile that is known by then: one by hand is predicted,
    and profiled for that if need be.

    ``options`` are those of ``add_plan_workload``, ``add_store`` and ``add_profiling``.

    Raises:
        PlanError: ``plan-workload`` if there is nothing to profile.
    """
    if plan.prediction is not None:
        return plan, profile
    if profile is None:
        say(
            options,
            "the plan has no prediction and there is no --profile: profiling "
            f"{workload_of(plan, options.workload)} for its stages",
        )
        profile = _profile_of(options, plan)
    from recommender.capture.recommendation import predict_plan

    return plan.with_(prediction=predict_plan(profile, plan).to_json()), profile


def _profile_of(options: argparse.Namespace, plan: Plan) -> Profile:
    """A profile of the degrees that a plan's stages have."""
    measurements = open_plan_measurements(options, plan, progress(options))
    from profiling_runs import profile
    from profiling_runs.verify import check_model

    check_model(plan, measurements)
    return profile(
        workload_of(plan, options.workload),
        plan.cluster,
        microbatch_size=plan.microbatch_size,
        choices=sorted({StageChoice.of(stage) for stage in plan.stages}),
        num_neighbours=options.neighbours,
        calibration_plans=options.calibration_plans,
        measurements=measurements,
    )


def open_profile_measurements(
    options: argparse.Namespace, profile: Profile, cluster: Cluster, progress: Any
) -> Any:
    """Measurements of a profile's workload, cut and split as there; ``options`` are those of
    ``add_store``."""
    num_layers = profile.graph.num_layers if profile.auto_layers else None
    spec = WorkloadSpec.parse(options.workload) if options.workload else profile.workload
    if spec is None:
        raise PlanError.of(
            "the profile was made from Python objects and names no workload; give --workload.",
            "plan-workload",
        )
    return _open_measurements(
        options, spec, cluster, num_layers, profile.tensor_parallel_rule, progress
    )


def open_question_measurements(options: argparse.Namespace, cluster: Cluster, progress: Any) -> Any:
    """Measurements of the workload that is asked about; ``options`` are those of
    ``add_question``."""
    return _open_measurements(
        options,
        WorkloadSpec.parse(options.workload),
        cluster,
        options.num_layers,
        options.tensor_parallel_rule,
        progress,
    )


def _open_measurements(
    options: argparse.Namespace,
    spec: WorkloadSpec,
    cluster: Cluster,
    num_layers: int | None,
    rule: TensorParallelRule,
    progress: Any,
    unmarked_layers: int | None = None,
) -> Any:
    prepare(cluster)
    from profiling_runs.collect import open_measurements

    return open_measurements(
        spec,
        num_devices=cluster.num_devices,
        target=cluster.target,
        num_layers=num_layers,
        unmarked_layers=unmarked_layers,
        tensor_parallel_rule=rule,
        store=open_store(options),
        where=where_of(options),
        progress=progress,
    )


def workload_of(plan: Plan | ShardingPlan, named: str | None) -> WorkloadSpec:
    """The workload that a plan remembers, or the one that is named.

    Raises:
        PlanError: ``plan-workload`` if there is neither.
    """
    if named is not None:
        return WorkloadSpec.parse(named)
    if plan.workload is None:
        raise PlanError.of(
            "the plan was made from Python objects and names no workload; give --workload.",
            "plan-workload",
        )
    return plan.workload


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="compile compiles for the target and runs nothing; run executes the paper's profiling "
        "runs here, and alpa has them "
        "executed by Alpa on its Ray cluster, both with --mode paper (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=at_least(1),
        default=1,
        metavar="N",
        help="with --backend run: steps measured in every run (default: %(default)s)",
    )
    parser.add_argument(
        "--alpa-python",
        metavar="PATH",
        help="the interpreter of Alpa's environment, for --backend alpa",
    )


def check_backend(options: argparse.Namespace) -> None:
    """Refuse what executed runs cannot give, and options that they have no use for.

    Raises:
        ProfileError: ``profile-backend``.
    """
    if options.backend == "compile":
        return
    violations = []
    if options.mode != "paper":
        violations.append(
            Violation(
                f"--backend {options.backend} makes the runs of the paper's mode alone; add "
                "--mode paper.",
                "profile-backend",
            )
        )
    if (options.neighbours, options.calibration_plans) != (
        DEFAULT_NEIGHBOURS,
        DEFAULT_CALIBRATION_PLANS,
    ):
        violations.append(
            Violation(
                "--neighbours and --calibration-plans are of compiled windows; leave them out "
                "with --backend run or alpa.",
                "profile-backend",
            )
        )
    ProfileError.check(violations)


def remat_policies(options: argparse.Namespace) -> tuple[Remat, ...]:
    """Those that a plan's stages may have.

    Raises:
        ProfileError: ``profile-remat`` for ``auto`` with the paper's runs, which have one policy.
    """
    if options.remat != AUTO:
        return (options.remat,)
    if options.mode == "paper":
        raise ProfileError.of(
            "--remat auto: the paper's runs recompute the same in every stage; name one policy.",
            "profile-remat",
        )
    return REMAT_POLICIES


def check_profiles_nothing(options: argparse.Namespace) -> None:
    """Refuse options of profiling where a profile is given.

    Raises:
        ProfileError: ``profile-measured``.
    """
    defaults = {
        "backend": BACKENDS[0],
        "neighbours": DEFAULT_NEIGHBOURS,
        "calibration_plans": DEFAULT_CALIBRATION_PLANS,
    }
    given = [
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        if getattr(options, name) != default
    ]
    if given:
        raise ProfileError.of(
            f"{', '.join(given)}: with --profile no layer is profiled; leave out what is about "
            "profiling, or --profile.",
            "profile-measured",
        )


def asked(
    options: argparse.Namespace,
    microbatch_size: int,
    *,
    paper: tuple[str, int] | None = None,
    remat: Remat | None = None,
    shard_optimizer: bool | None = None,
    calibration_plans: int | None = None,
) -> dict[str, Any]:
    """What a profile is asked for: arguments of ``profiling_runs.profile``; what is not None
    overrides the options."""
    return {
        "microbatch_size": microbatch_size,
        "backend": options.backend,
        "num_layers": options.num_layers,
        "remat": remat_policies(options) if remat is None else (remat,),
        "shard_optimizer": options.shard_optimizer if shard_optimizer is None else shard_optimizer,
        "shard_params": options.shard_params,
        "whole_nodes": options.whole_nodes,
        "any_divisor": options.any_divisor,
        "num_neighbours": options.neighbours,
        "tensor_parallel_rule": options.tensor_parallel_rule,
        "calibration_plans": options.calibration_plans
        if calibration_plans is None
        else calibration_plans,
        "paper": paper,
        "repeats": options.repeats,
        "alpa_python": options.alpa_python,
    }


def prepare_backends(profiles: Sequence[argparse.Namespace]) -> None:
    """Make this process one that can make all these profiles: their options decide its devices,
    once, before JAX is loaded."""
    from capture.profiler.paper import most_run_devices

    clusters = [(options, read_cluster(options)) for options in profiles]
    num_devices = [
        c.num_devices if options.backend == "compile" else most_run_devices(c.num_devices)
        for options, c in clusters
    ]
    platforms = {
        Target.load(c.target).platform if options.backend == "compile" else "cpu"
        for options, c in clusters
    }
    environment.prepare(
        num_devices=max(num_devices),
        platform=max(platforms, key=lambda platform: platform != "cpu"),
    )


def make_profile(
    options: argparse.Namespace,
    cluster: Cluster,
    microbatch_size: int,
    progress: Any,
    *,
    memory_limit_bytes: int | None = None,
    watch: Any = lambda event: None,
    measurements: Any = None,
    **changes: Any,
) -> Profile:
    """Profile the workload of the options through the store.

    Args:
        options: Of a question.
        cluster, microbatch_size, progress, memory_limit_bytes, watch: As for
        ``profiling_runs.profile``.
        measurements: Open already.
        **changes: Those of ``asked``.
    """
    spec = WorkloadSpec.parse(options.workload)
    prepare_backends([options])
    from profiling_runs import profile

    return profile(
        spec,
        cluster,
        **asked(options, microbatch_size, **changes),
        store=open_store(options),
        where=where_of(options),
        progress=progress,
        watch=watch,
        memory_limit_bytes=memory_limit_bytes,
        measurements=measurements,
    )


def layers_note(options: argparse.Namespace, profile: Profile) -> list[str]:
    """A line about layers that nobody chose."""
    if options.num_layers is not None or not profile.auto_layers:
        return []
    return [
        f"cut into {profile.graph.num_layers} layers of nearly equal work; --num-layers or marks "
        "in the model choose others"
    ]


def list_jobs(
    options: argparse.Namespace, cluster: Cluster, microbatch_size: int, **changes: Any
) -> Any:
    """The jobs of ``make_profile`` with the same arguments (``profiling_runs.listing``); nothing is
    measured."""
    spec = WorkloadSpec.parse(options.workload)
    prepare_backends([options])
    from profiling_runs.listing import list_jobs

    return list_jobs(
        spec, cluster, open_store(options), **asked(options, microbatch_size, **changes)
    )
