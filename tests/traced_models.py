"""Models as they are traced, by name: each once in a process."""

from __future__ import annotations

import functools

from capture.tracing import TracedModel, trace
from tests import tracing_models as models

B = 2


WORKLOADS = {
    "unet": models.unet,
    "lstm": models.lstm,
    "convnet": models.convnet,
    "linen": models.linen,
    "linen-dropout-remat": lambda: models.linen(dropout=0.2, remat=True),
    "linen-mark-in-remat": lambda: models.linen(remat=True, mark_inside=True),
    "linen-scan": lambda: models.linen(stacked=True, mark_inside=True),
    "linen-scan-remat-dropout": lambda: models.linen(
        stacked=True, mark_inside=True, remat=True, dropout=0.2
    ),
    "nnx": models.nnx_mlp,
    "pytree-module": models.pytree_module,
    "scan": models.scanned,
    "scan-penalty": lambda: models.scanned(penalty=0.01),
    "scan-unmarked": lambda: models.scanned(marked=False),
    "routed": models.routed,
    "named-remat": models.named_remat,
    "control": models.control,
}


#: Workload and num_layers to ask for: the number of layers to get.
CASES = {
    ("unet", None): 6,
    ("unet", 3): 3,
    ("lstm", None): 2,
    ("convnet", None): 4,
    ("linen", None): 3,
    ("linen-dropout-remat", None): 3,
    ("linen-dropout-remat", 5): 5,
    ("linen-mark-in-remat", None): 3,
    ("linen-scan", None): 3,
    ("linen-scan-remat-dropout", None): 3,
    ("nnx", None): 4,
    ("pytree-module", None): 3,
    ("scan", None): 5,
    ("scan-penalty", None): 5,
    ("scan-unmarked", 3): 3,
    ("routed", None): 4,
    ("control", None): 7,
}


def case_id(value):
    return f"{value[0]}-{value[1] or 'marks'}" if isinstance(value, tuple) else None


@functools.cache
def workload_of(name):
    return WORKLOADS[name]()


@functools.cache
def traced(name, num_layers=None) -> TracedModel:
    return trace(workload_of(name), B, num_layers)


def tensors_of(model: TracedModel, layer):
    graph = model.graph
    return (
        [graph.params[p] for p in layer.params],
        [graph.values[v] for v in layer.inputs],
        [graph.batch[b] for b in layer.batch],
    )


def loss_workload(loss, **shapes):
    return models.workload(
        loss,
        lambda key: models.normals(key, **(shapes or {"w": (models.D, models.D)})),
        models.vectors_batch,
    )
