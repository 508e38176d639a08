"""One codec for all that is stored as JSON: dataclasses become documents and come back.

A document has the fields of its class. Where the two differ (a derived number that people want to
see, rows that are flat), the class has a ``to_json``, and a small dataclass next to it is the shape
that is read. Whatever is missing or wrong is named with its path.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from capture.errors import CaptureError, Violation

T = TypeVar("T")

_hints = lru_cache(maxsize=256)(get_type_hints)
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
#: Written as they are.
_PLAIN = frozenset({*_NAMES, NoneType})


class FieldError(ValueError):
    """An error of a field that is missing or of another type; the message names it."""


def read(data: object, kind: type[T], path: str = "", *, strict: bool = False) -> T:
    """Convert a parsed JSON document into a dataclass.

    Args:
        data: What a JSON parser returned.
        kind: The class; its fields without defaults must be there.
        path: Where the data stand in their document, for messages.
        strict: Whether a field that no class has is refused: a misspelt one would be ignored.

    Raises:
        FieldError: naming the first field that is missing or wrong; what the class itself raises.

    Example:
        >>> @dataclass
        ... class Stage:
        ...     layers: tuple[int, int]
        >>> read({"layers": [0, 1]}, Stage)
        Stage(layers=(0, 1))
        >>> read({"layers": [0, 1.5]}, Stage, "stages[0]")
        Traceback (most recent call last):
        capture.documents.FieldError: stages[0].layers[1] is 1.5 and must be a whole number
    """
    if strict and (wrong := next(_wrong(data, kind, path, strict), None)):
        raise FieldError(wrong)
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise FieldError(next(_wrong(data, kind, path, strict), str(error))) from None


def write(value: object) -> Any:
    """Convert a value into what a JSON writer takes, the inverse of ``read``. A class that has a
    ``to_json`` converts itself."""
    if type(value) in _PLAIN:  # most are, and asking for more of them takes time
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return fields_of(value)
    return mapped(value, lambda item: item, write)


def as_json(value: object, indent: int | None = None) -> str:
    """Return a dataclass as a JSON text; what is infinite or no number becomes null, as JSON has
    neither."""

    def finite(each: object) -> Any:
        return None if isinstance(each, float) and not math.isfinite(each) else each

    return json.dumps(mapped(write(value), finite), indent=indent, allow_nan=False)


def mapped(
    document: object,
    change: Callable[[object], object],
    inner: Callable[[object], object] | None = None,
) -> Any:
    """Return a document with ``change`` applied to every number, text, truth value and null;
    ``inner`` converts the items of objects and lists, by default in the same way."""
    if type(document) in _PLAIN:
        return change(document)
    inner = inner or (lambda item: mapped(item, change))
    match document:
        case Mapping():
            return {str(key): inner(item) for key, item in document.items()}
        case list() | tuple():
            return [inner(item) for item in document]
    return change(document)


def fields_of(value: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass, converted for JSON, in the order of the class; with
    ``names``, these attributes instead."""
    names = names or _field_names(value.__class__)
    return {name: write(getattr(value, name)) for name in names}


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def but_empty(value: object, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass, converted for JSON, except ``names`` that are empty."""
    written = fields_of(value)
    return {name: one for name, one in written.items() if name not in names or getattr(value, name)}


def but_none(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass, converted for JSON, except those that are None."""
    return {name: one for name, one in fields_of(value).items() if one is not None}


#: By the name of a format, the command that makes such files, and groups of fields: a document that
#: has all fields of one group is of the format. All kinds of plans are plans.
_FILES: Mapping[str, tuple[str, Sequence[str]]] = {
    "plan": (
        "capture plan and capture osdp write",
        ("kind schema_version", "stages schedule", "operators step_seconds"),
    ),
    "profile": ("capture profile writes", ("graph param_bytes_by_tensor_parallel",)),
    "layer profile": ("capture profile --system harmony writes", ("fwd bwd",)),
    "target file": (
        "is written by hand, as those in capture/machine/targets",
        ("platform compute",),
    ),
    "server file": (
        "is written by hand, as those in capture/machine/servers",
        ("swap_bytes_per_second",),
    ),
    "model description": (
        "is written by hand (capture/model/operators.py)",
        ("operators schema_version",),
    ),
}


@dataclass(frozen=True)
class Format:
    """A kind of document, and how a document that is not of it is refused.

    Attributes:
        name: For sentences.
        error: What is raised.
        code: The beginning of its codes: ``<code>-file`` if it cannot be read, ``<code>-schema``
            for an unknown version, ``<code>-corrupt`` for all else.
        advice: What to do about it.
        versions: Schema versions that are read; the last is written.
        kind: Which kind of document, where files of one format hold several kinds; schema 1 had
            none.
        not_json: The end of the code of a file that is no JSON.
        strict: Whether fields that no class has are refused.
    """

    name: str
    error: type[CaptureError]
    code: str
    advice: str
    versions: tuple[int, ...] = (1,)
    kind: str = ""
    not_json: Literal["corrupt", "file"] = "corrupt"
    strict: bool = False

    def load(self, path: Path | str, made: Callable[[object], T]) -> T:
        """Read a JSON file of this format, refuse any other, and return what ``made`` makes of it.

        Raises:
            CaptureError: ``<code>-file`` if it cannot be read, ``<code>-corrupt`` if it is no JSON,
                ``<code>-kind`` if it is a file of another kind, and what ``made`` raises, with the
                path.
        """
        named = f"{self.name} {str(path)!r}"
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise self.error.of(f"{named} does not exist.", f"{self.code}-file") from None
        except OSError as error:
            raise self.error.of(
                f"{named} cannot be read: {error.strerror}.", f"{self.code}-file"
            ) from None
        except ValueError as error:
            raise self.error.of(
                f"{named} is not JSON: {error}. {self._advice}", f"{self.code}-{self.not_json}"
            ) from None
        asked = "plan" if self.kind else self.name
        keys = {*data} if isinstance(data, Mapping) else set[str]()
        marks = ((name, each.split()) for name, (_, groups) in _FILES.items() for each in groups)
        found = next((name for name, own in marks if keys.issuperset(own)), asked)
        if asked in _FILES and found != asked:
            raise self.error.of(
                f"{str(path)!r} is a {found}; give a {asked}, which {_FILES[asked][0]}.",
                f"{self.code}-kind",
            )
        try:
            return made(data)
        except self.error as error:
            raise type(error)(
                violation
                if repr(str(path)) in violation.message
                else Violation(f"{str(path)!r}: {violation.message}", violation.code)
                for violation in error.violations
            ) from None

    def check(self, data: Any) -> dict[str, Any]:
        """Return the fields of a document whose schema version and kind are those of this format.

        Raises:
            CaptureError: ``<code>-schema``, ``<code>-kind``.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if isinstance(version, bool) or version not in self.versions:
            known, advice = " and ".join(map(str, self.versions)), self._advice
            if type(version) is int and version > self.versions[-1]:
                advice = "The file is of a newer version: update capture."
            raise self.error.of(
                f"{self.name} has schema_version={version!r}; this version of capture reads "
                f"{known}. {advice}",
                f"{self.code}-schema",
            )
        fields = {key: value for key, value in data.items() if key != "schema_version"}
        if self.kind and (kind := fields.pop("kind", self.kind)) != self.kind:
            raise self.error.of(
                f"{self.name} is of kind {kind!r}, and this is for plans of kind {self.kind!r}. "
                "capture.plan.kinds.load_plan reads every kind.",
                f"{self.code}-kind",
            )
        return fields

    def read(self, data: object, kind: type[T]) -> T:
        """Check a parsed document of this format and convert its fields into a dataclass.

        Raises:
            CaptureError: ``<code>-schema``, ``<code>-kind``, ``<code>-corrupt``.
        """
        known = self.check(data)
        try:
            return read(known, kind, strict=self.strict)
        except FieldError as error:
            raise self.corrupt(str(error)) from None

    def write(self, written: Mapping[str, object]) -> dict[str, Any]:
        """Return the document of this format with these fields, its schema version and its kind."""
        kind = {"kind": self.kind} if self.kind else {}
        return {"schema_version": self.versions[-1], **kind, **written}

    def corrupt(self, wrong: str) -> CaptureError:
        """Return the error of a document of this format in which something is wrong."""
        return self.error.of(
            f"{self.name} is not one: {wrong}. {self._advice}", f"{self.code}-corrupt"
        )

    @property
    def _advice(self) -> str:
        return f"{self.advice[0].upper()}{self.advice[1:]}."


def _wrong(value: object, hint: object, path: str, strict: bool) -> Iterator[str]:
    """Yield one sentence for each part of a value that does not fit a type hint, with its path."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        yield from _wrong_fields(value, hint, path, strict)  # type: ignore[arg-type]
    elif origin in (Union, UnionType):
        others = [option for option in arguments if option is not NoneType]
        if value is not None or len(others) == len(arguments):
            # Of several types, which are numbers all, the widest.
            yield from _wrong(value, others[-1], path, strict)
    elif origin is Literal:
        if value not in arguments:
            yield f"{path} is {reprlib.repr(value)} and must be one of {', '.join(arguments)}"
    elif origin is tuple or origin in (list, Sequence):
        yield from _wrong_items(value, arguments, path, strict)
    elif hint is dict or origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            yield _sentence(value, path, "an object")
        elif arguments:
            for key, item in value.items():
                yield from _wrong(item, arguments[1], _at(path, key), strict)
    elif hint in _NAMES:
        numbers = (int, float) if hint is float else hint
        if not isinstance(value, numbers) or (hint is not bool and isinstance(value, bool)):
            yield _sentence(value, path, _NAMES[hint])


def _wrong_fields(value: object, kind: type, path: str, strict: bool) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield _sentence(value, path or "the document", "an object")
        return
    hints, known = _hints(kind), [field.name for field in fields(kind)]
    for field in fields(kind):
        if field.name in value:
            at = _at(path, field.name)
            yield from _wrong(value[field.name], hints[field.name], at, strict)
        elif field.default is MISSING and field.default_factory is MISSING:
            yield f"{_at(path, field.name)} is missing"
    for key in value if strict else ():
        if key not in known:
            yield f"{_at(path, key)} is no field{_meant(key, hints)}"


def _meant(key: str, hints: Mapping[str, object]) -> str:
    """Return the end of a sentence: where a name that is no field belongs, or what it is like."""
    for name, hint in hints.items():
        items = [kind for kind in get_args(hint) if is_dataclass(kind)]
        if any(key == field.name for kind in items for field in fields(kind)):
            return f"; each of {name!r} may have it"
    near = difflib.get_close_matches(key, hints, 1)
    return f"; {near[0]!r} is" if near else ""


def _wrong_items(value: object, kinds: Sequence[object], path: str, strict: bool) -> Iterator[str]:
    if not isinstance(value, (list, tuple)):
        yield _sentence(value, path, "a list")
        return
    repeated = len(kinds) == 1 or kinds[-1] is Ellipsis
    if not repeated and len(value) != len(kinds):
        yield f"{path} has {len(value)} items and must have {len(kinds)}"
    for i, item in enumerate(value):
        kind = kinds[0] if repeated else kinds[min(i, len(kinds) - 1)]
        yield from _wrong(item, kind, f"{path}[{i}]", strict)


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _sentence(value: object, path: str, wanted: str) -> str:
    return f"{path} is {reprlib.repr(value)} and must be {wanted}"
