"""The one result type of every search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from capture.documents import fields_of
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import FrontPoint, Why
from recommender.capture.problem import SearchProblem

TieBreak = Literal["full", "partial", "none"]


@dataclass(frozen=True)
class PlacedStage(Stage):
    """A stage, with what each of its devices needs.

    Attributes:
        peak_bytes: Bytes of each of its devices.
    """

    peak_bytes: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: a plan, what it needs, and how far that is proven.

    Attributes:
        status: ``infeasible`` if no plan exists or none stays within the memory limit; ``why`` then
            says more.
        stages: In pipeline order; the least-peak plan too where only the memory limit is missed, ()
            where no plan exists.
        peak_bytes_per_device: In device order.
        algorithm: Name of the answer.
        optimal: Whether what was minimised, the peak or the step time, is proven to be the least
            possible.
        num_explored: Stage placements that were looked at.
        tie_break_columns: Number of largest per-device values proven lexicographically least.
        seconds: Wall time of the search; ``search`` fills it in.
        why: Set exactly if infeasible.
        step_seconds: Time of a step, where the search was for speed and a plan was found: of a
            problem by its closed form, in an answer with transfers
            (``recommender.capture.counted``).
        bound_fraction: By the closed form, no plan is faster by more than that; 0 if optimal.
    """

    status: Literal["ok", "infeasible"]
    stages: tuple[PlacedStage, ...]
    peak_bytes_per_device: tuple[int, ...]
    algorithm: str
    optimal: bool
    num_explored: int = 0
    tie_break_columns: int = 0
    seconds: float = 0.0
    why: Why | None = None
    step_seconds: float | None = None
    bound_fraction: float = 0.0

    def to_json(self) -> dict[str, Any]:
        names = ("seconds", "algorithm", "optimal", "tie_break", "tie_break_columns")
        return fields_of(self, *names, "num_explored", "step_seconds", "bound_fraction")

    @property
    def peak_bytes(self) -> int:
        """The largest of ``peak_bytes_per_device``; 0 without a plan."""
        return max(self.peak_bytes_per_device, default=0)

    @property
    def tie_break(self) -> TieBreak:
        """How far plans of the same peak were compared: ``full`` (the sorted per-device bytes are
        the lexicographically least), ``partial`` (only the ``tie_break_columns`` largest of them)
        or ``none``."""
        if not self.tie_break_columns:
            return "none"
        return "full" if self.tie_break_columns == len(self.peak_bytes_per_device) else "partial"

    @property
    def sorted_peaks(self) -> tuple[int, ...]:
        """The bytes per device, largest first: what the tie-break compares."""
        return tuple(sorted(self.peak_bytes_per_device, reverse=True))


@dataclass(frozen=True)
class Proposal:
    """A plan that a search proposes, with its result.

    Attributes:
        result: Of a plain schedule, ``optimal`` and ``bound_fraction`` are of the closed form
            without transfers; ``step_seconds`` are counted, if it was searched for speed.
        plan: The stages on their devices.
    """

    result: SearchResult
    plan: Plan

    @property
    def seconds(self) -> float:
        assert self.result.step_seconds is not None, "times are known"
        return self.result.step_seconds

    @property
    def point(self) -> FrontPoint:
        """The plan as a point of a front."""
        result = self.result
        return FrontPoint(result.peak_bytes, self.seconds, result.bound_fraction, self.plan.stages)


def placed(device: int, first: int, stop: int, choice: StageChoice, peak_bytes: int) -> PlacedStage:
    """Return a stage on the devices from ``device`` on, with what each of them needs."""
    return replace(PlacedStage.at(device, first, stop, choice), peak_bytes=peak_bytes)


def place(problem: SearchProblem, cuts: Iterable[tuple[int, int, int]]) -> tuple[PlacedStage, ...]:
    """Return stages from (first, stop, degree) in pipeline order, each with its cheapest choice at
    its position."""
    cuts, stages, device = list(cuts), [], 0
    for stage_id, (first, stop, d) in enumerate(cuts):
        choice, peak_bytes = problem.choose(d, len(cuts) - stage_id, first, stop)
        stages.append(placed(device, first, stop, choice, peak_bytes))
        device += d
    return tuple(stages)


def found(
    problem: SearchProblem,
    stages: tuple[PlacedStage, ...],
    algorithm: str,
    *,
    optimal: bool,
    num_explored: int = 0,
    tie_break_columns: int = 0,
) -> SearchResult:
    """Return the result for a plan: ``ok``, or ``infeasible`` if it misses the memory limit."""
    peaks = tuple(stage.peak_bytes for stage in stages for _ in stage.devices)
    result = SearchResult("ok", stages, peaks, algorithm, optimal, num_explored, tie_break_columns)
    return within_limit(result, problem.memory_limit_bytes)


def within_limit(result: SearchResult, limit: int | None) -> SearchResult:
    """Return the result as it is, or as ``infeasible`` if its plan misses the memory limit."""
    if limit is None or result.peak_bytes <= limit:
        return result
    stages = result.stages
    stage_id = max(range(len(stages)), key=lambda i: stages[i].peak_bytes)
    stage = stages[stage_id]
    least = (
        "The lowest peak memory of any plan is" if result.optimal else "The best plan found needs"
    )
    why = Why(
        f"{least} {result.peak_bytes:,} bytes, {result.peak_bytes - limit:,} above "
        f"memory_limit_bytes={limit:,}: stage_id={stage_id} "
        f"(layers {stage.first} to {stage.stop - 1} on devices {stage.devices[0]} to "
        f"{stage.devices[-1]}, "
        f"data_parallel={stage.choice.data_parallel}, "
        f"tensor_parallel={stage.choice.tensor_parallel}). "
        f"Raise the limit to {result.peak_bytes:,} bytes, or use more devices, more micro-batches "
        "of a smaller size, or rematerialisation. "
        "[memory-limit]",
        code="memory-limit",
        memory_limit_bytes=limit,
        least_peak_bytes=result.peak_bytes,
        stage_id=stage_id,
    )
    return replace(result, status="infeasible", why=why)


def nothing_found(
    problem: SearchProblem, *, algorithm: str, num_explored: int, proven: bool = True
) -> SearchResult:
    """Return the result where no plan exists whatever the memory limit, with the reason, under a
    code: ``devices-unfillable``, ``too-few-layers``, ``no-possible-stage``, or ``search-stopped``
    (not proven)."""
    fewest, devices = problem.fewest_stages[0], problem.cluster.num_devices
    if fewest > devices:
        code = "devices-unfillable"
        text = (
            f"No sequence of stages on {sorted(problem.choices)} devices fills the {devices} "
            f"devices of cluster {problem.cluster}; "
            "allow stages on one device, or another cluster."
        )
    elif fewest > problem.num_layers:
        code = "too-few-layers"
        text = (
            f"num_layers={problem.num_layers} cannot fill the {devices} devices of cluster "
            f"{problem.cluster}: at least {fewest} stages "
            f"of one layer or more are needed. Cut the model into {fewest} layers or more, allow "
            "larger stages, or use fewer devices."
        )
    else:
        code = "no-possible-stage"
        text = (
            f"Every plan for num_layers={problem.num_layers} on cluster {problem.cluster} needs a "
            "stage whose cost is marked impossible."
        )
    if not proven:
        code, text = (
            "search-stopped",
            "The search stopped at its limit of explored placements before it met a plan; raise "
            "the limit.",
        )
    why = Why(f"{text} [{code}]", code=code, memory_limit_bytes=problem.memory_limit_bytes)
    return SearchResult("infeasible", (), (), algorithm, proven, num_explored, why=why)
