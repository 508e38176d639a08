"""The command line: one file per verb.

Exit code 0 on success, 1 for an infeasible or incomplete result, 2 for bad input, 3 where the
machines fail and the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from capture import __version__, environment, interrupts
from capture.cli.library_log import LibraryLog
from capture.cli.progress import clear_line
from capture.errors import (
    CaptureError,
    OptionError,
    Violation,
    raised_at,
    users_file,
    users_traceback,
    violations_of,
)
from capture.quantities import nearest

#: What each verb does; the module of that name in ``capture.cli`` has ``add_arguments`` and
#: ``main``, and is loaded where the verb is asked for.
VERBS = {
    "demo": "the whole path on a small GPT",
    "estimate": "what a model needs, and the fewest devices that can hold it, without compiling",
    "profile": "measure a model's layers",
    "store": "look after the store of measurements",
    "plan": "recommend a plan: pipeline stages, packs of layers (offload), or a model array",
    "predict": "predict a plan's memory from a profile",
    "verify": "compile a plan's stages for its target: the exact peak per device",
    "run": "execute a plan on the devices of this machine",
    "osdp": "shard a model's operators over data-parallel devices: FSDP (ZeRO-3) where it pays",
    "explain": "say who needs the memory, and what one change saves most",
    "report": "show a plan: a table, a page with figures, a trace of the schedule",
    "diff": "compare two plans: decisions, memory and time",
    "export": "hand a plan to Alpa",
    "evaluate": "compare predictions of random plans with compiled truth",
}


#: Of an error.
MOST_CHARACTERS = 1400
#: Below a help that leaves options out.
_MORE = "{} more options, by group and system: --help-all. By example: docs/quickstart.md."


class Parser(argparse.ArgumentParser):
    """The parser of options, whose errors are those of all others: a sentence, and a code.

    Attributes:
        everyday: Options that ``--help`` shows where there are too many to be read, by name, with
            other words where a text is given; ``--help-all`` shows all. Empty where ``--help``
            does.
        typed: Words of the command line behind the verb.
    """

    typed: Sequence[str] = ()
    everyday: Mapping[str, str] = MappingProxyType({})

    def show_everyday(self, options: Mapping[str, str]) -> None:
        """Let ``--help`` show these options, and ``--help-all`` all."""
        self.everyday = options
        self.add_argument("--help-all", action=_HelpAll, help="show all options")

    def format_help(self) -> str:
        if not self.everyday:
            return super().format_help()
        usage, helps = self.usage, {action: action.help for action in self._actions}
        more = 0
        for action in self._actions:
            if action.dest in self.everyday:
                action.help = self.everyday[action.dest] or action.help
            elif action.dest not in ("help", "help_all", "json", "quiet"):
                action.help, more = argparse.SUPPRESS, more + 1
        self.usage, self.epilog = f"{self.prog} [WORKLOAD] [options]", _MORE.format(more)
        try:
            return super().format_help()
        finally:
            self.usage, self.epilog = usage, None
            for action, help in helps.items():
                action.help = help

    def error(self, message: str) -> NoReturn:
        """Refuse the options with a sentence, a code and the nearest name that is known.

        Raises:
            OptionError: ``option-value``, or the code that a reader of values ends its sentence in.
        """
        said = re.fullmatch(r"(.*) \[([a-z-]+)\]", message, re.DOTALL)
        text, code = (said[1], said[2]) if said else (message, "option-value")
        meant = ""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", text):
            meant = nearest(choice[1], re.findall(r"[\w.+-]+", choice[2]))
        raise OptionError.of(f"{text.rstrip('.')}; see {self.prog} --help.{meant}", code)


class _HelpAll(argparse._HelpAction):
    """The action of ``--help-all``: it prints the help of all options and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        assert isinstance(parser, Parser), "of a verb"
        parser.everyday = {}
        parser.print_help()
        parser.exit()


def build_parser(asked: Collection[str] = tuple(VERBS)) -> argparse.ArgumentParser:
    """Return the parser of all verbs.

    Args:
        asked: Verbs whose options it knows; the modules of the others are not loaded.
    """
    parser = Parser(
        prog="capture",
        description=(
            "Plans of lowest peak memory, or the fastest that fit, for training JAX models on "
            "many devices: predicted, proven and run."
        ),
        epilog="A WORKLOAD is path/to/file.py:function?key=value or "
        "package.module:function?key=value. What compiled libraries say while a "
        f"command runs is in {environment.log_folder()} if it fails.",
    )
    parser.add_argument("--version", action="version", version=f"capture {__version__}")
    parser.set_defaults(main=None)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name, help in VERBS.items():
        sub = verbs.add_parser(
            name, help=help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name not in asked:
            continue
        verb = import_module(f"capture.cli.{name}")
        sub.description = verb.__doc__
        verb.add_arguments(sub)
        sub.add_argument(
            "--json", action="store_true", help="print one JSON document on standard output"
        )
        sub.add_argument("--quiet", action="store_true", help="no progress on standard error")
        if everyday := getattr(verb, "EVERYDAY", {}):
            sub.show_everyday(everyday)
        sub.set_defaults(main=verb.main, parser=sub)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options of a command.

    Raises:
        OptionError: ``option-unknown`` for what its verb does not know, with the nearest name, and
            those of ``Parser.error``.
    """
    given = _joined(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser([word for word in given if word in VERBS][:1])
    options, unknown = parser.parse_known_args(given)
    if options.main is None and not unknown:
        parser.print_help()
        parser.exit()
    if options.main is not None:
        options.parser.typed = tuple(given)[tuple(given).index(_verb(options)) + 1 :]
    if unknown:
        asked = getattr(options, "parser", parser)
        known = [name for name in asked._option_string_actions if name.startswith("--")]
        raise OptionError.of(
            f"{asked.prog} has no {' '.join(unknown)}; see {asked.prog} --help."
            f"{nearest(unknown[0].partition('=')[0], known)}",
            "option-unknown",
        )
    return options


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words of a command with values such as -5h joined to their options, which then
    refuse them with their own words; argparse would take them for options.

    Example:
        >>> _joined(["plan", "--mtbf", "-5h", "-o", "x.json"])
        ['plan', '--mtbf=-5h', '-o', 'x.json']
    """
    found: list[str] = []
    for word in words:
        is_value = re.match(r"-[\d.]", word) and found and re.fullmatch(r"--[^=]+", found[-1])
        if is_value:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _verb(options: argparse.Namespace) -> str:
    return options.parser.prog.split()[-1]


def console() -> int:
    """Run a verb in a process of its own, whose compiled libraries write to a log file. This is the
    ``capture`` command."""
    try:
        options = parse()
    except OptionError as error:
        return _refused("--json" in sys.argv, error)
    environment.shield_children()
    log, code = LibraryLog.begin(), 2
    warnings.showwarning = _show_warning
    try:
        code = run_verb(options)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
        raise
    finally:
        # 1 is an answer, that nothing fits, but of ``profile``; and who interrupts a command knows
        # why it ended.
        log.end(failed=code in (2, 3) or (code == 1 and _verb(options) == "profile"))
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb in this process. Unlike ``console``, it leaves standard error as it is."""
    try:
        options = parse(arguments)
    except OptionError as error:
        return _refused("--json" in (sys.argv if arguments is None else arguments), error)
    return run_verb(options)


def _refused(asks_json: bool, error: OptionError) -> int:
    _report(asks_json, error.violations)
    return 2


def run_verb(options: argparse.Namespace) -> int:
    """Run a verb and return its exit code. A broken rule of the user's input, or a file that cannot
    be used, is printed with its code alone."""
    from capture.cli import asked
    from capture.cli import options as shared

    try:
        if _verb(options) != "profile":  # which makes the folder of its file
            shared.check_outputs(options)
        with interrupts.noted():
            code = options.main(options)
        asked.remember_named(options)
        return code
    except CaptureError as error:
        _report(options.json, error.violations)
        return shared.exit_code(error)
    except KeyboardInterrupt:
        clear_line()
        kept = "; finished measurements are kept, the same command resumes"
        print(f"interrupted{kept if hasattr(options, 'store') else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        violations: tuple[Violation, ...] = violations_of(error)
        if isinstance(error, OSError) and error.filename is not None and not raised_at(error):
            violations = (Violation(f"{error.filename!r}: {error.strerror}.", "file"),)
        _report(options.json, violations)
        # Of the user's model, most likely.
        if [violation.code for violation in violations] == ["exception"]:
            print(users_traceback(error), end="", file=sys.stderr)
        return 2


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning in one line; one of the user's files with the file and line."""
    where = users_file(filename)
    clear_line()
    print(
        f"warning: {where}:{lineno}: {message}" if where else f"warning: {message}",
        file=file or sys.stderr,
    )


def _cut(message: str) -> str:
    """Return a message of ``MOST_CHARACTERS`` at most."""
    left = len(message) - MOST_CHARACTERS
    return message if left <= 0 else f"{message[:MOST_CHARACTERS]}... ({left:,} characters more)"


def _report(asks_json: bool, violations: Sequence[Violation]) -> None:
    """Print every broken rule, cut short; with ``--json`` also as a document."""
    violations = [replace(violation, message=_cut(violation.message)) for violation in violations]
    clear_line()
    print("\n".join(f"error: {violation}" for violation in violations), file=sys.stderr)
    if asks_json:
        print(json.dumps({"status": "error", "errors": [*map(vars, violations)]}, indent=2))
