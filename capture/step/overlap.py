"""Seconds of a program whose device computes and sends at the same time, in the order in which the
compiler scheduled it.

A device has two resources, what computes and the link, and is given words one after the other
(``ProgramWork.order``). A kernel runs when the one before it has ended. A collective that begins
has the link as soon as this is free, and computing goes on; the wait for it holds computing until
it has ended. What the order does not hide is exposed:

    seconds = computing + exposed >= max(computing, sending)

Everything that is sent shares one link, whether it leaves a node or not, and takes no cores from
what computes.

Source: XLA's latency-hiding scheduler, in whose programs collectives are split into a beginning and
an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramSeconds:
    """Seconds of one execution of a program on every device.

    Attributes:
        computing: Of its kernels.
        sending: Of its collectives.
        exposed: In which only the link works.
    """

    computing: float
    sending: float
    exposed: float

    @property
    def total(self) -> float:
        return self.computing + self.exposed


def overlapped(
    order: str, kernels: Sequence[float], collectives: Sequence[float]
) -> ProgramSeconds:
    """Return the seconds of a program with a known order.

    Args:
        order: As in ``ProgramWork.order``.
        kernels, collectives: Seconds of one of each, by their places.

    Example:
        >>> overlapped("+0 0 0 -0 1", [2.0, 1.0], [5.0])
        ProgramSeconds(computing=5.0, sending=5.0, exposed=1.0)
    """
    device, words, place = _Device(kernels, collectives), order.split(), 0
    while place < len(words):
        word = words[place]
        if word.endswith("("):
            device.enter(place, int(word[:-1]))
        elif word == ")":
            place = device.leave(place)
        else:
            device.take(word)
        place += 1
    end = max(device.clock, device.link)
    return ProgramSeconds(device.computing, device.sending, end - device.computing)


@dataclass
class _Loop:
    """A loop that a device is in: where it begins, how often it is still run, and what the device
    had done when this turn of it began."""

    place: int
    turns: int
    num_begun: int
    computing: float
    num_sent: int


class _Device:
    """A device at a moment: until when it computes and its link is taken."""

    def __init__(self, kernels: Sequence[float], collectives: Sequence[float]):
        self._kernels, self._collectives = kernels, collectives
        self.clock = self.link = self.computing = self.sending = 0.0
        #: Of the collectives that began, by their number in the text.
        self._ends: dict[int, float] = {}
        self._num_begun = self._num_sent = 0
        self._loops: list[_Loop] = []

    def take(self, word: str) -> None:
        """Run a kernel, begin a collective, or wait for one."""
        mark = word[0]
        if mark == "-":
            self.clock = max(self.clock, self._ends.get(int(word[1:]), 0.0))
        elif mark in "+=":
            seconds = self._collectives[int(word[1:])]
            self.link = max(self.clock, self.link) + seconds
            self.sending += seconds
            self._num_sent += 1
            if mark == "=":
                self.clock = self.link
            else:
                self._ends[self._num_begun] = self.link
                self._num_begun += 1
        else:
            self._compute(self._kernels[int(word)])

    def _compute(self, seconds: float) -> None:
        self.clock += seconds
        self.computing += seconds

    def enter(self, place: int, times: int) -> None:
        self._loops.append(_Loop(place, times, self._num_begun, self.computing, self._num_sent))

    def leave(self, place: int) -> int:
        """Return the place from which the innermost loop goes on: its beginning until it has run as
        often as it does. One that sends nothing is run once and counted."""
        loop = self._loops[-1]
        loop.turns -= 1
        if self._num_sent == loop.num_sent:
            self._compute(loop.turns * (self.computing - loop.computing))
            loop.turns = 0
        if loop.turns <= 0:
            self._loops.pop()
            return place
        self._num_begun = loop.num_begun
        loop.computing, loop.num_sent = self.computing, self._num_sent
        return loop.place
