"""Problems with known answers, for every search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import comb

import numpy as np

from capture.machine.cluster import Cluster
from capture.papers.capture.choices import hybrid_choices, paper_choices
from capture.plan.choices import StageChoice
from capture.plan.sampling import count_fillings
from capture.plan.space import StageSpace
from recommender.capture.problem import NEVER, SearchProblem

#: (nodes, layers, whole_nodes, any_divisor); each is small enough for brute force.
SHAPES = [
    ((4, 2), 6, False, False),
    ((2, 4), 6, False, False),
    ((1, 2), 5, False, False),
    ((6,), 6, False, False),
    ((6,), 6, False, True),
    ((3,), 6, False, True),
    ((3,), 6, False, False),
    ((4,), 7, False, False),
    ((2, 2), 6, False, False),
    ((2, 2), 6, True, False),
    ((1, 1, 1), 6, False, False),
    ((1, 1, 1, 1), 6, True, False),
    ((2, 2, 2), 5, True, False),
    ((3, 3), 5, True, True),
    ((1,), 4, False, False),
    ((5,), 4, False, False),
]


@dataclass(frozen=True)
class Case:
    """A problem and the sorted per-device bytes of its best plan; () if there is no plan."""

    name: str
    problem: SearchProblem
    best: tuple[int, ...]


def linear_cost(static: np.ndarray, kept: np.ndarray, in_flight: np.ndarray) -> np.ndarray:
    """Bytes that grow with the micro-batches in flight, (num_choices, K, L, L + 1)."""
    growing = np.where(static < NEVER, kept, 0)[:, None] * in_flight[:, None, None]
    return static[:, None] + growing


def random_problem(seed: int) -> SearchProblem:
    """A small problem: negative costs, ties, impossible stages, positions that matter, dense or
    linear costs."""
    generator = np.random.default_rng(seed)
    nodes, num_layers, whole_nodes, any_divisor = SHAPES[seed % len(SHAPES)]
    cluster = Cluster(nodes)
    space = StageSpace(whole_nodes, any_divisor)
    degrees = space.all_degrees(cluster)
    powers = (paper_choices, hybrid_choices)[seed % 2](cluster.num_devices)
    choices = {d: powers.get(d, (StageChoice(d, 1), StageChoice(1, d))) for d in degrees}
    num_positions = int(generator.integers(1, min(cluster.num_devices, num_layers) + 2))
    largest = (4, 30, 10**9)[seed % 3]  # 4: heavy ties
    cost: dict[int, np.ndarray] = {}
    for d in degrees:
        shape = (len(choices[d]), num_layers, num_layers + 1)
        static = generator.integers(-largest // 3, largest, shape)
        empty = np.tri(num_layers, num_layers + 1, dtype=bool) | (
            generator.random(shape) < 0.1 * (seed % 5 == 0)
        )
        if seed % 4 < 2:
            kept = generator.integers(-largest // 8, largest // 3 + 1, shape)
            in_flight = np.arange(1, num_positions + 1)
            cost[d] = linear_cost(np.where(empty, NEVER, static), kept, in_flight)
        else:
            rows = static[:, None] + generator.integers(
                -largest // 4, largest // 2 + 1, (shape[0], num_positions, *shape[1:])
            )
            cost[d] = np.where(empty[:, None] if empty.ndim == 3 else empty, NEVER, rows)
    return SearchProblem(cluster, num_layers, choices, cost, space)


def timed_problem(seed: int) -> SearchProblem:
    """``random_problem`` with whole seconds, so that sums are exact: ties, impossible times,
    updates, one to seven micro-batches."""
    problem, generator = random_problem(seed), np.random.default_rng(seed + 10**6)
    longest = (4, 40, 1000)[seed // 3 % 3]  # 4: heavy ties
    seconds, updates = {}, {}
    for d in problem.choices:
        shape = (len(problem.choices[d]), problem.kinds.size)
        impossible = generator.random(shape) < 0.1 * (seed % 7 == 0)
        seconds[d] = np.where(
            impossible, np.inf, generator.integers(0, longest, shape).astype(float)
        )
        updates[d] = generator.integers(0, longest * (1 + seed % 2), shape).astype(float)
    return replace(
        problem,
        seconds=seconds,
        update_seconds=None if seed % 4 == 3 else updates,
        num_microbatches=int(generator.integers(1, 8)),
    )


def every_step(problem: SearchProblem) -> Iterator[tuple[float, int, int]]:
    """Step seconds, peak bytes and number of stages of every possible plan with every combination
    of choices, by the definition."""
    assert problem.seconds is not None, "the problem has times"
    for plan in every_plan(problem):
        ways = []
        for i, (first, stop, d) in enumerate(plan):
            own = problem.bytes_per_choice(d, len(plan) - i, first, stop).tolist()
            seconds = problem.seconds[d][:, problem.kinds[first, stop]].tolist()
            updates = (
                [0.0] * len(own)
                if problem.update_seconds is None
                else problem.update_seconds[d][:, problem.kinds[first, stop]].tolist()
            )
            ways.append(
                [
                    way
                    for way in zip(own, seconds, updates, strict=True)
                    if way[0] < NEVER and np.isfinite(way[1])
                ]
            )
        for chosen in product(*ways):
            own, seconds, updates = zip(*chosen, strict=True)
            yield (
                sum(seconds) + (problem.num_microbatches - 1) * max(seconds) + max(updates),
                max(own),
                len(plan),
            )


def every_plan(
    problem: SearchProblem, device: int = 0, first: int = 0
) -> Iterator[list[tuple[int, int, int]]]:
    """All plans as lists of (first, stop, degree), by plain recursion."""
    if device == problem.cluster.num_devices:
        yield from [[]] if first == problem.num_layers else []
        return
    for d in problem.degrees[device]:
        for stop in range(first + 1, problem.num_layers + 1):
            for rest in every_plan(problem, device + d, stop):
                yield [(first, stop, d), *rest]


def every_sorted_vector(problem: SearchProblem) -> Iterator[tuple[int, ...]]:
    """The per-device bytes, largest first, of every possible plan with every combination of
    choices."""
    for plan in every_plan(problem):
        costs = [
            problem.bytes_per_choice(d, len(plan) - i, first, stop).tolist()
            for i, (first, stop, d) in enumerate(plan)
        ]
        for chosen in product(*costs):
            if max(chosen) < NEVER:
                yield tuple(
                    sorted(
                        (c for c, (_, _, d) in zip(chosen, plan, strict=True) for _ in range(d)),
                        reverse=True,
                    )
                )


def brute_force(problem: SearchProblem) -> tuple[int, ...]:
    return min(every_sorted_vector(problem), default=())


def additive(isolated: list[int], added: list[int]) -> np.ndarray:
    """M_i of the first layer plus M_a of the others, (L, L + 1)."""
    num_layers = len(isolated)
    table = np.full((num_layers, num_layers + 1), NEVER)
    for first in range(num_layers):
        for stop in range(first + 1, num_layers + 1):
            table[first, stop] = isolated[first] + sum(added[first + 1 : stop])
    return table


def pipeline_problem(table: np.ndarray, num_devices: int) -> SearchProblem:
    """One-device stages with the same cost at every position."""
    return SearchProblem(
        Cluster((1,) * num_devices), len(table), paper_choices(1), {1: table[None, None]}
    )


def known_cases() -> list[Case]:
    """Answers that can be checked by hand."""
    equal = additive([10] * 6, [10] * 6)
    first_heavy = additive([50, 10, 10, 10], [50, 10, 10, 10])
    # Two stages on two devices. A stage before another one keeps two micro-batches: 2 x 3 layers
    # against 1 x 3.
    one_f_one_b = linear_cost(
        np.where(equal < NEVER, 0, NEVER)[None],
        np.where(equal < NEVER, equal, 0)[None],
        np.array([1, 2]),
    )
    # One stage on both devices needs 36 on each; two stages need 40 and 20: the single stage wins
    # on the largest device only.
    halves = np.where(equal < NEVER, equal * 3 // 5, NEVER)[None, None]
    tie = np.full((3, 4), NEVER)
    tie[0, 1], tie[1, 3], tie[0, 2], tie[2, 3] = 9, 7, 9, 8
    return [
        Case("equal layers share equally", pipeline_problem(equal, 3), (20, 20, 20)),
        Case("a heavy first layer stands alone", pipeline_problem(first_heavy, 2), (50, 30)),
        Case(
            "1F1B gives the first stage fewer layers",
            SearchProblem(Cluster((1, 1)), 6, paper_choices(1), {1: one_f_one_b}),
            (40, 40),
        ),
        Case(
            "one stage on two devices",
            SearchProblem(
                Cluster((2,)),
                6,
                {1: (StageChoice(),), 2: (StageChoice(1, 2),)},
                {1: equal[None, None] + 10, 2: halves},
            ),
            (36, 36),
        ),
        Case("the tie is broken by the second device", pipeline_problem(tie, 2), (9, 7)),
        Case("fewer layers than stages", pipeline_problem(equal, 7), ()),
        Case("nothing possible", pipeline_problem(np.full((3, 4), NEVER), 2), ()),
        Case(
            "a node of three, stages of two",
            SearchProblem(Cluster((3,)), 6, {2: (StageChoice(2, 1),)}, {2: equal[None, None]}),
            (),
        ),
    ]


def count_plans(problem: SearchProblem) -> int:
    """All plans of a problem: fillings with their choices, times the ways to cut the layers into as
    many stages.

    Source: CAPTURE III-C; Algorithm 4 enumerates them.
    """
    used = set(problem.used_degrees)
    each = [[d for d in here if d in used for _ in problem.choices[d]] for here in problem.degrees]
    fillings = count_fillings(each)[0]
    return sum(
        count * comb(problem.num_layers - 1, num_stages - 1)
        for num_stages, count in enumerate(fillings)
        if num_stages
    )
