"""The model of a plan, traced again as the plan cuts it."""

from __future__ import annotations

from capture.model.workload import WorkloadProtocol
from capture.plan.files import traced_for
from capture.plan.stages import Plan
from capture.tracing.model import TracedModel, trace


def trace_for_plan(workload: WorkloadProtocol, plan: Plan) -> TracedModel:
    """Trace the model at the plan's micro-batch size and cut it into the plan's layers.

    Raises:
        PlanError: ``plan-other-model`` if it is not the model that the plan was made for.
    """
    return traced_for(
        plan,
        workload,
        lambda: trace(
            workload,
            plan.microbatch_size,
            plan.num_layers if plan.auto_layers else None,
            unmarked_layers=plan.num_layers,
        ),
        lambda traced: traced.graph,
    )
