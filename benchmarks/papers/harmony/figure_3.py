"""Figures 3 and 9: what training over virtual memory swaps as GPUs are added, how unevenly the
stages of a pipeline swap, and what needs the memory.

    python -m benchmarks.papers.harmony.figure_3 -o RESULT.json

BERT96, five examples per GPU, GTX-1080Ti. Memory by component is of one copy of the model: weights,
gradients, optimizer state, and what a forward pass keeps without recomputation.

Paper: DP's volume grows linearly with the GPUs; PP's is unbalanced; footprints of hundreds of GB.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import bars, finish, problem_of
from capture.machine.server import Server
from capture.papers.harmony.baselines import dp_swap, gp_swap

MODEL, EXAMPLES = "bert_96", 5


def footprint(model: str, batch: int) -> dict[str, int]:
    """Bytes by component, for a batch on one GPU without limits."""
    asked = problem_of(model)
    profile, layers = asked.profile, asked.profile.at("forward", batch)
    kept = layers.memory_bytes - layers.input_bytes
    weights = profile.weight_bytes(0, profile.num_layers)
    return {
        "weights": weights,
        "gradients": sum(profile.w_bytes),
        "optimizer": sum(profile.k_bytes),
        "activations": int(kept.sum()) - weights + layers.inputs[0],
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for devices in (1, 2, 4):
        server = Server.load("gtx1080ti-x4").with_(num_devices=devices)
        asked = problem_of(MODEL, "dp", EXAMPLES * devices, server=server)
        found = dp_swap(asked)
        rows.append({"system": "DP Swap", "devices": devices, **found.to_json()})
    pipeline = gp_swap(problem_of(MODEL, "pp", 4 * EXAMPLES))
    rows.append({"system": "GP Swap", "devices": 4, **pipeline.to_json()})
    memory = {
        f"{model}, batch {batch}": footprint(model, batch)
        for model in ("bert_96", "gpt2_xl")
        for batch in (1, 2, 4, 8, 16)
    }
    volumes = {row["devices"]: row["swap_bytes"] for row in rows if row["system"] == "DP Swap"}
    claims = {
        "volume on 4 GPUs over 1": volumes[4] / volumes[1],
        "GB at batch 16": {
            name: round(sum(of.values()) / 1e9, 1)
            for name, of in memory.items()
            if name.endswith("batch 16")
        },
    }
    groups = [(str(n), {"DP Swap": nbytes / 1e9}) for n, nbytes in volumes.items()]
    parts = [
        (name.replace(", ", "\n"), {part: n / 1e9 for part, n in of.items()})
        for name, of in memory.items()
    ]
    svg = bars(
        "Swaps of data parallelism, and who needs the memory (Figures 3 and 9)",
        "Estimated: BERT96, five examples per GPU; managers that know the future.",
        {
            "swapped in a step, by GPUs": ("GB", groups),
            "memory of one copy": ("GB", parts),
        },
    )
    return finish("harmony_figure_3", rows, options, svg, claims=claims, footprint_bytes=memory)


if __name__ == "__main__":
    sys.exit(main())
