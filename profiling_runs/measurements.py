"""Measured stage configs, made as they are needed: taken from the store, or else measured by
jobs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from capture import environment
from capture.documents import read
from capture.errors import ProfileError, plain
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost, StageCost
from capture.measured.store import Store
from capture.model.graph import agreed_value_dims
from capture.model.workload import WorkloadSpec
from capture.plan.stages import TensorParallelRule
from capture.profiler.bounded_passes import BoundedPasses, alone
from capture.step.attribution import StageBuffers
from profiling_runs.batch import Batch, Progress, Watch
from profiling_runs.jobs import Job, Outcome, Part, Setting
from profiling_runs.pools.pool import Kept, Runner
from profiling_runs.pools.where import DEFAULT_LOCAL_WORKERS, Where, setting_of
from profiling_runs.question import ProfileQuestion

#: A kind of jobs.
UPDATES, SPLITS = "optimizer updates", "split backward passes"


@dataclass
class Measurements:
    """The measured stage configs of one model, made as they are needed.

    Attributes:
        backend: Knows keys and compiles.
        spec: The workload by name; None measures in this process.
        where: Jobs run.
        num_devices: Virtual devices of a worker.
        rule: How parameters are split, as for ``ProfileQuestion``.
        progress, watch: Told how far the jobs are.
        costs: Of the configs that were measured.
        failures: Configs that could not be measured, and why.
    """

    backend: Any
    spec: WorkloadSpec | None
    where: Where
    num_devices: int
    rule: TensorParallelRule
    progress: Progress
    watch: Watch
    costs: dict[StageConfig, StageCost] = field(default_factory=dict)
    failures: dict[StageConfig, str] = field(default_factory=dict)
    _kept: Kept | None = None
    _ahead: tuple[int, ...] = ()
    _started: Setting | None = None
    _begun: set[str] = field(default_factory=set)
    _live: tuple[Batch, Iterator[Outcome | None]] | None = None

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
                    found.setdefault(update, Job(update, config, "update", UPDATES))
                    found[key] = Job(key, config, kind=kind, needs=update)
                if splits_backward:
                    split = self.backend.split_key(config)
                    found.setdefault(split, Job(split, config, "split", SPLITS))
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
        values, missing = self._missing_jobs(wanted, splits_backward)
        errors = {}
        for outcome in self._run(missing):
            if outcome.value is None:
                errors[outcome.job.key] = outcome.error
            else:
                values[outcome.job.key] = outcome.value
        for key, configs in configs_of.items():
            parts = [key, *([self.backend.split_key(configs[0])] if splits_backward else [])]
            if failed := [part for part in parts if part not in values]:
                self.failures.update(dict.fromkeys(configs, errors[failed[0]]))
                continue
            cost = read(values[key], StageCost)
            if splits_backward:
                cost = replace(cost, split=read(values[parts[1]], SplitCost))
            self.costs.update(dict.fromkeys(configs, cost))
        self._begun -= configs_of.keys()

    def _missing_jobs(
        self, wanted: Mapping[str, Iterable[StageConfig]], splits_backward: bool = False
    ) -> tuple[dict[str, Any], list[Job]]:
        """Return what the store has of the jobs of stage configs, by key, and the missing jobs."""
        jobs = self.jobs(wanted, splits_backward)
        values = self.backend.store.get(job.key for job in jobs)
        left = [job for job in jobs if job.key not in values]
        num_needing = Counter(job.needs for job in left)
        # What one job alone needs is a part of it: nobody has to hear of it in between.
        apart = {key for key, num in num_needing.items() if key in values or num > 1}
        return values, [
            replace(job, needs=None)
            if job.needs not in apart
            else replace(job, known={job.needs: values[job.needs]})
            if job.needs is not None and job.needs in values
            else job
            for job in left
            if job.part != "update" or job.key in apart
        ]

    def begin(self, configs: Sequence[StageConfig]) -> None:
        """Have kept workers begin to compile stages without waiting for them; jobs that are
        required later run beside these."""
        unknown = [each for each in configs if each not in {*self.failures, *self.costs}]
        _, jobs = self._missing_jobs({"stages of the plan": unknown})
        if self._kept is None or self.setting is None or not jobs:
            return
        self._begun |= {job.key for job in jobs}
        batch = self._add(jobs)
        # Workers that have said that they are ready, or done, are heard first, and then given jobs.
        batch.poll_seconds = 0.0
        for _, _ in zip(range(2), self._lively(), strict=False):
            pass
        batch.poll_seconds = Batch.poll_seconds
        if self._live is not None:
            batch.hand_out(self._kept)

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
        part: Part = "split buffers" if splits_backward else "buffers"
        backend = self.backend
        key_of = backend.split_buffers_key if splits_backward else backend.buffers_key
        jobs = {key_of(config): config for config in configs}
        found = self.backend.store.get(jobs)
        for outcome in self._run(
            [
                Job(key, config, part, "buffers of the stages")
                for key, config in jobs.items()
                if key not in found
            ]
        ):
            if outcome.value is None:
                raise ProfileError.of(
                    f"{outcome.job.what} does not compile: {plain(outcome.error)}.", "verify-stage"
                )
            found[outcome.job.key] = outcome.value
        return [read(found[key_of(config)], StageBuffers) for config in configs]

    @property
    def setting(self) -> Setting | None:
        """The setting that tells workers how to measure; None if it is done in this process."""
        if self.spec is None or self.where.here:
            return None
        return setting_of(
            Setting(
                self.spec,
                self.backend.num_layers,
                self.rule,
                self.num_devices,
                "compile",
                self.backend.target.name,
                ahead=self._ahead,
            )
        )

    def _run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Run jobs and yield their outcomes; jobs that were begun before go on beside them."""
        if self._kept is None or self.setting is None:
            yield from self._batch(jobs).run(lambda: self._kept or self._open(len(jobs)))
            return
        wanted = {job.key for job in jobs}
        if jobs:
            self._add(jobs, first=True)
        for outcome in self._lively() if jobs else ():
            if outcome is not None and outcome.job.key in wanted:
                wanted.discard(outcome.job.key)
                yield outcome
            if not wanted:
                break
        if self._live is not None and self._live[0].is_done:
            self._end_live()

    def _add(self, jobs: Sequence[Job], first: bool = False) -> Batch:
        """Add jobs to those that kept workers do."""
        if self._live is None:
            batch = self._batch(jobs)
            self._live = batch, batch.polled(lambda: self._kept or self._open(len(jobs)))
        else:
            self._live[0].add(jobs, first)
        return self._live[0]

    def _lively(self) -> Iterator[Outcome | None]:
        """Yield outcomes of the kept workers' jobs as they come, None between; nothing is ended
        where nobody asks for more."""
        assert self._live is not None, "jobs were added"
        live, self._live = self._live, None  # whatever is raised ends it
        for outcome in live[1]:
            self._live = live
            yield outcome
            self._live = None

    def _end_live(self) -> None:
        """End the jobs of kept workers for which nobody waits."""
        if self._live is not None:
            self._live[1].close()  # type: ignore[attr-defined]
        self._live = None

    def _batch(self, jobs: Sequence[Job]) -> Batch:
        backend = self.backend
        return Batch(jobs, backend.store, backend.provenance, self.spec, self.progress, self.watch)

    def _open(self, num_jobs: int) -> Runner:
        return self.where.open(self.setting, self.backend, num_jobs)

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
        self._kept.idle(busy=1)

    def shared(
        self, batches: Sequence[BoundedPasses], here: Callable[[BoundedPasses], None]
    ) -> Iterator[tuple[BoundedPasses, Sequence[Any] | None]]:
        """Bound passes in this process, from the first on, and in the kept workers that have
        nothing to do, from the last on (``capture.profiler.bounded_passes.Share``)."""
        if self._started is None or self._kept is None or self._live is not None:
            yield from alone(batches, here)  # or workers compile
            return
        waiting, running = deque(batches), dict[str, BoundedPasses]()
        with closing(self._kept) as workers:
            while waiting or running:
                for slot in workers.idle(busy=1):
                    if len(waiting) > 1:  # one is for this process
                        key = f"bounds {len(waiting)}"
                        running[key] = waiting.pop()
                        workers.start(slot, Job(key, running[key], "bounds"))
                if waiting:
                    here(waiting[0])
                    yield waiting.popleft(), None
                for outcome in workers.finished(0 if waiting else Batch.poll_seconds):
                    batch = running.pop(outcome.job.key)
                    if outcome.value is None:  # its worker is gone, or says no as this process will
                        here(batch)
                    yield batch, outcome.value

    @contextmanager
    def keeping_workers(self) -> Iterator[None]:
        """Keep the same workers for everything that is measured within the block, so that they
        trace the model once."""
        self._kept = Kept(lambda: self._open(self.where.num_workers or DEFAULT_LOCAL_WORKERS))
        try:
            yield
        finally:
            self._end_live()
            self._kept.end()
            self._kept = self._started = None


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

    num_devices = question.cluster.num_devices
    compiler = CompileBackend(
        question.task,
        question.num_layers,
        question.tensor_parallel_rule,
        store,
        Target.load(question.cluster.target),
        unmarked_layers=question.unmarked_layers,
        num_devices=num_devices,
    )
    return Measurements(
        compiler,
        question.spec,
        where,
        num_devices,
        question.tensor_parallel_rule,
        progress,
        watch,
    )


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
        tensor_parallel_rule=measurements.rule,
        microbatch_sizes=sizes,
        model_hashes={size: graphs[size].model_hash for size in sizes},
    )
