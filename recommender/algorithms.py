"""Searches by name, the same for every system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from capture.errors import PlanError

Search = TypeVar("Search")
Name = TypeVar("Name", bound=str)


def algorithm_named(name: Name, algorithms: Mapping[Name, Search]) -> Search:
    """Return the search of this name.

    Raises:
        PlanError: ``search-algorithm`` for an unknown name.
    """
    if name not in algorithms:
        raise PlanError.of(
            f"algorithm={name!r} is unknown; choose one of {', '.join(algorithms)}.",
            "search-algorithm",
        )
    return algorithms[name]
