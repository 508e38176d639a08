"""Job files: several profiles in one TOML file, whose keys are the options of ``capture profile``.

    [defaults]                                # of every profile below
    cluster = "2x4"
    target = "h100"

    [[profile]]
    workload = "models/gpt.py:gpt?size=2.6B"
    global_batch = [512, 1024]                # a list stands for one profile per value; several
                                              lists, for every combination
    microbatches = 64
    output = "profiles/gpt-{global_batch}.json"

Where jobs run, and what is reported of them, is said on the command line, not in the file.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from capture.cli import options as shared
from capture.errors import CaptureError, ProfileError, Violation

#: Options of the command line: they are of all profiles together.
_OF_THE_COMMAND = {
    "jobs",
    "dry_run",
    "events",
    "store",
    "workers",
    "ray",
    "accelerator",
    "job_timeout",
    "json",
    "quiet",
    "help",
}


def read_job_file(
    path: Path, parser: argparse.ArgumentParser, command: argparse.Namespace
) -> list[argparse.Namespace]:
    """The options of every profile of a file.

    Args:
        path: Of the file.
        parser: Of ``capture profile``; it reads the values as it reads those of a command line.
        command: The options that were given beside the file; those of the command as a whole hold
            for every profile.

    Raises:
        ProfileError: ``jobs-file`` if it cannot be read, is no TOML or has other tables;
            ``jobs-option`` naming every key that is no option of a profile and every value that its
            option does not take; ``jobs-output`` if two profiles would be written to the same file;
            and the codes of the cluster, the batch and the backend of a profile.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ProfileError.of(
            f"job file {str(path)!r} cannot be read: {error.strerror}.", "jobs-file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError.of(
            f"job file {str(path)!r} is not TOML: {error}.", "jobs-file"
        ) from None
    tables = data.get("profile", [])
    if not isinstance(tables, list) or not tables or data.keys() - {"defaults", "profile"}:
        raise ProfileError.of(
            f"job file {str(path)!r} has {', '.join(data) or 'nothing'}; write one [[profile]] or "
            "more, and [defaults] if you like.",
            "jobs-file",
        )
    defaults = data.get("defaults", {})
    if not isinstance(defaults, dict) or not all(isinstance(table, dict) for table in tables):
        raise ProfileError.of(
            f"job file {str(path)!r} needs [defaults], once, and [[profile]] as tables of options.",
            "jobs-file",
        )
    known = {
        action.dest: action for action in parser._actions if action.dest not in _OF_THE_COMMAND
    }
    found, violations = list[argparse.Namespace](), list[Violation]()
    for number, table in enumerate(tables, start=1):
        where = f"job file {str(path)!r}, profile {number}"
        values = {**defaults, **table}
        violations += [
            Violation(f"{where}: {name} = [] has no value.", "jobs-option")
            for name, value in values.items()
            if value == []
        ]
        for one in _combinations(values):
            entry, wrong = _options(one, known, command)
            violations += [Violation(f"{where}: {text}", "jobs-option") for text in wrong]
            violations += (
                []
                if wrong
                else [
                    Violation(f"{where}: {v.message}", v.code) for v in _question_violations(entry)
                ]
            )
            found.append(entry)
    ProfileError.check(dict.fromkeys(violations))
    _check_outputs(path, found)
    return found


def of_profiles(parser: argparse.ArgumentParser, command: argparse.Namespace) -> list[str]:
    """Options of a command line that are those of a profile, and not of the command."""
    actions = [
        action
        for action in parser._actions
        if action.dest not in _OF_THE_COMMAND and action.option_strings
    ]
    return [
        action.option_strings[-1]
        for action in actions
        if getattr(command, action.dest) != action.default
    ]


def _question_violations(entry: argparse.Namespace) -> list[Violation]:
    """What is wrong with a profile that would be found when its turn comes, perhaps after hours."""
    found: list[Violation] = []
    for check in (shared.read_cluster, shared.read_batch, shared.check_backend):
        try:
            check(entry)
        except CaptureError as error:
            found += error.violations
    return found


def _combinations(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table per combination of the values of lists.

    Example:
        >>> _combinations({"cluster": ["1x2", "1x4"], "mode": "paper"})
        [{'cluster': '1x2', 'mode': 'paper'}, {'cluster': '1x4', 'mode': 'paper'}]
    """
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, values, strict=True)) for values in product(*choices)]


def _options(
    values: Mapping[str, Any], known: Mapping[str, argparse.Action], command: argparse.Namespace
) -> tuple[argparse.Namespace, list[str]]:
    """The options of one profile, and what is wrong with them."""
    options = {name: action.default for name, action in known.items()} | {
        n: getattr(command, n, None) for n in _OF_THE_COMMAND - {"help"}
    }
    wrong = [f"{name!r} is missing." for name in ("workload", "cluster") if name not in values]
    for name, value in values.items():
        action = known.get(name)
        if action is None:
            wrong.append(
                f"{name!r} is no option of a profile; those are {', '.join(sorted(known))}."
            )
            continue
        try:
            options[name] = _value(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            wrong.append(f"{name} = {value!r}: {error}")
    if isinstance(options.get("output"), Path):
        try:
            options["output"] = Path(
                str(options["output"]).format(
                    **{name: value for name, value in options.items() if name != "output"}
                )
            )
        except (KeyError, IndexError, ValueError) as error:
            wrong.append(f"output = {str(options['output'])!r} names what is no option: {error}.")
    return argparse.Namespace(**options), wrong


def _value(action: argparse.Action, value: Any) -> Any:
    """As the command line would read it.

    Raises:
        ValueError: if the option does not take it.
    """
    if isinstance(action.const, bool):  # a switch
        if not isinstance(value, bool):
            raise ValueError("write true or false.")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("write a string or a whole number.")
    read = action.type(str(value)) if callable(action.type) else str(value)
    if action.choices is not None and read not in action.choices:
        raise ValueError(f"choose one of {', '.join(map(str, action.choices))}.")
    return read


def _check_outputs(path: Path, profiles: list[argparse.Namespace]) -> None:
    outputs = [str(profile.output) for profile in profiles]
    twice = sorted({output for output in outputs if outputs.count(output) > 1})
    if twice:
        raise ProfileError.of(
            f"job file {str(path)!r} would write {', '.join(twice)} more than once; give every "
            "profile an output of its own, such as "
            "'{cluster}-{global_batch}.json'.",
            "jobs-output",
        )
