"""What is measured of an array, once, and what is said meanwhile."""

from __future__ import annotations

from functools import partial

import jax
import pytest
from array_kit import Kit
from array_models import BATCH, MEMBERS, tiny_gpt

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.link_fit import MeasuredCopies, fit_host_link
from capture.measured.store import Store
from capture.profiler import array as profiler
from capture.profiler.array import ArrayBackend, ArrayProfile
from capture.profiler.asked import ArrayCall, ArrayShape, HostCopy, ProgramCost
from capture.runtime.array_programs import program_name
from capture.step.sub_array import Call
from profiling_runs.arrays import _measured
from profiling_runs.require import Measurer
from recommender.mutwo import ArrayQuestion


class Backend(Kit):
    """That says of every program that it takes a second."""

    store, provenance = Store(), {}
    measured = ArrayBackend.measured

    def measure(self, what):
        return ProgramCost(1, 1.0)

    def key_of(self, name: str) -> str:
        return name


def test_every_program_is_said_once_and_more_of_them_are_when_they_come(monkeypatch):
    said: list[tuple[str, int, int]] = []
    name = lambda array, call: f"{call} of {array.num_models}"  # noqa: E731
    monkeypatch.setattr(profiler, "program_name", name)
    cluster = Cluster((1,), "h200")
    profile = ArrayProfile(None, cluster, ArrayShape(1), progress=lambda *one: said.append(one))
    backend = Backend(2)
    vars(profile)["backend"] = backend
    profile.prepare([2, 1, 2])
    assert said == [("segments", done, 8) for done in range(9)]
    said.clear()
    one, call = backend.sub_array(1), Call("recompute", 0, (0,), (), (1,))
    for _ in range(2):
        assert profile.facts(one, call).seconds == 1.0
    assert said == [("more programs", 1, 2)]
    profile.end()
    assert said[1:] == [("more programs", 1, 1)]


def test_a_program_is_executed_alone_and_its_slow_run_does_not_count():
    """One execution that does not count, and the median of three; nothing is on the device but what
    the program reads, and after it nothing."""
    backend = ArrayBackend(tiny_gpt(1), ArrayShape(BATCH))
    array = backend.fuser.of(2)
    call = next(
        issued.call for issued in profiler.Uses(array).issued if issued.call.kind == "backward"
    )
    reads = sum(array.bundles[n].nbytes for n in call.inputs)
    live, ticks = [], iter([0, 100, 200, 203, 300, 390, 400, 402])
    others = {id(x) for x in jax.live_arrays()}

    def clock() -> int:
        here = [x for x in jax.live_arrays() if id(x) not in others and not x.is_deleted()]
        live.append(sum(x.nbytes for x in here if x.sharding.memory_kind != "pinned_host"))
        return next(ticks)

    backend.clock = clock
    assert backend.measure(ArrayCall(2, call)).seconds == 3
    assert live[::2] == [reads] * 4
    assert all(not x.is_deleted() for x in jax.live_arrays() if id(x) in others)


def test_what_was_measured_is_kept_when_the_rest_is_not(monkeypatch):
    """As jobs of this process: a profile that is ended goes on where it was; a later one asks for
    nothing, and its seconds are the same."""
    store, made, most = Store(), [], 2

    def measure(self, what):
        if len(made) == most:
            raise KeyboardInterrupt
        made.append(what)
        return ProgramCost(7, 0.5 + len(made))

    monkeypatch.setattr(ArrayBackend, "measure", measure)

    def profile() -> ArrayProfile:
        measurers = {}
        found = ArrayProfile(
            tiny_gpt(2), Cluster((1,), "cpu"), ArrayShape(BATCH), executes=True, store=store,
            measure=partial(_measured, measurers, None),
        )  # fmt: skip
        measurers[None] = Measurer(found.backend)
        return found

    with pytest.raises(KeyboardInterrupt):
        profile().prepare([2])
    assert len(store) == 3  # and the outline of the array
    most = 100
    first = profile()
    first.prepare([2])
    assert len(made) == len(set(made)) == 4  # of 2 equal layers: the last has the loss
    later = profile()
    later.prepare([2])
    assert len(made) == 4
    array = later.sub_array(2)
    calls = [issued.call for issued in profiler.Uses(array).issued]
    seconds = [later.facts(array, call).seconds for call in calls]
    assert sorted(seconds) == [1.5, 2.5, 3.5, 4.5]
    assert len({program_name(array, call) for call in calls}) == 4


def test_a_link_is_fitted_both_ways_and_shared_unless_both_hide_each_other():
    sizes = (10**6, 10**7, 10**8)
    rows = [(n, 1e-5 + n / 4e9, 2e-5 + n / 2e9) for n in sizes]
    apart = [MeasuredCopies(n, one, other, max(one, other)) for n, one, other in rows]
    together = [MeasuredCopies(n, one, other, 0.8 * one + other) for n, one, other in rows]
    free, shared = (fit_host_link(rows, "planted") for rows in (apart, together))
    assert free.link.duplex and not shared.link.duplex
    assert shared.hidden_fraction == pytest.approx(0.2)
    assert free.link.to_device.seconds(10**7) == pytest.approx(1e-5 + 1e7 / 4e9)
    assert free.link.to_host.seconds(10**7) == pytest.approx(2e-5 + 1e7 / 2e9)
    assert "20% of the shorter" in shared.link.duplex_source


def test_copies_are_measured_both_ways():
    backend = ArrayBackend(tiny_gpt(1), ArrayShape(BATCH))
    ticks = iter(range(0, 800, 10))
    backend.clock = lambda: next(ticks)
    for way in ("to device", "to host", "both"):
        assert backend.measure(HostCopy(way, 4096)).seconds == 10


def test_what_is_executed_is_on_the_target_and_has_a_limit():
    with pytest.raises(PlanError) as error:
        profile = ArrayProfile(tiny_gpt(1), Cluster((1,), "h200"), ArrayShape(BATCH), executes=True)
        profile.prepare([1])
    assert error.value.codes == ("array-devices",)
    for backend, code in (("run", "array-limit"), ("alpa", "array-backend")):
        with pytest.raises(PlanError) as error:
            ArrayQuestion(None, MEMBERS, Cluster((1,), "cpu"), BATCH, backend=backend)
        assert error.value.codes == (code,)
