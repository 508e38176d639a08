"""Which numbers of devices a stage may take, and the choices that such stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from capture.machine.cluster import Cluster
from capture.options import Asked
from capture.plan.choices import Remat, StageChoice, with_sequence_parallel, with_sharded_params


@dataclass(frozen=True)
class StageSpace:
    """The submeshes that plans are made of.

    A stage stays inside the rest of its node, on a power of two of devices.

    Attributes:
        whole_nodes: Stages may also span 2, 4, 8, ... whole nodes; of a torus, those that form a
            box.
        any_divisor: Degrees may be any divisor of a node, not only powers of two.

    Source: CAPTURE III-C (degrees are powers of two up to the devices of a node: READINGS.md, C-j
    and C-k).
    """

    whole_nodes: Annotated[bool, Asked()] = False
    any_divisor: Annotated[bool, Asked()] = False

    def degrees(self, cluster: Cluster) -> list[list[int]]:
        """Return the numbers of devices that a stage starting at device p may take, for every p.

        Example:
            >>> StageSpace().degrees(Cluster((4,)))
            [[1, 2, 4], [1, 2], [1, 2], [1]]
        """
        degrees: list[list[int]] = []
        for node, size in enumerate(cluster.nodes):
            for offset in range(size):
                room, first = size - offset, len(degrees)
                if self.any_divisor:
                    here = [d for d in range(1, room + 1) if size % d == 0]
                else:
                    here = [1 << bit for bit in range(room.bit_length()) if 1 << bit <= room]
                here = [d for d in here if cluster.is_block(first, d)]
                num_nodes = 2
                while (
                    self.whole_nodes
                    and offset == 0
                    and cluster.nodes[node : node + num_nodes] == (size,) * num_nodes
                ):
                    if cluster.is_block(first, size * num_nodes):
                        here.append(size * num_nodes)
                    num_nodes *= 2
                degrees.append(here)
        return degrees

    def all_degrees(self, cluster: Cluster) -> list[int]:
        """Return the numbers of devices that a stage may take at any device, ascending."""
        return sorted({d for here in self.degrees(cluster) for d in here})

    def choices(
        self,
        cluster: Cluster,
        microbatch_size: int,
        remat: Sequence[Remat] = ("none",),
        *,
        shard_optimizer: bool = False,
        shard_params: bool = False,
        sequence_parallel: bool = False,
    ) -> list[StageChoice]:
        """Return every pair of degrees that a stage can have, for each way to rematerialise; with
        ``shard_params`` also with parameters split over the replicas, with ``sequence_parallel``
        also with activations split along the sequence.

        Example:
            >>> choices = StageSpace().choices(Cluster((2,)), 8)
            >>> [(choice.data_parallel, choice.tensor_parallel) for choice in choices]
            [(1, 1), (2, 1), (1, 2)]
        """
        found = [
            StageChoice(d // tp, tp, policy, shard_optimizer)
            for policy in remat
            for d in self.all_degrees(cluster)
            for tp in range(1, d + 1)
            if d % tp == 0
            and (self.any_divisor or tp.bit_count() == 1 == d.bit_count())
            and microbatch_size % (d // tp) == 0
        ]
        if shard_params:
            found = with_sharded_params(found)
        return with_sequence_parallel(found) if sequence_parallel else found
