"""How far jobs are: a line for people, lines of JSON for schedulers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from capture.plan.why import Bracket
from capture.quantities import counted

#: Between two lines where they are not rewritten.
PAUSE_SECONDS = 15.0

Progress = Callable[[str, int, int], None]
Clock = Callable[[], float]


@dataclass
class Tally:
    """The count of jobs that are done, over all kinds of which something is left.

    Attributes:
        kinds: (done, total) by kind.
        clock: Seconds.
    """

    clock: Clock = time.monotonic
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    _began: float = 0.0

    def note(self, kind: str, done: int, total: int) -> None:
        """Note how many jobs of a kind are done. When all that was known is done, counting starts
        anew, unless there is more of the same kind."""
        _, known = self.kinds.get(kind, (0, total))
        if self.done == self.total and total <= known:
            self.kinds.clear()
        if not self.kinds:
            self._began = self.clock()
        self.kinds[kind] = done, total

    @property
    def done(self) -> int:
        return sum(done for done, _ in self.kinds.values())

    @property
    def total(self) -> int:
        return sum(total for _, total in self.kinds.values())

    @property
    def seconds(self) -> float:
        """The seconds since the first job was noted."""
        return self.clock() - self._began

    @property
    def jobs_per_minute(self) -> float | None:
        """The jobs that were done per minute; None before the first is done."""
        return 60 * self.done / self.seconds if self.done and self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """The seconds left at the rate so far; None before the first job is done."""
        rate = self.jobs_per_minute
        return None if rate is None else 60 * (self.total - self.done) / rate


#: The kind of job that traces.
BOUNDS = "bounds from tracing"
_COMPILE, _MEASURE = ("compiling", "compiled"), ("measuring", "measured")
#: By kind of job, in words of people who have a model and want a plan: what is done, to what (with
#: the place of its s), and what of it.
_WORDS = {
    "optimizer updates": (_COMPILE, "stage{}", "optimizer updates"),
    "layer windows": (_COMPILE, "stage{}", "each layer, alone and with its neighbours"),
    "calibration": (_COMPILE, "stage{}", "random ones, to know how far predictions are off"),
    "other sizes": (_COMPILE, "stage{}", "a few at other micro-batch sizes, to know that of these"),
    "paper runs": (_COMPILE, "stage{}", "those of the paper's profiling runs"),
    "buffers of the stages": (_COMPILE, "stage{}", "what their memory consists of"),
    BOUNDS: (("tracing", "traced"), "kind{} of stage", ""),
    "stages of the plan": (_COMPILE, "stage{} of the plan", ""),
    "stages of the plans": (_COMPILE, "stage{} of the plans", ""),
    "largest sizes": (_MEASURE, "layer{}", "alone, to find the largest micro-batch size that fits"),
    "layers": (_MEASURE, "layer{}", "alone, at the sizes between"),
    "segments": (_COMPILE, "segment{}", "passes of every layer, by how many models may be fused"),
    "more programs": (_COMPILE, "more program{}", "feature maps again, other numbers of models"),
    "programs of packs": (_COMPILE, "program{} of packs", "of the plan, for its exact memory"),
    "updates on the host": (_MEASURE, "update{}", ""),
    "sums of gradients": (_MEASURE, "sum{}", ""),
    "profiling runs": (("making", "made"), "profiling run{}", ""),
    "devices of the workers": (("asking", "asked"), "worker{} for devices", ""),
}


def _counted(number: int, thing: str) -> str:
    """Return a number of things, which have ``{}`` where their s is."""
    return counted(number, thing.format(""), thing.format("s"))


def progress(options: argparse.Namespace) -> Progress:
    """Return a function that shows progress on standard error: one line that is rewritten, or,
    where that is no terminal, a line now and then."""
    if options.quiet:
        return lambda kind, done, total: None
    tally, rewrites, said = Tally(), sys.stderr.isatty(), float("-inf")

    def show(kind: str, done: int, total: int) -> None:
        nonlocal said
        tally.note(kind, done, total)
        clear_line()
        text, now = _told(kind, tally), tally.clock()
        if tally.done < tally.total and rewrites:
            *_, detail = _WORDS.get(kind, ("",))
            rewritten(f"{text}: {detail}" if detail else text)
        elif tally.done == tally.total or (tally.done and now - said >= PAUSE_SECONDS):
            # When the first is done all kinds are known.
            print(text, file=sys.stderr, flush=True)
            said = now

    return show


def _told(kind: str, tally: Tally) -> str:
    """Return how far jobs are in words, with the time left once there are jobs enough to tell: the
    first one waits for its worker to start."""
    (doing, did), thing, _ = _WORDS.get(kind, (("doing", "did"), kind, ""))
    of = _counted(tally.total, thing)
    if tally.done == tally.total:
        return f"{did} {of} in {tally.seconds:.0f} s"
    left = tally.seconds_left if tally.done >= 5 else None
    return f"{doing} {tally.done} of {of}" + (f", about {left:.0f} s left" if left else "")


class SearchProgress:
    """The progress of a search that compiles in rounds: what is known, and how many stages are done
    of all that were asked for so far. On a terminal that is one line, which is rewritten; else a
    line for every round that moves something, and one now and then.

    Args:
        options: ``quiet`` says nothing.
        clock: Seconds.
    """

    def __init__(self, options: argparse.Namespace, clock: Clock = time.monotonic):
        self._is_quiet, self._rewrites = options.quiet, sys.stderr.isatty()
        self._clock, self._said_at = clock, clock()
        self._known = self._words = self._shown = ""
        self._has_hinted = False
        self._before, self._round = (0, 0), dict[str, tuple[int, int]]()
        #: Kinds of stage whose bounds are known, and of how many that is asked.
        self._kinds = 0, 0

    def known(self, bracket: Bracket) -> None:
        """Print what is known, unless that was printed: most rounds of a long search move nothing
        that shows."""
        self._known, self._words = str(bracket), bracket.words
        moved = str(replace(bracket, seconds=0.0))
        if moved != self._shown and not self._rewrites:
            self._print(self._known)
        self._shown = moved
        if bracket.compiled and bracket.seconds > PAUSE_SECONDS and not self._has_hinted:
            self._has_hinted = True
            clear_line()
            self._print("Ctrl-C ends the search with the best plan so far")
        self._show()

    def jobs(self, kind: str, done: int, total: int) -> None:
        """Note how many jobs of a round are done (``Progress``). Optimizer updates are parts of
        stages and not counted beside them; tracing is no job of a round."""
        if kind == BOUNDS:
            self._kinds = done, total
        elif kind != "optimizer updates":
            if self._round and all(d == t for d, t in self._round.values()):
                self._before, self._round = self._counts, {}
            self._round[kind] = done, total
        self._show()

    def end(self) -> None:
        """Print the last of what was known on a line of its own."""
        if self._rewrites and self._known and not self._is_quiet:
            clear_line()
            print(self._known, file=sys.stderr, flush=True)

    @property
    def _counts(self) -> tuple[int, int]:
        """The number of jobs that are done, and of all of them, in all rounds."""
        done, total = zip(self._before, *self._round.values(), strict=True)
        return sum(done), sum(total)

    def _show(self) -> None:
        left, now = self._left, self._clock()
        if self._rewrites and not self._is_quiet:
            clear_line()
            text = "; ".join(filter(None, (left, self._words))) if left else self._known
            rewritten(text)
        elif left and now - self._said_at >= PAUSE_SECONDS:
            self._print(left)

    @property
    def _left(self) -> str:
        """The stages that are traced or compiled of those asked for, in words; empty for all."""
        (known, kinds), (done, total) = self._kinds, self._counts
        if known < kinds:
            return f"{known} of {_counted(kinds, _WORDS[BOUNDS][1])} known"
        return f"compiled {done} of {counted(total, 'stage')}" if done < total else ""

    def _print(self, text: str) -> None:
        self._said_at = self._clock()
        if not self._is_quiet:
            print(text, file=sys.stderr, flush=True)


def clear_line() -> None:
    """Clear the line of progress, for what is printed next."""
    if sys.stderr.isatty():
        print(end="\x1b[K", file=sys.stderr)


def rewritten(text: str) -> None:
    """Write a line that whoever writes next writes over: the cursor goes back to where it was."""
    width = 80
    with suppress(OSError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns or width
    print(text[: width - 1], end="\r", file=sys.stderr, flush=True)


class Events:
    """The writer of events, one JSON document per line, for the scheduler of a cluster to follow.

    Every line has ``event`` and ``time`` (seconds since 1970):

        profile    state (started, done), output, workload, cluster, target; when done also
                   num_set_aside
        job        key, kind, state (running, done, failed, pending, set aside), worker, seconds,
                   error
        progress   done, total, kinds, seconds, jobs_per_minute, seconds_left; at most one every few
                   seconds
        end        exit_code, errors

    Args:
        path: The file that lines are added to. None writes nothing.
        pause_seconds: Between two lines of progress.
    """

    def __init__(self, path: Path | None, pause_seconds: float = 5.0):
        self._file: TextIO | None = None if path is None else path.open("a", buffering=1)
        self._tally, self._pause_seconds, self._said = Tally(), pause_seconds, float("-inf")

    def say(self, event: str, **facts: Any) -> None:
        self.watch({"event": event, "time": time.time(), **facts})

    def watch(self, event: Mapping[str, object]) -> None:
        """Write an event of ``profiling_runs.batch``: a job began, ended or failed."""
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")

    def progress(self, kind: str, done: int, total: int) -> None:
        tally = self._tally
        tally.note(kind, done, total)
        if tally.done == tally.total or tally.clock() - self._said >= self._pause_seconds:
            self._said = tally.clock()
            kinds = {name: {"done": d, "total": t} for name, (d, t) in tally.kinds.items()}
            counts = {"done": tally.done, "total": tally.total, "kinds": kinds}
            rate = {"jobs_per_minute": tally.jobs_per_minute, "seconds_left": tally.seconds_left}
            self.say("progress", **counts, seconds=tally.seconds, **rate)
