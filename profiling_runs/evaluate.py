"""The evaluation of predictions: random plans, predicted from a profile alone, against their own
compiled stages.

Plans are drawn uniformly over stage count, then cuts, degrees and kind. The truth is the replay of
the plan over its compiled stages. A stage whose programs were compiled for the profile or the
calibration is counted apart: a lookup is no prediction. Interrupted, it resumes: compiled stages
are in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

import numpy as np

from capture.documents import fields_of
from capture.errors import PlanError, ProfileError
from capture.measured.profile import Profile, StageConfig
from capture.options import Asked
from capture.plan.choices import by_degree
from capture.plan.sampling import random_plans, random_table_plans
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.accuracy import Accuracy, JudgedPeak, finite
from capture.registered import REGISTERED
from profiling_runs.calibrate import replayed_peaks
from profiling_runs.collect import profile
from profiling_runs.measurements import Measurements
from profiling_runs.question import ProfileQuestion


@dataclass(frozen=True)
class EvaluationQuestion:
    """The question of an evaluation: which random plans are predicted and compiled.

    Attributes:
        profile: That predictions are made from.
        num_microbatches: Micro-batches of a step.
        schedules: Every plan is looked at under each of them: plain ones, or one that is not.
        num_plans: Random plans.
        seed: What the plans are drawn with.
        memory_limit_bytes: Draw only plans that are predicted to fit this limit per device, such as
            40GB.
        paper: Whether the paper's mode predicts them too, from profiling runs of its own.
        asked_size: Micro-batch size of the plans, where another is profiled (with --default-only).
    """

    profile: ProfileQuestion
    num_microbatches: int
    schedules: tuple[str, ...] = tuple(PLAIN_SCHEDULES)
    num_plans: Annotated[int, Asked("plans", "N", least=1)] = 200
    seed: Annotated[int, Asked(metavar="S")] = 0
    memory_limit_bytes: Annotated[int | None, Asked("memory")] = None
    paper: bool = True
    asked_size: Annotated[int | None, Asked("ask_size", "B", least=1)] = None

    def __post_init__(self) -> None:
        others = [name for name in self.schedules if name not in PLAIN_SCHEDULES]
        if others and (len(self.schedules) > 1 or self.paper):
            raise PlanError.of(
                f"--schedule {', '.join(self.schedules)}: {others[0]} has plans of its own, which "
                "the paper's mode does not know; give it alone, with --default-only.",
                "evaluate-schedule",
            )
        if self.paper and self.asked_size is not None:
            raise PlanError.of(
                f"--ask-size {self.asked_size}: the paper's mode knows the profiled size alone; "
                "add --default-only.",
                "evaluate-size",
            )

    @property
    def microbatch_size(self) -> int:
        return self.asked_size or self.profile.microbatch_size

    @property
    def global_batch_size(self) -> int:
        return self.microbatch_size * self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class EvaluateReport:
    """The report of ``capture evaluate``: how far predicted peaks are from compiled ones.

    Attributes:
        workload, cluster, target: What is planned for.
        num_plans, seed, memory_limit_bytes: How plans were drawn.
        schedules: Every plan is looked at under each of them.
        remat, global_batch_size, num_microbatches: Of the plans.
        profiled_microbatch_sizes, asked_microbatch_size: Of the profile, and of the plans.
        interval_factors: The widest interval of a prediction, over the prediction; None without
            calibration.
        default, paper: By mode; None where the paper's was not asked.
        default_where_paper_predicts: The default mode, where the paper's says something.
        by_schedule: By schedule and mode.
        num_failed_stages: Stages that did not compile; their plans are left out.
        source: Backend, target and versions of the profile.
        warnings: What of the loss makes its step another than that of one device.
    """

    workload: str
    cluster: str
    target: str
    num_plans: int
    seed: int
    memory_limit_bytes: int | None
    schedules: Sequence[str]
    remat: str
    global_batch_size: int
    num_microbatches: int
    profiled_microbatch_sizes: Sequence[int]
    asked_microbatch_size: int
    interval_factors: tuple[float, float] | None
    default: Accuracy
    paper: Accuracy | None
    default_where_paper_predicts: Accuracy | None
    by_schedule: Mapping[str, Mapping[str, Accuracy]]
    num_failed_stages: int
    source: Mapping[str, Any]
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """The predicted peak memory of random plans beside the peaks of their compiled stages.

    Attributes:
        question: That this answers.
        profile: That predictions were made from.
        default, paper: Per plan and device, in the default mode and in the paper's, which predicts
            nothing (NaN) where it was not asked.
        num_failed_stages: Stages that did not compile; their plans are left out.
    """

    question: EvaluationQuestion
    profile: Profile
    default: tuple[JudgedPeak, ...]
    paper: tuple[JudgedPeak, ...]
    num_failed_stages: int

    @property
    def report(self) -> EvaluateReport:
        """The accuracy of the default and of the paper's mode, in numbers."""
        asked, profile = self.question, self.profile
        together = zip(self.default, self.paper, strict=True)
        of_both = [mine for mine, theirs in together if not np.isnan(theirs.predicted)]
        return EvaluateReport(
            workload=str(asked.profile.workload),
            cluster=str(asked.profile.cluster),
            target=asked.profile.cluster.target,
            **fields_of(asked, "num_plans", "seed", "memory_limit_bytes", "schedules"),
            remat=asked.profile.remat[0],
            **fields_of(asked, "global_batch_size", "num_microbatches"),
            profiled_microbatch_sizes=profile.microbatch_sizes,
            asked_microbatch_size=asked.microbatch_size,
            interval_factors=profile.widest_interval(asked.profile.stage_choices),
            default=Accuracy.of(self.default),
            paper=Accuracy.of(self.paper) if asked.paper else None,
            default_where_paper_predicts=Accuracy.of(of_both) if asked.paper else None,
            by_schedule={s: self._by_mode(s) for s in asked.schedules},
            num_failed_stages=self.num_failed_stages,
            source=profile.provenance,
        )

    def _by_mode(self, schedule: str) -> dict[str, Accuracy]:
        modes = {"default": self.default}
        modes |= {"paper": self.paper} if self.question.paper else {}
        return {
            mode: Accuracy.of([o for o in of_mode if o.plan[1] == schedule])
            for mode, of_mode in modes.items()
        }

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """Every prediction as a JSON document, one per plan and device."""
        return [
            {**o.to_json(), "paper_predicted_bytes": finite(p.predicted)}
            for o, p in zip(self.default, self.paper, strict=True)
        ]


def evaluate(question: EvaluationQuestion, measurements: Measurements) -> Evaluation:
    """Profile a model, draw random plans, and compare their predicted peaks with compiled ones.

    Raises:
        PlanError: ``sampling-empty`` if there is no plan, ``evaluate-memory`` if none fits.
    """
    asked, cluster = question.profile, question.profile.cluster
    size = question.microbatch_size
    result = profile(asked, measurements=measurements)
    # Calibration draws with a seed of its own; this keeps the two streams apart whatever seed is
    # given.
    draws = _draws(question, result, np.random.default_rng([question.seed, 1]))
    known_keys = {measurements.key(config) for config in measurements.costs}
    papers = _papers(question, result, measurements)
    known_to_paper = {measurements.key(config) for config in measurements.costs}
    drawn = (
        {
            s: result.plan(
                cluster,
                stages,
                global_batch_size=question.global_batch_size,
                num_microbatches=question.num_microbatches,
                schedule=s,
            )
            for s in question.schedules
        }
        for stages in draws
    )
    limit = question.memory_limit_bytes
    fitting = drawn if limit is None else _fitting(drawn, AdditivePredictor(result), limit)
    plans = {
        (i, s): plan
        for i, both in enumerate(islice(fitting, question.num_plans))
        for s, plan in both.items()
    }
    stages = [StageConfig.of(s, size) for plan in plans.values() for s in plan.stages]
    measurements.require({"stages of the plans": stages}, asked.splits_backward)
    default, paper = list[JudgedPeak](), list[JudgedPeak]()
    predictor = AdditivePredictor(result)
    for key, plan in plans.items():
        configs = [StageConfig.of(stage, size) for stage in plan.stages]
        if any(config not in measurements.costs for config in configs):
            continue
        truth = replayed_peaks(plan, result, [measurements.costs[c] for c in configs], measurements)
        predicted = predictor.predict(plan)
        by_paper = _by_paper(papers.get(plan.schedule), plan)
        for group in plan.schedule_table.stages:
            # Of stages that share devices, the first stands for all.
            s = group[0]
            seen = {measurements.key(configs[t]) for t in group}
            for d in plan.stages[s].devices:
                peak = predicted.peak_bytes_per_device[d]
                interval = predicted.interval_bytes_per_device[d]
                default.append(JudgedPeak(key, s, peak, *interval, truth[d], seen <= known_keys))
                by = by_paper[s]
                paper.append(
                    JudgedPeak(key, s, by, np.nan, np.nan, truth[d], seen <= known_to_paper)
                )
    return Evaluation(question, result, tuple(default), tuple(paper), len(measurements.failures))


def _draws(
    question: EvaluationQuestion, result: Profile, generator: np.random.Generator
) -> Iterator[Sequence[Stage]]:
    """Return an endless iterator of random stages with the choices that were profiled."""
    asked, known = question.profile, set(result.choices)
    choices = sorted(c for c in asked.stage_choices if known.issuperset(c.measured))
    about = (asked.cluster, result.graph.num_layers, by_degree(choices))
    kind = SCHEDULES[question.schedules[0]]
    if kind.is_plain:
        return random_plans(*about, generator, asked.space)
    return random_table_plans(*about, kind, generator, asked.space)


def _papers(
    question: EvaluationQuestion, result: Profile, measurements: Measurements
) -> dict[str, Any]:
    """Return the predictor of the paper's mode for every schedule, where it is asked."""

    def of_paper(schedule: str) -> Any:
        profiled = replace(question.profile, paper=(schedule, question.num_microbatches))
        return REGISTERED["profile of the paper"]["compiled"](profiled, measurements)

    return {
        schedule: REGISTERED["predictor of stages"]["paper"](
            replace(result, paper=of_paper(schedule).to_json())
        )
        for schedule in (question.schedules if question.paper else ())
    }


def _by_paper(predictor: Any, plan: Plan) -> list[float]:
    """Return the peak bytes per stage that the paper's predictor expects; NaN for data and tensor
    parallelism together, which is not in the paper's space."""
    if predictor is None:
        return [np.nan] * plan.num_stages
    found = []
    for stage in plan.stages:
        try:
            peaks = predictor.peaks(stage.choice, plan.num_microbatches)
        except ProfileError:
            found.append(np.nan)
        else:
            found.append(float(peaks[stage.first, stage.stop]))
    return found


def _fitting(
    drawn: Iterator[Mapping[str, Plan]], predictor: Any, limit: int
) -> Iterator[Mapping[str, Plan]]:
    """Yield the drawn plans that are predicted to fit the limit under every schedule.

    Raises:
        PlanError: ``evaluate-memory`` if none of the first thousand does.
    """
    found = 0
    for tried, both in enumerate(drawn):
        if all(predictor.predict(plan).peak_bytes <= limit for plan in both.values()):
            found += 1
            yield both
        if not found and tried == 1000:
            raise PlanError.of(
                f"none of {tried} random plans is predicted to need at most {limit:,} bytes; "
                "raise --memory.",
                "evaluate-memory",
            )
