"""Products by their tiles: ``capture.machine.tiles``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.machine.links import Layout
from capture.machine.target import Target, target_names
from capture.machine.tiles import FULL_REUSE, tiled_seconds
from capture.measured.work import Kernel
from capture.step.times import TimeModel

#: Of a device of 10 cores that do one tile of 128 x 128 and depth 1 each in a second.
CORES, RATE = 10, 10.0 * 2 * 128 * 128


def seconds(batches, rows, columns, depth, needed=FULL_REUSE, bytes_per_second=1e-9):
    flops = 2 * batches * rows * columns * depth
    return tiled_seconds((batches, rows, columns), flops, CORES, RATE, needed, bytes_per_second)


def test_waves_of_tiles_by_hand():
    assert seconds(1, 128, 1280, 100) == pytest.approx(100)  # 10 tiles, one wave
    assert seconds(10, 128, 128, 100) == pytest.approx(100)
    assert seconds(11, 128, 128, 100) == pytest.approx(200)  # the second wave has one
    # Four tiles of 64 x 64 have its results, at half of the rate: 44 of 10 cores, five waves.
    assert seconds(11, 128, 128, 100, needed=32) == pytest.approx(5 * 100 / 4)
    assert seconds(11, 128, 128, 100, needed=64) < seconds(11, 128, 128, 100, needed=64.1)
    assert seconds(1, 1, 1, 100) == pytest.approx(50)  # one tile of 64 x 64, at half of the rate


def test_a_deep_sum_is_cut_into_parts_where_its_partial_results_are_cheap():
    """Two tiles on ten cores; in four parts of 1,024 eight are busy, at their full rate."""
    whole = seconds(2, 128, 128, 4096)
    assert whole == pytest.approx(2048)  # memory is slow: eight of 64 x 64, at half of the rate
    results = 2 * 128 * 128
    parts = seconds(2, 128, 128, 4096, bytes_per_second=8 * results)
    assert parts == pytest.approx(4096 / 4 + 4)
    assert seconds(2, 128, 128, 511, bytes_per_second=1e9) == pytest.approx(255.5)  # too shallow


@given(
    st.tuples(*[st.integers(1, 3000)] * 3),
    st.integers(1, 5000),
    st.integers(2, 16),
    st.sampled_from(target_names()),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_fusion_never_costs_and_no_product_is_faster_than_the_roofline(
    shape, depth, models, target, dtype
):
    rates = Target.load(target).rates
    if rates is None:
        return
    model = TimeModel(rates, Layout(8))

    def of(batches):
        rows, columns = shape[1:]
        flops = 2 * batches * rows * columns * depth
        kernel = Kernel(0, flops, dtype, "default", shape=(batches, rows, columns))
        roofline = flops / rates.reached_flops_per_second(dtype, "default")
        assert model.kernel_seconds(kernel) >= roofline * (1 - 1e-9)
        return model.kernel_seconds(kernel)

    assert of(models * shape[0]) <= models * of(shape[0]) * (1 + 1e-9)


def test_small_products_fill_no_gpu_and_large_ones_do():
    rates = Target.load("h100").rates
    model = TimeModel(rates, Layout(8))

    def of(batches, width):
        flops = 2 * batches * width**3
        return model.kernel_seconds(
            Kernel(0, flops, "bfloat16", "default", shape=(batches, width, width))
        )

    assert of(8, 384) < 2 * of(1, 384)
    assert of(8, 1024) < 6 * of(1, 1024)
    assert of(8, 16384) == pytest.approx(8 * of(1, 16384), rel=0.03)
    assert rates.needed_reuse("float32") < 10 < rates.needed_reuse("float32", "default")


def test_what_is_narrower_than_a_systolic_array_leaves_a_part_of_it_idle():
    def of(target, rows, columns, depth):
        flops = 2 * rows * columns * depth
        rates = Target.load(target).rates
        kernel = Kernel(0, flops, "bfloat16", "default", shape=(1, rows, columns))
        alone = flops / rates.reached_flops_per_second("bfloat16", "default")
        return TimeModel(rates, Layout(8)).kernel_seconds(kernel) / alone

    assert of("v6e", 8192, 4096, 4096) == of("v5e", 8192, 4096, 4096) == pytest.approx(1)
    # Attention with heads of 128: scores, and what they weigh.
    assert of("v6e", 8192, 8192, 128) == of("v6e", 8192, 128, 8192) == pytest.approx(2)
    assert of("v5e", 8192, 128, 8192) == pytest.approx(1)
    assert of("v6e", 8192, 384, 512) == pytest.approx(512 / 384)
    # A column is no product of an array: no slower than the passes of an exact product.
    assert of("v6e", 8192, 1, 8192) == pytest.approx(6)
