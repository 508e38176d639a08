"""Who needs the memory of a plan, and which single change saves most. The plan's own stages are compiled, so nothing is guessed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from capture import environment
from capture.cli import options as shared
from capture.cli.output import emit, progress, table
from capture.cli.run import workload_of
from capture.errors import PlanError
from capture.plan import Plan, Remat
from capture.quantities import format_bytes
from capture.schedule import SCHEDULES

NAME = "explain"
HELP = "say who needs the memory, and what one change saves most"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    shared.add_plan_workload(parser)
    shared.add_store(parser)


def main(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    spec = workload_of(plan, options.workload)
    environment.prepare(num_devices=plan.cluster.num_devices)
    from profiling_runs.profile import open_measurements

    measurements = open_measurements(
        spec,
        num_devices=plan.cluster.num_devices,
        num_layers=plan.num_layers if plan.auto_layers else None,
        tensor_parallel_rule=plan.tensor_parallel_rule,
        store=shared.open_store(options),
        num_workers=options.workers,
        progress=progress(options),
    )
    _check_model(plan, measurements)
    document = explain(plan, measurements)
    emit(options, document, as_text(document))
    return 0


def _check_model(plan: Plan, measurements: Any) -> None:
    graph = measurements.backend.traced(plan.microbatch_size).graph
    if graph.num_layers != plan.num_layers or (plan.model_hash and plan.model_hash != graph.model_hash):
        raise PlanError.of(
            f"the plan was made for model_hash={plan.model_hash} with num_layers={plan.num_layers}; the workload has "
            f"{graph.model_hash} with {graph.num_layers}. Plan it again with capture plan.",
            "plan-other-model",
        )


def explain(plan: Plan, measurements: Any) -> dict[str, Any]:
    """The document of ``capture explain --json``: peaks with their parts, and every single change with what it saves."""
    ledger = _replayed(plan, measurements)
    assert ledger is not None, "the plan's own stages compile"
    peak = max(ledger.peak_bytes_per_device)
    layers = [stage["layers_bytes"] for stage in plan.prediction["stages"]] if plan.prediction else None
    stages = []
    for s, stage in enumerate(plan.stages):
        own = ledger.peaks[stage.devices[0]]
        stages.append(
            {
                "stage_id": s,
                "layers": list(stage.layers),
                "devices": list(stage.devices),
                "peak_bytes": own.peak_bytes,
                "instant": own.instant,
                "parts_bytes": own.parts,
                "predicted_layers_bytes": None if layers is None else layers[s],
            }
        )
    changes = []
    for name, changed in _changes(plan):
        other = _replayed(changed, measurements)
        if other is not None:
            changes.append(
                {"change": name, "peak_bytes": max(other.peak_bytes_per_device), "saves_bytes": peak - max(other.peak_bytes_per_device)}
            )
    changes.sort(key=lambda change: -change["saves_bytes"])
    return {
        "peak_bytes": peak,
        "peak_bytes_per_device": list(ledger.peak_bytes_per_device),
        "source": dict(measurements.backend.provenance),
        "stages": stages,
        "changes": changes,
        "best_change": changes[0] if changes and changes[0]["saves_bytes"] > 0 else None,
    }


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that differ by one decision."""
    for schedule in SCHEDULES:
        if schedule != plan.schedule:
            yield f"schedule {schedule}", plan.with_(schedule=schedule)
    policies: tuple[Remat, ...] = ("dots", "full")
    for remat in policies:
        if any(stage.remat != remat for stage in plan.stages):
            yield f"remat {remat}", plan.with_(stages=tuple(replace(stage, remat=remat) for stage in plan.stages))
    if any(stage.data_parallel > 1 and not stage.shard_optimizer for stage in plan.stages):
        yield "shard the optimizer", plan.with_(stages=tuple(replace(stage, shard_optimizer=True) for stage in plan.stages))
    doubled = 2 * plan.num_microbatches
    fits = plan.global_batch_size % doubled == 0
    if fits and all((plan.global_batch_size // doubled) % stage.data_parallel == 0 for stage in plan.stages):
        yield f"{doubled} micro-batches of half the size", plan.with_(num_microbatches=doubled, model_hash="")


def _replayed(plan: Plan, measurements: Any) -> Any:
    """The ledger of a plan over its compiled stages; None if one does not compile."""
    from capture.interface import plan_interfaces
    from capture.step import build_step, replay
    from profiling_runs.profile import stage_config

    configs = [stage_config(stage, plan.microbatch_size) for stage in plan.stages]
    measurements.require(configs, "stages of the plan")
    if any(config not in measurements.costs for config in configs):
        return None
    backend = measurements.backend
    sharding = backend.sharding(plan.microbatch_size)
    param_bytes = {stage.tensor_parallel: sharding.param_bytes(stage.tensor_parallel) for stage in plan.stages}
    costs = [measurements.costs[config] for config in configs]
    interfaces = plan_interfaces(plan, backend.traced(plan.microbatch_size).graph, param_bytes, costs)
    return replay(build_step(interfaces, plan.schedule_table), plan.cluster.num_devices)


def as_text(document: dict[str, Any]) -> str:
    """Stages with their parts, the heaviest layers, and the changes."""
    categories = sorted({c for stage in document["stages"] for c in stage["parts_bytes"]})
    header = ["stage", "layers", "peak per device", "at", *categories]
    rows = [
        [
            stage["stage_id"],
            f"{stage['layers'][0]}-{stage['layers'][1]}",
            format_bytes(stage["peak_bytes"]),
            stage["instant"],
            *(format_bytes(stage["parts_bytes"].get(c, 0)) for c in categories),
        ]
        for stage in document["stages"]
    ]
    lines = [table(header, rows)]
    if document["stages"][0]["predicted_layers_bytes"] is not None:
        per_layer = [
            (sum(parts.values()), stage["layers"][0] + i, max(parts, key=parts.__getitem__))
            for stage in document["stages"]
            for i, parts in enumerate(stage["predicted_layers_bytes"])
            if parts
        ]
        heaviest = sorted(per_layer, reverse=True)[:5]
        lines.append("heaviest layers (predicted): " + ", ".join(f"{layer} {format_bytes(n)} ({c})" for n, layer, c in heaviest))
    saving = [change for change in document["changes"] if change["saves_bytes"] > 0]
    if saving:
        lines.append(table(["one change", "peak per device", "saves"], [_change_row(change) for change in saving]))
    tried = [change["change"] for change in document["changes"] if change not in saving]
    if tried:
        lines.append(f"no saving: {', '.join(tried)}")
    return "\n".join(lines)


def _change_row(change: dict[str, Any]) -> list[str]:
    return [change["change"], format_bytes(change["peak_bytes"]), format_bytes(change["saves_bytes"])]
