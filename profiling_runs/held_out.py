"""Held-out stages: a few, measured at micro-batch sizes that are not profiled, to see how far the
line through the profiled sizes is off there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from capture.measured.profile import Profile, StageConfig
from capture.measured.size_errors import SizeError, octaves_away
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay
from profiling_runs.measurements import Measurements

#: Different stages per size.
MOST_STAGES = 6


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
            first_of.setdefault(
                StageConfig.of(stage, plan.microbatch_size),
                (plan, s),
            )
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
