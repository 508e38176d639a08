"""Devices of a target to compile for; they need not be there, and nothing can be put on them.

CUDA targets need the CUDA plugin of JAX and TPU targets libtpu: wheels without a driver, a toolkit
or a device. The process must have been prepared (``environment.prepare(..., platform=...)``): JAX
otherwise looks for the devices themselves.

CUDA devices that are not there know no memory kinds: a sharding with ``memory_kind="pinned_host"``
loses it without a word, and XLA counts that argument in the device's ``argument_size_in_bytes``.
Nothing here reads that number: what a program is given is booked by the ledger from shapes and
shardings, and of the compiler only temporaries, results and aliases are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.experimental import topologies

from capture import environment
from capture.errors import TargetError
from capture.machine.target import Target, check_compiler


def devices_of(target: Target, num_devices: int) -> Sequence[Any]:
    """Return devices of a target, for the meshes that programs are compiled for.

    Args:
        target: Target to compile for.
        num_devices: Number of devices.

    Raises:
        TargetError: ``target-devices`` if this process has fewer virtual CPU devices;
            ``target-missing`` if the compiler of the target
            is not installed; ``target-compiler`` if it refuses the target.
    """
    if target.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < num_devices:
            raise TargetError.of(
                f"a stage on {num_devices} devices cannot be compiled in a process with "
                f"{len(devices)} virtual CPU devices; call "
                f"capture.environment.prepare(num_devices={num_devices}) before JAX loads (the "
                "capture command does).",
                "target-devices",
            )
        return devices[:num_devices]
    check_compiler(target)
    try:
        found = (
            # One for all stages of up to a node, so that equal programs are equal in all of them.
            _cuda_topology(target_config(target), max(16, num_devices))
            if target.platform == "cuda"
            else _tpu_devices(target, num_devices)
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        message = str(error).strip().splitlines()[0]
        raise TargetError.of(
            f"target={target.name!r} cannot be compiled for with "
            f"{environment.versions(target.platform)}: {message}.",
            "target-compiler",
        ) from error
    return found[:num_devices]


@lru_cache(maxsize=32)
def _cuda_topology(config: str, num_devices: int) -> tuple[Any, ...]:
    return tuple(
        topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{num_devices}"
        ).devices
    )


#: The part of a GPU's memory that XLA schedules with where it has no device, by the overlap that it
#: gives up (jax 0.10.2). With a device it takes the process's pool.
_SCHEDULED_FRACTION = 0.8


def target_config(target: Target) -> str:
    """Return the GPU description that XLA plans with, as a text proto
    (``GpuTargetConfigProto``). Its memory is such that the scheduler has the pool of a process that
    has the device."""
    fields = {
        key: value
        for key, value in target.compiler.items()
        if not key.startswith(("options", "run_options")) and key != "source"
    }
    if target.memory is not None and "device_memory_size" in fields.get("gpu_device_info", {}):
        pool = target.memory.capacity_bytes.value * target.memory.allocator_fraction.value
        size = int(pool / _SCHEDULED_FRACTION)
        fields["gpu_device_info"] = {**fields["gpu_device_info"], "device_memory_size": size}
    return _text_proto(
        {**fields, "platform_name": "CUDA", "device_description_str": target.description}
    )


def _text_proto(fields: Mapping[str, object]) -> str:
    lines = []
    for key, value in fields.items():
        match value:
            case Mapping():
                lines.append(f"{key} {{\n{_text_proto(value)}\n}}")
            case str():
                lines.append(f'{key}: "{value}"')
            case _:
                lines.append(f"{key}: {value}")
    return "\n".join(lines)


@lru_cache(maxsize=32)
def _tpu_topology(name: str, chip_config: str | None, num_slices: int = 1) -> tuple[Any, ...]:
    options: dict[str, Any] = {} if chip_config is None else {"chip_config_name": chip_config}
    if num_slices > 1:
        options["num_slices"] = num_slices
    return tuple(
        topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    )


def _tpu_devices(target: Target, num_devices: int) -> tuple[Any, ...]:
    """Return the smallest topology of the target that is large enough, or several slices of the
    largest: a program on a part of a larger one may be refused."""
    chip_config = target.compiler.get("chip_config_name")
    if not target.compiler["topologies"]:
        raise ValueError("its file names no topology")
    for name in target.compiler["topologies"]:
        devices = _tpu_topology(name, chip_config)
        if len(devices) >= num_devices:
            return devices
    return _tpu_topology(name, chip_config, -(-num_devices // len(devices)))
