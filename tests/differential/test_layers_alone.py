"""Layers alone: chained, they are the loss and its gradient; profiled, equal layers are measured
once, what is interrupted ends in the same bytes, and packs of them can be planned and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capture import Cluster, Store, Workload, WorkloadSpec, decompose, streamed
from capture.errors import ProfileError, TargetError
from capture.machine.server import Server
from capture.machine.target import Target
from capture.measured.layer_passes import PassProfile
from capture.measured.layer_profile import LayerProfile
from capture.profiler.layers import LayerBackend, cast_bytes, weight_bytes
from capture.runtime.packs import TracedSizes
from capture.step.holds import Params
from capture.step.pack_sizes import ProfileSizes
from profiling_runs import LayersQuestion, Where, profile_layers
from recommender.harmony import PacksQuestion, harmony
from tests.processes import user_model

CPU_LIKE = str(Path(__file__).parents[1] / "recorded" / "files" / "cpu_like.json")
HERE = Where(0)
#: Of all tests that measure the same model: what one has measured, the next one knows.
STORE = Store()


def skipping(coupled: bool = False) -> Workload:
    """A value that skips a layer, and a parameter that two layers share."""

    def init(key):
        keys = jax.random.split(key, 3)
        return {n: jax.random.normal(k, (8, 8)) / 3 for n, k in zip("abc", keys, strict=True)}

    def loss_fn(params, batch):
        from jax.ad_checkpoint import checkpoint_name

        def mark(x):
            return checkpoint_name(x, "layer_boundary")

        first = jnp.tanh(batch["x"] @ params["a"])
        if coupled:
            first = first - first.mean(0)
        x = mark(jnp.tanh(mark(first) @ params["b"]))
        x = mark(jnp.tanh((x + first) @ params["c"]))
        return jnp.mean((x @ params["a"] - batch["y"]) ** 2)

    def batch(key, size):
        x, y = jax.random.normal(key, (2, size, 8))
        return {"x": x, "y": y}

    return Workload(loss_fn, init, batch, optax.adam(1e-2))


def test_layers_in_a_row_are_the_loss_and_its_gradient():
    task = skipping()
    params, batch = task.init(jax.random.key(0)), task.batch(jax.random.key(1), 4)
    layers = decompose(task, 4)
    graph, values, entered = layers.traced.graph, [], []
    for i in range(layers.num_layers):
        entered.append(values)
        (values,) = layers.forward(i)(layers.weights(params, i), values, layers.batch(batch, i))
    loss, expected = jax.value_and_grad(task.loss_fn)(params, batch)
    assert float(values[0]) == pytest.approx(float(loss), rel=1e-6)
    found, gradient = {}, []
    for i in reversed(range(layers.num_layers)):
        *made, of_weights = layers.backward(i)(
            layers.weights(params, i), entered[i], layers.batch(batch, i), gradient
        )
        gradient = made[0] if i else []
        for p, array in zip(graph.layers[i].params, of_weights, strict=True):
            found[p] = found.get(p, 0) + array
    leaves = jax.tree.leaves(expected)
    assert layers.num_layers == 4 and sorted(found) == [0, 1, 2]
    for p, array in found.items():
        np.testing.assert_allclose(array, leaves[p], rtol=2e-5, atol=1e-7)


def test_a_profile_says_what_the_layers_are(tmp_path):
    question = LayersQuestion(skipping(), CPU_LIKE, most=4, stride=2)
    profile = profile_layers(question, where=HERE, store=STORE)
    square, row = 8 * 8 * 4, 8 * 4
    assert profile.w_bytes == (square, square, square, 0)
    assert profile.b_bytes == (0, 0, 0, square)  # what the last layer reads of the first
    assert profile.shared == ((square, 0, 3),)
    assert profile.k_bytes == (2 * square + 4,) * 3 + (0,)
    # The batch; what skips a layer goes through it.
    assert profile.x_bytes_per_sample == (2 * row, row, 2 * row, row)
    assert profile.fwd.u == profile.bwd.u == (1, 2, 4)
    assert profile.update_cpu_time[0] == pytest.approx(7 * square / 20e9, rel=0.01)
    rates = Target.load(CPU_LIKE).rates
    assert profile.add_seconds == (3 * square / rates.reached_bytes_per_second,) * 4
    for which in ("forward", "backward"):
        at = profile.at(which, 4)
        assert (at.memory_bytes >= at.input_bytes + profile.w_bytes).all()
    assert (profile.at("backward", 4).memory_bytes > profile.at("forward", 4).memory_bytes).all()
    profile.save(tmp_path / "layers.json")
    assert LayerProfile.load(tmp_path / "layers.json") == profile


def halved(only: str) -> Workload:
    """The same loss of some parameters in bfloat16."""
    plain = skipping()

    def loss_fn(params, batch):
        return plain.loss_fn(
            {n: w.astype(jnp.bfloat16) if n in only else w for n, w in params.items()}, batch
        )

    return replace(plain, loss_fn=loss_fn)


@pytest.mark.parametrize("only", ["abc", "a", "bc", "c", ""])
def test_sizes_of_a_profile_are_those_of_its_arrays(only):
    """Of parameters that several layers read, too, and of those that devices get as casts."""
    backend = LayerBackend(halved(only), target=Target.load(CPU_LIKE))
    graph, traced = backend.graph(), backend.layers(1).traced
    own, borrowed = weight_bytes(graph)
    nothing = PassProfile((1,), ((0.0,) * 4,), ((0,) * 4,))
    rows = ((0,) * 4, tuple(own), tuple(borrowed), (0,) * 4, (0.0,) * 4)
    profile = LayerProfile("tied", 4, nothing, nothing, *rows, shared=backend.shared())
    profile = replace(profile, casts=cast_bytes(traced))
    assert bool(profile.casts) == bool(only)
    spans = [(i, j) for i in range(4) for j in range(i + 1, 5)]
    optimizer: Any = None  # says what no layer profile is asked here
    for streamed_as in ("", *profile.casts):
        casts = dict(enumerate(traced.casts)) if streamed_as else {}
        arrays = TracedSizes(graph, optimizer, {p: c for p, c in casts.items() if c})
        sizes = ProfileSizes(profile.as_streamed(streamed_as))
        ours, theirs = sizes.layers, arrays.layers
        for span in spans:
            # A profile knows those that are shared by their places there, and else two of a layer.
            assert len(ours.shared(span)) == len(theirs.shared(span))
            assert (0 in ours.owned(span)) == (0 in theirs.owned(span))
            assert (0 in ours.cast(span)) == (0 in theirs.cast(span))
            for form in ("whole", "sent", "alone"):
                owned = [Params(of.owned(span), form) for of in (ours, theirs)]
                cast = [Params(of.cast(span), form) for of in (ours, theirs)]
                for one, other in (owned, cast):
                    assert sizes.nbytes(one) == arrays.nbytes(other), (form, span)
        assert ours.owner[0] == theirs.owner[0]
        for form in ("whole", "sent"):
            assert sizes.nbytes(Params((0,), form)) == arrays.nbytes(Params((0,), form)), form


def test_memory_is_that_of_the_compiled_layer_with_its_arguments():
    backend = LayerBackend(skipping(), target=Target.load(CPU_LIKE))
    assert backend.summary_bytes() == 0
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert LayerBackend(replace(skipping(), optimizer=clipped)).summary_bytes() == 4
    layers = backend.layers(4)
    profile = profile_layers(
        LayersQuestion(skipping(), CPU_LIKE, most=4, stride=4), where=HERE, store=STORE
    )
    for which, row in (("forward", profile.fwd), ("backward", profile.bwd)):
        program = layers.program(which, 1)
        arguments = jax.tree.leaves(program.arguments)
        compiled = jax.jit(program.function).lower(*program.arguments).compile()
        memory = compiled.memory_analysis()
        expected = sum(a.size * a.dtype.itemsize for a in arguments)
        expected += memory.temp_size_in_bytes + memory.output_size_in_bytes
        assert row.memory[-1][1] == expected


def test_equal_layers_are_measured_once_and_a_profile_resumes(tmp_path):
    (tmp_path / "tiny.py").write_text(user_model("tiny"))
    spec = WorkloadSpec.parse(f"{tmp_path / 'tiny.py'}:model?layers=5")
    question, began = LayersQuestion(spec, CPU_LIKE, most=2), []

    class InterruptedHereError(Exception):
        pass

    def stop(event):
        began.extend([event["key"]] if event["state"] == "running" else [])
        if len(began) == 4:
            raise InterruptedHereError

    with pytest.raises(InterruptedHereError):
        profile_layers(question, where=HERE, store=Store(tmp_path / "store"), watch=stop)
    profile_layers(
        question,
        where=HERE,
        store=Store(tmp_path / "store"),
        watch=lambda event: began.append(event["key"]) if event["state"] == "running" else None,
    ).save(tmp_path / "resumed.json")
    told = []
    profile_layers(question, where=HERE, progress=lambda *of: told.append(of)).save(
        tmp_path / "whole.json"
    )
    assert len({*told}) == len(told), "what follows is not counted from the start again"
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    # First, inner and last layers, both ways, at two sizes; one was interrupted.
    assert len({*began}) == 3 * 2 * 2 and len(began) <= 3 * 2 * 2 + 1


def test_the_limit_ends_the_search_for_the_largest_size():
    whole = profile_layers(LayersQuestion(skipping(), CPU_LIKE, most=4), where=HERE, store=STORE)
    limit = max(whole.bwd.memory[2])  # of 3 examples
    asked = LayersQuestion(skipping(), CPU_LIKE, most=8, memory_limit_bytes=limit)
    profile = profile_layers(asked, where=HERE, store=STORE)
    assert profile.made["trials"]["backward"] == [1, 2, 4, 3]
    assert profile.bwd.u[-1] == 3 <= profile.fwd.u[-1]
    asked = LayersQuestion(skipping(), CPU_LIKE, most=8, memory_limit_bytes=100)
    profile = profile_layers(asked, where=HERE, store=STORE)
    assert profile.made["largest"] == {"forward": 0, "backward": 0} and profile.bwd.u == (1,)
    server = Server.of(Cluster((2,), CPU_LIKE)).with_(usable_bytes=100)
    answer = harmony(PacksQuestion(profile, server, 8))
    assert (answer.status, answer.why.code) == ("infeasible", "packs-layer")


def test_a_coupled_loss_keeps_one_size():
    profile = profile_layers(
        LayersQuestion(skipping(coupled=True), CPU_LIKE, most=2), where=HERE, store=STORE
    )
    assert profile.coupled
    server = Server.of(Cluster((2,), CPU_LIKE)).with_(usable_bytes=3 * max(profile.bwd.memory[-1]))
    for algorithm in ("bounded", "wide"):
        answer = harmony(PacksQuestion(profile, server, 2, algorithm=algorithm))
        configuration = answer.plan.configuration
        assert configuration.forward.microbatch_size == configuration.backward.microbatch_size
        sizes = {
            (p["forward"]["microbatch_size"], p["backward"]["microbatch_size"])
            for p in answer.plan.points
        }
        assert all(u_f == u_b for u_f, u_b in sizes)


def test_layers_are_executed(tmp_path):
    profile = profile_layers(LayersQuestion(skipping(), backend="run", most=2), where=HERE)
    assert all(seconds > 0 for row in profile.fwd.time + profile.bwd.time for seconds in row)
    assert all(seconds > 0 for seconds in profile.update_cpu_time[:3])
    assert profile.update_cpu_time[3] == 0 and profile.source.startswith("executed on")
    assert all(seconds > 0 for seconds in profile.add_seconds)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ({"most": 0, "stride": 0}, ["layers-question", "layers-question"]),
        ({"target": "cpu", "most": 4}, ["layers-target"]),
        ({"target": "cpu"}, ["layers-target", "layers-limit"]),
        ({"backend": "run", "target": "cpu"}, ["layers-limit"]),
        ({"update_bytes_per_second": float("nan"), "most": 4}, ["layers-question"]),
        ({"backend": "run", "update_bytes_per_second": 1e9, "most": 4}, ["layers-question"]),
        ({"backend": "alpa"}, ["target-unknown"]),
    ],
)
def test_all_that_is_wrong_is_said_at_once(asked, codes):
    with pytest.raises((ProfileError, TargetError)) as error:
        LayersQuestion(skipping(), **{"target": CPU_LIKE, **asked})
    assert list(error.value.codes) == codes


def test_a_step_of_packs_of_a_profiled_model_runs():
    task = skipping()
    profile = profile_layers(LayersQuestion(task, CPU_LIKE, most=4), where=HERE, store=STORE)
    server = Server.of(Cluster((2,), CPU_LIKE)).with_(usable_bytes=max(profile.bwd.memory[1]) + 600)
    answer = harmony(PacksQuestion(profile, server, 4))
    assert answer.status == "ok" and len(answer.plan.configuration.backward.packs) > 1
    assert answer.plan.model_hash
    step = streamed(task, answer.plan)
    _, metrics = step(step.init(jax.random.key(0)), task.batch(jax.random.key(1), 4))
    expected = task.loss_fn(task.init(jax.random.key(0)), task.batch(jax.random.key(1), 4))
    assert float(metrics.loss) == pytest.approx(float(expected), rel=1e-6)
