"""From layers, a server and a minibatch to a plan of packs, or to what is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from capture.measured.layer_passes import Pass
from capture.measured.layer_profile import LayerProfile
from capture.plan.packs import PacksPlan, PacksPrediction, PaperTimes, StepTimes
from capture.plan.task_graph import Configuration, Mode
from capture.plan.why import Why
from capture.predictor.pack_step import step_times
from capture.predictor.pack_times import Estimate
from capture.quantities import counted, format_bytes, format_seconds
from recommender.answer import Answer
from recommender.harmony.packing import EXPERT
from recommender.harmony.problem import PacksProblem
from recommender.harmony.question import PacksQuestion
from recommender.harmony.result import PacksResult, Point
from recommender.harmony.search import finds_packs, search

#: Of plans of packs.
PacksAnswer = Answer[PacksPlan, PacksResult]
#: Of the evaluated points, a plan keeps so many.
_KEPT = 10
#: Each below a lower limit.
_MOST_SEARCHES = 20
#: Of what ``wide`` finds, the best of so many pairs of sizes are judged as instructions.
_JUDGED = 6


def harmony(question: PacksQuestion) -> PacksAnswer:
    """Choose packs of layers, and the sizes of micro-batches, for the least estimated time.

    Returns:
        A plan with its prediction; ``infeasible`` where no packs fit a device, or the state does
        not fit the host.

    Source: Li et al. 2022 (Harmony), 4.3.
    """
    tried = {mode: _searched(question, mode) for mode in question.modes}
    found = {mode: chosen for mode, (_, chosen) in tried.items() if chosen is not None}
    have = int(question.server.host_memory_bytes.value)
    if not found:
        mode = question.modes[0]
        why = _no_packs(question, mode)
        return Answer("infeasible", None, tried[mode][0], why)
    # The fastest of those that the host can hold.
    mode = min(found, key=lambda mode: (_host_bytes(found[mode].plan) > have, found[mode].seconds))
    result, chosen = tried[mode][0], found[mode]
    plan, need = chosen.plan, _host_bytes(chosen.plan)
    points = tuple(point.to_json() for point in result.top(_KEPT))
    why = (
        _no_host(question.problem(mode).profile, need, have)
        if need > have
        else _why(result, chosen, question.profile.coupled)
    )
    plan = replace(plan, why=why, points=points)
    status = "infeasible" if need > have else "ok"
    limit = int(question.server.usable_bytes.value)
    return Answer(status, plan, result, why, plan.headroom(limit))


@dataclass(frozen=True)
class _Chosen:
    """A point of a search, as a plan.

    Attributes:
        point: By the paper's rules.
        plan: Of it, predicted.
        before: What is faster by the paper's rules, and slower as instructions.
        is_judged: Whether its instructions were compared with those of others.
    """

    point: Point
    plan: PacksPlan
    before: tuple[PacksPlan, ...] = ()
    is_judged: bool = False

    @property
    def seconds(self) -> float:
        """That it was chosen by."""
        return _step(self.plan).step_seconds if self.is_judged else self.point.seconds


def _searched(question: PacksQuestion, mode: Mode) -> tuple[PacksResult, _Chosen | None]:
    """What a search finds, and its plan. Where instructions are held below the limit, too, which
    hold what no task counts, packs are searched again below a limit that is lower by what they
    exceed it by."""
    problem, limit = question.problem(mode), int(question.server.usable_bytes.value)
    for _ in range(_MOST_SEARCHES):
        result = search(problem, question.algorithm)
        if result.best is None:
            return result, None
        chosen = _chosen(question, mode, result)
        above = chosen.plan.known_peak_bytes - limit
        if above <= 0 or not _holds_instructions(question):
            return result, chosen
        lowered = max(1, int(problem.limit_bytes) - above)
        problem = replace(problem, server=problem.server.with_(usable_bytes=lowered))
    return replace(result, status="infeasible", points=()), None


def _holds_instructions(question: PacksQuestion) -> bool:
    """Of a model that can be run, and below a limit that was given, but by the paper's rules."""
    given = question.server.usable_bytes.source == "given" and question.algorithm != "paper"
    return given or bool(question.profile.model_hashes)


def _chosen(question: PacksQuestion, mode: Mode, result: PacksResult) -> _Chosen:
    """The best point; of ``wide``, the one of the best few whose instructions take least time,
    which the paper's rules may rank otherwise: there a host process per device updates."""
    is_judged = question.algorithm == "wide"
    points = result.of_sizes(_JUDGED) if is_judged else result.top(1)
    plans = [plan_of(question, mode, point.configuration) for point in points]
    server = question.server

    def key(i: int) -> tuple[bool, bool, float]:
        exceeds = plans[i].known_peak_bytes > server.usable_bytes.value
        lacks = _host_bytes(plans[i]) > server.host_memory_bytes.value
        return exceeds, lacks, _step(plans[i]).step_seconds

    best = min(range(len(points)), key=key)
    return _Chosen(points[best], plans[best], tuple(plans[:best]), is_judged)


def plan_of(question: PacksQuestion, mode: Mode, configuration: Configuration) -> PacksPlan:
    """The plan of a configuration, predicted."""
    problem, server = question.problem(mode), question.server
    graph = problem.graph(configuration, None)
    prediction = PacksPrediction(
        paper_times(problem.estimate(configuration)), step_times(graph, question.profile, server)
    )
    return PacksPlan(
        server,
        question.profile.num_layers,
        question.minibatch_size,
        mode,
        configuration,
        question.switches,
        question.profile.name,
        question.profile.model_hashes.get(configuration.backward.microbatch_size, ""),
        question.profile.workload,
        question.cluster,
        prediction,
        swaps=question.swaps,
    )


def paper_times(found: Estimate) -> PaperTimes:
    """What a plan keeps of an estimate."""
    return PaperTimes(
        found.seconds,
        found.rank_ends,
        found.idle_fractions,
        found.gap_fractions,
        found.rank_bytes,
        found.volumes_bytes,
    )


def _step(plan: PacksPlan) -> StepTimes:
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted above"
    return plan.prediction.step


def _host_bytes(plan: PacksPlan) -> int:
    return _step(plan).host_peak_bytes


def _why(result: PacksResult, chosen: _Chosen, coupled: str) -> Why:
    best, plan = chosen.point, chosen.plan
    seconds = _step(plan).step_seconds
    forward, backward = plan.configuration.forward, plan.configuration.backward
    said = (
        f"{plan.mode}: {counted(len(forward.packs), 'forward pack')} for "
        f"{counted(forward.microbatch_size, 'example')} "
        f"({best.choice.forward_packing or 'none'}), "
        f"{counted(len(backward.packs), 'backward pack')} for "
        f"{backward.microbatch_size} ({best.choice.backward_packing})"
        f"{_how(plan)}; {plan.minibatch_size / seconds:.4g} examples/s, "
        f"{format_seconds(seconds)} a step as instructions ({format_seconds(best.seconds)} by the "
        f"paper's rules), tasks of {format_bytes(best.task_bytes)} at most"
    )
    if chosen.before:
        first = chosen.before[0]
        assert first.prediction is not None, "predicted above"
        one, other = first.configuration.forward, first.configuration.backward
        said += (
            f". The paper's rules rank {len(chosen.before)} before it, first micro-batches of "
            f"{one.microbatch_size} and {other.microbatch_size} with "
            f"{format_seconds(first.prediction.paper.step_seconds)}; as instructions it takes "
            f"{format_seconds(seconds)} and that {format_seconds(_step(first).step_seconds)}"
            f"{_lacking(first)}"
        )
    limit = plan.machine.usable_bytes.value
    if best.task_bytes > limit:
        said += (
            f", {format_bytes(best.task_bytes - limit)} above the limit, which holds for packs "
            "alone (--algorithm wide holds whole tasks below it)"
        )
    if coupled:
        said += f". Both directions have micro-batches of one size, for {coupled}"
    if (single := result.fits_one_device) is not None:
        size = single.configuration.backward.microbatch_size
        said += (
            f". One device holds the whole model in one pack for {counted(size, 'example')}: it "
            "can be trained resident, and Harmony is not needed"
        )
    return Why(said, num_choices=len(result.points))


def _lacking(plan: PacksPlan) -> str:
    """Of a plan that was not taken: whether it fits at all."""
    have = plan.machine.host_memory_bytes.value
    if _host_bytes(plan) > have:
        return (
            f", with {format_bytes(_host_bytes(plan))} of the host, which has {format_bytes(have)}"
        )
    limit = plan.machine.usable_bytes.value
    if plan.known_peak_bytes > limit:
        return f", with {format_bytes(plan.known_peak_bytes)} of a device"
    return ""


def _how(plan: PacksPlan) -> str:
    """What is not as it is by default."""
    said = f" without {', '.join(plan.switches.off)}" if plan.switches.off else ""
    said += f", streamed as {plan.swaps.stream}" if plan.swaps.stream else ""
    return said + (", swapped in shares" if plan.swaps.sharded else "")


def _no_packs(question: PacksQuestion, mode: Mode) -> Why:
    """The layer that is too large, and the least limit with which the search finds packs."""
    problem, algorithm = question.problem(mode), question.algorithm
    profile, limit, is_wide = problem.profile, int(problem.limit_bytes), algorithm == "wide"
    asked: tuple[Pass, ...] = ("forward", "backward")
    sizes = {way: problem.all_sizes(way) if is_wide else problem.sizes(way) for way in asked}
    lacking = [way for way, found in sizes.items() if not found]
    if lacking:
        rule = "is at most" if is_wide else "divides"
        kind = "power of two" if EXPERT in problem.backward_packings else "micro-batch size"
        return Why(
            f"no profiled {lacking[0]} {kind} {rule} the shares, {problem.shares}; "
            f"profile smaller sizes than {profile.smallest(lacking[0])}, or change the minibatch.",
            code="packs-sizes",
        )
    size = sizes["backward"][0]
    needs = profile.at("backward", size).memory_bytes.tolist()
    layer = max(range(profile.num_layers), key=lambda i: needs[i])
    least = least_limit(problem, needs[layer], algorithm)
    if _holds_instructions(question):
        least = _least_held(question, mode, max(limit + 1, least))
    if _holds_instructions(question) and finds_packs(problem, algorithm):
        said = (
            f"packs are found below the limit of {format_bytes(limit)}, but none whose "
            f"instructions hold as little. Cheapest change: a limit of {least} bytes per device, "
            "or a smaller minibatch; or --algorithm paper, which holds packs alone below it."
        )
        return Why(said, code="packs-none", memory_limit_bytes=limit, least_peak_bytes=least)
    change = f"Cheapest change: a limit of {least} bytes per device"
    if needs[layer] <= limit:
        what, other = "packs", "other packings"
        if is_wide:
            what, other = "tasks", "--algorithm paper, which holds packs alone below it"
        said = (
            f"every layer alone fits {format_bytes(limit)} for {size} examples, but no {what} that "
            f"the search finds. {change}; or {other}."
        )
        return Why(said, code="packs-none", memory_limit_bytes=limit, least_peak_bytes=least)
    return Why(
        f"layer {layer} alone needs {format_bytes(needs[layer])} backward for {size} examples, "
        f"{format_bytes(needs[layer] - limit)} above the limit of {format_bytes(limit)}. {change}; "
        "or cut the layer into smaller ones.",
        code="packs-layer",
        memory_limit_bytes=limit,
        least_peak_bytes=least,
        stage_id=layer,
    )


def least_limit(problem: PacksProblem, at_least: int, algorithm: str) -> int:
    """The smallest limit of a device with which a search finds packs, to a part in 2**20."""

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
    """A limit below which packs and their instructions are found, not far from the smallest."""
    limit = at_least
    for _ in range(_MOST_SEARCHES):
        server = question.server.with_(usable_bytes=limit)
        asked = replace(question, server=server)
        if _searched(asked, mode)[1] is not None:
            return limit
        found = search(asked.problem(mode), question.algorithm)
        more = _chosen(asked, mode, found).plan.known_peak_bytes if found.best else 2 * limit
        limit = max(limit + 1, more)
    return limit


def _no_host(profile: LayerProfile, need: int, have: int) -> Why:
    """Host bytes that are missing, and what of them is not state."""
    layers = 0, profile.num_layers
    weights = profile.weight_bytes(*layers) + profile.cast_bytes(*layers)
    state = weights + profile.state_bytes(*layers)
    change = f"Cheapest change: a host with {need} bytes"
    if state < have:
        change += (
            f"; or fewer examples a step: beside {format_bytes(state)} of weights and optimizer "
            "state the rest is what is kept for the backward pass"
        )
    return Why(
        f"the host holds {format_bytes(need)} at its peak ({format_bytes(state)} of it weights, "
        f"buffers and optimizer state) and has {format_bytes(have)}: {need - have} bytes are "
        f"missing. {change}.",
        code="packs-host",
        memory_limit_bytes=have,
        least_peak_bytes=need,
        least_state_bytes=state,
    )
