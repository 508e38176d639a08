"""What the states of training steps of all kinds have in common: whole-model trees cut into leaves
and joined again, and the checks of what a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from capture.errors import ExecutionError, Violation
from capture.model.workload import PyTree
from capture.tracing import TracedModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """The arrays that a step changes, on the devices of the stages or in the memory of their hosts.
    A step takes a state over: use the one that it returns.

    Attributes:
        slots: Per persistent slot of the step program, its arrays: parameters and optimizer state.
        num_steps: Updates so far.
        unused: On the host, the parameters that the loss does not read, by index into the layer
            graph: no step changes them.
    """

    slots: dict[str, list[jax.Array]]
    num_steps: int = field(metadata={"static": True}, default=0)
    unused: dict[int, Any] = field(default_factory=dict)


def made_by_host(make: Callable[[Any], PyTree], given: Any) -> PyTree:
    """Return what a function makes of a random key, or of arrays, made by the host where devices
    are accelerators: none of them need hold a whole model, nor any of it twice."""
    if jax.default_backend() == "cpu":
        return make(given)
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return jax.device_get(make(given))
    with jax.default_device(host):
        return jax.device_get(make(jax.device_put(given, host)))


def param_leaves(traced: TracedModel, params: PyTree) -> list[np.ndarray]:
    """Return parameters as host arrays in the order of the layer graph.

    Raises:
        ExecutionError: ``run-params`` naming every parameter that the model does not have so.
    """
    given, expected = jax.tree.leaves(params), jax.tree.leaves(traced.params_struct)
    ExecutionError.check(_leaf_violations("parameters", expected, given, "run-params"))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(traced.split_params(params))]


def optimizer_leaves(structs: Sequence[jax.ShapeDtypeStruct], optimizer_state: PyTree) -> list[Any]:
    """Return the leaves of a whole model's optimizer state.

    Raises:
        ExecutionError: ``run-optimizer`` naming every leaf that the model does not have so.
    """
    leaves = jax.tree.leaves(optimizer_state)
    ExecutionError.check(_leaf_violations("optimizer state", structs, leaves, "run-optimizer"))
    return leaves


def joined_params(traced: TracedModel, leaves: Mapping[int, np.ndarray]) -> PyTree:
    """Return parameters in a tree as the workload's ``init`` returns it.

    Args:
        leaves: By index into the layer graph.
    """
    # JAX's stubs leave its methods out.
    tree: Any = jax.tree.structure(traced.split_struct)
    return traced.join_params(tree.unflatten([leaves[p] for p in range(tree.num_leaves)]))


def check_state(state: PipelineState, planned: Mapping[str, Sequence[object]]) -> None:
    """Refuse what would fail deep inside JAX: a state of another plan, or one that a step has
    already taken over.

    Args:
        planned: Per persistent slot of the step, the sharding of each array.

    Raises:
        ExecutionError: ``run-state``, ``run-state-consumed``.
    """
    if set(state.slots) != set(planned):
        raise ExecutionError.of(
            f"the state has the slots {sorted(state.slots)} and this plan {sorted(planned)}; "
            "carry it over with "
            "step.restore(other.params(state), other.optimizer_state(state), state.num_steps).",
            "run-state",
        )
    for name, arrays in state.slots.items():
        # What a step returns has the very objects, which a list compares first: asking each array
        # in turn takes twice as long.
        shardings = [a.sharding for a in arrays]
        if shardings != planned[name]:
            found, sharding = next(
                pair for pair in zip(shardings, planned[name], strict=True) if pair[0] != pair[1]
            )
            raise ExecutionError.of(
                f"an array of the state's {name} lies as {found} and the plan's as "
                f"{sharding}; leave the arrays of a state where the step put them, or "
                "take them up anew with step.restore.",
                "run-state",
            )
        if True in [array.is_deleted() for array in arrays]:
            raise ExecutionError.of(
                "the state was already taken over by a step, which donates its arrays; go on "
                "with the state that the step returned.",
                "run-state-consumed",
            )


def _leaf_violations(
    what: str, expected: Sequence[Any], given: Sequence[Any], code: str
) -> list[Violation]:
    """Return which leaves of a tree that a user gives are not those of the model."""
    if len(expected) != len(given):
        return [
            Violation(
                f"the {what} have {len(given)} leaves and the model's {len(expected)}; give those "
                "of this model.",
                code,
            )
        ]
    return [
        Violation(
            f"leaf {i} of the {what} has shape {tuple(np.shape(leaf))} {leaf.dtype}; the model "
            f"has {tuple(struct.shape)} {struct.dtype}.",
            code,
        )
        for i, (struct, leaf) in enumerate(zip(expected, given, strict=True))
        if tuple(np.shape(leaf)) != tuple(struct.shape) or leaf.dtype != struct.dtype
    ]
