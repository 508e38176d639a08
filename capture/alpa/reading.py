"""Alpa's own plans, read back: its pickled ``ParallelPlan``, or the arguments of a
``ManualStageOption``.

A pickle is read without alpa, and without running anything of it: every class that it names becomes
an empty shell that only takes attributes, so a file that somebody else made can do no harm.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from capture.alpa.placement import Shape, alpa_placement
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan

#: Of a stage: ids of its layers, logical shape, options, and devices.
_Row = tuple[list[int], Sequence[int], Mapping[str, Any], tuple[int, ...]]

_SAFE = {
    ("collections", "OrderedDict"),
    ("builtins", "list"),
    ("builtins", "tuple"),
    ("builtins", "dict"),
    ("builtins", "set"),
}


class _Shell:
    """An empty stand-in for an object of a class that is not imported."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, Mapping):
                self.__dict__.update(part)


class _ShellUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _SAFE:
            return super().find_class(module, name)
        return type(name, (_Shell,), {"__module__": module})


def plan_from_alpa(
    source: object,
    *,
    global_batch_size: int,
    cluster: Cluster | None = None,
    target: str = "cpu",
    undecided: str | None = None,
    num_micro_batches: int | None = None,
    pipeline_schedule: str | None = None,
) -> Plan:
    """Return the plan that Alpa's own plan or options mean.

    Args:
        source: A ``ParallelPlan``, or the path or the bytes of a pickled one; or a mapping with the
            arguments of ``ManualStageOption``, for which ``cluster``, ``num_micro_batches`` and
            ``pipeline_schedule`` are needed.
        global_batch_size: Examples in a step, which Alpa's plan does not say.
        cluster: Instead of that of the ``ParallelPlan``.
        target: Device kind of the cluster, where the ``ParallelPlan`` has it.
        undecided: What a stage counts as whose options leave the choice to Alpa's solver:
            ``"data_parallel"`` or ``"tensor_parallel"``.
        num_micro_batches, pipeline_schedule: What manual options do not say.

    Raises:
        PlanError: ``alpa-plan`` if it is no plan of Alpa's, ``alpa-undecided`` for a stage whose
            parallelism its options leave open, and the codes of ``Plan``.
    """
    if undecided not in (None, "data_parallel", "tensor_parallel"):
        raise PlanError.of(
            f"undecided={undecided!r} is unknown; choose 'data_parallel' or 'tensor_parallel'.",
            "alpa-undecided",
        )
    try:
        if isinstance(source, Mapping):
            said = _Said(source, cluster, num_micro_batches, pipeline_schedule)
        else:
            said = _said(_loaded(source), cluster, target)
        if said.cluster is None or None in (said.num_micro_batches, said.pipeline_schedule):
            raise ValueError(
                "manual options need cluster, num_micro_batches and pipeline_schedule beside them"
            )
        rows = _rows(said.options, said.cluster)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
    ) as error:
        raise PlanError.of(
            f"{_name(source)} is no plan of Alpa's: {type(error).__name__}: {error}.", "alpa-plan"
        ) from None
    stages = []
    for s, (ids, shape, own, where) in enumerate(rows):
        settings = {**said.auto_sharding, **own}
        dp, tp = _degrees(s, (int(shape[0]), int(shape[1])), settings, undecided)
        split = bool(settings.get("prefer_reduce_scatter")) and dp > 1
        choice = StageChoice(dp, tp, "full" if said.remat else "none", split)
        stages.append(Stage(ids[0], ids[-1] + 1, where, choice))
    assert said.num_micro_batches is not None and said.pipeline_schedule is not None, "checked"
    return Plan(
        said.cluster,
        sum(len(ids) for ids, *_ in rows),
        tuple(stages),
        global_batch_size,
        int(said.num_micro_batches),
        said.pipeline_schedule,
        auto_layers=said.auto_layers,
    )


def _rows(options: Mapping[str, Any], cluster: Cluster) -> list[_Row]:
    """Return the layers, logical shape, options and devices of every stage.

    Raises:
        ValueError: where one of them is missing.
    """
    layer_ids = [list(map(int, ids)) for ids in options["forward_stage_layer_ids"]]
    shapes = [(int(h), int(g)) for h, g in options["submesh_physical_shapes"]]
    logical = options.get("submesh_logical_shapes") or shapes
    dicts = options.get("submesh_autosharding_option_dicts") or [{}] * len(layer_ids)
    if not all(layer_ids) or {len(shapes), len(logical), len(dicts)} != {len(layer_ids)}:
        raise ValueError("every stage needs layers, a physical and a logical shape, and options")
    devices = alpa_placement(cluster, [h * g for h, g in shapes])
    return list(zip(layer_ids, logical, dicts, devices, strict=True))


class _Said(NamedTuple):
    """The content of Alpa's plan or options.

    Attributes:
        options: The arguments of ``ManualStageOption``.
        cluster, num_micro_batches, pipeline_schedule: None where it is not known.
        auto_sharding: The solver's options for all stages.
        remat: Whether all layers are recomputed.
        auto_layers: Whether Alpa has cut the layers.
    """

    options: Mapping[str, Any]
    cluster: Cluster | None
    num_micro_batches: int | None
    pipeline_schedule: str | None
    auto_sharding: Mapping[str, Any] = {}
    remat: bool = False
    auto_layers: bool = False


def _said(plan: Any, cluster: Cluster | None, target: str) -> _Said:
    """Return the content of a ``ParallelPlan``."""
    pipeline = plan.pipeline_plan
    options, layers = vars(pipeline.manual_stage_option), vars(pipeline.layer_option)
    if cluster is None:
        there = plan.cluster_info
        nodes = (int(there.num_devices_per_host),) * int(there.num_hosts)
        cluster = Cluster(nodes, target)
    return _Said(
        options,
        cluster,
        plan.num_micro_batches,
        pipeline.pipeline_schedule,
        {} if plan.auto_sharding_option is None else vars(plan.auto_sharding_option),
        bool(layers.get("remat_layer")) or layers.get("remat_mode", "none") != "none",
        type(pipeline.layer_option).__name__ == "AutoLayerOption",
    )


def _degrees(
    stage: int, logical: Shape, settings: Mapping[str, object], undecided: str | None
) -> tuple[int, int]:
    """Return the (data parallel, tensor parallel) degrees of a stage."""
    size = logical[0] * logical[1]
    if settings.get("force_data_parallel"):
        return size, 1
    # On a mesh of two dimensions Alpa splits the batch over the first by itself.
    if size == 1 or settings.get("force_batch_dim_to_mesh_dim") == 0 or min(logical) > 1:
        return logical
    if settings.get("force_batch_dim_to_mesh_dim") == 1:
        return logical[1], logical[0]
    if undecided is None:
        raise PlanError.of(
            f"stage {stage} has logical shape {logical} without force_batch_dim_to_mesh_dim, so "
            "Alpa's solver chooses its parallelism; say "
            "what to count it as: undecided='data_parallel' or 'tensor_parallel'.",
            "alpa-undecided",
        )
    return (size, 1) if undecided == "data_parallel" else (1, size)


def _loaded(source: object) -> Any:
    match source:
        case str() | Path():
            return _loaded(Path(source).read_bytes())
        case bytes():
            return _ShellUnpickler(io.BytesIO(source)).load()
    return source


def _name(source: object) -> str:
    return f"{str(source)!r}" if isinstance(source, (str, Path)) else f"the {type(source).__name__}"
