"""Results that an object keeps, so that what is asked again is not worked out again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Asked = ParamSpec("Asked")
Found = TypeVar("Found")


def memo(
    method: Callable[Concatenate[Owner, Asked], Found],
) -> Callable[Concatenate[Owner, Asked], Found]:
    """Let an object keep what a method returns, by its arguments, which can be hashed. Unlike
    ``functools.cache`` it ends with the object.

    Example:
        >>> class Squares:
        ...     @memo
        ...     def of(self, number):
        ...         print("worked out")
        ...         return number**2
        >>> squares = Squares()
        >>> squares.of(3), squares.of(3)
        worked out
        (9, 9)
    """
    name = method.__qualname__  # one of a subclass is another

    @wraps(method)
    def kept(self: Owner, *asked: Asked.args, **named: Asked.kwargs) -> Found:
        key = (asked, *named.items()) if named else asked
        known = vars(self).get(name)
        if known is None:
            known = vars(self)[name] = {}
        if key not in known:
            known[key] = method(self, *asked, **named)
        found: Found = known[key]
        return found

    return kept


def forget(owner: object) -> None:
    """Drop what an object keeps of its methods (``memo``)."""
    for name in [name for name in vars(owner) if "." in name]:
        del vars(owner)[name]
