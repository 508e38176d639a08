"""The slots of a step of packs, and what they hold: what its builder in ``capture.step.streamed``
knows of every slot that it makes."""

from __future__ import annotations

from typing import Any

from capture.plan.task_graph import Span
from capture.step.pack_sizes import PackSizes
from capture.step.program import Copy, Place, Step


class StreamedSlots:
    """Makes them.

    Attributes:
        step: What is built.
        spans: By slot of weights, casts, state or gradients, its layers.
        rows: By slot of rows: the layer that they enter, or whose batch they are, and which
            examples of the lane.
        values: By slot that holds some of the values which enter its layer, those.
        alone: Slots of gradients that one pass makes: as those of casts, where they are as good.
        shares: By slot that holds a share of each of its arrays, which.
    """

    def __init__(self, step: Step, sizes: PackSizes):
        self.step, self._sizes, self._label = step, sizes, ""
        self.spans: dict[int, Span] = {}
        self.rows: dict[int, tuple[int, Span]] = {}
        self.values: dict[int, tuple[int, ...]] = {}
        self.alone: set[int] = set()
        self.shares: dict[int, int] = {}

    def _slot(
        self, what: str, place: Place, category: str, nbytes: int, key: int | None = None
    ) -> int:
        return self.step.slot(f"{what} {len(self.step.slots)}", place, category, nbytes, what, key)

    def _span_slot(self, what: str, place: Place, span: Span) -> int:
        """Of weights, gradients or optimizer state of layers."""
        state = what == "state"
        nbytes = self._sizes.state_bytes(span) if state else self._sizes.weight_bytes(span)
        category = {"weights": "parameters", "state": "optimizer"}.get(what, what)
        slot = self._slot(what, place, category, nbytes)
        self.spans[slot] = span
        return slot

    def _row_slot(self, what: str, place: Place, category: str, layer: int, rows: Span) -> int:
        """Of rows of a value that enters a layer, or of its gradient."""
        size = self._sizes.gradient_bytes if what == "gradient" else self._sizes.value_bytes
        slot = self._slot(what, place, category, size(layer, rows[1] - rows[0]))
        self.rows[slot] = layer, rows
        return slot

    def _values_slot(
        self, place: Place, category: str, layer: int, rows: Span, values: tuple[int, ...]
    ) -> int:
        """Likewise, of some of the values."""
        nbytes = self._sizes.value_bytes(layer, rows[1] - rows[0], values)
        slot = self._slot("activation", place, category, nbytes)
        self.rows[slot], self.values[slot] = (layer, rows), values
        return slot

    def _alike(self, slot: int, place: Place, category: str = "") -> int:
        """A slot for a copy."""
        given = self.step.slots[slot]
        made = self._slot(given.what, place, category or given.category, given.nbytes, given.key)
        tables: list[dict[int, Any]] = [self.spans, self.rows, self.values, self.shares]
        for known in tables:
            if slot in known:
                known[made] = known[slot]
        if slot in self.alone:
            self.alone.add(made)
        return made

    def _copy(self, source: int, target: int) -> Copy:
        return Copy(source, target, self.step.slots[source].nbytes, self._label)
