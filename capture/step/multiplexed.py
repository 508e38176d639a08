"""The steps of an array of models: sub-arrays one after the other, or two of them multiplexed, with
feature maps that are retained, swapped to the host, or made again.

    in turn        F0 B0 F1 B1                               each update is one step
    multiplexed    F0 | B0 x F1, B1 x F0' | B0 x F1, B1      prologue, body, epilogue

F and B are the segments of a sub-array's forward and backward pass, ``x`` is one of these and one
of those in turn, and F0' is of the next update. The body repeats: between two of them live the
feature maps of sub-array 0, so sub-array 0 reads the batch of an update while the one before is
still made, and an epilogue ends what the last body began.

**Swaps.** What is swapped is copied to the host after its last use forward and fetched some
segments before its first use backward, if there is room by then. Its bytes are free only when the
copy has ended (``Wait``), and a host that waits ends run-ahead, so the step waits as late as the
memory limit lets it: for the oldest copy, when something has no room beside what is still going
out. What is used again before anybody needed its room stays where it is.

**Recomputation.** What is made again is freed as soon as its segment has made it; before the
segment that reads it, a slice of its layer makes it from what that layer read, and from what else
is kept of it. (A segment that did not make it would be another program, with other roundings.)

Source: Purandare et al. 2023 (mu-TWO), 3.2 (merged graphs), 4.2 (swaps and recomputation) and 4.3;
READINGS.md, M-w and M-x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

from capture.errors import PlanError, Violation
from capture.plan.array import Decision, Order
from capture.step.ledger import Ledger
from capture.step.program import (
    Copy,
    Feed,
    Free,
    Host,
    Instruction,
    Place,
    Program,
    Run,
    Step,
    Wait,
    begin,
    book,
    replay,
)
from capture.step.sub_array import (
    Call,
    CallKind,
    Lifetimes,
    Programs,
    SubArray,
    movable,
    recomputable,
)

HOST = "host"

#: A bundle of a sub-array.
Key = tuple[int, int]


@dataclass
class ArrayStep:
    """Instructions, and what their slots and programs are.

    Attributes:
        step: In the language of all steps.
        keys: By slot, its sub-array and bundle.
        calls: By program, its sub-array and what it does.
        seconds: By program.
    """

    step: Step
    keys: dict[int, Key] = field(default_factory=dict)
    calls: dict[str, tuple[int, Call]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def reported(self) -> list[int]:
        """Sub-arrays whose losses the step reports, in their order."""
        return [self.keys[slot][0] for slot in self.step.reported]


@dataclass(frozen=True)
class ArraySteps:
    """What trains an array.

    Attributes:
        body: One update of every model.
        prologue: The first forward pass of sub-array 0, where the order is multiplexed.
        epilogue: The rest of the last update.
    """

    body: ArrayStep
    prologue: ArrayStep | None = None
    epilogue: ArrayStep | None = None

    @property
    def all(self) -> tuple[ArrayStep, ...]:
        return tuple(one for one in (self.prologue, self.body, self.epilogue) if one is not None)

    def replay(self, *, record_timeline: bool = False) -> tuple[Ledger, ...]:
        """The ledgers of all of them."""
        return tuple(replay(one.step, record_timeline=record_timeline) for one in self.all)


def lifetimes(sub_array: SubArray, decisions: Sequence[Decision]) -> Lifetimes:
    """What decisions mean for a sub-array.

    Raises:
        PlanError: ``array-bundle`` for bundles that it has not, or that cannot be moved so.
    """
    names = {bundle.name: number for number, bundle in enumerate(sub_array.bundles)}
    allowed = {"swap": set(movable(sub_array)), "recompute": set(recomputable(sub_array))}
    PlanError.check(
        Violation(
            f"the plan decides {decision.choice!r} for the bundle {decision.bundle!r}, which this "
            "model has not, or whose reader is another than the backward pass; plan this model "
            f"again. It has {', '.join(_names(sub_array, allowed[decision.choice])) or 'none'}.",
            "array-bundle",
        )
        for decision in decisions
        if names.get(decision.bundle) not in allowed[decision.choice]
    )
    return Lifetimes(
        sub_array,
        {names[d.bundle]: d.ahead for d in decisions if d.choice == "swap"},
        frozenset(names[d.bundle] for d in decisions if d.choice == "recompute"),
    )


def _names(sub_array: SubArray, numbers: set[int]) -> list[str]:
    return [sub_array.bundles[number].name for number in sorted(numbers)]


def build_array(
    arrays: Sequence[Lifetimes],
    order: Order,
    programs: Programs,
    memory_limit_bytes: int | None = None,
    host_memory_bytes: int | None = None,
) -> ArraySteps:
    """The steps of sub-arrays in an order.

    Args:
        arrays: Sub-arrays, decided.
        order: Of their passes.
        programs: Compiles what is not yet.
        memory_limit_bytes: Of the device, above which a step waits for what goes out. A step that
            needs more all the same is built; its replay says so.
        host_memory_bytes: What may be swapped at once; None if nobody knows.
    """
    builder = _Builders(arrays, programs, memory_limit_bytes, host_memory_bytes)
    layers = [life.sub_array.num_layers for life in arrays]
    if order == "in turn":
        nodes = [(a, segment, 0) for a, count in enumerate(layers) for segment in range(2 * count)]
        return ArraySteps(builder.build(nodes, ()))
    first, second = layers
    forward = [(0, segment, 0) for segment in range(first)]
    nodes = _beside(
        [(0, segment, 0) for segment in range(first, 2 * first)],
        [(1, segment, 0) for segment in range(second)],
    )
    rest = [(1, segment, 0) for segment in range(second, 2 * second)]
    again = _beside(rest, [(0, segment, 1) for segment in range(first)])
    prologue = builder.build(forward, ())
    carried = prologue.carried
    return ArraySteps(
        builder.build([*nodes, *again], carried),
        prologue,
        builder.build([*nodes, *rest], carried),
    )


#: (sub-array, segment, which batch).
Node = tuple[int, int, int]


def _beside(backward: Sequence[Node], forward: Sequence[Node]) -> list[Node]:
    """One of each in turn; what gives memory back goes first."""
    pairs = zip_longest(backward, forward)
    return [node for pair in pairs for node in pair if node is not None]


@dataclass
class _Carried(ArrayStep):
    """And what is alive at its end beside the state: bundle, whether on the host."""

    carried: tuple[tuple[Key, bool], ...] = ()


@dataclass(frozen=True)
class _Builders:
    arrays: Sequence[Lifetimes]
    programs: Programs
    limit_bytes: int | None
    host_bytes: int | None

    def build(self, nodes: Sequence[Node], carried: Sequence[tuple[Key, bool]]) -> _Carried:
        """The step of some segments.

        Args:
            nodes: In the order of issue.
            carried: What the step before has left beside the state.
        """
        if self.limit_bytes is None:
            return _Builder(self, carried, inf, [0] * len(nodes)).build(nodes)
        # What it needs where nothing comes early and everything is waited for.
        least = _Builder(self, carried, 0, [0] * len(nodes))
        least.build(nodes)
        return _Builder(self, carried, self.limit_bytes, least.needs).build(nodes)


class _Builder:
    """Writes one step, and books it as it is written.

    Args:
        given: Sub-arrays and programs.
        carried: What the step before has left beside the state.
        limit: Bytes up to which nothing is waited for.
        least: By segment, the bytes that it needs in any case.

    Attributes:
        needs: By segment, the most that it needed.
    """

    def __init__(
        self,
        given: _Builders,
        carried: Sequence[tuple[Key, bool]],
        limit: float,
        least: Sequence[int],
    ):
        self._arrays, self._programs = given.arrays, given.programs
        self._limit, self._least = limit, list(least)
        self.needs = [0] * len(least)
        self._at = 0
        self._nodes: Sequence[Node] = ()
        self._device = Place("device", (0,))
        self._host = Place(HOST, (0,), Host(HOST, given.host_bytes))
        self._built = _Carried(Step((self._device, self._host)))
        self._step = self._built.step
        #: Where bundles are; one that is going out is in both, and in ``_leaving``.
        self._here: dict[Key, int] = {}
        self._there: dict[Key, int] = {}
        self._leaving: dict[Key, None] = {}
        self._coming: set[Key] = set()
        self._again: dict[tuple[Key, bool], int] = {}
        for a, life in enumerate(self._arrays):
            for number, bundle in enumerate(life.sub_array.bundles):
                if bundle.is_state:
                    self._here[a, number] = self._kept((a, number), host=False)
        for key, host in carried:
            slot = self._again[key, host] = self._kept(key, host=host)
            (self._there if host else self._here)[key] = slot
        self._before = frozenset(self._step.persistent.values())
        self._ledger = Ledger(1)
        begin(self._ledger, self._step)

    def build(self, nodes: Sequence[Node]) -> _Carried:
        self._nodes = nodes
        for self._at, (a, segment, batch) in enumerate(nodes):
            for instruction in self._segment(a, segment, batch):
                self._step.instructions.append(instruction)
                book(self._ledger, self._step, instruction)
        rest = [step for key in list(self._leaving) for step in self._left(key)]
        reported = [Free(tuple(self._step.reported))] if self._step.reported else []
        self._step.instructions += [*rest, *reported]
        left = [(key, slot, False) for key, slot in self._here.items()]
        left += [(key, slot, True) for key, slot in self._there.items()]
        left = [one for one in left if not self._bundle(one[0]).is_state]
        self._step.made |= {
            self._name(key): slot for key, slot, _ in left if slot not in self._before
        }
        self._built.carried = tuple((key, host) for key, _, host in left)
        return self._built

    def _bundle(self, key: Key):
        return self._arrays[key[0]].sub_array.bundles[key[1]]

    def _name(self, key: Key) -> str:
        return f"{key[0]}: {self._bundle(key).name}"

    def _kept(self, key: Key, host: bool) -> int:
        slot = self._new(key, host)
        self._step.persistent[self._name(key)] = slot
        return slot

    def _new(self, key: Key, host: bool) -> int:
        """A slot for a bundle. What outlives the step has the slot that it had before it."""
        if (key, host) in self._again:
            return self._again[key, host]
        bundle, place = self._bundle(key), self._host if host else self._device
        name = f"{self._name(key)} #{len(self._step.slots)}"
        category = "swapped" if host else bundle.category
        slot = self._step.slot(name, place, category, bundle.nbytes, bundle.category, key[1])
        self._built.keys[slot] = key
        return slot

    # ---- one segment -----------------------------------------------------------------------------

    def _segment(self, a: int, segment: int, batch: int) -> Iterator[Instruction]:
        life = self._arrays[a]
        sub_array, work = life.sub_array, life.sub_array.segments[segment]
        backward = segment >= sub_array.num_layers
        if backward:
            yield from self._ahead(a, segment)
        for writer, targets, sources in life.slices.get(segment, []):
            yield from self._readied(a, sources, batch)
            yield from self._run(a, Call("recompute", writer, sources, (), targets), segment)
        yield from self._readied(a, work.reads, batch)
        outputs = work.writes
        dying = [
            number
            for number in (n for n in self._of(a) if life.uses[n][-1:] == (segment,))
            if not sub_array.bundles[number].is_state
        ]
        donated = tuple(n for n in work.reads if n in dying or n in outputs)
        kind: CallKind = "backward" if backward else "forward"
        yield from self._run(a, Call(kind, segment, work.reads, donated, outputs), segment)
        idle = [
            n
            for n in outputs
            if n in life.recomputed or not (life.uses[n] or sub_array.bundles[n].is_state)
        ]
        gone = tuple(
            self._here.pop((a, number))
            for number in [*dying, *idle]
            if number not in donated and number != sub_array.loss
        )
        if gone:
            yield Free(gone)
        if not backward:
            for number in sorted(life.swapped):
                if life.last_forward(number) == segment:
                    yield from self._out((a, number))

    def _of(self, a: int) -> list[int]:
        """Bundles of a sub-array that are on the device."""
        return [number for array, number in self._here if array == a]

    def _run(self, a: int, call: Call, at: int) -> Iterator[Instruction]:
        sub_array = self._arrays[a].sub_array
        facts = self._programs.facts(sub_array, call)
        if facts.name not in self._step.programs:
            program = Program(call.kind, self._device, facts.transient_bytes)
            self._step.programs[facts.name] = program
            self._built.calls[facts.name] = a, call
            self._built.seconds[facts.name] = facts.seconds
        yield from self._room(facts.transient_bytes)
        inputs = tuple(self._here[a, number] for number in call.inputs)
        donated = tuple(self._here[a, number] for number in call.donated)
        outputs = []
        for number in call.outputs:
            key = a, number
            state = sub_array.bundles[number].is_state
            outputs.append(self._here[key] if state else self._new(key, host=False))
        for number in call.donated:
            del self._here[a, number]
        for number, slot in zip(call.outputs, outputs, strict=True):
            if number == sub_array.loss:
                self._step.reported.append(slot)
            else:
                self._here[a, number] = slot
        label = f"{call.kind} {self._layer(a, call.segment)} of sub-array {a}"
        label += f" for layer {self._layer(a, at)}" if call.kind == "recompute" else ""
        yield Run(facts.name, (inputs,), tuple(outputs), donated, label)

    def _layer(self, a: int, segment: int) -> int:
        layers = self._arrays[a].sub_array.num_layers
        return segment if segment < layers else 2 * layers - 1 - segment

    # ---- what comes in ---------------------------------------------------------------------------

    def _readied(self, a: int, numbers: Sequence[int], batch: int) -> Iterator[Instruction]:
        """What a program reads is on the device, and has arrived."""
        for number in numbers:
            key, bundle = (a, number), self._bundle((a, number))
            if key not in self._here:
                if bundle.feed:
                    yield from self._fed(key, batch)
                else:
                    yield from self._fetched(key)
            if key in self._leaving:
                yield from self._stays(key)
            if key in self._coming:
                self._coming.remove(key)
                yield Wait(self._here[key])
                yield Free((self._there.pop(key),))

    def _fed(self, key: Key, batch: int) -> Iterator[Instruction]:
        a, bundle = key[0], self._bundle(key)
        yield from self._room(bundle.nbytes)
        slot = self._here[key] = self._new(key, host=False)
        first = a * self._arrays[a].sub_array.num_leaves
        leaves = tuple(first + leaf for leaf in bundle.feed)
        yield Feed(slot, batch, leaves, f"feed {bundle.name} to sub-array {a}")

    def _ahead(self, a: int, segment: int) -> Iterator[Instruction]:
        """What is used soon comes early, if it has room now, and beside all that runs until it is
        used: for what comes early nothing is waited for."""
        life = self._arrays[a]
        soon = [
            (life.first_backward(number), number)
            for number, ahead in life.swapped.items()
            if segment < life.first_backward(number) <= segment + ahead
        ]
        for use, number in sorted(soon):
            key, nbytes = (a, number), self._bundle((a, number)).nbytes
            until = range(self._at, self._at + self._nodes[self._at :].index((a, use, 0)))
            fits = all(self._least[node] + nbytes <= self._limit for node in until)
            if key in self._here or not fits or self._live + nbytes > self._limit:
                continue
            for node in until:
                self._least[node] += nbytes
            yield from self._fetched(key)

    def _fetched(self, key: Key) -> Iterator[Instruction]:
        bundle = self._bundle(key)
        yield from self._room(bundle.nbytes)
        slot = self._new(key, host=False)
        label = f"fetch {bundle.name} of sub-array {key[0]}"
        yield Copy(self._there[key], slot, bundle.nbytes, label)
        self._here[key] = slot
        self._coming.add(key)

    # ---- what goes out ---------------------------------------------------------------------------

    @property
    def _live(self) -> int:
        return self._ledger.live_bytes[0]

    def _room(self, nbytes: int) -> Iterator[Instruction]:
        """Wait for what is going out, the oldest first, until so much fits."""
        for key in list(self._leaving):
            if self._live + nbytes <= self._limit:
                break
            yield from self._left(key)
        self.needs[self._at] = max(self.needs[self._at], self._live + nbytes)

    def _out(self, key: Key) -> Iterator[Instruction]:
        bundle = self._bundle(key)
        slot = self._there[key] = self._new(key, host=True)
        self._leaving[key] = None
        label = f"swap out {bundle.name} of sub-array {key[0]}"
        yield Copy(self._here[key], slot, bundle.nbytes, label)

    def _left(self, key: Key) -> Iterator[Instruction]:
        del self._leaving[key]
        yield Wait(self._there[key])
        yield Free((self._here.pop(key),))

    def _stays(self, key: Key) -> Iterator[Instruction]:
        """It is read again, and nobody needed its room."""
        del self._leaving[key]
        yield Wait(self._there[key])
        yield Free((self._there.pop(key),))


def swapped_bytes(steps: ArraySteps) -> int:
    """Copied to the host in one body."""
    slots, instructions = steps.body.step.slots, steps.body.step.instructions
    return sum(
        each.nbytes
        for each in instructions
        if isinstance(each, Copy) and slots[each.target].place.host is not None
    )


def recomputed_bytes(arrays: Sequence[Lifetimes]) -> int:
    """Made again in one body."""
    return sum(
        life.sub_array.bundles[number].nbytes for life in arrays for number in life.recomputed
    )


def peak_of(ledgers: Sequence[Ledger], memory: int | str) -> tuple[int, str, Mapping[str, int]]:
    """The most of several steps: bytes, at which instruction, and by category."""
    peak = max((ledger.peak_of(memory) for ledger in ledgers), key=lambda peak: peak.peak_bytes)
    return peak.peak_bytes, peak.instant, peak.parts
