"""What plans of every kind share: one kind of file, which names the workload and the devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from capture.errors import CaptureError, PlanError, TracingError
from capture.machine.cluster import Cluster
from capture.machine.target import relative_target, resolved_target
from capture.model.workload import WorkloadSpec, name_of, of_document

#: A plan of some kind: a dataclass with ``cluster``, ``workload`` and ``to_json``.
AnyPlan = TypeVar("AnyPlan")
T = TypeVar("T")


@dataclass(frozen=True)
class ClusterRow:
    """A cluster as plans have it."""

    nodes: tuple[int, ...]
    target_per_node: tuple[str, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterRow:
        return cls(cluster.nodes, (cluster.target,) * len(cluster.nodes))

    @property
    def wrong(self) -> str:
        """What is wrong with its form; empty if nothing is."""
        none = "cluster.target_per_node is empty and must have a target for every node"
        return "" if self.target_per_node else none

    @property
    def cluster(self) -> Cluster:
        """The cluster.

        Raises:
            PlanError: ``plan-mixed-targets``.
        """
        targets = sorted(set(self.target_per_node))
        if len(targets) > 1:
            raise PlanError.of(
                f"plan mixes the targets {targets}; one target per plan for now.",
                "plan-mixed-targets",
            )
        return Cluster(self.nodes, targets[0])


def save(plan: Any, path: Path | str) -> None:
    """Write JSON; the paths of workloads and of a target's file are stored relative to the file."""
    path, folder = Path(path), Path(path).parent
    moved = _moved(
        plan, lambda spec: spec.relative_to(folder), lambda name: relative_target(name, folder)
    )
    path.write_text(json.dumps(moved.to_json(), indent=2) + "\n")


def resolved(plan: AnyPlan, path: Path | str) -> AnyPlan:
    """The inverse: a plan that was read from a file, as seen from the working directory."""
    folder = Path(path).parent
    plan = _moved(
        of_document(plan, path),
        lambda spec: spec.resolved_from(folder),
        lambda name: resolved_target(name, folder),
    )
    return replace(plan, named_by=str(path)) if hasattr(plan, "named_by") else plan  # type: ignore


def _moved(
    plan: Any, workload: Callable[[WorkloadSpec], WorkloadSpec], target: Callable[[str], str]
) -> Any:
    """A plan whose files are seen from elsewhere: that of its target, of its workload, and of those
    that its parts name (``with_workloads``)."""
    moved: dict[str, Any] = {}
    if plan.cluster is not None:
        moved["cluster"] = replace(plan.cluster, target=target(plan.cluster.target))
    if plan.workload is not None:
        moved["workload"] = workload(plan.workload)
    plan = replace(plan, **moved) if moved else plan
    return plan.with_workloads(workload) if hasattr(plan, "with_workloads") else plan


def traced_for(
    plan: Any, workload: Any, trace: Callable[[], T], graph_of: Callable[[T], Any] = lambda t: t
) -> T:
    """What ``trace`` makes of a workload, if that is the model that a plan was made for.

    Args:
        plan: With ``workload``, ``num_layers`` (0 for any) and ``model_hash`` (empty for any).
        workload: The task that is traced.
        trace: Traces it, into as many layers as the plan's.
        graph_of: The graph of what it makes.

    Raises:
        PlanError: ``plan-other-model``.
    """
    try:
        traced = trace()
    except TracingError as error:
        if error.codes != ("trace-num-layers",):
            raise
        raise other_model(plan, workload, "has too few products for so many layers") from None
    graph = graph_of(traced)
    if plan.num_layers not in (0, graph.num_layers):
        raise other_model(plan, workload, f"has num_layers={graph.num_layers}")
    if plan.model_hash and plan.model_hash != graph.model_hash:
        has = f"has model_hash={graph.model_hash}"
        raise other_model(plan, workload, has)
    return traced


def other_model(plan: Any, workload: Any, has: str) -> CaptureError:
    """The error of a workload that is not the plan's.

    Args:
        plan: Of any kind.
        workload: The task that is given instead.
        has: What it has that the plan's has not.
    """
    num_layers, known = getattr(plan, "num_layers", 0), plan.model_hash
    about = [f"num_layers={num_layers}"] if num_layers else []
    about += [f"model_hash={known}"] if known else []
    return PlanError.of(
        f"the plan was made for {plan.workload or 'a model'} with {' and '.join(about)}, and "
        f"{name_of(workload)} {has}: another model, or its shapes or the version of JAX changed. "
        "Give the plan's own workload, or plan this one.",
        "plan-other-model",
    )
