"""Who needs the memory of a plan, and which single change saves most. The plan's own stages are
compiled, so nothing is guessed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, say, table
from capture.options import add, at_least
from capture.plan.kinds import kind_of, load_plan
from capture.plan.stages import Plan
from capture.quantities import counted, format_bytes, ids_text
from capture.report.documents import ExplainReport
from profiling_runs.collect import split_warnings

#: Groups of buffers and layers of a stage in the text.
NUM_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    parser.add_argument(
        "--seconds",
        type=at_least(0),
        default=60,
        metavar="S",
        help="compile no further change after so many seconds of the processor (default: "
        "%(default)s); plans of stages",
    )
    add(
        parser,
        shared.output(None, "of an array: also write the page (.html)"),
        shared.file("trace", "of an array: also write the step for ui.perfetto.dev (.json)"),
        *shared.STORE,
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    report, lines = kind_of(plan).verb("explain")(options, plan)
    emit(options, report, *lines)
    return 0


def stages(options: argparse.Namespace, plan: Plan) -> tuple[ExplainReport, Iterator[str]]:
    """Explain a plan of stages: which layers and buffers need the memory, and what single changes
    save."""
    asked.refuse_unread(
        options, "stages", "workload", "seconds", *(option.name for option in shared.STORE)
    )
    measurements = asked.plan_measurements(options, plan)
    from profiling_runs.explain import explain

    def told(report: ExplainReport) -> None:
        if not options.json:
            print(stages_text(report.stages), flush=True)
        limit = f"{options.seconds} s of the processor (--seconds)"
        say(options, f"trying single changes of the plan for {limit}")

    def trying(change: str, num_missing: int) -> None:
        say(options, f"{change}: compiling {counted(num_missing, 'stage')}")

    found = explain(plan, measurements, seconds=options.seconds, told=told, trying=trying)
    warnings = split_warnings(measurements.backend.workload, plan.microbatch_size)
    report = replace(found, warnings=warnings)
    return report, changes_lines(report)


def stages_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Return the stages with their parts, and the heaviest layers."""
    rows = []
    for stage in stages:
        layers, peak = "{}-{}".format(*stage["layers"]), format_bytes(stage["peak_bytes"])
        rows.append(([stage["stage_id"], layers, peak, stage["instant"]], stage["parts_bytes"]))
    worst = max(stages, key=lambda stage: stage["peak_bytes"])
    by_layer = sorted(worst["layers_bytes"].items(), key=lambda item: -sum(item[1].values()))
    heaviest = [([layer, format_bytes(sum(of.values()))], of) for layer, of in by_layer[:NUM_SHOWN]]
    return "\n".join(
        [
            _with_parts(["stage", "layers", "peak per device", "at"], rows),
            f"stage {worst['stage_id']} at its peak ({worst['attributed_fraction']:.1%} of it is "
            "known to be of a layer):",
            _with_parts(["heaviest layers", "together"], heaviest),
            _largest_buffers(worst),
        ]
    )


def _with_parts(header: Sequence[str], rows: Sequence[tuple[list[Any], Mapping[str, int]]]) -> str:
    """Return a table whose rows end in bytes by category."""
    categories = sorted({category for _, parts in rows for category in parts})
    cells = ([*row, *(format_bytes(of.get(each, 0)) for each in categories)] for row, of in rows)
    return table([*header, *categories], [*cells])


def changes_lines(report: ExplainReport) -> Iterator[str]:
    """Yield what single changes save, what was not tried, and how the plan was found."""
    saving = [change for change in report.changes if change.saves_bytes > 0]
    if saving:
        yield table(
            ["one change", "peak per device", "saves"],
            [[c.change, format_bytes(c.peak_bytes), format_bytes(c.saves_bytes)] for c in saving],
        )
    if tried := [change.change for change in report.changes if change not in saving]:
        yield f"no saving: {', '.join(tried)}"
    if report.untried:
        yield f"not tried, for want of time (a larger --seconds): {', '.join(report.untried)}"
    if report.found:
        yield f"how the plan was found: {report.found}"


def _largest_buffers(stage: Mapping[str, Any]) -> str:
    rows = [
        [
            format_bytes(alike["bytes"]) + (f" x {alike['count']}" if alike["count"] > 1 else ""),
            alike["category"],
            ids_text(alike["layers"]) or "-",
            alike["what"],
            alike["source"] or "-",
        ]
        for alike in stage["buffers"][:NUM_SHOWN]
    ]
    return table(["largest buffers", "category", "layers", "what", "line"], rows)
