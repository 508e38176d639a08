"""The slots of a step of packs, with what they hold: what its builder in ``capture.step.streamed``
makes them by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from capture.plan.task_graph import Span
from capture.step.holds import Params, State, Values
from capture.step.pack_sizes import PackSizes
from capture.step.program import Copy, Place, Step


class StreamedSlots:
    """Makes them.

    Attributes:
        step: What is built.
    """

    def __init__(self, step: Step, sizes: PackSizes):
        self.step, self._sizes, self._label = step, sizes, ""

    def _slot(self, what: str, place: Place, category: str, nbytes: int, holds: Any) -> int:
        name = f"{what} {len(self.step.slots)}"
        return self.step.slot(name, place, category, nbytes, what, holds)

    def _gradients_slot(self, place: Place, span: Span) -> int:
        """Of what layers own."""
        holds = Params(self._sizes.owned(span))
        return self._slot("gradients", place, "gradients", self._sizes.weight_bytes(span), holds)

    def _state_slot(self, place: Place, span: Span) -> int:
        holds = State(self._sizes.owned(span))
        return self._slot("state", place, "optimizer", self._sizes.state_bytes(span), holds)

    def _row_slot(self, what: str, place: Place, category: str, layer: int, rows: Span) -> int:
        """Of rows of a value that enters a layer, or of its gradient."""
        gradient = what == "gradient"
        size = self._sizes.gradient_bytes if gradient else self._sizes.value_bytes
        holds = Values(self._sizes.values(layer), rows, gradient)
        return self._slot(what, place, category, size(layer, rows[1] - rows[0]), holds)

    def _values_slot(
        self, place: Place, category: str, layer: int, rows: Span, values: tuple[int, ...]
    ) -> int:
        """Likewise, of some of the values."""
        nbytes = self._sizes.value_bytes(layer, rows[1] - rows[0], values)
        return self._slot("activation", place, category, nbytes, Values(values, rows))

    def _alike(self, slot: int, place: Place, category: str = "") -> int:
        """A slot for a copy."""
        given = self.step.slots[slot]
        category = category or given.category
        return self._slot(given.what, place, category, given.nbytes, given.holds)

    def _share_slot(self, slot: int, place: Place, which: int, nbytes: int) -> int:
        """A slot for a share of the arrays of another."""
        given = self.step.slots[slot]
        holds = replace(given.holds, share=which)
        return self._slot(given.what, place, given.category, nbytes, holds)

    def _copy(self, source: int, target: int) -> Copy:
        return Copy(source, target, self.step.slots[source].nbytes, self._label)
