"""The state of an array of models: which rows of which arrays are whose, and how they are put there
and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from capture.errors import ExecutionError, Violation
from capture.plan.array import ArrayPlan
from capture.runtime.fused import FusedArray
from capture.runtime.layerwise import LayerwiseOptimizer
from capture.step.program import Place, Step

#: Of one model, by index: parameters in the layer graph, and leaves of the optimizer's state.
Leaves = tuple[Mapping[int, Any], Mapping[int, Any]]
_Arrays = tuple[dict[int, np.ndarray], dict[int, np.ndarray]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("slots", "ahead"),
    meta_fields=("plan", "num_steps"),
)
@dataclass(frozen=True)
class ArrayState:
    """The arrays that an update changes. An update takes a state over: use the one that it returns.

    Attributes:
        slots: Parameters, optimizer state and, of a state that is ahead, the feature maps of
            sub-array 0, by name.
        plan: Of the models that it is of.
        num_steps: Complete updates.
        ahead: Of a state that is ahead, on the host: the batch of the update that was begun, and
            the losses of sub-array 0 in it.
    """

    slots: dict[str, list[jax.Array]]
    plan: ArrayPlan
    num_steps: int = 0
    ahead: tuple[Sequence[Any], Any] | None = None


class Losses(Sequence[float]):
    """The losses of an update, one per model; reading one waits until all are there."""

    def __init__(self, partition: Sequence[Sequence[int]], arrays: Sequence[jax.Array]):
        self._partition, self._arrays = partition, arrays

    @cached_property
    def _values(self) -> list[float]:
        found = {
            model: float(loss)
            for group, losses in zip(self._partition, self._arrays, strict=True)
            for model, loss in zip(group, np.asarray(losses), strict=True)
        }
        return [found[model] for model in sorted(found)]

    def __getitem__(self, model):
        return self._values[model]

    def __len__(self) -> int:
        return sum(map(len, self._partition))

    def __repr__(self) -> str:
        return f"Losses({self._values})"

    def block_until_ready(self) -> Losses:
        """Wait for the losses, and return them."""
        jax.block_until_ready(self._arrays)
        return self


@dataclass(frozen=True)
class ArrayMetrics:
    """The losses and the processor time that one list of instructions of an array reports.

    Attributes:
        losses: One per model; None of an update that is only begun.
        dispatch_seconds: Processor time of the calling thread (``StepMetrics``).
    """

    losses: Losses | None
    dispatch_seconds: float

    @property
    def loss(self) -> list[float] | None:
        """The losses on the host, one per model; None of an update that is only begun."""
        return None if self.losses is None else list(self.losses)


@dataclass(frozen=True)
class StateRows:
    """The rows of all models' parameters and optimizer states in the slots of a state.

    Attributes:
        partition: Models of each sub-array.
        arrays: These, as one program each.
        optimizers: Of one model of each.
    """

    partition: Sequence[Sequence[int]]
    arrays: Sequence[FusedArray]
    optimizers: Sequence[LayerwiseOptimizer]
    body: Step
    sharding: Callable[[Place], NamedSharding]

    def placed(self, leaves: Sequence[Leaves]) -> dict[str, list[jax.Array]]:
        """Return the slots that hold the leaves of each model.

        Raises:
            ExecutionError: ``array-shared-values`` where what all share differs.
        """
        self._check_shared([params for params, _ in leaves])
        step, slots = self.body, dict[str, list[jax.Array]]()
        for name, a, bundle in self._slots:
            sharding, own = self.sharding(step.slots[step.persistent[name]].place), []
            for part, index in self._origins[a, bundle]:
                if self.arrays[a].bundles[bundle].shared:
                    whole = leaves[0][part][index]
                else:
                    whole = np.stack(
                        [np.asarray(leaves[m][part][index]) for m in self.partition[a]]
                    )
                own.append(jax.device_put(whole, sharding, may_alias=False))
            slots[name] = own
        return slots

    def read(
        self, slots: Mapping[str, Sequence[jax.Array]], models: Sequence[int]
    ) -> list[_Arrays]:
        """Return copies on the host of what is of some models; of what they share, one."""
        found: list[_Arrays] = [({}, {}) for _ in models]
        for name, a, bundle in self._slots:
            shared = self.arrays[a].bundles[bundle].shared
            rows = {m: row for row, m in enumerate(self.partition[a])}
            for (part, index), array in zip(self._origins[a, bundle], slots[name], strict=True):
                wanted = [n for n, model in enumerate(models) if shared or model in rows]
                if wanted:
                    host = np.array(array) if shared else np.asarray(array)
                for n in wanted:
                    found[n][part][index] = host if shared else np.array(host[rows[models[n]]])
        return found

    @cached_property
    def _slots(self) -> list[tuple[str, int, int]]:
        """The slots of state: name, sub-array and bundle."""
        held = self.body.slots
        named = [(name, *held[n].holds) for name, n in self.body.persistent.items()]
        return [(name, a, n) for name, a, n in named if self.arrays[a].bundles[n].is_state]

    @cached_property
    def _origins(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """The origin of each array in a bundle of state, by (sub-array, bundle): the index of a
        parameter (0) or of a leaf of the optimizer's state (1)."""
        found = {}
        for a, (array, optimizer) in enumerate(zip(self.arrays, self.optimizers, strict=True)):
            of = {value: (0, index) for index, value in enumerate(array.params)}
            for stage, values in zip(optimizer.stages, array.state, strict=True):
                of |= {v: (1, leaf) for leaf, v in zip(stage.state, values, strict=True)}
            for number, bundle in enumerate(array.bundles):
                if bundle.is_state:
                    found[a, number] = [of[value] for value in array.values[number]]
        return found

    def _check_shared(self, params: Sequence[Mapping[int, Any]]) -> None:
        ExecutionError.check(
            Violation(
                f"models 0 and {model} have other values of parameter {p}, which the plan's "
                "shared= has once for all; give both the same, or plan without sharing it.",
                "array-shared-values",
            )
            for model, own in enumerate(params)
            for p in sorted(self.optimizers[0].shared)
            if own[p] is not params[0][p] and not np.array_equal(own[p], params[0][p])
        )


def check_count(what: str, given: object, count: int) -> None:
    """Refuse a sequence that has not one element per model.

    Raises:
        ExecutionError: ``array-count``.
    """
    had = len(given) if isinstance(given, Sequence) else f"a {type(given).__name__}"
    if had != count:
        raise ExecutionError.of(
            f"{what} is {had}; give a sequence of {count}, one per model.", "array-count"
        )


def check_models(models: Sequence[int], count: int) -> None:
    """Refuse numbers of models that are not there.

    Raises:
        ExecutionError: ``array-count``.
    """
    ExecutionError.check(
        Violation(
            f"model={model} is not of this array; models run from 0 to {count - 1}.", "array-count"
        )
        for model in models
        if not 0 <= model < count
    )


def check_array_state(state: ArrayState, step: Step) -> None:
    """Refuse a state of another plan, and one that an update has taken over.

    Raises:
        ExecutionError: ``array-state``.
    """
    deleted = any(array.is_deleted() for own in state.slots.values() for array in own)
    if set(state.slots) != set(step.persistent) or deleted:
        said = "was already taken over by an update" if deleted else "is of another plan"
        raise ExecutionError.of(
            f"the state {said}; go on with the one that this training returned last, or begin with "
            "train.init().",
            "array-state",
        )
