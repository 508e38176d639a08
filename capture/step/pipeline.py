"""The step of a pipeline: stages and a schedule table as tasks over values.

Every stage is a place; stages that share devices are several places on them, and hand over what
they make without a copy, unless the one that made it keeps it, too. The values of a stage are
called ``params``, ``optimizer``, ``gradient``, ``param`` (one borrowed), ``residuals``, ``batch``,
``input``, ``output``, ``input gradient``, ``cotangent`` or ``summary``; its programs ``forward``,
``zero_gradients``, ``backward``, ``summarize`` and ``update``. A split backward pass is
``backward_inputs`` and ``backward_weights``: what only the first reads dies with it, the rest
(``held residuals`` among it) and what it makes for the second (``deferred``) with the second.

Parameters and optimizer state outlive the step. Gradients are accumulated from zeros, which are
made just before a stage's first pass that adds to them, until its update, which takes them. What a
program makes is sent at the end of its round; what is copied, awaited and freed when is found by
``capture.step.passes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.machine.rates import Rates
from capture.plan.schedule import Schedule, StagePass
from capture.step.holds import KeptPart, Leaves, Params, State, Summary
from capture.step.holds import Values as Between
from capture.step.interface import SplitBackward, StageInterface
from capture.step.passes.frees import free
from capture.step.passes.residency import reside
from capture.step.passes.transfers import transfer
from capture.step.passes.waits import wait
from capture.step.program import Host, Place, Program, Step
from capture.step.tasks import Round, Send, Task, Value
from capture.step.timeline import LinkTimes, Seconds, StepTimeline, simulate_step
from capture.step.times import StageTimes

Values = tuple[Value, ...]

Key = tuple[str, int, int, int]
"""What a value of a micro-batch is, the stage, the micro-batch, and the id in the layer graph."""


def build_step(stages: Sequence[StageInterface], schedule: Schedule) -> Step:
    """Return one step's instructions: every clock's programs, then its transfers, then the updates.

    Args:
        stages: In pipeline order.
        schedule: As many stages; where it splits backward passes, those of all stages.
    """
    return built(Pipeline(stages, schedule))


def built(pipeline: Pipeline) -> Step:
    """Return the step of a pipeline, whose tasks nobody has listed before."""
    step = Step((*pipeline.places, *pipeline.hosts), pipeline.programs)
    turns = transfer(step, [*pipeline.passes(), Round([*pipeline.updates()])], pipeline.kept)
    if pipeline.hosts:
        reside(step, turns, inf, ahead=True, behind=True)
    else:
        step.instructions += [each for turn in turns for body in turn.body for each in body]
    first = next((id(block[0]) for block in turns[-1].body), None)
    numbered = (n for n, each in enumerate(step.instructions) if id(each) == first)
    step.num_passes = next(numbered, len(step.instructions))
    free(step)
    if pipeline.hosts:
        wait(step)
    return step


class StageCall(NamedTuple):
    """The computation of a pipeline's program: its kind, and the number of its stage."""

    kind: str
    stage: int

    @property
    def name(self) -> str:
        """The program's name in a step: ``forward@0``."""
        return f"{self.kind}@{self.stage}"


def stage_seconds(step: Step, times: Sequence[StageTimes]) -> dict[str, float]:
    """Return the seconds of every program of a pipeline's step, by its name.

    Raises:
        ExecutionError: ``timeline-stages`` if there is not one ``StageTimes`` per stage.
    """
    calls = {name: program.call for name, program in step.programs.items()}
    num_stages = len({call.stage for call in calls.values()})
    if len(times) != num_stages:
        raise ExecutionError.of(
            f"times has {len(times)} entries for a program of {num_stages} stages; give "
            "one per stage.",
            "timeline-stages",
        )
    return {name: times[call.stage].of(call.kind) for name, call in calls.items()}


def plan_timeline(
    step: Step, cluster: Cluster, times: Sequence[StageTimes], rates: Rates
) -> StepTimeline:
    """Simulate one step of a pipeline on the links of its target."""
    links = LinkTimes(cluster, rates)
    return simulate_step(
        step, Seconds(stage_seconds(step, times), links.seconds, rates.host.duplex)
    )


class Pipeline:
    """The lowering of a pipeline: lists the tasks, and remembers the values of every micro-batch.

    A value travels from stage to stage until its last reader, and its gradient goes back from
    reader to reader, each adding its own. Another runtime's habits override ``passes`` and the
    three methods after it.

    Args:
        stages: In pipeline order.

    Attributes:
        kept: Values that are there before the step and after it.
    """

    def __init__(self, stages: Sequence[StageInterface], schedule: Schedule):
        self.stages, self.schedule = stages, schedule
        self.places = tuple(Place(f"stage {s}", stage.devices) for s, stage in enumerate(stages))
        #: In the memory of hosts, if something of a stage rests there.
        self.hosts = tuple(
            Place(f"host of stage {s}", stage.devices, Host(stage.host))
            for s, stage in enumerate(stages)
            if any(each.offload for each in stages)
        )
        self._resting = self._rests()
        self._away = set[Value]()  # what is on a host by now
        self.kept: list[Value] = []
        self.programs: dict[str, Program] = {}
        self._values: dict[Key, Value] = {}
        #: Where values are that another stage on the same devices has made.
        self._handed: dict[Value, Place] = {}
        self._params: list[Values] = []  # per stage, owned and then borrowed
        self._optimizer: list[Value] = []
        self._gradients: dict[int, Values] = {}  # like parameters, once there are any
        self._owner = {p: s for s, stage in enumerate(stages) for p in stage.owned}
        for s, stage in enumerate(stages):
            needs = {**stage.transient_bytes, "zero_gradients": sum(stage.param_bytes.values())}
            for kind, nbytes in needs.items():
                call = StageCall(kind, s)
                self.programs[call.name] = Program(kind, self.places[s], nbytes, call)
            owned, of = Params(tuple(stage.owned)), ("params", "parameters")
            params = [self._keep(s, *of, stage.params_bytes, owned)]
            state = "optimizer", "optimizer", stage.optimizer_bytes, State(owned.ids)
            optimizer = self._keep(s, *state)
            if "optimizer" in stage.offload:
                optimizer.home = self.hosts[s]
                optimizer = replace(optimizer, home=None, name="", source=optimizer)
            self._optimizer.append(optimizer)
            for p in stage.borrowed:
                owner, of = self._owner[p], ("param", "parameters")
                borrowed = self._keep(s, *of, stage.param_bytes[p], Params((p,), "sent"), p)
                borrowed.source = self._params[owner][0]
                borrowed.index = stages[owner].owned.index(p)
                params.append(borrowed)
            self._params.append(tuple(params))

    # ---- what another runtime does otherwise -----------------------------------------------------

    def passes(self) -> Iterator[Round]:
        """Yield the forward and backward passes, and when what they make is sent; once."""
        for passes in self.schedule.rounds:
            ordered = sorted(passes, key=_order_of_sends)
            tasks = [task for one in passes for task in self.run(one)]
            sends = [send for one in ordered for send in self.sends(one)]
            if not self.hosts:
                yield Round([*tasks, *sends])
                continue
            for task in tasks:
                yield self._turn(task)
            yield Round([*sends, *(rest for one in passes for rest in self._offloaded(one))])

    def _turn(self, task: Task) -> Round:
        """Return the round of a task, with the values that come back from the host for it."""
        if task.program.kind == "zero_gradients":
            return Round([task])
        back = tuple(v for group in task.reads for v in group if v in self._away)
        self._away.difference_update(back)
        return Round([task], min(task.program.place.devices), [back])

    def _offloaded(self, one: StagePass) -> Iterator[Send]:
        """Yield the offload of what a forward pass keeps, which goes when all has been sent."""
        s, m = one.stage_id, one.microbatch
        if one.kind != "forward" or (s, m) not in self._resting:
            return
        held = self._read("held residuals", s, m, [0] * self.schedule.splits_backward)
        for value in (*chain(*self._kept(s, m)), *held):
            self._away.add(value)
            label = f"offload {value.what} {m} of stage {s}"
            yield Send(value, self.hosts[s], label, rests=True)

    def _rests(self) -> set[tuple[int, int]]:
        """Return the (stage, micro-batch) whose activations rest on the host."""
        return {
            key for key in self.schedule.resting if "activations" in self.stages[key[0]].offload
        }

    def received(self, s: int) -> tuple[int, ...]:
        """Return the values that a stage gets from others."""
        return self.stages[s].received

    def receivers(self, s: int, v: int) -> Iterable[int]:
        """Return the stages that get a value from stage s."""
        return (s + 1,)

    def sender(self, s: int, v: int) -> int:
        """Return the stage that gets the gradient of a value from stage s."""
        return s - 1

    # ---- passes ----------------------------------------------------------------------------------

    def run(self, one: StagePass) -> Iterator[Task]:
        """Yield the task of a pass, after what has to be there for it."""
        s, m = one.stage_id, one.microbatch
        if one.kind in ("backward", "backward_weights"):
            yield from self.accumulators(s)
        task = {
            "forward": self._forward,
            "backward": self._backward,
            "backward_inputs": self._backward_inputs,
            "backward_weights": self._backward_weights,
        }[one.kind]
        yield task(s, m)

    def sends(self, one: StagePass) -> Iterator[Send]:
        """Yield the sends of what a pass has made for others, or has passed through its stage."""
        s, m, stage = one.stage_id, one.microbatch, self.stages[one.stage_id]
        for v in stage.sent if one.kind == "forward" else ():
            made = v in stage.outputs
            what, kept = ("output", stage.kept_outputs) if made else ("input", stage.kept_inputs)
            for t in self.receivers(s, v):
                yield from self._give((what, s, m, v), "input", t, copied=v in kept)
        for v in self.received(s) if one.kind in ("backward", "backward_inputs") else ():
            if v in stage.differentiable:
                what = "input gradient" if v in stage.input_gradients else "cotangent"
                yield from self._give((what, s, m, v), "cotangent", self.sender(s, v))

    def _give(self, key: Key, what: str, t: int, *, copied: bool = False) -> Iterator[Send]:
        """Yield the send of a value to stage t; hand over the value itself, without a send, where
        both share their devices, and so split it alike."""
        source, (_, s, m, v) = self._values[key], key
        if self.stages[s].devices == self.stages[t].devices and not copied:
            self._values[what, t, m, v] = source
            self._handed.setdefault(source, self.places[s])
            return
        kind, of = ("gradients", "gradient ") if what == "cotangent" else ("activations", "")
        value = self._new(what, f"received {kind}", t, m, v, source=source)
        yield Send(value, self.places[t], f"send {of}{v}.{m} from stage {s} to {t}")

    def batch(self, s: int, m: int) -> Values:
        """Return the leaves of a micro-batch that the stage reads."""
        stage = self.stages[s]
        for b in stage.batch:
            if ("batch", s, m, b) not in self._values:
                of = "batch", "batch", s, m, b, Leaves((b,)), stage.batch_bytes[b]
                self._new(*of, fed=(m, (b,)))
        return self._read("batch", s, m, stage.batch)

    def accumulators(self, s: int) -> Iterator[Task]:
        """Yield the task that makes zeros for a stage's gradients, unless there are some."""
        if s not in self._gradients:
            names = ["gradients", *(f"gradient{p}" for p in self.stages[s].borrowed)]
            self._gradients[s] = tuple(
                Value("gradient", "gradients", of.nbytes, of.holds, name=f"{name}@{s}")
                for name, of in zip(names, self._params[s], strict=True)
            )
            label = f"zero gradients on stage {s}"
            yield self._task("zero_gradients", s, (), self._gradients[s], (), label)

    def _keep(
        self, s: int, what: str, category: str, nbytes: int, holds: object, key: int | str = ""
    ) -> Value:
        name = f"{what}{key}@{s}"
        self.kept.append(Value(what, category, nbytes, holds, home=self.places[s], name=name))
        return self.kept[-1]

    def _new(
        self,
        what: str,
        category: str,
        s: int,
        m: int,
        key: int,
        holds: object = None,
        nbytes: int = 0,
        **more: Any,
    ) -> Value:
        """Return a new value of a micro-batch; one that passes between layers by default."""
        if holds is None:
            holds, nbytes = Between((key,)), self.stages[s].value_bytes[key]
        value = Value(what, category, nbytes, holds, name=f"{what}{key}.{m}@{s}", **more)
        self._values[what, s, m, key] = value
        return value

    def _read(self, what: str, s: int, m: int, keys: Sequence[int]) -> Values:
        return tuple([self._values[what, s, m, key] for key in keys])

    def _task(
        self,
        kind: str,
        s: int,
        reads: tuple[Values, ...],
        makes: Values,
        takes: Values,
        label: str,
        ends: Values = (),
        rests: Sequence[tuple[Value, Place]] = (),
    ) -> Task:
        name, at = StageCall(kind, s).name, self._handed
        program = self.programs[name]
        return Task(name, program, reads, makes, takes, rests, ends, at, label)

    def _forward(self, s: int, m: int) -> Task:
        stage, last = self.stages[s], s == len(self.stages) - 1
        assert not (last and stage.kept_outputs), (
            "the loss outlives the backward pass, which would free it"
        )
        reads = self._params[s], self._read("input", s, m, stage.used), self.batch(s, m)
        for v in stage.outputs:
            category = "loss" if last else "sent activations"
            category = "activations" if v in stage.kept_outputs else category
            self._new("output", category, s, m, v, reported=last)
        makes = (*self._read("output", s, m, stage.outputs), *self._residuals(s, m))
        return self._task("forward", s, reads, makes, (), f"forward {m} on stage {s}")

    def _kept(self, s: int, m: int) -> tuple[Values, ...]:
        """Return what the backward pass reads: inputs, batch, outputs and residuals."""
        stage = self.stages[s]
        return (
            self._read("input", s, m, stage.kept_inputs),
            self._read("batch", s, m, stage.kept_batch),
            self._read("output", s, m, stage.kept_outputs),
            self._read("residuals", s, m, [0]),
        )

    def _backward(self, s: int, m: int) -> Task:
        kept, sums = self._kept(s, m), self._gradients[s]
        cotangents = self._read("cotangent", s, m, self.stages[s].cotangents)
        reads = (self._params[s], *kept, cotangents, sums)
        makes = (*self._input_gradients(s, m), *sums)
        takes = (*kept[0], *kept[2], *kept[3], *cotangents, *sums)
        return self._task("backward", s, reads, makes, takes, f"backward {m} on stage {s}")

    def _backward_inputs(self, s: int, m: int) -> Task:
        """Return the task of the gradients that the stage before waits for."""
        stage, split = self.stages[s], self.split(s)
        gone = (
            *self._read("input", s, m, _without(stage.kept_inputs, split.inputs)),
            *self._read("output", s, m, _without(stage.kept_outputs, split.outputs)),
            *self._read("residuals", s, m, [0]),
            *self._read("cotangent", s, m, _without(stage.cotangents, split.cotangents)),
        )
        batch = self._read("batch", s, m, stage.kept_batch)
        reads, made = (self._params[s], batch, gone, self._held(s, m)), self._input_gradients(s, m)
        of = "deferred", "activations", s, m, 0, KeptPart("deferred"), split.deferred_bytes
        label = f"gradients of inputs {m} on stage {s}"
        return self._task("backward_inputs", s, reads, (*made, self._new(*of)), gone, label)

    def _backward_weights(self, s: int, m: int) -> Task:
        """Return the task of the gradients of weights, which no other stage waits for."""
        batch = self._read("batch", s, m, self.split(s).batch)
        held, deferred = self._held(s, m), self._read("deferred", s, m, [0])
        sums, label = self._gradients[s], f"gradients of weights {m} on stage {s}"
        reads, takes = (self._params[s], batch, held, deferred, sums), (*held, *deferred, *sums)
        return self._task("backward_weights", s, reads, sums, takes, label)

    def _input_gradients(self, s: int, m: int) -> Values:
        new = partial(self._new, "input gradient", "sent gradients", s, m)
        return tuple(map(new, self.stages[s].input_gradients))

    def _held(self, s: int, m: int) -> Values:
        """Return what the gradients of weights read of the inputs, outputs, residuals and
        cotangents of the backward pass, in this order."""
        split = self.split(s)
        return (
            *self._read("input", s, m, split.inputs),
            *self._read("output", s, m, split.outputs),
            *self._read("held residuals", s, m, [0]),
            *self._read("cotangent", s, m, split.cotangents),
        )

    def split(self, s: int) -> SplitBackward:
        """Return what a stage holds between the two parts of its split backward pass."""
        split = self.stages[s].split
        assert split is not None, f"stage {s} is not known with a split backward pass"
        return split

    def _residuals(self, s: int, m: int) -> Values:
        """Return new residuals of a micro-batch: one value, or two where the backward pass is
        split, which die with its first and its second part."""
        splits, nbytes = self.schedule.splits_backward, self.stages[s].residual_bytes
        held = self.split(s).residual_bytes if splits else 0
        new = partial(self._new, category="activations", s=s, m=m, key=0)
        first = new("residuals", holds=KeptPart("residuals"), nbytes=nbytes - held)
        if not splits:
            return (first,)
        return first, new("held residuals", holds=KeptPart("held"), nbytes=held)

    # ---- updates ---------------------------------------------------------------------------------

    def updates(self) -> Iterator[Task | Send]:
        """Yield the sums of shared parameters' gradients at their owner, the updates there, and the
        sends of the new values back."""
        stages, arrived = self.stages, dict[int, Values](dict.fromkeys(range(len(self.stages)), ()))
        for p, owner in sorted(self._owner.items()):  # as the owner's programs take them
            nbytes = stages[owner].param_bytes[p]
            for s in (s for s, stage in enumerate(stages) if p in stage.borrowed):
                source = self._gradients[s][1 + stages[s].borrowed.index(p)]
                of, name = ("gradient", "received gradients"), f"gradient{p} of {s}@{owner}"
                value = Value(*of, nbytes, source.holds, name=name, source=source)
                arrived[owner] += (value,)
                label = f"send gradient of parameter {p} from stage {s} to {owner}"
                yield Send(value, self.places[owner], label)
        own = [(self._params[s][0], self._optimizer[s], self._gradients[s][0]) for s in arrived]
        reads = [(*((value,) for value in own[s]), arrived[s]) for s in arrived]
        summaries: dict[int, Values] = dict.fromkeys(arrived, ())
        if any(stage.summary_bytes for stage in stages):
            yield from self._summaries(reads, summaries)
        for s in arrived:
            ends = (*self._gradients[s][1:], *arrived[s], *summaries[s])
            groups, label = (*reads[s], summaries[s][1:]), f"update on stage {s}"
            rests = [(own[s][1], self.hosts[s])] if "optimizer" in stages[s].offload else []
            yield self._task("update", s, groups, own[s][:2], own[s], label, ends, rests)
        for s, stage in enumerate(stages):
            for p, value in zip(stage.borrowed, self._params[s][1:], strict=True):
                owner = self._owner[p]
                label = f"send parameter {p} from stage {owner} to {s}"
                yield Send(value, self.places[s], label, stages[owner].param_bytes[p])

    def _summaries(
        self, reads: Sequence[tuple[Values, ...]], summaries: dict[int, Values]
    ) -> Iterator[Task | Send]:
        """Yield tasks and sends of what each stage's update needs of all others; own ones first."""
        for s, stage in enumerate(self.stages):
            of = "summary", "optimizer", stage.summary_bytes, Summary(s)
            summaries[s] = (Value(*of, name=f"summary@{s}"),)
            label = f"summarize gradients on stage {s}"
            yield self._task("summarize", s, reads[s], summaries[s], (), label)
        for s, (made,) in list(summaries.items()):
            for t in (t for t in summaries if t != s):
                value = replace(made, name=f"summary of {s}@{t}", source=made)
                summaries[t] += (value,)
                label = f"send summary from stage {s} to {t}"
                yield Send(value, self.places[t], label)


def _without(keys: Sequence[int], others: Sequence[int]) -> list[int]:
    return [key for key in keys if key not in others]


def _order_of_sends(one: StagePass) -> tuple[bool, int]:
    """Return a sort key: activations from the last stage to the first, then gradients from the
    first to the last. A stage hands on and frees what it made before it receives, except where two
    neighbours exchange both in one clock."""
    forward = one.kind == "forward"
    return not forward, -one.stage_id if forward else one.stage_id
