"""Which values a forward pass keeps so that few bytes do: a minimum cut.

All that the backward pass reads has to follow from what is kept, by operations that may be run
again (``recompute.py``), and from parameters, which are there anyway. In a network of flow every
value is an arc as wide as its bytes; whatever no operation makes again hangs on the source, what
the backward pass reads on the sink, and the arcs of a minimum cut are kept. An operation that is
run again is an arc from the source, as wide as what it costs, so that the cut is the least sum of
both: a mean over a thousand elements is kept, the elements are not.

Source: Ahuja, Magnanti, Orlin, Network Flows, chapter 6 (maximum flow, minimum cut; project
selection for the costs).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable
from capture.tracing.recompute import recompute_bytes

#: Bytes that may be read or written once more for one byte not kept. What is kept stays for as
#: many micro-batches as are in flight; a pass over memory is over at once.
TRAFFIC_PER_KEPT_BYTE = 16

#: Of a kept byte, between which a budget looks for one, and how many it tries: to within 9 %.
PRICES, NUM_PRICES = (2.0, 2.0**14), 7
#: What is kept is written by one pass and read by the other; below this price nothing takes longer.
_MOVED_PER_KEPT_BYTE = 2

#: Sum of all finite capacities, at most: the solver counts in 32 bits.
_MOST_UNITS = 2**29
_SOURCE, _SINK = 0, 1


def least_kept(
    flow: DataFlow,
    required: Sequence[Any],
    from_data: Collection[Any],
    nbytes: Callable[[Any], int],
    recompute: Callable[[Any], float | None] = recompute_bytes,
    traffic_per_kept_byte: float = TRAFFIC_PER_KEPT_BYTE,
) -> list[Any]:
    """Return the values to keep by a minimum cut, in program order; never more bytes than the
    required ones.

    Args:
        flow: The forward pass.
        required: Variables that the backward pass reads.
        from_data: Variables that depend on more than parameters; the others are made again.
        nbytes: What keeping a variable costs.
        recompute: What running an equation again costs, in bytes of traffic; None: never.
        traffic_per_kept_byte: What a byte that is not kept may cost.
    """

    def depends(atom: Any) -> bool:
        return is_variable(atom) and atom in from_data

    network = _Network()
    waiting = list(dict.fromkeys(filter(depends, required)))
    for v in waiting:
        network.need(network.output(v))
    seen = set[Any]()
    while waiting:
        v = waiting.pop()
        if v in seen:
            continue
        seen.add(v)
        network.join(network.value(v), network.output(v), nbytes(v))
        equation = flow.maker(v)
        cost = None if equation is None else recompute(equation)
        if equation is None or cost is None:
            network.never(network.value(v))
            continue
        run = network.run_of(equation, flow.order(v), cost / traffic_per_kept_byte)
        network.join(run, network.value(v))
        for operand in filter(depends, equation.invars):
            network.join(network.output(operand), run)
            waiting.append(operand)
    reaching = network.sink_side()
    kept = {v for v in seen if not reaching[network.value(v)] and reaching[network.output(v)]}
    return [v for v in flow.values if v in kept]


def least_kept_within(
    flow: DataFlow,
    required: Sequence[Any],
    from_data: Collection[Any],
    nbytes: Callable[[Any], int],
    recompute: Callable[[Any], float | None],
    budget: float,
    known: Sequence[Any],
) -> list[Any]:
    """Return values with few bytes to keep so that running operations again stays within a budget.
    The traffic saved by values that are not kept is added to the budget. Candidates are minimum
    cuts, one for every price of a kept byte, and ``known``.

    Between two cuts there may be other sets of values, with fewer bytes within the budget, which no
    price makes a minimum cut.

    Args:
        flow, required, from_data, nbytes, recompute: The arguments of ``least_kept``.
        budget: Bytes of traffic.
        known: Values that are enough, such as a cut of fewer operations.
    """
    best, low, high = list(dict.fromkeys(required)), *PRICES
    all_bytes = sum(map(nbytes, filter(is_variable, best)))

    def is_within(kept: Sequence[Any]) -> bool:
        again = flow.needed(required, set(kept))
        costs = [recompute(e) for e in again if any(v in from_data for v in e.outvars)]
        unmoved = _MOVED_PER_KEPT_BYTE * (all_bytes - sum(map(nbytes, kept)))
        return sum(cost for cost in costs if cost is not None) - unmoved <= budget

    for _ in range(NUM_PRICES):
        price = (low * high) ** 0.5
        kept = least_kept(flow, required, from_data, nbytes, recompute, price)
        if is_within(kept):
            best, low = kept, price
        else:
            high = price
    if sum(map(nbytes, known)) < sum(map(nbytes, best)) and is_within(known):
        return list(known)
    return best


class _Network:
    """The flow network; its nodes are numbers: two per value, before and after it is kept, and one
    per operation that may be run again."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._arcs: dict[tuple[int, int], float] = {}

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 2)

    def value(self, v: Any) -> int:
        return self._number(("value", v))

    def output(self, v: Any) -> int:
        """Return the node of a value where it is read, after the choice to keep it."""
        return self._number(("output", v))

    def run_of(self, equation: Any, order: int, cost: float) -> int:
        """Return the node of an operation; one with several results is run once for all."""
        key = ("run", order)
        if key not in self._numbers:
            self.join(_SOURCE, self._number(key), cost)
        return self._number(key)

    def join(self, tail: int, head: int, capacity: float = np.inf) -> None:
        self._arcs[tail, head] = capacity

    def never(self, node: int) -> None:
        self.join(_SOURCE, node)

    def need(self, node: int) -> None:
        self.join(node, _SINK)

    def sink_side(self) -> np.ndarray:
        """Return, per node, whether the sink can be reached in what a maximum flow leaves. This is
        the minimum cut nearest to the sink, which runs least again."""
        # scikit-learn's own dependency; loading it takes a quarter of a second.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(self._numbers) + 2
        tails, heads = np.array(list(self._arcs), np.int32).reshape(-1, 2).T
        widths = np.array(list(self._arcs.values()), np.float64)
        finite = np.isfinite(widths)
        scale = min(64.0, _MOST_UNITS / max(1.0, widths[finite].sum()))
        units = np.where(finite, np.ceil(np.where(finite, widths, 0) * scale), 2 * _MOST_UNITS)
        graph = csr_array((units.astype(np.int32), (tails, heads)), shape=(count, count))
        left = graph - maximum_flow(graph, _SOURCE, _SINK).flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        found = breadth_first_order(left.T.tocsr(), _SINK, return_predecessors=False)
        reaching = np.zeros(count, bool)
        reaching[found] = True
        return reaching
