"""What a host issues while some devices wait for their copies: everything once, for each device in the
order of the list, and nothing of a device that waits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from capture.runtime.dispatch import BoundStep, Frame
from capture.step.program import Copy, Feed, Free, Run, Step, Wait
from tests.property.test_stage_offload import held

BOTH = ("activations", "optimizer")


@dataclass
class Array:
    """One that is there after so many looks at it; None: when the host waits for it."""

    looks: int | None

    def is_ready(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= self.looks > 0
        return self.looks == 0


def issued(step: Step, looks) -> list[int]:
    """The order in which the instructions are issued; ``looks`` gives for the number of a copy how
    often it is looked at in vain. A wait is issued when its copy has ended, or the host waits."""
    bound = BoundStep.__new__(BoundStep)
    bound.step = step
    order: list[int] = []

    def action_of(number, each):
        def action(frame: Frame) -> None:
            order.append(number)
            match each:
                case Copy(target=slot) | Feed(slot=slot):
                    frame.slots[slot] = [Array(looks(number))]
                case Wait(slot=slot):
                    frame.slots[slot][0].looks = 0

        return action

    actions = [action_of(number, each) for number, each in enumerate(step.instructions)]
    bound._issue_by_place(Frame([None] * len(step.slots), (), []), actions)
    return order


def devices_of(step: Step, each) -> set[int]:
    match each:
        case Run(program=name):
            return {*step.programs[name].place.devices}
        case Copy(source=source, target=target):
            slots = [source, target]
        case Free(slots=freed):
            slots = [*freed]
        case Feed(slot=slot) | Wait(slot=slot):
            slots = [slot]
    return {device for slot in slots for device in step.slots[slot].place.devices}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(5))
def test_every_device_gets_its_own_in_order(schedule, seed):
    step, generator = held(BOTH, schedule), random.Random(seed)
    order = issued(step, lambda number: generator.choice([0, 0, 3, 30, None]))
    assert sorted(order) == list(range(len(step.instructions)))
    assert schedule == "1f1b" or order != sorted(order)
    for device in (0, 1):
        own = [n for n in order if device in devices_of(step, step.instructions[n])]
        assert own == sorted(own)


def test_in_the_order_of_the_list_where_every_copy_has_ended():
    step = held(BOTH)
    assert issued(step, lambda number: 0) == list(range(len(step.instructions)))


def test_a_device_goes_on_while_another_waits():
    """No copy of the first stage's ends by itself: the second begins before the host waits."""
    step = held(("activations",))
    first = {n for n, e in enumerate(step.instructions) if 0 in devices_of(step, e)}
    order = issued(step, lambda number: None if number in first else 0)
    wait = next(n for n in order if isinstance(step.instructions[n], Wait))
    ahead = [n for n in order[: order.index(wait)] if n > wait]
    assert ahead and first.isdisjoint(ahead)
