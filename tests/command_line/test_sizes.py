"""Micro-batch sizes that were not profiled: memory jumps where no line says so, and answers must
not believe the line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from processes import user_model
from synthetic_profiles import make_plan

from capture.cli.main import main
from capture.documents import read, write
from capture.machine.cluster import Cluster
from capture.measured.profile import Calibration, Profile
from capture.measured.size_errors import FLOOR_FRACTION, SizeError, extrapolation_width
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from profiling_runs.calibrate import held_out_sizes, held_out_stages, size_errors
from profiling_runs.measurements import open_measurements
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify, with_verified
from recommender import PlanQuestion, recommend
from recommender.capture.extent import best_of, largest_batch, smallest_cluster
from recommender.capture.knowledge import Knowledge, recommend_verified

CLUSTER = Cluster((1, 1))


MICROBATCHES = 2


BATCH = ["--cluster", "2x1", "--microbatches", str(MICROBATCHES)]


STORE = ["--store", "store.sqlite", "--workers", "0"]


PROFILED = ["--global-batch", "16", "--neighbours", "1", "--calibration-plans", "0"]
PROFILED += ["--remat", "none"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """The model, profiled at micro-batches of 4 and 8 examples, and what compiles its plans."""
    directory = tmp_path_factory.mktemp("sizes")
    (directory / "jump.py").write_text(user_model("jump"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert (
            main(
                [
                    "profile",
                    "jump.py:model",
                    *BATCH,
                    *STORE,
                    *PROFILED,
                    "--quiet",
                    "-o",
                    "profile.json",
                ]
            )
            == 0
        )
    spec = WorkloadSpec.parse(f"{directory}/jump.py:model")
    store = Store(directory / "store.sqlite")
    measurements = open_measurements(
        ProfileQuestion(spec, Cluster((2,)), 8), store=store, where=Where(0)
    )
    return SimpleNamespace(
        directory=directory,
        profile=Profile.load(directory / "profile.json"),
        measurements=measurements,
    )


@pytest.fixture
def inside(made, monkeypatch):
    monkeypatch.chdir(made.directory)
    return made.directory


def truth(made, plan: Plan) -> int:
    return max(verify(plan, made.measurements).peak_bytes_per_device)


def compiled(made):
    return lambda plan, known: (
        verify(plan, made.measurements).verified,
        with_verified(known, plan, made.measurements),
    )


def asking(limit: int | None, batch: int) -> PlanQuestion:
    return PlanQuestion(CLUSTER, batch, MICROBATCHES, memory_limit_bytes=limit)


def at(made, size: int, limit: int | None = None):
    """What the line predicts at a micro-batch size, and the compiler's truth of that plan."""
    result = recommend(made.profile, asking(limit, size * MICROBATCHES))
    return result, truth(made, result.plan)


def between(made) -> int:
    """A limit that the line stays within for 24 examples, and the compiler from 17 on does not."""
    return at(made, 24)[0].peak_bytes + 1000


# ---- the searches --------------------------------------------------------------------------------


def test_the_line_is_low_beyond_the_jump_and_says_that_it_is_a_line(made):
    known, exact = at(made, 8)
    assert not known.extrapolated and known.peak_bytes == pytest.approx(exact, rel=0.02)
    guess, exact = at(made, 24)
    assert guess.extrapolated and guess.extrapolated and guess.prediction.to_json()["extrapolated"]
    assert (
        guess.peak_bytes < 0.6 * exact and guess.prediction.interval_bytes_per_device[0][1] < exact
    ), "beyond the interval"


def test_what_is_extrapolated_never_just_fits(made):
    guess, _ = at(made, 24, 10**9)
    assert guess.status == "ok" and guess.headroom.verdict == "fits by extrapolation"
    assert guess.headroom.to_json()["extrapolated"] and "extrapolated, interval" in str(
        guess.headroom
    )
    assert at(made, 8, 10**9)[0].headroom.verdict == "fits"


def test_the_largest_batch_fits_by_the_compiler(made):
    limit = between(made)

    def ask(question):
        return recommend(made.profile, question)

    believed, _ = largest_batch(ask, ask, asking(limit, MICROBATCHES), 4)
    assert believed.question.global_batch_size > 16 * MICROBATCHES
    assert truth(made, believed.result.plan) > limit, (
        "the line alone shows a plan that does not fit"
    )
    knowledge = Knowledge(made.profile, compiled(made))

    def settled(question):
        return knowledge.answer(question, any_that_fits=True)

    best, attempts = largest_batch(ask, settled, asking(limit, MICROBATCHES), 4)
    assert best.question.global_batch_size == 16 * MICROBATCHES
    assert truth(made, best.result.plan) == best.result.peak_bytes <= limit
    assert (
        best.result.plan.verification
        and best.result.headroom.verdict == "fits"
        and not best.result.extrapolated
    )
    assert best.result.plan.model_hash == made.measurements.backend.traced(16).graph.model_hash, (
        "capture run refuses another model"
    )
    (refused,) = [a for a in attempts if a.question.global_batch_size == 20 * MICROBATCHES]
    assert (refused.result.status, refused.rests_on, refused.result.why.code) == (
        "infeasible",
        "compiled",
        "memory-limit",
    )


def test_the_smallest_cluster_and_the_best_count_are_compiled(made):
    size = 24
    _, limit = at(made, size)
    knowledge = Knowledge(made.profile, compiled(made))
    batch = size * MICROBATCHES

    def settled(question):
        return knowledge.answer(question, any_that_fits=True)

    believed, _ = smallest_cluster(
        lambda question: recommend(made.profile, question), asking(limit, batch)
    )
    assert believed.question.cluster.num_devices == 1 and truth(made, believed.result.plan) > limit
    best, _ = smallest_cluster(settled, asking(limit, batch))
    assert best.question.cluster == CLUSTER and truth(made, best.result.plan) <= limit
    counts = [2, 6]
    best, attempts = best_of(
        lambda question: recommend(knowledge.profile, question),
        settled,
        asking(None, batch),
        counts,
        ["1f1b"],
    )
    assert (
        best.result.peak_bytes
        == truth(made, best.result.plan)
        <= min(a.result.peak_bytes for a in attempts)
    )


def test_an_answer_stays_compiled_when_other_plans_are_asked_about(made):
    """A plan that is known to fit is not lost while plans that only seem better are tried."""
    question = asking(None, 48)
    first = recommend_verified(made.profile, question, compiled(made), 1)
    again = recommend_verified(made.profile, question, compiled(made), 1, known=first)
    assert again.compiled and again.peak_bytes <= first.peak_bytes


def test_stages_that_were_compiled_for_one_plan_are_exact_in_others(made):
    """Also where the model is another program at that size, whose graph is not the profile's
    scaled."""
    result, exact = at(made, 24)
    _, known = compiled(made)(result.plan, made.profile)
    prediction = AdditivePredictor(known).predict(result.plan)
    assert not prediction.extrapolated and prediction.peak_bytes == pytest.approx(exact, rel=0.15)


# ---- the command line ----------------------------------------------------------------------------

PLAN = ["plan", "jump.py:model", *BATCH, "--profile", "profile.json"]


def run(capsys, *arguments: str, code: int = 0) -> str:
    found = main([*arguments])
    out, err = capsys.readouterr()
    assert found == code, err
    return out


def test_the_largest_batch_of_the_command_line_is_compiled(made, inside, capsys):
    limit = str(between(made))
    asked = [*PLAN, *STORE, "--largest-batch", "--memory", limit, "--quiet"]
    document = json.loads(run(capsys, *asked, "--json"))
    assert (
        document["plan"]["global_batch_size"] == 16 * MICROBATCHES and not document["extrapolated"]
    )
    assert (
        document["needs"]["headroom"]["verdict"] == "fits"
        and document["plan"]["verification"]["peak_bytes_per_device"]
    )
    written = Plan.load("plan.json")
    assert truth(made, written) == max(written.verification.peak_bytes_per_device) <= int(limit)
    text = run(capsys, *asked)
    assert (
        re.search(r"batch 40, .* infeasible .* compiled", text) and "per device, compiled" in text
    )
    guessed = run(capsys, *PLAN, "--largest-batch", "--memory", limit, "--no-compile")
    assert (
        guessed.count(" extrapolated, not compiled ") > 2
        and "ok, extrapolated: " in guessed
        and "(extrapolated, interval" in guessed
    )
    assert "per device, predicted, not compiled, extrapolated: up to" in guessed


def test_a_plan_at_another_size_than_the_profiles_is_compiled(made, inside, capsys):
    asked = [*PLAN, "--global-batch", "48", "--memory", "1GB"]
    document = json.loads(run(capsys, *asked, *STORE, "--json"))
    peak = max(document["plan"]["verification"]["peak_bytes_per_device"])
    assert peak == truth(made, Plan.load("plan.json")) and not document["extrapolated"]
    document = json.loads(run(capsys, *asked, "--no-compile", "--json"))
    assert (
        document["extrapolated"]
        and document["needs"]["headroom"]["verdict"] == "fits by extrapolation"
    )
    assert document["plan"]["verification"] is None


def test_a_limit_between_the_line_and_the_truth_fits_nothing(made, inside, capsys):
    asked = [*PLAN, "--global-batch", "48", "--memory", str(between(made)), "--schedule", "1f1b"]
    document = json.loads(run(capsys, *asked, *STORE, "--json", code=1))
    assert document["status"] == "infeasible" and document["why"]["code"] == "memory-limit"
    change = document["cheapest_change"]
    assert change is None or not change["extrapolated"]
    run(capsys, *asked, "--no-compile", "--json")  # the line says that it fits


def test_predict_extrapolates_and_says_what_compiles(made, inside, capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    run(capsys, *PLAN, "--global-batch", "48", "--no-compile", "-o", path)
    asked = ["predict", path, "--profile", "profile.json"]
    document = json.loads(run(capsys, *asked, "-o", "compiled.json", "--json"))
    assert any(stage["extrapolated"] for stage in document["prediction"]["stages"])
    text = run(capsys, *asked)
    assert "extrapolated: up to" in text and "capture verify PLAN compiles" in text
    run(capsys, "verify", "compiled.json", *STORE, "-o", "compiled.json", "--json")
    exact = truth(made, Plan.load("compiled.json"))
    assert max(Plan.load("compiled.json").verification.peak_bytes_per_device) == exact


def test_an_edited_model_is_not_compiled_into_an_old_profile(made, inside, capsys):
    (inside / "old").mkdir()
    (inside / "old" / "jump.py").write_text(
        user_model("jump").replace("jnp.tanh(x @ w)", "jnp.sin(x @ w)")
    )
    asked = [
        "plan",
        "old/jump.py:model",
        *BATCH,
        "--profile",
        "profile.json",
        "--global-batch",
        "48",
        *STORE,
    ]
    assert main(asked) == 2
    assert capsys.readouterr().err.endswith("[profile-other-model]\n")


# ---- held-out sizes ------------------------------------------------------------------------------


def test_a_few_short_stages_of_all_choices_are_held_out():
    plans = [
        make_plan([1, 2, 1], [StageChoice(2, 1), StageChoice(), StageChoice(1, 2)]),
        make_plan([3, 1], [StageChoice(), StageChoice(2, 1)]),
    ]
    sizes = held_out_sizes(16, [StageChoice(), StageChoice(2, 1)])
    assert (
        sizes == (4, 32)
        and held_out_sizes(16, [StageChoice(8, 1)]) == (32,)
        and held_out_sizes(2, [StageChoice()]) == (4,)
    )
    found = held_out_stages(plans, sizes)
    assert [
        (c.first, c.stop, c.choice.data_parallel, c.choice.tensor_parallel)
        for c in found
        if c.microbatch_size == 4
    ] == [
        (0, 1, 2, 1),
        (3, 4, 1, 2),
        (1, 3, 1, 1),
        (3, 4, 2, 1),
        (0, 3, 1, 1),
    ]
    assert all(
        plan.microbatch_size == config.microbatch_size for config, (plan, _) in found.items()
    )
    assert all(plan.stages[s].first == config.first for config, (plan, s) in found.items())


def test_held_out_errors_are_those_of_the_line(made):
    """Half the largest size and twice that are below the jump, and three times it is above: the
    errors say so."""
    plan, exact = at(made, 8)[0].plan, {}
    for size in (2, 16, 24):
        stages = held_out_stages([plan], [size])
        made.measurements.require({"held out": stages})
        exact[size] = size_errors(made.profile, stages, made.measurements)
    assert [e.octaves for size in exact for e in exact[size][:1]] == [
        1,
        1,
        pytest.approx(1.585, abs=1e-3),
    ]
    assert (
        max(abs(e.error) for size in (2, 16) for e in exact[size]) < 0.1
        and min(e.error for e in exact[24]) > 0.5
    )
    for s, found in enumerate(exact[24]):
        at_24 = plan.with_(global_batch_size=48, model_hash="")
        truth_of_stage = verify(at_24, made.measurements).peak_bytes_per_device[s]
        predicted = AdditivePredictor(made.profile).predict(at_24).stages[s].peak_bytes
        assert found.error == pytest.approx(truth_of_stage / predicted - 1, abs=0.02)


def test_the_interval_of_an_extrapolation_widens_with_the_distance():
    errors = [SizeError(0.01 * i, 1.0) for i in range(1, 61)]
    width, coverage = extrapolation_width(errors, 1.0)
    assert (width, coverage) == (0.6, 0.98) and extrapolation_width(errors, 2.5)[
        0
    ] == pytest.approx(1.5)
    assert extrapolation_width(errors, 0.3)[0] == 0.6, "between profiled sizes, as one octave away"
    assert extrapolation_width([SizeError(0.001, 1.0)], 1.0) == (FLOOR_FRACTION, 0.5), (
        "one error claims little"
    )
    assert extrapolation_width([SizeError(0.2, 1.0), SizeError(-0.4, 2.0)], 1.0)[
        0
    ] == pytest.approx(0.3)
    assert read(json.loads(json.dumps(write(errors[3]))), SizeError) == errors[3]


def test_a_profile_holds_sizes_out_and_its_intervals_know(made):
    """A size twice as far has an interval twice as much wider; without held-out sizes it is that of
    experience."""
    found = replace(
        made.profile, calibration=Calibration((), 0, 0, (SizeError(0.02, 1.0), SizeError(0.2, 1.0)))
    )
    plan = at(made, 8)[0].plan

    def width(profile, size):
        other = plan.with_(global_batch_size=size * plan.num_microbatches, model_hash="")
        stage = AdditivePredictor(profile).predict(other).stages[0]
        return stage.interval_bytes[1] / stage.peak_bytes - 1

    inside, double, fourfold = (width(found, size) for size in (8, 16, 32))
    assert double - inside == pytest.approx(0.3, abs=1e-3) and fourfold - inside == pytest.approx(
        0.6, abs=1e-3
    )
    assert width(replace(made.profile, calibration=None), 16) == pytest.approx(0.4 + 0.17, abs=1e-3)
    assert (
        Profile.from_json(json.loads(json.dumps(found.to_json()))).calibration == found.calibration
    )
