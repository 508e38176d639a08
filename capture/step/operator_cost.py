"""What an operator costs in a mode: memory that stays, memory that comes and goes, seconds.

    memory of a plan   sum of resident bytes over the operators + the largest of their transient
                       bytes
    seconds of a step  sum over the operators

Searches and baselines know only the interface ``CostModel``; the paper's own model
(``capture.papers.osdp.paper_cost``) is another one behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from capture.errors import Violation, WorkloadError
from capture.machine.cluster import Machine
from capture.model.operators import Operator, OperatorModel
from capture.plan.sharding import DP, Mode

#: A number of examples, or an array of such numbers: costs are then arrays of its shape.
BatchSize = Any

#: Slice granularity that the paper uses unless it sweeps it (4.1).
PAPER_GRANULARITY = 4


@dataclass(frozen=True)
class Cost:
    """The memory and time that one operator takes of every device in one step.

    Attributes:
        resident_bytes: Held through the step: adds up over operators.
        transient_bytes: Held while the operator runs: only the largest counts.
        seconds: Computation and communication.
    """

    resident_bytes: Any
    transient_bytes: Any
    seconds: Any


class Collectives(NamedTuple):
    """The seconds of the collectives of one operator.

    Attributes:
        replicated: The all-reduce of the gradients of what is replicated.
        all_gather: Seconds of the all-gather of a slice, for one pass.
        reduce_scatter: Seconds of the reduce-scatter of the gradients of a slice, which takes as
            long as one of all bits.
        between_groups: The all-reduce of a shard of these between groups.
    """

    replicated: float
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    between_groups: float = 0.0


class CostModel(Protocol):
    """The interface through which searches ask for costs of operators."""

    @property
    def machine(self) -> Machine: ...

    @property
    def model(self) -> OperatorModel: ...

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        """Return the modes to choose from for an operator."""
        ...

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        """Return what an operator costs every device, for so many examples per device (a number, or
        an array of numbers)."""
        ...


def sliced_modes(
    operator: Operator,
    granularities: tuple[int, ...],
    groups: tuple[int | None, ...] = (None,),
    partly: bool = True,
) -> tuple[Mode, ...]:
    """Return DP, and k of g slices in ZDP for every granularity g: 0 and 1 both mean unsplit (O-j).
    Not partly: k is g.

    An operator without parameters has nothing to shard, one that cannot be split has DP and ZDP.

    Example:
        >>> [str(mode) for mode in sliced_modes(Operator("", "matmul", 8, 0, 0, 0), (2,))]
        ['DP', 'ZDP 1/2', 'ZDP 2/2']
    """
    if not operator.parameter_bytes:
        return (DP,)
    chosen = sorted({max(1, g) for g in granularities}) if operator.can_split else [1]
    return (
        DP,
        *(
            Mode(g, k, group)
            for g, group in product(chosen, groups)
            for k in range(1 if partly else g, g + 1)
        ),
    )


@dataclass(frozen=True)
class StepCost:
    """The cost model of a step, with what the paper's model leaves out.

    * Gathering. While a ZDP slice is used backwards, it is there whole, and so is its gradient: 2 S
      / g bytes, and another S / g where the next slice may be gathered meanwhile (overlap); less
      where products read it in fewer bits (``gathered_fraction``). With the workspace and the
      gradients of its input and output, these are *transient*: one operator has them at a time
      (O-b, O-c), and memory on the chip holds what it can of them. What was kept of the operations
      after the product has gone by then. Rematerialised activations are transient too.
    * Splitting. Slices in DP mode are reduced together, those in ZDP mode one by one, each with its
      alphas; and partial results are added: read twice and written once per further slice, forwards
      in a buffer of its own (O-h, O-i).
    * Overlap. Of computation and communication of an operator, a fraction of the lesser is hidden:
      0 none, 1 ideal, or as measured (``capture.machine.link_fit.fit_overlap``) (O-m).
    * Groups. Collectives run over links inside and between nodes (``capture.machine.links``);
      slices may be shared by the devices of one node only, which costs memory and saves gathering
      between nodes: then the gradients of a shard are also reduced over the nodes.

    Attributes:
        granularities: Slices per operator to choose from.
        remat: Whether activations are rematerialised: one more gather of what is sharded, and the
            forward pass twice.
        overlap_fraction: In [0, 1].
        node_groups: Whether to choose between sharing by all and by the devices of a node.
        partly: Whether some slices of an operator may be replicated and others sharded.

    Raises:
        WorkloadError: ``osdp-overlap``, ``osdp-granularity``.
    """

    model: OperatorModel
    machine: Machine
    granularities: tuple[int, ...] = (1,)
    remat: bool = False
    overlap_fraction: float = 0.0
    node_groups: bool = True
    partly: bool = True

    def __post_init__(self):
        WorkloadError.check(self._violations())

    def _violations(self) -> Iterator[Violation]:
        if not 0 <= self.overlap_fraction <= 1:
            yield Violation(
                f"overlap_fraction={self.overlap_fraction:g} is no fraction; 0 is none, 1 is "
                "ideal.",
                "osdp-overlap",
            )
        if not self.granularities or min(self.granularities) < 0:
            yield Violation(
                f"granularities={self.granularities} must be numbers of slices; 1 is unsplit.",
                "osdp-granularity",
            )

    def modes(self, operator: Operator) -> tuple[Mode, ...]:
        num_devices, per_node = self.machine.num_devices, self.machine.devices_per_node
        if num_devices == 1:
            return (DP,)
        by_node = self.node_groups and num_devices > per_node > 1
        return sliced_modes(
            operator,
            self.granularities,
            (None, per_node) if by_node else (None,),
            self.partly,
        )

    def cost(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Cost:
        size = operator.parameter_bytes
        group = mode.group_size or self.machine.num_devices
        sharded = mode.num_sharded / mode.num_slices
        states = self.model.state_bytes_per_parameter_byte * (
            operator.replicated_bytes + size * (1 - sharded + sharded / group)
        )
        held = self.held_bytes(operator, mode)
        transient = np.maximum.reduce(
            np.broadcast_arrays(0, *self.transients(operator, mode, batch_size))
        )
        computed, sent = self._computed_and_sent(operator, mode, batch_size)
        hidden = self.overlap_fraction * np.minimum(computed, sent)
        return Cost(states + batch_size * held, transient, computed + sent - hidden)

    def exposed_fraction(self, operator: Operator, mode: Mode, batch_size: int) -> float:
        """Return the part of an operator's communication seconds beside which nothing computes."""
        computed, sent = self._computed_and_sent(operator, mode, batch_size)
        return 1 - self.overlap_fraction * min(computed, sent) / sent if sent else 1.0

    def _computed_and_sent(
        self, operator: Operator, mode: Mode, batch_size: BatchSize
    ) -> tuple[Any, float]:
        """Return the seconds that an operator computes and the seconds that it sends in a step."""
        added = self.added_seconds(operator, mode, batch_size) * (2 if self.remat else 1)
        computed = compute_seconds(operator, self.machine, batch_size, self.remat) + added
        return computed, self._sent_seconds(operator, mode)

    def transients(
        self, operator: Operator, mode: Mode, batch_size: BatchSize
    ) -> tuple[Any, Any, Any]:
        """Return the bytes that come and go beside what is held: the product forwards, what follows
        it backwards, the product backwards.

        The product has its parameters gathered, and nothing is kept of the operations after it.
        Rematerialised, it goes forwards when the gradients of what later operators read are there;
        and as its input is all that is held, the gradient of that takes the place.
        """
        size, read, tail = (
            batch_size * each
            for each in (operator.output_bytes, operator.input_bytes, operator.tail_bytes)
        )
        again = batch_size * operator.again_bytes
        going = batch_size * max(operator.output_bytes, operator.backward_bytes)
        gradient = operator.parameter_bytes / mode.num_slices if mode.num_sharded else 0.0
        gathered = [self.gathered_bytes(operator, mode)] * (2 if self.overlap_fraction else 1)
        forwards = [size] * (2 if self._partial_sums(mode) else 1) + gathered
        operand = batch_size * operator.activation_bytes - tail
        gone = 0 if self.remat else tail
        phases = forwards, [read, going, again], [read, size, gradient, *gathered, again]
        if self.remat:
            crossing = operator.crossing_bytes
            arriving = read if crossing is None else batch_size * crossing
            whole = [going, np.maximum(tail, batch_size * operator.activation_bytes - read)]
            backwards = [np.maximum(size, arriving), gradient, *gathered]
            phases = [*forwards, arriving], [*whole, arriving], backwards
        in_use = (operand,), (operand, tail), (operand,)
        first, second, third = (
            operator.workspace_bytes + sum(arrays) - self._on_chip(*arrays, *held)
            for arrays, held in zip(phases, in_use, strict=True)
        )
        return first - gone, second, third - gone

    def _on_chip(self, *arrays: Any) -> Any:
        """Return the bytes that memory on the chip holds of arrays that are in use at once."""
        capacity = self.machine.target.on_chip_bytes.value
        fitting = (np.where(np.less_equal(nbytes, capacity), nbytes, 0) for nbytes in arrays)
        return np.minimum(capacity, sum(fitting)) if capacity else 0

    @staticmethod
    def _partial_sums(mode: Mode) -> int:
        """Return the number of additions of slices' results: slices in DP mode are one product."""
        return mode.num_sharded - (mode.num_sharded == mode.num_slices)

    def held_bytes(self, operator: Operator, mode: Mode) -> int:
        """Return the bytes per example that an operator keeps for its backward pass."""
        if self.remat:
            return operator.input_bytes
        return operator.activation_bytes - (0 if mode.num_sharded else operator.fused_bytes)

    def gathered_bytes(self, operator: Operator, mode: Mode) -> float:
        """Return the bytes of a slice's parameters, as products read them; 0 if replicated."""
        if not mode.num_sharded:
            return 0.0
        return operator.parameter_bytes / mode.num_slices * operator.gathered_fraction

    def added_seconds(self, operator: Operator, mode: Mode, batch_size: BatchSize) -> Any:
        """Return the seconds of adding up the results of slices, in one forward pass."""
        nbytes = 3 * self._partial_sums(mode) * batch_size * operator.output_bytes
        return nbytes / self.machine.rates.reached_bytes_per_second

    def collectives(self, operator: Operator, mode: Mode) -> Collectives:
        """Return the seconds of each collective of an operator's step, in one slice and pass."""
        n, sent = self.machine.num_devices, self.machine.links.seconds
        group = mode.group_size or n
        slice_bytes = operator.parameter_bytes / mode.num_slices
        replicated = operator.replicated_bytes + slice_bytes * (mode.num_slices - mode.num_sharded)
        all_reduce = sent("all-reduce", replicated, n) if replicated else 0.0
        if not mode.num_sharded:
            return Collectives(all_reduce)
        gathered = slice_bytes * operator.gathered_fraction
        return Collectives(
            all_reduce,
            sent("all-gather", gathered, group),
            sent("reduce-scatter", slice_bytes, group),
            sent("all-reduce", slice_bytes / group, n // group, stride=group) if group < n else 0.0,
        )

    def _sent_seconds(self, operator: Operator, mode: Mode) -> float:
        one = self.collectives(operator, mode)
        gathers = 3 if self.remat else 2  # forwards, again, backwards
        each = gathers * one.all_gather + one.reduce_scatter + one.between_groups
        return one.replicated + mode.num_sharded * each


def compute_seconds(
    operator: Operator, machine: Machine, batch_size: BatchSize, remat: bool
) -> Any:
    """Return the seconds b gamma that an operator computes in a step: forward, and backward twice
    as long; rematerialised, forward once more (a third: the paper's "roughly 30%", 2.3)."""
    gamma = operator.gamma_seconds
    if gamma is None:
        gamma = 3 * operator.flops / machine.flops_per_second
    return batch_size * gamma * (4 / 3 if remat else 1)
