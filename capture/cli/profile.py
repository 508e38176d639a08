"""Measure a model's layers (M_i, M_a) for every way in which a stage may use the cluster's devices.

The same command resumes after an interruption: finished measurements are in the store.

Exit codes: 0 complete; 1 written, but some jobs failed again and again and were set aside; 2 bad
input; 3 ended early by the machines (a full disk, a lost cluster, workers that cannot start), 130
and 143 interrupted: the same command resumes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.cli import asked, layers
from capture.cli import options as shared
from capture.cli.output import emit
from capture.cli.progress import Events, clear_line, progress
from capture.errors import ProfileError, Violation
from capture.measured.layer_profile import LayerProfile
from capture.measured.profile import Profile
from capture.options import Option, add, merged, refused, size
from capture.quantities import counted
from profiling_runs.collect import profile, split_warnings
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import profile_layers
from profiling_runs.measurements import open_measurements
from profiling_runs.profile_report import LayersReport, ProfileReport, WindowsReport
from profiling_runs.question import ProfileQuestion

_OUTPUT = shared.output("profile.json")
#: What the systems read.
SYSTEMS = {
    "capture": (
        *shared.QUESTION,
        Option(
            "memory",
            "with --backend run: runs that need more on a device, such as 40GB, are left out; "
            "harmony: limit per device",
            read=size,
            metavar="SIZE",
        ),
        Option(
            "mode",
            "paper: make the paper's profiling runs as well",
            "default",
            choices=("default", "paper"),
        ),
        _OUTPUT,
    ),
    layers.SYSTEM: (shared.TARGET, *layers.OPTIONS, _OUTPUT),
}
#: Options of a profile, of any system.
OPTIONS = (layers.SYSTEM_OPTION, *(option for option, _ in merged(SYSTEMS).values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser)
    add(
        parser,
        *OPTIONS,
        *shared.STORE,
        Option(
            "events",
            "add what happens to this file, one JSON document per line",
            read=Path,
            metavar="FILE",
        ),
    )


def main(options: argparse.Namespace) -> int:
    question = question_of(options)
    asked.prepare(question)
    shared.check_output(options.output, makes_folders=True)
    # Of a scheduler that needs the machine: workers are ended, and the store is left in order.
    before = signal.signal(signal.SIGTERM, _terminate)
    events = Events(options.events)
    errors: tuple[Violation, ...] = ()
    try:
        report, lines = _made(options, question, events)
        code = 1 if report.num_set_aside else 0
    except BaseException as error:
        code, errors = shared.exit_code(error), getattr(error, "violations", ())
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        events.say("end", exit_code=code, errors=[*map(vars, errors)])
    emit(options, report, *lines)
    return code


def question_of(options: argparse.Namespace) -> ProfileQuestion | LayersQuestion:
    """Return the question that options ask.

    Raises:
        CaptureError: as ``profile_question`` and ``layers_question``; ``profile-system`` for
            options of another system.
    """
    values = vars(options)
    given = [each.name for each in OPTIONS if values[each.name] != each.default]
    ProfileError.check(
        Violation(text, "profile-system") for text in refused(given, options.system, SYSTEMS)
    )
    if options.system == layers.SYSTEM:
        return layers.layers_question(values)
    asked.say_one_device(options)
    return asked.profile_question(values, memory_limit_bytes=options.memory)


def _terminate(number: int, frame: object) -> None:
    clear_line()
    print("terminated; finished measurements are kept, the same command resumes", file=sys.stderr)
    raise SystemExit(128 + number)


def _made(
    options: argparse.Namespace, question: ProfileQuestion | LayersQuestion, events: Events
) -> tuple[ProfileReport, list[str]]:
    """Make the profile, write it, and return its report as data and in lines."""
    named = {
        "output": str(options.output),
        "workload": options.workload,
        "cluster": options.cluster or shared.ONE_DEVICE,
        "target": question.target_name,
    }
    events.say("profile", state="started", **named)
    shown, set_aside = progress(options), set[str]()

    def both(kind: str, done: int, total: int) -> None:
        shown(kind, done, total)
        events.progress(kind, done, total)

    def watch(event: Mapping[str, Any]) -> None:
        events.watch(event)
        if event["state"] == "set aside":
            set_aside.add(event["key"])

    told = {**asked.told(options), "progress": both, "watch": watch}
    made: LayerProfile | Profile
    if isinstance(question, LayersQuestion):
        made = profile_layers(question, **told)
        found, lines = _of_layers(question, made)
    else:
        measurements = None if question.executes else open_measurements(question, **told)
        if measurements is not None:
            asked.say_layers(options, question, measurements)
        made = profile(question, measurements=measurements, **told)
        found, lines = _of_windows(question, made)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    made.save(options.output)
    events.say("profile", state="done", num_set_aside=len(set_aside), **named)
    report = ProfileReport(
        profile=named.pop("output"),
        **named,
        backend=question.backend,
        num_set_aside=len(set_aside),
        **found,
    )
    return report, [*lines, f"profile -> {options.output}"]


def _of_layers(question: LayersQuestion, made: LayerProfile) -> tuple[dict[str, Any], list[str]]:
    report = LayersReport.of(made)
    found = {
        "layers": report,
        "warnings": split_warnings(question.task, max(made.bwd.u)),
        "failures": made.made["failures"],
    }
    return found, layers.as_text(report)


def _of_windows(question: ProfileQuestion, made: Profile) -> tuple[dict[str, Any], list[str]]:
    report = WindowsReport.of(made, asked.layers_note(question, made.cut_into))
    sizes = ", ".join(map(str, report.microbatch_sizes))
    lines = [
        f"{counted(report.num_layers, 'layer')}, {report.num_parameters:,} parameters: "
        f"{counted(report.num_measurements, 'measurement')} at micro-batch sizes {sizes}"
    ]
    if report.num_runs is not None:
        how = "compiled and replayed" if question.backend == "compile" else "executed"
        lines.append(
            f"the paper's profiling runs, {how}: {report.num_runs}, of which "
            f"{report.num_failed_runs} failed"
        )
    found = {"windows": report, "warnings": made.warnings, "failures": made.failures}
    return found, [*lines, *report.notes]
