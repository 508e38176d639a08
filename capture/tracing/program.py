"""The traced loss as one flat list of operations, and what each value depends on.

Values are small integers, so that cutting and slicing never touch JAX variables. Calls and
rematerialised regions have been opened (``flatten.py``); the operations of a region remember it, so
that slices can wrap them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax.extend import core as jex_core

from capture.tracing.jaxprs import primitives

#: Never computed twice because two layers need the result: too expensive, or too opaque to tell.
NEVER_RECOMPUTED = primitives("""
    dot_general ragged_dot conv_general_dilated sort scan while cond custom_vjp_call shard_map
    pallas_call custom_partitioning pure_callback io_callback""")


@dataclass(frozen=True)
class RematRegion:
    """The identity of a ``jax.checkpoint`` region of the model.

    Attributes:
        region_id: Number in order of appearance.
        segment: Number of layer marks before; a mark inside a region divides it in two.
        policy: What the region may save, as given to ``jax.checkpoint``.
        prevent_cse: The argument given to ``jax.checkpoint``.
    """

    region_id: int
    segment: int
    policy: Callable[..., Any] | None = field(compare=False)
    prevent_cse: Any = field(compare=False)


@dataclass(frozen=True, eq=False)
class Op:
    """One equation of the flat program; an input is the id of a value or a literal.

    Attributes:
        inputs: Value ids and literals.
        outputs: Value ids.
        context: JAX's context of the equation (``compute_on`` and the like).
        has_effects: Kept even if nobody reads its outputs.
        scope: Name scopes around it, joined with ``/``.
        traceback: Where the model calls it.
        regions: The remat regions around it, outermost first.
        flops: Forward floating-point operations.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[int | jex_core.Literal, ...]
    outputs: tuple[int, ...]
    context: Any
    has_effects: bool
    scope: str
    traceback: Any
    regions: tuple[RematRegion, ...]
    flops: int

    @property
    def reads(self) -> Iterator[int]:
        """The values among the operation's operands; literals are left out."""
        return filter(is_value, self.inputs)


def is_value(operand: object) -> TypeGuard[int]:
    """Tell whether an operand is a value of its program; others are literals."""
    return isinstance(operand, int)


@dataclass(frozen=True)
class Mark:
    """A layer boundary that the model carries: between ``ops[position - 1]`` and ``ops[position]``,
    on one value."""

    position: int
    value: int | None


@dataclass(frozen=True, eq=False)
class LossProgram:
    """A loss as operations on values 0..len(avals)-1.

    Attributes:
        ops: Operations in an order that respects dependencies.
        avals: Shape and dtype by value.
        consts: Closed-over arrays by value.
        params: Values of the parameter leaves, a leaf stacked over unrolled layers once per layer.
        batch: Values of the batch leaves, then of the random key.
        loss: Value of the loss.
        aux: Values of what else the traced function returns: leaves, constants or computed.
        marks: Layer boundaries, ascending.
    """

    ops: tuple[Op, ...]
    avals: tuple[Any, ...]
    consts: dict[int, Any]
    params: tuple[int, ...]
    batch: tuple[int, ...]
    loss: int
    aux: tuple[int, ...]
    marks: tuple[Mark, ...]

    @property
    def results(self) -> frozenset[int]:
        return frozenset((self.loss, *self.aux))

    @cached_property
    def leaves(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """The parameters, the batch and the constants."""
        return frozenset(self.params), frozenset(self.batch), frozenset(self.consts)

    @cached_property
    def producer(self) -> dict[int, int]:
        """The index of the op that makes each value; leaves and constants have none."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    def _reached_from(
        self, leaves: tuple[int, ...], stop: frozenset[str] = frozenset()
    ) -> frozenset[int]:
        reached = set(leaves)
        for op in self.ops:
            if op.primitive.name not in stop and not reached.isdisjoint(op.reads):
                reached.update(op.outputs)
        return frozenset(reached)

    @cached_property
    def from_params(self) -> frozenset[int]:
        """The values computed from parameters."""
        return self._reached_from(self.params)

    @cached_property
    def from_batch(self) -> frozenset[int]:
        """The values computed from the batch or the random key."""
        return self._reached_from(self.batch)

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """The floating-point parameters, and the floating-point values through which a gradient
        flows from the loss back to one of them."""
        reached = self._reached_from(self.params, stop=frozenset({"stop_gradient"}))
        passing = (reached & self.toward_loss).union(self.params)
        return frozenset(filter(self._is_inexact, passing))

    @cached_property
    def toward_loss(self) -> frozenset[int]:
        """The floating-point values to which a gradient comes back from the loss."""
        reached = {self.loss}
        for op in reversed(self.ops):
            if op.primitive.name != "stop_gradient" and not reached.isdisjoint(op.outputs):
                reached.update(filter(self._is_inexact, op.reads))
        return frozenset(reached)

    def _is_inexact(self, value: int) -> bool:
        return jnp.issubdtype(self.avals[value].dtype, jnp.inexact)

    def _is_early(self, op: Op) -> bool:
        """Tell whether an op needs parameters only, or batch only: any layer could run it."""
        return not op.has_effects and not (
            any(v in self.from_params for v in op.outputs)
            and any(v in self.from_batch for v in op.outputs)
        )

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The indices of ops that every layer which needs the result runs itself, so that the
        result never crosses a boundary.

        They are cheap and fed by leaves, constants and each other: casts and slices of parameters,
        masks, positions, key splits.
        """
        sources = {*self.params, *self.batch, *self.consts}
        found = set()
        for i, op in enumerate(self.ops):
            if (
                op.primitive.name not in NEVER_RECOMPUTED
                and self._is_early(op)
                and sources.issuperset(op.reads)
            ):
                found.add(i)
                sources.update(op.outputs)
        return frozenset(found)

    def sunk(self) -> LossProgram:
        """Return the program with ops that any layer could run just before their first user.

        A marked value stays where it is. An op moves in front of a remat region rather than into
        it, where it would divide the region.
        """
        users: dict[int, list[int]] = {}
        region_start: dict[RematRegion, int] = {}
        for i, op in enumerate(self.ops):
            for v in op.reads:
                users.setdefault(v, []).append(i)
            for region in op.regions:
                region_start.setdefault(region, i)
        anchored = {mark.value for mark in self.marks}
        position = list(range(len(self.ops)))

        def place_before(user: int, op: Op) -> int:
            outside = next((r for r in self.ops[user].regions if r not in op.regions), None)
            return position[user] if outside is None else region_start[outside]

        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            readers = [u for v in op.outputs for u in users.get(v, ())]
            if (
                readers
                and i not in self.recomputed
                and self._is_early(op)
                and anchored.isdisjoint(op.outputs)
            ):
                position[i] = max(i, min(place_before(u, op) for u in readers))
        order = sorted(range(len(self.ops)), key=lambda i: (position[i], i))
        moved = Counter(position)
        before = list(accumulate((moved[p] for p in range(len(self.ops))), initial=0))
        marks = tuple(Mark(before[mark.position], mark.value) for mark in self.marks)
        return replace(self, ops=tuple(self.ops[i] for i in order), marks=marks)

    def without_dead_ops(self) -> LossProgram:
        """Return the program without ops that make no result of it, nor anything that one needs."""
        live = set(self.results)
        kept = [False] * len(self.ops)
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            if op.has_effects or not live.isdisjoint(op.outputs):
                kept[i] = True
                live.update(op.reads)
        before = list(accumulate(kept, initial=0))
        marks = tuple(Mark(before[mark.position], mark.value) for mark in self.marks)
        return replace(self, ops=tuple(compress(self.ops, kept)), marks=marks)
