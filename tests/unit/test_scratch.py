"""What kernels of CPU programs allocate, against what malloc was seen to give out for them (jax 0.10.2,
two cores): never less, and where the library's rule is known, hardly more."""

from __future__ import annotations

import pytest

from capture.compiler.scratch import scratch_of

YNN = 'kind=kCustom, calls=%f, backend_config={"fusion_config":{"kind":"__ynn_fusion"}}'
LABELS = "dim_labels=b01f_01io->b01f"


def alone(line: str, *operands: str) -> str:
    """A program of one instruction."""
    parameters = "".join(f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands))
    return f"ENTRY %main (p0: f32[]) -> f32[] {{\n{parameters}  ROOT %r = {line}\n}}\n"


def fused(line: str, *operands: str) -> str:
    """A program of one instruction in a fusion of YNNPACK."""
    parameters = "".join(f"  %a{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands))
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    shape = line.split(" ")[0]
    inside = f"%f (a0: f32[]) -> f32[] {{\n{parameters}  ROOT %x = {line}\n}}\n\n"
    return inside + alone(f"{shape} fusion({names}), {YNN}", *operands)


def product(m: int, k: int, n: int) -> str:
    line = (
        f"f32[{m},{n}]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"
    )
    return alone(line, f"f32[{k},{m}]{{1,0}}", f"f32[{k},{n}]{{1,0}}")


IMAGES, FILTER = "f32[32,32,32,{}]{{3,2,1,0}}", "f32[3,3,{},{}]{{3,2,1,0}}"
SAME = f"window={{size=3x3 pad=1_1x1_1}}, {LABELS}"


def convolution(channels: int, features: int, groups: int = 1, operand: str = "a") -> str:
    result = IMAGES.format(features)
    count = f", feature_group_count={groups}" if groups > 1 else ""
    return f"{result} convolution(%{operand}0, %{operand}1), {SAME}{count}"


@pytest.mark.parametrize(
    ("text", "seen", "factor"),
    [
        (product(64, 256, 16384), 17_597_824, 1.6),
        (product(256, 16384, 64), 1_131_456, 1.6),
        (product(1000, 700, 1000), 4_536_128, 2),
        (product(64, 4096, 64), 197_312, 4),
        (
            alone(convolution(16, 16, operand="p"), IMAGES.format(16), FILTER.format(16, 16)),
            21_202_880,
            1.5,
        ),
        (
            fused(convolution(32, 32), IMAGES.format(32), FILTER.format(32, 32)),
            4_771_966 - 2 * 63,
            1.0001,
        ),
        (
            fused(convolution(32, 64, 4), IMAGES.format(32), FILTER.format(8, 64)),
            42_502_333 - 3 * 63,
            1.0001,
        ),
        (
            fused(convolution(32, 32, 32), IMAGES.format(32), FILTER.format(1, 32)),
            4_735_039 - 63,
            1.001,
        ),
        (
            alone(
                f"f32[32,32,32,16]{{3,2,1,0}} convolution(%p0, %p1), window={{size=3x3 "
                f"pad=1_1x1_1 lhs_dilate=2x2}}, {LABELS}",
                "f32[32,16,16,32]{3,2,1,0}",
                "f32[3,3,32,16]{3,2,1,0}",
            ),
            5_874_176,
            1.2,
        ),
        (
            alone(
                "f32[1048576]{0} sort(%p0), dimensions={0}, is_stable=true, to_apply=%c",
                "f32[1048576]{0}",
            ),
            16_777_216,
            1,
        ),
        (
            alone(
                "f32[1024,1024]{1,0} sort(%p0), dimensions={0}, is_stable=true, to_apply=%c",
                "f32[1024,1024]{1,0}",
            ),
            16_384,
            1,
        ),
    ],
    ids=[
        *("wide product", "long product", "product", "small product"),
        *("convolution in Eigen", "convolution", "groups", "depthwise", "transposed"),
        *("sort of a line", "sort of columns"),
    ],
)
def test_scratch_is_at_least_what_malloc_gave_out(text, seen, factor):
    found = scratch_of(text, num_threads=2)
    assert seen <= found.nbytes <= factor * seen
    assert found.unbounded == ()


def test_kernels_run_one_after_the_other():
    both = (
        "ENTRY %main (a: f32[]) -> f32[] {\n  %a = f32[64,512]{1,0} parameter(0)\n"
        "  %s = f32[64,512]{1,0} sort(%a), dimensions={1}, to_apply=%c\n"
        "  ROOT %t = f32[64,512]{1,0} sort(%s), dimensions={0}, to_apply=%c\n}\n"
    )
    assert scratch_of(both).nbytes == 4 * 512 * 4


def test_what_lies_between_operations_of_a_fusion_counts_while_it_is_needed():
    body = (
        "%f (a: f32[]) -> f32[] {\n  %a = f32[64,64]{1,0} parameter(0)\n"
        "  %e = f32[64,64]{1,0} exponential(%a)\n"
        "  %g = f32[64,64]{1,0} tanh(%e)\n"
        "  ROOT %n = f32[64,64]{1,0} negate(%g)\n}\n\n"
    )
    text = body + alone(f"f32[64,64]{{1,0}} fusion(%p0), {YNN}", "f32[64,64]{1,0}")
    assert scratch_of(text).nbytes == 2 * 64 * 64 * 4


def test_calls_of_unknown_libraries_are_named():
    line = 'f32[8]{0} custom-call(%p0), custom_call_target="my_kernel"'
    assert scratch_of(alone(line, "f32[8]{0}")).unbounded == ("my_kernel",)
    known = 'f32[8]{0} custom-call(%p0), custom_call_target="TopK"'
    assert scratch_of(alone(known, "f32[8]{0}")).unbounded == ()
