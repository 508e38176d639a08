"""Collect a profile: list the stage configs, measure what the store does not have, put the facts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from capture.attribution import StageBuffers
from capture.choices import StageChoice, hybrid_choices
from capture.cluster import Cluster
from capture.errors import PlanError, ProfileError, TargetError, Violation
from capture.interface import StageCost, stage_interface
from capture.plan import Plan, Remat, StagePlan, TensorParallelRule
from capture.predictor import AdditivePredictor
from capture.predictor.formula import of_interface, peak_of
from capture.profile import Calibration, Profile, StageConfig
from capture.profiler.paper import PaperStatistics, paper_runs, run_paper_profile
from capture.profiler.windows import DEFAULT_NEIGHBOURS, choices_to_profile, profiled_microbatch_sizes, window_configs
from capture.sampling import DrawnStage, random_plans
from capture.schedule import SCHEDULES
from capture.store import Store
from capture.target import Target
from capture.workload import WorkloadProtocol, WorkloadSpec
from profiling_runs.local import Job, Measured, WorkerModel, measure_here, measure_in_processes
from profiling_runs.runs import executed_profile

CALIBRATION_SEED = 20_240_000
DEFAULT_CALIBRATION_PLANS = 12
BACKENDS = ("compile", "run", "alpa")
#: Those that execute the paper's profiling runs.
EXECUTING = ("run", "alpa")

Progress = Callable[[str, int, int], None]


@dataclass
class Measurements:
    """Measured stage configs of one model, as they are needed.

    Attributes:
        backend: Knows keys and compiles.
        spec: The workload by name; None measures in this process.
        num_workers: Worker processes.
        num_devices: Virtual devices of a worker.
        progress: Called with (what, done, total).
    """

    backend: Any
    spec: WorkloadSpec | None
    num_workers: int
    num_devices: int
    num_layers: int | None
    rule: TensorParallelRule
    progress: Progress
    costs: dict[StageConfig, StageCost] = field(default_factory=dict)
    failures: dict[StageConfig, str] = field(default_factory=dict)
    _keys: dict[StageConfig, str] = field(default_factory=dict)

    def key(self, config: StageConfig) -> str:
        """Content hash of the measurement of a config."""
        if config not in self._keys:
            self._keys[config] = self.backend.key(config)
        return self._keys[config]

    def require(self, configs: Iterable[StageConfig], what: str) -> None:
        """Measure those that neither this object nor the store has; failures are kept, not raised."""
        wanted = [config for config in dict.fromkeys(configs) if config not in self.costs and config not in self.failures]
        by_key: dict[str, list[StageConfig]] = {}
        for config in wanted:
            by_key.setdefault(self.key(config), []).append(config)
        for key, value in self.backend.store.get(by_key).items():
            self._keep(by_key[key], StageCost.from_json(value))
        missing = {key: same[0] for key, same in by_key.items() if same[0] not in self.costs}
        if not missing:
            return
        jobs = self._with_updates(missing) if self._in_processes else [Job(key, config) for key, config in missing.items()]
        for result in self._run(jobs, what):
            if result.value is None:
                self.failures.update(dict.fromkeys(by_key[result.key], result.error))
            else:
                self._keep(by_key[result.key], StageCost.from_json(result.value))

    @property
    def _in_processes(self) -> bool:
        return self.spec is not None and self.num_workers > 0

    def _with_updates(self, missing: Mapping[str, StageConfig]) -> list[Job]:
        """Jobs that are given the end of a step, which many stages share. One that cannot be measured fails again with its stages."""
        keys = {key: self.backend.update_key(config) for key, config in missing.items()}
        configs = {keys[key]: config for key, config in missing.items()}
        known = self.backend.store.get(configs)
        jobs = [Job(key, config, "update") for key, config in configs.items() if key not in known]
        done = self._run(jobs, "optimizer updates") if jobs else ()
        known |= {result.key: result.value for result in done if result.value is not None}
        return [Job(key, config, known={keys[key]: known[keys[key]]} if keys[key] in known else {}) for key, config in missing.items()]

    def buffers(self, configs: Sequence[StageConfig]) -> list[StageBuffers]:
        """What the bytes of stage configs consist of; compiled once more, with the compiler's dump.

        Raises:
            ProfileError: ``verify-stage`` naming those that do not compile.
        """
        keys = [self.backend.buffers_key(config) for config in configs]
        found = self.backend.store.get(keys)
        missing = {key: Job(key, config, "buffers") for key, config in zip(keys, configs, strict=True) if key not in found}
        for result in self._run(list(missing.values()), "buffers of the stages") if missing else ():
            if result.value is None:
                raise ProfileError.of(f"{missing[result.key].config} does not compile: {result.error}.", "verify-stage")
            found[result.key] = result.value
        return [StageBuffers.from_json(found[key]) for key in keys]

    def _run(self, jobs: Sequence[Job], what: str) -> Iterator[Measured]:
        self.progress(what, 0, len(jobs))
        if self._in_processes:
            assert self.spec is not None
            model = WorkerModel(self.spec, self.num_layers, self.rule, self.num_devices, self.backend.target.name)
            results = measure_in_processes(model, jobs, min(self.num_workers, len(jobs)))
        else:
            results = measure_here(self.backend, jobs)
        for done, result in enumerate(results, start=1):
            if result.value is not None:  # in this process the backend has stored it already, and the first one stays
                self.backend.store.put(result.key, result.value, provenance=self.backend.provenance, seconds=result.seconds)
            yield result
            self.progress(what, done, len(jobs))

    def _keep(self, configs: Iterable[StageConfig], cost: StageCost) -> None:
        self.costs.update(dict.fromkeys(configs, cost))


def open_measurements(
    workload: WorkloadProtocol | WorkloadSpec,
    *,
    num_devices: int,
    target: str = "cpu",
    num_layers: int | None = None,
    tensor_parallel_rule: TensorParallelRule = "auto",
    store: Store | None = None,
    num_workers: int = 2,
    progress: Progress = lambda what, done, total: None,
) -> Measurements:
    """Measurements of a workload that are made when they are required.

    Args:
        workload: The task, or its name; by name it is measured in worker processes.
        num_devices: Virtual devices of a worker, at least those of the largest stage.
        target: What is compiled for: a name or a file (``Target.load``).
        num_layers, tensor_parallel_rule, store, num_workers, progress: As for ``profile``.
    """
    from capture.profiler.compile import CompileBackend

    spec = workload if isinstance(workload, WorkloadSpec) else None
    task = workload.load() if isinstance(workload, WorkloadSpec) else workload
    compiler = CompileBackend(task, num_layers, tensor_parallel_rule, store, Target.load(target))
    return Measurements(compiler, spec, num_workers, num_devices, num_layers, tensor_parallel_rule, progress)


def profile(
    workload: WorkloadProtocol | WorkloadSpec,
    cluster: Cluster,
    *,
    microbatch_size: int,
    backend: str = "compile",
    num_layers: int | None = None,
    remat: Sequence[Remat] = ("none",),
    shard_optimizer: bool = False,
    choices: Iterable[StageChoice] | None = None,
    whole_nodes: bool = False,
    any_divisor: bool = False,
    num_neighbours: int = DEFAULT_NEIGHBOURS,
    tensor_parallel_rule: TensorParallelRule = "auto",
    calibration_plans: int = DEFAULT_CALIBRATION_PLANS,
    paper: tuple[str, int] | None = None,
    store: Store | None = None,
    num_workers: int = 2,
    progress: Progress = lambda what, done, total: None,
    measurements: Measurements | None = None,
    memory_limit_bytes: int | None = None,
    alpa_python: str | None = None,
) -> Profile:
    """Measure a model's layers for every stage that a plan on the cluster may have.

    Args:
        workload: The task, or its name; by name it is measured in worker processes.
        cluster: Decides the degrees to profile.
        microbatch_size: Examples in a micro-batch over all replicas; half of it is profiled too.
        backend: ``"compile"`` compiles layer windows for the cluster's target and runs nothing; ``"compile:TARGET"`` names another target
            for the cluster. ``"run"`` executes the paper's profiling runs and nothing else:
            the profile serves the paper's mode alone (see ``executed_profile``), and what is said of windows below does not matter.
            ``"alpa"`` has them executed by Alpa, on its Ray cluster of these nodes.
        num_layers: None cuts at the model's marks; a number cuts automatically.
        remat, shard_optimizer: Of the stages.
        choices: Of the windows, instead of all data- and tensor-parallel degree pairs that fit the cluster.
        whole_nodes, any_divisor: Of the windows; see ``Cluster.stage_degrees``.
        num_neighbours: Of the windows: most neighbours of M_a.
        tensor_parallel_rule: ``"auto"`` or ``"largest"``.
        calibration_plans: Random plans whose stages are measured to calibrate the interval of the windows; 0 leaves it wide.
        paper: (schedule, number of micro-batches) to make the paper's profiling runs as well; needed with ``"run"`` and ``"alpa"``.
        store: Of measurements; in memory if None.
        num_workers: Worker processes.
        progress: Called with (what, done, total).
        measurements: Open already (``open_measurements``); then workload, store and workers are its own.
        memory_limit_bytes: With ``"run"``: a run that needs more on a device is not made, and named as failed.
        alpa_python: With ``"alpa"``: the interpreter of Alpa's environment.

    Returns:
        The profile. Stage configs or runs that failed are named in ``failures``.

    Raises:
        TargetError: ``target-unknown`` for another backend.
        ProfileError: ``profile-backend`` for arguments that the backend has no use for, or without those that it needs.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    backend, cluster = _of_target(backend, cluster)
    _check_backend(backend, paper, memory_limit_bytes, alpa_python, tensor_parallel_rule, choices, measurements)
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
            num_workers=num_workers,
            progress=progress,
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
            num_workers=num_workers,
            progress=progress,
        )
    compiler = measurements.backend
    graph = compiler.traced(microbatch_size).graph
    wanted = (
        list(choices)
        if choices is not None
        else default_choices(cluster, microbatch_size, remat, shard_optimizer, whole_nodes, any_divisor)
    )
    sizes = profiled_microbatch_sizes(microbatch_size, wanted)
    configs = window_configs(graph.num_layers, wanted, sizes, num_neighbours)
    measurements.require(configs, "layer windows")
    degrees = sorted({choice.tensor_parallel for choice in wanted})
    param_bytes = {tp: compiler.sharding(microbatch_size).param_bytes(tp) for tp in degrees}
    result = Profile(
        graph=graph,
        measurements={config: measurements.costs[config] for config in configs if config in measurements.costs},
        param_bytes=param_bytes,
        provenance={**compiler.provenance, "created": datetime.now(UTC).isoformat(timespec="seconds")},
        workload=measurements.spec,
        auto_layers=num_layers is not None,
        tensor_parallel_rule=tensor_parallel_rule,
        microbatch_sizes=sizes,
        model_hashes={size: compiler.traced(size).graph.model_hash for size in sizes},
        warnings=_split_warnings(compiler.workload, microbatch_size),
    )
    if calibration_plans and not measurements.failures:
        result = replace(result, calibration=calibrate(result, measurements, cluster, wanted, calibration_plans, whole_nodes, any_divisor))
    if paper is not None:
        runs = paper_profile(measurements, cluster, microbatch_size, *paper, remat=remat[0], shard_optimizer=shard_optimizer)
        result = replace(result, paper=runs.to_json())
    failures = tuple(f"layers {c.first} to {c.stop - 1}, {c.choice}: {error}" for c, error in measurements.failures.items())
    return replace(result, failures=failures)


def _split_warnings(task: WorkloadProtocol, microbatch_size: int) -> tuple[str, ...]:
    from capture.tracing.batch_split import check_split, split_warning

    warning = split_warning(check_split(task, microbatch_size))
    return () if warning is None else (warning,)


def _of_target(backend: str, cluster: Cluster) -> tuple[str, Cluster]:
    """``"compile:TARGET"`` as ``"compile"`` and a cluster of the target."""
    kind, _, target = backend.partition(":")
    return (kind, Cluster(cluster.nodes, target)) if kind == "compile" and target else (backend, cluster)


def _check_backend(
    backend: str, paper: Any, memory_limit_bytes: int | None, alpa_python: str | None, rule: TensorParallelRule, *of_windows: Any
) -> None:
    if backend not in BACKENDS:
        raise TargetError.of(f"backend={backend!r} is unknown; choose compile, compile:TARGET, run or alpa.", "target-unknown")
    violations = []
    if backend in EXECUTING and paper is None:
        violations.append(
            Violation(
                f"backend={backend!r} makes the paper's profiling runs: give paper=(schedule, num_microbatches), or --mode paper.",
                "profile-backend",
            )
        )
    if backend in EXECUTING and any(argument is not None for argument in of_windows):
        violations.append(
            Violation(f"choices and measurements are those of compiled windows; backend={backend!r} has none.", "profile-backend")
        )
    if backend == "alpa" and rule != "auto":
        violations.append(
            Violation(f"Alpa decides itself how to split parameters; leave out tensor_parallel_rule={rule!r}.", "profile-backend")
        )
    if (backend == "alpa") != (alpa_python is not None):
        violations.append(
            Violation(
                f"backend={backend!r} came with alpa_python={alpa_python!r}; the interpreter of Alpa's environment (--alpa-python) "
                "belongs to backend='alpa', which needs it.",
                "profile-backend",
            )
        )
    if backend != "run" and memory_limit_bytes is not None:
        violations.append(
            Violation(
                f"memory_limit_bytes={memory_limit_bytes} is the limit of runs that are made here, and backend={backend!r} makes none; "
                "use backend='run', or leave it out.",
                "profile-backend",
            )
        )
    ProfileError.check(violations)


def default_choices(
    cluster: Cluster, microbatch_size: int, remat: Sequence[Remat], shard_optimizer: bool, whole_nodes: bool, any_divisor: bool
) -> list[StageChoice]:
    """Every degree pair, for each way to rematerialise."""
    found = []
    for policy in remat:
        hybrid = hybrid_choices(cluster.num_devices, remat=policy, shard_optimizer=shard_optimizer)
        if any_divisor:
            hybrid = divisor_choices(cluster.num_devices, policy, shard_optimizer)
        found += choices_to_profile(cluster, hybrid, microbatch_size, any_divisor=any_divisor, whole_nodes=whole_nodes)
    return found


def divisor_choices(max_devices: int, remat: Remat, shard_optimizer: bool) -> dict[int, tuple[StageChoice, ...]]:
    """All pairs of degrees whose product is the number of devices, for any number."""
    return {
        d: tuple(StageChoice(d // tp, tp, remat, shard_optimizer) for tp in range(1, d + 1) if d % tp == 0)
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
    graph, sharding = measurements.backend.traced(microbatch_size).graph, measurements.backend.sharding(microbatch_size)
    runs = paper_runs(graph.num_layers, cluster.num_devices, microbatch_size, remat, shard_optimizer)
    measurements.require([c for run in runs for c in run.configs(microbatch_size)], "paper runs")
    param_bytes = {run.choice.tensor_parallel: sharding.param_bytes(run.choice.tensor_parallel) for run in runs}
    return run_paper_profile(runs, graph, param_bytes, schedule, num_microbatches, measurements.costs.get)


def calibrate(
    result: Profile,
    measurements: Measurements,
    cluster: Cluster,
    choices: Sequence[StageChoice],
    num_plans: int,
    whole_nodes: bool,
    any_divisor: bool,
) -> Calibration:
    """Errors on the stages of random plans that the profile does not hold.

    Each plan is drawn as ``evaluate`` draws its own, with another seed; both schedules, a few numbers of micro-batches.
    """
    by_degree: dict[int, tuple[StageChoice, ...]] = {}
    for choice in choices:
        by_degree[choice.num_devices] = (*by_degree.get(choice.num_devices, ()), choice)
    graph, known = result.graph, {measurements.key(config) for config in result.measurements}
    try:
        draws = random_plans(cluster, graph.num_layers, by_degree, CALIBRATION_SEED, whole_nodes=whole_nodes, any_divisor=any_divisor)
    except PlanError:  # no plan fills the cluster, which the search then reports as its result
        return Calibration((), CALIBRATION_SEED, 0)
    plans = [
        plan_of(drawn, result, cluster, 8 * graph.microbatch_size, 8, name) for drawn in islice(draws, num_plans) for name in SCHEDULES
    ]
    configs = [stage_config(stage, graph.microbatch_size) for plan in plans for stage in plan.stages]
    fresh = [config for config in configs if measurements.key(config) not in known]
    measurements.require(fresh, "calibration")
    predictor, errors = AdditivePredictor(result), {}
    for plan in plans:
        predicted = predictor.predict(plan)
        for s, stage in enumerate(plan.stages):
            config = stage_config(stage, graph.microbatch_size)
            if measurements.key(config) not in known and config in measurements.costs:
                peak = measured_peak(plan, s, graph, result.param_bytes, measurements.costs[config])
                errors[plan.schedule, plan.num_stages - s, config] = peak / predicted.stages[s].peak_bytes - 1
    return Calibration(tuple(errors.values()), CALIBRATION_SEED, num_plans)


def plan_of(
    drawn: Sequence[DrawnStage], result: Profile, cluster: Cluster, global_batch_size: int, num_microbatches: int, schedule: str
) -> Plan:
    """A plan from drawn stages."""
    stages = tuple(
        StagePlan(
            (stage.first, stage.stop - 1),
            tuple(range(stage.start_device, stage.start_device + stage.choice.num_devices)),
            stage.choice.data_parallel,
            stage.choice.tensor_parallel,
            stage.choice.remat,
            stage.choice.shard_optimizer,
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


def measured_peak(plan: Plan, stage_id: int, graph: Any, param_bytes: Mapping[int, Sequence[int]], cost: StageCost) -> int:
    """Peak of a stage whose programs were compiled, from the schedule's occupancies."""
    stage = plan.stages[stage_id]
    interface = stage_interface(
        graph, stage.first, stage.stop, stage.devices, stage.data_parallel, param_bytes[stage.tensor_parallel], cost
    )
    return int(peak_of(of_interface(interface), plan.schedule_table.occupancies[stage_id]))
