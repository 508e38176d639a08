"""Batches of jobs: nothing is lost, nothing is done twice, and what fails again and again is set
aside. No process is started."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import ProfileError, TargetError, is_bug
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.tracing.dataflow import DataFlow
from profiling_runs.batch import MAX_ATTEMPTS, Batch
from profiling_runs.jobs import Job, Outcome, Setting
from profiling_runs.measurements import Measurements
from profiling_runs.pools.local import how_it_ended
from profiling_runs.pools.pool import MAX_FAILED_STARTS, Ended, Here, Pool, PoolWorker, Ready
from profiling_runs.pools.where import Where
from profiling_runs.pools.worker import check_versions, measure_job
from profiling_runs.require import Measurer

ONE = StageChoice()
SPEC = WorkloadSpec("model.py", "model")


def job(name: str, *, size: int = 4, needs: str | None = None) -> Job:
    return Job(name, StageConfig(0, 1, ONE, size), kind="layer windows", needs=needs)


class Scripted(PoolWorker):
    """A worker that says what a script tells it to: per job and attempt, None for success, or how
    it fails."""

    def __init__(self, pool: ScriptedPool):
        super().__init__()
        self.pool, self.inbox, self.killed = (
            pool,
            [Ready("here:1")] if pool.starts else [Ended("lost", "no memory")],
            False,
        )

    def send(self, job):
        self.pool.sent.append(job)
        failures = self.pool.script.get(job.key, [])
        failure = failures.pop(0) if failures else None
        if failure is None:
            self.inbox.append(Outcome(job, {"of": job.key}, 0.5, "here:1"))
        elif failure in ("raised", "refused", "bug"):
            self.inbox.append(
                Outcome(job, None, 0.5, "here:1", failure, f"it {failure}", "Traceback ...")
            )
        elif failure != "timed out":  # then it says nothing any more
            self.inbox.append(Ended(failure, "its process ended"))

    def receive(self):
        return self.inbox.pop(0)

    def kill(self):
        self.killed = True


class ScriptedPool(Pool):
    def __init__(
        self, script=None, *, num_workers=2, starts=True, fresh_process=False, timeout_seconds=0.05
    ):
        super().__init__(fresh_process=fresh_process, timeout_seconds=timeout_seconds)
        self.script = {key: list(failures) for key, failures in (script or {}).items()}
        self.num_workers, self.starts, self.sent, self.made = num_workers, starts, [], []

    def room(self):
        return self.num_workers

    def launch(self):
        self.made.append(Scripted(self))
        return self.made[-1]

    def news(self, workers, timeout_seconds):
        return [worker for worker in workers if worker.inbox]


def run(jobs, pool, store=None, **options):
    batch = Batch(
        jobs, Store() if store is None else store, {"backend": "compile:cpu"}, SPEC, **options
    )
    return {outcome.job.key: outcome for outcome in batch.run(lambda: pool)}


def test_every_job_is_done_once_and_kept_with_what_it_is():
    store, pool, events = Store(), ScriptedPool(), []
    done = run([job(name) for name in "abc"], pool, store, watch=events.append)
    assert (
        {key: outcome.value for key, outcome in done.items()}
        == store.get("abc")
        == {key: {"of": key} for key in "abc"}
    )
    assert Counter(sent.key for sent in pool.sent) == Counter("abc")
    row = next(store.rows(key_prefix="a"))
    assert (row.state, row.attempts, row.worker, row.seconds, row.provenance) == (
        "done",
        1,
        "here:1",
        0.5,
        {"backend": "compile:cpu"},
    )
    assert row.job == {
        "workload": "model.py:model",
        "backend": "compile:cpu",
        "part": "stage",
        "layers": [0, 0],
        "data_parallel": 1,
        "tensor_parallel": 1,
        "remat": "none",
        "shard_optimizer": False,
        "shard_params": False,
        "microbatch_size": 4,
        "kind": "layer windows",
    }
    assert [event["state"] for event in events if event["key"] == "a"] == ["running", "done"]
    assert all(worker.killed for worker in pool.made)


@pytest.mark.parametrize("failure", [name for name in MAX_ATTEMPTS if name != "bug"])
def test_what_fails_again_and_again_is_set_aside_and_the_rest_is_done(failure):
    store, pool = Store(), ScriptedPool({"b": [failure] * 99})
    done = run([job(name) for name in "abc"], pool, store)
    assert Counter(sent.key for sent in pool.sent) == {"a": 1, "b": MAX_ATTEMPTS[failure], "c": 1}
    assert done["b"].value is None and done["a"].value and done["c"].value
    (row,) = store.rows("set aside")
    attempts = 1 if failure == "node lost" else MAX_ATTEMPTS[failure]
    assert (row.key, row.attempts, row.error) == ("b", attempts, done["b"].error)
    assert row.traceback == ("Traceback ..." if failure in ("raised", "refused") else "")


def test_what_was_set_aside_is_named_and_not_tried_until_retry():
    store = Store()
    run([job("b")], ScriptedPool({"b": ["refused"]}), store)
    pool = ScriptedPool()
    done = run([job(name) for name in "ab"], pool, store)
    assert [sent.key for sent in pool.sent] == ["a"]
    assert done["b"].error == (
        "it refused (set aside by an earlier command; capture store retry lets it be tried again)"
    )
    assert store.retry() == 1
    assert run([job("b")], ScriptedPool(), store)["b"].value == {"of": "b"}


def test_a_fault_of_the_library_is_reported_and_never_a_reason():
    """The other jobs are done first; it is tried again by the next command, which may be another
    version."""
    store, pool = Store(), ScriptedPool({"b": ["bug"], "d": ["bug"]})
    with pytest.raises(ProfileError) as caught:
        run([job(name) for name in "abcd"], pool, store)
    assert caught.value.codes == ("internal-error",)
    assert str(caught.value).startswith(
        "a measurement of layer 0, data parallel 1, tensor parallel 1, micro-batch size 4 (and of 1"
    )
    assert "Traceback ..." in str(caught.value) and "report" in str(caught.value)
    assert store.get("abcd").keys() == {"a", "c"} and not list(store.rows("set aside"))
    assert run([job("b")], ScriptedPool(), store)["b"].value == {"of": "b"}


class Breaks:
    """A backend whose measurement raises."""

    def __init__(self, error):
        self.store, self._error = Store(), error

    def measure(self, config):
        raise self._error


def fault_of_the_library():
    """A KeyError that one of its modules raises."""
    DataFlow(jax.make_jaxpr(lambda x: x + 1)(1.0)).evaluate({}, [object()])


def test_only_faults_of_the_library_are_called_so():
    with pytest.raises(KeyError) as caught:
        fault_of_the_library()
    caught.value.__traceback__ = caught.tb.tb_next.tb_next  # without this file, a user's
    assert is_bug(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("XLA: out of memory"),
        TargetError.of("no", "target-refused"),
        NotImplementedError("no lowering rule"),
        MemoryError(),
        jax.errors.UnexpectedTracerError("leaked"),
    ],
)
def test_what_others_say_is_no_fault_of_the_library(error):
    assert not is_bug(error)


def test_what_a_model_raises_while_it_is_compiled_is_its_own():
    """The rules of its own derivatives run only then; here a function of this file."""
    outcome = measure_job(Breaks(KeyError("x")), job("a"))
    assert (outcome.value, outcome.failure) == (None, "raised")


def test_a_lost_node_is_no_fault_of_its_jobs():
    store = Store()
    done = run(
        [job("a")], ScriptedPool({"a": ["node lost"] * (MAX_ATTEMPTS["node lost"] - 1)}), store
    )
    assert done["a"].value == {"of": "a"}
    assert next(store.rows()).attempts == 1


def test_a_job_that_was_lost_twice_is_tried_alone_at_the_end():
    pool = ScriptedPool({"a": ["lost", "lost"]}, num_workers=3)
    run([job(name) for name in "abcdefgh"], pool)
    assert [sent.key for sent in pool.sent].count("a") == 3
    assert pool.sent[-1].key == "a"


def test_a_job_gets_what_it_needs_and_is_done_without_it_where_that_failed():
    jobs = [
        job("stage", needs="update"),
        job("other", needs="broken"),
        job("update"),
        job("broken"),
    ]
    pool = ScriptedPool({"broken": ["refused"]}, num_workers=1)
    done = run(jobs, pool)
    known = {sent.key: dict(sent.known) for sent in pool.sent}
    assert known["stage"] == {"update": {"of": "update"}} and known["other"] == {}
    assert done["stage"].value and done["other"].value
    assert [sent.key for sent in pool.sent].index("update") < [
        sent.key for sent in pool.sent
    ].index("stage")


def test_a_fresh_process_measures_one_job():
    pool = ScriptedPool(num_workers=1, fresh_process=True)
    run([job(name) for name in "abc"], pool)
    assert len(pool.made) >= 3 and all(worker.killed for worker in pool.made)


def test_workers_that_never_get_ready_are_an_error():
    pool = ScriptedPool(starts=False, num_workers=1)
    with pytest.raises(ProfileError) as error:
        run([job("a")], pool)
    assert error.value.codes == ("profile-worker",)
    assert len(pool.made) == MAX_FAILED_STARTS


def test_a_script_that_every_worker_would_run_again_is_told_how_to_be_written():
    assert "if __name__ == '__main__':" in how_it_ended(1)
    assert how_it_ended(9) == "its process ended with exit code 9 (out of memory?)"


def test_results_that_arrive_together_are_all_kept_before_anybody_hears_of_one():
    store, pool = Store(), ScriptedPool(num_workers=3)

    def stop(kind, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([job(name) for name in "abc"], pool, store, progress=stop)
    assert len(store) == len(pool.sent) == 3


def test_an_interrupted_batch_leaves_its_jobs_waiting_and_its_workers_ended():
    store, pool = Store(), ScriptedPool()

    def stop(kind, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([job(str(i)) for i in range(8)], pool, store, progress=stop)
    states = Counter(row.state for row in store.rows())
    assert states["done"] >= 2 and set(states) == {"done", "pending"}
    assert all(worker.killed for worker in pool.made)
    finished = set(store.get(map(str, range(8))))
    again = ScriptedPool()
    run([job(str(i)) for i in range(8) if str(i) not in finished], again, store)
    assert len(store) == 8 and not finished & {sent.key for sent in again.sent}


def test_a_full_disk_loses_nothing_that_was_kept(tmp_path):
    store = Store(tmp_path / "store.sqlite")
    names = [f"job {i}" for i in range(200)]
    jobs = [job(name) for name in names]
    Batch(jobs, store, {})
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages + 3}")
    with pytest.raises(ProfileError) as error:
        run(jobs, ScriptedPool(), store)
    assert error.value.codes == ("store-write",)
    assert "disk is full" in str(error.value)
    kept = store.get(names)
    assert 0 < len(kept) < 200
    store.close()
    store, pool = Store(tmp_path / "store.sqlite"), ScriptedPool()
    run([job(name) for name in names if name not in kept], pool, store)
    assert len(store) == 200 and len(pool.sent) == 200 - len(kept)


@given(seed=st.integers(0, 10**6), num_jobs=st.integers(1, 20), num_workers=st.integers(1, 4))
def test_whatever_is_killed_the_result_is_the_same(seed, num_jobs, num_workers):
    """Lost workers and nodes, and drivers that end at any moment: as if nothing had happened."""
    chance, names, store, events = (
        random.Random(seed),
        [str(i) for i in range(num_jobs)],
        Store(),
        [],
    )
    script = {name: chance.choices(["lost", "node lost"], k=chance.randrange(3)) for name in names}
    while len(store) < num_jobs:
        ends_at = chance.randrange(1, 6)

        seen = count()

        def end(event, ends_at=ends_at, seen=seen):
            events.append(event)
            if next(seen) == ends_at:
                raise KeyboardInterrupt

        missing = [name for name in names if name not in store.get(names)]
        pool = ScriptedPool(script, num_workers=num_workers)
        try:
            run([job(name) for name in missing], pool, store, watch=end)
        except KeyboardInterrupt:
            script = pool.script
    assert store.get(names) == {name: {"of": name} for name in names}
    assert max(Counter(event["key"] for event in events if event["state"] == "done").values()) == 1


def test_jobs_are_added_to_a_batch_that_runs():
    store, pool = Store(), ScriptedPool(num_workers=1)
    batch = Batch([job("a")], store, {"backend": "compile:cpu"}, SPEC)
    outcomes = batch.run(lambda: pool)
    batch.add([job("a"), job("c", needs="b"), job("b")])
    assert next(outcomes).job.key == "a"
    batch.add([job("d", needs="c"), job("e")])
    batch.add([job("f")], first=True)
    assert [outcome.job.key for outcome in outcomes] == ["f", "b", "c", "d", "e"]
    assert [sent.key for sent in pool.sent] == ["a", "f", "b", "c", "d", "e"]
    assert pool.sent[-2].known == {"c": {"of": "c"}}


def test_what_is_begun_is_not_waited_for_until_it_is_asked_for(monkeypatch):
    pool, store = ScriptedPool({"refused": ["refused"]}, num_workers=1), Store()
    backend = SimpleNamespace(store=store, provenance={"backend": "compile:cpu"})
    silent, setting = (lambda *said: None), property(lambda self: "known")
    monkeypatch.setattr(Measurements, "setting", setting)
    monkeypatch.setattr(Measurements, "_open", lambda self, num_jobs: pool)
    monkeypatch.setattr(Measurements, "jobs", lambda self, of: list(map(job, *of.values())))
    measurements = Measurements(backend, Setting(SPEC), Where(), silent, silent)

    def ran(*names):
        return [outcome.job.key for outcome in measurements._run(list(map(job, names)))]

    def sent():
        return "".join(each.key[0] for each in pool.sent)

    with measurements.keeping_workers():
        measurements.begin(["a", "slow", "refused"])
        assert sent() == "as", "they run while nobody waits, one when the other is done"
        assert ran("b") == ["b"] and sent() == "asb", "it goes first"
        measurements.begin(["c", "never"])
        assert sent() == "asbrc", "what is done is heard, and the next begun"
        assert ran("c") == ["c"] and sent() == "asbrc"
        assert ran("refused") == ["refused"] and sent().count("r") == 1, "it was set aside"
        measurements.begin(["e", "f", "g"])
        num_sent = len(sent())
        measurements.begin([])
        assert len(sent()) > num_sent, "nothing new, but what waited"
    assert store.get(["slow"]) and not pool._workers, "nothing is left running"
    assert ran("d") == ["d"], "without kept workers, too"


@pytest.mark.parametrize(
    "options", [{"num_workers": 0, "ray": "local"}, {"accelerator_type": "A100"}]
)
def test_places_that_make_no_sense_are_refused(options):
    with pytest.raises(ProfileError) as error:
        Where(**options)
    assert error.value.codes == ("where-options",)


def test_a_worker_with_other_versions_is_refused():
    check_versions({"jax": "1"}, {"jax": "1", "ray": "2"})
    with pytest.raises(
        ProfileError,
        match=r"has jax 2 instead of 1, numpy missing instead of 3; install .* "
        r"\[worker-versions\]$",
    ):
        check_versions({"jax": "1", "numpy": "3"}, {"jax": "2"})


def test_a_setting_is_plain_data():
    assert Setting(SPEC) == Setting(WorkloadSpec.parse("model.py:model"))


def test_a_busy_machine_ends_no_job_that_an_idle_one_would_finish(monkeypatch):
    """Ended after 20 s on an idle machine; here each look at the clock is 5 s later, and a hundred
    processes queue for every processor."""
    clock = iter(range(0, 10**6, 5))
    monkeypatch.setattr("profiling_runs.pools.pool.time.monotonic", lambda: next(clock))
    load = 100 * os.cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    pool = ScriptedPool({"a": ["timed out"]}, num_workers=1, timeout_seconds=20)
    (worker,) = pool.idle() or [pool.finished(0), *pool.idle()][1:]
    pool.start(worker, job("a"))
    assert not any(pool.finished(0) for _ in range(100))  # 500 s and more
    load = 0  # what was allowed while it was busy stays allowed
    assert not any(pool.finished(0) for _ in range(100))
    (late,) = next(filter(None, (pool.finished(0) for _ in range(1000))))
    assert late.failure == "timed out" and "not done within 20 s" in late.error


def test_no_test_waits_for_a_time_of_its_own():
    """A literal that is enough on an idle machine is not on a busy one."""
    literal = re.compile(r"timeout=\d|monotonic\(\) \+ \d|TIMEOUT\w* = \d")
    found = [
        path.name
        for path in Path(__file__).parents[1].rglob("test_*.py")
        if literal.search(path.read_text())
    ]
    assert found == []


def test_what_is_required_is_measured_once_and_failures_are_kept():
    made = []

    def measure(config):
        made.append(config.first)
        if config.first:
            raise ValueError("out of registers")
        return {"of": "a"}

    measurer = Measurer(SimpleNamespace(store=Store(), provenance={}, measure=measure))
    alike = [Job(name, StageConfig(0, 1, ONE, size)) for name, size in (("a", 4), ("a", 8))]
    jobs = [*alike, Job("b", StageConfig(1, 2, ONE, 4))]
    for _ in range(2):
        assert measurer.measure(jobs) == {"a": {"of": "a"}}
        assert measurer.errors.keys() == {"b"} and "out of registers" in measurer.errors["b"]
        assert made == [0] + [1] * MAX_ATTEMPTS["raised"]


def test_what_one_stage_alone_needs_is_a_part_of_its_job():
    stages = [StageConfig(first, first + 1, ONE, 4) for first in range(3)]
    worker, kept = Store(), Store()

    def measure(config):
        worker.put(f"update {config.first // 2}", {"of": "update"}, provenance={}, seconds=1)
        return StageCost(1, 2, 3, 4, 5, (), (), ())

    backend = SimpleNamespace(
        store=worker,
        provenance={"backend": "compile:cpu"},
        key=str,
        update_key=lambda config: f"update {config.first // 2}",
        measure=measure,
    )
    silent = lambda *said: None  # noqa: E731
    measurements = Measurements(backend, Setting(SPEC), Where(), silent, silent)
    _, jobs = measurements.missing_jobs(measurements.jobs({"stages of the plan": stages}))
    assert [(job.part, job.needs) for job in jobs] == [
        ("update", None),
        ("stage", "update 0"),
        ("stage", "update 0"),
        ("stage", None),
    ]
    outcomes = Batch(jobs[-1:], kept, backend.provenance, SPEC).run(lambda: Here(backend))
    assert [outcome.failure for outcome in outcomes] == [None]
    assert set(kept.get([str(stages[2]), "update 1"])) == {str(stages[2]), "update 1"}
    worker.put("update 0", {"of": "update"}, provenance={}, seconds=1)
    _, jobs = measurements.missing_jobs(measurements.jobs({"stages of the plan": stages[:1]}))
    assert [(job.part, job.known) for job in jobs] == [("stage", {"update 0": {"of": "update"}})]
