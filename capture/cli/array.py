"""Plans of arrays of models (mu-TWO): what ``capture run``, ``explain``, ``report`` and ``diff`` do
with them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from capture import environment
from capture.cli import asked
from capture.cli.output import emit, say, table
from capture.errors import PlanError
from capture.plan.array import ArrayPlan
from capture.quantities import format_bytes


def run(options: argparse.Namespace, plan: ArrayPlan) -> int:
    """Train the array here.

    Raises:
        PlanError: ``array-run`` for options that arrays do not have.
    """
    given = [name for name in ("save", "restore") if getattr(options, name) is not None]
    if given or options.seed:
        names = " and ".join(f"--{name}" for name in [*given, *(["seed"] if options.seed else [])])
        raise PlanError.of(
            f"{names}: models of an array have seeds of their own in the plan, and their state is "
            "not stored by this version; leave it out.",
            "array-run",
        )
    spec = asked.workload_of(plan, options.workload)
    environment.prepare(num_devices=1)
    from capture.runtime.array_check import run_array

    document = run_array(
        plan,
        spec.load(),
        options.steps,
        check=options.check,
        report=lambda text: say(options, text),
    )
    emit(options, document, run_text(plan, document))
    return 0


def run_text(plan: ArrayPlan, document: Mapping[str, Any]) -> str:
    """Memory, and the losses of each model."""
    rows = [
        [
            memory,
            *(
                "-" if document[key] is None else format_bytes(document[key])
                for key in (planned, measured)
            ),
        ]
        for memory, planned, measured in (
            ("device", "planned_peak_bytes", "measured_peak_bytes"),
            ("host", "planned_host_peak_bytes", "host_peak_bytes"),
        )
    ]
    lines = [table(["memory", "planned peak", "measured peak"], rows)]
    lines.append(f"measured by {document['meter']}")
    if not document["is_target"]:
        lines.append(
            f"planned for target {document['target']}, measured on {document['platform']}: not to "
            "be compared"
        )
    moved = document["moved_bytes"]
    lines.append(
        f"an update copies {format_bytes(moved['to_host'])} to the host and "
        f"{format_bytes(moved['to_device'])} back"
    )
    losses = zip(*document["losses"], strict=True)
    rows = [
        [str(model), _set(plan, model), " ".join(f"{loss:.6f}" for loss in of)]
        for model, of in enumerate(losses)
    ]
    lines.append(table(["model", "", "losses"], rows))
    if "reference_losses" in document:
        lines.append(
            "largest relative error beside each model alone: losses "
            f"{document['max_relative_loss_error']:.1e}, parameters "
            f"{document['max_relative_param_error']:.1e}"
        )
    return "\n".join(lines)


def explain(options: argparse.Namespace, plan: ArrayPlan) -> int:
    """What is fused, what is moved, and who needs the memory."""
    rows = [
        [a, decision.bundle, decision.choice, decision.ahead if decision.choice == "swap" else "-"]
        for a, own in enumerate(plan.decisions)
        for decision in own
    ]
    moved = (
        table(["sub-array", "bundle", "is", "fetched ahead"], rows)
        if rows
        else "all feature maps are retained"
    )
    emit(options, {"plan": plan.to_json()}, "\n".join([*plan_lines(plan), moved]))
    return 0


def report(options: argparse.Namespace, plan: ArrayPlan) -> int:
    """What is predicted, and what it leaves.

    Raises:
        PlanError: ``array-page`` for a page or a trace.
    """
    if options.output is not None or options.trace is not None:
        raise PlanError.of(
            "plans of arrays have no page and no trace in this version; leave out -o and --trace.",
            "array-page",
        )
    limit = asked.read_limit(vars(options)) or plan.memory_limit_bytes
    room = None if limit is None else plan.headroom(limit)
    document = {"plan": plan.to_json(), "headroom": room and room.to_json()}
    emit(options, document, "\n".join([*plan_lines(plan), *([str(room)] if room else [])]))
    return 0


def diff(options: argparse.Namespace, first: ArrayPlan, second: ArrayPlan) -> int:
    """What two plans decide and need, where they differ."""
    pairs = zip(_facts(first).items(), _facts(second).values(), strict=True)
    rows = [
        {"what": what, "first": one, "second": other}
        for (what, one), other in pairs
        if one != other
    ]
    lines = [[row["what"], row["first"], row["second"]] for row in rows]
    said = table(["", "first", "second"], lines) if rows else "no difference"
    emit(options, {"differences": rows}, said)
    return 0


def _facts(plan: ArrayPlan) -> dict[str, str]:
    found = plan.prediction
    return {
        "models": "; ".join(_set(plan, model) for model in range(len(plan.models))),
        "batch": f"{plan.batch_size}{' shared' if plan.shared_batches else ''}",
        "sub-arrays": " ".join(str(list(group)) for group in plan.partition),
        "order": plan.order,
        "swapped": _named(plan, "swap"),
        "recomputed": _named(plan, "recompute"),
        "limit": "-" if plan.memory_limit_bytes is None else format_bytes(plan.memory_limit_bytes),
        "device": format_bytes(found.peak_bytes) if found else "-",
        "host": format_bytes(found.host_peak_bytes) if found else "-",
        "a step": f"{found.step_seconds:.4g} s" if found else "-",
    }


def _named(plan: ArrayPlan, choice: str) -> str:
    named = (
        f"{a}: {decision.bundle}"
        for a, own in enumerate(plan.decisions)
        for decision in own
        if decision.choice == choice
    )
    return ", ".join(named) or "-"


def _set(plan: ArrayPlan, model: int) -> str:
    member = plan.models[model]
    values = [f"{name} {value:g}" for name, value in member.hyperparameters.items()]
    return ", ".join([f"seed {member.seed}", *values])


def plan_lines(plan: ArrayPlan) -> list[str]:
    """Sub-arrays and what is predicted."""
    rows = [
        [a, " ".join(map(str, group)), *(_moved(plan, a, name) for name in ("swap", "recompute"))]
        for a, group in enumerate(plan.partition)
    ]
    lines = [
        f"{len(plan.models)} models of {plan.batch_size} examples each, {plan.order}",
        table(["sub-array", "models", "bundles swapped", "recomputed"], rows),
    ]
    if (found := plan.prediction) is not None:
        ordered = sorted(found.parts_bytes.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered)
        lines += [
            f"{found.step_seconds:.4g} s for an update of every model, simulated for "
            f"{plan.cluster.target}",
            f"device: {format_bytes(found.peak_bytes)} at its peak ({parts})",
            f"feature maps: {format_bytes(found.retained_bytes)} retained, "
            f"{format_bytes(found.swapped_bytes)} swapped, "
            f"{format_bytes(found.recomputed_bytes)} recomputed; the host holds "
            f"{format_bytes(found.host_peak_bytes)} at most",
        ]
    return lines


def _moved(plan: ArrayPlan, a: int, choice: str) -> int:
    return sum(decision.choice == choice for decision in plan.decisions[a])
