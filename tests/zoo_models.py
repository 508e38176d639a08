"""The models of the zoo, small ones and their sizes, as tests load them."""

from __future__ import annotations

import importlib
import math
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from capture.model.workload import Workload, WorkloadSpec

MODELS = Path(__file__).parents[1] / "models"


KEY = jax.random.key(0)


#: Compiling takes most of the time of these tests; the numbers stay the same.
quick_jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


TINY_CLASSES = {
    "bert": 2,
    "gpt": 256,
    "gpt2": 256,
    "llama": 256,
    "mingpt": 256,
    "mobilenet": 8,
    "moe": 256,
    "resnet": 8,
    "unet": 8,
    "vgg": 8,
    "vit": 8,
    "wide_resnet": 16,
}


#: Whose number of blocks is an option.
TRANSFORMERS = ("bert", "gpt", "gpt2", "llama", "moe", "vit")


@cache
def load(model: str, query: str = "size=tiny") -> Workload:
    """The workload as the command line names it."""
    return WorkloadSpec.parse(f"{MODELS}/{model}.py:{model}?{query}").load()


def small(model: str, options: str = "") -> Workload:
    """The tiny model; a transformer with two blocks, which have every part of it and are compiled
    in a fraction of the time."""
    return load(model, f"size=tiny{'&num_layers=2' if model in TRANSFORMERS else ''}{options}")


@cache
def tiny_params(model: str) -> Any:
    return quick_jit(small(model).init)(KEY)


@cache
def tiny_batch(model: str) -> Any:
    """Four examples."""
    return quick_jit(small(model).batch, static_argnums=1)(jax.random.key(1), 4)


def examples(batch: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def import_model(model: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module(model)


@cache
def abstract_params(workload: Workload) -> Any:
    return jax.eval_shape(workload.init, KEY)


def num_elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def sub_jaxprs(equation: Any) -> list[Any]:
    found = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"),
    )
    return [
        getattr(value, "jaxpr", value)
        for value in found
        if hasattr(value, "eqns") or hasattr(value, "jaxpr")
    ]
