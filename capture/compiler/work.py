"""How much a compiled program computes, reads and sends, from its optimised HLO: what the roofline
is drawn from.

Kernels run one after the other (``capture.compiler.kernels``); the bytes of one may be hidden by
its own products, and by nothing else.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jax._src.lib import hlo  # type: ignore[attr-defined]

from capture.compiler.kernels import (
    HloLoop,
    HloModule,
    HloStep,
    Instruction,
    calls_kernels,
    costs_of,
    runs,
    shape_bytes,
)
from capture.compiler.text import INSTRUCTION, OPERAND
from capture.errors import TargetError
from capture.measured.work import Collective, Kernel, ProgramWork

_T = TypeVar("_T", Collective, Kernel)
#: Of a program without products.
_UNCOMPUTED = "float32", "default"
_COLLECTIVE = re.compile(
    r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\(\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r" \{(?P<along>[^}]*)\}"
)
_GROUP_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")


@dataclass(frozen=True)
class LocalFlops:
    """The FLOPs per device of the operations that a program runs on each device's part
    (``local_calls``).

    Attributes:
        plain: FLOPs of those that are ordinary operations on every platform: XLA counts them, on
            parts also before partitioning.
        kernels: FLOPs of those that are Pallas kernels where the platform has them: there XLA
            counts nothing in them.
    """

    plain: int = 0
    kernels: int = 0


NO_LOCAL_FLOPS = LocalFlops()


def work_of(
    compiled: Any, lowered: Any, num_devices: int, local: LocalFlops = NO_LOCAL_FLOPS
) -> ProgramWork:
    """Count what a compiled program computes, reads and sends, per device.

    XLA counts no FLOPs in calls of cuBLAS and cuDNN, which a GPU's optimised program mostly
    consists of. Then those of the program before optimisation are taken, shared out evenly.

    Args:
        compiled: A ``jax.stages.Compiled`` of any target.
        lowered: What it was compiled from.
        num_devices: Devices that it runs on.
        local: FLOPs of the operations that run on each device's part.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    work = work_of_module(module, local)
    whole = costs_of(lowered.compiler_ir("hlo").get_hlo_module())
    on_parts = local.plain if calls_kernels(module.to_string()) else local.plain + local.kernels
    shared = max(0, int(whole.get("flops", 0)) - on_parts) // num_devices
    return replace(work, flops=max(work.flops, shared + local.plain + local.kernels))


def work_of_text(text: str, local: LocalFlops = NO_LOCAL_FLOPS) -> ProgramWork:
    """Count the work of an optimised, partitioned program from the text that the compiler dumps;
    ``local`` as for ``work_of``."""
    return work_of_module(hlo.hlo_module_from_text(text), local)


def work_of_module(module: Any, local: LocalFlops = NO_LOCAL_FLOPS) -> ProgramWork:
    """Count the work of an optimised, partitioned HLO module (``jaxlib``'s ``HloModule``); kernels
    of Pallas share ``local.kernels``."""
    program = HloModule(module.to_string())
    reader = _Reader(program, local.kernels)
    reader.read(program.steps)
    dtype, precision = reader.computed.most_common(1)[0][0] if reader.computed else _UNCOMPUTED
    nbytes = Counter[bool]()
    for kernel, count in reader.kernels.items():
        nbytes[bool(kernel.dtype)] += count * kernel.nbytes
    return ProgramWork(
        int(costs_of(module).get("flops", 0)) + (local.kernels if reader.num_calls else 0),
        dtype,
        product_bytes=nbytes[True],
        other_bytes=nbytes[False],
        collectives=_counted(reader.collectives),
        precision=precision,
        kernels=_counted(reader.kernels),
        order=reader.order if program.is_scheduled else None,
    )


class _Reader:
    """The reader of what a program is given to run, in order.

    Args:
        program: Of a device.
        local_flops: FLOPs of all kernels of Pallas together, which share them.

    Attributes:
        kernels, collectives, computed: What it runs, by how often; and of its products the data
            types and precisions.
        num_calls: Kernels of Pallas.
    """

    def __init__(self, program: HloModule, local_flops: int):
        self._program, self._local = program, local_flops
        self.kernels, self.collectives = Counter[Kernel](), Counter[Collective]()
        self.computed: Counter[tuple[str, str]] = Counter()
        self.num_calls = sum(times for one, times in runs(program.steps) if one.is_kernel_call)
        #: Of fusions on TPUs: they begin a collective, go on and end it beside other work.
        self._last = {
            channel: one.name
            for one, _ in runs(program.steps)
            for channel in _CHANNEL.findall(one.body)
        }
        self._channels: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._order: list[tuple[str, Kernel | Collective | int]] = []

    def read(self, steps: Sequence[HloStep], times: int = 1) -> None:
        """Count what the steps run, each so many times, and note their order."""
        for step in steps:
            match step:
                case HloLoop():
                    self._order.append(("(", step.times))
                    self.read(step.body, times * step.times)
                    self._order.append((")", 0))
                case Instruction(is_end=True):
                    self._end(step)
                case Instruction():
                    self._read_instruction(step, times)

    def _read_instruction(self, step: Instruction, times: int) -> None:
        found = _collective(step, self._program.num_partitions)
        if found is None:
            self._read_kernel(step, times)
            return
        self.collectives[found] += times
        is_waited_for = not step.is_begun or '"is_sync":true' in step.rest
        self._began[step.name] = self._begin(found, is_waited_for)

    def _begin(self, found: Collective, is_waited_for: bool) -> int:
        self._order.append(("=" if is_waited_for else "+", found))
        return len(self._order) - 1

    def _end(self, step: Instruction) -> None:
        """Note the wait for what a step's operand began, unless it is no collective."""
        for name, _ in step.operands:
            if (place := self._began.get(name)) is not None and self._order[place][0] == "+":
                self._order.append(("-", place))

    def _read_kernel(self, step: Instruction, times: int) -> None:
        for channel, found in _fused(step, self._program.num_partitions):
            if channel not in self._channels:
                self.collectives[found] += times
                is_whole = self._last[channel] == step.name
                self._channels[channel] = self._begin(found, is_whole)
            elif self._last[channel] == step.name:
                self._order.append(("-", self._channels[channel]))
        kernel = Kernel(self._program.nbytes(step))
        if step.is_product:
            is_call = step.is_kernel_call
            flops = self._local // self.num_calls if is_call else self._program.flops(step)
            dtype, precision = _computed(*step.product[:2])
            shape = self._program.product_shape(step)
            kernel = Kernel(kernel.nbytes, flops, dtype, precision, shape=shape)
            self.computed[dtype, precision] += times
        self.kernels[kernel] += times
        self._order.append(("", kernel))

    @property
    def order(self) -> str:
        """The order as ``ProgramWork`` writes it: the places of kernels and collectives among the
        different ones, sorted."""
        at: dict[object, int] = dict(_places(self.kernels))
        at.update(_places(self.collectives))
        ended = {place for mark, place in self._order if mark == "-"}
        began = {place: i for i, place in enumerate(sorted(ended))}
        words = []
        for place, (mark, each) in enumerate(self._order):
            if mark == "-":
                words.append(f"-{began[each]}")
            elif isinstance(each, int):
                words.append(f"{each}(" if mark == "(" else ")")
            else:
                # What nothing waits for by name is waited for at once.
                words.append(f"{'=' if mark == '+' and place not in ended else mark}{at[each]}")
        return " ".join(words)


def _counted(found: Counter[_T]) -> tuple[_T, ...]:
    return tuple(replace(one, count=count) for one, count in sorted(found.items()))


def _places(found: Counter[_T]) -> Iterator[tuple[_T, int]]:
    """Yield what was found with its place in ``_counted``."""
    return ((each, place) for place, each in enumerate(sorted(found)))


def _computed(attributes: str, operand: str) -> tuple[str, str]:
    """Return (data type of the first operand of a product, precision that it asks for); an
    algorithm in one pass names the type itself."""
    defined = re.match(r"\(?(\w+)\[", operand)
    dtype = _DTYPES.get(defined[1] if defined else "f32", "float32")
    if algorithm := _ALGORITHM.search(attributes):
        return dtype if algorithm[2] else _DTYPES.get(algorithm[1].lower(), dtype), "highest"
    found = _PRECISION.search(attributes)
    asked = found[1].lower() if found else ""
    return dtype, next((each for each in ("highest", "high") if each in asked), "default")


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "tf32": "tf32"}
#: ``operand_precision={highest,default}``; of a call of a library
#: ``"operand_precision":["HIGHEST","DEFAULT"]``.
_PRECISION = re.compile(r'operand_precision(?:=\{|":\[)([^\]}]*)')
#: ``algorithm=dot_tf32_tf32_f32``; of a call ``"algorithm":"ALG_DOT_TF32_TF32_F32"``, with ``_X3``
#: at its end where it takes three passes.
_ALGORITHM = re.compile(
    r'\balgorithm(?:=|":"ALG_)dot_([a-z0-9]+)_[a-z0-9]+_[a-z0-9]+?(_x\d+)?\b', re.I
)


def _collective(instruction: Instruction, num_partitions: int) -> Collective | None:
    """Return the collective that an instruction is, or None; its bytes are those of the larger
    side, per device."""
    match = _COLLECTIVE.match(instruction.op)
    if match is None:
        return None
    kind = match[1]
    size, stride = group_of(instruction.rest, num_partitions)
    result = shape_bytes(instruction.shape)
    sent = sum(shape_bytes(shape) for _, shape in instruction.operands)
    # What begins returns its operands as well, but for a sum.
    if match[2] and kind != "all-reduce":
        result -= sent
    return Collective(kind, max(result, sent), size, stride)


def _fused(one: Instruction, num_partitions: int) -> Iterator[tuple[str, Collective]]:
    """Yield the collectives of a fusion with their channels: programs of TPUs begin them, go on and
    end them beside other work, in a fusion each."""
    inside = {m["name"]: m for m in INSTRUCTION.finditer(one.body)}
    sliced = {
        name
        for m in inside.values()
        if m["op"] == "dynamic-slice"
        for name in OPERAND.findall(m["operands"])
    }
    channels = set[str]()
    for name, m in inside.items():
        kind, channel = _COLLECTIVE.match(m["op"]), _CHANNEL.search(m["rest"])
        if kind is None or channel is None or channel[1] in channels:
            continue
        channels.add(channel[1])
        operands = tuple(
            (operand, inside[operand]["shape"])
            for operand in OPERAND.findall(m["operands"])
            if operand in inside
        )
        inner = Instruction(name, m["op"], m["shape"], m["rest"], operands, "", m[0])
        found = _collective(inner, num_partitions)
        if found is not None:
            scatters = name in sliced and found.kind == "all-reduce"
            yield channel[1], replace(found, kind="reduce-scatter") if scatters else found


def group_of(text: str, num_partitions: int) -> tuple[int, int]:
    """Return (devices in a group, distance between its neighbours) of a collective, in any of the
    forms that XLA writes groups in."""
    if named := _MESH_GROUPS.search(text):
        ids = _mesh_group(named)
    elif listed := _LISTED_GROUPS.search(text):
        ids = [int(i) for i in listed[1].split(",")]
    elif iota := _IOTA_GROUPS.search(text):
        count, size = int(iota[1]), int(iota[2])
        ids = _permuted(count * size, iota[3], iota[5]).reshape(count, size)[0].tolist()
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
    """Return device ids 0 to count - 1, as an array of these dimensions transposed."""
    ids = np.arange(count).reshape([int(size) for size in dims.split(",")])
    return ids.transpose([int(dim) for dim in order.split(",")]) if order else ids


def _mesh_group(match: re.Match[str]) -> list[int]:
    """Return the first group of devices along some axes of a mesh:
    ``mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x','y':(2)2}``.

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
