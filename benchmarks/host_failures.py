"""One run over two hosts with random failures: its losses and parameters must be those of the
undisturbed run, bit for bit, with no hang, no checkpoint lost, and no process left behind.

    python benchmarks/host_failures.py --failures 100 --steps 200 -o benchmarks/results/NAME.json

Each failure is of a random process, at a random moment after all were started: while they start,
compile, restore, train or save.

    kill     SIGKILL
    stop     SIGSTOP for ever: lost when the heartbeat is over
    pause    SIGSTOP for less than the heartbeat: nothing may follow
    cut      the TCP connections of the process are destroyed (``ss -K``, as root; a kill where the
             kernel cannot)

The heartbeat is 5 s, so that many failures fit into an hour. No time is judged: the times of the
document are of a machine that other work may use.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import documents

from capture import environment
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.runtime.hosts.saved import complete_steps

WORKLOAD = (
    f"{Path(__file__).parent / 'plain_gpt.py'}"
    ":gpt?num_blocks=2&width=16&num_heads=2&seq_len=8&vocab_size=32"
)
HEARTBEAT_SECONDS, SAVE_EVERY = 5.0, 10
KINDS = {"kill": 0.5, "stop": 0.2, "pause": 0.15, "cut": 0.15}
#: Of the failures, those that are not while all starts.
TRAINING_FRACTION = 0.3
#: On an idle machine nothing may take so long: neither a restart nor ten steps.
HANG_SECONDS = 300.0


class Run:
    """``capture run`` in a process of its own, and what it says."""

    def __init__(self, plan: Path, steps: int, save: Path):
        self.began = time.monotonic()
        command = [sys.executable, "-m", "capture", "run", str(plan), "--hosts", "local", "--json"]
        command += [
            "--trust",
            "--steps",
            str(steps),
            "--save",
            str(save),
            "--save-every",
            str(SAVE_EVERY),
        ]
        command += ["--max-restarts", "1000", "--heartbeat", str(HEARTBEAT_SECONDS)]
        # What was compiled is kept: restarts are what is tried here.
        kept = {"JAX_COMPILATION_CACHE_DIR": str(plan.with_name("compiled"))}
        kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | kept,
        )
        self.lines: list[tuple[float, str]] = []
        self.out = ""
        self.threads = [threading.Thread(target=each) for each in (self._hear, self._read)]
        for thread in self.threads:
            thread.start()

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))
            if not line.startswith("step "):
                print(f"    {line.rstrip()}", file=sys.stderr, flush=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.out = self.process.stdout.read()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def hosts(self) -> list[int]:
        """The processes that it has started, the first host first."""
        found: list[int] = []
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                found += map(int, thread.read_text().split())
            except OSError:
                continue
        return sorted(child for child in found if "spawn_main" in _arguments(child))

    def steps_since(self, line: int) -> int:
        return sum(text.startswith("step ") for _, text in self.lines[line:])

    def document(self) -> dict:
        for thread in self.threads:
            thread.join()
        assert self.process.wait() == 0, "\n".join(text for _, text in self.lines[-40:])
        return json.loads(self.out)


def _arguments(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def state_of(process: int) -> str:
    """As ``/proc`` has it; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def plan_of_two_hosts(folder: Path) -> Path:
    stages = (
        Stage(0, 1, (0, 1), StageChoice(data_parallel=2)),
        Stage(1, 2, (2, 3), StageChoice(tensor_parallel=2)),
    )
    workload = WorkloadSpec.parse(WORKLOAD)
    Plan(Cluster((2, 2)), 2, stages, 4, 2, workload=workload).save(folder / "plan.json")
    return folder / "plan.json"


def fail(kind: str, victim: int, chance: random.Random) -> str:
    """What was done."""
    if kind == "cut":
        # Connections to the one that started it are no sockets of the network.
        listing = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True).stdout
        ports = [
            line.split()[3].rpartition(":")[2]
            for line in listing.splitlines()
            if f"pid={victim}," in line
        ]
        for port in ports:
            subprocess.run(["ss", "-K", "sport", "=", port], capture_output=True)
        after = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True).stdout
        if ports and f"pid={victim}," not in after:
            return "cut"
        kind = "kill"
    os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "pause":
        time.sleep(chance.uniform(0.1, HEARTBEAT_SECONDS / 2))
        os.kill(victim, signal.SIGCONT)
    return kind


def hangs(since: float) -> bool:
    return time.monotonic() - since > environment.patience(HANG_SECONDS)


def disturb(
    run: Run, count: int, chance: random.Random, kinds: list[str], save: Path, end: float
) -> dict:
    """Make failures until there are so many, or the run or the time is over."""
    done: Counter[str] = Counter()
    seen: set[int] = set()
    newest, start_seconds = 0, 6.0
    while run.running and sum(done.values()) < count and time.monotonic() < end:
        hosts, begin = run.hosts(), time.monotonic()
        while run.running and (len(hosts) < 2 or all(host in seen for host in hosts)):
            assert not hangs(begin), "it does not start again"
            time.sleep(0.02)
            hosts = run.hosts()
        line, begin = len(run.lines), time.monotonic()
        kind = chance.choices(kinds, [KINDS[each] for each in kinds])[0]
        # While it trains, or saves; else while it starts, until its first step at the latest: a run
        # that is left to train for long is over before it has had many failures.
        steps, wait = 1, chance.uniform(0.0, start_seconds)
        if chance.random() < TRAINING_FRACTION:
            steps, wait = chance.randint(1, 13), float("inf")
        while run.running and run.steps_since(line) < steps and time.monotonic() - begin < wait:
            assert not hangs(begin), "it does not go on"
            if run.hosts() != hosts:
                break
            time.sleep(0.005)
        if run.steps_since(line) == 1 and steps == 1:
            start_seconds = min(time.monotonic() - begin, 60.0)
        time.sleep(chance.uniform(0.0, 0.2))
        there = complete_steps(save)
        assert max(there, default=0) >= newest, f"checkpoint {newest} is lost: {there}"
        newest = max(there, default=0)
        victim = chance.choice(hosts)
        if not run.running or state_of(victim) in ("", "Z"):
            seen.update(hosts)
            continue
        done[fail(kind, victim, chance)] += 1
        if kind != "pause":
            seen.update(hosts)
        print(f"{sum(done.values())}: {dict(done)}, checkpoint {newest}", file=sys.stderr)
    return {"failures": dict(done), "processes": sorted(seen | set(run.hosts()))}


def parameters(plan: Path, save: Path) -> dict:
    """Of the last checkpoint, in one process."""
    environment.prepare(num_devices=4)
    import jax
    import numpy as np

    from capture import pipeshard
    from capture.runtime import checkpoint

    plan_read = Plan.load(plan)
    assert plan_read.workload is not None
    step = pipeshard(plan_read.workload.load(trust=True), plan_read)
    state = checkpoint.restore(step, save)
    leaves = jax.tree.leaves((step.params(state), step.optimizer_state(state)))
    return {"num_steps": state.num_steps, "leaves": [np.asarray(leaf) for leaf in leaves]}


def main() -> int:
    parser = documents.arguments(__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after which the run is left in peace"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    plan = plan_of_two_hosts(folder)
    undisturbed = Run(plan, options.steps, folder / "undisturbed").document()
    run = Run(plan, options.steps, folder / "disturbed")
    chance = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    found = disturb(run, options.failures, chance, options.kinds, folder / "disturbed", end)
    document = run.document()
    one, other = (parameters(plan, folder / name) for name in ("undisturbed", "disturbed"))
    left = [process for process in found["processes"] if state_of(process)]
    restarts = document.get("restarts", [])
    claims = {
        "losses_equal": document["losses"] == undisturbed["losses"],
        "parameters_bit_equal": all(
            (a == b).all() for a, b in zip(one["leaves"], other["leaves"], strict=True)
        ),
        "num_steps": [one["num_steps"], other["num_steps"]],
        "processes_left": left,
    }
    shutil.rmtree(folder)
    documents.finish(
        "failures of hosts",
        restarts,
        options,
        versions=environment.versions(),
        steps=options.steps,
        save_every=SAVE_EVERY,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        failures_asked=options.failures,
        failures=found["failures"],
        num_failures=sum(found["failures"].values()),
        num_restarts=len(restarts),
        wall_seconds=run.lines[-1][0],
        claims=claims,
    )
    return 0 if claims["losses_equal"] and claims["parameters_bit_equal"] and not left else 1


if __name__ == "__main__":
    sys.exit(main())
