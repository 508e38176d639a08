"""The model of a plan, traced again as the plan cuts it."""

from __future__ import annotations

from capture.errors import PlanError, Violation
from capture.model.workload import WorkloadProtocol
from capture.plan.stages import Plan
from capture.tracing.model import TracedModel, trace


def trace_for_plan(workload: WorkloadProtocol, plan: Plan) -> TracedModel:
    """The model cut into the plan's layers, at the plan's micro-batch size.

    Raises:
        PlanError: ``plan-other-model`` or ``plan-num-layers`` if it is not the model that the plan
            was made for.
    """
    traced = trace(
        workload,
        plan.microbatch_size,
        plan.num_layers if plan.auto_layers else None,
        unmarked_layers=plan.num_layers,
    )
    violations = []
    if traced.graph.num_layers != plan.num_layers:
        violations.append(
            Violation(
                f"the plan has num_layers={plan.num_layers} and the model "
                f"{traced.graph.num_layers}; plan this model again.",
                "plan-num-layers",
            )
        )
    elif plan.model_hash and traced.graph.model_hash != plan.model_hash:
        violations.append(
            Violation(
                f"the plan was made for model_hash={plan.model_hash} and this model has "
                f"{traced.graph.model_hash}: the model, its "
                "shapes or the version of JAX changed. Plan it again with capture plan.",
                "plan-other-model",
            )
        )
    PlanError.check(violations)
    return traced
