"""Where jobs run, as plain data, and the runner that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from capture import environment
from profiling_runs.jobs import Setting
from profiling_runs.pool import Here, Runner
from profiling_runs.worker import versions_of

DEFAULT_LOCAL_WORKERS = 2
DEFAULT_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Where:
    """Where jobs run.

    Attributes:
        num_workers: At most; 0 measures in this process. None: 2 here, and on a Ray cluster as many as it has room for.
        timeout_seconds: Of a job in a worker.
    """

    num_workers: int | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    @property
    def here(self) -> bool:
        """Whether everything happens in this process."""
        return self.num_workers == 0

    def open(self, setting: Setting | None, backend: Any, num_jobs: int) -> Runner:
        """Start what the jobs need.

        Args:
            setting: Of the workers; None measures in this process, with the backend.
            backend: Of this process.
            num_jobs: More workers are not started.
        """
        if setting is None:
            return Here(backend)
        from profiling_runs.local import LocalPool

        return LocalPool(setting, min(num_jobs, self.num_workers or DEFAULT_LOCAL_WORKERS), self.timeout_seconds)


def setting_of(setting: Setting) -> Setting:
    """A setting with the flags and versions of this process, which the workers' results are to be of."""
    return replace(setting, flags=environment.active_flags(), versions=versions_of(setting))
