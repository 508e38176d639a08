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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.cli import job_file, jobs
from capture.cli import options as shared
from capture.cli.output import emit
from capture.cli.progress import Events, clear_line, progress
from capture.errors import CaptureError, ProfileError, Violation
from capture.quantities import parse_bytes

NAME = "profile"
HELP = "measure a model's layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_question(parser, remats=shared.REMATS_OF_A_SEARCH, required=False)
    shared.add_backend(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="with --backend run: runs that need more on a device, such as 40GB, are left out",
    )
    parser.add_argument(
        "--mode",
        choices=("default", "paper"),
        default="default",
        help="paper: make the paper's profiling runs as well",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--jobs",
        type=Path,
        metavar="FILE",
        help="the profiles of a TOML file, such as profiling_runs/configs/example.toml",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the jobs and what they cost; measure nothing"
    )
    parser.add_argument(
        "--events",
        type=Path,
        metavar="FILE",
        help="add what happens to this file, one JSON document per line",
    )
    parser.set_defaults(parser=parser)


def main(options: argparse.Namespace) -> int:
    profiles = _profiles(options)
    shared.prepare_backends(profiles)
    if options.dry_run:
        return _dry_run(options, profiles)
    before = signal.signal(
        signal.SIGTERM, _terminate
    )  # of a scheduler that needs the machine: workers are ended, and the store is left in order
    events = Events(options.events)
    errors: list[Violation] = []
    code = 2  # of what nobody has foreseen, as in capture.cli.main
    try:
        documents = [_one(profile, events) for profile in profiles]
        code = 1 if any(document["num_set_aside"] for document in documents) else 0
    except CaptureError as error:
        errors = list(error.violations)
        code = 3 if shared.ENDED_EARLY & set(error.codes) else 2
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit as end:
        code = int(end.code or 0)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        events.say(
            "end",
            exit_code=code,
            errors=[{"code": violation.code, "message": violation.message} for violation in errors],
        )
    document = {"profiles": documents} if options.jobs else documents[0]
    emit(options, document, "\n".join(_as_text(one) for one in documents))
    return code


def _profiles(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of every profile of the command."""
    if options.jobs is not None:
        if options.workload is not None or options.cluster is not None:
            raise ProfileError.of(
                "--jobs names workloads and clusters in its file; leave WORKLOAD and --cluster "
                "out.",
                "jobs-option",
            )
        if given := job_file.of_profiles(options.parser, options):
            raise ProfileError.of(
                f"{', '.join(given)} beside --jobs would hold for no profile; write it in the "
                "file.",
                "jobs-option",
            )
        return job_file.read_job_file(options.jobs, options.parser, options)
    if options.workload is None:
        raise ProfileError.of(
            "WORKLOAD is missing; say what to profile, or name a file with --jobs.", "jobs-option"
        )
    return [options]


def _dry_run(options: argparse.Namespace, profiles: list[argparse.Namespace]) -> int:
    listings = [(profile, jobs.jobs_of(profile)) for profile in profiles]
    rows = [
        {"workload": p.workload, "cluster": p.cluster, "output": str(p.output), **listing.to_json()}
        for p, listing in listings
    ]
    text = "\n\n".join(
        f"{p.workload} on {p.cluster} of {p.target} -> {p.output}\n{jobs.as_text(listing)}"
        for p, listing in listings
    )
    total = sum(listing.seconds for _, listing in listings)
    emit(
        options,
        {"profiles": rows, "worker_seconds": total},
        f"{text}\n\none worker needs about {jobs.duration(total)}",
    )
    return 0


def _terminate(number: int, frame: Any) -> None:
    clear_line()
    print("terminated; finished measurements are kept, the same command resumes", file=sys.stderr)
    raise SystemExit(128 + number)


def _one(options: argparse.Namespace, events: Events) -> dict[str, Any]:
    """Make one profile, write it, and say what it is."""
    cluster = shared.read_cluster(options)
    global_batch, num_microbatches = shared.read_batch(options)
    shared.check_backend(options)
    named = {
        "output": str(options.output),
        "workload": options.workload,
        "cluster": str(cluster),
        "target": cluster.target,
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

    result = shared.make_profile(
        options,
        cluster,
        global_batch // num_microbatches,
        both,
        watch=watch,
        paper=(options.schedule, num_microbatches) if options.mode == "paper" else None,
        memory_limit_bytes=None if options.memory is None else parse_bytes(options.memory),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result.save(options.output)
    events.say("profile", state="done", num_set_aside=len(set_aside), **named)
    graph = result.graph
    low, high = (
        result.calibration.widest(result.choices, graph.num_layers)
        if result.calibration
        else (None, None)
    )
    return {
        "profile": str(options.output),
        "workload": options.workload,
        "backend": options.backend,
        "num_layers": graph.num_layers,
        "auto_layers": result.auto_layers,
        "notes": shared.layers_note(options, result),
        "num_parameters": graph.num_parameters,
        "num_measurements": len(result.measurements),
        "num_runs": None if result.paper is None else result.paper["num_runs"],
        "num_failed_runs": None if result.paper is None else result.paper["num_failed_runs"],
        "microbatch_sizes": list(result.microbatch_sizes),
        "interval_factors": [low, high],
        "warnings": list(result.warnings),
        "failures": list(result.failures),
        "num_set_aside": len(set_aside),
        "provenance": dict(result.provenance),
    }


def _as_text(document: dict[str, Any]) -> str:
    sizes = ", ".join(map(str, document["microbatch_sizes"]))
    lines = [
        f"{document['num_layers']} layers, {document['num_parameters']:,} parameters: "
        f"{document['num_measurements']} measurements at "
        f"micro-batch sizes {sizes} -> {document['profile']}"
    ]
    if document["num_runs"] is not None:
        how = "compiled and replayed" if document["backend"] == "compile" else "executed"
        lines.append(
            f"the paper's profiling runs, {how}: {document['num_runs']}, of which "
            f"{document['num_failed_runs']} failed"
        )
    lines += document["notes"]
    lines += [f"warning: {warning}" for warning in document["warnings"]]
    return "\n".join(lines + [f"failed: {failure}" for failure in document["failures"]])
