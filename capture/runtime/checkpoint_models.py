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
from capture.model.workload import PyTree
from capture.runtime.array_state import ArrayState
from capture.runtime.hosts.saved import check_models
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.state import PipelineState
from capture.runtime.train_step import TrainStep
from capture.tracing.keys import is_key

#: What has a state, and the state.
Trained = TrainStep | ArrayTraining
State = PipelineState | ArrayState

PARTS = ("params", "optimizer")

KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}

CHECKPOINT = documents.Format(
    "checkpoint", ExecutionError, "checkpoint", "save it again with this version"
)


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree, by path."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def described(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape and dtype of each leaf, by path."""
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


class Models:
    """The models that a step trains, as a checkpoint holds them.

    Attributes:
        count: Models of an array; None of one alone, whose paths begin with no number.
        shared: Paths of parameters that all models have alike.
        structs: By model, the shapes of its parameters; and of the state of its optimizer.
    """

    def __init__(self, step: Trained):
        self._step: Any = step
        self.count: int | None = None
        self.shared = frozenset[str]()
        if not isinstance(step, ArrayTraining):
            each = [(step.traced, step.optimizer)]
        else:
            self.count = len(step.plan.models)
            fusers = [step.fuser(model) for model in range(self.count)]
            each = [(fuser.traced, fuser.optimizer.sliced) for fuser in fusers]
            first = fusers[0]  # models of one workload share
            shared, paths = first.optimizer.shared, by_path(first.traced.params_struct)
            rows = zip(paths, first.traced.rows, strict=True)
            self.shared = frozenset(path for path, own in rows if not shared.isdisjoint(own))
        self.structs = (
            [traced.params_struct for traced, _ in each],
            [optimizer.state_struct for _, optimizer in each],
        )

    def leaves(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and optimizer state, by path; what all models share with the first."""
        params, optimizer = dict[str, Any](), dict[str, Any]()
        for model in range(self.count or 1):
            which, begin = ((), "") if self.count is None else ((model,), f"[{model}]")
            own = by_path(self._step.params(state, *which))
            params |= {f"{begin}{p}": x for p, x in own.items() if not (model and p in self.shared)}
            states = by_path(self._step.optimizer_state(state, *which))
            optimizer |= {f"{begin}{p}": x for p, x in states.items()}
        return params, optimizer

    def restored(
        self, params: Sequence[object], optimizer: Sequence[object], num_steps: int
    ) -> State:
        """Return the state with what was read, by model."""
        given = (params, optimizer) if self.count is not None else (params[0], optimizer[0])
        state: State = self._step.restore(*given, num_steps)
        return state


def filled_leaf(struct: Any, read: np.ndarray | None) -> Any:
    """Return a leaf as it was stored; zeros if nothing was, as it has no elements or is zero."""
    if read is None:
        return np.zeros(struct.shape, struct.dtype)
    if is_key(struct):
        return jax.random.wrap_key_data(jnp.asarray(read), impl=KEY_IMPLS[str(struct.dtype)])
    return read


def filled(struct: PyTree, read: Mapping[str, np.ndarray | None]) -> Any:
    """Return the arrays that were read, in the tree and with the keys of ``struct``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: filled_leaf(leaf, read.get(jax.tree_util.keystr(path))), struct
    )


class Sources:
    """The places in a checkpoint of the leaves of a step's models.

    Args:
        structs: By model that is to go on, of its parameters and of its optimizer's state.
        models: Its models that go on; None for all.
        shared: Paths of parameters that all models have alike.

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
        structs: tuple[Sequence[Any], Sequence[Any]],
        metadata: Mapping[str, Any],
        models: Sequence[int] | None = None,
        shared: frozenset[str] = frozenset(),
    ):
        count = len(structs[0])
        chosen = check_models(metadata.get("num_models"), count, models)
        # None: of one model alone, whose paths have no number.
        self._begin = [""] * count if chosen is None else [f"[{model}]" for model in chosen]
        found = [
            self._found(list(map(by_path, each)), metadata[part], alike)
            for each, part, alike in zip(structs, PARTS, (shared, frozenset[str]()), strict=True)
        ]
        self.paths, self.expected, self.saved = (tuple(each) for each in zip(*found, strict=True))

    def _found(
        self,
        leaves: Sequence[Mapping[str, object]],
        saved: Mapping[str, object],
        shared: frozenset[str],
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
