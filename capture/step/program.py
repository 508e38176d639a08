"""One training step as a list of instructions over named slots, made once and interpreted twice.

The replay books the instructions in a ledger without allocating anything; the runtime executes the
same list on arrays and books the same ledger. Slots are groups of arrays that live and die
together, so the list stays short.

    Feed   a micro-batch's leaves from the host to the devices of a stage
    Run    a compiled program of a stage on slots; donated slots die, output slots come to life
    Move   a slot, or one array of it, to the devices of another stage
    Free   slots that nothing reads any more
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from capture.plan.schedule import Schedule, Task
from capture.step.ledger import Ledger


@dataclass(frozen=True)
class Slot:
    """A group of arrays of one stage: per-device bytes, and what they are for.

    Attributes:
        name: Unique in a step.
        what: ``params``, ``optimizer``, ``gradients`` (all owned parameters), ``param``,
            ``gradient`` (one borrowed), ``residuals``, ``batch``, ``input``, ``output``, ``input
            gradient``, ``cotangent`` or ``summary``.
        key: Of the parameter, batch leaf or value, where it is one.
    """

    name: str
    stage_id: int
    category: str
    nbytes: int
    what: str
    key: int | None = None


@dataclass(frozen=True)
class Feed:
    slot: int
    microbatch: int
    batch: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class Run:
    """``inputs`` are the argument groups of the program, each a tuple of slots; ``outputs`` the
    slots of its results."""

    stage_id: int
    program: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class Move:
    """Copy the arrays of a slot; ``index`` selects one of them. ``kind`` and ``key`` say what they
    are: value, param or summary."""

    source: int
    target: int
    kind: Literal["value", "param", "summary"]
    key: int
    label: str
    index: int | None = None


@dataclass(frozen=True)
class Free:
    slots: tuple[int, ...]


Instruction = Feed | Run | Move | Free


@dataclass(frozen=True)
class StageInterface:
    """What a stage reads and writes, in ids of the layer graph, and how many bytes per device each
    group takes.

    Attributes:
        devices: Device ids of the stage.
        received: Values that cross the cut before the stage; those it does not use pass through.
        used: Those of ``received`` that the stage's program reads.
        outputs: Values that the program makes and later stages read, or the loss.
        sent: Values that cross the cut after the stage; empty for the last.
        kept_inputs, kept_outputs, kept_batch: What the backward pass reads besides residuals.
        batch: All batch leaves that the forward pass reads.
        owned: Parameters that this stage updates: those that no earlier stage reads.
        borrowed: Parameters that an earlier stage owns and updates.
        differentiable: Values among received, outputs and sent that carry a gradient back.
        value_bytes: Per value, its bytes per device on this stage.
        batch_bytes: Per batch leaf.
        param_bytes: Per parameter, owned or borrowed; its accumulated gradient takes as much.
        optimizer_bytes: State of the optimizer for the owned parameters.
        residual_bytes: Activations that one micro-batch keeps for its backward pass, kept inputs,
            outputs and batch leaves not included.
        transient_bytes: Per program (``forward``, ``backward``, ``update``, ``summarize``):
            temporaries + outputs - aliased inputs.
        summary_bytes: Small values that the update of other stages needs (a global norm); 0 if
            updates are independent.
    """

    devices: tuple[int, ...]
    received: tuple[int, ...]
    used: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: tuple[int, ...]
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    kept_batch: tuple[int, ...]
    batch: tuple[int, ...]
    owned: tuple[int, ...]
    borrowed: tuple[int, ...]
    differentiable: frozenset[int]
    value_bytes: Mapping[int, int]
    batch_bytes: Mapping[int, int]
    param_bytes: Mapping[int, int]
    optimizer_bytes: int
    residual_bytes: int
    transient_bytes: Mapping[str, int]
    summary_bytes: int = 0

    @property
    def params_bytes(self) -> int:
        """Of the owned parameters."""
        return sum(self.param_bytes[p] for p in self.owned)

    @property
    def cotangents(self) -> tuple[int, ...]:
        """Values whose gradient the backward program takes: its outputs', and those of inputs that
        also pass through."""
        return tuple(
            v
            for v in self.sent
            if v in self.differentiable and (v in self.outputs or v in self.used)
        )

    @property
    def input_gradients(self) -> tuple[int, ...]:
        """Received values whose gradient the backward program makes."""
        return tuple(v for v in self.used if v in self.differentiable)


@dataclass
class StepProgram:
    """The instructions of a step, its slots, and the slots that outlive it.

    Attributes:
        stages: In pipeline order.
        slots: Indexed by the instructions.
        instructions: Forward and backward passes, then the updates.
        persistent: Slots that live from before the step to after it, by name and stage.
        num_passes: Instructions before the updates.
    """

    stages: Sequence[StageInterface]
    slots: list[Slot] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    persistent: dict[tuple[str, int], int] = field(default_factory=dict)
    num_passes: int = 0

    def slot(
        self,
        name: str,
        stage_id: int,
        category: str,
        nbytes: int,
        what: str,
        key: int | None = None,
    ) -> int:
        self.slots.append(Slot(name, stage_id, category, nbytes, what, key))
        return len(self.slots) - 1

    def keep(
        self, what: str, stage_id: int, category: str, nbytes: int, key: int | None = None
    ) -> int:
        """A slot that lives from before the step to after it."""
        name = what if key is None else f"{what}{key}"
        self.persistent[name, stage_id] = self.slot(
            f"{name}@{stage_id}", stage_id, category, nbytes, what, key
        )
        return self.persistent[name, stage_id]


def replay(
    program: StepProgram, num_devices: int, *, record_timeline: bool = False, by_slot: bool = False
) -> Ledger:
    """Book a step without allocating anything.

    Args:
        program: The step.
        num_devices: Of the cluster.
        record_timeline: As for ``Ledger``.
        by_slot: Name the parts of a peak by slots instead of their categories.

    Returns:
        The ledger after the step: peaks per device with their parts.
    """
    if by_slot:
        slots = [replace(slot, category=slot.name) for slot in program.slots]
        program = replace(program, slots=slots)
    ledger = Ledger(num_devices, record_timeline)
    for slot in program.persistent.values():
        hold(ledger, program, slot, "before the step")
    for instruction in program.instructions:
        book(ledger, program, instruction)
    return ledger


def hold(ledger: Ledger, program: StepProgram, slot_id: int, label: str) -> None:
    slot = program.slots[slot_id]
    ledger.hold(program.stages[slot.stage_id].devices, slot.nbytes, slot.category, label)


def book(ledger: Ledger, program: StepProgram, instruction: Instruction) -> None:
    """Enter one instruction into the ledger."""
    match instruction:
        case Feed(slot=slot, label=label) | Move(target=slot, label=label):
            hold(ledger, program, slot, label)
        case Run():
            stage = program.stages[instruction.stage_id]
            ledger.execute(
                stage.devices, stage.transient_bytes[instruction.program], instruction.label
            )
            _drop(ledger, program, instruction.donated)
            for slot in instruction.outputs:
                hold(ledger, program, slot, instruction.label)
        case Free():
            _drop(ledger, program, instruction.slots)


def _drop(ledger: Ledger, program: StepProgram, slot_ids: Sequence[int]) -> None:
    for slot_id in slot_ids:
        slot = program.slots[slot_id]
        ledger.drop(program.stages[slot.stage_id].devices, slot.nbytes, slot.category)


def build_step(
    stages: Sequence[StageInterface], schedule: Schedule, *, as_alpa: bool = False
) -> StepProgram:
    """The instructions of one step: every clock's programs, then its transfers, then the updates.

    Args:
        stages: In pipeline order.
        schedule: As many stages.
        as_alpa: As Alpa's runtime does: every micro-batch is fed at the start of the step, tensors
            stay with the stage that made them until the one that reads them is about to, and go
            there past the stages between.
    """
    program = StepProgram(stages)
    for s, stage in enumerate(stages):
        program.keep("params", s, "parameters", stage.params_bytes)
        program.keep("optimizer", s, "optimizer", stage.optimizer_bytes)
        program.keep("gradients", s, "gradients", stage.params_bytes)
        for p in stage.borrowed:
            program.keep("param", s, "parameters", stage.param_bytes[p], p)
            program.keep("gradient", s, "gradients", stage.param_bytes[p], p)
    passes = _Passes(program, direct=as_alpa)
    program.instructions += _pulled(passes, schedule) if as_alpa else _pushed(passes, schedule)
    program.num_passes = len(program.instructions)
    program.instructions += [*_updates(program), Free(tuple(passes.losses))]
    return program


def _pushed(passes: _Passes, schedule: Schedule) -> Iterator[Instruction]:
    """What a program makes is sent at the end of its clock."""
    for clock in schedule.clocks:
        transfers: dict[Task, list[Instruction]] = {task: [] for task in clock}
        for task in clock:
            yield from passes.run(task, transfers[task])
        for task in sorted(clock, key=_order_of_transfers):
            yield from transfers[task]


def _pulled(passes: _Passes, schedule: Schedule) -> Iterator[Instruction]:
    """What a program makes is sent in the clock of the program that reads it, to the first stage
    first, and freed once all have it."""
    for s in range(len(passes.stages)):
        for m in range(schedule.num_microbatches):
            yield from passes.feed(s, m, "start of the step")
    waiting: defaultdict[Task, list[Instruction]] = defaultdict(list)
    for clock in schedule.clocks:
        for task in sorted(clock, key=lambda task: task.stage_id):
            yield from waiting.pop(task, ())
        for task in clock:
            transfers: list[Instruction] = []
            yield from passes.run(task, transfers)
            last_reader: dict[int, Task] = {}
            for move in transfers:
                if isinstance(move, Move):  # of one source: in the order of the readers' clocks
                    last_reader[move.source] = Task(
                        passes.program.slots[move.target].stage_id, task.kind, task.microbatch
                    )
                    waiting[last_reader[move.source]].append(move)
            freed = [
                slot
                for instruction in transfers
                if isinstance(instruction, Free)
                for slot in instruction.slots
            ]
            for slot in freed:
                if slot in last_reader:
                    waiting[last_reader[slot]].append(Free((slot,)))
            yield Free(tuple(slot for slot in freed if slot not in last_reader))


def _order_of_transfers(task: Task) -> tuple[bool, int]:
    """Activations from the last stage to the first, then gradients from the first to the last: a
    stage hands on and frees what it made before it receives, except where two neighbours exchange
    both in one clock."""
    forward = task.kind == "forward"
    return not forward, -task.stage_id if forward else task.stage_id


class _Passes:
    """Emits the forward and backward passes; remembers which slot holds which value of which
    micro-batch.

    A value travels from stage to stage until its last reader; if ``direct``, from its maker to each
    reader. Its gradient goes back from reader to reader, each adding its own, in both cases.
    """

    def __init__(self, program: StepProgram, direct: bool):
        self.program, self.stages, self.direct = program, program.stages, direct
        self.values: dict[
            tuple[str, int, int, int], int
        ] = {}  # (what, stage, micro-batch, id) -> slot
        self.losses: list[int] = []

    def run(self, task: Task, transfers: list[Instruction]) -> Iterator[Instruction]:
        return (self._forward if task.kind == "forward" else self._backward)(
            task.stage_id, task.microbatch, transfers
        )

    def _new(self, what: str, category: str, s: int, m: int, key: int, nbytes: int) -> int:
        slot = self.program.slot(f"{what}{key}.{m}@{s}", s, category, nbytes, what, key)
        self.values[what, s, m, key] = slot
        return slot

    def _take(self, what: str, s: int, m: int, keys: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values.pop((what, s, m, key)) for key in keys)

    def _see(self, what: str, s: int, m: int, keys: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values[what, s, m, key] for key in keys)

    def _received(self, s: int) -> tuple[int, ...]:
        return self.stages[s].used if self.direct else self.stages[s].received

    def _receivers(self, s: int, v: int) -> Iterable[int]:
        """Stages that get a value from stage s."""
        if not self.direct:
            return (s + 1,)
        return (
            (t for t in range(s + 1, len(self.stages)) if v in self.stages[t].used)
            if v in self.stages[s].outputs
            else ()
        )

    def _sender(self, s: int, v: int) -> int:
        """The stage that gets the gradient of a value from stage s."""
        if not self.direct:
            return s - 1
        return next(
            t for t in reversed(range(s)) if v in (*self.stages[t].used, *self.stages[t].outputs)
        )

    def _params(self, s: int) -> tuple[int, ...]:
        state = self.program.persistent
        return (state["params", s], *(state[f"param{p}", s] for p in self.stages[s].borrowed))

    def _gradients(self, s: int) -> tuple[int, ...]:
        state = self.program.persistent
        return (state["gradients", s], *(state[f"gradient{p}", s] for p in self.stages[s].borrowed))

    def feed(self, s: int, m: int, label: str) -> Iterator[Instruction]:
        """The leaves of a micro-batch that the stage reads, unless they are there already."""
        for b in self.stages[s].batch:
            if ("batch", s, m, b) not in self.values:
                yield Feed(
                    self._new("batch", "batch", s, m, b, self.stages[s].batch_bytes[b]),
                    m,
                    (b,),
                    label,
                )

    def _forward(self, s: int, m: int, transfers: list[Instruction]) -> Iterator[Instruction]:
        stage, label, last = self.stages[s], f"forward {m} on stage {s}", s == len(self.stages) - 1
        yield from self.feed(s, m, label)
        category = "loss" if last else "sent activations"
        outputs = tuple(
            self._new(
                "output",
                "activations" if v in stage.kept_outputs else category,
                s,
                m,
                v,
                stage.value_bytes[v],
            )
            for v in stage.outputs
        )
        residuals = self._new("residuals", "activations", s, m, 0, stage.residual_bytes)
        yield Run(
            s,
            "forward",
            (
                self._params(s),
                self._see("input", s, m, stage.used),
                self._see("batch", s, m, stage.batch),
            ),
            (*outputs, residuals),
            (),
            label,
        )
        if last:
            assert not stage.kept_outputs, (
                "the loss outlives the backward pass, which would free it"
            )
            self.losses += outputs
        for v in stage.sent:
            for t in self._receivers(s, v):
                source = self.values["output" if v in stage.outputs else "input", s, m, v]
                target = self._new(
                    "input", "received activations", t, m, v, self.stages[t].value_bytes[v]
                )
                transfers.append(
                    Move(source, target, "value", v, f"send {v}.{m} from stage {s} to {t}")
                )
        dead = [v for v in self._received(s) if v not in stage.kept_inputs]
        sent = [v for v in stage.outputs if v not in stage.kept_outputs and not last]
        batch = [b for b in stage.batch if b not in stage.kept_batch]
        transfers.append(
            Free(
                self._take("input", s, m, dead)
                + self._take("output", s, m, sent)
                + self._take("batch", s, m, batch)
            )
        )

    def _backward(self, s: int, m: int, transfers: list[Instruction]) -> Iterator[Instruction]:
        stage, label, program = self.stages[s], f"backward {m} on stage {s}", self.program
        kept = (
            self._take("input", s, m, stage.kept_inputs),
            self._take("batch", s, m, stage.kept_batch),
            self._take("output", s, m, stage.kept_outputs),
            self._take("residuals", s, m, [0]),
        )
        cotangents = self._take("cotangent", s, m, stage.cotangents)
        gradients = tuple(
            self._new("input gradient", "sent gradients", s, m, v, stage.value_bytes[v])
            for v in stage.input_gradients
        )
        accumulated = self._gradients(s)
        donated = (*kept[0], *kept[2], *kept[3], *cotangents, *accumulated)
        yield Run(
            s,
            "backward",
            (self._params(s), *kept, cotangents, accumulated),
            (*gradients, *accumulated),
            donated,
            label,
        )
        yield Free(kept[1])
        for v in self._received(s):
            if v in stage.differentiable:
                made, t = v in stage.input_gradients, self._sender(s, v)
                source = self.values.pop(("input gradient" if made else "cotangent", s, m, v))
                target = self._new(
                    "cotangent", "received gradients", t, m, v, self.stages[t].value_bytes[v]
                )
                transfers += [
                    Move(
                        source, target, "value", v, f"send gradient {v}.{m} from stage {s} to {t}"
                    ),
                    Free((source,)),
                ]
        assert not any(key[:3] == ("cotangent", s, m) for key in self.values), (
            f"{program.stages[s]} left a gradient behind"
        )


def _updates(program: StepProgram) -> Iterator[Instruction]:
    """Sum the gradients of shared parameters at their owner, update there, and send the new values
    back."""
    stages, state = program.stages, program.persistent
    owner_of = {p: s for s, stage in enumerate(stages) for p in stage.owned}
    arrived: dict[int, list[int]] = {s: [] for s in range(len(stages))}
    for p, owner in sorted(
        owner_of.items()
    ):  # by parameter: the order in which the owner's programs take them
        for s, stage in enumerate(stages):
            if p in stage.borrowed:
                slot = program.slot(
                    f"gradient{p} of {s}@{owner}",
                    owner,
                    "received gradients",
                    stages[owner].param_bytes[p],
                    "gradient",
                    p,
                )
                arrived[owner].append(slot)
                yield Move(
                    state[f"gradient{p}", s],
                    slot,
                    "param",
                    p,
                    f"send gradient of parameter {p} from stage {s} to {owner}",
                )
    summaries = {}
    if any(stage.summary_bytes for stage in stages):
        for s, stage in enumerate(stages):
            summaries[s, s] = program.slot(
                f"summary@{s}", s, "optimizer", stage.summary_bytes, "summary"
            )
            read = (
                (state["params", s],),
                (state["optimizer", s],),
                (state["gradients", s],),
                tuple(arrived[s]),
            )
            yield Run(
                s, "summarize", read, (summaries[s, s],), (), f"summarize gradients on stage {s}"
            )
        for s in range(len(stages)):
            for t in range(len(stages)):
                if s != t:
                    summaries[s, t] = program.slot(
                        f"summary of {s}@{t}", t, "optimizer", stages[s].summary_bytes, "summary"
                    )
                    yield Move(
                        summaries[s, s],
                        summaries[s, t],
                        "summary",
                        s,
                        f"send summary from stage {s} to {t}",
                    )
    for s, stage in enumerate(stages):
        borrowed = tuple(state[f"gradient{p}", s] for p in stage.borrowed)
        seen = {t: summaries[t, s] for t in range(len(stages)) if (t, s) in summaries}
        others = tuple(slot for t, slot in seen.items() if t != s)
        own = (state["params", s], state["optimizer", s], state["gradients", s])
        inputs = (*((slot,) for slot in own), borrowed, tuple(arrived[s]), others)
        yield Run(s, "update", inputs, (*own, *borrowed), (*own, *borrowed), f"update on stage {s}")
        yield Free((*arrived[s], *seen.values()))
    for s, stage in enumerate(stages):
        for p in stage.borrowed:
            owner = owner_of[p]
            yield Free((state[f"param{p}", s],))
            index = stages[owner].owned.index(p)
            label = f"send parameter {p} from stage {owner} to {s}"
            yield Move(state["params", owner], state[f"param{p}", s], "param", p, label, index)
