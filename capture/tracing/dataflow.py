"""Data flow through a traced function: what depends on what, and evaluating a part of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend import core as jex_core

from capture.model.graph import content_hash
from capture.tracing.hashing import jaxpr_key
from capture.tracing.jaxprs import (
    CALLS,
    CUSTOM_RULES,
    REMATS,
    Atom,
    evaluate,
    in_groups,
    is_variable,
    value_of,
    variables,
)
from capture.tracing.recompute import aval_bytes
from capture.tracing.source import at_source, traceback_of

_BRANCHES = {"cond": "branches"}
_INLINED = CALLS | {"custom_jvp_call": CUSTOM_RULES["custom_jvp_call"]}


class DataFlow:
    """A closed jaxpr with its calls opened, so that data flow is seen per equation.

    Args:
        open_remats: Whether bodies that are computed again are opened, too.
        open_branches: Whether branches of ``lax.cond`` are opened, as for ``opened``.

    Attributes:
        inputs, outputs: Variables (outputs may be literals), in the order of the jaxpr.
        jaxpr: The flat program, open.
    """

    def __init__(self, closed: Any, *, open_remats: bool = False, open_branches: bool = False):
        opened = _INLINED | (REMATS if open_remats else {}) | (_BRANCHES if open_branches else {})

        def run(*args):
            return _evaluate_inlined(closed, args, opened)

        flat = closed
        if any(equation.primitive.name in opened for equation in closed.jaxpr.eqns):
            flat = jax.make_jaxpr(run)(
                *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
            )
        self.jaxpr, self._consts = flat.jaxpr, flat.consts
        self.inputs, self.outputs = list(self.jaxpr.invars), list(self.jaxpr.outvars)
        self._nbytes: dict[Any, int] = {}

    def nbytes(self, value: object) -> int:
        """Return the bytes of a whole value, unsharded."""
        found = self._nbytes.get(value)
        if found is None:
            found = self._nbytes[value] = aval_bytes(value)
        return found

    @cached_property
    def opened(self) -> DataFlow:
        """The data flow with the branches of every ``lax.cond`` beside each other and one of their
        results chosen: data flow through each result is its own."""
        if not any(equation.primitive.name == "cond" for equation in self.jaxpr.eqns):
            return self
        return DataFlow(jex_core.ClosedJaxpr(self.jaxpr, self._consts), open_branches=True)

    def returning(self, outputs: Sequence[object]) -> Any:
        """Return a closed jaxpr of the same equations with other results."""
        return jex_core.ClosedJaxpr(self.jaxpr.replace(outvars=[*outputs]), self._consts)

    @property
    def key(self) -> str:
        """The hash of all that the program computes, closed-over arrays by content."""
        return jaxpr_key(jex_core.ClosedJaxpr(self.jaxpr, self._consts))

    @property
    def constants(self) -> dict[Any, Any]:
        """The closed-over arrays, by variable."""
        return dict(zip(self.jaxpr.constvars, self._consts, strict=True))

    @property
    def values(self) -> list[Any]:
        """The variables in program order, without constants."""
        return [*self.inputs, *(out for e in self.jaxpr.eqns for out in e.outvars)]

    def propagate(
        self,
        owners: Mapping[object, frozenset[int]],
        of_result: Callable[[frozenset[int], int], frozenset[int]] | None = None,
    ) -> dict[Any, frozenset[int]]:
        """Return, per value, the union of the owners of the inputs that it depends on.

        Args:
            owners: Owners of each input, by variable.
            of_result: Maps the union and the number of elements of a value to its owners; by
                default the union.
        """
        flow = dict(owners)
        for equation in self.jaxpr.eqns:
            parts = [flow[v] for v in variables(equation.invars) if v in flow]
            union = frozenset().union(*parts) if parts else frozenset()
            for out in equation.outvars:
                flow[out] = (
                    union if of_result is None else of_result(union, math.prod(out.aval.shape))
                )
        return flow

    def key_of(self, *wanted: Any) -> str:
        """Return a hash of the equations that values depend on, and of values that none of them
        names, renumbered; closed-over arrays count by shape, not by content."""
        numbers: dict[Any, int] = {}

        def text(atom: Atom) -> str:
            if not is_variable(atom):
                return str(atom)
            return f"v{numbers.setdefault(atom, len(numbers))}:{atom.aval.str_short()}"

        lines = [
            f"{list(map(text, e.outvars))}={e.primitive.name}"
            f"{sorted((k, str(v)) for k, v in e.params.items())}{list(map(text, e.invars))}"
            for e in self.needed(wanted)
        ]
        lines += [text(each) for each in filter(is_variable, wanted) if each not in numbers]
        return content_hash([re.sub(r"0x[0-9a-f]+", "", line) for line in lines])

    @cached_property
    def _position(self) -> dict[Any, int]:
        return {out: i for i, equation in enumerate(self.jaxpr.eqns) for out in equation.outvars}

    def maker(self, var: Any) -> Any | None:
        """Return the equation that makes a value; None if it is an input or a constant."""
        at = self.order(var)
        return self.jaxpr.eqns[at] if at >= 0 else None

    def order(self, var: jex_core.Var) -> int:
        """Return the position of the equation that makes a value; -1 for inputs and constants."""
        return self._position.get(var, -1)

    def needed(self, wanted: Sequence[object], given: object = ()) -> list[Any]:
        """Return the equations that values depend on, in order, stopping at given ones."""
        return [self.jaxpr.eqns[position] for position in self.needed_at(wanted, given)]

    def needed_at(self, wanted: Sequence[object], given: Any = ()) -> list[int]:
        """Return the positions of the equations that ``needed`` returns."""
        waiting, chosen = list(wanted), set[int]()
        while waiting:
            value = waiting.pop()
            if not is_variable(value) or value in given:
                continue
            position = self._position.get(value)
            if position is not None and position not in chosen:
                chosen.add(position)
                waiting += self.jaxpr.eqns[position].invars
        return sorted(chosen)

    def evaluate(
        self, env: dict[Any, Any], wanted: Sequence[Any], *, whole: bool = False
    ) -> list[Any]:
        """Compute the wanted variables from the values in ``env``. With ``whole`` all equations are
        run, for the effects of what nobody reads."""
        values = self.constants | env
        for equation in self.jaxpr.eqns if whole else self.needed(wanted, values):
            bind(equation, [value_of(v, values) for v in equation.invars], values)
        return [value_of(v, values) for v in wanted]

    def part(
        self,
        given: Sequence[Sequence[object]],
        wanted: Sequence[Sequence[object]],
        *,
        whole: bool = False,
    ) -> Callable[..., list[list[Any]]]:
        """Return a part of the program as a function, from groups of arrays for the given variables
        to groups of arrays of the wanted ones. With ``whole`` all equations are run, for the
        effects of what nobody reads."""

        def run(*groups: Sequence[Any]) -> list[list[Any]]:
            env: dict[Any, Any] = {}
            for named, arrays in zip(given, groups, strict=True):
                env |= zip(named, arrays, strict=True)
            made = self.evaluate(env, [v for group in wanted for v in group], whole=whole)
            return in_groups(made, map(len, wanted))

        return run


def bind(
    equation: jex_core.JaxprEqn,
    args: Sequence[object],
    values: dict[object, object],
    caller: object = None,
    call: Callable[..., Sequence[object]] | None = None,
) -> None:
    """Run one equation, in its own scope and at its own line, and note its results.

    Args:
        values: Values by variable; results are added.
        caller: The traceback of the call around it, if it is of an opened function.
        call: Run in its place, with as many results.
    """
    with at_source(traceback_of(equation, caller), equation.source_info.name_stack):
        if call is not None:
            results = call(*args)
        else:
            results = equation.primitive.bind(
                *args, **equation.primitive.get_bind_params(equation.params)
            )
            results = results if equation.primitive.multiple_results else [results]
    values.update(zip(equation.outvars, results, strict=True))


def _evaluate_inlined(
    body: Any, args: Sequence[Any], opened: Mapping[str, str], caller: object = None
) -> list[Any]:
    def run(equation: jex_core.JaxprEqn, inputs: list[Any], values: dict[object, object]) -> None:
        inner = equation.params.get(opened.get(equation.primitive.name, ""))
        if inner is None:
            return bind(equation, inputs, values, caller)
        here = traceback_of(equation, caller)
        with at_source(here, equation.source_info.name_stack):
            if equation.primitive.name in _BRANCHES:
                which, *rest = inputs
                found = [_evaluate_inlined(branch, rest, opened, here) for branch in inner]
                results = [jax.lax.select_n(which, *each) for each in zip(*found, strict=True)]
            else:
                results = _evaluate_inlined(inner, inputs, opened, here)
        values.update(zip(equation.outvars, results, strict=True))

    return evaluate(body, args, run)
