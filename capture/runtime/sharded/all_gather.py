"""One operation that reads sharded parameters, with its own derivative: all-gathers, computes,
forgets; and all-gathers again to go backwards.

Plain ``jax.jit`` on sharded parameters gathers once and keeps the whole parameter until the
backward pass. Here

* only the shards and the operation's other operands are saved; the backward pass gathers again;
* an all-gather is tied to what the operation needs anyway (``lax.optimization_barrier``), so that
  XLA gathers neither ahead nor twice as one; or, prefetched, to what the operation before needed:
  the forward pass then has two operations' parameters at most. Backwards, nothing is prefetched:
  an operation has two products there, with the all-gather beside the first and the reduce-scatter
  beside the second;
* gradients are brought to the parameter's sharding at once, before anything further back is
  computed: what XLA makes of that is a reduce-scatter. A scalar that is passed from operation to
  operation carries that order through the backward pass, and forwards what a prefetch waits for.

A split operation is a sum of pieces, each on a slice of its parameter, gathered after the sum of
those before.

Source: Jiang et al. 2023 (OSDP), 2.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from capture.model.workload import PyTree
from capture.runtime.layer_order import may_wait
from capture.runtime.sharded.slices import LeafRows, Taken

_Arrays = list[jax.Array]


@dataclass(frozen=True)
class Piece:
    """A part of the operation; the results of all pieces are added.

    Attributes:
        params: What it needs of the parameters' arrays.
        partner: What it needs of one of the other operands, where that is split as well.
        compute: From the gathered parameters and the other operands, one of them sliced, to the
            results.
    """

    params: tuple[Taken, ...]
    partner: Taken | None
    compute: Callable[[list[Any], list[Any]], list[Any]]


@dataclass(frozen=True)
class ParamArray:
    """One of the arrays that an operation reads parameters from.

    Attributes:
        cast: Element-wise ops that come before the all-gather, so that less is sent.
    """

    part: LeafRows
    cast: Callable[[Any], Any]

    def all_gather(self, shard: object) -> Any:
        value = self.cast(shard)
        return (
            lax.with_sharding_constraint(value, replicated(self.part.stored))
            if self.part.is_sharded
            else value
        )

    def reduce_scatter(self, shard: object, gradient: object) -> Any:
        """Return the gradient of a shard, from that of what was gathered from it."""
        for sharding in self.part.reduced:
            gradient = lax.with_sharding_constraint(gradient, sharding)
        return jax.vjp(self.cast, shard)[1](gradient)[0]


def replicated(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec())


def run_gathered(
    arrays: Sequence[ParamArray],
    pieces: Sequence[Piece],
    params: Sequence[object],
    others: Sequence[Any],
    token: object,
    *,
    keep_results: bool = False,
    hand_on: bool = False,
    prefetch: bool = False,
) -> tuple[list[Any], Any, Any]:
    """Run an operation on sharded parameters; return its results, the token for the next one, and
    the first of the other operands.

    Args:
        params: As stored.
        token: What makes backward passes go one after the other (``with_token``).
        keep_results: Whether a compiler is kept from repeating the operation where its results are
            read, for which it would keep what was gathered.
        hand_on: Whether another operation reads the first operand: it has to wait for this one, or
            they would be made one.
        prefetch: Forwards, whether the all-gather may start with the operation before, not only
            when the operands are there. Not of an operation that is repeated to go backwards:
            nobody then reads the token, and XLA would drop it.
    """
    moving = [i for i, x in enumerate(others) if jnp.issubdtype(x.dtype, jnp.inexact)]
    passes = _GatheredPasses(arrays, pieces, moving, keep_results, hand_on, prefetch)

    @jax.custom_vjp
    def run(params, others, token):
        return passes.forward(params, others, token)[0]

    run.defvjp(passes.forward, passes.backward)
    return run(list(params), list(others), token)


@dataclass(frozen=True)
class _GatheredPasses:
    """The forward and the backward pass of an operation on sharded parameters.

    Attributes:
        arrays, pieces, keep_results, hand_on, prefetch: As for ``run_gathered``.
        moving: Positions of the other operands that have gradients.
    """

    arrays: Sequence[ParamArray]
    pieces: Sequence[Piece]
    moving: Sequence[int]
    keep_results: bool
    hand_on: bool
    prefetch: bool

    def forward(
        self, params: _Arrays, others: _Arrays, token: jax.Array
    ) -> tuple[tuple[_Arrays, jax.Array, jax.Array], tuple[_Arrays, _Arrays]]:
        """Return what ``run_gathered`` does, and what the backward pass reads."""
        total: _Arrays = []
        operands = others
        for piece in self.pieces:
            # What is tied has to be used: of a barrier, XLA drops what nobody reads.
            held = [params[taken.array] for taken in piece.params]
            before = total or operands
            if self.prefetch:
                held, token = tied(held, token)
            else:
                held, before = tied(held, before)
            before, token = tied(before, token)
            total, operands = (before, operands) if total else (total, before)
            full = self._gathered(piece, _shards_of(piece, held))
            of_piece = piece.compute(full, sliced(piece, operands))
            total = list(map(jnp.add, total, of_piece)) if total else of_piece
        first = others[0]
        if self.hand_on:
            total, first = tied(total, first)
        elif self.keep_results:
            total, _ = tied(total, ())
        return (total, token, first), (params, others)

    def backward(
        self, saved: tuple[_Arrays, _Arrays], cotangents: tuple[_Arrays, jax.Array, jax.Array]
    ) -> tuple[_Arrays, _Arrays, jax.Array]:
        """Return the gradients of the parameters, of the other operands and of the token."""
        params, others = saved
        gradients, order, of_first = cotangents
        to_params: list[Any] = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params]
        found: list[Any] = [None] * len(others)
        for i in self.moving:
            found[i] = jax.ShapeDtypeStruct(others[i].shape, others[i].dtype)
        for piece in self.pieces:
            held, (gradients, order) = tied(
                [params[taken.array] for taken in piece.params], (gradients, order)
            )
            shards = _shards_of(piece, held)
            of_full, of_others = self._pulled_back(piece, shards, others, gradients)
            of_shards = [
                self.arrays[t.array].reduce_scatter(s, g)
                for t, s, g in zip(piece.params, shards, of_full, strict=True)
            ]
            (of_shards, of_others), order = tied((of_shards, of_others), order)
            for taken, gradient in zip(piece.params, of_shards, strict=True):
                whole = taken.put(to_params[taken.array], gradient)
                to_params[taken.array] = lax.with_sharding_constraint(
                    whole, self.arrays[taken.array].part.stored
                )
            for i, gradient in zip(self.moving, of_others, strict=True):
                partner = piece.partner if piece.partner and piece.partner.array == i else None
                found[i] = partner.put(found[i], gradient) if partner else gradient
        if found[0] is not None:
            found[0] = found[0] + of_first
        return to_params, found, order

    def _pulled_back(
        self, piece: Piece, shards: _Arrays, others: _Arrays, gradients: _Arrays
    ) -> tuple[_Arrays, _Arrays]:
        """Return the gradients of a piece's gathered parameters and of its other operands."""
        given = sliced(piece, others)

        def compute(full: _Arrays, differentiable: _Arrays) -> _Arrays:
            operands = list(given)
            for i, value in zip(self.moving, differentiable, strict=True):
                operands[i] = value
            return piece.compute(full, operands)

        _, vjp = jax.vjp(compute, self._gathered(piece, shards), [given[i] for i in self.moving])
        return vjp(gradients)

    def _gathered(self, piece: Piece, shards: _Arrays) -> _Arrays:
        return [
            self.arrays[taken.array].all_gather(shard)
            for taken, shard in zip(piece.params, shards, strict=True)
        ]


def _shards_of(piece: Piece, held: _Arrays) -> _Arrays:
    """Take a piece's slices behind the barrier, or XLA would keep them from the forward to the
    backward pass."""
    return [taken.of(array) for taken, array in zip(piece.params, held, strict=True)]


def with_token(params: PyTree) -> tuple[Any, Any]:
    """Return the parameters as they are, and a scalar 0, whose gradient, also 0, is added to that
    of the smallest of them.

    So that it is used in the end, or XLA would drop it from all barriers.
    """
    leaves, tree = jax.tree.flatten(params)
    smallest = min(
        (i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)),
        key=lambda i: leaves[i].size,
    )

    @jax.custom_vjp
    def run(leaf):
        return leaf, jnp.zeros(())

    run.defvjp(
        lambda leaf: (run(leaf), None),
        lambda _, gradients: (gradients[0] + gradients[1].astype(gradients[0].dtype),),
    )
    leaves[smallest], token = run(leaves[smallest])
    return jax.tree.unflatten(tree, leaves), token


def awaited(params: PyTree, token: object) -> tuple[Any, Any]:
    """Return both; what goes further back waits for the gradients of the parameters' readers.

    Otherwise XLA may keep what those are computed from until the end of the step.
    """

    @jax.custom_vjp
    def run(params, token):
        return params, token

    run.defvjp(
        lambda params, token: (run(params, token), None), lambda _, gradients: tied(*gradients)
    )
    return run(params, token)


def sliced(piece: Piece, others: Sequence[Any]) -> list[Any]:
    if piece.partner is None:
        return list(others)
    return [piece.partner.of(x) if i == piece.partner.array else x for i, x in enumerate(others)]


def tied(first: object, second: object) -> tuple[Any, Any]:
    """Return both as they are, neither before the other is there. Random keys and gradients of
    integers are left out."""
    leaves, tree = jax.tree.flatten((first, second))
    plain = [i for i, x in enumerate(leaves) if may_wait(x)]
    for i, value in zip(plain, lax.optimization_barrier([leaves[i] for i in plain]), strict=True):
        leaves[i] = value
    return jax.tree.unflatten(tree, leaves)
