"""Faults that are planted into a step of every kind of plan, each at every place where it can be: the
judge of steps refuses all of them, and none of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from array_kit import Kit

from capture.errors import ExecutionError
from capture.machine.server import Server
from capture.measured.layer_profile import Casts
from capture.plan.array import Decision
from capture.plan.schedule import make_schedule
from capture.plan.task_graph import Configuration, Packs, Swaps, Switches, TaskGraph
from capture.predictor.pack_step import packs_step
from capture.step.multiplexed import build_array, lifetimes
from capture.step.pipeline import build_step
from capture.step.program import Copy, Free, Step, Wait, replay
from capture.step.sharded import build_step as build_sharded
from capture.step.sharded import build_training
from capture.step.sub_array import movable, recomputable
from tests.property.test_osdp_step import random_plan
from tests.property.test_step import interfaces
from tests.property.test_streamed_step import profile_of
from tests.step_judge import (
    Fault,
    early_copies,
    early_donation,
    judge,
    late_frees,
    stale_copies,
    without,
)
from tests.synthetic_graphs import chain

FAULTS: dict[str, Fault] = {
    "stale copy": stale_copies,
    "late free": late_frees,
    "no free": without(Free),
    "missing wait": without(Wait),
    "missing transfer": without(Copy),
    "early donation": early_donation,
}


def pipeline(name: str) -> Step:
    graph = chain(4, skips=[(0, 3)], shared=[(0, 3), (1, 2)])
    stages = interfaces(graph, [1, 2])
    stages[1] = replace(stages[1], kept_inputs=(0,))
    stages[2] = replace(stages[2], kept_batch=(0,))
    return build_step(stages, make_schedule(name, 3, 4))


def packs(mode: str, off: tuple[str, ...] = (), swaps: Swaps | None = None) -> Step:
    profile = profile_of([50, 60, 70, 80], [1] * 4)
    swaps = swaps or Swaps()
    if swaps.stream:
        whole = (10,) * 4
        casts = tuple(w // 2 - 5 for w in profile.w_bytes)
        profile = replace(profile, casts={swaps.stream: Casts(whole, (0,) * 4, casts, whole)})
    configuration = Configuration(Packs(2, ((0, 1), (1, 3))), Packs(2, ((0, 2), (2, 3), (3, 4))))
    graph = TaskGraph.of(configuration, mode, 2, 8, Switches.without(off), swaps=swaps)
    return packs_step(graph, profile, Server.load("gtx1080ti-x4").with_(num_devices=2))


def array(turns: str) -> Step:
    of = Kit(3).sub_array(1)
    again = recomputable(of)
    decided = [
        Decision(of.bundles[n].name, "recompute" if n in again and n % 2 else "swap")
        for n in movable(of)
    ]
    return build_array([lifetimes(of, decided)] * 2, turns, Kit(3), 1).body


STEPS: dict[str, Callable[[], Step]] = {
    **{name: lambda name=name: pipeline(name) for name in ("gpipe", "1f1b")},
    "packs": lambda: packs("pp"),
    "packs over the host": lambda: packs("pp", ("p2p", "prefetch")),
    "packs of many devices": lambda: packs("dp"),
    "packs updated on devices": lambda: packs("dp", ("offload",)),
    "packs updated last": lambda: packs("pp", ("offload", "jit")),
    "packs of shares": lambda: packs("dp", swaps=Swaps(sharded=True)),
    "packs of casts": lambda: packs("pp", swaps=Swaps("bfloat16")),
    "arrays in turn": lambda: array("in turn"),
    "arrays multiplexed": lambda: array("multiplexed"),
    "sharding": lambda: build_sharded(*random_plan(3)),
    "sharding as executed": lambda: build_training(2, 3, 2, (100, 200, 30, 4), 50),
}
SHARDING = ("sharding", "sharding as executed")
#: What cannot be planted: neither hosts nor links in sharding, and one program alone where it is
#: executed, no host in pipelines; state of arrays stays where it is, and what is updated on the host
#: waits for all passes that read it.
CANNOT = {
    "late free": {"sharding as executed"},
    "missing wait": {"gpipe", "1f1b", *SHARDING},
    "missing transfer": {*SHARDING},
    "stale copy": {
        *("arrays in turn", "arrays multiplexed", *SHARDING),
        *("packs", "packs over the host", "packs of many devices", "packs of shares"),
    },
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_is_as_the_judge_wants_it(kind):
    judge(STEPS[kind]())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", STEPS)
def test_no_planted_fault_is_overlooked(kind, fault):
    step, count = STEPS[kind](), 0
    for instructions in FAULTS[fault](step):
        count += 1
        with pytest.raises((AssertionError, ExecutionError)):
            judge(replace(step, instructions=instructions))
    assert bool(count) != (kind in CANNOT.get(fault, ()))


@pytest.mark.parametrize(
    "kind", ["packs over the host", "packs updated on devices", "arrays in turn"]
)
def test_a_prefetch_above_the_limit_is_seen(kind):
    """At the limit that the step just keeps, copies that come some programs earlier are above it."""
    step = STEPS[kind]()
    limit = max(replay(step).peak_bytes_per_device)
    judge(step, limit)
    above = 0
    for instructions in early_copies(step):
        early = replace(step, instructions=instructions)
        if max(replay(early).peak_bytes_per_device) > limit:
            above += 1
            with pytest.raises(AssertionError, match="above the limit"):
                judge(early, limit)
    assert above
