"""The backend ``run``, the paper's way to profile: execute the partitionings with the native
runtime, two training steps each.

The peaks of the second step count, as the meters of ``capture.runtime.meter`` read them, never as
replayed: live arrays and the buffer assignment of the running program; in a fresh process on an
accelerator its allocator, for those devices whose mark the steps have raised above that of the
initialisation.

A finished run is content-addressed and never made again. A run that goes out of memory, or needs
more than a limit, is a result too: the statistics that it alone would give are missing.

Source: CAPTURE III-A; III-A2 on runs that go out of memory.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from capture.errors import CaptureError, is_bug
from capture.measured.store import Store
from capture.model.graph import content_hash
from capture.model.workload import WorkloadProtocol, takes_key
from capture.papers.capture.execution import Executed, ProfilingRun, replay_key
from capture.papers.capture.profile import RunPeaks
from capture.plan.stages import Plan, TensorParallelRule
from capture.profiler.compile import PROGRAM_VERSION, CompileBackend
from capture.profiler.executing import ExecutingMachine
from capture.profiler.timing import machine_here
from capture.quantities import format_bytes
from capture.runtime.meter import LiveArrayMeter, allocator_peaks, measure_step
from capture.runtime.pipeline import PipelinedStep
from capture.runtime.programs import StagePrograms


class RunBackend:
    """The backend ``run``: measured peaks per stage of executed partitionings of a model.

    Args:
        workload: The task.
        num_layers: None for the model's marks, or the number of layers to cut automatically.
        rule: How parameters are split.
        store: Where finished runs are kept.
        memory_limit_bytes: Per device; a run that needs more fails instead of being made. None for
            no limit.
        machine: On which the runs are made, by default this process; another one only to find what
            is in the store.
        fresh_process: Whether every run gets a process of its own, so that the allocator's marks
            are those of the run.
        num_devices: All devices of the cluster; a model without marks is cut into layers enough for
            them.
    """

    name = "run"

    def __init__(
        self,
        workload: WorkloadProtocol,
        num_layers: int | None = None,
        rule: TensorParallelRule = "auto",
        store: Store | None = None,
        *,
        memory_limit_bytes: int | None = None,
        machine: ExecutingMachine | None = None,
        fresh_process: bool = False,
        num_devices: int = 1,
    ):
        self.compiler = CompileBackend(workload, num_layers, rule, store, num_devices=num_devices)
        self.workload, self.memory_limit_bytes, self.fresh_process = (
            workload,
            memory_limit_bytes,
            fresh_process,
        )
        self.machine = machine_here() if machine is None else machine
        self._compiled: dict[Any, StagePrograms] = {}

    @property
    def store(self) -> Store:
        return self.compiler.store

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The machine, meter and program version, which beside the program decide a measurement."""
        allocator = self.fresh_process and self.machine.platform != "cpu"
        return {
            **self.machine.provenance,
            "meter": "allocator, else live arrays + XLA buffer assignment"
            if allocator
            else "live arrays + XLA buffer assignment",
            "program_version": PROGRAM_VERSION,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make the same backend in another process."""
        return {
            "num_layers": self.compiler.num_layers,
            "rule": self.compiler.rule,
            "memory_limit_bytes": self.memory_limit_bytes,
            "fresh_process": self.fresh_process,
        }

    # ---- the store -------------------------------------------------------------------------------

    def key(self, run: ProfilingRun) -> str:
        """Return a content hash of everything that can change the measurement."""
        stages = list(map(self.compiler.key, run.configs))
        model_hash = self.compiler.traced(run.microbatch_size).graph.model_hash
        repeats = [run.repeats] if run.repeats > 1 else []
        return content_hash(
            [self.provenance, model_hash, stages, run.schedule, run.num_microbatches, *repeats]
        )

    def find(self, run: ProfilingRun) -> RunPeaks | None:
        """Return the stored result of a run, or its failure if there are too few devices; None if
        it must be made."""
        key = self.key(run)
        found = self.store.get([key, replay_key(key)])
        if key in found:
            return self._limited(run, tuple(found[key]["peak_bytes_per_stage"]), "measured")
        if replay_key(key) in found:
            replayed = self._limited(
                run, tuple(found[replay_key(key)]["peak_bytes_per_stage"]), "replayed"
            )
            if replayed.failures:
                return replayed
        if run.num_devices > self.machine.num_devices:
            return run.failed(
                f"needs {run.num_devices} devices and there are {self.machine.num_devices} "
                f"({self.machine.platform})"
            )
        return None

    def _limited(self, run: ProfilingRun, peaks: tuple[int, ...], how: str) -> RunPeaks:
        limit = self.memory_limit_bytes
        if limit is not None and max(peaks) > limit:
            return run.failed(
                f"needs {format_bytes(max(peaks))} on a device ({how}), more than "
                f"{format_bytes(limit)}"
            )
        return RunPeaks(peaks)

    def keep(self, run: ProfilingRun, executed: Executed, seconds: float) -> RunPeaks:
        """Put the outcome of a run into the store and return it; what failed for another reason
        than the limit is not kept, so that it is tried again next time."""
        key, peaks = self.key(run), executed.peak_bytes_per_stage
        if peaks is None:
            return run.failed(executed.failure)
        self.store.put(
            key if executed.meter else replay_key(key),
            executed.to_json(),
            provenance={**self.provenance, "kind": "executed in place"},  # of no job
            seconds=seconds,
        )
        return self._limited(run, peaks, "measured" if executed.meter else "replayed")

    def measure(self, run: ProfilingRun) -> RunPeaks:
        """Return the peaks of a run, from the store or executed in this process."""
        if (found := self.find(run)) is not None:
            return found
        start = time.perf_counter()
        return self.keep(run, self.execute(run), time.perf_counter() - start)

    # ---- execution -------------------------------------------------------------------------------

    def execute(self, run: ProfilingRun) -> Executed:
        """Make a run here; a failure is reported, not raised."""
        try:
            return self._execute(run)
        except CaptureError as error:
            return Executed(None, "", str(error))
        except Exception as error:  # one run must not lose the others
            if is_bug(error):
                raise
            first_line = (str(error).splitlines() or [""])[0]
            failure = (
                "out of memory: " if _is_out_of_memory(error) else f"{type(error).__name__}: "
            ) + first_line
            return Executed(None, "", failure, traceback.format_exc())

    def _execute(self, run: ProfilingRun) -> Executed:
        plan, compiler = run.plan(), self.compiler
        # As ``pipeshard`` does, but the model is traced once for all runs.
        traced, sharding = (
            compiler.traced(run.microbatch_size),
            compiler.sharding(run.microbatch_size),
        )
        step = PipelinedStep(
            self.workload, plan, traced, list(jax.devices()), sharding, fast_compile=True
        )
        self._reuse_programs(step)
        if self.memory_limit_bytes is not None:
            replayed = _per_stage(plan, step.replay().peak_bytes_per_device)
            if max(replayed) > self.memory_limit_bytes:
                return Executed(replayed, "")
        # No accelerator ever holds the whole model or the batch.
        with jax.default_device(jax.devices("cpu")[0]):
            keys = jax.random.split(jax.random.key(0), 3)
            params = jax.tree.map(np.asarray, self.workload.init(keys[0]))
            batch = jax.tree.map(np.asarray, self.workload.batch(keys[1], plan.global_batch_size))
        state = jax.block_until_ready(step.init_from(params))
        initial = allocator_peaks(step.devices)
        key = keys[2] if takes_key(self.workload) else None
        state, metrics = step(state, batch, key)
        del metrics  # its losses are live
        steps = []
        for _ in range(run.repeats):
            steps.append(measure_step(step, state, batch, key))
            state = steps[-1].state
        peaks, meter = (
            _largest([one.live_peak_bytes_per_device for one in steps]),
            LiveArrayMeter.of(step).meter,
        )
        if self.fresh_process and initial is not None:
            allocated = _largest([one.peak_bytes_per_device for one in steps])
            peaks = tuple(
                a if a > before else live
                for a, before, live in zip(allocated, initial, peaks, strict=True)
            )
            meter = f"{steps[0].meter} where the steps raised it, else {meter}"
        return Executed(_per_stage(plan, peaks), meter)

    def _reuse_programs(self, step: PipelinedStep) -> None:
        """Take what an earlier run has compiled for an equal stage on the same devices."""
        if step.optimizer.exchanges:
            return  # its update reads something of every other stage
        plan = step.plan
        for s, stage in enumerate(step.stages):
            # The loss is divided by their number.
            size = plan.microbatch_size, plan.num_microbatches * stage.segment.is_last
            step.stages[s] = self._compiled.setdefault(
                (plan.stages[s], size, stage.arriving), stage
            )


def _per_stage(plan: Plan, per_device: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(per_device[d] for d in stage.devices) for stage in plan.stages)


def _largest(peaks_of_steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(max(peaks) for peaks in zip(*peaks_of_steps, strict=True))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    )
