"""The devices on which programs are executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capture import environment


@dataclass(frozen=True)
class ExecutingMachine:
    """The devices on which programs are executed to measure them.

    Attributes:
        platform, device_kind: Names that JAX gives the devices.
        num_devices: Number of devices of a process.
    """

    platform: str
    device_kind: str
    num_devices: int

    @property
    def provenance(self) -> dict[str, Any]:
        """The facts of this process that decide measurements on its devices: device kind, versions
        and flags."""
        return {
            "backend": "run",
            "target": self.platform,
            "device_kind": self.device_kind,
            "versions": environment.versions(),
            "flags": list(environment.active_flags()),
        }
