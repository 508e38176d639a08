"""The backend ``run``: executed profiling runs give the statistics that compiled ones do, once
each."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from pipeline_models import mlp
from processes import user_model

import capture.papers.capture.run
from capture.cli.main import main
from capture.errors import CaptureError, ProfileError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.papers.capture.execution import Executed, ProfilingRun
from capture.papers.capture.predictor import PaperPredictor
from capture.papers.capture.profile import PaperStatistics
from capture.papers.capture.run import RunBackend
from capture.plan.choices import StageChoice
from capture.profiler.executing import ExecutingMachine
from capture.registered import REGISTERED
from profiling_runs import profile
from profiling_runs.batch import MAX_ATTEMPTS, Batch
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where, setting_of
from profiling_runs.question import ProfileQuestion
from recommender import PlanQuestion, recommend

# What its tests share is executed by one worker.
pytestmark = pytest.mark.xdist_group("run backend")

CLUSTER, MICROBATCH_SIZE, TARGET = Cluster((2,)), 2, ("1f1b", 8)
TARGETS = {"microbatch_size": MICROBATCH_SIZE, "paper": TARGET}
#: Sets: one device, 2-way data, 2-way tensor parallel; 4 layers on 3 stages: 3 partitionings, at 2
#: and at 4 micro-batches.
NUM_RUNS = 18
TINY = mlp()
ONE_RUN = ProfilingRun((2, 1, 1), StageChoice(), MICROBATCH_SIZE, 2, "gpipe")


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def executed(store) -> Profile:
    return profile(ProfileQuestion(TINY, CLUSTER, backend="run", **TARGETS), store=store)


@pytest.fixture(scope="module")
def compiled() -> Profile:
    return profile(ProfileQuestion(TINY, CLUSTER, num_neighbours=1, calibration_plans=0, **TARGETS))


@pytest.fixture(scope="module")
def backend() -> RunBackend:
    return RunBackend(TINY)


@pytest.fixture
def executions(monkeypatch) -> list[ProfilingRun]:
    """Grows with every run that is executed."""
    made: list[ProfilingRun] = []
    execute = RunBackend.execute

    def counted(self, run):
        made.append(run)
        return execute(self, run)

    monkeypatch.setattr(RunBackend, "execute", counted)
    return made


def statistics(result: Profile) -> PaperStatistics:
    assert result.paper is not None
    return PaperStatistics.from_json(result.paper)


def limit_of_one_layer(result: Profile) -> int:
    """Bytes with which one layer fits on a device, and two do not."""
    layers = statistics(result).statistics[StageChoice()][4]
    most, pairs = layers.isolated.max(), layers.isolated[:-1] + layers.added[1:]
    assert most < pairs.min()
    return int((most + pairs.min()) / 2)


@pytest.mark.slow
def test_executed_statistics_are_the_compiled_ones(executed, compiled):
    mine, theirs = statistics(executed), statistics(compiled)
    for found in (mine, theirs):
        assert (found.num_runs, found.num_failed_runs, found.failed) == (NUM_RUNS, 0, ())
    assert (
        mine.statistics.keys()
        == theirs.statistics.keys()
        == {StageChoice(), StageChoice(2, 1), StageChoice(1, 2)}
    )
    for choice, by_batch in mine.statistics.items():
        assert sorted(by_batch) == [2, 4]
        for m, layers in by_batch.items():
            other = theirs.statistics[choice][m]
            assert not np.isnan(layers.isolated).any()
            assert not np.isnan(layers.added[1:]).any()
            np.testing.assert_array_equal(layers.isolated[:-1], other.isolated[:-1])
            np.testing.assert_array_equal(layers.added[:-1], other.added[:-1])
            # The last stage holds its losses until the end of a step, which the formula leaves out.
            assert 0 <= layers.isolated[-1] - other.isolated[-1] <= 4 * m
            assert 0 <= layers.added[-1] - other.added[-1] <= 4 * m


@pytest.mark.slow
def test_the_profile_says_what_was_executed(executed):
    assert executed.measurements == {}
    assert executed.failures == ()
    assert executed.provenance["backend"] == "run"
    assert executed.provenance["target"] == "cpu"
    assert executed.provenance["meter"] == "live arrays + XLA buffer assignment"
    assert Profile.from_json(json.loads(json.dumps(executed.to_json()))) == executed


@pytest.mark.slow
def test_a_second_call_executes_nothing(executed, store, executions):
    again = profile(ProfileQuestion(TINY, CLUSTER, backend="run", **TARGETS), store=store)
    assert executions == []
    assert again.paper == executed.paper


def test_an_interrupted_profile_goes_on_where_it_stopped(monkeypatch):
    half, made = Store(), []
    monkeypatch.setattr(
        RunBackend,
        "execute",
        lambda self, run: made.append(run) or Executed((1, 2, 3), "a meter of this test"),
    )

    def stop(what, done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(ProfileQuestion(TINY, CLUSTER, backend="run", **TARGETS), store=half, progress=stop)
    assert len(made) == len(half) == 5
    profile(ProfileQuestion(TINY, CLUSTER, backend="run", **TARGETS), store=half)
    assert len(made) == len(set(made)) == len(half) == NUM_RUNS


def test_the_second_step_is_measured_never_the_replay(monkeypatch, backend):
    steps = []
    measure = capture.papers.capture.run.measure_step

    def measured(step, state, batch, key):
        steps.append(state.num_steps)
        return replace(measure(step, state, batch, key), live_peak_bytes_per_device=(11, 12, 13))

    monkeypatch.setattr(capture.papers.capture.run, "measure_step", measured)
    assert backend.execute(ONE_RUN).peak_bytes_per_stage == (11, 12, 13)
    assert steps == [1]


def test_repeats_measure_as_many_steps_and_count_the_largest_peaks(monkeypatch, backend):
    steps = []
    measure, peaks = capture.papers.capture.run.measure_step, [(1, 22, 3), (11, 2, 13), (5, 5, 5)]

    def measured(step, state, batch, key):
        steps.append(state.num_steps)
        return replace(
            measure(step, state, batch, key), live_peak_bytes_per_device=peaks[len(steps) - 1]
        )

    monkeypatch.setattr(capture.papers.capture.run, "measure_step", measured)
    run = replace(ONE_RUN, repeats=3)
    assert backend.execute(run).peak_bytes_per_stage == (11, 22, 13)
    assert steps == [1, 2, 3]
    assert backend.key(run) != backend.key(ONE_RUN) != backend.key(replace(ONE_RUN, repeats=2))


@pytest.mark.slow
def test_the_same_plan_as_from_compiled_runs(executed, compiled):
    batch = {"global_batch_size": 16, "num_microbatches": 8, "schedule": "1f1b", "mode": "paper"}
    mine, theirs = (
        recommend(executed, PlanQuestion(CLUSTER, **batch)),
        recommend(compiled, PlanQuestion(CLUSTER, **batch)),
    )
    assert mine.status == theirs.status == "ok"
    assert mine.plan is not None
    assert mine.plan == theirs.plan
    assert mine.prediction is not None
    expected = PaperPredictor(statistics(executed)).predict(mine.plan)
    assert mine.prediction.peak_bytes_per_device == tuple(int(np.ceil(peak)) for peak in expected)
    assert mine.prediction.source["predictor"] == "paper"
    assert mine.prediction.source["backend"] == "run"
    assert mine.prediction.interval_coverage is None
    stage = mine.prediction.stages[0]
    assert stage.parts_bytes == {"not itemised": stage.peak_bytes}
    assert stage.interval_bytes == (stage.peak_bytes // 4, 2 * stage.peak_bytes)


@pytest.mark.slow
def test_the_default_mode_refuses_executed_runs(executed):
    with pytest.raises(ProfileError) as error:
        recommend(executed, PlanQuestion(CLUSTER, global_batch_size=16, num_microbatches=8))
    assert error.value.codes == ("profile-windows",)


@pytest.mark.slow
def test_runs_above_the_limit_are_named_and_what_they_alone_give_is_missing(
    executed, store, executions
):
    """What is in the store already is judged by the limit as if it were made now."""
    limit = limit_of_one_layer(executed)
    limited = profile(
        ProfileQuestion(TINY, CLUSTER, backend="run", memory_limit_bytes=limit, **TARGETS),
        store=store,
    )
    assert executions == []
    found = statistics(limited)
    assert (found.num_runs, found.num_failed_runs) == (NUM_RUNS, len(found.failed))
    assert (
        len(
            [
                failure
                for failure in found.failed
                if "data_parallel=1 x tensor_parallel=1" in failure
            ]
        )
        == 6
    )
    assert limited.failures == found.failed
    assert limited.failures[0].startswith(
        "run of [1, 1, 2] layers, data_parallel=1 x tensor_parallel=1, 2 micro-batches: needs "
    )
    assert np.isnan(found.statistics[StageChoice()][4].isolated).all()
    plan = recommend(
        limited, PlanQuestion(CLUSTER, global_batch_size=16, num_microbatches=8, mode="paper")
    ).plan
    assert plan is not None
    # Stages on one device have no statistics.
    assert [stage.num_devices for stage in plan.stages] == [2]
    with pytest.raises(ProfileError) as error:
        profile(
            ProfileQuestion(TINY, CLUSTER, backend="run", memory_limit_bytes=10, **TARGETS),
            store=store,
        )
    assert error.value.codes == ("profile-runs",)


@pytest.mark.slow
def test_a_run_above_the_limit_is_not_made_and_compiled_once(executed, monkeypatch, executions):
    # Calling it would fail in another way.
    monkeypatch.setattr(capture.papers.capture.run, "measure_step", None)
    backend = RunBackend(TINY, memory_limit_bytes=limit_of_one_layer(executed))
    first = backend.measure(ONE_RUN)
    assert "needs " in first.failures[0]
    assert " (replayed), more than " in first.failures[0]
    assert backend.measure(ONE_RUN) == first
    assert executions == [ONE_RUN]
    monkeypatch.undo()
    backend.memory_limit_bytes = None
    assert backend.measure(ONE_RUN).failures == ()


@pytest.mark.parametrize(
    "failure", [MemoryError("no room"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")]
)
def test_out_of_memory_is_a_result_and_tried_again(monkeypatch, backend, failure):
    def fail(*args):
        raise failure

    monkeypatch.setattr(capture.papers.capture.run, "measure_step", fail)
    run = replace(ONE_RUN, num_microbatches=2 if isinstance(failure, MemoryError) else 3)
    (message,) = backend.measure(run).failures
    assert message == (
        f"run of [2, 1, 1] layers, data_parallel=1 x tensor_parallel=1, {run.num_microbatches} "
        f"micro-batches: out of memory: {failure}"
    )
    monkeypatch.undo()
    assert backend.measure(run).failures == ()


def test_a_run_that_needs_more_devices_than_there_are_is_named():
    backend = RunBackend(TINY, machine=ExecutingMachine("cpu", "cpu", 4))
    assert (
        backend.measure(replace(ONE_RUN, choice=StageChoice(2, 1)))
        .failures[0]
        .endswith("needs 6 devices and there are 4 (cpu)")
    )


@pytest.mark.slow
def test_a_killed_process_fails_its_run_alone(tmp_path, monkeypatch):
    """As the system does where memory runs out on CPU."""
    monkeypatch.setitem(MAX_ATTEMPTS, "lost", 2)
    file = tmp_path / "killed.py"
    file.write_text(user_model("killed"))
    backend = REGISTERED["profiling runs"]["run"]
    spec = WorkloadSpec(str(file), "killed")
    setting = setting_of(Setting(spec, num_devices=3, executes=True, backend=backend))
    jobs = [
        Job("killed", replace(ONE_RUN, num_microbatches=16), "run", method="execute"),
        Job("made", ONE_RUN, "run", method="execute"),
    ]
    store, events = Store(), []
    batch = Batch(jobs, store, {"backend": "run"}, watch=events.append)
    outcomes = {
        outcome.job.key: outcome
        for outcome in batch.run(lambda: Where(1).open(setting, None, len(jobs)))
    }
    assert outcomes["killed"].error == "its process ended with exit code 9 (out of memory?)"
    assert outcomes["made"].value == store.get(["made"])["made"]
    assert outcomes["made"].value["meter"].startswith("live arrays + XLA buffer assignment")
    states = [event["state"] for event in events if event["key"] == "killed"]
    assert states == ["running", "failed"] * (MAX_ATTEMPTS["lost"] - 1) + ["running", "set aside"]
    assert [row.attempts for row in store.rows("set aside")] == [MAX_ATTEMPTS["lost"]]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "run", "paper": None},
        {"backend": "run", "choices": [StageChoice()]},
        {"backend": "compile", "memory_limit_bytes": 10},
        {"backend": "compile", "repeats": 2},
    ],
)
def test_arguments_without_use_are_refused(changes):
    with pytest.raises(ProfileError) as error:
        profile(ProfileQuestion(TINY, CLUSTER, **{**TARGETS, **changes}))
    assert error.value.codes == ("profile-backend",)


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"microbatch_size": 0, "num_neighbours": 0}, ("profile-question", "profile-question")),
        ({"remat": ("some",)}, ("profile-remat",)),
        ({"remat": ("none", "full"), "paper": ("gpipe", 4)}, ("profile-remat",)),
        ({"backend": "run", "paper": ("gpipe", 4), "calibration_plans": 3}, ("profile-backend",)),
        ({"backend": "abacus"}, ("target-unknown",)),
    ],
)
def test_a_question_is_checked_when_it_is_asked(changes, codes):
    with pytest.raises(CaptureError) as error:
        ProfileQuestion(TINY, CLUSTER, **{"microbatch_size": 4, **changes})
    assert error.value.codes == codes


def test_a_backend_of_a_target_is_a_cluster_of_it():
    asked = ProfileQuestion(TINY, CLUSTER, 4, backend="compile:h100", remat=["full"])
    assert (asked.backend, asked.cluster.target, asked.remat) == ("compile", "h100", ("full",))


@pytest.mark.slow
def test_the_command_runs_in_workers_and_resumes(tmp_path, capsys, executed):
    """The numbers of the workers are those of this process; a plan follows from the written
    profile."""
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    batch = [
        "pipeline_models:mlp",
        "--json",
        "--quiet",
        "--cluster",
        "1x1",
        "--global-batch",
        "16",
        "--microbatches",
        "8",
    ]
    command = [
        "profile",
        *batch,
        "--backend",
        "run",
        "--store",
        str(tmp_path / "store.sqlite"),
        "-o",
        str(path),
    ]
    for _ in range(2):
        assert main([*command, "--mode", "paper"]) == 0
        made = json.loads(capsys.readouterr().out)
        counts = [
            made["windows"][f"num_{what}"] for what in ("runs", "failed_runs", "measurements")
        ]
        assert counts == [6, 0, 0]
    found = Profile.load(path)
    assert found.workload == WorkloadSpec("pipeline_models", "mlp")
    for m, layers in statistics(found).statistics[StageChoice()].items():
        np.testing.assert_array_equal(
            layers.isolated, statistics(executed).statistics[StageChoice()][m].isolated
        )
        np.testing.assert_array_equal(
            layers.added, statistics(executed).statistics[StageChoice()][m].added
        )
    assert main(["plan", *batch, "--mode", "paper", "--profile", str(path), "-o", str(plan)]) == 0
    assert (
        json.loads(capsys.readouterr().out)["plan"]["prediction"]["source"]["predictor"] == "paper"
    )
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "error: --backend run makes the runs of the paper's mode alone; add --mode paper. "
        "[profile-backend]\n"
    )
