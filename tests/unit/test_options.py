"""Options that are fields of questions."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from capture.options import Asked, Option, add, merged, options_of, refused, taken


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        graph: No option.
        num_things, limit_bytes: Most of
            them, 50% at least.
        order: Which way.
        is_open: Whether anybody says so.
        names: Of some.
    """

    graph: object
    num_things: Annotated[int, Asked("things", "N", least=1)] = 4
    limit_bytes: Annotated[int | None, Asked("memory")] = None
    order: Annotated[Literal["up", "down"], Asked()] = "up"
    is_open: Annotated[bool | None, Asked("open")] = None
    names: Annotated[tuple[str, ...], Asked()] = ("a", "b")


@dataclass(frozen=True)
class Other:
    """Another.

    Attributes:
        order: Its own.
        shared: Patterns.
    """

    order: Annotated[Literal["left"] | None, Asked()] = None
    shared: Annotated[tuple[str, ...], Asked(again=True)] = ()


def parsed(*arguments: str) -> dict[str, object]:
    parser = ArgumentParser(exit_on_error=False)
    add(parser, *options_of(Question, Other))
    return vars(parser.parse_args(arguments))


def test_a_field_is_an_option_with_its_default_type_and_help():
    things, memory, order, is_open, names = options_of(Question)
    assert things.help == "most of them, 50%% at least (default: 4)" and things.metavar == "N"
    assert memory.help == "most of them, 50%% at least" and memory.metavar == "SIZE"
    assert (order.choices, order.default) == (("up", "down"), "up")
    assert is_open.is_open and names.help == "of some (default: a,b)"


def test_what_is_typed_makes_the_question():
    values = parsed("--memory", "1KiB", "--no-open", "--names", "x,y")
    assert Question(None, **taken(Question, values)) == Question(
        None, 4, 1024, "up", False, ("x", "y")
    )
    assert Question(None, **taken(Question, parsed())) == Question(None)
    values = parsed("--shared", "a", "--shared", "b")
    assert taken(Other, {"shared": values["shared"]}) == {"shared": ("a", "b")}


@pytest.mark.parametrize("given", ["0", "x", "-1"])
def test_a_number_below_its_least_is_refused(given):
    with pytest.raises(Exception, match=r"no whole number of at least 1. \[option-number\]"):
        parsed(f"--things={given}")


def test_an_option_of_several_systems_takes_what_any_of_them_does():
    systems = {"one": options_of(Question), "two": options_of(Other)}
    option, of = merged(systems)["order"]
    assert (option.choices, option.default, of) == (("up", "down", "left"), None, ("one", "two"))
    assert option.help == "one: which way (default: up); two: its own"
    assert merged({**systems, "three": ()})["names"][0].help == "of some (default: a,b)"
    assert refused(["names", "order"], "two", systems) == [
        "--names is not of --system two, but of one; leave it out."
    ]


def test_a_value_of_a_file_is_read_as_on_the_command_line():
    numbers = Option("n", "", read=int)
    assert numbers.value(3) == numbers.value("3") == 3
    with pytest.raises(ValueError, match=r'not a table: "h100=2\.5,v6e=3"'):
        numbers.value({"h100": 2.5, "v6e": 3})
    with pytest.raises(ValueError, match="write a string or a number"):
        numbers.value(True)
    with pytest.raises(ValueError, match="write true or false"):
        Option("s", "", False).value("yes")
