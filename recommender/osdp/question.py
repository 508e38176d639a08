"""The question of a sharding plan (OSDP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from capture.errors import ClusterError, PlanError, TargetError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol
from capture.options import Asked, several, size
from capture.quantities import bytes_of
from capture.step.operator_cost import PAPER_GRANULARITY

#: Smaller parameters are replicated: gathering one takes as long as latency allows, and a thousand
#: of them are 4 GB at most with Adam.
SMALLEST_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class ShardingQuestion:
    """The question of a sharding plan (OSDP): for which task, devices and memory.

    Attributes:
        workload: The task; nothing is allocated. Where the loop's own loss returns ``(loss, aux)``
            or takes more arguments, that of the workload is the scalar alone, and the loop's is
            given to ``transform``.
        where: A ``Cluster``, or a ``jax.sharding.Mesh`` whose axes are all data-parallel.
        memory_limit: Limit per device, such as 30GiB (default: what the target can use). The
            compiled step stays within it; a plan that is not compiled leaves a part of it to the
            compiler.
        target: Rates and memory of the mesh's devices, such as ``"h100"``; a cluster names its own.
        devices_per_node: Devices of the mesh that share a node; None: those of a process.
        batch_size: Examples per device, another word for a share of --global-batch (default: those
            of largest throughput).
        max_batch_size: The largest batch per device to choose from.
        granularities: Slices per operator to choose from; 1 is unsplit.
        partly: Some slices of an operator may be replicated, others sharded: such leaves become two
            arrays.
        remat: Whether the backward pass computes every operator again from its input. The model's
            own ``jax.checkpoint`` needs no option.
        overlap_fraction: The part of the lesser of computation and communication that is hidden;
            above 0, gathers look ahead: the forward pass may gather an operator's parameters while
            the one before it runs. Backwards, gathers and reduce-scatters run beside the two
            products of their own operator in any case, as far as XLA can.
        smallest_bytes: Replicate parameters that are smaller, such as 64KiB (default: 1 MiB).
        dtype: Whose rate products have, also ``"tf32"`` where the target has it; None: that in
            which the target computes most of the loss's products at the precision that they ask for
            (``Rates.computed_in``).

    Raises:
        PlanError: ``memory-syntax``, ``osdp-limit``, ``osdp-batch-size``, ``osdp-granularity``,
            ``osdp-smallest``;
        TargetError: ``osdp-target`` for a mesh without a target, ``osdp-dtype``;
        ClusterError: ``osdp-where``.
    """

    workload: WorkloadProtocol
    where: Any
    memory_limit: Annotated[str | float | None, Asked("memory", metavar="SIZE", read=size)] = None
    target: str | None = None
    devices_per_node: int | None = None
    batch_size: Annotated[int | None, Asked("batch", "B", least=1)] = None
    max_batch_size: Annotated[int | None, Asked("most", "B", least=1)] = None
    granularities: Annotated[tuple[int, ...], Asked("slices", "G,G,...", read=several(1))] = (
        1,
        PAPER_GRANULARITY,
    )
    partly: Annotated[bool, Asked()] = False
    remat: bool = False
    overlap_fraction: Annotated[float, Asked("overlap", "F")] = 0.0
    smallest_bytes: Annotated[int, Asked("smallest")] = SMALLEST_BYTES
    dtype: str | None = None

    def __post_init__(self) -> None:
        PlanError.check(self._violations())
        mesh = self._mesh
        if mesh is not None and not hasattr(mesh, "devices"):
            raise ClusterError.of(
                f"{self.where!r} is neither a cluster nor a mesh; give Cluster.parse('1x8', "
                "'h100') or a mesh.",
                "osdp-where",
            )
        if mesh is not None and self.target is None:
            raise TargetError.of(
                'a mesh does not say how fast its devices are; give target=, such as "h100".',
                "osdp-target",
            )

    @property
    def limit_bytes(self) -> float | None:
        """The memory limit per device that is given, in bytes; None without one."""
        return bytes_of(self.memory_limit)

    @property
    def _mesh(self) -> Any:
        """The mesh that the question gives; None where it gives a cluster."""
        return None if isinstance(self.where, Cluster) else self.where

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster that is given, or the devices of the mesh as one.

        Raises:
            ClusterError: ``osdp-nodes``.
        """
        if self._mesh is None:
            given: Cluster = self.where
            return given
        from capture.runtime.sharded.mesh import cluster_of

        assert self.target is not None, "checked"
        return cluster_of(self._mesh, self.target, self.devices_per_node)

    @cached_property
    def node_groups(self) -> bool:
        """Whether operators may be sharded over the devices of a node alone."""
        if self._mesh is None:
            return True
        from capture.runtime.sharded.mesh import group_axes

        return bool(group_axes(self._mesh, self.cluster.nodes[0]))

    def check_dtype(self) -> None:
        """Refuse a dtype that the target has no rate of.

        Raises:
            TargetError: ``osdp-dtype``.
        """
        rates = Target.load(self.cluster.target).rates
        if self.dtype is not None and rates and self.dtype not in rates.flops_per_second:
            raise TargetError.of(
                f"dtype={self.dtype!r} has no rate in target={self.cluster.target!r}; choose one "
                f"of {', '.join(rates.flops_per_second)}.",
                "osdp-dtype",
            )

    def _violations(self) -> Iterator[Violation]:
        limit, granularities = self.limit_bytes, self.granularities
        if limit is not None and not 0 < limit < float("inf"):
            yield Violation(
                f"memory_limit={limit} is no memory of a device; give bytes, more than 0.",
                "osdp-limit",
            )
        for name in ("batch_size", "max_batch_size"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or size < 1):
                yield Violation(
                    f"{name}={size!r} is no batch per device; give a whole number, at least 1.",
                    "osdp-batch-size",
                )
        if (
            not isinstance(granularities, Sequence)
            or not granularities
            or any(not isinstance(g, int) or g < 0 for g in granularities)
        ):
            yield Violation(
                f"granularities={granularities!r} are no numbers of slices; give some, such as (1, "
                "4); 1 is unsplit.",
                "osdp-granularity",
            )
        if self.smallest_bytes < 0:
            yield Violation(
                f"smallest_bytes={self.smallest_bytes} is no size; give 0 or more.", "osdp-smallest"
            )
