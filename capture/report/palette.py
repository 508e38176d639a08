"""Colours that are told apart without seeing red or green; one meaning per colour in all figures.

Source: categories, Okabe and Ito 2008 and Tol 2021 (muted); stages, samples of viridis (van der
Walt and Smith 2015) without its light end, which white paper swallows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CATEGORIES = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "received activations": "#F0E442",
    "sent activations": "#DDCC77",
    "received gradients": "#CC79A7",
    "sent gradients": "#882255",
    "batch": "#999933",
    "gathered parameters": "#44AA99",
    "temporaries": "#D55E00",
    "loss": "#444444",
}
OTHER = "#BBBBBB"

#: Of programs in the schedule.
KINDS = {
    "forward": "#88CCEE",
    "backward": "#332288",
    "backward_inputs": "#332288",
    "backward_weights": "#AA9922",
    "update": "#117733",
    "summarize": "#AA4499",
    "recompute": "#CC6677",
    "transfer": "#999999",
    "feed": "#DDDDDD",
}

LIMIT = "#B00020"
INK = "#1F2933"

_STAGES = ("#440154", "#3B528B", "#21918C", "#5EC962")


def category_color(category: str) -> str:
    return CATEGORIES.get(category, OTHER)


def in_order(categories: Sequence[str]) -> list[str]:
    """Return categories in the order in which they are stacked: what stays in memory first, what
    comes and goes above it."""
    order = list(CATEGORIES)
    return sorted(
        set(categories),
        key=lambda category: (order.index(category) if category in order else len(order), category),
    )


def stage_colors(num_stages: int) -> list[str]:
    """Return one color per stage, from the first to the last, dark to light.

    Example:
        >>> stage_colors(2)
        ['#440154', '#5ec962']
    """
    at, known = np.linspace(0, len(_STAGES) - 1, num_stages), range(len(_STAGES))
    channels = zip(*map(_channels, _STAGES), strict=True)
    mixed = [np.interp(at, known, channel).round().astype(int) for channel in channels]
    return ["#" + "".join(f"{value:02x}" for value in color) for color in zip(*mixed, strict=True)]


def text_on(color: str) -> str:
    """Return black or white, whichever is read more easily on a color."""
    red, green, blue = _channels(color)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#FFFFFF"


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
