"""A forward pass that saves all, from which what is kept of it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax

from capture.partition.spread import Spread
from capture.tracing.dataflow import DataFlow


class SavedPass:
    """A forward pass with everything that ``jax.vjp`` saves behind its outputs.

    Args:
        run: The pass: of arguments; to outputs, and the function that goes backwards.
        args: Structures of the arguments.

    Attributes:
        traced: The pass.
        flow: The same, opened.
    """

    def __init__(self, run: Callable[..., tuple[Sequence[Any], Any]], args: Sequence[Any]):
        self._constants: dict[int, Any] = {}
        self._tree: Any = None

        def saving_all(*args):
            outputs, vjp = run(*args)
            saved, self._tree = jax.tree.flatten(vjp)
            self._constants = {
                i: array for i, array in enumerate(saved) if not isinstance(array, jax.core.Tracer)
            }
            return outputs, [array for i, array in enumerate(saved) if i not in self._constants]

        self.traced = jax.make_jaxpr(saving_all)(*args)
        self.flow = DataFlow(self.traced)

    @cached_property
    def spread(self) -> Spread:
        """The way in which splits spread through ``flow``."""
        return Spread(self.flow.jaxpr)

    def vjp(self, saved: Iterable[Any]) -> Any:
        """Return the function that goes backwards, made from all that was saved."""
        read = iter(saved)
        return jax.tree.unflatten(
            self._tree,
            [
                self._constants[i] if i in self._constants else next(read)
                for i in range(self._tree.num_leaves)
            ],
        )
