"""The plan of packs for layers, a server and a minibatch, or what is missing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from capture.errors import ProfileError, TargetError
from capture.measured.layer_profile import LayerProfile
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Mode
from capture.plan.why import Why
from capture.quantities import counted, format_bytes, format_rate, format_seconds
from recommender.answer import Answer
from recommender.harmony.packing import EXPERT
from recommender.harmony.question import PacksQuestion
from recommender.harmony.result import PacksResult
from recommender.harmony.search import JUDGED, finds_packs
from recommender.harmony.within import (
    Chosen,
    Compile,
    after_all,
    holds_instructions,
    host_bytes,
    layer_needs,
    least_within,
    profiled_sizes,
    step_times_of,
    within,
)

#: Of plans of packs.
PacksAnswer = Answer[PacksPlan, PacksResult]
#: Of the evaluated points, a plan keeps so many.
_KEPT = 10


def harmony(question: PacksQuestion, compiled: Compile | None = None) -> PacksAnswer:
    """Choose packs of layers, and the sizes of micro-batches, for the least estimated time.

    Args:
        question: What is asked.
        compiled: Compiles the packs of a plan: then no plan is answered whose packs need more than
            the limit by the compiler. Where it cannot, the plan is an estimate, and
            ``why.uncompiled`` says so.

    Returns:
        A plan with its prediction; ``infeasible`` where no packs fit a device, or the state does
        not fit the host.

    Raises:
        PlanError, WorkloadError: those of ``streamed``, where the packs to compile cannot be run.

    Source: Li et al. 2022 (Harmony), 4.3.
    """
    try:
        return _answer(question, compiled)
    except (ProfileError, TargetError) as error:
        if compiled is None:
            raise
        return not_compiled(_answer(question, None), str(error))


def every_way(question: PacksQuestion) -> list[tuple[PacksQuestion, PacksAnswer]]:
    """Return the questions of all modes, places of updates and forms of swaps, each with its answer
    by estimates, the fastest that fits first.

    Args:
        question: What is asked, as if all of these and the algorithm were left open.
    """
    every = replace(question, algorithm=JUDGED)
    off = replace(every, without=(*question.without, "offload"))
    ways = [replace(each, mode="pp") for each in (every, off)]
    if 1 < question.server.devices <= question.minibatch_size:
        ways += [replace(each, mode="dp") for each in (every, off)]
        ways.append(replace(every, mode="dp", swaps=replace(every.swaps, sharded=True)))
    answers = [(each, _answer(each, None)) for each in ways]
    return sorted(answers, key=lambda way: (not way[1].fits, step_seconds_of(way[1])))


def step_seconds_of(answer: PacksAnswer) -> float:
    """Return the seconds of an answer's step, the best that is known; infinite without a plan."""
    known = None if answer.plan is None else answer.plan.step_estimate
    return inf if known is None else known[0]


def not_compiled(answer: PacksAnswer, reason: str) -> PacksAnswer:
    """Return an answer that says why its packs were not compiled."""
    why = replace(answer.why, uncompiled=reason)
    plan = None if answer.plan is None else replace(answer.plan, why=why)
    return replace(answer, plan=plan, why=why)


def _answer(question: PacksQuestion, compiled: Compile | None) -> PacksAnswer:
    tried = {mode: within(question, mode, compiled) for mode in question.modes}
    found = {mode: chosen for mode, (_, chosen) in tried.items() if chosen is not None}
    limit, have = question.limit_bytes, int(question.server.host_memory_bytes.value)
    if not found:
        mode = question.modes[0]
        least, chosen = least_within(question, mode), None
        if least is not None and compiled is not None:
            chosen = after_all(question, mode, least, compiled)
        if chosen is not None:
            least = chosen.plan.known_peak_bytes
        if chosen is None or chosen.plan.known_peak_bytes > limit:
            why = _no_packs(question, mode, least, " by estimate" * (chosen is None))
            return Answer("infeasible", None, tried[mode][0], why)
        found[mode] = chosen
    # The fastest of those that the host can hold.
    mode = min(found, key=lambda mode: (host_bytes(found[mode].plan) > have, found[mode].seconds))
    chosen = found[mode]
    plan, need = chosen.plan, host_bytes(chosen.plan)
    points = tuple(point.to_json() for point in chosen.result.top(_KEPT))
    why = (
        _no_host(question.problem(mode).profile, need, have)
        if need > have
        else _why(chosen, question.profile.coupled)
    )
    plan = replace(plan, why=why, points=points)
    status = "infeasible" if need > have else "ok"
    return Answer(status, plan, chosen.result, why, plan.headroom(limit))


def _why(chosen: Chosen, coupled: str) -> Why:
    result, best, plan = chosen.result, chosen.point, chosen.plan
    assert plan.step_estimate is not None, "predicted"
    seconds, _ = plan.step_estimate
    forward, backward = plan.configuration.forward, plan.configuration.backward
    said = (
        f"{plan.mode}: {counted(len(forward.packs), 'forward pack')} for "
        f"{counted(forward.microbatch_size, 'example')} "
        f"({best.choice.forward_packing or 'none'}), "
        f"{counted(len(backward.packs), 'backward pack')} for "
        f"{backward.microbatch_size} ({best.choice.backward_packing})"
        f"{_how(plan)}; {format_rate(plan.minibatch_size / seconds)} examples/s, "
        f"{format_seconds(seconds)} a step as instructions ({format_seconds(best.seconds)} by the "
        f"paper's rules), tasks of {format_bytes(best.task_bytes)} at most"
    )
    if chosen.before:
        first = chosen.before[0]
        assert first.prediction is not None, "predicted above"
        one, other = first.configuration.forward, first.configuration.backward
        slower = step_times_of(first).step_seconds
        said += (
            f". The paper's rules rank {len(chosen.before)} before it, first micro-batches of "
            f"{one.microbatch_size} and {other.microbatch_size} with "
            f"{format_seconds(first.prediction.paper.step_seconds)}; as instructions it takes "
            f"{format_seconds(step_times_of(plan).step_seconds)} and that {format_seconds(slower)}"
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
    """Return a clause on the bytes of a rejected plan that exceed the host's or the device's
    memory; empty if it fits both."""
    have = plan.machine.host_memory_bytes.value
    if host_bytes(plan) > have:
        return (
            f", with {format_bytes(host_bytes(plan))} of the host, which has {format_bytes(have)}"
        )
    limit = plan.machine.usable_bytes.value
    if plan.known_peak_bytes > limit:
        return f", with {format_bytes(plan.known_peak_bytes)} of a device"
    return ""


def _how(plan: PacksPlan) -> str:
    """Return a clause on the options of a plan that differ from the defaults: optimizations that
    are off, stream dtype, swaps in shares."""
    said = f" without {', '.join(plan.switches.off)}" if plan.switches.off else ""
    said += f", streamed as {plan.swaps.stream}" if plan.swaps.stream else ""
    return said + (", swapped in shares" if plan.swaps.sharded else "")


def _no_packs(question: PacksQuestion, mode: Mode, least: int | None, known: str) -> Why:
    """Return why there are no packs: the layer that is too large, and the least limit of a plan,
    with how it is known."""
    problem, algorithm = question.problem(mode), question.algorithm
    profile, limit, is_wide = problem.profile, question.limit_bytes, algorithm == "wide"
    sizes = profiled_sizes(problem, algorithm)
    lacking = [way for way, found in sizes.items() if not found]
    if lacking:
        rule = "is at most" if is_wide else "divides"
        kind = "power of two" if EXPERT in problem.backward_packings else "micro-batch size"
        return Why(
            f"no profiled {lacking[0]} {kind} {rule} the shares, {problem.shares}; "
            f"profile smaller sizes than {profile.smallest(lacking[0])}, or change the minibatch.",
            code="packs-sizes",
        )
    size, needs = sizes["backward"][0], layer_needs(problem, algorithm)
    layer = max(range(profile.num_layers), key=lambda i: needs[i])
    change = f"Cheapest change: a limit of {least} bytes per device{known}"
    examples, code = counted(size, "example"), "packs-none"
    stage_id: int | None = None
    if holds_instructions(question) and finds_packs(problem, algorithm):
        said = (
            f"packs are found below the limit of {format_bytes(limit)}, but none whose "
            f"instructions hold as little. {change}, or a smaller minibatch; or --algorithm paper, "
            "which holds packs alone below it."
        )
    elif needs[layer] <= limit:
        what, other = "packs", "other packings"
        if is_wide:
            what, other = "tasks", "--algorithm paper, which holds packs alone below it"
        said = (
            f"every layer alone fits {format_bytes(limit)} for {examples}, but no {what} that "
            f"the search finds. {change}; or {other}."
        )
    else:
        code, stage_id = "packs-layer", layer
        said = (
            f"layer {layer} alone needs {format_bytes(needs[layer])} backward for {examples}, "
            f"{format_bytes(needs[layer] - limit)} above the limit of {format_bytes(limit)}. "
            f"{change}; or cut the layer into smaller ones."
        )
    return Why(said, code=code, memory_limit_bytes=limit, least_peak_bytes=least, stage_id=stage_id)


def _no_host(profile: LayerProfile, need: int, have: int) -> Why:
    """Return why the host is too small: the bytes missing, and how many of all are state."""
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
