"""Where each dimension of an operand goes in the result of a jaxpr equation: what a sharding
follows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from capture.tracing.jaxprs import several

#: For each dimension of an operand, the dimension of the result that holds it, or None.
DimFlow = tuple[int | None, ...]

#: Parameters that name the dimensions along which a primitive mixes elements; the other dimensions
#: stay.
_MIXED_DIMS = ("axes", "axis", "dimension", "dimensions")
_MIXING = {
    "sort",
    "top_k",
    "rev",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    "squeeze",
    "argmax",
    "argmin",
    "unstack",
}
#: XLA realigns the shards by permutes between neighbours. For the thirds of a fused query-key-value
#: product (4 devices) that took 160 kB of permutes and 96 kB of all-to-all beside Megatron's 128 kB
#: of all-reduces, and temporaries of 371 kB; whole, they are 839 kB.
_REALIGNED = {"slice", "split", "concatenate", "pad"}
#: Losing a sharded dimension here costs at most one collective that XLA does well, so the sharding
#: that came in was worth it.
_CHEAP_LOSS = {
    "gather",
    "scatter",
    "scatter-add",
    "dynamic_slice",
    "dynamic_update_slice",
    *_REALIGNED,
} | {f"reduce_{operation}" for operation in ("and", "max", "min", "or", "prod", "sum")}


def dim_flow(eqn: Any, operand: int, degree: int) -> DimFlow:
    """Return where each dimension of one operand goes in the first result of an equation.

    Element-wise equations keep them; a transpose, broadcast, reshape, reduction, slice or gather
    moves or drops them. An unknown primitive keeps the dimensions of equal size, as nearly all that
    mix elements are known here.

    Args:
        eqn: Any equation but products, convolutions and those that call a jaxpr.
        operand: Which of its inputs.
        degree: Ways in which a followed dimension is cut: a reshape keeps it whole only if the new
            dimension divides.

    Returns:
        One entry per dimension of the operand.
    """
    name, params = eqn.primitive.name, eqn.params
    shape, result = eqn.invars[operand].aval.shape, eqn.outvars[0].aval.shape
    if name == "transpose":
        return tuple(params["permutation"].index(dim) for dim in range(len(shape)))
    if name == "broadcast_in_dim":
        targets = params["broadcast_dimensions"] if operand == 0 else ()
        return tuple(
            target if result[target] == size else None
            for target, size in zip(targets, shape, strict=False)
        )
    if name == "reshape":
        return tuple(reshaped_dim(shape, result, dim, degree) for dim in range(len(shape)))
    if name == "stack":
        return tuple(dim + (dim >= params["axis"]) for dim in range(len(shape)))
    if name == "gather":
        return _gathered(eqn, operand)
    if name.startswith(("reduce_window", "select_and")):
        window = params.get("window_dimensions", ())
        return tuple(
            dim if dim < len(window) and window[dim] == 1 else None for dim in range(len(shape))
        )
    if name in _REALIGNED and len(shape) == len(result):
        return tuple(
            dim if result[dim] == size or result[dim] % degree == 0 else None
            for dim, size in enumerate(shape)
        )
    if name in _MIXING or name.startswith("reduce_"):
        mixed = _mixed_dims(params, len(shape))
        kept = [dim for dim in range(len(shape)) if dim not in mixed]
        positions = kept if len(shape) == len(result) else range(len(kept))
        places = dict(zip(kept, positions, strict=True))
        return tuple(places.get(dim) for dim in range(len(shape)))
    if name == "fft":
        return tuple(
            dim if dim < len(shape) - len(params["fft_lengths"]) else None
            for dim in range(len(shape))
        )
    if len(shape) != len(result):
        return (None,) * len(shape)
    # Size 1 is broadcast.
    return tuple(dim if size == result[dim] else None for dim, size in enumerate(shape))


def loss_is_cheap(eqn: JaxprEqn) -> bool:
    """Tell whether XLA drops a sharded dimension here with a masked lookup, or an all-reduce of the
    small result.

    A reshape that cuts through the shards, a sort or a top-k instead gathers the whole tensor on
    every device.
    """
    return eqn.primitive.name in _CHEAP_LOSS


def reshaped_dim(shape: Sequence[int], result: Sequence[int], dim: int, degree: int) -> int | None:
    """Return the dimension of a reshaped array whose contiguous blocks are those of ``dim``, or
    None.

    ``dim`` must be the first of the dimensions that it is merged with, and the block it becomes
    must divide by ``degree``.

    Example:
        >>> reshaped_dim((8, 16, 64), (8, 16, 4, 16), 2, degree=2)  # split into heads
        2
        >>> tuple(reshaped_dim((8, 16, 4, 16), (8, 16, 64), dim, degree=2) for dim in (2, 3))
        (2, None)
        >>> reshaped_dim((8, 16, 6), (8, 16, 3, 2), 2, degree=2) is None  # 3 heads over 2 devices
        True
    """
    for old, new in reshape_groups(shape, result):
        if dim not in old:
            continue
        first_old = next((d for d in old if shape[d] > 1), dim)
        first_new = next((d for d in new if result[d] > 1), None)
        if dim == first_old and first_new is not None and result[first_new] % degree == 0:
            return first_new
    return None


def reshape_groups(
    shape: Sequence[int], result: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dimensions that have equal sizes on both sides of a reshape."""
    if not math.prod(shape):
        return
    i = j = 0
    while i < len(shape) or j < len(result):
        old: list[int] = []
        new: list[int] = []
        sizes = [1, 1]
        while not (old or new) or sizes[0] != sizes[1]:
            if i < len(shape) and (sizes[0] <= sizes[1] or j == len(result)):
                sizes[0] *= shape[i]
                old.append(i)
                i += 1
            elif j < len(result):
                sizes[1] *= result[j]
                new.append(j)
                j += 1
        yield old, new


def _mixed_dims(params: dict[str, object], ndim: int) -> set[int]:
    dims = next((params[key] for key in _MIXED_DIMS if key in params), ndim - 1)
    return {dim % ndim for dim in several(dims)}


def _gathered(eqn: Any, operand: int) -> DimFlow:
    """Return the dimension flow of a gather. Dimensions taken whole stay as offset dimensions;
    batching dimensions meet those of the indices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices, result = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    batch = [dim for dim in range(len(result)) if dim not in numbers.offset_dims]
    if operand == 1:  # the last dimension of the indices holds coordinates
        return (*batch, None)[: len(indices)]
    flow: list[int | None] = [None] * len(table)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [dim for dim in range(len(table)) if dim not in gone]
    for dim, target in zip(windows, numbers.offset_dims, strict=True):
        flow[dim] = target if sizes[dim] == table[dim] else None
    for dim, index_dim in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        flow[dim] = batch[index_dim]
    return tuple(flow)
