"""How far jobs are: bars or lines for people, lines of JSON for schedulers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Progress = Callable[[str, int, int], None]
Clock = Callable[[], float]


@dataclass
class Tally:
    """Jobs that are done, over all kinds of which something is left.

    Attributes:
        kinds: (done, total) by kind.
        clock: Seconds.
    """

    clock: Clock = time.monotonic
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    _began: float = 0.0

    def note(self, kind: str, done: int, total: int) -> None:
        """A kind has come so far. When all that was known is done, what follows is counted from the start again."""
        if self.done == self.total:
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
        """Since the first was noted."""
        return self.clock() - self._began

    @property
    def jobs_per_minute(self) -> float | None:
        """None before the first is done."""
        return 60 * self.done / self.seconds if self.done and self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before the first is done."""
        rate = self.jobs_per_minute
        return None if rate is None else 60 * (self.total - self.done) / rate

    def __str__(self) -> str:
        rate = "" if self.jobs_per_minute is None else f", {self.jobs_per_minute:.0f} a minute"
        left = f", about {self.seconds_left:.0f} s left" if self.seconds_left else ""
        return f"{self.done} of {self.total}, {self.seconds:.0f} s{rate}{left}"


def progress(options: argparse.Namespace) -> Progress:
    """A bar per kind of work on standard error; where that is no terminal, a line now and then."""
    if options.quiet:
        return lambda kind, done, total: None
    return _progress_bars() if sys.stderr.isatty() else _progress_lines()


def _progress_bars() -> Progress:
    from tqdm import tqdm

    bars: dict[str, Any] = {}
    tally = Tally()

    def bar_of(kind: str, total: int) -> Any:
        if kind not in bars or bars[kind].total != total:
            bars[kind] = tqdm(total=total, desc=kind, unit="job", file=sys.stderr, dynamic_ncols=True)
        return bars[kind]

    def show(kind: str, done: int, total: int) -> None:
        tally.note(kind, done, total)
        bar = bar_of(kind, total)
        bar.update(done - bar.n)
        if len(tally.kinds) > 1:
            everything = bar_of("all", tally.total)
            everything.update(tally.done - everything.n)
        if tally.done == tally.total:
            for bar in bars.values():
                bar.close()
            bars.clear()

    return show


def _progress_lines(pause_seconds: float = 15.0) -> Progress:
    tally = Tally()
    said: dict[str, float] = {}

    def show(kind: str, done: int, total: int) -> None:
        tally.note(kind, done, total)
        now = tally.clock()
        if kind in said and done < total and now - said[kind] < pause_seconds:
            return
        said[kind] = now
        together = f"; all jobs: {tally}" if len(tally.kinds) > 1 else ""
        text = f"{done} of {total}" if together else str(tally)
        print(f"{kind}: {text}{together}", file=sys.stderr, flush=True)
        if done == total:
            del said[kind]

    return show


class Events:
    """What happens, as one JSON document per line, for the scheduler of a cluster to follow.

    Every line has ``event`` and ``time`` (seconds since 1970):

        profile    state (started, done), output, workload, cluster, target; when done also num_set_aside
        job        key, kind, state (running, done, failed, pending, set aside), worker, seconds, error
        progress   done, total, kinds, seconds, jobs_per_minute, seconds_left; at most one every few seconds
        end        exit_code, errors

    Args:
        path: Of the file; lines are added to it. None writes nothing.
        pause_seconds: Between two lines of progress.
    """

    def __init__(self, path: Path | None, pause_seconds: float = 5.0):
        self._file: TextIO | None = None if path is None else path.open("a", buffering=1)
        self._tally, self._pause_seconds, self._said = Tally(), pause_seconds, float("-inf")

    def say(self, event: str, **facts: Any) -> None:
        self.watch({"event": event, "time": time.time(), **facts})

    def watch(self, event: Mapping[str, Any]) -> None:
        """Of ``profiling_runs.batch``."""
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
