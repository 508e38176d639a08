"""A network, message by message: what collectives are compared with."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass
class Network:
    """Messages over links. A link carries one message after the other, in the order in which they
    are ready; a message arrives its latency after its last byte has left.

    Attributes:
        rates: Bytes per second by link.
    """

    rates: dict[Hashable, float]
    _messages: list[tuple[Hashable, float, float]] = field(default_factory=list)
    _needs: list[tuple[int, ...]] = field(default_factory=list)

    def send(self, link: Hashable, nbytes: float, latency: float, needs: Iterable[int] = ()) -> int:
        """Add a message that leaves when those that it needs have arrived; return its number."""
        self._messages.append((link, nbytes, latency))
        self._needs.append(tuple(needs))
        return len(self._messages) - 1

    def seconds(self) -> float:
        """Return when the last message arrives."""
        missing = [len(needs) for needs in self._needs]
        readers: list[list[int]] = [[] for _ in self._needs]
        for number, needs in enumerate(self._needs):
            for need in needs:
                readers[need].append(number)
        ready = [(0.0, number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        free, latest, last = dict.fromkeys(self.rates, 0.0), [0.0] * len(missing), 0.0
        while ready:
            start, number = heapq.heappop(ready)
            link, nbytes, latency = self._messages[number]
            free[link] = max(start, free[link]) + nbytes / self.rates[link]
            arrives = free[link] + latency
            last = max(last, arrives)
            for reader in readers[number]:
                latest[reader] = max(latest[reader], arrives)
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (latest[reader], reader))
        assert not any(missing), "messages that wait for one another"
        return last
