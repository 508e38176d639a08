"""A lower bound of a configuration's seconds: what a device computes and waits for by itself, one
thing after the other.

A device's chain starts when its first input can have come through the ranks before it, and ends
with what its last gradients go through behind it. Everything that is summed follows on one another
in every simulation, so no simulation is shorter.
"""

from __future__ import annotations

from dataclasses import replace

from capture.plan.task_graph import Configuration, Span, microbatches
from recommender.harmony.problem import PacksProblem

#: Sums in another order differ by less.
_ROUNDING = 1 - 1e-9


def least_seconds(problem: PacksProblem, configuration: Configuration) -> float:
    """Return a lower bound of ``PacksProblem.estimate(configuration).seconds``; 0 where
    optimizations other than prefetch are off, for which no bound is known."""
    if replace(problem.switches, prefetch=True).off:
        return 0.0
    return _Bound(problem, configuration).seconds() * _ROUNDING


class _Bound:
    def __init__(self, problem: PacksProblem, configuration: Configuration):
        server, self._profile = problem.server, problem.profile
        self._prefetch = problem.switches.prefetch
        self._forward, self._backward = configuration.forward, configuration.backward
        self._stashes = configuration.stashes
        num_tasks = len(self._forward.packs) + len(self._backward.packs)
        devices = server.devices
        self._alone = problem.mode == "dp" or devices == 1
        self._ranks = 1 if self._alone else min(devices, num_tasks)
        working = devices if problem.mode == "dp" else self._ranks
        self._swap = server.swap_bytes_per_second.value / working
        self._p2p = server.p2p_bytes_per_second.value
        self._delete = server.delete_seconds.value
        self._shares = working if problem.swaps.sharded else 1
        #: Seconds per byte that devices make whole between them; of gradients, that they add.
        self._gather = (1 - 1 / self._shares) / self._p2p
        self._reduce = 2 * (working - 1) / working / self._p2p if problem.mode == "dp" else 0.0
        self._reduce = self._gather if problem.swaps.sharded else self._reduce
        share = problem.shares[0]
        self._sizes_f = microbatches(share, self._forward.microbatch_size)
        self._sizes_b = microbatches(share, self._backward.microbatch_size)
        self._converts = self._forward.microbatch_size != self._backward.microbatch_size

    def seconds(self) -> float:
        forward, backward = self._forward.packs, tuple(reversed(self._backward.packs))
        chains = [0.0] * self._ranks
        last_out = [0.0] * self._ranks
        for position, pack in enumerate((*forward, *backward)):
            rank = position % self._ranks
            if position < len(forward):
                chains[rank] += self._of_forward(pack, first=position == 0) + self._delete
            else:
                chains[rank] += self._of_backward(pack, position - len(forward))
                last_out[rank] = self._out(pack)
        leads, tails = self._leads(), self._tails()
        return max(
            lead + chain - end + tail
            for lead, chain, end, tail in zip(leads, chains, last_out, tails, strict=True)
        )

    def _of_forward(self, pack: Span, *, first: bool) -> float:
        total = self._before(pack)
        for size, count in _counted(self._sizes_f):
            layers = self._profile.at("forward", size)
            one = layers.time(*pack)
            if not self._prefetch:
                kept = sum(layers.inputs[at] for at in self._stashes if pack[0] <= at < pack[1])
                from_host = first or self._alone
                one += layers.inputs[pack[0]] / (self._swap if from_host else self._p2p)
                one += kept / self._swap
                one += layers.inputs[pack[1]] / self._swap if self._alone else 0.0
            total += count * one
        return total

    def _of_backward(self, pack: Span, i: int) -> float:
        """Return the seconds of the i-th backward task, until its memory is given back."""
        total = self._out(pack) + self._reduce * self._gradients(pack)
        total += self._before(pack)
        x, dx = pack[0], pack[0] > 0 and self._alone
        # X comes from another device where nothing converts it; what was kept comes from the host.
        from_device = i == 0 and not self._alone and not self._converts and self._forward.packs
        for size, count in _counted(self._sizes_b):
            layers = self._profile.at("backward", size)
            one = layers.time(*pack)
            if not self._prefetch:
                one += layers.inputs[x] / (self._p2p if from_device else self._swap)
                if i > 0:
                    one += layers.inputs[pack[1]] / (self._swap if self._alone else self._p2p)
                one += layers.inputs[x] / self._swap if dx else 0.0
            total += count * one
        return total

    def _leads(self) -> list[float]:
        """Return per rank the seconds before its chain can start: when its first input can be
        there, less the weights' transfer where the chain counts that itself."""
        leads, passed = [0.0], 0.0
        for rank in range(1, self._ranks):
            if rank > len(self._forward.packs):
                # Behind the turn a rank may compute again what it kept before its gradients come.
                leads.append(0.0)
                continue
            pack = self._forward.packs[rank - 1]
            layers = self._profile.at("forward", self._sizes_f[0])
            start = self._weights(pack) if rank == 1 else passed
            passed = start + layers.time(*pack)
            # Its chain has its weights, and they come meanwhile.
            first = (*self._forward.packs, self._backward.packs[-1])[rank]
            leads.append(passed if self._prefetch else max(0.0, passed - self._weights(first)))
        return leads

    def _tails(self) -> list[float]:
        """Return per rank the seconds that follow on its last backward pass: the last micro-batch
        goes through the packs behind, and then the last gradients go out."""
        backward = tuple(reversed(self._backward.packs))
        size, tails = self._sizes_b[-1], [0.0] * self._ranks
        behind = 0.0
        num_forward = len(self._forward.packs)
        forward, both = self._profile.at("forward", size), self._profile.at("backward", size)
        for i in range(len(backward) - 1, max(-1, len(backward) - 1 - self._ranks), -1):
            pack = backward[i]
            rank = (num_forward + i) % self._ranks
            tails[rank] = max(self._end(pack), behind)
            one = both.time(*pack) - forward.time(*pack)
            link = self._swap if self._alone else self._p2p
            behind = max(self._end(pack), behind) + one + both.inputs[pack[1]] / link
        return tails

    def _weights(self, pack: Span) -> float:
        return self._profile.streamed_bytes(*pack) / self._shares / self._swap

    def _before(self, pack: Span) -> float:
        """Return the seconds until a pack's weights are there, where no prefetch hides them."""
        return self._gather * self._profile.streamed_bytes(*pack) + (
            0.0 if self._prefetch else self._weights(pack)
        )

    def _gradients(self, pack: Span) -> int:
        alone = len(self._sizes_b) == 1 and self._shares == 1
        return self._profile.gradient_bytes(*pack, alone=alone)

    def _out(self, pack: Span) -> float:
        """Return the seconds to send a pack's gradients out and to give its memory back."""
        return self._gradients(pack) / self._shares / self._swap + self._delete

    def _end(self, pack: Span) -> float:
        """Return the seconds behind the last backward pass of a rank's last task: its gradients go
        out, then the update or the release of memory, whichever is longer."""
        return self._gradients(pack) / self._shares / self._swap + max(
            self._delete, self._profile.update_seconds(*pack) / self._shares
        )


def _counted(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(size, sizes.count(size)) for size in dict.fromkeys(sizes)]
