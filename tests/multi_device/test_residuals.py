"""What ``cheap`` keeps is enough: gradients as without remat, from no more bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tracing_models as models
from pipeline_models import pipeline, tied

from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import pipeshard
from capture.runtime.programs import StagePrograms
from capture.runtime.reference import ReferenceStep, max_relative_error

WORKLOADS = {
    "dropout, tied": tied,
    "custom rules": models.convnet,
    "experts, choices, remat": models.routed,
    "scan that stays one": lambda: models.scanned(marked=False),
    "loops, branches": models.control,
}


def arrays(structs, draw) -> list:
    return [
        jax.random.key(draw.integers(9))
        if jnp.issubdtype(s.dtype, jax.dtypes.prng_key)
        else jnp.asarray(
            draw.integers(0, 2, s.shape)
            if jnp.issubdtype(s.dtype, jnp.integer)
            else draw.normal(size=s.shape),
            s.dtype,
        )
        for s in structs
    ]


def step(programs: StagePrograms) -> tuple:
    """Outputs of the forward pass, and all gradients of the backward pass, on drawn numbers."""
    draw = np.random.default_rng(0)
    params, inputs, batch = (arrays(group, draw) for group in programs.forward_args)
    outputs, stored = jax.jit(programs._forward)(params, inputs, batch)
    kept = programs.residuals
    gradients = jax.jit(programs._backward)(
        params,
        [inputs[i] for i in kept.inputs],
        [batch[i] for i in kept.batch],
        [outputs[i] for i in kept.outputs],
        stored,
        arrays(programs.value_structs(programs.segment.cotangents), draw),
        [jnp.zeros_like(p) for p in params],
    )
    nbytes = sum(
        x.nbytes
        for x in (
            *stored,
            *(
                group[i]
                for group, at in (
                    (inputs, kept.inputs),
                    (batch, kept.batch),
                    (outputs, kept.outputs),
                )
                for i in at
            ),
        )
    )
    return outputs, gradients, nbytes


@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_are_those_without_remat_from_fewer_bytes(name):
    num_layers = 2 if name == "scan that stays one" else None
    backend = CompileBackend(WORKLOADS[name](), num_layers, store=Store())
    last = backend.traced(4).graph.num_layers
    cuts = (0, 2, last) if name == "dropout, tied" else (0, last)
    for stage in pairwise(cuts):
        (outputs, gradients, nbytes), (expected, expected_gradients, most) = (
            step(backend.programs(StageConfig(*stage, StageChoice(remat=remat), 4)))
            for remat in ("cheap", "none")
        )
        assert all((a == b).all() for a, b in zip(outputs, expected, strict=True))
        assert max_relative_error(gradients, expected_gradients) < 1e-5
        assert nbytes <= most
    assert nbytes < most


def test_layers_that_recompute_as_a_whole_keep_their_inputs_and_the_others_a_cut():
    """What is kept falls with every layer; the gradients are those without remat. A stage that has
    no more layers is that of ``full``, measured once."""
    backend = CompileBackend(models.repeated(4, marked=True), None, store=Store())
    last = backend.traced(4).graph.num_layers
    sizes, expected = [], None
    for remat in ("none", "cheap", "full:1", "full:2", f"full:{last}"):
        config = StageConfig(0, last, StageChoice(remat=remat), 4)
        _, gradients, nbytes = step(backend.programs(config))
        expected = expected or gradients
        assert max_relative_error(gradients, expected) < 1e-5
        sizes.append(nbytes)
    assert sizes == sorted(set(sizes), reverse=True)
    whole = StageConfig(0, last, StageChoice(remat="full"), 4)
    assert backend.key(config) == backend.key(whole)
    assert backend.key(replace(config, choice=StageChoice(remat="full:2"))) != backend.key(whole)


def test_a_step_of_split_stages_is_the_single_device_step_and_its_replay():
    """Replicas that keep a cut, and tensor parallelism that runs one of two layers again."""
    plan = pipeline((2, 2), ((2, 1), (1, 2)), remat="cheap")
    first, second = plan.stages
    second = replace(second, choice=replace(second.choice, remat="full:1"))
    plan = plan.with_(stages=(first, second))
    workload = tied(optax.adam(1e-3))
    step = pipeshard(workload, plan)
    params, batch = workload.init(jax.random.key(0)), workload.batch(jax.random.key(1), 8)
    key = jax.random.key(2)
    reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
    expected_params, _ = reference.init(params)
    loss, expected = reference.loss_and_gradients(expected_params, batch, key)
    gradients, metrics = step.accumulate(step.init_from(params), batch, key)
    assert metrics.loss == pytest.approx(loss, rel=1e-6)
    assert max_relative_error(gradients, expected) < 1e-5
    measured = measure_step(step, step.init_from(params), batch, key, strict=True)
    assert measured.peak_bytes_per_device == step.replay().peak_bytes_per_device
