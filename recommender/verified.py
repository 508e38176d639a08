"""Rank by what the compiler says: compile the best plan, look its stages up from then on, and search again.

A search over predictions may prefer a plan whose stages are predicted a little too low. Every round compiles the stages of the plan that is
best by everything known so far. Once the best plan is one whose stages are all compiled, no other plan has a lower predicted peak, and the
shown number is the compiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from capture.headroom import Headroom
from capture.plan import Plan
from capture.predictor.times import TimePredictor
from capture.profile import Profile
from capture.target import Target
from recommender.recommendation import Recommendation


def recommend_verified(
    profile: Profile,
    question: Callable[[Profile], Recommendation],
    compiled: Callable[[Plan, Profile], tuple[Mapping[str, Any], Profile]],
    max_plans: int,
) -> Recommendation:
    """The plan that is best by the question's objective among those whose stages are compiled.

    Args:
        profile: Of the model.
        question: ``recommend`` with everything but the profile.
        compiled: ``compiled(plan, profile)`` compiles the plan's stages: the verification (``Verification.to_json``) and the profile that
            knows them.
        max_plans: Most plans to compile, at least 1.

    Returns:
        Its ``plan.verification`` holds the compiler's peaks, which ``headroom`` and ``peak_bytes`` are of. ``why["verified"]`` says how
        many plans were compiled, and whether another plan is still predicted to need less.
    """
    best: Recommendation | None = None
    checked: set[Plan] = set()
    result = question(profile)
    while result.plan is not None and result.plan not in checked and len(checked) < max_plans:
        plan = result.plan
        verification, profile = compiled(plan, profile)
        checked.add(plan)
        found = _of_compiler(result, verification, profile)
        if best is None or _rank(found) < _rank(best):
            best = found
        result = question(profile)
    if best is None or best.plan is None:
        return result
    settled = result.plan is None or result.plan in checked
    note = "no other plan is predicted to be better" if settled else "another plan, not compiled yet, is predicted to be better"
    why = {**best.why, "verified": {"num_plans": len(checked), "settled": settled, "summary": f"{len(checked)} plans compiled; {note}."}}
    return replace(best, why=why, plan=best.plan.with_(why=why))


def _rank(result: Recommendation) -> tuple[bool, float, int]:
    """What fits first; then the faster where the search was for speed; then the smaller."""
    fits = result.status == "ok"
    return not fits, (result.search.step_seconds or 0.0) if fits else 0.0, result.peak_bytes


def _of_compiler(result: Recommendation, verification: Mapping[str, Any], profile: Profile) -> Recommendation:
    """The recommendation with the compiler's peaks and work in the place of predicted ones, as far as plans are ranked."""
    assert result.plan is not None, "only plans are verified"
    peaks = verification["peak_bytes_per_device"]
    memory = Target.load(result.plan.cluster.target).memory
    limit = result.headroom.limit_bytes if result.headroom else None
    headroom = Headroom.of(peaks, [(peak, peak) for peak in peaks], 1.0, limit, memory)
    if headroom is not None and result.headroom is not None:
        headroom = replace(headroom, source=result.headroom.source)
    status = "infeasible" if headroom is not None and headroom.verdict != "fits" else "ok"
    search = result.search
    if search.step_seconds is not None:
        search = replace(search, step_seconds=_step_seconds(result.plan, profile))
    return replace(result, status=status, plan=result.plan.with_(verification=verification), headroom=headroom, search=search)


def _step_seconds(plan: Plan, profile: Profile) -> float:
    """As the search for speed counts them (``recommender.throughput``), from stages that the profile holds compiled."""
    times = TimePredictor(profile, max(plan.cluster.nodes)).stage_times(plan)
    passes = [stage.microbatch_seconds for stage in times]
    return sum(passes) + (plan.num_microbatches - 1) * max(passes) + max(stage.update_seconds for stage in times)
