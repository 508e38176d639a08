"""Measured stage configs, made as they are needed: taken from the store, or else measured by
jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from capture import environment
from capture.documents import read
from capture.errors import ProfileError, plain
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost, StageCost
from capture.measured.store import Store
from capture.model.graph import agreed_value_dims
from capture.plan.stages import TensorParallelRule
from capture.profiler.bounded_passes import BoundedPasses, alone
from capture.registered import Registered
from capture.step.attribution import StageBuffers
from profiling_runs.batch import Batch, Progress, Watch
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.require import Measurer

if TYPE_CHECKING:
    from capture.profiler.compile import CompileBackend

#: A kind of jobs.
UPDATES, SPLITS = "optimizer updates", "split backward passes"

#: Bounds passes with the backend of a worker.
BOUNDED = Registered("capture.profiler.bounds:bounded")


@dataclass
class Measurements(Measurer[Any]):
    """The measured stage configs of one model, made as they are needed.

    Attributes:
        costs: Of the configs that were measured.
        failures: Configs that could not be measured, and why.
    """

    backend: CompileBackend
    costs: dict[StageConfig, StageCost] = field(default_factory=dict)
    failures: dict[StageConfig, str] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    @property
    def rule(self) -> TensorParallelRule:
        """The rule by which parameters are split."""
        assert isinstance(self.backend.rule, str), "questions name one"
        return self.backend.rule

    def key(self, config: StageConfig) -> str:
        """Return the content hash under which the store keeps the measurement of a config."""
        return self.backend.key(config)

    def missing(self, configs: Sequence[StageConfig], splits_backward: bool = False) -> set[str]:
        """Return the keys of stages, and of their split backward passes where they are asked for,
        that the store did not have before they were begun or required."""
        keys = {self.key(config) for config in configs}
        if splits_backward:
            keys |= {self.backend.split_key(config) for config in configs}
        return keys - (set(self.backend.store.get(keys)) - self._begun)

    def jobs(
        self, wanted: Mapping[str, Iterable[StageConfig]], splits_backward: bool = False
    ) -> list[Job]:
        """Return the distinct jobs that measure stage configs, given by kind, the ends of a step
        that they need, and their split backward passes. Measures nothing."""
        found: dict[str, Job] = {}
        for kind, configs in wanted.items():
            for config in configs:
                key = self.key(config)
                if key not in found:
                    update = self.backend.update_key(config)
                    found.setdefault(update, _part(update, config, "update", UPDATES))
                    found[key] = Job(key, config, kind=kind, needs=update)
                if splits_backward:
                    split = self.backend.split_key(config)
                    found.setdefault(split, _part(split, config, "split", SPLITS))
        return list(found.values())

    def require(
        self, wanted: Mapping[str, Iterable[StageConfig]], splits_backward: bool = False
    ) -> None:
        """Measure the stage configs, given by kind, that neither this object nor the store has;
        failures are kept, not raised.

        Args:
            wanted: By kind.
            splits_backward: Whether their split backward passes are measured, too.
        """
        wanted = {
            kind: [
                c
                for c in configs
                if c not in self.failures
                and (c not in self.costs or (splits_backward and self.costs[c].split is None))
            ]
            for kind, configs in wanted.items()
        }
        configs_of: dict[str, list[StageConfig]] = {}
        for config in dict.fromkeys(config for configs in wanted.values() for config in configs):
            configs_of.setdefault(self.key(config), []).append(config)
        values = self.measure(self.jobs(wanted, splits_backward))
        for key, configs in configs_of.items():
            parts = [key, *([self.backend.split_key(configs[0])] if splits_backward else [])]
            if failed := [part for part in parts if part not in values]:
                self.failures.update(dict.fromkeys(configs, self.errors[failed[0]]))
                continue
            cost = read(values[key], StageCost)
            if splits_backward:
                cost = replace(cost, split=read(values[parts[1]], SplitCost))
            self.costs.update(dict.fromkeys(configs, cost))
        self._begun -= configs_of.keys()

    def begin(self, configs: Sequence[StageConfig]) -> bool:
        """Have kept workers begin to compile stages, these and those begun before, without waiting
        for them; jobs that are required later run beside these. Return whether all are done."""
        if self._kept is None or not self._in_workers:
            return False
        unknown = [each for each in configs if each not in {*self.failures, *self.costs}]
        jobs = self.missing_jobs(self.jobs({"stages of the plan": unknown}))[1] if unknown else []
        if not jobs and self._live is None:
            return True
        self._begun |= {job.key for job in jobs}
        batch = self._add(jobs)
        # Workers that have said that they are ready, or done, are heard first, and then given jobs.
        batch.poll_seconds = 0.0
        for _, _ in zip(range(2), self._lively(), strict=False):
            pass
        batch.poll_seconds = Batch.poll_seconds
        if self._live is not None:
            batch.hand_out(self._kept.pool)
        return batch.is_done

    def buffers(
        self, configs: Sequence[StageConfig], splits_backward: bool = False
    ) -> list[StageBuffers]:
        """Return the buffers that make up the bytes of stage configs. Stages are compiled once more
        for it, with the compiler's dump.

        Args:
            configs: The stages.
            splits_backward: Whether their backward passes are split.

        Raises:
            ProfileError: ``verify-stage`` naming those that do not compile.
        """
        part, key_of = "buffers", self.backend.buffers_key
        if splits_backward:
            part, key_of = "split buffers", self.backend.split_buffers_key
        jobs = [_part(key_of(each), each, part, "buffers of the stages") for each in configs]
        found = self.measure(jobs)
        for job in jobs:
            if job.key not in found:
                said = plain(self.errors[job.key])
                raise ProfileError.of(f"{job.what} does not compile: {said}.", "verify-stage")
        return [read(found[job.key], StageBuffers) for job in jobs]

    def start_workers(self, ahead: Iterable[int] = ()) -> None:
        """Begin to start the kept workers on this machine, without waiting for them and one fewer,
        as this process is busy. They are started anew if the model has been cut into layers since.

        Args:
            ahead: As of ``Setting``, when they are first started.
        """
        if self._started is None:
            self._ahead = tuple(ahead)
        setting = self.setting
        if self._kept is None or setting is None or self.where.ray is not None:
            return
        if self._started not in (None, setting):
            self._kept.end()
        self._started = setting
        self._kept.pool.idle(busy=1)

    def shared(
        self, batches: Sequence[BoundedPasses], here: Callable[[BoundedPasses], None]
    ) -> Iterator[tuple[BoundedPasses, Sequence[Any] | None]]:
        """Bound passes in this process, from the first on, and in the kept workers that have
        nothing to do, from the last on (``capture.profiler.bounded_passes.Share``)."""
        if self._started is None or self._kept is None or self._live is not None:
            yield from alone(batches, here)  # or workers compile
            return
        waiting, running = deque(batches), dict[str, BoundedPasses]()
        with self._kept as workers:
            while waiting or running:
                for worker in workers.idle(busy=1):
                    if len(waiting) > 1:  # one is for this process
                        key = f"bounds {len(waiting)}"
                        running[key] = waiting.pop()
                        workers.start(worker, Job(key, running[key], "bounds", method=BOUNDED))
                if waiting:
                    here(waiting[0])
                    yield waiting.popleft(), None
                for outcome in workers.finished(0 if waiting else Batch.poll_seconds):
                    batch = running.pop(outcome.job.key)
                    if outcome.value is None:  # its worker is gone, or says no as this process will
                        here(batch)
                    yield batch, outcome.value


def _part(key: str, config: StageConfig, part: str, kind: str) -> Job:
    """Return the job that measures a part of a stage."""
    return Job(key, config, part, kind, method=f"measure_{part.replace(' ', '_')}")


def open_measurements(
    question: ProfileQuestion,
    *,
    store: Store | None = None,
    where: Where = Where(),
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
) -> Measurements:
    """Return the measurements of a question's stages, which are made when they are required.

    Args:
        question: What is to be measured: its workload, cut and split as it says, compiled for the
            target of its cluster. By name it is measured in worker processes, which have as many
            virtual devices as the cluster.
        store, where, progress, watch: As for ``profile``.
    """
    from capture.profiler.compile import CompileBackend

    cluster, spec = question.cluster, question.spec
    compiler = CompileBackend(
        question.task,
        question.num_layers,
        question.tensor_parallel_rule,
        store,
        Target.load(cluster.target),
        unmarked_layers=question.unmarked_layers,
        num_devices=cluster.num_devices,
    )
    asked = None if spec is None else Setting(spec, cluster.num_devices, compiler.target.name)
    return Measurements(compiler, asked, where, progress, watch)


def unmeasured(
    question: ProfileQuestion, measurements: Measurements, sizes: tuple[int, ...] | None = None
) -> Profile:
    """Return a profile without measurements: what tracing says of the layers at the question's
    micro-batch size and at ``sizes``, by default those that are profiled."""
    compiler, sizes = measurements.backend, question.microbatch_sizes if sizes is None else sizes
    graphs = {
        size: compiler.sharding(size).graph(question.stage_choices)
        for size in (*sizes, question.microbatch_size)
    }
    splits = sorted({choice.param_split for choice in question.stage_choices})
    return Profile(
        graph=replace(
            graphs[question.microbatch_size], value_dims=agreed_value_dims(graphs.values())
        ),
        measurements={},
        param_bytes={
            split: compiler.sharding(question.microbatch_size).param_bytes(split)
            for split in splits
        },
        provenance={**compiler.provenance, "created": environment.now()},
        workload=measurements.spec,
        auto_layers=compiler.num_layers is not None,
        tensor_parallel_rule=question.tensor_parallel_rule,
        microbatch_sizes=sizes,
        model_hashes={size: graphs[size].model_hash for size in sizes},
    )
