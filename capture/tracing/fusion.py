"""What a compiler fuses around the products of a jaxpr: which values it keeps for the backward pass
in place of those that ``jax.vjp`` saves, and what comes and goes beside them.

Known by kinds of primitives, not by asking the compiler: an estimate, which searches need for every
operator at once, and which compiling the whole step then checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capture.tracing.cut import PRODUCTS
from capture.tracing.jaxprs import primitives, variables
from capture.tracing.leaf_uses import LAYOUT


def following(jaxpr, known: set) -> set:
    """Return the variables that follow from known ones by operations that are fused."""
    found = set[Any]()
    for equation in jaxpr.eqns:
        if _is_fused(equation) and all(
            v in known or v in found for v in variables(equation.invars)
        ):
            found.update(equation.outvars)
    return found - known


#: Products of numbers: lookups are none.
MULTIPLY = PRODUCTS.keys() - {"gather"}


def multiplied(jaxpr, known: dict[object, bool]) -> dict[Any, bool]:
    """Tell, per variable that is read, whether only products at default precision read it, directly
    or in another layout.

    Args:
        known: Values that others read, each with whether only such products do.
    """
    found = dict(known)
    for equation in reversed(jaxpr.eqns):
        name = equation.primitive.name
        ways = {name in MULTIPLY and _precision(equation) == "default"}
        if name in (*LAYOUT, "slice", "split"):
            ways = {found[v] for v in equation.outvars if v in found}
        for v in variables(equation.invars) if ways else ():
            found[v] = found.get(v, True) and all(ways)
    return found


def _precision(equation) -> str:
    """Return the precision that a product asks for; ``highest`` where it names an algorithm, which
    is exact or says itself what it computes in."""
    asked = equation.params.get("precision")
    if asked is None or isinstance(asked, tuple):
        return max(
            asked or (jax.lax.Precision.DEFAULT,), key=lambda precision: precision.value
        ).name.lower()
    return "highest"


#: Of the first word of a ``jax.lax.DotAlgorithmPreset`` that takes one pass.
_ALGORITHM_DTYPES = {"TF32": "tf32", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def computed_in(equation) -> tuple[str, str]:
    if equation is None:
        return "float32", "default"
    words = getattr(equation.params.get("precision"), "name", "").split("_")
    dtype = str(equation.invars[0].aval.dtype)
    return _ALGORITHM_DTYPES.get(words[0], dtype) if len(words) == 3 else dtype, _precision(
        equation
    )


#: Ops that a compiler fuses into what reads their result, beside element-wise ones.
_FUSED = primitives("""
    broadcast_in_dim convert_element_type expand_dims iota reshape squeeze stop_gradient
    transpose""")
#: Ops that are none although they keep the shape.
_WHOLE = primitives("""
    cumlogsumexp cummax cummin cumprod cumsum random_bits rev sort while scan cond""")


#: Ops that are too long to be computed again where a later one reads their result; the second only
#: on 16 bits, between whose roundings nothing is joined. Seen in programs for H100 (jax 0.10.2):
#: GELU and SiLU, their backward passes.
_LONG = frozenset({"erf", "erf_inv", "erfc", "lgamma", "digamma"})
_LONG_IN_16_BITS = _LONG | {"exp", "tanh"}


def _is_long(equation) -> bool:
    return equation.primitive.name in (
        _LONG_IN_16_BITS if equation.outvars[0].aval.dtype.itemsize == 2 else _LONG
    )


def _is_fused(equation) -> bool:
    """Tell whether an operation is fused into what reads its result."""
    name, (result, *more) = equation.primitive.name, equation.outvars
    if more or name in _WHOLE or name in PRODUCTS or "call" in name:
        return False
    return name in _FUSED or all(
        _broadcasts(v.aval.shape, result.aval.shape) for v in equation.invars
    )


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Tell whether a shape is the result's, except where its dimensions are 1."""
    return not shape or (
        len(shape) == len(result) and all(a in (1, b) for a, b in zip(shape, result, strict=True))
    )


def kept(
    jaxpr,
    saved: Sequence,
    free: set,
    boundary: set,
    nbytes: Callable[[object], int],
    fuse_operands: bool,
) -> set:
    """Return the variables that a compiler keeps in place of those that ``jax.vjp`` saves.

    Results of products are in memory anyway, operands unless they are fused, and so are sums and
    values between layers. What follows from them by element-wise operations is computed again where
    it is read, so they are kept in its place, unless that is more; sums are next to nothing. A mask
    that tells where one of them is positive is computed again although it would be less.

    Args:
        saved: Variables that ``jax.vjp`` saves.
        free: Variables that cost nothing.
        boundary: Values between layers.
        fuse_operands: Whether operands of products are fused into them (``Products``).
    """
    stops = set(boundary)
    for equation in jaxpr.eqns:
        if _is_long(equation):
            stops.update(equation.outvars)
        if not _is_fused(equation):
            stops.update(equation.outvars)
            made_on_the_way = equation.primitive.name.startswith("reduce_") or (
                fuse_operands and equation.primitive.name in MULTIPLY
            )
            if not made_on_the_way:
                stops.update(variables(equation.invars))
    small = sums(jaxpr)
    roots: dict[Any, frozenset] = {}
    for equation in jaxpr.eqns:
        read = [v for v in variables(equation.invars) if v not in free]
        below = frozenset().union(*(roots.get(v, frozenset([v])) for v in read))
        roots.update((out, frozenset([out]) if out in stops else below) for out in equation.outvars)
    found = {v for v in saved if v in stops}
    # A probability costs nothing beside the score that it follows from.
    for v in sorted(saved, key=nbytes, reverse=True):
        instead = roots.get(v, frozenset([v])) - found
        of_one = (
            v.aval.dtype == bool
            and len(instead) == 1
            and all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in instead)
        )
        found |= instead if of_one or sum(map(nbytes, instead - small)) <= nbytes(v) else {v}
    return found


#: Ops whose results are their operands in another layout.
_SAME = frozenset({*LAYOUT, "slice", "split", "concatenate"})


def going_backwards(jaxpr, product, there: set, nbytes: Callable[[object], int]) -> int:
    """Return the most bytes that come and go while one operation after the product goes backwards.

    One that is not fused, a lookup of labels among log-probabilities for example, reads the
    gradient of its result and writes those of its operands; and what it reads of the forward pass
    is in memory, kept or not.

    Args:
        product: Equation of the product of the forward pass; None without one.
        there: Variables that are kept, and those that cost nothing.
    """
    most, equations, there = 0, list(jaxpr.eqns), set(there)
    for equation in equations:
        if equation.primitive.name in _SAME:
            there.update(
                equation.outvars if any(v in there for v in variables(equation.invars)) else ()
            )
    for equation in equations[equations.index(product) + 1 :] if product is not None else equations:
        if not _is_fused(equation) and not equation.primitive.name.startswith("reduce_"):
            read = {
                v for v in variables(equation.invars) if jnp.issubdtype(v.aval.dtype, jnp.floating)
            }
            gradients = [
                v for v in (*read, *equation.outvars) if jnp.issubdtype(v.aval.dtype, jnp.floating)
            ]
            values = set() if equation.primitive.name in _SAME else read - there
            most = max(most, sum(map(nbytes, gradients)) + sum(map(nbytes, values)))
    return most


def sums(jaxpr) -> set:
    return {
        v
        for equation in jaxpr.eqns
        if equation.primitive.name.startswith("reduce_")
        for v in equation.outvars
    }
