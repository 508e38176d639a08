"""Copies between processes in the list of a step: how long what is offered waits.

A process does not send: it *offers* pieces of its arrays, and the receiver pulls them when it
gets there. Until then the sender holds them, whoever has dropped its own references, so the list
says so: behind a copy that leaves its process stands a ``Wait`` for it, which the sender alone
executes (the receiver acknowledges what has arrived), and what was offered is freed only then.

    Copy  source -> pieces     where a shard is cut, the cuts are slots of their own, one per device
    Copy  source -> target     offered here, pulled there
    ...                        at most ``window`` more offers from this process to that one
    Wait  target
    Free  pieces, source

A program that takes the source over comes after the wait, too: an offer does not protect a buffer
that is donated. So the ledger of this list is what every process holds, offers included.

No order of events deadlocks on these waits: all processes execute parts of one list in its order,
and what a process waits for stands earlier in the list than the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from capture.step.program import Copy, Free, Place, Run, Step, Wait


@dataclass(frozen=True)
class Crossing:
    """The offers of one copy between processes.

    Attributes:
        pairs: (sender, receiver), by number of the process.
        piece_bytes: Of the cuts of a device's shards, per device that cuts any.
    """

    pairs: frozenset[tuple[int, int]]
    piece_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OfferedStep:
    """A step of several processes.

    Attributes:
        crossings: Per copy that leaves a process, by its number in ``step``, its number in the
            step without waits.
        pieces: Per slot of cuts, the number in ``step`` of the copy that offers them, and the
            device.
    """

    step: Step
    crossings: Mapping[int, int]
    pieces: Mapping[int, tuple[int, int]]


def with_offers(step: Step, crossings: Mapping[int, Crossing], window: int) -> OfferedStep:
    """Return a step with waits for what its processes offer each other.

    All that was offered in the passes is acknowledged before the updates, and all of a step at its
    end.

    Args:
        step: Of a pipeline.
        crossings: By number of the copy in its instructions.
        window: Offers from a process to another that may wait to be pulled, at least 1.
    """
    assert window >= 1, f"window={window} would let nothing be offered"
    return _OfferWriter(step, crossings, window).write()


@dataclass(eq=False)
class _Offer:
    copy: Copy
    pairs: frozenset[tuple[int, int]]
    pieces: tuple[int, ...]


class _OfferWriter:
    def __init__(self, step: Step, crossings: Mapping[int, Crossing], window: int):
        self._old, self._crossings, self._window = step, crossings, window
        self._step = replace(step, slots=list(step.slots), instructions=[])
        self._waiting: list[_Offer] = []  # the oldest first
        self._dead: set[int] = set()  # slots that nothing reads any more but those who pull them
        self._places: dict[int, Place] = {}
        self._found: dict[int, int] = {}
        self._pieces: dict[int, tuple[int, int]] = {}

    def write(self) -> OfferedStep:
        new = self._step
        for index, instruction in enumerate(self._old.instructions):
            if index in (self._old.num_passes, len(self._old.instructions) - 1):
                self._settle(list(self._waiting))
            if index == self._old.num_passes:
                new.num_passes = len(new.instructions)
            match instruction:
                case Copy() if index in self._crossings:
                    self._offer(index, instruction)
                    continue
                case Run(donated=taken):
                    self._settle([offer for offer in self._waiting if offer.copy.source in taken])
                case Free(slots=slots):
                    held = {offer.copy.source for offer in self._waiting}
                    self._dead |= held.intersection(slots)
                    instruction = Free(tuple(slot for slot in slots if slot not in held))
            new.instructions.append(instruction)
        assert not self._waiting, "a step ends with the release of what it reports"
        if self._old.num_passes == len(self._old.instructions):
            new.num_passes = len(new.instructions)
        new = replace(new, places=(*self._old.places, *self._places.values()))
        return OfferedStep(new, self._found, self._pieces)

    def _offer(self, index: int, copy: Copy) -> None:
        new, crossing = self._step, self._crossings[index]
        for pair in sorted(crossing.pairs):
            open_offers = [offer for offer in self._waiting if pair in offer.pairs]
            self._settle(open_offers[: len(open_offers) - self._window + 1])
        pieces = []
        for device, nbytes in sorted(crossing.piece_bytes.items()):
            place = self._places.setdefault(device, Place(f"offers of device {device}", (device,)))
            name = f"pieces of {new.slots[copy.target].name} from device {device}"
            slot = new.slot(name, place, "offered pieces", nbytes, "pieces")
            pieces.append(slot)
            new.instructions.append(Copy(copy.source, slot, nbytes, f"cut to {copy.label}"))
        number = len(new.instructions)
        new.instructions.append(copy)
        self._found[number] = index
        self._pieces |= {
            slot: (number, device)
            for slot, device in zip(pieces, sorted(crossing.piece_bytes), strict=True)
        }
        self._waiting.append(_Offer(copy, crossing.pairs, tuple(pieces)))

    def _settle(self, offers: list[_Offer]) -> None:
        for offer in offers:
            self._waiting.remove(offer)
            self._step.instructions.append(Wait(offer.copy.target))
            gone = list(offer.pieces)
            left = Counter(other.copy.source for other in self._waiting)
            if offer.copy.source in self._dead and not left[offer.copy.source]:
                self._dead.remove(offer.copy.source)
                gone.append(offer.copy.source)
            if gone:
                self._step.instructions.append(Free(tuple(gone)))
