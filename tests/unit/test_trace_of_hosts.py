"""The trace of an executed step over several hosts: lanes, and arrows between them."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import jax
import pytest

from capture.runtime.trace import StepTrace
from capture.step.program import Copy, Feed, Place, Step

LABEL, PAIRS = "send 0.0", [(0, 2), (1, 2)]


class Pulled:
    """An array that comes at once."""

    def block_until_ready(self) -> None: ...


def traced(host: int, monkeypatch) -> list[dict]:
    """Of one of three hosts of two devices: those of the first two send to the third."""
    monkeypatch.setattr(jax, "process_index", lambda: host)
    step = Step(places=(Place("sends", (0, 1, 2, 3)), Place("gets", (4, 5))))
    source = step.slot("x", step.places[0], "x", 8, "value")
    target = step.slot("y", step.places[1], "y", 8, "value")
    fed = step.slot("z", Place("elsewhere", (9,)), "z", 8, "input")  # of no host that draws
    copy = Copy(source, target, 8, LABEL)
    step.instructions += [copy, copy, Feed(fed, 0, (), "feed")]
    devices = [SimpleNamespace(process_index=device // 2) for device in range(10)]
    seconds = count(1_000_000_000)
    trace = StepTrace(
        SimpleNamespace(program=step, devices=devices),
        {0: frozenset(PAIRS), 1: frozenset(PAIRS)},
        lambda: float(next(seconds)),
    )
    slots = [None, [Pulled()] if host == 2 else None, None]
    for instruction in step.instructions:
        trace(instruction, slots)
    return trace.events()


@pytest.mark.parametrize("host", [0, 1, 2])
def test_every_arrow_ends_in_what_it_is_of(host, monkeypatch):
    events = traced(host, monkeypatch)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    what = "transfers" if host == 2 else "offers"
    assert sorted(lanes.values()) == [f"device {2 * host} {what}", f"device {2 * host + 1} {what}"]
    assert len(set(lanes)) == 2
    drawn = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in drawn] == [LABEL] * 4, "on both devices, twice"
    assert {(e["pid"], lanes[e["tid"]]) for e in drawn} == {
        (host + 1, name) for name in lanes.values()
    }
    arrows = [e for e in events if e["ph"] in "sf"]
    pairs = [pair for pair in PAIRS if host in pair]
    assert {e["ph"] for e in arrows} == {"f" if host == 2 else "s"}
    assert [e["id"] for e in arrows] == [
        f"{number} from {a} to {b}" for number in (0, 1) for a, b in pairs
    ]
    for arrow, number in zip(arrows, [n for n in (0, 1) for _ in pairs], strict=True):
        (at,) = [
            n
            for n, e in enumerate(e for e in drawn if e["tid"] == arrow["tid"])
            if e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        ]
        assert at == number, "what is drawn at its time"
