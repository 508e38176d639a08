"""The explanation of a plan: who needs its memory, and which single change saves most. The plan's
own stages are compiled, so nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.documents import fields_of, write
from capture.errors import ProfileError
from capture.measured.profile import StageConfig
from capture.plan.choices import Remat
from capture.plan.prediction import Verified
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.stages import Plan
from capture.processor_time import processor_seconds
from capture.report.documents import ExplainReport, PlanNeeds
from capture.step.attribution import Attribution, attribute, group
from profiling_runs.measurements import Measurements
from profiling_runs.verify import verify

#: Groups of buffers of a stage in the document.
NUM_GROUPS = 50


@dataclass(frozen=True)
class PlanChange:
    """A plan that differs from another by one decision, compiled.

    Attributes:
        change: What is decided.
        plan: With it.
        peak_bytes: Need of the device that needs most, compiled.
        saves_bytes: Less than the unchanged plan.
    """

    change: str
    plan: Plan
    peak_bytes: int
    saves_bytes: int

    def to_json(self) -> dict[str, Any]:
        return fields_of(self, "change", "peak_bytes", "saves_bytes")


def explained(
    plan: Plan,
    peaks: tuple[int, ...],
    host_peak_bytes: int | None,
    source: Mapping[str, object],
    stages: Sequence[Attribution],
) -> ExplainReport:
    """Return the explanation of a plan before any change of it is tried.

    Args:
        plan: The explained plan.
        peaks: Compiled peak bytes of every device.
        host_peak_bytes: Compiled need of the host; None if the plan keeps nothing there.
        source: Backend, target, versions.
        stages: Per stage, its peak taken apart.
    """
    rows = [
        {
            "stage_id": s,
            "layers": [stage.first, stage.stop - 1],
            "devices": list(stage.devices),
            "peak_bytes": found.peak.peak_bytes,
            "instant": found.peak.instant,
            "parts_bytes": found.peak.parts,
            "layers_bytes": {str(layer): parts for layer, parts in found.layers.items()},
            "attributed_fraction": found.attributed_fraction,
            "buffers": write(group(found.buffers)[:NUM_GROUPS]),
        }
        for s, (stage, found) in enumerate(zip(plan.stages, stages, strict=True))
    ]
    needs = PlanNeeds.of(plan.with_(verification=Verified(peaks)))
    return ExplainReport(
        kind="stages",
        needs=replace(needs, host_peak_bytes=host_peak_bytes),
        peak_bytes_per_device=peaks,
        stages=rows,
        source=source,
        found=None if plan.why is None else plan.why.found or None,
    )


def explain(
    plan: Plan,
    measurements: Measurements,
    *,
    seconds: float | None = None,
    told: Callable[[ExplainReport], None] = lambda report: None,
    trying: Callable[[str, int], None] = lambda change, num_missing: None,
) -> ExplainReport:
    """Take the compiled peaks of a plan apart, and try every single change of it.

    Changes whose stages the store has come first, then those that need few compiles.

    Args:
        plan: What is explained.
        measurements: Of its workload, open for its target.
        seconds: No further change is compiled once this process and its workers have computed for
            so long; those of the store are always said. None for no limit.
        told: Is given the explanation without changes, as soon as it is known.
        trying: Is told every change before it is compiled, with the number of stages that are new.

    Raises:
        PlanError, ProfileError: as ``verify``.
    """
    start, verified = processor_seconds(), verify(plan, measurements)
    peaks = verified.peak_bytes_per_device
    buffers = measurements.buffers(
        [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages],
        plan.schedule_table.splits_backward,
    )
    graph = measurements.backend.traced(plan.microbatch_size).graph
    ranges = [(stage.first, stage.stop) for stage in plan.stages]
    stages = attribute(verified.program, verified.stages, ranges, graph, buffers)
    source, on_host = measurements.backend.provenance, verified.host_peak_bytes
    report = explained(plan, peaks, on_host, source, stages)
    told(report)
    found, untried = list[PlanChange](), list[str]()
    wanted = [
        (_num_missing(changed, measurements), name, changed) for name, changed in _changes(plan)
    ]
    for num_missing, name, changed in sorted(wanted, key=lambda item: item[0]):
        is_late = seconds is not None and processor_seconds() - start >= seconds
        if num_missing and is_late:
            untried.append(name)
            continue
        if num_missing:
            trying(name, num_missing)
        try:
            other = max(verify(changed, measurements).peak_bytes_per_device)
        except ProfileError:  # a stage of the changed plan does not compile
            continue
        found.append(PlanChange(name, changed, other, max(peaks) - other))
    found.sort(key=lambda change: -change.saves_bytes)
    best = found[0] if found and found[0].saves_bytes > 0 else None
    return replace(report, changes=tuple(found), untried=tuple(untried), best_change=best)


def _num_missing(plan: Plan, measurements: Measurements) -> int:
    """Count the stages of a plan that were never compiled."""
    configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
    return len(measurements.missing(configs, plan.schedule_table.splits_backward))


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield plans that differ from the given one by one decision, each behind its name."""
    for schedule in PLAIN_SCHEDULES:
        if schedule != plan.schedule and SCHEDULES[plan.schedule].stages_per_group == 1:
            yield f"schedule {schedule}", plan.with_(schedule=schedule)
    choices = [stage.choice for stage in plan.stages]

    def changed(**fields: Any) -> Plan:
        found = (replace(choice, **fields) for choice in choices)
        if "shard_params" in fields:  # of replicas alone
            found = (replace(choice, shard_params=choice.data_parallel > 1) for choice in found)
        if "sequence_parallel" in fields:  # of tensor parallelism alone
            found = (replace(c, sequence_parallel=c.tensor_parallel > 1) for c in found)
        return plan.with_(
            stages=tuple(
                replace(stage, choice=choice)
                for stage, choice in zip(plan.stages, found, strict=True)
            )
        )

    policies: tuple[Remat, ...] = ("cheap", "dots", "full")
    for remat in policies:
        if any(choice.remat != remat for choice in choices):
            yield f"remat {remat}", changed(remat=remat)
    if any(choice.data_parallel > 1 and not choice.shard_optimizer for choice in choices):
        yield "shard the optimizer", changed(shard_optimizer=True)
    if any(choice.data_parallel > 1 and not choice.shard_params for choice in choices):
        yield "shard the parameters", changed(shard_optimizer=True, shard_params=True)
    if any(c.tensor_parallel > 1 and not c.sequence_parallel for c in choices):
        yield "split the activations along the sequence", changed(sequence_parallel=True)
    doubled = 2 * plan.num_microbatches
    fits = plan.global_batch_size % doubled == 0
    if fits and all(
        (plan.global_batch_size // doubled) % choice.data_parallel == 0 for choice in choices
    ):
        yield (
            f"{doubled} micro-batches of half the size",
            plan.with_(num_microbatches=doubled, model_hash=""),
        )
