"""Which buffers a compiled program holds at its peak, and which layer and line of the model each
comes from, read from XLA's dump.

``*-live-range.txt`` says from which instruction to which a value lives, ``*-buffer-assignment.txt``
which values are temporaries, and the optimised HLO carries the name scopes and the source lines of
the instructions that define them. A value whose instruction names no layer (a copy, a bitcast that
XLA made) belongs to the nearest instruction that does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from capture.compiler.text import ALLOCATION, INSTRUCTION, OPERAND
from capture.step.attribution import Buffer
from capture.tracing.source import layer_of_scope, model_line, operation_name

_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\})?:(\d+)-(\d+)$", re.M)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_ENTRIES = re.compile(r"^(\d+) (.*)$", re.M)

#: Of allocations, by a word in what the text says of them.
_KINDS = {"preallocated-temp": "temporary", "live-out": "result"}
#: Instructions between one that names no layer and one that does.
_MOST_STEPS = 12


@dataclass(frozen=True)
class _Instruction:
    name: str
    op_name: str
    source: str
    operands: tuple[str, ...]


def read_buffers(
    folder: Path, layer_of: Callable[[str], int | None] = layer_of_scope
) -> tuple[Buffer, ...]:
    """Read the temporaries and results that the one dumped program of a folder holds at its peak,
    largest first; arguments are left out.

    Args:
        folder: Given to the compiler as ``xla_dump_to``.
        layer_of: The layer that an ``op_name`` tells of; for an argument that is its name in the
            program.
    """
    (assignment,), (live,), (program,) = (
        [path.read_text(errors="replace") for path in folder.glob(pattern)]
        for pattern in ("*-buffer-assignment.txt", "*-live-range.txt", "*after_optimizations.txt")
    )
    return parse_buffers(assignment, live, program, layer_of)


def parse_buffers(
    assignment: str, live: str, program: str, layer_of: Callable[[str], int | None] = layer_of_scope
) -> tuple[Buffer, ...]:
    """Return the buffers that ``read_buffers`` does, from the texts of the files."""
    temporaries, results = _allocated(assignment)
    lives = [
        _Life(name, *temporaries[name, index or "{}"], int(start), int(end))
        for name, index, start, end in _RANGE.findall(live)
        if (name, index or "{}") in temporaries
    ]
    held = [(life.name, life.size) for life in _at_peak(lives)] + results
    origin = _Origins(program, layer_of)
    buffers = [Buffer(size, "temporaries", *origin.of(name)) for name, size in held if size]
    return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))


@dataclass(frozen=True)
class _Life:
    """One value among the temporaries: where it lies, and its first and last instruction."""

    name: str
    size: int
    offset: int
    start: int
    end: int

    def overlaps(self, other: _Life) -> bool:
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


def _at_peak(lives: Sequence[_Life]) -> list[_Life]:
    """Return the values that are live where they need most bytes together. An instruction may write
    its result over an operand: that counts once."""
    starting: dict[int, list[_Life]] = {}
    for life in lives:
        starting.setdefault(life.start, []).append(life)
    ends = {
        life: life.end
        - any(life.overlaps(new) for new in starting.get(life.end, ()) if new is not life)
        for life in lives
    }
    change: Counter[int] = Counter()
    for life, end in ends.items():
        change[life.start] += life.size
        change[end + 1] -= life.size
    times = sorted(change)
    totals = list(accumulate(change[time] for time in times))
    peak = times[max(range(len(times)), key=totals.__getitem__)] if times else 0
    return [life for life, end in ends.items() if life.start <= peak <= end]


def _allocated(
    assignment: str,
) -> tuple[dict[tuple[str, str], tuple[int, int]], list[tuple[str, int]]]:
    """Return (values among the temporaries with their size and offset, results that have an
    allocation of their own with its size).

    The text lists allocations, each followed by the values that share it. Only memory space 0
    counts, the device's own; parameters are the caller's. Values in one result's allocation are the
    same buffer, so the first stands for it; temporaries share one arena, at offsets of their own.
    """
    temporaries: dict[tuple[str, str], tuple[int, int]] = {}
    results: list[tuple[str, int]] = []
    kind = ""
    for line in assignment.splitlines():
        if header := ALLOCATION.match(line):
            size, color, text = int(header[1]), header[2] or "0", header[3]
            in_memory = color == "0" and not text.startswith("parameter")
            kinds = [kind for mark, kind in _KINDS.items() if in_memory and mark in text]
            kind = kinds[0] if kinds else ""
        elif kind and (value := _VALUE.match(line)):
            if kind == "temporary":
                temporaries[value[1], value[2] or "{}"] = int(value[3]), int(value[4])
            else:
                results.append((value[1], size))
                kind = ""  # values that share the allocation are the same buffer
    return temporaries, results


class _Origins:
    """The finder of the layer, the operation and the source line behind the name of an
    instruction."""

    def __init__(self, program: str, layer_of: Callable[[str], int | None]):
        frames = _Frames(program)
        self._layer_of = layer_of
        self._instructions = {
            match[1]: _instruction(match[1], match[2], frames)
            for match in INSTRUCTION.finditer(program)
        }

    @cached_property
    def _users(self) -> Mapping[str, list[str]]:
        users: dict[str, list[str]] = {}
        for instruction in self._instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
        return users

    def of(self, name: str) -> tuple[int | None, str, str]:
        """Return the (layer, operation, source line) of an instruction."""
        own = self._instructions.get(name)
        what = operation_name(own.op_name) if own and own.op_name else ""
        layer, source = None, own.source if own else ""
        for instruction in self._nearest(name):
            here = self._layer_of(instruction.op_name)
            if here is None or layer not in (None, here):
                continue
            layer, what = here, what or operation_name(instruction.op_name)
            source = source or instruction.source
            if source:
                break
        return layer, what or name, source

    def _nearest(self, name: str) -> Iterator[_Instruction]:
        """Yield the instruction, then its neighbours in rings; operands before users."""
        ring, seen = [name], {name}
        for _ in range(_MOST_STEPS):
            following = []
            for one in ring:
                instruction = self._instructions.get(one)
                if instruction is None:
                    continue
                yield instruction
                following += [
                    other
                    for other in (*instruction.operands, *self._users.get(one, ()))
                    if other not in seen
                ]
                seen.update(following)
            ring = following


def _instruction(name: str, rest: str, frames: _Frames) -> _Instruction:
    op_name = _OP_NAME.search(rest)
    return _Instruction(
        name,
        op_name[1].replace("\\'", "'") if op_name else "",
        frames.source(rest),
        tuple(OPERAND.findall(rest)),
    )


@dataclass
class _Frames:
    """The tables of source lines in the header of an HLO module."""

    program: str
    _tables: dict[str, dict[int, str]] = field(init=False)

    def __post_init__(self) -> None:
        header = self.program[: self.program.find("\n%")]
        parts = re.split(
            r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n", header, flags=re.M
        )
        self._tables = {
            name: {int(match[1]): match[2] for match in _ENTRIES.finditer(text)}
            for name, text in zip(parts[1::2], parts[2::2], strict=False)
        }
        self._known: dict[int, str] = {}

    def source(self, instruction: str) -> str:
        """Return the line of the model that an instruction comes from; empty if it comes from
        none."""
        if written := _FILE_AND_LINE.search(instruction):
            return model_line([(written[1], int(written[2]))])
        frame = _FRAME_ID.search(instruction)
        if frame is None:
            return ""
        frame_id = int(frame[1])
        if frame_id not in self._known:
            self._known[frame_id] = model_line(self._frames(frame_id))
        return self._known[frame_id]

    def _frames(self, frame_id: int) -> Iterator[tuple[str, int]]:
        frames, seen = self._tables.get("StackFrames", {}), set()
        while frame_id in frames and frame_id not in seen:
            seen.add(frame_id)
            location = self._tables["FileLocations"].get(
                _number(frames[frame_id], "file_location_id"), ""
            )
            yield (
                self._tables["FileNames"].get(_number(location, "file_name_id"), "").strip('"'),
                _number(location, "line"),
            )
            parent = _number(frames[frame_id], "parent_frame_id")
            # Printed one too high by some versions.
            frame_id = parent - 1 if parent >= frame_id else parent


def _number(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0
