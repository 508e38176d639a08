"""What a report says of a plan, as plain facts: nothing here draws.

The schedule is simulated in one of four ways, as far as what is known goes:

    seconds     with a profile of an accelerator: the step on the links and rates of the target
    units       with a profile that says nothing about time: every program takes one unit, transfers
                take none
    saved       without a profile, where the plan says what a step took when it was simulated: the
                schedule's table with the seconds of its passes and of what stages send
    clocks      without either: the schedule's own table, one unit per pass

Of the last two nothing is known of memory over time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from capture.documents import fields_of
from capture.errors import PlanError
from capture.measured.profile import Profile
from capture.plan.headroom import Headroom
from capture.plan.orders import StagePass
from capture.plan.prediction import Prediction, StagePrediction, StepTime
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import Front
from capture.predictor.additive import AdditivePredictor
from capture.predictor.step_time import has_times, predicted_timeline
from capture.quantities import ids_text
from capture.step.ledger import Memory
from capture.step.pipeline import build_step, stage_seconds
from capture.step.simulator import MemoryUse, Simulation, Work, simulate
from capture.step.timeline import Seconds, StepTimeline, compute_stream, simulate_step
from capture.step.times import StageTimes

Clock = Literal["seconds", "units", "saved", "clocks"]


@dataclass(frozen=True)
class StageFacts:
    """The facts of one stage; bytes are those of each of its devices.

    Attributes:
        stage_id: Number in pipeline order.
        stage: Layers, devices, degrees.
        predicted: Peak with its parts and interval.
        verified_bytes: Peak by the compiler of the target; None if the plan was not verified.
        max_in_flight: Most micro-batches whose activations it keeps at once, those for the
            gradients of weights included.
    """

    stage_id: int
    stage: Stage
    predicted: StagePrediction
    verified_bytes: int | None
    max_in_flight: int

    @property
    def peak_bytes(self) -> int:
        """The peak memory by the best that is known: compiled, else predicted."""
        return self.predicted.peak_bytes if self.verified_bytes is None else self.verified_bytes

    @property
    def devices_text(self) -> str:
        return ids_text(self.stage.devices)

    @property
    def layers_text(self) -> str:
        return ids_text(range(self.stage.first, self.stage.stop))


@dataclass(frozen=True)
class ScheduleFacts:
    """The facts of a step's schedule, simulated.

    Attributes:
        clock: Kind of the times, as above.
        simulation: What happens when.
        waits_fraction: Part of the step in which each stage computes nothing.
        memory: Memory of each stage over time, on each of its devices; () where nothing is known.
        processes: Headings of the trace.
        lanes: Name of the streams of each group of devices, and its stages in words.
        saved_seconds: Seconds of the whole step, as the plan's file says, of the clock ``saved``.
    """

    clock: Clock
    simulation: Simulation
    waits_fraction: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    processes: Mapping[Memory, str]
    lanes: Mapping[str, str]
    saved_seconds: float | None = None

    @property
    def in_seconds(self) -> bool:
        return self.clock in ("seconds", "saved")

    @property
    def step_seconds(self) -> float | None:
        """The seconds of the step; None where times are units."""
        return float(self.simulation.seconds) if self.clock == "seconds" else self.saved_seconds


@dataclass(frozen=True)
class ReportFacts:
    """The facts that a report of a plan of stages shows.

    Attributes:
        plan: The reported plan.
        prediction: Its prediction.
        stages: Facts of the stages in pipeline order.
        headroom: Memory that the verified peaks leave, or, if there are none, the predicted; None
            where nobody says how much memory there is.
        schedule: The step.
    """

    plan: Plan
    prediction: Prediction
    stages: tuple[StageFacts, ...]
    headroom: Headroom | None
    schedule: ScheduleFacts

    @property
    def front(self) -> Front | None:
        """The front of the search; None if it made none."""
        front = None if self.plan.why is None else self.plan.why.front
        return front if front and front.points else None

    @property
    def limit_bytes(self) -> int | None:
        """The limit per device; None where nobody says."""
        return None if self.headroom is None else self.headroom.limit_bytes

    @property
    def high_bytes(self) -> int:
        """The upper end of the highest interval of a prediction."""
        return max(stage.predicted.interval_bytes[1] for stage in self.stages)

    @property
    def fullest(self) -> StageFacts:
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def busiest(self) -> int:
        """The stage that waits least: the step cannot be shorter than its work."""
        waits = self.schedule.waits_fraction
        return min(range(len(waits)), key=waits.__getitem__)

    @property
    def mean_waits(self) -> float:
        """The part of a step in which a stage computes nothing, on average over the stages."""
        waits = self.schedule.waits_fraction
        return sum(waits) / len(waits)

    @property
    def verified(self) -> bool:
        return self.plan.verification is not None

    def rows(self) -> dict[str, Any]:
        """Return stages, schedule and front as plain data."""
        limit = self.limit_bytes
        return {
            "stages": [
                {
                    "stage_id": stage.stage_id,
                    **stage.stage.to_json(),
                    "predicted_peak_bytes": stage.predicted.peak_bytes,
                    "verified_peak_bytes": stage.verified_bytes,
                    "headroom_bytes": None if limit is None else limit - stage.peak_bytes,
                    **fields_of(stage.predicted, "interval_bytes", "instant", "parts_bytes"),
                    "max_in_flight": stage.max_in_flight,
                    "waits_fraction": waits,
                }
                for stage, waits in zip(self.stages, self.schedule.waits_fraction, strict=True)
            ],
            "schedule": {
                "clock": self.schedule.clock,
                "simulated": True,
                "step_seconds": self.schedule.step_seconds,
            },
            "front": self.front
            and {
                "complete": self.front.complete,
                "points": [
                    fields_of(point, "peak_bytes", "step_seconds", "stages", "name")
                    for point in self.front.points
                ],
            },
        }


def report_facts(
    plan: Plan, profile: Profile | None = None, memory_limit_bytes: int | None = None
) -> ReportFacts:
    """Gather the facts of a plan.

    Args:
        plan: Plan with its prediction.
        profile: Measurements of the plan's model on its target: for times, and for memory over
            time.
        memory_limit_bytes: Limit per device; None takes what the target's devices can use.

    Raises:
        PlanError: ``report-prediction`` if the plan has none, ``plan-corrupt`` if a note of the
            plan is not what this version writes.
        ProfileError: if the profile is of another model or target, and the codes of the predictors.
    """
    if plan.prediction is None:
        raise PlanError.of(
            "the plan has no prediction, which is what is shown; add it with capture predict PLAN "
            "--profile FILE -o PLAN, from the FILE that capture profile makes of the model.",
            "report-prediction",
        )
    found, room = _stages(plan, plan.prediction), plan.headroom(memory_limit_bytes)
    return ReportFacts(plan, plan.prediction, found, room, schedule_facts(plan, profile))


def schedule_facts(plan: Plan, profile: Profile | None) -> ScheduleFacts:
    """Simulate the step with what the profile knows; one without compiled windows (executed runs
    alone) counts as none.

    Of degrees that were not profiled no time is known: a plan predicted by extrapolation is drawn
    in units.

    Raises:
        ProfileError: if the profile is of another model or target, or lacks what the plan's stages
            need.
    """
    if profile is None or not profile.measurements:
        if plan.time is not None:
            return _saved(plan, plan.time)
        return _of_table("clocks", plan, lambda s, kind: float(kind != "update"))
    extrapolated = plan.prediction is not None and plan.prediction.extrapolated
    predictor = AdditivePredictor(profile, allow_extrapolation=extrapolated)
    predictor.predict(plan)  # refuses a profile of another model or target
    if has_times(profile) and not extrapolated:
        return _of_timeline("seconds", predicted_timeline(plan, profile), plan)
    program = build_step(predictor.interfaces(plan), plan.schedule_table)
    units = stage_seconds(program, [StageTimes(1, 1, 1, 1, 1, 1)] * plan.num_stages)
    return _of_timeline("units", simulate_step(program, Seconds(units, lambda *_: 0)), plan)


def _of_timeline(clock: Clock, timeline: StepTimeline, plan: Plan) -> ScheduleFacts:
    devices = [place.devices[0] for place in timeline.step.places if not place.host]
    memory = tuple(map(timeline.memory_of, devices))
    waits = tuple(map(float, timeline.bubble_fraction))
    lanes = {
        timeline.processes[plan.stages[stages[0]].devices[0]]: _named(stages)
        for stages in plan.schedule_table.stages
    }
    return ScheduleFacts(clock, timeline.simulation, waits, memory, timeline.processes, lanes)


def _named(stages: Sequence[int]) -> str:
    """Return the stages of a group of devices, in words."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _saved(plan: Plan, time: StepTime) -> ScheduleFacts:
    """Simulate the schedule's table with the seconds that the plan's file has."""
    passes, sends = time.passes_seconds_per_stage, time.sends_seconds
    _check_length(passes, plan.num_stages, "time.passes_seconds_per_stage")
    _check_length(time.bubble_fraction_per_stage, plan.num_stages, "time.bubble_fraction_per_stage")
    _check_length(sends, plan.num_stages - 1, "time.sends_seconds")
    facts = _of_table("saved", plan, lambda s, kind: passes[s].get(kind, 0.0), sends)
    waits = time.bubble_fraction_per_stage
    return replace(facts, waits_fraction=waits, saved_seconds=time.step_seconds)


def _of_table(
    clock: Clock,
    plan: Plan,
    seconds: Callable[[int, str], float],
    sends: Sequence[float] = (),
) -> ScheduleFacts:
    """Simulate the schedule's table, which says nothing of memory.

    Args:
        clock: Kind of the times.
        plan: Plan with the schedule.
        seconds: Time of a pass of a stage, or of its update; 0 where there is none.
        sends: Seconds from each stage but the last to the next; empty where sending takes none.
    """
    table, work = plan.schedule_table, list[Work]()
    lanes, number = list(map(_named, table.stages)), dict[StagePass, int]()
    streams = [compute_stream(lanes[group]) for group in table.placement]
    for task in (task for tasks in table.clocks for task in tasks):
        s, before = task.stage_id, tuple[int, ...]()
        if (needed := table.requirement(task)) is not None:
            before = (number[needed],)
            here, there = lanes[table.placement[s]], lanes[table.placement[needed.stage_id]]
            if sends and here != there:
                length = sends[min(needed.stage_id, s)]
                link = (f"{there} -> {here}",)
                work.append(Work(f"transfer to {here}", link, length, before, kind="transfer"))
                before = (len(work) - 1,)
        number[task] = len(work)
        label = f"{task.kind} {task.microbatch} on stage {s}"
        length = seconds(s, task.kind)
        work.append(Work(label, (streams[s],), length, before, kind=task.kind))
    for s, stream in enumerate(streams):
        if length := seconds(s, "update"):
            work.append(Work(f"update of stage {s}", (stream,), length, (), kind="update"))
    simulation = simulate(work)
    whole = simulation.seconds or 1
    waits = tuple(1 - simulation.busy_seconds[stream] / whole for stream in streams)
    headings: dict[Memory, str] = {compute_stream(lane): lane for lane in lanes}
    return ScheduleFacts(clock, simulation, waits, (), headings, {lane: lane for lane in lanes})


def _stages(plan: Plan, predicted: Prediction) -> tuple[StageFacts, ...]:
    _check_length(predicted.stages, plan.num_stages, "prediction.stages", ", one per stage")
    verified = None
    if plan.verification is not None:
        verified = plan.verification.peak_bytes_per_device
        num_devices = plan.cluster.num_devices
        _check_length(verified, num_devices, "verification.peak_bytes_per_device")
    found = []
    for s, (stage, note) in enumerate(zip(plan.stages, predicted.stages, strict=True)):
        path = f"prediction.stages[{s}].layers_bytes"
        _check_length(note.layers_bytes, stage.num_layers, path, ", one per layer")
        peak = None if verified is None else max(verified[device] for device in stage.devices)
        in_flight = max(o.num_kept + o.num_deferred for o in plan.schedule_table.occupancies[s])
        found.append(StageFacts(s, stage, note, peak, in_flight))
    return tuple(found)


def _check_length(items: Sequence[object], wanted: int, path: str, each: str = "") -> None:
    if len(items) != wanted:
        raise PlanError.of(
            f"the plan is not one: {path} has {len(items)} items and must have {wanted}{each}. "
            "Correct it, or predict it again with capture predict PLAN --profile FILE -o PLAN.",
            "plan-corrupt",
        )


def levels(samples: Sequence[tuple[float, int]], end_seconds: float) -> list[tuple[float, int]]:
    """Return the bytes held over time as a step function until the end. An instant counts with its
    highest sample and its last.

    A program's donated inputs are released before its results come to life at the same instant;
    that dip lasts no time and is left out.

    Example:
        >>> levels([(0, 5), (1, 0), (1, 5), (2, 9), (2, 4)], 3)
        [(0, 5), (1, 5), (2, 9), (2, 4), (3, 4)]
    """
    kept: list[tuple[float, int]] = []
    for seconds, group in groupby(samples, key=lambda sample: sample[0]):
        of_instant = [nbytes for _, nbytes in group]
        if max(of_instant) > of_instant[-1]:
            kept.append((seconds, max(of_instant)))
        kept.append((seconds, of_instant[-1]))
    if kept and kept[-1][0] < end_seconds:
        kept.append((end_seconds, kept[-1][1]))
    return kept


def envelope(samples: Sequence[tuple[float, int]], num_buckets: int) -> list[tuple[float, int]]:
    """Thin out the points of a step function but keep its highs and lows: per bucket of time the
    lowest, the highest and the last.

    Args:
        samples: (seconds, bytes) in the order of time.
        num_buckets: Number of buckets, of equal length.

    Returns:
        The samples themselves where they are few enough.

    Example:
        >>> envelope([(0, 1), (1, 9), (2, 5), (3, 4), (10, 0)], 1)
        [(1, 9), (10, 0)]
    """
    if len(samples) <= 3 * num_buckets:
        return list(samples)
    begin, length = samples[0][0], samples[-1][0] - samples[0][0]
    buckets: dict[int, list[int]] = {}
    for i, (seconds, _) in enumerate(samples):
        at = min(num_buckets - 1, int((seconds - begin) / length * num_buckets)) if length else 0
        buckets.setdefault(at, []).append(i)
    kept: list[tuple[float, int]] = []
    for members in buckets.values():
        lowest, highest = (
            min(members, key=lambda i: samples[i][1]),
            max(members, key=lambda i: samples[i][1]),
        )
        kept += [samples[i] for i in sorted({lowest, highest, members[-1]})]
    return kept
