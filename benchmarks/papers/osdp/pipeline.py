"""Pipelines of replicas: the layers in contiguous stages, each data parallel, sharded or not,
inside.

The step takes what its busiest stage does, and one micro-batch through the others to fill and to
drain (``busiest_seconds``).

Parameters in ZDP mode are gathered for every micro-batch, and their gradients reduced after each;
those in DP mode are reduced once.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B: stage i of p keeps p - i
micro-batches).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from benchmarks.papers.osdp.settings import fastest_at
from capture.machine.cluster import Machine
from capture.model.operators import Block, Operator, OperatorModel
from capture.papers.capture.cuts import equal_cuts
from capture.plan.sharding import DP, Mode
from capture.step.operator_cost import BatchSize, Cost, CostModel
from recommender.osdp.problem import ShardingProblem

PipelineSchedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class MicrobatchedCost:
    """Costs of a step of several micro-batches; what searches take for a batch is one of them.

    Attributes:
        of: Costs of operators on the devices of one stage.
        model: The operators of the stage.
        num_microbatches: Micro-batches of a step.
        num_in_flight: Micro-batches whose activations the stage holds at once.
    """

    of: CostModel
    model: OperatorModel
    num_microbatches: int
    num_in_flight: int

    @property
    def machine(self) -> Machine:
        return self.of.machine

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        return self.of.modes(operator)

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        factors = (1, self.num_in_flight, self.num_microbatches)
        found = self.of.cost(operator, mode, np.multiply.outer(factors, batch_size))
        one, _, step = found.seconds
        transient = found.transient_bytes
        return Cost(
            found.resident_bytes[1],
            transient[0] if np.ndim(transient) else transient,
            step if mode == DP else self.num_microbatches * one,
        )

    def once_seconds(self, operator: Operator, mode: Mode) -> float:
        """What comes once per step, not per micro-batch: reducing what is replicated."""
        return float(self.of.cost(operator, mode, 0).seconds) if mode == DP else 0.0


@dataclass(frozen=True)
class Pipeline:
    """A pipeline on devices that hold one stage each, or one replica of it.

    Attributes:
        cost: What operators cost on the devices of one stage.
        num_stages: p; not more than layers.
        machine: All devices.
        schedule: ``gpipe`` keeps all micro-batches, ``1f1b`` those in flight.
    """

    cost: CostModel
    num_stages: int
    machine: Machine
    schedule: PipelineSchedule

    def step_seconds(self, microbatch_size: int, num_microbatches: int) -> float:
        """Seconds of a step of so many micro-batches of so many examples per replica; infinite if
        some stage does not fit."""
        busy, filling = [], []
        for stage_id, stage in enumerate(self._stages(num_microbatches)):
            plan = fastest_at(ShardingProblem(stage, microbatch_size), microbatch_size)
            if plan is None:
                return float("inf")
            operators = stage.model.operators
            once = math.fsum(map(stage.once_seconds, operators, plan.modes))
            sent = 0.0
            if stage_id:
                stride = self.machine.num_devices // self.num_stages
                nbytes = microbatch_size * operators[0].input_bytes
                # And its gradient back.
                sent = 2 * self.machine.links.seconds("collective-permute", nbytes, 2, stride)
            busy.append(plan.step_seconds + num_microbatches * sent)
            filling.append((plan.step_seconds - once) / num_microbatches + sent)
        return busiest_seconds(busy, filling)

    def largest_microbatch(self, num_microbatches: int) -> int:
        """Most examples of a micro-batch that fit; 0 if one does not."""
        least = None
        for stage in self._stages(num_microbatches):
            least = ShardingProblem(stage, least).num_batch_sizes
            if not least:
                return 0
        return least or 0

    def _stages(self, num_microbatches: int) -> Iterator[MicrobatchedCost]:
        for stage_id, stage in enumerate(stages_of(self.cost.model, self.num_stages)):
            in_flight = num_microbatches
            if self.schedule == "1f1b":
                in_flight = min(self.num_stages - stage_id, num_microbatches)
            yield MicrobatchedCost(self.cost, stage, num_microbatches, in_flight)


def layers_of(model: OperatorModel) -> list[tuple[Operator, ...]]:
    """What a pipeline may part: one repetition of a block of several operators, with single
    operators before it, or after the last."""
    return list(_layers(model))


def _layers(model: OperatorModel) -> Iterator[tuple[Operator, ...]]:
    repetitions = [block.operators for block in model.blocks for _ in range(block.count)]
    last = max(
        (i for i, operators in enumerate(repetitions) if len(operators) > 1),
        default=len(repetitions) - 1,
    )
    waiting: tuple[Operator, ...] = ()
    for i, operators in enumerate(repetitions):
        waiting += operators
        if i == last:
            yield waiting + tuple(operator for rest in repetitions[last + 1 :] for operator in rest)
            return
        if len(operators) > 1:
            yield waiting
            waiting = ()


@lru_cache(maxsize=256)
def stages_of(model: OperatorModel, num_stages: int) -> tuple[OperatorModel, ...]:
    """The layers in contiguous stages, their FLOPs as equal as can be (``equal_cuts``)."""
    layers = layers_of(model)
    weights = [sum(operator.flops for operator in layer) for layer in layers]
    parts = (
        tuple(operator for layer in layers[first:stop] for operator in layer)
        for first, stop in pairwise(equal_cuts(weights, num_stages))
    )
    return tuple(
        OperatorModel(
            f"{model.name}, stage {i}", (Block(part),), model.state_bytes_per_parameter_byte
        )
        for i, part in enumerate(parts)
    )


def busiest_seconds(busy: Sequence[float], filling: Sequence[float]) -> float:
    """A step by its busiest stage: all that it does, and one micro-batch through all others.

    With ``busy = M t + u`` and ``filling = t`` at most ``pipeline_seconds``, and equal to it where
    the slowest stage has the longest update. It is no sum over stages and a maximum of each, which
    the searches for speed need; so they minimise the other.

    Args:
        busy: Seconds that every stage computes in the whole step.
        filling: Seconds of every stage for one micro-batch.

    Source: Huang et al. 2019 (GPipe).
    """
    last = int(np.argmax(busy))
    return busy[last] + sum(filling) - filling[last]
