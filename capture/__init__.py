"""CAPTURE: which stages, devices and schedule train a JAX model in the least memory, known before
anything runs.

The public names load their module on first use, so ``import capture`` loads no framework and
planning from a profile never does; only ``pipeshard``, ``shard``,
``streamed`` and ``train_array`` load JAX.
Profiles are made by ``profiling_runs.profile``, plans by ``recommender.recommend``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Module of each public name. A name must not be that of a submodule: once loaded, the submodule
#: would hide it.
_MODULE_OF = {
    "AdditivePredictor": "capture.predictor",
    "AlpaOptions": "capture.alpa",
    "ArrayPlan": "capture.plan.array",
    "CaptureError": "capture.errors",
    "Cluster": "capture.machine.cluster",
    "LayerGraph": "capture.model.graph",
    "PacksPlan": "capture.plan.packs",
    "Plan": "capture.plan.stages",
    "Prediction": "capture.predictor",
    "Profile": "capture.measured.profile",
    "ShardingPlan": "capture.plan.sharding",
    "Stage": "capture.plan.stage",
    "StageChoice": "capture.plan.choices",
    "Store": "capture.measured.store",
    "Workload": "capture.model.workload",
    "WorkloadSpec": "capture.model.workload",
    "decompose": "capture.runtime.decomposer",
    "load_plan": "capture.plan.kinds",
    "pipeshard": "capture.runtime.pipeline",
    "plan_from_alpa": "capture.alpa",
    "shard": "capture.runtime.sharded",
    "streamed": "capture.runtime.streamed",
    "to_alpa": "capture.alpa",
    "train_array": "capture.runtime.multiplexed",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Return a public name of the library, from the module that defines it (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are "
            f"{', '.join(sorted(_MODULE_OF))}."
        )
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
