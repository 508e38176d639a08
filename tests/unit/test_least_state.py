"""What can fit at all is said before anything is measured, and never of a plan that does fit."""

from __future__ import annotations

import json
from dataclasses import replace

import optax
import pytest
from pipeline_models import mlp, tied
from synthetic_profiles import Planted, hybrid

from capture.documents import write
from capture.machine.cluster import Cluster
from capture.papers.capture.choices import hybrid_choices
from capture.plan.choices import StageChoice
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.profiler.compile import CompileBackend
from recommender import PlanQuestion, recommend
from recommender.capture.changes import Measuring, cheapest_change
from recommender.capture.knowledge import Knowledge
from recommender.capture.least_state import beyond_memory, least_state
from recommender.plan_report import PlanReport

BATCH = {"global_batch_size": 128, "num_microbatches": 8}


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (1, 1, 1, 1), (3,)])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_a_lower_bound_on_the_least_peak(seed, nodes):
    profile, cluster = Planted(6, seed).profile(hybrid(4)), Cluster(nodes)
    none = [0] * len(profile.graph.params)  # whatever the optimizer
    least = least_state(profile.graph, profile.param_bytes, none, profile.choices, cluster)
    for schedule in PLAIN_SCHEDULES:
        found = recommend(profile, PlanQuestion(cluster, **BATCH, schedule=schedule))
        assert 0 < least.peak_bytes <= found.proof.peak_bytes
        fits = least_state(
            profile.graph,
            profile.param_bytes,
            none,
            profile.choices,
            cluster,
            memory_limit_bytes=found.proof.peak_bytes,
        )
        assert fits.status == "ok"


@pytest.mark.parametrize(
    ("optimizer", "of_parameter"),
    [(optax.sgd(0.1), 0), (optax.adam(0.1), 2), (optax.sgd(0.1, momentum=0.9), 1)],
)
def test_the_state_is_parameters_gradients_and_what_the_optimizer_keeps(optimizer, of_parameter):
    """The numbers by hand: four equal blocks, each on a device of its own, and of the optimizer its
    own trees."""
    backend = CompileBackend(mlp(optimizer))
    graph, sharding = backend.traced(4).graph, backend.sharding(4)
    sizes = [tensor.nbytes for tensor in graph.params]
    assert backend.state_bytes(4) == tuple(of_parameter * size for size in sizes)

    def least(cluster, choices):
        param_bytes = {
            choice.param_split: sharding.param_bytes(choice.param_split) for choice in choices
        }
        return least_state(graph, param_bytes, backend.state_bytes(4), choices, cluster).peak_bytes

    block = sum(sizes) // 4
    assert least(Cluster((1,) * 4), [StageChoice()]) == (2 + of_parameter) * block
    assert least(Cluster((1,)), [StageChoice()]) == 4 * (2 + of_parameter) * block
    assert least(Cluster((2,)), [StageChoice(2, 1)]) == 4 * (2 + of_parameter) * block
    assert (
        least(Cluster((2,)), [StageChoice(2, 1, shard_optimizer=True)])
        == 4 * 2 * block + 4 * of_parameter * block // 2
    )
    split = least(Cluster((2,)), [StageChoice(1, 2)])
    assert split < least(Cluster((2,)), [StageChoice(2, 1)])


def test_a_shared_parameter_is_held_by_every_stage_that_reads_it_and_its_optimizer_state_by_one():
    backend = CompileBackend(tied(optax.adam(0.1)))
    graph = backend.traced(4).graph
    choices, one = [StageChoice()], {(1, 1): backend.sharding(4).param_bytes((1, 1))}
    read = {p for layer in graph.layers for p in layer.params}
    whole = least_state(graph, one, backend.state_bytes(4), choices, Cluster((1,))).peak_bytes
    assert whole == 4 * sum(graph.params[p].nbytes for p in read)
    last = sum(graph.params[p].nbytes for p in graph.layers[-1].params)
    owned = sum(
        graph.params[p].nbytes
        for p in graph.layers[-1].params
        if graph.param_owner(p) == graph.num_layers - 1
    )
    stages = least_state(
        graph, one, backend.state_bytes(4), choices, Cluster((1,) * graph.num_layers)
    ).stages
    assert stages[-1].peak_bytes == 2 * last + 2 * owned


def test_the_answer_says_what_is_needed_and_is_a_document():
    backend = CompileBackend(mlp(optax.adam(0.1)))
    graph, sizes = backend.traced(4).graph, backend.sharding(4).param_bytes((1, 1))
    found = least_state(
        graph,
        {(1, 1): sizes},
        backend.state_bytes(4),
        [StageChoice()],
        Cluster((1, 1)),
        memory_limit_bytes=1000,
    )
    why = beyond_memory(found).why
    written = json.loads(json.dumps(write(PlanReport.of("stages", beyond_memory(found)))))
    assert written["why"] == why.to_json() and written["needs"] is None
    assert (why.code, why.memory_limit_bytes, why.least_state_bytes) == (
        "memory-limit",
        1000,
        2 * sum(sizes),
    )
    assert why.summary.startswith(
        f"Every plan needs at least {2 * sum(sizes):,} bytes on a device for parameters, "
        "gradients and "
    )
    few = least_state(
        graph,
        {(1, 1): sizes},
        backend.state_bytes(4),
        [StageChoice()],
        Cluster((1,) * 8),
        memory_limit_bytes=1000,
    )
    assert beyond_memory(few).why.code == "too-few-layers"


# ---- changes -------------------------------------------------------------------------------------


class Measured:
    """What was measured for changes, in order; the profile of each is the same."""

    def __init__(self, profile):
        self.asked, self._profile = [], profile

    def __call__(self, **changes):
        self.asked.append(changes)
        return self._profile

    def with_state(self, least_state) -> Measuring:
        return Measuring(("none",), False, self, least_state)


def test_a_change_under_which_the_state_does_not_fit_is_not_measured():
    planted = Planted(4, 1)
    profile, cluster = planted.profile(hybrid(2)), Cluster((2,))
    peak = recommend(profile, PlanQuestion(cluster, **BATCH)).proof.peak_bytes
    reprofile = Measured(
        planted.profile([c for d in (1, 2) for c in hybrid_choices(2, remat="full")[d]])
    )

    def state(of, **changes):
        return 0 if changes.get("remat") == ("full",) else 2 * peak + 1

    question = PlanQuestion(cluster, **BATCH, memory_limit_bytes=peak * 2)
    found = cheapest_change(question, 4, Knowledge(profile), reprofile.with_state(state))
    assert (
        reprofile.asked == [{"remat": ("full",)}]
        and found.change == "--remat full"
        and found.peak_bytes <= 2 * peak
    )


def test_nothing_is_measured_for_a_change_where_nothing_was_for_the_question():
    reprofile = Measured(None)
    measuring = reprofile.with_state(lambda of, **changes: 7 if of.num_devices == 4 else 9)

    def change(limit):
        question = PlanQuestion(Cluster((2,)), **BATCH, memory_limit_bytes=limit)
        return cheapest_change(question, 4, None, measuring)

    found = change(8)
    assert not reprofile.asked and (found.change, found.peak_bytes, found.least_state_bytes) == (
        "--cluster 2x2",
        None,
        7,
    )
    assert change(6) is None


def test_a_change_that_cannot_save_enough_of_what_is_measured_is_not_measured():
    """On one device there is nobody to split the optimizer's state with; and recomputing saves
    nothing of the state."""
    planted = Planted(4, 1)
    profile, cluster = planted.profile(hybrid(1), sizes=(16,)), Cluster((1,))
    profile = replace(
        profile,
        measurements={
            config: replace(cost, update_bytes=0) for config, cost in profile.measurements.items()
        },
    )
    state = least_state(
        profile.graph,
        profile.param_bytes,
        [0] * len(profile.graph.params),
        profile.choices,
        cluster,
    ).peak_bytes
    peak = recommend(profile, PlanQuestion(cluster, **BATCH)).proof.peak_bytes
    assert state < peak - 1
    for limit, asked in (
        (peak - 1, [{"remat": (remat,)} for remat in ("cheap", "dots", "full")]),
        (state // 2, []),
    ):
        reprofile = Measured(profile)

        def no_smaller_batch(of, limit=limit, **changes):
            return limit + 1 if "microbatch_size" in changes else None

        question = PlanQuestion(cluster, **BATCH, memory_limit_bytes=limit)
        measuring = reprofile.with_state(no_smaller_batch)
        assert cheapest_change(question, 0, Knowledge(profile), measuring) is None
        assert reprofile.asked == asked
