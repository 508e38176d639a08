"""Our runtime beside SpectraX, JaxPP, one jit over a mesh (GSPMD) and one device: the same model,
batch and optimizer, in the same run (``benchmarks/peer_libraries.py``).

    python -m benchmarks.peers --install ~/peers --jaxpp git+file:///path/to/a/clone/of/jaxpp \\
        -o benchmarks/results/2026-01-31-peers.json

``--install`` makes an environment of its own in that folder, with this environment's version of JAX
(at least 0.10, which SpectraX needs), installs there what can be had, and measures with its
interpreter. SpectraX is in the package index; JaxPP is not, and is installed from a clone of its
repository, without what it asks for only on GPUs. What is missing, or does not run, is skipped by
name. Nothing of another library is in this repository; SpectraX is under the AGPL.

How it is measured, alike for all (``benchmarks/peer_meters.py`` has the meters):

* Times: all libraries are compiled in one process and train in turns, in another order each round.
  A turn is ``STEPS_PER_TURN`` steps in a row, of which the first is left out: it finds the
  processor's caches as another library left them. What is reported is the median over all others.
  Other work on the machine lifts the seconds of all; load averages are recorded, and ratios hold.
* Dispatch: processor time of the threads that issue a step, the calling one from call to return,
  and those that the library started, until the step has ended. XLA's own threads, which compute,
  are not in it; a program that XLA runs in the thread that issues it is.
* A task is a pass of one micro-batch through one stage, forward or backward: 2 x stages x
  micro-batches a step, whatever a library makes of them. Overhead per task is the dispatch of the
  whole step, updates included, by their number.
* Step: wall time from the call until losses and state are ready. All virtual devices share the
  processor's cores.
* Memory: in a process per library, programs counted at the border of C++; before each, everything
  that was issued is awaited, and live arrays, each buffer once, are added to what XLA reports of
  the program. It is what a step needs in program order, whatever runs ahead.
* Losses: of the first ``NUM_LOSSES`` steps, against one device's; the largest relative difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib import metadata
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from capture import environment
from capture.errors import CaptureError

NUM_DEVICES = 4
CaptureError.check(environment.prepare(num_devices=NUM_DEVICES))

from benchmarks.peer_libraries import (  # noqa: E402
    JAXPP,
    LIBRARIES,
    ONE_DEVICE,
    OURS,
    PIPELINES,
    SCHEDULES_OF_PEERS,
    SPECTRAX,
    Case,
    Trainer,
)
from benchmarks.peer_meters import PythonThreads, await_step, measure_memory  # noqa: E402
from capture.cli.output import table  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
#: Arguments of ``plain_gpt.gpt`` and examples of a micro-batch. Steps of micro are nothing but
#: dispatch.
MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "micro": ({"num_blocks": 8, "width": 32, "num_heads": 4, "seq_len": 8, "vocab_size": 100}, 1),
    "medium": (
        {"num_blocks": 8, "width": 256, "num_heads": 4, "seq_len": 64, "vocab_size": 1000},
        2,
    ),
}
#: Of ours those that there are.
REMATS_TIMED = ("none", "cheap")
REMATS_HELD = ("none", "cheap", "full")
SPECTRAX_REQUIREMENT = "spectrax-lib==0.1.4"
NUM_LOSSES, STEPS_PER_TURN = 3, 4

Variant = tuple[str, str]
"""A library and its remat."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.install is not None:
        given = list(sys.argv[1:] if argv is None else argv)
        return _run_there(install(options.install, options.jaxpp), given)
    load_before = os.getloadavg()
    skipped: dict[str, str] = {}
    steps, memory = [], []
    for model in options.models:
        for schedule in options.schedules:
            steps += compare_steps(model, schedule, options.rounds, skipped)
    for model in options.models:
        for schedule in options.schedules:
            memory += compare_memory(model, schedule, skipped)
    document = {
        "benchmark": "peers",
        "date": date.today().isoformat(),
        "hardware": {
            "platform": f"{platform.system()} {platform.machine()}",
            "num_cores": len(os.sched_getaffinity(0)),
            "devices": f"{NUM_DEVICES} virtual CPU devices; the cores are shared by all of them",
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
        },
        "versions": {**environment.versions(), **_versions()},
        "xla_flags": list(environment.active_flags()),
        "models": {
            name: {**MODELS[name][0], "microbatch_size": MODELS[name][1]} for name in options.models
        },
        "num_rounds": options.rounds,
        "skipped": skipped,
        "steps": steps,
        "memory": memory,
        "ratios": ratios(steps, memory),
    }
    say("\n" + as_text(document))
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.json:
        print(json.dumps(document, indent=1))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--install", type=Path, metavar="DIR", help="measure in an environment made there"
    )
    parser.add_argument(
        "--jaxpp", metavar="SOURCE", help="with --install: what pip is to install JaxPP from"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES_OF_PEERS, default=list(SCHEDULES_OF_PEERS)
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns of each library (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the document here")
    parser.add_argument("--json", action="store_true", help="the document on standard output")
    options = parser.parse_args(argv)
    if options.jaxpp is not None and options.install is None:
        parser.error("--jaxpp says what --install installs; give both")
    return options


# ---- the peers' environment ----------------------------------------------------------------------


def install(folder: Path, jaxpp: str | None) -> Path:
    """Make the environment, or bring it up to date; its interpreter."""
    python = folder.resolve() / "bin" / "python"
    if not python.exists():
        say(f"making {folder}")
        venv.create(folder, with_pip=True)
    pins = [f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib", "numpy", "optax")]

    def pip(*arguments: str) -> subprocess.CompletedProcess:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return subprocess.run([*command, *arguments], text=True, stderr=subprocess.PIPE)

    own = pip("--editable", str(REPOSITORY), *pins)
    if own.returncode:
        raise SystemExit(own.stderr)
    wanted = {SPECTRAX: [SPECTRAX_REQUIREMENT, *pins]}
    wanted |= {JAXPP: ["--no-deps", jaxpp]} if jaxpp is not None else {}
    for name, arguments in wanted.items():
        if (made := pip(*arguments)).returncode:
            say(f"{name} cannot be installed: {made.stderr.strip().splitlines()[-1]}")
    return python


def _run_there(python: Path, argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--install", "--jaxpp"):
        parser.add_argument(name)
    _, rest = parser.parse_known_args(argv)
    return subprocess.run([python, "-m", "benchmarks.peers", *rest], cwd=REPOSITORY).returncode


def _versions() -> dict[str, str]:
    """Of our own library and the others, with the commit where one was installed from a clone."""
    found = {}
    for library in LIBRARIES.values():
        try:
            distribution = metadata.distribution(library.package or "")
        except (metadata.PackageNotFoundError, ValueError):
            continue
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id", "")
        found[library.package] = f"{distribution.version} {commit}".strip()
    return found


# ---- what is compared ----------------------------------------------------------------------------


def variants(remats: Sequence[str], skipped: Mapping[str, str]) -> list[Variant]:
    return [
        (name, remat)
        for name, library in LIBRARIES.items()
        if name not in skipped
        for remat in remats
        if remat in library.remats and (remat == "none" or name in PIPELINES)
    ]


def case_of(model: str, schedule: str, remat: str) -> Case:
    arguments, microbatch_size = MODELS[model]
    return Case(dict(arguments), microbatch_size, schedule, remat)


def compare_steps(
    model: str, schedule: str, num_rounds: int, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """A row per library and remat.

    Args:
        model: Of ``MODELS``.
        schedule: Of the pipelines.
        num_rounds: In each, every library has a turn.
        skipped: By name, why; those found here are added.
    """
    case, made = case_of(model, schedule, "none"), {}
    batch, losses = case.batch(), {}
    for name, remat in variants(REMATS_TIMED, skipped):
        say(f"{model}, {schedule}: {name}, remat {remat}: compiling")
        try:
            trainer = LIBRARIES[name].make(case_of(model, schedule, remat))
            losses[name, remat] = list(_first_losses(trainer, batch))
        except Exception as error:
            _skip(name, error, skipped)
            continue
        made[name, remat] = trainer
    times = _in_turns(made, batch, num_rounds)
    exact = losses[ONE_DEVICE, "none"]
    rows = []
    for variant, found in times.items():
        name, remat = variant
        dispatch, threads, step, processor = (median(values) for values in zip(*found, strict=True))
        differences = [abs(a - b) / abs(b) for a, b in zip(losses[variant], exact, strict=True)]
        rows.append(
            {
                "library": name,
                "model": model,
                "schedule": schedule,
                "remat": remat,
                "num_steps": len(found),
                "dispatch_seconds": dispatch,
                "dispatch_seconds_of_other_threads": threads,
                "dispatch_seconds_least": min(seconds for seconds, *_ in found),
                "num_tasks": case.num_tasks if name in PIPELINES else None,
                "overhead_per_task_seconds": (
                    dispatch / case.num_tasks if name in PIPELINES else None
                ),
                "step_seconds": step,
                "processor_seconds": processor,
                "losses": losses[variant],
                "max_relative_loss_difference": max(differences),
            }
        )
    return rows


def _skip(name: str, error: Exception, skipped: dict[str, str]) -> None:
    """Another library that is missing or does not run is no reason to stop; ours is."""
    if name not in (SPECTRAX, JAXPP):
        raise error
    text = (str(error).splitlines() or [""])[0]
    skipped[name] = f"{type(error).__name__}: {text}"
    say(f"{name} is skipped: {skipped[name]}")


def _first_losses(trainer: Trainer, batch: Any) -> Iterator[float]:
    for _ in range(NUM_LOSSES):
        result = trainer.step(batch)
        await_step(trainer, result)
        yield trainer.loss(result)


def _in_turns(
    made: Mapping[Variant, Trainer], batch: Any, num_rounds: int
) -> dict[Variant, list[tuple[float, float, float, float]]]:
    """Per step: processor seconds of all threads that issue it, of those that are not the calling
    one, wall seconds, and processor seconds of the whole process."""
    found: dict[Variant, list[tuple[float, float, float, float]]] = {key: [] for key in made}
    order = list(made)
    # What compiling left behind is not gone through again in the middle of a step.
    gc.collect()
    gc.freeze()
    with PythonThreads() as threads:
        for count in range(num_rounds):
            turn = count % len(order)
            for variant in order[turn:] + order[:turn]:
                gc.collect()
                times = [_timed(made[variant], batch, threads) for _ in range(STEPS_PER_TURN)]
                found[variant] += times[1:]
    gc.unfreeze()
    return found


def _timed(
    trainer: Trainer, batch: Any, threads: PythonThreads
) -> tuple[float, float, float, float]:
    others, process, wall = threads.seconds(), time.process_time(), time.perf_counter()
    calling = time.thread_time()
    result = trainer.step(batch)
    calling = time.thread_time() - calling
    await_step(trainer, result)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    others = threads.seconds() - others
    return calling + others, others, wall, process


def compare_memory(model: str, schedule: str, skipped: dict[str, str]) -> list[dict[str, Any]]:
    """A row per library and remat, each from a process of its own."""
    rows = []
    for name, remat in variants(REMATS_HELD, skipped):
        say(f"{model}, {schedule}: {name}, remat {remat}: memory")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            case = case_of(model, schedule, remat)
            try:
                found = pool.submit(measure_memory, name, case).result()
            except Exception as error:
                _skip(name, error, skipped)
                continue
        rows.append(
            {
                "library": name,
                "model": model,
                "schedule": schedule,
                "remat": remat,
                **asdict(found),
            }
        )
    return rows


def ratios(
    steps: Sequence[Mapping[str, Any]], memory: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Ours over each other library, by model, schedule and what is recomputed; ``cheap`` computes
    no product again, and stands beside others that recompute nothing."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for ours, other in [pair for rows in (steps, memory) for pair in product(rows, repeat=2)]:
        if ours["library"] != OURS or other["library"] == OURS or not _alike(ours, other):
            continue
        key = ours["model"], ours["schedule"], ours["remat"], other["library"]
        row = found.setdefault(
            key, dict(zip(("model", "schedule", "remat", "library"), key, strict=True))
        )
        if "peak_bytes_per_device" in ours:
            peaks = [max(each["peak_bytes_per_device"]) for each in (ours, other)]
            row["peak_ratio"] = peaks[0] / peaks[1]
        for what in ("overhead_per_task", "step", "processor"):
            if other.get(f"{what}_seconds"):
                row[f"{what}_ratio"] = ours[f"{what}_seconds"] / other[f"{what}_seconds"]
    return list(found.values())


def _alike(ours: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    recomputed = "none" if ours["remat"] == "cheap" else ours["remat"]
    return (ours["model"], ours["schedule"], recomputed) == tuple(
        other[key] for key in ("model", "schedule", "remat")
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_text(document: Mapping[str, Any]) -> str:
    steps = [
        [
            row["model"],
            row["schedule"],
            row["library"],
            row["remat"],
            f"{row['dispatch_seconds'] * 1e3:.1f}",
            f"{row['overhead_per_task_seconds'] * 1e6:.0f}" if row["num_tasks"] else "",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['processor_seconds'] * 1e3:.1f}",
            f"{row['max_relative_loss_difference']:.0e}",
        ]
        for row in document["steps"]
    ]
    memory = [
        [
            row["model"],
            row["schedule"],
            row["library"],
            row["remat"],
            f"{max(row['peak_bytes_per_device']) / 1e6:.2f}",
            f"{max(row['between_steps_bytes_per_device']) / 1e6:.2f}",
            str(row["num_programs"]),
        ]
        for row in document["memory"]
    ]
    names = ["model", "schedule", "library", "remat"]
    compared = [
        [
            *(row[key] for key in names),
            *(
                f"{row[f'{what}_ratio']:.3f}" if f"{what}_ratio" in row else ""
                for what in ("overhead_per_task", "step", "processor", "peak")
            ),
        ]
        for row in document["ratios"]
    ]
    return "\n\n".join(
        [
            table(
                [*names, "dispatch ms", "us per task", "step ms", "processor ms", "loss differs"],
                steps,
            ),
            table([*names, "peak MB", "between steps MB", "programs"], memory),
            table([*names, "ours: overhead", "step", "processor", "peak"], compared),
            *(f"skipped: {name}: {why}" for name, why in document["skipped"].items()),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
