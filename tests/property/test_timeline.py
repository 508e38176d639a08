"""Simulated pipeline steps against closed forms, against longest paths over the schedule table, and
against the replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.schedule import Schedule, make_schedule
from capture.step.interface import StageInterface, stage_interface
from capture.step.pipeline import build_step, stage_seconds
from capture.step.program import Copy, Step, replay
from capture.step.timeline import LinkTimes, Seconds, StepTimeline, TransferSeconds, simulate_step
from capture.step.times import StageTimes
from capture.step.trace_events import save_trace
from tests.synthetic_graphs import chain, layer_graphs, stage_interfaces

NOTHING = StageCost(0, 0, 0, 0, 0, (), (), ())
schedules = st.sampled_from(["gpipe", "1f1b"])
seconds = st.integers(0, 9)


def interfaces(graph, cuts: Sequence[int], cost: StageCost = NOTHING) -> list[StageInterface]:
    bounds = [0, *cuts, graph.num_layers]
    param_bytes = [p.nbytes for p in graph.params]
    return [
        stage_interface(graph, first, stop, [s], StageChoice(), param_bytes, cost)
        for s, (first, stop) in enumerate(pairwise(bounds))
    ]


def straight(num_stages: int) -> list[StageInterface]:
    """One layer and one device per stage; one value crosses each boundary."""
    return interfaces(chain(num_stages), range(1, num_stages))


def timeline(
    name: str,
    num_microbatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    update: Sequence[int] = (),
    links: Sequence[tuple[int, int]] = (),
    feed: int = 0,
    **options,
) -> StepTimeline:
    """A straight pipeline. ``links`` are the times of an activation and of a gradient over each
    boundary."""
    num_stages = len(forward)
    times = [
        StageTimes(*each)
        for each in zip(forward, backward, update or [0] * num_stages, strict=True)
    ]
    links = links or [(0, 0)] * (num_stages - 1)

    def transfer(instruction, nbytes, source, target):
        if source is None:
            return feed
        s, t = program.places.index(source), program.places.index(target)
        return links[s][0] if s < t else links[t][1]

    program = build_step(straight(num_stages), make_schedule(name, num_stages, num_microbatches))
    return simulated(program, times, transfer, **options)


def simulated(
    program: Step, times: Sequence[StageTimes], transfer: TransferSeconds, **options
) -> StepTimeline:
    return simulate_step(program, Seconds(stage_seconds(program, times), transfer), **options)


# ---- the longest path over the table, without slots, streams or instructions ---------------------


def longest_path(
    schedule: Schedule,
    forward: Sequence[int],
    backward: Sequence[int],
    links: Sequence[tuple[int, int]],
) -> int:
    """A task waits for the one before it in its stage and for its input; a transfer for its source
    and the one before it on its link."""
    before = {after: task for order in schedule.orders for task, after in pairwise(order)}

    @cache
    def end(task) -> int:
        s = task.stage_id
        ready = [end(before[task])] if task in before else []
        if task.kind == "forward":
            ready += [arrival(replace(task, stage_id=s - 1), links[s - 1][0])] if s else []
            return max(ready, default=0) + forward[s]
        ready += (
            [arrival(replace(task, stage_id=s + 1), links[s][1])]
            if s + 1 < len(forward)
            else [end(replace(task, kind="forward"))]
        )
        return max(ready) + backward[s]

    @cache
    def arrival(task, link_seconds: int) -> int:
        earlier = (
            [arrival(replace(task, microbatch=task.microbatch - 1), link_seconds)]
            if task.microbatch
            else []
        )
        return max([end(task), *earlier]) + link_seconds

    return max(end(order[-1]) for order in schedule.orders)


@st.composite
def pipelines(draw, max_stages: int = 5):
    num_stages = draw(st.integers(1, max_stages))
    return (
        draw(schedules),
        draw(st.integers(1, 7)),
        draw(st.lists(seconds, min_size=num_stages, max_size=num_stages)),
        draw(st.lists(seconds, min_size=num_stages, max_size=num_stages)),
        draw(
            st.lists(st.tuples(seconds, seconds), min_size=num_stages - 1, max_size=num_stages - 1)
        ),
    )


@given(pipelines())
def test_a_step_takes_its_longest_path(pipeline):
    name, num_microbatches, forward, backward, links = pipeline
    expected = longest_path(
        make_schedule(name, len(forward), num_microbatches), forward, backward, links
    )
    assert timeline(name, num_microbatches, forward, backward, links=links).step_seconds == expected


# ---- closed forms: S stages, M micro-batches, f and b seconds, p = f + b -------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 1), (4, 2), (4, 4), (3, 8), (16, 64)]
)
def test_equal_stages(name, num_stages, num_microbatches):
    """(M + S - 1) (f + b) + update; the bubble of a stage is (S - 1) / (M + S - 1) of it (GPipe;
    PipeDream-Flush)."""
    f, b, update = 3, 7, 5
    rounds = num_microbatches + num_stages - 1
    equal = timeline(
        name, num_microbatches, [f] * num_stages, [b] * num_stages, [update] * num_stages
    )
    assert equal.step_seconds == rounds * (f + b) + update
    assert equal.simulation.busy_seconds["stage 0 compute"] == num_microbatches * (f + b) + update
    without_update = timeline(name, num_microbatches, [f] * num_stages, [b] * num_stages)
    assert without_update.bubble_fraction == pytest.approx([(num_stages - 1) / rounds] * num_stages)


@given(pipelines(), st.integers(0, 9))
def test_gpipe_is_two_flow_shops(pipeline, update):
    """Stages and links are the machines: sum + (M - 1) max forwards, and the same backwards, which
    begins when the forward phase ends."""
    _, num_microbatches, forward, backward, links = pipeline
    there, back = (
        [*forward, *(link[0] for link in links)],
        [*backward, *(link[1] for link in links)],
    )
    expected = sum(there) + sum(back) + (num_microbatches - 1) * (max(there) + max(back)) + update
    assert (
        timeline(
            "gpipe", num_microbatches, forward, backward, [update] * len(forward), links
        ).step_seconds
        == expected
    )


@given(pipelines())
def test_1f1b_between_its_bounds(pipeline):
    """With transfers that take no time, and P = sum p + (M - 1) max p:

    never less than sum p, nor than any stage working without a pause: sum of p before it + M times
    its own; P where the last stage has the longest forward and the longest backward pass; at most P
    where any stage has both.
    """
    _, num_microbatches, forward, backward, _ = pipeline
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    step = timeline("1f1b", num_microbatches, forward, backward).step_seconds
    form = sum(both) + (num_microbatches - 1) * max(both)
    assert step >= max(
        sum(both), *(sum(both[:s]) + num_microbatches * p for s, p in enumerate(both))
    )
    if (max(forward), max(backward)) in zip(forward, backward, strict=True):
        assert step <= form
    longest_last = timeline(
        "1f1b", num_microbatches, [*forward, max(forward)], [*backward, max(backward)]
    ).step_seconds
    last = max(forward) + max(backward)
    assert longest_last == sum(both) + num_microbatches * last


def test_1f1b_of_uneven_stages_has_no_such_form_elsewhere():
    """A long first stage works while the others wait: it hides them. And the longest passes of
    different stages can add up."""
    assert timeline("1f1b", 4, [10, 1], [10, 1]).step_seconds == 80 < 22 + 3 * 20
    assert timeline("1f1b", 6, [1, 0, 0, 0], [0, 1, 0, 1]).step_seconds == 9 > 3 + 5 * 1
    assert timeline("gpipe", 4, [10, 1], [10, 1]).step_seconds == 22 + 3 * 20


def test_activations_and_gradients_do_not_block_each_other():
    """In the steady state of 1F1B both cross a boundary at once, each for longer than a pass
    takes."""
    both_ways = timeline("1f1b", 8, [1, 1], [1, 1], links=[(4, 4)])
    assert (
        both_ways.simulation.busy_seconds["stage 0 -> stage 1"]
        == both_ways.simulation.busy_seconds["stage 1 -> stage 0"]
        == 32
    )
    assert both_ways.step_seconds < 64


@pytest.mark.parametrize(
    ("feeds_ahead", "expected", "num_batches"),
    [(0, 4 * (2 + 3) + 4, 1), (1, 2 + 4 * 3 + 4, 2), (None, 2 + 4 * 3 + 4, 3)],
)
def test_feeds_overlap_with_the_programs_that_they_may_run_ahead_of(
    feeds_ahead, expected, num_batches
):
    """One stage, four micro-batches: a feed of 2 s and a forward pass of 3 s each, then 4 s
    backwards. The fourth feed begins at 6 s, when the first forward pass has ended."""
    step = timeline("gpipe", 4, [3], [1], feed=2, feeds_ahead=feeds_ahead)
    assert step.step_seconds == expected
    above = step.peak_bytes_per_device[0] - step.program_order.live_bytes[0]
    batch_bytes = straight(1)[0].batch_bytes[0]
    assert num_batches * batch_bytes <= above < (num_batches + 1) * batch_bytes, (
        "the losses are less than a batch"
    )


def test_shared_parameters_are_summed_at_their_owner_and_sent_back():
    """One micro-batch on two stages that share a parameter: passes of 1 s, updates of 10 s, 5 s to
    send a parameter or its gradient.

    Forwards to 2 s, backwards to 3 s and 4 s; the gradient is on its way until 8 s. The owner's
    update waits for it, the borrower's does not. The new value leaves at 18 s.
    """
    program = build_step(interfaces(chain(2, shared=[(0, 1)]), [1]), make_schedule("1f1b", 2, 1))
    step = simulated(
        program,
        [StageTimes(1, 1, 10)] * 2,
        lambda instruction, *_: 5 if "parameter" in instruction.label else 0,
    )
    starts = {
        item.label: start
        for item, start in zip(step.simulation.work, step.simulation.starts, strict=True)
    }
    assert {
        label: starts[label] for label in starts if "parameter" in label or "update" in label
    } == {
        "send gradient of parameter 2 from stage 1 to 0": 3,
        "update on stage 0": 8,
        "update on stage 1": 3,
        "send parameter 2 from stage 0 to 1": 18,
    }
    assert step.step_seconds == 23


def test_updates_wait_for_the_summaries_of_all_stages():
    stages = [replace(stage, summary_bytes=4) for stage in straight(3)]
    times = [StageTimes(1, 1, 2, summarize_seconds=s) for s in (1, 2, 7)]
    step = simulated(build_step(stages, make_schedule("gpipe", 3, 1)), times, lambda *_: 0)
    starts = {
        item.label: start
        for item, start in zip(step.simulation.work, step.simulation.starts, strict=True)
    }
    assert [starts[f"summarize gradients on stage {s}"] for s in range(3)] == [6, 5, 4]
    assert [starts[f"update on stage {s}"] for s in range(3)] == [11, 11, 11]
    assert step.step_seconds == 13


# ---- memory --------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    stages = draw(stage_interfaces(draw(layer_graphs(max_layers=4))))
    return build_step(stages, make_schedule(draw(schedules), len(stages), draw(st.integers(1, 4))))


@st.composite
def timed(draw):
    """A program, times of its stages, and one of a transfer that depends on everything it may."""
    program = draw(programs())
    times = [
        StageTimes(*draw(st.tuples(seconds, seconds, seconds, seconds))) for _ in program.places
    ]
    a, b = draw(seconds), draw(st.integers(1, 5))

    def transfer(instruction, nbytes, source, target):
        t = program.places.index(target)
        return (
            (nbytes + t) % b
            if source is None
            else a + (nbytes + program.places.index(source) + t) % b
        )

    return program, times, transfer


@given(programs())
def test_without_time_every_peak_is_that_of_the_replay(program):
    step = simulated(program, [StageTimes(0, 0, 0)] * len(program.places), lambda *_: 0)
    for use, peak in zip(step.memory, step.program_order.peaks, strict=True):
        assert (use.peak.peak_bytes, use.peak.parts) == (peak.peak_bytes, peak.parts)
    assert step.bubble_fraction == (0,) * len(program.places)


@given(timed())
def test_a_step_begins_and_ends_with_what_persists(case):
    program = case[0]
    step = simulated(*case)
    held = [step.program_order.live_bytes[device] for device in range(len(step.memory))]
    assert [use.samples[-1][1] for use in step.memory] == held
    assert [use.samples[0] for use in step.memory] == [(0, nbytes) for nbytes in held]
    assert all(nbytes >= 0 for use in step.memory for _, nbytes in use.samples)
    assert step.program_order == replay(program)
    assert all(0 <= bubble <= 1 for bubble in step.bubble_fraction)


def test_a_fast_stage_piles_up_the_inputs_of_a_slow_one():
    """Over time the second stage of GPipe holds what the replay, one clock after the other, never
    holds at once."""
    free = timeline("gpipe", 4, [1, 5], [1, 5])
    in_order = free.program_order.peak_bytes_per_device
    assert free.peak_bytes_per_device[1] > in_order[1]


def test_one_device_stands_for_all_of_a_stage():
    graph, devices, rest = (
        chain(2),
        ([0, 1], [2, 4]),
        ([StageTimes(1, 1, 1)] * 2, lambda *_: 1),
    )
    params, pair = [p.nbytes for p in graph.params], StageChoice(2)
    stages = [stage_interface(graph, s, s + 1, devices[s], pair, params, NOTHING) for s in range(2)]
    program = build_step(stages, make_schedule("gpipe", 2, 2))
    step = simulated(program, *rest)
    assert program.standing_for == {0: 0, 1: 0, 2: 2, 4: 2}
    assert (
        step.memory[0] is step.memory[1]
        and step.memory[2] is step.memory[4]
        and step.memory[0] != step.memory[2]
    )
    assert step.peak_bytes_per_device[3] == 0, "no stage uses it"


# ---- transfers, traces, refusals -----------------------------------------------------------------


def test_a_transfer_is_as_long_as_the_larger_part_of_both_sides():
    """Value 0 has 16 bytes: one device sends it to two, two send it to one. One array of a slot is
    sent by itself."""
    graph = chain(3, shared=[(0, 2)])
    degrees, sizes = ([0], [1, 2], [3]), []
    params = [p.nbytes for p in graph.params]
    stages = [
        stage_interface(graph, s, s + 1, d, StageChoice(len(d)), params, NOTHING)
        for s, d in enumerate(degrees)
    ]
    program = build_step(stages, make_schedule("gpipe", 3, 1))

    def transfer(instruction, nbytes, source, target):
        if isinstance(instruction, Copy):
            stages = (program.places.index(source), program.places.index(target))
            sizes.append((instruction.label, nbytes, *stages))
        return 1

    simulated(program, [StageTimes(1, 1, 1)] * 3, transfer)
    assert sizes == [
        ("send 0.0 from stage 0 to 1", 16, 0, 1),
        ("send 1.0 from stage 1 to 2", 32, 1, 2),
        ("send gradient 1.0 from stage 2 to 1", 32, 2, 1),
        ("send gradient 0.0 from stage 1 to 0", 16, 1, 0),
        ("send gradient of parameter 3 from stage 2 to 0", 16, 2, 0),
        ("send parameter 3 from stage 0 to 2", 16, 0, 2),
    ]


def test_links_of_a_target():
    """Stages 0 and 1 share a node, stage 2 is on the next."""
    rates = Target.load("a100-40g").rates
    stages = straight(3)
    links = LinkTimes(Cluster((2, 1), "a100-40g"), rates)
    program = build_step(stages, make_schedule("gpipe", 3, 1))
    step = simulated(program, [StageTimes(0, 0, 0)] * 3, links.seconds)
    busy = step.simulation.busy_seconds
    assert busy["stage 0 -> stage 1"] == rates.intra_node.seconds(16) == busy["stage 1 -> stage 0"]
    assert busy["stage 1 -> stage 2"] == rates.inter_node.seconds(32) == busy["stage 2 -> stage 1"]
    assert busy["stage 0 host"] == rates.host.to_device.seconds(48) == busy["stage 2 host"]


def test_a_trace_shows_every_stage_with_its_streams_and_memory(tmp_path):
    step = timeline("1f1b", 2, [1, 1], [2, 2], links=[(1, 1)])
    save_trace(step.simulation, tmp_path / "step.json", step.processes)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = sorted(
        (processes[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    )
    assert threads == [
        ("stage 0", "stage 0 -> stage 1"),
        ("stage 0", "stage 0 compute"),
        ("stage 0", "stage 0 host"),
        ("stage 1", "stage 1 -> stage 0"),
        ("stage 1", "stage 1 compute"),
        ("stage 1", "stage 1 host"),
    ]
    counters = {(processes[e["pid"]], e["name"]) for e in events if e["ph"] == "C"}
    assert counters == {("stage 0", "memory of device 0"), ("stage 1", "memory of device 1")}
    passes = [
        e["name"]
        for e in events
        if e["ph"] == "X" and e["cat"] in ("forward", "backward") and e["name"].endswith("stage 0")
    ]
    assert passes == [
        f"{kind} {m} on stage 0"
        for kind, m in [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    ]


def test_times_are_one_per_stage():
    with pytest.raises(ExecutionError) as caught:
        stage_seconds(build_step(straight(2), make_schedule("gpipe", 2, 1)), [StageTimes(1, 1, 1)])
    assert (
        str(caught.value)
        == "times has 1 entries for a program of 2 stages; give one per stage. [timeline-stages]"
    )
