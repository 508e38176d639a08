"""Meshes whose devices are all data-parallel, the clusters that they are, and groups of devices
inside them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from capture.errors import ClusterError, ExecutionError
from capture.machine.cluster import Cluster


def mesh_of(cluster: Cluster) -> Mesh:
    """Return the devices of this process as the mesh of a cluster: the axis ``data`` along the
    devices of a node, ``node`` before it where there are several.

    Raises:
        ExecutionError: ``osdp-devices`` if there are too few.
    """
    devices = jax.devices()
    if len(devices) < cluster.num_devices:
        raise ExecutionError.of(
            f"the plan is for {cluster.num_devices} devices and this process has {len(devices)}; "
            "plan for a mesh of theirs, or start it "
            "with more (capture.environment.prepare for virtual CPU devices).",
            "osdp-devices",
        )
    shape, names = mesh_axes(cluster)
    return Mesh(np.asarray(devices[: cluster.num_devices]).reshape(shape), names)


def mesh_axes(where: Mesh | Cluster) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return sizes and names of a mesh's axes, or of those that ``mesh_of`` makes of a cluster."""
    if not isinstance(where, Cluster):
        return where.devices.shape, where.axis_names
    if len(where.nodes) == 1:
        return (where.num_devices,), ("data",)
    return (len(where.nodes), where.num_devices // len(where.nodes)), ("node", "data")


def cluster_of(mesh: Mesh, target: str, devices_per_node: int | None) -> Cluster:
    """Return a mesh as nodes of devices: by their processes, unless the size of a node is given.

    Raises:
        ClusterError: ``osdp-nodes`` if nodes do not come out equal.
    """
    processes = Counter(device.process_index for device in mesh.devices.flat)
    per_node = devices_per_node or min(processes.values())
    if mesh.size % per_node or (devices_per_node is None and len(set(processes.values())) > 1):
        raise ClusterError.of(
            f"{mesh.size} devices of {len(processes)} processes are no equal nodes of {per_node}; "
            "give devices_per_node.",
            "osdp-nodes",
        )
    return Cluster((per_node,) * (mesh.size // per_node), target)


def group_axes(mesh: Mesh, group_size: int | None) -> tuple[Any, ...]:
    """Return the last axes of a mesh that have so many devices together, or none."""
    if group_size is None:
        return mesh.axis_names
    sizes = list(mesh.shape.values())
    fitting = [i for i in range(len(sizes)) if math.prod(sizes[i:]) == group_size]
    return mesh.axis_names[fitting[0] :] if fitting else ()
