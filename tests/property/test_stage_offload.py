"""What stages keep on their hosts between its uses: the passes that bring it there and back, on steps
of pipelines of every schedule, and what that leaves on devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.errors import ExecutionError
from capture.plan.schedule import (
    Schedule,
    make_schedule,
    occupancy_by_position,
    on_host_by_position,
)
from capture.predictor.formula import of_interfaces, peaks_by_position
from capture.step.interface import StageInterface
from capture.step.passes.residency import reside
from capture.step.passes.transfers import transfer
from capture.step.pipeline import Pipeline, build_step
from capture.step.program import Copy, Free, Run, Step, Wait, replay
from capture.step.tasks import Round
from capture.step.timeline import Seconds, simulate_step
from tests.property import test_step, test_step_tables
from tests.property.test_pack_passes import check_residency, check_transfers, check_waits
from tests.step_judge import judge
from tests.synthetic_graphs import chain

WAYS = [(), ("activations",), ("optimizer",), ("activations", "optimizer")]


@st.composite
def steps(draw) -> tuple[list[StageInterface], Schedule]:
    """Some of whose stages keep something on the host."""
    stages, schedule = draw(st.one_of(test_step.steps(), test_step_tables.steps()))
    offloads = [draw(st.sampled_from(WAYS)) for _ in stages]
    return [
        replace(stage, offload=offload) for stage, offload in zip(stages, offloads, strict=True)
    ], schedule


def resident(stages: list[StageInterface]) -> list[StageInterface]:
    return [replace(stage, offload=()) for stage in stages]


def runs_of(step: Step) -> dict[int, list[str]]:
    """By device, the programs in their order."""
    found = defaultdict[int, list[str]](list)
    for each in step.instructions:
        if isinstance(each, Run):
            for device in step.programs[each.program].place.devices:
                found[device].append(each.label)
    return found


@settings(max_examples=60)
@given(steps())
def test_devices_do_the_same_and_hold_no_more(made):
    stages, schedule = made
    step, alone = build_step(stages, schedule), build_step(resident(stages), schedule)
    judge(step)
    check_waits(step)
    assert runs_of(step) == runs_of(alone)
    ledger, before = replay(step), replay(alone).peak_bytes_per_device
    assert all(now <= then for now, then in zip(ledger.peak_bytes_per_device, before, strict=True))
    state = sum(s.optimizer_bytes * len(s.devices) for s in stages if "optimizer" in s.offload)
    assert ledger.live_bytes["host"] == state


@settings(max_examples=40)
@given(steps(), st.sampled_from([1, 10, 1000]))
def test_a_host_holds_no_more_over_time_than_is_booked(made, rate):
    step = build_step(*made)
    seconds = Seconds(dict.fromkeys(step.programs, 10), lambda of, nbytes, *_: nbytes / rate, True)
    timeline = simulate_step(step, seconds)
    assert timeline.memory_of("host").peak.peak_bytes <= replay(step).peak_of("host").peak_bytes


@settings(max_examples=60)
@given(steps())
def test_what_rests_goes_with_the_pass_behind_and_comes_with_the_one_before(made):
    pipeline = Pipeline(*made)
    rounds = [*pipeline.passes(), Round([*pipeline.updates()])]
    step = Step((*pipeline.places, *pipeline.hosts), pipeline.programs)
    turns = transfer(step, rounds, pipeline.kept)
    check_transfers(step, rounds, turns)
    reside(step, turns, inf, ahead=True, behind=True)
    check_residency(step, turns)


def held(offload: tuple[str, ...], schedule: str = "gpipe", count: int = 8) -> Step:
    """Two stages that keep a residual of 100 of every micro-batch, and have 60 of state."""
    stages = test_step.interfaces(chain(2), [1])
    sizes = {"residual_bytes": 100, "optimizer_bytes": 60, "offload": offload}
    return build_step([replace(s, **sizes) for s in stages], make_schedule(schedule, 2, count))


def test_by_hand():
    """Of eight micro-batches of GPipe a device keeps three: that of the last forward pass, the one
    that goes meanwhile, and the one that comes for the first backward pass."""
    alone, step = replay(held(())), replay(held(("activations",)))
    assert alone.peaks[0].parts["activations"] == 8 * 100
    assert step.peaks[0].parts["activations"] == 3 * 100
    assert step.peak_of("host").parts == {"activations": 2 * 8 * 100}
    state = replay(held(("optimizer",)))
    assert state.peak_of("host").parts == {"optimizer": 2 * 60}
    assert state.live_bytes["host"] == 2 * 60
    assert all("optimizer" not in peak.parts for peak in state.peaks)


def test_what_would_be_away_for_no_pass_stays():
    """Of two stages of 1F1B, the first has two passes between its own two of a micro-batch."""
    step = replay(held(("activations",), "1f1b"))
    assert step.peak_of("host").peak_bytes == 0 and step.peaks[0].parts["activations"] == 200


@pytest.mark.parametrize("kind", [Wait, Copy, Free])
def test_what_is_forgotten_is_seen(kind):
    step = held(("activations", "optimizer"))
    seen = 0
    for number, each in enumerate(step.instructions):
        at_host = not isinstance(each, Copy) or any(
            step.slots[slot].place.host for slot in (each.source, each.target)
        )
        if isinstance(each, kind) and at_host:
            rest = [*step.instructions[:number], *step.instructions[number + 1 :]]
            with pytest.raises((AssertionError, ExecutionError, KeyError)):
                judge(replace(step, instructions=rest))
            seen += 1
    assert seen > 10


@settings(max_examples=60)
@given(
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(WAYS),
    st.lists(st.sampled_from([0, 5, 300, 2000]), min_size=5, max_size=5),
)
def test_tables_of_stages_say_what_the_replay_does(name, num_stages, num_microbatches, way, sizes):
    """On devices, and of the activations that rest on the host."""
    stages = [
        replace(
            stage,
            residual_bytes=stage.residual_bytes + sizes[0],
            optimizer_bytes=sizes[1],
            transient_bytes={
                "forward": stage.residual_bytes
                + sizes[0]
                + sum(stage.value_bytes.values())
                + sizes[2],
                "backward": stage.transient_bytes["backward"] + sizes[3],
                "update": sizes[4],
                "summarize": 0,
            },
            offload=way,
        )
        for stage in test_step.interfaces(chain(num_stages), [*range(1, num_stages)])
    ]
    ledger = replay(build_step(stages, make_schedule(name, num_stages, num_microbatches)))
    of = name, num_microbatches, num_stages
    positions = occupancy_by_position(*of, "activations" in way)
    memories, on_host = of_interfaces(stages), on_host_by_position(*of)
    for s, memory in enumerate(memories):
        j = min(num_stages - s, len(positions)) - 1
        parts = replace(memory, kept=np.array([memory.kept]))
        ((peak,),) = peaks_by_position(parts, [positions[j]], [0], "optimizer" in way)
        assert peak == ledger.peak_bytes_per_device[s]
    if way == ("activations",):
        most = sum(
            on_host[min(num_stages - s, len(positions)) - 1] * memory.kept
            for s, memory in enumerate(memories)
        )
        held = ledger.peak_of("host").peak_bytes
        assert held <= most
        assert held == most or num_stages > 1, "stages need not hold their most at once"
