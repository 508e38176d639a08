"""Reports of plans: the facts that are drawn, the words, the page in a real browser, and the
command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_plans import GB, planted_profile, predicted_plan, verified, written_plan
from timeouts import TIMEOUT_SECONDS

from capture.cli.main import main
from capture.errors import CaptureError
from capture.extras import install_command
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import Front, Why
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import predicted_timeline
from capture.report.data import envelope, levels, report_facts
from capture.report.figures import figures
from capture.report.page import page
from capture.report.palette import CATEGORIES
from capture.report.schedule_figure import MAX_BARS, NUM_SLOTS, slots
from capture.report.words import paragraph
from capture.step.timeline import compute_stream
from recommender import PlanQuestion, recommend

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STAGES = [
    Stage(0, 4, (0, 1, 2, 3), StageChoice(4, 1)).to_json(),
    Stage(4, 8, (4, 5, 6, 7), StageChoice(2, 2)).to_json(),
]
POINTS = [
    {
        "peak_bytes": (20 + 2 * i) * GB,
        "step_seconds": 1.4 - 0.1 * i,
        "bound_fraction": 0,
        "stages": STAGES,
    }
    for i in range(4)
]


@pytest.fixture(scope="module")
def profile():
    return planted_profile(8)


@pytest.fixture(scope="module")
def plan(profile):
    plan = predicted_plan(profile, [2, 2, 2, 2], (4, 4), StageChoice(2, 1), num_microbatches=8)
    return verified(plan).with_(why=Why.read({"front": {"points": POINTS, "complete": False}}))


@pytest.fixture(scope="module")
def facts(plan, profile):
    return report_facts(plan, profile)


@pytest.fixture(scope="module")
def large():
    """16 stages and 64 micro-batches."""
    profile = planted_profile(32)
    return report_facts(
        predicted_plan(profile, [2] * 16, (8,) * 4, StageChoice(1, 2), num_microbatches=64), profile
    )


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4)])
def test_a_plan_predicted_by_extrapolation_is_drawn_without_seconds(profile, degrees):
    plan = predicted_plan(profile, [4, 4], (4,), StageChoice(2, 1), num_microbatches=8)
    stages = tuple(
        Stage(stage.first, stage.stop, range(4 * i, 4 * i + 4), StageChoice(*degrees))
        for i, stage in enumerate(plan.stages)
    )
    wide = plan.with_(cluster=Cluster((8,), profile.target), stages=stages)
    with pytest.raises(CaptureError, match="allow extrapolation"):
        report_facts(wide, profile)
    wide = wide.with_(prediction=AdditivePredictor(profile, allow_extrapolation=True).predict(wide))
    assert report_facts(wide, profile).schedule.clock == "units"
    said = paragraph(report_facts(wide, profile, memory_limit_bytes=1 << 50))
    assert (
        said.startswith("The plan fits by extrapolation.")
        and "were not profiled: verify the plan to be sure" in said
    )


def drawn(facts):
    return {figure.name: figure for figure in figures(facts)}


# ---- facts ---------------------------------------------------------------------------------------


def test_facts_are_those_of_the_plan(facts, plan, profile):
    assert [stage.predicted_bytes for stage in facts.stages] == [
        note.peak_bytes for note in plan.prediction.stages
    ]
    assert [stage.verified_bytes for stage in facts.stages] == list(
        plan.verification.peak_bytes_per_device[::2]
    )
    assert [stage.max_in_flight for stage in facts.stages] == [4, 3, 2, 1], (
        "1F1B: one more for every stage that follows"
    )
    usable = Target.load("a100-40g").memory.usable_bytes
    assert facts.headroom.to_json()["headroom_bytes"] == usable - max(
        plan.verification.peak_bytes_per_device
    )
    assert facts.headroom.coverage == 1, "compiled"
    timeline = predicted_timeline(plan, profile)
    assert facts.schedule.step_seconds == timeline.step_seconds > 0
    assert facts.schedule.waits_fraction == timeline.bubble_fraction
    assert [use.peak.peak_bytes for use in facts.schedule.memory] == list(
        timeline.peak_bytes_per_device[::2]
    )
    assert facts.busiest == min(range(4), key=timeline.bubble_fraction.__getitem__)


def test_without_a_verification_headroom_is_of_the_prediction_and_its_interval():
    room = report_facts(written_plan(), memory_limit_bytes=24_200_000_000).headroom
    assert (room.verdict, room.peak_bytes, room.high_bytes, room.coverage) == (
        "may not fit",
        24 * GB,
        24_480_000_000,
        0.98,
    )
    assert report_facts(written_plan("cpu")).headroom is None


def test_gpipe_keeps_every_microbatch_in_flight():
    assert [
        stage.max_in_flight for stage in report_facts(written_plan(schedule="gpipe")).stages
    ] == [3, 3]


def test_a_profile_without_times_gives_unit_times():
    """Two stages, three micro-batches: each computes 6 passes and an update; the last backward pass
    of stage 0 ends at 8."""
    profile = planted_profile(4, "cpu")
    facts = report_facts(
        predicted_plan(profile, [2, 2], (2,), StageChoice(), num_microbatches=3), profile
    )
    assert facts.schedule.clock == "units"
    assert facts.schedule.step_seconds is None
    assert facts.schedule.simulation.seconds == 9
    assert facts.schedule.waits_fraction == pytest.approx((2 / 9, 2 / 9))
    for stage, use in zip(facts.stages, facts.schedule.memory, strict=True):
        assert use.peak.peak_bytes == pytest.approx(stage.predicted_bytes, rel=1e-6), (
            "but for losses and streams, what was predicted"
        )


def test_without_a_profile_the_schedule_alone_is_drawn():
    schedule = report_facts(written_plan()).schedule
    assert (schedule.clock, schedule.simulation.seconds, schedule.memory) == ("clocks", 8, ())
    assert schedule.waits_fraction == (0.25, 0.25), "two of eight clocks"
    ends = dict(
        zip(
            (item.label for item in schedule.simulation.work), schedule.simulation.ends, strict=True
        )
    )
    assert (
        ends["forward 0 on stage 0"],
        ends["forward 0 on stage 1"],
        ends["backward 2 on stage 0"],
    ) == (1, 2, 8)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10**6)), min_size=1, max_size=300),
    st.integers(1, 20),
)
def test_thinned_memory_keeps_its_peak_its_order_and_its_end(samples, num_buckets):
    samples.sort(key=lambda sample: sample[0])
    held = levels(samples, 61)
    thin = envelope(held, num_buckets)
    assert max(nbytes for _, nbytes in thin) == max(nbytes for _, nbytes in samples)
    assert thin[-1] == (61, samples[-1][1])
    assert [seconds for seconds, _ in thin] == sorted(seconds for seconds, _ in thin)
    assert set(thin) <= set(held)
    assert len(thin) <= max(3 * num_buckets, 3)


# ---- figures -------------------------------------------------------------------------------------


def test_a_figure_is_drawn_only_where_there_are_facts(facts):
    assert list(drawn(facts)) == [
        "stages",
        "peaks",
        "treemap",
        "errors",
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
        assert sum(trace["y"][s] for trace in bars) * 1e9 == pytest.approx(stage.predicted_bytes)
    by_name = {trace["name"]: trace for trace in figure.traces}
    predicted = by_name["predicted, with interval"]
    for s, stage in enumerate(facts.stages):
        assert (predicted["y"][s] + predicted["error_y"]["array"][s]) * 1e9 == pytest.approx(
            stage.interval_bytes[1]
        )
        assert by_name["verified (compiled)"]["y"][s] * 1e9 == pytest.approx(stage.verified_bytes)
    assert figure.layout["shapes"][0]["y0"] * 1e9 == pytest.approx(
        Target.load("a100-40g").memory.usable_bytes
    )


def test_a_limit_far_above_is_said_and_not_drawn():
    near, far = (
        drawn(report_facts(written_plan(), memory_limit_bytes=limit * GB))["peaks"]
        for limit in (100, 200)
    )
    assert near.layout["shapes"][0]["y0"] == 100
    assert "shapes" not in far.layout
    assert far.caption.endswith(
        "The limit is 200 GB; 176 GB are left. It lies far above and is not drawn."
    )


@pytest.mark.parametrize("written", [False, True], ids=["predicted", "written by hand"])
def test_every_rectangle_of_the_treemap_is_the_sum_of_those_in_it(facts, written):
    facts = report_facts(written_plan()) if written else facts
    (trace,) = drawn(facts)["treemap"].traces
    values = dict(zip(trace["ids"], trace["values"], strict=True))
    inside: dict[str, int] = {}
    for name, parent in zip(trace["ids"], trace["parents"], strict=True):
        inside[parent] = inside.get(parent, 0) + values[name]
    assert inside.pop("") == sum(stage.predicted_bytes for stage in facts.stages)
    assert all(values[name] == total for name, total in inside.items())
    assert [values[f"/stage {stage.stage_id}"] for stage in facts.stages] == [
        stage.predicted_bytes for stage in facts.stages
    ]
    if written:
        assert values["/stage 1/of no one layer/temporaries"] == 4 * GB


def test_a_category_has_one_colour_in_all_figures(facts):
    shown = drawn(facts)
    (trace,) = shown["treemap"].traces
    leaves = dict(zip(trace["labels"], trace["marker"]["colors"], strict=True))
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
        assert trace["y"][-1] * 1e9 == pytest.approx(use.final_bytes)
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
        for i, about in enumerate(traces["backward"]["customdata"])
        if about.startswith("backward 3 on stage 2<br>")
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
    assert curve["customdata"][1] == "22 GB, 1.3 s<br>layers 0-3 (4 x 1)<br>layers 4-7 (2 x 2)"
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
    assert len(points) == 3
    assert [(point.peak_bytes, point.step_seconds) for point in facts.front.points] == [
        (point.peak_bytes, point.step_seconds) for point in points
    ]
    assert len(curve["x"]) == len(points)
    assert facts.to_json()["front"]["complete"] == found.why.front.complete


def test_a_front_without_points_is_not_drawn():
    plan = written_plan().with_(why=Why(front=Front((), complete=True)))
    assert "front" not in drawn(report_facts(plan))


# ---- words ---------------------------------------------------------------------------------------


def run(arguments, capsys):
    code = main(arguments)
    return code, *capsys.readouterr()


TABLE = """\
models/gpt.py:gpt?size=2.6B on 1x3 a100-40g, 1f1b, 3 micro-batches of 8
stage  layers  devices  dp x tp  remat  predicted  verified  headroom  waits
0         0-1      0-1    2 x 1   none      24 GB         -   12.1 GB    25%
1           2        2    1 x 1   full      12 GB         -   24.1 GB    25%
peak 24 GB per device
fits: 12.1 GB of 36.1 GB left, 11.6 GB at worst (interval 98%)
step time not known (waits: unit times)
"""


def test_the_table_word_for_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written_plan().save("plan.json")
    assert run(["report", "plan.json"], capsys) == (0, TABLE, "")


def test_the_paragraph_of_a_plan_that_fits_and_is_verified():
    plan = verified(written_plan(), 0.99)
    assert paragraph(report_facts(plan)) == (
        "The plan fits. The fullest device needs 23.8 GB at its peak (by the compiler of the "
        "target); of 36.1 GB, what the target can use, "
        "12.3 GB are left. Every stage was compiled, so the peaks are exact; the prediction was "
        "off by at most 1.01%. The bottleneck of "
        "memory is stage 0 (layers 0-1): 10 GB of the predicted peak are activations during the "
        "backward pass, of 2 micro-batches in "
        "flight. Were all passes equally long, stages would wait 25% of a step on average. How "
        "long a step takes is not known."
    )


def test_the_paragraph_of_a_plan_that_may_not_fit():
    assert paragraph(
        report_facts(written_plan(coverage=None), memory_limit_bytes=24_200_000_000)
    ).startswith(
        "The plan may not fit. The fullest device needs 24 GB at its peak (predicted); of 24.2 "
        "GB, the limit that was given, 200 MB are "
        "left. The upper end of the intervals is 24.5 GB, 280 MB too much; the intervals are not "
        "calibrated. Verify the plan to be sure "
        "(capture verify). The bottleneck of memory is stage 0 (layers 0-1): 10 GB of it are "
        "activations during the backward pass, "
    )


def test_the_paragraph_says_what_is_not_known():
    assert paragraph(report_facts(written_plan("cpu"))).startswith(
        "The fullest device needs 24 GB at its peak (predicted). Nobody says how much memory a "
        "device of cpu has, so nothing is said of "
        "what is left (--memory does). The upper end of the intervals is 24.5 GB; a device stays "
        "within its interval with a calibrated "
        "probability of 98%. "
    )


def test_the_paragraph_names_the_bottleneck_of_time(facts):
    step, waits = facts.schedule.step_seconds, facts.schedule.waits_fraction
    assert (
        f"A step takes {1e3 * step:.0f} ms (simulated), {128 / step:.3g} examples/s. The "
        "bottleneck of time is stage "
    ) in paragraph(facts)
    assert f"which computes for {1 - min(waits):.0%} of the step" in paragraph(facts)


# ---- the page ------------------------------------------------------------------------------------


class References(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]


def test_the_page_fetches_nothing(facts):
    html = page(facts)
    references = References()
    references.feed(html)
    assert references.found == ["data:,"]
    assert "default-src 'none'" in html
    assert html.count("<script") - html.count("<script>") == 2, "the two of data"


def test_names_of_a_plan_cannot_end_the_script_or_become_elements():
    plan = written_plan()
    first, second = plan.prediction.stages
    notes = (
        replace(first, instant="</script><b>"),
        replace(second, parts_bytes={"</script><b>": 12 * GB}),
    )
    html = page(report_facts(plan.with_(prediction=replace(plan.prediction, stages=notes))))
    assert "</script><b>" not in html
    assert "\\u003c/script>\\u003cb>" in html


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(BROWSERS)} is on PATH, so nobody looked whether the "
            "page renders; install chromium"
        )
    return found


def rendered(html: str, folder: Path) -> tuple[str, list[str]]:
    """(the page's elements once its scripts have run, what they logged)."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
    ]
    command += [
        f"--user-data-dir={folder / 'browser'}",
        "--dump-dom",
        (folder / "report.html").as_uri(),
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, process.stderr
    return process.stdout, re.findall(r"CONSOLE:\d+\] (.*)", process.stderr)


@pytest.mark.parametrize("case", ["facts", "large", "written"])
def test_every_figure_renders_in_a_browser(case, request, tmp_path):
    facts = (
        report_facts(written_plan("cpu")) if case == "written" else request.getfixturevalue(case)
    )
    names = list(drawn(facts))
    dom, logged = rendered(page(facts), tmp_path)
    assert logged == []
    assert 'class="script-error"' not in dom
    assert f'data-drawn="{len(names)}"' in dom
    parts = re.split(r'<div class="figure[^>]* id="(\w+)"', dom)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(bodies) == names
    marks = {
        "stages": "<path",
        "peaks": "<path",
        "treemap": "<path",
        "errors": "<path",
        "memory": "<path",
        "front": "<path",
    }
    marks["schedule"] = "<image" if case == "large" else "<path"
    for name, body in bodies.items():
        assert 'class="main-svg"' in body, name
        plot = body[: body.index("<h2>")] if "<h2>" in body else body
        assert marks[name] in plot, name


def test_a_page_that_does_not_render_is_seen(facts, tmp_path):
    dom, logged = rendered(
        page(facts).replace("Plotly.newPlot(figure", "Plotly.nothing(figure"), tmp_path
    )
    assert (
        'class="script-error">A figure could not be drawn: Uncaught TypeError: Plotly.nothing is '
        "not a function"
    ) in dom
    assert "data-drawn" not in dom
    assert len(logged) == 1


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch, plan, profile):
    monkeypatch.chdir(tmp_path)
    plan.save("plan.json")
    profile.save("profile.json")
    return tmp_path


def test_the_command_writes_a_page_and_a_trace(files, facts, capsys):
    arguments = [
        "report",
        "plan.json",
        "--profile",
        "profile.json",
        "-o",
        "report.html",
        "--trace",
        "trace.json",
        "--json",
    ]
    code, out, _ = run(arguments, capsys)
    document = json.loads(out)
    assert (code, document["written"]) == (0, {"page": "report.html", "trace": "trace.json"})
    assert document["summary"] == paragraph(facts)
    assert document["schedule"] == {
        "clock": "seconds",
        "simulated": True,
        "step_seconds": facts.schedule.step_seconds,
    }
    assert [stage["headroom_bytes"] for stage in document["stages"]] == [
        facts.headroom.limit_bytes - stage.verified_bytes for stage in facts.stages
    ]
    assert (files / "report.html").read_text(encoding="utf-8") == page(facts)
    events = json.loads((files / "trace.json").read_text())["traceEvents"]
    kinds = [event["cat"] for event in events if event["ph"] == "X"]
    assert (kinds.count("forward"), kinds.count("backward"), kinds.count("update")) == (32, 32, 4)
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"stage 0", "stage 1", "stage 2", "stage 3"}
    assert any(event["ph"] == "C" for event in events), "memory"


def test_the_command_says_what_it_wrote(files, facts, capsys):
    code, out, err = run(
        ["report", "plan.json", "--profile", "profile.json", "-o", "report.html"], capsys
    )
    assert (code, out, err) == (0, f"{paragraph(facts)}\npage -> report.html\n", "")


def error_of(arguments, capsys) -> str:
    code, out, err = run(arguments, capsys)
    assert (code, out) == (2, "")
    return err


def test_a_plan_without_a_prediction_is_predicted(files, plan, capsys):
    """By the profile that is given; without one, what is to be profiled is said, and must be
    there."""
    plan.with_(prediction=None, why=None, verification=None).save("bare.json")
    Plan.load("bare.json").with_(prediction=plan.prediction).save("predicted.json")
    shown = [
        run(["report", name, "--profile", "profile.json"], capsys)
        for name in ("bare.json", "predicted.json")
    ]
    assert shown[0] == shown[1] and shown[0][0] == 0
    with pytest.raises(CaptureError, match=r"\[report-prediction\]$"):
        report_facts(Plan.load("bare.json"))
    said, refused = error_of(["report", "bare.json"], capsys).splitlines()
    assert said == (
        f"the plan has no prediction and there is no --profile: profiling {plan.workload} for "
        "its stages"
    )
    assert refused.endswith("[workload-file]")
    Plan.load("bare.json").with_(workload=None).save("bare.json")
    assert error_of(["report", "bare.json"], capsys).endswith("[plan-workload]\n")


def test_a_missing_plotly_is_told_how_to_install(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    assert error_of(["report", "plan.json", "-o", "report.html"], capsys) == (
        "error: plotly is not installed, and the page is drawn with it: "
        f"{install_command('report')}. Without -o, a table is printed. "
        "[report-plotly]\n"
    )
    assert not (files / "report.html").exists()


def test_a_profile_of_another_target_is_refused(files, capsys):
    planted_profile(8, "cpu").save("cpu.json")
    assert "[profile-target]" in error_of(["report", "plan.json", "--profile", "cpu.json"], capsys)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda data: data["prediction"]["stages"].pop(),
            "prediction.stages has 3 items and must have 4, one per stage",
        ),
        (
            lambda data: data["prediction"]["stages"][1].pop("peak_bytes"),
            "prediction.stages[1].peak_bytes is missing",
        ),
        (
            lambda data: data["prediction"]["stages"][2]["layers_bytes"].pop(),
            "layers_bytes has 1 items and must have 2, one per layer",
        ),
        (lambda data: data["prediction"].pop("source"), "prediction.source is missing"),
        (
            lambda data: data["prediction"].update(interval_coverage="most"),
            "prediction.interval_coverage is 'most' and must be a number",
        ),
        (
            lambda data: data["verification"]["peak_bytes_per_device"].pop(),
            "verification.peak_bytes_per_device has 7 items and must have 8",
        ),
        (
            lambda data: data["why"]["front"]["points"][0].pop("step_seconds"),
            "why.front.points[0].step_seconds is missing",
        ),
        (lambda data: data["why"]["front"].pop("complete"), "why.front.complete is missing"),
    ],
)
def test_wrong_notes_of_a_plan_are_named(plan, edit, message):
    data = json.loads(json.dumps(plan.to_json()))
    edit(data)
    with pytest.raises(CaptureError) as caught:
        report_facts(Plan.from_json(data))
    assert caught.value.codes == ("plan-corrupt",)
    assert message in str(caught.value)


def test_the_table_needs_neither_jax_nor_plotly(files):
    code = (
        "import sys\nfrom capture.cli.main import main\nmain(['report', 'plan.json', '--profile', "
        "'profile.json'])\n"
    )
    code += (
        "print(*(name for name in ('jax', 'sklearn', 'plotly') if name in sys.modules), "
        "file=sys.stderr)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert process.stderr.split() == []
    assert process.stdout.startswith(
        "models/gpt.py:gpt?size=2.6B on 2x4 a100-40g, 1f1b, 8 micro-batches of 16\nstage "
    )
