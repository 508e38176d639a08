"""The plan of packs that stays within the limit of a device: as instructions, and, where its packs
are compiled, by the compiler.

The paper holds packs alone below the limit. Instructions hold what no task counts, so where they
exceed it, packs are searched again below a limit that is lower by as much. What layers need one by
one is more than a pack of them does, seldom less: so a plan that is within the limit by that is
compiled, and the search goes on as before where it is not within it then. Faster ones that were
refused for their estimate are compiled, too, where that would be within the limit if it were as far
above as that of the plan; and where nothing is within it, the packs of the least limit are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from capture.measured.layer_passes import Pass
from capture.plan.headroom import HOPELESS
from capture.plan.packs import PacksPlan, PacksPrediction, StepTimes
from capture.plan.task_graph import Configuration, Mode
from capture.predictor.pack_step import step_times
from capture.step.pack_order import passes_by
from recommender.harmony.problem import PacksProblem
from recommender.harmony.question import PacksQuestion
from recommender.harmony.result import PacksResult, Point
from recommender.harmony.search import JUDGED, finds_packs, search

#: The plan, whose prediction says what its packs compile to.
Compile = Callable[[PacksPlan], PacksPlan]
#: Each below a lower limit.
_MOST_SEARCHES = 20
#: Of so many pairs of sizes, the best are judged as instructions.
_JUDGED = 6
#: Faster plans that are compiled after one that fits.
_MOST_FASTER = 2


@dataclass(frozen=True)
class Chosen:
    """A point of a search and its plan, predicted as instructions.

    Attributes:
        result: Of the search.
        point: By the paper's rules.
        plan: Of it, predicted.
        before: What is faster by the paper's rules, and slower as instructions.
        is_judged: Whether its instructions were compared with those of others.
    """

    result: PacksResult
    point: Point
    plan: PacksPlan
    before: tuple[PacksPlan, ...] = ()
    is_judged: bool = False

    @property
    def seconds(self) -> float:
        """The seconds of a step by which it was chosen: those of its instructions if they were
        compared, else those of the paper's rules."""
        return step_times_of(self.plan).step_seconds if self.is_judged else self.point.seconds

    def through(self, compiled: Compile) -> Chosen:
        return replace(self, plan=compiled(self.plan))


def within(
    question: PacksQuestion, mode: Mode, compiled: Compile | None = None
) -> tuple[PacksResult, Chosen | None]:
    """Search until the best plan's instructions stay within the limit of a device. Return the last
    search and its plan; None where none is found."""
    problem, limit = question.problem(mode), question.limit_bytes
    refused: list[Chosen] = []
    for _ in range(_MOST_SEARCHES):
        result = search(problem, question.algorithm)
        if result.best is None:
            return result, None
        chosen = _chosen(question, mode, result)
        if compiled is not None and chosen.plan.known_peak_bytes <= limit:
            chosen = _faster(refused, chosen.through(compiled), compiled, limit)
        above = chosen.plan.known_peak_bytes - limit
        if above <= 0 or not holds_instructions(question):
            return chosen.result, chosen
        refused.append(chosen)
        lowered = max(1, int(problem.limit_bytes) - above)
        problem = replace(problem, server=problem.server.with_(usable_bytes=lowered))
    return replace(result, status="infeasible", points=()), None


def _faster(refused: Sequence[Chosen], chosen: Chosen, compiled: Compile, limit: int) -> Chosen:
    """Return the first refused plan that is faster than the chosen one and compiles within the
    limit; the chosen one if there is none."""
    estimated = max(step_times_of(chosen.plan).device_peak_bytes)
    too_high = estimated / chosen.plan.known_peak_bytes
    near = [
        one
        for one in {str(one.plan.configuration): one for one in refused}.values()
        if not one.plan.compiled
        and one.seconds < chosen.seconds
        and one.plan.known_peak_bytes <= too_high * limit
    ]
    for one in near[:_MOST_FASTER]:
        if (found := one.through(compiled)).plan.known_peak_bytes <= limit:
            return found
    return chosen


def after_all(question: PacksQuestion, mode: Mode, least: int, compiled: Compile) -> Chosen | None:
    """Search below the least limit with which packs are found, which is higher than asked, and
    compile the plan: it may need less than estimated. None where that is in vain."""
    limit = question.limit_bytes
    if max(layer_needs(question.problem(mode), question.algorithm)) > limit:
        return None
    asked = replace(question, server=question.server.with_(usable_bytes=least))
    if (chosen := within(asked, mode)[1]) is None:
        return None
    # With less room, less is fetched early.
    chosen = replace(chosen, plan=plan_of(question, mode, chosen.point.configuration))
    return None if chosen.plan.known_peak_bytes > HOPELESS * limit else chosen.through(compiled)


def holds_instructions(question: PacksQuestion) -> bool:
    """Return whether the limit holds for instructions, not for packs alone: for models that can be
    run, and for a given limit unless the paper's algorithm is asked for."""
    given = question.server.usable_bytes.source == "given" and question.algorithm != "paper"
    return given or bool(question.profile.model_hashes)


def _chosen(question: PacksQuestion, mode: Mode, result: PacksResult) -> Chosen:
    """Choose the best point; of ``judged`` and ``wide``, the one of the best few whose instructions
    take least time, which the paper's rules may rank otherwise: there a host process per device
    updates."""
    is_judged = question.algorithm in (JUDGED, "wide")
    points = result.of_sizes(_JUDGED) if is_judged else result.top(1)
    plans = [plan_of(question, mode, point.configuration) for point in points]
    server = question.server

    def key(i: int) -> tuple[bool, bool, float]:
        exceeds = plans[i].known_peak_bytes > server.usable_bytes.value
        lacks = host_bytes(plans[i]) > server.host_memory_bytes.value
        return exceeds, lacks, step_times_of(plans[i]).step_seconds

    best = min(range(len(points)), key=key)
    return Chosen(result, points[best], plans[best], tuple(plans[:best]), is_judged)


def plan_of(question: PacksQuestion, mode: Mode, configuration: Configuration) -> PacksPlan:
    """Return the plan of a configuration, with its prediction."""
    problem, server = question.problem(mode), question.server
    graph, estimate = problem.graph(configuration, None), problem.estimate(configuration)
    order = passes_by(graph, estimate.begins) if mode == "pp" else ()
    times = step_times(graph, question.profile, server)
    prediction = PacksPrediction(estimate.times, times)
    return PacksPlan(
        server,
        question.profile.num_layers,
        question.minibatch_size,
        mode,
        configuration,
        question.switches,
        question.profile.name,
        prediction,
        model_hash=question.profile.model_hashes.get(configuration.backward.microbatch_size, ""),
        workload=question.profile.workload,
        cluster=question.cluster,
        swaps=question.swaps,
        remat=question.profile.made.get("remat"),
        order=tuple(task.id for task, _ in order),
    )


def step_times_of(plan: PacksPlan) -> StepTimes:
    """Return the times of a predicted plan's step, read as instructions."""
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    return plan.prediction.step


def host_bytes(plan: PacksPlan) -> int:
    """Return the bytes at the host's peak in a step of a predicted plan."""
    assert plan.prediction is not None and plan.prediction.memory is not None, "predicted"
    return plan.prediction.memory.host_peak_bytes


def profiled_sizes(problem: PacksProblem, algorithm: str) -> Mapping[Pass, Sequence[int]]:
    """Return the micro-batch sizes that a search may use, per direction."""
    of = problem.all_sizes if algorithm == "wide" else problem.sizes
    return {"forward": of("forward"), "backward": of("backward")}


def layer_needs(problem: PacksProblem, algorithm: str) -> list[int]:
    """Return the bytes of every layer alone, backward at the smallest micro-batch size."""
    size = profiled_sizes(problem, algorithm)["backward"][0]
    return problem.profile.at("backward", size).memory_bytes.tolist()


def least_within(question: PacksQuestion, mode: Mode) -> int | None:
    """Return a limit, not far from the smallest, below which estimates find a plan; None without
    micro-batch sizes."""
    problem = question.problem(mode)
    if not all(profiled_sizes(problem, question.algorithm).values()):
        return None
    least = least_limit(problem, max(layer_needs(problem, question.algorithm)), question.algorithm)
    if holds_instructions(question):
        least = _least_held(question, mode, max(question.limit_bytes + 1, least))
    return least


def least_limit(problem: PacksProblem, at_least: int, algorithm: str) -> int:
    """Return the smallest limit of a device with which a search finds packs, to a part in 2**20."""

    def found(limit: int) -> bool:
        server = problem.server.with_(usable_bytes=limit)
        return finds_packs(replace(problem, server=server), algorithm)

    low, high = at_least - 1, at_least
    while not found(high):
        low, high = high, 2 * high
    while high - low > max(1, high >> 20):
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _least_held(question: PacksQuestion, mode: Mode, at_least: int) -> int:
    """Return a limit, near the smallest, below which packs and their instructions are found."""
    limit = at_least
    for _ in range(_MOST_SEARCHES):
        server = question.server.with_(usable_bytes=limit)
        asked = replace(question, server=server)
        if within(asked, mode)[1] is not None:
            return limit
        found = search(asked.problem(mode), question.algorithm)
        more = _chosen(asked, mode, found).plan.known_peak_bytes if found.best else 2 * limit
        limit = max(limit + 1, more)
    return limit
