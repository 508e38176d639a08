"""The question of a plan of stages, and which searches answer what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.options import Asked
from capture.plan.choices import REMAT_TEXT, Remat, is_remat
from capture.plan.schedule import SCHEDULES, schedule_violations
from capture.plan.space import StageSpace
from capture.plan.stage import Offload
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
    ("cost", "default", BOUNDS_FIRST),
)
OBJECTIVES, MODES, SEARCH_NAMES = (
    tuple(dict.fromkeys(column)) for column in zip(*SEARCHES, strict=True)
)


@dataclass(frozen=True)
class PlanQuestion:
    """The question of a plan of stages: a cluster, a batch, a memory limit and a goal.

    Attributes:
        cluster: May be smaller or larger than the profiled one.
        global_batch_size: Examples in a step.
        num_microbatches: Micro-batches in a step, whose gradients are accumulated.
        schedule: Pipeline schedule; those behind gpipe and 1f1b put two stages on each group of
            devices, split backward passes, or both.
        memory_limit_bytes: Limit per device, such as 40GB (default: what the target can use); a
            plan above it is a result, infeasible (exit code 1).
        objective: Goal of the search. memory: lowest peak memory; throughput: shortest step that
            fits; pareto: that and the front of both; cost: least --price of a token, on as many of
            the cluster's devices as that takes. Times need an accelerator target (default:
            throughput where times are known, with the plan of lowest peak and one between; else
            memory, or that of --algorithm).
        mode: default: data and tensor parallelism together, schedule-aware; paper: either of them,
            the paper's predictor and space.
        algorithm: Search; autostage is Alpa's, for step time, on this cost model: the plan to
            compare with (default: the first that the objective and the mode have).
        space: Submeshes of stages.
        merge_layers: The paper's layer merger: cut between so many merged layers only.
        remat: What every stage recomputes; None: each whatever the profile knows, mixtures of
            ``"full"`` and ``"cheap"`` where it knows both.
        chosen: Names of options that the user gave; a proof says of the others that they are
            defaults.
        fixed: What stages have of a plan that is known; None for nothing.
        offload: Groups that every stage inside one node keeps in the memory of its host between
            their uses; None for nothing, though more would be searched if that memory were known.
        host_memory_bytes: The memory of a node's host, where plans with offload are searched.

    Raises:
        PlanError: ``plan-batch``, ``plan-schedule``, ``plan-remat``, ``plan-algorithm`` for options
            that the mode or Alpa's algorithm does not know, and the codes of ``search_of``; all at
            once.
    """

    cluster: Cluster
    global_batch_size: Annotated[int, Asked("global_batch", "B")]
    num_microbatches: Annotated[int, Asked("microbatches", "M")]
    schedule: Annotated[str, Asked(choices=tuple(SCHEDULES))] = "1f1b"
    memory_limit_bytes: Annotated[int | None, Asked("memory")] = None
    objective: Annotated[str | None, Asked(choices=OBJECTIVES)] = None
    mode: Annotated[str, Asked(choices=MODES)] = "default"
    algorithm: Annotated[str | None, Asked(choices=SEARCH_NAMES)] = None
    space: StageSpace = StageSpace()
    merge_layers: Annotated[int | None, Asked(metavar="L")] = None
    remat: Remat | None = None
    chosen: tuple[str, ...] = ()
    fixed: FixedPlan | None = None
    offload: tuple[Offload, ...] | None = ()
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        PlanError.check(self._violations())

    def _violations(self) -> list[Violation]:
        found = [
            *batch_violations(self.global_batch_size, self.num_microbatches),
            *schedule_violations(self.schedule, 0, self.num_microbatches),
        ]
        try:
            search_of(self.objective, self.mode, self.algorithm)
        except PlanError as error:
            found += error.violations
        if self.remat is not None and not is_remat(self.remat):
            found.append(
                Violation(f"remat={self.remat!r} is unknown; give {REMAT_TEXT}.", "plan-remat")
            )
        if self.schedule in SCHEDULES and not self.is_plain:
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
        """The examples in a micro-batch, over all replicas."""
        return self.global_batch_size // self.num_microbatches

    @property
    def is_plain(self) -> bool:
        """Whether the schedule is plain (``capture.plan.orders.ScheduleKind``)."""
        return SCHEDULES[self.schedule].is_plain

    def offload_of(self, num_devices: int) -> tuple[Offload, ...]:
        """Return what stages on so many devices keep on their host: nothing if they have several
        hosts."""
        return (self.offload or ()) if num_devices <= min(self.cluster.nodes) else ()

    @property
    def is_beside_offload(self) -> bool:
        """Whether plans with offload are searched beside these, which have none."""
        return self.offload == () and self.host_memory_bytes is not None

    @property
    def may_rest(self) -> bool:
        """Whether plans with offload are searched beside these, or would be if more were known."""
        return self.offload is None or self.is_beside_offload

    @property
    def search(self) -> tuple[str, str, str]:
        """The entry of ``SEARCHES`` that answers the question: (objective, mode, algorithm)."""
        return search_of(self.objective, self.mode, self.algorithm)

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit per device that is given, or that of the target; None without one."""
        memory = Target.load(self.cluster.target).memory
        return (
            memory.usable_bytes
            if self.memory_limit_bytes is None and memory
            else self.memory_limit_bytes
        )


def search_names(objective: str, mode: str = "default") -> tuple[str, ...]:
    """Return the algorithms for an objective and a mode, the default first.

    Example:
        >>> search_names("throughput")
        ('throughput', 'autostage', 'bounds-first')
    """
    return tuple(name for *of, name in SEARCHES if of == [objective, mode])


def search_of(objective: str | None, mode: str, algorithm: str | None) -> tuple[str, str, str]:
    """Return the entry of ``SEARCHES`` that is asked for; None leaves its part open.

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
