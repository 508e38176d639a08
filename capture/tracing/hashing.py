"""Content hashes of layers: what they compute, on what shapes, and nothing about where or when they
were traced."""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.memo import memo
from capture.tracing.jaxprs import (
    CUSTOM_RULES,
    consts_of,
    is_body,
    is_variable,
    opened,
    primitives,
    sub_jaxprs,
)
from capture.tracing.keys import words
from capture.tracing.layers import LayerOps
from capture.tracing.program import LossProgram, Op, RematRegion, is_value
from capture.tracing.split_rule import PRIMITIVE

#: Parameters of equations that say nothing about the result, or that hold the functions of a custom
#: rule (hashed by what they trace to).
_IGNORED = primitives("""
    name name_and_src_info debug_info ctx_mesh fwd_jaxpr_thunk jvp_jaxpr_fun bwd out_trees
    inline keep_unused""")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_NO_PROGRAM = LossProgram((), (), {}, (), (), 0, (), ())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def jaxpr_key(closed: object) -> str:
    """Return a hash that is equal for closed jaxprs that compute the same, constants too."""
    return ProgramHasher(_NO_PROGRAM).body(closed)


def function_key(function: object) -> str:
    """Return a hash of a function: of its code and what it closes over."""
    return digest(ProgramHasher(_NO_PROGRAM).text(function))


class ProgramHasher:
    """The hasher of the layers of one program; it remembers the text of bodies that occur again."""

    def __init__(self, program: LossProgram):
        self._program = program
        self._known: dict[
            tuple[int, bool], tuple[Any, str]
        ] = {}  # by id of an object, which is kept so that the id stays its own
        self._in_rule = False
        self._open_functions: set[int] = set()

    def layer_key(self, layer: LayerOps) -> str:
        """Return a hash that is equal for layers that run the same program on other parameters.

        Leaves and inputs are named by their position in the layer's lists, which is the order of
        its arguments.
        """
        program = self._program
        names: dict[int, str] = {}
        for prefix, values in (("p", layer.params), ("i", layer.inputs), ("b", layer.batch)):
            names.update({v: f"{prefix}{n}" for n, v in enumerate(values)})
        lines = [
            f"{name}:{self._type(v)}:{v in program.differentiable}" for v, name in names.items()
        ]
        names.update({v: self.const(v) for v in layer.consts})
        regions: dict[Any, str] = {}
        for op in layer.ops:
            for region in op.regions:
                regions.setdefault(region, f"r{len(regions)}{self.region(region)}")
            for v in op.outputs:
                names[v] = f"v{len(names)}"
            inputs = ",".join([names[v] if is_value(v) else self.literal(v) for v in op.inputs])
            outputs = ",".join([f"{names[v]}:{self._type(v)}" for v in op.outputs])
            lines.append(
                f"{outputs}={self.operation(op)}({inputs})"
                f"[{','.join([regions[r] for r in op.regions])}]"
            )
        lines += [f"out {names[v]}:{v in program.differentiable}" for v in layer.outputs]
        return digest("\n".join(lines))

    @memo
    def const(self, value: int) -> str:
        """Return a text of a constant of the program, by content."""
        return _array(self._program.consts[value])

    def literal(self, atom: Any) -> str:
        """Return a text of an operand that is a literal, by content."""
        return _array(atom.val)

    def region(self, region: RematRegion) -> str:
        """Return a text of the policy and options of a remat region."""
        return f"{self.text(region.policy)}{region.prevent_cse}"

    @memo  # many layers, and slices of layers, have the same one
    def operation(self, op: Op) -> str:
        """Return a text of what an operation does, whatever it reads."""
        return self._equation(op)

    @memo
    def _type(self, value: int) -> str:
        return _type(self._program.avals[value])

    def _equation(self, equation) -> str:
        """Return a text of the primitive and parameters of an ``Op`` or of an equation."""
        name, params = equation.primitive.name, equation.params
        shown = {
            k: v for k, v in params.items() if k not in _IGNORED or (name == "name" and k == "name")
        }
        # Which has no derivative: its rules do not matter.
        in_rule, self._in_rule = self._in_rule, self._in_rule or name == PRIMITIVE
        text = f"{name}{self.text(shown)}"
        self._in_rule = in_rule
        return text + self._rule(equation.primitive, params) if name in CUSTOM_RULES else text

    def _rule(self, primitive, params: dict[str, object]) -> str:
        """Return a text of a custom derivative: what it traces to, because the functions themselves
        have only addresses to tell them apart.

        Inside a rule, custom functions (often the same one) are only evaluated, so there their
        rules do not matter.
        """
        if self._in_rule:
            return ""
        if (id(params), False) not in self._known:
            avals = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
                for v in next(sub_jaxprs(params)).invars
            ]
            text = ""
            if any(map(_is_float, avals)):
                traced = jax.make_jaxpr(_pullback(primitive, params))(*avals)
                self._in_rule = True
                text = self.text(traced)
                self._in_rule = False
            self._known[id(params), False] = params, text
        return self._known[id(params), False][1]

    def body(self, body: object) -> str:
        """Return a hash of a jaxpr, closed-over arrays included."""
        jaxpr, consts = opened(body), consts_of(body)
        names = {
            v: f"a{n}:{_type(v.aval)}" for n, v in enumerate((*jaxpr.constvars, *jaxpr.invars))
        }
        lines = [" ".join(names.values()), *map(_array, consts)]

        def read(atom) -> str:
            return names[atom] if is_variable(atom) else _array(atom.val)

        for equation in jaxpr.eqns:
            inputs = ",".join(map(read, equation.invars))
            for v in equation.outvars:
                names[v] = f"v{len(names)}:{_type(v.aval)}"
            lines.append(
                f"{','.join(names[v] for v in equation.outvars)}"
                f"={self._equation(equation)}({inputs})"
            )
        return digest("\n".join([*lines, *map(read, jaxpr.outvars)]))

    def text(self, value: Any) -> str:
        """Return a text of a parameter, without names, addresses and variable identity."""
        match value:
            case Mapping():
                return "{" + ",".join(f"{k}:{self.text(v)}" for k, v in sorted(value.items())) + "}"
            case tuple() | list():
                return f"{type(value).__name__}(" + ",".join(map(self.text, value)) + ")"
            case set() | frozenset():
                return "{" + ",".join(sorted(map(self.text, value))) + "}"
            case np.ndarray() | jax.Array():
                return _array(value)
            case functools.partial():
                return "partial" + self.text((value.func, value.args, value.keywords))
            case types.FunctionType():
                # Its module is named by where the model's file lies.
                return value.__qualname__ + self._function(value)
            case types.CodeType():
                return self._code(value)
        if is_body(value):
            known = (id(value), self._in_rule)
            if known not in self._known:
                self._known[known] = value, self.body(value)
            return self._known[known][1]
        own = getattr(value, "__dict__", None) or {}
        # What a set prints differs from process to process (``save_only_these_names``).
        has_set = not isinstance(value, type) and any(
            isinstance(each, set | frozenset) for each in own.values()
        )
        if own and (has_set or type(value).__repr__ is object.__repr__):
            return type(value).__qualname__ + self.text(own)
        return _ADDRESS.sub("", repr(value))

    def _code(self, code: types.CodeType) -> str:
        nested = [self.text(c) for c in code.co_consts]
        return digest(repr((code.co_code, code.co_names, nested)))

    def _function(self, function: types.FunctionType) -> str:
        """Return a hash of a function's code, closure and the functions of its module that it
        names. Two lambdas of one line may differ in what they close over only."""
        if id(function) in self._open_functions:
            return "recursive"
        self._open_functions.add(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        named = [function.__globals__.get(name) for name in _names(function.__code__)]
        own = [
            f
            for f in named
            if isinstance(f, types.FunctionType) and f.__globals__ is function.__globals__
        ]
        parts = (cells, function.__defaults__ or (), function.__kwdefaults__ or {}, own)
        text = digest(self._code(function.__code__) + self.text(parts))
        self._open_functions.remove(id(function))
        return text


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _pullback(primitive, params: dict[str, object]) -> Callable[..., Any]:
    """Return a function that computes primals and gradients of a call with a custom rule."""

    def function(*arguments):
        def call(floats):
            remaining = iter(floats)
            mixed = [next(remaining) if _is_float(x) else x for x in arguments]
            result = primitive.bind(*mixed, **primitive.get_bind_params(params))
            return [x for x in (result if primitive.multiple_results else [result]) if _is_float(x)]

        primals, pull = jax.vjp(call, [x for x in arguments if _is_float(x)])
        return primals, pull(primals)

    return function


def _names(code: types.CodeType) -> list[str]:
    """Return the names of globals and attributes that a function uses, in order."""
    nested = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for names in nested for name in names)]))


def _type(aval) -> str:
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _array(array: Any) -> str:
    """Return a text of an array: dtype, shape and a hash of its content."""
    array = np.asarray(words(array))
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
