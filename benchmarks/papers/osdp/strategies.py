"""What OSDP is compared with, in the same cost model: DP, FSDP, GPipe, tensor parallelism, tuned 3D
parallelism; and 3D with OSDP inside.

Source: paper 4.1. There, every strategy is tuned and its best throughput is reported; so it is
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from benchmarks.papers.osdp.pipeline import Pipeline, PipelineSchedule, layers_of
from benchmarks.papers.osdp.tensor_parallel import TensorParallelCost
from capture.documents import fields_of
from capture.machine.cluster import Machine
from capture.model.operators import Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.plan.sharding import DP, ZDP, Mode, ShardingPlan
from capture.step.operator_cost import BatchSize, Cost, CostModel, StepCost
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.search import search

Costs = PaperCost | StepCost

#: Micro-batches of a step that tuning tries: up to so many per stage, from which on the bubble is
#: negligible (Huang et al. 2019, 2.3).
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Outcome:
    """What a strategy reaches.

    Attributes:
        status: ``ok``; ``oom`` if one example does not fit; ``n/a`` if the strategy does not apply.
        examples_per_second: Throughput of all devices together; 0 unless ``ok``.
        setting: What tuning chose.
        plan: What strategies choose that are data parallel only.
    """

    status: Literal["ok", "oom", "n/a"]
    examples_per_second: float = 0.0
    setting: str = ""
    plan: ShardingPlan | None = None

    def to_json(self) -> dict[str, Any]:
        document = fields_of(self, "status", "examples_per_second", "setting")
        return document if self.plan is None else {**document, **self.plan.summary()}


@dataclass(frozen=True)
class OneMode:
    """Costs where every operator is in one mode; those without parameters are in DP mode always."""

    costs: CostModel
    mode: Mode

    @property
    def machine(self) -> Machine:
        return self.costs.machine

    @property
    def model(self) -> OperatorModel:
        return self.costs.model

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        return (self.mode,) if operator.parameter_bytes else (DP,)

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        return self.costs.cost(operator, mode, batch_size)


def data_parallel(costs: Costs) -> Outcome:
    """All operators replicated (PyTorch DDP)."""
    return _searched(OneMode(costs, DP))


def fully_sharded(costs: Costs) -> Outcome:
    """All operators in ZDP mode, whole (FairScale FSDP)."""
    return _searched(OneMode(costs, ZDP))


def osdp(costs: Costs) -> Outcome:
    """The exact search with all modes that the costs offer."""
    return _searched(costs)


def osdp_base(costs: Costs) -> Outcome:
    """The exact search without operator splitting."""
    return _searched(replace(costs, granularities=(1,)))


def tensor_parallel(costs: Costs) -> Outcome:
    """Every operator over all devices (Megatron-LM)."""
    return _searched(OneMode(TensorParallelCost(costs, costs.machine.num_devices), DP))


def pipeline(costs: Costs) -> Outcome:
    """One stage per device, all micro-batches in flight (GPipe); not applicable with fewer layers
    than devices."""
    num_devices = costs.machine.num_devices
    if len(layers_of(costs.model)) < num_devices:
        return Outcome("n/a")
    return _best(_pipelined(costs, 1, num_devices, "gpipe", sharded=False))


def three_d(costs: Costs) -> Outcome:
    """Data, tensor and pipeline parallelism in the best combination of degrees (DeepSpeed 3D)."""
    return _best(_combinations(costs, sharded=False))


def three_d_osdp(costs: Costs) -> Outcome:
    """The same with OSDP in place of data parallelism; 3D itself is among the combinations, so it
    is never worse."""
    return _best(chain(_combinations(costs, sharded=False), _combinations(costs, sharded=True)))


STRATEGIES: Mapping[str, Callable[[Costs], Outcome]] = MappingProxyType(
    {
        "DP": data_parallel,
        "PP": pipeline,
        "TP": tensor_parallel,
        "FSDP": fully_sharded,
        "OSDP-base": osdp_base,
        "OSDP": osdp,
        "3D": three_d,
        "3D+OSDP": three_d_osdp,
    }
)
#: Strategies that combine no kinds of parallelism, beside OSDP's own (paper 4.2).
PURE = ("DP", "PP", "TP", "FSDP")


def _searched(costs: CostModel, setting: str = "") -> Outcome:
    plan = search(ShardingProblem(costs)).plan
    return (
        Outcome("oom")
        if plan is None
        else Outcome("ok", plan.examples_per_second, setting or f"b {plan.batch_size}", plan)
    )


def _best(outcomes: Iterator[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: outcome.examples_per_second, default=Outcome("oom"))


def _combinations(costs: Costs, sharded: bool) -> Iterator[Outcome]:
    """Tensor-parallel groups inside a node, stages of whole groups, the rest replicas."""
    machine = costs.machine
    for tensor in _divisors(machine.devices_per_node):
        for stages in _divisors(machine.num_devices // tensor):
            if stages == 1:
                inside = TensorParallelCost(costs, tensor)
                found = _searched(inside if sharded else OneMode(inside, DP))
                replicas = machine.num_devices // tensor
                yield replace(found, setting=f"dp {replicas}, tp {tensor}, pp 1, {found.setting}")
            elif stages <= len(layers_of(costs.model)):
                yield from _pipelined(costs, tensor, stages, "1f1b", sharded)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _pipelined(
    costs: Costs, tensor: int, stages: int, schedule: PipelineSchedule, sharded: bool
) -> Iterator[Outcome]:
    """The best micro-batch size for every number of micro-batches. With all replicated, a larger
    one is never slower per example."""
    machine = costs.machine
    replicas = machine.num_devices // tensor // stages
    inside = TensorParallelCost(replace(costs, machine=machine.group(replicas * tensor)), tensor)
    parts = Pipeline(inside if sharded else OneMode(inside, DP), stages, machine, schedule)
    for count in (1 << power for power in range((MICROBATCHES_PER_STAGE * stages).bit_length())):
        largest = parts.largest_microbatch(count)
        sizes = (
            np.unique(np.geomspace(1, largest, 4).astype(int)).tolist()
            if sharded and largest
            else [largest]
        )
        for size in filter(None, sizes):
            speed = replicas * count * size / parts.step_seconds(size, count)
            yield Outcome("ok", speed, f"dp {replicas}, tp {tensor}, pp {stages}, {count} x {size}")
