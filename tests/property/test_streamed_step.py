"""Steps of packs: for any packs, sizes, devices and optimizations, memory comes back to what it
was, the peak over time is at most the ledger's, nothing is copied twice, and the volumes of the
paper's one-layer setting come out exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.errors import ExecutionError
from capture.machine.server import Server
from capture.measured.layer_passes import PassProfile
from capture.measured.layer_profile import Casts, LayerProfile
from capture.papers.harmony.estimate import estimate
from capture.plan.task_graph import (
    Configuration,
    Packs,
    Swaps,
    Switches,
    TaskGraph,
    completed_by,
)
from capture.predictor.pack_step import packs_step, packs_timeline
from capture.step.pack_order import begins_without_copies
from capture.step.pack_sizes import ProfileSizes
from capture.step.pack_times import packs_seconds, volumes_bytes
from capture.step.packs import build_step
from capture.step.program import Copy, Feed, Run, Step, Wait, replay
from tests.step_judge import judge

SERVER = Server.load("gtx1080ti-x4")
SIZES = tuple(range(1, 17))


def profile_of(weights: list[int], x: list[int]) -> LayerProfile:
    """Layers with such weights and inputs; memory as that of a layer that keeps four inputs."""
    count = len(weights)

    def of(times: int, copies: int) -> PassProfile:
        return PassProfile(
            SIZES,
            tuple(tuple(times * (1e-3 + 1e-4 * u) for _ in range(count)) for u in SIZES),
            tuple(
                tuple(copies * w + 4 * u * b for w, b in zip(weights, x, strict=True))
                for u in SIZES
            ),
        )

    zero = (0,) * count
    state = tuple(2 * w for w in weights)
    return LayerProfile(
        "drawn", count, of(1, 1), of(3, 2), tuple(x), tuple(weights), zero, state, (1e-3,) * count
    )


@st.composite
def task_graphs(draw, count: int) -> TaskGraph:
    """Of any plan of so many layers."""
    mode = draw(st.sampled_from(["pp", "dp"]))
    devices = draw(st.integers(1, 4))
    minibatch = draw(st.integers(devices, 16))
    share = minibatch // devices if mode == "dp" else minibatch

    def packs(stop: int) -> tuple[tuple[int, int], ...]:
        cuts = draw(st.sets(st.integers(1, stop - 1))) if stop > 1 else set()
        return tuple(pairwise([0, *sorted(cuts), stop]))

    backward = packs(count)
    last = backward[-1][0]
    sizes = [draw(st.integers(1, share)) for _ in range(2)]
    configuration = Configuration(
        Packs(sizes[0], packs(last) if last else ()), Packs(sizes[1], backward)
    )
    switches = st.sets(st.sampled_from(["grouping", "prefetch", "jit", "offload", "p2p"]))
    off = draw(st.one_of(st.just({"offload"}), switches))  # where devices update and reduce
    return TaskGraph.of(configuration, mode, devices, minibatch, Switches.without(off))


@st.composite
def problems(draw) -> tuple[TaskGraph, LayerProfile, Server]:
    count = draw(st.integers(2, 6))
    weights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    x = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    graph = draw(task_graphs(count))
    server = SERVER.with_(num_devices=graph.num_devices)
    slow = {"value": draw(st.sampled_from([1e2, 1e4, 1e6])), "source": ""}
    rate = replace(server.swap_bytes_per_second, **slow)
    server = replace(server, swap_bytes_per_second=rate)
    return graph, profile_of(weights, x), server


@settings(max_examples=60)
@given(problems())
def test_memory_comes_back_and_time_needs_no_more(problem):
    graph, profile, server = problem
    timeline = packs_timeline(graph, profile, server)
    step, ledger = timeline.step, timeline.program_order
    judge(step)
    kept = sum(step.slots[slot].nbytes for slot in step.persistent.values())
    assert kept == sum(profile.w_bytes) + sum(profile.k_bytes)
    live = {memory: nbytes for memory, nbytes in ledger.live_bytes.items() if nbytes}
    assert live in ({"host": kept}, {})
    simulation = timeline.simulation
    assert timeline.memory_of("host").peak.peak_bytes <= ledger.peak_of("host").peak_bytes
    assert len(simulation.ends) >= len(step.instructions) - 1
    # Weights come once per task, whatever the micro-batches.
    volumes, weights = volumes_bytes(step), profile.w_bytes
    tasks = [task for task in graph.tasks if task.kind != "update"]
    fetched = sum(sum(weights[task.first : task.stop]) for task in tasks)
    again = 0 if graph.switches.offload or graph.switches.jit else sum(weights)
    assert volumes.get("weights in", 0) == fetched + again
    copied = [i.target for i in step.instructions if isinstance(i, Copy)]
    fresh = [slot for slot in copied if slot not in step.persistent.values()]
    assert len(fresh) == len({*fresh})


@settings(max_examples=30)
@given(problems())
def test_both_estimates_compute_the_same(problem):
    graph, profile, server = problem
    found = estimate(graph, profile, server)
    timeline = packs_timeline(graph, profile, server)
    assert timeline.step_seconds > 0 and found.seconds < float("inf")
    computed = sum(
        item.seconds for item in timeline.simulation.work if item.kind in ("forward", "backward")
    )
    alike = graph.num_devices if graph.mode == "dp" else 1
    if graph.minibatch_size % graph.num_devices == 0 or graph.mode == "pp":
        assert computed == pytest.approx(alike * sum(found.compute_seconds))


def one_layer_setting(mode: str, devices: int, microbatches: int) -> tuple[TaskGraph, LayerProfile]:
    """R equal layers between an input and a criterion without weights, packs of one layer each."""
    weights = [0, 7, 7, 7, 7, 0]
    profile = profile_of(weights, [1] * 6)
    each = tuple((i, i + 1) for i in range(6))
    configuration = Configuration(Packs(1, each[:-1]), Packs(1, each))
    count = microbatches * (devices if mode == "dp" else 1)
    return TaskGraph.of(configuration, mode, devices, count), profile


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(("mode", "factor"), [("pp", 1), ("dp", None)])
def test_three_times_the_weights_whatever_the_micro_batches(mode, factor, devices):
    for microbatches in (1, 3, 5):
        graph, profile = one_layer_setting(mode, devices, microbatches)
        volumes = volumes_bytes(packs_step(graph, profile, SERVER.with_(num_devices=devices)))
        total = volumes["weights in"] + volumes["gradients out"]
        assert total == 3 * (factor or devices) * sum(profile.w_bytes)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_in_shares_three_times_the_weights_whatever_the_devices(devices):
    for microbatches in (1, 3):
        graph, profile = one_layer_setting("dp", devices, microbatches)
        graph = replace(graph, swaps=Swaps(sharded=True))
        server = SERVER.with_(num_devices=devices)
        timeline, weights = packs_timeline(graph, profile, server), sum(profile.w_bytes)
        volumes = volumes_bytes(timeline.step)
        assert volumes["weights in"] == 2 * weights and volumes["gradients out"] == weights
        if devices > 1:  # who has a share gets the others
            assert volumes["weights gathered"] == 2 * (devices - 1) * weights
            assert volumes["gradients scattered"] == (devices - 1) * weights
        found = estimate(graph, profile, server)
        assert (found.volumes_bytes["WB in"], found.volumes_bytes["dWB out"]) == (
            2 * weights,
            weights,
        )
        p2p = server.p2p_bytes_per_second.value
        exchanged = sum(
            seconds
            for what, seconds in zip(found.items.whats, found.items.seconds, strict=True)
            if what.kind in ("AGW", "RSD")
        )
        assert exchanged == pytest.approx(3 * weights * (1 - 1 / devices) / p2p)
        simulated = [i.seconds for i in timeline.simulation.work if i.kind in ("gather", "scatter")]
        assert sum(simulated) == pytest.approx(exchanged)


@pytest.mark.parametrize(("mode", "sizes"), [("pp", (1, 4)), ("dp", (1, 2)), ("dp", (1, 1))])
def test_casts_are_streamed_instead_of_parameters(mode, sizes):
    """Of 14 bytes of each layer, 12 as casts of 6: 8 come each time, and so much goes back where
    one micro-batch makes it."""
    weights = [0, 14, 14, 14, 14, 0]
    casts = [6 if w else 0 for w in weights]
    comes = tuple(w - cast for w, cast in zip(weights, casts, strict=True))
    profile = replace(
        profile_of(weights, [1] * 6),
        casts={"bfloat16": Casts(comes, (0,) * 6, tuple(casts), comes)},
    )
    each = tuple((i, i + 1) for i in range(6))
    configuration = Configuration(Packs(sizes[0], each[:-1]), Packs(sizes[1], each))
    server, swaps = SERVER.with_(num_devices=2), Swaps("bfloat16")
    graph = TaskGraph.of(configuration, mode, 2, 4, swaps=swaps)
    alone, times = sizes[1] * (2 if mode == "dp" else 1) == 4, 2 if mode == "dp" else 1
    step = packs_step(graph, profile, server)
    volumes, kept = volumes_bytes(step), replay(step).peak_of("host").parts
    assert volumes["weights in"] == times * 2 * 8 and volumes["casts in"] == times * 2 * 24
    assert volumes["gradients out"] == times * (32 if alone else 56)
    assert kept["parameters"] == 56 + 24
    paper = estimate(graph, profile, server).volumes_bytes
    assert paper["WB in"] == volumes["weights in"] + volumes["casts in"]
    assert paper["dWB out"] == volumes["gradients out"]
    # The host converts what comes, if it is of casts, and what goes.
    timeline = packs_timeline(graph, profile, server)
    found = [item for item in timeline.simulation.work if item.kind in ("widen", "cast")]
    assert len(found) == 4 + alone * 4 * times and all(item.seconds > 0 for item in found)


def test_the_last_pack_comes_once():
    profile = profile_of([5, 6, 7, 8], [1] * 4)
    configuration = Configuration(Packs(2, ((0, 3),)), Packs(2, ((0, 2), (2, 3), (3, 4))))
    graph = TaskGraph.of(configuration, "pp", 2, 8)
    volumes = volumes_bytes(packs_step(graph, profile, SERVER.with_(num_devices=2)))
    assert volumes["weights in"] == 2 * 26 - 8 and volumes["gradients out"] == 26
    assert volumes["activation out"] == volumes["activation in"] == 8  # layer 2, 8 examples


@pytest.mark.parametrize(("u_f", "u_b"), [(4, 3), (3, 4), (5, 2), (2, 5), (4, 4)])
def test_sizes_of_the_directions_need_not_divide_each_other(u_f, u_b):
    """No byte goes twice: each boundary is passed once forward and once back."""
    profile = profile_of([5] * 4, [1, 2, 3, 4])
    configuration = Configuration(
        Packs(u_f, ((0, 1), (1, 3))), Packs(u_b, ((0, 2), (2, 3), (3, 4)))
    )
    graph = TaskGraph.of(configuration, "pp", 2, 13)
    volumes = volumes_bytes(packs_step(graph, profile, SERVER.with_(num_devices=2)))
    assert volumes["p2p"] == 13 * (2 + 4) + 13 * (4 + 3)
    assert volumes["activation out"] == volumes["activation in"] == 13 * 3
    assert volumes["batch in"] == 2 * 13 * 1
    assert sum(map(len, completed_by(*graph.sizes))) == len(graph.sizes[1])


def test_a_host_with_too_little_memory_is_said():
    graph, profile = one_layer_setting("pp", 2, 2)
    small = SERVER.with_(num_devices=2, host_memory_bytes=50)
    with pytest.raises(ExecutionError) as error:
        replay(packs_step(graph, profile, small))
    assert error.value.codes == ("step-host-memory",)
    assert packs_timeline(graph, profile, small).program_order.peak_of("host").peak_bytes > 50


def peak_of(graph: TaskGraph, profile: LayerProfile, server: Server, limit: int) -> int:
    """Of the device that needs most, below a limit."""
    timeline = packs_timeline(graph, profile, server.with_(usable_bytes=limit))
    return max(timeline.program_order.peak_bytes_per_device)


@settings(max_examples=10)
@given(problems(), st.floats(0, 1))
def test_no_prefetch_exceeds_the_limit(problem, at):
    least, most = (peak_of(*problem, limit) for limit in (1, 10**9))
    limit = round(least + at * max(0, most - least))
    assert peak_of(*problem, limit) <= max(limit, least)


@pytest.mark.parametrize("mode", ["pp", "dp"])
@pytest.mark.parametrize("off", [["offload"], ["offload", "grouping"]])
def test_prefetch_leaves_room_for_updates(mode, off):
    """State and the sum of the gradients come after the pass before which the next pack came."""
    profile = profile_of([50, 60, 70, 80, 90, 50], [1] * 6)
    configuration = Configuration(Packs(4, ((0, 4),)), Packs(4, ((0, 2), (2, 4), (4, 6))))
    server = SERVER.with_(num_devices=2)
    graph = TaskGraph.of(configuration, mode, 2, 16, Switches.without(off))
    least, most = (peak_of(graph, profile, server, limit) for limit in (1, 10**6))
    assert least < most
    for limit in range(least, most, 40):
        assert peak_of(graph, profile, server, limit) <= limit


@pytest.mark.parametrize("minibatch", [8, 9])
def test_no_device_runs_ahead_of_updates_that_wait_for_all(minibatch):
    """It would hold the next pack's weights and gradients beside those that are to be added."""
    profile = profile_of([86, 98, 98, 50], [4] * 4)
    packs = ((0, 1), (1, 3), (3, 4))
    configuration = Configuration(Packs(2, packs[:2]), Packs(2, packs))
    graph = TaskGraph.of(configuration, "dp", 2, minibatch, Switches.without(["offload"]))
    server = SERVER.with_(num_devices=2)
    predicted = packs_timeline(graph, profile, server).program_order.peak_bytes_per_device
    begins = begins_without_copies(graph, lambda task, examples: examples * len(task.layers))
    run = replay(build_step(graph, ProfileSizes(profile), server, begins))
    assert max(run.peak_bytes_per_device) == max(predicted)


def test_updates_that_need_all_gradients_keep_them_on_the_host():
    profile = replace(profile_of([50, 60, 70, 80], [1] * 4), summary_bytes=4)
    configuration = Configuration(Packs(4, ((0, 3),)), Packs(4, ((0, 2), (2, 3), (3, 4))))
    graph = TaskGraph.of(configuration, "pp", 2, 8)
    timeline = packs_timeline(graph, profile, SERVER.with_(num_devices=2))
    parts = timeline.program_order.peak_of("host").parts
    assert parts["gradients"] == parts["parameters"] == 260


@pytest.mark.parametrize(("mode", "lanes"), [("pp", 1), ("dp", 2)])
def test_gradients_of_what_later_layers_read_wait_for_the_update(mode, lanes):
    """On the host, from every device in data parallelism; its place is with its owner alone."""
    tied = replace(profile_of([50, 2, 3, 4], [1] * 4), b_bytes=(0, 0, 0, 50), shared=((50, 0, 3),))
    packs = tuple((i, i + 1) for i in range(4))
    configuration = Configuration(Packs(4, packs[:3]), Packs(4, packs))
    graph = TaskGraph.of(configuration, mode, 2, 8)
    timeline = packs_timeline(graph, tied, SERVER.with_(num_devices=2))
    parts = timeline.program_order.peak_of("host").parts
    assert parts["parameters"] == 59 and parts["optimizer"] == 2 * 59
    assert parts["gradients"] >= 2 * lanes * 50


@pytest.mark.parametrize("microbatch_size", [1, 2, 4, 8])
def test_gradients_are_added_to_those_of_the_micro_batches_before(microbatch_size):
    """All but the first, by the paper's rules as by instructions."""
    profile = profile_of([5, 6, 7, 8], [1] * 4)
    adding = replace(profile, add_seconds=(0.5, 0.25, 2.0, 0.0))
    packs = ((0, 2), (2, 3), (3, 4))
    configuration = Configuration(Packs(2, packs[:2]), Packs(microbatch_size, packs))
    graph = TaskGraph.of(configuration, "pp", 1, 8)
    rules = [sum(estimate(graph, each, SERVER).items.seconds) for each in (profile, adding)]
    works = [packs_timeline(graph, each, SERVER).simulation.work for each in (profile, adding)]
    steps = [sum(each.seconds for each in work) for work in works]
    expected = 2.75 * (8 // microbatch_size - 1)
    assert rules[1] - rules[0] == pytest.approx(expected, abs=1e-9)
    assert steps[1] - steps[0] == pytest.approx(expected, abs=1e-9)


def test_prefetch_takes_only_room_that_is_left():
    profile = profile_of([50] * 6, [1] * 6)
    configuration = Configuration(Packs(4, ((0, 4),)), Packs(4, ((0, 2), (2, 4), (4, 6))))
    graph = TaskGraph.of(configuration, "dp", 2, 16)

    def peak(limit: int, **off: bool) -> int:
        asked = replace(graph, switches=Switches(**off))
        server = SERVER.with_(num_devices=2, usable_bytes=limit)
        return max(replay(packs_step(asked, profile, server)).peak_bytes_per_device)

    least, most = peak(1, prefetch=False), peak(10**6)
    assert least < most
    for limit in (least, (least + most) // 2):
        assert least <= peak(limit) <= limit
    assert peak(1) == least  # below what a pass needs, nothing comes early
    assert peak(most) == most > peak(most - 1)  # to the last byte


def passes(step: Step) -> list[str]:
    """A line per program: what comes in before it (+), goes out (-) and is waited for (~)."""
    lines, words, slots = [], [], step.slots
    for instruction in step.instructions:
        match instruction:
            case Feed():
                words.append("+batch")
            case Copy(source, target):
                sign = "+" if slots[target].place.host is None else "-"
                words.append(sign + slots[source].what)
            case Wait(slot):
                words.append("~" + slots[slot].what)
            case Run(program):
                lines.append(" ".join([*words, *program.split()[:2]]))
                words = []
    return lines


PREFETCHED = """\
+weights +batch +batch forward 0
-activation +weights +activation forward 0
-activation ~activation +activation forward 1
~activation -activation ~activation +weights forward 1
~activation -activation ~activation +activation +activation +weights +activation +activation backward 2
~activation ~activation ~activation -gradient -gradient -gradients +gradient +gradient +weights +batch \
+batch backward 1
~activation ~activation ~gradient ~gradient ~gradient ~gradient -gradient -gradient -gradients ~gradients \
update 2
+gradient +gradient backward 0
~gradient ~gradient ~gradient ~gradient -gradients ~gradients update 1
~gradients update 0"""
ONE_BY_ONE = """\
+weights +batch forward 0
-activation ~activation +batch forward 0
-activation ~activation +weights +activation forward 1
~activation -activation ~activation +activation forward 1
~activation -activation ~activation +weights +activation +activation backward 2
~activation ~activation -gradient -gradient -gradients ~gradient ~gradient ~gradients update 2
+weights +activation +activation +gradient +gradient backward 1
~activation ~activation ~gradient ~gradient -gradient -gradient -gradients ~gradient ~gradient ~gradients \
update 1
+weights +batch +batch +gradient +gradient backward 0
~gradient ~gradient -gradients ~gradients update 0"""


@pytest.mark.parametrize(("off", "expected"), [((), PREFETCHED), (("prefetch",), ONE_BY_ONE)])
def test_what_the_next_pass_needs_comes_before_this_one_and_what_goes_out_is_awaited_after_it(
    off, expected
):
    """Inputs of two packs, kept and passed on through the host; one device."""
    configuration = Configuration(Packs(1, ((0, 1), (1, 2))), Packs(2, ((0, 1), (1, 2), (2, 3))))
    graph = TaskGraph.of(configuration, "pp", 1, 2, Switches.without(off))
    step = packs_step(graph, profile_of([50, 60, 70], [1, 2, 3]), SERVER.with_(num_devices=1))
    assert "\n".join(passes(step)) == expected


def test_an_input_that_is_not_kept_comes_before_its_pass_too():
    """Of the second micro-batch, beside the weights and the first."""
    configuration = Configuration(Packs(1, ((0, 1), (1, 2))), Packs(2, ((0, 2), (2, 3))))
    graph = TaskGraph.of(configuration, "pp", 1, 2)
    step = packs_step(graph, profile_of([50, 60, 70], [1, 2, 3]), SERVER.with_(num_devices=1))
    first = next(line for line in passes(step) if line.endswith("forward 1"))
    assert first.count("+activation") == 1 and "-activation ~activation" in first
    before = passes(step)[passes(step).index(first) - 1]
    assert before.count("+activation") == 1  # of the first, beside the pass that makes the second


def test_seconds_are_those_of_the_profile_and_bytes_over_shared_bandwidths():
    """Of updates on the host, which take as long as the profile says, and on devices."""
    profile = profile_of([5, 6, 7], [1] * 3)
    server = SERVER.with_(num_devices=2)
    configuration = Configuration(Packs(2, ((0, 2),)), Packs(1, ((0, 2), (2, 3))))
    swap, p2p = server.swap_bytes_per_second.value / 2, server.p2p_bytes_per_second.value
    for off, of_update in (((), 1e-3), (("offload",), 0.0)):
        graph = TaskGraph.of(configuration, "dp", 2, 4, Switches.without(off))
        step = packs_step(graph, profile, server)
        seconds = packs_seconds(step, graph, profile, server)
        for name, found in seconds.programs.items():
            kind, (first, stop), size, *_ = step.programs[name].call
            expected = {
                "forward": 2 * (1e-3 + 1e-4 * size),
                "accumulate": (stop - first) * 3 * (1e-3 + 1e-4 * size),
                "backward": (stop - first) * 3 * (1e-3 + 1e-4 * size),
                "update": (stop - first) * of_update,
                "reduce": sum(profile.w_bytes[first:stop]) / p2p,  # half of it, there and back
            }[kind]
            assert found == pytest.approx(expected), name
        device, other, host = (step.places[i] for i in (0, 2, 1))
        copy = Copy(0, 1, 100, "")
        for source, target in ((device, host), (host, device), (None, device)):
            assert seconds.transfer(copy, 100, source, target) == 100 / swap
        assert seconds.transfer(copy, 100, device, other) == 100 / p2p


@pytest.mark.parametrize(("devices", "off"), [(1, ()), (2, ("p2p",)), (2, ())])
def test_between_packs_what_stays_on_a_device_or_may_not_leave_it_goes_over_the_host(devices, off):
    configuration = Configuration(Packs(2, ((0, 1), (1, 2))), Packs(2, ((0, 1), (1, 2), (2, 3))))
    graph = TaskGraph.of(configuration, "pp", devices, 4, Switches.without(off))
    profile = profile_of([5, 6, 7], [1, 2, 3])
    volumes = volumes_bytes(packs_step(graph, profile, SERVER.with_(num_devices=devices)))
    passed = 4 * (2 + 3) + 4 * (3 + 2)  # forward and back
    if devices == 2 and not off:
        assert volumes["p2p"] == passed and "gradient out" not in volumes
    else:
        assert volumes["gradient out"] == volumes["gradient in"] == 4 * (3 + 2)
        assert volumes["activation out"] == 4 * (2 + 3) and "p2p" not in volumes
