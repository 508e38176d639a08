"""Which operations each layer runs, once the cut positions are known, and what it is called.

A layer runs its own operations and its own copies of the recomputed ones that it needs
(``LossProgram.recomputed``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from capture.tracing.program import LossProgram, Op


@dataclass(frozen=True, eq=False)
class LayerOps:
    """The operations of one layer, and the values that they read and make, each list ascending.

    Attributes:
        ops: Operations in program order, recomputed ones included.
        own: Number of operations that run in no other layer.
        params, batch, consts: Leaves and constants that the ops read.
        inputs: Values of earlier layers that the ops read.
        outputs: Values that later layers read, and results of the program; the last layer makes the
            loss.
    """

    ops: tuple[Op, ...]
    own: int
    params: tuple[int, ...]
    batch: tuple[int, ...]
    consts: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(
        cls, program: LossProgram, positions: Collection[int], outputs: Iterable[int] = ()
    ) -> LayerOps:
        """Return some operations of a program, all of them its own."""
        ops = tuple(program.ops[i] for i in sorted(positions))
        read = {v for op in ops for v in op.reads} - {v for op in ops for v in op.outputs}
        groups = [sorted(read.intersection(of)) for of in program.leaves]
        inputs = read.difference(*groups)
        return cls(ops, len(ops), *map(tuple, [*groups, sorted(inputs), sorted(outputs)]))

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)


def assign_layers(program: LossProgram, cuts: Sequence[int]) -> list[LayerOps]:
    """Return the layers between consecutive cut positions
    ``0 = cuts[0] < ... < cuts[-1] = len(program.ops)``.

    An op that is cheap to repeat (``program.recomputed``) belongs to no layer: each gets a copy of
    those that it needs, backwards through what they read, so that nothing cheap crosses a border.
    A value leaves the layer that it belongs to, never one that has a copy, but for results of the
    last.
    """
    picked: list[tuple[set[int], LayerOps]] = []
    crossing = set[int]()
    for k, (start, stop) in enumerate(pairwise(cuts)):
        own = [i for i in range(start, stop) if i not in program.recomputed]
        wanted = {v for i in own for v in program.ops[i].reads}
        if k == len(cuts) - 2:
            wanted |= program.results
        copied: set[int] = set()
        pending = list(wanted)
        while pending:
            i = program.producer.get(pending.pop())
            if i in program.recomputed and i not in copied:
                copied.add(i)
                pending += program.ops[i].reads
        positions = {*own, *copied}
        picked.append((positions, replace(LayerOps.of(program, positions), own=len(own))))
        crossing.update(picked[-1][1].inputs)
    layers = []
    for k, (positions, layer) in enumerate(picked):
        is_last = k == len(picked) - 1
        made = {
            v
            for i in positions
            if is_last or i not in program.recomputed
            for v in program.ops[i].outputs
        }
        outputs = made & (program.results if is_last else crossing | program.results)
        layers.append(replace(layer, outputs=tuple(sorted(outputs))))
    return layers


def layer_names(layers: Sequence[LayerOps]) -> list[str]:
    """Return the name of every layer: the name scope that all its ops share, where it tells the
    layer from the others; else ``layer_3``."""
    scopes = [_common_scope([op.scope for op in layer.ops if op.scope]) for layer in layers]
    root = _common_scope(scopes)
    return [
        scope if scope != root and scopes.count(scope) == 1 else f"layer_{i}"
        for i, scope in enumerate(scopes)
    ]


def _common_scope(scopes: Sequence[str]) -> str:
    same = takewhile(
        lambda parts: len(set(parts)) == 1,
        zip(*(scope.split("/") for scope in scopes), strict=False),
    )
    return "/".join(parts[0] for parts in same)
