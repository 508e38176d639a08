"""A plan as the arguments of Alpa's ``PipeshardParallel`` (alpa 0.2.3): plain data, a file that
makes the real object, or the object.

What Alpa means by its arguments, and what it silently accepts, was found by running it
(``tests/alpa_conformance``):

* A stage's logical shape is (data parallel, tensor parallel). Without
  ``force_batch_dim_to_mesh_dim`` Alpa's solver chooses between the two on a one-dimensional mesh,
  so the key is always written above one device.
* Optimizer state is split over replicas where ``prefer_reduce_scatter`` is true; so that key says
  what the plan says.
* Rematerialisation is an option of all layers together.
* A stage without layers, and a micro-batch that the replicas do not divide, are accepted by Alpa;
  ``Plan`` refuses both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from capture import __version__
from capture.alpa.placement import Shape, alpa_placement, foreign_schedule, on_hosts, physical_shape
from capture.errors import ExecutionError, PlanError, Violation
from capture.plan.kinds import of_stages
from capture.plan.stages import Plan

ALPA_VERSION = "0.2.3"


@dataclass(frozen=True)
class AlpaOptions:
    """The arguments of ``alpa.PipeshardParallel`` that mean a plan, as plain data.

    Attributes:
        num_hosts, num_devices_per_host: Size of the mesh that it is for.
        num_micro_batches: Micro-batches of a step, as in Alpa.
        pipeline_schedule: ``"1f1b"`` or ``"gpipe"``.
        layer_option: Class of the layer option (``ManualLayerOption`` at marks,
            ``AutoLayerOption``) and its arguments.
        default_auto_sharding_option: Arguments of ``AutoShardingOption``, for every stage.
        forward_stage_layer_ids: Layers of every stage.
        submesh_physical_shapes: (hosts, devices per host) of every stage.
        submesh_logical_shapes: (data parallel, tensor parallel) of every stage.
        submesh_autosharding_option_dicts: The settings of ``AutoShardingOption`` that differ in
            each stage.
        placement: Device ids of every stage as Alpa places them; no argument.
    """

    num_hosts: int
    num_devices_per_host: int
    num_micro_batches: int
    pipeline_schedule: str
    layer_option: tuple[str, dict[str, Any]]
    default_auto_sharding_option: dict[str, Any]
    forward_stage_layer_ids: list[list[int]]
    submesh_physical_shapes: list[Shape]
    submesh_logical_shapes: list[Shape]
    submesh_autosharding_option_dicts: list[dict[str, Any]]
    placement: list[tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        return {"alpa_version": ALPA_VERSION, **asdict(self)}

    def build(self, devices: object = None) -> Any:
        """Build the real ``alpa.PipeshardParallel``.

        Args:
            devices: A ``VirtualPhysicalMesh``; None for the mesh that ``alpa.init`` made.

        Raises:
            ExecutionError: ``alpa-missing`` where alpa cannot be imported.
        """
        try:
            alpa = import_module("alpa")
        except ImportError as error:
            raise ExecutionError.of(
                "alpa cannot be imported here (Python "
                f"{sys.version_info.major}.{sys.version_info.minor}: {error}); it needs jax "
                "0.3.22 "
                "and an environment of its own. Take the plan there: capture export PLAN --to "
                "alpa -o method.py.",
                "alpa-missing",
            ) from None
        layer_class, layer_arguments = self.layer_option
        return alpa.PipeshardParallel(
            devices=devices,
            num_micro_batches=self.num_micro_batches,
            default_auto_sharding_option=alpa.AutoShardingOption(
                **self.default_auto_sharding_option
            ),
            pipeline_schedule=self.pipeline_schedule,
            layer_option=getattr(alpa, layer_class)(**layer_arguments),
            stage_option=alpa.ManualStageOption(
                forward_stage_layer_ids=[list(ids) for ids in self.forward_stage_layer_ids],
                submesh_physical_shapes=list(self.submesh_physical_shapes),
                submesh_logical_shapes=list(self.submesh_logical_shapes),
                submesh_autosharding_option_dicts=[
                    dict(d) for d in self.submesh_autosharding_option_dicts
                ],
            ),
        )

    def source(self, about: str = "") -> str:
        """Return the text of a Python 3.8 file that imports alpa alone; its ``method()`` returns
        the real ``PipeshardParallel``.

        Args:
            about: A line of the file's docstring that says what it is of.
        """
        layer_class, layer_arguments = self.layer_option
        num_layers = sum(map(len, self.forward_stage_layer_ids))
        if layer_class == "ManualLayerOption":
            layers = (
                f"The loss must call alpa.mark_pipeline_boundary() {num_layers - 1} times, "
                f"between its {num_layers} layers."
            )
        else:
            layers = (
                f"Alpa cuts the loss into {num_layers} layers itself; its cuts may differ from "
                "those that were planned for."
            )
        # It is text of a file, perhaps a stranger's, in a file of Python.
        about = about.encode("unicode_escape").decode().replace('"', "'")
        return _FILE.format(
            about=f"{about}\n\n" if about else "",
            version=__version__,
            alpa_version=ALPA_VERSION,
            num_hosts=self.num_hosts,
            num_devices_per_host=self.num_devices_per_host,
            layers=layers,
            num_micro_batches=self.num_micro_batches,
            auto_sharding=_arguments(self.default_auto_sharding_option),
            schedule=self.pipeline_schedule,
            layer_option=f"alpa.{layer_class}({_arguments(layer_arguments)})",
            ids=_listed(self.forward_stage_layer_ids),
            physical=_listed(self.submesh_physical_shapes),
            logical=_listed(self.submesh_logical_shapes),
            dicts=_listed(self.submesh_autosharding_option_dicts),
        )


_FILE = '''"""{about}Made by capture {version} for Alpa {alpa_version} on {num_hosts} hosts of \
{num_devices_per_host} devices.

{layers}

    import alpa, method
    alpa.init(cluster="ray")
    step = alpa.parallelize(train_step, method=method.method())
"""

import alpa


def method(devices=None):
    """The plan; devices is a VirtualPhysicalMesh, or None for that of alpa.init."""
    return alpa.PipeshardParallel(
        devices=devices,
        num_micro_batches={num_micro_batches},
        default_auto_sharding_option=alpa.AutoShardingOption({auto_sharding}),
        pipeline_schedule="{schedule}",
        layer_option={layer_option},
        stage_option=alpa.ManualStageOption(
            forward_stage_layer_ids={ids},
            submesh_physical_shapes={physical},
            submesh_logical_shapes={logical},
            submesh_autosharding_option_dicts={dicts},
        ),
    )
'''


def _arguments(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _listed(items: list[Any]) -> str:
    return "[\n" + "".join(f"                {item!r},\n" for item in items) + "            ]"


def to_alpa(plan: Plan) -> AlpaOptions:
    """Return the arguments of ``alpa.PipeshardParallel`` that mean the plan; neither alpa nor JAX
    is imported.

    Args:
        plan: On equal nodes.

    Raises:
        PlanError: every rule of Alpa's that the plan breaks: ``alpa-cluster``, ``alpa-submesh``,
            ``alpa-packing``, ``alpa-remat`` (one mode for all stages, none or full),
            ``alpa-shard-params``, ``alpa-sequence-parallel``, ``alpa-schedule``, ``alpa-offload``.

    Example:
        >>> from capture.machine.cluster import Cluster
        >>> from capture.plan.choices import StageChoice
        >>> from capture.plan.stage import Stage
        >>> stage = Stage(0, 2, [0, 1], StageChoice(data_parallel=2))
        >>> options = to_alpa(Plan(Cluster((2,)), 2, (stage,), 8, 2))
        >>> options.submesh_logical_shapes, options.submesh_autosharding_option_dicts
        ([(2, 1)], [{'force_batch_dim_to_mesh_dim': 0}])
    """
    plan = of_stages(plan)
    PlanError.check(violations(plan))
    placement = alpa_placement(plan.cluster, [stage.num_devices for stage in plan.stages])
    per_node = plan.cluster.nodes[0]
    replicated = [stage for stage in plan.stages if stage.choice.data_parallel > 1]
    default = all(stage.choice.shard_optimizer for stage in replicated)
    dicts: list[dict[str, Any]] = []
    for stage in plan.stages:
        own: dict[str, Any] = {"force_batch_dim_to_mesh_dim": 0} if stage.num_devices > 1 else {}
        if stage.choice.data_parallel > 1 and stage.choice.shard_optimizer != default:
            own["prefer_reduce_scatter"] = stage.choice.shard_optimizer
        dicts.append(own)
    return AlpaOptions(
        num_hosts=len(plan.cluster.nodes),
        num_devices_per_host=per_node,
        num_micro_batches=plan.num_microbatches,
        pipeline_schedule=plan.schedule,
        layer_option=_layer_option(plan),
        default_auto_sharding_option={"prefer_reduce_scatter": default},
        forward_stage_layer_ids=[list(range(stage.first, stage.stop)) for stage in plan.stages],
        submesh_physical_shapes=[
            physical_shape(stage.num_devices, per_node) for stage in plan.stages
        ],
        submesh_logical_shapes=[
            (stage.choice.data_parallel, stage.choice.tensor_parallel) for stage in plan.stages
        ],
        submesh_autosharding_option_dicts=dicts,
        placement=list(placement),
    )


def _layer_option(plan: Plan) -> tuple[str, dict[str, Any]]:
    recomputes = plan.stages[0].choice.remat == "full"
    if not plan.auto_layers:
        return "ManualLayerOption", {"remat_layer": recomputes}
    mode = "coarse_grained_remat" if recomputes else "none"
    return "AutoLayerOption", {"layer_num": plan.num_layers, "remat_mode": mode}


def violations(plan: Plan) -> list[Violation]:
    """Return a violation per rule of Alpa's that a plan breaks; only one if it lacks the
    schedule."""
    if found := foreign_schedule(plan):
        return found
    found = on_hosts(plan)
    try:
        alpa_placement(plan.cluster, [stage.num_devices for stage in plan.stages])
    except PlanError as error:
        found += error.violations
    modes = sorted({stage.choice.remat for stage in plan.stages})
    if modes not in (["none"], ["full"]):
        found.append(
            Violation(
                f"the stages have remat {', '.join(modes)}; Alpa recomputes all layers or none. "
                "Plan with --remat none or full, or let capture export --nearest take full.",
                "alpa-remat",
            )
        )
    split = [s for s, stage in enumerate(plan.stages) if stage.choice.shard_params]
    if split:
        found.append(
            Violation(
                f"stages {split} split their parameters over replicas, which Alpa's solver "
                "decides itself; plan without --shard-params, or export with --nearest.",
                "alpa-shard-params",
            )
        )
    split = [s for s, stage in enumerate(plan.stages) if stage.choice.sequence_parallel]
    if split:
        found.append(
            Violation(
                f"stages {split} split their activations along the sequence, which Alpa's solver "
                "decides itself; plan without --sequence-parallel, or export with --nearest.",
                "alpa-sequence-parallel",
            )
        )
    return found
