"""Seconds from what programs compute, read and send: a roofline per program, alpha-beta per
collective.

    program    = max(flops / F, product bytes / B) + other bytes / B + collectives
    F, B       = specified rates of the target, each times the fraction of it that is reached in
               practice

F is the rate of what products compute in, which is not always what they read: at default precision,
float32 is TF32 on NVIDIA GPUs since Ampere and bfloat16 on TPUs (``Rates.computed_in``).

Matrix products may hide their own memory traffic; every other kernel is bound by memory, and
kernels run one after the other.

    all-reduce over n devices by rings      2 (n - 1) (alpha + bytes / n / bandwidth)
    all-gather, reduce-scatter              (n - 1) (alpha + bytes / n / bandwidth), of the whole
                                            array's bytes
    all-to-all                              (n - 1) (alpha + bytes / n / bandwidth)
    collective-permute                      alpha + bytes / bandwidth

A group on several nodes works in two levels: between nodes, each device of a node has its share of
the bytes, but for an all-to-all, which has none to share. Nothing is taken to overlap, so these are
times of a step whose collectives are all exposed.

Source: Williams, Waterman, Patterson 2009 (roofline); Thakur, Rabenseifner, Gropp 2005
(collectives).
"""

from __future__ import annotations

from dataclasses import dataclass

from capture.machine.target import Link, Rates
from capture.measured.stage_cost import StageCost
from capture.measured.work import Collective, ProgramWork


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one execution of each program of a stage, its collectives included; of one
    micro-batch where it has one."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    summarize_seconds: float = 0

    @property
    def microbatch_seconds(self) -> float:
        """Of a micro-batch, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    def of(self, program: str) -> float:
        """Of the program that a ``Run`` names."""
        return {
            "forward": self.forward_seconds,
            "backward": self.backward_seconds,
            "update": self.update_seconds,
            "summarize": self.summarize_seconds,
        }[program]


@dataclass(frozen=True)
class TimeModel:
    """Times of programs on a target.

    Attributes:
        rates: Of the target.
        devices_per_node: Where collectives leave the node.
    """

    rates: Rates
    devices_per_node: int

    def program_seconds(self, work: ProgramWork) -> float:
        """One execution on every device of a stage."""
        flops_per_second = (
            self.rates.rate_of(work.dtype, work.precision).value
            * self.rates.compute_efficiency.value
        )
        bytes_per_second = self.rates.bytes_per_second.value * self.rates.memory_efficiency.value
        products = max(work.flops / flops_per_second, work.product_bytes / bytes_per_second)
        sent = sum(
            count * self.collective_seconds(collective) for collective, count in work.collectives
        )
        return products + work.other_bytes / bytes_per_second + sent

    def stage_times(self, cost: StageCost) -> StageTimes | None:
        """Of a measured stage; None if its work was not counted."""
        if cost.forward_work is None or cost.backward_work is None or cost.update_work is None:
            return None
        return StageTimes(
            *map(self.program_seconds, (cost.forward_work, cost.backward_work, cost.update_work))
        )

    def collective_seconds(self, collective: Collective) -> float:
        """One collective, alone on its links.

        Example:
            >>> from capture.machine.target import Target
            >>> model = TimeModel(Target.load("a100-40g").rates, devices_per_node=4)
            >>> one = model.collective_seconds(Collective("all-reduce", 300_000_000, group_size=2, stride=1))
            >>> round(one * 1e3, 3)  # 2 * 150 MB at 300 GB/s
            1.007
        """
        inside, nodes = self._layout(collective)
        fast, slow = self.rates.intra_node, self.rates.inter_node
        kind, nbytes, n = collective.kind, collective.nbytes, collective.group_size
        if kind == "collective-permute":
            return (slow if nodes > 1 else fast).seconds(nbytes)
        if nodes == 1 or inside == 1:
            return _ring(kind, nbytes, n, slow if nodes > 1 else fast)
        if kind == "all-reduce":
            return 2 * _ring("all-gather", nbytes, inside, fast) + _ring(
                kind, nbytes / inside, nodes, slow
            )
        if kind == "all-to-all":
            return _ring(kind, nbytes, inside, fast) + _ring(kind, nbytes, nodes, slow)
        return _ring(kind, nbytes, inside, fast) + _ring(kind, nbytes / inside, nodes, slow)

    def _layout(self, collective: Collective) -> tuple[int, int]:
        """(members of the group in one node, nodes of the group)."""
        inside = max(1, min(collective.group_size, self.devices_per_node // collective.stride))
        return inside, -(-collective.group_size // inside)


def _ring(kind: str, nbytes: float, n: int, link: Link) -> float:
    if n < 2:
        return 0.0
    steps = 2 * (n - 1) if kind == "all-reduce" else n - 1
    return steps * link.seconds(nbytes / n)
