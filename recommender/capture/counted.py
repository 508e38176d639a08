"""The fastest plans of the plain schedules, counted as those of every other schedule are.

The searches for speed minimise a closed form without transfers (``pipeline_seconds``), which a
programme over single stages can prove. In a step, transfers delay the stages that wait for them. So
what an answer says of a step is counted by the table of its schedule, transfers included
(``CountedSteps``), and two closed forms propose plans: the one without transfers, and one in which
every stage also waits for what it sends and gets back. Of what both propose, the plan that is
fastest as counted is taken, and moved on while that makes it faster; so are those of tighter
limits, so that no plan becomes faster as its limit falls. What is proven is proven of the closed
form without transfers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from capture.machine.cluster import Cluster
from capture.machine.links import Links
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.model.graph import LayerGraph
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.plan.why import Front
from capture.predictor.alike import Kinds
from capture.predictor.step_time import CountedSteps
from recommender.capture.minmax import least_peak
from recommender.capture.pareto import pareto, undominated
from recommender.capture.posed import plan_of
from recommender.capture.problem import SearchProblem
from recommender.capture.result import PlacedStage, Proposal, SearchResult, placed
from recommender.capture.throughput import throughput
from recommender.capture.ticks import step_seconds
from recommender.question import PlanQuestion

#: Forward and backward passes that are counted, at most, of the plans next to a proposal.
MOST_TASKS = 500_000
#: From one tighter limit to the next.
LIMITS_RATIO = 2**0.5


def _order(proposal: Proposal) -> tuple[float, int]:
    return proposal.seconds, proposal.result.peak_bytes


class CountedSearch:
    """The search for the fastest plan of a plain schedule, with steps counted by its table.

    Args:
        profile: Measurements of the model.
        question: For speed, of a plain schedule.
        problem: What the profile poses, with seconds.
    """

    def __init__(self, profile: Profile, question: PlanQuestion, problem: SearchProblem):
        self._profile, self._question, self._problem = profile, question, problem
        self._steps = CountedSteps(profile, question.cluster)

    def fastest(self, result: SearchResult, plan: Plan) -> Proposal:
        """Return the fastest proposal as counted: ``plan``, of the closed form without transfers,
        what is proposed with transfers, and what tighter limits propose. Infeasible results are
        counted as they are."""
        if result.status != "ok":
            return self._counted(result, plan)
        proposed = self._proposed(result)
        found = [self._improved(min(proposed, key=_order), result)]
        for limit in self._tighter_limits(max(p.result.peak_bytes for p in proposed)):
            tighter = self._within(limit)
            closed = throughput(tighter._problem)
            if closed.status == "ok":
                near = tighter._improved(min(tighter._proposed(closed), key=_order), closed)
                found.append(self._bounded(near.result, result))
        return min(found, key=_order)

    def _proposed(self, result: SearchResult) -> list[Proposal]:
        """Return the plans that both closed forms propose within the limit; ``result`` is that of
        the one without transfers."""
        proposed = [self._counted(result, self._planned(result.stages))]
        if (sending := self.with_transfers()) is not None:
            other = throughput(sending)
            if other.status == "ok":
                proposed.append(self._bounded(other, result))
        return proposed

    def _tighter_limits(self, peak_bytes: int) -> Iterator[int]:
        """Yield limits below a peak, from the least one on. They do not depend on the limit, so
        that a plan that is found at one of them is found at every larger limit."""
        limit = least_peak(self._problem)
        while 0 < limit < peak_bytes:
            yield limit
            limit = int(limit * LIMITS_RATIO) + 1

    def _within(self, limit: int) -> CountedSearch:
        return CountedSearch(
            self._profile,
            replace(self._question, memory_limit_bytes=limit),
            replace(self._problem, memory_limit_bytes=limit),
        )

    def front(self, fastest: Proposal) -> tuple[Proposal, Front]:
        """Return the fastest proposal, and the front: all proposals of which none is both smaller
        and faster than another."""
        start = time.perf_counter()
        plain = pareto(self._problem)
        proposed = [self._counted(point, self._planned(point.stages)) for point in plain.points]
        if fastest.result.status == "ok":
            proposed.append(fastest)
        if (sending := self.with_transfers()) is not None:
            for point in pareto(sending).points:
                below = [p for p in plain.points if p.peak_bytes <= point.peak_bytes]
                proposed += [self._bounded(point, below[-1])] if below else []
        left = undominated(proposed, lambda one: (one.result.peak_bytes, one.seconds))
        same = [one.plan.stages for one in left] == [
            self._planned(point.stages).stages for point in plain.points
        ]
        front = Front(
            tuple(one.point for one in left),
            plain.complete and same,
            self._question.microbatch_size not in self._profile.microbatch_sizes,
            time.perf_counter() - start,
        )
        return min([fastest, *left], key=lambda p: p.seconds), front

    def _planned(self, stages: Sequence[PlacedStage]) -> Plan:
        return plan_of(self._profile, self._question, stages)

    def _counted(self, result: SearchResult, plan: Plan) -> Proposal:
        return Proposal(replace(result, step_seconds=self._steps.seconds(plan)), plan)

    def _bounded(self, other: SearchResult, best: SearchResult) -> Proposal:
        """Return a proposal that was searched with transfers, with what is proven without them."""
        without = step_seconds(self._problem, other.stages)
        least = step_seconds(self._problem, best.stages) / (1 + best.bound_fraction)
        above = max(0.0, without / least - 1) if least else 0.0
        result = replace(other, optimal=best.optimal and above == 0, bound_fraction=above)
        return self._counted(result, self._planned(other.stages))

    def _improved(self, best: Proposal, closed: SearchResult) -> Proposal:
        """Move borders and swap neighbours of a proposal within the limit, as long as the counted
        step gets shorter: on which links stages meet, no closed form over single stages says."""
        num_left = MOST_TASKS // (2 * self._problem.num_microbatches * len(best.plan.stages))
        moved: Proposal | None = best
        while moved is not None:
            best, moved = moved, None
            for stages in self._moves(best.result.stages):
                if num_left <= 0:
                    return best
                num_left -= 1
                peaks = tuple(s.peak_bytes for s in stages for _ in s.devices)
                result = replace(best.result, stages=stages, peak_bytes_per_device=peaks)
                one = self._bounded(result, closed)
                if one.seconds < (moved or best).seconds:
                    moved = one
        return best

    def _moves(self, stages: Sequence[PlacedStage]) -> Iterator[tuple[PlacedStage, ...]]:
        """Yield the stages with one border elsewhere, or the devices and choices of two neighbours
        swapped, if they fit."""
        cuts = [stage.first for stage in stages] + [stages[-1].stop]
        choices = [stage.choice for stage in stages]
        for i in range(1, len(stages)):
            for step in (-1, 1):
                if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                    yield from self._fitting([*cuts[:i], cuts[i] + step, *cuts[i + 1 :]], choices)
            if choices[i - 1] != choices[i]:
                swapped = [*choices[: i - 1], choices[i], choices[i - 1], *choices[i + 1 :]]
                yield from self._fitting(cuts, swapped)

    def _fitting(
        self, cuts: Sequence[int], choices: Sequence[StageChoice]
    ) -> Iterator[tuple[PlacedStage, ...]]:
        """Yield these stages on consecutive devices, if all are possible and within the limit."""
        problem, device, found = self._problem, 0, list[PlacedStage]()
        for s, (choice, (first, stop)) in enumerate(zip(choices, pairwise(cuts), strict=True)):
            d = choice.num_devices
            if d not in problem.degrees[device]:
                return
            peaks = problem.bytes_per_choice(d, len(choices) - s, first, stop)
            peak = int(peaks[problem.choices[d].index(choice)])
            if peak > problem.limit_bytes:
                return
            found.append(placed(device, first, stop, choice, peak))
            device += d
        yield tuple(found)

    def with_transfers(self) -> SearchProblem | None:
        """Return the problem in which a stage waits for what it sends and gets back; None where
        nothing is sent."""
        problem, cluster = self._problem, self._question.cluster
        graph = self._profile.graph_at(self._question.microbatch_size)
        sent = {
            d: np.stack([sends_seconds(graph, cluster, each) for each in problem.choices[d]])
            for d in problem.used_degrees
        }
        if cluster.num_devices == 1 or not any(each.any() for each in sent.values()):
            return None
        return with_sends(problem, sent)


def with_sends(
    problem: SearchProblem,
    sent: Mapping[int, np.ndarray],
    fed: Mapping[int, np.ndarray] | None = None,
) -> SearchProblem:
    """Return the problem in which a stage waits for what it sends and gets back, and the first one
    for the batch.

    Args:
        problem: With seconds, and those of updates where something is fed.
        sent: Per degree those of ``sends_seconds`` by choice, (num_choices, L + 1).
        fed: The same of ``fed_seconds``; None for nothing.
    """
    shape = problem.kinds.shape
    tables = [*sent.values(), *(fed or {}).values()]
    _, alike = np.unique(np.concatenate(tables), axis=1, return_inverse=True)
    begins = np.arange(shape[0])[:, None] == 0
    kinds = Kinds(problem.kinds, alike + (0 if fed is None else len(alike)) * begins)
    problem, stop = problem.split(kinds), kinds.first % shape[1]
    assert problem.seconds is not None, "times are known"
    seconds = {d: problem.seconds[d] + 2 * each[:, stop] for d, each in sent.items()}
    if fed is None:
        return replace(problem, seconds=seconds)
    assert problem.update_seconds is not None, "times are known"
    is_first = kinds.first < shape[1]
    once = {d: problem.update_seconds[d] + each[:, stop] * is_first for d, each in fed.items()}
    return replace(problem, seconds=seconds, update_seconds=once)


def sends_seconds(graph: LayerGraph, cluster: Cluster, choice: StageChoice) -> np.ndarray:
    """Return the seconds of what a stage sends to the next one, by where it stops, (L + 1,).

    Where it stands is not known, so the links between nodes are taken as often as stages of that
    size end at the end of a node.

    Args:
        graph: The layers at the plan's micro-batch size.
        cluster: Of a target with rates.
        choice: Of the stage.
    """
    rates = Target.load(cluster.target).rates
    assert rates is not None, "times are known"
    links = Links(rates, cluster.layout)
    ends = min(1.0, choice.num_devices / cluster.nodes[0]) if len(cluster.nodes) > 1 else 0.0
    sends = np.zeros(graph.num_layers + 1)
    for stop in range(1, graph.num_layers):
        for v in graph.crossing(stop):
            nbytes = graph.value_bytes(v, choice.value_split)
            sends[stop] += ends * links.send_seconds(nbytes, True)
            sends[stop] += (1 - ends) * links.send_seconds(nbytes, False)
    return sends


def fed_seconds(graph: LayerGraph, cluster: Cluster, choice: StageChoice) -> np.ndarray:
    """Return the seconds until a first stage has its first micro-batch, by where it stops,
    (L + 1,). Those that follow come while it computes.

    Args:
        graph: The layers at the plan's micro-batch size.
        cluster: Of a target with rates.
        choice: Of the stage.
    """
    rates = Target.load(cluster.target).rates
    assert rates is not None, "times are known"
    read, found = set[int](), [0.0]
    for layer in graph.layers:
        read.update(layer.batch)
        leaves = (graph.batch[leaf].shard_bytes(choice.data_parallel) for leaf in read)
        found.append(sum(map(rates.host.to_device.seconds, leaves)))
    return np.array(found)
