"""The estimated seconds of a part's stages: what tracing expects, times what compiled stages with
the same choice took beyond it, and what is sent; and the plans that a closed form over these
proposes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from capture.plan.choices import StageChoice
from capture.predictor.alike import Kinds
from recommender.capture import grouped
from recommender.capture.counted import fed_seconds, sends_seconds, with_sends
from recommender.capture.lowest_peak import between, expected, nearness
from recommender.capture.pareto import pareto
from recommender.capture.parts import (
    ENDLESS_BYTES,
    Found,
    OpenPart,
    compiled_in,
    posed,
    posed_at_most,
)
from recommender.capture.problem import SearchProblem, together
from recommender.capture.result import SearchResult
from recommender.capture.throughput import throughput

#: Per degree and choice, what stages take over what they are expected to.
Ratios = tuple[tuple[float, ...], ...]


def slowness(part: OpenPart) -> Mapping[StageChoice, float]:
    """Return by choice the ratio of compiled to expected seconds, over the compiled stages of the
    part's micro-batch size; without one, over layers that were compiled alone."""
    known, real = defaultdict[StageChoice, float](float), defaultdict[StageChoice, float](float)
    model, choices = part.expected.model, set[StageChoice]()
    for config, cost in part.known.verified.items():
        times = model.stage_times(cost)
        if config.microbatch_size == part.size and times is not None:
            choices.add(config.choice)
            known[config.choice] += part.expected.microbatch_seconds(config)
            real[config.choice] += times.microbatch_seconds
    for config, cost in part.alone.items():
        # What replicas send has little to hide behind, other than in a stage of many.
        among = model.hiding_replicas(config.choice.tensor_parallel)
        expected = among.stage_times(part.most.measurements[config])
        times = among.stage_times(cost)
        if config.choice not in choices and times is not None and expected is not None:
            known[config.choice] += expected.microbatch_seconds
            real[config.choice] += times.microbatch_seconds
    return {choice: real[choice] / seconds for choice, seconds in known.items() if seconds}


def ratios(part: OpenPart, known: Mapping[int, Mapping[StageChoice, float]]) -> Ratios:
    """Return the ratios to expected seconds that stages are taken to have, per degree and choice:
    as known at their micro-batch size, or at another; else the least of the choices that are most
    alike: whose passes are the same but for the number of replicas, or have as much tensor
    parallelism, or of all."""
    return part.once(_ratios, tuple((size, tuple(of.items())) for size, of in known.items()))


def _ratios(
    part: OpenPart, known: Sequence[tuple[int, Sequence[tuple[StageChoice, float]]]]
) -> Ratios:
    maps = [dict(of) for _, of in sorted(known, key=lambda each: each[0] != part.size)]
    alike = {num: dict[tuple[object, ...], float]() for num in (4, 1, 0)}
    for choice, value in (each for found in maps for each in found.items()):
        for num, least in alike.items():
            key = _passes(choice, num)
            least[key] = min(value, least.get(key, value))

    def ratio(choice: StageChoice) -> float:
        if (same := next((found[choice] for found in maps if choice in found), None)) is not None:
            return same
        parts = [found[part] for part in choice.measured for found in maps if part in found]
        if parts:  # of a mixture
            return max(parts)
        nearest = (least.get(_passes(choice, num)) for num, least in alike.items())
        return next((each for each in nearest if each is not None), 1.0)

    if not part.is_plain:
        return (tuple(map(ratio, part.known.choices)),)
    return tuple(tuple(map(ratio, choices)) for choices in part.once(posed).choices.values())


def _passes(choice: StageChoice, num: int) -> tuple[object, ...]:
    """Return the first ``num`` things that decide how far the passes of a stage are from what is
    expected of them."""
    own = choice.tensor_parallel, choice.remat, choice.sequence_parallel, choice.shard_params
    return own[:num]


def _moved(part: OpenPart, of: Callable[..., np.ndarray]) -> Mapping[int, np.ndarray]:
    """Return per degree the seconds of what stages send, or first stages are fed, (num_choices,
    L + 1), by their stops."""
    graph, cluster = part.known.graph_at(part.size), part.question.cluster
    known = dict[tuple[int, tuple[int, int]], np.ndarray]()

    def moved(choice: StageChoice) -> np.ndarray:
        key = choice.num_devices, choice.value_split
        if key not in known:
            known[key] = of(graph, cluster, choice)
        return known[key]

    return {
        d: np.stack([moved(choice) for choice in choices])
        for d, choices in part.once(posed).choices.items()
    }


def estimates(part: OpenPart, ratios: Ratios, at_most: bool = False) -> SearchProblem:
    """Return the problem with the bytes and seconds that stages are estimated to need, or the most
    bytes with ``at_most``, and what is sent and fed. Compiled stages keep theirs."""
    problem, own = part.once(_expected, at_most)
    assert problem.seconds is not None, "it has times"
    seconds = {
        d: problem.seconds[d] + (np.array(of_choices)[:, None] - 1) * own[d]
        for d, of_choices in zip(problem.choices, ratios, strict=True)
    }
    return replace(problem, seconds=seconds)


def _expected(part: OpenPart, at_most: bool) -> tuple[SearchProblem, Mapping[int, np.ndarray]]:
    """Return the problem of ``estimates`` with the seconds that tracing expects, and these of the
    passes of stages that are not compiled, (num_choices, S): the bytes, which are most of it, are
    the same of all ratios."""
    problem, other = together(part.once(posed), part.once(posed_at_most))
    assert other.seconds is not None, "it has times"
    own = {d: np.where(np.isfinite(table), table, 0.0) for d, table in other.seconds.items()}
    for d, choice, kind in compiled_in(problem, part):
        own[d][choice, kind] = 0.0
    found = other if at_most else between(problem, other, part.once(nearness))
    found = replace(found, seconds=other.seconds, update_seconds=other.update_seconds)
    whole = with_sends(found, part.once(_moved, sends_seconds), part.once(_moved, fed_seconds))
    kinds = Kinds(whole.kinds)
    return whole, {d: kinds.renumber(table, found.kinds) for d, table in own.items()}


def fastest_of_any_size(part: OpenPart, ratios: Ratios) -> SearchResult:
    """Return the plan that is estimated to be fastest with endless memory."""
    return throughput(replace(part.once(estimates, ratios), memory_limit_bytes=ENDLESS_BYTES))


def _fastest(part: OpenPart, ratios: Ratios) -> SearchResult:
    """Return the plan that is estimated to be fastest of those that fit."""
    limit = part.question.limit_bytes
    if limit is not None and part.question.may_rest:
        found = part.once(fastest_of_any_size, ratios)
        if found.status == "ok" and found.peak_bytes <= limit:
            return found
    return throughput(part.once(estimates, ratios))


def proposed(
    part: OpenPart, ratios: Ratios, is_last: bool = False, enough: float = inf
) -> Sequence[Found]:
    """Return the plan that is estimated to be fastest; where none is expected to fit, that of the
    least bounds of bytes. One that ``is_last``, as nothing is compiled, fits by what it needs at
    most, if any does. Of a schedule that is not plain, () where none may be faster than ``enough``
    seconds."""
    if not part.is_plain:
        return grouped.fastest(part, ratios[0], part.question.limit_bytes, enough)
    found = throughput(part.once(estimates, ratios, True)) if is_last else None
    if found is None or found.status != "ok":
        found = _fastest(part, ratios)
    if found.status != "ok":
        least, problem = together(part.once(posed), part.once(estimates, ratios))
        found = throughput(replace(problem, cost=least.cost))
    # None takes any time where hosts hold too little for every stage.
    return [] if found.step_seconds is None else [Found(part, expected(part, found))]


def estimated_front(part: OpenPart, ratios: Ratios, is_last: bool = False) -> Sequence[Found]:
    """Return the estimated front of memory against time; if none fits, the plan of ``proposed``."""
    if not part.is_plain:
        return grouped.front(part, ratios[0])
    points = pareto(part.once(estimates, ratios, is_last)).points
    return [Found(part, expected(part, point)) for point in points] or proposed(part, ratios)
