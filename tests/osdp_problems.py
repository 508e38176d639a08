"""Problems for the searches of OSDP: small random ones, and the paper's families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from capture.machine.cluster import Cluster, Machine
from capture.machine.rates import HostLink, Link, Rates, Sourced
from capture.machine.target import Target
from capture.model.operators import Block, Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.papers.osdp.transformer import transformer
from capture.plan.sharding import Mode
from capture.step.operator_cost import Cost, StepCost
from recommender.osdp.problem import ShardingProblem

#: Layers and widths of Table 1's families.
FAMILIES: Mapping[str, list[tuple[int, int]]] = MappingProxyType(
    {
        "N&D": [(48, 1024)],
        "N&D, deep": [(96, 1536)],
        "W&S": [(4, 6144)],
        "I&C": [(24, 1024), (16, 2048), (4, 4096)],
        "I&C, deep": [(64, 1024), (24, 1536), (8, 2048)],
    }
)


def link(alpha: float, bytes_per_second: float) -> Link:
    return Link(Sourced(alpha, "test"), Sourced(bytes_per_second, "test"))


def machine(limit: float, num_nodes: int = 1, per_node: int = 8, alpha: float = 1e-4) -> Machine:
    inside, all_of_it = link(alpha, 4.5e9), Sourced(1.0, "test")
    rates = Rates(
        {"float32": Sourced(11e12, "test")},
        all_of_it,
        Sourced(5e11, "test"),
        all_of_it,
        inside,
        link(2 * alpha, 1.5e9),
        HostLink(inside, inside, True, "test"),
    )
    target = Target("test", "eight for tests", "cuda", rates=rates)
    return Machine(Cluster((per_node,) * num_nodes, "test"), target, limit)


def family(name: str) -> OperatorModel:
    return transformer(name, FAMILIES[name], seq_len=128, vocab_size=50257)


@dataclass(frozen=True)
class PlantedCost:
    """Costs by table: memory and seconds of each mode at one example; activations and compute per
    further example."""

    model: OperatorModel
    machine: Machine
    table: tuple[tuple[tuple[float, float, float], ...], ...]

    def _kind(self, operator: Operator) -> int:
        return int(operator.name)

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        return tuple(Mode(99, k) for k in range(len(self.table[self._kind(operator)])))

    def cost(self, operator: Operator, mode: Mode, batch_size) -> Cost:
        resident, transient, seconds = self.table[self._kind(operator)][mode.num_sharded]
        return Cost(
            resident + batch_size * operator.activation_bytes,
            transient + 0 * batch_size,
            seconds + batch_size * operator.flops,
        )


def random_problem(seed: int, max_operators: int = 6, max_modes: int = 3) -> ShardingProblem:
    """A small problem of whole numbers: ties, modes that another beats, transients that decide,
    limits that nothing or everything fits."""
    generator = np.random.default_rng(seed)
    num_kinds = int(generator.integers(1, 4))
    largest = (3, 12, 1000)[seed % 3]  # 3: heavy ties
    table = tuple(
        tuple(
            (
                float(generator.integers(0, largest)),
                float(generator.integers(0, largest) * (seed % 2)),
                float(generator.integers(1, largest)),
            )
            for _ in range(generator.integers(1, max_modes + 1))
        )
        for _ in range(num_kinds)
    )
    blocks, left = [], max_operators
    for kind in range(num_kinds):
        count = int(generator.integers(1, max(2, left - (num_kinds - 1 - kind) + 1)))
        left -= count
        operator = Operator(
            str(kind),
            "other",
            1,
            int(generator.integers(1, 4)),
            0,
            0,
            flops=int(generator.integers(0, 3)),
            workspace_bytes=kind,
        )
        blocks.append(Block((operator,), count))
    model = OperatorModel(f"random {seed}", tuple(blocks))
    limit = float(generator.integers(1, max(2, 3 * largest * model.num_operators // 4)))
    return ShardingProblem(PlantedCost(model, machine(limit), table))


def paper_problem(
    name: str, limit: float, granularities: tuple[int, ...] = (1,), remat: bool = False
) -> ShardingProblem:
    return ShardingProblem(PaperCost(family(name), machine(limit), granularities, remat))


def step_problem(
    name: str, limit: float, granularities: tuple[int, ...] = (1, 4), **options
) -> ShardingProblem:
    return ShardingProblem(StepCost(family(name), machine(limit), granularities, **options))
