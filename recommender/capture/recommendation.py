"""The recommended plan of a profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from capture.errors import PlanError
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.plan.stages import Plan
from capture.plan.why import Front, Why
from capture.predictor import AdditivePredictor, Prediction
from capture.predictor.step_time import CountedSteps
from capture.quantities import counted
from capture.registered import REGISTERED
from recommender.answer import Answer, StageAnswer
from recommender.capture.counted import CountedSearch
from recommender.capture.posed import paper_predictor, plan_of, search_problem
from recommender.capture.problem import SearchProblem
from recommender.capture.result import SearchResult
from recommender.capture.search import search
from recommender.capture.searched import searched
from recommender.capture.tables import TableSearch, nothing_fits
from recommender.question import AUTOSTAGE, BOUNDS_FIRST, PlanQuestion


def recommend(profile: Profile | Sequence[Profile], question: PlanQuestion) -> StageAnswer:
    """Find the plan of lowest peak memory on a cluster, or the fastest one that fits.

    Args:
        profile: Measurements of the model; several are put together (``merge_profiles``).
        question: What is asked.

    Returns:
        At a micro-batch size that was not profiled the numbers are an extrapolation, and say so
        (``Answer.extrapolated``); ``recommender.capture.knowledge.Knowledge`` asks until they are
        compiled.

    Raises:
        ProfileError: if the profile lacks what the search needs, ``profile-no-times`` among it;
            ``profile-mixture`` for profiles that do not belong together.
    """
    cluster = question.cluster
    if not isinstance(profile, Profile):
        profile = merge_profiles(profile, cluster.target)
    objective, mode, algorithm = question.search
    if algorithm == AUTOSTAGE:
        return REGISTERED["search of stages"][AUTOSTAGE](profile, question)
    if algorithm == BOUNDS_FIRST:
        raise PlanError.of(
            f"algorithm={BOUNDS_FIRST!r} asks the compiler as it searches, and no profile; leave "
            "out the profile.",
            "plan-algorithm",
        )

    if not question.is_plain:
        return _recommend_table(profile, question, objective)
    with_times = objective != "memory"
    problem = search_problem(profile, question, with_times=with_times)
    result, plan = _searched(problem, profile, question)
    if mode == "default" and depends_on_cuts_behind(profile, problem, question.microbatch_size):
        least = search_problem(profile, question, with_times=with_times, least=True)
        of_least = _searched(least, profile, question)
        result, plan = _between((result, plan), of_least, profile, question.limit_bytes)
    if plan is None:
        return _none(result)
    front = None
    if with_times:
        counted = CountedSearch(profile, question, problem)
        proposal = counted.fastest(result, plan)
        if objective == "pareto":
            proposal, front = counted.front(proposal)
        result, plan = proposal.result, proposal.plan
    prediction = predict_plan(profile, plan)
    why = result.why or _why(
        result, prediction, question, profile, len({*chain(*problem.choices.values())})
    )
    why = replace(why, front=front)
    plan = plan.with_(prediction=prediction, why=why)
    return Answer(result.status, plan, result, why, plan.headroom(question.memory_limit_bytes))


def _searched(
    problem: SearchProblem, profile: Profile, question: PlanQuestion
) -> tuple[SearchResult, Plan | None]:
    """Return the result of the search that a question asks for, and its plan."""
    *_, algorithm = question.search
    result = search(problem, algorithm)
    return result, plan_of(profile, question, result.stages) if result.stages else None


def _recommend_table(profile: Profile, question: PlanQuestion, objective: str) -> StageAnswer:
    """Return the answer for a schedule whose stages share devices or split backward passes."""
    steps = None if objective == "memory" else CountedSteps(profile, question.cluster)
    search = TableSearch(profile, question, steps)
    found = search.least_peak() if objective == "memory" else search.fastest(question.limit_bytes)
    if found is None:
        return _none(nothing_fits(question, profile.graph.num_layers))
    result, plan = found.result, found.plan
    prediction = plan.prediction
    assert prediction is not None, "every plan of the search is predicted"
    why = result.why or _why(result, prediction, question, profile, len(search.choices))
    if objective == "pareto":
        why = replace(why, front=_front_of_table(search, question, profile))
    plan = plan.with_(why=why)
    return Answer(result.status, plan, result, why, plan.headroom(question.memory_limit_bytes))


def _front_of_table(search: TableSearch, question: PlanQuestion, profile: Profile) -> Front:
    start = time.perf_counter()
    points = tuple(found.point for found in search.front())
    extrapolated = question.microbatch_size not in profile.microbatch_sizes
    return Front(points, False, extrapolated, time.perf_counter() - start)


def _none(result: SearchResult) -> StageAnswer:
    assert result.why is not None, "an infeasible result says why"
    return Answer("infeasible", None, result, result.why)


def depends_on_cuts_behind(profile: Profile, problem: SearchProblem, microbatch_size: int) -> bool:
    predictor = AdditivePredictor(profile)
    return any(
        predictor.depends_on_cuts_behind(choice, microbatch_size)
        for d in problem.used_degrees
        for choice in problem.choices[d]
    )


def _between(
    most: tuple[SearchResult, Plan | None],
    least: tuple[SearchResult, Plan | None],
    profile: Profile,
    memory_limit_bytes: int | None,
) -> tuple[SearchResult, Plan | None]:
    """Return the better of two answers, and what is proven of it.

    What a stage needs depends a little on how the layers behind it are cut
    (``AdditivePredictor.peaks``), which no table over stages can say. ``most`` was searched with
    the worst case of every stage, so its plan needs no more than the search says; ``least`` with
    the best, so that no plan is better than the search says. Where its plan needs just that, it is
    the best one.
    """
    (bound, other), (result, plan) = least, most
    if other is None:
        return result, plan
    predict = AdditivePredictor(profile).predict
    if tuple(predict(other).peak_bytes_per_device) == bound.peak_bytes_per_device:
        return bound, other
    if plan is None or result.step_seconds is not None:
        if result.step_seconds is not None and bound.step_seconds is not None:
            above = max(
                result.bound_fraction,
                result.step_seconds / bound.step_seconds * (1 + bound.bound_fraction) - 1,
            )
            result = replace(result, optimal=result.optimal and above == 0, bound_fraction=above)
        return result, plan
    if bound.status == "infeasible":
        return bound, other
    peaks = [sorted(predict(p).peak_bytes_per_device, reverse=True) for p in (plan, other)]
    if memory_limit_bytes is not None and min(peaks)[0] > memory_limit_bytes:
        return replace(result, optimal=False), plan
    result, plan = (result, plan) if peaks[0] <= peaks[1] else (bound, other)
    optimal = bound.optimal and min(peaks)[0] <= bound.peak_bytes
    return replace(result, status="ok", why=None, optimal=optimal, tie_break_columns=0), plan


def predict_plan(profile: Profile, plan: Plan) -> Prediction:
    """Return the prediction of a plan by the default predictor, which itemises; by the paper's
    where the profile holds executed runs alone."""
    if profile.measurements:
        return AdditivePredictor(profile).predict(plan)
    return paper_predictor(profile).prediction(plan, profile.provenance)


def baseline_plan(profile: Profile, question: PlanQuestion, weigh: str = "flops") -> Plan:
    """Return a baseline: stages of one device (of a node where layers are too few) with equal
    FLOPs, parameters or layers, and their prediction.

    Args:
        profile: Measurements of the model.
        question: Its cluster, batch and schedule.
        weigh: ``"flops"``, ``"params"`` or ``"layers"``.

    Raises:
        PlanError: ``baseline-degree`` if no profiled degree divides the nodes into groups of the
            schedule.
    """
    return REGISTERED["baselines"]["stages"](profile, question, weigh)


def _why(
    result: SearchResult,
    prediction: Prediction,
    question: PlanQuestion,
    profile: Profile,
    num_choices: int,
) -> Why:
    stage_id = max(range(len(result.stages)), key=lambda s: prediction.stages[s].peak_bytes)
    stage, predicted = result.stages[stage_id], prediction.stages[stage_id]
    largest = max(predicted.parts_bytes, key=lambda category: predicted.parts_bytes[category])
    count = counted(len(result.stages), "stage")
    if result.step_seconds is None:
        proof = (
            "no plan is predicted to need less" if result.optimal else "the search is not a proof"
        )
        proof += f" (tie-break: {result.tie_break})"
    else:
        better = "no plan that fits" if question.limit_bytes is not None else "no plan"
        proof = f"{better} is predicted to be faster by the closed form, which leaves transfers out"
        proof += "" if result.optimal else f", or at most {result.bound_fraction:.1%} faster"
        if not result.optimal and not result.bound_fraction:
            proof = "the search is not a proof"
    if question.mode == "default":
        proof += f", {searched([question], profile.choices)}"
    return Why(
        f"{count}; the peak is {predicted.peak_bytes:,} bytes (predicted, not compiled) on stage "
        f"{stage_id} (layers {stage.first} to {stage.stop - 1}), most of it {largest}; {proof}.",
        bottleneck_stage=stage_id,
        bottleneck_category=largest,
        num_choices=num_choices,
    )
