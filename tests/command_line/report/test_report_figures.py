"""Figures of a report: what each draws, and when it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_plans import GB, drawn, planted_profile, predicted_plan, written_plan

from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.plan.choices import StageChoice
from capture.plan.why import Bracket, ByLayers, Front, Proven, Why
from capture.report.data import report_facts
from capture.report.palette import CATEGORIES
from capture.report.schedule_figure import MAX_BARS, NUM_SLOTS, slots
from capture.step.timeline import compute_stream
from recommender import PlanQuestion, recommend

# ---- figures -------------------------------------------------------------------------------------


def test_a_figure_is_drawn_only_where_there_are_facts(facts):
    assert list(drawn(facts)) == [
        "stages",
        "peaks",
        "treemap",
        "memory",
        "schedule",
        "front",
    ]
    assert list(drawn(report_facts(written_plan()))) == ["stages", "peaks", "treemap", "schedule"]


def test_the_stage_map_covers_every_device_once(facts, large):
    for shown in (facts, large):
        covered = [
            (node, base + 0.5 + i)
            for trace in drawn(shown)["stages"].traces
            for node, base, width in zip(trace["y"], trace["base"], trace["x"], strict=True)
            for i in range(width)
        ]
        nodes = shown.plan.cluster.nodes
        assert sorted(covered) == [
            (node, device) for node, size in enumerate(nodes) for device in range(size)
        ]


def test_a_stage_on_two_nodes_has_a_bar_on_each():
    profile = planted_profile(4, max_devices=8)
    plan = predicted_plan(profile, [4], (4, 4), StageChoice(8, 1))
    (trace,) = drawn(report_facts(plan))["stages"].traces
    assert (trace["y"], trace["base"], trace["x"]) == ([0, 1], [-0.5, -0.5], [4, 4])


def test_the_parts_of_a_stage_are_stacked_to_its_peak_under_the_limit(facts):
    figure = drawn(facts)["peaks"]
    bars = [trace for trace in figure.traces if trace["type"] == "bar"]
    for s, stage in enumerate(facts.stages):
        assert sum(trace["y"][s] for trace in bars) * 1e9 == pytest.approx(
            stage.predicted.peak_bytes
        )
    by_name = {trace["name"]: trace for trace in figure.traces}
    predicted = by_name["predicted, with interval"]
    for s, stage in enumerate(facts.stages):
        assert predicted["intervals"][s][1] * 1e9 == pytest.approx(
            stage.predicted.interval_bytes[1]
        )
        assert by_name["verified (compiled)"]["y"][s] * 1e9 == pytest.approx(stage.verified_bytes)
    assert figure.layout["limit"][1] * 1e9 == pytest.approx(
        Target.load("a100-40g").memory.usable_bytes
    )


def test_a_limit_far_above_is_said_and_not_drawn():
    near, far = (
        drawn(report_facts(written_plan(), memory_limit_bytes=limit * GB))["peaks"]
        for limit in (100, 200)
    )
    assert near.layout["limit"][:2] == ("y", 100)
    assert "limit" not in far.layout
    assert far.caption.endswith(
        "The limit is 200 GB; 176 GB are left. It lies far above and is not drawn."
    )


@pytest.mark.parametrize("written", [False, True], ids=["predicted", "written by hand"])
def test_every_rectangle_of_the_treemap_is_the_sum_of_those_in_it(facts, written):
    facts = report_facts(written_plan()) if written else facts
    (trace,) = drawn(facts)["treemap"].traces
    values = {area.key: area.nbytes for area in trace["areas"]}
    inside: dict[str, int] = {}
    for area in trace["areas"]:
        inside[area.parent] = inside.get(area.parent, 0) + area.nbytes
    assert inside.pop("") == sum(stage.predicted.peak_bytes for stage in facts.stages)
    assert all(values[name] == total for name, total in inside.items())
    assert [values[f"/stage {stage.stage_id}"] for stage in facts.stages] == [
        stage.predicted.peak_bytes for stage in facts.stages
    ]
    if written:
        assert values["/stage 1/of no one layer/temporaries"] == 4 * GB


def test_a_category_has_one_colour_in_all_figures(facts):
    shown = drawn(facts)
    (trace,) = shown["treemap"].traces
    leaves = {area.label: area.color for area in trace["areas"]}
    bars = {
        trace["name"]: trace["marker"]["color"]
        for trace in shown["peaks"].traces
        if trace["type"] == "bar"
    }
    assert set(bars) >= {"parameters", "gradients", "optimizer", "activations", "temporaries"}
    assert (
        bars
        == {category: CATEGORIES[category] for category in bars}
        == {category: leaves[category] for category in bars}
    )


def test_memory_over_time_shows_the_peak_of_the_simulation(facts):
    figure = drawn(facts)["memory"]
    for trace, use in zip(figure.traces, facts.schedule.memory, strict=True):
        assert max(trace["y"]) * 1e9 == pytest.approx(use.peak.peak_bytes)
        assert trace["y"][-1] * 1e9 == pytest.approx(use.samples[-1][1])
    assert "Simulated" in figure.caption


def test_the_gantt_has_a_bar_per_program_where_the_simulation_puts_it(facts):
    traces = {trace["name"]: trace for trace in drawn(facts)["schedule"].traces}
    assert {name: len(trace["x"]) for name, trace in traces.items()} == {
        "forward": 4 * 8,
        "backward": 4 * 8,
        "update": 4,
        "transfer": 2 * 3 * 8,
    }
    first = facts.schedule.simulation
    at = next(
        i
        for i, item in enumerate(first.work)
        if item.label == "backward 3 on stage 2" and item.kind == "backward"
    )
    bar = next(
        i
        for i, about in enumerate(traces["backward"]["said"])
        if about.startswith("backward 3 on stage 2\n")
    )
    assert traces["backward"]["base"][bar] == pytest.approx(1e3 * first.starts[at]), "milliseconds"
    assert traces["backward"]["x"][bar] == pytest.approx(1e3 * (first.ends[at] - first.starts[at]))


def test_a_large_schedule_is_an_image_that_says_so(large):
    figure = drawn(large)["schedule"]
    assert [trace["type"] for trace in figure.traces] == [
        "heatmap",
        "scatter",
        "scatter",
        "scatter",
    ]
    assert (
        "3,984 programs and transfers are too many for bars: drawn are 1,200 slots of time"
        in figure.caption
    )
    assert 16 * (2 * 64 + 1) + 2 * 15 * 64 == 3984 > MAX_BARS
    kinds, _ = slots(large.schedule, NUM_SLOTS)
    length = large.schedule.simulation.seconds / NUM_SLOTS
    for s, row in enumerate(kinds):
        busy = large.schedule.simulation.busy_seconds[compute_stream(f"stage {s}")]
        # A program's ends fall into slots that are partly something else's: at most half a slot
        # each is given to the wrong side.
        assert abs(sum(kind is not None for kind in row) * length - busy) <= 129 * length
    assert (kinds[0][0], kinds[15][0], kinds[15][-1]) == ("forward", None, None)


def test_the_slots_of_a_schedule_in_clocks():
    """1F1B of two stages: the last stage waits first, then alternates; two slots per clock."""
    kinds, labels = slots(report_facts(written_plan()).schedule, 16)
    letters = [
        "".join(".FB"[(None, "forward", "backward").index(kind)] for kind in row) for row in kinds
    ]
    assert letters == ["FFFF..BBFFBB..BB", "..FFBBFFBBFFBB.."]
    assert labels[0][8] == "forward 2 on stage 0"
    coarse, _ = slots(report_facts(written_plan()).schedule, 5)
    assert (coarse[1][0], coarse[1][-1]) == (None, None), (
        "of 1.6 clocks, the first and the last 1.0 are waiting"
    )


def test_the_front_has_its_points_and_this_plan(facts):
    figure = drawn(facts)["front"]
    curve, here = figure.traces
    assert curve["said"][1] == "22 GB, 1.3 s\nlayers 0-3 (4 x 1)\nlayers 4-7 (2 x 2)"
    assert figure.caption.startswith(
        "4 plans: a sample of those that no other plan beats both in memory and in time, with "
        "both ends."
    )
    assert curve["x"] == pytest.approx([20, 22, 24, 26])
    assert curve["y"] == pytest.approx([1.4, 1.3, 1.2, 1.1])
    assert here["x"] == pytest.approx([facts.fullest.peak_bytes / 1e9])
    assert here["y"] == pytest.approx([facts.schedule.step_seconds]), (
        "seconds: the unit of the slowest"
    )


def test_what_no_plan_is_faster_than_is_drawn_below_the_front(facts):
    """Within the peak of a point by its bound, beyond the last by that of all; and by estimates."""
    points = [
        replace(point, bound_fraction=fraction)
        for point, fraction in zip(facts.front.points, (1.0, 1.0, 0.5, 0.1), strict=True)
    ]
    trail = (Bracket(1.0, 1, 0, 20 * GB, True, 0.9, 1.1),)
    proven = Proven(0.2, trail, by_layers=ByLayers(1.05, 3, 0.0))
    why = Why(front=Front(tuple(points), False), proven=proven)
    figure = drawn(report_facts(facts.plan.with_(why=why)))["front"]
    traced, by_layers = figure.traces[-2:]
    end = figure.layout["limit"][1] if "limit" in figure.layout else 26
    assert traced["x"] == pytest.approx([20, 20, 20, 22, 22, 24, 24, 26, 26, end])
    assert traced["y"] == pytest.approx([0.7, 0.7, 0.65, 0.65, 0.8, 0.8, 1, 1, 0.9, 0.9])
    assert by_layers["y"] == pytest.approx([1.05, 1.05])
    assert "than 900 ms, transfers left out. By estimates" in figure.caption
    assert "faster than 1.05 s." in figure.caption


def test_the_front_of_a_recommendation_is_drawn(profile):
    found = recommend(
        profile,
        PlanQuestion(
            Cluster((4, 4), "a100-40g"),
            global_batch_size=128,
            num_microbatches=8,
            objective="pareto",
        ),
    )
    facts = report_facts(found.plan, profile)
    (curve, _), points = drawn(facts)["front"].traces, found.why.front.points
    assert len(points) > 2
    assert [(point.peak_bytes, point.step_seconds) for point in facts.front.points] == [
        (point.peak_bytes, point.step_seconds) for point in points
    ]
    assert len(curve["x"]) == len(points)
    assert facts.rows()["front"]["complete"] == found.why.front.complete


def test_a_front_without_points_is_not_drawn():
    plan = written_plan().with_(why=Why(front=Front((), complete=True)))
    assert "front" not in drawn(report_facts(plan))
