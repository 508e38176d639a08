"""Bound what the kernels of a CPU program allocate while they run, beside the arena of its buffer
assignment: packed copies of the operands of products, patches of images, room to sort in.

No report of XLA names it, and how much a library takes depends on caches and cores, so the bound is
made from the shapes of the optimised program. The rules are those of jax 0.10 on x86-64, where the
kernels of a program run one after the other:

    product in Eigen       both operands packed, at most two slices of 320 of the summed dimension:
                           (m + n) min(k, 640) elements; an eighth more for blocks of threads, and
                           part of a block more per thread. Where the product is split over the
                           summed dimension, one more result per further thread
    convolution in Eigen   a product with the patches of the images (m: pixels of the output, k:
                           elements of the filter); a transposed one writes patches of the input
    fusion of YNNPACK      copies of the operands, images with their padding, patches where a
                           convolution has several groups, and what lies between its operations
    sort                   four times a line
    TopK, FFT, LAPACK      the operand; the result and a quarter; four times the largest operand

Source: Eigen, ``TensorContractionThreadPool.h`` (``evalProductImpl``, ``EvalParallelContext``,
``shardByInnerDim``) and ``GeneralBlockPanelKernel.h`` (the block sizes: at most 320 of the summed
dimension); XLA, ``convolution_thunk_internal.h``. Sorts, YNNPACK, FFT and LAPACK were measured
(``benchmarks/heap_bound.py --kernels``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from capture.compiler.kernels import HloModule, Instruction, dims_of, shape_bytes
from capture.compiler.text import DIM_LABELS, INSTRUCTION, OPERAND, feature_groups

_YNN = '"kind":"__ynn_fusion"'
_CONTRACTING = re.compile(r"(lhs|rhs)_contracting_dims=\{([\d,]*)\}")
_BATCH = re.compile(r"(lhs|rhs)_batch_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_SORTED = re.compile(r"dimensions=\{(\d+)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
#: At most two slices of the summed dimension are packed at a time, each at most so long.
_SLICE = 320
#: What Eigen holds of a product that several threads share, beside packed operands.
_CONTEXT_BYTES = 96 * 1024
#: Multiplications from which on they do, and the largest result of a product with three long
#: dimensions that is still split over the summed one.
_SHARED_PRODUCT, _SMALL_RESULT_BYTES = 250_000, 400_000
#: Calls that run no kernel of a library, or one that allocates nothing.
_FREE_CALLS = re.compile(
    r"Sharding|SPMD|annotate|LayoutConstraint|Barrier|xla_ffi_python_cpu_callback"
)


@dataclass(frozen=True)
class Scratch:
    """The bytes that a CPU program's kernels may allocate.

    Attributes:
        nbytes: Most bytes at any time, per device.
        unbounded: Calls of libraries of which nothing is known, by their names.
    """

    nbytes: int
    unbounded: tuple[str, ...] = ()


def scratch_of(text: str, num_threads: int | None = None) -> Scratch:
    """Bound what the kernels of an optimised CPU program allocate.

    Args:
        text: The program, as ``compiled.as_text()`` returns it.
        num_threads: Number of threads of XLA's pool, at least 2; None: as many as this machine has
            cores.
    """
    threads = max(2, num_threads or os.cpu_count() or 2)
    instructions = HloModule(text).instructions
    found = [_scratch_bytes(each, threads) for each in instructions]
    unbounded = (
        _TARGET.findall(each.rest)[0]
        for each, nbytes in zip(instructions, found, strict=True)
        if nbytes is None
    )
    return Scratch(max((each or 0 for each in found), default=0), tuple(dict.fromkeys(unbounded)))


def _scratch_bytes(kernel: Instruction, threads: int) -> int | None:
    """Return the bytes that one kernel allocates; None for a call of an unknown library."""
    shapes = [shape for _, shape in kernel.operands]
    match kernel.op:
        case "fusion":
            return _in_ynnpack(kernel.body) if _YNN in kernel.rest else 0
        case "dot":
            return _in_eigen(kernel.rest, shapes, kernel.shape, threads)
        case "convolution":
            return _convolution_in_eigen(kernel.rest, shapes, kernel.shape, threads)
        case "sort":
            dim = int(_SORTED.findall(kernel.rest)[0])
            return 4 * sum(_line_bytes(shape, dim) for shape in shapes)
        case "fft":
            return 5 * shape_bytes(kernel.shape) // 4
        case "custom-call":
            return _of_call(_TARGET.findall(kernel.rest)[0], shapes)
        case _:
            return 0


def _line_bytes(shape: str, dim: int) -> int:
    sizes = dims_of(shape)
    return shape_bytes(shape) * sizes[dim] // max(1, math.prod(sizes))


def _of_call(target: str, shapes: Sequence[str]) -> int | None:
    largest = max(map(shape_bytes, shapes), default=0)
    if target == "TopK":
        return largest
    if target.startswith("lapack_"):
        return 4 * largest + 2**20
    return 0 if _FREE_CALLS.search(target) else None


def _in_ynnpack(body: str) -> int:
    """Return the bytes of a fusion that YNNPACK computes as one graph: what lies between its
    operations while it is needed, beside the copies that the running one makes."""
    found = list(INSTRUCTION.finditer(body))
    last_use = {
        name: i for i, each in enumerate(found) for name in OPERAND.findall(each["operands"])
    }
    shapes, between, live, most = {}, {}, 0, 0
    for i, each in enumerate(found):
        name, operands = each["name"], OPERAND.findall(each["operands"])
        shapes[name] = each["shape"]
        if each["op"] != "parameter" and not each[0].lstrip().startswith("ROOT"):
            between[name] = shape_bytes(each["shape"])
        live += between.get(name, 0)
        most = max(most, live + _copied_bytes(each, [shapes[operand] for operand in operands]))
        live -= sum(between.get(one, 0) for one in dict.fromkeys(operands) if last_use[one] == i)
    return most


def _copied_bytes(product: re.Match[str], operands: Sequence[str]) -> int:
    if product["op"] not in ("dot", "convolution"):
        return 0
    copied = sum(map(shape_bytes, operands))
    if product["op"] == "dot":
        return copied
    of = _Convolution(product["rest"], operands, product["shape"])
    patches = of.patch_bytes if 1 < of.groups < of.channels else 0
    return copied + of.padded_bytes - shape_bytes(operands[0]) + patches


def _in_eigen(rest: str, shapes: Sequence[str], result: str, threads: int) -> int:
    """Return the bytes of a matrix product in Eigen, of all matrices of a batch at once."""
    lhs, rhs = map(dims_of, shapes)
    summed = dict(_CONTRACTING.findall(rest))
    k = math.prod(lhs[int(dim)] for dim in summed.get("lhs", "").split(",") if dim)
    batched = dict(_BATCH.findall(rest))
    count = math.prod(lhs[int(dim)] for dim in batched.get("lhs", "").split(",") if dim)
    m, n = (math.prod(sizes) // max(1, k * count) for sizes in (lhs, rhs))
    return count * _contraction_bytes(m, n, k, _itemsize(result), threads)


def _convolution_in_eigen(rest: str, shapes: Sequence[str], result: str, threads: int) -> int:
    of, itemsize = _Convolution(rest, shapes, result), _itemsize(result)
    k, features = of.filter_size * of.channels // of.groups, of.features // of.groups
    if not of.is_transposed:
        return of.groups * _contraction_bytes(of.pixels, features, k, itemsize, threads)
    pixels, patch = of.input_pixels, of.filter_size * of.features
    product = _contraction_bytes(pixels, patch, of.channels, itemsize, threads)
    return pixels * patch * itemsize + product


def _contraction_bytes(m: int, n: int, k: int, itemsize: int, threads: int) -> int:
    """Return the bytes that Eigen takes for [m, k] x [k, n] on several threads."""
    if min(m, n) <= 1:  # a matrix and a vector: nothing is packed but the vector
        return (m + n + k) * itemsize
    packed = (m + n) * min(k, 2 * _SLICE) * itemsize
    result = m * n * itemsize
    is_narrow = min(m, n) < 8 or max(m, n) < 4 * threads
    results = (threads - 1) * (result if is_narrow else min(result, _SMALL_RESULT_BYTES))
    context = _CONTEXT_BYTES if m * n * k > _SHARED_PRODUCT else 0
    return packed + packed // 8 + packed // threads + results + context


class _Convolution:
    """The sizes of a convolution, read from its attributes and shapes.

    Attributes:
        groups, channels, features: Numbers of the filter's groups, of the input's channels, and of
            the output's features.
        filter_size, pixels, input_pixels: Elements of a filter per channel, of all outputs and of
            all inputs per feature.
        padded_bytes: Bytes of the input with its padding, and with the zeros of a dilation.
        patch_bytes: Bytes of the elements that each output is computed from.
        is_transposed: Whether the input alone is dilated: a gradient with respect to the input of a
            convolution with strides.
    """

    def __init__(self, rest: str, shapes: Sequence[str], result: str):
        lhs, rhs, out = (dims_of(shape) for shape in (*shapes[:2], result))
        labels = DIM_LABELS.search(rest)
        assert labels is not None, "a convolution has labels of its dimensions"
        of_lhs, of_rhs, of_out = labels.groups()
        self.groups = feature_groups(rest)
        self.channels = lhs[of_lhs.index("f")]
        self.features = out[of_out.index("f")]
        batch = lhs[of_lhs.index("b")]
        self.filter_size = math.prod(
            n for n, name in zip(rhs, of_rhs, strict=True) if name not in "io"
        )
        self.pixels = math.prod(out) // self.features
        self.input_pixels = math.prod(lhs) // self.channels
        window = _WINDOW.search(rest)
        named = dict(
            part.split("=") for part in (window[1] if window else "").split() if "=" in part
        )
        spatial = [lhs[of_lhs.index(str(d))] for d in range(len(lhs) - 2)]
        pads = [tuple(map(int, pad.split("_"))) for pad in named.get("pad", "").split("x") if pad]
        dilated = [int(n) for n in named.get("lhs_dilate", "").split("x") if n]
        plain = (
            self.groups == 1 and len(spatial) <= 2 and not {"stride", "rhs_dilate"} & named.keys()
        )
        self.is_transposed = bool(dilated) and plain
        padded = batch * self.channels
        for d, size in enumerate(spatial):
            low, high = pads[d] if pads else (0, 0)
            padded *= max(1, (size - 1) * (dilated[d] if dilated else 1) + 1 + low + high)
        itemsize = _itemsize(result)
        self.padded_bytes = padded * itemsize
        self.patch_bytes = self.pixels * self.filter_size * self.channels * itemsize


def _itemsize(shape: str) -> int:
    return shape_bytes(shape) // max(1, math.prod(dims_of(shape)))
