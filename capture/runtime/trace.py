"""What the devices of this process did when in an executed step, for ui.perfetto.dev.

Nothing is awaited that the step does not await: of every instruction it is noted when it was
issued, and threads note when its results were there. It began when it had been issued,
its inputs were there, and what its devices did before had ended. Clocks of several hosts are taken
as they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from capture.runtime.train_step import Metered
from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Wait
from capture.step.trace_events import MICROSECONDS, complete_event, name_event, order_event

#: What lanes of a device show: what it computes, what comes to it, what it offers to others.
_PROGRAMS, _TRANSFERS, _OFFERS = "", "transfers", "offers"
_LANES = (_PROGRAMS, _TRANSFERS, _OFFERS)
#: Viewers bind an end of an arrow to what is drawn at its time, so nothing is drawn shorter.
_SHORTEST_SECONDS = 1e-6


class StepTrace:
    """An observer of one step, which notes when its instructions began and ended.

    Args:
        crossings: Per copy that leaves a process, by its number in the step, (sender, receiver).
        clock: In seconds, the same for all hosts.
    """

    def __init__(
        self,
        step: Metered,
        crossings: Mapping[int, Collection[tuple[int, int]]] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._step, self._crossings, self._clock = step, crossings or {}, clock
        self._issued: list[float] = []
        self._ended: dict[int, float] = {}
        self._watchers: dict[tuple[str, ...], _Watcher] = {}
        self._slots: Sequence[Any] = ()

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        self._watch_last(slots)
        self._issued.append(self._clock())
        self._slots = slots

    def _watch_last(self, slots: Sequence[Any]) -> None:
        """Note when what was issued last is there."""
        if not self._issued:
            return
        number = len(self._issued) - 1
        instruction = self._step.program.instructions[number]
        made = [array for slot in instruction.made for array in slots[slot] or ()]
        if not made:
            self._ended[number] = self._clock()
            return
        where = self._stream_of(instruction)
        if where not in self._watchers:
            self._watchers[where] = _Watcher(self._clock, self._ended)
        self._watchers[where].put(number, made)

    def _stream_of(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the stream of an instruction: on one, instructions end one after the other."""
        program = self._step.program
        slots = (*instruction.made[:1], *instruction.copied)
        places = [program.slots[slot].place.name for slot in slots]
        return (type(instruction).__name__, *places)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of this process's devices, once the step is over: of each a lane for
        what it computes, one for what comes to it, and one for what it offers. Arrows lead from an
        offer to what was pulled."""
        self._watch_last(self._slots)
        for watcher in self._watchers.values():
            watcher.finish()
        lanes = _Lanes(self._step.devices)
        arrived: dict[int, float] = {}
        instructions = self._step.program.instructions
        for number, (instruction, issued) in enumerate(
            zip(instructions, self._issued, strict=False)
        ):
            ended = self._ended[number]
            match instruction:
                case Run(inputs=groups, outputs=outputs, label=label, program=name):
                    program = self._step.program.programs[name]
                    read = [arrived.get(slot, 0.0) for group in groups for slot in group]
                    lanes.add(
                        program.place, _PROGRAMS, (max([issued, *read]), ended), label, program.kind
                    )
                    arrived |= dict.fromkeys(outputs, ended)
                case Feed(slot=slot, label=label):
                    place = self._step.program.slots[slot].place
                    lanes.add(place, _TRANSFERS, (issued, ended), label, "feed")
                    arrived[slot] = ended
                case Copy(source=source, target=target, label=label):
                    begin = max(issued, arrived.get(source, 0.0))
                    self._add_copy(lanes, number, instruction, (begin, max(begin, ended)))
                    arrived[target] = ended
                case Wait() | Free():
                    pass
        return lanes.events

    def _add_copy(self, lanes: _Lanes, number: int, copy: Copy, span: tuple[float, float]) -> None:
        source, target = (self._step.program.slots[s].place for s in (copy.source, copy.target))
        pairs = sorted(self._crossings.get(number, ()))
        if lanes.has(target):
            drawn = lanes.add(target, _TRANSFERS, span, copy.label, "transfer")
            end = drawn[1] - _SHORTEST_SECONDS / 2
            arrows = [(pair, "f", end) for pair in pairs if pair[1] == lanes.host]
            lanes.arrows(target, _TRANSFERS, number, arrows)
        if lanes.has(source) and (offers := [pair for pair in pairs if pair[0] == lanes.host]):
            drawn = lanes.add(source, _OFFERS, span, copy.label, "offer")
            lanes.arrows(source, _OFFERS, number, [(pair, "s", drawn[0]) for pair in offers])


class _Watcher:
    """A thread that notes when arrays are there, those that were given first at first."""

    def __init__(self, clock: Callable[[], float], ended: dict[int, float]):
        self._given: queue.SimpleQueue[tuple[int, list[jax.Array]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, args=(clock, ended), daemon=True)
        self._thread.start()

    def put(self, number: int, arrays: list[jax.Array]) -> None:
        self._given.put((number, arrays))

    def finish(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _watch(self, clock: Callable[[], float], ended: dict[int, float]) -> None:
        while (given := self._given.get()) is not None:
            number, arrays = given
            del given
            _await(arrays)
            arrays.clear()
            ended[number] = clock()


def _await(arrays: Iterable[jax.Array]) -> None:
    """Wait for one array, which is enough: those of an instruction are there together. A later
    program may have taken some of them over."""
    for array in arrays:
        try:
            array.block_until_ready()
            return
        except RuntimeError:
            continue


class _Lanes:
    """The events of this process's devices, by host and device."""

    def __init__(self, devices: Sequence[jax.Device]):
        self._own = {
            number: device.process_index
            for number, device in enumerate(devices)
            if device.process_index == jax.process_index()
        }
        self.host = jax.process_index()
        self._ended: dict[tuple[int, str], float] = {}
        self.events: list[dict[str, Any]] = []

    def has(self, place: Place) -> bool:
        return any(device in self._own for device in place.devices)

    def add(
        self, place: Place, what: str, span: tuple[float, float], label: str, kind: str
    ) -> tuple[float, float]:
        """Add an event of all devices of a place that are here; one lane shows one thing at a time.
        Return when it is drawn, on the first of them."""
        drawn: list[tuple[float, float]] = []
        for device in place.devices:
            if device in self._own:
                where = self._lane(device, what)
                begin = max(span[0], self._ended.get((device, what), 0.0))
                end = max(begin + _SHORTEST_SECONDS, span[1])
                drawn.append((begin, end))
                self._ended[device, what] = end
                self.events.append(complete_event(label, kind, where, (begin, end - begin)))
        return drawn[0] if drawn else span

    def arrows(
        self,
        place: Place,
        what: str,
        number: int,
        ends: Sequence[tuple[tuple[int, int], str, float]],
    ) -> None:
        """Add ends of arrows of a copy between hosts: which hosts, the phase, and when."""
        device = next(device for device in place.devices if device in self._own)
        pid, tid = self._lane(device, what)
        for (sender, receiver), phase, seconds in ends:
            self.events.append(
                {
                    "ph": phase,
                    "name": "transfer",
                    "cat": "transfer",
                    "id": f"{number} from {sender} to {receiver}",
                    "pid": pid,
                    "tid": tid,
                    "ts": seconds * MICROSECONDS,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )

    def _lane(self, device: int, what: str) -> tuple[int, int]:
        """Return process and thread of the format; they are named when first used."""
        host, tid = self._own[device], len(_LANES) * device + _LANES.index(what) + 1
        if (device, what) not in self._ended:
            name = f"device {device} {what}".rstrip()
            self.events += [
                name_event("process_name", f"host {host}", host + 1, 0),
                name_event("thread_name", name, host + 1, tid),
                order_event("thread_sort_index", host + 1, tid, tid),
            ]
            self._ended[device, what] = 0.0
        return host + 1, tid
