"""What one execution of a step works on, and what its instructions are bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from capture.step.program import Instruction, Slot

Call = Callable[[list[jax.Array]], Sequence[list[jax.Array]]]
"""A program: takes the arrays of its inputs in one list, group by group; returns a list per output
slot."""

Layout = Callable[[Slot], Sequence[jax.ShapeDtypeStruct]]
"""The arrays of a slot: shape, dtype and sharding, its memory kind included."""

Observer = Callable[[Instruction, list[Any]], None]
"""Is called before an instruction, with the arrays of all slots."""

Action = Callable[["Frame"], None]
"""An instruction, bound to what it runs or moves."""


@dataclass
class Frame:
    """The arrays and the batch that one execution of a step works on.

    Attributes:
        slots: Per slot of the step its arrays, or None while it is not alive.
        microbatches: Per part of the batch its leaves: host arrays, and the random key if the loss
            takes one.
        reported: Arrays of the slots that the step reports, in the order in which they were made.
    """

    slots: list[list[jax.Array] | None]
    microbatches: Sequence[Sequence[Any]]
    reported: list[jax.Array]
