"""Options: a field of a question is an option of the command line and a key of a question's file.

    num_workers: Annotated[int | None, Asked("workers", "N", least=0)] = None

The default is the field's, the type its annotation, and the help is what the docstring of the class
says of the field.
"""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from capture.errors import CaptureError
from capture.quantities import nearest, parse_bytes

#: What options are added to: all of a verb, or a group of them.
Arguments = argparse.ArgumentParser | argparse._ArgumentGroup


def at_least(least: int) -> Callable[[str], int]:
    """Return the reader of a whole number that has a smallest value.

    Example:
        >>> at_least(1)("0")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: '0' is no whole number of at least 1. [option-number]
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number of at least {least}. [option-number]"
            )
        return int(text)

    return read


def several(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return the reader of whole numbers with commas between them.

    Example:
        >>> several(1)("2,8")
        (2, 8)
    """
    return lambda text: tuple(map(at_least(least), text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(name for name in text.split(",") if name)


def percent(text: str) -> float:
    """Read a percentage, such as 5%, as a fraction.

    Example:
        >>> percent("5%")
        0.05
    """
    number = text.removesuffix("%")
    if not number.replace(".", "", 1).isdecimal() or not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 5%. [option-number]")
    return float(number) / 100


def size(text: str) -> int:
    """Read bytes, such as 40GB."""
    try:
        return parse_bytes(text)
    except CaptureError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Option:
    """An option of a command line, and a key of a question's file.

    Attributes:
        name: In files; ``--name`` with dashes on the command line.
        help: For people.
        default: False for a switch; None for one that may be left open (``is_open``).
        read: Makes the value from its text.
        choices: Allowed texts; None for any.
        metavar: Name of its value, for people.
        short: Another name on the command line.
        is_open: Whether a switch also has a ``--no-name``, and is None where nobody says either.
        again: Whether it may be given several times, which makes a list.
        in_files: Whether a file may say it: not what decides where this machine computes.
    """

    name: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    metavar: str | None = None
    short: str | None = None
    is_open: bool = False
    again: bool = False
    in_files: bool = True

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        """Whether the option is given without a value."""
        return self.default is False or self.is_open

    def add_to(self, parser: Arguments) -> None:
        flags = [name for name in (self.short, self.flag) if name]
        if self.is_switch:
            either = argparse.BooleanOptionalAction if self.is_open else "store_true"
            parser.add_argument(*flags, action=either, default=self.default, help=self.help)
            return
        parser.add_argument(
            *flags,
            action="append" if self.again else "store",
            type=self.read,
            default=self.default,
            choices=self.choices,
            metavar=self.metavar,
            help=self.help,
        )

    def value(self, given: object) -> Any:
        """Convert a value of a file as the command line would read it.

        Raises:
            ValueError, argparse.ArgumentTypeError: if the option does not take it.
        """
        match given:
            case bool() if self.is_switch:
                return given
            case _ if self.is_switch:
                raise ValueError("write true or false.")
            case list() if self.again:
                return [self._read(one) for one in given]
            case list():
                return self._read(",".join(map(str, given)))
        return [self._read(given)] if self.again else self._read(given)

    def _read(self, given: object) -> Any:
        if isinstance(given, Mapping):
            pairs = ",".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f'write a string, not a table: "{pairs}".')
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError("write a string or a number.")
        read = self.read(str(given))
        if self.choices is not None and read not in self.choices:
            near = nearest(str(given), self.choices)
            raise ValueError(f"choose one of {', '.join(self.choices)}.{near}")
        return read

    def written(self, value: Any) -> Any:
        """Convert a value for a file of JSON, the inverse of ``value``."""
        if self.read is percent:
            return f"{value * 100:.12g}%"
        match value:
            case list() | tuple():
                return [self.written(one) for one in value]
            case bool() | int() | float():
                return value
        return str(value)


def add(parser: Arguments, *options: Option) -> None:
    for option in options:
        option.add_to(parser)


@dataclass(frozen=True)
class Asked:
    """The mark of a field that is an option.

    Attributes:
        name: As people type it; empty for that of the field.
        metavar: Name of its value, for people; that of a size where the field has bytes.
        least: The least whole number; None leaves that to the class.
        read: Makes the value from its text, where its type does not say how.
        choices: Allowed texts.
        again, in_files: As of ``Option``.
    """

    name: str = ""
    metavar: str | None = None
    least: int | None = None
    read: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    again: bool = False
    in_files: bool = True


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a TOML file.

    Raises:
        ValueError: If it cannot be read or is no TOML, with the rest of a sentence on the file.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not TOML: {error}") from None


def read_keys(
    given: Mapping[str, object], known: Collection[Option]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the keys of a file, and what is wrong with others, in sentences."""
    options = {option.name: option for option in known if option.in_files}
    values, wrong = dict[str, Any](), list[str]()
    for name, value in given.items():
        if name not in options:
            wrong.append(
                f"{name!r} is no key here; those are {', '.join(sorted(options))}."
                f"{nearest(name, options)}"
            )
            continue
        try:
            values[name] = options[name].value(value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            wrong.append(f"{name} = {value!r}: {error}")
    return values, wrong


def options_of(*kinds: type) -> tuple[Option, ...]:
    """Return the options that the fields of dataclasses stand for, in their order; each name once.

    Example:
        >>> @dataclass
        ... class Question:
        ...     '''What is asked.
        ...
        ...     Attributes:
        ...         limit_bytes: Most that it may need.
        ...     '''
        ...
        ...     limit_bytes: Annotated[int | None, Asked("memory")] = None
        >>> [option] = options_of(Question)
        >>> option.flag, option.help, option.read("1KiB")
        ('--memory', 'most that it may need', 1024)
    """
    found: dict[str, Option] = {}
    for kind in kinds:
        helps, defaults = described(kind), {each.name: each.default for each in fields(kind)}
        for field, (asked, hint) in _asked(kind).items():
            name = asked.name or field
            default = None if defaults[field] is MISSING else defaults[field]
            found.setdefault(name, _option(name, field, asked, hint, (default, helps[field])))
    return tuple(found.values())


def taken(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a dataclass that options set; without those of options not given."""
    named = {field: asked.name or field for field, (asked, _) in _asked(kind).items()}
    return {
        field: tuple(value) if isinstance(value, list) else value
        for field, name in named.items()
        if (value := values.get(name)) is not None
    }


def listed(value: object) -> list[Any]:
    """Return an option's value as a list: several of one that may be repeated, one of another."""
    return value if isinstance(value, list) else [value]


def described(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says of each attribute, by name."""
    section = re.search(
        r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", inspect.getdoc(kind) or "", re.M | re.S
    )
    found: dict[str, str] = {}
    for words, text in re.findall(
        r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.M | re.S
    ):
        found |= dict.fromkeys(words.split(", "), " ".join(text.split()))
    return found


def _asked(kind: type) -> dict[str, tuple[Asked, Any]]:
    """Return the fields of a dataclass that are options: name to mark and type."""
    assert is_dataclass(kind), "questions are dataclasses"
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: (mark, get_args(hints[each.name])[0])
        for each in fields(kind)
        if get_origin(hints[each.name]) is Annotated
        for mark in hints[each.name].__metadata__
    }


def _option(name: str, field: str, asked: Asked, hint: object, said: tuple[object, str]) -> Option:
    default, text = said
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in union if kind is not NoneType]
    kind, metavar, choices = kinds[0], asked.metavar, asked.choices
    read: Callable[[str], Any] = kind if kind in (int, float, Path) else str
    if asked.again:
        default = None  # to which argparse would add
    elif get_origin(kind) is tuple:
        of_numbers = get_args(kind)[0] is int
        read = several(asked.least or 0) if of_numbers else names
        metavar = metavar or ("N,N,..." if of_numbers else "NAME,...")
    elif get_origin(kind) is Literal:
        choices = choices or get_args(kind)
    elif "_bytes" in field:
        read, metavar = size, metavar or "SIZE"
    elif asked.least is not None:
        read = at_least(asked.least)
    text = (text[0].lower() + text[1:] if text[1:2].islower() else text).replace("`", "")
    text = text.rstrip(".").replace("%", "%%")
    says_nothing = default is None or default is False or default in ((), "")
    if not says_nothing and "(default" not in text:
        text += f" (default: {_shown(default)})"
    return Option(
        name,
        text,
        default,
        asked.read or read,
        choices,
        metavar,
        is_open=bool in kinds and default is None,
        again=asked.again,
        in_files=asked.in_files,
    )


def _shown(default: object) -> str:
    match default:
        case tuple():
            return ",".join(map(str, default))
        case float():
            return f"{default:g}"
    return str(default)


#: What each system reads.
Systems = Mapping[str, Collection[Option]]


def merged(by_system: Systems) -> dict[str, tuple[Option, tuple[str, ...]]]:
    """Return the options of several systems by name, each with the systems that read it.

    One that several systems have takes what any of them does, and its default is theirs, if it is
    the same, else None: each system takes its own.
    """
    found: dict[str, dict[str, Option]] = {}
    for system, options in by_system.items():
        for option in options:
            found.setdefault(option.name, {})[system] = option
    return {name: (_joined(of, len(by_system)), tuple(of)) for name, of in found.items()}


def refused(given: Collection[str], system: str, by_system: Systems) -> list[str]:
    """Return a sentence on each option that is given and that a system does not read, with the
    systems that do."""
    known = merged(by_system)
    return [
        f"{option.flag} is not of --system {system}, but of {', '.join(of)}; leave it out."
        for option, of in (known[name] for name in given if name in known)
        if system not in of
    ]


def _joined(of: Mapping[str, Option], num_systems: int) -> Option:
    first, *others = of.values()
    choices, text, default = first.choices, first.help, first.default
    if any(other.choices != choices for other in others) and choices is not None:
        every = (choice for option in of.values() for choice in option.choices or ())
        choices = tuple(dict.fromkeys(every))
        text = "; ".join(f"{system}: {option.help}" for system, option in of.items())
    elif 1 < len(of) < num_systems:
        text = f"{', '.join(of)}: {text}"
    if any(other.default != default for other in others):
        default = None
    if choices is None:
        return replace(first, help=text, default=default)
    return replace(first, help=text, default=default, read=str, choices=choices)
