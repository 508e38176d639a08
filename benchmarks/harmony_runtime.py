"""What it costs the host to issue a step of packs, and what such a step moves.

    python -m benchmarks.harmony_runtime -o RESULT.json

* dispatch: seconds from handing an instruction to the runtime until it comes back, the devices idle
  before each, by kind: programs on devices, updates on the host, copies, feeds. Steps of packs and
  of a pipeline of the same model in turn, so that both meet the same load of the machine.
* volumes: what every switch that is off adds to what is moved, counted from the instructions, and
  whether two steps give the same bits.
* overlap, where a GPU is at hand: seconds of a step with and without prefetch.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import fields, replace
from statistics import median
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.runtime_overhead import DispatchTimer, make_plan, seconds
from capture import environment
from capture.cli.tiny_gpt import gpt
from capture.machine.server import Server
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Switches
from capture.runtime.pipeline import pipeshard
from capture.runtime.streamed import streamed
from capture.step.pack_times import volumes_bytes
from capture.step.program import Copy, Feed, Instruction, Run, Step

NUM_BLOCKS, EXAMPLES, MICROBATCH = 4, 8, 2


def packs_of(devices: int, without: tuple[str, ...] = ()) -> PacksPlan:
    """Packs of one block."""
    forward, backward = (
        Packs.of_lengths(MICROBATCH, (1,) * 3),
        Packs.of_lengths(MICROBATCH, (1,) * 4),
    )
    server = Server.load("gtx1080ti-x4").with_(num_devices=devices)
    switches = Switches.without(without)
    configuration = Configuration(forward, backward)
    return PacksPlan(server, NUM_BLOCKS, EXAMPLES, "pp", configuration, switches)


def kind_of(step: Step, instruction: Instruction) -> str | None:
    """Of what is issued; None for what only the host does."""
    match instruction:
        case Run(program=program):
            on_host = step.programs[program].place.host is not None
            return "program on the host" if on_host else "program"
        case Copy(source=source, target=target):
            one, other = (step.slots[slot].place for slot in (source, target))
            if one.host is not None:
                return "copy in"
            return "copy out" if other.host is not None else "copy between devices"
        case Feed():
            return "feed"
    return None


def measure_dispatch(num_steps: int) -> list[dict[str, Any]]:
    import jax
    import numpy as np

    workload, devices = gpt(NUM_BLOCKS), min(4, len(jax.devices()))
    batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), EXAMPLES))
    steps: dict[str, Any] = {
        "packs": streamed(workload, packs_of(devices)),
        "pipeline": pipeshard(
            workload,
            replace(
                make_plan(((1, 1),) * devices, NUM_BLOCKS),
                global_batch_size=EXAMPLES,
                num_microbatches=EXAMPLES // MICROBATCH,
            ),
        ),
    }
    states = {name: step.init(jax.random.key(0)) for name, step in steps.items()}
    timers = {name: DispatchTimer() for name in steps}
    for count in range(num_steps + 2):
        for name, step in steps.items():
            observer = timers[name] if count > 1 else None  # the first calls are checked
            states[name], _ = step(states[name], batch, observer=observer)
            jax.block_until_ready(states[name])
    rows = []
    for name, step in steps.items():
        found: defaultdict[str, list[float]] = defaultdict(list)
        for instruction, times in timers[name].seconds.items():
            if (kind := kind_of(step.program, instruction)) is not None:
                found[kind] += times
                found["all"] += times
        rows += [
            {
                "plan": name,
                "kind": kind,
                "median_seconds": median(times),
                "num_per_step": len(times) // num_steps,
            }
            for kind, times in sorted(found.items())
        ]
    return rows


def measure_volumes() -> list[dict[str, Any]]:
    import jax

    workload, rows, first = gpt(NUM_BLOCKS), [], None
    for off in ((), *((field.name,) for field in fields(Switches))):
        step = streamed(workload, packs_of(2, off))
        ledger, state = step.replay(), step.init(jax.random.key(0))
        for i in range(2):
            state, metrics = step(state, workload.batch(jax.random.key(i), EXAMPLES))
        leaves = [leaf.tobytes() for leaf in jax.tree.leaves(step.params(state))]
        bits = (metrics.loss, b"".join(leaves))
        first = first or bits
        rows.append(
            {
                "without": list(off),
                "volumes_bytes": volumes_bytes(step.program),
                "device_peak_bytes": list(ledger.peak_bytes_per_device),
                "host_peak_bytes": ledger.peak_of("host").peak_bytes,
                "same_bits_as_all_on": bits == first,
            }
        )
    return rows


def measure_overlap(num_steps: int) -> list[dict[str, Any]]:
    import jax

    if jax.devices()[0].platform != "gpu":
        return []
    workload, rows = gpt(NUM_BLOCKS), []
    for off in ((), ("prefetch",)):
        step = streamed(workload, packs_of(1, off))
        batch, held = workload.batch(jax.random.key(1), EXAMPLES), [step.init(jax.random.key(0))]

        def run(step: Any = step, held: Any = held, batch: Any = batch) -> None:
            held[0], metrics = step(held[0], batch)
            jax.block_until_ready((held[0], metrics.losses))

        run()
        times = [seconds(run) for _ in range(num_steps)]
        rows.append({"without": list(off), "step_seconds": median(times)})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    options = parser.parse_args(argv)
    load = os.getloadavg()
    dispatch = measure_dispatch(options.steps)
    return finish(
        "harmony_runtime",
        dispatch,
        options,
        volumes=measure_volumes(),
        overlap=measure_overlap(options.steps),
        model=f"GPT of capture demo, {NUM_BLOCKS} blocks, {EXAMPLES} examples, packs of 1 block",
        versions=environment.versions(),
        # Above the number of cores, other work shared the machine: seconds are too many then.
        load_average_before=load,
        load_average_after=os.getloadavg(),
    )


if __name__ == "__main__":
    sys.exit(main())
