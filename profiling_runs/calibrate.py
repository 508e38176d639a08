"""The calibration of predictions: random plans whose stages a profile does not hold are measured,
and compared with what it predicts; a few of these stages also at micro-batch sizes that are not
profiled, to see how far the line through the profiled sizes is off there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from capture.errors import PlanError, is_bug
from capture.measured.profile import Calibration, Profile, StageConfig, StageError
from capture.measured.size_errors import SizeError, octaves_away
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice, by_degree, with_mixtures
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay
from profiling_runs.measurements import Measurements, unmeasured
from profiling_runs.question import ProfileQuestion

CALIBRATION_SEED = 20_240_000
#: Different stages per held-out size.
MOST_STAGES = 6
#: Where stages may mix ``full`` with ``cheap``, plans are drawn with fewer layers of ``full`` than
#: this: most stages are short.
MOST_MIXED = 3


def calibration_of(question: ProfileQuestion, measurements: Measurements) -> list[Plan]:
    """Return random plans whose stages calibrate the interval of predictions; none if no plan fills
    the cluster, which the search then reports.

    Each plan is drawn as ``evaluate`` draws its own, with another seed; both plain schedules, and
    one that splits backward passes where these are asked for.
    """
    cluster, result = question.cluster, unmeasured(question, measurements)
    try:
        every = random_plans(
            cluster,
            result.graph.num_layers,
            by_degree(with_mixtures(question.stage_choices, MOST_MIXED)),
            CALIBRATION_SEED,
            question.space,
        )
        draws = [*islice(every, question.calibration_plans)]
    except PlanError:
        return []
    return [
        result.plan(
            cluster,
            drawn,
            global_batch_size=8 * question.microbatch_size,
            num_microbatches=8,
            schedule=name,
        )
        for drawn in draws
        for name in _schedules(question.splits_backward)
    ]


def _schedules(splits_backward: bool) -> tuple[str, ...]:
    return (*PLAIN_SCHEDULES, "zb-h1") if splits_backward else PLAIN_SCHEDULES


def calibrate(result: Profile, measurements: Measurements, plans: Sequence[Plan]) -> Calibration:
    """Compare predicted with replayed peaks, for the stages of plans that the profile does not hold
    and that could be measured.

    The truth is the replay of the plan's step, never the closed form that predicts it. Stages that
    could not be measured are there as predicted, for what they hand over.
    """
    num_schedules = len(_schedules(result.splits_backward))
    known = {measurements.key(config) for config in result.measurements}
    predictor, errors = AdditivePredictor(result), dict[Any, StageError]()
    for plan in plans:
        configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
        fresh = [
            measurements.key(config) not in known and config in measurements.costs
            for config in configs
        ]
        if not any(fresh):
            continue
        costs = [
            measurements.costs.get(c)
            or predictor.stage_cost(c.first, c.stop, c.choice, c.microbatch_size)
            for c in configs
        ]
        program = build_step(
            plan_interfaces(plan, result.graph, result.param_bytes, costs), plan.schedule_table
        )
        truth = replay(program).peak_bytes_per_device
        predicted = predictor.predict(plan)
        for s, (stage, config) in enumerate(zip(plan.stages, configs, strict=True)):
            if fresh[s]:
                error = truth[stage.devices[0]] / predicted.stages[s].peak_bytes - 1
                errors[plan.schedule, plan.num_stages - s, config] = StageError(config, error)
    return Calibration(tuple(errors.values()), CALIBRATION_SEED, len(plans) // num_schedules)


def held_out(
    question: ProfileQuestion, measurements: Measurements
) -> dict[StageConfig, tuple[Plan, int]]:
    """Return stages to measure at micro-batch sizes that are not profiled. Sizes at which the model
    is cut into another number of layers are left out: a model may want whole groups of examples."""
    sizes = [
        size
        for size in held_out_sizes(question.microbatch_size, question.stage_choices)
        if _is_same_model(measurements, question, size)
    ]
    return held_out_stages(calibration_of(question, measurements), sizes) if sizes else {}


def _is_same_model(measurements: Measurements, question: ProfileQuestion, size: int) -> bool:
    traced, own = measurements.backend.traced, question.microbatch_size
    try:
        return traced(size).graph.num_layers == traced(own).graph.num_layers
    except Exception as error:  # the model's own
        if is_bug(error):
            raise
        return False


def held_out_sizes(microbatch_size: int, choices: Iterable[StageChoice]) -> tuple[int, ...]:
    """Return the held-out micro-batch sizes: twice the largest profiled size, and a quarter of it
    where every choice can split that.

    Example:
        >>> one, two = StageChoice(1, 1), StageChoice(2, 1)
        >>> held_out_sizes(16, [one, two]), held_out_sizes(2, [one])
        ((4, 32), (4,))
    """
    quarter, whole = divmod(microbatch_size, 4)
    splits = (
        quarter >= 1
        and not whole
        and all(quarter % choice.data_parallel == 0 for choice in choices)
    )
    return (quarter, 2 * microbatch_size) if splits else (2 * microbatch_size,)


def held_out_stages(
    plans: Sequence[Plan], sizes: Sequence[int]
) -> dict[StageConfig, tuple[Plan, int]]:
    """Choose stages of calibration plans to measure at the held-out sizes: those of fewest layers,
    one of every choice before a second one.

    Returns:
        Per stage config, at a held-out size: a plan at that size, and which of its stages it is.
    """
    first_of: dict[StageConfig, tuple[Plan, int]] = {}
    for plan in plans:
        for s, stage in enumerate(plan.stages):
            first_of.setdefault(StageConfig.of(stage, plan.microbatch_size), (plan, s))
    num_of = dict[StageChoice, int]()
    ranked = []
    for config in sorted(first_of, key=lambda config: (config.num_layers, config)):
        num_of[config.choice] = num_of.get(config.choice, 0) + 1
        ranked.append((num_of[config.choice], config.num_layers, config))
    found = {}
    for *_, config in sorted(ranked)[:MOST_STAGES]:
        plan, s = first_of[config]
        for size in sizes:
            other = plan.with_(global_batch_size=size * plan.num_microbatches, model_hash="")
            found[replace(config, microbatch_size=size)] = other, s
    return found


def size_errors(
    result: Profile, stages: Mapping[StageConfig, tuple[Plan, int]], measurements: Measurements
) -> tuple[SizeError, ...]:
    """Return the errors of predictions at held-out sizes, of stages that could be measured.

    The truth is the replay of the plan with the stage as it was compiled, among stages as they are
    predicted.

    Args:
        result: The profile.
        stages: What ``held_out_stages`` chose.
        measurements: They hold them.
    """
    predictor, found = AdditivePredictor(result), []
    for config, (plan, s) in stages.items():
        if config in measurements.costs:
            size = config.microbatch_size
            costs = [
                predictor.stage_cost(stage.first, stage.stop, stage.choice, size)
                for stage in plan.stages
            ]
            costs[s] = measurements.costs[config]
            peaks = replayed_peaks(plan, result, costs, measurements)
            predicted = predictor.predict(plan).stages[s].peak_bytes
            octaves = octaves_away(size, result.microbatch_sizes)
            found.append(SizeError(peaks[plan.stages[s].devices[0]] / predicted - 1, octaves))
    return tuple(found)


def replayed_peaks(
    plan: Plan, result: Profile, costs: Sequence[StageCost], measurements: Measurements
) -> tuple[int, ...]:
    """Return the peak bytes of every device, replayed over compiled stages of a plan."""
    sharding = measurements.backend.sharding(plan.microbatch_size)
    graph = sharding.graph(stage.choice for stage in plan.stages)
    stages = plan_interfaces(plan, graph, result.param_bytes, costs)
    return replay(build_step(stages, plan.schedule_table)).peak_bytes_per_device
