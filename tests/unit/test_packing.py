"""Packings on small layers, by hand; the wide search against the paper's; what is infeasible."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import PlanError
from capture.machine.server import Server
from capture.measured.layer_passes import SizedLayers
from capture.measured.layer_profile import Casts, LayerProfile
from capture.plan.task_graph import Swaps, Switches
from capture.quantities import format_seconds
from recommender.harmony import PacksQuestion, harmony
from recommender.harmony.bound import least_seconds
from recommender.harmony.packing import (
    PACKINGS,
    LeastMaxTime,
    _cut_nearest_time,
    _fewest,
    balanced_memory,
    balanced_time,
    constant,
    greedy,
    greedy_reverse,
    of_length,
    reused,
)
from recommender.harmony.problem import PacksProblem
from recommender.harmony.search import search
from recommender.harmony.wide import wide_choices
from recommender.harmony.within import plan_of

PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"
SERVER = Server.load("gtx1080ti-x4")


def layers(seconds, memory=None, inputs=None) -> SizedLayers:
    count = len(seconds)
    return SizedLayers(
        np.array(seconds, dtype=float),
        np.array(memory or [10] * count),
        np.array(inputs or [0] * count),
    )


def problem(name: str, **changes) -> PacksProblem:
    asked = {"limit": 2_200_000_000, "devices": 2, "mode": "pp", "minibatch": 20} | changes
    server = SERVER.with_(num_devices=asked["devices"], usable_bytes=asked["limit"])
    given = {
        key: value
        for key, value in changes.items()
        if key not in ("limit", "devices", "mode", "minibatch")
    }
    return PacksProblem(
        LayerProfile.load(PROFILES / f"{name}.json"),
        server,
        asked["mode"],
        asked["minibatch"],
        **given,
    )


def test_left_insertion_leaves_the_first_pack_short_and_nearest_does_not():
    six = layers([1] * 6)
    assert balanced_time(six, 6, 30) == ((0, 1), (1, 3), (3, 6))
    assert _fewest(six, 6, 20, _cut_nearest_time) == ((0, 2), (2, 4), (4, 6))


def test_a_pack_of_exactly_the_limit_fits_balanced_but_not_greedy():
    two = layers([1, 1, 1, 1])
    assert balanced_time(two, 4, 30) == ((0, 1), (1, 4)) == balanced_memory(two, 4, 30)
    assert balanced_time(two, 4, 29) == ((0, 1), (1, 2), (2, 4)) != balanced_time(two, 4, 30)
    assert greedy(two, 4, 20) == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert greedy(two, 4, 21) == ((0, 2), (2, 4))


def test_inputs_inside_a_pack_are_counted_once():
    shared = layers([1, 1, 1], memory=[10, 10, 10], inputs=[4, 4, 4])
    assert shared.pack_bytes(0, 3) == 22
    assert constant(shared, 3, 22) == ((0, 3),) and constant(shared, 3, 21) == ((0, 1), (1, 3))
    assert reused(((0, 2), (2, 3)), shared, 17) == ((0, 2),)
    assert reused(((0, 2), (2, 3)), shared, 16) is None


def test_greedy_leaves_what_is_over_at_the_end_or_the_beginning():
    seven = layers([1] * 7)
    assert greedy(seven, 7, 31) == ((0, 3), (3, 6), (6, 7))
    assert greedy_reverse(seven, 7, 31) == ((0, 1), (1, 4), (4, 7)) == of_length(7, 3)


def test_empty_packs_are_no_packs():
    # Every cut of the long first layer is left of it.
    assert balanced_time(layers([100, 1, 1, 1]), 4, 20) is None
    assert balanced_time(layers([100, 1, 1, 1]), 4, 40) == ((0, 4),)
    assert _fewest(layers([100, 1, 1, 1]), 4, 30, _cut_nearest_time) == ((0, 1), (1, 4))


@pytest.mark.parametrize("name", PACKINGS)
def test_no_packing_holds_a_layer_above_the_limit(name):
    assert PACKINGS[name](layers([1, 1, 1], memory=[10, 40, 10]), 3, 30) is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(6, 30))
def test_least_max_time_is_the_least_of_all_splits(seconds, limit):
    total = len(seconds)
    some = layers(seconds, memory=[5] * total)
    fits = np.array(
        [
            [first < stop and some.pack_bytes(first, stop) <= limit for stop in range(total + 1)]
            for first in range(total + 1)
        ]
    )
    balanced = LeastMaxTime(some, fits)
    counts = (max(1, total - 1), total)  # a prefix, too
    answers = [(count, *one) for count in counts for one in enumerate(balanced.packs(count), 1)]
    for count, number, found in answers:
        splits = [
            tuple(pairwise((0, *cuts, count))) for cuts in combinations(range(1, count), number - 1)
        ]
        longest = [
            max(some.time(*pack) for pack in split)
            for split in splits
            if all(fits[pack] for pack in split)
        ]
        assert (found is None) == (not longest)
        if found:
            assert max(some.time(*pack) for pack in found) == min(longest)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("devices", [2, 4])
def test_wide_is_never_slower_and_keeps_whole_tasks_below_the_limit(devices, prefetch):
    asked = problem("toy6", devices=devices, switches=Switches(prefetch=prefetch))
    paper, wide = search(asked, "paper"), search(asked, "wide").best
    assert wide.task_bytes <= asked.limit_bytes
    assert wide.seconds <= min(p.seconds for p in paper.points if p.task_bytes <= asked.limit_bytes)
    if (devices, prefetch) != (2, False):  # where the paper's own choice is above the limit
        assert paper.best.task_bytes > asked.limit_bytes
    assert wide.seconds < paper.best.seconds


def test_every_task_of_what_wide_weighs_is_below_the_limit_with_what_it_keeps():
    asked = problem("toy6", limit=700_000_000)
    choices = wide_choices(asked, float("inf"))
    peaks = [asked.estimate(choice.configuration).peak_bytes for choice in choices]
    assert 0.98 * asked.limit_bytes < max(peaks) <= asked.limit_bytes


@pytest.mark.parametrize("prefetch", [False, True])
def test_bounds_stay_below_what_is_streamed_and_shared(prefetch):
    """Where a device has one micro-batch, and where it has several."""
    profile = LayerProfile.load(PROFILES / "toy6.json")
    half = tuple(w // 2 for w in profile.w_bytes)
    casts = {"bfloat16": Casts(half, profile.b_bytes, half, half)}
    plain = problem("toy6", mode="dp", devices=4, switches=Switches(prefetch=prefetch))
    seconds = {}
    for swaps in (Swaps(), Swaps("bfloat16"), Swaps(sharded=True), Swaps("bfloat16", True)):
        asked = replace(plain, profile=replace(profile, casts=casts), swaps=swaps)
        choices = list(asked.choices())
        for choice in choices:
            found = asked.estimate(choice.configuration).seconds
            assert 0 < least_seconds(asked, choice.configuration) <= found
        paper, bounded = search(asked, "paper").best, search(asked, "bounded").best
        assert paper == bounded
        assert search(asked, "wide").best.seconds > 0
        seconds[swaps] = paper.seconds
    assert seconds[Swaps("bfloat16", True)] < min(seconds[Swaps("bfloat16")], seconds[Swaps()])
    assert seconds[Swaps(sharded=True)] < seconds[Swaps()]


def test_points_that_hold_the_model_rank_by_time_or_first():
    by_time = problem("toy6", limit=8 * 10**9)
    first = problem("toy6", limit=8 * 10**9, single_first=True)
    assert search(by_time, "paper").fits_one_device is not None
    for algorithm in ("paper", "bounded"):
        best = search(first, algorithm).best
        assert best.choice.single and best.configuration.forward.packs == ()
        assert best == search(first, "paper").fits_one_device
    point = search(first, "paper").best
    assert (
        point.configuration.forward.microbatch_size == point.configuration.backward.microbatch_size
    )


def test_equal_passes_use_the_backward_packs():
    asked = problem(
        "bert_96",
        limit=9 * 10**9,
        devices=4,
        minibatch=64,
        equal_passes=True,
        switches=Switches(prefetch=False),
    )
    equal, free = (
        search(asked),
        search(
            problem(
                "bert_96",
                limit=9 * 10**9,
                devices=4,
                minibatch=64,
                switches=Switches(prefetch=False),
            )
        ),
    )
    for point in equal.points:
        one = point.configuration
        assert one.forward.microbatch_size == one.backward.microbatch_size
        assert one.forward.packs == one.backward.packs[:-1]
    assert equal.best.seconds >= free.best.seconds


def test_the_expert_picks_one_power_of_two_and_one_length():
    (point,) = search(
        problem(
            "transformer15",
            limit=900_000_000,
            devices=4,
            minibatch=32,
            forward_packings=("expert",),
            backward_packings=("expert",),
        )
    ).points
    size, lengths = (
        point.configuration.backward.microbatch_size,
        point.configuration.backward.lengths,
    )
    assert size & (size - 1) == 0 and len(set(lengths[1:])) == 1
    assert point.configuration.forward.lengths == lengths[:-1]


def test_sizes_divide_every_share():
    assert problem("toy6", mode="dp", minibatch=40).sizes("forward") == [1, 2, 4, 5, 10, 20]
    assert problem("toy6", mode="dp", minibatch=39).sizes("forward") == [1]
    assert problem("toy6", minibatch=7).sizes("backward") == [1, 7]


def test_nothing_fits_is_a_result():
    found = search(problem("transformer15", limit=200_000_000, devices=4, minibatch=32))
    assert found.status == "infeasible" and found.best is None


def test_unknown_algorithms_are_refused():
    with pytest.raises(PlanError) as error:
        search(problem("toy6"), "best")
    assert error.value.codes == ("search-algorithm",)


def test_wide_judges_its_best_as_instructions():
    server = SERVER.with_(num_devices=4, usable_bytes=1_500_000_000)
    profile = LayerProfile.load(PROFILES / "toy6.json")
    answer = harmony(PacksQuestion(profile, server, 20, algorithm="wide"))
    first, chosen = answer.proof.best, answer.plan.prediction
    assert chosen.paper.step_seconds > first.seconds
    asked = PacksQuestion(profile, server, 20)
    other = plan_of(asked, "pp", first.configuration).prediction
    assert chosen.step.step_seconds < other.step.step_seconds
    said = answer.why.summary
    assert "The paper's rules rank 1 before it" in said
    ours, theirs = (format_seconds(one.step.step_seconds) for one in (chosen, other))
    assert f"{ours} a step as instructions" in said and f"{ours} and that {theirs}" in said
