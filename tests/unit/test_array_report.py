"""What is shown of a plan of an array: its step, and what became of every bundle."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from array_kit import MACHINE, Kit

from capture.plan.array import ArrayPlan, Decision, Member, Saturation
from capture.report.array import _memory, _saturation, _step, array_facts, page, rows
from capture.step.sub_array import movable

KIT = Kit(3)
NAMES = [KIT.sub_array(2).bundles[n].name for n in movable(KIT.sub_array(2))]


@pytest.fixture
def facts():
    maps = [name for name in NAMES if "maps" in name]
    plan = ArrayPlan(
        cluster=MACHINE.cluster,
        batch_size=4,
        models=tuple(map(Member, range(3))),
        partition=((0, 1), (2,)),
        order="multiplexed",
        decisions=((Decision(maps[0], "swap"),), (Decision(maps[1], "recompute"),)),
        memory_limit_bytes=6_000,
        saturation=(Saturation(1, 1e-3), Saturation(2, 1.5e-3)),
    )
    return array_facts(plan, KIT, [KIT.sub_array(2), KIT.sub_array(1)], MACHINE.rates.host)


def test_every_bundle_has_a_line_that_says_what_it_is_and_why(facts):
    found = {(row[0], row[1]): row[2:] for row in rows(facts)}
    assert len(found) == 2 * len(NAMES)
    choices = {key: row[1] for key, row in found.items() if row[1] != "retained"}
    assert choices == {("0", "layer 0 maps 0"): "swapped", ("1", "layer 0 maps 1"): "recomputed"}
    nbytes, _, _, why = found["0", "layer 0 maps 0"]
    assert nbytes == "400 B" and "10 µs out and 10 µs back" in why
    # Of the last layer nothing rests: its backward pass is next.
    assert found["1", "layer 2 maps 0"][2] == "0 µs"
    assert "made again in 2 µs" in found["1", "layer 0 maps 1"][3]


def test_a_step_is_drawn_with_both_directions_and_its_memory(facts):
    drawn = {trace["name"]: trace for trace in _step(facts).traces}
    assert {"forward", "backward", "recompute", "transfer"} <= set(drawn)
    assert set(drawn["transfer"]["y"]) == {1, 2} and set(drawn["forward"]["y"]) == {0}
    assert len(drawn["forward"]["x"]) == len(drawn["backward"]["x"]) == 6
    assert set(drawn["forward"]["text"]) == {"F0", "F1"} and drawn["recompute"]["text"] == ["R1"]
    lines = {trace["name"].partition(":")[0]: trace for trace in _memory(facts).traces}
    assert set(lines) == {"device", "peak of the plan", "limit"}
    assert max(lines["device"]["y"]) <= lines["peak of the plan"]["y"][0]
    curve, alone = _saturation(facts.plan).traces
    assert curve["y"] == pytest.approx([4000, 16 / 3 * 1000]) and alone["y"][0] == curve["y"][0]


def test_every_program_has_a_curve_of_what_fusing_it_is_worth(facts):
    """With examples of its own batch size."""
    models = (Member(0), Member(1), Member(2, batch_size=8))
    found = (*facts.plan.saturation, Saturation(1, 4e-3, task=1))
    plan = replace(facts.plan, models=models, saturation=found)
    curve, _, other, alone = _saturation(plan).traces
    assert curve["y"] == pytest.approx([4000, 16 / 3 * 1000]) and other["y"] == [2000]
    assert alone["name"] == "one alone of the workload with batch_size=8"


def test_the_page_has_its_figures_and_says_that_nothing_was_measured(facts):
    text = page(facts, ["a line", "a\ntable"]).html(None)
    assert re.findall(r'class="figure" id="(\w+)"', text) == ["step", "memory", "saturation"]
    assert "never measured" in text and ">A line.<" in text and "layer 0 maps 0" in text
