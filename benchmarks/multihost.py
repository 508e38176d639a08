"""What it costs to run a plan over several processes, on virtual CPU devices of this machine.

Four questions, each answered by medians of one run of this script; what is compared takes turns, so
that it meets the same load of the machine:

* transfers: how long an array takes from a process to another, half of a round trip, by the
  transports (``capture.runtime.multihost.TRANSPORTS``; sockets also through gates, as between
  machines) and by a plain TCP socket whose bytes
  become an array; beside them a copy of as many bytes in one process.
* dispatch: how long the host thread of a process is busy with a copy that leaves it, with one that
  comes, and with waiting for acknowledgements, in the interpreter of a step.
* steps: a step over two hosts against one in one process, on the same cores.
* detection: from a signal to a host's process until the driver has ended all others and raises its
  error. A frozen host is found after 10 s without a sign of life, more under load.

``--quick`` takes fewer repetitions and freezes no host.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from capture import environment
from capture.errors import CaptureError, ExecutionError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan, Stage
from capture.runtime.hosts.driver import run_on_this_machine
from capture.step.program import Copy, Wait

if TYPE_CHECKING:  # JAX is told of its devices first
    from capture.runtime.multihost import Hosts
    from capture.runtime.pipeline import PipelinedStep

HERE = Path(__file__).resolve().parent
#: Steps of it are nothing but dispatch.
MICRO = f"{HERE / 'plain_gpt.py'}:gpt?num_blocks=8&width=32&num_heads=4&seq_len=8&vocab_size=100"
GPT = f"{HERE.parent / 'models' / 'gpt.py'}:gpt?size=tiny"
WORKLOADS = {"smallest gpt": MICRO, "gpt tiny": GPT}
#: (data, tensor) parallel degrees of the stages, one on each host.
PLANS = {"1 / 1": ((1, 1), (1, 1)), "DP2 / TP2": ((2, 1), (1, 2))}
#: Transport and the secret of the run, by what the row is called.
TRANSPORTS = {
    "sockets": ("sockets", None),
    "gates": ("sockets", "of a benchmark, known to all"),
    "device_put": ("device_put", None),
}
GLOBAL_BATCH_SIZE, NUM_MICROBATCHES = 16, 8


def make_plan(workload: str, degrees: tuple[tuple[int, int], ...]) -> Plan:
    """Two equal stages, 1F1B."""
    devices = degrees[0][0] * degrees[0][1]
    stages = tuple(
        Stage(4 * s, 4 * s + 4, tuple(range(devices * s, devices * (s + 1))), StageChoice(*each))
        for s, each in enumerate(degrees)
    )
    return Plan(
        Cluster((devices, devices)),
        8,
        stages,
        GLOBAL_BATCH_SIZE,
        NUM_MICROBATCHES,
        workload=WorkloadSpec.parse(workload),
    )


# ---- what a process does -------------------------------------------------------------------------


def serve(
    host: int,
    coordinator: str,
    flags: tuple[str, ...],
    transport: str,
    secret: str | None,
    connection: Connection,
) -> None:
    """Does what it is told, together with the other host, until nobody tells it anything."""
    os.dup2(2, 1)  # standard output is the document's
    environment.prepare_worker(2, "cpu", flags)
    from benchmarks.host_transfers import transfers
    from capture.runtime import multihost

    plan = make_plan(GPT, PLANS["DP2 / TP2"])
    hosts = multihost.initialize(
        coordinator, 2, host, plan=plan, transport=transport, secret=secret
    )
    trainings: dict[tuple[str, str], Steps] = {}
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        if what == "transfers":
            connection.send(transfers(hosts, *arguments))
            continue
        workload, plan_name, num_steps = arguments
        if (workload, plan_name) not in trainings:
            trainings[workload, plan_name] = Steps(workload, plan_name, hosts)
        training = trainings[workload, plan_name]
        connection.send(getattr(training, what)(num_steps))


class Steps:
    """A training that goes on when it is told to, of one process or of hosts.

    Args:
        workload, plan_name: Of ``WORKLOADS`` and ``PLANS``.
        hosts: That share it.
    """

    def __init__(self, workload: str, plan_name: str, hosts: Hosts | None = None):
        import jax
        import numpy as np

        from capture.runtime.pipeline import pipeshard

        task = WorkloadSpec.parse(WORKLOADS[workload]).load()
        plan = make_plan(WORKLOADS[workload], PLANS[plan_name])
        self.step: PipelinedStep = pipeshard(task, plan, hosts=hosts)
        self._hosts, self._jax = hosts, jax
        self._batch = jax.tree.map(np.asarray, task.batch(jax.random.key(1), GLOBAL_BATCH_SIZE))
        self.state = self.step.init(jax.random.key(0))
        self.seconds(2)

    def seconds(self, num_steps: int) -> list[float]:
        """Of steps one after the other, each awaited with its loss."""
        found = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step()
            found.append(time.perf_counter() - start)
        return found

    def dispatch(self, num_steps: int) -> dict[str, list[float]]:
        """Seconds of the instructions that this process shares with another, by what it does."""
        assert self._hosts is not None
        clock = Clock(self.step, self._hosts)
        for _ in range(num_steps):
            self._step(clock)
            clock.end()
        return dict(clock.seconds)

    def _step(self, observer: Any = None) -> None:
        self.state, metrics = self.step(self.state, self._batch, observer=observer)
        self._jax.block_until_ready((self.state, metrics.losses))


class Clock:
    """An observer of a step: how long copies that cross take the calling thread, and waits of their
    sender; in it, how long the thread has a core (``_thread``), which a busy machine changes less.
    """

    def __init__(self, step: PipelinedStep, hosts: Hosts):
        self.seconds: dict[str, list[float]] = defaultdict(list)
        program, self._kinds = step.program, dict[int, str]()
        sent: dict[int, bool] = {}
        here = {
            place.name
            for place in program.places
            if any(step.devices[d].process_index == hosts.process for d in place.devices)
        }
        for instruction in program.instructions:
            match instruction:
                case Copy(source=source, target=target):
                    sends, receives = (
                        program.slots[slot].place.name in here for slot in (source, target)
                    )
                    sent[target] = sends and not receives
                    if sends != receives:
                        self._kinds[id(instruction)] = "offer" if sends else "pull"
                case Wait(slot=slot) if sent.get(slot):
                    self._kinds[id(instruction)] = "wait"
        self._current, self._start, self._start_of_thread = "", 0.0, 0.0

    def __call__(self, instruction: Any, slots: list[Any]) -> None:
        self.end()
        self._current = self._kinds.get(id(instruction), "")
        self._start, self._start_of_thread = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        seconds, of_thread = time.perf_counter(), time.thread_time()
        if self._current:
            self.seconds[self._current].append(seconds - self._start)
            self.seconds[f"{self._current}_thread"].append(of_thread - self._start_of_thread)
        self._current = ""


# ---- what is measured ----------------------------------------------------------------------------


class Pair:
    """Two processes of this machine that do as they are told."""

    def __init__(self, transport: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        context, flags = multiprocessing.get_context("spawn"), environment.active_flags()
        self._connections, self._processes = [], []
        for host in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(host, coordinator, flags, *TRANSPORTS[transport], theirs)
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """What each answers."""
        for connection in self._connections:
            connection.send((what, arguments))
        return [connection.recv() for connection in self._connections]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextmanager
def pair_of_hosts(transport: str) -> Iterator[Pair]:
    pair = Pair(transport)
    try:
        yield pair
    finally:
        pair.end()


def measure_dispatch(pair: Pair, num_steps: int) -> list[dict[str, Any]]:
    rows = []
    for plan_name in PLANS:
        log(f"dispatch, {plan_name}")
        both = pair.ask("dispatch", "smallest gpt", plan_name, num_steps)
        row: dict[str, Any] = {"workload": "smallest gpt", "plan": plan_name}
        for kind in ("offer", "pull", "wait"):
            seconds = [t for found in both for t in found.get(kind, ())]
            row |= {f"{kind}_seconds": median(seconds), f"{kind}_count": len(seconds)}
            row[f"{kind}_seconds_of_best_quarter"] = sorted(seconds)[len(seconds) // 4]
            row[f"{kind}_thread_seconds"] = median(
                t for found in both for t in found.get(f"{kind}_thread", ())
            )
        rows.append(row)
    return rows


def measure_steps(pair: Pair, num_rounds: int) -> list[dict[str, Any]]:
    """In turn, a few steps each: the processes that wait use no core."""
    rows = []
    for workload in WORKLOADS:
        for plan_name in PLANS:
            log(f"steps, {workload}, {plan_name}")
            one, times = Steps(workload, plan_name), defaultdict(list)
            for _ in range(num_rounds):
                times["one_process"] += one.seconds(4)
                of_hosts = pair.ask("seconds", workload, plan_name, 4)
                times["hosts"] += [max(both) for both in zip(*of_hosts, strict=True)]
            row: dict[str, Any] = {"workload": workload, "plan": plan_name}
            row |= {f"{name}_seconds": median(seconds) for name, seconds in times.items()}
            row |= {f"{name}_seconds_least": min(seconds) for name, seconds in times.items()}
            row["ratio"] = row["hosts_seconds"] / row["one_process_seconds"]
            rows.append(row | {"num_steps": 4 * num_rounds})
    return rows


def measure_detection(signals: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """A host of a running training gets a signal."""
    plan = make_plan(MICRO, PLANS["1 / 1"])
    assert plan.workload is not None
    rows = []
    for name, number in signals:
        for host in (0, 1):
            log(f"detection, {name}, host {host}")
            sent: list[float] = []
            try:
                run_on_this_machine(
                    plan,
                    plan.workload,
                    {"num_steps": 100_000},
                    _when_it_trains(lambda h=host, n=number, s=sent: _signal(h, n, s)),
                )
            except ExecutionError as error:
                seconds = time.monotonic() - sent[0]
                rows.append({"signal": name, "host": host, "seconds": seconds, "error": str(error)})
    return rows


def _when_it_trains(act: Callable[[], None]) -> Callable[[str], None]:
    """Listens to the lines of progress, and acts a moment after the third step."""

    def report(text: str) -> None:
        if text.startswith("step 3:"):
            threading.Timer(0.3, act).start()

    return report


def _signal(host: int, number: int, sent: list[float]) -> None:
    child = sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)[host]
    assert child.pid is not None
    sent.append(time.monotonic())
    os.kill(child.pid, number)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_tables(document: dict[str, Any]) -> None:
    log(f"\n{'one way':>23} {'transport':>12} {'plain socket':>12} {'copy':>12} {'ratio':>6}")
    for row in document["transfers"]:
        times = [row[f"{name}_seconds"] for name in ("transport", "plain_socket", "copy")]
        cells = " ".join(f"{seconds * 1e6:9.0f} us" for seconds in times)
        size = f"{row['transport']:10} {row['bytes'] / 1e6:9.3f} MB"
        log(f"{size} {cells} {row['ratio_to_plain_socket']:6.2f}")
    log("\ndispatch of an instruction, medians (best quarter; on a core)")
    for row in document["dispatch"]:
        cells = ", ".join(
            f"{kind} {row[f'{kind}_seconds'] * 1e6:.0f} us "
            f"({row[f'{kind}_seconds_of_best_quarter'] * 1e6:.0f}; "
            f"{row[f'{kind}_thread_seconds'] * 1e6:.0f})"
            for kind in ("offer", "pull", "wait")
        )
        log(f"{row['transport']:10} {row['plan']:12} {cells}")
    log("\nstep over two hosts, in one process")
    for row in document["steps"]:
        times = f"{row['hosts_seconds'] * 1e3:.1f} ms {row['one_process_seconds'] * 1e3:.1f} ms"
        name = f"{row['transport']:10} {row['workload']:14} {row['plan']:10}"
        log(f"{name} {times}, ratio {row['ratio']:.2f}")
    for row in document["detection"]:
        log(f"\n{row['signal']} to host {row['host']}: {row['seconds']:.2f} s: {row['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    CaptureError.check(environment.prepare(num_devices=4))
    load_before = os.getloadavg()
    signals = [("SIGKILL", signal.SIGKILL)] * (1 if args.quick else 3)
    if not args.quick:
        signals.append(("SIGSTOP", signal.SIGSTOP))
    document: dict[str, Any] = {
        "benchmark": "multihost",
        "date": datetime.date.today().isoformat(),
        "versions": environment.versions(),
        "xla_flags": list(environment.active_flags()),
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
    }
    document |= {"transfers": [], "dispatch": [], "steps": []}
    for transport in TRANSPORTS:
        with pair_of_hosts(transport) as pair:
            log(f"transfers, {transport}")
            found = {
                "transfers": pair.ask("transfers", 2 if args.quick else 5)[0],
                "dispatch": measure_dispatch(pair, 10 if args.quick else 40),
                "steps": measure_steps(pair, 2 if args.quick else 6),
            }
        for what, rows in found.items():
            document[what] += [{"transport": transport} | row for row in rows]
    document["detection"] = measure_detection(signals)
    # Above the number of cores before the start, other work shared the machine: seconds are
    # inflated then, ratios less so.
    document["hardware"] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "num_cores": len(os.sched_getaffinity(0)),
        "devices": "virtual CPU devices of processes of one machine, which share its cores",
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
    }
    print_tables(document)
    if args.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
