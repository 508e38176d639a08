"""Passes that this process and its workers bound side by side."""

from collections import Counter
from types import SimpleNamespace

import pytest
from test_batch import SPEC, ScriptedPool, job

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.profiler.bounded_passes import BoundedPasses
from profiling_runs.jobs import Outcome, Setting
from profiling_runs.measurements import Measurements
from profiling_runs.pools.pool import Kept
from profiling_runs.pools.where import Where

BATCHES = [BoundedPasses((StageConfig(n, n + 1, StageChoice(), 8),), 4) for n in range(7)]


class Workers:
    """Two, of which the second gets ready late; some batches are lost."""

    def __init__(self, lost=()):
        self.jobs, self.rounds, self.closed, self._lost = {}, 0, 0, lost

    def idle(self, busy=0):
        return [which for which in (0, 1)[: 1 + (self.rounds > 1)] if which not in self.jobs]

    def start(self, worker, job):
        self.jobs[worker] = job

    def finished(self, timeout_seconds):
        self.rounds += 1
        done, self.jobs = [*self.jobs.values()], {}
        return [Outcome(job, None if job.what in self._lost else f"{job.what}") for job in done]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed += 1


def measurements(workers, has_started=True):
    made = Measurements.__new__(Measurements)
    made._kept, made._started = workers, has_started or None
    return made


@pytest.mark.parametrize("lost", [(), BATCHES[-2:]], ids=["all answer", "some are lost"])
def test_every_batch_is_bounded_once(lost):
    here, workers = [], Workers(lost)
    found = dict(measurements(workers).shared(BATCHES, here.append))
    assert [*Counter([*here, *(b for b, said in found.items() if said)]).values()] == [1] * 7
    assert found.keys() == {*BATCHES} and {*lost} <= {*here}
    assert all(said == f"{batch}" for batch, said in found.items() if said)
    assert 0 < len(here) < len(BATCHES) and workers.closed == 1


def test_without_workers_this_process_bounds_all():
    """So it does while they compile: what comes of that is of others."""
    for kept, has_started, live in (
        (None, True, None),
        (Workers(), False, None),
        (Workers(), 1, 1),
    ):
        here, made = [], measurements(kept, has_started)
        made._live = live
        found = [*made.shared(BATCHES, here.append)]
        assert here == BATCHES and found == [(batch, None) for batch in BATCHES]
        assert kept is None or not kept.rounds


def test_workers_that_are_left_with_work_are_ended():
    def interrupted(batch):
        raise KeyboardInterrupt

    workers = Workers()
    with pytest.raises(KeyboardInterrupt):
        [*measurements(workers).shared(BATCHES, interrupted)]
    assert workers.jobs and workers.closed == 1


def test_a_worker_less_is_started_while_this_process_is_busy():
    pool = ScriptedPool(num_workers=3)
    pool.idle(busy=1)
    assert len(pool.made) == 2
    pool.idle()
    assert len(pool.made) == 3
    alone = ScriptedPool(num_workers=1)
    alone.idle(busy=1)
    assert len(alone.made) == 1, "at least one"


def test_workers_are_started_anew_where_the_model_is_cut_into_layers_since(monkeypatch):
    opened = []

    def opens(self, num_jobs):
        opened.append((self.setting, ScriptedPool()))
        return opened[-1][1]

    monkeypatch.setattr(Measurements, "_open", opens)
    setting = property(lambda self: (self.backend.num_layers, self._ahead))
    monkeypatch.setattr(Measurements, "setting", setting)
    backend, silent = SimpleNamespace(num_layers=None), (lambda *said: None)
    measurements = Measurements(backend, Setting(SPEC), Where(), silent, silent)
    with measurements.keeping_workers():
        measurements.start_workers(ahead=[2, 8])
        measurements.start_workers()
        assert [asked for asked, _ in opened] == [(None, (2, 8))], "they are there"
        backend.num_layers = 4
        measurements.start_workers()
        assert [asked for asked, _ in opened] == [(None, (2, 8)), (4, (2, 8))]
        assert all(worker.killed for worker in opened[0][1].made)
    assert all(worker.killed for _, pool in opened for worker in pool.made)


def test_a_kept_pool_stays_open_unless_jobs_still_run():
    opened = []
    kept = Kept(lambda: opened.append(ScriptedPool()) or opened[-1])
    for _ in range(2):
        with kept as pool:
            pool.idle()
            pool.finished(0)
    assert len(opened) == 1 and not any(worker.killed for worker in opened[0].made)
    with pytest.raises(KeyboardInterrupt), kept as pool:
        pool.start(pool.idle()[0], job("a"))
        raise KeyboardInterrupt
    assert all(worker.killed for worker in opened[0].made)
    with kept:
        assert len(opened) == 2, "another is opened"
