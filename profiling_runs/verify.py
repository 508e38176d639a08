"""The exact answer for one plan: compile its own stages for its target and replay the step over the
compiler's reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from capture.errors import ProfileError, said_once
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost, StageCost
from capture.model.graph import LayerGraph, agreed_value_dims
from capture.plan.files import traced_for
from capture.plan.kinds import of_stages
from capture.plan.prediction import StepTime, Verified, error_fractions
from capture.plan.stages import Plan
from capture.plan.step_work import Casts
from capture.predictor.formula import kept_bytes, split_bytes
from capture.predictor.step_time import time_summary
from capture.step.interface import StageInterface, plan_interfaces
from capture.step.ledger import Ledger
from capture.step.pipeline import build_step, plan_timeline
from capture.step.program import Step, replay
from capture.step.timeline import StepTimeline
from capture.step.times import TimeModel, exposed_seconds
from profiling_runs.measurements import Measurements


@dataclass(frozen=True)
class Verification:
    """The memory that a plan needs, by the compiler of its target, with its step and its stages.

    Attributes:
        plan: Verified.
        stages: What its stages hold and hand over.
        program: The instructions of its step.
        ledger: Their replay: peaks per device with their parts.
        provenance: Backend, target, versions, flags.
        num_compiled: Stages that were compiled for this; the store had the others.
        graph: The model's layers at the plan's micro-batch size.
        casts: Casts through which layers read parameters.
        costs: Per stage, what the compiler says.
    """

    plan: Plan
    stages: Sequence[StageInterface]
    program: Step
    ledger: Ledger
    provenance: Mapping[str, Any]
    num_compiled: int
    graph: LayerGraph
    casts: Casts
    costs: Sequence[StageCost]

    def timeline(self) -> StepTimeline | None:
        """Simulate one step from the work of compiled programs; None for a target without rates."""
        model = self._time_model
        if model is None:
            return None
        times = [found for cost in self.costs if (found := model.stage_times(cost)) is not None]
        if len(times) < len(self.costs):
            return None
        return plan_timeline(self.program, self.plan.cluster, times, model.rates)

    @property
    def step_time(self) -> StepTime | None:
        """The simulated step in the form that a plan stores, with what its stages send that nothing
        hides; None for a target without rates."""
        timeline, model, plan = self.timeline(), self._time_model, self.plan
        if timeline is None or model is None:
            return None
        exposed = (
            exposed_seconds(model, cost, plan.num_microbatches, plan.schedule_table.splits_backward)
            for cost in self.costs
        )
        found = time_summary(timeline, plan, self.graph, self.casts)
        return replace(found, exposed_seconds_per_stage=tuple(exposed))

    @cached_property
    def _time_model(self) -> TimeModel | None:
        rates = Target.load(self.plan.cluster.target).rates
        return None if rates is None else TimeModel(rates, self.plan.cluster.layout)

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        return tuple(self.ledger.peak_bytes_per_device)

    @property
    def host_peak_bytes(self) -> int | None:
        """The peak bytes of the host that the step uses most; None where it uses none."""
        names = {place.host.name for place in self.program.places if place.host}
        return max((self.ledger.peak_of(name).peak_bytes for name in names), default=None)

    @property
    def verified(self) -> Verified:
        """The compiled peaks, and the errors of the prediction, in the form that a plan stores."""
        peaks, said = self.peak_bytes_per_device, self.plan.prediction
        guesses = None if said is None else said.peak_bytes_per_device
        errors = error_fractions(guesses, peaks)
        return Verified(peaks, guesses, errors, dict(self.provenance), self.num_compiled)


def verify(plan: Plan, measurements: Measurements) -> Verification:
    """Compile every stage of a plan, or take it from the store, and replay a step.

    Args:
        plan: A plan of the workload that the measurements are of.
        measurements: Open for the plan's target.

    Raises:
        PlanError: ``plan-other-model`` if the workload traces to another program than the plan was
            made for.
        ProfileError: ``verify-stage`` naming the stages that do not compile.
    """
    of_stages(plan)
    check_model(plan, measurements)
    configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
    splits = plan.schedule_table.splits_backward
    missing = measurements.missing(configs, splits)
    measurements.require({"stages of the plan": configs}, splits)
    known = measurements.costs
    failed = [
        f"stage {s}: {measurements.failures[config]}"
        for s, config in enumerate(configs)
        if config not in known or (splits and known[config].split is None)
    ]
    if failed:
        raise ProfileError.of(
            f"stages of the plan do not compile: {said_once(failed)}.", "verify-stage"
        )
    backend = measurements.backend
    sharding = backend.sharding(plan.microbatch_size)
    param_bytes = {
        config.choice.param_split: sharding.param_bytes(config.choice.param_split)
        for config in configs
    }
    costs = [measurements.costs[config] for config in configs]
    graph = sharding.graph(config.choice for config in configs)
    stages = plan_interfaces(plan, graph, param_bytes, costs)
    program = build_step(stages, plan.schedule_table)
    ledger = replay(program)
    casts = backend.traced(plan.microbatch_size).casts
    return Verification(
        plan, stages, program, ledger, backend.provenance, len(missing), graph, casts, costs
    )


def check_model(plan: Plan, measurements: Measurements) -> None:
    """Refuse a workload that is not the plan's.

    Raises:
        PlanError: ``plan-other-model``.
    """
    backend = measurements.backend
    traced_for(plan, backend.workload, lambda: backend.traced(plan.microbatch_size).graph)


def with_verified(profile: Profile, plan: Plan, measurements: Measurements) -> Profile:
    """Return the profile with the compiled stages of a plan added: the predictor looks these up, so
    that a search ranks by what is known.

    What is kept is counted by the graph at the plan's own micro-batch size, which may be another
    than the profile's graph scaled to it.
    """
    configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
    return with_stages(profile, configs, measurements)


def with_stages(
    profile: Profile, configs: Sequence[StageConfig], measurements: Measurements
) -> Profile:
    """Return the profile with compiled stages of one micro-batch size added, which the predictor
    looks up; without any stages, the profile as it is."""
    if not configs:
        return profile
    size = configs[0].microbatch_size
    graph = measurements.backend.sharding(size).graph(config.choice for config in configs)
    costs = {config: measurements.costs[config] for config in configs}
    verified = {
        config: replace(
            cost.keeping(kept_bytes(graph, config.first, config.stop, config.choice, cost)),
            split=_all_deferred(graph, config, cost),
        )
        for config, cost in costs.items()
    }
    return replace(
        profile,
        graph=replace(profile.graph, value_dims=agreed_value_dims([profile.graph, graph])),
        verified={**profile.verified, **verified},
        model_hashes={**profile.model_hashes, size: graph.model_hash},
    )


def _all_deferred(graph: LayerGraph, config: StageConfig, cost: StageCost) -> SplitCost | None:
    """Return a split backward pass whose kept bytes all count as deferred; None for a whole one."""
    if cost.split is None:
        return None
    nbytes, split = split_bytes(graph, config.first, config.stop, config.choice, cost), cost.split
    return SplitCost(
        split.inputs_bytes,
        split.weights_bytes,
        0,
        nbytes,
        inputs_work=split.inputs_work,
        weights_work=split.weights_work,
    )


def check_profile(profile: Profile, measurements: Measurements) -> None:
    """Refuse a workload that is not the profile's: what is compiled of it would be mixed with
    measurements of another model.

    Raises:
        ProfileError: ``profile-other-model``.
    """
    size, known = profile.graph.microbatch_size, profile.graph.model_hash
    found = measurements.backend.traced(size).graph.model_hash
    if known and found != known:
        raise ProfileError.of(
            f"the profile is of model_hash={known} at microbatch_size={size}; the workload has "
            f"{found}. Profile it again.",
            "profile-other-model",
        )


class PlanCompiler:
    """A compiler of plans, so that no answer rests on an extrapolation
    (``recommender.capture.knowledge.Compile``); the workload is loaded with the first plan.

    Args:
        profile: That answers are asked of; the workload must be its own. None of what is made of
            the measurements themselves.
        open_measurements: Opens those of the workload.
        say: Is told, in words, why the first is compiled.
    """

    def __init__(
        self,
        profile: Profile | None,
        open_measurements: Callable[[], Measurements],
        say: Callable[[str], None] = lambda text: None,
    ):
        self._profile, self._open, self._say = profile, open_measurements, say
        self._measurements: Measurements | None = None

    def open(self) -> Measurements:
        """Return the measurements of the workload, opened when first asked for.

        Raises:
            WorkloadError, TargetError: if the workload cannot be loaded.
            ProfileError: ``profile-other-model``.
        """
        if self._measurements is None:
            self._measurements = self._open()
            if self._profile is not None:
                check_profile(self._profile, self._measurements)
        return self._measurements

    def attempt(self, plan: Plan, known: Profile) -> tuple[Verified | None, Profile]:
        """Compile a plan; return what a plan remembers of it, and the profile with its stages. None
        where a stage does not compile: the profile then says why no memory suffices for it
        (``recommender.capture.refine.StageCompiler``)."""
        try:
            return self(plan, known)
        except ProfileError:
            configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
            if self.open().failures.keys().isdisjoint(configs):
                raise
            return None, self.probe(configs, known)[1]

    def probe(self, configs: Sequence[StageConfig], known: Profile) -> tuple[int, Profile]:
        """Compile some stages. Return how many the store did not have, and the profile with them;
        those that do not compile are known from then on to fit no memory."""
        measurements = self.open()
        missing = measurements.missing(configs)
        measurements.require({"stages of the plan": configs})
        compiled = [config for config in configs if config in measurements.costs]
        failures = measurements.failures
        refused = {config: failures[config] for config in configs if config in failures}
        return len(missing), with_stages(known, compiled, measurements).without_stages(refused)

    def begin(self, configs: Sequence[StageConfig]) -> bool:
        """Begin to compile stages in kept workers, these and those begun before, without waiting
        for them. Return whether all are done."""
        is_any = bool(configs) or self._measurements is not None
        return is_any and self.open().begin(configs)

    def __call__(self, plan: Plan, known: Profile) -> tuple[Verified, Profile]:
        size = plan.microbatch_size
        sizes = (size,) if self._profile is None else self._profile.microbatch_sizes
        if size not in sizes and self._measurements is None:
            profiled = " and ".join(map(str, sizes))
            self._say(
                f"micro-batch size {size} was not profiled ({profiled} were): "
                "compiling the stages of the best plans (--no-compile extrapolates)"
            )
        measurements = self.open()
        return verify(plan, measurements).verified, with_verified(known, plan, measurements)
