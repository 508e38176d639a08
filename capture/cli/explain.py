"""Who needs the memory of a plan, and which single change saves most. The plan's own stages are compiled, so nothing is guessed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from capture.cli import options as shared
from capture.cli.output import emit, progress, table
from capture.errors import ProfileError
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
    measurements = shared.open_plan_measurements(options, plan, progress(options))
    from profiling_runs.verify import check_model

    check_model(plan, measurements)
    document = explain(plan, measurements)
    emit(options, document, as_text(document))
    return 0


def explain(plan: Plan, measurements: Any) -> dict[str, Any]:
    """The document of ``capture explain --json``: peaks with their parts, and every single change with what it saves."""
    from profiling_runs.verify import verify

    ledger = verify(plan, measurements).ledger
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
    changes: list[dict[str, Any]] = []
    for name, changed in _changes(plan):
        try:
            other = max(verify(changed, measurements).peak_bytes_per_device)
        except ProfileError:  # a stage of the changed plan does not compile
            continue
        changes.append({"change": name, "peak_bytes": other, "saves_bytes": peak - other})
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
