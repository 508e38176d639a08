"""How a loss depends on the examples of its batch: a walk over its jaxprs for n and for 2 n
examples, side by side.

A dimension is the batch dimension if it is twice as large in the second; every value gets a
``State``, by the rules of ``batch_rules``. Calls and custom derivatives are entered, bodies of
loops until the states of what they carry no longer change. The value of the loss decides, as a
gradient splits with it; a custom derivative that mixes examples where its function does not is not
seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from capture.tracing.batch.equation import Step, grown_dims
from capture.tracing.batch.rules import RULES
from capture.tracing.batch.states import SAME, Kind, State, broken, constant_state, linear, unknown
from capture.tracing.jaxprs import BODIES, consts_of, is_body, opened, scan_arity

#: Sizes among the parameters of a primitive, which may differ between n and 2 n examples; rules
#: read the shapes.
_SIZES = {"shape", "new_sizes", "slice_sizes", "limit_indices", "sizes", "length"}
_MOST_PASSES = 8


def loss_state(closed: Any, doubled: Any, num_params: int) -> State:
    """State of the loss.

    Args:
        closed, doubled: Its closed jaxprs for n and 2 n examples; the inputs are parameters, then
            batch leaves (and a key).
        num_params: Number of parameter leaves.
    """
    states = []
    for i, (a, b) in enumerate(zip(closed.jaxpr.invars, doubled.jaxpr.invars, strict=True)):
        dims = grown_dims(a.aval.shape, b.aval.shape)
        regular = i >= num_params and len(dims) == 1
        states.append(
            SAME
            if not dims
            else State(Kind.EXAMPLES)
            if regular
            else unknown(f"input {i} of the loss has no single batch dimension")
        )
    return walk(closed, doubled, states, "")[0]


def walk(body: Any, doubled: Any, states: Sequence[State], scope: str) -> list[State]:
    """States of the results of a body, from those of its arguments."""
    first, second = opened(body), opened(doubled)
    if [e.primitive for e in first.eqns] != [e.primitive for e in second.eqns] or len(
        first.outvars
    ) != len(second.outvars):
        return [
            unknown(
                f"the program is another one for twice as many examples (in {scope or 'the loss'})"
            )
        ] * len(first.outvars)
    env: dict[Any, State] = dict(zip(first.invars, states, strict=True))
    pairs = zip(consts_of(body), consts_of(doubled), strict=True)
    env.update(
        zip(
            first.constvars,
            [constant_state(a, b, scope or "the loss") for a, b in pairs],
            strict=True,
        )
    )

    def read(atom: Any, other: Any) -> State:
        if isinstance(atom, jex_core.Literal):
            same_kind = isinstance(other, jex_core.Literal)
            return (
                constant_state(atom.val, other.val, scope or "the loss")
                if same_kind
                else unknown("a number that depends on the batch")
            )
        return env[atom]

    for one, two in zip(first.eqns, second.eqns, strict=True):
        arguments = [read(a, b) for a, b in zip(one.invars, two.invars, strict=True)]
        inner = "/".join(filter(None, (scope, str(one.source_info.name_stack))))
        env.update(zip(one.outvars, _equation(Step(one, two, inner), arguments), strict=True))
    return [read(a, b) for a, b in zip(first.outvars, second.outvars, strict=True)]


def _equation(step: Step, states: Sequence[State]) -> Sequence[State]:
    """States of the results of one operation.

    The order matters: what is known to be wrong stays so (loops and choices judge that themselves);
    then shapes are judged, which programs for n and 2 n examples show without any rule; and only
    then the operation's own rule is asked, because rules assume one dimension of examples.
    """
    num_outputs = len(step.one.outvars)
    if step.name in BODIES:
        body = BODIES[step.name]
        return walk(step.one.params[body], step.two.params[body], states, step.scope)
    for kind in (Kind.BROKEN, Kind.UNKNOWN):
        if (bad := next((s for s in states if s.kind is kind), None)) and step.name not in (
            "scan",
            "while",
            "cond",
            "select_n",
        ):
            return [bad] * num_outputs
    if _differs(step.one.params, step.two.params):
        return [unknown(f"{step.where} has parameters that depend on the batch size")] * num_outputs
    if step.name in _LOOPS:
        return _LOOPS[step.name](step, states)
    if any(len(dims) > 1 for dims in step.out_grown):
        grown = [
            s for s, dims in zip(states, step.in_grown, strict=True) if dims and not s.is_data_free
        ]
        if len(grown) > 1:
            return [
                broken(f"{step.where} pairs every example of the micro-batch with every other")
            ] * num_outputs
        return [unknown(f"{step.where} gives a tensor with two batch dimensions")] * num_outputs
    if any(dims is None for dims in step.out_dims):
        return [
            unknown(f"{step.where} gives a size that is not in proportion to the batch")
        ] * num_outputs
    if step.name in RULES:
        result = RULES[step.name](step, states)
        return result if isinstance(result, list) else [result] * num_outputs
    if all(s.is_data_free and not dims for s, dims in zip(states, step.in_grown, strict=True)):
        # Whatever it is, without data: random numbers where it makes something of batch size.
        return [State(Kind.EXAMPLES if dims else Kind.SAME) for dims in step.out_grown]
    return [unknown(f"{step.where} is an operation that this check does not know")] * num_outputs


def _differs(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    simple = (bool, int, float, str, tuple, np.dtype)
    return any(
        isinstance(value, simple)
        and key not in _SIZES
        and not _bodies(value)
        and not _equal(value, two.get(key))
        for key, value in one.items()
    )


def _equal(one: Any, two: Any) -> bool:
    return one == two or (one != one and two != two)  # a fill value may be NaN


def _bodies(value: Any) -> bool:
    return isinstance(value, tuple) and any(map(is_body, value))


@dataclass(frozen=True)
class _Loop:
    """A body that is run again on some of its own results: constants, carry, and rows of scanned
    arrays."""

    body: Any
    doubled: Any
    consts: Sequence[State]
    rows: Sequence[State]
    where: str
    scope: str

    def run(self, carry: Sequence[State]) -> tuple[list[State], list[State]]:
        """States of the carry, joined over any number of iterations, and of the other results."""
        carry = list(carry)
        for _ in range(_MOST_PASSES):
            results = walk(self.body, self.doubled, [*self.consts, *carry, *self.rows], self.scope)
            joined = [
                join(before, after, self.where)
                for before, after in zip(carry, results, strict=False)
            ]
            if joined == carry:
                return carry, results[len(carry) :]
            carry = joined
        return [unknown(f"{self.where} was not understood in {_MOST_PASSES} passes")] * len(
            carry
        ), results[len(carry) :]


def join(one: State, two: State, where: str) -> State:
    """A state that holds for both values."""
    for kind in (Kind.BROKEN, Kind.UNKNOWN):
        for state in (one, two):
            if state.kind is kind:
                return state
    return one if one == two else linear([one, two], where)


def _scan(step: Step, states: Sequence[State]) -> list[State]:
    num_consts, num_carry = scan_arity(step.one)
    first_row = num_consts + num_carry
    consts, carry, rows = states[:num_consts], states[num_consts:first_row], states[first_row:]
    if step.one.params["length"] == step.two.params["length"]:
        loop = _Loop(
            step.one.params["jaxpr"], step.two.params["jaxpr"], consts, rows, step.where, step.scope
        )
        carried, collected = loop.run(carry)
        return [*carried, *collected]
    # One iteration for each example, or for several: each sees its own rows alone if nothing is
    # carried.
    own = all(s.kind in (Kind.SAME, Kind.EXAMPLES) and s.degree in (0, None) for s in rows)
    if num_carry or not own or not all(s.is_data_free for s in consts):
        return [unknown(f"{step.where} runs over the examples of the micro-batch")] * len(
            step.one.outvars
        )
    results = walk(
        step.one.params["jaxpr"],
        step.two.params["jaxpr"],
        [*consts, *[SAME] * len(rows)],
        step.scope,
    )
    return [State(Kind.EXAMPLES, s.degree) if s.is_data_free else s for s in results]


def _while(step: Step, states: Sequence[State]) -> list[State]:
    one, two = step.one.params, step.two.params
    num_cond, num_body = one["cond_nconsts"], one["body_nconsts"]
    cond_consts, consts, carry = (
        states[:num_cond],
        states[num_cond : num_cond + num_body],
        states[num_cond + num_body :],
    )
    loop = _Loop(one["body_jaxpr"], two["body_jaxpr"], consts, (), step.where, step.scope)
    carried, _ = loop.run(carry)
    (stop,) = walk(one["cond_jaxpr"], two["cond_jaxpr"], [*cond_consts, *carried], step.scope)
    if stop.is_fixed:
        return carried
    return [_chosen_by(stop, s, f"the number of iterations of {step.where}") for s in carried]


def _cond(step: Step, states: Sequence[State]) -> list[State]:
    index, *arguments = states
    branches = [
        walk(one, two, arguments, step.scope)
        for one, two in zip(step.one.params["branches"], step.two.params["branches"], strict=True)
    ]
    results = list(branches[0])
    for other in branches[1:]:
        results = [join(a, b, step.where) for a, b in zip(results, other, strict=True)]
    return (
        results
        if index.is_fixed
        else [_chosen_by(index, s, f"the branch of {step.where}") for s in results]
    )


def _chosen_by(choice: State, result: State, what: str) -> State:
    if result.kind in (Kind.BROKEN, Kind.UNKNOWN):
        return result
    if choice.is_aggregated or choice.kind is Kind.BROKEN:
        return broken(f"{what} depends on the data of the whole micro-batch")
    return unknown(f"{what} depends on the data or the batch size")


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
