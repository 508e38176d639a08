"""How much a compiled program computes, reads and sends, from its optimised HLO: what the roofline is drawn from.

XLA's own cost analysis counts FLOPs and bytes of a whole program. Kernels run one after the other, so the bytes of matrix products, which
the products may hide, are told apart from those of all other kernels, which nothing hides.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
from jax._src.lib import _jax, hlo  # type: ignore[attr-defined]

from capture.work import Collective, ProgramWork

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b(pred|token|[subfc]\d+[a-z0-9]*|bf16)\[([\d,]*)\]")
#: ``%name (parameter: shape, ...) -> shape {`` up to the closing brace of the computation.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \((?P<params>.*)\) -> (?P<result>.*) \{\n(?P<body>(?:.*\n)*?)\}", re.M)
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$", re.M)
_PRODUCTS = ("dot", "convolution")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv|dot)[^"]*"', re.I)
_COLLECTIVE = re.compile(r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")


def work_of(compiled: Any, lowered: Any, num_devices: int) -> ProgramWork:
    """Of a compiled program, per device.

    XLA counts no FLOPs in calls of cuBLAS and cuDNN, which a GPU's optimised program mostly consists of. Then those of the program before
    optimisation are taken, shared out evenly.

    Args:
        compiled: A ``jax.stages.Compiled`` of any target.
        lowered: What it was compiled from.
        num_devices: It runs on.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    work = work_of_module(module)
    whole = _costs(lowered.compiler_ir("hlo").get_hlo_module())
    return replace(work, flops=max(work.flops, int(whole.get("flops", 0)) // num_devices))


def work_of_text(text: str) -> ProgramWork:
    """Of an optimised, partitioned program as the compiler dumps it."""
    return work_of_module(hlo.hlo_module_from_text(text))


def work_of_module(module: Any) -> ProgramWork:
    """Of an optimised, partitioned HLO module (``jaxlib``'s ``HloModule``)."""
    costs = _costs(module)
    text = module.to_string()
    computations = {m["name"]: m for m in _COMPUTATION.finditer(text)}
    entry = next(m for m in _COMPUTATION.finditer(text) if m.group(0).startswith("ENTRY"))
    sizes, product_bytes, collectives = {}, 0, Counter[Collective]()
    dtypes: Counter[str] = Counter()
    for instruction in _INSTRUCTION.finditer(entry["body"]):
        sizes[instruction["name"]] = shape_bytes(instruction["shape"])
        operands = [sizes.get(name, 0) for name in re.findall(r"%([\w.\-]+)", instruction["operands"])]
        found = _collective(instruction, operands)
        if found is not None:
            collectives[found] += 1
        called = re.search(r"calls=%([\w.\-]+)", instruction["rest"])
        body = computations[called[1]] if called and called[1] in computations else None
        if _is_product(instruction, body):
            product_bytes += sizes[instruction["name"]] + sum(operands)
            dtypes[_operand_dtype(instruction, body, entry["body"])] += 1
    total = int(costs.get("bytes accessed", 0))
    return ProgramWork(
        flops=int(costs.get("flops", 0)),
        dtype=dtypes.most_common(1)[0][0] if dtypes else "float32",
        product_bytes=min(product_bytes, total),
        other_bytes=max(0, total - product_bytes),
        collectives=tuple((collective, count) for collective, count in sorted(collectives.items())),
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
        return bool(_PRODUCT_CALL.search(instruction["rest"]))
    return body is not None and any(f" {op}(" in body["body"] for op in _PRODUCTS)


def _operand_dtype(instruction: re.Match[str], body: re.Match[str] | None, entry: str) -> str:
    """Of the first operand of the product."""
    scope = instruction if body is None else next(m for m in _INSTRUCTION.finditer(body["body"]) if m["op"] in _PRODUCTS)
    where = entry if body is None else body["body"]
    name = re.search(r"%([\w.\-]+)", scope["operands"])
    defined = re.search(rf"%{re.escape(name[1])} = \(?(\w+)\[", where) if name else None
    return _DTYPES.get(defined[1] if defined else "f32", "float32")


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def _collective(instruction: re.Match[str], operands: list[int]) -> Collective | None:
    """What an instruction sends, if it is a collective: bytes are those of the larger side, per device."""
    match = _COLLECTIVE.match(instruction["op"])
    if match is None:
        return None
    kind = match[1]
    size, stride = _group(instruction["rest"])
    result = shape_bytes(instruction["shape"])
    if match[2] and kind in ("all-gather", "collective-permute"):  # an asynchronous start returns its operands as well
        result -= sum(operands)
    return Collective(kind, max(result, sum(operands)), size, stride)


def _group(text: str) -> tuple[int, int]:
    """(devices in a group, distance between its neighbours)."""
    if listed := _LISTED_GROUPS.search(text):
        ids = [int(i) for i in listed[1].split(",")]
        return len(ids), ids[1] - ids[0] if len(ids) > 1 else 1
    if iota := _IOTA_GROUPS.search(text):
        num_groups, size = int(iota[1]), int(iota[2])
        return size, num_groups if iota[4] else 1
    return 2, 1  # a permutation
