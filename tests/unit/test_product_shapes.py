"""The shapes of products in programs for TPUs, written by hand."""

import pytest

from capture.compiler.kernels import HloModule

KERNEL = (
    "  ROOT %found = (bf16[6,32,64,128]{3,2,1,0}, f32[6,32,64,128]{3,2,1,0}) custom-call(%a, %b), "
    'custom_call_target="tpu_custom_call"'
)
FUSION = "  ROOT %found = f32[16,32]{1,0} fusion(%a, %b), kind=kOutput, calls=%inner"
PRODUCT = """%inner (x: bf16[16,48], y: bf16[48,32]) -> f32[16,32] {
  %x = bf16[16,48]{1,0} parameter(0)
  %y = bf16[48,32]{1,0} parameter(1)
  %product = bf16[16,32]{1,0} convolution(%x, %y), dim_labels=bf_io->bf
  ROOT %out = f32[16,32]{1,0} convert(%product)
}

"""


def shape_of(line: str, first: str, second: str, inner: str = "") -> tuple[int, ...]:
    module = HloModule(
        f"HloModule m\n\n{inner}ENTRY %main (a: {first}, b: {second}) -> f32[1] {{\n"
        f"  %a = {first} parameter(0)\n  %b = {second} parameter(1)\n{line}\n}}\n"
    )
    (found,) = module.instructions
    return module.product_shape(found)


def test_a_convolution_inside_a_fusion_is_a_product_of_rows_and_features():
    assert shape_of(FUSION, "bf16[16,48]{1,0}", "bf16[48,32]{1,0}", PRODUCT) == (1, 16, 32)


def test_groups_of_a_convolution_are_products_of_their_own():
    grouped = PRODUCT.replace("bf_io->bf", "bf_io->bf, feature_group_count=4")
    assert shape_of(FUSION, "bf16[16,48]{1,0}", "bf16[48,32]{1,0}", grouped) == (4, 16, 8)


def test_a_kernel_of_pallas_has_the_shape_of_its_first_result():
    heads = "bf16[6,32,64,128]{3,2,1,0}"
    assert shape_of(KERNEL, heads, heads) == (192, 64, 128)


@pytest.mark.parametrize("target", ["__gpu$xla.gpu.triton", "mosaic_gpu_v2"])
def test_of_kernels_of_pallas_for_gpus_no_shape_is_taken(target):
    heads = "bf16[6,32,64,128]{3,2,1,0}"
    assert shape_of(KERNEL.replace("tpu_custom_call", target), heads, heads) == ()
