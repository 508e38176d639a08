"""Jaxprs taken apart: which operations are calls, what their bodies are, how a body is evaluated.

JAX 0.12 has one class for open and closed jaxprs, JAX 0.10 two; what differs between versions is
known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from jax.extend import core as jex_core

_T = TypeVar("_T")
#: An operand of an equation.
Atom = jex_core.Var | jex_core.Literal
#: Call-like primitives, and the parameter that holds the body.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
#: Those whose body is computed again when it goes backwards.
REMATS = {"remat2": "jaxpr", "checkpoint": "jaxpr"}
#: Those whose body is not what is differentiated.
CUSTOM_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
#: All whose body takes the operands and gives the results.
BODIES = CALLS | REMATS | CUSTOM_RULES


def primitives(text: str) -> frozenset[str]:
    """Return the names of primitives that a text lists."""
    return frozenset(text.split())


def is_body(value: object) -> bool:
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def is_variable(atom: object) -> bool:
    """Tell whether an operand of an equation is a variable, not a literal."""
    return not isinstance(atom, jex_core.Literal)


def variables(atoms: Iterable[Atom]) -> list[Any]:
    """Return those operands that are variables, not literals."""
    return [atom for atom in atoms if is_variable(atom)]


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """Return the value of a literal, or of a variable."""
    return values[atom] if is_variable(atom) else atom.val


def opened(body: object) -> Any:
    """Return the open jaxpr of an open or closed one."""
    return getattr(body, "jaxpr", body)


def consts_of(body: object) -> Sequence[Any]:
    """Return the constants of a closed jaxpr; an open one has none."""
    return getattr(body, "consts", ())


def in_groups(values: Sequence[_T], sizes: Iterable[int]) -> list[list[_T]]:
    """Return the values in consecutive groups of these sizes."""
    bounds = accumulate(sizes, initial=0)
    return [list(values[first:stop]) for first, stop in pairwise(bounds)]


def several(value: object) -> Sequence[Any]:
    """Return a parameter that may be one or several as a sequence."""
    return value if isinstance(value, (tuple, list)) else (value,)


def sub_jaxprs(params: Mapping[str, object]) -> Iterator[Any]:
    """Yield the open jaxprs among an equation's parameters (bodies, branches, conditions)."""
    for value in params.values():
        for item in several(value):
            if is_body(item):
                yield opened(item)


def scan_arity(equation: jex_core.JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and carries of a scan, from ranks: what is scanned or
    collected has one dimension more outside. The parameters that say so differ between versions."""
    body = opened(equation.params["jaxpr"])
    num_scanned = _num_stacked(equation.invars, body.invars)
    num_carry = len(equation.outvars) - _num_stacked(equation.outvars, body.outvars)
    return len(equation.invars) - num_scanned - num_carry, num_carry


def _num_stacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(a.aval.ndim != b.aval.ndim for a, b in zip(outer, inner, strict=True))


def evaluate(
    body: Any, args: Sequence[Any], run: Callable[[Any, list[Any], dict[Any, Any]], None]
) -> list[Any]:
    """Evaluate the body of a jaxpr and return its results.

    Args:
        run: Given an equation, its operands and the values by variable, adds its results to them.
    """
    jaxpr = opened(body)
    values = dict(zip(jaxpr.constvars, consts_of(body), strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        run(equation, [value_of(v, values) for v in equation.invars], values)
    return [value_of(v, values) for v in jaxpr.outvars]
