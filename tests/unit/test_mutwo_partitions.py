"""mu-TWO's profiler (A), its scheduler over partitions, and both from the data of our own search."""

from __future__ import annotations

import pytest
from array_kit import MACHINE, Kit
from merged_graphs import layers

from capture.papers.mutwo.partitions import fastest, schedule_partition
from capture.papers.mutwo.profiler import profile
from capture.papers.mutwo.readings import CORRECTED, PAPER
from capture.papers.mutwo.sub_arrays import pose, resident_bytes
from capture.step.multiplexed import build_array, lifetimes, peak_of
from capture.step.sub_array import movable

HOST = MACHINE.rates.host


class Bench:
    """Takes 2 s per operation, and 1 s per 10 bytes out or half of that in; the first iteration
    and the second measured one take ten times as long.

    Attributes:
        held: Intermediates on the device.
        most: That were there at once.
        runs: Operations so far.
    """

    def __init__(self, graph):
        self.graph, self.held, self.most, self.runs = graph, set(), 0, 0

    @property
    def _slower(self):
        return 10 if self.runs // len(self.graph.operations) in (0, 2) else 1

    def execute(self, rank):
        made = [v for v in self.graph.operations[rank].writes if v in self.graph.intermediates]
        assert self.held.issuperset(
            v for v in self.graph.operations[rank].reads if v in self.graph.intermediates
        )
        self.held.update(made)
        self.most = max(self.most, len(self.held))
        seconds = 2.0 * self._slower
        self.runs += 1
        if rank >= self.graph.num_forward:
            last = self.graph.last_bw_access
            self.held -= {v for v in self.held if last[v] == rank - self.graph.num_forward}
        return seconds

    def swap_out(self, v):
        self.held.remove(v)
        return self.graph.values[v].nbytes / 10

    def swap_in(self, v):
        self.held.add(v)
        return self.graph.values[v].nbytes / 20


def test_the_profiler_takes_the_median_of_three_after_one_and_holds_what_one_operation_needs():
    graph = layers("one", 30)
    bench = Bench(graph)
    found = profile(graph, bench)
    assert bench.runs == 4 * len(graph.operations) and bench.most == 2 and not bench.held
    assert {operation.seconds for operation in found.operations} == {2.0}
    assert [value.swap_out_seconds for value in found.values[:5]] == [3.0] * 4 + [0.0]
    assert [value.swap_in_seconds for value in found.values[:5]] == [1.5] * 4 + [0.0]
    assert found.inactive_seconds[0] == 20.0


@pytest.mark.parametrize("by_bundle", [False, True])
def test_a_sub_array_as_a_graph_needs_what_its_step_does(by_bundle):
    """With everything retained, in every segment, but for what is static there: batch and loss."""
    kit = Kit(4, shared_bytes=90)
    chain = kit.sub_array(2)
    posed = pose(chain, kit, HOST, "one", by_bundle)
    graph = posed.graph
    assert resident_bytes([posed, posed]) == 2 * posed.static_bytes + 90
    assert sum(len(own) for v, own in enumerate(posed.bundles) if v in graph.intermediates) == len(
        movable(chain)
    )
    (ledger,) = build_array([lifetimes(chain, [])], "in turn", kit).replay(record_timeline=True)
    booked: dict[str, int] = {}
    for label, memory, nbytes in ledger.timeline:
        if memory == 0 and " of sub-array" in label and not label.startswith("feed"):
            booked[label] = max(nbytes, booked.get(label, 0))
    for rank, (label, nbytes) in enumerate(booked.items()):
        resting = [
            v
            for v in graph.intermediates
            if graph.last_fw_access[v] < rank < graph.num_forward + graph.first_bw_access[v]
        ]
        ours = resident_bytes([posed]) + graph.peak_bytes[rank]
        ours += sum(graph.values[v].nbytes for v in resting)
        loss = chain.bundles[chain.loss].nbytes
        assert nbytes <= ours <= nbytes + loss, label


def test_sub_arrays_of_like_times_are_pairs_and_the_fastest_partition_that_fits_wins():
    kit = Kit(3)
    sizes = [(4, 4), (3, 1, 3, 1), (2, 2, 2, 2), (1,) * 8]
    free = [schedule_partition(kit, one, HOST, 10**9, CORRECTED) for one in sizes]
    assert free[1].pairs == ((0, 2), (1, 3))
    assert fastest(free).sizes == (4, 4)
    # What needs least of the device is still there when the limit falls.
    least = min(free, key=lambda one: one.peak_bytes)
    assert least.sizes == (1,) * 8
    tight = least.peak_bytes
    found = [schedule_partition(kit, one, HOST, tight, CORRECTED) for one in sizes]
    assert all(one.peak_bytes <= tight for one in found if one.fits)
    best = fastest(found)
    assert best is not None and best.seconds == min(one.seconds for one in found if one.fits)
    assert fastest(schedule_partition(kit, one, HOST, 1, CORRECTED) for one in sizes) is None


@pytest.mark.parametrize("readings", [PAPER, CORRECTED], ids=["paper", "corrected"])
def test_decisions_are_those_of_a_plan(readings):
    kit = Kit(4)
    free = schedule_partition(kit, (2, 2), HOST, 10**9, CORRECTED).peak_bytes
    found = schedule_partition(kit, (2, 2), HOST, int(0.8 * free), readings)
    decided = [
        list(posed.decisions(policy.schedule))
        for posed, policy in zip(found.posed, found.schedules[0].policies, strict=True)
    ]
    assert any(decided)
    arrays = [
        lifetimes(posed.sub_array, own) for posed, own in zip(found.posed, decided, strict=True)
    ]
    retained = [lifetimes(posed.sub_array, []) for posed in found.posed]
    least = peak_of(build_array(arrays, "multiplexed", kit, 1).replay(), 0)[0]
    assert least < peak_of(build_array(retained, "multiplexed", kit, 1).replay(), 0)[0]
