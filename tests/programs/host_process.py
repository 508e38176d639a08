"""One process of several that share a plan: ``host_process.py COORDINATOR NUM_HOSTS HOST FOLDER
DELAY CASE...`` leaves what every case gives in a file of the folder; before every instruction it
waits at random, up to DELAY seconds."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from capture import environment

environment.prepare(num_devices=2)

import host_cases
import numpy as np

from capture import pipeshard
from capture.runtime import multihost


def main(coordinator: str, num_hosts: str, host: str, folder: str, delay: str, *names: str) -> None:
    hosts = multihost.initialize(coordinator, int(num_hosts), int(host), patience_seconds=60)
    chance = random.Random(int(host))
    observer = None
    if float(delay):

        def observer(instruction, slots):
            time.sleep(chance.random() * float(delay))

    for name in names:
        workload, plan, hosts.window = host_cases.ALL[name]()
        step = pipeshard(workload, plan, hosts=hosts)
        directory = Path(folder) / "saved" if name == host_cases.SAVED else None
        found = host_cases.train(step, workload, observer, directory)
        np.savez(Path(folder) / f"{name}.{host}.npz", **found)
    hosts.exchange("end", None)


if __name__ == "__main__":
    main(*sys.argv[1:])
