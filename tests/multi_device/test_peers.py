"""The benchmark beside other libraries, without them: its steps train as one device does, its
meters see what the ledger books, and a library that is missing is skipped by name."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from benchmarks import peer_meters, peers
from benchmarks.peer_libraries import (
    GSPMD,
    JAXPP,
    LIBRARIES,
    ONE_DEVICE,
    OURS,
    SCHEDULES_OF_PEERS,
    SPECTRAX,
    Case,
    Library,
)
from benchmarks.peer_meters import PythonThreads, measure_memory
from capture.step.program import Run

# What its tests share is made by one worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

MODEL = {"num_blocks": 2, "width": 8, "num_heads": 2, "seq_len": 4, "vocab_size": 16}
CASE = Case(MODEL, 1, num_stages=2, num_microbatches=2)

without_peers = pytest.mark.skipif(
    any(find_spec(package) for package in ("spectrax", "jaxpp")), reason="SpectraX or JaxPP is here"
)


@pytest.fixture(scope="module")
def compared():
    """Rows of all steps of a tiny model, what was skipped, and our compiled step."""
    made = []

    def make(case):
        made.append(LIBRARIES[OURS].make(case))
        return made[-1]

    libraries = {**LIBRARIES, OURS: replace(LIBRARIES[OURS], make=make, remats=("none",))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "LIBRARIES", libraries)
        patch.setattr(peers, "case_of", lambda model, schedule, remat: CASE)
        skipped: dict[str, str] = {}
        return peers.compare_steps("tiny", "1f1b", 1, skipped), skipped, made[0]


@without_peers
def test_a_library_that_is_missing_is_skipped_by_name(compared):
    rows, skipped, _ = compared
    assert set(skipped) == {SPECTRAX, JAXPP}
    assert "spectrax" in skipped[SPECTRAX] and "jaxpp" in skipped[JAXPP]
    assert {row["library"] for row in rows} == {OURS, GSPMD, ONE_DEVICE}


def test_all_train_as_one_device_does(compared):
    rows, *_ = compared
    for row in rows:
        assert row["max_relative_loss_difference"] < 1e-6, row["library"]
        assert len(set(row["losses"])) == peers.NUM_LOSSES, "parameters change"
        assert row["num_steps"] == peers.STEPS_PER_TURN - 1


def test_ours_is_compared_with_what_has_the_same_schedule_and_recomputes_as_much(compared):
    rows, *_ = compared
    seconds = {row["library"]: row["step_seconds"] for row in rows if row["remat"] == "none"}
    found = peers.ratios(rows, [])
    assert {row["library"] for row in found} == {GSPMD, ONE_DEVICE}
    for row in found:
        if row["remat"] == "none":
            assert row["step_ratio"] == seconds[OURS] / seconds[row["library"]]
    others = [{**row, "schedule": "gpipe"} for row in rows if row["library"] != OURS]
    assert not peers.ratios([row for row in rows if row["library"] == OURS] + others, [])


def test_the_table_has_every_library_and_says_what_was_skipped(compared):
    rows, *_ = compared
    text = peers.as_text(
        {"steps": rows, "memory": [], "ratios": peers.ratios(rows, []), "skipped": {"X": "why"}}
    )
    assert OURS in text and GSPMD in text and "skipped: X: why" in text


def test_what_fails_of_ours_is_no_reason_to_skip():
    with pytest.raises(ValueError, match="ours"):
        peers._skip(OURS, ValueError("ours"), {})


def test_the_meter_of_all_libraries_sees_what_our_ledger_books(compared, monkeypatch):
    *_, trainer = compared
    # Programs are bound again, and then pass the meter; what is alive before it does not count.
    del trainer.pipeline.__dict__["bound"]
    trainer.state = None

    def make(case):
        trainer.state = trainer.pipeline.init_from(case.params())
        return trainer

    monkeypatch.setattr(peer_meters, "LIBRARIES", {OURS: Library(make)})
    found = measure_memory(OURS, CASE)
    ledger = trainer.pipeline.replay()
    assert found.peak_bytes_per_device == ledger.peak_bytes_per_device
    held = [ledger.live_bytes[device] for device in range(ledger.num_devices)]
    assert found.between_steps_bytes_per_device == tuple(held)
    runs = [each for each in trainer.pipeline.program.instructions if isinstance(each, Run)]
    assert found.num_programs == len(runs)


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
