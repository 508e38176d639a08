"""Hand a plan to another system: Alpa's PipeshardParallel options, as one Python file for Alpa's
own environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.alpa.memory import AlpaMemory, alpa_memory
from capture.alpa.nearest import nearest
from capture.alpa.options import AlpaOptions, to_alpa, violations
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.measured.profile import Profile
from capture.options import Option, add
from capture.plan.kinds import load_plan, of_stages
from capture.quantities import counted, format_bytes, ids_text
from capture.report.difference import Difference, difference_rows, differences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan_alone(parser)
    parser.add_argument("--to", choices=("alpa",), required=True, help="whose options")
    add(
        parser,
        shared.output(None, "write a Python 3.8 file whose method() returns them (method.py)"),
        Option(
            "nearest",
            "of a plan that Alpa cannot express, export the nearest one that it can, and write "
            "that beside the file (method.json)",
            False,
        ),
        shared.file(
            "profile", "measurements of the model: adds what each device needs in Alpa's runtime"
        ),
    )


@dataclass(frozen=True)
class NearestReport:
    """The differences between a plan and the nearest one that Alpa can express.

    Attributes:
        changes: Decisions of the plan, and of the one that is exported.
        state_bytes: Parameters, gradients and optimizer state, in both plans, of the device that
            holds most; None where the plan has no prediction.
        peak_bytes: Peaks of both, the second predicted; None without a profile.
    """

    changes: tuple[Difference, ...]
    state_bytes: tuple[int, int] | None
    peak_bytes: tuple[int, int] | None


@dataclass(frozen=True)
class ExportReport:
    """The document of ``capture export``: a plan as another system has it.

    Attributes:
        kind: Kind of the plan: stages.
        alpa: Options of ``alpa.PipeshardParallel``.
        nearest: Changes that the nearest plan needed (``--nearest``); None if nothing.
        memory: Peaks in Alpa's runtime; None without a profile.
        written: Files that were written, by what they are.
    """

    kind: str
    alpa: AlpaOptions
    nearest: NearestReport | None
    memory: AlpaMemory | None
    written: Mapping[str, str]


def main(options: argparse.Namespace) -> int:
    plan = of_stages(load_plan(options.plan))
    profile = None if options.profile is None else Profile.load(options.profile)
    lines, written, changed = list[str](), dict[str, str](), None
    if options.nearest and violations(plan):
        found = nearest(plan, profile)
        changed = NearestReport(
            tuple(differences(plan, found.plan)), found.state_bytes, found.peak_bytes
        )
        lines += _nearest_lines(changed, options.output)
        plan = found.plan
        if options.output is not None:
            written["plan"] = str(options.output.with_suffix(".json"))
            plan.save(written["plan"])
    exported = to_alpa(plan)
    memory = None if profile is None else alpa_memory(plan, profile)
    header = ["stage", "layers", "hosts:devices", "physical", "logical (dp, tp)", "options"]
    header += ["peak per device in Alpa"] if memory is not None else []
    rows: list[list[Any]] = []
    for s, stage in enumerate(plan.stages):
        where = exported.placement[s]
        hosts = sorted({plan.cluster.node_of_device[d] for d in where})
        per_host = exported.num_devices_per_host
        local = ids_text(range(per_host) if len(hosts) > 1 else [d % per_host for d in where])
        rows.append(
            [
                s,
                f"{stage.first}-{stage.stop - 1}",
                f"{ids_text(hosts)}:{local}",
                exported.submesh_physical_shapes[s],
                exported.submesh_logical_shapes[s],
                exported.submesh_autosharding_option_dicts[s],
                *([] if memory is None else [format_bytes(memory.stages[s].peak_bytes)]),
            ]
        )
    lines.append(table(header, rows))
    if options.output is not None:
        about = (
            f"{plan.workload} on {plan.cluster}, {counted(plan.global_batch_size, 'example')} in "
            f"{counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}."
        )
        options.output.write_text(exported.source(about if plan.workload else ""))
        written["method"] = str(options.output)
    emit(options, ExportReport("stages", exported, changed, memory, written), *lines)
    return 0


def _nearest_lines(found: NearestReport, output: Path | None) -> list[str]:
    """Return the lines on what is not as planned, in decisions and in bytes."""
    rows = difference_rows(found.changes)
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
