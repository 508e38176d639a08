"""The ledger: parts sum to the peak, nothing is dropped twice, and the timeline says when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.step.ledger import Ledger, Peak

CATEGORIES = ["parameters", "activations", "gradients"]
entries = st.lists(
    st.tuples(
        st.sampled_from(["hold", "drop", "run"]),
        st.integers(0, 2),
        st.sampled_from(CATEGORIES),
        st.integers(0, 99),
    )
)


@given(entries)
def test_peak_is_the_most_that_was_ever_live_and_its_parts_sum_to_it(entries):
    """Against a list of buffers and the maximum of their sums."""
    ledger, buffers, most = Ledger(3), [], [0, 0, 0]
    for i, (action, device, category, nbytes) in enumerate(entries):
        if action == "hold":
            ledger.hold([device], nbytes, category, f"at {i}")
            buffers.append((device, category, nbytes))
        elif action == "drop" and buffers:
            device, category, nbytes = buffers.pop(nbytes % len(buffers))
            ledger.drop([device], nbytes, category)
        elif action == "run":
            ledger.execute([device], nbytes, f"at {i}")
        live = [sum(n for d, _, n in buffers if d == device) for device in range(3)]
        assert [ledger.live_bytes[device] for device in range(3)] == live
        running = nbytes if action == "run" else 0
        most = [
            max(m, n + (running if d == device else 0))
            for d, (m, n) in enumerate(zip(most, live, strict=True))
        ]
        assert ledger.peak_bytes_per_device == tuple(most)
    assert all(sum(peak.parts.values()) == peak.peak_bytes for peak in ledger.peaks)


def test_a_peak_names_its_first_instant_and_the_running_programs_part():
    ledger = Ledger(2)
    ledger.hold([0, 1], 10, "parameters", "before")
    ledger.hold([1], 0, "activations", "nothing")
    ledger.execute([1], 5, "forward 0")
    ledger.execute([1], 5, "forward 1")
    assert ledger.peaks == (
        Peak(10, "before", {"parameters": 10}),
        Peak(15, "forward 0", {"parameters": 10, "temporaries": 5}),
    )
    ledger.drop([1], 10, "parameters")
    assert ledger.peaks[1].peak_bytes == 15 and ledger.live_bytes == {0: 10, 1: 0}


def test_dropping_more_than_was_held_is_our_bug_even_if_other_categories_would_cover_it():
    ledger = Ledger(1)
    ledger.hold([0], 10, "parameters")
    ledger.hold([0], 4, "activations")
    with pytest.raises(
        AssertionError, match=r"^activations on device 0 dropped more than was held$"
    ):
        ledger.drop([0], 5, "activations")


def test_timeline_keeps_every_change_if_asked():
    quiet, ledger = Ledger(1), Ledger(2, record_timeline=True)
    for each in (quiet, ledger):
        each.hold([0], 3, "parameters", "before")
        each.execute([0], 4, "forward")
        each.drop([0], 3, "parameters")
        each.execute([0], 1, "update")
    assert ledger.timeline == [
        ("before", 0, 3),
        ("forward", 0, 7),
        ("free parameters", 0, 0),
        ("update", 0, 1),
    ]
    assert quiet.timeline == []
    assert max(nbytes for _, _, nbytes in ledger.timeline) == ledger.peak_bytes_per_device[0]
