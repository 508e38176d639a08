"""The fewest bytes that a forward pass keeps: against all other choices, and what is never made
again."""

from __future__ import annotations

from itertools import chain, combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import output_of

from capture.partition.walk import followed_dims
from capture.plan.choices import is_cut, is_remat
from capture.runtime.residuals import ValueSplit
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable
from capture.tracing.mincut import TRAFFIC_PER_KEPT_BYTE, least_kept
from capture.tracing.recompute import aval_bytes, recompute_bytes, unlisted


def test_every_primitive_that_can_be_lowered_is_listed():
    names = set(output_of("lowered_primitives").split("\n")) - {""}
    assert {"dot_general", "threefry2x32"} <= names
    assert unlisted(names) == set()
    assert unlisted({"add", "of a user"}) == {"of a user"}


def flow_of(function, *shapes) -> DataFlow:
    return DataFlow(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)))


def kept(flow: DataFlow, num_params: int = 0) -> list[str]:
    """Shapes and makers of what is kept of all that the function returns."""
    reached = flow.propagate({v: frozenset([0]) for v in flow.inputs[num_params:]})
    from_data = {v for v, origins in reached.items() if origins}
    found = least_kept(flow, flow.outputs, from_data, aval_bytes)
    return [
        f"{v.aval.str_short(short_dtypes=True)} {maker.primitive.name if maker else 'input'}"
        for v, maker in zip(found, map(flow.maker, found), strict=True)
    ]


def saved_by_vjp(function):
    def saving(*args):
        _, vjp = jax.vjp(function, *args)
        return [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.core.Tracer)]

    return saving


def test_an_activation_keeps_what_it_follows_from_and_no_product_is_made_again():
    def layer(w, x):
        return jax.nn.gelu(x @ w, approximate=True) @ w.T

    flow = flow_of(saved_by_vjp(layer), (8, 64), (32, 8))
    assert len({id(v) for v in flow.outputs if v.aval.shape == (32, 64)}) > 4
    assert kept(flow, num_params=1) == ["f32[32,8] input", "f32[32,64] dot_general"]


def test_a_mean_is_kept_where_making_it_again_reads_much():
    def mean_of(x):
        y = x + 1
        return y, jnp.sum(y, axis=1)

    assert kept(flow_of(mean_of, (4, 1024))) == ["f32[4,1024] add", "f32[4] reduce_sum"]
    assert kept(flow_of(mean_of, (4, 4))) == ["f32[4,4] add"]


def test_lookups_in_parameters_and_random_bits_are_made_again_and_choices_are_not():
    def function(table, tokens, key, scores):
        bits = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, (64, 8))
        values, experts = jax.lax.top_k(scores, 2)
        return table[tokens], bits, values, experts

    flow = DataFlow(
        jax.make_jaxpr(function)(
            jnp.zeros((50, 8)),
            jnp.zeros(64, jnp.int32),
            jnp.zeros(2, jnp.uint32),
            jnp.zeros((64, 100)),
        )
    )
    assert kept(flow, num_params=1) == [
        "key<fry>[] random_wrap",
        "f32[64,2] top_k",
        "i32[64,2] top_k",
        "i32[64,1] broadcast_in_dim",
    ]


@pytest.mark.parametrize(("impl", "again"), [("threefry2x32", True), ("unsafe_rbg", False)])
def test_random_bits_are_made_again_if_they_do_not_depend_on_how_they_are_split(impl, again):
    def function(key):
        return jax.random.bits(jax.random.split(key)[0], (4,))

    flow = DataFlow(jax.make_jaxpr(function)(jax.random.key(0, impl=impl)))
    costs = {e.primitive.name: recompute_bytes(e) for e in flow.jaxpr.eqns}
    assert (costs["random_bits"] is not None) == again
    assert (costs["random_split"] is not None) == again


def test_bodies_cost_what_is_in_them_and_loops_and_effects_are_never_run_again():
    def costs(function):
        return [
            recompute_bytes(e) for e in jax.make_jaxpr(function)(jnp.zeros((10, 10))).jaxpr.eqns
        ]

    assert costs(jax.checkpoint(lambda x: jnp.tanh(x) + x)) == [105]
    assert costs(jax.checkpoint(lambda x: jnp.tanh(x @ x))) == [None]
    assert costs(lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=3)[0]) == [None]

    def seen(x):
        jax.debug.print("{}", x)
        return x

    assert costs(lambda x: jax.jit(seen)(x) + 1)[0] is None


@st.composite
def programs(draw):
    """Programs of 3 to 6 operations on arrays of different sizes, and which values are read."""
    operations = draw(
        st.lists(
            st.tuples(st.sampled_from(["add", "sum", "product", "repeat"]), st.integers(0, 9)),
            min_size=3,
            max_size=6,
        )
    )
    reads = draw(st.sets(st.integers(0, 9), min_size=1, max_size=4))

    def function(x):
        values = [x]
        for name, operand in operations:
            at, last = values[operand % len(values)], values[-1]
            if name == "sum":
                values.append(jnp.sum(at, axis=0, keepdims=True) * 2)
            elif name == "repeat":
                values.append(jnp.concatenate([at, at]))
            elif name == "product":
                values.append(at @ jnp.ones((4, 4)))
            else:
                values.append(at + last[:1])
        return [values[i % len(values)] for i in sorted(reads)]

    return function


@given(programs())
def test_no_other_choice_costs_less(function):
    flow = flow_of(function, (4, 4))
    from_data = set(flow.propagate({v: frozenset([0]) for v in flow.inputs}))
    values = [v for v in flow.values if v in from_data]

    def cost(chosen) -> float:
        """Bytes kept and, at its price, what is run again; infinite where that is not enough."""
        again = [recompute_bytes(e) for e in flow.needed(flow.outputs, chosen)]
        inputs = [v for v in flow.inputs if v in needed_inputs(flow, chosen)]
        if None in again or inputs:
            return np.inf
        return sum(map(aval_bytes, chosen)) + sum(again) / TRAFFIC_PER_KEPT_BYTE

    found = least_kept(flow, flow.outputs, from_data, aval_bytes)
    subsets = chain.from_iterable(combinations(values, n) for n in range(min(5, len(values)) + 1))
    assert cost(set(found)) <= min(map(cost, map(set, subsets))) + 1
    assert sum(map(aval_bytes, found)) <= sum(map(aval_bytes, dict.fromkeys(flow.outputs)))


def needed_inputs(flow: DataFlow, chosen: set) -> set:
    """Inputs that are read where only the chosen values are there."""
    read = [v for e in flow.needed(flow.outputs, chosen) for v in e.invars]
    return set(filter(is_variable, [*read, *flow.outputs])) & set(flow.inputs) - chosen


def test_bytes_are_those_of_one_device_and_nothing_is_exchanged_again():
    """Of a layer whose columns are split, as it says which dimension is."""

    def layer(w, x):
        h = jnp.tanh(x @ w)
        return h, jnp.sum(h, axis=1), jnp.sum(h, axis=0)

    flow = flow_of(layer, (8, 64), (32, 8))
    split = ValueSplit(flow, [("data", 2, [None, 0]), ("model", 4, [1, None])])
    product, hidden, over_columns, over_rows = flow.jaxpr.eqns
    assert followed_dims(flow.jaxpr, [1, None], 4)[product.outvars[0]] == 1
    assert split.nbytes(product.outvars[0]) == 32 * 64 * 4 // 8
    assert split.recompute_bytes(product) is None
    assert split.recompute_bytes(hidden) == recompute_bytes(hidden) / 8
    assert split.recompute_bytes(over_columns) is split.recompute_bytes(over_rows) is None
    alone = ValueSplit(flow, [("data", 1, [None, 0]), ("model", 1, [1, None])])
    assert alone.recompute_bytes(over_columns) == recompute_bytes(over_columns)


@pytest.mark.parametrize(
    "text",
    [
        "2%",
        "2",
        "half",
        "full:0",
        "full:",
        "full:01",
        "full:1.5",
        "full2",
        "dots:1",
    ],
)
def test_mixtures_that_are_none(text):
    assert not is_remat(text) and not is_cut(text)
