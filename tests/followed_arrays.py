"""The arrays of a step of packs, followed from slot to slot."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from capture.model.graph import LayerGraph
from capture.plan.task_graph import Span, TaskGraph
from capture.step.holds import Leaves, Loss, Params, State, Summary, Values
from capture.step.pack_sizes import PackLayers, PackPass
from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait
from tests.synthetic_graphs import LOSS_BYTES, MICROBATCH_SIZE

Array = tuple
"""("param" | "state", id, version), ("value" | "cotangent" | "batch", id, lane, first, stop),
("cast", parameter, version), ("grad" | "cast grad", parameter, what was summed), ("summary", pack)
or ("loss",); of any, ("share", which, array)."""

#: Each takes another number of bytes.
PASSES = ("reduce", "gather", "scatter", "update", "forward", "backward", "accumulate")
EXCHANGES = PASSES[:3]


@dataclass(frozen=True)
class GraphSizes:
    """Of a layer graph and an optimizer with two values per parameter, which knows packs alone;
    devices may get some parameters as casts of half the bytes, and shares."""

    graph: LayerGraph
    summary: int
    packs: frozenset[Span]
    casts: frozenset[int] = frozenset()
    num_shares: int = 1

    def once(self, param: int) -> bool:
        return param in self.casts and len(self.graph.param_readers(param)) == 1

    @cached_property
    def layers(self) -> PackLayers:
        return PackLayers.of(self.graph, self.casts)

    def param_bytes(self, param: int) -> int:
        return self.graph.params[param].nbytes

    def streamed_bytes(self, param: int) -> int:
        return self.param_bytes(param) // (2 if param in self.casts else 1)

    def weight_bytes(self, span: Span) -> int:
        return sum(map(self.param_bytes, self.layers.owned(span)))

    def flowing(self, layer: int) -> list[int]:
        return [v for v in self.layers.values[layer] if self.graph.values[v].differentiable]

    def nbytes(self, holds: object) -> int:
        match holds:
            case Params(ids, form, share):
                sent = {p for p in ids if form == "sent" or (form == "alone" and self.once(p))}
                parts = [self.streamed_bytes(p) if p in sent else self.param_bytes(p) for p in ids]
                return sum(parts if share is None else [-(-n // self.num_shares) for n in parts])
            case State(params):
                assert params in map(self.layers.owned, self.packs)
                return 2 * sum(map(self.param_bytes, params)) + 1
            case Summary(params):
                assert params in map(self.layers.owned, self.packs)
                return self.summary
            case Values(ids, (first, stop), gradients):
                values = (v for v in ids if not gradients or self.graph.values[v].differentiable)
                return sum(self.row_bytes("value", v, stop - first) for v in values)
            case Leaves(ids, (first, stop)):
                return sum(self.row_bytes("batch", leaf, stop - first) for leaf in ids)
            case Loss():
                return LOSS_BYTES
        raise AssertionError(holds)

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        own = PASSES.index(which) * 1000 + 10 * size
        return own + self.weight_bytes(pack) + output_bytes

    def row_bytes(self, what: str, key: int, examples: int) -> int:
        tensor = (self.graph.batch if what == "batch" else self.graph.values)[key]
        each = tensor.nbytes // MICROBATCH_SIZE
        return tensor.nbytes if tensor.batch_dim is None else each * examples

    def array_bytes(self, array: Array) -> int:
        match array:
            case ("param" | "grad", param, _):
                return self.param_bytes(param)
            case ("cast" | "cast grad", param, _):
                return self.streamed_bytes(param)
            case ("share", _, whole):
                return -(-self.array_bytes(whole) // self.num_shares)
            case ("state", pack, _):
                return self.nbytes(State(self.layers.owned(pack)))
            case ("summary", _):
                return self.summary
            case ("loss",):
                return LOSS_BYTES
            case (what, key, _, first, stop):
                return self.row_bytes(what, key, stop - first)
        raise AssertionError(array)


#: By kind of array, what its slot may be counted as; on the host all that passes is.
CATEGORIES = {
    "param": {"parameters"},
    "cast": {"parameters"},
    "state": {"optimizer"},
    "summary": {"optimizer"},
    "grad": {"gradients"},
    "cast grad": {"gradients"},
    "batch": {"batch"},
    "value": {"activations", "kept activations"},
    "cotangent": {"cotangents", "activations"},
    "loss": {"loss"},
}


class Followed:
    """What is in every slot of a step that a builder has built."""

    def __init__(self, graph: TaskGraph, sizes: GraphSizes, step: Step):
        self.graph, self.sizes, self.step = graph, sizes, step
        self.holds = [slot.holds for slot in self.step.slots]
        of: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for task in graph.tasks:
            lane = task.rank if graph.mode == "dp" else 0
            of[lane, task.station] |= dict(enumerate(task.sizes, task.start))
        cuts: defaultdict[int, set[int]] = defaultdict(set)
        for (lane, _), by_number in of.items():
            cuts[lane].update(accumulate((by_number[i] for i in sorted(by_number)), initial=0))
        #: Parts of the batch, as they are numbered: (lane, first, stop).
        self.parts = [
            (lane, *part) for lane, ends in sorted(cuts.items()) for part in pairwise(sorted(ends))
        ]
        shares = {lane: max(ends) for lane, ends in cuts.items()}
        self.examples = {(lane, e) for lane, share in shares.items() for e in range(share)}
        self.tasks = {(task.first, task.stop) for task in graph.tasks}
        self.packs = sorted(sizes.packs)
        self.there: dict[int, list[Array]] = {}
        self.passed: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for name, slot in self.step.persistent.items():
            what, which = self.step.slots[slot].what, getattr(self.holds[slot], "share", None)
            of, count = "state of layers" if what == "state" else f"{what} of", sizes.num_shares
            share = "" if which is None else f", share {which + 1} of {count}"
            first, last = map(int, re.findall(rf"^{of} (\d+) to (\d+){share}$", name)[0])
            owned = sizes.layers.owned((first, last + 1))
            held = getattr(self.holds[slot], "params" if what == "state" else "ids")
            assert held == (sizes.layers.cast((first, last + 1)) if what == "casts" else owned)
            self.write(slot, self.persistent(slot, 0))
        for instruction in self.step.instructions:
            self.follow(instruction)

    def persistent(self, slot: int, version: int) -> list[Array]:
        holds = self.holds[slot]
        if isinstance(holds, State):
            (span,) = (pack for pack in self.packs if self.sizes.layers.owned(pack) == holds.params)
            return [("state", span, version)]
        kind = "cast" if self.step.slots[slot].what == "casts" else "param"
        arrays: list[Array] = [(kind, p, version) for p in holds.ids]
        if holds.share is not None:
            arrays = [("share", holds.share, array) for array in arrays]
        return arrays

    def whole(self, slots: Sequence[int]) -> list[Array]:
        """What is in slots; of shares, which come one after the other."""
        count, found = self.sizes.num_shares, []
        if count == 1:
            return [array for slot in slots for array in self.there[slot]]
        for first in range(0, len(slots), count):
            parts = [self.there[slot] for slot in slots[first : first + count]]
            for arrays in zip(*parts, strict=True):
                assert arrays == tuple(("share", i, arrays[0][2]) for i in range(count))
                found.append(arrays[0][2])
        return found

    def write(self, slot: int, arrays: list[Array]) -> None:
        assert slot not in self.there, f"{self.step.slots[slot]} is overwritten"
        assert self.step.slots[slot].nbytes == sum(map(self.sizes.array_bytes, arrays))
        kinds = {array[2][0] if array[0] == "share" else array[0] for array in arrays}
        assert all(self.step.slots[slot].category in CATEGORIES[kind] for kind in kinds)
        self.there[slot] = arrays

    def follow(self, instruction: Instruction) -> None:
        step = self.step
        match instruction:
            case Feed(slot, part, leaves):
                self.write(slot, [("batch", leaf, *self.parts[part]) for leaf in leaves])
                assert self.holds[slot] == Leaves(leaves, self.parts[part][1:])
            case Copy(source, target, nbytes, _, index):
                arrays = self.there[source]
                if index is not None:
                    chosen = index if isinstance(index, tuple) else (index,)
                    arrays = [arrays[i] for i in chosen]
                self.write(target, list(arrays))
                assert step.slots[target].place is not step.slots[source].place
                assert nbytes == step.slots[target].nbytes
                assert step.slots[target].what == step.slots[source].what or index is not None
                if step.slots[target].what == "shared":
                    what, (param,) = self.holds[target].share, self.holds[target].ids
                    wanted = ("cast" if param in self.sizes.casts else "param", param, 0)
                    assert arrays == [wanted if what is None else ("share", what, wanted)]
            case Wait(slot):
                assert slot in self.there
            case Free(slots):
                for slot in slots:
                    del self.there[slot]
            case Run():
                self.run(instruction)

    def run(self, run: Run) -> None:
        kind, (first, stop), size, *_ = self.step.programs[run.program].call
        program, slots = self.step.programs[run.program], self.step.slots
        for slot in (*(s for group in run.inputs for s in group), *run.outputs):
            on = slots[slot].place
            assert on is program.place or (kind in EXCHANGES and on.host is None)
        given = [[a for slot in group for a in self.there[slot]] for group in run.inputs]
        kinds = {"accumulate": "backward"}
        assert program.kind == kinds.get(kind, kind)
        match kind:
            case "forward":
                made = self.forward(run, (first, stop), size, given)
            case "backward" | "accumulate":
                made = self.backward(run, (first, stop), size, given)
            case "cast" | "widen":
                made = self.converted(run, kind)
            case "gather" | "scatter":
                made = self.exchanged(run, kind)
                one = [a for slot in run.outputs[: len(run.inputs[0])] for a in made[slot]]
                nbytes = sum(map(self.sizes.array_bytes, one))
                wanted = self.sizes.transient_bytes(kind, (first, stop), 0, nbytes)
                assert program.transient_bytes == wanted
            case _:
                made = self.updated(run, (first, stop), given)
                summed = self.sizes.weight_bytes((first, stop)) if kind == "reduce" else 0
                assert program.transient_bytes == (
                    0
                    if program.place.host  # its temporaries are not booked
                    else self.sizes.transient_bytes(kind, (first, stop), 0, summed)
                )
                assert program.call[2:4] == (0, program.place.devices[0])
                does = "summarize gradients" if kind == "summarize" else r"update( 0)?"
                if kind != "reduce":
                    assert re.fullmatch(f"{does} of layers {first} to {stop - 1}", run.label)
        if kind in ("forward", "backward", "accumulate"):
            results = [a for slot in made.values() for a in slot if "grad" not in a[0]]
            wanted = self.sizes.transient_bytes(
                kind, (first, stop), size, sum(map(self.sizes.array_bytes, results))
            )
            assert program.transient_bytes == wanted
            at = run.label.removesuffix(f" of layers {self.layers_of(run.label, first, stop)}")
            assert re.fullmatch(rf"{program.kind} \d+", at), run.label
        for slot in run.donated:
            del self.there[slot]
        assert tuple(made) == run.outputs
        for slot, arrays in made.items():
            self.write(slot, arrays)

    def layers_of(self, label: str, first: int, stop: int) -> str:
        """A task's, of which a pass may have some."""
        start, end = map(int, re.findall(r"layers (\d+) to (\d+)$", label)[0])
        assert start <= first < stop <= end + 1 and (start, end + 1) in self.tasks
        return f"{start} to {end}"

    def forward(
        self, run: Run, span: Span, size: int, given: Sequence[list[Array]]
    ) -> dict[int, list[Array]]:
        weights, entering, batch = given
        assert not run.donated
        self.reads(weights, span)
        lane, rows = self.range_of([*entering, *batch], size)
        self.joined(run.inputs[1], "value", self.sizes.layers.values[span[0]], (lane, *rows))
        self.reads_batch(run.inputs[2], span, (lane, *rows))
        self.note("forward", span, lane, rows)
        self.named(run, [*run.inputs[1], *run.inputs[2], *run.outputs])
        if self.step.slots[run.outputs[0]].what == "loss":
            assert span[1] == len(self.sizes.layers)
            return {run.outputs[0]: [("loss",)]}
        return self.pieces(run.outputs, "value", self.sizes.layers.values[span[1]], (lane, *rows))

    def backward(
        self, run: Run, span: Span, size: int, given: Sequence[list[Array]]
    ) -> dict[int, list[Array]]:
        weights, entering, batch, cotangents, summed = given
        assert bool(summed) == run.program.startswith("accumulate")
        assert run.donated == run.inputs[4]
        self.reads(weights, span)
        lane, rows = self.range_of([*entering, *batch, *cotangents], size)
        self.joined(run.inputs[1], "value", self.sizes.layers.values[span[0]], (lane, *rows))
        self.reads_batch(run.inputs[2], span, (lane, *rows))
        leaving = self.sizes.flowing(span[1])
        self.joined(run.inputs[3], "cotangent", leaving, (lane, *rows))
        self.note("backward", span, lane, rows)
        self.named(run, [*run.inputs[1], *run.inputs[2], *run.inputs[3], *run.outputs])
        names = [self.step.slots[slot].what for slot in run.outputs]
        losses = names.count("loss")
        assert losses == (span[1] == len(self.sizes.layers))
        num_rows = names.count("gradient")
        outputs, gradients = run.outputs[:num_rows], run.outputs[num_rows + losses :]
        made = (
            self.pieces(outputs, "cotangent", self.sizes.flowing(span[0]), (lane, *rows))
            if span[0]
            else {}
        )
        for slot in run.outputs[num_rows : num_rows + losses]:
            assert slot in self.step.reported
            made[slot] = [("loss",)]
        new = frozenset((span, lane, e) for e in range(*rows))
        shared = self.sizes.layers.shared(span)
        params = [self.sizes.layers.owned(span), *((p,) for p in shared)]
        assert [self.holds[slot].ids for slot in gradients] == params
        before = {p: of for _, p, of in summed}
        for slot, own in zip(gradients, params, strict=True):
            sums = [before.pop(p, frozenset()) for p in own]
            assert all(of.isdisjoint(new) for of in sums), "an example counts twice"
            made[slot] = [
                (
                    "cast grad"
                    if self.holds[slot].form == "alone" and self.sizes.once(p)
                    else "grad",
                    p,
                    of | new,
                )
                for p, of in zip(own, sums, strict=True)
            ]
        assert not before
        return made

    def converted(self, run: Run, kind: str) -> dict[int, list[Array]]:
        """New casts of new weights, in the place of old ones; or gradients of parameters."""
        (target,) = run.outputs
        if kind == "widen":
            assert run.inputs == (run.donated,)
            given = self.there[run.donated[0]]
            assert any(array[0] == "cast grad" for array in given)
            return {target: [("grad", p, of) for _, p, of in given]}
        ((source,), old) = run.inputs
        assert old == run.donated == run.outputs
        assert self.there[source] == self.weights_of(source, 1)
        assert self.there[target] == self.persistent(target, 0)
        return {target: self.persistent(target, 1)}

    def weights_of(self, slot: int, version: int) -> list[Array]:
        assert self.step.slots[slot].what == "weights"
        return self.persistent(slot, version)

    def exchanged(self, run: Run, kind: str) -> dict[int, list[Array]]:
        """Weights of the shares of all devices, or the share of each of their gradients."""
        ranks, made = [*map(list, zip(*run.inputs, strict=True))], {}
        assert sorted(run.donated) == sorted(slot for group in run.inputs for slot in group)
        count = len(ranks)
        for i, slots in enumerate(ranks):
            outputs = run.outputs[i::count]
            assert [self.step.slots[slot].place for slot in slots] == [
                self.step.slots[slot].place for slot in outputs
            ]
            if kind == "gather":
                made |= {slot: self.whole(slots) for slot in outputs}
                continue
            params = [array[1] for array in self.there[slots[0]]]
            whole = self.summed((a for slot in slots for a in self.there[slot]), params)
            for which, slot in enumerate(outputs):
                made[slot] = [("share", which, ("grad", p, whole[p])) for p in params]
        return {slot: made[slot] for slot in run.outputs}

    def updated(self, run: Run, span: Span, given: Sequence[list[Array]]) -> dict[int, list[Array]]:
        kind, owned = run.program.split()[0], self.sizes.layers.owned(span)
        if kind == "reduce":
            assert run.inputs == tuple((slot,) for slot in run.donated)  # a group of each device
            assert [self.step.slots[slot].place for slot in run.donated] == [
                self.step.slots[slot].place for slot in run.outputs
            ]
            whole = self.summed((a for group in given for a in group), owned)
            return {slot: [("grad", p, whole[p]) for p in owned] for slot in run.outputs}
        weights, state, gradients = self.whole(run.inputs[0]), given[1], self.whole(run.inputs[2])
        assert weights == [("param", p, 0) for p in owned] and state == [("state", span, 0)]
        readers = {p: {pack for pack in self.packs if p in self.read_by(pack)} for p in owned}
        assert self.summed(gradients, owned) == {
            p: {(pack, *e) for pack in packs for e in self.examples} for p, packs in readers.items()
        }
        if kind == "summarize":  # behind all passes: the devices have nothing left of them
            assert not run.donated
            here = [s for slot in self.there if (s := self.step.slots[slot]).place.host is None]
            assert all(slot.what == "loss" for slot in here)
            return {run.outputs[0]: [("summary", span)]}
        others = [pack for pack in self.packs if pack != span] if self.sizes.summary else []
        assert given[3] == [("summary", pack) for pack in others]
        changed = (*run.inputs[0], *run.inputs[1])
        assert run.donated == (*changed, *run.inputs[2])
        made = {slot: self.weights_of(slot, 1) for slot in run.inputs[0]}
        return made | {run.inputs[1][0]: [("state", span, 1)]}

    # ---- what is asked of arrays -----------------------------------------------------------------

    def read_by(self, span: Span) -> tuple[int, ...]:
        return self.sizes.graph.stage_params(*span)

    def reads(self, weights: Iterable[Array], span: Span) -> None:
        """All parameters that layers read, and no new ones."""
        held = [(param, version) for _, param, version in weights]
        assert len(held) == len({*held}) and not any(version for _, version in held)
        assert {*self.read_by(span)} <= {param for param, _ in held}

    def reads_batch(self, slots: Sequence[int], span: Span, rows: tuple[int, int, int]) -> None:
        """What its task reads, where the pass is a part of one; nothing if it reads none."""
        leaves = self.sizes.layers.leaves(span)
        assert bool(slots) == bool(leaves)
        given = self.holds[slots[0]].ids if slots else ()
        self.joined(slots, "batch", given, rows)
        assert {*leaves} <= {*given}

    def range_of(self, arrays: Sequence[Array], size: int) -> tuple[int, Span]:
        lanes = {array[2] for array in arrays}
        first, stop = min(array[3] for array in arrays), max(array[4] for array in arrays)
        assert len(lanes) == 1 and stop - first == size
        return lanes.pop(), (first, stop)

    def joined(
        self, slots: Sequence[int], what: str, keys: Sequence[int], rows: tuple[int, int, int]
    ) -> None:
        """Of every key, pieces that follow one another; where several slots have a piece, in the
        order of the keys."""
        pieces: defaultdict[Span, list[int]] = defaultdict(list)
        for slot in slots:
            for kind, key, lane, first, stop in self.there[slot]:
                assert kind == what and lane == rows[0]
                pieces[first, stop].append(key)
        wanted = [list(keys)] * len(pieces)
        assert [*pieces.values()] == wanted, f"{[self.step.slots[s] for s in slots]}"
        if keys:
            ends = [first for first, _ in pieces] + [rows[2]]
            assert list(pieces) == list(pairwise(ends)) and ends[0] == rows[1]

    def pieces(
        self, slots: Sequence[int], what: str, keys: Sequence[int], rows: tuple[int, int, int]
    ) -> dict[int, list[Array]]:
        held = [self.holds[slot].rows for slot in slots]
        assert held == list(pairwise([rows[1], *(stop for _, stop in held)]))
        assert held[-1][1] == rows[2]
        return {
            slot: [(what, key, rows[0], *self.holds[slot].rows) for key in keys] for slot in slots
        }

    def named(self, run: Run, slots: Sequence[int]) -> None:
        """Where rows come in pieces, the name has the size of each: the program is another."""
        held = (getattr(self.holds[slot], "rows", None) for slot in slots)
        pieces = sorted({rows for rows in held if rows})
        sizes = "+".join(str(stop - first) for first, stop in pieces)
        assert run.program.split()[5:] == ([sizes] if len(pieces) > 1 else [])

    def note(self, kind: str, span: Span, lane: int, rows: Span) -> None:
        for layer in range(*span):
            self.passed[kind, layer] += [(lane, e) for e in range(*rows)]

    @staticmethod
    def summed(gradients: Iterable[Array], owned: Sequence[int]) -> dict[int, set]:
        found: dict[int, set] = {p: set() for p in owned}
        for _, param, of in gradients:
            assert found[param].isdisjoint(of), f"a gradient of {param} counts twice: {of}"
            found[param] |= of
        return found
