"""Alpa's autostaging on the profile's cost model: the baseline of every comparison.

Alpa looks for the least step time of a pipeline whose stages take submeshes of its own choice:

    sum over stages of t + (M - 1) x the slowest t          with t = forward + backward of one micro-batch

under its own idea of memory: behind a stage may stand at most

    floor((available - peak - initial) / intermediate - 1)

stages, because under 1F1B each of them means one more micro-batch in flight. ``peak`` is what a forward or backward pass needs, ``initial``
what only the update needs (optimizer state), ``intermediate`` what lives between the two passes. The same limit is used for GPipe, where
it is too optimistic.

Alpa fills tables of t and of the most stages behind by measuring on GPUs; here the profile's predictor fills them. The search is exact
where Alpa tries caps that are 1e-6 seconds apart. ``tests/alpa`` runs Alpa's own search on the same tables.

Source: Zheng et al., OSDI 2022, section 5.2, equations 2 and 3; Alpa 0.2.3, ``stage_construction``, by its behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.alpa.placement import Shape, alpa_placement
from capture.choices import StageChoice
from capture.cluster import Cluster
from capture.errors import PlanError
from capture.headroom import Headroom
from capture.plan import Plan, StagePlan
from capture.predictor import AdditivePredictor, Prediction
from capture.predictor.times import TimePredictor
from capture.profile import Profile
from capture.target import Target
from recommender.problem import NEVER, SearchProblem
from recommender.recommendation import Recommendation
from recommender.result import SearchResult
from recommender.throughput import throughput

LABEL = "Alpa's algorithm on our cost model"
#: More stages than this are never behind a stage (Alpa's own cap).
MOST_SUCCESSORS = 1 << 20


@dataclass(frozen=True)
class AutostagingTables:
    """What the search is given, indexed [first layer, last layer, submesh, configuration] as in Alpa.

    Attributes:
        submeshes: (hosts, devices per host), ascending.
        choices: Of each submesh, its configurations; the tables are padded where a submesh has fewer.
        seconds: float64, infinite where impossible.
        max_successors: int64, the most stages that memory allows behind; -1 for none at all.
    """

    submeshes: tuple[Shape, ...]
    choices: tuple[tuple[StageChoice, ...], ...]
    seconds: np.ndarray
    max_successors: np.ndarray


def submesh_choices(cluster: Cluster) -> tuple[Shape, ...]:
    """Alpa's space ``power_of_two``: parts of a node and whole nodes, in powers of two.

    Raises:
        PlanError: ``alpa-cluster`` if the nodes are not equal or their size is no power of two.

    Example:
        >>> submesh_choices(Cluster((4, 4)))
        ((1, 1), (1, 2), (1, 4), (2, 4))
    """
    size, hosts = cluster.nodes[0], len(cluster.nodes)
    if len(set(cluster.nodes)) > 1 or size & (size - 1):
        raise PlanError.of(
            f"cluster {cluster}: Alpa's autostaging takes equal nodes of a power of two of devices; use such a cluster.", "alpa-cluster"
        )
    inside = [(1, 1 << bit) for bit in range(size.bit_length())]
    return (*inside, *((1 << bit, size) for bit in range(1, hosts.bit_length()) if 1 << bit <= hosts))


def autostaging_tables(
    profile: Profile, cluster: Cluster, *, microbatch_size: int, memory_limit_bytes: int | None = None
) -> AutostagingTables:
    """Predicted times and memory of every stage, as Alpa's autostaging wants them.

    Args:
        profile: Of an accelerator; submeshes of whole nodes are there as far as they were profiled.
        cluster: Of equal nodes.
        microbatch_size: Over all replicas.
        memory_limit_bytes: Available per device; None for no limit.

    Raises:
        PlanError: as ``submesh_choices``.
        ProfileError: ``profile-no-times``, and the codes of the predictors.
    """
    predictor, times = AdditivePredictor(profile), TimePredictor(profile, max(cluster.nodes))
    submeshes = submesh_choices(cluster)
    choices = tuple(
        tuple(c for c in profile.choices if c.num_devices == hosts * devices and microbatch_size % c.data_parallel == 0)
        for hosts, devices in submeshes
    )
    num_layers, width = profile.graph.num_layers, max(map(len, choices))
    seconds = np.full((num_layers, num_layers, len(submeshes), max(1, width)), np.inf)
    successors = np.full(seconds.shape, -1, np.int64)
    upper = np.triu(np.ones((num_layers, num_layers), bool))
    for s, configs in enumerate(choices):
        for c, choice in enumerate(configs):
            table = times.table(choice, microbatch_size)
            seconds[:, :, s, c] = np.where(upper, (table.forward + table.backward)[:, 1:], np.inf)
            memory = predictor.memory(choice, microbatch_size)
            peak = memory.params + memory.gradients + memory.kept + np.maximum(memory.received + memory.forward, memory.gradients_in + memory.backward)
            room = (MOST_SUCCESSORS if memory_limit_bytes is None else memory_limit_bytes) - peak - memory.optimizer
            most = np.floor(room / np.maximum(memory.kept, 1) - 1) if memory_limit_bytes is not None else np.full(peak.shape, MOST_SUCCESSORS)
            successors[:, :, s, c] = np.where(upper, np.clip(most, -1, MOST_SUCCESSORS)[:, 1:], -1)
    return AutostagingTables(submeshes, choices, seconds, successors)


def search_tables(
    sizes: Sequence[int], seconds: np.ndarray, max_successors: np.ndarray, num_devices: int, num_microbatches: int
) -> tuple[SearchResult, SearchProblem]:
    """The stages of least step time.

    Args:
        sizes: Devices of each submesh: powers of two, each once.
        seconds, max_successors: (L, L, submesh, configuration), as in ``AutostagingTables``.
        num_devices: Of the cluster, a power of two or a multiple of the largest size.
        num_microbatches: M.

    Returns:
        The result, whose choices have the number of the configuration as ``data_parallel``... see ``autostage`` for plans; and the problem.
    """
    raise NotImplementedError
