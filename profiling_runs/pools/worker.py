"""The worker of a batch, wherever it runs: it makes the model's backend once, and measures one job
after the other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import capture
from capture import environment
from capture.documents import write
from capture.errors import CaptureError, ProfileError, is_bug, violations_of
from capture.machine.target import Target
from capture.measured.claims import name_of_process
from capture.profiler.bounded_passes import BoundedPasses
from capture.registered import REGISTERED
from profiling_runs.jobs import Failure, Job, Outcome, Setting


class Worker:
    """A worker: measures jobs of one setting in this process, where JAX must not be loaded yet.

    Raises:
        ProfileError: ``worker-versions`` if this process has other versions than the driver.
        WorkloadError: if the workload cannot be imported here.
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        platform = "cpu" if setting.backend == "run" else Target.load(setting.target).platform
        check_versions(setting.versions, versions_of(setting))
        environment.prepare_worker(setting.num_devices, platform, setting.flags)
        # Now, so that a workload that is not here is seen before any job is lost to it.
        self._workload = setting.workload.load()

    @cached_property
    def _backend(self) -> Any:
        setting = self.setting
        if setting.array is not None:
            from capture.profiler.array import ArrayBackend

            target = None if setting.backend == "run" else Target.load(setting.target)
            return ArrayBackend(self._workload, setting.array, target=target)
        if setting.measures == "packs":
            from capture.profiler.packs import PackBackend

            return PackBackend(self._workload, Target.load(setting.target))
        if setting.measures == "layers":
            from capture.profiler.layers import LayerBackend

            return LayerBackend(
                self._workload,
                setting.num_layers,
                target=None if setting.backend == "run" else Target.load(setting.target),
                memory_limit_bytes=setting.memory_limit_bytes,
            )
        if setting.backend == "compile":
            from capture.profiler.compile import CompileBackend

            return CompileBackend(
                self._workload,
                setting.num_layers,
                setting.tensor_parallel_rule,
                target=Target.load(setting.target),
            )
        return REGISTERED["profiling runs"]["run"](
            self._workload,
            setting.num_layers,
            setting.tensor_parallel_rule,
            memory_limit_bytes=setting.memory_limit_bytes,
            fresh_process=setting.fresh_process,
        )

    def look_ahead(self, is_asked: Callable[[], bool]) -> None:
        """Trace the model as stages of the setting will need it, until something is asked for."""
        for size in self.setting.ahead:
            if is_asked():
                break
            self._backend.trace_ahead(size)

    def measure(self, job: Job) -> Outcome:
        """Make a measurement; a failure is an outcome, not raised: it must not lose the other
        jobs."""
        if job.part == "machine":
            from capture.profiler.timing import machine_here

            return Outcome(job, asdict(machine_here()), worker=name_of_process())
        return measure_job(self._backend, job)


def measure_job(backend: Any, job: Job) -> Outcome:
    """Make one measurement with a backend of this process; a failure is an outcome, not raised."""
    start = time.perf_counter()
    try:
        of = {"run": _of_run, "bounds": _of_bounds}.get(job.part, _of_stage)
        outcome = of(backend, job)
    except Exception as error:
        failure: Failure = "raised"
        if isinstance(error, CaptureError):
            failure = "refused"
        elif is_bug(error):
            failure = "bug"
        said = str(error) if failure == "refused" else violations_of(error)[0].message
        outcome = Outcome(job, None, failure=failure, error=said, traceback=traceback.format_exc())
    return replace(outcome, seconds=time.perf_counter() - start, worker=name_of_process())


def _of_stage(backend: Any, job: Job) -> Outcome:
    for key, value in job.known.items():
        backend.store.put(key, value, provenance={}, seconds=0)
    measure = {
        "stage": "measure",
        "update": "measure_update",
        "split": "measure_split",
        "buffers": "measure_buffers",
        "split buffers": "measure_split_buffers",
        "layer": "measure",
        "pack": "measure",
        "segment": "measure",
        "copy": "measure",
    }
    value = write(getattr(backend, measure[job.part])(job.what))
    is_update_own = job.part == "stage" and not job.known
    others = backend.store.get([backend.update_key(job.what)]) if is_update_own else {}
    return Outcome(job, value, others=others)


def _of_run(backend: Any, job: Job) -> Outcome:
    executed = backend.execute(job.what)
    if executed.peak_bytes_per_stage is None:
        failure: Failure = "raised" if executed.traceback else "refused"
        return Outcome(
            job, None, failure=failure, error=executed.failure, traceback=executed.traceback
        )
    return Outcome(job, executed.to_json(), stored_key=executed.stored_key(job.key))


def _of_bounds(backend: Any, job: Job) -> Outcome:
    from capture.profiler.bounds import bounded

    assert isinstance(job.what, BoundedPasses), "what is bounded"
    return Outcome(job, write(bounded(backend, job.what)))


def versions_of(setting: Setting) -> dict[str, str]:
    """Return the versions that must be equal on the driver and its workers, by package."""
    platform = "cpu" if setting.backend == "run" else Target.load(setting.target).platform
    return {"capture": capture.__version__, **environment.versions(platform)}


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
