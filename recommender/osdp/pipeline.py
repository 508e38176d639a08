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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from capture.machine.cluster import Machine
from capture.model.operators import Block, Operator, OperatorModel
from capture.plan.sharding import DP
from capture.step.operator_cost import CostModel
from capture.step.times import busiest_seconds
from recommender.osdp.exact import cheapest
from recommender.osdp.problem import Options

PipelineSchedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline on devices that hold one stage each, or one replica of it.

    Attributes:
        cost: Of operators on the devices of one stage.
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
        for stage_id, stage in enumerate(self._stages):
            options, once = self._options(stage_id, microbatch_size, num_microbatches)
            chosen = cheapest(options, self.cost.machine.memory_limit_bytes).chosen
            if chosen is None:
                return float("inf")
            rows = [(kind, pick) for kind, picks in enumerate(chosen) for pick in picks]
            seconds = sum(float(options.seconds[row]) for row in rows)
            sent = 0.0
            if stage_id:
                stride = self.machine.num_devices // self.num_stages
                nbytes = microbatch_size * stage.operators[0].input_bytes
                sent = 2 * self.machine.links.seconds(
                    "collective-permute", nbytes, 2, stride
                )  # and its gradient back
            busy.append(seconds + num_microbatches * sent)
            filling.append(
                (seconds - sum(float(once[row]) for row in rows)) / num_microbatches + sent
            )
        return busiest_seconds(busy, filling)

    @cached_property
    def _stages(self) -> tuple[OperatorModel, ...]:
        return stages_of(self.cost.model, self.num_stages)

    def largest_microbatch(self, num_microbatches: int) -> int:
        """Most examples of a micro-batch that fit; 0 if one does not."""
        limit = self.cost.machine.memory_limit_bytes

        def fits(size: int) -> bool:
            return all(
                self._options(i, size, num_microbatches)[0].least_bytes() <= limit
                for i in range(self.num_stages)
            )

        least, stop = 0, 1
        while fits(stop):
            least, stop = stop, 2 * stop
        while stop - least > 1:
            middle = (least + stop) // 2
            least, stop = (middle, stop) if fits(middle) else (least, middle)
        return least

    def _options(
        self, stage_id: int, size: int, num_microbatches: int
    ) -> tuple[Options, np.ndarray]:
        """What may be chosen in a stage, and what of its seconds comes once per step rather than
        per micro-batch."""
        stage = self._stages[stage_id]
        in_flight = (
            num_microbatches
            if self.schedule == "gpipe"
            else min(self.num_stages - stage_id, num_microbatches)
        )
        kinds = [stage.operators[first] for first, _ in stage.counts]
        modes = tuple(map(self.cost.modes, kinds))
        columns = np.full((4, len(kinds), max(map(len, modes))), np.inf)
        sizes = np.array([0, size, in_flight * size, num_microbatches * size])
        for i, operator in enumerate(kinds):
            for j, mode in enumerate(modes[i]):
                cost = self.cost.cost(operator, mode, sizes)
                none, one, _, step = cost.seconds
                passing = np.broadcast_to(cost.transient_bytes, sizes.shape)[1]
                seconds, once = (step, none) if mode == DP else (num_microbatches * one, 0.0)
                columns[:, i, j] = cost.resident_bytes[2], passing, seconds, once
        counts = np.array([count for _, count in stage.counts])
        return Options(
            counts, modes, np.ceil(columns[0]), np.ceil(columns[1]), columns[2]
        ), columns[3]


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
    """The layers in contiguous stages, the largest FLOPs of a stage as small as possible."""
    layers = layers_of(model)
    weights = [sum(operator.flops for operator in layer) + 1 for layer in layers]
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_packed(weights, middle, num_stages)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    cuts = [0, *np.cumsum([len(part) for part in _packed(weights, low, num_stages)]).tolist()]
    parts = (
        tuple(operator for layer in layers[first:stop] for operator in layer)
        for first, stop in pairwise(cuts)
    )
    return tuple(
        OperatorModel(
            f"{model.name}, stage {i}", (Block(part),), model.state_bytes_per_parameter_byte
        )
        for i, part in enumerate(parts)
    )


def _packed(weights: Sequence[int], limit: int, num_parts: int) -> list[list[int]]:
    """Contiguous parts, each as long as it stays within the limit and leaves one weight for each
    part to come."""
    parts: list[list[int]] = [[]]
    for i, weight in enumerate(weights):
        must_part = len(weights) - i <= num_parts - len(parts)
        if parts[-1] and (must_part or sum(parts[-1]) + weight > limit):
            parts.append([])
        parts[-1].append(weight)
    return parts
