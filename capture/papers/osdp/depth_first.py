"""The paper's search: for every batch size, a depth-first walk over the modes of all operators, cut
where it cannot lead to the best plan.

A node is an operator with a mode, under all operators before it. Two prunings, each can be turned
off to count what it saves:

    memory    of the operators so far above the limit
    time      of the operators so far not below that of the best plan of this batch size

Exact where it ends; it has up to 2^n leaves per batch size, so beyond a few dozen operators it ends
by ``max_nodes`` (O-d).

Source: paper, Algorithm 1 (with line 20 per example, O-f) and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from capture.plan.sharding import ShardingPlan
from recommender.osdp.problem import Options, ShardingProblem
from recommender.osdp.result import ShardingResult, answer, plan_of


def depth_first(
    problem: ShardingProblem,
    *,
    prune_memory: bool = True,
    prune_time: bool = True,
    max_nodes: int | None = None,
) -> ShardingResult:
    """Find the plan of least time per example over the candidates of all batch sizes.

    Args:
        problem: What to choose.
        prune_memory, prune_time: The paper's two prunings.
        max_nodes: Stop after so many nodes in total; the result is then not proven.
    """
    best: ShardingPlan | None = None
    nodes, complete = 0, True
    for batch_size in range(1, problem.num_batch_sizes + 1):
        options = problem.options(batch_size)
        walk = _DepthFirst(
            options,
            problem.memory_limit_bytes,
            prune_memory,
            prune_time,
            None if max_nodes is None else max_nodes - nodes,
        )
        complete &= walk.place(0, 0.0, 0.0, 0.0)
        nodes += walk.num_nodes
        if walk.best:
            plan = plan_of(problem, batch_size, options, walk.by_kind())
            if best is None or plan.seconds_per_example < best.seconds_per_example:
                best = plan
        if not complete:
            break
    return answer(
        problem,
        best,
        algorithm="depth-first",
        optimal=complete,
        bound_fraction=0.0 if complete else float("inf"),
        num_explored=nodes,
        num_batch_sizes=problem.num_batch_sizes,
    )


@dataclass
class _DepthFirst:
    """One walk at one batch size."""

    options: Options
    limit: float
    prune_memory: bool
    prune_time: bool
    max_nodes: int | None

    def __post_init__(self):
        self.num_nodes = 0
        self.best: tuple[int, ...] = ()
        self.best_seconds = float("inf")
        self._picks: list[int] = []
        columns = (self.options.resident_bytes, self.options.transient_bytes, self.options.seconds)
        by_kind = [
            list(zip(*(column[kind, : len(modes)].tolist() for column in columns), strict=True))
            for kind, modes in enumerate(self.options.modes)
        ]
        self._rows = [
            rows
            for rows, count in zip(by_kind, self.options.counts, strict=True)
            for _ in range(count)
        ]

    def place(self, depth: int, resident: float, transient: float, seconds: float) -> bool:
        """Give the next operator every mode; False if the walk ran into its limit."""
        if depth == len(self._rows):
            if resident + transient <= self.limit and seconds < self.best_seconds:
                self.best, self.best_seconds = tuple(self._picks), seconds
            return True
        for pick, (held, passing, spent) in enumerate(self._rows[depth]):
            if self.num_nodes == self.max_nodes:
                return False
            self.num_nodes += 1
            now = resident + held, max(transient, passing), seconds + spent
            if (self.prune_memory and now[0] + now[1] > self.limit) or (
                self.prune_time and now[2] >= self.best_seconds
            ):
                continue
            self._picks.append(pick)
            complete = self.place(depth + 1, *now)
            self._picks.pop()
            if not complete:
                return False
        return True

    def by_kind(self) -> list[tuple[int, ...]]:
        """Return the best plan's picks, for each kind of equal operators."""
        found, start = [], 0
        for count in self.options.counts.tolist():
            found.append(self.best[start : start + count])
            start += count
        return found
