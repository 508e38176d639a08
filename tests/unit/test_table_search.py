"""Plans of schedules whose stages share devices or whose backward passes are split: predictions,
the search, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product

import pytest
from synthetic_graphs import tensor
from synthetic_profiles import MICROBATCH_SIZE, Planted, configs_of

from capture.errors import PlanError, ProfileError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost, StageCost
from capture.measured.work import ProgramWork
from capture.plan.choices import StageChoice
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import CountedSteps, predicted_timeline
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step, stage_seconds
from capture.step.program import replay
from capture.step.timeline import LinkTimes, Seconds, simulate_step
from recommender.capture import counted, table_space
from recommender.capture.counted import CountedSearch, sends_seconds
from recommender.capture.pareto import pareto
from recommender.capture.posed import search_problem
from recommender.capture.recommendation import baseline_plan, plan_of, recommend
from recommender.capture.throughput import throughput
from recommender.capture.ticks import step_seconds
from recommender.question import PlanQuestion

ONE, TWO, SPLIT = StageChoice(1, 1), StageChoice(2, 1), StageChoice(1, 2)
FULL, FOUR = StageChoice(1, 1, "full"), StageChoice(4, 1)
TABLES = [name for name in SCHEDULES if name not in PLAIN_SCHEDULES]


def work(num_layers: int, passes: int, flops: int = 10**12) -> ProgramWork:
    return ProgramWork(flops * num_layers * passes, "bfloat16", 0, 0)


def with_split(cost: StageCost, config: StageConfig, times: bool) -> StageCost:
    """Additive over layers, and forward, inputs and weights take equally long."""
    n, share = config.num_layers, config.microbatch_size // config.choice.num_devices
    deferred = 64 * share * sum(range(config.first + 1, config.stop + 1))
    split = SplitCost(deferred + 96 * share * n, 32 * share * n, 0, deferred)
    if not times:
        return replace(cost, split=split)
    return replace(
        cost,
        forward_work=work(n, 1),
        backward_work=work(n, 2),
        update_work=work(0, 1),
        split=replace(split, inputs_work=work(n, 1), weights_work=work(n, 1)),
    )


def split_profile(planted: Planted, *choices: StageChoice, times: bool = False) -> Profile:
    profile = planted.profile(choices)
    costs = {c: with_split(cost, c, times) for c, cost in profile.measurements.items()}
    provenance = {**profile.provenance, "target": "a100-40g" if times else "cpu"}
    return replace(profile, measurements=costs, provenance=provenance)


def table_plan(
    name: str, cuts: tuple[int, ...], choice: StageChoice, num_microbatches: int, target="cpu"
) -> Plan:
    kind, d = SCHEDULES[name], choice.num_devices
    num_groups = (len(cuts) - 1) // kind.stages_per_group
    stages = tuple(
        Stage.at(group * d, first, stop, choice)
        for group, (first, stop) in zip(kind.placement(num_groups), pairwise(cuts), strict=True)
    )
    return Plan(
        Cluster((num_groups * d,), target),
        cuts[-1],
        stages,
        MICROBATCH_SIZE * num_microbatches,
        num_microbatches,
        name,
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_prediction_equals_the_replay_of_the_planted_stages(name):
    planted = Planted(6, seed=5, shared=[(0, 5)]).summarizes(5)
    profile = split_profile(planted, ONE, TWO)
    for choice in (ONE, TWO):
        cuts = (0, 1, 2, 4, 6) if SCHEDULES[name].stages_per_group == 2 else (0, 2, 6)
        plan = table_plan(name, cuts, choice, 4)
        costs = [with_split(planted.cost(config), config, False) for config in configs_of(plan)]
        interfaces = plan_interfaces(plan, planted.graph, profile.param_bytes, costs)
        truth = replay(build_step(interfaces, plan.schedule_table))
        predicted = AdditivePredictor(profile).predict(plan)
        assert predicted.peak_bytes_per_device == truth.peak_bytes_per_device
        for s, stage in enumerate(predicted.stages):
            assert sum(stage.parts_bytes.values()) == stage.peak_bytes
            assert len(stage.layers_bytes) == plan.stages[s].num_layers
        loaded = Plan.from_json(plan.with_(prediction=predicted).to_json())
        assert loaded == plan and loaded.prediction == predicted


def question(name: str, devices: int = 2, **options) -> PlanQuestion:
    options = {"num_microbatches": 4, **options}
    target = options.pop("target", "cpu")
    return PlanQuestion(
        Cluster((devices,), target),
        MICROBATCH_SIZE * options["num_microbatches"],
        schedule=name,
        **options,
    )


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-v"])
def test_the_least_peak_is_that_of_all_plans(name, monkeypatch):
    """By brute force over cuts, predicted one by one; from a start, cuts that one move makes better
    lead near it."""
    profile = split_profile(Planted(7, seed=11), ONE, TWO)
    answer = recommend(profile, question(name, 4))
    count = 2 * SCHEDULES[name].stages_per_group
    every = []
    for choice, stages in ((ONE, 2 * count), (TWO, count)):
        for borders in combinations(range(1, 7), stages - 1):
            plan = table_plan(name, (0, *borders, 7), choice, 4)
            every.append(AdditivePredictor(profile).predict(plan).peak_bytes)
    assert answer.status == "ok" and answer.proof.optimal
    assert answer.peak_bytes == min(every) == answer.proof.peak_bytes
    assert answer.plan.schedule == name
    monkeypatch.setattr(table_space, "MOST_ENUMERATED", 0)
    other = recommend(profile, question(name, 4))
    assert not other.proof.optimal
    assert "not a proof (tie-break: none), for remat=" in other.why.summary
    assert min(every) <= other.peak_bytes <= 1.05 * min(every)


def recomputing(planted: Planted, *choices: StageChoice) -> Profile:
    """With remat ``full``, a stage keeps half and its backward pass takes 1.5 times as long."""
    profile = split_profile(planted, *choices, times=True)
    costs = {
        config: replace(
            cost,
            residual_bytes=cost.residual_bytes // 2,
            backward_work=work(config.num_layers, 3),
            split=replace(cost.split, inputs_work=work(config.num_layers, 2)),
        )
        if config.choice.remat == "full"
        else cost
        for config, cost in profile.measurements.items()
    }
    return replace(profile, measurements=costs)


def every_plan(
    profile: Profile, asked: PlanQuestion, choices: Sequence[StageChoice]
) -> list[tuple[int, float, int]]:
    """Peak, seconds and number of different choices of the plans of two groups."""
    count, num_layers = 2 * SCHEDULES[asked.schedule].stages_per_group, profile.graph.num_layers
    steps, predictor = CountedSteps(profile, asked.cluster), AdditivePredictor(profile)
    found = []
    for borders in combinations(range(1, num_layers), count - 1):
        plan = table_plan(asked.schedule, (0, *borders, num_layers), choices[0], 4, "a100-40g")
        for chosen in product(choices, repeat=count):
            stages = map(lambda s, choice: replace(s, choice=choice), plan.stages, chosen)
            with suppress(PlanError):  # stages of a group have the same degrees
                one = plan.with_(stages=tuple(stages))
                peak = predictor.predict(one).peak_bytes
                found.append((peak, steps.seconds(one), len(set(chosen))))
    return found


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("interleaved", (ONE, FULL)),
        ("zb-h1", (TWO, SPLIT, replace(TWO, remat="full"))),
        ("zb-v", (TWO, SPLIT, replace(SPLIT, remat="full"))),
    ],
)
def test_every_stage_has_a_choice_of_its_own(name, choices):
    """Of least memory, and the fastest within a limit that plans of one choice cannot use: by brute
    force over cuts and choices."""
    profile, d = recomputing(Planted(5, seed=7), *choices), choices[0].num_devices
    asked = question(name, 2 * d, target="a100-40g", memory_limit_bytes=1 << 40)
    least = recommend(profile, asked)
    every = every_plan(profile, asked, choices)
    assert least.peak_bytes == min(every)[0] and least.proof.optimal
    alone = min(every, key=lambda one: (one[2], one[1], one[0]))[0]
    mixed = False
    for limit in range(least.peak_bytes, alone + 1, 1 + (alone - least.peak_bytes) // 8):
        fast = replace(asked, memory_limit_bytes=limit, objective="throughput")
        answer = recommend(profile, fast)
        fitting = [one for one in every if one[0] <= limit]
        assert answer.status == "ok" and answer.peak_bytes <= limit
        assert answer.proof.step_seconds <= 1.001 * min(one[1] for one in fitting)
        every_of_one = [one[1] for one in fitting if one[2] == 1]
        mixed |= not every_of_one or answer.proof.step_seconds < 0.999 * min(every_of_one)
    assert mixed


def test_what_stages_exchange_at_the_end_of_a_step_is_within_the_limit():
    """Gradients of a large parameter that the ends of the model share, and summaries, which the
    search sees in a prediction alone."""
    planted = Planted(5, seed=5, shared=[(0, 4)]).summarizes(5)
    planted.fixed[-1] *= 40
    planted.per_example[:3] //= 16
    graph = planted.graph
    planted.graph = replace(graph, params=(*graph.params[:-1], tensor("shared", 10_000)))
    profile = recomputing(planted, ONE, FULL)
    asked = question("zb-h1", target="a100-40g", objective="throughput")
    every = every_plan(profile, asked, (ONE, FULL))
    for limit in sorted({peak for peak, *_ in every}):
        answer = recommend(profile, replace(asked, memory_limit_bytes=limit))
        assert answer.status == "ok" and answer.peak_bytes <= limit
        fastest = min(seconds for peak, seconds, _ in every if peak <= limit)
        assert answer.proof.step_seconds == pytest.approx(fastest)


def test_a_limit_that_no_plan_meets():
    profile = split_profile(Planted(6, seed=2), ONE)
    answer = recommend(profile, question("zb-h1", memory_limit_bytes=10))
    assert answer.status == "infeasible" and answer.why.code == "memory-limit"
    assert answer.why.least_peak_bytes == answer.peak_bytes > 10
    assert answer.plan is not None


def test_numbers_that_make_no_groups():
    profile = split_profile(Planted(6, seed=2), ONE)
    answer = recommend(profile, question("interleaved", num_microbatches=3))
    assert (answer.status, answer.plan, answer.why.code) == (
        "infeasible",
        None,
        "no-possible-groups",
    )
    assert "a multiple of 2 micro-batches" in answer.why.summary


@pytest.mark.parametrize(
    "options", [{"algorithm": "minmax"}, {"mode": "paper"}, {"merge_layers": 3}]
)
def test_a_schedule_with_a_search_of_its_own_refuses_others(options):
    with pytest.raises(PlanError) as caught:
        question("zb-v", **options)
    assert caught.value.codes == ("plan-algorithm",)


def test_a_profile_without_split_backward_passes_is_refused():
    planted = Planted(4, seed=1)
    with pytest.raises(ProfileError) as caught:
        recommend(planted.profile([ONE]), question("zb-h1"))
    assert caught.value.codes == ("profile-split",)
    assert recommend(planted.profile([ONE]), question("interleaved")).status == "ok"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_baseline_has_the_groups_of_every_schedule(name):
    """Equal layers on as many groups as there are layers for."""
    profile = split_profile(Planted(4, seed=2), ONE, TWO)
    asked = question(name, 4, num_microbatches=8)
    plan = baseline_plan(profile, asked, "layers")
    per_group = SCHEDULES[name].stages_per_group
    assert plan.schedule == name and plan.num_stages == 4
    assert {stage.choice for stage in plan.stages} == {TWO if per_group == 2 else ONE}
    with pytest.raises(PlanError) as caught:
        baseline_plan(split_profile(Planted(1, seed=2), ONE), asked, "layers")
    assert caught.value.codes == ("baseline-degree",)


# ---- times ---------------------------------------------------------------------------------------


def equal_layers() -> Planted:
    planted = Planted(8, seed=3)
    planted.fixed[:, :, :] = planted.fixed[:, :, :1]
    planted.per_example[:, :, :] = planted.per_example[:, :, :1]
    return planted


@pytest.fixture(scope="module")
def timed() -> Profile:
    """Eight equal layers; a layer's forward pass takes as long as each half of its backward
    pass."""
    return split_profile(equal_layers(), ONE, times=True)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("1f1b", 27.3), ("interleaved", 15.8), ("zb-h1", 11.1), ("zb-v", 5.9), ("dualpipev", 5.9)],
)
def test_bubbles_of_simulated_steps_are_those_of_the_tables(timed, name, percent):
    """S = 4, M = 8, equal stages; what is sent is next to nothing."""
    count = 4 * SCHEDULES[name].stages_per_group
    plan = table_plan(name, tuple(range(0, 9, 8 // count)), ONE, 8, "a100-40g")
    timeline = predicted_timeline(plan, timed)
    assert {round(100 * waits, 1) for waits in timeline.bubble_fraction} <= {percent, percent + 0.1}
    by_table = CountedSteps(timed, plan.cluster).seconds(plan)
    assert by_table == pytest.approx(timeline.step_seconds, rel=0.01)


def test_the_fastest_plan_of_every_schedule_and_its_front(timed):
    seconds, peaks = {}, {}
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        asked = question(name, 4, num_microbatches=8, objective="pareto", target="a100-40g")
        answer = recommend(timed, asked)
        assert answer.status == "ok"
        seconds[name], peaks[name] = answer.proof.step_seconds, answer.peak_bytes
        front = answer.why.front.points
        assert front[-1].step_seconds == pytest.approx(seconds[name])
        assert all(
            a.peak_bytes < b.peak_bytes and a.step_seconds > b.step_seconds
            for a, b in pairwise(front)
        )
    assert seconds["zb-v"] < seconds["zb-h1"] < seconds["interleaved"] < seconds["1f1b"]
    rates = Target.load("a100-40g").rates
    work_seconds = 48 * 10**12 / rates.reached_flops_per_second("bfloat16", "default")
    assert seconds["zb-v"] == pytest.approx(work_seconds * 51 / 48, rel=0.01)
    asked = question("zb-h1", 4, num_microbatches=8, target="a100-40g")
    least = recommend(timed, asked)
    limited = replace(asked, objective="throughput", memory_limit_bytes=least.peak_bytes)
    answer = recommend(timed, limited)
    assert answer.status == "ok" and answer.peak_bytes <= least.peak_bytes <= peaks["zb-h1"]
    assert answer.proof.step_seconds >= seconds["zb-h1"]


def sending(planted: Planted) -> Profile:
    """A pass of a layer takes a third as long as what is sent between nodes, on two devices 0.6
    of it."""
    profile = split_profile(planted, ONE, TWO, times=True)
    costs = {}
    for config, cost in profile.measurements.items():
        n, flops = config.num_layers, 10**9 if config.choice == ONE else 6 * 10**8
        costs[config] = replace(
            cost, forward_work=work(n, 1, flops), backward_work=work(n, 2, flops)
        )
    return replace(profile, measurements=costs)


@pytest.fixture(scope="module")
def short() -> Profile:
    return sending(Planted(8, seed=3))


def without_feeds(links: LinkTimes, transfer, nbytes: int, source, target) -> float:
    return 0.0 if source is None else links.seconds(transfer, nbytes, source, target)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_steps_of_all_schedules_are_counted_as_they_are_simulated(short, schedule):
    """With transfers, also where a link is busier than the stages; batches arrive at once."""
    rates = Target.load("a100-40g").rates
    asked = PlanQuestion(
        Cluster((2, 2), "a100-40g"), 8 * MICROBATCH_SIZE, 8, schedule, objective="pareto"
    )
    answer = recommend(short, asked)
    points = [(point.stages, point.step_seconds) for point in answer.why.front.points]
    assert points[-1] == (answer.plan.stages, answer.proof.step_seconds)
    for stages, seconds in points:
        plan = answer.plan.with_(stages=stages)
        predictor, times = AdditivePredictor(short), CountedSteps(short, plan.cluster)
        step = build_step(predictor.interfaces(plan), plan.schedule_table)
        told = Seconds(
            stage_seconds(step, times.times.stage_times(plan)),
            partial(without_feeds, times.links),
            rates.host.duplex,
        )
        assert seconds == pytest.approx(simulate_step(step, told).step_seconds, rel=1e-9)


def test_transfers_decide_which_plan_is_fastest(short):
    """The closed form without them has another, which is faster by what it says."""
    asked = PlanQuestion(
        Cluster((2, 2), "a100-40g"), 16 * MICROBATCH_SIZE, 16, objective="throughput"
    )
    answer, problem = recommend(short, asked), search_problem(short, asked, with_times=True)
    closed = throughput(problem)
    plan = answer.plan.with_(stages=plan_of(short, asked, closed.stages).stages)
    steps = CountedSteps(short, asked.cluster)
    assert answer.proof.step_seconds == steps.seconds(answer.plan) < steps.seconds(plan)
    assert closed.optimal and not answer.proof.optimal
    without = step_seconds(problem, answer.proof.stages)
    assert without == pytest.approx(closed.step_seconds * (1 + answer.proof.bound_fraction))


def counted_search(profile: Profile, nodes: tuple[int, ...], num_microbatches: int = 8):
    asked = PlanQuestion(
        Cluster(nodes, "a100-40g"), num_microbatches * MICROBATCH_SIZE, num_microbatches
    )
    problem = search_problem(profile, asked, with_times=True)
    return CountedSearch(profile, asked, problem), problem, asked


@pytest.mark.parametrize(
    ("nodes", "choice", "between_nodes"),
    [((2, 2), ONE, 0.5), ((2, 2), TWO, 1), ((4, 2), TWO, 0.5), ((1, 1), TWO, 1), ((4,), ONE, 0)],
)
def test_a_stage_sends_what_crosses_where_it_stops(short, nodes, choice, between_nodes):
    rates, graph = Target.load("a100-40g").rates, short.graph_at(MICROBATCH_SIZE)
    expected = [0.0] * (graph.num_layers + 1)
    for stop in range(1, graph.num_layers):
        for v in graph.crossing(stop):
            nbytes = graph.values[v].shard_bytes(choice.data_parallel)
            expected[stop] += between_nodes * rates.inter_node.seconds(nbytes)
            expected[stop] += (1 - between_nodes) * rates.intra_node.seconds(nbytes)
    found = sends_seconds(graph, Cluster(nodes, "a100-40g"), choice)
    assert list(found) == pytest.approx(expected) and max(expected) > 0


@pytest.mark.parametrize(
    ("planted", "num_microbatches"),
    [(Planted(8, seed=3), 8), (equal_layers(), 8), (Planted(8, seed=2), 16)],
    ids=["any", "equal", "of-one-peak"],
)
def test_a_front_has_what_either_closed_form_proposes(planted, num_microbatches):
    """As counted, those of which none is both smaller and faster than another; of plans found with
    transfers, by how much they may miss the fastest without, within their memory."""
    profile = sending(planted)
    search, problem, asked = counted_search(profile, (2, 2), num_microbatches)
    result = throughput(problem)
    fastest = search.fastest(result, plan_of(profile, asked, result.stages))
    best, front = search.front(fastest)
    plain, other = pareto(problem).points, pareto(search.with_transfers()).points
    least = {
        p.peak_bytes: max(q.peak_bytes for q in plain if q.peak_bytes <= p.peak_bytes)
        for p in other
    }
    without = {p.peak_bytes: step_seconds(problem, p.stages) for p in plain}
    # Plan -> peak, seconds, how far from the least it may be; the fastest, of all that fit.
    ahead = fastest.result
    counted: dict[tuple, tuple] = {
        fastest.plan.stages: (ahead.peak_bytes, fastest.seconds, ahead.bound_fraction)
    }
    for point in (*plain, *other):
        plan = plan_of(profile, asked, point.stages)
        above = (
            step_seconds(problem, point.stages)
            / without[least.get(point.peak_bytes, point.peak_bytes)]
            - 1
        )
        seconds = CountedSteps(profile, asked.cluster).seconds(plan)
        counted.setdefault(plan.stages, (point.peak_bytes, seconds, above))
    every = sorted(counted.values())
    expected = [
        (peak, seconds, above)
        for peak, seconds, above in every
        if not any(p <= peak and s <= seconds and (p, s) != (peak, seconds) for p, s, _ in every)
    ]
    points = [(p.peak_bytes, p.step_seconds, p.bound_fraction) for p in front.points]
    assert points == [pytest.approx(each) for each in dict.fromkeys(expected)]
    assert best.seconds == points[-1][1]
    same = [p.stages for p in front.points] == [
        plan_of(profile, asked, p.stages).stages for p in plain
    ]
    assert front.complete == same


def test_the_fastest_is_on_its_front_and_a_looser_proof_is_of_a_smaller_least(short):
    search, problem, asked = counted_search(short, (2, 2), 16)
    result = throughput(problem)
    plan = plan_of(short, asked, result.stages)
    proven, loose = (
        search.fastest(replace(result, bound_fraction=bound), plan) for bound in (0.0, 0.25)
    )
    assert proven.plan == loose.plan and proven.plan.stages != plan.stages
    assert 1 + loose.result.bound_fraction == pytest.approx(
        1.25 * (1 + proven.result.bound_fraction)
    )
    ahead = replace(proven, result=replace(proven.result, step_seconds=proven.seconds / 2))
    best, front = search.front(ahead)
    assert best is ahead and front.points[-1].step_seconds == ahead.seconds


def test_a_proposal_is_moved_to_where_its_neighbours_are_no_faster(monkeypatch):
    """Which stages meet over the links between nodes depends on the order of their sizes."""
    profile = split_profile(Planted(8, seed=3), ONE, TWO, FOUR, times=True)
    flops = {1: 10**9, 2: 6 * 10**8, 4: 4 * 10**8}
    costs = {
        c: replace(
            cost,
            forward_work=work(c.num_layers, 1, flops[c.choice.num_devices]),
            backward_work=work(c.num_layers, 2, flops[c.choice.num_devices]),
        )
        for c, cost in profile.measurements.items()
    }
    profile = replace(profile, measurements=costs)
    asked = PlanQuestion(
        Cluster((4, 4), "a100-40g"), 16 * MICROBATCH_SIZE, 16, objective="throughput"
    )
    answer = recommend(profile, asked)
    limited = recommend(profile, replace(asked, memory_limit_bytes=answer.peak_bytes))
    assert limited.proof.step_seconds == answer.proof.step_seconds
    assert answer.plan.prediction.peak_bytes == answer.proof.peak_bytes
    monkeypatch.setattr(counted, "MOST_TASKS", 0)
    assert answer.proof.step_seconds < 0.95 * recommend(profile, asked).proof.step_seconds


def test_stages_of_a_group_split_along_the_sequence_together():
    """By itself the first half of the layers would, and the second would not."""
    sequence = replace(SPLIT, sequence_parallel=True)
    profile = split_profile(Planted(6, seed=3), SPLIT, sequence)

    def planted(config: StageConfig, cost: StageCost) -> StageCost:
        num_first = sum(layer < 3 for layer in range(config.first, config.stop))
        along = config.choice.sequence_parallel
        num_dear = config.num_layers - num_first if along else num_first
        return replace(cost, residual_bytes=cost.residual_bytes + 10**6 * num_dear)

    costs = {config: planted(config, cost) for config, cost in profile.measurements.items()}
    question = PlanQuestion(Cluster((4,)), 4 * MICROBATCH_SIZE, 4, "interleaved")
    found = recommend(replace(profile, measurements=costs), question)
    assert found.plan is not None and found.plan.num_stages == 4
    of_group = [stage.choice.sequence_parallel for stage in found.plan.stages]
    assert of_group[:2] == of_group[2:]
