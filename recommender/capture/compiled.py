"""The answer with a plan's compiled peaks in the place of predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from capture.measured.profile import Profile
from capture.plan.headroom import Headroom
from capture.plan.prediction import Verified
from capture.plan.stages import Plan
from capture.plan.why import Why
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import predicted_timeline
from capture.quantities import counted
from capture.step.pipeline import build_step
from capture.step.program import replay
from recommender.answer import StageAnswer
from recommender.question import PlanQuestion


def same_model(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the hash of the model at its micro-batch size, once that is traced."""
    return plan.with_(model_hash=profile.model_hashes.get(plan.microbatch_size, plan.model_hash))


def of_compiler(
    result: StageAnswer,
    verification: Verified,
    profile: Profile,
    question: PlanQuestion | None = None,
) -> StageAnswer:
    """Return the answer with the compiler's peaks in the place of predicted ones, and the seconds
    of the simulated step, as they are shown: plans are ranked by these. A plan that keeps more on
    a host than the question's have does not fit."""
    host = None if question is None else question.host_memory_bytes
    assert result.plan is not None, "only plans are verified"
    peaks = verification.peak_bytes_per_device
    plan = same_model(result.plan, profile).with_(verification=verification)
    headroom = plan.headroom(result.memory_limit_bytes)
    if headroom is not None and result.headroom is not None:
        headroom = replace(headroom, source=result.headroom.source)
    proof = result.proof
    if proof.step_seconds is not None:
        step = predicted_timeline(result.plan, profile)
        proof = replace(proof, step_seconds=float(step.step_seconds))
    status, why = "ok", result.why
    if headroom is not None and headroom.verdict != "fits":
        status, why = "infeasible", _too_large(result.plan, peaks, headroom)
    elif (held := _held(result.plan, profile, host)) is not None:
        status, why = "infeasible", held
    elif result.status != "ok":
        why = Why(f"compiled, the plan needs {max(peaks):,} bytes, less than was predicted.")
    else:
        why = replace(why, summary=_peak(result.plan, peaks))
    plan = plan.with_(why=why)
    return replace(result, status=status, plan=plan, why=why, headroom=headroom, proof=proof)


def _held(plan: Plan, profile: Profile, host_memory_bytes: int | None) -> Why | None:
    """Return why what a plan keeps on a host does not fit there; None if it does."""
    if host_memory_bytes is None or not any(stage.offload for stage in plan.stages):
        return None
    held = most_on_a_host(plan, profile)
    if held <= host_memory_bytes:
        return None
    return Why(
        f"The plan keeps {held:,} bytes on a host, {held - host_memory_bytes:,} above "
        f"host_memory_bytes={host_memory_bytes:,}. Give the memory that it has with --host-memory, "
        "or --offload none. [host-memory]",
        code="host-memory",
    )


def most_on_a_host(plan: Plan, profile: Profile) -> int:
    """Return the most bytes that a step of a plan holds in the memory of a host."""
    step = build_step(AdditivePredictor(profile).interfaces(plan), plan.schedule_table)
    hosts, ledger = {place.host.name for place in step.places if place.host}, replay(step)
    return max((ledger.peak_of(host).peak_bytes for host in hosts), default=0)


def _peak(plan: Plan, peaks: Sequence[int]) -> str:
    stage_id = _largest(plan, peaks)
    stage = plan.stages[stage_id]
    return (
        f"{counted(plan.num_stages, 'stage')}; compiled, the peak is {max(peaks):,} bytes on stage "
        f"{stage_id} (layers {stage.first} to {stage.stop - 1})."
    )


def _largest(plan: Plan, peaks: Sequence[int]) -> int:
    return max(range(plan.num_stages), key=lambda s: peaks[plan.stages[s].devices[0]])


def _too_large(plan: Plan, peaks: Sequence[int], headroom: Headroom) -> Why:
    stage_id = _largest(plan, peaks)
    stage, limit = plan.stages[stage_id], headroom.limit_bytes
    return Why(
        f"Compiled, the plan needs {max(peaks):,} bytes, {max(peaks) - limit:,} above "
        f"memory_limit_bytes={limit:,}: stage_id={stage_id} (layers {stage.first} to "
        f"{stage.stop - 1}). Raise the limit, or use more devices, more micro-batches of a "
        "smaller size, or rematerialisation. [memory-limit]",
        code="memory-limit",
        memory_limit_bytes=limit,
        least_peak_bytes=max(peaks),
        stage_id=stage_id,
    )
