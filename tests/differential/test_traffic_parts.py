"""What tracing says that a program reads more than once, or has to lay out anew, against what it is
by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS
from capture.runtime.bounds import Bounder
from capture.runtime.least_traffic import along_sequence, of_examples, together

N = 256
SQUARE = 4 * N * N


def traffic(function, *shapes, mesh=(1, 1), specs=None, dtype="float32"):
    """Bytes of the parts of the least traffic of a function."""
    devices = AbstractMesh(mesh, (DATA_AXIS, MODEL_AXIS), (AxisType.Auto,) * 2)
    specs = specs or [PartitionSpec()] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(devices, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    work = Bounder(counts_work=True)(function, args).least_work
    return [kernel.nbytes for kernel in work.kernels if not kernel.dtype]


def squares(function, count=2):
    """The same in squares, of what tensor parallelism does not split."""
    return sum(traffic(function, *[(N, N)] * count)) / SQUARE


def test_a_sum_that_is_a_result_ends_the_kernel_that_reads_its_rows():
    def softmax(x, y, gives_sums):
        scores = x @ y
        most = scores.max(axis=-1, keepdims=True)
        terms = jnp.exp(scores - most)
        total = terms.sum(axis=-1, keepdims=True)
        return ((terms / total) @ y, most, total) if gives_sums else (terms / total) @ y

    one_kernel = squares(lambda x, y: softmax(x, y, False))
    assert one_kernel == 2  # reads the scores, writes what the product reads
    rows = 2 * 4 * N / SQUARE
    assert squares(lambda x, y: softmax(x, y, True)) == 2 + 2 + rows  # once more for each sum


def test_a_sum_over_rows_ends_a_kernel_where_no_softmax_is():
    def gradient(dy, p, y):
        # As of a softmax whose maximum and sum are known: two large values are multiplied.
        products = dy @ y
        sums = (products * p).sum(axis=-1, keepdims=True)
        return ((products - sums) * p) @ y

    def many(dy, p, y):
        return gradient(dy, jnp.tanh(p), y)

    # Writes an operand; reads a result and an argument, both twice.
    assert squares(gradient, 3) == squares(many, 3) == 1 + 2 * 2

    def with_softmax(dy, p, y):
        return gradient(dy, jax.nn.softmax(p), y)

    assert squares(with_softmax, 3) < 1 + 2 * 2


def test_what_two_values_need_a_sum_for_is_read_twice():
    def both(x, y, z):
        p = jax.nn.softmax(x @ y)
        return p @ y, (p * z) @ y

    def one(x, y, z):
        return jax.nn.softmax(x @ y) @ y

    assert squares(one, 3) == 2
    assert squares(both, 3) == 2 + 1 + 2  # reads z and writes another operand, too


def test_a_sum_of_a_constant_is_none_of_rows():
    def scaled(x, y):
        # A number of a program that is called stands for what is summed there.
        total = jax.jit(lambda number: jax.lax.reduce_sum(number, axes=()))(3.0)
        return jnp.exp(x * total) @ y

    assert squares(scaled) == 2


def test_less_that_is_computed_on_the_way_may_be_stored_for_the_second_time():
    def sums(a, b, y):
        x = a + b
        total = x.sum(axis=-1, keepdims=True)
        return (x - total) @ y, total

    # Reads both arguments once, and their sum or as much once more; writes an operand.
    assert squares(sums, 3) == 2 + 1 + 1 + 4 * N / SQUARE


def test_what_is_read_before_a_product_and_behind_it_is_read_twice():
    def around(x, y):
        return jnp.exp(x) @ y

    def again(x, y):
        return jnp.exp(jnp.exp(x) @ y) * jnp.tanh(x)

    assert squares(around) == 2
    assert squares(again) == 2 + 3  # the product and x again, and the result


def test_an_argument_that_only_a_product_has_read_is_read_once():
    def behind(x, y):
        return jnp.exp(x @ y) * jnp.tanh(x)

    assert squares(behind) == 3


HEADS = ((2, N, N), (N, 4, 64))


def heads(x, w):
    """Products of every head of an example with itself, from what is made of all heads together."""
    q = jnp.einsum("bse,ehd->bshd", x, w)
    return jnp.einsum("bqhd,bkhd->bhqk", q, jnp.tanh(x.reshape(2, N, 4, 64)))


def test_heads_that_are_made_together_are_moved_to_be_read_apart():
    moved = 2 * 4 * 2 * N * N  # one example of one device: the heads lie apart
    tanh = moved
    assert sum(traffic(heads, *HEADS)) == tanh + moved
    examples = [PartitionSpec(DATA_AXIS), PartitionSpec()]
    # One example on each device: its heads are at one distance.
    assert sum(traffic(heads, *HEADS, mesh=(2, 1), specs=examples)) == tanh / 2


def test_experts_may_find_what_they_read_as_they_read_it():
    def experts(x, w):
        return jnp.einsum("gecm,emh->gech", x, w)

    shapes = [(4, 8, 64, 64), (8, 64, 64)]
    specs = [PartitionSpec(DATA_AXIS), PartitionSpec(DATA_AXIS)]
    assert sum(traffic(experts, *shapes)) > 0, "on one device"
    assert sum(traffic(experts, *shapes, mesh=(2, 1), specs=specs)) == 0


def test_arguments_are_moved_that_lie_in_another_order():
    def apart(q, k):
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    def beside(q, k):
        return jnp.einsum("bhqd,bhkd->bhqk", q, k)

    whole = 4 * 2 * 4 * N * 64
    assert sum(traffic(apart, *[(2, N, 4, 64)] * 2)) == 2 * 2 * whole
    assert sum(traffic(beside, *[(2, 4, N, 64)] * 2)) == 0


@pytest.mark.parametrize("along", [False, True])
def test_traffic_is_known_in_parts(along):
    """Of what replicas split and what they do not, and of both what tensor parallelism does."""

    def layer(x, w, scale):
        return jnp.exp(x * scale) @ jnp.exp(w)

    specs = [PartitionSpec(DATA_AXIS), PartitionSpec(None, MODEL_AXIS), PartitionSpec()]
    shapes = [(N, N), (N, N), (N,)]
    devices = AbstractMesh((2, 2), (DATA_AXIS, MODEL_AXIS), (AxisType.Auto,) * 2)
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(devices, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    work = Bounder(counts_work=True)(layer, args).least_work
    if along:
        work = along_sequence(work, 2)
    parts = [k.nbytes for k in work.kernels if not k.dtype]
    share = 2 if along else 1
    assert parts == [0, 2 * SQUARE // 2 // share, 2 * SQUARE // 2, 4 * N // share]
    assert [k.nbytes for k in of_examples(work).kernels if not k.dtype] == parts[:2]
    joined = [k.nbytes for k in together(work).kernels if not k.dtype]
    assert joined == [sum(parts[:2]), sum(parts[2:])]
