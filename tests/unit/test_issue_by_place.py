"""What a host issues while some memories wait for their copies: everything once, for each memory and
each slot in the order of the list, and nothing in a memory that waits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from capture.runtime.dispatch import BoundStep
from capture.runtime.frame import Frame
from capture.step.program import Copy, Feed, Free, Place, Run, Step, Wait
from tests.property.test_pack_passes import example, finished
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


def held_up(place: Place) -> tuple[int | str, ...]:
    """Nobody knows the capacity of the hosts of pipelines."""
    known = place.host is None or place.host.capacity_bytes is not None
    return place.memories if known else (place.name,)


def packs(*off: str, mode: str = "pp") -> Step:
    return finished(example(*off, mode=mode).resided(10**6))


def room_of(step: Step, each) -> set[int | str]:
    """Where it takes or gives back room, sends from a device, or is waited."""
    slots = step.slots
    match each:
        case Wait(place=place):
            return {*held_up(place)}
        case Run(program=name, outputs=made):
            return {*held_up(step.programs[name].place)}.union(
                *(held_up(slots[slot].place) for slot in made)
            )
        case Copy(source=source, target=target):
            sender = () if slots[source].place.host else held_up(slots[source].place)
            return {*sender, *held_up(slots[target].place)}
        case Free(slots=freed):
            return {memory for slot in freed for memory in held_up(slots[slot].place)}
        case Feed(slot=slot):
            return {*held_up(slots[slot].place)}


STEPS = {
    "gpipe": lambda: held(BOTH, "gpipe"),
    "1f1b": lambda: held(BOTH, "1f1b"),
    "packs": packs,
    "packs, what they hand on over the host": lambda: packs("p2p", "prefetch"),
    "packs in data parallelism, updated there": lambda: packs("offload", mode="dp"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(5))
def test_every_memory_gets_its_own_in_order(name, seed):
    step, generator = STEPS[name](), random.Random(seed)
    order = issued(step, lambda number: generator.choice([0, 0, 3, 30, None]))
    assert sorted(order) == list(range(len(step.instructions)))
    assert name == "1f1b" or order != sorted(order)
    hosts = {held_up(place)[0] for place in step.places if place.host}
    assert hosts
    for memory in (0, 1, *hosts):
        own = [n for n in order if memory in room_of(step, step.instructions[n])]
        assert own == sorted(own)
    ended, changed_by, readers = set[int](), dict[int, int](), dict[int, int]()
    for number in order:
        each = step.instructions[number]
        gone = each.slots if isinstance(each, Free) else each.consumed
        assert ended.isdisjoint({*each.used, *gone}.difference(each.begun))
        for slot in each.used:
            assert changed_by.get(slot, -1) < number
            readers[slot] = max(number, readers.get(slot, -1))
        for slot in (*each.made, *gone):
            assert readers.get(slot, -1) <= number
            changed_by[slot] = number
        ended = ended.union(gone).difference(each.made)


def test_in_the_order_of_the_list_where_every_copy_has_ended():
    step = held(BOTH)
    assert issued(step, lambda number: 0) == list(range(len(step.instructions)))


def test_a_device_goes_on_while_another_waits():
    """No copy of the first stage's ends by itself: the second begins before the host waits."""
    step = held(("activations",))
    first = {n for n, e in enumerate(step.instructions) if 0 in room_of(step, e)}
    order = issued(step, lambda number: None if number in first else 0)
    wait = next(n for n in order if isinstance(step.instructions[n], Wait))
    ahead = [n for n in order[: order.index(wait)] if n > wait]
    assert ahead and first.isdisjoint(ahead)
