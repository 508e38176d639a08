"""More configurations than Algorithm 1 has: every micro-batch size, the last one smaller where it
does not divide; cuts at the nearest layer, and packs whose longest is as short as can be; and more
packs than the fewest. Whole tasks stay below the limit (H-c, H-h, H-m)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import merge
from itertools import islice, pairwise, takewhile

import numpy as np

from capture.measured.layer_passes import Pass, SizedLayers
from capture.memo import memo
from capture.plan.task_graph import Configuration, Packs, Span, microbatches
from recommender.harmony.packing import CUTS, LeastMaxTime, fewest_packs
from recommender.harmony.problem import PackedConfiguration, PacksProblem

#: How many more packs than the fewest, in rounds of all devices.
_ROUNDS = 2
#: So many pairs are looked at, those of the lowest bounds.
_MOST = 4000


def wide_choices(problem: PacksProblem, below: float) -> list[PackedConfiguration]:
    """Return configurations that may take less than ``below`` seconds and whose tasks stay below
    the limit."""
    return _Wide(problem, below).choices()


class _Wide:
    def __init__(self, problem: PacksProblem, below: float):
        self._problem, self._below, self._profile = problem, below, problem.profile
        server, devices = problem.server, problem.server.devices
        self._num_layers = self._profile.num_layers
        self._ranks = 1 if problem.mode == "dp" else devices
        self._swap = server.swap_bytes_per_second.value / devices
        self._shares = devices if problem.swaps.sharded else 1
        self._delete = server.delete_seconds.value
        self._share, self._extra = problem.shares[0], _ROUNDS * devices

    def choices(self) -> list[PackedConfiguration]:
        """Return configurations by a lower bound of their seconds. The bound on the sum of what all
        ranks do comes first: it is a sum over both directions, so most pairs need not be made."""
        backward: defaultdict[int, list[tuple[float, Packs]]] = defaultdict(list)
        for size in self._problem.all_sizes("backward"):
            work = self._least("backward", size, self._num_layers)
            if work / self._ranks < self._below:
                for packs in self._packings("backward", size, self._num_layers):
                    row = work + self._delete * len(packs.packs), packs
                    backward[packs.packs[-1][0]].append(row)
        ranked: list[Iterator[tuple[float, Packs, Packs]]] = []
        for num_layers, rows in backward.items():
            rows.sort(key=lambda row: row[0])
            least = rows[0][0]
            for size in self._problem.all_sizes("forward") if num_layers else ():
                work = self._least("forward", size, num_layers)
                same = [row for row in rows if row[1].microbatch_size == size]
                others = same if self._problem.equal_sizes else rows
                if others and (least + work) / self._ranks < self._below:
                    packings = self._packings("forward", size, num_layers)
                    ranked += [self._ranked(work, packs, others) for packs in packings]
        # There are millions of pairs, so they are ranked as far as they are looked at.
        pairs = merge(*ranked, key=lambda pair: pair[0])
        below = takewhile(lambda pair: pair[0] < self._below, pairs)
        found = (Configuration(forward, other) for _, forward, other in below)
        kept = (one for one in found if self._stashes_fit(one))
        return [PackedConfiguration(one, "wide", "wide") for one in islice(kept, _MOST)]

    def _ranked(
        self, least: float, forward: Packs, backward: list[tuple[float, Packs]]
    ) -> Iterator[tuple[float, Packs, Packs]]:
        """Yield the forward packs with each of the backward packs and a lower bound of their
        seconds, in the order of the backward packs."""
        work = least + self._delete * len(forward.packs)
        for more, packs in backward:
            yield (work + more) / self._ranks, forward, packs

    def _layers(self, which: Pass, size: int) -> SizedLayers:
        return self._profile.at(which, size)

    def _least(self, which: Pass, size: int, num_layers: int) -> float:
        """Return the least seconds of a direction, all ranks together, without what packs add."""
        sizes, total = microbatches(self._share, size), 0.0
        if not self._problem.switches.prefetch:
            total += self._profile.streamed_bytes(0, num_layers) / self._shares / self._swap
        if which == "backward":
            alone = len(sizes) == 1 and self._shares == 1
            gradients = self._profile.gradient_bytes(0, num_layers, alone=alone)
            total += gradients / self._shares / self._swap
        return total + sum(
            sizes.count(u) * self._layers(which, u).time(0, num_layers) for u in {*sizes}
        )

    def _packings(self, which: Pass, size: int, num_layers: int) -> Iterator[Packs]:
        """Yield different packings of the first ``num_layers`` layers whose tasks fit, without what
        forward tasks keep."""
        layers = self._layers(which, size)
        limit = self._problem.limit_bytes
        fits, balanced = self._balanced(which, size)
        fewest = fewest_packs(layers, num_layers, limit)
        seen: set[tuple[Span, ...]] = set()
        found = 0
        for num_packs, shortest in enumerate(balanced.packs(num_layers), 1):
            if num_packs < fewest:
                continue
            cuts = (cut(layers, num_layers, num_packs) for cut in CUTS)
            ways = [tuple(pairwise((0, *cut, num_layers))) for cut in cuts]
            ways += [shortest] if shortest else []
            new = [way for way in ways if way not in seen and all(fits[span] for span in way)]
            seen.update(new)
            yield from (Packs(size, way) for way in dict.fromkeys(new))
            found += bool(new) or found > 0
            if found > self._extra:
                return

    @memo
    def _balanced(self, which: Pass, size: int) -> tuple[np.ndarray, LeastMaxTime]:
        """Return whether a task of the layers [first, stop] is below the limit, and the dynamic
        programme that packs within that."""
        layers = self._layers(which, size)
        x = np.array(layers.inputs)
        inner = np.array(layers.inner_sums)
        c = inner[None, :] - inner[:, None] + x[:, None]
        if which == "forward":
            need = x[:, None] + c + x[None, :]
        else:
            behind = np.where(np.arange(len(x)) > 0, x, 0)
            need = 2 * x[:, None] + x[None, :] + c + behind[:, None]
        above = np.tri(len(x), dtype=bool)  # a pack has layers
        fits = (need <= self._problem.limit_bytes) & ~above
        return fits, LeastMaxTime(layers, fits)

    def _stashes_fit(self, configuration: Configuration) -> bool:
        """Return whether forward tasks stay below the limit with the inputs that they keep."""
        forward, kept = configuration.forward, configuration.stashes
        layers = self._profile.at("forward", forward.microbatch_size)
        return all(
            layers.forward_bytes(pack, (layer for layer in kept if pack[0] <= layer < pack[1]))
            <= self._problem.limit_bytes
            for pack in forward.packs
        )
