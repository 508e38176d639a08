"""The whole question: what is not said is searched, and the answer says what was said.

A plan of the space has any number of micro-batches that the batch has, and a schedule; its stages
have any degrees, inside nodes or over whole ones, and each what it recomputes and splits. It is
searched in parts, each of one number of micro-batches and one schedule
(``recommender.capture.refine``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.rates import ASSUMED
from capture.machine.target import Target
from capture.plan.choices import (
    REMAT_POLICIES,
    StageChoice,
    with_sequence_parallel,
    with_sharded_params,
)
from capture.plan.schedule import SCHEDULES, make_schedule
from capture.plan.space import StageSpace
from capture.plan.stage import Offload, Stage
from capture.quantities import counted
from recommender.fixed import FixedPlan
from recommender.question import PlanQuestion

#: What all stages keep on their hosts, by the name of ``--offload``.
OFFLOADS: Mapping[str, tuple[Offload, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "both": ("activations", "optimizer"),
}
#: Of one stage per group of devices, none holds less or is faster.
BEST_PLAIN = "1f1b"


@dataclass(frozen=True)
class WholeQuestion:
    """The question of a plan in which every decision may be left to the search (None).

    Attributes:
        cluster, global_batch_size, memory_limit_bytes, objective, chosen, fixed: As of
            ``PlanQuestion``.
        counts: Numbers of micro-batches.
        schedule: Of every plan.
        remat: Of every stage.
        shard_optimizer: Whether all replicas split the optimizer state (ZeRO 1).
        shard_params: Whether they may split parameters and gradients, too (ZeRO 3); left to the
            search only where the optimizer state may be split.
        sequence_parallel: Whether stages may split activations along the sequence.
        whole_nodes: Whether stages may take several whole nodes.
        any_divisor: Whether degrees may be no powers of two.
        offload: What all stages keep on their hosts, of ``OFFLOADS``.
        host_memory_bytes: The memory of a node's host; None for what the target says, if it does.

    Raises:
        PlanError: the codes of ``PlanQuestion``; ``plan-batch`` where no number of micro-batches
            is left; ``plan-fix`` where no plan has what is fixed; ``plan-offload`` for offload to
            hosts whose memory is not known, or with a schedule whose plans have none.
    """

    cluster: Cluster
    global_batch_size: int
    objective: str = "throughput"
    memory_limit_bytes: int | None = None
    counts: tuple[int, ...] | None = None
    schedule: str | None = None
    remat: str | None = None
    shard_optimizer: bool | None = None
    shard_params: bool | None = None
    sequence_parallel: bool | None = None
    whole_nodes: bool | None = None
    any_divisor: bool = False
    chosen: tuple[str, ...] = ()
    fixed: FixedPlan | None = None
    offload: str | None = None
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if OFFLOADS[self.offload or "none"] and self.host_bytes is None:
            raise PlanError.of(
                f"--offload {self.offload} needs the memory of the host, and the target "
                f"{self.cluster.target} does not say it; give --host-memory, such as 1TB.",
                "plan-offload",
            )
        if OFFLOADS[self.offload or "none"] and not SCHEDULES[self.schedules[0]].is_plain:
            raise PlanError.of(
                f"--offload {self.offload} is searched with plain schedules, and --schedule "
                f"{self.schedule} is none; give --schedule {BEST_PLAIN}, or leave out --offload.",
                "plan-offload",
            )
        if self.host_memory_bytes is not None and self.host_memory_bytes < 1:
            raise PlanError.of(
                f"--host-memory {self.host_memory_bytes} is no memory; give more, or leave it out.",
                "plan-offload",
            )
        if self.global_batch_size < 1:
            raise PlanError.of(
                f"global_batch_size={self.global_batch_size} leaves nothing to train on; give 1 or "
                "more.",
                "plan-batch",
            )
        for number in self.microbatches:
            self.question(number)
        PlanError.check(_beyond(self))

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that are searched, ascending."""
        if self.counts is not None:
            return self.counts
        batch, fixed = self.global_batch_size, self.fixed
        every = tuple(m for m in range(1, batch + 1) if batch % m == 0)
        if fixed is None:
            return every
        possible = (m for m in every if all(self.may_have(s, m, fixed) for s in fixed.stages))
        return tuple(possible) or every[:1]

    def freed(self, decision: str) -> WholeQuestion:
        """Return the question in which one more decision of the fixed plan is searched."""
        assert self.fixed is not None, "there is one"
        counts = None if decision == "microbatches" else self.counts
        schedule = None if decision == "schedule" else self.schedule
        fixed = self.fixed.without(decision)
        return replace(self, counts=counts, schedule=schedule, fixed=fixed)

    def of_sizes(self, takes: Callable[[int], bool]) -> WholeQuestion:
        """Return the question without numbers of micro-batches, unless asked for, whose sizes the
        model does not take: those that are no multiples of the smallest that it takes.

        Args:
            takes: Whether the model takes micro-batches of a size.
        """
        sizes = {self.global_batch_size // m: m for m in reversed(self.microbatches)}
        unit = None if self.counts else next(filter(takes, sizes), None)
        if unit is None:
            return self
        return replace(self, counts=tuple(sorted(m for n, m in sizes.items() if n % unit == 0)))

    @property
    def space(self) -> StageSpace:
        several = len(self.cluster.nodes) > 1
        return StageSpace(
            several if self.whole_nodes is None else self.whole_nodes, self.any_divisor
        )

    @property
    def schedules(self) -> tuple[str, ...]:
        """The pipeline schedules that are searched, the plain one first."""
        # A plan that is fixed has no stages that share devices, nor has one with offload.
        is_bound = self.fixed is not None or OFFLOADS[self.offload or "none"]
        if self.schedule is not None or is_bound:
            return (self.schedule or BEST_PLAIN,)
        return (BEST_PLAIN, *(name for name, kind in SCHEDULES.items() if not kind.is_plain))

    @property
    def host_bytes(self) -> int | None:
        """The memory of a node's host; None if it is not known."""
        return known_host_bytes(self.cluster, self.host_memory_bytes)

    @property
    def offloads(self) -> tuple[tuple[Offload, ...] | None, ...]:
        """What stages of plain schedules keep on their hosts, of all parts to search; None in the
        place of what would be searched if the memory of the hosts were known."""
        if self.offload is not None or self.objective not in ("throughput", "cost"):
            return (OFFLOADS[self.offload or "none"],)
        return (None,) if self.host_bytes is None else tuple(OFFLOADS.values())

    def parts(self, question: PlanQuestion, schedule: str) -> Iterator[PlanQuestion]:
        """Yield a question of one number of micro-batches with a schedule, if that is plain once
        per kind of offload that may move something."""
        if not SCHEDULES[schedule].is_plain:
            yield replace(question, schedule=schedule)
            return
        # Where nothing rests in so many stages, nothing does in more.
        num, ways = min(self.cluster.num_devices, 4), self.offloads
        can_rest = make_schedule(schedule, num, question.num_microbatches).resting
        for way in ways:
            if can_rest or len(ways) == 1 or "activations" not in (way or ()):
                host = self.host_bytes if any(ways) else None
                yield replace(question, schedule=schedule, offload=way, host_memory_bytes=host)

    def question(
        self, num_microbatches: int | None = None, schedule: str | None = None
    ) -> PlanQuestion:
        """Return the question of one part; by default the part with the largest micro-batches and
        the plain schedule."""
        return PlanQuestion(
            self.cluster,
            self.global_batch_size,
            num_microbatches or self.microbatches[0],
            schedule or self.schedules[0],
            self.memory_limit_bytes,
            self.objective,
            space=self.space,
            remat=self.remat,
            chosen=self.chosen,
            fixed=self.fixed,
            offload=OFFLOADS[self.offload or "none"],
            host_memory_bytes=self.host_bytes if self.offload else None,
        )

    def choices(self, microbatch_size: int) -> list[StageChoice]:
        """Return the choices that stages may have at a micro-batch size, as far as the fixed plan
        leaves them open; no mixtures but the one that is named."""
        found, fixed = self._all_choices(microbatch_size), self.fixed
        return [each for each in found if fixed is None or fixed.is_measured_for(each)]

    def _all_choices(self, microbatch_size: int) -> list[StageChoice]:
        """Return the choices of stages at a micro-batch size, whatever the fixed plan says."""
        remats = REMAT_POLICIES if self.remat is None else (self.remat,)
        found = [
            choice
            for choice in self.space.choices(self.cluster, microbatch_size, remats)
            if choice.tensor_parallel <= max(self.cluster.nodes)
        ]
        sharded = [replace(c, shard_optimizer=True) for c in found if c.data_parallel > 1]
        if self.shard_optimizer:
            found = [c for c in found if c.data_parallel == 1] + sharded
        elif self.shard_optimizer is None:
            found += sharded
        if self.shard_params or (self.shard_params is None and self.shard_optimizer is not False):
            found = list(dict.fromkeys(with_sharded_params(found)))
        if self.sequence_parallel is not False:
            found = with_sequence_parallel(found)
        return found

    def may_have(self, stage: Stage, num_microbatches: int, fixed: FixedPlan) -> bool:
        """Return whether a plan with so many micro-batches may have a stage of the fixed plan."""
        alone = replace(fixed, stages=(stage,))
        return any(
            choice.num_devices == stage.num_devices or "stages" not in fixed.decisions
            for choice in self._all_choices(self.global_batch_size // num_microbatches)
            if alone.is_measured_for(choice)
        )

    def left_out(self) -> Iterator[tuple[str, str]]:
        """Yield what the search leaves out though nobody excluded it, each with the reason."""
        if self.schedule is None:
            yield "GPipe", "as fast as 1F1B, and holds no less"
            others = [name for name, kind in SCHEDULES.items() if not kind.is_plain]
            if len(self.schedules) == 1:
                yield ", ".join(others), "no stages of a plan that is fixed share devices"
        if any(self.offloads):
            yield "offload with other schedules than 1F1B", "they hold less of what it moves"
        if max(self.cluster.nodes) < self.cluster.num_devices:
            yield "tensor parallelism over several nodes", "its sums wait for the slow links"
        degrees_are_fixed = self.fixed is not None and "degrees" in self.fixed.decisions
        if not (self.any_divisor or degrees_are_fixed):
            yield "degrees that are no powers of two", "--any-divisor searches them"


def known_host_bytes(cluster: Cluster, given: int | None = None) -> int | None:
    """Return the memory of a node's host: as given, or as the target says; None if neither does."""
    known = Target.load(cluster.target).host.memory_bytes
    if given is not None or known.source.startswith(ASSUMED):
        return given
    return int(known.value) * min(cluster.nodes)


def _beyond(whole: WholeQuestion) -> Iterator[Violation]:
    """Yield violations for the stages of a fixed plan that no plan of the space has, with the
    decision that would have to be searched for them."""
    fixed = whole.fixed
    if fixed is None:
        return
    if "stages" in fixed.decisions and (said := _misplaced(whole, fixed.stages)):
        yield Violation(f"{said}; place stages again: --search stages,degrees.", "plan-fix")
        return
    for m, stage in product(whole.microbatches, fixed.stages):
        if not whole.may_have(stage, m, fixed):
            freed = (n for n in fixed.decisions if whole.may_have(stage, m, fixed.without(n)))
            name, size = next(freed, None), whole.global_batch_size // m
            given = f"{counted(m, 'micro-batch', 'micro-batches')} of {counted(size, 'example')}"
            yield Violation(
                f"{given} and what else is asked leave no stage with {stage.choice} (layers "
                f"{stage.first}-{stage.stop - 1} of the plan that is fixed); "
                f"{f'search it again: --search {name}' if name else 'leave out --fix'}.",
                "plan-fix",
            )


def _misplaced(whole: WholeQuestion, stages: Sequence[Stage]) -> str:
    """Return why stages, in their order, do not fill the cluster; empty if they do."""
    degrees, device = whole.space.degrees(whole.cluster), 0
    for s, stage in enumerate(stages):
        here = degrees[device] if device < len(degrees) else []
        if stage.devices != tuple(range(device, device + stage.num_devices)):
            return f"devices of stage {s} are not those behind the ones of the stage before"
        if stage.num_devices not in here:
            return f"{whole.cluster} has no {counted(stage.num_devices, 'device')} for stage {s}"
        device += stage.num_devices
    num = whole.cluster.num_devices
    return f"the stages take {device} of {num} devices" if device < num else ""
