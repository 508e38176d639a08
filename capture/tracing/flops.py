"""Forward floating-point operations of an equation, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

from capture.tracing.jaxprs import primitives, sub_jaxprs
from capture.tracing.split_rule import PRIMITIVE

#: Of Pallas.
KERNEL = "pallas_call"

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
    if name == KERNEL:
        return _kernel_flops(params, sum(bodies))
    if bodies:
        return params.get("length", 1) * sum(bodies)
    return 0 if name in _NO_FLOPS else out_size


def kernel_flops(jaxpr: Any, num_devices: int = 1) -> int:
    """Count the FLOPs of a program's kernels of Pallas on one of its devices, in which no compiler
    counts any. What has a kernel for some platforms counts as ``equation_flops`` does.

    Args:
        jaxpr: The traced program, open.
        num_devices: Devices over which the compiler splits ``custom_partitioning`` operations; what
            is no such operation every device runs whole.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in (KERNEL, PRIMITIVE) or params.get("branches_platforms"):
            if holds(equation, KERNEL):
                total += equation_flops(equation) // (num_devices if name == PRIMITIVE else 1)
            continue
        bodies = [kernel_flops(body, num_devices) for body in sub_jaxprs(params)]
        total += max(bodies) if name == "cond" else params.get("length", 1) * sum(bodies)
    return total


def holds(equation: Any, name: str, outside: str = "") -> bool:
    """Tell whether an equation is of a primitive, or runs one in a body, but not in one of
    ``outside``."""
    if equation.primitive.name in (name, outside):
        return equation.primitive.name == name
    inner = (e for body in sub_jaxprs(equation.params) for e in body.eqns)
    return any(holds(e, name, outside) for e in inner)


def _kernel_flops(params: dict[str, Any], of_body: int) -> int:
    estimate = params.get("cost_estimate")
    if estimate is not None and estimate.flops:
        return int(estimate.flops)
    grid = getattr(params.get("grid_mapping"), "grid", ())
    return of_body * math.prod(size for size in grid if isinstance(size, int))
