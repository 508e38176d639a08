"""Collect a profile: list the stage configs, measure what the store does not have, put the facts
together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from capture.errors import ProfileError
from capture.measured.profile import Profile, StageConfig
from capture.measured.store import Store
from capture.model.workload import WorkloadProtocol
from capture.plan.choices import StageChoice
from capture.predictor.statistics import without_windows
from capture.profiler.windows import window_configs
from capture.registered import REGISTERED
from profiling_runs.batch import Progress, Watch
from profiling_runs.calibrate import calibrate, calibration_of, held_out, size_errors
from profiling_runs.failures import causes, ways
from profiling_runs.measurements import Measurements, open_measurements, unmeasured
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion

#: Kinds of jobs.
WINDOWS, PAPER_RUNS, CALIBRATION = "layer windows", "paper runs", "calibration"
OTHER_SIZES = "other sizes"
#: Of a job where the store knows none of its kind; roughly those of a model of some hundred million
#: parameters.
GUESSED_SECONDS = 2.0


def profile(
    question: ProfileQuestion,
    *,
    store: Store | None = None,
    where: Where = Where(),
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
    measurements: Measurements | None = None,
) -> Profile:
    """Measure a model's layers for every stage that a plan on the cluster may have.

    Args:
        question: What is asked.
        store: Where measurements are kept; in memory if None.
        where: The jobs of a workload by name run: in processes of this machine, or on a Ray
            cluster.
        progress: Called with (kind of jobs, done, total).
        watch: Called with every start and end of a job (``profiling_runs.batch``).
        measurements: Open already (``open_measurements``); then workload, store and where are its
            own.

    Returns:
        The profile. Stages or runs that failed are named in ``failures``, once per cause.

    Raises:
        ProfileError: ``profile-backend`` for measurements where runs are executed.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    size = question.microbatch_size
    if question.executes:
        if measurements is not None:
            raise ProfileError.of(
                "choices, measurements, shard_params, sequence_parallel and split backward passes "
                f"are of compiled windows; backend={question.backend!r} has none.",
                "profile-backend",
            )
        made = REGISTERED["profile of the paper"]["executed"]
        result = made(question, store, where, progress, watch)
        return replace(result, warnings=split_warnings(question.task, size))
    if measurements is None:
        told: dict[str, Any] = {"where": where, "progress": progress, "watch": watch}
        measurements = open_measurements(question, store=store, **told)
    wanted = wanted_configs(question, measurements)
    measurements.require(wanted, question.splits_backward)
    costs = measurements.costs
    windows = {config: costs[config] for config in wanted[WINDOWS] if config in costs}
    warnings = split_warnings(measurements.backend.workload, size)
    missing = missing_statistics(wanted[WINDOWS], costs)
    result = unmeasured(question, measurements)
    result = replace(result, measurements=windows, warnings=warnings + missing)
    if question.calibration_plans and windows.keys() >= {*wanted[WINDOWS]}:
        result = _calibrated(result, question, measurements, wanted[CALIBRATION])
    if question.paper is not None:
        found = REGISTERED["profile of the paper"]["compiled"](question, measurements)
        result = replace(result, paper=found.to_json())
    return replace(result, failures=causes(measurements.failures))


def _calibrated(
    result: Profile,
    question: ProfileQuestion,
    measurements: Measurements,
    wanted: Iterable[StageConfig],
) -> Profile:
    """Return a profile that knows by how much predictions from it are off."""
    calibration = calibrate(result, measurements, calibration_of(question, measurements))
    errors = size_errors(result, held_out(question, measurements), measurements)
    # Only now: what is looked up is no test of what is predicted.
    compiled = {each: measurements.costs[each] for each in wanted if each in measurements.costs}
    calibration = replace(calibration, size_errors=errors)
    return replace(result, calibration=calibration, verified=compiled)


def wanted_configs(
    question: ProfileQuestion, measurements: Measurements
) -> dict[str, list[StageConfig]]:
    """Return every stage config that a profile measures, by kind of job. Nothing is measured for
    it: the model is traced, and that needs no device."""
    graph = measurements.backend.traced(question.microbatch_size).graph
    windows = window_configs(
        graph.num_layers,
        question.profiled_choices,
        question.microbatch_sizes,
        question.num_neighbours,
        splits_backward=question.splits_backward,
    )
    wanted = {WINDOWS: windows}
    if question.paper is not None:
        wanted[PAPER_RUNS] = REGISTERED["profile of the paper"]["configs"](
            question, graph.num_layers
        )
    if question.calibration_plans:
        known = {measurements.key(config) for config in windows}
        configs = [
            StageConfig.of(s, question.microbatch_size)
            for plan in calibration_of(question, measurements)
            for s in plan.stages
        ]
        wanted[CALIBRATION] = [each for each in configs if measurements.key(each) not in known]
        wanted[OTHER_SIZES] = list(held_out(question, measurements))
    return wanted


def jobs_left(question: ProfileQuestion, measurements: Measurements) -> tuple[int, float]:
    """Return the number of jobs of a profile that the store does not have, and the seconds of one
    worker that they are estimated to take, by what the store knows of such jobs."""
    store = measurements.backend.store
    jobs = measurements.jobs(wanted_configs(question, measurements), question.splits_backward)
    done, typical = store.get(job.key for job in jobs), store.typical_seconds()
    backend = f"compile:{question.cluster.target}"
    seconds = [
        typical.get((backend, job.part), GUESSED_SECONDS) for job in jobs if job.key not in done
    ]
    return len(seconds), sum(seconds)


def missing_statistics(
    windows: Sequence[StageConfig], measured: Container[StageConfig]
) -> tuple[str, ...]:
    """Return warnings that say which statistics predictions lack, because windows of layers could
    not be measured. Choices and micro-batch sizes that lack the same share one."""
    alike = defaultdict[tuple[StageChoice, int], list[StageConfig]](list)
    for config in windows:
        alike[config.choice, config.microbatch_size].append(config)
    found = defaultdict[str, list[tuple[StageChoice, int]]](list)
    for way, configs in alike.items():
        if missing := [(each.first, each.stop) for each in configs if each not in measured]:
            text = without_windows(missing, [(each.first, each.stop) for each in configs])
            found[text].append(way)
    return tuple(f"{ways(of)}: {text}. Layers count from 0." for text, of in found.items())


def split_warnings(
    task: WorkloadProtocol, microbatch_size: int, parts: str = "micro-batches"
) -> tuple[str, ...]:
    """Return what a user should know of a loss before training with it (``loss_warnings``)."""
    from capture.tracing.batch_split import check_split, loss_warnings

    return loss_warnings(check_split(task, microbatch_size), parts)
