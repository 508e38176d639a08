"""A program as plain data: all that cutting it into layers and naming these reads, and nothing that
could run. What was traced once is kept as that, by content, and need not be traced again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capture.tracing.hashing import ProgramHasher
from capture.tracing.program import LossProgram, Mark, Op, RematRegion, is_value

#: The one dtype of keys that programs of arrays draw with; JAX has no name for it that makes it.
_KEY = "key<fry>"


@dataclass(frozen=True)
class _Primitive:
    """The name of a primitive in the place of the primitive: such an operation cannot run."""

    name: str


class OutlineHasher(ProgramHasher):
    """The hasher of a program's outline, which gives layers the same keys as the program."""

    def __init__(self, program: LossProgram, operations: Mapping[Op, str]):
        super().__init__(program)
        self._operations = operations

    def operation(self, op: Op) -> str:
        return self._operations[op]

    def const(self, value: int) -> str:
        return self._program.consts[value]

    def literal(self, atom: Any) -> str:
        return atom

    def region(self, region: RematRegion) -> str:
        return str(region.policy)


def outline(program: LossProgram, hasher: ProgramHasher) -> dict[str, Any]:
    """Return a program as JSON; ``hasher`` is the program's."""
    texts, regions = dict[str, int](), dict[RematRegion, int]()

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    ops = [
        [
            number(op.primitive.name),
            number(hasher.operation(op)),
            # A literal is a list with the number of its text.
            [v if is_value(v) else [number(hasher.literal(v))] for v in op.inputs],
            list(op.outputs),
            op.has_effects,
            [regions.setdefault(region, len(regions)) for region in op.regions],
            op.flops,
        ]
        for op in program.ops
    ]
    return {
        "ops": ops,
        "regions": [[r.region_id, r.segment, number(hasher.region(r))] for r in regions],
        "avals": [[number(str(a.dtype)), *map(int, a.shape)] for a in program.avals],
        "consts": {str(value): hasher.const(value) for value in program.consts},
        "params": list(program.params),
        "batch": list(program.batch),
        "loss": program.loss,
        "aux": list(program.aux),
        "marks": [[mark.position, mark.value] for mark in program.marks],
        "texts": list(texts),
    }


def outlined(document: Mapping[str, Any]) -> tuple[LossProgram, OutlineHasher]:
    """Return a program that cannot run, and its hasher, from its outline."""
    texts = document["texts"]
    primitives = [_Primitive(text) for text in texts]
    regions = [
        RematRegion(number, segment, texts[policy], None)
        for number, segment, policy in document["regions"]
    ]
    named = {number: _dtype(texts[number]) for number in {aval[0] for aval in document["avals"]}}
    structs: dict[tuple[int, ...], jax.ShapeDtypeStruct] = {}
    for aval in map(tuple, document["avals"]):
        if aval not in structs:
            structs[aval] = jax.ShapeDtypeStruct(aval[1:], named[aval[0]])
    operations: dict[Op, str] = {}
    for name, text, inputs, outputs, effects, around, flops in document["ops"]:
        op = Op(
            primitives[name],
            {},
            tuple([v if isinstance(v, int) else texts[v[0]] for v in inputs]),
            tuple(outputs),
            None,
            effects,
            "",
            None,
            tuple([regions[r] for r in around]),
            flops,
        )
        operations[op] = texts[text]
    program = LossProgram(
        tuple(operations),
        tuple([structs[tuple(aval)] for aval in document["avals"]]),
        {int(value): text for value, text in document["consts"].items()},
        tuple(document["params"]),
        tuple(document["batch"]),
        document["loss"],
        tuple(document["aux"]),
        tuple(Mark(position, value) for position, value in document["marks"]),
    )
    return program, OutlineHasher(program, operations)


def _dtype(name: str) -> Any:
    if name == _KEY:
        return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    return jnp.dtype(name)
