"""Of which products bounds count what stands in memory, and of which they count nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from capture.runtime.bounds import Bounder
from capture.runtime.opaque import product_sizes

N = 64
SQUARE = 4 * N * N
RULES = Bounder()


def least(function, *shapes, num_devices=1, dtype="float32", rules=RULES, donate=()):
    """The lower bound of a program of arguments that are not split."""
    mesh = jax.sharding.AbstractMesh((num_devices,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    return rules(function, args, donate=donate).least_bytes


def test_a_product_is_there_beside_its_operands():
    """Of ``tanh(x y) y`` the operand and the result; a sum makes the result a number."""
    assert least(lambda x, y: jnp.tanh(x @ y) @ y, (N, N), (N, N)) == 2 * SQUARE
    assert least(lambda x, y: (jnp.tanh(x @ y) @ y).sum(), (N, N), (N, N)) == SQUARE + 4
    assert least(lambda x, y: jnp.tanh(x) @ y, (N, N), (N, N)) == 2 * SQUARE


NOTHING = {
    "outer": lambda x, y: jnp.tanh(jnp.outer(x[:, 0], y[0])),
    "matrix-vector": lambda x, y: jnp.tanh(x) @ y[:, 0],
    "vectors": lambda x, y: jnp.einsum("nk,nk->n", jnp.tanh(x), jnp.sin(y)),
    "one term": lambda x, y: jnp.tanh(x[:, :1] @ y[:1]).sum(),
    "basis": lambda x, y: jnp.einsum(
        "ndk,dk->nd", jnp.cos(x[..., None] * jnp.arange(8.0)), y[:, :8]
    ),
    "complex": lambda x, y: jnp.real(lax.complex(x, y) @ lax.complex(y, x)),
    "integer": lambda x, y: jnp.tanh(x).astype(jnp.int32) @ y.astype(jnp.int32),
    "constant": lambda x, y: jnp.tanh(x) @ jnp.eye(N) + jnp.tanh(y) @ jnp.zeros((N, N)),
    "few elements": lambda x, y: jnp.tanh(x[:4, :4]) @ y[:4, :4],
    "twice": lambda x, y: jnp.tanh(x) @ y + (y.T @ (2 * jnp.tanh(x)).T).T,
    "unused": lambda x, y: (jnp.tanh(x) @ y, x)[1] + y,
    "depthwise": lambda x, y: lax.conv_general_dilated(
        jnp.tanh(x)[None],
        y[:3, None],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=N,
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_a_compiler_may_compute_otherwise_is_not_counted(name):
    def function(x, y):
        return NOTHING[name](x, y).sum()

    result = jax.eval_shape(function, *[jax.ShapeDtypeStruct((N, N), "float32")] * 2)
    assert least(function, (N, N), (N, N)) == result.dtype.itemsize
    large = Bounder(product_scratch_bytes=10**6, counts_work=True)
    assert least(function, (N, N), (N, N), rules=large) == result.dtype.itemsize


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.T,
        lambda x: x * 0.5,
        lambda x: -x / 3,
        lambda x: x[::-1],
        lambda x: jnp.pad(x, ((0, 2), (0, 0))),
        lambda x: x[jnp.arange(N)],
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        lambda x: jnp.maximum(x, -jnp.inf),
        lambda x: x + jnp.zeros((N, N)),
        lambda x: jnp.log(x),
        lambda x: jnp.tanh(jnp.broadcast_to(x[:1, :1], (N, N))),
    ],
)
def test_an_argument_that_is_only_moved_or_scaled_may_be_read_as_it_is(moved):
    found = least(lambda x, y: (moved(x) @ y).sum(), (N, N), (N, N))
    assert found <= SQUARE + 2 * 4 * N + 8, "the product alone"
    assert least(lambda x, y: (moved(jnp.tanh(x)) @ y).sum(), (N, N), (N, N)) <= 2 * SQUARE + 600


def test_what_is_narrowed_at_once_never_stands_as_it_was():
    def cast(x, y):
        wide = lax.dot(x, y, preferred_element_type=jnp.float32)
        return wide.astype(jnp.bfloat16) @ y

    assert least(cast, (N, N), (N, N), dtype="bfloat16") == SQUARE
    summed = lambda x, y: jnp.einsum("npk,mpk->pnm", x, y).sum(0) @ x[:, 0]  # noqa: E731
    assert least(summed, (N, 8, 16), (N, 8, 16)) == SQUARE + 4 * N * 16


def test_a_dimension_may_be_split_until_one_is_left():
    def function(x, y):
        return (jnp.tanh(x) @ y).sum()

    assert least(function, (8, N), (N, N), num_devices=4) > 4
    assert least(function, (8, N), (N, N), num_devices=8) == 4


def test_a_result_may_be_computed_last():
    """It is not there while a product reads something else that is made of the same."""

    def function(x, y):
        r = jnp.tanh(x)
        return r, (jnp.sin(r) @ y).sum()

    assert least(function, (N, N), (N, N)) == SQUARE + 4


def test_a_donated_argument_holds_a_result():
    def add(total, x, y):
        return total + jnp.tanh(x) @ y

    assert least(add, (N, N), (N, N), (N, N), donate=(0,)) == SQUARE
    assert least(add, (N, N), (N, N), (N, N)) == 2 * SQUARE


def test_a_donated_argument_lends_its_memory_before_a_result_is_written():
    def chain(x, y):
        return jnp.tanh(x) @ y @ y

    shapes = ((N, N), (N, N))
    assert least(chain, *shapes) == 2 * SQUARE
    assert least(chain, *shapes, donate=(0,)) == SQUARE, "the operand is where x was"
    flat = least(lambda x, y: chain(x, y).reshape(-1), *shapes, donate=(0,))
    assert flat == SQUARE, "as many elements are enough"


def test_compilers_that_keep_less_are_counted_less():
    def function(x, y):
        return (jnp.tanh(jnp.tanh(x) @ y) @ y).sum()

    shapes = ((N, N), (N, N))
    assert least(function, *shapes, rules=Bounder(keeps_products=False)) == 4
    assert least(function, *shapes) == 2 * SQUARE


def test_sizes_of_products():
    def sizes(function, *shapes):
        args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return product_sizes(jax.make_jaxpr(function)(*args).jaxpr.eqns[0])

    assert sizes(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (9, 2, 3), (9, 3, 5)) == (2, 5, 3)
    image = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    conv = lambda x, y: lax.conv_general_dilated(x, y, (1, 1), "SAME", **image)  # noqa: E731
    assert sizes(conv, (2, 8, 8, 3), (3, 3, 3, 16)) == (128, 16, 27)
    assert sizes(lambda x, y: x + y, (2,), (2,)) == (0, 0, 0)
