"""How long a step of a pipeline takes, and what every device holds when: the step program on the
simulator.

The instructions that the replay books and the runtime executes become items of work. The devices of
a stage run in lockstep, so a stage has one stream of each sort:

    Run    on "stage 0 compute"
    Move   on "stage 0 -> stage 1"; every direction of every pair of stages is a stream, so
           activations and gradients do not block
           each other, nor does a stage that sends to two others
    Feed   on "stage 0 host"
    Free   takes no time, and happens when everything issued before it that reads the slots has
           ended

A program or a transfer waits for what wrote the slots that it reads; a program that donates a slot
also for what still reads it.

**Two peaks.** The replay books the instructions one after the other. On real streams a transfer may
arrive earlier, or the one before it leave later, than in that order, so the peak over time can lie
above or below the peak of the replay. Both are reported. With ``capacity_bytes`` at the replay's
peaks, the step always completes, if later: room is granted in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.machine.target import Rates
from capture.plan.stages import Plan
from capture.step.ledger import Ledger, Peak
from capture.step.program import (
    Feed,
    Free,
    Move,
    Run,
    StageInterface,
    StepProgram,
    build_step,
    replay,
)
from capture.step.simulator import Buffer, Device, MemoryUse, Simulation, Work, simulate
from capture.step.times import StageTimes

TransferSeconds = Callable[[Move, int, int, int], float]
"""(move, bytes per device, source stage, target stage) -> seconds."""
FeedSeconds = Callable[[int, int], float]
"""(bytes per device, stage) -> seconds."""


@dataclass(frozen=True)
class LinkTimes:
    """Times of transfers from the links of a target: latency + bytes per device / rate.

    **Assumes** that every device has its link to itself, and sends or receives its part at the same
    time as the others of its stage.

    Attributes:
        stages: In pipeline order.
        cluster: Says which devices share a node.
        rates: Of the target.
    """

    stages: Sequence[StageInterface]
    cluster: Cluster
    rates: Rates

    def transfer_seconds(
        self, move: Move, nbytes: int, source_stage: int, target_stage: int
    ) -> float:
        """Over the link inside a node if all devices of both stages lie in one, else over the link
        between nodes."""
        nodes = {
            self.cluster.node_of_device[d]
            for s in (source_stage, target_stage)
            for d in self.stages[s].devices
        }
        return (self.rates.intra_node if len(nodes) == 1 else self.rates.inter_node).seconds(nbytes)

    def feed_seconds(self, nbytes: int, stage_id: int) -> float:
        """Over the link from the host."""
        return self.rates.host.to_device.seconds(nbytes)


@dataclass(frozen=True)
class StepTimeline:
    """A step, simulated.

    Attributes:
        simulation: What happened when. Devices that serve the same stages hold the same bytes at
            every instant, so the first of them stands for all in ``simulation.memory``.
        program_order: The ledger of the replay, for comparison.
        stages: In pipeline order.
        standing_for: Per device, the device that stands for it.
    """

    simulation: Simulation
    program_order: Ledger
    stages: Sequence[StageInterface]
    standing_for: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        return self.simulation.seconds

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """Per stage, the part of the step in which it computes nothing: 1 - busy / step; 0 if the
        step takes no time."""
        busy = [
            self.simulation.busy_seconds.get(compute_stream(s), 0) for s in range(len(self.stages))
        ]
        return tuple(
            1 - seconds / self.step_seconds if self.step_seconds else 0 for seconds in busy
        )

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Per device, over time. ``program_order.peaks`` are those of the replay."""
        return tuple(self.simulation.memory.get(device, _UNUSED) for device in self.standing_for)

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        """Over time; those of the replay are ``program_order.peak_bytes_per_device``."""
        return tuple(use.peak.peak_bytes for use in self.memory)

    @property
    def processes(self) -> dict[Device, str]:
        """Where ``capture.step.trace_events`` shows a stream or the memory of a device: with its
        stage, a link with the sender."""
        shown: dict[Device, str] = {}
        for s, stage in enumerate(self.stages):
            streams = (
                compute_stream(s),
                host_stream(s),
                *(link_stream(s, t) for t in range(len(self.stages))),
            )
            shown |= dict.fromkeys((*streams, *stage.devices), f"stage {s}")
        return shown


_UNUSED = MemoryUse(((0, 0),), Peak(0, "", {}), 0)


def compute_stream(stage_id: int) -> str:
    return f"stage {stage_id} compute"


def link_stream(source_stage: int, target_stage: int) -> str:
    return f"stage {source_stage} -> stage {target_stage}"


def host_stream(stage_id: int) -> str:
    return f"stage {stage_id} host"


def plan_timeline(
    plan: Plan, stages: Sequence[StageInterface], times: Sequence[StageTimes], rates: Rates
) -> StepTimeline:
    """Simulate one step of a plan on the links of its target.

    Args:
        plan: Decides the schedule.
        stages: Interfaces of its stages, predicted or compiled.
        times: Per stage.
        rates: Of the target.
    """
    links = LinkTimes(stages, plan.cluster, rates)
    return pipeline_timeline(
        build_step(stages, plan.schedule_table), times, links.transfer_seconds, links.feed_seconds
    )


def pipeline_timeline(
    program: StepProgram,
    times: Sequence[StageTimes],
    transfer_seconds: TransferSeconds,
    feed_seconds: FeedSeconds,
    *,
    feeds_ahead: int | None = 1,
    capacity_bytes: Mapping[int, int] | None = None,
) -> StepTimeline:
    """Simulate one step.

    Args:
        program: As ``build_step`` makes it.
        times: One per stage.
        transfer_seconds: Of a move. The bytes are per device; where the stages differ in degree,
            the larger of both sides, which is what the busier link carries.
        feed_seconds: Of a feed.
        feeds_ahead: How many programs of its stage a feed may run ahead: 0 starts it when the
            program before its own has ended, 1 during that program, and so on; None as soon as the
            link is free, as far ahead as the step goes.
        capacity_bytes: Per device id, where memory is limited; what does not fit waits. Devices
            that no stage uses may be named.

    Returns:
        The timeline. Exact if all seconds are integers or fractions.

    Raises:
        ExecutionError: ``timeline-stages`` if there is not one ``StageTimes`` per stage, and the
            codes of ``simulate``.
    """
    if len(times) != len(program.stages):
        raise ExecutionError.of(
            f"times has {len(times)} entries for a program of {len(program.stages)} stages; give "
            "one per stage.",
            "timeline-stages",
        )
    standing_for = _standing_for(program.stages)
    items = _Items(program, times, transfer_seconds, feed_seconds, feeds_ahead, standing_for)
    capacities: dict[Device, int] = {}
    for device, nbytes in (capacity_bytes or {}).items():
        if device < len(standing_for):
            first = standing_for[device]
            capacities[first] = min(
                nbytes, capacities.get(first, nbytes)
            )  # the fullest holds up the whole stage
    simulation = simulate(items.work, capacity_bytes=capacities)
    return StepTimeline(
        simulation, replay(program, len(standing_for)), program.stages, standing_for
    )


def _standing_for(stages: Sequence[StageInterface]) -> tuple[int, ...]:
    """Per device, the first that serves the same stages: both hold the same."""
    num_devices = 1 + max(device for stage in stages for device in stage.devices)
    serves = [
        tuple(s for s, stage in enumerate(stages) if device in stage.devices)
        for device in range(num_devices)
    ]
    return tuple(serves.index(which) for which in serves)


class _Items:
    """Turns instructions into items; remembers which item wrote a slot, and which have read it
    since."""

    def __init__(
        self,
        program: StepProgram,
        times: Sequence[StageTimes],
        transfer_seconds: TransferSeconds,
        feed_seconds: FeedSeconds,
        feeds_ahead: int | None,
        standing_for: Sequence[int],
    ):
        self._devices = [
            tuple(sorted({standing_for[device] for device in stage.devices}))
            for stage in program.stages
        ]
        self._program, self._times, self._feeds_ahead = program, times, feeds_ahead
        self._transfer_seconds, self._feed_seconds = transfer_seconds, feed_seconds
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._runs: list[list[int]] = [[] for _ in program.stages]
        self.work: list[Work] = []
        persistent = tuple(program.persistent.values())
        self._add(
            Work("before the step", allocates=self._buffers(persistent), kind="state"),
            writes=persistent,
        )
        for instruction in program.instructions:
            match instruction:
                case Feed():
                    self._feed(instruction)
                case Run():
                    self._run(instruction)
                case Move():
                    self._move(instruction)
                case Free():
                    self._free(instruction)

    def _add(self, item: Work, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        i = len(self.work)
        self.work.append(item)
        for slot in reads:
            self._readers[slot].append(i)
        for slot in writes:
            self._writer[slot], self._readers[slot] = i, []

    def _buffers(self, slots: Sequence[int]) -> tuple[Buffer, ...]:
        named = [self._program.slots[slot] for slot in slots]
        return tuple(
            Buffer(slot.name, self._devices[slot.stage_id], slot.nbytes, slot.category)
            for slot in named
        )

    def _names(self, slots: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._program.slots[slot].name for slot in slots)

    def _feed(self, feed: Feed) -> None:
        slot = self._program.slots[feed.slot]
        runs = self._runs[slot.stage_id]
        after: tuple[int, ...] = ()
        if self._feeds_ahead is not None and len(runs) > self._feeds_ahead:
            after = (runs[-1 - self._feeds_ahead],)
        item = Work(
            f"feed micro-batch {feed.microbatch} to stage {slot.stage_id}",
            (host_stream(slot.stage_id),),
            self._feed_seconds(slot.nbytes, slot.stage_id),
            after,
            allocates=self._buffers([feed.slot]),
            kind="feed",
        )
        self._add(item, writes=[feed.slot])

    def _run(self, run: Run) -> None:
        stage, reads = (
            self._program.stages[run.stage_id],
            [slot for group in run.inputs for slot in group],
        )
        after = {self._writer[slot] for slot in reads}.union(
            *(self._readers[slot] for slot in run.donated)
        )
        self._runs[run.stage_id].append(len(self.work))
        item = Work(
            run.label,
            (compute_stream(run.stage_id),),
            self._times[run.stage_id].of(run.program),
            tuple(sorted(after)),
            temporaries=(
                Buffer(
                    "",
                    self._devices[run.stage_id],
                    stage.transient_bytes[run.program],
                    "temporaries",
                ),
            ),
            produces=self._buffers(run.outputs),
            frees=self._names(run.donated),
            kind=run.program,
        )
        self._add(item, reads, run.outputs)

    def _move(self, move: Move) -> None:
        source, target = self._program.slots[move.source], self._program.slots[move.target]
        one_of_several = move.index is not None
        sent_bytes = (
            self._program.stages[source.stage_id].param_bytes[move.key]
            if one_of_several
            else source.nbytes
        )
        nbytes = max(sent_bytes, target.nbytes)
        item = Work(
            move.label,
            (link_stream(source.stage_id, target.stage_id),),
            self._transfer_seconds(move, nbytes, source.stage_id, target.stage_id),
            (self._writer[move.source],),
            allocates=self._buffers([move.target]),
            kind="transfer",
        )
        self._add(item, [move.source], [move.target])

    def _free(self, free: Free) -> None:
        if free.slots:
            after = {self._writer[slot] for slot in free.slots}.union(
                *(self._readers[slot] for slot in free.slots)
            )
            self._add(
                Work("free", after=tuple(sorted(after)), frees=self._names(free.slots), kind="free")
            )
