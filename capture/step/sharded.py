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
from capture.step.holds import Leaves, Loss, Params, State
from capture.step.operator_cost import StepCost, compute_seconds
from capture.step.passes.frees import free
from capture.step.passes.transfers import transfer
from capture.step.program import Place, Program, Step
from capture.step.tasks import Round, Task, Value

#: Of a byte: what is less above a whole number is an error of rounding.
_ROUNDING = 2**-10


@dataclass(frozen=True)
class OperatorBytes:
    """The memory that one operator in its mode takes of a device, in whole bytes.

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
    """Return the peak memory of one device over a step.

    Args:
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
    """Return the bytes of so many bytes of parameters and their optimizer state."""
    return _whole((cost.model.state_bytes_per_parameter_byte - 1) * parameters)


def _whole(nbytes: float) -> int:
    return math.ceil(nbytes - _ROUNDING)


def build_step(
    cost: StepCost, modes: Sequence[Mode], batch_size: int, names: Sequence[str] = ()
) -> Step:
    """Return the step as the search counts it, operator by operator.

    Args:
        batch_size: Examples per device.
        names: Names of the operators; those of the model unless given.
    """
    operators = _Operators(cost, modes, batch_size, names)
    return _built(operators.place, [*operators.tasks()], operators.state)


def build_training(
    num_devices: int,
    num_params: int,
    num_leaves: int,
    nbytes: Sequence[int],
    transient_bytes: int,
) -> Step:
    """Return the step as it is executed: one program on all devices.

    Args:
        num_leaves: Leaves of the batch, with a random key if the loss takes one.
        nbytes: What a device has of the parameters, the optimizer state, the batch and the loss.
    """
    place, params = Place("devices", tuple(range(num_devices))), tuple(range(num_params))
    leaves, (of_params, of_state, of_batch, of_loss) = tuple(range(num_leaves)), nbytes
    state = (
        Value("parameters", "parameters", of_params, Params(params), place, "parameters"),
        Value("optimizer", "optimizer", of_state, State(params), place, "optimizer"),
    )
    batch = Value("batch", "batch", of_batch, Leaves(leaves), fed=(0, leaves))
    loss = Value("loss", "loss", of_loss, Loss(), reported=True)
    program, reads = Program("step", place, transient_bytes), tuple((v,) for v in (*state, batch))
    step = Task("train step", program, reads, (*state, loss), state, label="train step")
    return _built(place, [step], state)


def _built(place: Place, tasks: Sequence[Task], state: Sequence[Value]) -> Step:
    """Return the step of tasks on one place; the last task is, or has, the update."""
    step = Step((place,))
    (turn,) = transfer(step, [Round(tasks)], state)
    step.instructions += [each for block in turn.body for each in block]
    step.num_passes = len(step.instructions) - 1
    free(step)
    return step


def step_seconds(cost: StepCost, modes: Sequence[Mode], batch_size: int) -> dict[str, float]:
    """Return the seconds of every program of the step; they add up to those of the cost. The update
    is not counted, as there.

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


class _Operators:
    """Lists the tasks. Values are called ``parameters``, ``optimizer``, ``activations``, ``tail``,
    ``gathered``, ``prefetched`` and ``gradients``; they hold what an operator's number names.

    Attributes:
        state: Parameters and optimizer state, by operator.
    """

    def __init__(
        self, cost: StepCost, modes: Sequence[Mode], batch_size: int, names: Sequence[str]
    ):
        self._remat, self._prefetch = cost.remat, cost.overlap_fraction > 0
        self._names = names or [operator.name for operator in cost.model.operators]
        self._operators = [
            OperatorBytes.of(cost, operator, mode, batch_size)
            for operator, mode in zip(cost.model.operators, modes, strict=True)
        ]
        self.place = Place("devices", tuple(range(cost.machine.num_devices)))
        # Rounded up where all are added, so that what all hold is in whole bytes.
        sums = np.cumsum([0, *(operator.parameters for operator in self._operators)]).tolist()
        kept = [b - a for a, b in pairwise(_persistent_bytes(cost, total) for total in sums)]
        held = [min(of.parameters, n) for of, n in zip(self._operators, kept, strict=True)]
        self._parameters = [self._keep("parameters", i, n) for i, n in enumerate(held)]
        rest = enumerate(a - b for a, b in zip(kept, held, strict=True))
        self.state = (*self._parameters, *(self._keep("optimizer", i, n) for i, n in rest))

    def tasks(self) -> Iterator[Task]:
        """Yield the passes, and then the update."""
        activations, gradients = list[list[Value]](), list[Value]()
        for i, operator in enumerate(self._operators):
            made = [Value("activations", "activations", operator.held - operator.tail, i)]
            if operator.tail:
                made.append(Value("tail", "activations", operator.tail, i))
            activations.append(made)
            needs = operator.held + operator.forwards
            yield from self._gathering(i, "forward", "forward", needs, made)
        for i, operator in reversed([*enumerate(self._operators)]):
            own = activations.pop()
            if self._remat:
                yield from self._gathering(i, "forward again", "forward", operator.forwards, [])
            yield self._task("tail backward", i, operator.before, own, [])
            made = [Value("gradients", "gradients", operator.parameters, i)]
            gradients += made
            needs = operator.product + operator.tail + operator.parameters
            yield from self._gathering(i, "backward", "backward", needs, made, own[:1])
            yield self._task("reduce", i, 0, made, made, made)
        count, update = len(self._parameters), Program("update", self.place, 0)
        reads = (self.state[:count], self.state[count:], tuple(gradients))
        yield Task("update", update, reads, self.state, self.state, label="update")

    def _gathering(
        self,
        i: int,
        what: str,
        program: str,
        transient_bytes: int,
        made: Sequence[Value],
        taken: Sequence[Value] = (),
    ) -> Iterator[Task]:
        """Yield a pass with the operator's parameters gathered, and as much for the next one's."""
        nbytes, category = self._operators[i].gathered, "gathered parameters"
        names = ("gathered", "prefetched")[: 1 + self._prefetch] if nbytes else ()
        gathered = [Value(name, category, nbytes, i) for name in names]
        beside = nbytes * len(gathered)
        if gathered:
            yield self._task("all-gather", i, beside, [], gathered)
        yield self._task(
            what, i, transient_bytes - beside, [*gathered, *taken], made, taken, program
        )

    def _task(
        self,
        what: str,
        i: int,
        transient_bytes: int,
        read: Sequence[Value],
        made: Sequence[Value],
        taken: Sequence[Value] = (),
        program: str | None = None,
    ) -> Task:
        return Task(
            f"{what}@{i}",
            Program(program or what, self.place, transient_bytes),
            ((self._parameters[i],), tuple(read)),
            tuple(made),
            tuple(taken),
            label=f"{what} of {i} {self._names[i]}",
        )

    def _keep(self, what: str, i: int, nbytes: int) -> Value:
        return Value(what, what, nbytes, i, self.place, f"{what} {i}")
