"""Peaks of steps of packs: predicted from a profile of single layers, and from the packs that are
compiled when a plan is made; replayed over the compiled packs of the step that runs, and measured
as live arrays; of devices, and of their host.

    python -m benchmarks.harmony_memory -o RESULT.json [MODEL or RESULT.json ...]

Small models (a GPT, a U-Net whose values skip, a mixture of experts, a language model with tied
embeddings) with Adam in float32 in pipelines on 1 and 3 virtual devices and in data parallelism on
2; on two also with every optimization off in turn, in the modes by turns. Layers are profiled by
running them here, and packs are searched below a limit that the whole model exceeds, and compiled
for the processor. The host's
peak stands beside 12 bytes per parameter, the activations that wait there, and gradients of the
largest pack; with several devices those of several packs may wait there for their updates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from capture import environment
from capture.errors import CaptureError

NUM_DEVICES = 3
CaptureError.check(environment.prepare(num_devices=NUM_DEVICES))

import jax  # noqa: E402

from benchmarks.kit_questions import workload_of  # noqa: E402
from capture.machine.cluster import Cluster  # noqa: E402
from capture.machine.server import Server  # noqa: E402
from capture.measured.layer_profile import LayerProfile  # noqa: E402
from capture.model.workload import WorkloadSpec, takes_key  # noqa: E402
from capture.plan.packs import PacksPlan  # noqa: E402
from capture.plan.task_graph import MODES, Mode, Switches  # noqa: E402
from capture.runtime.meter import LiveArrayMeter  # noqa: E402
from capture.runtime.streamed import StreamedStep, streamed  # noqa: E402
from profiling_runs import LayersQuestion, Where, profile_layers  # noqa: E402
from profiling_runs.packs import PackCompiler  # noqa: E402
from recommender.harmony import PacksQuestion, harmony  # noqa: E402

_SEQUENCES = {"width": 32, "depth": 4, "optimizer": "adam"}
MODELS: dict[str, WorkloadSpec] = {
    "GPT": WorkloadSpec("capture.cli.tiny_gpt", "gpt", {"num_blocks": 4}),
    "U-Net": workload_of("images:skips", channels=8, levels=3, optimizer="adam"),
    "experts": workload_of("sequences:experts", num_experts=4, vocab=500, **_SEQUENCES),
    "tied": workload_of("sequences:language_model", vocab=500, length=16, tied=True, **_SEQUENCES),
}
MINIBATCH = 8
#: Of what the layers need one by one, all of them together.
SHARE_OF_MODEL = 0.4


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        mode: How devices share the work.
        num_devices: N.
        without: Switches that are off.
    """

    mode: Mode
    num_devices: int
    without: tuple[str, ...] = ()


def cases() -> Iterator[Case]:
    yield from (Case("pp", 1), Case("pp", 3), Case("dp", 2))
    for i, switch in enumerate(fields(Switches)):
        yield Case(MODES[i % 2], 2, (switch.name,))


def plan_of(profile: LayerProfile, case: Case, compiled: PackCompiler) -> PacksPlan:
    """The best below a share of what the model needs, or of the least more that has packs."""
    largest = profile.at("backward", 1).memory_bytes
    limit = max(int(SHARE_OF_MODEL * sum(largest)), int(1.3 * max(largest)))
    while True:
        server = Server.load("gtx1080ti-x4").with_(num_devices=case.num_devices, usable_bytes=limit)
        cluster = Cluster((case.num_devices,), "cpu")
        asked = PacksQuestion(
            profile, server, MINIBATCH, case.mode, without=case.without, cluster=cluster
        )
        if (plan := harmony(asked, compiled).plan) is not None:
            return plan
        limit = int(1.2 * limit)


def measured(step: StreamedStep) -> tuple[int, int]:
    """Of the second step, the device that needs most, and the host."""
    workload, meter = step.workload, LiveArrayMeter.of(step, strict=True)
    state = step.init(jax.random.key(0))
    for observer in (None, meter):
        batch = workload.batch(jax.random.key(1), MINIBATCH)
        key = jax.random.key(2) if takes_key(workload) else None
        jax.block_until_ready(state)
        state, metrics = step(state, batch, key, observer=observer)
        del metrics  # its losses are live, and booked as released
    meter.finish()
    return max(meter.peak_bytes_per_device), meter.peak_bytes_of("host")


def row_of(name: str, profile: LayerProfile, case: Case, compiled: PackCompiler) -> dict[str, Any]:
    plan = plan_of(profile, case, compiled)
    assert plan.prediction and plan.prediction.step and plan.prediction.compiled, "compiled"
    layers, packs = plan.prediction.step, plan.prediction.compiled
    step = streamed(MODELS[name].load(), plan, fast_compile=True)
    ledger, (device, host) = step.replay(), measured(step)
    peak = ledger.peak_of("host")
    weights = [profile.weight_bytes(*pack) for pack in plan.configuration.backward.packs]
    limit = int(plan.machine.usable_bytes.value)
    return {
        "model": name,
        "mode": case.mode,
        "num_devices": case.num_devices,
        "without": list(case.without),
        "configuration": str(plan.configuration),
        "limit_bytes": limit,
        "device": {
            "predicted_from_layers_bytes": max(layers.device_peak_bytes),
            "predicted_compiled_bytes": max(packs.device_peak_bytes),
            "replayed_bytes": max(ledger.peak_bytes_per_device),
            "measured_bytes": device,
            "parts_bytes": max(ledger.peaks, key=lambda one: one.peak_bytes).parts,
            "predicted_from_layers_parts_bytes": dict(layers.device_parts_bytes),
        },
        "host": {
            "predicted_from_layers_bytes": layers.host_peak_bytes,
            "predicted_compiled_bytes": packs.host_peak_bytes,
            "replayed_bytes": peak.peak_bytes,
            "measured_bytes": host,
            "largest_pack_bytes": max(weights),
            "parts_bytes": peak.parts,
        },
    }


def formula_bytes(host: Mapping[str, Any]) -> int:
    """12 bytes per parameter, activations, and gradients of the largest pack."""
    parts = host["parts_bytes"]
    stash = sum(parts.get(what, 0) for what in ("kept activations", "activations"))
    return 3 * parts["parameters"] + stash + host["largest_pack_bytes"]


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Of a model."""
    spec = MODELS[name]
    asked = LayersQuestion(spec, backend="run", most=MINIBATCH, stride=4)
    profile = profile_layers(asked, where=Where(0))
    compiled = PackCompiler(spec, where=Where(0))
    for case in cases():
        yield row_of(name, profile, case, compiled)
        print(name, case, file=sys.stderr, flush=True)


def errors_of(rows: Sequence[Mapping[str, Any]], what: str, predicted: str) -> dict[str, float]:
    """Of a prediction, beside what was replayed."""
    errors = [row[what][predicted] / row[what]["replayed_bytes"] - 1 for row in rows]
    return {
        "most_too_low": min(errors),
        "most_too_high": max(errors),
        "mean_error": sum(map(abs, errors)) / len(errors),
    }


def main() -> int:
    parser = arguments(__doc__)
    said = f"of {', '.join(MODELS)}, or results of earlier runs; all models by default"
    parser.add_argument("models", nargs="*", help=said)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models or MODELS:
        rows += rows_of(name) if name in MODELS else json.loads(Path(name).read_text())["rows"]
    claims: dict[str, Any] = {"num_plans": len(rows)}
    for what in ("device", "host"):
        claims[what] = {
            "measured_as_replayed": all(
                row[what]["measured_bytes"] == row[what]["replayed_bytes"] for row in rows
            ),
            "from_layers": errors_of(rows, what, "predicted_from_layers_bytes"),
            "compiled": errors_of(rows, what, "predicted_compiled_bytes"),
        }
    claims["above_the_limit"] = sum(
        row["device"]["measured_bytes"] > row["limit_bytes"] for row in rows
    )
    claims["host_over_formula_on_one_device"] = [
        row["host"]["measured_bytes"] / formula_bytes(row["host"])
        for row in rows
        if row["num_devices"] == 1
    ]
    claims["most_packs_whose_gradients_wait"] = max(
        row["host"]["parts_bytes"].get("gradients", 0) / row["host"]["largest_pack_bytes"]
        for row in rows
    )
    return finish("harmony_memory", rows, options, claims=claims, versions=environment.versions())


if __name__ == "__main__":
    sys.exit(main())
