"""Which devices Alpa gives to which stage.

Alpa packs submeshes itself: the largest first, those of equal size in reverse order of the stages,
hosts filled from the first to the last without gaps. So of equal stages the first stands on the
last host, and reports per device must follow this rule, not the plan's ids.

Source: Alpa 0.2.3, ``get_sliced_virtual_submeshes``, by its behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.stages import Plan

Shape = tuple[int, int]


def physical_shape(num_devices: int, devices_per_node: int) -> Shape:
    """Return a submesh's (hosts, devices per host): a part of one host, or whole hosts.

    Raises:
        PlanError: ``alpa-submesh`` if it is neither.

    Example:
        >>> physical_shape(2, 4), physical_shape(4, 4), physical_shape(8, 4)
        ((1, 2), (1, 4), (2, 4))
    """
    if num_devices <= devices_per_node:
        return 1, num_devices
    if num_devices % devices_per_node:
        raise PlanError.of(
            f"a stage on {num_devices} devices is neither a part of a node of {devices_per_node} "
            "nor whole nodes, which is all that Alpa "
            "takes; give the stage another number of devices.",
            "alpa-submesh",
        )
    return num_devices // devices_per_node, devices_per_node


def alpa_placement(cluster: Cluster, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the device ids of every stage, node-major, as Alpa packs them.

    Args:
        cluster: Devices in equal nodes: Alpa's hosts.
        sizes: Devices of each stage, in pipeline order; all of the cluster together.

    Raises:
        PlanError: ``alpa-cluster`` for unequal nodes, ``alpa-submesh`` for a size that Alpa has no
            submesh for, ``alpa-packing`` if the sizes do not fill the nodes in Alpa's order.

    Example:
        >>> alpa_placement(Cluster((4, 4)), [2, 4, 2])
        ((6, 7), (0, 1, 2, 3), (4, 5))
    """
    per_node = cluster.nodes[0]
    if len(set(cluster.nodes)) > 1:
        raise PlanError.of(
            f"cluster {cluster} has unequal nodes, and Alpa's hosts all have as many devices; "
            "plan for NxG.",
            "alpa-cluster",
        )
    shapes = [physical_shape(size, per_node) for size in sizes]
    if sum(sizes) != cluster.num_devices:
        raise PlanError.of(
            f"the stages have {sum(sizes)} devices and the cluster {cluster.num_devices}; Alpa "
            "uses every device.",
            "alpa-packing",
        )
    placed: dict[int, tuple[int, ...]] = {}
    start = 0
    for stage in sorted(range(len(sizes)), key=lambda s: (sizes[s], s), reverse=True):
        room = per_node - start % per_node
        if shapes[stage][0] == 1 and sizes[stage] > room:
            raise PlanError.of(
                f"stages of {list(sizes)} devices do not fill nodes of {per_node}: Alpa packs the "
                f"largest first, and stage {stage} "
                f"(of {sizes[stage]}) finds {room} left in its node; use powers of two.",
                "alpa-packing",
            )
        placed[stage] = tuple(range(start, start + sizes[stage]))
        start += sizes[stage]
    return tuple(placed[stage] for stage in range(len(sizes)))


def on_hosts(plan: Plan) -> list[Violation]:
    """Return an ``alpa-offload`` violation per stage that offloads: Alpa keeps all on devices."""
    return [
        Violation(
            f"stage {s} has offload={list(stage.offload)}, and Alpa keeps everything on devices; "
            "leave it out, or add --nearest.",
            "alpa-offload",
        )
        for s, stage in enumerate(plan.stages)
        if stage.offload
    ]


def foreign_schedule(plan: Plan) -> list[Violation]:
    """Return an ``alpa-schedule`` violation, unless the plan's schedule is one of Alpa's."""
    if plan.schedule in PLAIN_SCHEDULES:
        return []
    return [
        Violation(
            f"the plan has schedule={plan.schedule!r}; Alpa's stages have devices of their own "
            f"and whole backward passes. Plan with --schedule {' or '.join(PLAIN_SCHEDULES)}.",
            "alpa-schedule",
        )
    ]
