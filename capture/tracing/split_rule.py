"""What a ``custom_partitioning`` operation says of its dimensions: which may be split, and where
they stand in its results.

Such an operation, a Pallas kernel say, is opaque to a compiler's partitioner. Its author gives an
einsum-like rule instead, in which a dimension has the same name (*factor*) wherever it occurs
(``jax.experimental.custom_partitioning``, ``sharding_rule``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from capture.errors import TracingError
from capture.tracing.jaxprs import sub_jaxprs

PRIMITIVE = "custom_partitioning"
#: What JAX puts for the dimensions in front that a rule writes as an ellipsis.
_LEADING = "\u2026"

#: The factor of each dimension of an array; None where the dimension must stay whole.
Factors = tuple[str | None, ...]


@dataclass(frozen=True)
class SplitRule:
    """The factors of the operands and the results of one operation.

    Attributes:
        operands: Factors of every operand's dimensions; those that may not be split are left out.
        results: Factors of every result's dimensions.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]

    @property
    def factors(self) -> Iterator[tuple[str, int, int]]:
        """The factors as (factor, operand, dimension), each where it stands first."""
        seen: set[str] = set()
        for operand, factors in enumerate(self.operands):
            for dim, factor in enumerate(factors):
                if factor is not None and factor not in seen:
                    seen.add(factor)
                    yield factor, operand, dim


def split_rule(equation: JaxprEqn) -> SplitRule | None:
    """Return the rule of a ``custom_partitioning`` equation; None if none is known before lowering.

    A factor may be split that every result has, or that the rule calls a reduction: then the
    operation's author adds up what the devices have. One that is a part of a dimension (a compound
    factor) stays whole.

    Raises:
        TracingError: ``trace-split-rule`` if the rule does not fit the operands and results, or
            names a factor twice in one array.
    """
    rule = equation.params["sharding_rule"]
    if not hasattr(rule, "operand_mappings"):
        return None
    operands = _named(rule, rule.operand_mappings, equation.invars, "operands")
    results = _named(rule, rule.result_mappings, equation.outvars, "results")
    whole = {*rule.need_replication_factors, *rule.permutation_factors}
    whole |= {
        part
        for dims in (*operands, *results)
        for dim in dims
        if not isinstance(dim, str)
        for part in dim
    }
    may_split = {
        factor
        for dims in operands
        for factor in dims
        if isinstance(factor, str)
        and factor not in whole
        and (factor in rule.reduction_factors or all(factor in result for result in results))
    }

    def kept(arrays: list[tuple[object, ...]]) -> tuple[Factors, ...]:
        return tuple(
            tuple(factor if factor in may_split else None for factor in dims) for dims in arrays
        )

    return SplitRule(kept(operands), kept(results))


def _named(
    rule: Any, mappings: Sequence[Any], atoms: Sequence[Any], what: str
) -> list[tuple[Any, ...]]:
    """Return the factors of every dimension of arrays."""
    arrays = [
        _dimensions(mapping, len(atom.aval.shape))
        for mapping, atom in zip(mappings, atoms, strict=False)
    ]
    ranks = [len(atom.aval.shape) for atom in atoms]
    if (
        len(mappings) != len(atoms)
        or [len(dims) for dims in arrays] != ranks
        or any(len(set(dims)) < len(dims) for dims in arrays)
    ):
        raise TracingError.of(
            f"the sharding rule {rule} of a custom_partitioning operation does not fit its "
            f"{what} of {ranks} dimensions; "
            "give one factor per dimension, each once in an array.",
            "trace-split-rule",
        )
    return arrays


def _dimensions(mapping: Sequence[object], ndim: int) -> tuple[Any, ...]:
    """Return one entry per dimension: a factor, or several that share it."""
    dims: list[Any] = []
    for entry in mapping:
        leading = isinstance(entry, str) and entry.startswith(_LEADING)
        dims += [f"{entry}{i}" for i in range(ndim - len(mapping) + 1)] if leading else [entry]
    return tuple(dims)


def may_hold_split_rule(equation: Any) -> bool:
    """Tell whether an equation is, or may run, a ``custom_partitioning`` operation."""
    if equation.primitive.name in (PRIMITIVE, "custom_vjp_call"):
        return True
    return any(
        may_hold_split_rule(inner) for body in sub_jaxprs(equation.params) for inner in body.eqns
    )
