"""How long a step of a plan takes: predicted stage times on the simulator, with the links of the
target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.model.graph import LayerGraph
from capture.plan.prediction import StepTime
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.step_work import Casts, StepWork
from capture.predictor.additive import AdditivePredictor
from capture.predictor.times import TimePredictor
from capture.quantities import format_rate, format_seconds
from capture.step.pipeline import build_step, plan_timeline
from capture.step.timeline import LinkTimes, StepTimeline
from capture.step.times import TableTimes


def predicted_timeline(plan: Plan, profile: Profile) -> StepTimeline:
    """Simulate one step of a plan.

    Args:
        plan: A plan of the profile's model and target.
        profile: Measurements for an accelerator: a CPU's say nothing of time.

    Returns:
        The timeline: seconds of the step, bubbles per stage, memory over time. All of it is
            simulated.

    Raises:
        ProfileError: ``profile-no-times``, and the codes of the predictors.
    """
    times = TimePredictor(profile, plan.cluster.layout)
    return simulated_timeline(plan, AdditivePredictor(profile), times)


def simulated_timeline(
    plan: Plan, predictor: AdditivePredictor, times: TimePredictor
) -> StepTimeline:
    """Simulate one step of a plan with given predictors, which can serve several plans of one
    profile.

    Args:
        plan: A plan of the predictors' model and target.
        predictor: Predictor of what the plan's stages hold and hand over.
        times: Predictor of how long the plan's stages take.

    Raises:
        ProfileError: The codes of the predictors.
    """
    step = build_step(predictor.interfaces(plan), plan.schedule_table)
    return plan_timeline(step, plan.cluster, times.stage_times(plan), times.model.rates)


class CountedSteps:
    """An estimator of step seconds that compares plans of all schedules: predicted passes by the
    schedule's table, what stages send to each other, and the updates at the end.

    What is exchanged once per step (gradients of shared parameters, norms) and feeds of the batch
    are left to the simulation.

    Args:
        profile: Measurements for an accelerator.
        cluster: Cluster of the plans.
        times: Predictor of the stages' seconds; None for that of the profile.

    Raises:
        ProfileError: ``profile-no-times``.
    """

    def __init__(self, profile: Profile, cluster: Cluster, times: TimePredictor | None = None):
        self._profile = profile
        self.times = times or TimePredictor(profile, cluster.layout)
        self.links = LinkTimes(cluster, self.times.model.rates)
        self._tables: dict[tuple[str, int, int], TableTimes] = {}

    def seconds(self, plan: Plan) -> float:
        """Estimate the seconds of one step of a plan.

        Raises:
            ProfileError: the codes of ``TimePredictor.table``.
        """
        key = (plan.schedule, plan.num_stages, plan.num_microbatches)
        if key not in self._tables:
            self._tables[key] = TableTimes(plan.schedule_table)
        sends = send_seconds(plan.stages, self.links, self._profile.graph_at(plan.microbatch_size))
        return self._tables[key].seconds(self.times.stage_times(plan), sends)


def send_seconds(stages: Sequence[Stage], links: LinkTimes, graph: LayerGraph) -> list[float]:
    """Return, per stage but the last, the seconds that it takes to send its values to the next
    stage; 0 where both share their devices.

    Values go one after the other, each as large as on the side that has more of it per device.

    Args:
        stages: The stages in pipeline order.
        links: Between devices.
        graph: The layer graph at the plan's micro-batch size.
    """
    sends = []
    for stage, other in pairwise(stages):
        splits = (stage.choice.value_split, other.choice.value_split)
        crossing = [
            max(graph.value_bytes(v, split) for split in splits) for v in graph.crossing(stage.stop)
        ]
        apart = stage.devices != other.devices
        sends.append(
            sum(links.between(stage.devices, other.devices, nbytes) for nbytes in crossing)
            if apart
            else 0.0
        )
    return sends


def has_times(profile: Profile) -> bool:
    """Tell whether times can be predicted: the profile's target has rates, and its windows counted
    work."""
    return Target.load(profile.target).rates is not None and any(
        cost.forward_work for cost in profile.measurements.values()
    )


def time_summary(
    timeline: StepTimeline, plan: Plan, graph: LayerGraph, casts: Casts = None
) -> StepTime:
    """Return the step time that documents and plan files hold, from a simulated step.

    Args:
        timeline: The plan's simulated step.
        plan: What was simulated.
        graph: The model's layers at the plan's micro-batch size.
        casts: Casts of its parameters, where they are known.
    """
    seconds, rates = float(timeline.step_seconds), Target.load(plan.cluster.target).rates
    assert rates is not None, "its step was simulated with them"
    num_devices = plan.cluster.num_devices
    work = StepWork.of([(graph, casts, plan.global_batch_size)], num_devices, rates)
    passes: list[dict[str, float]] = [{} for _ in plan.stages]
    for name, program in timeline.step.programs.items():
        passes[program.call.stage][program.kind] = float(timeline.program_seconds[name])
    return StepTime(
        seconds,
        plan.global_batch_size / seconds,
        work.flops / seconds / num_devices,
        tuple(map(float, timeline.bubble_fraction)),
        tuple(passes),
        tuple(send_seconds(plan.stages, LinkTimes(plan.cluster, rates), graph)),
        tokens_per_second=work.tokens_per_second(seconds),
        model_flops_utilization=work.utilization(seconds),
    )


def describe_time(time: StepTime) -> str:
    """Describe a simulated step in one line for people."""
    bubbles = " ".join(f"{fraction:.0%}" for fraction in time.bubble_fraction_per_stage)
    exposed = " ".join(
        f"{seconds / time.step_seconds:.0%}" for seconds in time.exposed_seconds_per_stage
    )
    tokens, mfu = "", ""
    if time.tokens_per_second is not None:
        tokens = f"{format_rate(time.tokens_per_second)} tokens/s, "
    if time.model_flops_utilization is not None:
        mfu = f", MFU {time.model_flops_utilization:.1%}"
    return (
        f"step {format_seconds(time.step_seconds)} (simulated), "
        f"{format_rate(time.examples_per_second)} examples/s, {tokens}"
        f"{time.model_flops_per_second_per_device / 1e12:.1f} TFLOPS per device{mfu}; pipeline "
        f"bubble per stage: {bubbles}"
        + (f"; communication that nothing hides: {exposed}" * bool(exposed))
    )
