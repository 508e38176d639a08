"""Measure a model's layers (M_i, M_a) for every way in which a stage may use the cluster's devices.

The same command resumes after an interruption: finished measurements are in the store. A file of
jobs (--jobs) names several profiles.

Exit codes: 0 complete; 1 written, but some jobs failed again and again and were set aside; 2 bad
input; 3 ended early by the machines (a full disk, a lost cluster, workers that cannot start), 130
and 143 interrupted: the same command resumes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from capture.cli import asked, job_file, jobs, layers
from capture.cli import options as shared
from capture.cli.job_file import ProfileJob
from capture.cli.output import beyond_lines, emit
from capture.cli.progress import Events, clear_line, progress
from capture.errors import ProfileError, Violation
from capture.measured.layer_profile import LayerProfile
from capture.measured.profile import Profile
from capture.options import Option, add
from capture.quantities import counted
from profiling_runs.collect import profile, split_warnings
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import profile_layers
from profiling_runs.listing import list_jobs
from profiling_runs.measurements import open_measurements
from profiling_runs.profile_report import (
    LayersReport,
    MadeProfile,
    ProfileReport,
    WindowsReport,
)
from profiling_runs.question import ProfileQuestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser, required=False)
    add(
        parser,
        *job_file.OPTIONS,
        *shared.STORE,
        Option(
            "jobs",
            "the profiles of a TOML file, such as profiling_runs/configs/example.toml",
            read=Path,
            metavar="FILE",
        ),
        replace(shared.TRUST, help=f"with --jobs: {shared.TRUST.help}"),
        Option("dry_run", "list the jobs and what they cost; measure nothing", False),
        Option(
            "events",
            "add what happens to this file, one JSON document per line",
            read=Path,
            metavar="FILE",
        ),
    )


def main(options: argparse.Namespace) -> int:
    profiles = _profiles(options)
    asked.prepare(*(profile.question for profile in profiles))
    if options.dry_run:
        return _dry_run(options, profiles)
    for job in profiles:
        shared.check_output(job.output, makes_folders=True)
    # Of a scheduler that needs the machine: workers are ended, and the store is left in order.
    before = signal.signal(signal.SIGTERM, _terminate)
    events = Events(options.events)
    errors: Sequence[Violation] = ()
    try:
        made = [_one(options, profile, events) for profile in profiles]
        code = 1 if any(each.num_set_aside for each, _ in made) else 0
    except BaseException as error:
        code, errors = shared.exit_code(error), getattr(error, "violations", ())
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        events.say("end", exit_code=code, errors=[*map(vars, errors)])
    report = ProfileReport([each for each, _ in made])
    emit(options, report, *(text for _, text in made))
    return code


def _profiles(options: argparse.Namespace) -> list[ProfileJob]:
    """Return every profile that the command asks for."""
    if options.jobs is not None:
        if options.workload is not None or options.cluster is not None:
            raise ProfileError.of(
                "--jobs names workloads and clusters in its file; leave WORKLOAD and --cluster "
                "out.",
                "jobs-option",
            )
        if given := job_file.of_profiles(options):
            raise ProfileError.of(
                f"{', '.join(given)} beside --jobs would hold for no profile; write it in the "
                "file.",
                "jobs-option",
            )
        return [
            job.admitted(options.trust)
            for job in job_file.read_job_file(options.jobs, vars(options))
        ]
    if options.workload is None:
        raise ProfileError.of(
            "WORKLOAD is missing; say what to profile, or name a file with --jobs.", "jobs-option"
        )
    if options.system != layers.SYSTEM:
        asked.say_one_device(options)
    return [ProfileJob.of(vars(options))]


def _dry_run(options: argparse.Namespace, profiles: list[ProfileJob]) -> int:
    found = []
    for job in profiles:
        if isinstance(job.question, LayersQuestion):
            raise ProfileError.of(
                "which sizes of micro-batches are measured follows from the measurements, so the "
                "jobs of a layer profile cannot be listed; leave out --dry-run.",
                "layers-dry-run",
            )
        listing = list_jobs(job.question, asked.open_store(options))
        found.append(replace(listing, output=str(job.output)))
    report = ProfileReport(jobs=found)
    texts = [
        f"{each.workload} on {each.cluster} of {each.target} -> {each.output}\n{jobs.as_text(each)}"
        for each in found
    ]
    text = f"one worker needs about {jobs.duration(report.worker_seconds)}"
    emit(options, report, "\n\n".join([*texts, text]))
    return 0


def _terminate(number: int, frame: object) -> None:
    clear_line()
    print("terminated; finished measurements are kept, the same command resumes", file=sys.stderr)
    raise SystemExit(128 + number)


def _one(options: argparse.Namespace, job: ProfileJob, events: Events) -> tuple[MadeProfile, str]:
    """Make one profile, write it, and return its report as data and in words."""
    question = job.question
    named = {
        "output": str(job.output),
        "workload": job.values["workload"],
        "cluster": job.values["cluster"] or shared.ONE_DEVICE,
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
        found, lines = _of_layers(question, made, job.output)
    else:
        measurements = None if question.executes else open_measurements(question, **told)
        if measurements is not None:
            asked.say_layers(options, question, measurements)
        made = profile(question, measurements=measurements, **told)
        found, lines = _of_windows(question, made, job.output)
    events.say("profile", state="done", num_set_aside=len(set_aside), **named)
    report = MadeProfile(
        profile=named.pop("output"),
        **named,
        backend=question.backend,
        num_set_aside=len(set_aside),
        **found,
    )
    return report, "\n".join([*lines, *beyond_lines(report)])


def _of_layers(
    question: LayersQuestion, made: LayerProfile, output: Path
) -> tuple[dict[str, Any], list[str]]:
    output.parent.mkdir(parents=True, exist_ok=True)
    made.save(output)
    report = LayersReport.of(made)
    found = {
        "layers": report,
        "warnings": split_warnings(question.task, max(made.bwd.u)),
        "failures": made.made["failures"],
    }
    return found, [*layers.as_text(report), f"layers -> {output}"]


def _of_windows(
    question: ProfileQuestion, made: Profile, output: Path
) -> tuple[dict[str, Any], list[str]]:
    output.parent.mkdir(parents=True, exist_ok=True)
    made.save(output)
    report = WindowsReport.of(made, asked.layers_note(question, made.cut_into))
    sizes = ", ".join(map(str, report.microbatch_sizes))
    lines = [
        f"{counted(report.num_layers, 'layer')}, {report.num_parameters:,} parameters: "
        f"{counted(report.num_measurements, 'measurement')} at micro-batch sizes {sizes} -> "
        f"{output}"
    ]
    if report.num_runs is not None:
        how = "compiled and replayed" if question.backend == "compile" else "executed"
        lines.append(
            f"the paper's profiling runs, {how}: {report.num_runs}, of which "
            f"{report.num_failed_runs} failed"
        )
    found = {"windows": report, "warnings": made.warnings, "failures": made.failures}
    return found, [*lines, *report.notes]
