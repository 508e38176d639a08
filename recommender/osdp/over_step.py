"""The fastest plan whose memory, counted over the course of a step, stays within the limit.

The exact search bounds a sum that no moment of a step reaches (``capture.step.sharded``), so that
it leaves memory unused. Here it is asked, for a batch size, with the largest limit of that sum at
which its answer stays within the true one. Nothing proves that no plan is faster; but at the batch
sizes that were tried, none is that has all operators in one mode.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from capture.model.operators import Operator
from capture.plan.sharding import DP, Mode, ShardingPlan
from capture.quantities import counted
from capture.step.operator_cost import StepCost
from capture.step.sharded import peak_bytes
from recommender.bisection import last_that_holds
from recommender.osdp.exact import cheapest
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.result import ShardingResult, plan_of

#: Of the limit, by platform, what is left to gaps between buffers, workspaces of kernels and joined
#: collectives, which only a compiler knows: estimates were up to 6 % below the compiled steps for
#: H100 that were looked at, and 11 % for TPU v5e (``benchmarks/osdp_memory.py``).
_RESERVED_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {"cpu": 0.06, "cuda": 0.06, "tpu": 0.12}
)
#: The same of losses that compute in 16 bits, whose estimates are further below for reasons that
#: are not known.
_RESERVED_FRACTION_OF_16_BITS = 0.2
#: And of those whose own ``jax.checkpoint`` computes again, in any data type: of twelve steps for
#: H100 most compile to 1.05 to 1.11 times their estimates, the smallest to 1.27.
_RESERVED_FRACTION_OF_CHECKPOINTS = 0.22
#: What a step needs beside that: the workspace of cuBLAS, 4 MiB whatever the step, and what little
#: there is without it.
_FIXED_BYTES: Mapping[str, int] = MappingProxyType(
    {"cpu": 1_000_000, "cuda": 4_500_000, "tpu": 1_000_000}
)
#: By how much estimates were too high at most, of the estimate: 12 % for H100, 15 % for v5e.
_TOO_HIGH_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {"cpu": 0.16, "cuda": 0.13, "tpu": 0.16}
)
#: What XLA's CPU compiler may need more, of what it compiles to: it copies more, and keeps what
#: ``jax.checkpoint`` would compute again. 21 steps of 0.7 to 15 MB were within it.
_CPU_FRACTION, _CPU_FRACTION_OF_CHECKPOINTS = 1 / 3, 2 / 3
#: Batch sizes that are tried at once, before those around the best.
_SIZES_TRIED = 24
#: Of the limit, how closely the limit of the sum is searched for.
_CLOSENESS = 1 / 128


def reserved_fraction(platform: str, dtype: str, checkpointed: bool = False) -> float:
    """Return the part of the memory limit that plans leave to the compiler, in [0, 1].

    Args:
        platform: The target's: ``"cuda"``, ``"tpu"`` or ``"cpu"``.
        dtype: In which the loss computes.
        checkpointed: Whether the loss has something computed again (``jax.checkpoint``).
    """
    return max(
        _RESERVED_FRACTIONS[platform],
        _RESERVED_FRACTION_OF_16_BITS if dtype != "float32" else 0.0,
        _RESERVED_FRACTION_OF_CHECKPOINTS if checkpointed else 0.0,
    )


def interval_of(
    nbytes: int, platform: str, dtype: str, checkpointed: bool = False
) -> tuple[int, int]:
    """Return the fewest and the most bytes that a step estimated at ``nbytes`` may compile to.

    The high end is the limit below which the estimate would be planned with, and what any step
    needs. The ends are those of all steps that were compiled to see (``benchmarks/osdp_memory.py``
    and others, 150 for H100 and TPU v5e, and 26 small ones for H100): a bound by experience, with
    no probability.

    Args:
        nbytes: Estimated.
        platform, dtype, checkpointed: As of ``reserved_fraction``.

    Example:
        >>> interval_of(1_000_000_000, "cuda", "float32")
        (870000000, 1068329787)
    """
    reserved = reserved_fraction(platform, dtype, checkpointed)
    if platform == "cpu":
        reserved = _CPU_FRACTION_OF_CHECKPOINTS if checkpointed else max(reserved, _CPU_FRACTION)
    high = nbytes / (1 - reserved) + _FIXED_BYTES[platform]
    return int(nbytes * (1 - _TOO_HIGH_FRACTIONS[platform])), int(high)


@dataclass(frozen=True)
class OverStep:
    """The search for the fastest plan per example whose peak over a step fits.

    Attributes:
        cost: What the operators cost on the devices.
        operators: The traced ones (``TracedOperators``), which say what parameters are steps of one
            array.
        smallest_bytes: Smaller parameters are replicated whatever the mode.
        batch_size: Examples per device; None to choose it.
        max_batch_size: The largest to choose from.
    """

    cost: StepCost
    operators: Any
    smallest_bytes: int
    batch_size: int | None = None
    max_batch_size: int | None = None

    @cached_property
    def problem(self) -> ShardingProblem:
        """The problem of the exact search, which bounds the sum."""
        return ShardingProblem(self.cost, self.batch_size or self.max_batch_size)

    def fastest(self, limit: float) -> ShardingResult:
        """Search for the fastest plan per example whose peak over a step is within ``limit`` bytes
        of a device, or say what is missing.

        Raises:
            PlanError: ``osdp-unbounded`` if every batch size fits and none is the largest.
        """
        start, size = time.perf_counter(), self.batch_size
        plans = [self.plan_at(size, limit)] if size else list(self.plans(limit))
        fitting = [plan for plan in plans if plan is not None]
        best = min(fitting, key=lambda plan: plan.seconds_per_example, default=None)
        return ShardingResult(
            "ok" if best else "infeasible",
            best,
            "over the step",
            optimal=False,
            num_explored=len(plans),
            num_batch_sizes=len(fitting),
            bound_fraction=float("inf"),
            seconds=time.perf_counter() - start,
            why=None if best else self.why(size or 1, int(limit)),
        )

    def least(self) -> ShardingPlan:
        """Return the plan of least peak among those with all operators in one mode, for one example
        per device if the batch size is to be chosen."""
        plans = (self.placed(modes, self.batch_size or 1) for modes in self.uniform())
        return min(plans, key=lambda plan: plan.peak_bytes)

    def plans(self, limit: float) -> Iterator[ShardingPlan]:
        """Yield the best plan of each batch size tried, for sizes closer and closer to the best."""
        found: dict[int, ShardingPlan] = {}
        # The largest batch size that a plan with all operators in one mode fits.
        last = last_that_holds(
            lambda size: self._least_bytes(size) <= limit,
            start=1,
            most=self.problem.max_batch_size or np.inf,
        )
        first = 1
        while True:
            sizes = range(first, last + 1)
            if len(sizes) > _SIZES_TRIED:
                sizes = np.unique(
                    np.geomspace(first, last, _SIZES_TRIED).round().astype(int)
                ).tolist()
            for size in sizes:
                plan = None if size in found else self.plan_at(size, limit)
                if plan is not None:
                    found[size] = plan
                    yield plan
            if not found or isinstance(sizes, range):
                return
            tried = sorted(found)
            best = tried.index(min(tried, key=lambda size: found[size].seconds_per_example))
            first, last = tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)]

    def plan_at(self, batch_size: int, limit: float) -> ShardingPlan | None:
        """Return the fastest plan that is found at one batch size; None if nothing fits."""
        options = self.problem.options(batch_size)

        def within(most: float) -> ShardingPlan | None:
            """Return the plan of least seconds whose sum is at most so much; None without one."""
            if (chosen := cheapest(options, most).chosen) is None:
                return None
            modes = plan_of(self.problem, batch_size, options, chosen).modes
            return self.placed(modes, batch_size)

        # A plan whose sum is within the limit is within it over the step.
        found = [*(self.placed(modes, batch_size) for modes in self.uniform()), within(limit)]
        plans = [plan for plan in found if plan is not None and plan.peak_bytes <= limit]
        resident, transient = (
            np.where(np.isfinite(options.seconds), column, 0).max(axis=-1)
            for column in (options.resident_bytes, options.transient_bytes)
        )
        low = limit
        high = trying = max(low, float(resident @ options.counts + transient.max()))
        while True:
            plan = within(trying)
            fits = plan is not None and plan.peak_bytes <= limit
            if plan is not None and fits:
                plans.append(plan)
            low, high = (trying, high) if fits or plan is None else (low, trying)
            if high - low <= max(1.0, limit * _CLOSENESS):  # the limit may be nothing, or less
                return min(plans, key=lambda plan: plan.step_seconds, default=None)
            trying = (low + high) / 2

    def why(self, batch_size: int, limit: int) -> str:
        """Return how many bytes are missing with every operator in the mode that needs least."""
        least = self._least_bytes(batch_size)
        if not any(operator.parameter_bytes for operator in self.cost.model.operators):
            needs = "example per device needs", "examples per device need"
            return (
                f"{counted(batch_size, *needs)} {least:,} bytes, {least - limit:,} above "
                f"{limit:,}, what of the limit may be planned with, and no parameter can be "
                "sharded: all are smaller than "
                f"smallest_bytes={self.smallest_bytes:,}, or the "
                "devices divide none of their dimensions. Give a smaller one, or a higher limit. "
                "[memory-limit]"
            )
        return (
            f"{counted(batch_size, 'example')} per device: {least:,} bytes "
            "with all operators sharded, "
            f"{least - limit:,} above {limit:,}, what of the limit may be planned with. Raise it, "
            "use more devices, more slices per "
            "operator, or rematerialisation. [memory-limit]"
        )

    def _least_bytes(self, batch_size: int) -> int:
        return min(peak_bytes(self.cost, modes, batch_size) for modes in self.uniform())

    def uniform(self) -> Iterator[tuple[Mode, ...]]:
        """Yield plans of one mode: every operator replicated; sharded whole; sharded in so many
        slices, where it can be split."""
        choices = [self.cost.modes(operator) for operator in self.cost.model.operators]
        yield (DP,) * len(choices)
        for granularity in sorted({max(1, g) for g in self.cost.granularities} | {1}):
            yield tuple(
                next(
                    (mode for mode in modes if mode.num_slices == mode.num_sharded == granularity),
                    _whole(modes),
                )
                for modes in choices
            )

    def placed(self, modes: tuple[Mode, ...], batch_size: int) -> ShardingPlan:
        """Return the plan of modes with its numbers, equal operators in the order that needs less:
        replicated ones first, or last.

        The steps of a scan share arrays, so they get one mode: that of the operator among them that
        needs least memory.
        """
        cost, candidates = self.cost, []
        for sharded_last in (True, False):
            ordered = list(modes)
            for equal in self._equal:
                for i, mode in zip(
                    equal,
                    sorted((modes[i] for i in equal), key=_sharded, reverse=not sharded_last),
                    strict=True,
                ):
                    ordered[i] = mode
            for steps in self._scanned:
                least = max((ordered[i] for i in steps), key=_sharded)
                if least.num_sharded:  # an array of all steps is not split in two
                    least = replace(least, num_sharded=least.num_slices)
                for i in steps:
                    ordered[i] = least
            candidates.append((peak_bytes(cost, ordered, batch_size), tuple(ordered)))
        peak, chosen = min(candidates, key=lambda candidate: candidate[0])
        each = Counter(zip(cost.model.operators, chosen, strict=True))
        seconds = sum(
            count * float(cost.cost(operator, mode, batch_size).seconds)
            for (operator, mode), count in each.items()
        )
        return ShardingPlan(
            batch_size, chosen, seconds, peak, cost.machine.num_devices * batch_size / seconds
        )

    @cached_property
    def _equal(self) -> list[list[int]]:
        """The positions of equal operators, one list per kind."""
        positions: dict[Operator, list[int]] = {}
        for i, operator in enumerate(self.cost.model.operators):
            positions.setdefault(operator, []).append(i)
        return list(positions.values())

    @cached_property
    def _scanned(self) -> list[set[int]]:
        """The positions of operators that share arrays, as steps of a scan do; of sharded arrays,
        and also through a third one."""
        of_param = {p: i for i, own in enumerate(self.operators.params) for p in own}
        leaves, num_devices = self.operators.leaves, self.cost.machine.num_devices
        found: list[set[int]] = []
        for group in self.operators.stacked_params:
            if leaves[group[0]].can_shard(num_devices, self.smallest_bytes):
                positions = {of_param[p] for p in group}
                touching = [others for others in found if others & positions]
                found = [others for others in found if others not in touching] + [
                    positions.union(*touching)
                ]
        return found


def _sharded(mode: Mode) -> tuple[float, int]:
    return mode.num_sharded / mode.num_slices, mode.num_slices


def _whole(modes: tuple[Mode, ...]) -> Mode:
    """Return the mode that is sharded and not split; replicated if there is no such mode."""
    return next((mode for mode in modes if mode.num_slices == mode.num_sharded == 1), DP)
