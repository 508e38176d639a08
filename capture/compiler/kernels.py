"""The kernels of an optimised program, and what each of them computes and moves.

XLA's cost analysis knows what an instruction reads of its operands (a slice, a row), but tells it
of a whole module only, and nothing of calls of libraries; of a fusion it takes a slice of a view
for the whole array. So every instruction that runs as a kernel is analysed as a module of its own;
what a fusion reads and writes is counted by how its values are used, products in libraries by their
shapes:

    matrix product   2 x elements of the result x elements of a dimension that is summed over
    convolution      2 x elements of the output x elements of the filter / features of the output

A loop runs its body as often as the compiler knows it does, or once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import jax
from jax._src.lib import _jax, hlo  # type: ignore[attr-defined]

from capture.compiler.text import DIM_LABELS, INSTRUCTION, OPERAND, feature_groups

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b(pred|token|[subfc]\d+[a-z0-9]*|bf16)\[([\d,]*)\]")
#: ``%name (parameter: shape, ...) -> shape {`` up to the closing brace of the computation.
_COMPUTATION = re.compile(
    r"^(?:ENTRY )?%(?P<name>[\w.\-]+) \((?P<params>.*)\) -> (?P<result>.*) \{\n"
    r"(?P<body>(?:.*\n)*?)\}",
    re.M,
)
_PRODUCTS = ("dot", "convolution")
_PRODUCT_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|conv|dot)[^"]*"', re.I)
#: Kernels of Pallas. Elsewhere its operations are ordinary ones, which XLA counts.
_KERNEL_CALL = re.compile(
    r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu[^"]*|tpu_custom_call)"'
)
_ON_TPU = 'custom_call_target="tpu_custom_call"'
#: They name values or wait, and run nothing.
_NO_KERNELS = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|partition-id|replica-id"
    r"|opt-barrier|add-dependency|.*-update"
)
#: They run a computation beside others: on TPUs a collective on the sparse cores.
_CALLS_BESIDE = ("async-start", "call-start")
#: They show the bytes of their operand in another shape.
_VIEWS = ("bitcast", "reshape")
#: They read of their first operand what they return.
_SLICES = ("slice", "dynamic-slice", "gather")
#: The name of an operand, and its index where it is an element of a tuple (``%name#1``).
_ELEMENT = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LOOP = re.compile(r"\b(condition|body)=%([\w.\-]+)")
#: In a condition, the place of a loop's counter among its values.
_COUNTER = re.compile(r" get-tuple-element\([^)]*\), index=(\d+)")
_NAMED_NUMBER = re.compile(r"%([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_NUMBER = re.compile(r" = [su]32\[\]\S* constant\((\d+)\)")
#: What a loop's body makes of its values.
_RESULTS = re.compile(r"^  ROOT %[\w.\-]+ = .* tuple\((.*?)\)", re.M)
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%([\w.\-]+)")
#: Any computation, and nothing else: an instruction may have the name of one.
_COMPUTATIONS = re.compile(r"\b\w+=%([\w.\-]+)|computations=\{([^}]*)\}")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))"
)
#: What names something else in the module of an instruction.
_OF_ITS_MODULE = re.compile(r", control-predecessors=\{[^}]*\}| stack_frame_id=\d+")
_WORKSPACE = re.compile(r", [su]8\[\d+\](?:\{[^}]*\})?\)$")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":(\["[\d",]*\])')
_BATCHED = re.compile(r'"lhs_batch_dimensions":(\["[\d",]*\])')
#: The filter of a call of cuDNN: an operand, or the result; the other side is the output.
_BACKWARD = re.compile(r"convBackward(Input|Filter)")


def shape_bytes(text: str) -> int:
    """Return the bytes of a shape, or of a tuple of shapes, as HLO writes them; layouts do not
    count.

    Example:
        >>> shape_bytes("(f32[8,16]{1,0}, bf16[4]{0})")
        520
    """
    return sum(math.prod(_dims(dims)) * _bits(dtype) for dtype, dims in _SHAPE.findall(text)) // 8


def _dims(text: str) -> list[int]:
    return [int(size) for size in filter(None, text.split(","))]


def dims_of(shape: str) -> list[int]:
    """Return the sizes of the dimensions of an array's shape.

    Example:
        >>> dims_of("f32[8,16]{1,0}")
        [8, 16]
    """
    found = _SHAPE.search(shape)
    return _dims(found[2]) if found else []


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z](\d+)", dtype)
    return int(digits[1]) if digits else 32


def calls_kernels(text: str) -> bool:
    """Tell whether a program calls kernels of Pallas."""
    return _KERNEL_CALL.search(text) is not None


def costs_of(module: object) -> dict[str, float]:
    """Return XLA's cost analysis of an HLO module."""
    return _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)


@dataclass(frozen=True)
class Instruction:
    """An instruction of an optimised program that a device runs, or the end of one that runs beside
    others.

    Attributes:
        name, op, shape, rest: Name, opcode, result and attributes, as HLO writes them.
        operands: Their names and shapes, in order.
        body: Text of the computation that a fusion calls, with those that this one calls; or
            nothing.
        text: The whole line.
        is_begun: Whether it runs beside what follows, until its end.
    """

    name: str
    op: str
    shape: str
    rest: str
    operands: tuple[tuple[str, str], ...]
    body: str
    text: str
    is_begun: bool = False

    @property
    def is_end(self) -> bool:
        """Whether it only waits for what its operand began."""
        return self.op.endswith("-done")

    @property
    def is_kernel_call(self) -> bool:
        """Whether the instruction calls a kernel of Pallas."""
        return self.op == "custom-call" and bool(_KERNEL_CALL.search(self.rest))

    @property
    def is_product(self) -> bool:
        if self.op == "custom-call":
            return self.is_kernel_call or bool(_PRODUCT_CALL.search(self.rest))
        return self.op in _PRODUCTS or any(f" {op}(" in self.body for op in _PRODUCTS)

    @property
    def product(self) -> tuple[str, str, str]:
        """The attributes of the product, and the shapes of its first operand and of its result."""
        if not self.body:
            return self.rest, self.operands[0][1] if self.operands else "", self.shape
        inside = list(INSTRUCTION.finditer(self.body))
        found = next(m for m in inside if m["op"] in _PRODUCTS)
        first = OPERAND.search(found["operands"])
        shapes = {m["name"]: m["shape"] for m in inside}
        return found["rest"], shapes.get(first[1], "") if first else "", found["shape"]


class HloLoop(NamedTuple):
    """A loop of an optimised program.

    Attributes:
        times: Number of times that its body runs, as far as the compiler knows; or 1.
        body: What runs each time, in order; its condition among it.
    """

    times: int
    body: tuple[HloStep, ...]


HloStep: TypeAlias = Instruction | HloLoop


class HloModule:
    """An optimised, partitioned HLO module, read from its text.

    Attributes:
        num_partitions: Devices that run it.
        is_scheduled: Whether its instructions stand in the order in which a device is given them.
    """

    def __init__(self, text: str):
        found = list(_COMPUTATION.finditer(text))
        self._text_of = {m["name"]: _OF_ITS_MODULE.sub("", m[0]) for m in found}
        self._body_of = {m["name"]: m["body"] for m in found}
        (self._entry,) = [m["name"] for m in found if m[0].startswith("ENTRY")]
        counted = re.search(r"num_partitions=(\d+)", text)
        self.num_partitions = int(counted[1]) if counted else 1
        self.is_scheduled = "is_scheduled=true" in text[: text.find("\n")]

    @cached_property
    def steps(self) -> tuple[HloStep, ...]:
        """What a device is given, in the order of the text: instructions and loops of them, ends
        of collectives among them."""
        return tuple(self._run(self._entry))

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions that a device runs, collectives among them, in loops and calls too."""
        return tuple(one for one, _ in runs(self.steps))

    def _run(self, computation: str) -> Iterator[HloStep]:
        shapes: dict[str, str] = {}
        for m in INSTRUCTION.finditer(self._body_of[computation]):
            op, rest = m["op"], m["rest"]
            shapes[m["name"]] = m["shape"]
            if _NO_KERNELS.fullmatch(op):
                continue
            called = [name for name in _CALLED.findall(rest) if name in self._body_of]
            if op == "while":
                times = self._times(rest)
                yield HloLoop(times, tuple(step for name in called for step in self._run(name)))
            elif op == "conditional":
                yield from self._largest_branch(rest)
            elif op == "call" or (op in _CALLS_BESIDE and called):
                inner = tuple(self._run(called[0]))
                is_alone = op in _CALLS_BESIDE and len(inner) == 1
                yield from (_begun(step, m["name"]) if is_alone else step for step in inner)
            else:
                names = [name for name in OPERAND.findall(m["operands"]) if name in shapes]
                inside = self._called(rest) if op == "fusion" else ()
                yield Instruction(
                    m["name"],
                    op,
                    m["shape"],
                    rest,
                    tuple((name, shapes[name]) for name in names),
                    "".join(self._body_of[name] for name in inside),
                    m[0],
                    op.endswith("-start"),
                )

    def _times(self, rest: str) -> int:
        """Return how often a loop runs: as the compiler wrote beside it, or until its counter, from
        0 in the steps that its body takes, reaches what its condition compares it with. This is all
        that programs of TPUs tell."""
        if counted := _TRIP_COUNT.search(rest):
            return int(counted[1])
        bodies = {name: self._body_of.get(at, "") for name, at in _LOOP.findall(rest)}
        condition, body = bodies.get("condition", ""), bodies.get("body", "")
        compared, bounds = _COUNTER.findall(condition), _NUMBER.findall(condition)
        if len(compared) != 1 or len(bounds) != 1 or "direction=LT" not in condition:
            return 1
        results = _RESULTS.search(body)
        names = OPERAND.findall(results[1]) if results else []
        counter = int(compared[0])
        name = re.escape(names[counter]) if counter < len(names) else "-"
        added = re.search(rf"^  %{name} = \S+ add\((.*?)\)", body, re.M)
        steps = {each: int(number) for each, number in _NAMED_NUMBER.findall(body)}
        step = sum(steps.get(each, 0) for each in OPERAND.findall(added[1])) if added else 1
        return -(-int(bounds[0]) // (step or 1))

    def _largest_branch(self, rest: str) -> list[HloStep]:
        names = [name for m in _BRANCHES.finditer(rest) for name in OPERAND.findall(m[1] or m[2])]
        branches = [list(self._run(name)) for name in names]

        def nbytes(branch: Sequence[HloStep]) -> int:
            return sum(self.nbytes(each) for each, _ in runs(branch))

        return max(branches, key=nbytes, default=[])

    def nbytes(self, instruction: Instruction) -> int:
        """Return the bytes that an instruction reads and writes; a library's workspace does not
        count."""
        if instruction.op == "custom-call":
            result = _WORKSPACE.sub(")", instruction.shape) if instruction.is_product else ""
            read = sum(shape_bytes(shape) for _, shape in instruction.operands)
            return read + shape_bytes(result or instruction.shape)
        if instruction.op == "fusion":
            body = self._body_of[_CALLED.findall(instruction.rest)[0]]
            shapes = {
                int(m["operands"]): m["shape"]
                for m in INSTRUCTION.finditer(body)
                if m["op"] == "parameter"
            }
            parameters = [_Made("parameter", shapes[i]) for i in range(len(shapes))]
            return _moved(parameters, self._result(body, parameters))
        return int(self._costs(instruction).get("bytes accessed", 0))

    def flops(self, instruction: Instruction) -> int:
        """Return the FLOPs of the products of an instruction; 0 for a kernel of Pallas, in which
        XLA sees nothing."""
        if instruction.op != "custom-call":
            return int(self._costs(instruction).get("flops", 0))
        found = _product_of_call(instruction)
        return 0 if found is None else found.flops

    def product_shape(self, instruction: Instruction) -> tuple[int, ...]:
        """Return (batches, rows, columns) of the results of a product in a library, of a
        convolution, as which TPUs compute products, or of a Pallas kernel for TPUs; empty for
        others."""
        if instruction.op == "custom-call" and not instruction.is_kernel_call:
            found = _product_of_call(instruction)
            return () if found is None else found.shape
        attributes, _, result = instruction.product
        sizes, labels = dims_of(result), DIM_LABELS.search(attributes)
        if _ON_TPU in attributes and len(sizes) > 1:
            return math.prod(sizes[:-2]), *sizes[-2:]
        if labels is None:
            return ()
        groups = feature_groups(attributes)
        columns = sizes[labels[3].index("f")] // groups
        return groups, math.prod(sizes) // (groups * columns), columns

    def _result(self, body: str, arguments: Sequence[_Made]) -> _Made:
        """Return the result of a fusion whose computation has this text."""
        values: dict[str, _Made] = {}
        root = ""
        for m in INSTRUCTION.finditer(body):
            operands = [
                values[name].element(index)
                for name, index in _ELEMENT.findall(m["operands"])
                if name in values
            ]
            if m["op"] == "parameter":
                value = arguments[int(m["operands"])]
            elif m["op"] in _VIEWS:
                value = operands[0]
            elif m["op"] == "fusion":
                value = self._result(self._body_of[_CALLED.findall(m["rest"])[0]], operands)
            elif m["op"] == "get-tuple-element" and operands[0].op == "tuple":
                value = operands[0].element(_INDEX.findall(m["rest"])[0])
            else:
                value = _Made(m["op"], m["shape"], operands)
            values[m["name"]] = value
            if m[0].startswith("  ROOT "):
                root = m["name"]
        return values[root]

    def _costs(self, instruction: Instruction) -> dict[str, float]:
        parameters = "".join(
            f"  %{name} = {shape} parameter({i})\n"
            for i, (name, shape) in enumerate(dict(instruction.operands).items())
        )
        line = _OF_ITS_MODULE.sub("", instruction.text.strip())
        line = line if line.startswith("ROOT ") else f"ROOT {line}"
        computations = "\n\n".join(map(self._text_of.__getitem__, self._called(instruction.rest)))
        return costs_of(
            hlo.hlo_module_from_text(
                f"HloModule kernel\n\n{computations}\n\n"
                f"ENTRY %kernel {{\n{parameters}  {line}\n}}\n"
            )
        )

    def _called(self, text: str) -> tuple[str, ...]:
        """Return the computations that a text calls, each after those that it calls."""
        found: dict[str, None] = {}
        for one, several in _COMPUTATIONS.findall(text):
            for name in [one] if one else OPERAND.findall(several):
                if name in self._text_of:
                    found |= dict.fromkeys((*self._called(self._body_of[name]), name))
        return tuple(found)


def runs(steps: Iterable[HloStep], times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yield what runs, and how often, loops opened."""
    for step in steps:
        match step:
            case HloLoop():
                yield from runs(step.body, times * step.times)
            case Instruction(is_end=False):
                yield step, times


def _begun(step: HloStep, name: str) -> HloStep:
    """Return what is begun, by the name by which its end names it."""
    return step if isinstance(step, HloLoop) else replace(step, name=name, is_begun=True)


class _Made:
    """A value inside a fusion, where inner fusions are dissolved and views are what they show.

    Attributes:
        op, nbytes: Opcode that computes it, and its bytes.
        operands: The values that it is computed from; of a tuple its elements.
        uses: The values that are computed from it, each with the position of this operand. A
            tuple is no use.
    """

    def __init__(self, op: str, shape: str, operands: Sequence[_Made] = ()):
        self.op, self.nbytes, self.operands = op, shape_bytes(shape), operands
        self.uses: list[tuple[_Made, int]] = []
        if op != "tuple":
            for place, operand in enumerate(operands):
                operand.uses.append((self, place))

    def element(self, index: str) -> _Made:
        """Return an element of a tuple; the value itself if it is no tuple or has no index."""
        return self.operands[int(index)] if index and self.op == "tuple" else self

    @property
    def leaves(self) -> list[_Made]:
        """The arrays of a tuple of tuples, in order."""
        if self.op != "tuple":
            return [self]
        return [leaf for element in self.operands for leaf in element.leaves]


def _moved(parameters: Sequence[_Made], root: _Made) -> int:
    """Return the bytes that a fusion reads and writes.

    Of a parameter that only slices use, the slices are read. A result that updates parts of a
    parameter, and that the fusion reads no more, is written into that parameter's buffer: only the
    parts are written.
    """
    results = root.leaves
    _Made("result", "", results)
    written, in_place = 0, set[_Made]()
    for result in results:
        buffer, updates = result, list[_Made]()
        while buffer.op == "dynamic-update-slice" and len(buffer.uses) == 1:
            updates.append(buffer)
            buffer = buffer.operands[0]
        if updates and buffer.op == "parameter":
            in_place |= set(updates)
            written += sum(update.operands[1].nbytes for update in updates)
        else:
            written += result.nbytes

    def read(value: _Made) -> int:
        nbytes = 0
        for user, place in value.uses:
            if place == 0 and user.op in _SLICES:
                nbytes += user.nbytes
            elif place > 0 or user not in in_place:
                return value.nbytes
        return min(nbytes, value.nbytes)

    return written + sum(map(read, parameters))


class _Product(NamedTuple):
    """The shape and FLOPs of a matrix product or convolution that a library computes.

    Attributes:
        shape: (batches, rows, columns) of the results.
        flops: FLOPs of all batches together.
    """

    shape: tuple[int, int, int]
    flops: int


def _product_of_call(call: Instruction) -> _Product | None:
    """Return the product of a library call; None if it is no product, or has no operands."""
    shapes = [
        _dims(dims)
        for shape in (*(shape for _, shape in call.operands), call.shape)
        for _, dims in _SHAPE.findall(shape)[:1]
    ]
    if len(shapes) < 3:
        return None
    *operands, result = shapes
    if contracted := _CONTRACTED.search(call.rest):
        summed = math.prod(operands[0][int(dim)] for dim in json.loads(contracted[1]))
        batched = _BATCHED.search(call.rest)
        dims = json.loads(batched[1]) if batched else ()
        batches = math.prod(operands[0][int(dim)] for dim in dims)
        rows = math.prod(operands[0]) // (batches * summed) if summed else 0
        columns = math.prod(result) // (batches * rows) if batches * rows else 0
        return _Product((batches, rows, columns), 2 * math.prod(result) * summed)
    labels = DIM_LABELS.search(call.rest)
    if labels is None:
        return None
    backward = _BACKWARD.search(call.rest)
    made = backward[1] if backward else ""
    output, kernel = {
        "Input": (operands[0], operands[1]),
        "Filter": (operands[1], result),
        "": (result, operands[1]),
    }[made]
    flops = 2 * math.prod(output) * math.prod(kernel) // kernel[labels[2].index("o")]
    # The side of the result that is the output's features, or of an image its channels.
    features = {
        "Input": labels[1].index("f"),
        "Filter": labels[2].index("o"),
        "": labels[3].index("f"),
    }[made]
    groups = feature_groups(call.rest)
    columns = result[features] // groups
    rows = math.prod(result) // (groups * columns) if columns else 0
    return _Product((groups, rows, columns), flops)
