"""The search on bounds against the profile of all windows, and what it says when it may not
compile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import optax
import pytest

from capture.cli.bounds_first import of_a_profile
from capture.cli.main import main, parse
from capture.cli.options import LEFT_OPEN, TARGET
from capture.cli.output import unused_note
from capture.cli.progress import SearchProgress
from capture.cli.stages import OPTIONS
from capture.cli.whole import close
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.plan.headroom import Headroom
from capture.plan.prediction import StepTime
from capture.plan.stages import Plan
from capture.plan.why import Bracket
from capture.predictor import AdditivePredictor
from profiling_runs.bounds import ModelBounds, bounds
from profiling_runs.collect import profile
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import PlanCompiler, verify
from recommender import PlanQuestion, recommend
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.parts import Part
from recommender.capture.refine import refine
from recommender.question import BOUNDS_FIRST
from tests import user_models
from tests.pipeline_models import mlp, tied
from tests.planned_model import BATCH, STORE, capture
from tests.user_models import tiny

QUESTION = PlanQuestion(Cluster((2,)), 16, 4)
WHOLE = Effort()


def chain():
    return tiny.model(layers=4)


class Model:
    """A model with what was measured of it.

    Attributes:
        measurements: In a store that the search and the profile share.
        between: Its bounds.
    """

    def __init__(self, workload):
        self.asked = ProfileQuestion(
            workload, QUESTION.cluster, 4, num_neighbours=1, calibration_plans=0
        )
        self.measurements = open_measurements(self.asked, store=Store())
        self.between = bounds(self.asked, self.measurements)

    def search(self, effort=WHOLE, **changes):
        compiled = PlanCompiler(self.between.least, lambda: self.measurements)
        part = Part(replace(QUESTION, **changes), lambda: self.between)
        return refine(LowestPeak(), [part], compiled, effort)


@pytest.fixture(scope="module")
def model():
    return Model(chain())


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(chain, marks=pytest.mark.exhaustive),
        pytest.param(mlp, marks=pytest.mark.slow),
        pytest.param(lambda: tied(optax.adam(0.1)), marks=pytest.mark.exhaustive),
    ],
    ids=["chain", "mlp", "tied"],
)
def test_the_plan_needs_no_more_than_that_of_the_full_profile(workload):
    model = Model(workload())
    found = model.search()
    assert (found.status, found.compiled, found.proof.optimal) == ("ok", True, True)
    of_profile = recommend(profile(model.asked, measurements=model.measurements), QUESTION)
    peaks = verify(of_profile.plan, model.measurements).peak_bytes_per_device
    assert found.peak_bytes <= max(peaks)
    assert max(verify(found.plan, model.measurements).peak_bytes_per_device) == found.peak_bytes


def test_the_trail_narrows_to_the_answer(model):
    trail = model.search().why.proven.trail
    assert not trail[0].compiled
    assert trail[-1].compiled
    assert trail[-1].least_bytes == trail[-1].most_bytes
    for before, after in pairwise(trail):
        assert before.least_bytes <= after.least_bytes
        assert before.num_compiled <= after.num_compiled


def test_too_little_memory_is_proven_without_compiling():
    model = Model(chain())
    least = model.search(Effort(compiles=0)).why.proven.trail[0].least_bytes
    known = len(model.measurements.backend.store)
    found = model.search(memory_limit_bytes=least - 1)
    assert found.status == "infeasible"
    assert found.why.code == "memory-limit"
    assert "proven with 0 compiled stages" in found.why.summary
    assert len(model.measurements.backend.store) == known


def test_without_compiling_the_bracket_is_the_answer():
    model = Model(chain())
    found = model.search(Effort(compiles=0))
    [bracket] = found.why.proven.trail
    assert not found.compiled
    assert "the plan is predicted, not compiled" in found.why.summary
    assert bracket.least_bytes < bracket.most_bytes == found.peak_bytes


def test_an_answer_near_enough_ends_the_search(model):
    far = model.search(Effort(within_fraction=10.0)).why.proven
    assert len(far.trail) == 2
    assert 0 <= far.within_fraction <= 10


def test_a_lower_bound_is_that_of_the_largest_part(model):
    """Of stages longer than windows: no sum of what is not additive."""
    least = AdditivePredictor(model.between.least)
    choice = model.between.least.choices[0]
    memory = least.memory(choice, 4)
    measured = {
        (config.first, config.stop): cost.backward_bytes
        for config, cost in model.between.least.measurements.items()
        if config.choice == choice
    }
    num_layers = model.between.least.graph.num_layers
    assert memory.backward[0, num_layers] == max(measured.values())


@pytest.mark.parametrize("objective", ["memory", "throughput", "pareto"])
def test_a_profile_is_not_searched_on_bounds(model, objective):
    asked = replace(QUESTION, algorithm=BOUNDS_FIRST, objective=objective)
    with pytest.raises(PlanError, match=r"leave out the profile\. \[plan-algorithm\]"):
        recommend(model.between.least, asked)


def options_of(text):
    return parse(["plan", "w.py:f", *text.split()])


def asks_for_bounds(text):
    options = options_of(text)
    close(options, (*LEFT_OPEN, TARGET, *OPTIONS))
    return not of_a_profile(options)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", True),
        ("--memory 1GB --remat auto --smallest-cluster", True),
        ("--algorithm bounds-first", True),
        ("--target h100", True),
        ("--target v5e --objective memory --remat full --shard-params", True),
        ("--target h100 --smallest-cluster --memory 1GB", True),
        ("--target h100 --try-microbatches 2,4", True),
        ("--target h100 --largest-batch", True),
        ("--target h100 --objective throughput", True),
        ("--target h100 --objective throughput --largest-batch", True),
        ("--target h100 --objective pareto --try-microbatches 2,4", True),
        ("--target h100 --remat auto", True),
        ("--target h100 --remat full:2", True),
        *(
            (option, False)
            for option in (
                "--profile p.json",
                "--algorithm minmax",
                "--target h100 --algorithm autostage",
                "--mode paper",
                "--schedule interleaved",
                "--verify 2",
                "--no-compile",
                "--merge-layers 4",
                "--neighbours 1",
                "--calibration-plans 0",
                "--try-schedules",
            )
        ),
    ],
)
def test_plans_are_found_on_bounds_where_nothing_needs_a_profile(text, asked):
    assert asks_for_bounds(text) is asked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "--verify 2 --within 2.5%",
            "--verify 2 needs a profile, and --within 2.5% is of the search on bounds, which makes "
            "none; leave out one or the other.",
        ),
        (
            "--mode paper --merge-layers 4 --algorithm bounds-first --quick",
            "--merge-layers 4, --mode paper need a profile, and --algorithm bounds-first, --quick "
            "are of the search on bounds",
        ),
        ("--quick --compiles 3", "--quick compiles nothing, and --compiles 3 does"),
    ],
)
def test_options_that_do_not_go_together_are_refused(text, said):
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        asks_for_bounds(text)
    assert error.value.codes == ("plan-algorithm",)


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Plans in this process: exit code, document, and what was said on the way."""
    monkeypatch.chdir(tmp_path)
    workload = f"{user_models.__path__[0]}/tiny.py:model?layers=4"
    asked = ["--cluster", "1x2", "--global-batch", "16", "--microbatches", "4", *STORE]

    def plan(*more):
        code = main(["plan", workload, *asked, "--algorithm", BOUNDS_FIRST, *more, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return plan


@pytest.mark.slow
def test_several_numbers_of_micro_batches_are_compared_compiled(planned):
    code, document, _ = planned("--try-microbatches", "4,2,8", "--within", "0%")
    assert code == 0 and document["search"]["optimal"]
    assert "2, 4 or 8 micro-batches" in document["why"]["summary"]
    peaks = {}
    for microbatches in (2, 4, 8):
        _, alone, _ = planned("--microbatches", str(microbatches), "--within", "0%")
        peaks[microbatches] = max(alone["plan"]["verification"]["peak_bytes_per_device"])
    best = document["plan"]["num_microbatches"]
    assert (
        peaks[best]
        == min(peaks.values())
        == max(document["plan"]["verification"]["peak_bytes_per_device"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["throughput", "pareto"])
def test_several_numbers_of_micro_batches_are_searched_for_speed(tmp_path, objective):
    workload = f"{user_models.__path__[0]}/tiny.py:model?layers=4"
    asked = ("plan", workload, *BATCH[:4], *STORE, "--target", "h100", "--objective", objective)
    found = capture(tmp_path, *asked, "--try-microbatches", "2,4,8", "--within", "300%")
    document = found.document
    assert document["plan"]["num_microbatches"] in (2, 4, 8)
    assert document["needs"]["step_seconds"] == document["search"]["step_seconds"]
    assert "2, 4 or 8 micro-batches" in document["why"]["summary"]
    trail = document["why"]["proven"]["trail"]
    assert trail[-1]["least_step_seconds"] <= document["needs"]["step_seconds"]


def test_a_bound_that_a_compiled_stage_refutes_is_a_warning(planned, monkeypatch):
    bounded = ModelBounds.at

    def too_high(*given):
        found = bounded(*given)
        wrong = {
            config: replace(cost, backward_bytes=10 * cost.backward_bytes + 10**6)
            for config, cost in found.least.measurements.items()
        }
        return replace(found, least=replace(found.least, measurements=wrong))

    right = planned()[1]
    monkeypatch.setattr("capture.cli.bounds_first.ModelBounds.at", too_high)
    code, document, _ = planned()
    assert code == 0 and document["why"]["proven"]["ended"] == "proven"
    peaks = [max(d["plan"]["verification"]["peak_bytes_per_device"]) for d in (document, right)]
    assert peaks[0] == peaks[1]
    assert right["warnings"] == []
    assert document["warnings"] == document["why"]["proven"]["refuted"] != []
    assert "(backward), and compile to" in document["warnings"][0]


def test_the_smallest_cluster_is_proven(planned):
    _, whole, _ = planned()
    peak = max(whole["plan"]["verification"]["peak_bytes_per_device"])
    code, document, _ = planned("--smallest-cluster", "--memory", str(peak))
    assert code == 0 and document["plan"]["cluster"]["nodes"] == [2]
    assert [each["status"] for each in document["attempts"]] == ["infeasible", "ok"]
    code, document, err = planned("--memory", str(peak - 1))  # and what would fit
    assert (code, document["why"]["code"]) == (1, "memory-limit")
    assert document["why"]["proven"]["ended"] == "memory"
    assert "looking for the cheapest change that fits" in err
    change = document["cheapest_change"]
    assert change["peak_bytes"] < peak and not change["extrapolated"]


def test_the_largest_batch_is_compiled_and_the_next_one_does_not_fit(planned):
    peaks = {}
    for batch in (24, 32):  # micro-batches of two examples more
        _, found, _ = planned("--global-batch", str(batch))
        peaks[batch] = max(found["plan"]["verification"]["peak_bytes_per_device"])
    assert peaks[24] < peaks[32]
    for limit, largest in ((peaks[24], 24), (peaks[32] - 1, 24), (peaks[32], 32)):
        code, document, _ = planned("--largest-batch", "--memory", str(limit))
        assert code == 0 and document["plan"]["verification"] is not None
        assert document["plan"]["microbatch_size"] * 4 == largest
        tried = {each["global_batch_size"]: each["status"] for each in document["attempts"]}
        assert (tried[largest], tried[largest + 8]) == ("ok", "infeasible")
        assert document["why"]["proven"]["ended"] == "proven"
    code, document, _ = planned("--largest-batch", "--memory", str(peaks[24]), "--quick")
    assert code == 1 and not document["plan"]["verification"]
    code, document, _ = planned("--largest-batch", "--memory", "1kB")
    assert (code, document["status"], document["why"]["code"]) == (1, "infeasible", "memory-limit")
    assert planned("--largest-batch")[1]["errors"][0]["code"] == "plan-extent"  # no limit


def test_an_interrupt_keeps_the_best_plan_so_far(planned, monkeypatch):
    def interrupted(*arguments, **more):
        found = refine(*arguments, **more)
        proven = replace(found.why.proven, ended="interrupted")
        return replace(found, why=replace(found.why, proven=proven))

    monkeypatch.setattr("capture.cli.bounds_first.refine", interrupted)
    code, document, _ = planned()
    assert (code, document["why"]["proven"]["ended"]) == (130, "interrupted")
    assert Plan.load("plan.json").verification is not None


def test_a_round_that_moves_nothing_is_not_said(capsys):
    progress = SearchProgress(SimpleNamespace(quiet=False))
    for seconds, num_compiled, least in (
        (1, 0, 10),
        (2, 0, 10),
        (3, 1, 10),
        (4, 1, 20),
        (5, 1, 20),
        (20, 1, 21),
    ):
        progress.known(Bracket(seconds, num_compiled, least * 10**9, 30 * 10**9, True))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in said] == ["1.0", "3.0", "4.0", "20.0", "Ctrl-C"]
    assert all(len(line) <= 80 for line in said)


def test_stages_are_counted_over_rounds(capsys):
    seconds = iter(range(0, 10**4, 20))
    progress = SearchProgress(SimpleNamespace(quiet=False), lambda: next(seconds))
    progress.jobs("stages of the plan", 0, 2)
    progress.jobs("optimizer updates", 1, 2)
    progress.jobs("stages of the plan", 2, 2)
    progress.jobs("stages of the plan", 0, 3)
    progress.jobs("stages of the plan", 1, 3)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "compiled 3 of 5 stages" and said[0] == "compiled 0 of 2 stages"


def test_a_search_for_speed_is_told_in_the_words_of_the_question(capsys):
    seconds = iter(range(0, 10**4, 20))
    progress = SearchProgress(SimpleNamespace(quiet=False), lambda: next(seconds))
    bracket = Bracket(0.5, 0, 9, 9, False, 1.02)
    progress.known(bracket)
    progress.jobs("bounds from tracing", 18, 40)
    progress.jobs("bounds from tracing", 40, 40)
    progress.known(replace(bracket, expected_step_seconds=1.25))
    best = replace(bracket, num_compiled=2, most_bytes=61 * 10**9, most_step_seconds=1.31)
    progress.known(best)
    progress.jobs("stages of the plan", 1, 2)
    assert capsys.readouterr().err.splitlines() == [
        "0.5 s: no plan is faster than 1.02 s",
        "18 of 40 kinds of stage known",
        "0.5 s: best estimate 1.25 s; no plan is faster than 1.02 s",
        "0.5 s, 2 compiled: best so far 1.31 s, 61 GB; no plan is faster than 1.02 s",
        "compiled 1 of 2 stages",
    ]
    front = replace(best, num_points=2, within_fraction=0.25)
    assert front.words == (
        "2 plans; peak memory: lower bound 9 B, best plan so far about 61 GB; best so far 1.31 s; "
        "no plan is faster than 1.02 s; the front is known to 25.0%"
    )


@pytest.mark.parametrize(
    ("limit", "bubbles", "objective", "said"),
    [
        (100, (0.5, 0.1), None, "80 B of 100 B per device are not used, and devices wait 30%"),
        (100, (0.5, 0.1), "throughput", "more micro-batches wait less"),
        (40, (0.5, 0.1), None, ""),
        (100, (0.3, 0.1), None, ""),
    ],
)
def test_memory_that_would_make_a_step_faster_is_named(limit, bubbles, objective, said):
    headroom, time = Headroom(limit, "given", 20, 20, 1.0), StepTime(1.0, 1.0, 1.0, bubbles)
    lines = unused_note(SimpleNamespace(objective=objective), headroom, time)
    assert said in "".join(lines) and bool(said) == bool(lines)


def test_on_the_command_line(tmp_path):
    workload = f"{user_models.__path__[0]}/tiny.py:model"
    verb = ("plan", workload, *BATCH, *STORE)
    found = capture(tmp_path, *verb, "--algorithm", BOUNDS_FIRST)
    assert found.document["search"]["optimal"]
    assert found.document["why"]["proven"]["within_fraction"] == 0
    assert "peak memory: lower bound" in found.err
    assert (tmp_path / "plan.json").exists()
    quick = capture(tmp_path, *verb, "--target", "h100", "--quick", "-o", "quick.json")
    assert quick.document["search"]["algorithm"] == BOUNDS_FIRST
    assert quick.document["why"]["proven"]["ended"] == "compiles"
    written = json.loads((tmp_path / "quick.json").read_text())
    assert "nothing that fits was compiled" in written["why"]["uncompiled"]
    assert not written["verification"]


@pytest.mark.slow
def test_a_plan_for_an_accelerator_has_the_time_of_its_step(tmp_path):
    workload = f"{user_models.__path__[0]}/tiny.py:model?layers=4"
    found = capture(tmp_path, "plan", workload, *BATCH, *STORE, "--target", "h100")
    verified = capture(tmp_path, "verify", "plan.json", *STORE)
    assert found.document["plan"]["time"] == verified.document["time"]
    assert found.document["compiled"] and not found.document["failures"]


@pytest.mark.slow
def test_the_front_of_an_accelerator_is_compiled(tmp_path):
    workload = f"{user_models.__path__[0]}/tiny.py:model?layers=4"
    asked = ("plan", workload, *BATCH, *STORE, "--target", "h100", "--objective", "pareto")
    found = capture(tmp_path, *asked, "--algorithm", BOUNDS_FIRST)
    assert "plan; peak memory: lower bound" in found.err
    why = found.document["why"]
    best = why["front"]["points"][-1]
    assert best["peak_bytes"] == max(
        found.document["plan"]["verification"]["peak_bytes_per_device"]
    )
    assert best["within_fraction"] <= why["proven"]["within_fraction"]
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.verification is not None and plan.why is not None
    assert plan.why.to_json()["front"] == why["front"]
    capture(tmp_path, "report", "plan.json", "-o", "report.html")
