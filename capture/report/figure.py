"""One drawing of a report, as plotly.js takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        name: Identifier of its element in the page, stable.
        title, caption: In words; the caption says what is simulated.
        traces, layout: As plotly.js takes them.
    """

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
