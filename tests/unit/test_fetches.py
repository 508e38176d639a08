"""Which pieces a device fetches from which, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from capture.runtime.fetches import plan_fetches


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


class Layout:
    """As a sharding: per device its slices."""

    def __init__(self, slices: dict[Device, tuple[slice, ...]]):
        self._slices = slices

    def devices_indices_map(self, shape):
        return self._slices


#: Two devices of each of three processes.
DEVICES = [Device(10 * process + i, process) for process in range(3) for i in range(2)]
A, B, C, D, E, F = DEVICES
WHOLE = (slice(None),)


def sources(src: Layout, dst: Layout, shape=(4,)) -> list[tuple[int, int]]:
    return [(f.source.id, f.target.id) for f in plan_fetches(shape, src, dst).fetches]


def test_a_replica_of_the_same_process_serves_first():
    src = Layout({A: WHOLE, C: WHOLE})
    assert sources(src, Layout({D: WHOLE, B: WHOLE})) == [(C.id, D.id), (A.id, B.id)]


def test_replicas_share_the_sending_and_the_first_is_that_of_the_lowest_id():
    orders = ([A, B], [B, A])
    for order in orders:
        src = Layout(dict.fromkeys(order, WHOLE))
        assert sources(src, Layout(dict.fromkeys([C, D], WHOLE))) == [(A.id, C.id), (B.id, D.id)]


def test_pieces_are_cut_once_for_all_who_fetch_them():
    halves = {A: (slice(0, 2),), B: (slice(2, 4),)}
    found = plan_fetches((4,), Layout({A: WHOLE}), Layout({C: halves[A], D: halves[A]}))
    assert found.cuts == {A: (((0, 2),),)}
    assert [fetch.piece for fetch in found.fetches] == [0, 0]
    joined = plan_fetches((4,), Layout(halves), Layout({E: WHOLE}))
    assert joined.cuts == {} and joined.joins == ((E, ((0,), (2,))),)
    assert [fetch.shape for fetch in joined.fetches] == [(2,), (2,)]


@pytest.mark.parametrize("size", [0, 4])
def test_an_empty_array_is_fetched_whole(size):
    assert sources(Layout({A: WHOLE}), Layout({C: WHOLE}), (size,)) == [(A.id, C.id)]
