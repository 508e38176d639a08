"""What is kept of a joint step instead of tracing it again: all that a plan asks of it."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import optax
import pytest
from array_models import BATCH, tiny_gpt, tiny_lora

from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.profiler.array import ArrayProfile
from capture.profiler.asked import ArrayShape
from capture.runtime.array_programs import program_name
from capture.runtime.fused import FusedArray, Fuser
from capture.step.sub_array import Call, Uses, recomputable


def remat_gpt():
    plain = tiny_gpt(2)
    return replace(plain, loss_fn=jax.checkpoint(plain.loss_fn))


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        (remat_gpt, {"bundle_bytes": 512}),
        (lambda: tiny_lora(noisy=True), {"shared": ("base/*",), "shared_batches": True}),
    ],
    ids=["remat", "shared, with keys"],
)
def test_an_outline_is_the_array(workload, options):
    """Bundles, segments, what slices read, and the names of all programs; by JSON."""
    fuser = Fuser(workload(), BATCH, **options)
    traced = fuser.of(3)
    known = FusedArray(fuser, 3, json.loads(json.dumps(traced.outline)))
    for name in ("bundles", "segments", "loss", "num_leaves", "params", "state", "values"):
        assert getattr(known, name) == getattr(traced, name)
    assert known.outline == traced.outline
    calls = [issued.call for issued in Uses(traced).issued]
    for number in recomputable(traced):
        writer = traced.bundles[number].writer
        there = frozenset(traced.segments[writer].reads)
        sources = known.sources((number,), there)
        assert sources == traced.sources((number,), there)
        calls.append(Call("recompute", writer, sources, (), (number,)))
    assert len(calls) > len(traced.segments) or workload is remat_gpt
    assert [program_name(known, one) for one in calls] == [
        program_name(traced, one) for one in calls
    ]


def test_what_the_store_has_is_not_traced_again(monkeypatch):
    store, cluster, traced = Store(), Cluster((1,), "h200"), list[int]()
    trace = FusedArray._traced_program
    monkeypatch.setattr(FusedArray, "_traced_program", lambda self: traced.append(1) or trace(self))

    def array(workload=None, size: int = 2, **options):
        workload = workload or tiny_gpt(2)
        shape = ArrayShape(BATCH, **options)
        return ArrayProfile(workload, cluster, shape, store=store).sub_array(size)

    first = array()
    assert array().bundles == first.bundles and array().outline == first.outline
    assert array(bundle_bytes=256).values != first.values  # of the same program
    assert len(traced) == 1
    other = replace(tiny_gpt(2), optimizer=optax.inject_hyperparams(optax.adam)(0.1))
    decayed = replace(other, optimizer=optax.inject_hyperparams(optax.adamw)(0.1))
    for n, again in enumerate([(other,), (decayed,), (tiny_gpt(2, tied=True),), (None, 3)]):
        array(*again)
        assert len(traced) == n + 2
    array(shared_batches=True)
    array(shared=("table",), workload=_with_fixed_table())
    assert len(traced) == 7


def _with_fixed_table():
    plain = tiny_gpt(2)
    labels = {"table": "fixed", "blocks": "own", "head": "own"}
    optimizer = optax.multi_transform(
        {"own": plain.optimizer, "fixed": optax.set_to_zero()}, labels
    )
    return replace(plain, optimizer=optimizer)


def test_other_code_traces_again(monkeypatch):
    store, cluster = Store(), Cluster((1,), "h200")
    for n, code in enumerate(["a", "a", "b"]):
        monkeypatch.setattr("capture.profiler.array._code", lambda code=code: code)
        ArrayProfile(tiny_gpt(1), cluster, ArrayShape(BATCH), store=store).sub_array(1)
        assert len(store) == (1, 1, 2)[n]
    assert [row.provenance["kind"] for row in store.rows()] == ["outline"] * 2
