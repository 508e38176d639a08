"""What a plan is asked for, and which searches answer what."""

from __future__ import annotations

from dataclasses import dataclass

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.plan.choices import REMAT_TEXT, Remat, is_remat
from capture.plan.schedule import SCHEDULES, schedule_violations
from capture.plan.space import StageSpace
from capture.plan.stages import batch_violations
from recommender.fixed import FixedPlan

#: Alpa's search (``capture.papers.alpa.autostage``): it has a space and a limit of its own, so it
#: is asked with the profile.
AUTOSTAGE = "autostage"
#: The least peak in compiled bytes, the fastest plan that fits, or the front of both, from bounds
#: and few compiles (``recommender.capture.refine``): it is asked without a profile.
BOUNDS_FIRST = "bounds-first"
#: What answers a question, as (objective, mode, algorithm). Of the entries that agree with what is
#: asked, the first is taken.
SEARCHES = (
    *(
        ("memory", mode, name)
        for mode in ("default", "paper")
        for name in ("minmax", "enumerate", "mcap", "mcap-bf")
    ),
    ("memory", "default", BOUNDS_FIRST),
    ("throughput", "default", "throughput"),
    ("throughput", "default", AUTOSTAGE),
    ("throughput", "default", BOUNDS_FIRST),
    ("pareto", "default", "throughput"),
    ("pareto", "default", BOUNDS_FIRST),
)
OBJECTIVES, MODES, SEARCH_NAMES = (
    tuple(dict.fromkeys(column)) for column in zip(*SEARCHES, strict=True)
)


@dataclass(frozen=True)
class PlanQuestion:
    """What a plan is asked for.

    Attributes:
        cluster: May be smaller or larger than the profiled one.
        global_batch_size, num_microbatches: Examples, and micro-batches, of a step.
        schedule: Of ``capture.plan.schedule.SCHEDULES``.
        memory_limit_bytes: Per device; a plan above it is a result, ``status == "infeasible"``.
            None takes what the target's devices can use (``DeviceMemory.usable_bytes``); virtual
            CPU devices have no limit.
        objective: ``"memory"``: least peak. ``"throughput"``: least step time within the limit.
            ``"pareto"``: the same plan, and the front of peak memory against step time in
            ``why.front``. The last two need a profile of an accelerator. None: that of the
            algorithm, ``"memory"`` first.
        mode: ``"default"``: data and tensor parallelism together, schedule-aware; ``"paper"``:
            either of them, the paper's predictor.
        algorithm: One of those that ``SEARCHES`` has for the objective and the mode; None takes the
            first of them.
        space: Submeshes of stages.
        merge_layers: Cut only between layers that the paper's layer merger leaves; None cuts
            anywhere.
        remat: What every stage recomputes; None: each whatever the profile knows, mixtures of
            ``"full"`` and ``"cheap"`` where it knows both.
        chosen: Names of options that the user gave; a proof says of the others that they are
            defaults.
        fixed: What stages have of a plan that is known; None for nothing.

    Raises:
        PlanError: ``plan-batch``, ``plan-schedule``, ``plan-remat``, ``plan-algorithm`` for options
            that the mode or Alpa's algorithm does not know, and the codes of ``search_of``; all at
            once.
    """

    cluster: Cluster
    global_batch_size: int
    num_microbatches: int
    schedule: str = "1f1b"
    memory_limit_bytes: int | None = None
    objective: str | None = None
    mode: str = "default"
    algorithm: str | None = None
    space: StageSpace = StageSpace()
    merge_layers: int | None = None
    remat: Remat | None = None
    chosen: tuple[str, ...] = ()
    fixed: FixedPlan | None = None

    def __post_init__(self) -> None:
        PlanError.check(self._violations())

    def _violations(self) -> list[Violation]:
        found = batch_violations(self.global_batch_size, self.num_microbatches)
        found += schedule_violations(self.schedule, 0, self.num_microbatches)
        try:
            search_of(self.objective, self.mode, self.algorithm)
        except PlanError as error:
            found += error.violations
        if self.remat is not None and not is_remat(self.remat):
            found.append(
                Violation(f"remat={self.remat!r} is unknown; give {REMAT_TEXT}.", "plan-remat")
            )
        kind = SCHEDULES.get(self.schedule)
        if kind is not None and not kind.is_plain:
            found += [
                Violation(
                    f"schedule={self.schedule!r} has a search of its own "
                    f"(recommender.capture.tables); leave out {name}.",
                    "plan-algorithm",
                )
                for name, given in (
                    ("algorithm", self.algorithm is not None),
                    ("mode", self.mode != "default"),
                    ("merge_layers", self.merge_layers is not None),
                )
                if given
            ]
        if self.algorithm == AUTOSTAGE:
            found += [
                Violation(
                    f"algorithm={AUTOSTAGE!r} searches Alpa's own space; leave out {name}.",
                    "plan-algorithm",
                )
                for name, given in (
                    ("merge_layers", self.merge_layers is not None),
                    ("any_divisor", self.space.any_divisor),
                    ("remat", self.remat is not None),
                )
                if given
            ]
        if self.mode == "paper" and self.remat is not None:
            found.append(
                Violation(
                    f"mode='paper' recomputes as its profile does; leave out {self.remat!r}.",
                    "plan-algorithm",
                )
            )
        return found

    @property
    def microbatch_size(self) -> int:
        """Examples in a micro-batch, over all replicas."""
        return self.global_batch_size // self.num_microbatches

    @property
    def search(self) -> tuple[str, str, str]:
        """The entry of ``SEARCHES`` that answers it: (objective, mode, algorithm)."""
        return search_of(self.objective, self.mode, self.algorithm)

    @property
    def limit_bytes(self) -> int | None:
        """The limit that is given, or that of the target; None without one."""
        memory = Target.load(self.cluster.target).memory
        return (
            memory.usable_bytes
            if self.memory_limit_bytes is None and memory
            else self.memory_limit_bytes
        )


def search_names(objective: str, mode: str = "default") -> tuple[str, ...]:
    """The algorithms for an objective and a mode, the default first.

    Example:
        >>> search_names("throughput")
        ('throughput', 'autostage', 'bounds-first')
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
