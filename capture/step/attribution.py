"""Whose bytes the peak of a stage consists of: every live buffer with its layer, its category and
the line of the model that made it.

What lives between programs (parameters, gradients, optimizer state, activations of every
micro-batch in flight) is known by name; what the running program holds itself is read from the
compiler's dump (``capture.compiler.buffers``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture.model.graph import LayerGraph
from capture.step.holds import KeptPart, Leaves, Params, State, Values
from capture.step.interface import StageInterface
from capture.step.ledger import Peak
from capture.step.program import Slot, Step, replay

#: Of the running program's own part: what no buffer that is live at its peak accounts for.
FRAGMENTATION = "gaps between buffers"


@dataclass(frozen=True)
class Buffer:
    """Bytes per device that are live at an instant.

    Attributes:
        category: As in the parts of a peak.
        layer: Whose it is; None if nothing tells.
        what: The parameter or the operation.
        source: ``file:line`` in the model; empty if unknown.
    """

    bytes: int
    category: str
    layer: int | None
    what: str
    source: str = ""


@dataclass(frozen=True)
class StageBuffers:
    """The buffers that the groups of bytes in a ``StageCost`` consist of.

    Attributes:
        optimizer: State of the owned parameters.
        residuals: What one micro-batch keeps for the backward pass; of a split one, what dies with
            the gradients of the inputs.
        held, deferred: Of a split one, what it keeps beside them for the gradients of the weights,
            and what is made for these.
        programs: Per program, its temporaries and results at its own peak.
    """

    optimizer: tuple[Buffer, ...] = ()
    residuals: tuple[Buffer, ...] = ()
    programs: Mapping[str, tuple[Buffer, ...]] = field(default_factory=dict)
    held: tuple[Buffer, ...] = ()
    deferred: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class Attribution:
    """The peak memory of a stage's devices, split into buffers.

    Attributes:
        buffers: Largest first. They sum to the peak: what no buffer accounts for is an entry
            without a layer.
    """

    peak: Peak
    buffers: tuple[Buffer, ...]

    @property
    def attributed_fraction(self) -> float:
        """The share of the peak's bytes that is known to belong to a layer."""
        return sum(b.bytes for b in self.buffers if b.layer is not None) / self.peak.peak_bytes

    @property
    def layers(self) -> dict[int, dict[str, int]]:
        """The bytes of each layer in the peak, by category."""
        found: dict[int, dict[str, int]] = {}
        for buffer in self.buffers:
            if buffer.layer is not None:
                parts = found.setdefault(buffer.layer, {})
                parts[buffer.category] = parts.get(buffer.category, 0) + buffer.bytes
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class BufferGroup:
    """Buffers of one size, category, line and operation, of several layers or micro-batches.

    Attributes:
        bytes: Size of one of them.
        category, source: As of a ``Buffer``.
        what: The operation or parameter; ``*`` where the names differ by a number.
        layers: Ascending; empty if nothing tells.
    """

    bytes: int
    count: int
    category: str
    what: str
    source: str
    layers: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.count


def group(buffers: Iterable[Buffer]) -> list[BufferGroup]:
    """Group buffers that are alike; the group with the most bytes is first.

    Example:
        >>> [alike] = group(
        ...     Buffer(8, "activations", layer, f"block_{layer}/mul", "model.py:3")
        ...     for layer in (0, 1)
        ... )
        >>> alike.what, alike.count, alike.layers
        ('block_*/mul', 2, (0, 1))
    """
    members_of: dict[tuple[Any, ...], list[Buffer]] = {}
    for buffer in buffers:
        members_of.setdefault(
            (buffer.bytes, buffer.category, re.sub(r"\d+", "*", buffer.what), buffer.source), []
        ).append(buffer)
    groups = []
    for (nbytes, category, pattern, source), members in members_of.items():
        names = {buffer.what for buffer in members}
        layers = tuple(sorted({buffer.layer for buffer in members if buffer.layer is not None}))
        groups.append(
            BufferGroup(
                nbytes,
                len(members),
                category,
                names.pop() if len(names) == 1 else pattern,
                source,
                layers,
            )
        )
    return sorted(groups, key=lambda alike: -alike.total_bytes)


def attribute(
    step: Step,
    stages: Sequence[StageInterface],
    ranges: Sequence[tuple[int, int]],
    graph: LayerGraph,
    buffers: Sequence[StageBuffers],
) -> list[Attribution]:
    """Return the peak of every stage, split into the buffers that are live then.

    Args:
        ranges: Layers [first, stop) per stage.
        graph: The model's layers at the plan's micro-batch size.
    """
    ledger, by_slot = replay(step), replay(step, by_slot=True)
    slots = {slot.name: slot for slot in step.slots}
    running = {i.label: step.programs[i.program] for i in step.runs}
    number = {place.name: s for s, place in enumerate(step.places)}
    found = []
    for stage in stages:
        peak, device = ledger.peaks[stage.devices[0]], stage.devices[0]
        live: list[Buffer] = []
        for name, nbytes in by_slot.peaks[device].parts.items():
            if name in slots:  # of this stage, or of another one on the device
                s = number[slots[name].place.name]
                parts: Sequence[Buffer] = _of_slot(
                    slots[name], stages[s], ranges[s], graph, buffers[s]
                )
            else:
                program = running[peak.instant]
                parts = buffers[number[program.place.name]].programs.get(program.kind, ())
            live += parts
            rest = nbytes - sum(part.bytes for part in parts)
            if rest > 0:
                category = slots[name].category if name in slots else "temporaries"
                live.append(
                    Buffer(
                        rest,
                        category,
                        None,
                        FRAGMENTATION if name not in slots else slots[name].what,
                    )
                )
        found.append(Attribution(peak, tuple(sorted(live, key=lambda buffer: -buffer.bytes))))
    return found


def attribute_operators(step: Step) -> Attribution:
    """Return the peak of the devices, split into buffers by operator; for a step whose slots each
    hold what is of one operator."""
    peak, by_slot = replay(step).peaks[0], replay(step, by_slot=True).peaks[0]
    slots = {slot.name: slot for slot in step.slots}
    running = {i.label: i for i in step.runs}
    live = []
    for name, nbytes in by_slot.parts.items():
        if name in slots:
            slot = slots[name]
            live.append(Buffer(nbytes, slot.category, slot.holds, slot.what))
        else:
            run = running[peak.instant]
            operator = step.slots[run.inputs[0][0]].holds
            live.append(Buffer(nbytes, "temporaries", operator, step.programs[run.program].kind))
    return Attribution(peak, tuple(sorted(live, key=lambda buffer: -buffer.bytes)))


def _of_slot(
    slot: Slot,
    stage: StageInterface,
    layers: tuple[int, int],
    graph: LayerGraph,
    buffers: StageBuffers,
) -> list[Buffer]:
    """Return the buffers that a slot consists of, with their layers and names."""
    first, stop = layers

    def reader(of: Callable[[Any], Sequence[int]], key: int) -> int | None:
        return next((layer for layer in range(first, stop) if key in of(graph.layers[layer])), None)

    def named(name: str, layer: int | None) -> list[Buffer]:
        return [Buffer(slot.nbytes, slot.category, layer, name)]

    def of_param(p: int) -> Buffer:
        return Buffer(
            stage.param_bytes[p],
            slot.category,
            reader(lambda layer: layer.params, p),
            graph.params[p].name,
        )

    match slot.holds:
        case Params(ids):
            return [of_param(p) for p in ids]
        case State():
            return [replace(buffer, category=slot.category) for buffer in buffers.optimizer]
        case KeptPart(part):
            return [replace(buffer, category=slot.category) for buffer in getattr(buffers, part)]
        case Leaves((leaf,)):
            return named(graph.batch[leaf].name, reader(lambda layer: layer.batch, leaf))
        case Values((value,)):
            # What only passes through belongs to the layer of another stage that made it.
            inner = slot.what in ("input", "input gradient")
            layer = reader(lambda layer: layer.inputs, value) if inner else None
            owner = graph.producer(value) if layer is None else layer
            return named(f"{slot.what} {graph.values[value].name}", owner)
    return []
