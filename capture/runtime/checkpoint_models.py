"""What a checkpoint says that it holds, and which leaf is whose: of an array of models, paths begin
with the number of the model, ``[3]``, and what all share is with model 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture import documents
from capture.errors import ExecutionError
from capture.runtime.array_state import ArrayState
from capture.runtime.hosts.saved import check_models
from capture.runtime.layerwise import leaf_numbers
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.state import PipelineState
from capture.runtime.train_step import TrainStep

#: What has a state, and the state.
Trained = TrainStep | ArrayTraining
State = PipelineState | ArrayState

PARTS = ("params", "optimizer")

KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}

CHECKPOINT = documents.Format(
    "checkpoint", ExecutionError, "checkpoint", "save it again with this version"
)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def described(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Shape and dtype."""
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


def stored_leaves(step: Trained, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint holds of a state: parameters and optimizer state, by path."""
    if not isinstance(step, ArrayTraining):
        assert isinstance(state, PipelineState), "the state of one model"
        return by_path(step.params(state)), by_path(step.optimizer_state(state))
    assert isinstance(state, ArrayState), "the state of an array"
    params, optimizer, shared = dict[str, Any](), dict[str, Any](), _shared_paths(step)
    for model in range(len(state.plan.models)):
        own = by_path(step.params(state, model))
        params |= {f"[{model}]{p}": x for p, x in own.items() if not (model and p in shared)}
        states = by_path(step.optimizer_state(state, model))
        optimizer |= {f"[{model}]{p}": x for p, x in states.items()}
    return params, optimizer


def structs_of(step: Trained) -> tuple[list[Any], list[Any]]:
    """Of each model: its parameters, and the state of its optimizer."""
    if not isinstance(step, ArrayTraining):
        return [step.traced.params_struct], [step.optimizer.state_struct]
    fusers = [step.fuser(model) for model in range(len(step.plan.models))]
    return (
        [fuser.traced.params_struct for fuser in fusers],
        [fuser.optimizer.sliced.state_struct for fuser in fusers],
    )


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def host_data(leaf: Any) -> np.ndarray:
    """As it is stored: typed random keys as their data; of a structure, an empty array to be read
    into."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        struct = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        return np.empty(struct.shape, struct.dtype)
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def filled_leaf(struct: Any, read: np.ndarray | None) -> Any:
    """What was stored of a leaf; nothing is of one without elements, or which is zero."""
    if read is None:
        return np.zeros(struct.shape, struct.dtype)
    if is_key(struct):
        return jax.random.wrap_key_data(jnp.asarray(read), impl=KEY_IMPLS[str(struct.dtype)])
    return read


def filled(struct: Any, read: Mapping[str, np.ndarray | None]) -> Any:
    """The arrays that were read, in the tree and with the keys of ``struct``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: filled_leaf(leaf, read.get(jax.tree_util.keystr(path))), struct
    )


class Sources:
    """Where the leaves of the models of a step are in a checkpoint.

    Args:
        step: That is to go on.
        metadata: Of the checkpoint.
        models: Its models that go on; None for all.

    Attributes:
        paths: Of parameters and of the optimizer's state, by model of the step, from the path of
            each leaf to that in the checkpoint.
        expected: Of both, by the latter, the struct that the step has.
        saved: Of both, what there is of these models.

    Raises:
        ExecutionError: ``checkpoint-models``.
    """

    def __init__(self, step: Trained, metadata: Mapping[str, Any], models: Sequence[int] | None):
        self._begin = _prefixes(step, metadata.get("num_models"), models)
        found = [
            self._found([by_path(struct) for struct in structs], metadata[part], shared)
            for structs, part, shared in zip(
                structs_of(step), PARTS, (_shared_paths(step), frozenset[str]()), strict=True
            )
        ]
        self.paths, self.expected, self.saved = (tuple(each) for each in zip(*found, strict=True))

    def _found(
        self, leaves: Sequence[Mapping[str, Any]], saved: Mapping[str, Any], shared: frozenset[str]
    ) -> tuple[list[dict[str, str]], dict[str, Any], dict[str, Any]]:
        def named(path: str, prefix: str) -> str:
            own, first = f"{prefix}{path}", f"[0]{path}"
            return first if prefix and own not in saved and first in saved else own

        paths = [
            {path: named(path, self._begin[0] if path in shared else prefix) for path in own}
            for prefix, own in zip(self._begin, leaves, strict=True)
        ]
        expected = {
            named[path]: leaf
            for named, own in zip(paths, leaves, strict=True)
            for path, leaf in own.items()
        }
        mine = tuple(self._begin)
        there = {p: x for p, x in saved.items() if p in expected or p.startswith(mine)}
        return paths, expected, there


def _shared_paths(step: Trained) -> frozenset[str]:
    """Of parameters that all models of an array have alike."""
    if not isinstance(step, ArrayTraining):
        return frozenset()
    fuser = step.fuser(0)  # models of one workload share
    numbers = leaf_numbers(fuser.traced)
    shared = {numbers[p] for p in fuser.optimizer.shared}
    paths = by_path(fuser.traced.params_struct)
    return frozenset(path for n, path in enumerate(paths) if n in shared)


def _prefixes(step: Trained, count: int | None, models: Sequence[int] | None) -> list[str]:
    """For each model of a step, with what its paths begin in a checkpoint of so many models; None:
    of one alone, with which all begin."""
    wanted = len(step.plan.models) if isinstance(step, ArrayTraining) else 1
    chosen = check_models(count, wanted, models)
    if chosen is None:
        return [""] * wanted
    return [f"[{model}]" for model in chosen]
