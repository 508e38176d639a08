"""Loops over searches: the best of several questions, the fewest devices, the largest batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from capture.cluster import Cluster
from capture.errors import PlanError
from recommender.extent import best_of, largest_batch, smallest_cluster


def answers(fits, peak=lambda *question: 1, seconds=lambda *question: None):
    """A question that is answered by functions of (cluster, batch, micro-batches, schedule); ``asked`` notes what was asked."""
    asked = []

    def question(*given):
        asked.append(given)
        search = SimpleNamespace(step_seconds=seconds(*given))
        return SimpleNamespace(status="ok" if fits(*given) else "infeasible", plan=object(), search=search, peak_bytes=peak(*given))

    question.asked = asked
    return question


@pytest.mark.parametrize("needed", [1, 2, 3, 4, 5, 8, 9, 12])
def test_the_smallest_cluster_is_found_in_ascending_order(needed):
    question = answers(lambda cluster, *_: cluster.num_devices >= needed)
    best, attempts = smallest_cluster(question, Cluster((4, 4, 4), "h100"), 64, 8, "1f1b")
    tried = [attempt.cluster.num_devices for attempt in attempts]
    possible = [1, 2, 4, 8, 12]
    assert tried == [n for n in possible if n <= best.cluster.num_devices]
    assert best.cluster.num_devices == min(n for n in possible if n >= needed) and best.cluster.target == "h100"


def test_no_cluster_is_small_enough():
    best, attempts = smallest_cluster(answers(lambda *_: False), Cluster((2, 2)), 64, 8, "1f1b")
    assert best is None and [str(a.cluster) for a in attempts] == ["1x1", "1x2", "2x2"]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100])
def test_the_largest_batch_is_the_last_that_fits(most):
    question = answers(lambda cluster, batch, m, schedule: batch <= most * 4 * 8)
    best, attempts = largest_batch(question, Cluster((2,)), 4, 8, "gpipe")
    assert best.global_batch_size == most * 32
    assert all(attempt.global_batch_size % 32 == 0 for attempt in attempts)
    assert len(attempts) <= 2 * most.bit_length() + 2


def test_not_even_one_step_fits_and_an_end_is_set():
    assert largest_batch(answers(lambda *_: False), Cluster((2,)), 4, 8, "gpipe")[0] is None
    best, _ = largest_batch(answers(lambda *_: True), Cluster((2,)), 1, 1, "gpipe", max_doublings=3)
    assert best.global_batch_size == 15


def test_the_best_is_the_fastest_that_fits_else_the_smallest():
    seconds = {4: 3.0, 8: 1.0, 16: 2.0}
    question = answers(lambda cluster, batch, m, schedule: m > 8, seconds=lambda cluster, batch, m, schedule: seconds[m])
    best, attempts = best_of(question, Cluster((2,)), 64, [4, 8, 16], ["gpipe", "1f1b"])
    assert (best.num_microbatches, best.schedule, len(attempts)) == (16, "gpipe", 6)
    question = answers(lambda *_: True, peak=lambda cluster, batch, m, schedule: {"gpipe": 5, "1f1b": 4}[schedule])
    assert best_of(question, Cluster((2,)), 64, [4, 8], ["gpipe", "1f1b"])[0].schedule == "1f1b"


def test_a_count_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(PlanError, match=r"global_batch_size=64 is not divisible by num_microbatches=7; .*\[plan-batch\]$"):
        best_of(answers(lambda *_: True), Cluster((2,)), 64, [4, 7], ["gpipe"])
