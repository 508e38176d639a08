"""What models of several programs train, and may have together: each the hyperparameters of its own
optimizer, and shared what is the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from capture.errors import Violation
from capture.model.workload import WorkloadProtocol, WorkloadSpec
from capture.plan.array import ArrayPlan, ArrayTask, Member
from capture.plan.files import traced_for
from capture.runtime.fused import FusedArray, Fuser
from capture.runtime.layerwise import LayerwiseOptimizer, hyperparameter_violations


def as_planned(
    plan: ArrayPlan, task: ArrayTask, workload: WorkloadProtocol, made: Callable[[], Fuser]
) -> Fuser:
    """Return the factory of a task's programs, if the task is the one that the plan was made for.

    Raises:
        PlanError: ``plan-other-model``.
    """
    known = replace(plan, num_layers=task.num_layers, model_hash=task.model_hash)
    if task.workload:
        named = WorkloadSpec.parse(task.workload) if ":" in task.workload else None
        known = replace(known, workload=named)
    return traced_for(known, workload, made, lambda fuser: fuser.traced.graph)


def wrong_hyperparameters(
    optimizers: Mapping[ArrayTask, LayerwiseOptimizer],
    tasks: Sequence[ArrayTask],
    models: Sequence[Member],
) -> Iterator[Violation]:
    """Yield a violation for each hyperparameter that a model's own optimizer does not take."""
    for task in dict.fromkeys(tasks):
        own = [model for model, of in zip(models, tasks, strict=True) if of == task]
        yield from hyperparameter_violations(optimizers[task], own)


def unlike_shared(arrays: Mapping[ArrayTask, FusedArray]) -> Iterator[Violation]:
    """Yield a violation for each program that has other shared parameters or batches, or reads them
    in other parts: what is there once is one for all."""
    (first, known), *others = ((task, _shared(array)) for task, array in arrays.items())
    for task, found in others:
        if found != known:
            names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
            yield Violation(
                f"models of {first} and models of {task} are to share {', '.join(names)}, which "
                "are not the same arrays in both, or are read by other layers; share what is "
                "alike, or nothing.",
                "array-tasks",
            )


def _shared(array: FusedArray) -> dict[str, list[Any]]:
    """Return, per bundle that is there once, its parameters or batch leaves and their shapes."""
    found = dict[str, list[Any]]()
    for bundle, values in zip(array.bundles, array.values, strict=True):
        if bundle.shared:
            place = bundle.feed or [array.params.index(value) for value in values]
            structs = [(one.shape, str(one.dtype)) for one in map(array.struct, values)]
            found[bundle.name] = list(zip(place, structs, strict=True))
    return found
