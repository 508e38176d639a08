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
from jax.extend.core import JaxprEqn

from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import Atom, is_variable
from capture.tracing.recompute import recompute_bytes

#: Bytes that may be read or written once more for one byte not kept. What is kept stays for as
#: many micro-batches as are in flight; a pass over memory is over at once.
TRAFFIC_PER_KEPT_BYTE = 16

#: Sum of all finite capacities, at most: the solver counts in 32 bits.
_MOST_UNITS = 2**29
_SOURCE, _SINK = 0, 1


def least_kept(
    flow: DataFlow,
    required: Sequence[Any],
    from_data: Collection[Any],
    nbytes: Callable[[Any], int],
    recompute: Callable[[Any], float | None] = recompute_bytes,
) -> list[Any]:
    """Return the values to keep by a minimum cut, in program order; no more bytes than required.

    Args:
        required: Variables that the backward pass reads.
        from_data: Variables that depend on more than parameters; the others are made again.
        recompute: What running an equation again costs, in bytes of traffic; None: never.
    """

    def depends(atom: Atom) -> bool:
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
        run = network.run_of(equation, flow.order(v), cost / TRAFFIC_PER_KEPT_BYTE)
        network.join(run, network.value(v))
        for operand in filter(depends, equation.invars):
            network.join(network.output(operand), run)
            waiting.append(operand)
    reaching = network.sink_side()
    kept = {v for v in seen if not reaching[network.value(v)] and reaching[network.output(v)]}
    return [v for v in flow.values if v in kept]


class _Network:
    """The flow network; its nodes are numbers: two per value, before and after it is kept, and one
    per operation that may be run again."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._arcs: dict[tuple[int, int], float] = {}

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 2)

    def value(self, v: object) -> int:
        return self._number(("value", v))

    def output(self, v: object) -> int:
        """Return the node of a value where it is read, after the choice to keep it."""
        return self._number(("output", v))

    def run_of(self, equation: JaxprEqn, order: int, cost: float) -> int:
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
