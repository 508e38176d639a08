"""The plan of an array for a task, models and a limit, or what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from capture.errors import PlanError
from capture.machine.cluster import Cluster, Machine
from capture.machine.target import Target
from capture.model.workload import OfWorkload, WorkloadProtocol, WorkloadSpec, named_workload
from capture.options import Asked
from capture.plan.array import (
    BUNDLE_BYTES,
    ArrayPlan,
    ArrayTask,
    Member,
    Saturation,
    Shared,
    member_violations,
    sharing_violations,
    tasks_of,
)
from capture.plan.choices import Remat, layer_remat_violations
from capture.plan.why import Why
from capture.profiler.asked import ArrayShape
from capture.quantities import bytes_of, format_bytes, format_seconds
from capture.step.multiplexed import peak_of
from recommender.algorithms import algorithm_named
from recommender.answer import Answer
from recommender.mutwo.problem import ArrayProblem, SubArrayKind
from recommender.mutwo.search import (
    ALGORITHMS,
    OF_THE_PAPER,
    Algorithm,
    ArrayResult,
    beside_baselines,
    search,
)

if TYPE_CHECKING:
    from capture.profiler.array import ArrayProfile

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ArrayQuestion(OfWorkload):
    """The question of a model array (mu-TWO): models to be trained together on one device.

    Attributes:
        workload: What models train that name no other workload, or its name.
        models: Of each its seed and hyperparameters, and the batch size and workload that it has
            for itself.
        cluster: One device.
        batch_size: Examples of one model in a step, of those that have none for themselves.
        memory_limit_bytes: Limit of the device (default: what the target can use).
        host_memory_bytes: Memory of the host, such as 1TB: what may be swapped at once.
        shared: Parameters that all models have alike and the optimizer leaves alone, by path, such
            as 'base/*'; again: more of them. In Python also a predicate on paths.
        shared_batches: All models read the same batch.
        num_layers: Layers of a loss without marks; 0 to choose.
        bundle_bytes: See the plan.
        backend: compile compiles for the target, whose rates give seconds; run executes programs
            and copies on the devices here, which are of the target.
        remat: What the backward pass of every layer recomputes of it, beside what is decided of
            bundles: full, dots, or a policy of an installed package (default: nothing).
        workloads: By the names that models have for them; others are loaded by their names.
        algorithm: Search: ours (descent), all choices (enumerate), or the paper's as printed
            (paper) or corrected.

    Raises:
        PlanError: ``array-models`` for none, ``array-size`` for a batch size that is none,
            ``array-tasks`` for parameters that several workloads share, ``array-backend`` for
            another backend, ``array-limit`` where nobody knows the limit, ``array-remat``,
            ``search-algorithm`` for an unknown one, and for one model where the paper's have
            nothing to multiplex; TargetError: ``devices-no-rates``.
    """

    workload: WorkloadProtocol | WorkloadSpec
    models: tuple[Member, ...]
    cluster: Cluster
    batch_size: Annotated[int, Asked("global_batch", "B")]
    memory_limit_bytes: Annotated[int | None, Asked("memory")] = None
    host_memory_bytes: Annotated[int | None, Asked("host_memory")] = None
    shared_batches: Annotated[bool, Asked()] = False
    num_layers: Annotated[int, Asked(metavar="L")] = 0
    bundle_bytes: int = BUNDLE_BYTES
    algorithm: Annotated[Algorithm, Asked(choices=tuple(ALGORITHMS))] = "descent"
    shared: Annotated[Shared, Asked(metavar="PATTERN", again=True)] = ()
    backend: Annotated[str, Asked(choices=("compile", "run"))] = "compile"
    remat: Annotated[Remat | None, Asked(metavar="MODE")] = None
    workloads: Mapping[str, WorkloadProtocol] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        PlanError.check(layer_remat_violations(self.remat, "array-remat"))
        PlanError.check(member_violations(self.models))
        PlanError.check(sharing_violations(self.shared, self.trained))
        if self.batch_size < 1:
            raise PlanError.of(f"batch_size={self.batch_size}; give at least 1.", "array-size")
        if self.backend not in ("compile", "run"):
            raise PlanError.of(
                f"backend={self.backend!r} measures no arrays; choose compile or run.",
                "array-backend",
            )
        if not self.executes:
            Machine.of(self.cluster)  # before anything is compiled
        elif self.memory_limit_bytes is None and Target.load(self.cluster.target).memory is None:
            raise PlanError.of(
                f"target={self.cluster.target!r} says nothing of its memory; give the limit "
                "(--memory, memory_limit).",
                "array-limit",
            )
        algorithm_named(self.algorithm, ALGORITHMS)
        if self.algorithm in OF_THE_PAPER and len(self.models) == 1:
            raise PlanError.of(
                f"algorithm={self.algorithm!r} multiplexes sub-arrays, and there is one model; "
                "name two at least, or leave it out.",
                "search-algorithm",
            )

    @property
    def executes(self) -> bool:
        """Whether the seconds of programs are measured on devices here."""
        return self.backend == "run"

    @property
    def trained(self) -> tuple[ArrayTask, ...]:
        """The task of each model: its workload, batch size and number of layers."""
        return tasks_of(self.models, self.batch_size, self.spec, self.num_layers)

    @property
    def shape(self) -> ArrayShape:
        """The shape of the programs that are profiled, without what models have for themselves."""
        return ArrayShape(
            *(self.batch_size, self.num_layers, self.shared, self.shared_batches),
            self.bundle_bytes,
            self.remat,
        )


@dataclass(frozen=True)
class ArrayAnswer(Answer[ArrayPlan, ArrayResult]):
    """The answer for a model array: its plan, and the workloads to train with it.

    Attributes:
        workload: The task.
        workloads: Others, by the names that models have for them.
    """

    workload: WorkloadProtocol | None = None
    workloads: Mapping[str, WorkloadProtocol] = field(default_factory=dict)

    def train(self, devices: Sequence[object] | None = None) -> Any:
        """Return the training of the plan's models (``capture.train_array``).

        Raises:
            PlanError: ``array-infeasible`` where nothing fits; and those of ``train_array``.
        """
        if self.status != "ok" or self.plan is None or self.workload is None:
            raise PlanError.of(f"no plan fits: {self.why.summary}", "array-infeasible")
        from capture.runtime.multiplexed import train_array

        return train_array(self.workload, self.plan, devices, workloads=self.workloads)


def mutwo(
    workload: WorkloadProtocol,
    models: Sequence[Mapping[str, object]],
    *,
    target: str,
    batch_size: int,
    memory_limit: int | str | None = None,
    shared: str | Shared = (),
    **options: Any,
) -> ArrayAnswer:
    """Choose what is fused, multiplexed, swapped or recomputed, for least seconds of an update.

    Args:
        workload: The task; its optimizer is made with ``optax.inject_hyperparams``.
        models: Of each its ``seed`` and its hyperparameters; a ``batch_size`` or ``workload`` (a
            name) of its own makes it another program.
        target: With rates.
        batch_size: Examples of one model in a step.
        memory_limit: Of the device, such as ``"40GB"``; None for what the target can use.
        shared: Parameters that all models have alike, and that the optimizer leaves alone: a
            pattern of paths such as ``"base/*"``, several, or a predicate on paths.
        **options: What else ``ArrayQuestion`` has, such as ``workloads={name: workload}``.
    """
    limit = bytes_of(memory_limit)
    options["shared"] = (shared,) if isinstance(shared, str) else shared
    members = tuple(map(Member.of, models))
    cluster = Cluster((1,), target)
    return plan_array(ArrayQuestion(workload, members, cluster, batch_size, limit, **options))


def plan_array(
    question: ArrayQuestion,
    progress: Progress = lambda kind, done, total: None,
    profiles: Mapping[ArrayTask, ArrayProfile] | None = None,
) -> ArrayAnswer:
    """Answer the question of a model array with a plan.

    Args:
        question: What is asked.
        progress: Told (kind, done, total) of what is measured.
        profiles: Of the question's programs, by what models train; None has them measured in this
            process.

    Raises:
        PlanError: ``array-hyperparameter``, ``array-shared``, ``array-tasks``, ``array-devices``;
            WorkloadError: ``array-key``, ``array-shared-updated``; TargetError: those of the
            compiler.
    """
    if profiles is None:
        profiles = _profiles_here(question, progress)
    _check(question, profiles)
    tasks, (first, *_) = list(profiles), profiles.values()
    limit = question.memory_limit_bytes
    limit = first.memory_bytes if limit is None else limit
    assert limit is not None, "checked by the question"
    result, kinds = _searched(question, profiles, limit)
    best = result.best
    why = _why(result, limit) if best.fits else _nothing(result, limit, question.host_memory_bytes)
    traced = {task: _traced(task, profile) for task, profile in profiles.items()}
    of_plan = traced.pop(ArrayTask(question.batch_size), ArrayTask(question.batch_size))
    saturation = [
        Saturation(size, profiles[tasks[task]].seconds_of(size), task)
        for task, size in sorted(kinds)
    ]
    plan = ArrayPlan(
        cluster=question.cluster,
        batch_size=question.batch_size,
        models=question.models,
        partition=best.way.partition,
        order=best.way.order,
        decisions=best.evaluation.decisions,
        shared=first.shared_patterns,
        shared_batches=question.shared_batches,
        bundle_bytes=question.bundle_bytes,
        remat=question.remat,
        memory_limit_bytes=limit,
        num_layers=of_plan.num_layers,
        model_hash=of_plan.model_hash,
        workload=question.spec,
        tasks=tuple(traced.values()),
        prediction=best.evaluation.prediction(),
        seconds_from=first.source,
        saturation=tuple(saturation),
        why=why,
        candidates=tuple(one.to_json() for one in result.candidates),
    )
    status = "ok" if best.fits else "infeasible"
    loaded = {task.workload: profile.workload for task, profile in profiles.items()}
    own = loaded.get("") or question.task
    return ArrayAnswer(status, plan, result, why, plan.headroom(limit), own, loaded)


def _traced(task: ArrayTask, profile: ArrayProfile) -> ArrayTask:
    """Return a model's task with the number of layers and the hash of its trace."""
    graph = profile.fuser.traced.graph
    return replace(task, num_layers=graph.num_layers, model_hash=profile.model_hash)


def _searched(
    question: ArrayQuestion, profiles: Mapping[ArrayTask, ArrayProfile], limit: int
) -> tuple[ArrayResult, set[SubArrayKind]]:
    """Return the result of the search, and the task and size of each kind of sub-array profiled."""
    tasks, (first, *others) = list(profiles), profiles.values()
    problem = ArrayProblem(
        first,
        len(question.models),
        first.host,
        limit,
        question.host_memory_bytes,
        others=tuple(others),
        tasks=tuple(map(tasks.index, question.trained)),
    )
    kinds = {problem.kind(group) for way in problem.ways for group in way.partition}
    kinds |= {SubArrayKind(task, 1) for task in range(len(tasks))}
    for task, profile in enumerate(profiles.values()):
        profile.prepare(kind.num_models for kind in kinds if kind.task == task)
    result = beside_baselines(problem, search(problem, question.algorithm))
    for profile in profiles.values():
        profile.end()
    return result, kinds


def _check(question: ArrayQuestion, profiles: Mapping[ArrayTask, ArrayProfile]) -> None:
    """Refuse models with hyperparameters that their optimizer lacks, and parameters that several
    programs cannot share."""
    from capture.runtime.array_tasks import unlike_shared, wrong_hyperparameters

    optimizers = {task: profile.fuser.optimizer for task, profile in profiles.items()}
    PlanError.check(wrong_hyperparameters(optimizers, question.trained, question.models))
    if question.shared or question.shared_batches:
        arrays = {task: profile.backend.sub_array(1) for task, profile in profiles.items()}
        PlanError.check(unlike_shared(arrays))


def _profiles_here(question: ArrayQuestion, progress: Progress) -> dict[ArrayTask, ArrayProfile]:
    """Return a profile per task whose programs this process measures when they are asked for."""
    from capture.profiler.array import ArrayProfile

    given = {**question.workloads, "": question.task}
    return {
        task: ArrayProfile(
            named_workload(task.workload, given),
            question.cluster,
            replace(question.shape, batch_size=task.batch_size, num_layers=task.num_layers),
            progress,
            question.executes,
        )
        for task in dict.fromkeys(question.trained)
    }


def _why(result: ArrayResult, limit: int) -> Why:
    best = result.best
    others = [one for one in result.candidates if one is not best]
    beside = ", ".join(
        f"{one.way.name} " + (format_seconds(one.weighed.seconds) if one.fits else "does not fit")
        for one in others
    )
    said = (
        f"{best.way.name}: {format_seconds(best.evaluation.seconds)} for an update of every model, "
        f"within {format_bytes(limit)}"
    )
    said += f" (beside it: {beside})" if beside else ""
    if (count := len(best.space.problem.models)) > 1:
        said += f"; the models are {count} programs, and are fused with those of their own"
    rounds = [one for one in result.baselines if one.in_rounds and one.fits]
    if rounds:
        fastest = min(rounds, key=lambda one: one.step_seconds)
        if fastest.step_seconds < best.weighed.seconds:
            said += (
                f"; {fastest.name}, rounds of {' + '.join(map(str, fastest.sizes))} models that "
                "train to their end one after the other, takes "
                f"{format_seconds(fastest.step_seconds)}"
            )
    return Why(said, num_choices=len(others) + 1)


def _nothing(result: ArrayResult, limit: int, host: int | None) -> Why:
    least = result.best.weighed.peak_bytes
    if result.algorithm in OF_THE_PAPER and least > limit:
        said = (
            f"by the paper's algorithms ({result.algorithm}) {result.best.way.name} comes to "
            f"{format_bytes(least)} at best, and the limit is {format_bytes(limit)}. They never "
            "take a choice back; leave --algorithm out for the search that does."
        )
        return Why(said, code="array-memory", memory_limit_bytes=limit)
    best = result.best.evaluation
    least, instant, _ = peak_of(best.ledgers, 0)
    if least <= limit:
        said = (
            f"the host has to hold {format_bytes(best.host_peak_bytes)} of what is swapped, and "
            f"may {format_bytes(host or 0)}; allow that much."
        )
        return Why(said, code="array-host-memory", memory_limit_bytes=limit)
    said = (
        f"{result.best.way.name} needs least, {format_bytes(least)} at {instant!r}, and the limit "
        f"is {format_bytes(limit)}: {format_bytes(least - limit)} are missing. The cheapest change "
        f"that fits is that limit; smaller batches need less, too."
    )
    return Why(said, code="array-memory", memory_limit_bytes=limit, least_peak_bytes=least)
