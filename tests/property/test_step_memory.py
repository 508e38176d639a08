"""Host memory in a step: what a copy holds, what it waits for, and what a host has room for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import capture.step.program
from capture.errors import ExecutionError
from capture.step.ledger import Peak
from capture.step.program import (
    Copy,
    Feed,
    Free,
    Host,
    Place,
    Program,
    Run,
    Slot,
    Step,
    Wait,
    replay,
)
from capture.step.run_ahead import waits
from capture.step.timeline import Seconds, StepTimeline, simulate_step

HOST = Host("host", 10**6)
#: A device may be in several places; the hosts' places are the same memory.
DEVICES = (Place("a", (0,)), Place("also a", (0,)), Place("b", (1,)), Place("both", (0, 1)))
HOSTS = (Place("host of a", (0,), HOST), Place("host of both", (0, 1), HOST))
speeds = st.fractions(Fraction(1, 10), 10)


class Writer:
    """Writes a step of random instructions that obeys the rules of the language."""

    def __init__(self, draw, by_place: bool = False):
        self.draw, self.by_place = draw, by_place
        self.step = Step((*DEVICES, *HOSTS))
        self.alive: list[int] = []
        #: Copies, each with a slot that they may still use: its memory has not waited.
        self.copies: list[tuple[Copy, int]] = []
        for place in self.step.places:
            self.step.programs[place.name] = Program("work", place, draw(st.integers(0, 50)))

    def new(self, place: Place) -> int:
        slots = self.step.slots
        slot = self.step.slot(f"slot {len(slots)}", place, "any", self.draw(st.integers(1, 30)))
        self.alive.append(slot)
        return slot

    def end(self, slots) -> None:
        """What was copied into a slot that ends is nowhere to be waited for any more."""
        for copy, slot in [c for c in self.copies if c[1] in slots or c[0].target in slots]:
            self.copies.remove((copy, slot))
            place = self.step.slots[slot].place if self.by_place else None
            self.step.instructions.append(Wait(copy.target, place))
        for slot in slots:
            self.alive.remove(slot)

    def some(self, slots) -> tuple[int, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(slots), unique=True))) if slots else ()

    def feed(self) -> None:
        slot = self.new(self.draw(st.sampled_from(DEVICES)))
        self.step.instructions.append(Feed(slot, 0, (0,), "feed"))
        self.run(self.step.slots[slot].place, (slot,))

    def run(self, place: Place | None = None, read: tuple[int, ...] = ()) -> None:
        place = place or self.draw(st.sampled_from(self.step.places))
        here = [slot for slot in self.alive if self.step.slots[slot].place == place]
        read = (*read, *(slot for slot in self.some(here) if slot not in read))
        donated = self.some(read)
        self.end(donated)
        outputs = tuple(self.new(place) for _ in range(self.draw(st.integers(0, 2))))
        self.step.instructions.append(Run(place.name, (read,), outputs, donated, "work"))

    def copy(self, targets: tuple[Place, ...]) -> None:
        """From a device to its host, or back."""
        target_place = self.draw(st.sampled_from(targets))
        sources = [
            slot
            for slot in self.alive
            if self.step.slots[slot].place.devices == target_place.devices
            and bool(self.step.slots[slot].place.host) != bool(target_place.host)
        ]
        if sources:
            source = self.draw(st.sampled_from(sources))
            nbytes = self.step.slots[source].nbytes
            slot = Slot(f"slot {len(self.step.slots)}", target_place, "any", nbytes)
            self.step.slots.append(slot)
            self.alive.append(len(self.step.slots) - 1)
            copy = Copy(source, self.alive[-1], nbytes, "copy")
            self.copies += [(copy, copy.source), (copy, copy.target)]
            self.step.instructions.append(copy)

    def free(self) -> None:
        if slots := self.some(self.alive):
            self.end(slots)
            self.step.instructions.append(Free(slots))


@st.composite
def streamed_steps(draw, by_place: bool = False) -> Step:
    writer = Writer(draw, by_place)
    for place in writer.step.places:
        slot = writer.step.keep(f"state of {place.name}", place, "any", draw(st.integers(1, 30)))
        writer.alive.append(slot)
    for _ in range(draw(st.integers(1, 25))):
        what = draw(st.sampled_from(["feed", "run", "run", "out", "in", "free"]))
        match what:
            case "out":
                writer.copy(HOSTS)
            case "in":
                writer.copy(DEVICES)
            case _:
                getattr(writer, what)()
    return writer.step


def simulated(step: Step, speed: Fraction | int, seconds: dict[str, int]) -> StepTimeline:
    """Links of one byte a second, times ``speed``; feeds in program order."""
    transfer = Seconds(seconds, lambda instruction, nbytes, *_: nbytes / Fraction(speed))
    return simulate_step(step, transfer, feeds_ahead=0)


@given(streamed_steps(), speeds, st.lists(st.integers(0, 99), min_size=6, max_size=6))
def test_over_time_no_memory_holds_more_than_the_ledger_books(step, speed, seconds):
    times = dict(zip(step.programs, seconds, strict=True))
    timeline = simulated(step, speed, times)
    for memory in (0, 1, "host"):
        booked = timeline.program_order.peak_of(memory).peak_bytes
        assert timeline.memory_of(memory).peak.peak_bytes <= booked
        held = timeline.program_order.live_bytes[memory]
        assert timeline.memory_of(memory).samples[-1][1] == held


@given(streamed_steps(by_place=True), speeds, st.lists(st.integers(0, 99), min_size=6, max_size=6))
def test_over_time_no_memory_holds_more_where_it_alone_waits(step, speed, seconds):
    """Others go on meanwhile."""
    timeline = simulated(step, speed, dict(zip(step.programs, seconds, strict=True)))
    for memory in (0, 1, "host"):
        booked = timeline.program_order.peak_of(memory).peak_bytes
        assert timeline.memory_of(memory).peak.peak_bytes <= booked
    everyone = [Wait(i.slot) if isinstance(i, Wait) else i for i in step.instructions]
    waiting = simulated(replace(step, instructions=everyone), speed, dict(timeline.program_seconds))
    assert timeline.step_seconds <= waiting.step_seconds


def test_devices_that_wait_for_nothing_go_on():
    """The first device sends what it made to its host, which takes 40, and works again, 10; the
    second works at once, and what came to it over the first, in its turn, behind that."""
    places = Place("a", (0,)), Place("b", (1,)), Place("host of a", (0,), HOST)
    a, b, host = places
    ends = {}
    for who in (None, a):
        step = Step(places, {place.name: Program("work", place, 1) for place in (a, b)})
        made, other, own = (step.slot(name, a, "any", 10) for name in ("made", "other", "own"))
        kept, sent = step.slot("kept", host, "any", 10), step.slot("sent", b, "any", 10)
        step.instructions = [
            Run("a", (), (made, other), (), "first"),
            Copy(made, kept, 10, "out"),
            *(Wait(kept, who and ends) for ends in (a, host)),
            Free((made, kept)),
            Run("b", (), (), (), "free to go"),
            Run("a", (), (own,), (), "behind"),
            Copy(other, sent, 10, "send"),
            Run("b", (), (), (), "behind what was sent"),
            Free((other, own, sent)),
        ]
        seconds = Seconds({"a": 10, "b": 10}, lambda of, *_: 40 if of.label == "out" else 1)
        timeline = simulate_step(step, seconds)
        labels = [item.label for item in timeline.simulation.work]
        of = dict(zip(labels, timeline.simulation.ends, strict=True))
        ends[who] = [of[label] for label in ("free to go", "behind", "behind what was sent")]
    assert ends == {None: [60, 60, 70], a: [10, 60, 60]}


def test_who_takes_over_what_a_device_that_waits_puts_on_the_host_is_behind_that():
    """The second device's program reads nothing, but what comes to the device before it does."""
    places = a, b, host = Place("a", (0,)), Place("b", (1,)), Place("host of a", (0,), HOST)
    step = Step(places, {place.name: Program("work", place, 1) for place in (a, b)})
    made, other, came = (
        step.slot(name, at, "any", 10) for name, at in (("made", a), ("other", a), ("came", b))
    )
    kept, handed = (step.slot(name, host, "any", 10) for name in ("kept", "handed"))
    step.instructions = [
        Run("a", (), (made, other), (), "first"),
        Copy(made, kept, 10, "out"),
        Wait(kept, a),
        Free((made,)),
        Copy(other, handed, 10, "hand over"),
        Copy(handed, came, 10, "come"),
        Run("b", (), (), (), "behind"),
    ]
    seconds = Seconds({"a": 10, "b": 10}, lambda of, *_: 40 if of.label == "out" else 1)
    simulation = simulate_step(step, seconds).simulation
    ends = dict(zip((item.label for item in simulation.work), simulation.ends, strict=True))
    assert (ends["hand over"], ends["come"], ends["behind"]) == (51, 52, 60)


def test_a_program_on_the_host_runs_for_each_device_of_its_place():
    """The host, which is the memory of both devices, has room for what runs on each; and whoever
    runs ahead of it knows."""
    both = HOSTS[1]
    step = Step((both,), {"work": Program("work", both, 50)})
    made = [step.slot(f"made {i}", both, "any", 10) for i in range(2)]
    step.instructions += [Run("work", (), (slot,), (), f"work {slot}") for slot in made]
    timeline = simulated(step, 1, {"work": 1})
    booked = timeline.program_order.peak_of("host")
    assert booked == Peak(120, "work 1", {"any": 20, "temporaries": 100})
    assert timeline.memory_of("host").peak == booked
    assert waits(step, {"host": 120}) == [(), (made[0],)]
    assert waits(step, {"host": 200}) == [(), ()]


def swapping(
    num_layers: int = 6, capacity_bytes: int | None = None, *, by_place: bool = False
) -> Step:
    """Every layer makes 10 bytes, which go to the host and come back for its backward pass."""
    device, host = Place("device", (0,)), Place("host", (0,), Host("host", capacity_bytes))
    step = Step((device, host))
    step.programs |= {kind: Program(kind, device, 10) for kind in ("forward", "backward")}
    kept = []
    for layer in range(num_layers):
        made = step.slot(f"made {layer}", device, "activations", 10)
        kept.append(step.slot(f"kept {layer}", host, "activations", 10))
        step.instructions += [
            Run("forward", (), (made,), (), f"forward {layer}"),
            Copy(made, kept[-1], 10, f"out {layer}"),
            Wait(kept[-1], device if by_place else None),
            Free((made,)),
        ]
    for layer in reversed(range(num_layers)):
        back = step.slot(f"back {layer}", device, "activations", 10)
        step.instructions += [
            Copy(kept[layer], back, 10, f"in {layer}"),
            Wait(back, host if by_place else None),
            Free((kept[layer],)),
            Run("backward", ((back,),), (), (back,), f"backward {layer}"),
        ]
    return step


def test_a_step_that_swaps_everything_is_booked_too_low_without_its_waits(monkeypatch):
    """Over a link that takes four times as long as a layer: with waits the device holds what one
    layer makes, and without them, as the copies are issued, what five do."""
    step, seconds = swapping(), {"forward": 10, "backward": 10}
    timeline = simulated(step, Fraction(1, 4), seconds)
    alone = simulated(swapping(by_place=True), Fraction(1, 4), seconds)
    assert alone.simulation.ends == timeline.simulation.ends
    assert alone.peak_bytes_per_device == timeline.peak_bytes_per_device
    assert timeline.program_order.peak_bytes_per_device == timeline.peak_bytes_per_device == (20,)
    assert timeline.program_order.peak_of("host") == Peak(60, "out 5", {"activations": 60})
    never = [each for each in step.instructions if not isinstance(each, Wait)]
    hasty = replace(step, instructions=never)
    with pytest.raises(ExecutionError) as error:
        replay(hasty)
    assert set(error.value.codes) == {"step-wait"}
    assert str(error.value).splitlines()[0] == (
        "slot 'made 0' is freed while 'out 0' may still use it; wait for 'kept 0' before. "
        "[step-wait]"
    )
    monkeypatch.setattr(capture.step.program, "_unawaited", lambda step: ())
    timeline = simulated(hasty, Fraction(1, 4), seconds)
    assert timeline.program_order.peak_bytes_per_device == (20,)
    assert timeline.peak_bytes_per_device == (50,)


def test_a_slot_that_a_program_took_over_can_no_longer_be_waited_for():
    step = swapping(1)
    made, copy, wait, free = step.instructions[:4]
    step.programs["read"] = Program("read", step.places[1], 0)
    late = [made, copy, Run("read", ((1,),), (), (1,), "read"), wait, free]
    with pytest.raises(ExecutionError, match=r"^slot 'made 0' is freed while 'out 0' .*step-wait"):
        replay(replace(step, instructions=late))


def test_a_hosts_capacity_is_held():
    replay(swapping(capacity_bytes=60))
    with pytest.raises(ExecutionError) as error:
        replay(swapping(capacity_bytes=59))
    assert str(error.value) == (
        "the step holds 60 B in the memory of host at 'out 5' (activations 60 B), which has "
        "capacity_bytes=59; keep less there, or name a host with more. [step-host-memory]"
    )


def test_copies_share_the_link_of_their_direction_and_places_of_a_device_its_stream():
    step = swapping(2)
    twin = Place("twin", (0,))
    step.places = (*step.places, twin)
    step.programs["other"] = Program("other", twin, 5)
    step.instructions.append(Run("other", (), (), (), "other"))
    seconds = {"forward": 1, "backward": 1, "other": 7}
    timeline = simulated(step, 1, seconds)
    assert timeline.simulation.busy_seconds == {
        "device 0 compute": 11,
        "device 0 -> host": 20,
        "device 0 host": 20,
    }
    assert timeline.bubble_fraction == (1 - Fraction(11, 51),) * 2
    shared = simulate_step(step, Seconds(seconds, lambda *_: 10, duplex=False))
    assert shared.simulation.busy_seconds == {"device 0 compute": 11, "device 0 host": 40}
