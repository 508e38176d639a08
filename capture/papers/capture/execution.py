"""One execution of a partitioning, as plain data: what is run, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.model.graph import content_hash
from capture.papers.capture.profile import RunPeaks, ranges
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from profiling_runs.jobs import Failure, Job, Outcome


@dataclass(frozen=True)
class ProfilingRun:
    """One execution of a partitioning.

    Attributes:
        partitioning: Layers per stage.
        choice: What every stage does with its devices.
        microbatch_size: Examples in a micro-batch over all replicas.
        num_microbatches: In a step.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        repeats: Steps that are measured; the largest peaks count.
    """

    partitioning: tuple[int, ...]
    choice: StageChoice
    microbatch_size: int
    num_microbatches: int
    schedule: str
    repeats: int = 1

    @property
    def num_devices(self) -> int:
        return len(self.partitioning) * self.choice.num_devices

    @property
    def configs(self) -> list[StageConfig]:
        """The stages of the run, as the profiler measures stages."""
        return [
            StageConfig(first, stop, self.choice, self.microbatch_size)
            for first, stop in ranges(self.partitioning)
        ]

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of runs that share what they compiled: choice and number of micro-batches."""
        return self.choice, self.num_microbatches

    def to_json(self) -> dict[str, Any]:
        """Return the run's fields, for people and the store."""
        run = asdict(self)
        return {**run.pop("choice"), **run}

    def plan(self) -> Plan:
        """Return the run as a plan on a flat cluster of its own size."""
        choice, k = self.choice, self.choice.num_devices
        stages = tuple(
            Stage.at(s * k, first, stop, choice)
            for s, (first, stop) in enumerate(ranges(self.partitioning))
        )
        global_batch_size = self.num_microbatches * self.microbatch_size
        return Plan(
            Cluster((self.num_devices,)),
            sum(self.partitioning),
            stages,
            global_batch_size,
            self.num_microbatches,
            self.schedule,
        )

    def failed(self, why: str) -> RunPeaks:
        """Return the result of a run that gave no peaks."""
        dp, tp = self.choice.data_parallel, self.choice.tensor_parallel
        name = (
            f"run of {list(self.partitioning)} layers, data_parallel={dp} x tensor_parallel={tp}, "
            f"{self.num_microbatches} micro-batches"
        )
        return RunPeaks((None,) * len(self.partitioning), (f"{name}: {why}",))


@dataclass(frozen=True)
class Executed:
    """The outcome of an attempt to make a run; plain data, to be sent between processes.

    Attributes:
        peak_bytes_per_stage: On each device of a stage; None if the run failed.
        meter: What they were read from; empty if they were only replayed, because they are above
            the limit.
        failure: Why there are none.
        traceback: Where it failed, if it was an exception.
    """

    peak_bytes_per_stage: tuple[int, ...] | None
    meter: str
    failure: str = ""
    traceback: str = ""

    def outcome(self, job: Job) -> Outcome:
        """Return what came of the job of this run; the peaks that were replayed are kept under a
        key of their own."""
        if self.peak_bytes_per_stage is None:
            failure: Failure = "raised" if self.traceback else "refused"
            return Outcome(job, None, failure=failure, error=self.failure, traceback=self.traceback)
        return Outcome(job, self.to_json(), stored_key="" if self.meter else replay_key(job.key))

    def to_json(self) -> dict[str, Any]:
        """Return the peaks and their meter, as the store keeps them."""
        assert self.peak_bytes_per_stage is not None, (
            f"nothing to keep of a run that failed: {self.failure}"
        )
        return {"peak_bytes_per_stage": list(self.peak_bytes_per_stage), "meter": self.meter}


def replay_key(key: str) -> str:
    """Return the key of the replayed peaks of a run that is above a limit: another measurement than
    that of the run."""
    return content_hash([key, "replay"])
