"""The devices of a plan, and how the arrays of a stage lie on its mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from capture import environment
from capture.compiler.executable import HOST_MEMORY, Executable
from capture.errors import ExecutionError
from capture.model.graph import LayerGraph, Tensor
from capture.partition.sharding import over_replicas
from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS
from capture.plan.choices import StageChoice
from capture.quantities import format_bytes
from capture.runtime.optimizer import StageUpdate
from capture.step.attribution import Buffer
from capture.step.ledger import Peak
from capture.step.program import Step, replay
from capture.tracing.slices import struct_of


def first_devices(devices: Sequence[jax.Device] | None, count: int) -> list[Any]:
    """Return the first devices, as many as a plan uses, by default of ``jax.devices()``.

    Raises:
        ExecutionError: ``run-devices`` if there are fewer, or some are of other processes.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < count:
        raise ExecutionError.of(
            f"the plan uses {count} devices and this process has {len(devices)} "
            f"({devices[0].platform}); for virtual CPU devices call "
            f"capture.environment.prepare(num_devices={count}) before JAX loads (capture run "
            "does).",
            "run-devices",
        )
    others = {device.process_index for device in devices[:count]} - {jax.process_index()}
    if others:
        raise ExecutionError.of(
            f"the plan uses {count} devices, some of which are of processes {sorted(others)}, and "
            f"this is process {jax.process_index()}; give pipeshard the processes that share the "
            "plan (hosts=capture.runtime.multihost.initialize()), or devices of this one.",
            "run-devices",
        )
    return list(devices[:count])


def check_hosts(devices: Sequence[jax.Device]) -> None:
    """Refuse devices that cannot use the memory of their host.

    Raises:
        ExecutionError: ``run-host-memory``.
    """
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in devices]
    if any(HOST_MEMORY not in found for found in kinds):
        raise ExecutionError.of(
            f"devices of platform {devices[0].platform} have no memory of kind {HOST_MEMORY}, "
            "where the plan keeps something; run it on GPUs, TPUs or CPU devices.",
            "run-host-memory",
        )


def check_device_memory(devices: Sequence[jax.Device], peak_bytes: Sequence[int]) -> None:
    """Refuse a step that needs more than JAX's allocator may take of a GPU, three quarters of its
    memory unless a variable says otherwise.

    Raises:
        ExecutionError: ``run-device-memory``.
    """
    for device, needed in zip(devices, peak_bytes, strict=False):  # a plan may leave some out
        if device.platform not in ("gpu", "cuda") or device.process_index != jax.process_index():
            continue
        allowed = (device.memory_stats() or {}).get("bytes_limit", needed)
        if needed > allowed:
            raise ExecutionError.of(
                f"the step needs {format_bytes(needed)} of {device}, and JAX's allocator may take "
                f"{format_bytes(allowed)}; set {environment.DEVICE_MEMORY_FRACTION}=0.9 before JAX "
                "starts (capture run does), or choose a plan that needs less (capture plan "
                f"--memory {allowed / 1e9:.0f}GB).",
                "run-device-memory",
            )


def check_memory(devices: Sequence[jax.Device], *steps: Step) -> Peak:
    """Refuse steps that need more than JAX may take of their devices, or pin in the memory of a
    GPU's host; return the highest peak of a device.

    Args:
        devices: By device id of the steps.
        steps: That follow one another.

    Raises:
        ExecutionError: ``run-device-memory``, ``run-host-memory``, and those of ``replay``.
    """
    ledgers = [replay(step) for step in steps]
    allowed = int(os.environ.get(environment.HOST_MEMORY_LIMIT, 64)) * 10**9
    for host in {place.host.name for step in steps for place in step.places if place.host}:
        held = max(each.peak_of(host).peak_bytes for each in ledgers)
        if devices[0].platform in ("gpu", "cuda") and held > allowed:
            raise ExecutionError.of(
                f"the step holds {format_bytes(held)} in the memory of the host, and JAX may pin "
                f"{format_bytes(allowed)}; set {environment.HOST_MEMORY_LIMIT}="
                f"{-(-held // 10**9) + 1} before JAX starts.",
                "run-host-memory",
            )
    peaks = zip(*(ledger.peak_bytes_per_device for ledger in ledgers), strict=True)
    check_device_memory(devices, list(map(max, peaks)))
    every = (peak for ledger in ledgers for peak in ledger.peaks)
    return max(every, key=lambda peak: peak.peak_bytes)


class StageLayout:
    """Shardings of the values, batch leaves, parameters and optimizer state of a stage.

    Args:
        graph: The model's layers, as ``ModelSharding.graph`` of the choice.
        devices: Replicas first; none for programs that are traced and never compiled.
        specs: Per parameter of the graph, how it is split over the mesh axis ``"model"``.
    """

    def __init__(
        self,
        graph: LayerGraph,
        choice: StageChoice,
        devices: Sequence[jax.Device],
        specs: Sequence[PartitionSpec],
        update: StageUpdate,
    ):
        self.graph, self.choice, self.specs, self.optimizer = graph, choice, specs, update
        shape, axes = (choice.data_parallel, choice.tensor_parallel), (DATA_AXIS, MODEL_AXIS)
        self.mesh: Any = (
            Mesh(np.asarray(devices).reshape(shape), axes)
            if len(devices)
            else AbstractMesh(shape, axes, (AxisType.Auto,) * 2)
        )

    @cached_property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def tensor_sharding(self, tensor: Tensor) -> NamedSharding:
        """Return the sharding of a value or leaf: split along its batch if even, else whole."""
        if tensor.batch_dim is None or tensor.shape[tensor.batch_dim] % self.choice.data_parallel:
            return self.replicated
        return NamedSharding(self.mesh, PartitionSpec(*[None] * tensor.batch_dim, DATA_AXIS))

    def value_sharding(self, value: int) -> NamedSharding:
        """Return a tensor's sharding, along the sequence too if maker and readers split it so."""
        return self.split_sharding(value, self.graph.value_dim(value, self.choice.value_split))

    def split_sharding(self, value: int, dim: int | None) -> NamedSharding:
        """Return the sharding of a value that is also split along ``dim`` over the devices of a
        tensor-parallel group; None: along no other dimension than that of the examples."""
        tensor = self.graph.values[value]
        sharding = self.tensor_sharding(tensor)
        if dim is None:
            return sharding
        axes = [*sharding.spec, *[None] * (len(tensor.shape) - len(sharding.spec))]
        axes[dim] = MODEL_AXIS
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def batch_sharding(self, leaf: int) -> NamedSharding:
        return self.tensor_sharding(self.graph.batch[leaf])

    def param_sharding(self, param: int) -> NamedSharding:
        spec = self.specs[param]
        if self.choice.shard_params:
            spec = over_replicas(spec, self.graph.params[param].shape, self.choice.data_parallel)
        return NamedSharding(self.mesh, spec)

    def _state_sharding(self, param: int | None, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a leaf of the optimizer's state: as of its parameter if it has
        that shape, and over the replicas too if the plan says so."""
        is_like = param is not None and shape == self.graph.params[param].shape
        spec = self.specs[param] if param is not None and is_like else PartitionSpec()
        if self.choice.shard_optimizer:
            spec = over_replicas(spec, shape, self.choice.data_parallel)
        return NamedSharding(self.mesh, spec)

    def param_structs(self, params: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        return [struct_of(self.graph.params[p], self.param_sharding(p)) for p in params]

    def value_structs(self, values: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        return [struct_of(self.graph.values[v], self.value_sharding(v)) for v in values]

    def batch_structs(self, leaves: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        return [struct_of(self.graph.batch[b], self.batch_sharding(b)) for b in leaves]

    def state_structs(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                struct.shape, struct.dtype, sharding=self._state_sharding(param, struct.shape)
            )
            for param, struct in zip(
                self.params_of_state, self.optimizer.state_structs, strict=True
            )
        ]

    @property
    def params_of_state(self) -> list[int | None]:
        """The parameter of each leaf of the stage's optimizer state; None of what is of no one."""
        found = self.optimizer.whole.traced.param_of_state
        return [found.get(leaf) for leaf in self.optimizer.state]

    def state_buffers(self) -> tuple[Buffer, ...]:
        """Return what the state of the optimizer consists of."""
        found = []
        for param, struct in zip(self.params_of_state, self.state_structs(), strict=True):
            layer, name = None, "state"
            if param is not None:
                layer = self.graph.param_owner(param)
                name = f"state of {self.graph.params[param].name}"
            found.append(Buffer(shard_bytes(struct), "optimizer", layer, name))
        return tuple(found)


def split_dim(spec: PartitionSpec, axis: str) -> int | None:
    """Return the dimension that a mesh axis splits, or None."""
    return next((dim for dim, name in enumerate(spec) if name == axis), None)


def on_host(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the structure of an array in the memory of the host of its devices."""
    sharding = struct.sharding.with_memory_kind(HOST_MEMORY)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def shard_bytes(array: Any) -> int:
    """Return the bytes that an array, or its structure, takes on each of its devices."""
    return math.prod(array.sharding.shard_shape(array.shape)) * int(array.dtype.itemsize)


def kept_bytes(forward: Executable) -> int:
    """Return the bytes of what a forward pass returns beside its outputs, as allocated where the
    compiler says so: padding is counted with what is kept, which has the odd shapes."""
    outputs, *residuals = forward.outputs
    if forward.output_bytes is None:
        return sum(shard_bytes(r) for part in residuals for r in part)
    return max(0, forward.output_bytes - sum(map(shard_bytes, outputs)))
