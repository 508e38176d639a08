"""The benchmarks' own arithmetic, and what they say where there is nothing to measure on. Their
results are in benchmarks/results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import pytest
from timeouts import TIMEOUT_SECONDS

from benchmarks import (
    alpa_replay,
    drawing,
    gpu_seconds,
    hybrid_sharding,
    mutation,
    mutwo_saturation,
    open_and_narrow,
    published_runs,
    recommended,
    whole_space,
)
from benchmarks.papers.capture import count_again, figure_7, scenarios
from benchmarks.papers.mutwo.settings import overlapped
from capture.alpa.memory import AlpaMemory
from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import NO_COST
from capture.measured.store import Store
from capture.measured.work import Collective, ProgramWork
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.profiler.compile import CompileBackend
from capture.step.interface import plan_interfaces
from capture.step.ledger import Peak
from capture.step.times import StageTimes
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion

REPOSITORY = Path(__file__).resolve().parents[2]


def test_flops_formula_gives_the_published_regression_figure():
    """Alpa's README: GPT 2.6B, batch 32, eight V100: 2.464 s is 37.0 TFLOPS."""
    case = published_runs.Case(
        "gpt", "2.6B", 32, (1, 1), ((2, 2), (2, 2)), 32, 4, 37.0, 8.745, "README"
    )
    seconds = (
        published_runs.gpt_flops(case, width=2560, seq_len=1024, vocab_size=51200) / 37.0e12 / 8
    )
    assert seconds == pytest.approx(2.464, rel=0.003)


def test_moe_flops_are_those_of_its_products():
    """Two blocks of width 2: multiplied out by hand, times four passes; the head once and its
    gradients."""
    case = published_runs.Case("moe", "-", 2, (1,), ((1, 1),), 1, 1, None, None, "-")
    # Four projections, then scores and mixture, of three tokens.
    attention = 4 * 2 * (3 * 2 * 2) + 2 * 2 * (3 * 3 * 2)
    dense = attention + 2 * 2 * (3 * 2 * 16)
    routed = attention + 2 * 2 * (3 * 2 * 16) + 2 * 3 * 2 * 5 + 4 * 3 * 7 + 8 * 3 * 2 * 7
    assert (
        published_runs.moe_flops(case, 2, 3, 11, num_experts=5, group=7, ratio=8)
        == 4 * (dense + routed) + 6 * 3 * 2 * 11
    )


@pytest.mark.parametrize("case", published_runs.CASES, ids=lambda case: case.name)
def test_published_cases_are_plans(case):
    plan = published_runs.plan_of(case)
    assert plan.num_layers == case.num_blocks and plan.cluster.num_devices == case.num_gpus
    assert [stage.num_devices for stage in plan.stages] == [dp * tp for dp, tp in case.degrees]


def test_mutants_that_are_called_equivalent_are_of_lines_that_exist():
    """A line that changed takes its reason with it."""
    for entry in json.loads(mutation.EQUIVALENT.read_text()):
        lines = [line.strip() for line in (REPOSITORY / entry["module"]).read_text().splitlines()]
        assert entry["module"] in mutation.PARTS and entry["removed"] in lines and entry["why"]
        assert entry["added"] != entry["removed"]


def test_a_run_of_one_stage_is_counted_as_one_program(tmp_path, monkeypatch):
    """By hand: 16 bits twice, a float32 copy that two replicas split, state, and the batch of the
    step; the rest is the program's."""
    spec = WorkloadSpec(
        str(REPOSITORY / "models" / "gpt.py"),
        "gpt",
        {"size": "tiny", "num_layers": 2, "dtype": "float16"},
    )
    plan = Plan(
        Cluster((2,)),
        2,
        (Stage(0, 2, (0, 1), StageChoice(2, 1, "full", True)),),
        16,
        4,
        workload=spec,
    )
    store = Store(tmp_path / "store.db")
    measurements = open_measurements(
        ProfileQuestion(spec, Cluster((2,), "cpu"), 8), store=store, progress=lambda *_: None
    )
    num_params, state, update = 1_000_000, 4_000_001, 5_000_000
    stage = SimpleNamespace(
        params_bytes=4 * num_params,
        optimizer_bytes=state,
        batch_bytes={0: 100, 1: 28},
        transient_bytes={"update": update},
    )
    found = SimpleNamespace(stages=[stage])

    def counted(transient_bytes):
        def compiler(function, args, *, donate, out_shardings):
            params, batch, _ = args
            loss, accumulated = jax.eval_shape(function, *args)
            assert loss.shape == () and [x.shape for x in accumulated] == [x.shape for x in params]
            assert {leaf.shape[0] for leaf in batch} == {2}, "of one replica"
            assert donate == (2,) and len(out_shardings[1]) == len(params)
            return SimpleNamespace(transient_bytes=transient_bytes)

        monkeypatch.setattr(measurements.backend, "compiler_of", lambda config: compiler)
        return published_runs.one_program_bytes(published_runs.CASES[1], plan, found, measurements)

    resident = (2 + 2) * num_params + 4 * num_params // 2 + state
    assert counted(7_000_000) == resident + 4 * (100 + 28) + 7_000_000
    assert counted(6_000) == resident + update


def test_replicas_sum_their_gradients_once_per_step():
    """What tensor-parallel neighbours exchange stays in the backward pass."""
    stages = Stage(0, 1, range(4), StageChoice(2, 2)), Stage(1, 2, range(4, 8), StageChoice(1, 4))
    plan = Plan(Cluster((8,)), 2, stages, 16, 4)
    gradients, activations = Collective("all-reduce", 8, 2, 2), Collective("all-reduce", 8, 2, 1)
    backward = ProgramWork(0, "float16", 0, 0, (activations, gradients))
    update = ProgramWork(0, "float16", 0, 0, (activations,))
    cost = replace(NO_COST, forward_work=backward, backward_work=backward, update_work=update)
    first, second = published_runs.summed_once(plan, [cost, cost])
    assert first.forward_work == backward and second == cost
    assert first.backward_work.collectives == (activations,)
    assert first.update_work.collectives == (activations, gradients)


def test_stages_that_alpas_solver_split_are_named():
    named = {case.name: case.undecided for case in published_runs.CASES if case.undecided}
    assert named["wide_resnet 4B, 16 GPUs, Alpa"] == (2,) and named[
        "wide_resnet 6.8B, 32 GPUs, Alpa"
    ] == (1, 2, 3)
    for case in published_runs.CASES:
        assert all(
            stage < len(case.stages) and max(case.degrees[stage]) > 1 for stage in case.undecided
        )
        split = published_runs.with_tensors_split(
            published_runs.plan_of(case), case.undecided
        ).stages
        degrees = [
            (1, dp * tp) if s in case.undecided else (dp, tp)
            for s, (dp, tp) in enumerate(case.degrees)
        ]
        assert [
            (stage.choice.data_parallel, stage.choice.tensor_parallel) for stage in split
        ] == degrees


def test_without_a_gpu_nothing_is_measured_and_nothing_written(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "benchmarks.gpu_rates", "-o", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0 and "there is no GPU here" in done.stdout
    assert not (tmp_path / "out.json").exists()


def test_what_was_said_of_steps_is_compared_with_what_ran(tmp_path):
    case = asdict(gpu_seconds.CASES[0])
    said = {"step_seconds": 0.09, "bound_seconds": 0.05, "peak_bytes": 95}
    ran = {"step_seconds": 0.1, "busy_seconds": 0.08, "peak_bytes": 100}
    other = asdict(gpu_seconds.CASES[1])
    for name, rows in {
        "predict": [{"case": case, "predict": said}],
        "run": [{"case": case, "run": ran}, {"case": other, "run": {"failed": "no memory"}}],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    asked = [tmp_path / "predict.json", tmp_path / "run.json", "-o", tmp_path / "out.json"]
    command = [sys.executable, "-m", "benchmarks.gpu_seconds", "compare", *map(str, asked)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=TIMEOUT_SECONDS)
    first, second = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert first["seconds_error"] == pytest.approx(-0.1)
    assert first["busy_error"] == pytest.approx(0.125)
    assert first["peak_error"] == pytest.approx(-0.05)
    assert first["bound_fraction"] == pytest.approx(0.5)
    assert "seconds_error" not in second and second["run"]["failed"] == "no memory"


@pytest.mark.exhaustive
def test_a_replica_traced_alone_holds_what_the_compiled_stage_does(tmp_path):
    """Parameters, state, values and residuals of both; only what a program needs while it runs is
    the compiler's."""
    spec = WorkloadSpec(
        str(REPOSITORY / "models" / "gpt.py"),
        "gpt",
        {"size": "tiny", "num_layers": 3, "dtype": "float16"},
    )
    stages = (
        Stage(0, 2, [0, 1], StageChoice(2, 1, "none", True)),
        Stage(2, 3, [2, 3], StageChoice(2, 1, "full", True)),
    )
    plan = Plan(Cluster((4,)), 3, stages, 16, 4, "1f1b", workload=spec)
    backend, tracer = (
        CompileBackend(spec.load(), store=Store(tmp_path / "store.db")),
        alpa_replay.Tracer(spec),
    )
    graph, param_bytes = backend.traced(4).graph, {(1, 1): backend.sharding(4).param_bytes((1, 1))}
    compiled = plan_interfaces(
        plan, graph, param_bytes, [backend.measure(StageConfig.of(stage, 4)) for stage in stages]
    )
    traced = [tracer.interface(stage, 4) for stage in stages]
    assert [replace(stage, transient_bytes={}) for stage in traced] == [
        replace(stage, transient_bytes={}) for stage in compiled
    ]


# ---- the paper's evaluation ----------------------------------------------------------------------


def test_shares_of_errors_count_every_gpu_and_the_largest_of_a_plan():
    def prediction(plan, predicted, measured, by_paper, known=False):
        return {
            "plan": plan,
            "predicted_bytes": predicted,
            "paper_predicted_bytes": by_paper,
            "measured_bytes": measured,
            "compiled_before": known,
        }

    found = [
        prediction(0, 101, 100, 150),
        prediction(0, 60, 50, None),
        prediction(1, 94, 100, 90, known=True),
        prediction(1, 10, 20, 10),
    ]
    ours, papers = (figure_7.row(mode, found) for mode in figure_7.MODES)
    assert (ours["per_gpu"]["within_2pct"], ours["per_gpu"]["within_11pct"]) == (0.25, 0.5)
    # 101 of 100, and 94 of 100.
    assert ours["per_plan"]["num_predictions"] == 2 and ours["per_plan"]["within_2pct"] == 0.5
    assert ours["per_gpu_not_compiled_before"]["num_predictions"] == 3
    counts = ours["per_gpu"]["count_per_percent_from_minus_25"]
    assert len(counts) == 51 and [counts[i] for i in (0, 25 - 6, 25 + 1, 25 + 20)] == [1, 1, 1, 1]
    assert papers["num_not_predictable"] == 1
    # Of the first plan, one stage has no prediction.
    assert papers["per_plan"]["num_predictions"] == 1


def test_figure_6_has_twelve_panels_of_five_configurations():
    assert [s.panel for s in scenarios.SCENARIOS] == list("abcdefghijkl")
    hybrid = {(s.schedule, s.model.name) for s in scenarios.SCENARIOS if s.is_hybrid}
    assert {name for schedule, name in hybrid if schedule == "1f1b"} == set(scenarios.LARGEST)
    assert len({name for _, name in hybrid}) == 5
    assert all(
        model.global_batch % model.num_microbatches == 0 for model in scenarios.MODELS.values()
    )
    choices = scenarios.stage_choices(32, 16)
    assert len(choices) == len(set(choices)) == 1 + 2 + 3 + 3 + 3 and all(
        c.tensor_parallel <= 4 for c in choices
    )


def test_each_plan_is_counted_as_its_runtime_needs_it():
    """Of the same compiled stages: 7 and 8 bytes in ours, 6 and 5 in Alpa's."""
    parts = [Peak(nbytes, "", {}) for nbytes in (6, 5)]
    of_plan = {
        "verification": SimpleNamespace(peak_bytes_per_device=(7, 8)),
        "in_alpa": AlpaMemory(((0,), (1,)), tuple(parts)),
    }
    alpas, ours = (
        scenarios.Planned(None, **of_plan, is_alpas=is_alpas, predicted_bytes=None)
        for is_alpas in (True, False)
    )
    assert (tuple(alpas.peak_bytes_per_device), alpas.peak_bytes) == ((6, 5), 6)
    assert (tuple(ours.peak_bytes_per_device), ours.peak_bytes) == ((7, 8), 8)
    assert {model.name for model in scenarios.MODELS.values() if not model.master_copy} == {
        "Wide-ResNet 1B",
        "Wide-ResNet 2B",
    }


@pytest.mark.parametrize(("panel", "in_16_bits"), [("a", True), ("b", True), ("c", False)])
def test_alpas_plan_is_chosen_and_predicted_by_its_rules(panel, in_16_bits, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        scenarios,
        "autostage",
        lambda *_, **question: asked.update(question) or SimpleNamespace(plan="plan"),
    )
    monkeypatch.setattr(
        scenarios,
        "alpa_memory",
        lambda *_, master_copy: SimpleNamespace(peak_bytes_per_device=(3 if master_copy else 4,)),
    )
    monkeypatch.setattr(scenarios, "counted", lambda *args: args)
    monkeypatch.setattr(scenarios, "with_verified", lambda profile, *_: profile)
    (scenario,) = (scenario for scenario in scenarios.SCENARIOS if scenario.panel == panel)
    *_, predicted, is_alpas = scenarios.Planner(
        scenarios.Profiled(scenario.model, "profile", None, 0, True), scenario
    ).alpa()
    assert (
        asked["master_copy"] is in_16_bits and is_alpas and predicted == (3 if in_16_bits else 4,)
    )


def test_a_recorded_plan_is_counted_again(monkeypatch):
    """Of Figure 6 (a): as Alpa's for what Alpa chose, as ours for the other; the gain is that of
    what was counted."""
    record = json.loads(
        (REPOSITORY / "benchmarks" / "results" / "2026-11-22-paper-figure-6.json").read_text()
    )["rows"][0]

    def counted(plan, model, measurements, predicted, is_alpas):
        in_alpa = AlpaMemory(((0,),), (Peak(7, "", {}),))
        peak = {
            "peak_bytes": 10 if is_alpas else 8,
            "in_alpa": in_alpa,
            "to_json": lambda: {"counted_as": "alpa" if is_alpas else "ours"},
        }
        assert plan.num_layers == 32 and (predicted is None) == is_alpas and model.master_copy
        return SimpleNamespace(**peak)

    monkeypatch.setattr(count_again, "counted", counted)
    scenario = count_again.scenario_of(record)
    row = count_again.again(record, scenario, None)
    assert scenario.panel == "a" and row["gain_fraction"] == pytest.approx(0.2)
    assert row["gain_in_alpas_runtime_fraction"] == pytest.approx(0.3)
    assert [row[who]["counted_as"] for who in ("alpa", "ours")] == ["alpa", "ours"]


def a_picture() -> str:
    panel = drawing.Panel("title", "x", "y", (0, 10), (0, 50), [(5, "in\nthe middle")])
    panel.bar(1, 2, 25, drawing.OURS, "a < b")
    panel.line([(0, 0), (10, 50)], drawing.INK, "diagonal")
    panel.point(5, 25, drawing.PAPER, "a point")
    panel.level(40, drawing.ALPA)
    panel.note(5, 30, "said")
    return drawing.draw("All", "note", [panel, panel], 2, [(drawing.OURS, "ours")])


def test_a_picture_says_what_its_marks_are_and_is_the_same_again():
    picture = a_picture()
    assert picture == a_picture() and "20" + "26-" not in picture, "the same bytes, no date"
    root = ElementTree.fromstring(picture)
    assert float(root.get("width").removesuffix("pt")) == 2 * 330 + 20
    for said in ("a &lt; b", "diagonal", "a point"):
        assert picture.count(f"<title>{said}</title>") == 2, "once per panel"
    texts = [
        "".join(element.itertext()).strip() for element in root.iter() if "text" in element.tag
    ]
    assert {"All", "note", "ours", "title", "said", "the middle", "40"} <= set(texts)
    bars = drawing.grouped_bars("t", "y", [("m", {"one": 2.0, "two": "OOM"})], 330, 230)
    picture = drawing.draw("All", "", [bars], 1)
    assert "one, m: 2" in picture and ">OOM<" in picture


def test_hybrid_sharding_counts_a_gain_only_where_both_spaces_fit():
    def plan(speed):
        about = {
            "peak_bytes": 2**30,
            "num_stages": 2,
            "num_stages_with_shard_params": 1,
            "prediction_errors": [0.1, -0.3],
        }
        return {"status": "ok" if speed else "infeasible", "examples_per_second": speed, **about}

    def row(limit, *speeds):
        return {
            "cluster": "1x8",
            "limit_gib": limit,
            "spaces": dict(zip(hybrid_sharding.SPACES, map(plan, speeds), strict=True)),
            "gain": hybrid_sharding.gain(speeds[1], speeds[0]),
        }

    rows = [row(1, None, None), row(2, None, 3.0), row(3, 4.0, 5.0), row(4, 6.0, 6.0)]
    claims = hybrid_sharding.claims(rows)
    assert claims["3D + ZDP over 3D"] == {"limits": 2, "mean": 0.125, "max": 0.25, "min": 0.0}
    assert claims["only 3D + ZDP fits"] == ["1x8, 2 GiB"]
    assert claims["prediction"] == {
        "devices": 16,
        "mean_abs_error": pytest.approx(0.2),
        "max_abs_error": 0.3,
    }
    assert ElementTree.fromstring(hybrid_sharding.picture(rows)).tag.endswith("svg")


def test_fetches_overlap_with_the_programs_that_run_meanwhile():
    """One in a gap, one over two programs and the gap between, one past the end."""
    runs = [(0.0, 2.0), (3.0, 5.0), (5.0, 6.0)]
    assert overlapped(runs, [(2.25, 2.75), (1.0, 4.0), (5.5, 9.0)]) == 0.0 + 2.0 + 0.5


def test_fusion_stops_paying_where_twice_as_many_save_less_than_a_fiftieth():
    rows = [
        {"degree": degree, "seconds_of_a_model": seconds}
        for degree, seconds in [(1, 1.0), (2, 0.6), (4, 0.595), (8, 0.3)]
    ]
    assert mutwo_saturation.stops_at(rows) == 2 and mutwo_saturation.stops_at(rows[:2]) == 2


@pytest.mark.slow
def test_what_is_recommended_is_what_the_compiler_says(tmp_path):
    """One of the forty plans of the benchmark."""
    model = f"{Path(__file__).parents[1]}/user_models/widths.py:model"
    row = recommended.compared(model, "1x2", tmp_path)
    assert row["agrees"] and row["num_compiled"] >= 1 and len(row["verified_bytes_per_device"]) == 2


def test_a_plan_is_above_what_is_said_of_it_where_any_part_is():
    """One stage on two devices; each number in turn is put above what compiles."""
    stage = {"layers": [0, 1], "choice": "", "peak_bytes": 100, "held_bytes": 100}
    stage |= {"seconds": 1.0, "least_seconds": 1.0, "floor_seconds": 1.0}
    row = {
        "stages": [stage],
        "peak_bytes": [100, 100],
        "least_peak_bytes": [100, 90],
        "step_seconds": 5.0,
        "least_seconds": {"floor": 5.0},
    }
    assert not list(whole_space.above(row))
    planted = [
        {"stages": [stage | {"held_bytes": 101}]},
        {"stages": [stage | {"floor_seconds": 1.01}]},
        {"least_peak_bytes": [100, 101]},
        {"least_seconds": {"floor": 5.01}},
    ]
    assert [len(list(whole_space.above(row | each))) for each in planted] == [1, 1, 1, 1]


def test_no_step_of_a_plan_is_below_its_stages_one_after_the_other():
    """By hand: the second stage begins after the first one's 2 s and works 4 x 3 s; at the end the
    first one updates for 1 s, which is longer beside the second one's 5 s."""
    times = [StageTimes(1.0, 1.0, 1.0), StageTimes(1.0, 2.0, 5.0)]
    assert whole_space.least_step(times, 4) == 2 + 4 * 3 + 1


def test_an_open_answer_is_slower_where_a_narrow_one_is_faster_or_it_is_none():
    narrow = {"FSDP": {"step_seconds": 1.0}, "auto": {"status": "infeasible"}}
    judged = open_and_narrow.judged
    assert not judged({"step_seconds": 1.0005}, narrow)["is_slower"]
    assert judged({"step_seconds": 1.002}, narrow)["is_slower"]
    assert judged({"status": "infeasible"}, narrow)["is_slower"]
    assert not judged({"status": "infeasible"}, {"auto": {}})["is_slower"]
    assert judged({"crashed": "Traceback"}, narrow)["crashed"] == ["open"]
