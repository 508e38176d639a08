"""How much a compiled program computes, reads and sends, from its optimised HLO: what the roofline
is drawn from.

XLA's own cost analysis counts FLOPs and bytes of a whole program. Kernels run one after the other,
so the bytes of matrix products, which the products may hide, are told apart from those of all other
kernels, which nothing hides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax._src.lib import _jax, hlo  # type: ignore[attr-defined]

from capture.errors import TargetError
from capture.measured.work import Collective, ProgramWork

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b(pred|token|[subfc]\d+[a-z0-9]*|bf16)\[([\d,]*)\]")
#: ``%name (parameter: shape, ...) -> shape {`` up to the closing brace of the computation.
_COMPUTATION = re.compile(
    r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \((?P<params>.*)\) -> (?P<result>.*) \{\n(?P<body>(?:.*\n)*?)\}",
    re.M,
)
_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$",
    re.M,
)
_PRODUCTS = ("dot", "convolution")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv|dot)[^"]*"', re.I)
#: Kernels of Pallas. Elsewhere its operations are ordinary ones, which XLA counts.
_KERNEL_CALL = re.compile(
    r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu[^"]*|tpu_custom_call)"'
)
_COLLECTIVE = re.compile(
    r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\(\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<along>[^}]*)\}"
)
_GROUP_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")


@dataclass(frozen=True)
class LocalFlops:
    """FLOPs per device of the operations that a program runs on each device's part
    (``local_calls``).

    Attributes:
        plain: Of those that are ordinary operations on every platform: XLA counts them, on parts
            also before partitioning.
        kernels: Of those that are Pallas kernels where the platform has them: there XLA counts
            nothing in them.
    """

    plain: int = 0
    kernels: int = 0


NO_LOCAL_FLOPS = LocalFlops()


def work_of(
    compiled: Any, lowered: Any, num_devices: int, local: LocalFlops = NO_LOCAL_FLOPS
) -> ProgramWork:
    """Of a compiled program, per device.

    XLA counts no FLOPs in calls of cuBLAS and cuDNN, which a GPU's optimised program mostly
    consists of. Then those of the program before optimisation are taken, shared out evenly.

    Args:
        compiled: A ``jax.stages.Compiled`` of any target.
        lowered: What it was compiled from.
        num_devices: It runs on.
        local: Of the operations that run on each device's part.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    work = work_of_module(module)
    whole = _costs(lowered.compiler_ir("hlo").get_hlo_module())
    calls_kernels = _calls_kernels(module.to_string())
    on_parts = local.plain if calls_kernels else local.plain + local.kernels
    shared = max(0, int(whole.get("flops", 0)) - on_parts) // num_devices
    counted = work.flops + (local.kernels if calls_kernels else 0)
    return replace(work, flops=max(counted, shared + local.plain + local.kernels))


def work_of_text(text: str, local: LocalFlops = NO_LOCAL_FLOPS) -> ProgramWork:
    """Of an optimised, partitioned program as the compiler dumps it; ``local`` as for
    ``work_of``."""
    work = work_of_module(hlo.hlo_module_from_text(text))
    return replace(work, flops=work.flops + (local.kernels if _calls_kernels(text) else 0))


def _calls_kernels(text: str) -> bool:
    return _KERNEL_CALL.search(text) is not None


def work_of_module(module: Any) -> ProgramWork:
    """Of an optimised, partitioned HLO module (``jaxlib``'s ``HloModule``)."""
    costs = _costs(module)
    text = module.to_string()
    computations = {m["name"]: m for m in _COMPUTATION.finditer(text)}
    entry = next(m for m in _COMPUTATION.finditer(text) if m.group(0).startswith("ENTRY"))
    counted = re.search(r"num_partitions=(\d+)", text)
    num_partitions = int(counted[1]) if counted else 1
    sizes, product_bytes, in_calls, collectives = {}, 0, 0, Counter[Collective]()
    computed: Counter[tuple[str, str]] = Counter()
    for instruction in _INSTRUCTION.finditer(entry["body"]):
        sizes[instruction["name"]] = shape_bytes(instruction["shape"])
        operands = [
            sizes.get(name, 0) for name in re.findall(r"%([\w.\-]+)", instruction["operands"])
        ]
        found = _collective(instruction, operands, num_partitions)
        if found is not None:
            collectives[found] += 1
        called = re.search(r"calls=%([\w.\-]+)", instruction["rest"])
        body = computations[called[1]] if called and called[1] in computations else None
        if _is_product(instruction, body):
            touched = sizes[instruction["name"]] + sum(operands)
            product_bytes += touched
            in_calls += touched if instruction["op"] == "custom-call" else 0
            computed[_computed(instruction, body, entry["body"])] += 1
    counted_bytes = int(
        costs.get("bytes accessed", 0)
    )  # XLA counts nothing in calls of libraries and kernels
    dtype, precision = computed.most_common(1)[0][0] if computed else ("float32", "default")
    return ProgramWork(
        flops=int(costs.get("flops", 0)),
        dtype=dtype,
        product_bytes=product_bytes,
        other_bytes=max(0, counted_bytes - (product_bytes - in_calls)),
        collectives=tuple(replace(found, count=n) for found, n in sorted(collectives.items())),
        precision=precision,
    )


def _costs(module: Any) -> dict[str, float]:
    return _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)


def shape_bytes(text: str) -> int:
    """Bytes of a shape, or of a tuple of shapes, as HLO writes them; layouts do not count.

    Example:
        >>> shape_bytes("(f32[8,16]{1,0}, bf16[4]{0})")
        520
    """
    total = 0
    for dtype, dims in _SHAPE.findall(text):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        total += count * _bits(dtype)
    return total // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z](\d+)", dtype)
    return int(digits[1]) if digits else 32


def _is_product(instruction: re.Match[str], body: re.Match[str] | None) -> bool:
    if instruction["op"] in _PRODUCTS:
        return True
    if instruction["op"] == "custom-call":
        return bool(
            _PRODUCT_CALL.search(instruction["rest"]) or _KERNEL_CALL.search(instruction["rest"])
        )
    return body is not None and any(f" {op}(" in body["body"] for op in _PRODUCTS)


def _computed(
    instruction: re.Match[str], body: re.Match[str] | None, entry: str
) -> tuple[str, str]:
    """(data type of the first operand of the product, precision that it asks for); an algorithm in
    one pass names the type itself."""
    scope = (
        instruction
        if body is None
        else next(m for m in _INSTRUCTION.finditer(body["body"]) if m["op"] in _PRODUCTS)
    )
    where = entry if body is None else body["body"]
    name = re.search(r"%([\w.\-]+)", scope["operands"])
    defined = re.search(rf"%{re.escape(name[1])} = \(?(\w+)\[", where) if name else None
    dtype = _DTYPES.get(defined[1] if defined else "f32", "float32")
    if algorithm := _ALGORITHM.search(scope["rest"]):
        return (
            (dtype, "highest")
            if algorithm[2]
            else (_DTYPES.get(algorithm[1].lower(), dtype), "highest")
        )
    found = _PRECISION.search(scope["rest"])
    asked = found[1].lower() if found else ""
    return dtype, next(
        (precision for precision in ("highest", "high") if precision in asked), "default"
    )


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "tf32": "tf32"}
#: ``operand_precision={highest,default}``; of a call of a library
#: ``"operand_precision":["HIGHEST","DEFAULT"]``.
_PRECISION = re.compile(r'operand_precision(?:=\{|":\[)([^\]}]*)')
#: ``algorithm=dot_tf32_tf32_f32``; of a call ``"algorithm":"ALG_DOT_TF32_TF32_F32"``, with ``_X3``
#: at its end where it takes three passes.
_ALGORITHM = re.compile(
    r'\balgorithm(?:=|":"ALG_)dot_([a-z0-9]+)_[a-z0-9]+_[a-z0-9]+?(_x\d+)?\b', re.I
)


def _collective(
    instruction: re.Match[str], operands: list[int], num_partitions: int
) -> Collective | None:
    """What an instruction sends, if it is a collective: bytes are those of the larger side, per
    device."""
    match = _COLLECTIVE.match(instruction["op"])
    if match is None:
        return None
    kind = match[1]
    size, stride = group_of(instruction["rest"], num_partitions)
    result = shape_bytes(instruction["shape"])
    if match[2] and kind in (
        "all-gather",
        "reduce-scatter",
        "collective-permute",
    ):  # an asynchronous start returns its operands as well
        result -= sum(operands)
    return Collective(kind, max(result, sum(operands)), size, stride)


def group_of(text: str, num_partitions: int) -> tuple[int, int]:
    """(devices in a group, distance between its neighbours) of a collective, in any of the forms
    that XLA writes groups in."""
    if named := _MESH_GROUPS.search(text):
        ids = _mesh_group(named)
    elif listed := _LISTED_GROUPS.search(text):
        ids = [int(i) for i in listed[1].split(",")]
    elif iota := _IOTA_GROUPS.search(text):
        ids = (
            _permuted(int(iota[1]) * int(iota[2]), iota[3], iota[5])
            .reshape(int(iota[1]), int(iota[2]))[0]
            .tolist()
        )
    elif "replica_groups={}" in text:
        ids = list(range(num_partitions))
    else:
        if "replica_groups" in text:
            raise TargetError.of(
                "this version of XLA writes the groups of a collective in an unknown way: "
                f"{text[:200]}",
                "target-groups",
            )
        return 2, 1  # a permutation
    return len(ids), ids[1] - ids[0] if len(ids) > 1 else 1


def _permuted(count: int, dims: str, order: str | None) -> np.ndarray:
    """Device ids 0 to count - 1, as an array of these dimensions transposed."""
    ids = np.arange(count).reshape([int(size) for size in dims.split(",")])
    return ids.transpose([int(dim) for dim in order.split(",")]) if order else ids


def _mesh_group(match: re.Match[str]) -> list[int]:
    """The first group of devices along some axes of a mesh: ``mesh['x'=2,'y'=4],
    device_ids=([4,2]T(1,0)) {'x','y':(2)2}``.

    ``'y':(2)2`` is the part of size 2 of axis y that 2 larger parts stand before.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match["axes"])}
    count = math.prod(sizes.values())
    ids = _permuted(count, match["dims"] or str(count), match["order"]).reshape(*sizes.values())
    within, dims = [], []
    wanted = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in _GROUP_AXIS.findall(match["along"])
    }
    for name, total in sizes.items():
        before, size = wanted.get(name, (total, 1))
        within += [False, name in wanted, False]
        dims += [before, size, total // (before * size)]
    chosen = tuple(slice(None) if inside else 0 for inside in within)
    return [int(i) for i in ids.reshape(dims)[chosen].ravel()]
