"""Every byte of a peak has an owner: buffers sum to the peak, and compiled temporaries carry the
layer and line that made them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from pipeline_models import mark, mlp, tied

from capture.compiler.buffers import parse_buffers
from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.profiler.compile import CompileBackend
from capture.runtime import origins
from capture.step.attribution import Buffer, attribute, group
from capture.tracing.dataflow import DataFlow
from capture.tracing.source import model_line, operation_name
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify

HERE = "tests/pipeline_models.py"


def attributions(workload, plan):
    measurements = open_measurements(ProfileQuestion(workload, plan.cluster, 8))
    verified = verify(plan, measurements)
    buffers = measurements.buffers(
        [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
    )
    graph = measurements.backend.traced(plan.microbatch_size).graph
    ranges = [(stage.first, stage.stop) for stage in plan.stages]
    return attribute(verified.program, verified.stages, ranges, graph, buffers)


def plan_of(num_layers, *stages, schedule="1f1b", batch=16):
    devices = sum(len(stage.devices) for stage in stages)
    return Plan(Cluster((devices,)), num_layers, stages, batch, 4, schedule)


PLANS = [
    (mlp(optax.adamw(1e-3)), plan_of(4, Stage(0, 2, (0,)), Stage(2, 4, (1,)))),
    (
        mlp(optax.adamw(1e-3)),
        plan_of(4, Stage(0, 4, (0, 1, 2, 3), StageChoice(2, 2)), schedule="gpipe"),
    ),
    (
        mlp(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))),
        plan_of(4, Stage(0, 3, (0,)), Stage(3, 4, (1,))),
    ),
    (
        mlp(),
        plan_of(
            4,
            Stage(0, 2, (0,), StageChoice(remat="full")),
            Stage(2, 4, (1,), StageChoice(remat="full")),
        ),
    ),
    (tied(), plan_of(4, Stage(0, 2, (0,)), Stage(2, 4, (1,)))),
]


@pytest.mark.parametrize(("workload", "plan"), PLANS)
def test_buffers_sum_to_the_peak_category_by_category(workload, plan):
    for found, stage in zip(attributions(workload, plan), plan.stages, strict=True):
        assert sum(buffer.bytes for buffer in found.buffers) == found.peak.peak_bytes
        by_category: dict[str, int] = {}
        for buffer in found.buffers:
            by_category[buffer.category] = by_category.get(buffer.category, 0) + buffer.bytes
        assert by_category == found.peak.parts
        assert set(found.layers) <= set(range(stage.first, stage.stop)) | {stage.first - 1}
        # The loop that QUICK_CODE makes of a scatter has buffers of no layer.
        assert found.attributed_fraction > 0.92
        assert sum(sum(parts.values()) for parts in found.layers.values()) <= found.peak.peak_bytes


def test_activations_and_temporaries_name_their_line():
    first, last = attributions(mlp(), plan_of(4, Stage(0, 2, (0,)), Stage(2, 4, (1,)), batch=1024))
    found = replace(first, buffers=first.buffers + last.buffers)
    computed = [b for b in found.buffers if b.category in ("activations", "temporaries")]
    assert sum(b.bytes for b in computed if b.source.startswith(HERE)) > 0.9 * sum(
        b.bytes for b in computed
    )
    assert {b.layer for b in computed} >= {0, 1, 2, 3}
    names = {b.what for b in found.buffers if b.category == "parameters"}
    assert len(names) == 12 and all(
        "up" in name or "down" in name or "bias" in name for name in names
    )


def test_equal_stages_share_measurements_but_not_names():
    backend = CompileBackend(mlp(num_blocks=5))
    one, other = StageConfig(1, 2, StageChoice(), 4), StageConfig(2, 3, StageChoice(), 4)
    assert backend.key(one) == backend.key(other) and backend.buffers_key(
        one
    ) != backend.buffers_key(other)
    assert {buffer.layer for buffer in backend.measure_buffers(other).residuals} == {2}


def test_a_function_that_jax_keeps_traced_has_the_line_of_its_call():
    def loss(params, x):
        x = mark(jax.nn.silu(x @ params["w"]))
        return (jax.nn.silu(x) ** 2).mean()

    workload = replace(
        mlp(),
        loss_fn=loss,
        init=lambda key: {"w": jnp.ones((8, 8))},
        batch=lambda key, n: jnp.ones((n, 8)),
    )
    lines = {line for _, line in CompileBackend(workload).traced(4).slice(0, 2).sources}
    assert (
        all(line.startswith("tests/differential/test_attribution.py:") for line in lines)
        and len(lines) == 2
    )


def test_programs_that_jax_has_kept_have_their_buffers():
    assert jax.config.jax_compilation_cache_dir  # tests/conftest.py
    config = StageConfig(1, 2, StageChoice(), 4)
    first, second = (CompileBackend(mlp(num_blocks=5)).measure_buffers(config) for _ in range(2))
    assert first == second and first.residuals


# ---- the compiler's dump -------------------------------------------------------------------------

ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 p.1 @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 64, maybe-live-out:
 value: <2 add.1 @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 32, color 1, preallocated-temp:
 value: <9 fast.1 @0> (size=32,offset=0): f32[8]{0}
allocation 3: size 900, preallocated-temp:
 value: <3 dot.1 @0> (size=400,offset=0): f32[100]{0}
 value: <4 mul.1 @0> (size=400,offset=0): f32[100]{0}
 value: <5 pair.1{0} @0> (size=500,offset=400): f32[125]{0}
 value: <6 late.1 @0> (size=300,offset=0): f32[75]{0}
"""
LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:p.1
  BufferLiveRange:
    p.1{}:0-9
    dot.1{}:1-3
    mul.1{}:3-4
    pair.1{0}:2-4
    late.1{}:6-7
    add.1{}:8-9
  Live ranges at 3 (peak):
    p.1{}: 400 bytes (cumulative: 400 bytes)
"""
PROGRAM = """HloModule jit_f, is_scheduled=true

FileNames
1 "/somewhere/lib/site-packages/flax/dense.py"
2 "/home/user/model.py"

FunctionNames
1 "call"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=77 end_line=77 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=0}
2 {file_location_id=1 parent_frame_id=1}

ENTRY %main (p.1: f32[100]) -> f32[16] {
  %p.1 = f32[100]{0} parameter(0), metadata={op_name="x"}
  %dot.1 = f32[100]{0} dot(%p.1, %p.1), metadata={op_name="jit(f)/jvp(layer[1])/Net/dot_general" stack_frame_id=2}
  %pair.1 = (f32[125]{0}, s8[4]{0}) custom-call(%p.1), metadata={op_name="jit(f)/transpose(jvp(layer[0]))/Net/conv" stack_frame_id=1}
  %mul.1 = f32[100]{0} bitcast(%dot.1)
  %late.1 = f32[75]{0} copy(%mul.1)
  ROOT %add.1 = f32[16]{0} add(%late.1, %late.1), metadata={op_name="jit(f)/jvp(layer[1])/add"}
}
"""


def test_buffers_are_those_at_the_peak_and_what_is_written_over_an_operand_counts_once():
    """``mul`` is written where ``dot`` lies: 400 + 500 bytes are live together, not 1300. Fast
    memory and arguments are left out."""
    found = parse_buffers(ASSIGNMENT, LIVE, PROGRAM)
    assert found == (
        Buffer(500, "temporaries", 0, "Net/conv", "/home/user/model.py:77"),
        Buffer(400, "temporaries", 1, "Net/dot_general", "/home/user/model.py:77"),
        Buffer(64, "temporaries", 1, "add", "/home/user/model.py:77"),
    )


def test_frames_whose_parents_are_printed_one_too_high():
    shifted = PROGRAM.replace(
        "1 {file_location_id=2 parent_frame_id=0}", "1 {file_location_id=2 parent_frame_id=1}"
    )
    shifted = shifted.replace(
        "2 {file_location_id=1 parent_frame_id=1}", "2 {file_location_id=1 parent_frame_id=2}"
    )
    assert parse_buffers(ASSIGNMENT, LIVE, shifted) == parse_buffers(ASSIGNMENT, LIVE, PROGRAM)


def test_lines_written_with_the_instruction():
    written = PROGRAM.replace(
        "stack_frame_id=2", 'source_file="/home/user/model.py" source_line=77'
    ).replace("stack_frame_id=1", "")
    assert parse_buffers(ASSIGNMENT, LIVE, written)[1].source == "/home/user/model.py:77"


def test_names_of_arguments_tell_a_layer_where_no_scope_does():
    bare = PROGRAM.replace("jvp(layer[1])/", "").replace("jvp(layer[0])", "jvp()")
    found = parse_buffers(ASSIGNMENT, LIVE, bare, {"x": 5}.get)
    assert {buffer.layer for buffer in found} == {5}


def test_lines_of_libraries_and_of_this_package_are_no_lines_of_the_model():
    inside = "/usr/lib/python3/site-packages/jax/core.py"
    assert (
        model_line(
            [(inside, 1), ("<string>", 2), ("/home/user/net.py", 3), ("/home/user/main.py", 4)]
        )
        == "/home/user/net.py:3"
    )
    assert model_line([(inside, 1)]) == ""
    import capture.step.program

    assert (
        model_line([(inside, 1), (capture.step.program.__file__, 2), ("/home/user/main.py", 3)])
        == ""
    )


def test_operation_names_lose_what_transformations_put_around_them():
    assert (
        operation_name("jit(_backward)/transpose(jvp(layer[3]))/Gpt/head/dot_general")
        == "Gpt/head/dot_general"
    )
    assert (
        operation_name("jit(f)/jvp(layer[0])/checkpoint/rematted_computation/Net/mul") == "Net/mul"
    )
    assert operation_name("params[2]") == "params[2]"


def test_groups_join_what_differs_by_layer_or_micro_batch():
    buffers = [
        Buffer(8, "activations", layer, f"block_{layer}/mul", "m.py:3")
        for layer in (0, 1)
        for _ in range(2)
    ]
    buffers += [Buffer(20, "parameters", 1, "block_1/w")]
    first, second = group(buffers)
    assert (first.what, first.count, first.layers, first.total_bytes) == (
        "block_*/mul",
        4,
        (0, 1),
        32,
    )
    assert (second.what, second.count, second.layers) == ("block_1/w", 1, (1,))


def test_without_any_line_every_operation_is_asked_once(monkeypatch):
    """A model inside the package has no lines, and its operations many ways to each other."""
    asked = []
    monkeypatch.setattr(origins, "line_of", lambda traceback: asked.append(traceback) or "")

    def squared(x):
        for _ in range(30):
            x = x * jnp.sin(x) + x
        return x

    flow = DataFlow(jax.make_jaxpr(squared)(1.0))
    assert origins.buffer_of(flow, flow.outputs[0], 4).source == ""
    assert len(asked) == 90
