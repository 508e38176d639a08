"""How well products fill a device: a GPU by the tiles of their results, a TPU by its systolic
arrays.

A library of a GPU cuts the result of a product into tiles, each of which one core (streaming
multiprocessor) makes, as many at a time as there are cores:

    seconds  = min over tiles and parts of
               ceil(tiles x parts / cores) x FLOPs of a tile's part / rate of a core
               + bytes of partial results / B, if the sum over the depth is cut into parts
    tiles    = batches x ceil(rows / height) x ceil(columns / width)
    rate     = F / cores x min(1, reuse / needed)
    reuse    = height x width / (height + width)

So a product whose tiles are few, or no multiple of the cores, leaves some idle, which do the tiles
of other models where several are one product. Tiles of 128 x 128 and more are taken to reach the
full rate, smaller ones as much of it as they use again what they read; products without tensor
cores need as much less as they are slower.

Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001): tile sizes of cuBLAS,
of which larger ones are more efficient (2.3), tile and wave quantization (3.1, 3.2). Which tile a
library takes is not known; the best is assumed.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf

#: (height, width) that cuBLAS has.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
#: Of a tile of 128 x 128: elements multiplied by an element that is read.
FULL_REUSE = 64.0
#: Into which the sum over the depth may be cut, and what each of them has at least.
PARTS, LEAST_DEPTH = (1, 2, 4, 8, 16, 32), 256
#: Of the sums that partial results are, in float32, written and read again.
_PARTIAL_BYTES = 8


@lru_cache(maxsize=1 << 16)
def tiled_seconds(
    shape: tuple[int, ...],
    flops: int,
    cores: int,
    flops_per_second: float,
    needed_reuse: float,
    bytes_per_second: float,
) -> float:
    """Return the seconds of a product alone on its device, by its tiles.

    Args:
        shape: (batches, rows, columns) of its results.
        flops: Of all.
        cores: Of the device.
        flops_per_second: That large products reach on all of them.
        needed_reuse: Of tiles that reach it, at most ``FULL_REUSE``.
        bytes_per_second: Of the device's memory, reached.

    Returns:
        Seconds, no less than ``flops / flops_per_second``.
    """
    batches, rows, columns = shape
    results = batches * rows * columns
    depth = flops / (2 * results)
    best = inf
    for height, width in TILES:
        tiles = batches * ceil(rows / height) * ceil(columns / width)
        reuse = height * width / (height + width)
        rate = flops_per_second / cores * min(1.0, reuse / needed_reuse)
        for parts in PARTS:
            if parts > 1 and depth < parts * LEAST_DEPTH:
                break
            waves = ceil(tiles * parts / cores)
            partial = _PARTIAL_BYTES * parts * results / bytes_per_second if parts > 1 else 0.0
            best = min(best, waves * 2 * height * width * depth / parts / rate + partial)
    return best


def padded_flops(shape: tuple[int, ...], flops: int, width: int) -> float:
    """Return the FLOPs that a systolic array takes for a product: as if its depth and columns were
    padded to whole arrays.

    Source: How to Scale Your Model (jax-ml/scaling-book 0819a7d, tpus.md, appendix B): dimensions
    must be as large as the array is wide to use it fully.

    Args:
        shape: (batches, rows, columns) of its results.
        flops: Of all.
        width: Rows and columns of an array.

    Example:
        >>> padded_flops((1, 8192, 128), 2 * 8192 * 128 * 1024, 256) / (2 * 8192 * 128 * 1024)
        2.0
    """
    batches, rows, columns = shape
    depth = max(1, flops // (2 * batches * rows * columns))
    return flops * (_whole(columns, width) / columns) * (_whole(depth, width) / depth)


def _whole(size: int, width: int) -> int:
    return -(-size // width) * width
