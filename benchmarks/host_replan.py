"""A node of four is lost for good: how long until the training goes on under a plan for the other
three, and what its losses then are.

    python benchmarks/host_replan.py -o benchmarks/results/NAME.json

The nodes are virtual: four processes of one device each, of this machine, whose cores they share.
The model has 32 layers, which are profiled before. One process is killed in a step after the first
checkpoint. Steps that are repeated under the other plan have losses under both: their difference is
the rounding of another split.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import documents

from capture import environment
from capture.cli.replan import replanner
from capture.plan.stages import Plan
from capture.runtime.hosts.driver import run_on_this_machine
from capture.runtime.hosts.restarts import Restarts

WORKLOAD = (
    f"{Path(__file__).parent / 'plain_gpt.py'}"
    ":gpt?num_blocks=32&width=16&num_heads=2&seq_len=8&vocab_size=32"
)
NUM_LAYERS, CLUSTER, GLOBAL_BATCH, MICROBATCHES, SAVE_EVERY = 32, "4x1", 8, 4, 5
QUESTION: tuple[str, ...] = ("--cluster", CLUSTER, "--global-batch", str(GLOBAL_BATCH))
QUESTION += ("--microbatches", str(MICROBATCHES), "--remat", "none", "--quiet")
PROFILED = ("--num-layers", str(NUM_LAYERS), "--calibration-plans", "0")
VICTIM, KILLED_AFTER, NUM_STEPS = 2, 14, 16


def command(verb: str, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "capture", verb, WORKLOAD, *options], check=True)


def cpu_seconds_of_children() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = documents.arguments(__doc__)
    parser.add_argument("--profile", type=Path, help="that this script has left elsewhere")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    store = ("--store", str(folder / "store.sqlite"))
    profile = options.profile or folder / "profile.json"
    if not profile.exists():
        command("profile", *QUESTION, *PROFILED, *store, "-o", str(profile))
    command("plan", *QUESTION, "--profile", str(profile), "-o", str(folder / "plan.json"))
    plan = Plan.load(folder / "plan.json")
    assert plan.workload is not None
    losses: dict[int, list[float]] = {}
    cpu_seconds: list[float] = []

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if "is gone" in text:
            cpu_seconds.append(cpu_seconds_of_children())
        if found := re.fullmatch(r"step (\d+): loss (\S+)", text):
            of_step = losses.setdefault(int(found[1]), [])
            of_step.append(float(found[2]))
            if int(found[1]) == KILLED_AFTER and len(of_step) == 1:
                processes = sorted(child.pid or 0 for child in multiprocessing.active_children())
                os.kill(processes[VICTIM], signal.SIGKILL)

    load_before = os.getloadavg()
    document = run_on_this_machine(
        plan,
        plan.workload.admitted(trust=True),
        {"num_steps": NUM_STEPS, "save": folder / "saved", "save_every": SAVE_EVERY},
        report,
        Restarts(0, replanner([profile], plan)),
    )
    (broken,) = document["restarts"]
    repeated = {step: found for step, found in losses.items() if len(found) > 1}
    return documents.finish(
        "replan after a lost node",
        document["restarts"],
        options,
        versions=environment.versions(),
        num_layers=NUM_LAYERS,
        stages_before=[stage.num_layers for stage in plan.stages],
        num_steps=len(document["losses"]),
        losses=document["losses"],
        load_average=[load_before, os.getloadavg()],
        claims={
            "node_gone": broken["nodes_gone"],
            "resumed_from_step": broken["resumed_from_step"],
            "replan_seconds": broken["replan_seconds"],
            "seconds_to_next_step": broken["seconds_to_next_step"],
            # What the three processes need in all, whoever else uses the cores.
            "cpu_seconds_of_the_rest": cpu_seconds_of_children() - cpu_seconds[0],
            "repeated_steps": sorted(repeated),
            "most_relative_difference": max(
                (abs(a - b) / abs(a) for a, *_, b in repeated.values()), default=None
            ),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
