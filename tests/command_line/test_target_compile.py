"""Compiling for targets that are not there: each installed compiler answers, and its answers agree
with what is known exactly.

Needs the extras [cuda-targets] and [tpu-targets]; what is not installed is skipped with a message.
Every target is asked in a process of its own, because JAX decides at its start where it looks for
devices.
"""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from processes import QUICK_CODE, REPOSITORY, environment_apart, output_of

from capture.compiler.kernels import shape_bytes
from capture.compiler.report import MemoryReport, parse_report, read_report
from capture.compiler.report_compiler import ReportCompiler
from capture.compiler.target_compiler import TargetCompiler
from capture.compiler.target_devices import target_config
from capture.compiler.work import LocalFlops, group_of, work_of_text
from capture.documents import read
from capture.errors import TargetError
from capture.extras import install_command
from capture.machine.target import Target
from capture.measured.stage_cost import StageCost
from capture.measured.work import Collective, Kernel, ProgramWork

INSTALLED = {
    "cuda": find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"),
    "tpu": find_spec("libtpu"),
    "cpu": True,
}
#: Of the processes that compile.
QUICK = environment_apart(xla_flags=QUICK_CODE)
#: A TPU's compiler takes several times as long as the others'.
V5E = pytest.param("v5e", marks=pytest.mark.exhaustive)
TARGETS = ["cpu", "h100", V5E]


def test_files_that_options_name_are_there_as_long_as_the_compiler():
    compiler = TargetCompiler(Target.load("h100")).compiler()
    gc.collect()
    assert Path(compiler.options["xla_gpu_cuda_data_dir"]).exists()


def require(platform: str) -> None:
    if not INSTALLED[platform]:
        pytest.skip(
            f"the compiler of {platform} targets is not installed: pip install "
            f"'capture-jax[{platform}-targets]'"
        )


@pytest.fixture(scope="module")
def measured():
    """Per target, the document of the script; measured once."""
    found: dict[str, dict] = {}

    def measure(name: str) -> dict:
        require(Target.load(name).platform)
        if name not in found:
            found[name] = json.loads(output_of("target_measurements", name, env=QUICK))
        return found[name]

    return measure


@pytest.mark.parametrize(
    ("asked", "remats"),
    [
        pytest.param(["parts"], ("cheap", "full"), marks=pytest.mark.slow),
        pytest.param(["all", "parts"], ("cheap", "full") * 3, marks=pytest.mark.exhaustive),
    ],
)
def test_passes_over_parameters_in_parts_need_no_more_for_more_layers(asked, remats):
    """Beside what is kept. Products of weight gradients wait for nobody, also where parts of
    gradients are computed in another order of memory; parameters are cast and gathered in their
    layer's turn."""
    require("cuda")
    found = json.loads(output_of("target_measurements", "h100", *asked, env=QUICK))
    for remat, pair in zip(remats, found, strict=True):
        few, many = (read(cost, StageCost) for cost in pair)
        assert many.backward_bytes <= 1.05 * few.backward_bytes
        forward = [cost.forward_bytes - cost.residual_bytes for cost in (few, many)]
        assert remat != "full" or forward[1] <= 1.05 * forward[0]


@pytest.mark.slow
def test_sequence_parallelism_halves_every_all_reduce_into_a_scatter_and_a_gather():
    """Of a block on 4 devices: two all-reduces each way. Beside their halves there are backwards the
    gathers of the two kept parts that products read, and sums of the gradients of small parameters;
    what passes between stages stays in parts."""
    require("cuda")
    costs = json.loads(output_of("target_measurements", "h100", "sequence", env=QUICK))
    plain, split = (
        [read(cost[f"{way}_work"], ProgramWork) for way in ("forward", "backward")]
        for cost in costs
    )
    stream = 8 * 32 * 64 * 4

    def sent(work: ProgramWork) -> dict[str, int]:
        found: dict[str, int] = {}
        for c in work.collectives:
            found[c.kind] = found.get(c.kind, 0) + c.nbytes * c.count
        return found

    assert [sent(work) for work in plain] == [{"all-reduce": 2 * stream}] * 2
    forward, backward = map(sent, split)
    assert forward == {"reduce-scatter": 2 * stream, "all-gather": 2 * stream}
    assert backward.pop("all-reduce") < stream / 8
    assert backward == {"reduce-scatter": 2 * stream, "all-gather": (2 + 2) * stream}
    kept = [cost["residual_bytes"] for cost in costs]
    assert kept[1] < kept[0]


@pytest.mark.parametrize("name", TARGETS)
def test_kept_activations_are_the_same_arrays_on_every_target(measured, name):
    """What is kept is decided before a compiler is asked; a TPU pads it to whole tiles, and devices
    split it."""
    cpu, found = measured("cpu")["rows"], measured(name)["rows"]
    for row in ("one", "split"):
        exact, kept = cpu[row]["residual_bytes"], found[row]["residual_bytes"]
        assert kept == exact if Target.load(name).platform != "tpu" else exact <= kept < 4 * exact
        assert found[row]["optimizer_bytes"] == cpu[row]["optimizer_bytes"]
        assert found[row]["forward_bytes"] >= kept


@pytest.mark.parametrize("name", TARGETS)
def test_temporaries_are_attributed_to_layers_and_lines(measured, name):
    document = measured(name)
    padded = Target.load(name).platform == "tpu"  # and a model so small lives in vector memory
    for program in ("forward", "backward"):
        found, held = document["buffers"]["programs"][program], document["cost"][f"{program}_bytes"]
        of_layers = sum(buffer["bytes"] for buffer in found if buffer["layer"] is not None)
        assert (0 if padded else 0.9) * held < of_layers <= held
        lines = sum(buffer["bytes"] for buffer in found if buffer["source"].startswith("models/"))
        assert lines > 0.8 * of_layers or padded
    kept = sum(buffer["bytes"] for buffer in document["buffers"]["residuals"])
    assert (
        kept <= document["cost"]["residual_bytes"]
        if padded
        else kept == document["cost"]["residual_bytes"]
    )


@pytest.mark.parametrize("name", TARGETS[1:])
def test_work_is_that_of_the_model_split_over_its_devices(measured, name):
    document = measured(name)
    one, split = (document["rows"][row] for row in ("one", "split"))
    assert one["forward_work"]["flops"] == pytest.approx(document["flops"], rel=0.1)
    assert one["backward_work"]["flops"] == pytest.approx(2 * document["flops"], rel=0.1)
    assert split["forward_work"]["flops"] == pytest.approx(document["flops"] / 4, rel=0.1)
    for row, program, passes in ((one, "forward", 1), (one, "backward", 2), (split, "forward", 1)):
        work = read(row[f"{program}_work"], ProgramWork)
        counted = sum(kernel.count * kernel.flops for kernel in work.kernels)
        expected = passes * document["flops"] / (4 if row is split else 1)
        assert (
            counted == pytest.approx(expected, rel=0.1)
            and 5 < sum(kernel.count for kernel in work.kernels) < 500
        )
    assert one["forward_work"]["collectives"] == [] and one["forward_work"]["product_bytes"] > 0
    strides = {c["stride"] for c in split["backward_work"]["collectives"]}
    assert strides == {1, 2}, (
        "activations are summed over tensor-parallel neighbours, gradients over replicas"
    )
    assert all(c["group_size"] == 2 for c in split["backward_work"]["collectives"])
    if "replicas" in document["rows"]:
        assert {
            c["group_size"] for c in document["rows"]["replicas"]["backward_work"]["collectives"]
        } == {4}


def test_an_iteration_over_stacked_layers_reads_the_weights_of_one():
    """Where the compiler lays the stack out with its layers inside: each device casts its part of two
    matrices, and reads them whole in products."""
    require("cuda")
    num_layers, dim, batch_size = 16, 1024, 8
    asked = ("h100", *map(str, (num_layers, dim, batch_size)))
    work = read(json.loads(output_of("scanned_work", *asked)), ProgramWork)
    in_loop = (kernel for kernel in work.kernels if kernel.count % num_layers == 0)
    nbytes = sum(kernel.nbytes * kernel.count for kernel in in_loop) / num_layers
    weight = dim * dim
    assert nbytes == pytest.approx(2 * (weight // 4 * (4 + 2) + weight * 2), rel=0.03)


@pytest.mark.parametrize("name", TARGETS[1:])
def test_the_provenance_names_the_compiler(measured, name):
    provenance = measured(name)["provenance"]
    assert (
        provenance["target"] == name
        and provenance["backend"] == f"compile:{name}"
        and len(provenance["compiler"]) > 8
    )
    assert {"cuda": "jax-cuda12-plugin", "tpu": "libtpu"}[Target.load(name).platform] in provenance[
        "versions"
    ]


def test_the_parser_reads_what_this_version_of_jax_dumps(tmp_path):
    """Against the numbers of the compiler's own interface, which the CPU compiler gives
    correctly."""
    assert read_report(tmp_path) is None
    arguments, outputs, temporaries = map(int, output_of("dumped_report", tmp_path).split())
    report = read_report(tmp_path)
    assert (report.argument_bytes, arguments) == (3 * 256 * 256 * 4, 3 * 256 * 256 * 4)
    assert (
        report.output_bytes == pytest.approx(outputs, abs=256)
        and report.output_bytes >= 256 * 256 * 4
    )
    assert report.transient_bytes == pytest.approx(outputs + temporaries, abs=1024)


REPORT = (
    "Memory Space: default (color=0)\nTotal bytes: 700 (700B)\n\nMemory Space: vmem (color=1)\n"
    "Total bytes: 9000 (8.8KiB)\n"
)


@pytest.mark.parametrize("page", ["", ", page 0"], ids=["0.10", "0.12"])
def test_other_memory_spaces_and_donated_arguments_do_not_count_as_results(page):
    lines = [
        f"allocation 0: size 256{page}, parameter 0, shape |f32[64]| at ShapeIndex {{}}:",
        f"allocation 1: size 128{page}, parameter 1, shape |f32[32]| at ShapeIndex {{}}, "
        "maybe-live-out:",
        f"allocation 2: size 64{page}, maybe-live-out:",
        f"allocation 3: size 4096, color 1{page}, maybe-live-out:",
        f"allocation 4: size 252{page}, preallocated-temp:",
    ]
    assert parse_report(REPORT, "\n".join(lines)) == MemoryReport(700, 384, 64)
    assert parse_report("nothing", "") is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("f32[]", 4), ("(bf16[2,3]{1,0:T(8,128)}, pred[8])", 20), ("s4[4]", 2), ("token[]", 0)],
)
def test_sizes_of_shapes(text, nbytes):
    assert shape_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "size", "stride"),
    [
        ("replica_groups={{0,1,2,3}}", 4, 1),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 4),
        ("replica_groups=[2,4]<=[8]", 4, 1),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 4),
        ("replica_groups={}", 8, 1),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, use_global_device_ids=true", 8, 1),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=4] {'z'}", 4, 1),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=4] {'x'}", 2, 4),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", 4, 1),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", 2, 4),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", 2, 1),
        ("replica_groups=mesh['x'=2,'y'=4] {'x','y':(1)2}", 4, 2),
        ("source_target_pairs={{0,1}}", 2, 1),
    ],
)
def test_the_devices_of_a_collective(text, size, stride):
    """In each of the forms that XLA writes its groups in."""
    assert group_of(text, num_partitions=8) == (size, stride)


def test_gpus_are_scheduled_with_the_memory_of_a_process_that_has_them():
    """XLA takes four fifths of what it is told where it has no device."""
    target = Target.load("h100")
    (size,) = re.findall(r"device_memory_size: (\d+)", target_config(target))
    memory = target.memory
    pool = memory.capacity_bytes.value * memory.allocator_fraction.value
    assert 0.8 * int(size) == pytest.approx(pool, abs=1)
    without = replace(target, memory=None)
    (size,) = re.findall(r"device_memory_size: (\d+)", target_config(without))
    assert int(size) == target.compiler["gpu_device_info"]["device_memory_size"]


def test_a_call_of_a_library_hides_no_other_bytes():
    """XLA's own count has no bytes for it."""
    call = 'custom-call(%p, %p), custom_call_target="__cudnn$convForward"'
    hlo = (
        "HloModule m\n\nENTRY %main (p: f32[16]) -> f32[16] "
        f"{{\n  %p = f32[16]{{0}} parameter(0)\n  %c = f32[16]{{0}} {call}\n"
    )
    work = work_of_text(hlo + "  ROOT %r = f32[16]{0} add(%c, %p)\n}")
    assert (work.product_bytes, work.other_bytes) == (3 * 64, pytest.approx(3 * 64, abs=2))


FUSED = """HloModule m, num_partitions=2

%began (p: bf16[8]) -> bf16[16] {
  %p = bf16[8]{0} parameter(0)
  ROOT %g.1 = bf16[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
}

%ended (q: bf16[8], w: bf16[16]) -> bf16[16] {
  %q = bf16[8]{0} parameter(0)
  %w = bf16[16]{0} parameter(1)
  %g.2 = bf16[16]{0} all-gather(%q), channel_id=7, replica_groups={{0,1}}, dimensions={0}
  ROOT %s = bf16[16]{0} add(%g.2, %w)
}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

%scattered (v: bf16[16], at: s32[]) -> bf16[8] {
  %v = bf16[16]{0} parameter(0)
  %at = s32[] parameter(1)
  %r = bf16[16]{0} all-reduce(%v), channel_id=9, replica_groups={{0,1}}, to_apply=%add
  ROOT %d = bf16[8]{0} dynamic-slice(%r, %at), dynamic_slice_sizes={8}
}

ENTRY %main (p.0: bf16[8], at.0: s32[]) -> bf16[8] {
  %p.0 = bf16[8]{0} parameter(0)
  %at.0 = s32[] parameter(1)
  %f.1 = bf16[16]{0} fusion(%p.0), kind=kLoop, calls=%began
  %f.2 = bf16[16]{0} fusion(%p.0, %f.1), kind=kLoop, calls=%ended
  ROOT %f.3 = bf16[8]{0} fusion(%f.2, %at.0), kind=kLoop, calls=%scattered
}
"""


def test_a_collective_that_several_fusions_begin_and_end_counts_once():
    assert work_of_text(FUSED).collectives == (
        Collective("all-gather", 32, 2, 1),
        Collective("reduce-scatter", 32, 2, 1),
    )


def test_the_kernels_of_a_program_by_hand():
    """A loop's run as often as it does, a choice's as if it were the larger one, and kernels read
    what they use of an operand, also where an instruction has the name of its computation; a library's
    workspace is nothing that it moves. A kernel of Pallas
    has its share of what they compute together, and a collective is none."""
    text = (REPOSITORY / "tests" / "data" / "kernels.hlo").read_text()
    work = work_of_text(text, LocalFlops(kernels=1000))
    array = 64 * 8 * 4
    conv = (1 * 8 * 14 * 14 + 16 * 8 * 9 + 16 * 14 * 14) * 4
    flops = 2 * 16 * 14 * 14 * 8 * 9
    products = [
        Kernel(2 * array, 500, "float32", "default", count=2),
        Kernel(2 * array + 64 * 64 * 4, 2 * 64 * 64 * 8, "float32", "default", shape=(1, 64, 64)),
        Kernel(conv, flops, "float32", "default", shape=(1, 14 * 14, 16)),
        Kernel(conv, flops, "float32", "default", shape=(1, 8 * 9, 16)),  # of the filter
    ]
    others = [
        Kernel(2 * 8 * 4 + 4, count=12),  # a row of the table
        Kernel(3 * array, count=2),
    ]
    assert work.kernels == tuple(sorted(products + others))
    assert work.collectives == (Collective("all-reduce", array, 2, 1),)
    assert work.product_bytes == 6 * array + 64 * 64 * 4 + 2 * conv
    assert work.other_bytes == 12 * 68 + 6 * array


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        ("dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", ("float32", "default")),
        (
            "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "operand_precision={high,default}",
            ("float32", "high"),
        ),
        (
            "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "operand_precision={highest,highest}",
            ("float32", "highest"),
        ),
        (
            "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "algorithm=dot_tf32_tf32_f32",
            ("tf32", "highest"),
        ),
        (
            "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            "algorithm=dot_tf32_tf32_f32_x3",
            ("float32", "highest"),
        ),
        (
            'custom-call(%p, %p), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"precision_config":'
            '{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"},"selected_algorithm":"3"}}',
            ("float32", "highest"),
        ),
        (
            'custom-call(%p, %p), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"precision_config":'
            '{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_DOT_TF32_TF32_F32"}}}',
            ("tf32", "highest"),
        ),
    ],
)
def test_the_precision_of_products_is_read(product, expected):
    entry = f"  %p = f32[4,4]{{1,0}} parameter(0)\n  ROOT %c = f32[4,4]{{1,0}} {product}"
    work = work_of_text(f"HloModule m\n\nENTRY %main (p: f32[4,4]) -> f32[4,4] {{\n{entry}\n}}")
    assert (work.dtype, work.precision) == expected


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_missing_compiler_is_said_with_the_command_that_installs_it(monkeypatch, platform):
    from capture.compiler import target_devices
    from capture.machine import target

    monkeypatch.setattr(target, "find_spec", lambda name: None)
    says = re.escape(
        f"it needs no device: {install_command(f'{platform}-targets')}. [target-missing]"
    )
    with pytest.raises(TargetError, match=f"{says}$"):
        target_devices.devices_of(Target.load({"cuda": "h100", "tpu": "v5e"}[platform]), 1)


def test_flags_that_the_compiler_refuses_are_no_report(monkeypatch):
    """Where nobody has asked before (``environment.check_flags``), the child ends over them."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_no=true")
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = [jax.ShapeDtypeStruct((4,), "float32", sharding=here)]
    with pytest.raises(TargetError, match=r"LIBTPU_INIT_ARGS has xla_tpu_no, .* \[target-flags\]$"):
        ReportCompiler(Target.load("v5e"))(lambda x: 2 * x, given)


def test_the_end_of_a_step_without_parameters_is_no_program():
    """It has neither arguments nor results, and therefore no mesh; no compiler is asked."""
    executable = ReportCompiler(Target.load("v5e"))(
        lambda params, state: (params, state), ([], []), out_shardings=([], [])
    )
    assert executable.call([], []) == ([], []) and executable.transient_bytes == 0
    assert executable.work == ProgramWork(0, "float32", 0, 0)


def test_a_program_without_results_is_none_on_any_target():
    """What a layer without parameters does of its weights' gradients takes arguments alone: nothing
    would tell that it is the target's, whose options the CPU's compiler does not know."""
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    given = [jax.ShapeDtypeStruct((4,), "float32", sharding=here)]
    executable = ReportCompiler(Target.load("v5e"))(lambda arrays: [], (given,), out_shardings=[])
    assert executable.transient_bytes == 0
    assert executable.work == ProgramWork(0, "float32", 0, 0)
