"""Compile a method with real Alpa up to the instructions of its workers, and replay their memory;
nothing is executed.

Alpa needs its own compiler for two passes only: choosing shardings (auto-sharding) and partitioning
(SPMD). Here a rule chooses them: the batch and what is computed from it are split over the first
dimension of a stage's logical mesh, other tensors over the second, and what only the update reads
(optimizer state) over both if ``prefer_reduce_scatter`` is on. Partitioning is not needed to know
who holds which buffer when.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import shims  # isort: skip  # before jax and alpa
import alpa
import numpy as np
import ray
from alpa.device_mesh import PhysicalDeviceMeshGroup, VirtualPhysicalMesh
from alpa.parallel_plan import StagePlan
from alpa.pipeline_parallel import compile_executable, computation, cross_mesh_resharding
from alpa.pipeline_parallel.primitive_def import pipeline_p
from alpa.pipeline_parallel.runtime_emitter import (
    AllocateZeroWorkerExecutableConfig,
    PipelineInstType,
)
from alpa.util import get_shard_shape
from jax.core import Var
from jax.interpreters import pxla

assert shims

Specs = Sequence[Any]


def mesh(num_hosts: int, num_devices_per_host: int) -> VirtualPhysicalMesh:
    """A mesh of hosts that are not there."""
    hosts = [{"NodeManagerAddress": f"10.0.0.{i}"} for i in range(num_hosts)]
    return VirtualPhysicalMesh(list(range(num_hosts)), hosts, num_devices_per_host)


class _Silent:
    """An actor, or a method of one: takes every call."""

    _ids = itertools.count()

    def __init__(self) -> None:
        self.id = next(self._ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent()

    def __call__(self, *args: Any, **options: Any) -> None:
        return None

    def remote(self, *args: Any, **options: Any) -> None:
        return None


class _PhysicalMesh:
    """A launched submesh: the facts of the virtual one, and workers that do nothing."""

    def __init__(self, virtual: VirtualPhysicalMesh, mesh_id: int) -> None:
        self._virtual, self.mesh_id = virtual, mesh_id
        self.workers = [_Silent() for _ in range(virtual.num_hosts)]
        self.host_ips = [info["NodeManagerAddress"] for info in virtual.host_info]

    def get_virtual_physical_mesh(self) -> VirtualPhysicalMesh:
        return self._virtual

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        facts = (
            "host_ids",
            "host_info",
            "devices",
            "num_hosts",
            "num_devices_per_host",
            "num_devices",
            "shape",
            "device_strs",
        )
        return getattr(self._virtual, name) if name in facts else lambda *args, **options: None


def _spec(aval: Any, logical: Sequence[int], dims: Sequence[int | None]) -> pxla.ShardingSpec:
    """Tensor dimension ``dims[m]`` split over mesh dimension m, in the form in which Alpa reads
    shardings from XLA."""
    split = {
        m: d
        for m, d in enumerate(dims)
        if d is not None and logical[m] > 1 and aval.shape[d] % logical[m] == 0
    }
    sharding = [pxla.NoSharding() for _ in aval.shape]
    if not split:
        return pxla.ShardingSpec(sharding, [pxla.Replicated(int(np.prod(logical)))])
    for m, d in split.items():
        sharding[d] = pxla.Chunked([int(logical[m])])
    axis = {d: k for k, d in enumerate(sorted(split.values()))}
    mapping = [
        pxla.ShardedAxis(axis[split[m]]) if m in split else pxla.Replicated(int(size))
        for m, size in enumerate(logical)
        if size > 1
    ]
    return pxla.ShardingSpec(sharding, mapping)


def _rule(aval: Any, logical: Sequence[int], kind: str, splits_state: bool) -> pxla.ShardingSpec:
    # Groups of tokens come before or after experts; what has one dimension is a statistic.
    if kind == "batch":
        return _spec(
            aval,
            logical,
            [next((d for d, size in enumerate(aval.shape) if size % logical[0] == 0), None), None],
        )
    fits = (
        [d for d in reversed(range(len(aval.shape))) if aval.shape[d] % logical[1] == 0]
        if len(aval.shape) > 1
        else []
    )
    if kind == "optimizer" and splits_state:
        for d in fits:
            over_replicas = next(
                (e for e in range(len(aval.shape)) if e != d and aval.shape[e] % logical[0] == 0),
                None,
            )
            if over_replicas is not None:
                return _spec(aval, logical, [over_replicas, d])
    return _spec(aval, logical, [None, fits[0] if fits else None])


class _Hlo:
    def __init__(self, name: str) -> None:
        self.name = name

    def to_string(self) -> str:
        return ""

    def is_spmd_partitioned(self) -> bool:
        return True

    is_sharding_annotated = is_spmd_partitioned


class _RuleSharded(computation.XlaShardedPipelineComputation):
    """A stage whose shardings came from the rule; there is no program to partition."""

    def get_spmd_partitioned(self) -> Any:
        return self.hlo

    def get_hlo_text(self) -> str:
        return ""


@dataclasses.dataclass
class Compiled:
    """What Alpa made of a method.

    Attributes:
        executable: Its ``PipeshardDriverExecutable``.
        config: Its ``PipeshardConfig``: stages, schedule, instruction lists.
        global_invars: Variables of the whole step, in the order of its arguments.
        batch: Those of them that are split into micro-batches.
        from_batch: Variables of all stages whose value depends on the batch.
    """

    executable: Any
    config: Any
    global_invars: list[Any]
    batch: set[Any]
    from_batch: set[Any]

    @property
    def stage_option(self) -> Any:
        return self.executable.pipeline_plan.manual_stage_option

    def devices_of_mesh(self, m: int) -> list[tuple[int, int]]:
        """(host, device) of one mesh."""
        found = self.executable.mesh_group.meshes[m]
        return [
            (host, device)
            for host, devices in zip(found.host_ids, found.devices, strict=True)
            for device in devices
        ]

    def stages_of_mesh(self, m: int) -> list[Any]:
        """Forward, backward and update of one mesh."""
        placed = self.config.schedule.stage_placement
        return [stage for i, stage in enumerate(self.config.xla_stages) if list(placed(i)) == [m]]


def compile_method(step: Callable[..., Any], args: Sequence[Any], method: Any) -> Compiled:
    """Run Alpa's compiler on a train step for abstract arguments; ``method.devices`` is a
    ``mesh``."""
    # a failed compile leaves them running, and the next would refuse
    alpa.timer.timers.timers.clear()
    seen: dict[str, Any] = {}
    compile_internal = compile_executable.compile_pipeshard_executable_internal

    def compile_and_keep(*arguments: Any, **options: Any) -> Any:
        closed, _, batch_size = arguments[0], arguments[1], arguments[2]
        seen["invars"], seen["batch_size"] = list(closed.jaxpr.invars), batch_size
        seen["batch"] = {
            v for v, is_batch in zip(closed.jaxpr.invars, arguments[4], strict=True) if is_batch
        }
        seen["state"] = set(closed.jaxpr.invars) - seen["batch"]
        seen["config"] = compile_internal(*arguments, **options)
        return seen["config"]

    def launch(sliced: Sequence[VirtualPhysicalMesh]) -> Any:
        group = PhysicalDeviceMeshGroup(
            [_PhysicalMesh(virtual, i) for i, virtual in enumerate(sliced)], method.devices
        )
        group.instantiate_nccl_group = lambda *arguments: None
        method.devices.launched_physical_mesh_group = group
        return group

    with ExitStack() as patches:
        for patch in (
            mock.patch.object(compile_executable, "shard_each_stage", _sharder(seen)),
            mock.patch.object(
                compile_executable, "compile_pipeshard_executable_internal", compile_and_keep
            ),
            mock.patch.object(
                cross_mesh_resharding, "compile_allgather", lambda *arguments, **options: None
            ),
            mock.patch.object(ray, "get", lambda x, *arguments, **options: x),
            mock.patch.object(alpa.global_config, "eagerly_create_communicators", False),
            mock.patch.object(method.devices, "get_physical_mesh_group", launch, create=True),
        ):
            patches.enter_context(patch)
        executable = alpa.parallelize(step, method=method, donate_argnums=(0,)).get_executable(
            *args
        )
    return Compiled(executable, seen["config"], seen["invars"], seen["batch"], seen["from_batch"])


def _sharder(seen: dict[str, Any]) -> Callable[..., Any]:
    """In the place of Alpa's ``shard_each_stage``, whose arguments it takes."""

    # Fmt: skip.
    def shard_each_stage(
        stages,
        meshes,
        schedule,
        num_meshes,
        accumulators,
        global_invars,
        accumulated,
        donated,
        num_microbatch,
        logical_shapes,
        option_dicts,
        default_option,
        *rest,
    ):
        passes = [stage for stage in stages if not stage.name.endswith("apply_grad")]
        updates = [stage for stage in stages if stage.name.endswith("apply_grad")]
        first_reads = {v for stage in passes for v in stage.invars}
        inputs = set(global_invars)
        update_only = {
            v for stage in updates for v in stage.invars if v in inputs and v not in first_reads
        }
        no_batch = set(accumulators) | set(accumulators.values()) | update_only | seen["state"]
        donatable = computation.get_donatable_intermediate(
            stages,
            schedule.mesh_stage_mapping,
            computation.OrderedSet(global_invars).union(accumulators.keys()),
        )

        from_state = _computed_from(
            seen["state"], [equation for stage in stages for equation in stage.eqns]
        )
        # New parameters come from the batch as well, but have no examples.
        from_batch = seen["from_batch"] = _computed_from(
            seen["batch"], [equation for stage in passes for equation in stage.eqns]
        )

        def kind(v: Any, origin: Any = None) -> str:
            if v in update_only or origin in update_only:
                return "optimizer"
            # A mask has examples though nothing of the batch is in it; a weight may have as many
            # experts as there are examples.
            has_examples = v.aval.shape[:1] == (seen["batch_size"],) and v not in from_state
            has_examples |= v in from_batch and (
                len(v.aval.shape) > 1 or v.aval.shape == (seen["batch_size"],)
            )
            return "batch" if has_examples and v not in no_batch else "other"

        sharded = []
        for i, stage in enumerate(stages):
            (m,) = schedule.stage_placement(i)
            option = dataclasses.replace(default_option, **option_dicts[m])
            logical = tuple(logical_shapes[m])
            if option.force_data_parallel:
                logical = (int(np.prod(logical)), 1)
            common = {"name": stage.name, "hlo": _Hlo(stage.name)}
            if not stage.outvars:
                dummy = computation.XlaShardedPipelineComputation.dummy_computation(
                    stage.name, logical, rest[-1]
                )
                made = _RuleSharded(
                    **{f.name: getattr(dummy, f.name) for f in dataclasses.fields(dummy)}
                )
                made.input_sharding_specs = []
                made.output_sharding_specs = [
                    _rule(v.aval, logical, "other", False) for v in made.outvars
                ]
                sharded.append(made)
                continue
            made = _RuleSharded(
                **common,
                stage_plan=StagePlan(
                    0, logical, 1 << 60, option.all_reduce_threshold, option, None, 0
                ),
                donated_invars=list(donated[i]),
                invars=stage.invars,
                outvars=stage.outvars,
                output_acc_grad_indices=[
                    k for k, v in enumerate(stage.outvars) if v in accumulated
                ],
                donatables=donatable[i],
            )
            origin = {
                out: v
                for v, out, given in zip(stage.invars, stage.outvars, donated[i], strict=False)
                if given
            }
            splits = option.prefer_reduce_scatter
            made.input_sharding_specs = [
                _rule(v.aval, logical, kind(v), splits) for v in stage.invars
            ]
            made.output_sharding_specs = [
                _rule(v.aval, logical, kind(v, origin.get(v)), splits) for v in stage.outvars
            ]
            sharded.append(made)
        return sharded, 0

    return shard_each_stage


def _computed_from(sources: set[Any], equations: Iterable[Any]) -> set[Any]:
    """Variables whose value depends on one of the sources; merged layers are calls within a
    stage."""
    found = set(sources)
    for equation in equations:
        depends = [isinstance(v, Var) and v in found for v in equation.invars]
        called = next(
            (equation.params[name] for name in ("call_jaxpr", "jaxpr") if name in equation.params),
            None,
        )
        called = getattr(called, "jaxpr", called)  # some are closed
        if equation.primitive is pipeline_p:  # a mark hands on each of its operands
            made = depends
        elif called is not None and len(called.invars) == len(depends):
            inner = _computed_from(
                {v for v, has in zip(called.invars, depends, strict=True) if has}, called.eqns
            )
            made = [isinstance(v, Var) and v in inner for v in called.outvars]
        else:
            made = [any(depends)] * len(equation.outvars)
        found.update(v for v, has in zip(equation.outvars, made, strict=True) if has)
    return found


def shard_bytes(variable: Any, spec: Any) -> int:
    return (
        int(np.prod(get_shard_shape(variable.aval, spec), dtype=np.int64))
        * variable.aval.dtype.itemsize
    )


def replay(compiled: Compiled) -> list[list[tuple[str, int]]]:
    """Per mesh, what one of its workers does and the bytes per device that are live afterwards,
    from Alpa's own instruction lists."""
    return [
        list(_replay_mesh(compiled, m)) for m in range(len(compiled.executable.mesh_group.meshes))
    ]


def _replay_mesh(compiled: Compiled, m: int) -> Iterator[tuple[str, int]]:
    config, executable = compiled.config, compiled.executable
    worker = executable.mesh_group.meshes[m].workers[0]
    stage_of = dict(zip(config.executable_uuids, config.xla_stages, strict=True))
    zeros = {
        c.exec_uuid: c
        for c in config.executable_configs[worker]
        if isinstance(c, AllocateZeroWorkerExecutableConfig)
    }
    specs = {
        v: s
        for stage in compiled.stages_of_mesh(m)
        for v, s in zip(stage.invars, stage.input_sharding_specs, strict=True)
    }
    live: dict[int, int] = {}
    uuids = iter(config.input_config.input_local_uuid_lists[m])
    for argument, is_batch in zip(
        config.input_config.mesh_arg_indices[m], config.input_config.batch_invars[m], strict=True
    ):
        variable = compiled.global_invars[argument]
        for _ in range(executable.num_batch if is_batch else 1):
            live[next(uuids)] = shard_bytes(variable, specs[variable])
    yield "start", sum(live.values())
    arriving = {
        uuid: task.task_spec
        for task in config.resharding_tasks
        for uuid in task.recv_worker_task_ids.values()
    }
    for instruction in config.instruction_lists[worker]:
        if instruction.opcode == PipelineInstType.RUN and instruction.task_uuid in zeros:
            made = zeros[instruction.task_uuid]
            for uuid, shape, dtype in zip(
                instruction.output_uuids,
                made.grad_shard_shapes,
                made.grad_shard_dtypes,
                strict=True,
            ):
                live[int(uuid)] = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        elif instruction.opcode == PipelineInstType.RUN and instruction.task_uuid in stage_of:
            stage = stage_of[instruction.task_uuid]
            for uuid, given in zip(instruction.input_uuids, stage.donated_invars, strict=True):
                if given:
                    live.pop(int(uuid), None)
            for uuid, variable, spec in zip(
                instruction.output_uuids, stage.outvars, stage.output_sharding_specs, strict=True
            ):
                live[int(uuid)] = shard_bytes(variable, spec)
        elif (
            instruction.opcode == PipelineInstType.RECV
            and instruction.opaques["allgather_uuid"] is not None
        ):
            task = arriving[instruction.task_uuid]
            live[int(instruction.output_uuids[0])] = int(
                np.prod(get_shard_shape(task.aval, task.final_dst_spec), dtype=np.int64)
                * task.aval.dtype.itemsize
            )
        elif instruction.opcode == PipelineInstType.FREE:
            for uuid in instruction.input_uuids:
                live.pop(int(uuid), None)
        yield f"{instruction.opcode.name} {instruction.info}", sum(live.values())


@contextmanager
def autostaging_tables(costs: np.ndarray, successors: np.ndarray) -> Iterator[dict[str, Any]]:
    """Give Alpa's autostaging these tables instead of those that it would profile on GPUs: float
    (L, L, submesh, config) seconds, and the most stages that memory allows behind each."""
    from alpa.pipeline_parallel import stage_construction

    asked: dict[str, Any] = {}

    def get_compute_cost(virtual_mesh, submeshes, configs, *rest: Any, **options: Any) -> Any:
        asked.update(submeshes=submeshes, configs=configs)
        return costs, successors

    with mock.patch.object(stage_construction, "get_compute_cost", get_compute_cost):
        yield asked
