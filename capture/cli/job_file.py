"""Job files: several profiles in one TOML file, whose keys are the options of ``capture profile``.

    [defaults]                                # of every profile below
    cluster = "2x4"
    target = "h100"

    [[profile]]
    workload = "models/gpt.py:gpt?size=2.6B"
    global_batch = [512, 1024]                # one profile per value; of several
                                              # lists, one per combination
    microbatches = 64
    output = "profiles/gpt-{global_batch}.json"

Where jobs run, and what is reported of them, is said on the command line, not in the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from capture.cli import layers
from capture.cli import options as shared
from capture.cli.asked import Values, profile_question
from capture.errors import CaptureError, ProfileError, Violation
from capture.options import Option, listed, merged, read_keys, read_toml, refused, size
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.question import ProfileQuestion

_OUTPUT = shared.output("profile.json")
#: What the systems read.
SYSTEMS = {
    "capture": (
        *shared.QUESTION,
        Option(
            "memory",
            "with --backend run: runs that need more on a device, such as 40GB, are left out; "
            "harmony: limit per device",
            read=size,
            metavar="SIZE",
        ),
        Option(
            "mode",
            "paper: make the paper's profiling runs as well",
            "default",
            choices=("default", "paper"),
        ),
        _OUTPUT,
    ),
    layers.SYSTEM: (shared.TARGET, *layers.OPTIONS, _OUTPUT),
}
#: Options of a profile: those of a command line, and keys of a file.
OPTIONS = (layers.SYSTEM_OPTION, *(option for option, _ in merged(SYSTEMS).values()))
_KNOWN = {option.name: option for option in (Option("workload", "what to profile"), *OPTIONS)}


@dataclass(frozen=True)
class ProfileJob:
    """A profile to make.

    Attributes:
        question: Question that the profile answers.
        output: File of the profile.
        values: Options of the profile, as they were given.
    """

    question: ProfileQuestion | LayersQuestion
    output: Path
    values: Values

    def admitted(self, trust: bool) -> ProfileJob:
        """Return the profile as one whose workload may be loaded.

        Raises:
            WorkloadError: as ``WorkloadSpec.admitted``.
        """
        assert self.question.spec is not None, "options name workloads"
        workload = self.question.spec.admitted(trust)
        return replace(self, question=replace(self.question, workload=workload))

    @classmethod
    def of(cls, values: Values, named_by: str = "") -> ProfileJob:
        """Return the profile that options ask for.

        Args:
            values: Values of the options.
            named_by: The file that has them; empty for a command line.

        Raises:
            CaptureError: as ``profile_question`` and ``layers_question``; ``profile-system`` for
                options of another system.
        """
        question: ProfileQuestion | LayersQuestion
        given = [each.name for each in OPTIONS if values[each.name] != each.default]
        ProfileError.check(
            Violation(text, "profile-system") for text in refused(given, values["system"], SYSTEMS)
        )
        if values["system"] == layers.SYSTEM:
            question = layers.layers_question(values)
        else:
            question = profile_question(values, memory_limit_bytes=values["memory"])
        assert question.spec is not None, "options name workloads"
        workload = question.spec.in_file(named_by)
        return cls(replace(question, workload=workload), values["output"], values)


def read_job_file(path: Path, beside: Values = MappingProxyType({})) -> list[ProfileJob]:
    """Read every profile of a file, which names its workload (``ProfileJob.admitted``).

    Args:
        path: Path of the file.
        beside: Options of the command line; those count that no file may say.

    Raises:
        ProfileError: ``jobs-file`` if it cannot be read, is no TOML or has other tables;
            ``jobs-option`` naming every key that is no option of a profile and every value that its
            option does not take; ``jobs-output`` if two profiles would be written to the same file;
            and the codes of the question of a profile.
    """
    try:
        data = read_toml(path)
    except ValueError as error:
        raise ProfileError.of(f"job file {str(path)!r} {error}.", "jobs-file") from None
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
    found, violations = list[ProfileJob](), list[Violation]()
    for number, table in enumerate(tables, start=1):
        where = f"job file {str(path)!r}, profile {number}"
        given = {**defaults, **table}
        violations += [
            Violation(f"{where}: {name} = [] has no value.", "jobs-option")
            for name, value in given.items()
            if value == []
        ]
        for one in _combinations(given):
            values, wrong = _read(one)
            here = (each.name for each in OPTIONS if not each.in_files)
            values |= {name: beside[name] for name in here if name in beside}
            violations += [Violation(f"{where}: {text}", "jobs-option") for text in wrong]
            if wrong:
                continue
            try:
                found.append(ProfileJob.of(values, str(path)))
            except CaptureError as error:  # found now, and not perhaps hours later
                violations += [Violation(f"{where}: {v.message}", v.code) for v in error.violations]
    ProfileError.check(dict.fromkeys(violations))
    _check_outputs(path, [str(job.output) for job in found])
    return found


def of_profiles(command: argparse.Namespace) -> list[str]:
    """Return the given options of a command line that are those of a profile, and not of the
    command."""
    return [
        option.short or option.flag
        for option in OPTIONS
        if option.in_files and getattr(command, option.name) != option.default
    ]


def _combinations(table: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return one table per combination of the values of lists.

    Example:
        >>> _combinations({"cluster": ["1x2", "1x4"], "mode": "paper"})
        [{'cluster': '1x2', 'mode': 'paper'}, {'cluster': '1x4', 'mode': 'paper'}]
    """
    choices = map(listed, table.values())
    return [dict(zip(table, values, strict=True)) for values in product(*choices)]


def _read(given: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of all options of a profile, and what is wrong with those that are
    given."""
    values = {name: option.default for name, option in _KNOWN.items()}
    needed = ("workload",) if given.get("system") == layers.SYSTEM else ("workload", "cluster")
    wrong = [f"{name!r} is missing." for name in needed if name not in given]
    read, unread = read_keys(given, _KNOWN.values())
    values, wrong = values | read, wrong + unread
    others = {name: value for name, value in values.items() if name != "output"}
    try:
        values["output"] = Path(str(values["output"]).format(**others))
    except (KeyError, IndexError, ValueError) as error:
        wrong.append(f"output = {str(values['output'])!r} names what is no option: {error}.")
    return values, wrong


def _check_outputs(path: Path, outputs: list[str]) -> None:
    twice = sorted({output for output in outputs if outputs.count(output) > 1})
    if twice:
        raise ProfileError.of(
            f"job file {str(path)!r} would write {', '.join(twice)} more than once; give every "
            "profile an output of its own, such as "
            "'{cluster}-{global_batch}.json'.",
            "jobs-output",
        )
