"""The estimate of steps of packs: the released scheduler's timelines event by event, in memory and
idle time, ranks that wait for each other, and the trace. Its estimates of whole searches are
compared in ``tests/recorded/test_harmony_results.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.papers.harmony.estimate import estimate
from capture.plan.task_graph import Configuration, Packs, Swaps, Switches, TaskGraph
from capture.predictor.pack_step import packs_step
from capture.step.pack_times import packs_seconds
from capture.step.trace_events import trace_events

ROOT = Path(__file__).parents[2]
TIMELINES = json.loads((ROOT / "tests/data/harmony/timelines_toy6.json").read_text())["timelines"]
TOY = LayerProfile.load(ROOT / "benchmarks/papers/harmony/profiles/toy6.json")
SERVER = Server.load("gtx1080ti-x4")
MODES = {"vPP": "pp", "vDP": "dp"}


def packs(size: int, layers: list[list[int]]) -> Packs:
    return Packs(size, tuple((pack[0], pack[-1] + 1) for pack in layers))


def graph_of(recorded: dict, **changes) -> TaskGraph:
    row = {**recorded, **changes}
    configuration = Configuration(packs(row["u_f"], row["p_f"]), packs(row["u_b"], row["p_b"]))
    switches = Switches.without(row.get("without", () if row["prefetch"] else ("prefetch",)))
    return TaskGraph.of(configuration, MODES[row["mode"]], row["N"], row["D"], switches)


@pytest.mark.parametrize("number", range(len(TIMELINES)))
def test_events_of_the_released_scheduler(number):
    recorded = TIMELINES[number]
    found = estimate(graph_of(recorded), TOY, SERVER)
    ours = {
        (
            e.rank,
            e.stream,
            e.what.task,
            e.what.kind,
            e.what.microbatch,
            e.what.size,
            e.what.first,
            e.what.stop - 1,
        ): (e.begin, e.seconds)
        for e in found.events
    }
    theirs = {
        (
            row["rank"],
            row["stream"],
            row["task"],
            row["kind"],
            row["ubatch_index"],
            row["ubatch_size"],
            *row["layers"],
        ): (row["begin"], row["duration"])
        for row in recorded["events"]
    }
    assert len(found.events) == len(recorded["events"])
    assert ours.keys() == theirs.keys()
    for key, times in theirs.items():
        assert ours[key] == pytest.approx(times, rel=1e-12, abs=1e-14), key
    assert found.seconds == pytest.approx(recorded["est_time"], rel=1e-12)
    assert found.rank_ends == pytest.approx(tuple(recorded["per_rank_end"]), rel=1e-12)
    assert found.rank_bytes == tuple(recorded["per_rank_memory"])


@pytest.mark.parametrize(("off", "sharded"), [((), False), ((), True), (("offload",), False)])
def test_compiled_programs_count_where_one_device_runs_them(off, sharded):
    configuration = Configuration(Packs(1, ((0, 2),)), Packs(1, ((0, 2), (2, 6))))
    mode, swaps = ("dp" if sharded else "pp"), Swaps(sharded=sharded)
    graph = TaskGraph.of(configuration, mode, 2, 4, Switches.without(off), swaps=swaps)
    server = SERVER.with_(num_devices=2)
    step = packs_step(graph, TOY, server)
    alone = packs_seconds(step, graph, TOY, server).programs
    known = packs_seconds(step, graph, TOY, server, dict.fromkeys(step.programs, 1e3)).programs
    kinds = {step.programs[name].call.kind for name, seconds in known.items() if seconds == 1e3}
    assert kinds == {"forward", "backward", "accumulate"} | ({"update"} if off else set())
    assert {name: known[name] for name in known if known[name] != 1e3} == {
        name: alone[name] for name in known if known[name] != 1e3
    }


def test_idle_is_the_tail_and_gaps_are_the_whole_step():
    found = estimate(graph_of(TIMELINES[0]), TOY, SERVER)
    computed = [2 * 0.1 + 4 * 0.3, 2 * 0.1 + 2 * 0.3]  # two passes forward; two tasks back, and one
    assert found.compute_seconds == pytest.approx(computed)
    assert found.gap_fractions == pytest.approx(
        [1 - seconds / found.seconds for seconds in computed]
    )
    assert found.idle_fractions[0] == 0 < found.idle_fractions[1] < found.gap_fractions[1]


def test_a_rank_without_tasks_is_idle_throughout():
    found = estimate(graph_of(TIMELINES[0], N=8), TOY, SERVER)
    assert found.rank_ends[5:] == (1e-10,) * 3 and found.rank_bytes[5:] == (0,) * 3
    # The five that have tasks share the link.
    first = next(event for event in found.events if event.what.kind == "WB")
    assert first.seconds == pytest.approx(2 * 209715200 / (SERVER.swap_bytes_per_second.value / 5))


def test_ranks_that_wait_for_each_other_never_end():
    graph = graph_of(TIMELINES[0])
    forward, backward = graph.tasks[0], graph.tasks[6]
    # The backward pass of the first pack is issued before its forward pass, on the same device.
    swapped = replace(
        graph,
        tasks=tuple(
            replace(task, id=100 + task.id) if task is forward else task
            for task in (*graph.tasks[1:6], backward, graph.tasks[7], forward)
        ),
    )
    cyclic = replace(
        swapped,
        tasks=tuple(
            replace(
                task, stashes=tuple((layer, replace(to, task=100)) for layer, to in task.stashes)
            )
            if task.id == 6
            else replace(task, source=replace(task.source, task=100))
            if task.id == 1
            else task
            for task in swapped.tasks
        ),
    )
    found = estimate(cyclic, TOY, SERVER)
    assert found.seconds == float("inf") and found.rank_ends == (float("inf"),) * 2
    assert found.events == ()


def test_the_trace_shows_ranks_and_streams():
    found = estimate(graph_of(TIMELINES[0]), TOY, SERVER)
    simulation = found.simulation()
    assert simulation.seconds == found.seconds
    names = {
        event["args"]["name"]
        for event in trace_events(simulation)
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert {"rank 0 SwapIn", "rank 1 Compute", "rank 0 P2POut", "rank 1 CPU"} <= names
    assert len(simulation.work) == 62 - sum(1 for e in found.events if e.stream == "P2POut")


@pytest.mark.parametrize("mode", ["pp", "dp"])
def test_volumes_by_tensor_are_those_of_figure_6(mode):
    """Per tensor: weights twice less the last pack's, gradients once, what is kept out and in, and
    every boundary once in each direction; all of it per device in data parallelism."""
    configuration = Configuration(Packs(5, ((0, 1), (1, 4))), Packs(5, ((0, 2), (2, 4), (4, 6))))
    graph = TaskGraph.of(configuration, mode, 3, 30, num_ranks=1)
    found = estimate(graph, TOY, SERVER.with_(num_devices=3)).volumes_bytes
    weights, x, alike = sum(TOY.w_bytes), TOY.x_bytes_per_sample[0], 3 if mode == "dp" else 1
    assert found["WB in"] == alike * (2 * weights - sum(TOY.w_bytes[4:]))
    assert found["dWB out"] == alike * weights
    assert found["sX out"] == found["sX in"] == 30 * 2 * x  # layers 0 and 2
    boundaries = {"forward": 30 * 2 * x, "backward": 30 * 2 * x}  # at 1 and 4; at 4 and 2
    if mode == "pp":
        assert found["p2p"] == sum(boundaries.values()) and found["X in"] == 30 * x
    else:
        assert found["Y out"] == boundaries["forward"] == found["X in"] - 30 * x
        assert found["dX out"] == found["dY in"] == boundaries["backward"]
