"""Interrupts that are raised where exceptions are ignored are not lost."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest
from test_batch import ScriptedPool, job, run
from test_bounds_search import FIVE, Planted4

from capture import interrupts


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Python's word on an exception that it ignores, which these tests plant."""
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: None)


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C as at a terminal: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def lose_an_interrupt() -> None:
    """Press Ctrl-C inside a callback of the garbage collector, as JAX has one."""

    def pressed(phase, info):
        gc.callbacks.remove(pressed)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(pressed)
    gc.collect()


def test_what_a_callback_loses_is_raised_once():
    with interrupts.noted():
        lose_an_interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_noted()
        interrupts.raise_noted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.forget()
        interrupts.raise_noted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("of_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_what_a_scheduler_sends_is_an_interrupt(of_ctrl_c):
    """In the background, too, where a shell has its jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, of_ctrl_c)
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.noted(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is of_ctrl_c


def test_a_note_outlives_a_block_within():
    with interrupts.noted():
        lose_an_interrupt()
        with interrupts.noted():
            pass
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_noted()


def test_nothing_is_noted_once_the_block_has_ended():
    with interrupts.noted():
        lose_an_interrupt()
    interrupts.raise_noted()


def test_who_ignores_interrupts_goes_on_to():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.noted():
            signal.raise_signal(signal.SIGINT)
            interrupts.raise_noted()
    finally:
        signal.signal(signal.SIGINT, before)
    other = threading.Thread(target=lambda: interrupts.noted().__enter__())
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_ends_with_its_best_plan_after_an_interrupt_that_was_lost(monkeypatch):
    planted = Planted4(1, num_layers=10)
    compiled = planted.attempt

    def attempt(*arguments):
        lose_an_interrupt()
        return compiled(*arguments)

    monkeypatch.setattr(planted, "attempt", attempt)
    with interrupts.noted():
        found = planted.search(cluster=FIVE)
    assert (found.why.proven.ended, found.compiled) == ("interrupted", True)
    assert len(planted.compiler.compiled) == 1


def test_jobs_end_by_an_interrupt_that_was_lost():
    pool = ScriptedPool()
    with interrupts.noted(), pytest.raises(KeyboardInterrupt):
        run([job(name) for name in "abc"], pool, watch=lambda event: lose_an_interrupt())
    assert len(pool.sent) < 3
