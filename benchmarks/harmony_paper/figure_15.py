"""Figure 15: estimated steps beside those that ran.

    python -m benchmarks.harmony_paper.figure_15 -o RESULT.json

Fifteen configurations, drawn with a fixed seed from all that the search explores, of a small GPT
on one device of this machine, minibatch 8. Layers are executed one by one, the memory of the host
is timed, and steps are estimated by the paper's rules and as instructions; then every configuration
trains.

Seconds are those of the processor, on one thread. There copies and updates of the host hide behind
nothing, so an estimate is the sum of all its passes, copies and updates: what a step consists of,
and not how it overlaps. Other work that shares the caches still adds to them: to be recorded on a
quiet machine, for layers and steps are timed minutes apart.

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
from statistics import median
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
from capture.model.workload import WorkloadSpec  # noqa: E402
from capture.plan.packs import PacksPlan  # noqa: E402
from capture.plan.task_graph import Configuration  # noqa: E402
from capture.predictor.pack_step import packs_timeline  # noqa: E402
from capture.predictor.pack_times import estimate  # noqa: E402
from capture.profiler.layers import LayerBackend  # noqa: E402
from capture.runtime.streamed import streamed  # noqa: E402
from profiling_runs import LayersQuestion, Where, profile_layers  # noqa: E402
from recommender.harmony import PacksQuestion  # noqa: E402

ZOO = Path(__file__).parents[2] / "models"
WORKLOAD = "mingpt.py:mingpt?size=6x256&seq_len=128&vocab_size=256"
MINIBATCH, NUM_POINTS, SEED, NUM_STEPS = 8, 15, 15, 3
#: Of what all layers need with one example, so that there are several packs.
SHARE_OF_MODEL = 0.5


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


def points(profile: LayerProfile, server: Server) -> list[Configuration]:
    """Different ones of all that Algorithm 1 explores."""
    problem = PacksQuestion(profile, server, MINIBATCH).problem("pp")
    every = list(dict.fromkeys(choice.configuration for choice in problem.choices()))
    return random.Random(SEED).sample(every, min(NUM_POINTS, len(every)))


def actual_seconds(plan: PacksPlan, workload: Any) -> float:
    """Of the processor, for a step."""
    step = streamed(workload, plan)
    batch = workload.batch(jax.random.key(1), MINIBATCH)
    held = [step.init(jax.random.key(0))]

    def train() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics.losses))

    train()
    return seconds_of(train)


def row_of(
    configuration: Configuration, profile: LayerProfile, server: Server, workload: Any
) -> dict[str, Any]:
    plan = PacksPlan(server, profile.num_layers, MINIBATCH, "pp", configuration)
    graph = plan.tasks()
    timeline = packs_timeline(graph, profile, server)
    rules = estimate(graph, profile, server)
    seconds = {
        "as instructions": sum(work.seconds for work in timeline.simulation.work),
        "by the paper's rules": sum(rules.items.seconds),
    }
    one, other = configuration.forward, configuration.backward
    actual = actual_seconds(plan, workload)
    return {
        "configuration": [
            one.microbatch_size,
            len(one.packs),
            other.microbatch_size,
            len(other.packs),
        ],
        "actual_seconds": actual,
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
    asked = LayersQuestion(spec, backend="run", most=MINIBATCH, stride=2)
    profile = profile_layers(asked, where=Where(0))
    rate = swap_bytes_per_second()
    server = Server.load("gtx1080ti-x4").with_(
        num_devices=1,
        usable_bytes=int(SHARE_OF_MODEL * sum(profile.at("backward", 1).memory_bytes)),
    )
    swap = replace(server.swap_bytes_per_second, value=rate, source="timed here")
    server = replace(
        server,
        swap_bytes_per_second=swap,
        delete_seconds=replace(server.delete_seconds, value=0.0, source="part of the passes"),
    )
    workload, rows = spec.load(), []
    for configuration in points(profile, server):
        rows.append(row_of(configuration, profile, server, workload))
        print(rows[-1], file=sys.stderr, flush=True)
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
