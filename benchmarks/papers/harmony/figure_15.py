"""Figure 15: estimated steps beside those that ran.

    python -m benchmarks.papers.harmony.figure_15 -o RESULT.json

Fifteen configurations, drawn with a fixed seed from all that the search explores, of a small GPT
on one device of this machine, minibatch 8, for devices of a third to two thirds of its memory;
what trains has room for more, as the rules of the paper leave some out. Layers are executed one by
one, the memory of the host is timed, and steps are estimated by the paper's rules and as
instructions; then every configuration trains.

Seconds are those of the processor, on one thread. There copies and updates of the host hide behind
nothing, so an estimate is the sum of all its passes, copies and updates: what a step consists of,
and not how it overlaps. Other work that shares the caches still adds to them, and clocks change: so
layers are timed before the steps and after them, and the steps of all configurations in turn.

Paper: BERT-Large, minibatch 600, four GPUs, Harmony PP: within 5 % on average.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

# One thread computes, so that the processor's seconds are those of the work.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
)

from benchmarks.documents import arguments, finish
from benchmarks.drawing import ALPA, FAINT, OURS, Panel, draw
from capture import environment
from capture.errors import CaptureError

CaptureError.check(environment.prepare(num_devices=1))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from capture.compiler.executable import HOST_MEMORY  # noqa: E402
from capture.machine.server import Server  # noqa: E402
from capture.measured.layer_profile import LayerProfile  # noqa: E402
from capture.measured.store import Store  # noqa: E402
from capture.model.workload import WorkloadSpec  # noqa: E402
from capture.papers.harmony.estimate import estimate  # noqa: E402
from capture.plan.packs import PacksPlan  # noqa: E402
from capture.plan.task_graph import Configuration  # noqa: E402
from capture.predictor.pack_step import packs_timeline  # noqa: E402
from capture.profiler.layers import LayerBackend  # noqa: E402
from capture.runtime.streamed import streamed  # noqa: E402
from profiling_runs import LayersQuestion, Where, profile_layers  # noqa: E402
from recommender.harmony import PacksQuestion  # noqa: E402

ZOO = Path(__file__).parents[3] / "models"
WORKLOAD = "mingpt.py:mingpt?size=6x256&seq_len=128&vocab_size=256"
MINIBATCH, NUM_POINTS, SEED, NUM_STEPS, NUM_ROUNDS = 8, 15, 15, 3, 7
#: Of what all layers need with one example, so that there are several packs.
SHARES_OF_MODEL = 0.35, 0.5, 0.7


def swap_bytes_per_second() -> float:
    """Between a device and the memory of its host, both ways."""
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    here = jax.sharding.SingleDeviceSharding(device)
    array = jax.device_put(jnp.ones(1 << 18), here)

    def both_ways() -> None:
        jax.block_until_ready(jax.device_put(jax.device_put(array, there), here))

    return 2 * array.nbytes / seconds_of(both_ways)


def seconds_of(call: Callable[[], Any]) -> float:
    """Median of the processor's, after one call."""
    found = []
    for _ in range(NUM_STEPS + 1):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return median(found[1:])


def layers_of(spec: WorkloadSpec) -> LayerProfile:
    """Executed one by one, now."""
    asked = LayersQuestion(spec, backend="run", most=MINIBATCH, stride=2)
    return profile_layers(asked, where=Where(0), store=Store())


def points(profile: LayerProfile, server: Server) -> list[Configuration]:
    """Different ones of all that Algorithm 1 explores, with devices of several sizes."""
    whole = sum(profile.at("backward", 1).memory_bytes)
    problems = [
        PacksQuestion(profile, server.with_(usable_bytes=int(share * whole)), MINIBATCH).problem(
            "pp"
        )
        for share in SHARES_OF_MODEL
    ]
    choices = (choice for problem in problems for choice in problem.choices())
    every = list(dict.fromkeys(choice.configuration for choice in choices))
    return random.Random(SEED).sample(every, min(NUM_POINTS, len(every)))


class Training:
    """Steps of one configuration, timed one by one."""

    def __init__(self, configuration: Configuration, num_layers: int, server: Server, model: Any):
        self.configuration = configuration
        self.plan = PacksPlan(server, num_layers, MINIBATCH, "pp", configuration)
        self.seconds: list[float] = []
        self._step = streamed(model, self.plan)
        self._batch = model.batch(jax.random.key(1), MINIBATCH)
        self._state = self._step.init(jax.random.key(0))
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        start = time.process_time()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics.losses))
        self.seconds.append(time.process_time() - start)

    def row(self, profiles: list[LayerProfile]) -> dict[str, Any]:
        """Beside estimates by layers as they were timed each time."""
        graph, server = self.plan.tasks(), self.plan.machine
        timelines = [packs_timeline(graph, profile, server) for profile in profiles]
        rules = [estimate(graph, profile, server) for profile in profiles]
        seconds = {
            "as instructions": mean(
                sum(work.seconds for work in timeline.simulation.work) for timeline in timelines
            ),
            "by the paper's rules": mean(sum(rule.items.seconds) for rule in rules),
        }
        one, other = self.configuration.forward, self.configuration.backward
        actual = median(self.seconds)
        return {
            "configuration": [
                one.microbatch_size,
                len(one.packs),
                other.microbatch_size,
                len(other.packs),
            ],
            "actual_seconds": actual,
            "of_rounds": self.seconds,
            "estimated_seconds": seconds,
            "relative_errors": {name: s / actual - 1 for name, s in seconds.items()},
        }


def panel_of(rows: list[dict[str, Any]]) -> Panel:
    names = {"as instructions": OURS, "by the paper's rules": ALPA}
    both = [row["actual_seconds"] for row in rows]
    both += [s for row in rows for s in row["estimated_seconds"].values()]
    high = 1.1 * max(both)
    panel = Panel(
        f"small GPT, minibatch {MINIBATCH}, one device",
        "actual, seconds of the processor a step",
        "estimated",
        (0, high),
        (0, high),
        width=480,
        height=420,
    )
    panel.line([(0, 0), (high, high)], FAINT, "equal")
    for row in rows:
        for name, color in names.items():
            at = row["actual_seconds"], row["estimated_seconds"][name]
            panel.point(*at, color, f"{row['configuration']} {name}: {at[1]:.3f} for {at[0]:.3f}")
    return panel


def main() -> int:
    options = arguments(__doc__).parse_args()
    before = os.getloadavg()
    LayerBackend.clock = staticmethod(time.process_time)
    spec = WorkloadSpec.parse(f"{ZOO}/{WORKLOAD}")
    profile = layers_of(spec)
    rate = swap_bytes_per_second()
    server = Server.load("gtx1080ti-x4").with_(
        num_devices=1,
        usable_bytes=2 * sum(profile.at("backward", 1).memory_bytes),
    )
    swap = replace(server.swap_bytes_per_second, value=rate, source="timed here")
    server = replace(
        server,
        swap_bytes_per_second=swap,
        delete_seconds=replace(server.delete_seconds, value=0.0, source="part of the passes"),
    )
    workload = spec.load()
    trainings = [
        Training(configuration, profile.num_layers, server, workload)
        for configuration in points(profile, server)
    ]
    for number in range(NUM_ROUNDS):
        print(f"round {number + 1} of {NUM_ROUNDS}", file=sys.stderr, flush=True)
        for training in trainings:
            training.run()
    profiles = [profile, layers_of(spec)]
    rows = [training.row(profiles) for training in trainings]
    claims = {
        name: {
            "mean_error": sum(abs(row["relative_errors"][name]) for row in rows) / len(rows),
            "largest": max((row["relative_errors"][name] for row in rows), key=abs),
        }
        for name in rows[0]["relative_errors"]
    }
    svg = draw(
        "Estimated and actual steps (Harmony, Figure 15)",
        f"{len(rows)} configurations, drawn from those searched; seconds of the processor.",
        [panel_of(rows)],
        1,
        [(OURS, "as instructions"), (ALPA, "by the paper's rules")],
    )
    return finish(
        "harmony_figure_15",
        rows,
        options,
        svg,
        claims=claims,
        paper={"mean_error": 0.05},
        workload=WORKLOAD,
        swap_bytes_per_second=rate,
        versions=environment.versions(),
        load_average_before=before,
        load_average_after=os.getloadavg(),
    )


if __name__ == "__main__":
    sys.exit(main())
