"""What running an operation once more costs, so that its result need not be kept.

A compiler fuses element-wise operations into what reads them: they cost arithmetic alone. Moving
data and reducing it are passes over memory. Products, windows and loops are never run again; nor is
what has to come out the same both times: a choice (sort, top-k, the largest element), which
rounding may tip in another program, and random bits whose generator depends on how a compiler
splits them.

The lists name every primitive that the supported versions of JAX can lower, which a test proves; a
primitive that is in none (a user's own) is never run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from capture.tracing.flops import equation_flops
from capture.tracing.jaxprs import CALLS, CUSTOM_RULES, REMATS, primitives, sub_jaxprs
from capture.tracing.keys import is_key

#: Element-wise operations that this many make up for one byte read or written: accelerators of
#: today do 16 to 32 in single precision (H100: 67 TFLOP/s, 3.35 TB/s).
FLOPS_PER_BYTE = 20


#: The same array under another name, shape or type.
RENAMED = primitives("""
    bitcast_convert_type broadcast_in_dim broadcast_to convert_element_type copy copy_p empty
    empty2 expand_dims from_edtype full iota layout_constraint name optimization_barrier pvary
    random_clone random_unwrap random_wrap reduce_precision reshape reshard sharding_constraint
    split squeeze stop_gradient to_edtype unstack xla_metadata_value zeros_like""")
#: One operation per element.
ARITHMETIC = primitives("""
    abs add add_any and ceil clamp clz complex conj eq eq_to floor ge gt imag integer_pow is_finite
    le le_to lt lt_to max min mul mul_any mulhi multiple_of ne neg nextafter not one_minus_square or
    population_count real reciprocal round select_n shift_left shift_right_arithmetic
    shift_right_logical sign square sub xor""")
#: About 20, in hardware or as a short polynomial.
FUNCTIONS = primitives("""
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf erfc exp exp2 expm1 log log1p log2
    logistic pow rem rsqrt sin sinh sqrt tan tanh""")
#: About 100: long polynomials, generators of random bits.
LONG_FUNCTIONS = primitives("""
    bessel_i0e bessel_i1e digamma erf_inv iota_2x32_shape lgamma philox2x32 philox4x32 polynomial
    random_bits random_fold_in random_seed random_split threefry2x32 threefry4x32""")
#: All that is computed element by element, or is another view.
ELEMENTWISE = RENAMED | ARITHMETIC | FUNCTIONS | LONG_FUNCTIONS
#: Write their results to memory.
MOVES = primitives("""
    concatenate dynamic_slice dynamic_update_slice gather pad relayout rev slice stack
    tile transpose""")
#: Read their operands from memory.
REDUCTIONS = primitives("""
    reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor""")
#: As dear as their bodies.
BODIES = primitives("call composite cond remat_opt") | {*CALLS, *REMATS, *CUSTOM_RULES}

#: Never run again: products and what is as dear;
PRODUCTS = primitives("""
    cholesky cholesky_update conv_general_dilated custom_linear_solve dot_general eig eigh fft geqp3
    geqrf hessenberg householder_product lu lu_pivots_to_permutation ormqr qr ragged_dot
    ragged_dot_general scaled_dot scaled_matmul scaled_matmul_wrapper schur svd symmetric_product
    triangular_solve tridiagonal tridiagonal_solve
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fwd dot_product_attention_fwd_wrapper""")
#: windows and scatters, whose passes over memory are not known;
WINDOWS = primitives("""
    cumlogsumexp cummax cummin cumprod cumsum reduce_window reduce_window_max reduce_window_min
    reduce_window_sum scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    scatter_add scatter_max scatter_min scatter_mul scatter_sub select_and_gather_add
    select_and_scatter select_and_scatter_add""")
#: loops, also inside one element;
LOOPS = primitives("""
    igamma igamma_grad_a igammac polygamma random_gamma regularized_incomplete_beta scan while
    zeta""")
#: what has to come out the same;
CHOICES = primitives("approx_top_k argmax argmin rng_bit_generator rng_uniform sort top_k")
#: programs of others, and between devices;
FOREIGN = primitives("""
    call_exported core_map create_linear cudnn_fusion custom_lin custom_partitioning
    custom_vmap_call dce_sink eval_jaxpr ffi_call global_array_to_host_local_array
    host_local_array_to_global_array linear_call mpmd_map pallas_call platform_index pure_callback
    run_scoped shard_map tie xla_metadata_call
    all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
    all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast
    pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin ppermute ppermute_done
    ppermute_start precv preduced
    psend psum psum_done psum_invariant psum_invariant_start psum_start ragged_all_to_all
    reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p
    unreduced_pmax unreduced_pmin unreduced_psum
    unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
    vary_unreduced_cast vary_unreduced_cast_p""")
#: and what does more than compute.
EFFECTS = primitives("""
    after_all check compute_on create_token debug_callback debug_print device_put dim_as_value
    dimension_size inspect_sharding io_callback pin program_order run_state shape_assertion
    stage unpin unreachable with_memory_space_constraint""")

_FLOPS = dict.fromkeys(RENAMED | MOVES, 0) | dict.fromkeys(ARITHMETIC | REDUCTIONS, 1)
_FLOPS |= dict.fromkeys(FUNCTIONS, 20) | dict.fromkeys(LONG_FUNCTIONS, 100)


def recompute_bytes(equation: Any) -> float | None:
    """Return the bytes of memory traffic that running an equation once more is worth; None where it
    is never run again.

    Arithmetic counts 1 / ``FLOPS_PER_BYTE``; a move what it writes, a reduction what it reads; what
    is called, the sum of its body, of a ``cond`` all branches.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((10, 10)))
        >>> [recompute_bytes(e) for e in jaxpr.eqns]
        [None, 100.0, 405.0]
    """
    name = equation.primitive.name
    if equation.effects:
        return None
    if name in BODIES:
        bodies = [recompute_bytes(e) for body in sub_jaxprs(equation.params) for e in body.eqns]
        known = [nbytes for nbytes in bodies if nbytes is not None]
        return sum(known) if len(known) == len(bodies) else None
    if name not in _FLOPS or not _splits_alike(equation):
        return None
    flops = _FLOPS[name] * (
        equation_flops(equation)
        if name in REDUCTIONS
        else sum(math.prod(v.aval.shape) for v in equation.outvars)
    )
    moved = equation.outvars if name in MOVES else equation.invars if name in REDUCTIONS else ()
    return flops / FLOPS_PER_BYTE + sum(map(aval_bytes, moved))


def _splits_alike(equation: Any) -> bool:
    """Tell whether random bits, if any, are the same however they are split over devices."""
    if equation.primitive.name not in LONG_FUNCTIONS:
        return True
    keys = [v.aval.dtype for v in (*equation.invars, *equation.outvars) if is_key(v.aval)]
    return all(getattr(d, "_impl", d).name == "threefry2x32" for d in keys)


def aval_bytes(atom: Any) -> int:
    """Return the bytes of a whole value; random keys are pairs of 32-bit words."""
    aval = atom.aval
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * (8 if is_key(aval) else aval.dtype.itemsize)


def unlisted(names: Iterable[str]) -> set[str]:
    """Return the names of primitives that are in no list."""
    return (
        set(names)
        - _FLOPS.keys()
        - BODIES.union(PRODUCTS, WINDOWS, LOOPS, CHOICES, FOREIGN, EFFECTS)
    )
