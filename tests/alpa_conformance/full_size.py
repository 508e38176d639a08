"""Live bytes of every stage of a plan: by Alpa's own instruction lists, and by the library's replay
of the same stages.

A script for Alpa's environment: reads a plan with a workload on standard input and writes the
comparison to standard output, both as JSON. ``benchmarks/alpa_replay.py`` runs it for plans of the
paper's sizes, each in a process of its own, with the repository on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from facts import interfaces, of_parameters_bytes
from harness import compile_method, mesh, replay
from steps import of_workload

from capture.alpa import to_alpa
from capture.alpa.memory import alpa_replay
from capture.papers.alpa import worker
from capture.plan.stages import Plan
from capture.predictor.formula import kept_of


def compare(plan: Plan) -> dict[str, Any]:
    """Peaks per stage, and what they consist of; the worker's changes to Alpa are made."""
    start = time.perf_counter()
    compiled = compile_method(
        *of_workload(plan),
        to_alpa(plan).build(mesh(len(plan.cluster.nodes), plan.cluster.nodes[0])),
    )
    peaks = [max(nbytes for _, nbytes in timeline) for timeline in replay(compiled)]
    replayed_at = time.perf_counter()
    stages = interfaces(compiled)
    found = alpa_replay(plan, stages).stages
    return {
        "seconds": {"alpa": replayed_at - start, "replay": time.perf_counter() - replayed_at},
        "stages": [
            {
                "peak_bytes": peak,
                "replay_bytes": ours.peak_bytes,
                "params_bytes": stage.params_bytes,
                "optimizer_bytes": stage.optimizer_bytes,
                "kept_bytes_per_microbatch": kept_of(stage),
                "of_parameters_bytes_per_microbatch": of_parameters_bytes(compiled, m),
            }
            for m, (peak, ours, stage) in enumerate(zip(peaks, found, stages, strict=True))
        ],
    }


if __name__ == "__main__":
    worker.mark_layers()
    worker.let_scalars_cross()
    json.dump(compare(Plan.from_json(json.load(sys.stdin))), sys.stdout)
