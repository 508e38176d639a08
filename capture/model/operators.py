"""A model as operators, in plain data: what a choice of sharding per operator needs to know, and
nothing of any framework.

A description is JSON; sizes are those of one example, on one device, unsharded:

    schema_version                    1
    name
    state_bytes_per_parameter_byte    parameters, gradients and optimizer state over parameters: 4
                                      for Adam in one precision
    blocks                            in program order: ``count`` times in a row these ``operators``

``capture.tracing.operators`` reads the same from a traced loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from capture import documents
from capture.errors import Violation, WorkloadError

OPERATORS = documents.Format(
    "model description",
    WorkloadError,
    "operators",
    "see capture/model/operators.py, which says what it holds",
    not_json="file",
)

Kind = Literal["matmul", "conv", "embedding", "other"]


@dataclass(frozen=True)
class Operator:
    """A product with its parameters and what follows it up to the next one.

    Attributes:
        name: For people.
        kind: Products (``matmul``, ``conv``) and tables (``embedding``) can be split into slices
            whose results are added: of inputs, or of rows, where a row that is in another slice
            counts as zero. Whatever is ``other`` cannot.
        parameter_bytes: S_i of the paper: those that may be sharded.
        activation_bytes: Bytes that its forward pass keeps for the backward pass, per example.
        input_bytes: Activations that it reads, per example: what is kept where it is
            rematerialised.
        output_bytes: Bytes of its result, per example: what slices are added up in.
        workspace_bytes: M_extra of the paper: temporaries, whatever the batch.
        flops: FLOPs of the forward pass of one example, 2 per multiply-add.
        gamma_seconds: Measured seconds per example, forward and backward (gamma_i of the paper);
            None to take them from ``flops``.
        replicated_bytes: Further parameters, replicated in every mode: too small, or of a shape
            that the devices do not divide.
        tail_bytes: The part of ``activation_bytes`` that is kept of the operations after the
            product.
        crossing_bytes: Bytes that later operators read of it and of those before, per example;
            None: as much as its input.
        gathered_fraction: The part of ``parameter_bytes`` that a gather of all of them brings: less
            than 1 where products read them in fewer bits.
        fused_bytes: The part of ``activation_bytes`` that is operands which a replicated product
            computes again from what is kept; a sharded one, which may be computed while slices
            arrive, reads them as they were.
        again_bytes: Bytes that the model's own remat region has computed again when it goes
            backwards, up to the operations after its product.
        backward_bytes: While the operations after its product go backwards, the most that comes and
            goes beside what is kept, per example.
    """

    name: str
    kind: Kind
    parameter_bytes: int
    activation_bytes: int
    input_bytes: int
    output_bytes: int
    workspace_bytes: int = 0
    flops: int = 0
    gamma_seconds: float | None = None
    replicated_bytes: int = 0
    tail_bytes: int = 0
    crossing_bytes: int | None = None
    gathered_fraction: float = 1.0
    fused_bytes: int = 0
    backward_bytes: int = 0
    again_bytes: int = 0

    @property
    def can_split(self) -> bool:
        """Whether partial results over slices of its inputs add up to its result (paper, 3.3)."""
        return self.kind != "other"

    def violations(self) -> Iterator[Violation]:
        """Yield a violation for an unknown kind and for each negative size of the operator."""
        if self.kind not in get_args(Kind):
            yield Violation(
                f"operator {self.name!r} has kind={self.kind!r}; use one of "
                f"{', '.join(get_args(Kind))}.",
                "operator-kind",
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                yield Violation(
                    f"operator {self.name!r} has {field.name}={value}; give 0 or more.",
                    "operator-size",
                )


@dataclass(frozen=True)
class Block:
    """Operators that stand ``count`` times in a row, such as the two of a Transformer's layer."""

    operators: tuple[Operator, ...]
    count: int = 1


@dataclass(frozen=True)
class OperatorModel:
    """A model as operators.

    Attributes:
        name: For people.
        blocks: In program order.
        state_bytes_per_parameter_byte: (parameters + gradients + optimizer state) / parameters.

    Raises:
        WorkloadError: ``operators-none``, ``operators-count``, ``operators-state``,
            ``operator-kind``, ``operator-size``, all at once.

    Example:
        >>> product = Operator("product", "matmul", 4000, 400, 200, 200, flops=2000)
        >>> model = OperatorModel("three", (Block((product,), 3),))
        >>> model.num_operators, model.parameter_bytes, model.counts
        (3, 12000, ((0, 3),))
    """

    name: str
    blocks: tuple[Block, ...]
    state_bytes_per_parameter_byte: float = 4.0

    def __post_init__(self):
        WorkloadError.check(self._violations())

    def _violations(self) -> Iterator[Violation]:
        if not any(block.operators for block in self.blocks):
            yield Violation(
                f"model {self.name!r} has no operators; give one at least.", "operators-none"
            )
        if self.state_bytes_per_parameter_byte < 1:
            yield Violation(
                f"model {self.name!r} has "
                f"state_bytes_per_parameter_byte={self.state_bytes_per_parameter_byte:g}; "
                "the parameters alone are 1.",
                "operators-state",
            )
        for block in self.blocks:
            if block.count < 1:
                yield Violation(
                    f"model {self.name!r} has a block with count={block.count}; give 1 or more.",
                    "operators-count",
                )
            for operator in block.operators:
                yield from operator.violations()

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """All n operators in program order; equal ones, whatever their names, are one object."""
        first: dict[Operator, Operator] = {}
        return tuple(
            first.setdefault(replace(operator, name=""), operator)
            for block in self.blocks
            for _ in range(block.count)
            for operator in block.operators
        )

    @property
    def num_operators(self) -> int:
        return len(self.operators)

    @cached_property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """The kinds of equal operators, as (first position, number): searches decide how many of
        them, not which."""
        first: dict[Operator, int] = {}
        for position, operator in enumerate(self.operators):
            first.setdefault(operator, position)
        found = Counter(self.operators)
        return tuple((position, found[operator]) for operator, position in first.items())

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(
            operator.parameter_bytes + operator.replicated_bytes for operator in self.operators
        )

    @cached_property
    def flops(self) -> int:
        """The FLOPs of the forward pass of one example, over all operators."""
        return sum(operator.flops for operator in self.operators)

    def to_json(self) -> dict[str, Any]:
        return OPERATORS.write(documents.fields_of(self))

    @classmethod
    def from_json(cls, data: object) -> OperatorModel:
        """Read the model that ``to_json`` wrote, or one written by hand.

        Raises:
            WorkloadError: ``operators-schema`` for an unknown version, ``operators-corrupt`` for a
                missing or wrong field, and those of the class.
        """
        return OPERATORS.read(data, cls)

    @classmethod
    def load(cls, path: str | Path) -> OperatorModel:
        """Load the model of a JSON file.

        Raises:
            WorkloadError: ``operators-file`` if it cannot be read or is no JSON, and those of
                ``from_json``.
        """
        return OPERATORS.load(path, cls.from_json)
