"""Who needs the memory of a plan, and which single change saves most. The plan's own stages are
compiled, so nothing is guessed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.cli.progress import progress
from capture.documents import write
from capture.errors import ProfileError
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan, Remat
from capture.quantities import format_bytes
from capture.step.attribution import attribute, group

#: Groups of buffers and layers of a stage in the document, and in the text.
NUM_GROUPS, NUM_SHOWN = 50, 8

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
    """The document of ``capture explain --json``: peaks with their parts, and every single change
    with what it saves."""
    from profiling_runs.collect import stage_config
    from profiling_runs.verify import verify

    verified = verify(plan, measurements)
    ledger = verified.ledger
    peak = max(ledger.peak_bytes_per_device)
    buffers = measurements.buffers(
        [stage_config(stage, plan.microbatch_size) for stage in plan.stages]
    )
    graph = measurements.backend.traced(plan.microbatch_size).graph
    attributions = attribute(
        verified.program, [(stage.first, stage.stop) for stage in plan.stages], graph, buffers
    )
    stages = [
        {
            "stage_id": s,
            "layers": list(stage.layers),
            "devices": list(stage.devices),
            "peak_bytes": found.peak.peak_bytes,
            "instant": found.peak.instant,
            "parts_bytes": found.peak.parts,
            "layers_bytes": {str(layer): parts for layer, parts in found.layers.items()},
            "attributed_fraction": found.attributed_fraction,
            "buffers": write(group(found.buffers)[:NUM_GROUPS]),
        }
        for s, (stage, found) in enumerate(zip(plan.stages, attributions, strict=True))
    ]
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
            yield (
                f"remat {remat}",
                plan.with_(stages=tuple(replace(stage, remat=remat) for stage in plan.stages)),
            )
    if any(stage.data_parallel > 1 and not stage.shard_optimizer for stage in plan.stages):
        yield (
            "shard the optimizer",
            plan.with_(stages=tuple(replace(stage, shard_optimizer=True) for stage in plan.stages)),
        )
    if any(stage.data_parallel > 1 and not stage.shard_params for stage in plan.stages):
        yield (
            "shard the parameters",
            plan.with_(
                stages=tuple(
                    replace(stage, shard_optimizer=True, shard_params=stage.data_parallel > 1)
                    for stage in plan.stages
                )
            ),
        )
    doubled = 2 * plan.num_microbatches
    fits = plan.global_batch_size % doubled == 0
    if fits and all(
        (plan.global_batch_size // doubled) % stage.data_parallel == 0 for stage in plan.stages
    ):
        yield (
            f"{doubled} micro-batches of half the size",
            plan.with_(num_microbatches=doubled, model_hash=""),
        )


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
    worst = max(document["stages"], key=lambda stage: stage["peak_bytes"])
    lines.append(
        f"stage {worst['stage_id']} at its peak ({worst['attributed_fraction']:.1%} of it is "
        "known to be of a layer):"
    )
    lines += [_heaviest_layers(worst), _largest_buffers(worst)]
    saving = [change for change in document["changes"] if change["saves_bytes"] > 0]
    if saving:
        lines.append(
            table(
                ["one change", "peak per device", "saves"],
                [_change_row(change) for change in saving],
            )
        )
    tried = [change["change"] for change in document["changes"] if change not in saving]
    if tried:
        lines.append(f"no saving: {', '.join(tried)}")
    return "\n".join(lines)


def _heaviest_layers(stage: dict[str, Any]) -> str:
    by_layer = sorted(stage["layers_bytes"].items(), key=lambda item: -sum(item[1].values()))[
        :NUM_SHOWN
    ]
    categories = sorted({category for _, parts in by_layer for category in parts})
    rows = [
        [
            layer,
            format_bytes(sum(parts.values())),
            *(format_bytes(parts.get(category, 0)) for category in categories),
        ]
        for layer, parts in by_layer
    ]
    return table(["heaviest layers", "together", *categories], rows)


def _largest_buffers(stage: dict[str, Any]) -> str:
    rows = [
        [
            format_bytes(alike["bytes"]) + (f" x {alike['count']}" if alike["count"] > 1 else ""),
            alike["category"],
            _ranges(alike["layers"]) or "-",
            alike["what"],
            alike["source"] or "-",
        ]
        for alike in stage["buffers"][:NUM_SHOWN]
    ]
    return table(["largest buffers", "category", "layers", "what", "line"], rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of neighbours joined.

    Example:
        >>> _ranges([0, 1, 2, 5])
        '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _change_row(change: dict[str, Any]) -> list[str]:
    return [
        change["change"],
        format_bytes(change["peak_bytes"]),
        format_bytes(change["saves_bytes"]),
    ]
