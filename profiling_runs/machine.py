"""The devices that workers have."""

from __future__ import annotations

from capture.errors import ProfileError, plain
from capture.measured.store import Store
from capture.profiler.executing import ExecutingMachine
from profiling_runs.batch import Batch
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where, setting_of


def machine_of_workers(setting: Setting, where: Where) -> ExecutingMachine:
    """Ask a worker which devices it has. This process stays away from accelerators itself: it would
    take memory of theirs.

    Raises:
        ProfileError: ``profile-worker`` if the worker cannot say.
    """
    batch = Batch([Job("machine", None, "machine", "devices of the workers")], Store(), {})
    (outcome,) = batch.run(lambda: where.open(setting_of(setting), None, 1))
    if outcome.value is None:
        raise ProfileError.of(
            f"a worker cannot say which devices it has: {plain(outcome.error)}", "profile-worker"
        )
    return ExecutingMachine(**outcome.value)
