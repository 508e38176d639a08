"""The calibration of predictions: random plans whose stages a profile does not hold are measured,
and compared with what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from capture.errors import PlanError, is_bug
from capture.measured.profile import Calibration, Profile, StageConfig, StageError
from capture.plan.choices import by_degree, with_mixtures
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay
from profiling_runs.held_out import held_out_sizes, held_out_stages
from profiling_runs.measurements import Measurements, unmeasured
from profiling_runs.question import ProfileQuestion

CALIBRATION_SEED = 20_240_000
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
        draws = random_plans(
            cluster,
            result.graph.num_layers,
            by_degree(with_mixtures(question.stage_choices, MOST_MIXED)),
            CALIBRATION_SEED,
            question.space,
        )
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
        for drawn in islice(draws, question.calibration_plans)
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
    backend = measurements.backend
    try:
        return (
            backend.traced(size).graph.num_layers
            == backend.traced(question.microbatch_size).graph.num_layers
        )
    except Exception as error:  # the model's own
        if is_bug(error):
            raise
        return False
