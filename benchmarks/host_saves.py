"""What a checkpoint that is written while the training goes on costs the step that follows: two
hosts of one device, processes of this machine.

    python benchmarks/host_saves.py -o benchmarks/results/NAME.json

A round is a step, awaited; then the state is copied to the hosts, and a step is awaited while it is
written; then the end of the writing. The cost is what the copy and the step take more than a step
alone, in the slower process. Writers and steps share the cores of the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import documents
from multihost import PLANS, WORKLOADS, Steps

from capture import environment
from capture.errors import CaptureError
from capture.runtime.hosts.addresses import free_port


def serve(
    host: int, coordinator: str, num_rounds: int, folder: str, connection: Connection
) -> None:
    """Seconds of every round, by workload."""
    os.dup2(2, 1)  # standard output is the document's
    environment.prepare_worker(1, "cpu", environment.active_flags())
    import jax

    from capture.runtime import multihost
    from capture.runtime.hosts.saving import Saver

    hosts, found = multihost.initialize(coordinator, 2, host), dict[str, Any]()
    for name in WORKLOADS:
        training = Steps(name, "1 / 1", hosts)
        saver = Saver(training.step, Path(folder) / name.replace(" ", "_"))
        rows = []
        for _ in range(num_rounds + 2):
            (alone,) = training.seconds(1)
            begin = time.perf_counter()
            saver.save(training.state)
            copied = time.perf_counter() - begin
            (followed,) = training.seconds(1)
            begin = time.perf_counter()
            saver.finish()
            rows.append([alone, copied, followed, time.perf_counter() - begin])
        held = jax.tree.leaves(training.state.slots)
        nbytes = sum(shard.data.nbytes for array in held for shard in array.addressable_shards)
        found[name] = {"rows": rows[2:], "state_bytes": nbytes}
    connection.send(found)
    connection.recv()


def main() -> int:
    parser = documents.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    CaptureError.check(environment.prepare(num_devices=1))
    load_before, context = os.getloadavg(), get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        coordinator, started = f"127.0.0.1:{free_port()}", []
        for host in (0, 1):
            ours, theirs = context.Pipe()
            arguments = (host, coordinator, options.rounds, folder, theirs)
            started.append((context.Process(target=serve, args=arguments, daemon=True), ours))
            started[-1][0].start()
            theirs.close()
        try:
            both = [connection.recv() for _, connection in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    rows = []
    for name in WORKLOADS:
        rounds = [
            [max(of_hosts) for of_hosts in zip(*of_round, strict=True)]
            for of_round in zip(*(of_host[name]["rows"] for of_host in both), strict=True)
        ]
        alone, copied, followed, finished = (median(each) for each in zip(*rounds, strict=True))
        cost = median(copied + followed - alone for alone, copied, followed, _ in rounds)
        rows.append(
            {
                "workload": name,
                "plan": PLANS["1 / 1"],
                "state_bytes_per_host": [of_host[name]["state_bytes"] for of_host in both],
                "step_seconds": alone,
                "copy_seconds": copied,
                "following_step_seconds": followed,
                "seconds_until_written": finished,
                "cost_seconds": cost,
                "cost_fraction": cost / alone,
            }
        )
    return documents.finish(
        "cost of an asynchronous save",
        rows,
        options,
        versions=environment.versions(),
        num_rounds=options.rounds,
        load_average=[load_before, os.getloadavg()],
        claims={row["workload"]: [row["cost_seconds"], row["cost_fraction"]] for row in rows},
    )


if __name__ == "__main__":
    sys.exit(main())
