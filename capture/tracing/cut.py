"""Where to cut the program into layers: at the model's marks, or automatically.

Automatic cutting is a dynamic programme: among all ways to have L contiguous layers whose FLOPs
differ from the mean by at most a tolerance, the one with the fewest bytes crossing the cuts; every
layer has a product with a parameter, because without one it has nothing to split and next to
nothing to compute. Source: the layer clustering of Alpa (Zheng et al., OSDI 2022, section 5.2,
equation 6), which bounds FLOPs from above only and minimises the largest crossing.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import replace
from itertools import accumulate
from typing import Any

from capture.errors import TracingError
from capture.model.graph import item_bytes
from capture.model.operators import Kind
from capture.tracing.flatten import EquationPath, Flattening, flatten
from capture.tracing.jaxprs import sub_jaxprs
from capture.tracing.program import LossProgram, Op

#: Of a loss without marks: fewer layers leave stages little choice, more take long to measure.
LEAST_LAYERS, MOST_LAYERS = 8, 32
#: Of the FLOPs of all operations that apply parameters: those that repeat and make up less are no
#: sign of equal blocks.
BLOCK_FRACTION = 0.05

#: A layer's FLOPs lie within mean / (1 + t) and mean * (1 + t); t grows by half until that is
#: possible.
FLOPS_TOLERANCE = 0.25


def flatten_loss(closed, num_params: int, num_layers: int | None) -> Flattening:
    """Flatten a loss, again with every fact that flattening found: a scan too large for one layer,
    a parameter stacked over layers.

    Args:
        closed: Jaxpr of the loss; parameter leaves come first.
        num_layers: As for ``cut_loss``; more than there are operations: all scans over stacked
            parameters are unrolled.
    """
    unroll = None if num_layers is None else frozenset[EquationPath]()
    found = flatten(closed, num_params, unroll, {})
    if num_layers is not None:
        total = sum(op.flops for op in found.program.ops)
        largest = total / max(1, num_layers) * (1 + FLOPS_TOLERANCE)
        unroll = frozenset(path for path, flops in found.scan_flops.items() if flops > largest)
        if unroll:
            found = flatten(closed, num_params, unroll, {})
        # A layer needs a product: where there are too few of them, scans that are no more than a
        # layer are unrolled as well.
        while (closed_scans := found.scan_flops.keys() - unroll) and sum(
            applied(found.program)
        ) < num_layers:
            unroll |= closed_scans
            found = flatten(closed, num_params, unroll, {})
    stacked = found.stacked
    if stacked:
        found = flatten(closed, num_params, unroll, stacked)
    return replace(found, stacked=stacked)


def cut_loss(
    closed,
    num_params: int,
    num_layers: int | None,
    unmarked_layers: int | None,
    num_devices: int,
    at_products: bool,
) -> tuple[Flattening, list[int], bool]:
    """Return the flat loss, its cut positions, and whether these are automatic; see ``trace``."""
    if at_products:
        # Any scan is more than one of so many layers.
        flat = flatten_loss(closed, num_params, sys.maxsize)
        return flat, product_cuts(flat.program), False
    flat = flatten_loss(closed, num_params, num_layers)
    if num_layers is None and not flat.program.marks:
        num_layers = unmarked_layers or layers_without_marks(
            flatten_loss(closed, num_params, sys.maxsize).program, num_devices
        )
        flat = flatten_loss(closed, num_params, num_layers)
    if num_layers is None:
        return flat, mark_cuts(flat.program), False
    return flat, cluster_cuts(flat.program, num_layers), True


def mark_cuts(program: LossProgram) -> list[int]:
    """Return the cut positions at marks of the model with something to compute on both sides.

    Raises:
        TracingError: ``trace-no-marks`` if no mark divides the program.
    """
    end = len(program.ops)
    real = list(accumulate((i not in program.recomputed for i in range(end)), initial=0))
    # The layer that makes the loss is the last one, even if something for its effects only comes
    # after.
    last = program.producer[program.loss]
    cuts = [0]
    for mark in program.marks:
        if (
            real[mark.position] > real[cuts[-1]]
            and mark.position <= last
            and real[end] > real[mark.position]
        ):
            cuts.append(mark.position)
    if len(cuts) == 1:
        raise TracingError.of(
            f"the loss has {len(program.marks)} layer marks and none of them divides it; "
            "mark the boundaries in the model with jax.ad_checkpoint.checkpoint_name(x, "
            '"layer_boundary"), '
            "or leave the marks out or give num_layers (--num-layers), to cut it automatically.",
            "trace-no-marks",
        )
    return [*cuts, end]


#: Operations that read a parameter as a table or multiply by it, by the kind of operator that they
#: make.
PRODUCTS: dict[str, Kind] = {
    "dot_general": "matmul",
    "ragged_dot": "matmul",
    "conv_general_dilated": "conv",
    "gather": "embedding",
}


def product_kind(program: LossProgram, op: Op) -> Kind | None:
    """Return ``matmul``, ``conv`` or ``embedding`` if the operation applies a parameter, however
    cast or transposed, to data; else None."""
    static = program.from_params - program.from_batch
    reads = set(op.reads)
    return PRODUCTS.get(op.primitive.name) if reads & static and reads - static else None


def product_cuts(program: LossProgram) -> list[int]:
    """Return cut positions before every product with a parameter but the first; what follows a
    product up to the next one belongs to it."""
    last = program.producer[program.loss]
    found = [
        i
        for i, op in enumerate(program.ops[: last + 1])
        if i not in program.recomputed and product_kind(program, op)
    ]
    return [0, *found[1:], len(program.ops)]


def applied(program: LossProgram) -> list[bool]:
    """Return, per operation, whether an automatic layer may be made around it: it, or its body,
    multiplies data with a parameter.

    In a loss without any such product (scales and shifts alone), those that compute with a
    parameter take their place.
    """
    static = program.from_params - program.from_batch
    reads = [set(op.reads) for op in program.ops]
    computes = [
        op.flops > 0
        and i not in program.recomputed
        and bool(reads[i] & static and reads[i] - static)
        for i, op in enumerate(program.ops)
    ]
    products = [
        may and _has_product(op.primitive.name, op.params)
        for may, op in zip(computes, program.ops, strict=True)
    ]
    return products if any(products) else computes


def _has_product(name: str, params: dict[str, object]) -> bool:
    bodies = (equation for body in sub_jaxprs(params) for equation in body.eqns)
    return name in PRODUCTS or any(
        _has_product(equation.primitive.name, equation.params) for equation in bodies
    )


def layers_without_marks(program: LossProgram, num_devices: int) -> int:
    """Choose the number of layers of a loss without marks, the same at every micro-batch size.

    As many as it has equal blocks: a part of them where they are too many to measure, a multiple
    where they are too few for stages to differ. Never more than there are operations that apply
    parameters: a layer of a norm alone is no place for a cut.

    Args:
        program: Program with every scan over stacked parameters unrolled.
        num_devices: Number of devices that the layers are to fill, two layers each where possible.

    Raises:
        TracingError: ``trace-no-marks`` if no operation applies a parameter.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for op, applies in zip(
        program.ops[: program.producer[program.loss] + 1], applied(program), strict=False
    ):
        if applies:
            shapes = tuple(program.avals[v].shape for v in (*op.reads, *op.outputs))
            found.setdefault((op.primitive.name, shapes), []).append(op.flops)
    if not found:
        raise TracingError.of(
            "the loss has no layer marks, and no operation in it applies a parameter to data, so "
            "that there is nothing to cut; "
            "check that loss_fn(params, batch) uses its parameters.",
            "trace-no-marks",
        )
    total = sum(map(sum, found.values()))
    counts = [len(flops) for flops in found.values()]
    blocks = min(
        (
            len(flops)
            for flops in found.values()
            if len(flops) > 1 and sum(flops) >= BLOCK_FRACTION * total
        ),
        default=1,
    )
    most = min(sum(counts), MOST_LAYERS)
    least = min(max(LEAST_LAYERS, 2 * num_devices), most)
    if blocks > most:
        return next((n for n in range(most, least - 1, -1) if blocks % n == 0), most)
    return min(blocks * max(1, math.ceil(least / blocks)), most)


def crossing_bytes(program: LossProgram) -> list[int]:
    """Return the bytes live across each position, without recomputed values and leaves."""
    end = len(program.ops)
    last_read: dict[int, int] = {
        v: i for i, op in enumerate(program.ops) if i not in program.recomputed for v in op.reads
    }
    change = [0] * (end + 2)
    for value, made in program.producer.items():
        if made not in program.recomputed and (read := last_read.get(value, made)) > made:
            aval = program.avals[value]
            nbytes = math.prod(aval.shape) * item_bytes(str(aval.dtype))
            change[made + 1] += nbytes
            change[read + 1] -= nbytes
    return list(accumulate(change[: end + 1]))


def cluster_cuts(program: LossProgram, num_layers: int) -> list[int]:
    """Choose the cut positions of ``num_layers`` layers with near-equal FLOPs, a product each, and
    the fewest bytes crossing.

    FLOPs come first: every layer is within a tolerance of the mean, which grows only while nothing
    fits. Among those cuts the bytes decide; the distance from an even share counts less than one
    byte, so that it breaks ties alone.

    Raises:
        TracingError: ``trace-num-layers`` if the program has fewer products with parameters.
    """
    end = len(program.ops)
    last = program.producer[program.loss]
    products = list(
        accumulate((has and i <= last for i, has in enumerate(applied(program))), initial=0)
    )
    if not 1 <= num_layers <= max(1, products[end]):
        raise TracingError.of(
            f"num_layers={num_layers} is not possible: a layer needs a product with a parameter, "
            f"and the loss has {products[end]}; "
            f"give 1 to {max(1, products[end])}, or mark the layers in the model.",
            "trace-num-layers",
        )
    done = list(
        accumulate(
            (0 if i in program.recomputed else op.flops for i, op in enumerate(program.ops)),
            initial=0,
        )
    )
    # Between two computing ops only one place is worth a cut: the one with the fewest bytes, the
    # later of equals.
    live = crossing_bytes(program)
    best_place: dict[int, int] = {}
    for position in range(1, last + 1):
        flop = done[position]
        if 0 < flop < done[end] and live[position] <= live[best_place.get(flop, position)]:
            best_place[flop] = position
    places = [0, *best_place.values(), end]
    mean = done[end] / num_layers
    costs = [
        live[p] + 0.5 * abs(done[p] / mean - round(done[p] / mean)) if mean else 0.0 for p in places
    ]
    progress, found = [float(done[p]) for p in places], [products[p] for p in places]
    tolerance = FLOPS_TOLERANCE
    while (
        chosen := cheapest_path(
            progress, costs, num_layers, mean / (1 + tolerance), mean * (1 + tolerance), found
        )
    ) is None:
        tolerance *= 1.5
    return [places[i] for i in chosen]


def cheapest_path(
    progress: list[float],
    costs: list[float],
    num_steps: int,
    least: float,
    most: float,
    found: list[int],
) -> list[int] | None:
    """Find indices 0 = i_0 < ... < i_L = last with steps of progress in [least, most] and the least
    cost in between, in O(n L); None if there are none.

    One pass per step. Indices enter the window as they come within reach and leave it at its far
    end, both in order, and one that costs more than a later one never wins again: so the window's
    first is the best, as in a sliding minimum.

    Args:
        progress: Ascending.
        num_steps: L.
        least, most: Bounds on the progress of a step.
        found: Ascending; grows in every step.
    """
    end = len(progress) - 1
    best = [0.0] + [math.inf] * end
    origins: list[list[int]] = []
    for _ in range(num_steps):
        reached, origin = [math.inf] * (end + 1), [-1] * (end + 1)
        window: deque[int] = deque()  # candidates in reach, costs ascending
        entering = 0
        for j in range(1, end + 1):
            while (
                entering < j
                and progress[entering] <= progress[j] - least
                and found[entering] < found[j]
            ):
                if best[entering] < math.inf:
                    while window and best[window[-1]] >= best[entering]:
                        window.pop()
                    window.append(entering)
                entering += 1
            while window and progress[window[0]] < progress[j] - most:
                window.popleft()
            if window:
                reached[j], origin[j] = best[window[0]] + (costs[j] if j < end else 0.0), window[0]
        best = reached
        origins.append(origin)
    if best[end] == math.inf:
        return None
    path = [end]
    for origin in reversed(origins):
        path.append(origin[path[-1]])
    return path[::-1]
