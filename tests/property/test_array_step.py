"""Steps of arrays: a limit is kept at any link speed, and what is fetched early has its room."""

from __future__ import annotations

from array_kit import MACHINE, Kit
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.plan.array import Decision
from capture.step.multiplexed import build_array, lifetimes, peak_of
from capture.step.program import Copy
from capture.step.sub_array import movable, recomputable
from capture.step.timeline import LinkTimes, Seconds, simulate_step
from recommender.mutwo import ArrayProblem, search
from recommender.mutwo.problem import ways

LINKS = LinkTimes(MACHINE.cluster, MACHINE.rates)


@st.composite
def decided(draw, layers):
    """Sub-arrays of a chain with choices drawn for each bundle."""
    found = []
    for models in draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])):
        chain = Kit(layers).sub_array(models)
        again = recomputable(chain)
        decisions = []
        for number in movable(chain):
            choices = ["retain", "swap", "recompute"][: 3 if number in again else 2]
            choice = draw(st.sampled_from(choices))
            if choice != "retain":
                ahead = draw(st.integers(0, 3))
                decisions.append(Decision(chain.bundles[number].name, choice, ahead))
        found.append(lifetimes(chain, decisions))
    return found


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 4), st.floats(0, 1), st.sampled_from([0.1, 1.0, 10.0]))
def test_a_limit_is_kept_in_program_order_and_over_time(data, layers, between, slower):
    arrays, order = (
        data.draw(decided(layers)),
        data.draw(st.sampled_from(["multiplexed", "in turn"])),
    )
    kit = Kit(layers)
    free = peak_of(build_array(arrays, order, kit).replay(), 0)[0]
    least = peak_of(build_array(arrays, order, kit, 1).replay(), 0)[0]
    limit = round(least + between * max(0, free - least))
    steps = build_array(arrays, order, kit, limit)
    assert peak_of(steps.replay(), 0)[0] <= max(least, limit)
    for built, ledger in zip(steps.all, steps.replay(), strict=True):
        seconds = Seconds(
            built.seconds,
            lambda *given: slower * LINKS.seconds(*given),
            MACHINE.rates.host.duplex,
        )
        peak = ledger.peak_of(0).peak_bytes
        timeline = simulate_step(built.step, seconds, feeds_ahead=0)
        assert timeline.memory_of(0).peak.peak_bytes <= peak
        assert simulate_step(built.step, seconds, capacity_bytes={0: peak}).step_seconds > 0


def test_two_bodies_in_a_row_are_one_training():
    """What a body leaves is what the next one begins with, whatever is swapped."""
    chain = Kit(3).sub_array(2)
    swapped = [Decision(chain.bundles[n].name, "swap") for n in movable(chain)]
    array = lifetimes(chain, swapped)
    steps = build_array([array, array], "multiplexed", Kit(3), 1)
    state = {name for name, n in steps.body.step.persistent.items() if _is_state(steps.body, n)}
    carried = set(steps.body.step.persistent) - state
    assert carried and set(steps.prologue.step.made) == carried
    assert set(steps.epilogue.step.persistent) == carried | state
    end = steps.replay()[1].live_bytes
    before = [steps.body.step.slots[n] for n in steps.body.step.persistent.values()]
    assert end[0] == sum(slot.nbytes for slot in before if slot.place.host is None)
    assert end["host"] == sum(slot.nbytes for slot in before if slot.place.host)


def _is_state(built, slot) -> bool:
    return built.step.slots[slot].category in ("parameters", "optimizer state")


def test_what_is_fetched_ahead_is_issued_before_what_runs_in_between():
    chain = Kit(3).sub_array(1)
    names = [chain.bundles[n].name for n in movable(chain)]
    # Two segments ahead, it would have no room beside the first backward pass.
    for ahead, before in ((0, 0), (1, 1), (2, 1)):
        array = lifetimes(chain, [Decision(names[0], "swap", ahead)])
        retained = peak_of(build_array([lifetimes(chain, [])], "in turn", Kit(3)).replay(), 0)[0]
        step = build_array([array], "in turn", Kit(3), retained - 150).body.step
        labels = [getattr(each, "label", "") for each in step.instructions]
        fetch = next(
            i
            for i, each in enumerate(step.instructions)
            if isinstance(each, Copy) and step.slots[each.source].place.host
        )
        assert sum("backward" in label for label in labels[fetch:]) == before + 1


def test_the_search_keeps_every_limit_from_all_to_the_least():
    """And an answer, once there is none, does not come back as limits fall."""
    kit = Kit(3)
    whole = peak_of(build_array([lifetimes(kit.sub_array(4), [])], "in turn", kit).replay(), 0)[0]
    fitted = []
    for divisor in (1, 2, 4, 10):
        limit = whole // divisor
        result = search(ArrayProblem(kit, 4, MACHINE, limit))
        best = result.best
        fitted.append(best.fits)
        assert best.fits == (best.evaluation.peak_bytes <= limit)
        assert result.bound_seconds <= best.evaluation.seconds
        if best.fits:
            assert not best.evaluation.excess_bytes
    assert fitted == sorted(fitted, reverse=True) and fitted[0] and not fitted[-1]


def test_ways_have_every_model_once():
    assert [(way.name, way.partition) for way in ways(3)] == [
        ("multiplexed", ((0, 1), (2,))),
        ("in turn", ((0, 1), (2,))),
        ("all fused", ((0, 1, 2),)),
        ("none fused", ((0,), (1,), (2,))),
    ]
    assert [way.name for way in ways(2)] == ["multiplexed", "all fused", "none fused"]
    assert [way.name for way in ways(1)] == ["all fused"]
