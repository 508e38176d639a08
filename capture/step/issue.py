"""In which order a step of an array issues what it does, and what is live meanwhile: the one place
that decides when copies are issued and waited for.

What is decided is told to a listener: one writes the instructions of the step
(``capture.step.multiplexed``), another only reads a clock (``Clock``), which is what a search asks
thousands of times. Bytes are counted here, as the replay of the instructions books them.

**Swaps.** What is swapped is copied to the host after its last use forward and fetched some
segments before its first use backward, if there is room by then. Its bytes are free only when the
copy has ended (``Wait``), and a host that waits ends run-ahead, so the step waits as late as the
memory limit lets it: for the oldest copy, when something has no room beside what is still going
out. What is used again before anybody needed its room stays where it is.

**Recomputation.** What is made again is freed as soon as its segment has made it; before the
segment that reads it, a slice of its layer makes it from what that layer read, and from what else
is kept of it. (A segment that did not make it would be another program, with other roundings.)

Source: Purandare et al. 2023 (mu-TWO), 4.2 (swaps and recomputation) and 4.3; READINGS.md, M-x,
M-af and M-ag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capture.step.sub_array import Call, Issued, Lifetimes, ProgramFacts, Programs

#: (sub-array, segment, which batch).
Node = tuple[int, int, int]


class Listener:
    """The receiver of what a step issues, in order of issue; bundles by sub-array and number. This
    one needs to know nothing: bytes are counted all the same."""

    def run(self, a: int, call: Call, facts: ProgramFacts, node: Node) -> None:
        """Note that a program runs for the segment of a node."""

    def feed(self, a: int, number: int, batch: int) -> None:
        """Note that a bundle of a batch comes to the device."""

    def drop(self, a: int, number: int, batch: int) -> None:
        """Note that the last sub-array has read a batch that all of them read."""

    def fetch(self, a: int, number: int) -> None:
        """Note that a copy from the host begins."""

    def arrived(self, a: int, number: int) -> None:
        """Note that a copy from the host has ended; the host's bytes are free."""

    def swap_out(self, a: int, number: int) -> None:
        """Note that a copy to the host begins."""

    def left(self, a: int, number: int) -> None:
        """Note that a copy to the host has ended; the device's bytes are free."""

    def stays(self, a: int, number: int) -> None:
        """Note that a copy to the host has ended and the bundle stays on the device: nobody needed
        its room. The host's bytes are free."""

    def free(self, a: int, numbers: Sequence[int]) -> None:
        """Note that bundles end that no program takes over."""

    def has_left(self, a: int, number: int, since: int) -> bool:
        """Return whether a copy to the host is known to have ended ``since`` segments later."""
        return False


@dataclass(frozen=True)
class Order:
    """The segments of a step, in the order of issue.

    Attributes:
        carries: Whether the feature maps of sub-array 0 are there before the step, and what all
            sub-arrays read of the batch.
    """

    arrays: Sequence[Lifetimes]
    nodes: Sequence[Node]
    carries: bool = False

    def fed_to_all(self) -> list[dict[int, str]]:
        """Return, per sub-array, the bundles of a batch that all of them read, with their names."""
        found = [life.sub_array.bundles for life in self.arrays]
        return [{n: b.name for n, b in enumerate(own) if b.feed and b.shared} for own in found]


class Issue:
    """The issue of a step: decides when bundles come, go and are waited for, and counts bytes.

    Args:
        limit: Bytes up to which nothing is waited for.
        least: By segment, the bytes that it needs in any case, where something may come early.

    Attributes:
        needs: By segment, the most that it needed.
        behind: By sub-array and bundle that was swapped out, after how many segments its copy was
            known to have ended, where that made room for what comes early.
        peak_bytes, host_peak_bytes: As the replay books them.
    """

    def __init__(
        self,
        order: Order,
        programs: Programs,
        listener: Listener,
        limit: float = 0,
        least: Sequence[int] = (),
    ):
        self._arrays, self._nodes = order.arrays, order.nodes
        self._programs, self._listener, self._limit = programs, listener, limit
        self._least = list(least) or [0] * len(order.nodes)
        self._bytes = [life.where.nbytes for life in self._arrays]
        self._place = {node: at for at, node in enumerate(self._nodes)}
        #: The bundles on the device; those that are going out, with the place in the order from
        #: which on they are.
        self._here = [set(life.where.state) for life in self._arrays]
        self._leaving: dict[tuple[int, int], int] = {}
        #: What may come early: where it is used, the sub-array and the bundle.
        self._pending: list[tuple[int, int, int]] = []
        self._asked: set[tuple[int, int]] = set()
        self.behind: dict[tuple[int, int], int] = {}
        self._coming: list[set[int]] = [set() for _ in self._arrays]
        self._live = self._host_live = 0
        for number in self._arrays[0].between if order.carries else ():
            if number in self._arrays[0].swapped:
                self._host_live += self._bytes[0][number]
            else:
                self._here[0].add(number)
        for a, (own, here) in enumerate(zip(self._bytes, self._here, strict=True)):
            counted = here - self._arrays[a].where.shared if a else here
            self._live += sum(map(own.__getitem__, counted))
        self._common = order.fed_to_all()
        #: Of these, with the number of the batch, what is on the device; and when it is read last.
        self._fed: set[tuple[str, int]] = set()
        self._ends = self._last_read()
        for number, name in self._common[0].items() if order.carries else ():
            self._fed.add((name, 0))
            self._live += self._bytes[0][number]
        self.needs = [0] * len(self._nodes)
        self.peak_bytes, self.host_peak_bytes = self._live, self._host_live
        self._at = 0
        for self._at, node in enumerate(order.nodes):
            self._segment(node)
        for key in list(self._leaving):
            self._left(*key)

    def _last_read(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by place in the order, the (sub-array, bundle) of batches that nobody reads after
        it. Batches that the last sub-array still reads in the step that follows are left out."""
        found: dict[tuple[str, int], tuple[int, int, int]] = {}
        for a, common in enumerate(self._common):
            for number, name in common.items():
                for use in self._arrays[a].uses(number):
                    for batch in (0, 1):
                        at = self._place.get((a, use, batch), -1)
                        if at > found.get((name, batch), (-1,))[0]:
                            found[name, batch] = at, a, number
        ends: dict[int, list[tuple[int, int]]] = {}
        last = len(self._arrays) - 1
        for (name, batch), (at, a, number) in found.items():
            own = next(n for n, other in self._common[last].items() if other == name)
            if (last, self._arrays[last].uses(own)[-1], batch) in self._place:
                ends.setdefault(at, []).append((a, number))
        return ends

    # ---- one segment -----------------------------------------------------------------------------

    def _segment(self, node: Node) -> None:
        a, segment, batch = node
        issued = self._arrays[a].issued[segment]
        if self._limit and (issued.soon or self._pending):
            self._ahead(a, issued)
        for call in (*issued.slices, issued.call):
            if self._leaving or self._coming[a] or not call.read <= self._here[a]:
                self._readied(a, call.inputs, batch)
            self._run(a, call, node)
        for of, number in self._ends.get(self._at, ()):
            self._fed.remove((self._common[of][number], batch))
            self._live -= self._bytes[of][number]
            self._listener.drop(of, number, batch)
        if issued.gone:
            self._here[a].difference_update(issued.gone)
            self._live -= sum(map(self._bytes[a].__getitem__, issued.gone))
            self._listener.free(a, issued.gone)
        for number in issued.outs:
            self._leaving[a, number] = self._at
            self._host_live += self._bytes[a][number]
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_live)
            self._listener.swap_out(a, number)

    def _run(self, a: int, call: Call, node: Node) -> None:
        facts = self._programs.facts(self._arrays[a].sub_array, call)
        self._room(facts.transient_bytes)
        nbytes, here = self._bytes[a].__getitem__, self._here[a]
        here.difference_update(call.donated)
        here.update(call.outputs)
        self._live += sum(map(nbytes, call.outputs)) - sum(map(nbytes, call.donated))
        if self._live > self.peak_bytes:
            self.peak_bytes = self._live
        self._listener.run(a, call, facts, node)

    # ---- what comes in ---------------------------------------------------------------------------

    def _readied(self, a: int, numbers: Sequence[int], batch: int) -> None:
        """Feed, fetch and await what a program reads, so that all of it is on the device."""
        here, coming, leaving = self._here[a], self._coming[a], self._leaving
        common = self._common[a]
        for number in numbers:
            if number in common:
                if (common[number], batch) not in self._fed:
                    self._room(self._bytes[a][number])
                    self._fed.add((common[number], batch))
                    self._live += self._bytes[a][number]
                    self.peak_bytes = max(self.peak_bytes, self._live)
                    self._listener.feed(a, number, batch)
                continue
            if number not in here:
                if self._arrays[a].sub_array.bundles[number].feed:
                    self._room(self._bytes[a][number])
                    self._enter(a, number)
                    self._listener.feed(a, number, batch)
                else:
                    self._fetch(a, number)
            if leaving and (a, number) in leaving:
                del leaving[a, number]
                self._host_live -= self._bytes[a][number]
                self._listener.stays(a, number)
            if number in coming:
                coming.remove(number)
                self._host_live -= self._bytes[a][number]
                self._listener.arrived(a, number)

    def _ahead(self, a: int, issued: Issued) -> None:
        """Prefetch what is used soon, if it fits now and beside all that runs until it is used: for
        what comes early nothing is waited for."""
        for use, number in issued.soon:
            if number not in self._here[a] and (a, number) not in self._asked:
                self._asked.add((a, number))
                self._pending.append((self._place[a, use, 0], a, number))
        for key, since in list(self._leaving.items()):
            if self._listener.has_left(*key, self._at - since):
                self.behind[key] = self._at - since
                self._left(*key)
        # What is still going out is in nobody's way, unless something comes early beside it.
        leaving = sum(self._bytes[of][number] for of, number in self._leaving)
        self._least[self._at] += leaving
        waiting = []
        for until, of, number in sorted(self._pending):
            if until <= self._at or number in self._here[of]:
                continue
            nbytes = self._bytes[of][number]
            if max(self._live, *self._least[self._at : until]) + nbytes <= self._limit:
                for node in range(self._at, until):
                    self._least[node] += nbytes
                self._fetch(of, number)
            else:
                waiting.append((until, of, number))
        self._pending = waiting
        self._least[self._at] -= leaving

    def _fetch(self, a: int, number: int) -> None:
        self._room(self._bytes[a][number])
        self._enter(a, number)
        self._coming[a].add(number)
        self._listener.fetch(a, number)

    def _enter(self, a: int, number: int) -> None:
        self._here[a].add(number)
        self._live += self._bytes[a][number]
        self.peak_bytes = max(self.peak_bytes, self._live)

    # ---- what goes out ---------------------------------------------------------------------------

    def _room(self, nbytes: int) -> None:
        """Wait for swap-outs that are under way, the oldest first, until ``nbytes`` fit."""
        if self._leaving and self._live + nbytes > self._limit:
            for key in list(self._leaving):
                self._left(*key)
                if self._live + nbytes <= self._limit:
                    break
        needed = self._live + nbytes
        if needed > self.needs[self._at]:
            self.needs[self._at] = needed
            if needed > self.peak_bytes:
                self.peak_bytes = needed

    def _left(self, a: int, number: int) -> None:
        del self._leaving[a, number]
        self._here[a].remove(number)
        self._live -= self._bytes[a][number]
        self._listener.left(a, number)


class Clock(Listener):
    """A listener that knows when everything ends: the seconds that ``simulate_step`` finds for the
    same instructions, to the last bit (``tests/property/test_array_step.py``).

    Args:
        to_device, to_host: Seconds of a copy of so many bytes.
        duplex: Whether both directions may be busy at once.
    """

    def __init__(
        self,
        arrays: Sequence[Lifetimes],
        to_device: Callable[[int], float],
        to_host: Callable[[int], float],
        duplex: bool = True,
    ):
        self._bundles = [life.sub_array.bundles for life in arrays]
        self._in_seconds, self._out_seconds = to_device, to_host
        #: The stream of copies to the host, of the two.
        self._out = 1 if duplex else 0
        self._free_at = [0.0, 0.0]
        self._computed = self._waited = self._fed = 0.0
        #: When programs and copies ended.
        self._made: list[dict[int | None, float]] = [{} for _ in arrays]
        self._gone: dict[tuple[int, int], float] = {}
        self._came: dict[tuple[int, int], float] = {}

    @property
    def seconds(self) -> float:
        return max(self._computed, *self._free_at)

    def run(self, a: int, call: Call, facts: ProgramFacts, node: Node) -> None:
        end = max(self._computed, self._waited, self._fed) + facts.seconds
        self._computed = end
        if call.kind != "recompute":
            self._made[a][call.segment] = end

    def feed(self, a: int, number: int, batch: int) -> None:
        self._fed = self._copied(0, self._in_seconds, a, number, self._computed)

    def fetch(self, a: int, number: int) -> None:
        ready = max(self._computed, self._gone.get((a, number), 0.0))
        self._came[a, number] = self._copied(0, self._in_seconds, a, number, ready)

    def swap_out(self, a: int, number: int) -> None:
        ready = self._made[a][self._bundles[a][number].writer]
        self._gone[a, number] = self._copied(self._out, self._out_seconds, a, number, ready)

    def arrived(self, a: int, number: int) -> None:
        self._waited = max(self._waited, self._came[a, number])

    def left(self, a: int, number: int) -> None:
        self._waited = max(self._waited, self._gone[a, number])

    stays = left

    def has_left(self, a: int, number: int, since: int) -> bool:
        return self._gone[a, number] <= max(self._computed, self._waited)

    def _copied(
        self, stream: int, seconds: Callable[[int], float], a: int, number: int, ready: float
    ) -> float:
        start = max(self._free_at[stream], self._waited, ready)
        self._free_at[stream] = end = start + seconds(self._bundles[a][number].nbytes)
        return end
