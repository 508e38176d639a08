"""Alpa's autostaging on the profile's cost model: the baseline of every comparison.

Alpa looks for the least step time of a pipeline whose stages take submeshes of its own choice:

    sum over stages of t + (M - 1) x the slowest t
    t = forward + backward of one micro-batch

under its own idea of memory: behind a stage may stand at most

    floor((available - peak - initial) / intermediate - 1)

stages, because under 1F1B each of them means one more micro-batch in flight. ``peak`` is what a
forward or backward pass needs, ``initial`` what only the update needs (optimizer state),
``intermediate`` what lives between the two passes. The same limit is used for GPipe, where it is
too optimistic. A model that Alpa's suites train in 16 bits has half of the parameters and gradients
in ``peak`` and a float32 copy of the parameters in ``initial``, split over replicas as the rest of
it (``capture.alpa.memory``).

Alpa fills tables of t and of the most stages behind by measuring on GPUs; here the profile's
predictor fills them. The search is exact where Alpa tries caps that are 1e-6 seconds apart.
``tests/alpa_conformance`` runs Alpa's own search on the same tables.

Source: Zheng et al., OSDI 2022, section 5.2, equations 2 and 3; Alpa 0.2.3, ``stage_construction``,
by its behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from capture.alpa.memory import require_float32, with_master_copy
from capture.alpa.placement import Shape, alpa_placement
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.why import Why
from capture.predictor import AdditivePredictor
from capture.predictor.formula import StageMemory
from capture.predictor.times import TimePredictor
from capture.quantities import format_seconds
from recommender.answer import Answer, StageAnswer
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.recommendation import plan_of
from recommender.capture.result import SearchResult
from recommender.capture.throughput import throughput
from recommender.question import PlanQuestion

LABEL = "Alpa's algorithm on our cost model"
#: Alpa's names of its spaces of logical meshes; its default is the second.
LogicalShapes = Literal["all", "single_node_model_parallel", "same_as_physical"]
#: More stages than this are never behind a stage (Alpa's own cap).
MOST_SUCCESSORS = 1 << 20


@dataclass(frozen=True)
class AutostagingTables:
    """The times and memory of every stage from which the search chooses, indexed [first layer, last
    layer, submesh, configuration] as in Alpa.

    Attributes:
        submeshes: (hosts, devices per host), ascending.
        choices: Configurations of each submesh; the tables are padded where a submesh has fewer.
        seconds: float64, infinite where impossible.
        max_successors: int64, the most stages that memory allows behind; -1 for none at all.
    """

    submeshes: tuple[Shape, ...]
    choices: tuple[tuple[StageChoice, ...], ...]
    seconds: np.ndarray
    max_successors: np.ndarray


def submesh_choices(cluster: Cluster) -> tuple[Shape, ...]:
    """Return Alpa's space ``power_of_two``: parts of a node and whole nodes, in powers of two.

    Raises:
        PlanError: ``alpa-cluster`` if the nodes are not equal or their size is no power of two.

    Example:
        >>> submesh_choices(Cluster((4, 4)))
        ((1, 1), (1, 2), (1, 4), (2, 4))
    """
    size, hosts = cluster.nodes[0], len(cluster.nodes)
    if len(set(cluster.nodes)) > 1 or size & (size - 1):
        raise PlanError.of(
            f"cluster {cluster}: Alpa's autostaging takes equal nodes of a power of two of "
            "devices; use such a cluster.",
            "alpa-cluster",
        )
    inside = [(1, 1 << bit) for bit in range(size.bit_length())]
    return (
        *inside,
        *((1 << bit, size) for bit in range(1, hosts.bit_length()) if 1 << bit <= hosts),
    )


def _is_in(space: LogicalShapes, choice: StageChoice, submesh: Shape, node_size: int) -> bool:
    if choice.num_devices != submesh[0] * submesh[1]:
        return False
    if space == "same_as_physical":
        return (choice.data_parallel, choice.tensor_parallel) == submesh
    return space == "all" or choice.tensor_parallel <= node_size


def autostaging_tables(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatch_size: int,
    memory_limit_bytes: int | None = None,
    logical_shapes: LogicalShapes = "single_node_model_parallel",
    master_copy: bool = False,
) -> AutostagingTables:
    """Return predicted times and memory of every stage, as Alpa's autostaging wants them.

    Args:
        profile: Measurements for an accelerator; submeshes of whole nodes are there as far as they
            were profiled.
        cluster: Devices to plan for, in equal nodes.
        microbatch_size: Over all replicas.
        memory_limit_bytes: Available per device; None for no limit.
        logical_shapes: Alpa's space of (data, tensor) parallel degrees: all pairs; tensor
            parallelism inside nodes alone; or hosts times devices of the submesh. In the last,
            Alpa's solver may still replicate what is tensor-parallel here.
        master_copy: Whether the model is trained in 16 bits as in Alpa's suites; the profile has
            its parameters in float32.

    Raises:
        PlanError: as ``submesh_choices``.
        ProfileError: ``alpa-master-copy``, ``profile-no-times``, and the codes of the predictors.
    """
    if master_copy:
        require_float32(profile.graph)
    predictor, times = AdditivePredictor(profile), TimePredictor(profile, cluster.layout)
    submeshes = submesh_choices(cluster)
    choices = tuple(
        tuple(
            c
            for c in profile.choices
            if _is_in(logical_shapes, c, submesh, cluster.nodes[0])
            and microbatch_size % c.data_parallel == 0
        )
        for submesh in submeshes
    )
    num_layers = profile.graph.num_layers
    shape = num_layers, num_layers, len(submeshes), max(1, *map(len, choices))
    seconds, successors = np.full(shape, np.inf), np.full(shape, -1, np.int64)
    ranges = np.triu(np.ones((num_layers, num_layers), bool))
    for s, configs in enumerate(choices):
        for c, choice in enumerate(configs):
            table = times.table(choice, microbatch_size)
            seconds[:, :, s, c] = np.where(ranges, (table.forward + table.backward)[:, 1:], np.inf)
            memory = predictor.memory(choice, microbatch_size)
            if master_copy:
                params, optimizer = with_master_copy(memory.params, memory.optimizer, choice)
                memory = replace(memory, params=params, gradients=params, optimizer=optimizer)
            most = _most_successors(memory, memory_limit_bytes)
            successors[:, :, s, c] = np.where(ranges, most[:, 1:], -1)
    return AutostagingTables(submeshes, choices, seconds, successors)


def _most_successors(memory: StageMemory, available: int | None) -> np.ndarray:
    """Return the most stages that memory allows behind each stage, by Alpa's formula; its ``peak``
    holds what one micro-batch keeps."""
    passes = np.maximum(
        memory.received + memory.batch + memory.forward, memory.gradients_in + memory.backward
    )
    peak = memory.params + memory.gradients + memory.kept + passes
    if available is None:
        return np.full(peak.shape, MOST_SUCCESSORS)
    room = available - peak - memory.optimizer
    return np.clip(np.floor(room / np.maximum(memory.kept, 1) - 1), -1, MOST_SUCCESSORS).astype(
        np.int64
    )


def search_tables(
    tables: AutostagingTables, num_devices: int, num_microbatches: int
) -> SearchResult:
    """Return the stages of least step time; exact.

    Alpa orders submeshes freely and packs them afterwards, so that only their sizes must add up:
    here the devices stand in one row.

    Args:
        tables: Their submeshes have different sizes, powers of two.
        num_devices: All devices of the cluster.
        num_microbatches: M.
    """
    num_layers, *_ = tables.seconds.shape
    most_behind = min(num_layers, num_devices)
    cost, seconds = {}, {}
    for s, (hosts, devices) in enumerate(tables.submeshes):
        configs = len(tables.choices[s])
        shape = configs, num_layers, num_layers + 1
        times, behind = np.full(shape, np.inf), np.full(shape, -1, np.int64)
        times[:, :, 1:] = tables.seconds[:, :, s, :configs].transpose(2, 0, 1)
        behind[:, :, 1:] = tables.max_successors[:, :, s, :configs].transpose(2, 0, 1)
        # Memory counts as "fits behind j - 1 stages" alone: 0 bytes or none.
        fits = behind[:, None] >= np.arange(most_behind)[:, None, None]
        cost[hosts * devices], seconds[hosts * devices] = np.where(fits, 0, NEVER), times
    choices = {
        hosts * devices: tables.choices[s] for s, (hosts, devices) in enumerate(tables.submeshes)
    }
    row = Cluster((num_devices,))
    problem = SearchProblem(
        row,
        num_layers,
        choices,
        cost,
        seconds=seconds,
        num_microbatches=num_microbatches,
        memory_limit_bytes=1,
    )
    return throughput(problem)


def autostage(
    profile: Profile,
    question: PlanQuestion,
    *,
    logical_shapes: LogicalShapes = "single_node_model_parallel",
    master_copy: bool = False,
) -> StageAnswer:
    """Return the plan that Alpa's autostaging chooses on the profile's cost model.

    Args:
        profile: Measurements for an accelerator: a CPU's say nothing of time.
        question: Its cluster is of equal nodes, each of a power of two of devices; its schedule
            changes the plan's memory, not the choice.
        logical_shapes, master_copy: As ``autostaging_tables``.

    Returns:
        The plan on the devices that Alpa packs its stages on, with the prediction of the profile's
        own predictor: what it needs in the native runtime. ``status`` is ``infeasible`` if Alpa
        finds no plan, and if the one that it finds is predicted to need more than the limit.

    Raises:
        PlanError, ProfileError: as ``autostaging_tables``.
    """
    cluster, limit = question.cluster, question.limit_bytes

    def within(limit: int | None) -> SearchResult:
        tables = autostaging_tables(
            profile,
            cluster,
            microbatch_size=question.microbatch_size,
            memory_limit_bytes=limit,
            logical_shapes=logical_shapes,
            master_copy=master_copy,
        )
        return search_tables(tables, cluster.num_devices, question.num_microbatches)

    result = replace(within(limit), algorithm=f"autostaging ({LABEL})")
    if result.status == "infeasible":
        why = Why(_missing(limit, within), code="autostaging")
        return Answer("infeasible", None, result, why)
    placed = alpa_placement(cluster, [stage.choice.num_devices for stage in result.stages])
    stages = (replace(s, devices=devices) for s, devices in zip(result.stages, placed, strict=True))
    plan = plan_of(profile, question, stages)
    prediction = AdditivePredictor(profile).predict(plan)
    assert result.step_seconds is not None, "it is feasible"
    summary = (
        f"{LABEL}: least step time, {format_seconds(result.step_seconds)} without updates and "
        "transfers between stages."
    )
    fits = limit is None or prediction.peak_bytes <= limit
    if not fits:
        summary += (
            f" It takes the plan to fit, and {prediction.peak_bytes:,} bytes are predicted, of "
            f"{limit:,}."
        )
    why = Why(summary, code=None if fits else "autostaging")
    plan = plan.with_(prediction=prediction, why=why)
    headroom = plan.headroom(question.memory_limit_bytes)
    return Answer("ok" if fits else "infeasible", plan, result, why, headroom)


def _missing(limit: int | None, within: Callable[[int | None], SearchResult]) -> str:
    """Return why no plan is found, and the least limit per device that allows one, to a percent."""
    if limit is None or within(None).status == "infeasible":
        return (
            f"{LABEL} finds no plan whatever the memory: no submeshes with measured choices add "
            "up to the cluster. Profile more degrees."
        )
    low, high = limit, 2 * limit
    while within(high).status == "infeasible":
        low, high = high, 2 * high
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle).status == "infeasible" else (low, middle)
    return (
        f"{LABEL} finds no plan that fits by its rule in {limit:,} bytes per device; the least "
        f"limit under which it does is {high:,}."
    )
