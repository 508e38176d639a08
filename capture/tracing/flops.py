"""Forward floating-point operations of an equation, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

from capture.tracing.jaxprs import primitives, sub_jaxprs

#: Only move, name or reinterpret data.
_NO_FLOPS = primitives("""
    reshape broadcast_in_dim transpose squeeze expand_dims rev concatenate pad split iota
    select_n slice dynamic_slice dynamic_update_slice gather copy copy_p convert_element_type
    bitcast_convert_type name stop_gradient optimization_barrier debug_callback debug_print
    random_seed random_wrap random_unwrap random_split random_fold_in""")


def equation_flops(equation) -> int:
    """Count the floating-point operations of an equation: 2 per multiply-add, 1 per element of
    other arithmetic, 0 for moving data.

    A scan counts its body ``length`` times, a ``cond`` its dearest branch (one by platform its
    default), a ``while`` one iteration, a Pallas kernel what its author estimates, or else its body
    once per point of the grid.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5)))
        >>> [equation_flops(e) for e in jaxpr.eqns]
        [60]
    """
    name, params = equation.primitive.name, equation.params
    out_size = sum(math.prod(v.aval.shape) for v in equation.outvars)
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return 2 * out_size * math.prod(equation.invars[0].aval.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return (
            2
            * out_size
            * math.prod(kernel)
            // max(1, kernel[params["dimension_numbers"].rhs_spec[0]])
        )
    bodies = [sum(map(equation_flops, body.eqns)) for body in sub_jaxprs(params)]
    if name == "cond":
        platforms = params.get("branches_platforms") or ()
        return bodies[platforms.index(None)] if None in platforms else max(bodies, default=0)
    if name.startswith(("reduce_", "arg", "scatter")):
        # A reduction combines what it reads, a scatter what it writes; the body says only how.
        return math.prod(equation.invars[-1 if name.startswith("scatter") else 0].aval.shape)
    if name == "pallas_call":
        return _kernel_flops(params, sum(bodies))
    if bodies:
        return params.get("length", 1) * sum(bodies)
    return 0 if name in _NO_FLOPS else out_size


def _kernel_flops(params: dict[str, Any], of_body: int) -> int:
    estimate = params.get("cost_estimate")
    if estimate is not None and estimate.flops:
        return int(estimate.flops)
    grid = getattr(params.get("grid_mapping"), "grid", ())
    return of_body * math.prod(size for size in grid if isinstance(size, int))
