"""Hand a plan to another system: Alpa's PipeshardParallel options, as one Python file for Alpa's
own environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.documents import write
from capture.measured.profile import Profile
from capture.plan.kinds import load_plan, of_stages
from capture.plan.stages import Plan
from capture.quantities import counted, format_bytes
from capture.report.difference import describe_name, describe_value, differences

if TYPE_CHECKING:
    from capture.alpa.nearest import NearestPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan_alone(parser)
    parser.add_argument("--to", choices=("alpa",), required=True, help="whose options")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write a Python 3.8 file whose method() returns them (method.py)",
    )
    parser.add_argument(
        "--nearest",
        action="store_true",
        help="of a plan that Alpa cannot express, export the nearest one that it can, and write "
        "that beside the file (method.json)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measurements of the model: adds what each device needs in Alpa's runtime",
    )


def main(options: argparse.Namespace) -> int:
    from capture.alpa.memory import alpa_memory
    from capture.alpa.nearest import nearest
    from capture.alpa.options import to_alpa, violations

    plan = of_stages(load_plan(options.plan))
    profile = None if options.profile is None else Profile.load(options.profile)
    lines, document = list[str](), dict[str, Any]()
    if options.nearest and violations(plan):
        found = nearest(plan, profile)
        document["nearest"] = _nearest_document(plan, found)
        lines += _nearest_lines(plan, found, options.output)
        plan = found.plan
        if options.output is not None:
            plan.save(options.output.with_suffix(".json"))
    exported = to_alpa(plan)
    memory = None if profile is None else alpa_memory(plan, profile)
    document["alpa"] = exported.to_json()
    header = ["stage", "layers", "hosts:devices", "physical", "logical (dp, tp)", "options"]
    rows: list[list[Any]] = []
    for s, stage in enumerate(plan.stages):
        where = exported.placement[s]
        hosts = sorted({plan.cluster.node_of_device[d] for d in where})
        local = (
            f"0-{exported.num_devices_per_host - 1}"
            if len(hosts) > 1
            else _span([d % exported.num_devices_per_host for d in where])
        )
        shapes = exported.submesh_physical_shapes[s], exported.submesh_logical_shapes[s]
        rows.append(
            [
                s,
                f"{stage.first}-{stage.stop - 1}",
                f"{_span(hosts)}:{local}",
                *shapes,
                exported.submesh_autosharding_option_dicts[s],
            ]
        )
        if memory is not None:
            rows[-1].append(format_bytes(memory.stages[s].peak_bytes))
    if memory is not None:
        header.append("peak per device in Alpa")
        document["memory"] = memory.to_json()
    lines.append(table(header, rows))
    if options.output is not None:
        about = (
            f"{plan.workload} on {plan.cluster}, {counted(plan.global_batch_size, 'example')} in "
            f"{counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}."
        )
        options.output.write_text(exported.source(about if plan.workload else ""))
        document["written"] = str(options.output)
        lines.append(f"alpa.PipeshardParallel -> {options.output}")
    emit(options, document, "\n".join(lines))
    return 0


def _nearest_document(plan: Plan, found: NearestPlan) -> dict[str, Any]:
    return {
        "changes": write(differences(plan, found.plan)),
        "state_bytes": found.state_bytes,
        "peak_bytes": found.peak_bytes,
    }


def _nearest_lines(plan: Plan, found: NearestPlan, output: Path | None) -> list[str]:
    """Return what is not as planned, in decisions and in bytes."""
    rows = [
        [
            describe_name(each.name),
            describe_value(each.name, each.first),
            describe_value(each.name, each.second),
        ]
        for each in differences(plan, found.plan)
    ]
    sizes = {
        "state at the peak, per device": found.state_bytes,
        "peak per device": found.peak_bytes,
    }
    rows += [[name, *map(format_bytes, both)] for name, both in sizes.items() if both]
    lines = [table(["Alpa's nearest plan", "planned", "exported"], rows)]
    if found.peak_bytes is None:
        name = "its plan" if output is None else output.with_suffix(".json")
        lines.append(f"its peak is not known: capture verify {name} compiles it")
    return lines


def _span(ids: list[int]) -> str:
    return str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
