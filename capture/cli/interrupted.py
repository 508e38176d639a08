"""What a run that was interrupted has saved, and the command that goes on; it is no verb itself."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.options import listed
from capture.runtime.hosts.saved import complete_steps, latest


@dataclass(frozen=True)
class Progress:
    """The point where a run began, to tell what it has saved when it is interrupted.

    Attributes:
        options: Options of the run.
        begin: The step that it goes on from.
        before: The checkpoints that were in its folder.
    """

    options: argparse.Namespace
    begin: int
    before: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Progress:
        """Note where a run begins."""
        found = None if options.restore is None else latest(options.restore)
        begin = 0 if found is None else found[0]
        return cls(options, begin, _checkpoints(options.save))

    def __str__(self) -> str:
        """Return the sentence for the user."""
        options, saved = self.options, _checkpoints(self.options.save) - self.before
        if not saved:
            since = "" if options.restore is None else f" since step {self.begin}"
            said = f"interrupted; nothing was saved{since}"
            if options.save_every is None:
                said += " (--save DIR --save-every K saves as it goes)"
            return f"{said}. To start again: {command(options)}"
        step, _ = max(saved)
        said = f"interrupted; step {step} is saved in {str(options.save)!r}"
        if not (left := self.begin + options.steps - step):
            return f"{said}, which was the last step that was asked for"
        changes = {"steps": left, "restore": options.save, "check": False}
        if left < 2:  # a trace is of an ordinary step
            changes["trace"] = None
        return f"{said}. To go on: {command(options, **changes)}"


def command(options: argparse.Namespace, **changes: Any) -> str:
    """Return the command with the options of another one, as it is typed.

    Args:
        options: Options that were parsed, with their ``parser``.
        changes: Other values, by the name of the option; None and False leave an option out.
    """
    words = options.parser.prog.split()
    for action in options.parser._actions:
        value = changes.get(action.dest, getattr(options, action.dest, None))
        if value in (None, False) or (value == action.default and action.dest not in changes):
            continue
        for each in listed(value):
            words += action.option_strings[-1:]
            words += [] if action.nargs == 0 else [str(each)]
    return shlex.join(words)


def _checkpoints(folder: Path | None) -> frozenset[tuple[int, int]]:
    """Return a folder's complete checkpoints, each told from others of the same step."""
    steps = [] if folder is None else complete_steps(folder)
    return frozenset((step, (Path(str(folder)) / str(step)).stat().st_ino) for step in steps)
