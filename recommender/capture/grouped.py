"""Parts of a search for speed whose schedule is not plain: several stages share a group of devices,
or backward passes are split.

Such a schedule shortens what groups wait for each other, and nothing else. So a part is worth
opening where a step of equal stages by its table would be faster than the best plan that is known;
what bounds it is the floor of its parts alone, which leaves waiting out. In an open part
``recommender.capture.tables`` looks for the plan that is expected to be fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import inf

import numpy as np

from capture.machine.links import Layout
from capture.measured.profile import Profile
from capture.memo import memo
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import CountedSteps
from capture.predictor.times import StageTable, TimePredictor
from capture.step.times import StageTimes
from recommender.capture.counted import fed_seconds
from recommender.capture.lowest_peak import expected, least_in_groups
from recommender.capture.parts import Found, OpenPart, posed
from recommender.capture.posed import stage_choices
from recommender.capture.problem import SearchProblem
from recommender.capture.result import PlacedStage, Proposal
from recommender.capture.table_space import StageRows, step_of_equal_stages
from recommender.capture.tables import TableSearch, several_groups
from recommender.question import PlanQuestion

#: The part of a backward pass that computes gradients of weights: what is recomputed, element by
#: element or without weights comes before.
_WEIGHTS_FRACTION = 1 / 3


def floor(
    question: PlanQuestion,
    num_layers: int,
    seconds: Callable[[int], tuple[float, float]],
) -> tuple[float, float]:
    """Return a lower bound of the seconds of a step, and a lower bound of the expected seconds.

    Args:
        question: Of the part.
        num_layers: Of the model.
        seconds: The same of a micro-batch, by the number of devices of every group
            (``profiling_runs.bounds.ModelBounds.seconds``).

    Returns:
        Both infinite where there are no groups.
    """
    num_devices, num_microbatches = question.cluster.num_devices, question.num_microbatches
    known = {d: seconds(d) for d in several_groups(question, num_layers)}
    least = num_microbatches * min((each for each, _ in known.values()), default=inf)
    steps = (
        each * step_of_equal_stages(question.schedule, num_devices // d, num_microbatches)
        for d, (_, each) in known.items()
    )
    return least, min(steps, default=inf)


def least_seconds(part: OpenPart, question: PlanQuestion) -> float:
    """Return a lower bound of the seconds of a step: all groups together work on every micro-batch
    and update their stages, and the busiest no less than the mean.

    Args:
        part: Open, with the question's number of micro-batches and any schedule.
        question: With a schedule that is not plain.
    """
    num_devices = question.cluster.num_devices
    shares = (
        d / num_devices * part.once(_least_sum, d)
        for d in several_groups(question, part.known.graph.num_layers)
    )
    return min(shares, default=inf)


def _least_sum(part: OpenPart, num_devices: int) -> float:
    """Return the least seconds of a step on stages of so many devices one after the other, however
    layers are cut. Two programs of a backward pass take no less than the whole: no product runs
    twice, and each reads and makes what is its own."""
    if part.is_plain:
        problem = part.once(posed)
        if num_devices not in problem.used_degrees:
            return inf
        assert problem.seconds is not None and problem.update_seconds is not None, "it has times"
        steps = part.question.num_microbatches * problem.seconds[num_devices]
        steps = (steps + problem.update_seconds[num_devices]).min(axis=0)
        return _least_cut(problem.spread(steps))[0]
    num_layers = part.known.graph.num_layers
    stage = np.full((num_layers, num_layers + 1), inf)
    # Its tables are not kept: they are of all choices.
    times = TimePredictor(part.bounds.profile, part.question.cluster.layout, least=True)
    for choice in stage_choices(part.known, part.question.remat):
        if choice.num_devices == num_devices and part.size % choice.data_parallel == 0:
            table = times.table(choice, part.size)
            step = part.question.num_microbatches * (table.forward + table.backward)
            np.minimum(stage, step + table.update, out=stage)
    return _least_cut(stage)[0]


def least_plan(problem: SearchProblem, question: PlanQuestion) -> tuple[float, list[PlacedStage]]:
    """Return the least seconds of a step whose groups wait as they do where stages are equal, and
    stages that have them; where there are no groups these are infinite.

    Args:
        problem: With seconds as they are estimated, of as many micro-batches as the question has.
        question: With a schedule that is not plain.
    """
    assert problem.seconds is not None and problem.update_seconds is not None, "it has times"
    num_devices, num_microbatches = question.cluster.num_devices, question.num_microbatches
    least, found = inf, list[PlacedStage]()
    for d in {*several_groups(question, problem.num_layers)} & {*problem.used_degrees}:
        length = step_of_equal_stages(question.schedule, num_devices // d, num_microbatches)
        steps = problem.spread(length * problem.seconds[d] + problem.update_seconds[d])
        seconds, cuts = _least_cut(steps.min(axis=0))
        if (share := d / num_devices * seconds) < least:
            chosen = steps.argmin(axis=0)
            least, found = share, [
                PlacedStage.at(0, first, stop, problem.choices[d][chosen[first, stop]])
                for first, stop in pairwise(cuts)
            ]  # fmt: skip
    return least, found


def _least_cut(stage: np.ndarray) -> tuple[float, list[int]]:
    """Return the least sum of stages that cover all layers, of values (L, L + 1), and its cuts."""
    least, begins = np.zeros(stage.shape[1]), [0]
    for stop in range(1, len(least)):
        sums = least[:stop] + stage[:stop, stop]
        begins.append(int(sums.argmin()))
        least[stop] = sums.min()
    cuts = [len(least) - 1]
    while cuts[0]:
        cuts.insert(0, begins[cuts[0]])
    return float(least[-1]), cuts


def fastest(
    part: OpenPart, ratios: tuple[float, ...], limit: int | None, enough: float = inf
) -> Sequence[Found]:
    """Return the plan of an open part that is estimated to be fastest within a limit, else the
    smallest; plans have no mixtures. () where none may be faster than ``enough`` seconds.

    Args:
        part: Its bounds have split backward passes where the schedule does.
        ratios: Per choice of the part, what stages take over what they are expected to.
        limit: Bytes of a device.
    """
    return _found(part, part.once(_tables, ratios).fastest(limit, enough))


def given_up_seconds(part: OpenPart, ratios: tuple[float, ...], enough: float) -> float:
    """Return the seconds that the fastest plan of a part takes that fits, if its stages are equal,
    where ``fastest`` found none; infinite if none fits."""
    return part.once(_tables, ratios).given_up[part.question.limit_bytes, enough]


def smallest(part: OpenPart, ratios: tuple[float, ...]) -> Sequence[Found]:
    """Return the open part's plan that is expected to need least; arguments as of ``fastest``."""
    steps, found = part.once(_tables, ratios).steps, part.once(least_in_groups)
    assert steps is not None, "times are known"
    if found is None:
        return []
    seconds = steps.seconds(found.plan)
    return _found(part, replace(found, result=replace(found.result, step_seconds=seconds)))


def front(part: OpenPart, ratios: tuple[float, ...]) -> Sequence[Found]:
    """Return a sample of the estimated front of an open part within the limit: plans of which none
    is both smaller and faster than another. Arguments as of ``fastest``."""
    return [each for found in part.once(_tables, ratios).front() for each in _found(part, found)]


def _tables(part: OpenPart, ratios: tuple[float, ...]) -> TableSearch:
    cluster, most = part.question.cluster, part.most
    usable = set(several_groups(part.question, most.graph.num_layers))
    choices = [choice for choice in most.choices if choice.num_devices in usable]
    known = dict(zip(part.known.choices, ratios, strict=True))
    if ratios not in part.rows:  # what schedules do not change is the same of all
        steps = CountedSteps(most, cluster, _Estimated(most, cluster.layout, known))
        part.rows[ratios] = StageRows(AdditivePredictor(most), steps, part.size)
    rows = part.rows[ratios]
    return TableSearch(most, part.question, rows.steps, choices, rows)


def _found(part: OpenPart, found: Proposal | None) -> Sequence[Found]:
    """Return the plan, which begins once its first stage is fed."""
    if found is None:
        return []
    first, graph = found.plan.stages[0], part.known.graph_at(part.size)
    fed = fed_seconds(graph, part.question.cluster, first.choice)[first.stop]
    result = replace(found.result, step_seconds=found.seconds + float(fed))
    return [Found(part, expected(part, result, found.plan))]


class _Estimated(TimePredictor):
    """A predictor of estimated seconds: compiled stages, and layers like them, as compiled; the
    others as expected times a ratio. Split backward passes not compiled have a fixed part for
    weights."""

    def __init__(self, profile: Profile, layout: Layout, ratios: Mapping[StageChoice, float]):
        super().__init__(profile, layout)
        self._ratios = ratios

    @memo
    def table(self, choice: StageChoice, microbatch_size: int) -> StageTable:
        """Return the estimated seconds of every stage, at the one micro-batch size of a part."""
        return self._estimate(choice, super().table(choice, microbatch_size))

    def _estimate(self, choice: StageChoice, table: StageTable) -> StageTable:
        forward, backward, update = (
            self._ratios[choice] * each for each in (table.forward, table.backward, table.update)
        )
        weights = backward * _WEIGHTS_FRACTION
        weights[0] = backward[0]  # the first layers have no gradients of inputs
        rows = np.stack([forward, backward, update, backward - weights, weights])
        for first, stop, times in self._compiled(choice):
            seconds = np.array([times.of(each.name) for each in fields(StageTable)])
            if seconds[3:].any() or not self.profile.splits_backward:
                rows[:, first, stop] = seconds
        return StageTable(*rows)

    def _compiled(self, choice: StageChoice) -> Iterator[tuple[int, int, StageTimes]]:
        """Yield the compiled stages with a choice, and every range of layers that is like one of
        them, with its times."""
        keys = [layer.key for layer in self.profile.graph.layers]
        for config, cost in self.profile.verified.items():
            times = self.model.stage_times(cost)
            if config.choice != choice or times is None:
                continue
            layers = keys[config.first : config.stop]
            for first in range(len(keys) - len(layers) + 1):
                stop = first + len(layers)
                if keys[first:stop] == layers and (first == 0) == (config.first == 0):
                    yield first, stop, times
