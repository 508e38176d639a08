"""The step of a sharding plan: one program on all devices, operator by operator; and its peak in
closed form, for searches that ask for it thousands of times.

All devices are one place, and hold alike. A sharded operator gathers its parameters for each pass
and forgets them after it; its activations stay from its forward to its backward pass, where its
gradients take their place:

    for i = 1 .. n     all-gather i, forward i
    for i = n .. 1     [all-gather i, forward i again,]  tail i backwards, all-gather i, backward i,
                       reduce-scatter or all-reduce i
    update

What an operator has after its product, its tail, goes backwards first and is gone when the product
does. An operator that is worked through in slices has one slice gathered at a time. A prefetch is
as large as the operator's own gather: **assumes** neighbours of like size. The batch is not
counted.

The peak of the replay is

    sum of (parameters, optimizer state)
    + max over i of  (activations of operators <= i) + (gradients of operators > i)
                     + the larger of  what the tail needs,  what the product needs + gradient of i

(forwards without gradients, unless the operator is rematerialised; and at the end all gradients are
there): ``peak_bytes``, equal to the byte (``tests/property/test_osdp_step.py``). With memory on the
chip it is a lower bound: that holds arrays while operators run, and between them the replay counts
all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from capture.model.operators import Operator
from capture.plan.sharding import Mode
from capture.step.operator_cost import StepCost, compute_seconds
from capture.step.passes.frees import free
from capture.step.program import Instruction, Place, Program, Run, Step

#: Of a byte: what is less above a whole number is an error of rounding.
_ROUNDING = 2**-10


@dataclass(frozen=True)
class OperatorBytes:
    """What one operator in its mode takes of a device, in whole bytes.

    Attributes:
        parameters: Its part of them; its part of the gradients is as large.
        held: For the backward pass.
        tail: The part of ``held`` that is gone when the product goes backwards.
        gathered: Parameters of a slice; 0 if it is replicated.
        forwards, before, product: Beside what is held: of the product forwards, of the tail
            backwards, of the product backwards (``StepCost.transients``).
    """

    parameters: int
    held: int
    tail: int
    gathered: int
    forwards: int
    before: int
    product: int

    @classmethod
    def of(cls, cost: StepCost, operator: Operator, mode: Mode, batch_size: int) -> OperatorBytes:
        held = int(batch_size * cost.held_bytes(operator, mode))
        ways = mode.num_slices * (mode.group_size or cost.machine.num_devices)
        whole = ways - mode.num_sharded * (ways // mode.num_slices - 1)
        return cls(
            operator.replicated_bytes + -(-operator.parameter_bytes * whole // ways),
            held,
            0 if cost.remat else min(held, int(batch_size * operator.tail_bytes)),
            _whole(cost.gathered_bytes(operator, mode)),
            *map(_whole, cost.transients(operator, mode, batch_size)),
        )


def peak_bytes(cost: StepCost, modes: Sequence[Mode], batch_size: int) -> int:
    """Peak of one device over a step.

    Args:
        cost: What a model's operators cost on the devices.
        modes: The mode of each operator.
        batch_size: Examples per device.
    """
    pairs = list(zip(cost.model.operators, modes, strict=True))
    known = {pair: OperatorBytes.of(cost, *pair, batch_size) for pair in set(pairs)}
    taken = [known[pair] for pair in pairs]
    rows = [(o.held, o.parameters, o.forwards, o.before, o.product) for o in taken]
    held, gradients, forwards, before, product = np.array(rows, np.int64).T
    activations, later = np.cumsum(held), gradients.sum() - np.cumsum(gradients)
    peaks = activations + np.array(
        [forwards + (later if cost.remat else 0), before + later, product + later + gradients]
    )
    total = int(gradients.sum())
    return _persistent_bytes(cost, total) + max(int(peaks.max()), total)


def _persistent_bytes(cost: StepCost, parameters: int) -> int:
    """Bytes of parameters of so many bytes, and of their optimizer state."""
    return _whole((cost.model.state_bytes_per_parameter_byte - 1) * parameters)


def _whole(nbytes: float) -> int:
    return math.ceil(nbytes - _ROUNDING)


def build_step(
    cost: StepCost, modes: Sequence[Mode], batch_size: int, names: Sequence[str] = ()
) -> Step:
    """The instructions of one step.

    Args:
        cost: What a model's operators cost on the devices.
        modes: The mode of each operator.
        batch_size: Examples per device.
        names: Names of the operators; those of the model unless given.
    """
    builder = _Builder(cost, modes, batch_size, names)
    builder.step.instructions += builder.passes()
    builder.step.num_passes = len(builder.step.instructions)
    builder.step.instructions.append(builder.update())
    free(builder.step)
    return builder.step


def step_seconds(cost: StepCost, modes: Sequence[Mode], batch_size: int) -> dict[str, float]:
    """Seconds of every program of the step; they add up to those of the cost. The update is not
    counted, as there.

    Of a collective it is the part beside which nothing runs. What is hidden is a fraction of a
    whole operator's seconds, as it was measured (O-m), and may be more than any one of its passes
    computes; so it cannot be laid out pass by pass, and all collectives of an operator are
    shortened alike.
    """
    seconds = {"update": 0.0}
    for i, (operator, mode) in enumerate(zip(cost.model.operators, modes, strict=True)):
        sent = cost.collectives(operator, mode)
        exposed = cost.exposed_fraction(operator, mode, batch_size)
        forward = compute_seconds(operator, cost.machine, batch_size, remat=False) / 3
        added = cost.added_seconds(operator, mode, batch_size)
        seconds |= {
            f"all-gather@{i}": exposed * mode.num_sharded * sent.all_gather,
            f"forward@{i}": forward + added,
            f"forward again@{i}": forward + added,
            f"tail backward@{i}": 0.0,
            f"backward@{i}": 2 * forward,
            f"reduce@{i}": exposed
            * (sent.replicated + mode.num_sharded * (sent.reduce_scatter + sent.between_groups)),
        }
    return seconds


class _Builder:
    """Emits the instructions. Slots are called ``parameters``, ``optimizer``, ``activations``,
    ``tail``, ``gathered``, ``prefetched`` and ``gradients``; they hold what an operator's number
    names."""

    def __init__(
        self, cost: StepCost, modes: Sequence[Mode], batch_size: int, names: Sequence[str]
    ):
        self.remat, self.prefetch = cost.remat, cost.overlap_fraction > 0
        self.names = names or [operator.name for operator in cost.model.operators]
        self.operators = [
            OperatorBytes.of(cost, operator, mode, batch_size)
            for operator, mode in zip(cost.model.operators, modes, strict=True)
        ]
        self.place = Place("devices", tuple(range(cost.machine.num_devices)))
        self.step = Step((self.place,))
        self.parameters: list[int] = []
        self.optimizer: list[int] = []
        self.activations: dict[int, list[int]] = {}
        self.gradients: list[int] = []
        # Rounded up where all are added, so that what all hold is in whole bytes.
        sums = np.cumsum([0, *(operator.parameters for operator in self.operators)]).tolist()
        kept = [b - a for a, b in pairwise(_persistent_bytes(cost, total) for total in sums)]
        for i, (operator, nbytes) in enumerate(zip(self.operators, kept, strict=True)):
            parameters = min(operator.parameters, nbytes)
            self.parameters.append(self._keep("parameters", i, parameters))
            self.optimizer.append(self._keep("optimizer", i, nbytes - parameters))

    def passes(self) -> Iterator[Instruction]:
        for i, operator in enumerate(self.operators):
            made = [self._slot("activations", "activations", i, operator.held - operator.tail)]
            if operator.tail:
                made.append(self._slot("tail", "activations", i, operator.tail))
            self.activations[i] = made
            yield from self._gathering(
                i, "forward", "forward", operator.held + operator.forwards, made
            )
        for i in reversed(range(len(self.operators))):
            operator, own = self.operators[i], self.activations.pop(i)
            if self.remat:
                yield from self._gathering(i, "forward again", "forward", operator.forwards, [])
            yield self._run("tail backward", i, operator.before, own, [])
            gradients = self._slot("gradients", "gradients", i, operator.parameters)
            transient = operator.product + operator.tail + operator.parameters
            self.gradients.append(gradients)
            yield from self._gathering(i, "backward", "backward", transient, [gradients], own[:1])
            yield self._run("reduce", i, 0, [gradients], [gradients], [gradients])

    def update(self) -> Run:
        self.step.programs["update"] = Program("update", self.place, 0)
        state = (*self.parameters, *self.optimizer)
        inputs = (tuple(self.parameters), tuple(self.optimizer), tuple(self.gradients))
        return Run("update", inputs, state, state, "update")

    def _gathering(
        self,
        i: int,
        what: str,
        program: str,
        transient_bytes: int,
        made: Sequence[int],
        donated: Sequence[int] = (),
    ) -> Iterator[Instruction]:
        """A pass with the operator's parameters gathered, and as much for the next one's."""
        operator, gathered = self.operators[i], []
        if operator.gathered:
            category = "gathered parameters"
            gathered = [self._slot("gathered", category, i, operator.gathered)]
            if self.prefetch:
                gathered.append(self._slot("prefetched", category, i, operator.gathered))
            yield self._run("all-gather", i, sum(map(self._bytes, gathered)), [], gathered)
        transient_bytes -= sum(map(self._bytes, gathered))
        yield self._run(what, i, transient_bytes, [*gathered, *donated], made, donated, program)

    def _run(
        self,
        what: str,
        i: int,
        transient_bytes: int,
        read: Sequence[int],
        made: Sequence[int],
        donated: Sequence[int] = (),
        program: str | None = None,
    ) -> Run:
        name = f"{what}@{i}"
        self.step.programs[name] = Program(program or what, self.place, transient_bytes)
        inputs = ((self.parameters[i],), tuple(read))
        return Run(name, inputs, tuple(made), tuple(donated), f"{what} of {i} {self.names[i]}")

    def _keep(self, what: str, i: int, nbytes: int) -> int:
        return self.step.keep(f"{what} {i}", self.place, what, nbytes, what, i)

    def _slot(self, what: str, category: str, i: int, nbytes: int) -> int:
        number = len(self.step.slots)
        return self.step.slot(f"{what} {i} #{number}", self.place, category, nbytes, what, i)

    def _bytes(self, slot: int) -> int:
        return self.step.slots[slot].nbytes
