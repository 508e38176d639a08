"""From the values of options to what is asked; and what answers are
made with."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture import environment
from capture.cli import options as shared
from capture.cli.output import say
from capture.cli.progress import progress
from capture.errors import PlanError, ProfileError, WorkloadError
from capture.machine.cluster import Cluster
from capture.machine.target import Target, resolved_target
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.trust import remember
from capture.model.workload import WorkloadSpec
from capture.options import taken
from capture.plan.choices import REMAT_POLICIES
from capture.plan.files import PlanFile
from capture.plan.schedule import SCHEDULES
from capture.plan.space import StageSpace
from capture.plan.stages import Plan, batch_violations
from capture.quantities import counted, format_bytes
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.measurements import Measurements
from profiling_runs.measurements import open_measurements as open_them
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from recommender.capture.recommendation import predict_plan
from recommender.money import Terms

#: What the store and what compilers write need of a disk, with room to spare.
LEAST_FREE_BYTES = 50_000_000

#: Values of options by name; those of a verb are ``vars(options)``.
Values = Mapping[str, Any]


def read_cluster(values: Values) -> Cluster:
    """Return the cluster that options name, of a known target; one device where none is named.

    Raises:
        TargetError: as ``Target.load``.
    """
    Target.load(values["target"])
    named = values["cluster"] or shared.ONE_DEVICE
    return Cluster.parse(named, resolved_target(values["target"], Path()))


def say_one_device(options: argparse.Namespace) -> None:
    """Say that the question is for one device, where no cluster was named."""
    if options.cluster is None:
        where = f"for one device (--cluster {shared.ONE_DEVICE})"
        say(options, f"{where}; --cluster NxG is for N nodes of G devices")


def read_batch(values: Values) -> tuple[int, int]:
    """Return (global batch size, number of micro-batches).

    Raises:
        PlanError: ``plan-batch``.
    """
    global_batch, microbatches = values["global_batch"], values["microbatches"]
    if global_batch is None:
        global_batch = shared.DEFAULT_MICROBATCH_SIZE * max(1, microbatches)
    PlanError.check(batch_violations(global_batch, microbatches))
    return global_batch, microbatches


def terms_of(values: Values) -> Terms:
    """Return the terms of money and failures that options name."""
    return Terms(**taken(Terms, values))


def spec_of(values: Values) -> WorkloadSpec:
    """Return the workload that options name; one from a file is a ``WorkloadSpec`` already."""
    named = values["workload"]
    return named if isinstance(named, WorkloadSpec) else WorkloadSpec.parse(named)


def profile_question(values: Values, memory_limit_bytes: int | None = None) -> ProfileQuestion:
    """Return the question of a profile from the options ``shared.QUESTION``, or fewer of them, and
    ``mode``. The memory limit is that of executed runs.

    Raises:
        ProfileError: ``profile-backend`` for executed runs without the paper's mode, and the codes
            of ``ProfileQuestion``.
    """
    cluster = read_cluster(values)
    global_batch, num_microbatches = read_batch(values)
    backend, is_paper = values.get("backend", "compile"), values.get("mode") == "paper"
    if backend != "compile" and not is_paper:
        raise ProfileError.of(
            f"--backend {backend} makes the runs of the paper's mode alone; add --mode paper.",
            "profile-backend",
        )
    schedule = SCHEDULES.get(values.get("schedule", ""))
    splits = schedule is not None and schedule.splits_backward
    return ProfileQuestion(
        spec_of(values),
        cluster,
        global_batch // num_microbatches,
        **taken(ProfileQuestion, values),
        remat={None: (), shared.AUTO: REMAT_POLICIES}.get(values["remat"], (values["remat"],)),
        splits_backward=not is_paper and bool(values.get("try_schedules") or splits),
        space=StageSpace(**taken(StageSpace, values)),
        paper=(values["schedule"], num_microbatches) if is_paper else None,
        memory_limit_bytes=memory_limit_bytes,
    )


def prepare(*needing: Cluster | ProfileQuestion | LayersQuestion) -> None:
    """Prepare this process to answer all these questions, and to compile for clusters: as many
    virtual devices, and no search for devices that need not be there. They decide its devices,
    once, before JAX is loaded."""
    num_devices, platforms = zip(*(each.process_needs for each in needing), strict=True)
    environment.prepare(
        num_devices=max(num_devices),
        platform=max(platforms, key=lambda platform: platform != "cpu"),
    )


def open_store(options: argparse.Namespace) -> Store:
    """Open the store of measurements.

    Raises:
        ProfileError: ``store-write`` where the disk has no room for any.
    """
    path = options.store or environment.default_store_path()
    folder = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
        raise ProfileError.of(
            f"{folder} has {format_bytes(free)} free, and measurements need "
            f"{format_bytes(LEAST_FREE_BYTES)}; make room, or name a store elsewhere (--store "
            "FILE).",
            "store-write",
        )
    return Store(path)


def told(options: argparse.Namespace) -> dict[str, Any]:
    """Return where measurements are kept, where jobs run (both by the options ``shared.STORE``) and
    what shows their progress: the arguments ``store``, ``where`` and ``progress``."""
    where = Where(**taken(Where, vars(options)))
    return {"store": open_store(options), "where": where, "progress": progress(options)}


def open_measurements(options: argparse.Namespace, question: ProfileQuestion) -> Measurements:
    """Open the measurements of a question, made as the options ``shared.STORE`` say."""
    prepare(question)
    return open_them(question, **told(options))


def plan_measurements(options: argparse.Namespace, plan: Plan) -> Measurements:
    """Open the measurements of a plan's workload, for the plan's target."""
    return open_measurements(options, ProfileQuestion.of_plan(plan, workload_of(options, plan)))


def profile_measurements(
    options: argparse.Namespace, profile: Profile, cluster: Cluster
) -> Measurements:
    """Open the measurements of a profile's workload, cut into layers and split as in the
    profile."""
    spec = spec_of(vars(options)) if options.workload else profile.workload
    if spec is None:
        raise PlanError.of(
            "the profile was made from Python objects and names no workload; give --workload.",
            "plan-workload",
        )
    return open_measurements(options, ProfileQuestion.of_profile(profile, cluster, spec))


def workload_of(options: argparse.Namespace, plan: PlanFile) -> WorkloadSpec:
    """Return the workload that ``--workload`` names, or the one of the plan if the user has named
    it before or trusts the file.

    Raises:
        PlanError: ``plan-workload`` if there is neither.
        WorkloadError: ``workload-untrusted``.
    """
    if options.workload is not None:
        return WorkloadSpec.parse(options.workload)
    if plan.workload is None:
        raise PlanError.of(
            f"the plan was made from {plan.made_from} and names no workload; give --workload.",
            "plan-workload",
        )
    return plan.workload.admitted(options.trust)


def refuse_unread(options: argparse.Namespace, kind: str, *read: str) -> None:
    """Refuse options that a verb does not read of a plan of a kind.

    Raises:
        PlanError: ``plan-kind``.
    """
    known = {"plan", "first", "second", "json", "quiet", "main", "parser", *read}
    known |= {"trust"} if "workload" in read else set()
    given = [f"--{name.replace('_', '-')}" for name in shared.given(options) if name not in known]
    if given:
        raise PlanError.of(
            f"{', '.join(given)}: {options.parser.prog} does not read "
            f"{'it' if len(given) == 1 else 'them'} with a plan of kind {kind!r}; leave "
            f"{'it' if len(given) == 1 else 'them'} out.",
            "plan-kind",
        )


def with_prediction(plan: Plan, profile: Profile | None) -> tuple[Plan, Profile | None]:
    """Return the plan and the profile. A plan without a prediction gets that of the profile, if
    there is one. Nothing is loaded or measured for that."""
    if plan.prediction is not None or profile is None:
        return plan, profile
    return plan.with_(prediction=predict_plan(profile, plan)), profile


def remember_named(options: argparse.Namespace) -> None:
    """Remember the workload that a command was given, so that files may name it from now on
    (``capture.model.trust``)."""
    for option in ("workload", "other_workload"):
        if isinstance(text := getattr(options, option, None), str):
            with contextlib.suppress(WorkloadError):  # a plan, or the name of an object
                spec = WorkloadSpec.parse(text)
                remember(spec.location, spec.function)


def check_profiles_nothing(values: Values) -> None:
    """Refuse options of profiling where a profile is given.

    Raises:
        ProfileError: ``profile-measured``.
    """
    given = [
        option.flag
        for option in (shared.BACKEND[0], *shared.PROFILING)
        if values[option.name] != option.default
    ]
    if given:
        raise ProfileError.of(
            f"{', '.join(given)}: with --profile no layer is profiled; leave out what is about "
            "profiling, or --profile.",
            "profile-measured",
        )


def say_layers(
    options: argparse.Namespace, question: ProfileQuestion, measurements: Measurements
) -> None:
    """Say into how many layers the model is cut where nobody chose, before they are measured."""
    traced = measurements.backend.traced(question.microbatch_size)
    if question.num_layers is None and traced.auto_layers:
        count = counted(traced.graph.num_layers, "layer")
        say(options, f"cutting the model into {count} of nearly equal work")


def layers_note(question: ProfileQuestion, cut_into: int | None) -> list[str]:
    """Return a line about the number of layers where nobody chose it; empty if the model is cut at
    its marks (``cut_into`` is None)."""
    if question.num_layers is not None or cut_into is None:
        return []
    return [
        f"cut into {counted(cut_into, 'layer')} of nearly equal work; --num-layers "
        "or marks in the model choose others"
    ]
