"""A training of an array beside each of its models alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capture.model.workload import PyTree, takes_key
from capture.plan.array import ArrayPlan
from capture.runtime.array_batches import step_key
from capture.runtime.fused import Fuser
from capture.runtime.reference import ReferenceStep, relative_errors, rounding_floor

#: By so many the gradients of a model alone are off, to see what that makes of its parameters.
ROUNDINGS = 1
#: Relative error of a parameter up to which it needs no explanation.
EXACT = 1e-5


def compared(
    plan: ArrayPlan,
    fusers: Sequence[Fuser],
    begins: Sequence[PyTree],
    params_of: Callable[[int], PyTree],
    batches: Sequence[Any],
) -> dict[str, Any]:
    """Return the losses of each model alone, and by how much trained parameters of the array are
    off; also by how much they would be, trained alone, were their gradients off by a rounding.

    Args:
        begins: By model, the parameters with which it begins.
        params_of: Gives those with which a model of the array ends.
        batches: Batches of the models, of every update from the first on.
    """
    references = {
        task: ReferenceStep(fuser.workload, fuser.traced, [task.batch_size])
        for task, fuser in zip(plan.trained, fusers, strict=True)
    }
    expected: list[list[float]] = []
    # (array, rounded) by model and leaf.
    errors: dict[tuple[int, str], tuple[float, float]] = {}
    for model, member in enumerate(plan.models):
        fuser, reference = fusers[model], references[plan.trained[model]]
        keyed, floor = takes_key(fuser.workload), rounding_floor(fuser.traced.graph)
        found = []
        for roundings in (0, ROUNDINGS):
            params, own = reference.init(begins[model])
            own = fuser.optimizer.with_hyperparameters(own, member.hyperparameters)
            alone = []
            for update, batch in enumerate(batches):
                given = batch if plan.shared_batches else batch[model]
                key = step_key(member, update) if keyed else None
                params, own, loss = reference(params, own, given, key, roundings=roundings)
                alone.append(loss)
            found.append((params, alone))
        (exact, alone), (off, _) = found
        expected.append(alone)
        fused = relative_errors(params_of(model), exact, floor)
        rounded = relative_errors(off, exact, floor)
        errors |= {(model, leaf): (fused[leaf], rounded[leaf]) for leaf in fused}
    (model, leaf), (worst, of_rounding) = max(errors.items(), key=lambda one: one[1][0])
    return {
        "reference_losses": [list(step) for step in zip(*expected, strict=True)],
        "max_relative_param_error": worst,
        "worst_param": {"model": model, "leaf": leaf, "rounding_error": of_rounding},
        "max_param_error_in_roundings": max(
            error / max(other, EXACT) for error, other in errors.values()
        ),
    }
