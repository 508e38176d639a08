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
from capture.tracing.keys import is_key, words

#: What has a state, and the state.
Trained = TrainStep | ArrayTraining
State = PipelineState | ArrayState

PARTS = ("params", "optimizer")

KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}

CHECKPOINT = documents.Format(
    "checkpoint", ExecutionError, "checkpoint", "save it again with this version"
)


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, by path."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def described(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape and dtype of each leaf, by path."""
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


class OneModel:
    """The content of a checkpoint of a step that trains one model.

    Attributes:
        count: Models that it trains; None of one alone, whose paths begin with no number.
        shared: Paths of parameters that all models have alike.
    """

    count: int | None = None
    shared: frozenset[str] = frozenset()

    def __init__(self, step: TrainStep):
        self.step = step

    def leaves(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and optimizer state, by path."""
        return by_path(self.step.params(state)), by_path(self.step.optimizer_state(state))

    @property
    def structs(self) -> tuple[list[Any], list[Any]]:
        """The shapes of each model's parameters, and of the state of its optimizer."""
        return [self.step.traced.params_struct], [self.step.optimizer.state_struct]

    def restored(self, params: Sequence[Any], optimizer: Sequence[Any], num_steps: int) -> State:
        """Return the state with what was read."""
        return self.step.restore(params[0], optimizer[0], num_steps)


class ModelsOfArray:
    """The content of a checkpoint of a step that trains several models together."""

    def __init__(self, step: ArrayTraining):
        self.step, self.count = step, len(step.plan.models)
        self._fusers = [step.fuser(model) for model in range(self.count)]
        first = self._fusers[0]  # models of one workload share
        numbers = leaf_numbers(first.traced)
        shared = {numbers[p] for p in first.optimizer.shared}
        paths = by_path(first.traced.params_struct)
        self.shared = frozenset(path for n, path in enumerate(paths) if n in shared)

    def leaves(self, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and optimizer state, by path."""
        params, optimizer = dict[str, Any](), dict[str, Any]()
        for model in range(self.count):
            own = by_path(self.step.params(state, model))
            params |= {
                f"[{model}]{p}": x for p, x in own.items() if not (model and p in self.shared)
            }
            states = by_path(self.step.optimizer_state(state, model))
            optimizer |= {f"[{model}]{p}": x for p, x in states.items()}
        return params, optimizer

    @property
    def structs(self) -> tuple[list[Any], list[Any]]:
        """The shapes of each model's parameters, and of the state of its optimizer."""
        return (
            [fuser.traced.params_struct for fuser in self._fusers],
            [fuser.optimizer.sliced.state_struct for fuser in self._fusers],
        )

    def restored(self, params: Sequence[Any], optimizer: Sequence[Any], num_steps: int) -> State:
        """Return the state with what was read."""
        return self.step.restore(params, optimizer, num_steps)


def models_of(step: Trained) -> OneModel | ModelsOfArray:
    """Return the models that a step trains."""
    return ModelsOfArray(step) if isinstance(step, ArrayTraining) else OneModel(step)


def host_data(leaf: Any) -> np.ndarray:
    """Return a leaf as it is stored: typed random keys as their data; for a structure, an empty
    array to be read into."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        struct = jax.eval_shape(words, leaf)
        return np.empty(struct.shape, struct.dtype)
    return np.asarray(words(leaf))


def filled_leaf(struct: Any, read: np.ndarray | None) -> Any:
    """Return a leaf as it was stored; zeros if nothing was, as it has no elements or is zero."""
    if read is None:
        return np.zeros(struct.shape, struct.dtype)
    if is_key(struct):
        return jax.random.wrap_key_data(jnp.asarray(read), impl=KEY_IMPLS[str(struct.dtype)])
    return read


def filled(struct: Any, read: Mapping[str, np.ndarray | None]) -> Any:
    """Return the arrays that were read, in the tree and with the keys of ``struct``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: filled_leaf(leaf, read.get(jax.tree_util.keystr(path))), struct
    )


class Sources:
    """The places in a checkpoint of the leaves of a step's models.

    Args:
        trained: The models that are to go on.
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

    def __init__(
        self,
        trained: OneModel | ModelsOfArray,
        metadata: Mapping[str, Any],
        models: Sequence[int] | None,
    ):
        count = trained.count or 1
        chosen = check_models(metadata.get("num_models"), count, models)
        # None: of one model alone, whose paths have no number.
        self._begin = [""] * count if chosen is None else [f"[{model}]" for model in chosen]
        found = [
            self._found([by_path(struct) for struct in structs], metadata[part], shared)
            for structs, part, shared in zip(
                trained.structs, PARTS, (trained.shared, frozenset[str]()), strict=True
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
