"""The benchmark beside other libraries, without them: its steps train as one device does, its
meters see what the ledger books, and a library that is missing is skipped by name."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec

import pytest

from benchmarks import peers
from benchmarks.peer_libraries import (
    GSPMD,
    JAXPP,
    LIBRARIES,
    ONE_DEVICE,
    OURS,
    SCHEDULES_OF_PEERS,
    SPECTRAX,
    Case,
)
from benchmarks.peer_meters import PythonThreads, measure_memory

MODEL = {"num_blocks": 2, "width": 8, "num_heads": 2, "seq_len": 4, "vocab_size": 16}
CASE = Case(MODEL, 1, num_stages=2, num_microbatches=2)

without_peers = pytest.mark.skipif(
    any(find_spec(package) for package in ("spectrax", "jaxpp")), reason="SpectraX or JaxPP is here"
)


@pytest.fixture(scope="module")
def document():
    """Of the whole comparison of steps, on a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "case_of", lambda model, schedule, remat: CASE)
        skipped: dict[str, str] = {}
        return peers.compare_steps("tiny", "1f1b", 1, skipped), skipped


@without_peers
def test_a_library_that_is_missing_is_skipped_by_name(document):
    rows, skipped = document
    assert set(skipped) == {SPECTRAX, JAXPP}
    assert "spectrax" in skipped[SPECTRAX] and "jaxpp" in skipped[JAXPP]
    assert {row["library"] for row in rows} == {OURS, GSPMD, ONE_DEVICE}


def test_all_train_as_one_device_does(document):
    rows, _ = document
    for row in rows:
        assert row["max_relative_loss_difference"] < 1e-6, row["library"]
        assert len(set(row["losses"])) == peers.NUM_LOSSES, "parameters change"
        assert row["num_steps"] == peers.STEPS_PER_TURN - 1


def test_ours_is_compared_with_what_has_the_same_schedule_and_recomputes_as_much(document):
    rows, _ = document
    seconds = {row["library"]: row["step_seconds"] for row in rows if row["remat"] == "none"}
    found = peers.ratios(rows, [])
    assert {row["library"] for row in found} == {GSPMD, ONE_DEVICE}
    for row in found:
        if row["remat"] == "none":
            assert row["step_ratio"] == seconds[OURS] / seconds[row["library"]]
    others = [{**row, "schedule": "gpipe"} for row in rows if row["library"] != OURS]
    assert not peers.ratios([row for row in rows if row["library"] == OURS] + others, [])


def test_what_fails_of_ours_is_no_reason_to_skip():
    with pytest.raises(ValueError, match="ours"):
        peers._skip(OURS, ValueError("ours"), {})


def test_the_meter_of_all_libraries_sees_what_our_ledger_books():
    made = {}

    def make(case):
        made["trainer"] = LIBRARIES[OURS].make(case)
        return made["trainer"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "benchmarks.peer_meters.LIBRARIES", {OURS: peers.LIBRARIES[OURS].__class__(make)}
        )
        found = measure_memory(OURS, CASE)
    step = made["trainer"].pipeline
    assert found.peak_bytes_per_device == step.replay().peak_bytes_per_device
    runs = [each for each in step.program.instructions if type(each).__name__ == "Run"]
    # An update is two programs: on CPU it clears the gradients apart.
    assert found.num_programs == len(runs) + CASE.num_stages


def test_programs_run_as_before_when_the_meter_is_gone():
    from jax._src import pjit
    from jaxlib import _jax

    before = pjit._get_fastpath_data, _jax.LoadedExecutable.execute_sharded
    found = measure_memory(ONE_DEVICE, CASE)
    assert found.num_programs == 1 and found.peak_bytes_per_device[1] == 0
    assert found.peak_bytes_per_device[0] > found.between_steps_bytes_per_device[0] > 0
    assert (pjit._get_fastpath_data, _jax.LoadedExecutable.execute_sharded) == before


def test_threads_of_a_library_are_counted_whether_they_have_ended_or_not():
    def work(seconds, done=None):
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            pass
        if done is not None:
            done.set()
            stop.wait()

    stop, done = threading.Event(), threading.Event()
    with PythonThreads() as threads:
        before = threads.seconds()
        staying = threading.Thread(target=work, args=(0.02, done))
        staying.start()
        ending = threading.Thread(target=work, args=(0.02,))
        ending.start()
        ending.join()
        done.wait()
        work(0.02)
        counted = threads.seconds() - before
        stop.set()
        staying.join()
    assert 0.04 <= counted < 0.06, "both, and not the calling one"


def test_schedules_are_those_that_all_have():
    assert set(SCHEDULES_OF_PEERS) >= {"1f1b", "gpipe"}
