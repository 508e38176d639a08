"""From a profile to a recommended plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from capture.errors import PlanError, ProfileError, Violation, plain
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.headroom import Headroom
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan, StagePlan, batch_violations
from capture.predictor import AdditivePredictor, Prediction
from capture.predictor.paper import PaperPredictor
from capture.predictor.times import TimePredictor
from capture.profiler.paper import PaperStatistics, layer_statistics
from capture.profiler.paper import merge_layers as merged_layers
from recommender.capture.baselines import fixed_degree_plan
from recommender.capture.pareto import pareto
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.result import PlacedStage, SearchResult
from recommender.capture.search import ALGORITHMS, search
from recommender.capture.throughput import throughput

#: Alpa's search (``recommender.capture.autostage``): it has a space and a limit of its own, so it
#: is asked with the profile.
AUTOSTAGE = "autostage"


def _autostage(profile: Profile, cluster: Cluster, **question: Any) -> Recommendation:
    from recommender.capture.autostage import autostage  # which makes recommendations itself

    return autostage(profile, cluster, **question)


#: What answers a question, by (objective, mode, algorithm): a search of a ``SearchProblem``, and
#: for ``AUTOSTAGE`` all of ``recommend``. Of the entries that agree with what is asked, the first
#: is taken.
SEARCHES: Mapping[tuple[str, str, str], Callable[..., Any]] = MappingProxyType(
    {
        **{
            ("memory", mode, name): partial(search, algorithm=name)
            for mode in ("default", "paper")
            for name in ALGORITHMS
        },
        ("throughput", "default", "throughput"): throughput,
        ("throughput", "default", AUTOSTAGE): _autostage,
        ("pareto", "default", "throughput"): throughput,
    }
)
OBJECTIVES, MODES, SEARCH_NAMES = (
    tuple(dict.fromkeys(column)) for column in zip(*SEARCHES, strict=True)
)


def search_names(objective: str, mode: str = "default") -> tuple[str, ...]:
    """Of the algorithms for an objective and a mode, the default first.

    Example:
        >>> search_names("throughput")
        ('throughput', 'autostage')
    """
    return tuple(name for *of, name in SEARCHES if of == [objective, mode])


def search_of(objective: str | None, mode: str, algorithm: str | None) -> tuple[str, str, str]:
    """The entry of ``SEARCHES`` that is asked for; None leaves open.

    Raises:
        PlanError: ``recommend-mode``, ``recommend-objective`` or ``search-algorithm`` for an
            unknown name, ``recommend-objective`` for an objective that the mode does not have,
            ``plan-algorithm`` for an algorithm that the objective does not have.

    Example:
        >>> search_of(None, "default", None), search_of(None, "default", "autostage")
        (('memory', 'default', 'minmax'), ('throughput', 'default', 'autostage'))
    """
    asked = (objective, mode, algorithm)
    found = [
        entry
        for entry in SEARCHES
        if all(want in (None, have) for want, have in zip(asked, entry, strict=True))
    ]
    if found:
        return found[0]
    violations = [
        Violation(f"{what}={given!r} is unknown; choose one of {', '.join(known)}.", code)
        for what, given, known, code in (
            ("mode", mode, MODES, "recommend-mode"),
            ("objective", objective, OBJECTIVES, "recommend-objective"),
            ("algorithm", algorithm, SEARCH_NAMES, "search-algorithm"),
        )
        if given is not None and given not in known
    ]
    if not violations and not search_names(objective or OBJECTIVES[0], mode):
        violations = [
            Violation(
                f"mode={mode!r} predicts memory alone; leave out the objective, or the mode.",
                "recommend-objective",
            )
        ]
    elif not violations:
        of = f"objective={objective!r} in mode={mode!r}" if objective else f"mode={mode!r}"
        names = [
            name
            for name in SEARCH_NAMES
            if any(search == (objective or search[0], mode, name) for search in SEARCHES)
        ]
        violations = [
            Violation(
                f"algorithm={algorithm!r} does not search for {of}; choose {' or '.join(names)}.",
                "plan-algorithm",
            )
        ]
    raise PlanError(violations)


#: Of the cost table of one degree, all its choices together.
_LARGEST_TABLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Recommendation:
    """A plan, what it is predicted to need, and why it was chosen.

    Attributes:
        status: ``"ok"``, or ``"infeasible"`` if nothing fits; the least-peak plan is there all the
            same where one exists.
        plan: None where no plan exists.
        prediction: Of the plan.
        search: How it was found, and how far that is proven.
        why: For people and scripts: the choice, the runner-up baselines, or what is missing and the
            cheapest change.
        headroom: What the plan leaves of the limit, or of the target's memory; None where neither
            is known.
    """

    status: str
    plan: Plan | None
    prediction: Prediction | None
    search: SearchResult
    why: Mapping[str, Any]
    headroom: Headroom | None = None

    @property
    def peak_bytes(self) -> int:
        """Of the device that needs most: the compiler's if the plan is verified, else predicted; 0
        without a plan."""
        if self.plan is not None and self.plan.verification is not None:
            return int(max(self.plan.verification["peak_bytes_per_device"]))
        return 0 if self.prediction is None else self.prediction.peak_bytes

    @property
    def extrapolated(self) -> bool:
        """Whether the numbers are of a micro-batch size or degrees that were not profiled, and the
        plan was not compiled either."""
        return self.prediction is not None and self.prediction.extrapolated and not self.compiled

    @property
    def compiled(self) -> bool:
        """Whether the peaks are the compiler's of the plan's own stages."""
        return self.plan is not None and self.plan.verification is not None

    @property
    def memory_limit_bytes(self) -> int | None:
        """That the plan was searched under."""
        return self.headroom.limit_bytes if self.headroom else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "extrapolated": self.extrapolated,
            "plan": None if self.plan is None else self.plan.to_json(),
            "prediction": None if self.prediction is None else self.prediction.to_json(),
            "search": {
                "seconds": self.search.seconds,
                "algorithm": self.search.algorithm,
                "optimal": self.search.optimal,
                "tie_break": self.search.tie_break,
                "tie_break_columns": self.search.tie_break_columns,
                "num_explored": self.search.num_explored,
                "step_seconds": self.search.step_seconds,
                "bound_fraction": self.search.bound_fraction,
            },
            "why": dict(self.why),
            "headroom": None if self.headroom is None else self.headroom.to_json(),
        }


def recommend(
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    *,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    memory_limit_bytes: int | None = None,
    objective: str | None = None,
    mode: str = "default",
    algorithm: str | None = None,
    whole_nodes: bool = False,
    any_divisor: bool = False,
    merge_layers: int | None = None,
) -> Recommendation:
    """The plan of least peak memory on a cluster, or the fastest one that fits.

    Args:
        profile: Of the model; several are put together (``merge_profiles``).
        cluster: May be smaller or larger than the profiled one.
        global_batch_size, num_microbatches: Of a step.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        memory_limit_bytes: Per device; a plan above it is a result, ``status == "infeasible"``.
            None takes what the target's devices can use (``DeviceMemory.usable_bytes``); virtual
            CPU devices have no limit.
        objective: ``"memory"``: least peak. ``"throughput"``: least step time within the limit.
            ``"pareto"``: the same plan, and the front of peak memory against step time in
            ``why["front"]``. The last two need a profile of an accelerator. None: that of the
            algorithm, ``"memory"`` first.
        mode: ``"default"``: data and tensor parallelism together, schedule-aware; ``"paper"``:
            either of them, the paper's predictor.
        algorithm: One of those that ``SEARCHES`` has for the objective and the mode; None takes the
            first of them.
        whole_nodes, any_divisor: See ``Cluster.stage_degrees``.
        merge_layers: Cut only between layers that the paper's layer merger leaves; None cuts
            anywhere.

    Returns:
        At a micro-batch size that was not profiled the numbers are an extrapolation, and say so
        (``Recommendation.extrapolated``); ``recommender.capture.verified.Knowledge`` asks until
        they are compiled.

    Raises:
        PlanError: ``plan-batch``, ``plan-schedule``, ``plan-algorithm`` for options that Alpa's
            algorithm does not know, and the codes of ``search_of``.
        ProfileError: if the profile lacks what the search needs, ``profile-no-times`` among it;
            ``profile-mixture`` for profiles that do not belong together.
    """
    if not isinstance(profile, Profile):
        profile = merge_profiles(profile, cluster.target)
    PlanError.check(
        [
            *batch_violations(global_batch_size, num_microbatches),
            *question_violations(
                schedule,
                objective,
                mode,
                algorithm,
                merge_layers=merge_layers,
                any_divisor=any_divisor,
            ),
        ]
    )
    objective, mode, algorithm = search_of(objective, mode, algorithm)
    ask = SEARCHES[objective, mode, algorithm]
    batch: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "num_microbatches": num_microbatches,
        "schedule": schedule,
    }
    if algorithm == AUTOSTAGE:
        return ask(profile, cluster, **batch, memory_limit_bytes=memory_limit_bytes)
    memory = Target.load(cluster.target).memory
    given, memory_limit_bytes = (
        memory_limit_bytes,
        memory.usable_bytes if memory_limit_bytes is None and memory else memory_limit_bytes,
    )
    pose = partial(
        search_problem,
        profile,
        cluster,
        **batch,
        memory_limit_bytes=memory_limit_bytes,
        mode=mode,
        whole_nodes=whole_nodes,
        any_divisor=any_divisor,
        merge_layers=merge_layers,
        with_times=objective != "memory",
    )

    def answer(problem: SearchProblem) -> tuple[SearchResult, Plan | None]:
        result = ask(problem)
        if not result.stages:
            return result, None
        plan = plan_of_stages(
            result.stages, profile, cluster, global_batch_size, num_microbatches, schedule
        )
        if mode == "default" and objective == "memory":
            plan = plan.with_(
                stages=_with_best_choices(result.stages, problem, AdditivePredictor(profile), plan)
            )
        return result, plan

    problem = pose()
    result, plan = answer(problem)
    if mode == "default" and _depends_on_cuts_behind(
        profile, problem, global_batch_size // num_microbatches
    ):
        result, plan = _between(
            (result, plan), answer(pose(least=True)), profile, memory_limit_bytes
        )
    if plan is None:
        return Recommendation("infeasible", None, None, result, _infeasible(result))
    prediction = predict_plan(profile, plan)
    why = (
        _infeasible(result)
        if result.status == "infeasible"
        else _why(result, prediction, problem, profile)
    )
    if objective == "pareto":
        why = {**why, "front": _front(problem, profile, plan)}
    plan = plan.with_(prediction=prediction.to_json(), why=why)
    return Recommendation(
        result.status, plan, prediction, result, why, prediction.headroom(given, memory)
    )


def _depends_on_cuts_behind(profile: Profile, problem: SearchProblem, microbatch_size: int) -> bool:
    predictor = AdditivePredictor(profile)
    return any(
        predictor.depends_on_cuts_behind(choice, microbatch_size)
        for d in problem.used_degrees
        for choice in problem.choices[d]
    )


def _between(
    most: tuple[SearchResult, Plan | None],
    least: tuple[SearchResult, Plan | None],
    profile: Profile,
    memory_limit_bytes: int | None,
) -> tuple[SearchResult, Plan | None]:
    """The better of two answers, and what is proven of it.

    What a stage needs depends a little on how the layers behind it are cut
    (``AdditivePredictor.peaks``), which no table over stages can say. ``most`` was searched with
    the worst case of every stage, so its plan needs no more than the search says; ``least`` with
    the best, so that no plan is better than the search says. Where its plan needs just that, it is
    the best one.
    """
    (bound, other), (result, plan) = least, most
    if other is None:
        return result, plan
    predict = AdditivePredictor(profile).predict
    if tuple(predict(other).peak_bytes_per_device) == bound.peak_bytes_per_device:
        return bound, other
    if plan is None or result.step_seconds is not None:
        if result.step_seconds is not None and bound.step_seconds is not None:
            above = max(
                result.bound_fraction,
                result.step_seconds / bound.step_seconds * (1 + bound.bound_fraction) - 1,
            )
            result = replace(result, optimal=result.optimal and above == 0, bound_fraction=above)
        return result, plan
    if bound.status == "infeasible":
        return bound, other
    peaks = [sorted(predict(p).peak_bytes_per_device, reverse=True) for p in (plan, other)]
    if memory_limit_bytes is not None and min(peaks)[0] > memory_limit_bytes:
        return replace(result, optimal=False), plan
    result, plan = (result, plan) if peaks[0] <= peaks[1] else (bound, other)
    optimal = bound.optimal and min(peaks)[0] <= bound.peak_bytes
    return replace(
        result, status="ok", why=None, optimal=optimal, tie_break="none", tie_break_columns=0
    ), plan


def predict_plan(profile: Profile, plan: Plan) -> Prediction:
    """The prediction of a plan by the default predictor, which itemises; by the paper's where the
    profile holds executed runs alone."""
    if profile.measurements:
        return AdditivePredictor(profile).predict(plan)
    return _paper_predictor(profile).prediction(plan, profile.provenance)


def _front(problem: SearchProblem, profile: Profile, plan: Plan) -> dict[str, Any]:
    """The front as documents have it: every point with its plan in one line, and how far it is
    proven."""
    front = pareto(problem)
    return {
        "points": [
            {
                "peak_bytes": point.peak_bytes,
                "step_seconds": point.step_seconds,
                "bound_fraction": point.bound_fraction,
                "stages": [
                    stage.to_json() for stage in _as_plan(point.stages, profile, plan).stages
                ],
            }
            for point in front.points
        ],
        "complete": front.complete,
        "extrapolated": plan.microbatch_size not in profile.microbatch_sizes,
        "seconds": front.seconds,
    }


def _as_plan(stages: Sequence[PlacedStage], profile: Profile, like: Plan) -> Plan:
    return plan_of_stages(
        stages, profile, like.cluster, like.global_batch_size, like.num_microbatches, like.schedule
    )


def question_violations(
    schedule: str,
    objective: str | None,
    mode: str,
    algorithm: str | None,
    *,
    merge_layers: int | None,
    any_divisor: bool,
) -> list[Violation]:
    """What is wrong with a question, before anything is measured for it."""
    found = []
    if schedule not in SCHEDULES:
        found.append(
            Violation(
                f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}.",
                "plan-schedule",
            )
        )
    try:
        search_of(objective, mode, algorithm)
    except PlanError as error:
        found += error.violations
    if algorithm == AUTOSTAGE:
        found += [
            Violation(
                f"algorithm={AUTOSTAGE!r} searches Alpa's own space; leave out {name}.",
                "plan-algorithm",
            )
            for name, given in (
                ("merge_layers", merge_layers is not None),
                ("any_divisor", any_divisor),
            )
            if given
        ]
    return found


def search_problem(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
    memory_limit_bytes: int | None = None,
    mode: str = "default",
    whole_nodes: bool = False,
    any_divisor: bool = False,
    merge_layers: int | None = None,
    with_times: bool = False,
    least: bool = False,
) -> SearchProblem:
    """The search that a profile poses: predicted bytes (and seconds) of every stage, at every
    position, for every choice.

    With ``least``, the bytes are those of the best of plans behind a stage and not of the worst:
    see ``AdditivePredictor.peaks``.

    Raises:
        ProfileError: ``profile-failed`` if nothing could be measured, ``profile-missing`` if every
            choice lacks a measurement, ``profile-degrees`` if no profiled choice fits a stage of
            one device, ``profile-paper`` without paper statistics, ``profile-windows`` in the
            default mode if there is nothing else, ``profile-no-times`` without times of an
            accelerator.
    """
    microbatch_size = global_batch_size // num_microbatches
    degrees = {
        d
        for here in cluster.stage_degrees(any_divisor=any_divisor, whole_nodes=whole_nodes)
        for d in here
    }
    usable: dict[int, list[StageChoice]] = {}
    for choice in _choices(profile, mode, degrees, microbatch_size):
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0:
            usable.setdefault(choice.num_devices, []).append(choice)
    if not usable and profile.failures:
        failed = "\n".join(f"failed: {plain(failure)}" for failure in profile.failures)
        raise ProfileError.of(f"no measurement succeeded:\n{failed}", "profile-failed")
    if not usable:
        raise ProfileError.of(
            f"the profile has no choice for stages on {sorted(degrees)} devices at "
            f"microbatch_size={microbatch_size}; "
            f"profile for cluster {cluster}.",
            "profile-degrees",
        )
    num_layers = profile.graph.num_layers
    max_stages = min(num_layers, cluster.num_devices)
    rows = (
        _default_rows(profile, microbatch_size, schedule, num_microbatches, max_stages, least)
        if mode == "default"
        else _paper_rows(profile, num_microbatches)
    )
    blocked = _blocked(num_layers, merge_layers, rows(usable[min(usable)][0])[0])
    choices = {d: tuple(found) for d, found in usable.items()}
    cost = {
        d: _cost_table(found, rows, blocked, may_reduce=not with_times)
        for d, found in choices.items()
    }
    # In a reduced table the first choice stands for the best one of its degree;
    # ``_with_best_choices`` finds which that is.
    choices = {
        d: found if len(cost[d]) == len(found) else found[:1] for d, found in choices.items()
    }
    problem = SearchProblem(
        cluster, num_layers, choices, cost, whole_nodes, any_divisor, memory_limit_bytes
    )
    if not with_times:
        return problem
    times = TimePredictor(profile, max(cluster.nodes))
    tables = {
        d: [times.table(choice, microbatch_size) for choice in found]
        for d, found in choices.items()
    }
    return replace(
        problem,
        seconds={
            d: np.stack([table.forward + table.backward for table in found])
            for d, found in tables.items()
        },
        update_seconds={
            d: np.stack([table.update for table in found]) for d, found in tables.items()
        },
        num_microbatches=num_microbatches,
    )


def _cost_table(
    choices: Sequence[StageChoice],
    rows: Callable[[StageChoice], np.ndarray],
    blocked: np.ndarray,
    may_reduce: bool,
) -> np.ndarray:
    """Bytes of every stage per choice; reduced to the best choice where all of them would not fit
    into memory comfortably."""
    first = rows(choices[0])
    reduce = may_reduce and len(choices) > 1 and first.nbytes * len(choices) > _LARGEST_TABLE_BYTES
    table = first.copy() if reduce else np.stack([first, *map(rows, choices[1:])])
    if reduce:
        for choice in choices[1:]:
            np.minimum(table, rows(choice), out=table)
        table = table[None]
    table[..., blocked] = NEVER
    return table


def _with_best_choices(
    stages: Sequence[PlacedStage], problem: SearchProblem, predictor: AdditivePredictor, plan: Plan
) -> tuple[StagePlan, ...]:
    """The stages of a plan, each with the best choice of its degree at its position, where the
    search looked at a reduced table."""
    resolved = []
    for s, (placed, stage) in enumerate(zip(stages, plan.stages, strict=True)):
        if len(problem.choices[placed.choice.num_devices]) > 1 or placed.choice.num_devices == 1:
            resolved.append(stage)
            continue

        def peak(choice: StageChoice, s: int = s, stage: StagePlan = stage) -> int:
            rows = predictor.peaks(
                choice, plan.microbatch_size, plan.schedule, plan.num_microbatches, plan.num_stages
            )
            return int(rows[min(plan.num_stages - s, len(rows)) - 1, stage.first, stage.stop])

        best = min(
            (
                c
                for c in predictor.profile.choices
                if _fits(c, stage, plan.microbatch_size)
                and predictor.can_predict(c, plan.microbatch_size)
            ),
            key=peak,
        )
        resolved.append(replace(stage, **asdict(best)))
    return tuple(resolved)


def _fits(choice: StageChoice, stage: StagePlan, microbatch_size: int) -> bool:
    return choice.num_devices == stage.num_devices and microbatch_size % choice.data_parallel == 0


def _choices(
    profile: Profile, mode: str, degrees: Collection[int], microbatch_size: int
) -> Sequence[StageChoice]:
    """The choices of a mode that the profile can predict; one that lacks a measurement is done
    without, as its warnings say."""
    if mode == "paper":
        known = _paper_predictor(profile).choices(degrees)
        return (
            [choice for choice in known if choice in profile.choices]
            if profile.measurements
            else known
        )
    if not profile.measurements and profile.paper is not None:
        raise ProfileError.of(
            "the profile holds executed runs of the paper's kind alone, which the default "
            "predictor cannot use; plan with --mode paper, or "
            "profile with --backend compile.",
            "profile-windows",
        )
    if not profile.failures:
        return profile.choices
    predictor = AdditivePredictor(profile)
    fitting = [
        choice
        for choice in profile.choices
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0
    ]
    known = tuple(choice for choice in fitting if predictor.can_predict(choice, microbatch_size))
    if fitting and not known:
        predictor.table(fitting[0], microbatch_size)  # raises, and says what is missing
    return known


def _default_rows(
    profile: Profile,
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    max_stages: int,
    least: bool = False,
):
    predictor = AdditivePredictor(profile)
    return lambda choice: predictor.peaks(
        choice, microbatch_size, schedule, num_microbatches, max_stages, least=least
    )


def _paper_predictor(profile: Profile) -> PaperPredictor:
    if profile.paper is None:
        raise ProfileError.of(
            "the profile has no runs of the paper's kind; make it with capture profile --mode "
            "paper.",
            "profile-paper",
        )
    return PaperPredictor(PaperStatistics.from_json(profile.paper))


def _paper_rows(profile: Profile, num_microbatches: int):
    predictor = _paper_predictor(profile)

    def rows(choice: StageChoice) -> np.ndarray:
        peaks = predictor.peaks(choice, num_microbatches)
        return np.where(np.isnan(peaks), NEVER, np.ceil(np.nan_to_num(peaks))).astype(np.int64)[
            None
        ]

    return rows


def _blocked(num_layers: int, merge: int | None, alone: np.ndarray) -> np.ndarray:
    """Stages that cannot be: empty ones, and those that cut a merged layer.

    Args:
        merge: Layers that the merger leaves.
        alone: Bytes of every stage on the fewest devices, with one micro-batch in flight: M_i and
            M_a are read from it.
    """
    blocked = np.tri(num_layers, num_layers + 1, dtype=bool)
    if merge is not None:
        windows = [(first, first + n) for n in (1, 2) for first in range(num_layers - n + 1)]
        statistics = layer_statistics(
            {window: int(alone[window]) for window in windows if alone[window] < NEVER}, num_layers
        )
        bounds = {first for first, _ in merged_layers(statistics, merge)} | {num_layers}
        inside = np.array([cut not in bounds for cut in range(num_layers + 1)])
        blocked |= inside[:num_layers, None] | inside[None, :]
    return blocked


def plan_of_stages(
    stages: Sequence[PlacedStage],
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
) -> Plan:
    """A plan from placed stages."""
    return Plan(
        cluster=cluster,
        num_layers=profile.graph.num_layers,
        stages=tuple(
            StagePlan(
                (stage.first, stage.stop - 1),
                tuple(range(stage.start_device, stage.stop_device)),
                **asdict(stage.choice),
            )
            for stage in stages
        ),
        global_batch_size=global_batch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        auto_layers=profile.auto_layers,
        tensor_parallel_rule=profile.tensor_parallel_rule,
        model_hash=profile.model_hashes.get(global_batch_size // num_microbatches, ""),
        workload=profile.workload,
    )


def baseline_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
    weigh: str = "flops",
) -> Plan:
    """Stages of one device (of a node where layers are too few) with equal FLOPs, parameters or
    layers, and their prediction.

    Args:
        weigh: ``"flops"``, ``"params"`` or ``"layers"``.
    """
    graph = profile.graph
    weights = {
        "flops": [layer.flops for layer in graph.layers],
        "params": [sum(graph.params[p].size for p in layer.params) for layer in graph.layers],
        "layers": [1] * graph.num_layers,
    }[weigh]
    microbatch_size = global_batch_size // num_microbatches
    fitting = [
        choice
        for choice in sorted(profile.choices, key=lambda c: (c.num_devices, c.tensor_parallel))
        if cluster.num_devices % choice.num_devices == 0
        and cluster.num_devices // choice.num_devices <= graph.num_layers
        and microbatch_size % choice.data_parallel == 0
        and all(size % choice.num_devices == 0 for size in cluster.nodes)
    ]
    if not fitting:
        raise PlanError.of(
            f"no profiled degree divides the nodes of cluster {cluster} into at most "
            f"{graph.num_layers} stages.",
            "baseline-degree",
        )
    stages = fixed_degree_plan(cluster, weights, fitting[0])
    plan = plan_of_stages(stages, profile, cluster, global_batch_size, num_microbatches, schedule)
    return plan.with_(prediction=predict_plan(profile, plan).to_json())


def _why(
    result: SearchResult, prediction: Prediction, problem: SearchProblem, profile: Profile
) -> dict[str, Any]:
    stage_id = max(range(len(result.stages)), key=lambda s: prediction.stages[s].peak_bytes)
    stage, predicted = result.stages[stage_id], prediction.stages[stage_id]
    largest = max(predicted.parts_bytes, key=lambda category: predicted.parts_bytes[category])
    count = f"{len(result.stages)} stage{'s' * (len(result.stages) > 1)}"
    if result.step_seconds is None:
        proof = (
            "no plan of this space needs less" if result.optimal else "the search is not a proof"
        )
        proof += f" (tie-break: {result.tie_break})"
    else:
        better = (
            "no plan that fits"
            if problem.memory_limit_bytes is not None
            else "no plan of this space"
        )
        proof = f"{better} is faster by the model of times"
        proof += "" if result.optimal else f", or at most {result.bound_fraction:.1%} faster"
    return {
        "summary": f"{count}; the peak is {predicted.peak_bytes:,} bytes on stage {stage_id} (layers "
        f"{stage.first} to "
        f"{stage.stop - 1}), most of it {largest}; {proof}.",
        "bottleneck_stage": stage_id,
        "bottleneck_category": largest,
        "num_choices": len({choice for choices in problem.choices.values() for choice in choices}),
    }


def _infeasible(result: SearchResult) -> dict[str, Any]:
    why = result.why
    assert why is not None, "an infeasible result says why"
    return {
        "code": why.code,
        "summary": why.message,
        "memory_limit_bytes": why.memory_limit_bytes,
        "least_peak_bytes": why.least_peak_bytes,
        "stage_id": why.stage_id,
    }
