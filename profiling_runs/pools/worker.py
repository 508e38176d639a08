"""The worker of a batch, wherever it runs: it makes the model's backend once, and measures one job
after the other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property

import capture
from capture import environment
from capture.documents import write
from capture.errors import CaptureError, ProfileError, is_bug, violations_of
from capture.machine.target import Target
from capture.measured.claims import name_of_process
from profiling_runs.jobs import Backend, Failure, Job, Outcome, Setting


class Worker:
    """A worker: measures jobs of one setting in this process, where JAX must not be loaded yet.

    Raises:
        ProfileError: ``worker-versions`` if this process has other versions than the driver.
        WorkloadError: if the workload cannot be imported here.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        check_versions(setting.versions, versions_of(setting))
        environment.prepare_worker(setting.num_devices, setting.platform, setting.flags)
        # Now, so that a workload that is not here is seen before any job is lost to it.
        self._workload = setting.workload.load()

    @cached_property
    def _backend(self) -> Backend:
        setting = self.setting
        assert setting.backend is not None, "more is asked than what devices there are"
        target = {} if setting.executes else {"target": Target.load(setting.target)}
        return setting.backend(self._workload, **target, **setting.options)

    def look_ahead(self, is_asked: Callable[[], bool]) -> None:
        """Trace the model as stages of the setting will need it, until something is asked for."""
        for size in self.setting.ahead:
            if is_asked():
                break
            self._backend.trace_ahead(size)  # type: ignore[attr-defined]

    def measure(self, job: Job) -> Outcome:
        """Make a measurement; a failure is an outcome, not raised: it must not lose the other
        jobs."""
        if job.what is None:
            from capture.profiler.timing import machine_here

            return Outcome(job, asdict(machine_here()), worker=name_of_process())
        return measure_job(self._backend, job)


def measure_job(backend: Backend, job: Job) -> Outcome:
    """Make one measurement with a backend of this process; a failure is an outcome, not raised."""
    start = time.perf_counter()
    try:
        for key, value in job.known.items():
            backend.store.put(key, value, provenance={}, seconds=0)
        if isinstance(job.method, str):
            found = getattr(backend, job.method)(job.what)
        else:
            found = job.method(backend, job.what)
        if hasattr(found, "outcome"):  # of an execution, which may have failed
            outcome = found.outcome(job)
        else:
            outcome = Outcome(job, write(found), others=backend.store.get(job.also))
    except Exception as error:
        failure: Failure = "raised"
        if isinstance(error, CaptureError):
            failure = "refused"
        elif is_bug(error):
            failure = "bug"
        said = str(error) if failure == "refused" else violations_of(error)[0].message
        outcome = Outcome(job, None, failure=failure, error=said, traceback=traceback.format_exc())
    return replace(outcome, seconds=time.perf_counter() - start, worker=name_of_process())


def versions_of(setting: Setting) -> dict[str, str]:
    """Return the versions that must be equal on the driver and its workers, by package."""
    return {"capture": capture.__version__, **environment.versions(setting.platform)}


def check_versions(wanted: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse a worker whose results would not be the driver's.

    Raises:
        ProfileError: ``worker-versions``.

    Example:
        >>> check_versions({"jax": "0.10.2"}, {"jax": "0.10.2"})
    """
    different = [
        f"{name} {here.get(name, 'missing')} instead of {version}"
        for name, version in wanted.items()
        if here.get(name) != version
    ]
    if different:
        raise ProfileError.of(
            f"worker {name_of_process()} has {', '.join(different)}; install what the driver has "
            "there.",
            "worker-versions",
        )
