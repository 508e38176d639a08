"""Plans of arrays whose models come and go: the other models stay in their sub-arrays, and their
feature maps are moved as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from capture.errors import ExecutionError, Violation
from capture.plan.array import ArrayPlan, ArrayTask, Decision, Member, tasks_of
from capture.runtime.fused import FusedArray, Fuser
from capture.step.sub_array import movable, recomputable

Fusers = Mapping[ArrayTask, Fuser]


def without(plan: ArrayPlan, kept: Sequence[int], fusers: Fusers) -> ArrayPlan:
    """Return the plan with only the models ``kept``, in that order, and no empty sub-array."""
    groups = [
        (a, [kept.index(model) for model in group if model in kept])
        for a, group in enumerate(plan.partition)
    ]
    models = [plan.models[model] for model in kept]
    return _regrouped(plan, models, [(a, group) for a, group in groups if group], fusers)


def joined(plan: ArrayPlan, members: Sequence[Member], fusers: Fusers) -> ArrayPlan:
    """Return the plan with more models, each in the then smallest sub-array of its program.

    Raises:
        ExecutionError: ``array-tasks`` where there is none.
    """
    tasks = tasks_of(members, plan.batch_size, plan.workload)
    ExecutionError.check(
        Violation(
            f"no model of the array trains {task}, so that a new one has no sub-array to join; "
            "plan again with it, and carry the others over.",
            "array-tasks",
        )
        for task in dict.fromkeys(tasks)
        if task not in plan.trained
    )
    groups = [(a, list(group)) for a, group in enumerate(plan.partition)]
    for n, task in enumerate(tasks):
        same = (group for _, group in groups if plan.trained[group[0]] == task)
        min(same, key=len).append(len(plan.models) + n)
    return _regrouped(plan, [*plan.models, *members], groups, fusers)


def _regrouped(
    plan: ArrayPlan,
    models: Sequence[Member],
    groups: Sequence[tuple[int, Sequence[int]]],
    fusers: Fusers,
) -> ArrayPlan:
    """Return the plan with other sub-arrays, each beside the one whose decisions it takes over."""
    decisions = []
    for a, group in groups:
        fuser, old = fusers[plan.trained[plan.partition[a][0]]], len(plan.partition[a])
        carried = _carried(fuser.of(old), fuser.of(len(group)), plan.decisions[a])
        decisions.append(tuple(carried))
    return replace(
        plan,
        models=tuple(models),
        partition=tuple(tuple(group) for _, group in groups),
        order=plan.order if len(groups) > 1 else "in turn",
        decisions=tuple(decisions),
        prediction=None,
        seconds_from="",
        saturation=(),
        why=None,
        candidates=(),
    )


def _carried(old: FusedArray, new: FusedArray, decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Yield the decisions for a sub-array of another size, whose feature maps are the same ones in
    other bundles: what has parts of several is swapped if one of them is."""
    decided = {decision.bundle: decision for decision in decisions}
    of_old = [decided.get(old.bundles[n].name) for n in movable(old) for _ in old.values[n]]
    of_new = [n for n in movable(new) for _ in new.values[n]]
    again, found = set(recomputable(new)), dict[int, Decision]()
    for number, decision in zip(of_new, of_old, strict=True):
        if decision is not None and (number not in found or decision.choice == "swap"):
            found[number] = decision
    for number, decision in found.items():
        assert decision.choice == "swap" or number in again, "layers of equal models are equal"
        yield replace(decision, bundle=new.bundles[number].name)
