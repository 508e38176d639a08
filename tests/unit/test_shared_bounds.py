"""Passes that this process and its workers bound side by side."""

from collections import Counter

import pytest

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.profiler.bounded_passes import BoundedPasses
from profiling_runs.jobs import Outcome
from profiling_runs.measurements import Measurements

BATCHES = [BoundedPasses((StageConfig(n, n + 1, StageChoice(), 8),), 4) for n in range(7)]


class Workers:
    """Two, of which the second gets ready late; some batches are lost."""

    def __init__(self, lost=()):
        self.jobs, self.rounds, self.closed, self._lost = {}, 0, 0, lost

    def idle(self, busy=0):
        return [slot for slot in (0, 1)[: 1 + (self.rounds > 1)] if slot not in self.jobs]

    def start(self, slot, job):
        self.jobs[slot] = job

    def finished(self, timeout_seconds):
        self.rounds += 1
        done, self.jobs = [*self.jobs.values()], {}
        return [Outcome(job, None if job.what in self._lost else f"{job.what}") for job in done]

    def close(self):
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
