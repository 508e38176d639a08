"""The cost model of operators as the paper writes it: nothing is transient, nothing overlaps."""

from __future__ import annotations

from dataclasses import dataclass

from capture.machine.cluster import Machine
from capture.model.operators import Operator, OperatorModel
from capture.plan.sharding import DP, Mode
from capture.step.operator_cost import BatchSize, Cost, compute_seconds, sliced_modes


@dataclass(frozen=True)
class PaperCost:
    """The cost model as the paper writes it, for N devices in one ring and b examples per device
    (O-g).

        M = M_model x (DP: 1, ZDP: 1 / N) + b M_act + M_extra
        T = steps x (alpha + beta S / N) + b gamma,
            steps: DP 2 (N - 1), ZDP 3 (N - 1), ZDP rematerialised 4 (N - 1)

    M_model counts parameters, gradients and optimizer state (O-a). Every slice of a split operator
    is an operator of its own, S / g bytes large, in DP or ZDP mode (3.3), so that g slices pay g
    times alpha (O-h). Rematerialised, activations shrink to the inputs and the forward pass is
    computed twice (2.3, O-l). Nothing overlaps, and gathering needs no memory (O-b, O-m).

    Attributes:
        model, machine: What is trained, and on what.
        granularities: Slices per operator to choose from; 1 is unsplit (OSDP-base).
        remat: Whether activations are rematerialised ("checkpointing").

    Source: paper 3.1, 3.3 and 2.3.
    """

    model: OperatorModel
    machine: Machine
    granularities: tuple[int, ...] = (1,)
    remat: bool = False

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        return sliced_modes(operator, self.granularities) if self.machine.num_devices > 1 else (DP,)

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        n = self.machine.num_devices
        link = self.machine.links.slowest_of_ring(len(self.machine.cluster.nodes))
        sharded = mode.num_sharded / mode.num_slices
        ratio = self.model.state_bytes_per_parameter_byte
        states, replicated = operator.parameter_bytes * ratio, operator.replicated_bytes
        held = operator.input_bytes if self.remat else operator.activation_bytes
        steps = (
            2 * (mode.num_slices - mode.num_sharded) + (4 if self.remat else 3) * mode.num_sharded
        )
        sent = (
            steps * (n - 1) * link.seconds(operator.parameter_bytes / mode.num_slices / n)
            if operator.parameter_bytes
            else 0.0
        )
        sent += 2 * (n - 1) * link.seconds(replicated / n) if replicated else 0.0
        return Cost(
            states * (1 - sharded + sharded / n)
            + replicated * ratio
            + batch_size * held
            + operator.workspace_bytes,
            0.0,
            sent + compute_seconds(operator, self.machine, batch_size, self.remat),
        )
