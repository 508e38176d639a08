"""Seeds of tests that draw problems: a part in the default command, all with the exhaustive tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seeds(numbers: Iterable[int], every: int = 2) -> list[Any]:
    """Return the seeds as parameters of which each second (``every``) is in the default command."""
    return [
        pytest.param(seed, marks=pytest.mark.exhaustive if place % every else ())
        for place, seed in enumerate(numbers)
    ]
