"""One process of several that share a plan: ``host_process.py COORDINATOR NUM_HOSTS HOST FOLDER
DELAY SEEDS CASE...`` leaves what every case gives in a file of the folder; before every instruction
it waits at random, up to DELAY seconds. Of several seeds all must give the same. A case may have
the transport in front of it: ``device_put:unequal``."""

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
from capture.runtime.frame import Observer


def main(
    coordinator: str, num_hosts: str, host: str, folder: str, delay: str, seeds: str, *names: str
) -> None:
    hosts = multihost.initialize(
        coordinator,
        int(num_hosts),
        int(host),
        plan=host_cases.widest(names),
        transport="device_put",
        patience_seconds=60,
    )
    for name in names:
        workload, plan, hosts.window = host_cases.case(name)
        hosts.transport_name = host_cases.transport(name)
        step = pipeshard(workload, plan, hosts=hosts)
        directory = Path(folder) / "saved" if name == host_cases.SAVED else None
        observers = [delays(f"{seed} {host}", float(delay)) for seed in range(int(seeds))]
        found = host_cases.train(step, workload, observers[0], directory)
        np.savez(Path(folder) / f"{name}.{host}.npz", **found)
        for seed, observer in enumerate(observers[1:], 1):
            again = host_cases.train(step, workload, observer)
            for what, array in found.items():
                np.testing.assert_array_equal(again[what], array, f"{name}, seed {seed}: {what}")
    hosts.exchange("end", None)


def delays(seed: str, most: float) -> Observer | None:
    """Before instructions."""
    chance = random.Random(seed)
    return (lambda instruction, slots: time.sleep(chance.random() * most)) if most else None


if __name__ == "__main__":
    main(*sys.argv[1:])
