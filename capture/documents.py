"""Fields of a JSON document, read by name and type; whatever is missing or wrong is named with its
path."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

_MISSING = object()


class FieldError(ValueError):
    """A field that is missing or of another type; the message names it."""


class Fields:
    """A JSON object.

    Args:
        data: What a JSON parser returned.
        path: Of the object in its document, for messages.

    Raises:
        FieldError: if it is no object; the methods raise it for a field that is missing (unless a
            default is given) or wrong.

    Example:
        >>> stage = Fields({"layers": [0, 1.5]}, "stages[0]")
        >>> stage.integers("layers")
        Traceback (most recent call last):
        capture.documents.FieldError: stages[0].layers[1] is 1.5 and must be a whole number
    """

    def __init__(self, data: Any, path: str = ""):
        self._data: Mapping[str, Any] = _checked(data, Mapping, path or "the document", "an object")
        self._path = path
        self._asked: set[str] = set()

    def integer(self, key: str, default: Any = _MISSING) -> int:
        return _checked(self._get(key, default), int, self._at(key), "a whole number")

    def number(self, key: str, default: Any = _MISSING) -> float:
        return _checked(self._get(key, default), (int, float), self._at(key), "a number")

    def text(self, key: str, default: Any = _MISSING) -> str:
        return _checked(self._get(key, default), str, self._at(key), "a text")

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        return _checked(self._get(key, default), bool, self._at(key), "true or false")

    def integers(self, key: str, length: int | None = None) -> tuple[int, ...]:
        items = self._items(key)
        if length not in (None, len(items)):
            raise FieldError(f"{self._at(key)} has {len(items)} items and must have {length}")
        return tuple(_checked(item, int, path, "a whole number") for path, item in items)

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_checked(item, str, path, "a text") for path, item in self._items(key))

    def object(self, key: str) -> Fields:
        return Fields(self._get(key), self._at(key))

    def optional_object(self, key: str) -> Fields | None:
        """None if the field is null or missing."""
        return None if self._get(key, None) is None else self.object(key)

    def objects(self, key: str) -> tuple[Fields, ...]:
        return tuple(Fields(item, path) for path, item in self._items(key))

    @property
    def data(self) -> dict[str, Any]:
        """All fields, as they are."""
        return dict(self._data)

    def refuse_others(self, *also: str) -> None:
        """Call it after the last field was read.

        Args:
            also: Fields that may be there although they were not read.

        Raises:
            FieldError: for a field that nobody asked for: a misspelt one would be ignored.
        """
        known = self._asked.union(also)
        for key in self._data:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise FieldError(
                    f"{self._at(key)} is no field{f'; {near[0]!r} is' if near else ''}"
                )

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _get(self, key: str, default: Any = _MISSING) -> Any:
        self._asked.add(key)
        value = self._data.get(key, default)
        if value is _MISSING:
            raise FieldError(f"{self._at(key)} is missing")
        return value

    def _items(self, key: str) -> list[tuple[str, Any]]:
        items = _checked(self._get(key), list, self._at(key), "a list")
        return [(f"{self._at(key)}[{i}]", item) for i, item in enumerate(items)]


def _checked(value: Any, kind: type | tuple[type, ...], path: str, name: str) -> Any:
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise FieldError(f"{path} is {reprlib.repr(value)} and must be {name}")
    return value


def describe(error: Exception) -> str:
    """What is wrong with a document, given the exception that reading it raised.

    Example:
        >>> describe(KeyError("schedule"))
        "the field 'schedule' is missing"
    """
    if isinstance(error, FieldError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing"
    return f"a field has the wrong form ({error})"
