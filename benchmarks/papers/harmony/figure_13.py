"""Figure 13: losses of training that streams packs beside training that swaps nothing, minibatch by
minibatch.

    python -m benchmarks.papers.harmony.figure_13 -o RESULT.json

Small models of the zoo, random examples, 20 minibatches on two virtual CPU devices. (a) Harmony PP,
where U_F is not U_B, beside gradient accumulation on one device; (b) Harmony DP beside data
parallelism: one jitted step over a mesh of the same devices, without micro-batches.

Paper: BERT-Large on MRPC, a perfect match for every minibatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.drawing import ALPA, OURS, Panel, draw
from capture import environment
from capture.errors import CaptureError

NUM_DEVICES = 2
CaptureError.check(environment.prepare(num_devices=NUM_DEVICES))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from capture.machine.server import Server  # noqa: E402
from capture.model.workload import WorkloadProtocol, WorkloadSpec  # noqa: E402
from capture.plan.packs import PacksPlan  # noqa: E402
from capture.plan.task_graph import Configuration, Mode, Packs  # noqa: E402
from capture.runtime.reference import ReferenceStep  # noqa: E402
from capture.runtime.streamed import StreamedStep, streamed  # noqa: E402

ZOO = Path(__file__).parents[3] / "models"
#: Name -> workload, layers of the backward packs, and of those forward.
CASES = {
    "BERT, Adam": ("bert.py:bert?size=tiny&num_layers=2", (2, 1, 3), (2, 1)),
    "VGG, SGD": ("vgg.py:vgg?size=tiny", (4, 3, 3), (5, 2)),
}
NUM_STEPS, MINIBATCH = 20, 8
#: U_F and U_B.
SIZES = (4, 2)
Losses = list[float]


def plan_of(mode: Mode, backward: tuple[int, ...], forward: tuple[int, ...]) -> PacksPlan:
    configuration = Configuration(
        Packs.of_lengths(SIZES[0], forward), Packs.of_lengths(SIZES[1], backward)
    )
    server = Server.load("gtx1080ti-x4").with_(num_devices=NUM_DEVICES)
    return PacksPlan(server, sum(backward), MINIBATCH, mode, configuration)


def batches(workload: WorkloadProtocol) -> list[Any]:
    return [workload.batch(jax.random.key(1 + i), MINIBATCH) for i in range(NUM_STEPS)]


def of_packs(step: StreamedStep, workload: WorkloadProtocol, params: Any) -> Losses:
    state, losses = step.init_from(params), []
    for batch in batches(workload):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses


def of_one_device(step: StreamedStep, workload: WorkloadProtocol, params: Any) -> Losses:
    reference, losses = ReferenceStep(workload, step.traced, step.microbatch_sizes), []
    own, state = reference.init(params)
    for batch in batches(workload):
        own, state, loss = reference(own, state, batch)
        losses.append(loss)
    return losses


def of_data_parallelism(step: StreamedStep, workload: WorkloadProtocol, params: Any) -> Losses:
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("data"))
    copied = jax.NamedSharding(mesh, jax.P())

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(workload.loss_fn)(params, batch)
        updates, state = workload.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(params, copied)
    state, losses = jax.device_put(workload.optimizer.init(params), copied), []
    for batch in batches(workload):
        params, state, loss = update(params, state, jax.device_put(batch, split))
        losses.append(float(loss))
    return losses


BESIDE: dict[Mode, tuple[str, Callable[..., Losses]]] = {
    "pp": ("one device", of_one_device),
    "dp": ("data parallelism", of_data_parallelism),
}


def row_of(name: str, mode: Mode) -> dict[str, Any]:
    text, backward, forward = CASES[name]
    workload = WorkloadSpec.parse(f"{ZOO}/{text}").load()
    plan = plan_of(mode, backward, forward)
    params = workload.init(jax.random.key(0))
    step = streamed(workload, plan)
    ours = of_packs(step, workload, params)
    against, losses_of = BESIDE[mode]
    theirs = losses_of(step, workload, params)
    off = np.abs(np.array(ours) / np.array(theirs) - 1)
    return {
        "model": name,
        "workload": text,
        "mode": mode,
        "beside": against,
        "losses": ours,
        "losses_beside": theirs,
        "max_relative_difference": float(off.max()),
        "num_equal": int((off == 0).sum()),
    }


def panel_of(row: dict[str, Any]) -> Panel:
    both = [*row["losses"], *row["losses_beside"]]
    low, high = min(both), max(both)
    room = 0.08 * (high - low)
    title = f"{row['model']}: {row['mode'].upper()} and {row['beside']}"
    panel = Panel(
        title, "minibatch", "loss", (0, NUM_STEPS + 1), (low - room, high + room), width=480
    )
    panel.line(list(enumerate(row["losses_beside"], 1)), ALPA, f"{row['beside']}, no swaps")
    for i, loss in enumerate(row["losses"], 1):
        panel.point(i, loss, OURS, f"Harmony, minibatch {i}: {loss:.6f}")
    return panel


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = [row_of(name, mode) for name in CASES for mode in BESIDE]
    claims = {
        f"{row['model']}, {row['mode']}": {
            "max_relative_difference": row["max_relative_difference"],
            "equal": f"{row['num_equal']} of {NUM_STEPS}",
        }
        for row in rows
    }
    svg = draw(
        "Losses, minibatch by minibatch (Harmony, Figure 13)",
        "Measured: small models on two virtual CPU devices, random examples.",
        [panel_of(row) for row in rows],
        2,
        [(OURS, "Harmony, streamed"), (ALPA, "without swaps")],
    )
    paper = {"losses": "a perfect match for every minibatch"}
    return finish("harmony_figure_13", rows, options, svg, claims=claims, paper=paper)


if __name__ == "__main__":
    sys.exit(main())
