"""The question of a profile: what is measured, for which cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from capture.errors import ProfileError, TargetError, Violation
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.model.workload import OfWorkload, WorkloadProtocol, WorkloadSpec
from capture.options import Asked
from capture.plan.choices import (
    REMAT_TEXT,
    Remat,
    StageChoice,
    is_remat,
    measured_choices,
    num_full_layers,
)
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.space import StageSpace
from capture.plan.stages import Plan, TensorParallelRule
from capture.profiler.windows import DEFAULT_NEIGHBOURS, profiled_microbatch_sizes
from capture.registered import REGISTERED

DEFAULT_CALIBRATION_PLANS = 12
BACKENDS = ("compile", "run", "alpa")
#: Fields that are numbers, and the least that each may be.
_LEAST = {"microbatch_size": 1, "num_neighbours": 1, "calibration_plans": 0, "repeats": 1}
#: Those that execute the paper's profiling runs.
EXECUTING = ("run", "alpa")


@dataclass(frozen=True)
class ProfileQuestion(OfWorkload):
    """The question of a profile: a model's layers, for every stage that the cluster may have.

    Attributes:
        workload: The task, or its name; by name it is measured in worker processes.
        cluster: Decides the degrees to profile.
        microbatch_size: Examples in a micro-batch over all replicas; half of it is profiled too.
        backend: compile compiles layer windows for the target and runs nothing; run executes the
            paper's profiling runs here, and alpa has them executed by Alpa on its Ray cluster: such
            a profile serves the paper's mode alone. In Python ``"compile:TARGET"`` names another
            target for the cluster.
        num_layers: Layers of nearly equal work into which the model is cut (default: at the model's
            marks; without marks a number is chosen, and said).
        unmarked_layers: Layers of a model without marks; None: as many as are sensible
            (``capture.tracing.cut.layers_without_marks``).
        tensor_parallel_rule: How parameters are split.
        remat: What stages recompute. Left out, ``cheap``; beside the paper's runs ``none``, as in
            the paper.
        shard_optimizer: Split optimizer state over data-parallel replicas (ZeRO-1).
        shard_params: Let stages also split parameters, gradients and optimizer state over replicas
            where that is better (FSDP, ZeRO-3).
        sequence_parallel: Let stages with tensor parallelism also split the activations between its
            products, along the sequence or another dimension that operations keep apart, where that
            is better.
        splits_backward: Also split backward passes, for the schedules that have them.
        choices: What stages may have, instead of all data- and tensor-parallel degree
            pairs that fit the cluster.
        space: Submeshes of stages, and so of the windows.
        num_neighbours: Most neighbours of M_a: how long the windows are.
        calibration_plans: Random plans that calibrate the interval; 0 leaves it wide.
        paper: (schedule, number of micro-batches) to make the paper's profiling runs as well;
            needed with ``"run"`` and ``"alpa"``.
        memory_limit_bytes: With ``"run"``: a run that needs more on a device is not made, and named
            as failed.
        repeats: With --backend run: steps measured in every run; the largest peaks count.
        alpa_python: The interpreter of Alpa's environment, for --backend alpa.

    Raises:
        TargetError: ``target-unknown`` for another backend.
        ProfileError: ``profile-backend`` for what the backend has no use for, or without what it
            needs; ``profile-remat`` for an unknown policy, or several in the paper's runs;
            ``profile-question`` for numbers that are too small.
    """

    workload: WorkloadProtocol | WorkloadSpec
    cluster: Cluster
    microbatch_size: int
    backend: Annotated[str, Asked(choices=BACKENDS)] = BACKENDS[0]
    num_layers: Annotated[int | None, Asked(metavar="L")] = None
    unmarked_layers: int | None = None
    tensor_parallel_rule: Annotated[TensorParallelRule, Asked()] = "auto"
    remat: tuple[Remat, ...] = ()
    shard_optimizer: Annotated[bool, Asked()] = False
    shard_params: Annotated[bool, Asked()] = False
    sequence_parallel: Annotated[bool, Asked()] = False
    splits_backward: bool = False
    choices: tuple[StageChoice, ...] | None = None
    space: StageSpace = StageSpace()
    num_neighbours: Annotated[int, Asked("neighbours", "N", least=1)] = DEFAULT_NEIGHBOURS
    calibration_plans: Annotated[int, Asked(metavar="P", least=0)] = DEFAULT_CALIBRATION_PLANS
    paper: tuple[str, int] | None = None
    memory_limit_bytes: int | None = None
    repeats: Annotated[int, Asked(metavar="N", least=1)] = 1
    alpa_python: Annotated[str | None, Asked(metavar="PATH", in_files=False)] = None

    def __post_init__(self) -> None:
        usual: Remat = "none" if self.paper is not None else "cheap"
        object.__setattr__(self, "remat", tuple(self.remat) or (usual,))
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
        kind, _, target = self.backend.partition(":")
        if kind == "compile" and target:
            object.__setattr__(self, "backend", kind)
            object.__setattr__(self, "cluster", replace(self.cluster, target=target))
        if self.backend not in BACKENDS:
            raise TargetError.of(
                f"backend={self.backend!r} is unknown; choose compile, compile:TARGET, run or "
                "alpa.",
                "target-unknown",
            )
        ProfileError.check(self._violations())

    @classmethod
    def of_plan(cls, plan: Plan, workload: WorkloadProtocol | WorkloadSpec) -> ProfileQuestion:
        """Return the question that profiles the stages of one plan, at its micro-batch size."""
        return cls(
            workload,
            plan.cluster,
            plan.microbatch_size,
            num_layers=plan.num_layers if plan.auto_layers else None,
            unmarked_layers=plan.num_layers,
            tensor_parallel_rule=plan.tensor_parallel_rule,
            choices=tuple(sorted({stage.choice for stage in plan.stages})),
            splits_backward=plan.schedule_table.splits_backward,
        )

    @classmethod
    def of_profile(
        cls, profile: Profile, cluster: Cluster, workload: WorkloadProtocol | WorkloadSpec
    ) -> ProfileQuestion:
        """Return the question for a model cut into layers and split as in a profile."""
        return cls(
            workload,
            cluster,
            profile.graph.microbatch_size,
            num_layers=profile.graph.num_layers if profile.auto_layers else None,
            tensor_parallel_rule=profile.tensor_parallel_rule,
        )

    def _alpa_violations(self, code: str) -> Iterator[Violation]:
        """Yield what Alpa decides itself, and what it needs."""
        if self.backend == "alpa" and self.tensor_parallel_rule != "auto":
            yield Violation(
                "Alpa decides itself how to split parameters; leave out "
                f"tensor_parallel_rule={self.tensor_parallel_rule!r}.",
                code,
            )
        if (self.backend == "alpa") != (self.alpa_python is not None):
            yield Violation(
                f"backend={self.backend!r} came with alpa_python={self.alpa_python!r}; the "
                "interpreter of Alpa's environment (--alpa-python) belongs to backend='alpa', "
                "which needs it.",
                code,
            )

    def _paper_violations(self) -> Iterator[Violation]:
        """Yield what the profiling runs of the paper's mode do not have."""
        if self.paper is None:
            return
        if self.paper[0] not in PLAIN_SCHEDULES:
            yield Violation(
                f"the paper's profiling runs have stages on devices of their own and whole "
                f"backward passes; paper={self.paper!r} names schedule {self.paper[0]}, give one "
                f"of {', '.join(PLAIN_SCHEDULES)}.",
                "plan-schedule",
            )
        if any(map(num_full_layers, self.remat)):
            yield Violation(
                f"remat={self.remat!r}: in the paper's runs all layers recompute the same; name "
                "one policy.",
                "profile-remat",
            )
        if len(self.remat) > 1:
            yield Violation(
                "--remat auto: the paper's runs recompute the same in every stage; name one "
                "policy.",
                "profile-remat",
            )

    def _violations(self) -> Iterator[Violation]:
        executes, code = self.backend in EXECUTING, "profile-backend"
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                yield Violation(
                    f"{name}={getattr(self, name)} must be at least {least}.", "profile-question"
                )
        if unknown := [policy for policy in self.remat if not is_remat(policy)]:
            yield Violation(
                f"remat={self.remat!r}: {unknown[0]!r} is unknown; give some of "
                f"{REMAT_TEXT}, as a tuple.",
                "profile-remat",
            )
        yield from self._paper_violations()
        if executes and self.paper is None:
            yield Violation(
                f"backend={self.backend!r} makes the paper's profiling runs: give paper=(schedule, "
                "num_microbatches), or --mode paper.",
                code,
            )
        if executes and (
            self.choices is not None
            or self.shard_params
            or self.sequence_parallel
            or self.splits_backward
        ):
            yield Violation(
                "choices, measurements, shard_params, sequence_parallel and split backward passes "
                f"are of compiled windows; backend={self.backend!r} has none.",
                code,
            )
        if executes and (self.num_neighbours, self.calibration_plans) != (
            DEFAULT_NEIGHBOURS,
            DEFAULT_CALIBRATION_PLANS,
        ):
            yield Violation(
                "neighbours and calibration plans are of compiled windows; leave them out with "
                f"backend={self.backend!r}.",
                code,
            )
        yield from self._alpa_violations(code)
        if self.backend != "run" and self.memory_limit_bytes is not None:
            yield Violation(
                f"memory_limit_bytes={self.memory_limit_bytes} is the limit of runs that are made "
                f"here, and backend={self.backend!r} makes none; use backend='run', or leave it "
                "out.",
                code,
            )
        if self.backend != "run" and self.repeats != 1:
            yield Violation(
                f"repeats={self.repeats} is of runs that are made here; use backend='run', or "
                "leave it out.",
                code,
            )

    @property
    def executes(self) -> bool:
        """Whether the paper's profiling runs are executed."""
        return self.backend in EXECUTING

    @property
    def target_name(self) -> str:
        """The target that windows are profiled for, by name."""
        return self.cluster.target

    @property
    def process_needs(self) -> tuple[int, str]:
        """The devices of a process that measures, and their platform."""
        if self.executes:
            most: int = REGISTERED["profile of the paper"]["most devices"](self.cluster.num_devices)
            return most, "cpu"
        return self.cluster.process_needs

    @cached_property
    def stage_choices(self) -> tuple[StageChoice, ...]:
        """The choices that a stage may have: those given, else all that fit the cluster."""
        if self.choices is not None:
            return self.choices
        return tuple(
            self.space.choices(
                self.cluster,
                self.microbatch_size,
                self.remat,
                shard_optimizer=self.shard_optimizer,
                shard_params=self.shard_params,
                sequence_parallel=self.sequence_parallel,
            )
        )

    @property
    def profiled_choices(self) -> tuple[StageChoice, ...]:
        """The choices under which windows are measured; mixtures follow from their parts."""
        return measured_choices(self.stage_choices)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that are profiled, ascending."""
        return profiled_microbatch_sizes(self.microbatch_size, self.stage_choices)
