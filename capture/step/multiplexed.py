"""The steps of an array of models: sub-arrays in turn, or multiplexed, with feature maps that are
retained, swapped to the host, or made again.

    in turn        F0 B0 F1 B1                               each update is one step
    multiplexed    F0 | B0 x F1, B1 x F0' | B0 x F1, B1      prologue, body, epilogue
    of three       F0 | B0 x F1, B1 x F2, B2 x F0' | B0 x F1, B1 x F2, B2

F and B are the segments of a sub-array's forward and backward pass, ``x`` is one of these and one
of those in turn, or, of programs with other numbers of layers, as evenly, and F0' is of the next
update. The body repeats: between two of them live the
feature maps of sub-array 0, so sub-array 0 reads the batch of an update while the one before is
still made, and an epilogue ends what the last body began. What all sub-arrays read of a batch is
fed once, and stays until the last of them has read it.

What is issued when, and what is waited for, ``capture.step.issue`` decides; here it becomes
instructions.

Source: Purandare et al. 2023 (mu-TWO), 3.2 (merged graphs); READINGS.md, M-w and M-y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from capture.errors import PlanError, Violation
from capture.machine.rates import HostLink
from capture.plan.array import Decision
from capture.plan.array import Order as Turns
from capture.step.issue import Issue, Listener, Node, Order
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
    replay,
)
from capture.step.sub_array import (
    Call,
    HeldBundle,
    Lifetimes,
    ProgramFacts,
    Programs,
    SegmentCall,
    SubArray,
    Uses,
    movable,
    recomputable,
)
from capture.step.timeline import Seconds

HOST = "host"

#: A bundle of a sub-array.
Key = tuple[int, int]


@dataclass(frozen=True)
class ArraySteps:
    """The steps that train an array: slots hold bundles (``HeldBundle``), programs ``SegmentCall``.

    Attributes:
        body: One update of every model.
        prologue: The first forward pass of sub-array 0, where the order is multiplexed.
        epilogue: The rest of the last update.
    """

    body: Step
    prologue: Step | None = None
    epilogue: Step | None = None

    @property
    def all(self) -> tuple[Step, ...]:
        return tuple(one for one in (self.prologue, self.body, self.epilogue) if one is not None)

    def replay(self, *, record_timeline: bool = False) -> tuple[Ledger, ...]:
        """Return the ledger of each of the steps, replayed."""
        return tuple(replay(one, record_timeline=record_timeline) for one in self.all)


def lifetimes(sub_array: SubArray, decisions: Sequence[Decision]) -> Lifetimes:
    """Return when a sub-array's bundles are used under a plan's decisions to swap or recompute.

    Raises:
        PlanError: ``array-bundle`` for bundles that it has not, or that cannot be moved so.
    """
    names = {bundle.name: number for number, bundle in enumerate(sub_array.bundles)}
    allowed = {"swap": set(movable(sub_array)), "recompute": set(recomputable(sub_array))}
    of_choice = {
        choice: [sub_array.bundles[number].name for number in sorted(numbers)]
        for choice, numbers in allowed.items()
    }
    PlanError.check(
        Violation(
            f"the plan decides {decision.choice!r} for the bundle {decision.bundle!r}, which this "
            "model has not, or whose reader is another than the backward pass; plan this model "
            f"again. It has {', '.join(of_choice[decision.choice]) or 'none'}.",
            "array-bundle",
        )
        for decision in decisions
        if names.get(decision.bundle) not in allowed[decision.choice]
    )
    return Lifetimes(
        Uses(sub_array),
        {names[d.bundle]: d.ahead for d in decisions if d.choice == "swap"},
        frozenset(names[d.bundle] for d in decisions if d.choice == "recompute"),
        {names[d.bundle]: d.behind for d in decisions if d.behind is not None},
    )


def orders(arrays: Sequence[Lifetimes], turns: Turns) -> tuple[Order, Order | None, Order | None]:
    """Return the segments in order of issue: the body, and prologue and epilogue if multiplexed."""
    layers = [life.sub_array.num_layers for life in arrays]
    if turns == "in turn":
        nodes = [(a, segment, 0) for a, count in enumerate(layers) for segment in range(2 * count)]
        return Order(arrays, nodes), None, None
    forward = [
        [(a, segment, 0 if a else 1) for segment in range(count)] for a, count in enumerate(layers)
    ]
    backward = [
        [(a, segment, 0) for segment in range(count, 2 * count)] for a, count in enumerate(layers)
    ]
    last = len(layers) - 1
    nodes = [node for a in range(last) for node in _beside(backward[a], forward[a + 1])]
    body = [*nodes, *_beside(backward[last], forward[0])]
    prologue = [(0, segment, 0) for _, segment, _ in forward[0]]
    return (
        Order(arrays, body, True),
        Order(arrays, prologue),
        Order(arrays, [*nodes, *backward[last]], True),
    )


def _beside(backward: Sequence[Node], forward: Sequence[Node]) -> list[Node]:
    """Interleave the segments of two passes in proportion to their lengths; a backward segment goes
    first, since it gives memory back."""
    of_both = [((2 * n + 1) * len(forward), 0, node) for n, node in enumerate(backward)]
    of_both += [((2 * n + 1) * len(backward), 1, node) for n, node in enumerate(forward)]
    return [node for _, _, node in sorted(of_both)]


def build_array(
    arrays: Sequence[Lifetimes],
    turns: Turns,
    programs: Programs,
    memory_limit_bytes: int | None = None,
) -> ArraySteps:
    """Return the steps of sub-arrays in an order.

    Args:
        memory_limit_bytes: Of the device, above which a step waits for what goes out. A step that
            needs more all the same is built; its replay says so.
    """
    body, prologue, epilogue = (
        None if order is None else _written(order, programs, memory_limit_bytes)
        for order in orders(arrays, turns)
    )
    assert body is not None, "every order has a body"
    return ArraySteps(body, prologue, epilogue)


def issue(order: Order, programs: Programs, listener: Listener, limit_bytes: int | None) -> Issue:
    """Issue a step within a limit; without one, there is room for all that comes early."""
    if limit_bytes is None:
        return Issue(order, programs, listener, inf)
    # What it needs where nothing comes early and everything is waited for.
    least = Issue(order, programs, Listener())
    return Issue(order, programs, listener, limit_bytes, least.needs)


def _written(order: Order, programs: Programs, limit_bytes: int | None) -> Step:
    writer = _ArrayWriter(order)
    issue(order, programs, writer, limit_bytes)
    return writer.end()


class _ArrayWriter(Listener):
    """A listener that writes what is issued as instructions."""

    def __init__(self, order: Order):
        self._arrays = order.arrays
        leaves = (life.sub_array.num_leaves for life in order.arrays)
        self._first_leaf = list(accumulate(leaves, initial=0))
        self._device = Place("device", (0,))
        self._host = Place(HOST, (0,), Host(HOST))
        self._step = Step((self._device, self._host))
        self._here: dict[Key, int] = {}
        self._there: dict[Key, int] = {}
        #: Of what outlives the step, the slot that it had before it.
        self._again: dict[tuple[Key, bool], int] = {}
        shared = dict[str, int]()
        for a, life in enumerate(self._arrays):
            for number, bundle in enumerate(life.sub_array.bundles):
                if bundle.shared and bundle.name in shared:
                    self._here[a, number] = shared[bundle.name]
                elif bundle.is_state:
                    slot = self._here[a, number] = self._kept((a, number), host=False)
                    shared |= {bundle.name: slot} if bundle.shared else {}
        #: Of what all sub-arrays read of batches, by its name and the number of the batch.
        self._common = order.fed_to_all()
        self._fed: dict[tuple[str, int], int] = {}
        first = self._arrays[0]
        for number, name in self._common[0].items() if order.carries else ():
            self._fed[name, 0] = self._kept((0, number), host=False)
        for number in first.between if order.carries else ():
            host = number in first.swapped
            slot = self._again[(0, number), host] = self._kept((0, number), host=host)
            (self._there if host else self._here)[0, number] = slot

    def end(self) -> Step:
        """Return the step, when everything is issued."""
        step = self._step
        if step.reported:
            self._add(Free(tuple(step.reported)))
        before = set(step.persistent.values())
        left = [*self._here.items(), *self._there.items()]
        step.made |= {self._name(key): slot for key, slot in left if slot not in before}
        step.made |= {self._name(step.slots[slot].holds): slot for slot in self._fed.values()}
        return step

    def _add(self, instruction: Instruction) -> None:
        self._step.instructions.append(instruction)

    def _name(self, key: Key) -> str:
        bundle = self._bundle(key)
        return f"{0 if bundle.feed and bundle.shared else key[0]}: {bundle.name}"

    def _bundle(self, key: Key):
        return self._arrays[key[0]].sub_array.bundles[key[1]]

    def _kept(self, key: Key, host: bool) -> int:
        slot = self._new(key, host)
        self._step.persistent[self._name(key)] = slot
        return slot

    def _new(self, key: Key, host: bool) -> int:
        """Return a new slot for a bundle, or that from before the step if it outlives it."""
        if (key, host) in self._again:
            return self._again[key, host]
        bundle, place = self._bundle(key), self._host if host else self._device
        name = f"{self._name(key)} #{len(self._step.slots)}"
        category = "swapped" if host else bundle.category
        return self._step.slot(
            name, place, category, bundle.nbytes, bundle.category, HeldBundle(*key)
        )

    # ---- what is issued --------------------------------------------------------------------------

    def run(self, a: int, call: Call, facts: ProgramFacts, node: Node) -> None:
        sub_array, common, (_, at, batch) = self._arrays[a].sub_array, self._common[a], node
        if facts.name not in self._step.programs:
            called = SegmentCall(a, call, facts.seconds)
            program = Program(call.kind, self._device, facts.transient_bytes, called)
            self._step.programs[facts.name] = program
        inputs = tuple(
            self._fed[common[number], batch] if number in common else self._here[a, number]
            for number in call.inputs
        )
        donated = tuple(self._here[a, number] for number in call.donated)
        outputs = []
        for number in call.outputs:
            state = sub_array.bundles[number].is_state
            outputs.append(self._here[a, number] if state else self._new((a, number), host=False))
        for number in call.donated:
            del self._here[a, number]
        for number, slot in zip(call.outputs, outputs, strict=True):
            if number == sub_array.loss:
                self._step.reported.append(slot)
            else:
                self._here[a, number] = slot
        label = f"{call.kind} {self._layer(a, call.segment)} of sub-array {a}"
        label += f" for layer {self._layer(a, at)}" if call.kind == "recompute" else ""
        self._add(Run(facts.name, (inputs,), tuple(outputs), donated, label))

    def _layer(self, a: int, segment: int) -> int:
        layers = self._arrays[a].sub_array.num_layers
        return segment if segment < layers else 2 * layers - 1 - segment

    def feed(self, a: int, number: int, batch: int) -> None:
        bundle = self._bundle((a, number))
        slot = self._new((a, number), host=False)
        if number in self._common[a]:
            self._fed[self._common[a][number], batch] = slot
        else:
            self._here[a, number] = slot
        leaves = tuple(self._first_leaf[a] + leaf for leaf in bundle.feed)
        self._add(Feed(slot, batch, leaves, f"feed {bundle.name} to sub-array {a}"))

    def drop(self, a: int, number: int, batch: int) -> None:
        self._add(Free((self._fed.pop((self._common[a][number], batch)),)))

    def fetch(self, a: int, number: int) -> None:
        self._copy(a, number, self._there, self._here, "fetch")

    def arrived(self, a: int, number: int) -> None:
        self._wait(a, number, self._here, ends=self._there)

    def swap_out(self, a: int, number: int) -> None:
        self._copy(a, number, self._here, self._there, "swap out")

    def left(self, a: int, number: int) -> None:
        self._wait(a, number, self._there, ends=self._here)

    def stays(self, a: int, number: int) -> None:
        self._wait(a, number, self._there, ends=self._there)

    def _copy(
        self, a: int, number: int, source: dict[Key, int], target: dict[Key, int], what: str
    ) -> None:
        """Copy a bundle between the slots of the device and those of the host."""
        bundle, key = self._bundle((a, number)), (a, number)
        slot = self._new(key, host=target is self._there)
        label = f"{what} {bundle.name} of sub-array {a}"
        self._add(Copy(source[key], slot, bundle.nbytes, label))
        target[key] = slot

    def _wait(self, a: int, number: int, awaited: dict[Key, int], *, ends: dict[Key, int]) -> None:
        """Wait for a bundle's copy, and end one of its slots."""
        self._add(Wait(awaited[a, number]))
        self._add(Free((ends.pop((a, number)),)))

    def free(self, a: int, numbers: Sequence[int]) -> None:
        self._add(Free(tuple(self._here.pop((a, number)) for number in numbers)))

    def has_left(self, a: int, number: int, since: int) -> bool:
        return since >= self._arrays[a].behind.get(number, inf)


def array_seconds(step: Step, host: HostLink) -> Seconds:
    """Return the seconds of an array's step: of programs as their calls are known to take, and of
    copies over the link with the host."""

    def transfer(of: Feed | Copy, nbytes: int, source: Place | None, target: Place) -> float:
        inwards = source is None or source.host is not None
        return (host.to_device if inwards else host.to_host).seconds(nbytes)

    programs = {name: program.call.seconds for name, program in step.programs.items()}
    return Seconds(programs, transfer, host.duplex)


def recomputed_bytes(arrays: Sequence[Lifetimes]) -> int:
    """Return the bytes of the bundles that one body makes again."""
    return sum(
        life.sub_array.bundles[number].nbytes for life in arrays for number in life.recomputed
    )


def peak_of(ledgers: Sequence[Ledger], memory: int | str) -> tuple[int, str, Mapping[str, int]]:
    """Return the highest peak of several steps in a memory: bytes, instruction, and by category."""
    peak = max((ledger.peak_of(memory) for ledger in ledgers), key=lambda peak: peak.peak_bytes)
    return peak.peak_bytes, peak.instant, peak.parts
