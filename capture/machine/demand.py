"""What a process needs of the node that it is placed on, in the resources of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.errors import CaptureError
from capture.machine.target import Target, same_target

#: Kinds as Ray detects them, by target; those of the same letters share a kind, whatever memory
#: they have.
ACCELERATOR_TYPES = {
    "v100-32g": "V100",
    "a100-40g": "A100",
    "a100-80g": "A100",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gh200": "GH200",
    "gb300": "GB300",
    "v4": "TPU-V4",
    "v5e": "TPU-V5LITEPOD",
    "v5p": "TPU-V5P",
    "v6e": "TPU-V6E",
    "tpu7x": "TPU-V7X",
}


@dataclass(frozen=True)
class Demand:
    """The processor, memory and accelerators that a process needs of its node in a Ray cluster.

    Attributes:
        memory_bytes: Memory on the host.
        devices: ``"GPU"`` or ``"TPU"``; None if it uses no accelerators.
        num_devices: How many of them.
        accelerator_type: Kind of the devices.
    """

    memory_bytes: int
    devices: str | None = None
    num_devices: int = 0
    accelerator_type: str | None = None

    def on(
        self,
        target: str,
        num_devices: int,
        accelerator_type: str | None,
        error: type[CaptureError],
    ) -> Demand:
        """Return the demand with so many devices of a target; unchanged for a target of CPUs.

        Args:
            target: A name or a file.
            num_devices: That it uses.
            accelerator_type: Ray's name of them; None for the usual one.
            error: What is raised.

        Raises:
            CaptureError: ``ray-accelerator`` if it is not known how Ray calls the devices of the
                target.
        """
        found = Target.load(target)
        if found.platform == "cpu":
            return self
        kind = accelerator_type or next(
            (ray for name, ray in ACCELERATOR_TYPES.items() if same_target(name, target)), None
        )
        if kind is None:
            raise error.of(
                f"target={target!r} has no accelerator type of Ray's that is known here; "
                "name one with --accelerator.",
                "ray-accelerator",
            )
        devices = "GPU" if found.platform == "cuda" else "TPU"
        return replace(self, devices=devices, num_devices=num_devices, accelerator_type=kind)

    def offered(self, resources: Mapping[str, float]) -> bool:
        """Return whether a node has accelerators of the demanded kind at all."""
        return self.devices is None or (
            f"accelerator_type:{self.accelerator_type}" in resources
            and resources.get(self.devices, 0) >= 1
        )

    def room(self, resources: Mapping[str, float]) -> int:
        """Return how many such processes an empty node has room for.

        Example:
            >>> node = {"CPU": 8, "GPU": 5, "memory": 64e9}
            >>> Demand(10**9, "GPU", 2, "A100").room({**node, "accelerator_type:A100": 1})
            2
            >>> Demand(10**9, "GPU", 2, "A100").room({**node, "accelerator_type:H100": 1})
            0
        """
        if not self.offered(resources):
            return 0
        bounds = [resources.get("CPU", 0), resources.get("memory", 0) // self.memory_bytes]
        if self.devices is not None:
            bounds.append(resources[self.devices] // self.num_devices)
        return int(min(bounds))

    @property
    def resources(self) -> dict[str, float]:
        """The demand in Ray's resources: an amount by each resource's name."""
        # A node offers a whole one of its kind, to be shared by all that need it: an actor takes
        # next to nothing.
        kind = {f"accelerator_type:{self.accelerator_type}": 0.001} if self.accelerator_type else {}
        devices = {self.devices: self.num_devices} if self.devices else {}
        return {"CPU": 1, "memory": self.memory_bytes, **devices, **kind}

    def options(self) -> dict[str, Any]:
        """Return the options with which Ray starts an actor that has this demand."""
        own = dict(self.resources)
        return {
            "num_cpus": own.pop("CPU"),
            "num_gpus": own.pop("GPU", 0),
            "memory": own.pop("memory"),
            "resources": own,
            "max_restarts": 0,
        }

    def __str__(self) -> str:
        devices = f"{self.num_devices} {self.devices} of type {self.accelerator_type}, "
        return f"{devices if self.devices else ''}1 CPU, {self.memory_bytes} bytes of memory"


def resources_text(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the resources of nodes as one line of an error message."""
    return "; ".join(
        ", ".join(
            f"{name} {amount:g}"
            for name, amount in sorted(resources.items())
            if ":" not in name or "type:" in name
        )
        for resources in nodes
    )
