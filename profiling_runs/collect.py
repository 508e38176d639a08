"""Collect a profile: list the stage configs, measure what the store does not have, put the facts
together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from capture import environment
from capture.documents import read
from capture.errors import PlanError, ProfileError, TargetError, Violation, plain
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import Calibration, Profile, StageConfig, StageError
from capture.measured.stage_cost import StageCost
from capture.measured.store import Store
from capture.model.workload import WorkloadProtocol, WorkloadSpec
from capture.plan.choices import StageChoice, hybrid_choices, with_sharded_params
from capture.plan.sampling import DrawnStage, random_plans
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan, Remat, StagePlan, TensorParallelRule
from capture.predictor import AdditivePredictor
from capture.predictor.statistics import without_windows
from capture.profiler.paper import PaperStatistics, paper_runs, run_paper_profile
from capture.profiler.windows import (
    DEFAULT_NEIGHBOURS,
    choices_to_profile,
    profiled_microbatch_sizes,
    window_configs,
)
from capture.step.attribution import StageBuffers
from capture.step.interface import plan_interfaces
from capture.step.program import build_step, replay
from profiling_runs.batch import Batch, Progress, Watch
from profiling_runs.executions import executed_profile
from profiling_runs.failures import causes, ways
from profiling_runs.held_out import held_out_sizes, held_out_stages, size_errors
from profiling_runs.jobs import Job, Outcome, Setting
from profiling_runs.pools.where import Where, setting_of

CALIBRATION_SEED = 20_240_000
DEFAULT_CALIBRATION_PLANS = 12
BACKENDS = ("compile", "run", "alpa")
#: Those that execute the paper's profiling runs.
EXECUTING = ("run", "alpa")

#: Kinds of jobs.
UPDATES, WINDOWS, PAPER_RUNS, CALIBRATION = (
    "optimizer updates",
    "layer windows",
    "paper runs",
    "calibration",
)
OTHER_SIZES = "other sizes"


@dataclass
class Measurements:
    """Measured stage configs of one model, as they are needed.

    Attributes:
        backend: Knows keys and compiles.
        spec: The workload by name; None measures in this process.
        where: Jobs run.
        num_devices: Virtual devices of a worker.
        rule: Of the model, as for ``profile``.
        progress, watch: Told how far the jobs are.
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
    _keys: dict[StageConfig, str] = field(default_factory=dict)

    def key(self, config: StageConfig) -> str:
        """Content hash of the measurement of a config."""
        if config not in self._keys:
            self._keys[config] = self.backend.key(config)
        return self._keys[config]

    def jobs(self, wanted: Mapping[str, Iterable[StageConfig]]) -> list[Job]:
        """The different measurements of stage configs, given by kind, and of the ends of a step
        that they need. Measures nothing."""
        found: dict[str, Job] = {}
        for kind, configs in wanted.items():
            for config in configs:
                key = self.key(config)
                if key not in found:
                    update = self.backend.update_key(config)
                    found.setdefault(update, Job(update, config, "update", UPDATES))
                    found[key] = Job(key, config, kind=kind, needs=update)
        return list(found.values())

    def require(self, wanted: Mapping[str, Iterable[StageConfig]]) -> None:
        """Measure the stage configs, given by kind, that neither this object nor the store has;
        failures are kept, not raised."""
        wanted = {
            kind: [c for c in configs if c not in self.costs and c not in self.failures]
            for kind, configs in wanted.items()
        }
        configs_of: dict[str, list[StageConfig]] = {}
        for config in dict.fromkeys(config for configs in wanted.values() for config in configs):
            configs_of.setdefault(self.key(config), []).append(config)
        jobs = self.jobs(wanted)
        values = self.backend.store.get(job.key for job in jobs)
        errors = {}
        needed = {job.needs for job in jobs if job.key not in values}
        missing = [
            job
            for job in jobs
            if job.key not in values and (job.part != "update" or job.key in needed)
        ]
        missing = [
            replace(job, known={job.needs: values[job.needs]})
            if job.needs and job.needs in values
            else job
            for job in missing
        ]
        for outcome in self._run(missing):
            if outcome.value is None:
                errors[outcome.job.key] = outcome.error
            else:
                values[outcome.job.key] = outcome.value
        for key, configs in configs_of.items():
            if key in values:
                self.costs.update(dict.fromkeys(configs, read(values[key], StageCost)))
            else:
                self.failures.update(dict.fromkeys(configs, errors[key]))

    def buffers(self, configs: Sequence[StageConfig]) -> list[StageBuffers]:
        """What the bytes of stage configs consist of; compiled once more, with the compiler's dump.

        Raises:
            ProfileError: ``verify-stage`` naming those that do not compile.
        """
        jobs = {self.backend.buffers_key(config): config for config in configs}
        found = self.backend.store.get(jobs)
        for outcome in self._run(
            [
                Job(key, config, "buffers", "buffers of the stages")
                for key, config in jobs.items()
                if key not in found
            ]
        ):
            if outcome.value is None:
                raise ProfileError.of(
                    f"{outcome.job.what} does not compile: {plain(outcome.error)}.", "verify-stage"
                )
            found[outcome.job.key] = outcome.value
        return [read(found[self.backend.buffers_key(config)], StageBuffers) for config in configs]

    @property
    def setting(self) -> Setting | None:
        """How a worker measures; None if it is done in this process."""
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
            )
        )

    def _run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        batch = Batch(
            jobs, self.backend.store, self.backend.provenance, self.spec, self.progress, self.watch
        )
        return batch.run(lambda: self.where.open(self.setting, self.backend, len(jobs)))


def open_measurements(
    workload: WorkloadProtocol | WorkloadSpec,
    *,
    num_devices: int,
    target: str = "cpu",
    num_layers: int | None = None,
    unmarked_layers: int | None = None,
    tensor_parallel_rule: TensorParallelRule = "auto",
    store: Store | None = None,
    where: Where = Where(),  # noqa: B008 (frozen)
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
) -> Measurements:
    """Measurements of a workload that are made when they are required.

    Args:
        workload: The task, or its name; by name it is measured in worker processes.
        num_devices: Virtual devices of a worker, at least those of the largest stage; a model
            without marks is cut into layers enough for them, or into ``unmarked_layers``.
        target: What is compiled for: a name or a file (``Target.load``).
        num_layers, tensor_parallel_rule, store, where, progress, watch: As for ``profile``.
    """
    from capture.profiler.compile import CompileBackend

    spec = workload if isinstance(workload, WorkloadSpec) else None
    task = workload.load() if isinstance(workload, WorkloadSpec) else workload
    compiler = CompileBackend(
        task,
        num_layers,
        tensor_parallel_rule,
        store,
        Target.load(target),
        unmarked_layers=unmarked_layers,
        num_devices=num_devices,
    )
    return Measurements(compiler, spec, where, num_devices, tensor_parallel_rule, progress, watch)


def profile(
    workload: WorkloadProtocol | WorkloadSpec,
    cluster: Cluster,
    *,
    microbatch_size: int,
    backend: str = "compile",
    num_layers: int | None = None,
    remat: Sequence[Remat] = ("none",),
    shard_optimizer: bool = False,
    shard_params: bool = False,
    choices: Iterable[StageChoice] | None = None,
    whole_nodes: bool = False,
    any_divisor: bool = False,
    num_neighbours: int = DEFAULT_NEIGHBOURS,
    tensor_parallel_rule: TensorParallelRule = "auto",
    calibration_plans: int = DEFAULT_CALIBRATION_PLANS,
    paper: tuple[str, int] | None = None,
    store: Store | None = None,
    where: Where = Where(),  # noqa: B008 (frozen)
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
    measurements: Measurements | None = None,
    memory_limit_bytes: int | None = None,
    repeats: int = 1,
    alpa_python: str | None = None,
) -> Profile:
    """Measure a model's layers for every stage that a plan on the cluster may have.

    Args:
        workload: The task, or its name; by name it is measured in worker processes.
        cluster: Decides the degrees to profile.
        microbatch_size: Examples in a micro-batch over all replicas; half of it is profiled too.
        backend: ``"compile"`` compiles layer windows for the cluster's target and runs nothing;
            ``"compile:TARGET"`` names another target for the cluster. ``"run"`` executes the
            paper's profiling runs and nothing else: the profile serves the paper's mode alone (see
            ``executed_profile``), and what is said of windows below does not matter. ``"alpa"`` has
            them executed by Alpa, on its Ray cluster of these nodes.
        num_layers: None cuts at the model's marks, or a model without marks into as many layers as
            are sensible (``capture.tracing.cut.layers_without_marks``); a number cuts
            automatically.
        remat, shard_optimizer: Of the stages.
        shard_params: Also stages whose replicas split their parameters (ZeRO stage 3), beside those
            that do not.
        choices: Of the windows, instead of all data- and tensor-parallel degree pairs that fit the
            cluster.
        whole_nodes, any_divisor: Of the windows; see ``Cluster.stage_degrees``.
        num_neighbours: Of the windows: most neighbours of M_a.
        tensor_parallel_rule: ``"auto"`` or ``"largest"``.
        calibration_plans: Random plans whose stages are measured to calibrate the interval of the
            windows; 0 leaves it wide.
        paper: (schedule, number of micro-batches) to make the paper's profiling runs as well;
            needed with ``"run"`` and ``"alpa"``.
        store: Of measurements; in memory if None.
        where: The jobs of a workload by name run: in processes of this machine, or on a Ray
            cluster.
        progress: Called with (kind of jobs, done, total).
        watch: Called with every start and end of a job (``profiling_runs.batch``).
        measurements: Open already (``open_measurements``); then workload, store and where are its
            own.
        memory_limit_bytes: With ``"run"``: a run that needs more on a device is not made, and named
            as failed.
        repeats: With ``"run"``: steps that are measured in every run; the largest peaks count.
        alpa_python: With ``"alpa"``: the interpreter of Alpa's environment.

    Returns:
        The profile. Stages or runs that failed are named in ``failures``, once per cause.

    Raises:
        TargetError: ``target-unknown`` for another backend.
        ProfileError: ``profile-backend`` for arguments that the backend has no use for, or without
            those that it needs.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    backend, cluster = _of_target(backend, cluster)
    check_backend(
        backend,
        paper,
        memory_limit_bytes,
        repeats,
        alpa_python,
        tensor_parallel_rule,
        choices,
        measurements,
        shard_params or None,
    )
    if backend in EXECUTING:
        assert paper is not None, "checked"
        executed = executed_profile(
            workload,
            cluster,
            microbatch_size=microbatch_size,
            schedule=paper[0],
            num_microbatches=paper[1],
            num_layers=num_layers,
            remat=remat[0],
            shard_optimizer=shard_optimizer,
            tensor_parallel_rule=tensor_parallel_rule,
            memory_limit_bytes=memory_limit_bytes,
            store=store,
            where=where,
            progress=progress,
            watch=watch,
            repeats=repeats,
            alpa_python=alpa_python,
        )
        task = workload.load() if isinstance(workload, WorkloadSpec) else workload
        return replace(executed, warnings=_split_warnings(task, microbatch_size))
    if measurements is None:
        measurements = open_measurements(
            workload,
            num_devices=cluster.num_devices,
            target=cluster.target,
            num_layers=num_layers,
            tensor_parallel_rule=tensor_parallel_rule,
            store=store,
            where=where,
            progress=progress,
            watch=watch,
        )
    question = Question.of(
        cluster,
        microbatch_size,
        remat,
        shard_optimizer,
        choices,
        num_neighbours=num_neighbours,
        calibration_plans=calibration_plans,
        whole_nodes=whole_nodes,
        any_divisor=any_divisor,
        shard_params=shard_params,
        paper=paper,
    )
    compiler = measurements.backend
    wanted = wanted_configs(question, measurements)
    measurements.require(wanted)
    result = replace(
        unmeasured(question, measurements),
        measurements={
            config: measurements.costs[config]
            for config in wanted[WINDOWS]
            if config in measurements.costs
        },
        warnings=_split_warnings(compiler.workload, microbatch_size)
        + missing_statistics(wanted[WINDOWS], measurements.costs),
    )
    if calibration_plans and all(config in measurements.costs for config in wanted[WINDOWS]):
        calibration = calibrate(result, measurements, calibration_of(question, measurements))
        calibration = replace(
            calibration,
            size_errors=size_errors(result, _held_out(question, measurements), measurements),
        )
        # Only now: what is looked up is no test of what is predicted.
        compiled = {
            config: measurements.costs[config]
            for config in wanted[CALIBRATION]
            if config in measurements.costs
        }
        result = replace(result, calibration=calibration, verified=compiled)
    if paper is not None:
        runs = paper_profile(
            measurements,
            cluster,
            microbatch_size,
            *paper,
            remat=remat[0],
            shard_optimizer=shard_optimizer,
        )
        result = replace(result, paper=runs.to_json())
    return replace(result, failures=causes(measurements.failures))


@dataclass(frozen=True)
class PaperQuestion:
    """What the paper's profiling runs are made for: see ``profile``."""

    schedule: str
    num_microbatches: int
    remat: Remat
    shard_optimizer: bool


@dataclass(frozen=True)
class Question:
    """What a profile of windows is made for; the fields are those of ``profile``."""

    cluster: Cluster
    microbatch_size: int
    choices: tuple[StageChoice, ...]
    num_neighbours: int = DEFAULT_NEIGHBOURS
    calibration_plans: int = DEFAULT_CALIBRATION_PLANS
    whole_nodes: bool = False
    any_divisor: bool = False
    paper: PaperQuestion | None = None

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        microbatch_size: int,
        remat: Sequence[Remat],
        shard_optimizer: bool,
        choices: Iterable[StageChoice] | None = None,
        *,
        shard_params: bool = False,
        paper: tuple[str, int] | None,
        whole_nodes: bool,
        any_divisor: bool,
        **rest: int,
    ) -> Question:
        """From the arguments of ``profile``."""
        if choices is None:
            choices = default_choices(
                cluster, microbatch_size, remat, shard_optimizer, whole_nodes, any_divisor
            )
            choices = with_sharded_params(choices) if shard_params else choices
        asked = None if paper is None else PaperQuestion(*paper, remat[0], shard_optimizer)
        return cls(
            cluster,
            microbatch_size,
            tuple(choices),
            whole_nodes=whole_nodes,
            any_divisor=any_divisor,
            paper=asked,
            **rest,
        )

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        return profiled_microbatch_sizes(self.microbatch_size, self.choices)


def wanted_configs(question: Question, measurements: Measurements) -> dict[str, list[StageConfig]]:
    """Every stage config that a profile measures, by kind. Nothing is measured for it: the model is
    traced, and that needs no device."""
    graph = measurements.backend.traced(question.microbatch_size).graph
    windows = window_configs(
        graph.num_layers, question.choices, question.microbatch_sizes, question.num_neighbours
    )
    wanted = {WINDOWS: windows}
    if question.paper is not None:
        paper = question.paper
        runs = paper_runs(
            graph.num_layers,
            question.cluster.num_devices,
            question.microbatch_size,
            paper.remat,
            paper.shard_optimizer,
        )
        wanted[PAPER_RUNS] = [c for run in runs for c in run.configs(question.microbatch_size)]
    if question.calibration_plans:
        known = {measurements.key(config) for config in windows}
        configs = [
            stage_config(s, question.microbatch_size)
            for plan in calibration_of(question, measurements)
            for s in plan.stages
        ]
        wanted[CALIBRATION] = [
            config for config in configs if measurements.key(config) not in known
        ]
        wanted[OTHER_SIZES] = list(_held_out(question, measurements))
    return wanted


def _held_out(
    question: Question, measurements: Measurements
) -> dict[StageConfig, tuple[Plan, int]]:
    """Stages at sizes that are not profiled, of those at which the model is the same: one may want
    whole groups of examples."""
    sizes = [
        size
        for size in held_out_sizes(question.microbatch_size, question.choices)
        if _is_same_model(measurements, question, size)
    ]
    return held_out_stages(calibration_of(question, measurements), sizes) if sizes else {}


def _is_same_model(measurements: Measurements, question: Question, size: int) -> bool:
    backend = measurements.backend
    try:
        return (
            backend.traced(size).graph.num_layers
            == backend.traced(question.microbatch_size).graph.num_layers
        )
    except Exception:  # the model's own
        return False


def unmeasured(question: Question, measurements: Measurements) -> Profile:
    """The profile but for its measurements: what tracing says."""
    compiler, sizes = measurements.backend, question.microbatch_sizes
    graph = compiler.traced(question.microbatch_size).graph
    splits = sorted({choice.param_split for choice in question.choices})
    return Profile(
        graph=graph,
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
        model_hashes={size: compiler.traced(size).graph.model_hash for size in sizes},
    )


def missing_statistics(
    windows: Sequence[StageConfig], measured: Container[StageConfig]
) -> tuple[str, ...]:
    """What predictions do without the windows that could not be measured: a warning for all choices
    and micro-batch sizes alike."""
    found: dict[str, list[tuple[StageChoice, int]]] = {}
    for choice, size in dict.fromkeys(
        (config.choice, config.microbatch_size) for config in windows
    ):
        alike = [
            config
            for config in windows
            if (config.choice, config.microbatch_size) == (choice, size)
        ]
        missing = [(config.first, config.stop) for config in alike if config not in measured]
        if missing:
            text = without_windows(missing, [(config.first, config.stop) for config in alike])
            found.setdefault(text, []).append((choice, size))
    return tuple(f"{ways(alike)}: {text}. Layers count from 0." for text, alike in found.items())


def _split_warnings(task: WorkloadProtocol, microbatch_size: int) -> tuple[str, ...]:
    from capture.tracing.batch.split import check_split, split_warning

    warning = split_warning(check_split(task, microbatch_size))
    return () if warning is None else (warning,)


def _of_target(backend: str, cluster: Cluster) -> tuple[str, Cluster]:
    """``"compile:TARGET"`` as ``"compile"`` and a cluster of the target."""
    kind, _, target = backend.partition(":")
    return (
        (kind, Cluster(cluster.nodes, target))
        if kind == "compile" and target
        else (backend, cluster)
    )


def check_backend(
    backend: str,
    paper: Any,
    memory_limit_bytes: int | None,
    repeats: int,
    alpa_python: str | None,
    rule: TensorParallelRule,
    *of_windows: Any,
) -> None:
    """Refuse arguments of ``profile`` that its backend does not know.

    Raises:
        TargetError: ``target-unknown``.
        ProfileError: ``profile-backend``, with all that is wrong.
    """
    if backend not in BACKENDS:
        raise TargetError.of(
            f"backend={backend!r} is unknown; choose compile, compile:TARGET, run or alpa.",
            "target-unknown",
        )
    violations = []
    if backend in EXECUTING and paper is None:
        violations.append(
            Violation(
                f"backend={backend!r} makes the paper's profiling runs: give paper=(schedule, "
                "num_microbatches), or --mode paper.",
                "profile-backend",
            )
        )
    if backend in EXECUTING and any(argument is not None for argument in of_windows):
        violations.append(
            Violation(
                "choices, measurements and shard_params are of compiled windows; "
                f"backend={backend!r} has none.",
                "profile-backend",
            )
        )
    if backend == "alpa" and rule != "auto":
        violations.append(
            Violation(
                "Alpa decides itself how to split parameters; leave out "
                f"tensor_parallel_rule={rule!r}.",
                "profile-backend",
            )
        )
    if (backend == "alpa") != (alpa_python is not None):
        violations.append(
            Violation(
                f"backend={backend!r} came with alpa_python={alpa_python!r}; the interpreter of "
                "Alpa's environment (--alpa-python) "
                "belongs to backend='alpa', which needs it.",
                "profile-backend",
            )
        )
    if backend != "run" and memory_limit_bytes is not None:
        violations.append(
            Violation(
                f"memory_limit_bytes={memory_limit_bytes} is the limit of runs that are made "
                f"here, and backend={backend!r} makes none; "
                "use backend='run', or leave it out.",
                "profile-backend",
            )
        )
    if backend != "run" and repeats != 1:
        violations.append(
            Violation(
                f"repeats={repeats} is of runs that are made here; use backend='run', or leave it "
                "out.",
                "profile-backend",
            )
        )
    ProfileError.check(violations)


def default_choices(
    cluster: Cluster,
    microbatch_size: int,
    remat: Sequence[Remat],
    shard_optimizer: bool,
    whole_nodes: bool,
    any_divisor: bool,
) -> list[StageChoice]:
    """Every degree pair, for each way to rematerialise."""
    found = []
    for policy in remat:
        hybrid = hybrid_choices(cluster.num_devices, remat=policy, shard_optimizer=shard_optimizer)
        if any_divisor:
            hybrid = divisor_choices(cluster.num_devices, policy, shard_optimizer)
        found += choices_to_profile(
            cluster, hybrid, microbatch_size, any_divisor=any_divisor, whole_nodes=whole_nodes
        )
    return found


def divisor_choices(
    max_devices: int, remat: Remat, shard_optimizer: bool
) -> dict[int, tuple[StageChoice, ...]]:
    """All pairs of degrees whose product is the number of devices, for any number."""
    return {
        d: tuple(
            StageChoice(d // tp, tp, remat, shard_optimizer)
            for tp in range(1, d + 1)
            if d % tp == 0
        )
        for d in range(1, max_devices + 1)
    }


def paper_profile(
    measurements: Measurements,
    cluster: Cluster,
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    *,
    remat: Remat = "none",
    shard_optimizer: bool = False,
) -> PaperStatistics:
    """The paper's profiling runs of a model (see ``capture.profiler.paper``)."""
    graph, sharding = (
        measurements.backend.traced(microbatch_size).graph,
        measurements.backend.sharding(microbatch_size),
    )
    runs = paper_runs(
        graph.num_layers, cluster.num_devices, microbatch_size, remat, shard_optimizer
    )
    measurements.require({PAPER_RUNS: [c for run in runs for c in run.configs(microbatch_size)]})
    param_bytes = {
        run.choice.param_split: sharding.param_bytes(run.choice.param_split) for run in runs
    }
    return run_paper_profile(
        runs, graph, param_bytes, schedule, num_microbatches, measurements.costs.get
    )


def calibration_of(question: Question, measurements: Measurements) -> list[Plan]:
    """Random plans whose stages calibrate the interval; none if no plan fills the cluster, which
    the search then reports.

    Each plan is drawn as ``evaluate`` draws its own, with another seed; both schedules, a few
    numbers of micro-batches.
    """
    cluster, result = question.cluster, unmeasured(question, measurements)
    by_degree: dict[int, tuple[StageChoice, ...]] = {}
    for choice in question.choices:
        by_degree[choice.num_devices] = (*by_degree.get(choice.num_devices, ()), choice)
    try:
        draws = random_plans(
            cluster,
            result.graph.num_layers,
            by_degree,
            CALIBRATION_SEED,
            whole_nodes=question.whole_nodes,
            any_divisor=question.any_divisor,
        )
    except PlanError:
        return []
    return [
        plan_of(drawn, result, cluster, 8 * question.microbatch_size, 8, name)
        for drawn in islice(draws, question.calibration_plans)
        for name in SCHEDULES
    ]


def calibrate(result: Profile, measurements: Measurements, plans: Sequence[Plan]) -> Calibration:
    """Errors on those stages of plans that the profile does not hold and that could be measured.

    The truth is the replay of the plan's step, never the closed form that predicts it. Stages that
    could not be measured are there as predicted, for what they hand over.
    """
    known = {measurements.key(config) for config in result.measurements}
    predictor, errors = AdditivePredictor(result), dict[Any, StageError]()
    for plan in plans:
        configs = [stage_config(stage, plan.microbatch_size) for stage in plan.stages]
        fresh = [
            measurements.key(config) not in known and config in measurements.costs
            for config in configs
        ]
        if not any(fresh):
            continue
        costs = [
            measurements.costs.get(c)
            or predictor.stage_cost(c.first, c.stop, c.choice, c.microbatch_size)
            for c in configs
        ]
        program = build_step(
            plan_interfaces(plan, result.graph, result.param_bytes, costs), plan.schedule_table
        )
        truth = replay(program, plan.cluster.num_devices).peak_bytes_per_device
        predicted = predictor.predict(plan)
        for s, (stage, config) in enumerate(zip(plan.stages, configs, strict=True)):
            if fresh[s]:
                error = truth[stage.devices[0]] / predicted.stages[s].peak_bytes - 1
                errors[plan.schedule, plan.num_stages - s, config] = StageError(config, error)
    return Calibration(tuple(errors.values()), CALIBRATION_SEED, len(plans) // len(SCHEDULES))


def plan_of(
    drawn: Sequence[DrawnStage],
    result: Profile,
    cluster: Cluster,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
) -> Plan:
    """A plan from drawn stages."""
    stages = tuple(
        StagePlan(
            (stage.first, stage.stop - 1),
            tuple(range(stage.start_device, stage.start_device + stage.choice.num_devices)),
            **asdict(stage.choice),
        )
        for stage in drawn
    )
    return Plan(
        cluster,
        result.graph.num_layers,
        stages,
        global_batch_size,
        num_microbatches,
        schedule,
        result.auto_layers,
        result.tensor_parallel_rule,
        result.model_hashes.get(global_batch_size // num_microbatches, ""),
        result.workload,
    )


def stage_config(stage: StagePlan, microbatch_size: int) -> StageConfig:
    """The config of a plan's stage."""
    return StageConfig(stage.first, stage.stop, StageChoice.of(stage), microbatch_size)
