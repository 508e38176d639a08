"""Loops over searches: the best of several questions, the fewest devices, the largest batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.why import Front, FrontPoint, Why
from recommender.capture.extent import (
    Attempt,
    best_of,
    front_of,
    largest_batch,
    smallest_cluster,
)
from recommender.question import PlanQuestion


def answers(
    fits,
    peak=lambda *question: 1,
    seconds=lambda *question: None,
    extrapolated=lambda *question: False,
):
    """A question that is answered by functions of (cluster, batch, micro-batches, schedule);
    ``asked`` notes what was asked."""
    asked = []

    def question(of):
        given = of.cluster, of.global_batch_size, of.num_microbatches, of.schedule
        asked.append(given)
        proof = SimpleNamespace(step_seconds=seconds(*given))
        status = "ok" if fits(*given) else "infeasible"
        return SimpleNamespace(
            status=status,
            plan=object(),
            proof=proof,
            peak_bytes=peak(*given),
            extrapolated=extrapolated(*given),
        )

    question.asked = asked
    return question


@pytest.mark.parametrize("needed", [1, 2, 3, 4, 5, 8, 9, 12])
def test_the_smallest_cluster_is_found_in_ascending_order(needed):
    question = answers(lambda cluster, *_: cluster.num_devices >= needed)
    best, attempts = smallest_cluster(question, PlanQuestion(Cluster((4, 4, 4), "h100"), 64, 8))
    tried = [attempt.question.cluster.num_devices for attempt in attempts]
    possible = [1, 2, 4, 8, 12]
    assert tried == [n for n in possible if n <= best.question.cluster.num_devices]
    assert (
        best.question.cluster.num_devices == min(n for n in possible if n >= needed)
        and best.question.cluster.target == "h100"
    )


def test_no_cluster_is_small_enough():
    best, attempts = smallest_cluster(
        answers(lambda *_: False), PlanQuestion(Cluster((2, 2)), 64, 8)
    )
    assert best is None and [str(a.question.cluster) for a in attempts] == ["1x1", "1x2", "2x2"]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100])
def test_the_largest_batch_is_the_last_that_fits(most):
    question = answers(lambda cluster, batch, m, schedule: batch <= most * 4 * 8)
    best, attempts = largest_batch(
        question, question, PlanQuestion(Cluster((2,)), 8, 8, "gpipe"), 4
    )
    assert best.question.global_batch_size == most * 32
    assert all(attempt.question.global_batch_size % 32 == 0 for attempt in attempts)
    assert len(attempts) <= 2 * most.bit_length() + 2


def test_not_even_one_step_fits_and_an_end_is_set():
    nothing, everything = answers(lambda *_: False), answers(lambda *_: True)
    assert largest_batch(nothing, nothing, PlanQuestion(Cluster((2,)), 8, 8, "gpipe"), 4)[0] is None
    best, _ = largest_batch(
        everything, everything, PlanQuestion(Cluster((2,)), 1, 1, "gpipe"), 1, max_doublings=3
    )
    assert best.question.global_batch_size == 15


def test_the_best_is_the_fastest_that_fits_else_the_smallest():
    seconds = {4: 3.0, 8: 1.0, 16: 2.0}
    question = answers(
        lambda cluster, batch, m, schedule: m > 8,
        seconds=lambda cluster, batch, m, schedule: seconds[m],
    )
    best, attempts = best_of(
        question, question, PlanQuestion(Cluster((2,)), 64, 1), [4, 8, 16], ["gpipe", "1f1b"]
    )
    assert (best.question.num_microbatches, best.question.schedule, len(attempts)) == (
        16,
        "gpipe",
        6,
    )
    question = answers(
        lambda *_: True, peak=lambda cluster, batch, m, schedule: {"gpipe": 5, "1f1b": 4}[schedule]
    )
    assert (
        best_of(question, question, PlanQuestion(Cluster((2,)), 64, 1), [4, 8], ["gpipe", "1f1b"])[
            0
        ].question.schedule
        == "1f1b"
    )


def test_a_count_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(
        PlanError,
        match=r"global_batch_size=64 is not divisible by num_microbatches=7; .*\[plan-batch\]$",
    ):
        best_of(
            answers(lambda *_: True),
            answers(lambda *_: True),
            PlanQuestion(Cluster((2,)), 64, 1),
            [4, 7],
            ["gpipe"],
        )


# ---- sizes that were not profiled ----------------------------------------------------------------


@pytest.mark.parametrize("truth", [0, 1, 2, 3, 7, 8, 9, 30, 31])
@pytest.mark.parametrize("predicted", [0, 1, 8, 9, 30])
def test_the_largest_batch_is_the_compilers_and_not_the_predictions(predicted, truth):
    """Predictions are too low or too high; they say where to begin, and what is compiled
    decides."""
    guessed = answers(
        lambda cluster, batch, *_: batch <= 8 * predicted, extrapolated=lambda *_: True
    )
    compiled = answers(lambda cluster, batch, *_: batch <= 8 * truth)
    best, attempts = largest_batch(guessed, compiled, PlanQuestion(Cluster((2,)), 8, 8, "gpipe"), 1)
    assert (0 if best is None else best.question.global_batch_size) == 8 * truth
    assert best is None or not best.result.extrapolated
    assert len(compiled.asked) <= 2 * abs(predicted - truth).bit_length() + 2, "a few compiles"
    assert len({attempt.question.global_batch_size for attempt in attempts}) == len(attempts)


def test_a_size_that_was_profiled_needs_no_compiling():
    guessed = answers(lambda cluster, batch, *_: batch <= 64)
    best, _ = largest_batch(
        guessed,
        answers(lambda *_: pytest.fail("compiled")),
        PlanQuestion(Cluster((2,)), 8, 8, "gpipe"),
        1,
    )
    assert best.question.global_batch_size == 64


def test_the_best_is_asked_again_until_it_is_compiled():
    peaks, truth = {4: 50, 8: 30, 16: 40}, {4: 60, 8: 45, 16: 42}
    guessed = answers(
        lambda *_: True, peak=lambda c, b, m, s: peaks[m], extrapolated=lambda c, b, m, s: m != 4
    )
    compiled = answers(lambda *_: True, peak=lambda c, b, m, s: truth[m])
    best, attempts = best_of(
        guessed, compiled, PlanQuestion(Cluster((2,)), 64, 1), [4, 8, 16], ["gpipe"]
    )
    assert (best.question.num_microbatches, best.result.peak_bytes, best.result.extrapolated) == (
        16,
        42,
        False,
    )
    assert [m for _, _, m, _ in compiled.asked] == [8, 16], (
        "the one of 4 micro-batches was profiled"
    )
    assert [attempt.result.peak_bytes for attempt in attempts] == [50, 45, 42]
    # Nothing can be compiled: the answer stays an extrapolation, and is given.
    best, _ = best_of(guessed, guessed, PlanQuestion(Cluster((2,)), 64, 1), [4, 8, 16], ["gpipe"])
    assert (best.question.num_microbatches, best.result.extrapolated) == (8, True)


def test_the_front_of_several_schedules_has_what_none_of_them_beats():
    def attempt(schedule, *points):
        front = Front(tuple(FrontPoint(*point) for point in points), schedule == "1f1b", False, 1.0)
        asked = PlanQuestion(Cluster((2,)), 64, 8, schedule)
        return Attempt(asked, SimpleNamespace(why=Why(front=front)))

    attempts = (attempt("1f1b", (1, 9.0), (5, 4.0), (9, 3.0)), attempt("zb-v", (2, 6.0), (8, 2.0)))
    front = front_of(attempts)
    assert [(p.peak_bytes, p.schedule, p.num_microbatches) for p in front.points] == [
        (1, "1f1b", 8),
        (2, "zb-v", 8),
        (5, "1f1b", 8),
        (8, "zb-v", 8),
    ]
    assert not front.complete and front.seconds == 2.0
    assert Why.read(Why(front=front).to_json()).front == front
    assert front_of(()) is None
