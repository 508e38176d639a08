"""The models of Harmony's evaluation (5.1) in the zoo, layer by layer beside the profiles of the
paper's authors: layers, parameters, optimizer state, and what passes between layers.

    python -m benchmarks.papers.harmony.models -o RESULT.json [NAME ...]

The losses are traced for one example; nothing is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from benchmarks.documents import arguments, finish
from benchmarks.papers.harmony.settings import profile_of
from capture.measured.layer_profile import LayerProfile
from capture.model.graph import LayerGraph
from capture.model.workload import WorkloadProtocol, WorkloadSpec
from capture.tracing.model import trace

ZOO = Path(__file__).parents[3] / "models"
#: Workload -> the profile of the authors; that of the sizes without one is empty.
WORKLOADS = {
    "bert.py:bert?size=large": "bert_large",
    "bert.py:bert?size=96L": "bert_96",
    "gpt2.py:gpt2?size=medium": "",
    "gpt2.py:gpt2?size=xl": "gpt2_xl",
    "gpt2.py:gpt2?size=10B": "gpt2_10b",
    "gpt2.py:gpt2?size=20B": "gpt2_20b",
    "gpt2.py:gpt2?size=30B": "gpt2_30b",
    "gpt2.py:gpt2?size=40B": "gpt2_40b",
    "gpt2.py:gpt2?size=80B": "",
    "vgg.py:vgg?size=416L": "vgg416",
    "resnet.py:resnet?size=1026L": "resnet1026",
}
#: What differs -> why.
WHY = {
    "parameters": "keys have no bias, whose gradient is zero: a row of the width less per block",
    "buffers": "masks are computed, and batch statistics have no running averages",
    "inputs": "tokens are int32, not int64; masks belong to the batch, which is fed again",
    "optimizer": "as of the parameters; Adam counts its steps once, not per layer",
}


def load(name: str) -> WorkloadProtocol:
    """A workload of the zoo by its file, function and options."""
    return WorkloadSpec.parse(f"{ZOO}/{name}").load()


def parameter_bytes(graph: LayerGraph) -> list[int]:
    """Per layer."""
    return [sum(graph.params[param].nbytes for param in layer.params) for layer in graph.layers]


def input_bytes(graph: LayerGraph) -> list[int]:
    """Of one example per layer: what earlier layers made, or its part of the batch."""
    assert graph.microbatch_size == 1, "traced for one example"
    return [
        sum(graph.values[value].nbytes for value in graph.crossing(layer.layer_id))
        or sum(graph.batch[leaf].nbytes for leaf in layer.batch)
        for layer in graph.layers
    ]


def differences(ours: Sequence[int], authors: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Runs of layers whose bytes differ by the same."""
    pairs = enumerate(zip(ours, authors, strict=True))
    for (mine, other), run in groupby(pairs, key=lambda pair: pair[1]):
        layers = [i for i, _ in run]
        if mine != other:
            yield {"layers": [layers[0], layers[-1]], "ours": mine, "authors": other}


def row_of(name: str, workload: WorkloadProtocol, profile: LayerProfile | None) -> dict[str, Any]:
    """One model beside its profile."""
    graph = trace(workload, 1).graph
    params = jax.eval_shape(workload.init, jax.random.key(0))
    state = jax.tree.leaves(jax.eval_shape(workload.optimizer.init, params))
    parameters = parameter_bytes(graph)
    row: dict[str, Any] = {
        "workload": name,
        "num_layers": graph.num_layers,
        "num_parameters": graph.num_parameters,
        "parameter_bytes": sum(parameters),
        "optimizer_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in state),
    }
    if profile is None:
        return row
    row["authors"] = {
        "profile": profile.name,
        "num_layers": profile.num_layers,
        "parameter_bytes": sum(profile.w_bytes),
        "buffer_bytes": sum(profile.b_bytes),
        "optimizer_bytes": sum(profile.k_bytes),
    }
    row["differences"] = {
        "parameters": list(differences(parameters, profile.w_bytes)),
        "inputs": list(differences(input_bytes(graph), profile.x_bytes_per_sample)),
    }
    return row


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="workloads; all by default")
    options = parser.parse_args()
    rows = [
        row_of(name, load(name), profile_of(WORKLOADS[name]) if WORKLOADS[name] else None)
        for name in options.names or WORKLOADS
    ]
    claims = {
        row["workload"]: {
            "layers": f"{row['num_layers']} and {row['authors']['num_layers']}",
            "parameter bytes over the authors'": (
                row["parameter_bytes"] / row["authors"]["parameter_bytes"]
            ),
        }
        for row in rows
        if "authors" in row
    }
    return finish("harmony_models_zoo", rows, options, claims=claims, why=WHY)


if __name__ == "__main__":
    sys.exit(main())
