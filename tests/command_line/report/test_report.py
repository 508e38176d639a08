"""Reports of plans: the facts that are drawn, the words, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_plans import GB, planted_profile, predicted_plan, verified, written_plan
from timeouts import TIMEOUT_SECONDS

from capture.cli.explain import changes_lines
from capture.cli.main import main
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import CompiledPlans, Why
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import predicted_timeline, time_summary
from capture.report.data import envelope, levels, report_facts
from capture.report.difference import needs_of
from capture.report.page import page
from capture.report.words import last_lines, paragraph
from profiling_runs.explain import explained


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


# ---- facts ---------------------------------------------------------------------------------------


def test_facts_are_those_of_the_plan(facts, plan, profile):
    assert [stage.predicted.peak_bytes for stage in facts.stages] == [
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
        assert use.peak.peak_bytes == pytest.approx(stage.predicted.peak_bytes, rel=1e-6), (
            "but for losses and streams, what was predicted"
        )


def test_a_saved_plan_keeps_the_seconds_of_its_step(facts, plan, profile, tmp_path):
    """They are drawn and compared without the profile: passes and what stages send take as long as
    in the simulation of the whole step."""
    timeline = predicted_timeline(plan, profile)
    time = time_summary(timeline, plan, profile.graph_at(plan.microbatch_size))
    plan.with_(time=time).save(tmp_path / "plan.json")
    saved = report_facts(Plan.load(tmp_path / "plan.json"))
    assert saved.schedule.clock == "saved" and saved.schedule.memory == ()
    assert saved.schedule.step_seconds == facts.schedule.step_seconds
    assert saved.schedule.waits_fraction == facts.schedule.waits_fraction
    assert float(saved.schedule.simulation.seconds) == pytest.approx(
        facts.schedule.step_seconds, rel=0.01
    )
    drawn = list(saved.schedule.simulation.busy_seconds.values())
    whole = facts.schedule.simulation.busy_seconds
    for s in range(plan.num_stages):
        assert any(seconds == pytest.approx(whole[f"stage {s} compute"]) for seconds in drawn)
    assert "A step takes" in paragraph(saved)
    one, other = (needs_of(each).rows()["step time (simulated)"] for each in (facts, saved))
    assert one == other


@pytest.mark.parametrize("name", ["passes_seconds_per_stage", "sends_seconds"])
def test_seconds_of_other_stages_are_refused(plan, profile, name):
    timeline = predicted_timeline(plan, profile)
    time = time_summary(timeline, plan, profile.graph_at(plan.microbatch_size))
    wrong = replace(time, **{name: getattr(time, name)[1:]})
    with pytest.raises(CaptureError, match=rf"time.{name} has \d items and must have \d"):
        report_facts(plan.with_(time=wrong))


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


# ---- words ---------------------------------------------------------------------------------------


def run(arguments, capsys):
    code = main(arguments)
    return code, *capsys.readouterr()


TABLE = """\
models/gpt.py:gpt?size=2.6B on 1x3 a100-40g, 1f1b, 3 micro-batches of 8
stage  layers  devices  dp x tp  remat  predicted  verified  headroom  bubble
0         0-1      0-1    2 x 1   none      24 GB         -   12.1 GB     25%
1           2        2    1 x 1   full      12 GB         -   24.1 GB     25%
peak 24 GB per device
fits: 12.1 GB of 36.1 GB left, 11.6 GB at worst (interval 98%)
step time not known (bubble: unit times)
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
        "flight. Were all passes equally long, the pipeline bubble would be 25% of a step on average. How "
        "long a step takes is not known."
    )


def test_reports_and_explanations_end_with_how_the_plan_was_found():
    said = "2 plans with 3 new stages compiled; proven within 1.0%."
    why = Why("", verified=CompiledPlans(2, False, said))
    facts = report_facts(verified(written_plan().with_(why=why), 0.99))
    assert paragraph(facts).endswith(f" How it was found: {said}")
    assert last_lines(facts)[-1] == f"How it was found: {said}"
    peak = SimpleNamespace(peak_bytes=1, instant="update", parts={"activations": 1})
    stage = SimpleNamespace(peak=peak, layers={0: peak.parts}, attributed_fraction=1.0, buffers=[])
    report = explained(facts.plan, (1,), None, {}, (stage,) * facts.plan.num_stages)
    assert [*changes_lines(report)][-1] == f"how the plan was found: {said}"
    assert not [*changes_lines(replace(report, found=None))]


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
    assert (files / "report.html").read_text(encoding="utf-8") == page(facts).html(facts.headroom)
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
    assert "capture predict PLAN --profile FILE" in error_of(["report", "bare.json"], capsys)


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


def test_the_table_needs_no_jax(files):
    code = (
        "import sys\nfrom capture.cli.main import main\nmain(['report', 'plan.json', '--profile', "
        "'profile.json'])\n"
    )
    code += "print(*(name for name in ('jax', 'sklearn') if name in sys.modules), file=sys.stderr)"
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
