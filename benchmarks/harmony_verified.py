"""Predicted peaks of a large model's packs beside those of the compiled packs.

    python -m benchmarks.harmony_verified -o RESULT.json [--target h100] [NAME]

A model of ``benchmarks.harmony_models``, planned for one absent GPU from the profile of three
blocks; then all of its layers are traced and every pack of the plan is compiled for the target,
equal packs once: ``capture verify``. Nothing runs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.harmony_models import MINIBATCH, MODELS, ZOO, profile_of
from capture.cli import asked
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.model.workload import WorkloadSpec
from profiling_runs import Where
from recommender.harmony import PacksQuestion, harmony

HOST_BYTES = 10**12


def row_of(name: str, target: str) -> dict[str, Any]:
    model, cluster = MODELS[name], Cluster.parse("1x1", target)
    asked.prepare(cluster)
    from profiling_runs.packs import PackCompiler

    start = time.process_time()
    profile = replace(profile_of(model, target, None), workload=None)
    server = Server.of(cluster).with_(host_memory_bytes=HOST_BYTES)
    answer = harmony(PacksQuestion(profile, server, MINIBATCH, cluster=cluster))
    plan = answer.plan
    assert plan is not None and plan.prediction is not None and plan.prediction.step is not None
    planned = time.process_time()
    # The hash is that of the three blocks.
    spec = WorkloadSpec.parse(f"{ZOO}/{model.workload.format(blocks=model.num_blocks)}")
    ledger = PackCompiler(spec, where=Where(0)).ledger(replace(plan, model_hash=""))
    step, forward, backward = (
        plan.prediction.step,
        plan.configuration.forward,
        plan.configuration.backward,
    )
    device, host = max(ledger.peaks, key=lambda peak: peak.peak_bytes), ledger.peak_of("host")
    return {
        "model": name,
        "configuration": [
            forward.microbatch_size,
            len(forward.packs),
            backward.microbatch_size,
            len(backward.packs),
        ],
        "limit_bytes": server.usable_bytes.value,
        "device": {
            "predicted_bytes": max(step.device_peak_bytes),
            "predicted_parts_bytes": dict(step.device_parts_bytes),
            "compiled_bytes": device.peak_bytes,
            "compiled_parts_bytes": device.parts,
            "at": device.instant,
        },
        "host": {
            "predicted_bytes": step.host_peak_bytes,
            "compiled_bytes": host.peak_bytes,
            "compiled_parts_bytes": host.parts,
        },
        "plan_processor_seconds": planned - start,
        "compile_processor_seconds": time.process_time() - planned,
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--target", default="h100", help="kind of GPU (default: %(default)s)")
    parser.add_argument("name", nargs="?", default="LLaMA 70B", help=f"of {', '.join(MODELS)}")
    options = parser.parse_args()
    row = row_of(options.name, options.target)
    claims = {
        what: row[what]["predicted_bytes"] / row[what]["compiled_bytes"] - 1
        for what in ("device", "host")
    }
    return finish("harmony_verified", [row], options, claims=claims, target=options.target)


if __name__ == "__main__":
    sys.exit(main())
