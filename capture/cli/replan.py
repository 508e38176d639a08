"""The plan with which a training goes on when nodes are gone (``capture run --on-loss replan``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from capture.errors import ExecutionError
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.plan.files import PlanFile
from capture.plan.kinds import of_stages
from capture.plan.space import StageSpace
from recommender.capture.recommendation import recommend
from recommender.question import PlanQuestion

REPLAN = "replan"


def replanner(
    paths: Sequence[Path], plan: PlanFile
) -> Callable[[PlanFile, frozenset[int]], PlanFile]:
    """Return a function from a plan and its nodes that are gone to the plan of lowest peak memory
    on the others. Batch, micro-batches and schedule stay; stages are within nodes or on whole ones.

    Nothing is measured: the training waits.

    Args:
        paths: Profiles of the model; they are read now.
        plan: Plan with which the training begins.

    Raises:
        PlanError: ``plan-kind`` for a plan that is not of stages.
        ProfileError: If they are none, or do not belong together.
        ExecutionError: ``run-hosts-replan`` if they are of another model; later if nothing fits.
    """
    of_stages(plan)
    profile = merge_profiles([Profile.load(path) for path in paths], plan.known_cluster.target)
    if profile.workload is not None and profile.workload != plan.workload:
        raise ExecutionError.of(
            f"the profile is of {profile.workload}, and the plan of {plan.workload}; profile that "
            "one.",
            "run-hosts-replan",
        )

    def replan(before: PlanFile, gone: frozenset[int]) -> PlanFile:
        old = of_stages(before)
        question = PlanQuestion(
            old.cluster.without(gone),
            old.global_batch_size,
            old.num_microbatches,
            old.schedule,
            space=StageSpace(whole_nodes=True),
        )
        answer = recommend(profile, question)
        if answer.plan is None or answer.status != "ok":
            raise ExecutionError.of(
                f"the nodes that are left ({question.cluster}) have no plan: {answer.why.summary}.",
                "run-hosts-replan",
            )
        return answer.plan.with_(workload=plan.workload)

    return replan
