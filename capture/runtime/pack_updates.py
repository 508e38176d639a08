"""How the weights of a pack are updated: the optimizer's slice on slots of weights, state and
gradients of every device and pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp

from capture.runtime.exchange import joined, share_of
from capture.runtime.optimizer import StageUpdate, TracedOptimizer
from capture.tracing.jaxprs import in_groups

Arrays = Sequence[Any]


@dataclass(frozen=True)
class PackUpdate:
    """A pack's slice of the optimizer as functions of weights, state, gradients and summaries.

    Attributes:
        weights: Arrays of each slot of weights.
        params: Per slot of gradients, the parameter whose it is; None for those of all that the
            pack owns.
        groups: Slots of each argument.
        structs: Of the parameters, whole.
        num_shares: Slots of weights or gradients that together are one, a share each.
    """

    stage: StageUpdate
    weights: Sequence[int]
    params: Sequence[int | None]
    groups: Sequence[int]
    structs: Sequence[jax.ShapeDtypeStruct]
    num_shares: int = 1

    def key(self, traced: TracedOptimizer) -> Any:
        """Return what tells the update from others of the same arguments."""
        stage = self.stage
        at = {param: i for i, param in enumerate(stage.params)}
        # Which of the other packs' values is which, the keys of parameters do not say.
        number = stage.stage_id if stage.whole.exchanges else None
        return (
            tuple(traced.param_keys[p] for p in stage.params),
            tuple(at.get(traced.param_of_state.get(k, -1), -1) for k in stage.state),
            tuple(None if param is None else at[param] for param in self.params),
            number,
        )

    def update(self, *slots: Arrays) -> list[Any]:
        """Return new weights and state."""
        params, state, gradients, summaries = self._arguments(slots)
        if summaries:  # what the loss does not read, has none
            summaries += [[]] * (len(self.stage.others) - len(summaries))
        params, state = self.stage.update(params, state, gradients, summaries)
        if (count := self.num_shares) == 1:
            return [*in_groups(params, self.weights), state]
        runs = in_groups(params, self.weights[::count])
        shares = [[share_of(a, i, count, jnp) for a in run] for run in runs for i in range(count)]
        return [*shares, state]

    def summarize(self, *slots: Arrays) -> list[Any]:
        """Return what the updates of other packs need of this one's gradients."""
        return [self.stage.summarize(*self._arguments(slots)[:3])]

    def _arguments(self, slots: Sequence[Arrays]) -> tuple[list[Any], ...]:
        weights, (state,), gradients, *rest = in_groups(slots, self.groups)
        at, of = {param: i for i, param in enumerate(self.stage.params)}, self.params
        if (count := self.num_shares) > 1:
            of, structs = of[::count], in_groups(self.structs, self.weights[::count])
            weights = _joined(weights, structs, count)
            own = [self.structs if p is None else [self.structs[at[p]]] for p in of]
            gradients = _joined(gradients, own, count)
        whole = [given for given, param in zip(gradients, of, strict=True) if param is None]
        shared = ((p, given[0]) for given, p in zip(gradients, of, strict=True) if p is not None)
        total = self.stage.total([reduce(add, parts) for parts in zip(*whole, strict=True)], shared)
        params = [array for arrays in weights for array in arrays]
        return params, list(state), total, [summary for group in rest for summary in group]


def _joined(
    slots: Sequence[Arrays], structs: Sequence[Sequence[jax.ShapeDtypeStruct]], count: int
) -> list[Arrays]:
    """Return whole arrays from slots of which ``count`` in a row have shares of the same arrays."""
    return [
        [
            joined(shares, struct.shape, jnp)
            for shares, struct in zip(zip(*parts, strict=True), of, strict=True)
        ]
        for parts, of in zip(in_groups(slots, [count] * len(structs)), structs, strict=True)
    ]
