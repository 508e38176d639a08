"""The step of a pipeline: stages and a schedule table as instructions. What a program makes is sent
at the end of its round, and what nothing reads any more a pass ends
(``capture.step.passes.frees``).

Every stage is a place; stages that share devices are several places on them, and hand over what
they make without a copy, unless the one that made it keeps it, too. The slots of a stage are called
``params``, ``optimizer``, ``gradient``, ``param`` (one borrowed), ``residuals``, ``batch``,
``input``, ``output``, ``input gradient``, ``cotangent`` or ``summary``; its programs ``forward``,
``zero_gradients``, ``backward``, ``summarize`` and ``update``. A split backward pass is
``backward_inputs`` and ``backward_weights``: what only the first reads dies with it, the rest
(``held residuals`` among it) and what it makes for the second (``deferred``) with the second.

Parameters and optimizer state outlive the step. Gradients are accumulated from zeros, which are
made just before a stage's first pass that adds to them, until its update, which takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.machine.target import Rates
from capture.plan.schedule import Schedule, Task
from capture.step.holds import KeptPart, Leaves, Params, State, Summary, Values
from capture.step.interface import SplitBackward, StageInterface
from capture.step.passes.frees import free
from capture.step.program import Copy, Feed, Free, Instruction, Place, Program, Run, Step
from capture.step.timeline import LinkTimes, Seconds, StepTimeline, simulate_step
from capture.step.times import StageTimes


def build_step(stages: Sequence[StageInterface], schedule: Schedule) -> Step:
    """The instructions of one step: every clock's programs, then its transfers, then the updates.

    Args:
        stages: In pipeline order.
        schedule: As many stages; where it splits backward passes, those of all stages.
    """
    return PipelineBuilder(stages, schedule).build()


def program_name(kind: str, stage_id: int) -> str:
    """Name of a stage's program in the table of a step."""
    return f"{kind}@{stage_id}"


def stage_seconds(step: Step, times: Sequence[StageTimes]) -> dict[str, float]:
    """Seconds of every program of a pipeline's step.

    Args:
        step: As ``build_step`` makes it.
        times: One per stage.

    Raises:
        ExecutionError: ``timeline-stages`` if there is not one ``StageTimes`` per stage.
    """
    if len(times) != len(step.places):
        raise ExecutionError.of(
            f"times has {len(times)} entries for a program of {len(step.places)} stages; give "
            "one per stage.",
            "timeline-stages",
        )
    of_place = dict(zip(step.places, times, strict=True))
    return {
        name: of_place[program.place].of(program.kind) for name, program in step.programs.items()
    }


def plan_timeline(
    step: Step, cluster: Cluster, times: Sequence[StageTimes], rates: Rates
) -> StepTimeline:
    """Simulate one step of a pipeline on the links of its target.

    Args:
        step: As ``build_step`` makes it.
        cluster: The plan's devices.
        times: Per stage.
        rates: The target's: compute, memory and links.
    """
    links = LinkTimes(cluster, rates)
    return simulate_step(
        step, Seconds(stage_seconds(step, times), links.seconds, rates.host.duplex)
    )


class PipelineBuilder:
    """Emits the instructions; remembers which slot holds which value of which micro-batch.

    A value travels from stage to stage until its last reader, and its gradient goes back from
    reader to reader, each adding its own. Another runtime's habits override ``order`` and the three
    methods after it.

    Args:
        stages: In pipeline order.
        schedule: As many stages.
    """

    def __init__(self, stages: Sequence[StageInterface], schedule: Schedule):
        self.stages, self.schedule = stages, schedule
        self.places = tuple(Place(f"stage {s}", stage.devices) for s, stage in enumerate(stages))
        self.step = Step(self.places)
        self.values: dict[
            tuple[str, int, int, int], int
        ] = {}  # (what, stage, micro-batch, id) -> slot
        self.params: list[tuple[int, ...]] = []  # per stage, owned and then borrowed
        self.gradients: dict[int, tuple[int, ...]] = {}  # alike, once there are any
        for s, stage in enumerate(stages):
            needs = {**stage.transient_bytes, "zero_gradients": sum(stage.param_bytes.values())}
            for kind, nbytes in needs.items():
                self.step.programs[program_name(kind, s)] = Program(kind, self.places[s], nbytes)
            owned = Params(tuple(stage.owned))
            params = [self._keep("params", s, "parameters", stage.params_bytes, owned)]
            self._keep("optimizer", s, "optimizer", stage.optimizer_bytes, State(owned.ids))
            for p in stage.borrowed:
                nbytes = stage.param_bytes[p]
                params.append(self._keep("param", s, "parameters", nbytes, Params((p,)), p))
            self.params.append(tuple(params))

    def build(self) -> Step:
        """The step; once."""
        step = self.step
        step.instructions += self.order()
        step.num_passes = len(step.instructions)
        step.instructions += self.updates()
        free(step)
        return step

    # ---- what another runtime does otherwise -----------------------------------------------------

    def order(self) -> Iterator[Instruction]:
        """The forward and backward passes, and when what they make is sent."""
        for tasks in self.schedule.rounds:
            transfers: dict[Task, list[Copy]] = {task: [] for task in tasks}
            for task in tasks:
                yield from self.run(task, transfers[task])
            for task in sorted(tasks, key=_order_of_transfers):
                yield from transfers[task]

    def received(self, s: int) -> tuple[int, ...]:
        """Values that a stage gets from others."""
        return self.stages[s].received

    def receivers(self, s: int, v: int) -> Iterable[int]:
        """Stages that get a value from stage s."""
        return (s + 1,)

    def sender(self, s: int, v: int) -> int:
        """The stage that gets the gradient of a value from stage s."""
        return s - 1

    # ---- passes ----------------------------------------------------------------------------------

    def run(self, task: Task, transfers: list[Copy]) -> Iterator[Instruction]:
        """A pass; what is to be sent after it is added to ``transfers``."""
        s, m = task.stage_id, task.microbatch
        match task.kind:
            case "forward":
                return self._forward(s, m, transfers)
            case "backward":
                return self._backward(s, m, transfers)
            case "backward_inputs":
                return self._backward_inputs(s, m, transfers)
            case "backward_weights":
                return self._backward_weights(s, m)

    def feed(self, s: int, m: int, label: str) -> Iterator[Instruction]:
        """The leaves of a micro-batch that the stage reads, unless they are there already."""
        for b in self.stages[s].batch:
            if ("batch", s, m, b) not in self.values:
                nbytes = self.stages[s].batch_bytes[b]
                slot = self._new("batch", "batch", s, m, b, nbytes, Leaves((b,)))
                yield Feed(slot, m, (b,), label)

    def accumulators(self, s: int) -> Iterator[Instruction]:
        """Zeros for the gradients of a stage's parameters, unless they are there already."""
        if s in self.gradients:
            return
        stage, place = self.stages[s], self.places[s]
        parts = [("gradients", stage.params_bytes, tuple(stage.owned))]
        parts += [(f"gradient{p}", stage.param_bytes[p], (p,)) for p in stage.borrowed]
        self.gradients[s] = tuple(
            self.step.slot(f"{name}@{s}", place, "gradients", nbytes, "gradient", Params(ids))
            for name, nbytes, ids in parts
        )
        label = f"zero gradients on stage {s}"
        yield Run(program_name("zero_gradients", s), (), self.gradients[s], (), label)

    def _keep(
        self, what: str, s: int, category: str, nbytes: int, holds: Any, key: int | str = ""
    ) -> int:
        return self.step.keep(f"{what}{key}@{s}", self.places[s], category, nbytes, what, holds)

    def _new(
        self, what: str, category: str, s: int, m: int, key: int, nbytes: int, holds: Any = None
    ) -> int:
        """A slot of a micro-batch; of a value that passes between layers unless it is said."""
        name, holds = f"{what}{key}.{m}@{s}", holds or Values((key,))
        slot = self.step.slot(name, self.places[s], category, nbytes, what, holds)
        self.values[what, s, m, key] = slot
        return slot

    def _read(self, what: str, s: int, m: int, keys: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.values[what, s, m, key] for key in keys)

    def _copy(self, source: int, target: int, label: str) -> Copy:
        slots = self.step.slots
        return Copy(source, target, max(slots[source].nbytes, slots[target].nbytes), label)

    def _forward(self, s: int, m: int, transfers: list[Copy]) -> Iterator[Instruction]:
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
        residuals = self._residuals(s, m)
        yield Run(
            program_name("forward", s),
            (
                self.params[s],
                self._read("input", s, m, stage.used),
                self._read("batch", s, m, stage.batch),
            ),
            (*outputs, *residuals),
            (),
            label,
        )
        if last:
            assert not stage.kept_outputs, (
                "the loss outlives the backward pass, which would free it"
            )
            self.step.reported += outputs
        for v in stage.sent:
            made = v in stage.outputs
            is_kept = v in (stage.kept_outputs if made else stage.kept_inputs)
            for t in self.receivers(s, v):
                source = self.values["output" if made else "input", s, m, v]
                if self._together(s, t) and not is_kept:
                    self.values["input", t, m, v] = source
                    continue
                nbytes = self.stages[t].value_bytes[v]
                target = self._new("input", "received activations", t, m, v, nbytes)
                transfers.append(self._copy(source, target, f"send {v}.{m} from stage {s} to {t}"))

    def _backward(self, s: int, m: int, transfers: list[Copy]) -> Iterator[Instruction]:
        yield from self.accumulators(s)
        stage, label = self.stages[s], f"backward {m} on stage {s}"
        kept = (
            self._read("input", s, m, stage.kept_inputs),
            self._read("batch", s, m, stage.kept_batch),
            self._read("output", s, m, stage.kept_outputs),
            self._read("residuals", s, m, [0]),
        )
        cotangents = self._read("cotangent", s, m, stage.cotangents)
        made = tuple(
            self._new("input gradient", "sent gradients", s, m, v, stage.value_bytes[v])
            for v in stage.input_gradients
        )
        accumulated = self.gradients[s]
        yield Run(
            program_name("backward", s),
            (self.params[s], *kept, cotangents, accumulated),
            (*made, *accumulated),
            (*kept[0], *kept[2], *kept[3], *cotangents, *accumulated),
            label,
        )
        self._send_gradients(s, m, transfers)

    def _backward_inputs(self, s: int, m: int, transfers: list[Copy]) -> Iterator[Instruction]:
        """The gradients that the stage before waits for."""
        stage, split = self.stages[s], self.split(s)
        batch = self._read("batch", s, m, stage.kept_batch)
        gone = (
            *self._read("input", s, m, _without(stage.kept_inputs, split.inputs)),
            *self._read("output", s, m, _without(stage.kept_outputs, split.outputs)),
            *self._read("residuals", s, m, [0]),
            *self._read("cotangent", s, m, _without(stage.cotangents, split.cotangents)),
        )
        held = self._held(s, m)
        made = tuple(
            self._new("input gradient", "sent gradients", s, m, v, stage.value_bytes[v])
            for v in stage.input_gradients
        )
        of = "deferred", "activations", s, m, 0, split.deferred_bytes
        deferred = self._new(*of, KeptPart("deferred"))
        yield Run(
            program_name("backward_inputs", s),
            (self.params[s], batch, gone, held),
            (*made, deferred),
            gone,
            f"gradients of inputs {m} on stage {s}",
        )
        self._send_gradients(s, m, transfers)

    def _backward_weights(self, s: int, m: int) -> Iterator[Instruction]:
        """Those that nobody waits for."""
        yield from self.accumulators(s)
        accumulated, held = self.gradients[s], self._held(s, m)
        batch = self._read("batch", s, m, self.split(s).batch)
        deferred = self._read("deferred", s, m, [0])
        yield Run(
            program_name("backward_weights", s),
            (self.params[s], batch, held, deferred, accumulated),
            accumulated,
            (*held, *deferred, *accumulated),
            f"gradients of weights {m} on stage {s}",
        )

    def _held(self, s: int, m: int) -> tuple[int, ...]:
        """What the gradients of weights read of what the backward pass does, in their order."""
        split = self.split(s)
        return (
            *self._read("input", s, m, split.inputs),
            *self._read("output", s, m, split.outputs),
            *self._read("held residuals", s, m, [0]),
            *self._read("cotangent", s, m, split.cotangents),
        )

    def split(self, s: int) -> SplitBackward:
        """What a stage holds between the two parts of its backward pass."""
        split = self.stages[s].split
        assert split is not None, f"stage {s} is not known with a split backward pass"
        return split

    def _residuals(self, s: int, m: int) -> tuple[int, ...]:
        """Those of a micro-batch; where the backward pass is split, what dies with its first part
        and with its second."""
        nbytes, held = self.stages[s].residual_bytes, 0
        if self.schedule.splits_backward:
            held = self.split(s).residual_bytes
        first = self._new("residuals", "activations", s, m, 0, nbytes - held, KeptPart("residuals"))
        if not self.schedule.splits_backward:
            return (first,)
        return first, self._new("held residuals", "activations", s, m, 0, held, KeptPart("held"))

    def _send_gradients(self, s: int, m: int, transfers: list[Copy]) -> None:
        stage = self.stages[s]
        for v in self.received(s):
            if v not in stage.differentiable:
                continue
            t = self.sender(s, v)
            what = "input gradient" if v in stage.input_gradients else "cotangent"
            source = self.values[what, s, m, v]
            if self._together(s, t):
                self.values["cotangent", t, m, v] = source
                continue
            nbytes = self.stages[t].value_bytes[v]
            target = self._new("cotangent", "received gradients", t, m, v, nbytes)
            label = f"send gradient {v}.{m} from stage {s} to {t}"
            transfers.append(self._copy(source, target, label))

    def _together(self, s: int, t: int) -> bool:
        """Whether two stages share their devices, and so split values alike."""
        return self.stages[s].devices == self.stages[t].devices

    # ---- updates ---------------------------------------------------------------------------------

    def updates(self) -> Iterator[Instruction]:
        """Sum the gradients of shared parameters at their owner, update there, and send the new
        values back."""
        stages, step, places = self.stages, self.step, self.places
        owner_of = {p: s for s, stage in enumerate(stages) for p in stage.owned}
        borrowers = [
            (p, owner_of[p], s)
            for p in sorted(owner_of)  # the order in which the owner's programs take them
            for s, stage in enumerate(stages)
            if p in stage.borrowed
        ]
        arrived: list[list[int]] = [[] for _ in stages]
        for p, owner, s in borrowers:
            source = self.gradients[s][1 + stages[s].borrowed.index(p)]
            nbytes = stages[owner].param_bytes[p]
            name = f"gradient{p} of {s}@{owner}"
            slot = step.slot(
                name, places[owner], "received gradients", nbytes, "gradient", Params((p,))
            )
            arrived[owner].append(slot)
            label = f"send gradient of parameter {p} from stage {s} to {owner}"
            yield self._copy(source, slot, label)
        summaries: list[list[int]] = [[] for _ in stages]
        if any(stage.summary_bytes for stage in stages):
            yield from self._summaries(arrived, summaries)
        for s in range(len(stages)):
            own, borrowed = self._own(s), self.gradients[s][1:]
            others = (slot for slot in summaries[s] if step.slots[slot].holds.of != s)
            inputs = (*((slot,) for slot in own), tuple(arrived[s]), tuple(others))
            yield Run(program_name("update", s), inputs, own[:2], own, f"update on stage {s}")
            yield Free((*borrowed, *arrived[s], *summaries[s]))
        for s, stage in enumerate(stages):
            for p in stage.borrowed:
                owner = owner_of[p]
                target, nbytes = step.persistent[f"param{p}@{s}"], stages[owner].param_bytes[p]
                yield Free((target,))
                yield Copy(
                    self.params[owner][0],
                    target,
                    max(nbytes, step.slots[target].nbytes),
                    f"send parameter {p} from stage {owner} to {s}",
                    stages[owner].owned.index(p),
                )

    def _own(self, s: int) -> tuple[int, int, int]:
        optimizer = self.step.persistent[f"optimizer@{s}"]
        return self.params[s][0], optimizer, self.gradients[s][0]

    def _summaries(
        self, arrived: Sequence[Sequence[int]], summaries: Sequence[list[int]]
    ) -> Iterator[Instruction]:
        """Small values that every stage's update needs of all others."""

        def new(s: int, t: int, name: str) -> int:
            nbytes = self.stages[s].summary_bytes
            slot = self.step.slot(name, self.places[t], "optimizer", nbytes, "summary", Summary(s))
            summaries[t].append(slot)
            return slot

        made = []
        for s in range(len(self.stages)):
            made.append(new(s, s, f"summary@{s}"))
            read = (*((slot,) for slot in self._own(s)), tuple(arrived[s]))
            label = f"summarize gradients on stage {s}"
            yield Run(program_name("summarize", s), read, (made[s],), (), label)
        for s in range(len(self.stages)):
            for t in range(len(self.stages)):
                if s != t:
                    target = new(s, t, f"summary of {s}@{t}")
                    yield self._copy(made[s], target, f"send summary from stage {s} to {t}")


def _without(keys: Sequence[int], others: Sequence[int]) -> list[int]:
    return [key for key in keys if key not in others]


def _order_of_transfers(task: Task) -> tuple[bool, int]:
    """Activations from the last stage to the first, then gradients from the first to the last: a
    stage hands on and frees what it made before it receives, except where two neighbours exchange
    both in one clock."""
    forward = task.kind == "forward"
    return not forward, -task.stage_id if forward else task.stage_id
