"""What of a question is left to the search: whatever an option of ``capture plan`` does not say,
where seconds are known to choose by; and, with ``--fix``, what of a saved plan is not searched
again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capture.cli import asked
from capture.cli import options as shared
from capture.errors import PlanError, Violation
from capture.machine.target import Target
from capture.model.workload import WorkloadSpec
from capture.options import Option
from capture.plan.files import traced_for
from capture.plan.kinds import load_plan, of_stages
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan
from profiling_runs.measurements import Measurements
from profiling_runs.question import ProfileQuestion
from recommender.fixed import DECISIONS, FixedPlan
from recommender.whole import OFFLOADS, WholeQuestion


def _decisions(text: str) -> tuple[str, ...]:
    """Read decisions with commas between them: the type of ``--search``.

    Example:
        >>> _decisions("remat,stages")
        ('remat', 'stages')
    """
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in DECISIONS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no decision of a plan; choose of {', '.join(DECISIONS)}. "
            "[option-search]"
        )
    return names


FIXED = (
    Option(
        "fix",
        "keep what this plan decides, but for what --search or another option names (file, or "
        "file:NAME for a plan of its front)",
        read=Path,
        metavar="PLAN",
    ),
    Option(
        "search",
        f"with --fix: decisions of the plan to search again, of {', '.join(DECISIONS)}",
        read=_decisions,
        metavar="NAME,...",
    ),
)
OFFLOAD = (
    Option(
        "offload",
        "what all stages keep in the memory of their host (default: searched for speed, where that "
        "memory is known)",
        choices=tuple(OFFLOADS),
    ),
    shared.HOST_MEMORY,
)
#: The decision that an option names, whatever its value.
_NAMED = {
    "microbatches": "microbatches",
    "try_microbatches": "microbatches",
    "schedule": "schedule",
    "remat": "remat",
    "shard_optimizer": "sharding",
    "shard_params": "sharding",
    "sequence_parallel": "sequence",
}


@dataclass(frozen=True)
class Fixed:
    """A saved plan, and the decisions of it that stay."""

    path: Path
    plan: Plan
    decisions: tuple[str, ...]

    def __str__(self) -> str:
        searched = ", ".join(name for name in DECISIONS if name not in self.decisions) or "nothing"
        kept, cluster = ", ".join(self.decisions) or "nothing", self.plan.cluster
        where = f"{self.path}, of {cluster} {cluster.target}"
        return f"kept of {where}: {kept}; searched or named: {searched}"

    @property
    def kept(self) -> FixedPlan:
        """The decisions and stages of the plan as searches read them."""
        return FixedPlan(self.plan.stages, self.decisions)

    def check_model(self, spec: WorkloadSpec | None, measurements: Measurements) -> None:
        """Refuse a plan of another model.

        Raises:
            PlanError: ``plan-other-model``.
        """
        backend, size = measurements.backend, self.plan.microbatch_size
        traced_for(self.plan, spec, lambda: backend.traced(size), lambda traced: traced.graph)


def take_plan(options: argparse.Namespace) -> Fixed | None:
    """Give options that were left out what the plan of ``--fix`` has; None without one.

    Raises:
        PlanError: ``plan-fix`` for all options that contradict it, and the codes of ``load_plan``.
    """
    if options.fix is None:
        if options.search is not None:
            raise PlanError.of(
                f"--search {','.join(options.search)} names what is not kept of a plan; add --fix "
                "PLAN.",
                "plan-fix",
            )
        return None
    plan = of_stages(load_plan(options.fix))
    if len({"optimizer" in stage.offload for stage in plan.stages}) > 1:
        raise PlanError.of(
            f"{options.fix}: some of its stages keep optimizer state on their hosts, and a search "
            "has all of them do so, or none; change the plan.",
            "plan-fix",
        )
    named = {of for name, of in _NAMED.items() if getattr(options, name) is not None}
    open_ = {*named, *(options.search or ())}
    fixed = Fixed(options.fix, plan, tuple(name for name in DECISIONS if name not in open_))
    _default(options, fixed)
    PlanError.check(_contradictions(options, fixed))
    return fixed


def _default(options: argparse.Namespace, fixed: Fixed) -> None:
    """Set options that the user left out to what the plan has."""
    plan, default = fixed.plan, options.parser.get_default
    offload = {way for stage in plan.stages for way in stage.offload}
    taken = {
        "offload": next(name for name, ways in OFFLOADS.items() if {*ways} == offload),
        "cluster": str(plan.cluster),
        "target": plan.cluster.target,
        "global_batch": plan.global_batch_size,
        "num_layers": plan.num_layers if plan.auto_layers else None,
        "tensor_parallel_rule": plan.tensor_parallel_rule,
        "any_divisor": any(s.num_devices.bit_count() > 1 for s in plan.stages),
        "microbatches": plan.num_microbatches if "microbatches" in fixed.decisions else None,
        "schedule": plan.schedule if "schedule" in fixed.decisions else None,
    }
    for name, value in taken.items():
        if getattr(options, name) == default(name):
            setattr(options, name, value)


def _contradictions(options: argparse.Namespace, fixed: Fixed) -> Iterator[Violation]:
    plan, search = fixed.plan, options.search or ()
    for name in ("microbatches", "schedule", "remat"):
        value = getattr(options, name)
        if name in search and value not in (None, shared.AUTO):
            yield Violation(
                f"--{name} {value} says what --search {name} searches; leave out one of them.",
                "plan-fix",
            )
    others = {"--smallest-cluster": options.smallest_cluster}
    others["--objective cost"] = options.objective == "cost"
    for flag in (flag for flag, is_asked in others.items() if is_asked):
        yield Violation(
            f"{flag} asks for other clusters than that of {fixed.path}; leave it out, or --fix.",
            "plan-fix",
        )
    kept = fixed.decisions
    if "microbatches" in kept and options.global_batch % plan.num_microbatches:
        yield Violation(
            f"--global-batch {options.global_batch} is not divisible by the {plan.num_microbatches}"
            f" micro-batches of {fixed.path}; search them again: --search microbatches.",
            "plan-fix",
        )
    if "schedule" in kept and not SCHEDULES[plan.schedule].is_plain:
        yield Violation(
            f"{fixed.path} has the schedule {plan.schedule}, whose search places groups of stages "
            "and keeps none of a plan; name another: --schedule 1f1b.",
            "plan-fix",
        )


def close(options: argparse.Namespace, defaults: Sequence[Option]) -> None:
    """Give options that were left open their defaults."""
    for option in defaults:
        if getattr(options, option.name) is None:
            setattr(options, option.name, option.default)


def whole_question(options: argparse.Namespace, fixed: Fixed | None = None) -> WholeQuestion | None:
    """Return the whole question of the options as they were given, with what is fixed. None where
    the target's speed is not known: nothing but memory would decide, which asks for as many
    micro-batches as there are examples.

    Raises:
        PlanError: ``plan-fix`` where something is fixed and the speed is not known, and the codes
            of ``WholeQuestion``.
    """
    said = vars(options)
    cluster, counts = asked.read_cluster(said), options.microbatches
    if Target.load(cluster.target).rates is None:
        if fixed is not None:
            raise PlanError.of(
                f"--fix searches for speed, and the target {cluster.target!r} has no rates; name "
                "an accelerator, such as --target h100.",
                "plan-fix",
            )
        return None
    if counts is not None and options.try_microbatches not in (None, (counts,)):
        raise PlanError.of(
            f"--microbatches {counts} is what --try-microbatches chooses; leave out one of them.",
            "plan-batch",
        )
    if options.largest_batch and counts is None:
        counts = shared.MICROBATCHES.default  # with enough of them any batch fits
    if options.global_batch is None or counts is not None:
        num = shared.MICROBATCHES.default if counts is None else counts
        asked_for = {**said, "microbatches": num}
        global_batch, _ = asked.read_batch(asked_for)
    else:
        global_batch = options.global_batch
    return WholeQuestion(
        cluster,
        global_batch,
        options.objective or "throughput",
        options.memory,
        options.try_microbatches or (None if counts is None else (counts,)),
        options.schedule,
        None if options.remat == shared.AUTO else options.remat,
        options.shard_optimizer,
        options.shard_params,
        options.sequence_parallel,
        options.whole_nodes,
        options.any_divisor,
        (*shared.given(options), *(fixed.decisions if fixed else ())),
        None if fixed is None else fixed.kept,
        options.offload,
        options.host_memory,
    )


def of_whole(question: ProfileQuestion, whole: WholeQuestion) -> ProfileQuestion:
    """Return the question of what is measured of a model for the whole question, at its largest
    micro-batches."""
    size = whole.question().microbatch_size
    return replace(
        question, microbatch_size=size, choices=tuple(whole.choices(size)), space=whole.space
    )
