"""What waits to be pulled stands in the list: bounded, booked, and never a reason to wait for
ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from capture.plan.schedule import SCHEDULES
from capture.step.evaluation import build_evaluation
from capture.step.offers import Crossing, OfferedStep, with_offers
from capture.step.pipeline import build_step
from capture.step.program import Copy, Feed, Free, Place, Program, Run, Step, Wait, replay
from tests.property import test_step, test_step_tables
from tests.step_judge import check_lifetimes

steps = st.one_of(test_step.steps(), test_step_tables.steps())
build = st.sampled_from([build_step, build_evaluation])


def processes_of(step: Step, slot: int, num_devices: int) -> set[int]:
    """Two devices make a process."""
    return {device // num_devices for device in step.slots[slot].place.devices}


def crossings_of(step: Step, cut: bool, num_devices: int) -> dict[int, Crossing]:
    found = {}
    for number, copy in enumerate(step.instructions):
        if isinstance(copy, Copy):
            sources = processes_of(step, copy.source, num_devices)
            targets = processes_of(step, copy.target, num_devices)
            pairs = {(a, b) for a in sources for b in targets if a != b}
            if pairs:
                device = step.slots[copy.source].place.devices[0]
                found[number] = Crossing(frozenset(pairs), {device: 7} if cut else {})
    return found


@settings(max_examples=20)
@given(steps, build, st.integers(1, 3), st.booleans(), st.integers(1, 2), st.randoms())
def test_offers_are_bounded_booked_and_end(made, build, window, cut, num_devices, chance):
    check_offers(build(*made), window, cut, num_devices, chance)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=3, phases=[Phase.generate])
@given(st.data())
def test_one_offer_at_a_time_is_enough_for_every_schedule(name, data):
    stages, schedule = data.draw(test_step_tables.steps([name]))
    check_offers(build_step(stages, schedule), 1, data.draw(st.booleans()), 1, random.Random(name))


def check_offers(
    step: Step, window: int, cut: bool, num_devices: int, chance: random.Random
) -> None:
    crossings = crossings_of(step, cut, num_devices)
    offered = with_offers(step, crossings, window)
    new = offered.step
    # A sender may wait for a copy whose target its receiver has used up.
    check_lifetimes(
        replace(new, instructions=[each for each in new.instructions if not isinstance(each, Wait)])
    )
    assert [each for each in new.instructions if isinstance(each, Run)] == [
        each for each in step.instructions if isinstance(each, Run)
    ]
    assert sorted(offered.crossings.values()) == sorted(crossings)
    check_window(offered, crossings, window)
    check_no_deadlock(offered, crossings, num_devices, chance)
    before, after = replay(step), replay(new)
    assert before.live_bytes == after.live_bytes
    for here, there in zip(before.peak_bytes_per_device, after.peak_bytes_per_device, strict=True):
        assert here <= there
    passes = replace(new, instructions=new.instructions[: new.num_passes])
    waits = Counter(isinstance(each, Wait) for each in passes.instructions)
    copies = [n for n in offered.crossings if n < new.num_passes]
    assert waits[True] == len(copies), "nothing that was offered in the passes waits behind them"


def check_window(offered: OfferedStep, crossings: dict[int, Crossing], window: int) -> None:
    waiting: dict[int, tuple[int, Crossing]] = {}  # by target: the source
    for number, instruction in enumerate(offered.step.instructions):
        match instruction:
            case Copy(source=source, target=target) if number in offered.crossings:
                waiting[target] = source, crossings[offered.crossings[number]]
                pairs = Counter(pair for _, crossing in waiting.values() for pair in crossing.pairs)
                assert max(pairs.values()) <= window
            case Wait(slot=slot):
                del waiting[slot]
            case Run(donated=gone) | Free(slots=gone):
                held = {source for source, _ in waiting.values()}
                assert not held.intersection(gone), "what is offered is there until it was pulled"
    assert not waiting


def check_no_deadlock(
    offered: OfferedStep, crossings: dict[int, Crossing], num_devices: int, chance: random.Random
) -> None:
    """Whichever process goes on next: a sender waits until its receivers have executed the copy,
    and nobody waits for anything else."""
    instructions = offered.step.instructions
    count = 1 + (offered.step.num_devices - 1) // num_devices
    at, copy_of, last = [0] * count, {}, {}
    for number, instruction in enumerate(instructions):
        if number in offered.crossings:
            assert isinstance(instruction, Copy)
            last[instruction.target] = number
        elif isinstance(instruction, Wait):
            copy_of[number] = last[instruction.slot]

    def may_go_on(process: int) -> bool:
        if at[process] == len(instructions):
            return False
        copy = copy_of.get(at[process])
        pairs = crossings[offered.crossings[copy]].pairs if copy is not None else ()
        return all(at[b] > copy for a, b in pairs if a == process)  # type: ignore[operator]

    while able := [process for process in range(count) if may_go_on(process)]:
        process = chance.choice(able)
        at[process] += 1
        while may_go_on(process) and at[process] not in copy_of:
            at[process] += 1
    assert at == [len(instructions)] * count


def test_a_program_takes_over_only_what_was_pulled():
    places = Place("here", (0,)), Place("there", (1,))
    step = Step(places, {"double": Program("double", places[0], 0)})
    source, target, made = (
        step.slot(name, place, "activations", 4)
        for name, place in (("source", places[0]), ("target", places[1]), ("made", places[0]))
    )
    step.instructions = [
        Feed(source, 0, (0,), "feed"),
        Copy(source, target, 4, "send"),
        Run("double", ((source,),), (made,), (source,), "double"),
        Free((target, made)),
        Free(()),
    ]
    step.num_passes = len(step.instructions)
    offered = with_offers(step, {1: Crossing(frozenset({(0, 1)}))}, window=3)
    assert offered.step.instructions[2:4] == [Wait(target), step.instructions[2]]
