"""Costs of data parallelism, sharded or not, over replicas that each split their operators over
several devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from capture.machine.cluster import Machine
from capture.model.operators import Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.plan.sharding import Mode
from capture.step.operator_cost import BatchSize, Cost, StepCost


@dataclass(frozen=True)
class TensorParallelCost:
    """Costs of one replica's devices, ``degree`` of which hold a part of every operator each.

    A part has a share of the parameters, the FLOPs and the activations inside the operator; its
    input is whole on each device. The stream between operators is all-reduced after every operator,
    once forwards and once backwards, and once more where the forward pass is repeated; nothing
    overlaps with that. Examples of a batch are those of a replica.

    Attributes:
        whole: Costs of the same model without tensor parallelism, on all devices of a pipeline
            stage.
        degree: Devices per replica, neighbours in device order; divides their number.

    Source: Shoeybi et al. 2020, Megatron-LM, section 3.
    """

    whole: PaperCost | StepCost
    degree: int

    @property
    def model(self) -> OperatorModel:
        return self.whole.model

    @cached_property
    def machine(self) -> Machine:
        """One device of each replica: those that data parallelism is over."""
        whole = self.whole.machine
        return whole.group(whole.num_devices // self.degree, stride=self.degree)

    @cached_property
    def _replicas(self) -> PaperCost | StepCost:
        return replace(self.whole, machine=self.machine)

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        return self._replicas.modes(operator)

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        part = self._replicas.cost(self._part(operator), mode, batch_size)
        if self.degree == 1:
            return part
        # A table's result is reduced; of products, what comes in or goes out: the other is split (a
        # head's logits).
        stream = (
            operator.output_bytes
            if operator.kind == "embedding"
            else min(operator.input_bytes, operator.output_bytes)
        )
        times = 3 if self.whole.remat else 2
        return replace(
            part,
            seconds=part.seconds
            + times
            * self.whole.machine.links.seconds("all-reduce", batch_size * stream, self.degree),
        )

    def _part(self, operator: Operator) -> Operator:
        inside = max(0, operator.activation_bytes - operator.input_bytes)
        return replace(
            operator,
            parameter_bytes=-(-operator.parameter_bytes // self.degree),
            activation_bytes=operator.activation_bytes - inside + -(-inside // self.degree),
            workspace_bytes=-(-operator.workspace_bytes // self.degree),
            flops=-(-operator.flops // self.degree),
            replicated_bytes=-(-operator.replicated_bytes // self.degree),
            tail_bytes=-(-operator.tail_bytes // self.degree),
            gamma_seconds=None
            if operator.gamma_seconds is None
            else operator.gamma_seconds / self.degree,
        )
