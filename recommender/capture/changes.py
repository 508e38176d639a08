"""The cheapest single change under which a plan fits, where none does: found by planning again, not
by guessing.

Changes are tried in the order of what they cost a user: another schedule, more and smaller
micro-batches, a split optimizer state, rematerialisation (recomputing takes time), then more nodes.
One is passed over if not even the state fits (``recommender.capture.least_state``), or what is
measured already says that it cannot save enough; of the others, those that need new measurements
make them through the store, and one that fits by an extrapolation alone is compiled before it is
named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture.documents import fields_of
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.choices import REMAT_POLICIES, Remat
from capture.quantities import format_bytes
from recommender.capture.knowledge import Knowledge
from recommender.capture.minmax import minmax
from recommender.capture.posed import search_problem
from recommender.question import PlanQuestion

#: Changes of what stages are measured with, by field of a ``ProfileQuestion``.
Asks = Mapping[str, Any]


@dataclass(frozen=True)
class Measuring:
    """The means to measure a changed question.

    Attributes:
        remat, shard_optimizer: What the measured stages recompute, and whether replicas split
            optimizer state.
        profile: ``profile(remat=..., shard_optimizer=..., microbatch_size=...)`` measures what is
            missing.
        least_state: ``least_state(cluster, remat=..., ...)`` is the least that plans of the changed
            question need for parameters, gradients and optimizer state; None where that is not
            known.
    """

    remat: Sequence[Remat]
    shard_optimizer: bool
    profile: Callable[..., Profile]
    least_state: Callable[..., int | None]


@dataclass(frozen=True)
class Change:
    """A question that differs from another by one change.

    Attributes:
        text: What a user would do.
        question: Changed.
        asks: What it takes of a profile that is not there; empty if the profile that is there
            serves.
    """

    text: str
    question: PlanQuestion
    asks: Asks = field(default_factory=dict)


@dataclass(frozen=True)
class FittingChange:
    """A change under which some plan fits.

    Attributes:
        change: What a user would do.
        peak_bytes: Need of the plan; None if nothing was measured.
        extrapolated: Whether that is an extrapolation; None if nothing was measured.
        least_state_bytes: What every plan needs for its state, if nothing was measured.
    """

    change: str
    peak_bytes: int | None
    extrapolated: bool | None = None
    least_state_bytes: int | None = None

    @property
    def summary(self) -> str:
        if self.least_state_bytes is not None:
            return (
                f"{self.change}: may fit, with at least {format_bytes(self.least_state_bytes)} per "
                "device of parameters, gradients and optimizer state"
            )
        sure = "fits by extrapolation" if self.extrapolated else "fits"
        return f"{self.change}: peak {format_bytes(self.peak_bytes or 0)} per device {sure}"

    def to_json(self) -> dict[str, Any]:
        about = "extrapolated" if self.least_state_bytes is None else "least_state_bytes"
        return fields_of(self, "change", "peak_bytes", about, "summary")


def cheapest_change(
    question: PlanQuestion,
    num_layers: int,
    knowledge: Knowledge | None,
    measuring: Measuring | None,
) -> FittingChange | None:
    """Find the first change under which some plan fits, with its peak; None if none does.

    Args:
        question: Under which nothing fits, with the most micro-batches that were asked for.
        num_layers: The model's.
        knowledge: What is known of the model; None if nothing was measured, because not even the
            state fits. Then nothing is measured for a change either, and the first under which the
            state fits is named, with that.
        measuring: None leaves out changes that need it.
    """
    limit = question.limit_bytes
    assert limit is not None, "without a limit every plan fits"
    asked = PlanQuestion(
        question.cluster,
        question.global_batch_size,
        question.num_microbatches,
        question.schedule,
        limit,
        space=question.space,
        remat=question.remat,
    )
    profile = None if knowledge is None else knowledge.profile
    for change in _changes(asked, num_layers, profile, measuring):
        cluster = change.question.cluster
        least = None if measuring is None else measuring.least_state(cluster, **change.asks)
        if least is not None and least > limit:
            continue
        if knowledge is None:
            if least is None:
                continue
            return FittingChange(change.text, None, least_state_bytes=least)
        # A stage on several of the added nodes may take more devices than this process was prepared
        # for.
        can_compile = cluster == asked.cluster or not asked.space.whole_nodes
        known = replace(knowledge, compiled=knowledge.compiled if can_compile else None)
        if change.asks:
            assert measuring is not None, "such changes are left out without it"
            if (
                "microbatch_size" not in change.asks
                and change.question.is_plain
                and _least_peak(knowledge.profile, change) > limit
            ):
                continue
            known = replace(known, profile=measuring.profile(**change.asks))
        result = known.answer(change.question, any_that_fits=True)
        if result.status == "ok" and result.plan is not None:
            return FittingChange(change.text, result.peak_bytes, result.extrapolated)
    return None


def _least_peak(profile: Profile, change: Change) -> int:
    """Return the least peak of any plan if the change saved all that it could of what is measured
    without it.

    A split optimizer state is a part of what each replica holds, and its update needs nothing more;
    of what recomputing saves, and of what programs need meanwhile, nothing is left.
    """

    def at_best(config: StageConfig, cost: StageCost) -> StageCost:
        if "shard_optimizer" in change.asks:
            return replace(
                cost,
                optimizer_bytes=cost.optimizer_bytes // config.choice.data_parallel,
                update_bytes=0,
            )
        return replace(cost.keeping(0), forward_bytes=0, backward_bytes=0)

    costs = {config: at_best(config, cost) for config, cost in profile.measurements.items()}
    problem = search_problem(
        replace(profile, measurements=costs, verified={}), change.question, least=True
    )
    return minmax(problem, tie_break="none").peak_bytes


def _changes(
    question: PlanQuestion, num_layers: int, profile: Profile | None, measuring: Measuring | None
) -> Iterator[Change]:
    cluster, batch, m = question.cluster, question.global_batch_size, question.num_microbatches
    if question.schedule != "1f1b":
        yield Change("--schedule 1f1b", replace(question, schedule="1f1b"))
    size = batch // (2 * m)
    if batch % (2 * m) == 0:
        finer = Change(f"--microbatches {2 * m}", replace(question, num_microbatches=2 * m))
        if profile is not None and (size in profile.microbatch_sizes or measuring is None):
            yield finer
        elif measuring is not None:
            yield replace(finer, asks={"microbatch_size": size})
    if measuring is not None:
        if not measuring.shard_optimizer:
            yield Change("--shard-optimizer", question, {"shard_optimizer": True})
        # What has no place among them stands right before "full".
        named = [one if one in REMAT_POLICIES else "dots" for one in measuring.remat]
        places = map(REMAT_POLICIES.index, named)
        for remat in REMAT_POLICIES[max(places, default=0) + 1 :]:
            freed = replace(question, remat=None)
            yield Change(f"--remat {remat}", freed, {"remat": (remat,)})
    for factor in (2, 4, 8):
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if larger.num_devices <= num_layers * max(cluster.nodes):
            yield Change(f"--cluster {larger}", replace(question, cluster=larger))
