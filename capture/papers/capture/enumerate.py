"""The paper's search: enumerate placements of stage configurations, pruned by the best peak so far.

The reference that the exact search is compared with, and the way to search under rules that the
programme cannot express. Where Algorithm 4 is doubtful, this is the reading (its id in
``capture/READINGS.md`` in brackets):

* degrees are powers of two up to and including the devices of a node [C-j, C-k], data *or* tensor
  parallel if ``choices`` says so [C-r];
* mesh and plan are values, so nothing needs undoing [C-l];
* plans of equal peak are kept for the tie-break, and pruning is strict, so that they survive it
  [C-m, C-n];
* the tie-break excludes one device at a time until none is left [C-o, C-p]; plans that still tie:
  the first, or a seeded draw [C-q];
* a stage's cost may depend on the stages after it (1F1B), so the number of stages is fixed first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from capture.plan.choices import StageChoice
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.result import SearchResult, found, nothing_found, placed

Exclude = Literal["one", "equal", "none"]
#: Of a stage: its first device, its layers [first, stop), its choice, and its bytes.
Way = tuple[int, int, int, StageChoice, int]


def enumerate_plans(
    problem: SearchProblem,
    *,
    prune: bool = True,
    exclude: Exclude = "one",
    seed: int | None = None,
    max_placements: int | None = None,
) -> SearchResult:
    """Find the plan of least peak by pruned enumeration, then the paper's tie-break.

    Args:
        problem: What to place where.
        prune: Skip stages above the best peak so far; without it every plan is built (brute force).
        exclude: What a round of the tie-break removes: ``one`` device of the highest use, all
            devices of ``equal`` use, or ``none`` for no tie-break.
        seed: Draw uniformly among full ties; None takes the first.
        max_placements: Stop after looking at so many stages; the result is then not proven
            (``optimal`` is False).

    Returns:
        The plan, with ``num_explored`` stages looked at.

    Source: CAPTURE III-C, Algorithm 4, tie-breaking rule and pruning.
    """
    search = _Enumeration(
        problem,
        prune,
        exclude,
        None if seed is None else np.random.default_rng(seed),
        max_placements,
    )
    fewest, most = problem.fewest_stages[0], min(problem.cluster.num_devices, problem.num_layers)
    complete = all(
        search.place_group((), 0, 0, num_stages) for num_stages in range(fewest, most + 1)
    )
    if not search.best:
        return nothing_found(
            problem, algorithm="enumerate", num_explored=search.num_placements, proven=complete
        )
    compared: dict[Exclude, int] = {"one": problem.cluster.num_devices, "equal": 1, "none": 0}
    return found(
        problem,
        tuple(placed(*way) for way in search.best),
        "enumerate",
        optimal=complete,
        num_explored=search.num_placements,
        tie_break_columns=compared[exclude] if complete else 0,
    )


@dataclass
class _Enumeration:
    problem: SearchProblem
    prune: bool
    exclude: Exclude
    generator: np.random.Generator | None
    max_placements: int | None
    best: tuple[Way, ...] = ()
    best_key: tuple[int, ...] = (NEVER - 1,)
    num_placements: int = 0
    num_ties: int = 0
    costs: Callable[..., list[int]] = field(init=False)

    def __post_init__(self):
        self.costs = lru_cache(maxsize=None)(
            lambda *stage: self.problem.bytes_per_choice(*stage).tolist()
        )

    def place_group(self, plan: tuple[Way, ...], device: int, first: int, num_left: int) -> bool:
        """Place the next group in every way; False if the search ran into its limit."""
        problem = self.problem
        num_devices, num_layers = problem.cluster.num_devices, problem.num_layers
        if num_left == 0:
            if device == num_devices and first == num_layers:
                self.consider(plan)
            return True
        for stop in range(first + 1, num_layers - num_left + 2):
            for d in problem.degrees[device]:
                # Algorithm 4, line 2: the stages left must be enough for the devices left, and not
                # too many.
                if not problem.fewest_stages[device + d] < num_left <= num_devices - device - d + 1:
                    continue
                for choice, peak in zip(
                    problem.choices[d], self.costs(d, num_left, first, stop), strict=True
                ):
                    if self.num_placements == self.max_placements:
                        return False
                    self.num_placements += 1
                    if peak >= NEVER or (self.prune and peak > self.best_key[0]):
                        continue
                    stage = (device, first, stop, choice, peak)
                    if not self.place_group((*plan, stage), device + d, stop, num_left - 1):
                        return False
        return True

    def consider(self, plan: tuple[Way, ...]) -> None:
        """Keep the plan if it wins, or by lot if it ties."""
        peaks = sorted(
            (peak for *_, choice, peak in plan for _ in range(choice.num_devices)), reverse=True
        )
        key = {"one": peaks, "equal": sorted(set(peaks), reverse=True), "none": peaks[:1]}[
            self.exclude
        ]
        if tuple(key) < self.best_key or not self.best:
            self.best, self.best_key, self.num_ties = plan, tuple(key), 1
        elif tuple(key) == self.best_key and self.generator is not None:
            self.num_ties += 1
            if self.generator.integers(self.num_ties) == 0:
                self.best = plan
