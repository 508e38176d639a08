"""A backward pass goes layer by layer: nothing of a layer is computed before the gradients of the
layers behind it are complete, but for what may overlap with the sums over replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import tracing_models as models
from pipeline_models import tied
from test_residuals import step

from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend
from capture.runtime.programs import StagePrograms
from capture.runtime.reference import max_relative_error
from capture.tracing.dataflow import DataFlow
from capture.tracing.source import layer_of_scope

NUM_BLOCKS = 4


def programs_of(choice: StageChoice, workload) -> StagePrograms:
    backend = CompileBackend(workload, store=Store())
    last = backend.traced(4).graph.num_layers
    return backend.programs(StageConfig(0, last, choice, 4))


def awaited(programs: StagePrograms) -> dict[int, set[int]]:
    """Per layer, the layers whose accumulators all of its products depend on."""
    kept = programs.residuals
    args = (
        programs.param_structs(programs.params),
        programs.value_structs([programs.layers.inputs[i] for i in kept.inputs]),
        programs.batch_structs([programs.layers.batch[i] for i in kept.batch]),
        programs.value_structs([programs.layers.outputs[i] for i in kept.outputs]),
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept.stored],
        programs.value_structs(programs.segment.cotangents),
        programs.param_structs(programs.params),
    )
    flow = DataFlow(jax.make_jaxpr(programs._backward)(*args), open_remats=True)
    of_param = {p: i for i, layer in enumerate(programs.graph.layers) for p in layer.params}
    owners = dict.fromkeys(flow.inputs, frozenset())
    accumulators = flow.inputs[-len(programs.params) :]
    owners |= {
        v: frozenset([of_param[p]]) for v, p in zip(accumulators, programs.params, strict=True)
    }
    reached = flow.propagate(owners)
    found: dict[int, set[int]] = {}
    for equation in flow.jaxpr.eqns:
        layer = layer_of_scope(str(equation.source_info.name_stack))
        if equation.primitive.name == "dot_general" and layer is not None:
            before = reached[equation.outvars[0]]
            found[layer] = found.get(layer, set(before)) & before
    return found


@pytest.mark.parametrize(
    ("remat", "replicas", "lag"),
    [
        ("full:3", 1, 0),
        ("full:3", 2, 1),
        # Each policy once, and both lags.
        pytest.param("none", 2, 1, marks=pytest.mark.slow),
        pytest.param("cheap", 1, 0, marks=pytest.mark.slow),
        pytest.param("full", 2, 1, marks=pytest.mark.slow),
        pytest.param("none", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param("cheap", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("full", 1, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_waits_for_the_gradients_of_those_behind_it(remat, replicas, lag):
    programs = programs_of(StageChoice(replicas, remat=remat), models.linen(num_blocks=NUM_BLOCKS))
    found = awaited(programs)
    last = max(found)
    assert len(found) >= NUM_BLOCKS
    for layer, behind in found.items():
        assert behind == set(range(layer + 1 + lag, last + 1)), layer


@pytest.mark.parametrize(
    ("name", "remat", "degrees"),
    [  # each two together once
        ("linen", "cheap", (1, 1)),
        ("linen", "full", (2, 2)),
        ("dropout, tied", "cheap", (2, 2)),
        ("dropout, tied", "full", (1, 1)),
    ],
)
def test_the_order_changes_no_gradient(name, remat, degrees):
    """Random keys, which cannot wait, and a parameter of several layers among what is read."""
    workload = tied() if name == "dropout, tied" else models.linen(num_blocks=2)
    in_parts = degrees[0] > 1
    programs = programs_of(StageChoice(*degrees, remat, in_parts, in_parts), workload)
    programs._in_turn = in_parts  # as on GPUs
    _, ordered, _ = step(programs)
    programs = programs_of(StageChoice(*degrees, remat, in_parts, in_parts), workload)
    programs._forward, programs._backward = programs._made, programs._gradients
    _, expected, _ = step(programs)
    assert max_relative_error(ordered, expected) < 1e-6


def test_what_is_printed_on_the_way_back_comes_after_what_it_prints(capfd):
    @jax.custom_vjp
    def shown(x):
        return x

    def backward(_, gradient):
        jax.debug.print("gradient {}", gradient.sum())
        return (gradient,)

    shown.defvjp(lambda x: (x, None), backward)

    def loss(params, batch):
        h = batch[0]
        for w in params:
            h = models.mark(shown(jnp.tanh(h @ w)))
        return jnp.mean(h)

    workload = models.workload(
        loss, lambda key: [jnp.eye(models.D) for _ in range(3)], models.vectors_batch
    )
    step(programs_of(StageChoice(), workload))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("gradient") == 3
