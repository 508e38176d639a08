"""The place where jobs run, as plain data, and the pool that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from capture import environment
from capture.errors import ProfileError
from capture.options import Asked, at_least
from profiling_runs.jobs import Backend, Setting
from profiling_runs.pools.pool import Here, Pool
from profiling_runs.pools.worker import versions_of

#: One for each processor; what the free memory has no room for is left out.
DEFAULT_LOCAL_WORKERS = max(2, environment.num_cores())
DEFAULT_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Where:
    """The place where jobs run: this process, workers of this machine, or a Ray cluster.

    Attributes:
        num_workers: Worker processes that measure, at most; 0: this one (default: one per
            processor, at least 2, and on Ray all that it has room for).
        ray: Measure on a Ray cluster: auto (the one this machine is a part of), local, or an
            address.
        accelerator_type: With Ray and runs on devices: its name of the target's devices, such as
            A100.
        timeout_seconds: Seconds after which a worker is ended that is not done, more where the
            machine is busy.

    Raises:
        ProfileError: ``where-options`` for a Ray cluster without workers, or an accelerator type
            without a cluster.
    """

    num_workers: Annotated[int | None, Asked("workers", "N", least=0, in_files=False)] = None
    ray: Annotated[str | None, Asked(metavar="ADDRESS", in_files=False)] = None
    accelerator_type: Annotated[
        str | None, Asked("accelerator", metavar="TYPE", in_files=False)
    ] = None
    timeout_seconds: Annotated[
        float, Asked("job_timeout", "S", read=at_least(1), in_files=False)
    ] = DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if self.ray is not None and self.here:
            raise ProfileError.of(
                f"--workers 0 measures in this process, and --ray {self.ray} does not; leave one "
                "out.",
                "where-options",
            )
        if self.ray is None and self.accelerator_type is not None:
            raise ProfileError.of(
                f"--accelerator {self.accelerator_type} is of a Ray cluster; add --ray.",
                "where-options",
            )

    @property
    def here(self) -> bool:
        """Whether every measurement is made in this process."""
        return self.num_workers == 0

    def open(self, setting: Setting | None, backend: Backend | None, num_jobs: int) -> Pool:
        """Open the pool for a number of jobs: this process, local workers, or a Ray cluster.

        Args:
            setting: What the workers' jobs share; None measures in this process, with the backend.
            backend: What measures in this process.
            num_jobs: More workers are not started.

        Raises:
            ProfileError: as ``RayPool``.
        """
        if setting is None:
            assert backend is not None, "this process measures"
            return Here(backend)
        if self.ray is not None:
            from profiling_runs.pools.ray_pool import RayPool

            return RayPool(
                setting,
                self.ray,
                min(num_jobs, self.num_workers or num_jobs),
                self.timeout_seconds,
                self.accelerator_type,
            )
        from profiling_runs.pools.local import LocalPool

        return LocalPool(
            setting, min(num_jobs, self.num_workers or DEFAULT_LOCAL_WORKERS), self.timeout_seconds
        )


def setting_of(setting: Setting) -> Setting:
    """Return a setting with the flags and versions of this process, which the workers' results are
    to be of. Whether its workload may be loaded is decided here, and by no worker.

    Raises:
        WorkloadError: as ``WorkloadSpec.admitted``.
    """
    return replace(
        setting,
        workload=setting.workload.admitted(),
        flags=environment.active_flags(setting.platform),
        versions=versions_of(setting),
    )
