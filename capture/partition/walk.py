"""One walk over a jaxpr that decides which dimension of every parameter is cut over the devices of
a tensor-parallel group.

There is no rule per layer type. The traced function is walked once from inputs to outputs,
remembering which dimension of each value is sharded; the first product that meets a parameter
decides how that parameter is cut:

    input whole                    cut an output dimension; the result is sharded there
                                   (column; Megatron-LM, section 3)
    input cut where it contracts   cut the same dimension of the parameter; the result is summed
                                   (row)
    products in a batch            cut the batch dimension, such as the experts of a GShard layer
                                   (expert parallel)
    element-wise, such as a bias follow the value that it meets
    table that is looked up        cut the vocabulary (see ``_Walk._gather``)

A column that leads nowhere is undone: if XLA would have to gather the whole activation (a reshape
across shards, routing by top-k), or sum scores over it (heads that the degree does not divide), the
parameter stays whole and the walk starts again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from capture.partition.dim_flow import dim_flow, loss_is_cheap
from capture.tracing import split_rule
from capture.tracing.jaxprs import BODIES, is_variable, opened, scan_arity, several

#: Elements below which a parameter is not worth a collective of its own; it may still follow
#: another.
MIN_SHARDED_SIZE = 1024
#: An operation that has a rule, but none that is known here, is walked as what it stands for.
_BODIES = BODIES | {split_rule.PRIMITIVE: "call"}


def cut_parameters(
    jaxpr: Jaxpr, shapes: Sequence[tuple[int, ...]], degree: int, fixed: Mapping[int, int | None]
) -> dict[int, int | None]:
    """Decide along which dimension each parameter of a program is cut.

    Args:
        jaxpr: The program; its first inputs are the parameters, the others are whole.
        shapes: Shapes of the parameters, in the order of the inputs.
        degree: Devices of the group.
        fixed: Decisions that the walk must follow: a dimension, or None to stay whole.

    Returns:
        The dimension of each parameter that was decided; the others stay whole. Every dimension
        divides by ``degree``.

    Source: Shoeybi et al., Megatron-LM, section 3 (columns and rows); Lepikhin et al., GShard,
    section 3 (experts).
    """
    whole: set[int] = set()
    while True:
        walk = _Walk(shapes, degree, dict(fixed), frozenset(whole))
        walk.run(
            jaxpr,
            [
                _Value(param=index, param_dims=tuple(range(len(shape))), static=True)
                for index, shape in enumerate(shapes)
            ],
        )
        if not walk.undone:
            walk.place_tables()
            return walk.cuts
        # Each round adds one at least: only parameters outside it start a column.
        whole |= walk.undone


def followed_dims(
    jaxpr: Jaxpr, inputs: Sequence[int | None], degree: int, axis: str | None = None
) -> dict[Any, int | None]:
    """Return the dimension along which every value of a program is split, from those of its inputs.

    Args:
        jaxpr: The program.
        inputs: Dimension of each, or None.
        degree: Parts.
        axis: Name of a mesh axis, as constraints in the program name it; None follows none.
    """
    walk = _Walk((), degree, {}, frozenset(), axis)
    values = walk.follow(jaxpr, [_Value(dim=dim) for dim in inputs])
    return {v: value.dim for v, value in values.items()}


@dataclass(frozen=True)
class _Value:
    """The facts that the walk knows of a variable.

    Attributes:
        dim: The sharded dimension.
        column: The parameter whose column cut made it so; that cut may be undone.
        lost: The parameter whose column cut was lost on the way, at the price of gathering the
            activation.
        param: The undecided parameter that it is a view of (transposed, cast, broadcast, ...).
        param_dims: The dimension of that parameter, for each dimension of the value.
        static: Made of parameters and constants only.
    """

    dim: int | None = None
    column: int | None = None
    lost: int | None = None
    param: int | None = None
    param_dims: tuple[int | None, ...] = ()
    static: bool = False

    def as_activation(self) -> _Value:
        return replace(self, param=None, param_dims=())


_STATIC = _Value(static=True)
_WHOLE = _Value()


class _Walk:
    """The state of one walk over a jaxpr.

    Attributes:
        cuts: The decision per parameter: its sharded dimension, or None to stay whole. Who has none
            yet is undecided.
        undone: Parameters whose column cut turned out to lead nowhere.

    Args:
        axis: See ``followed_dims``.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        degree: int,
        cuts: dict[int, int | None],
        whole: frozenset[int],
        axis: str | None = None,
    ):
        self._axis = axis
        self.shapes, self.degree, self.cuts, self.whole = shapes, degree, cuts, whole
        self.undone: set[int] = set()
        self._tables: dict[
            int, tuple[int, ...]
        ] = {}  # looked up only: dimensions to cut, best first

    def run(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Follow the inputs (parameters first; what is missing is whole) to the outputs."""
        env = self.follow(jaxpr, inputs)
        return [self._read(atom, env) for atom in jaxpr.outvars]

    def _read(self, atom: object, env: Mapping[object, _Value]) -> _Value:
        return self._decided(env.get(atom, _WHOLE)) if is_variable(atom) else _STATIC

    def follow(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> dict[Any, _Value]:
        """Return what is known of every variable, from what is known of the inputs."""
        env: dict[Any, _Value] = dict.fromkeys(jaxpr.constvars, _STATIC)
        env.update(zip(jaxpr.invars, inputs, strict=False))

        for eqn in jaxpr.eqns:
            env.update(
                zip(
                    eqn.outvars,
                    self._equation(eqn, [self._read(atom, env) for atom in eqn.invars]),
                    strict=True,
                )
            )
        return env

    def place_tables(self) -> None:
        """Decide the tables that were only ever looked up."""
        for param, dims in self._tables.items():
            divisible = [dim for dim in dims if self.shapes[param][dim] % self.degree == 0]
            if divisible and self._may_start(param):
                self.cuts.setdefault(param, divisible[0])

    def _decided(self, value: _Value) -> _Value:
        """Return a value as a sharded one if the parameter that it views was decided meanwhile."""
        if value.param is None or value.param not in self.cuts:
            return value
        cut = self.cuts[value.param]
        return _Value(
            dim=value.param_dims.index(cut)
            if cut is not None and cut in value.param_dims
            else None,
            static=True,
        )

    def _may_start(self, param: int) -> bool:
        return (
            param not in self.whole
            and param not in self.cuts
            and math.prod(self.shapes[param]) >= MIN_SHARDED_SIZE
        )

    def _cut(self, value: _Value, dim: int) -> bool:
        """Decide a parameter at a dimension of its view, if it divides."""
        param_dim = value.param_dims[dim]
        if (
            value.param is None
            or value.param in self.cuts
            or param_dim is None
            or self.shapes[value.param][param_dim] % self.degree
        ):
            return False
        self.cuts[value.param] = param_dim
        return True

    def _undo(self, *params: int | None) -> None:
        self.undone |= {param for param in params if param is not None}

    def _equation(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name == "dot_general":
            return [self._dot(eqn, inputs)]
        if name == "conv_general_dilated":
            return [self._convolution(eqn, inputs)]
        if name == split_rule.PRIMITIVE and (rule := split_rule.split_rule(eqn)) is not None:
            return _by_rule(rule, inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "while":
            skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            return self._loop(opened(eqn.params["body_jaxpr"]), inputs[skip:], consts)
        if name == "cond":
            results = [self.run(opened(branch), inputs[1:]) for branch in eqn.params["branches"]]
            return [value.as_activation() for value in results[0]]
        if name in _BODIES:
            return self.run(opened(eqn.params[_BODIES[name]]), inputs)
        if name == "gather":
            self._gather(eqn, inputs)
        if name == "sharding_constraint" and self._axis is not None:
            return [self._constrained(eqn, inputs[0])]
        return [self._follow(eqn, inputs)] * len(eqn.outvars)

    def _constrained(self, eqn: Any, value: _Value) -> _Value:
        """Return a value as a sharding constraint leaves it; a dimension that the constraint leaves
        open stays as it comes."""
        spec = getattr(eqn.params["sharding"], "spec", ())
        named = (dim for dim, entry in enumerate(spec) if _names(entry, self._axis))
        kept = value.dim if value.dim in eqn.params["unconstrained_dims"] else None
        return replace(value.as_activation(), dim=next(named, kept))

    def _dot(self, eqn: Any, inputs: list[_Value]) -> _Value:
        """Decide the parameter of a product by where the other operand is cut. Contracted: the
        parameter becomes a row and the result is whole after a sum; in a batch dimension: experts;
        nowhere: a column may begin here. A product of two activations decides nothing, but where it
        would sum scores over the devices, the column that led to it is taken back."""
        (contract_lhs, contract_rhs), (batch_lhs, batch_rhs) = eqn.params["dimension_numbers"]
        contract, batch = (contract_lhs, contract_rhs), (batch_lhs, batch_rhs)
        self._undo(*(value.lost for value in inputs))
        result = _Value(static=all(value.static for value in inputs))
        weights = [side for side in (0, 1) if inputs[side].param is not None]
        if len(weights) == 1:
            side = weights[0]
            weight, other = inputs[side], inputs[1 - side]
            self._keep_table_whole_on_features(weight)
            if other.dim in contract[1 - side]:
                self._cut(weight, contract[side][contract[1 - side].index(other.dim)])
                return result
            if other.dim in batch[1 - side]:
                dim = batch[1 - side].index(other.dim)
                self._cut(weight, batch[side][dim])
                return replace(result, dim=dim)  # experts by now: their sum is due anyway
            if other.dim is None and weight.param is not None and self._may_start(weight.param):
                shape = eqn.invars[side].aval.shape
                given = (*contract[side], *batch[side])
                free = [dim for dim in range(len(shape)) if dim not in given]
                for dim in (*batch[side], *free):
                    if shape[dim] % self.degree == 0 and self._cut(weight, dim):
                        column = None if dim in batch[side] else weight.param
                        return replace(result, dim=product_dim(eqn, side, dim), column=column)
        for side in (0, 1):
            value, other = inputs[side], inputs[1 - side]
            if value.dim is None:
                continue
            if value.dim in contract[side]:
                # Scores summed over the devices: worse than not sharding their factors.
                if not other.static:
                    self._undo(value.column)
            elif result.dim is None:
                result = replace(result, dim=product_dim(eqn, side, value.dim), column=value.column)
        return result

    def _keep_table_whole_on_features(self, weight: _Value) -> None:
        """Rule out cuts by features for a table that a head is tied to: the head contracts them, so
        whole logits would be summed over the devices."""
        if weight.param in self._tables:
            self._tables[weight.param] = self._tables[weight.param][:1]

    def _convolution(self, eqn: JaxprEqn, inputs: list[_Value]) -> _Value:
        """Follow a convolution like a product over features: an output channel is a column, an
        input channel a row, a depthwise filter follows."""
        numbers, image, kernel = eqn.params["dimension_numbers"], *inputs
        image_batch, image_features = numbers.lhs_spec[:2]
        out_features, in_features = numbers.rhs_spec[:2]
        result_batch, result_features = numbers.out_spec[:2]
        self._undo(image.lost)
        result = _Value(static=image.static and kernel.static)
        grouped = eqn.params["feature_group_count"]
        if image.dim == image_batch:
            return replace(result, dim=result_batch, column=image.column)
        if image.dim == image_features:
            if grouped == 1:
                if kernel.param is not None:
                    self._cut(kernel, in_features)
                return result
            if grouped % self.degree:
                self._undo(image.column)
                return result
            if kernel.param is not None:
                self._cut(kernel, out_features)
            return replace(result, dim=result_features, column=image.column)
        if kernel.param is None:
            return replace(result, dim=result_features) if kernel.dim == out_features else result
        may_start = self._may_start(kernel.param) and (grouped == 1 or grouped % self.degree == 0)
        if image.dim is None and may_start and self._cut(kernel, out_features):
            return replace(result, dim=result_features, column=kernel.param)
        return result

    def _gather(self, eqn: JaxprEqn, inputs: list[_Value]) -> None:
        """Note a table that is looked up by values of the data: it is cut by vocabulary, as in
        Megatron.

        Measured on 4 devices (V=256, D=64, 256 ids; the same on jax 0.10.2 and 0.12). Alone in a
        stage, a table cut by features would cost an all-gather of the rows, half the traffic of the
        all-reduce of a vocabulary cut. But XLA then carries the cut into the residual stream: with
        one GPT block behind it, 12 all-reduces (394 kB) and 8 all-gathers (264 kB), against 5
        all-reduces (448 kB) for the vocabulary. A tied head decides it: 10 all-reduces (516 kB),
        logits and softmax sharded, against 13 (650 kB), 8 all-gathers and 1.4 times the
        temporaries. Features remain for a vocabulary that does not divide.
        """
        table, indices = inputs[0], inputs[1]
        self._undo(indices.lost)
        if table.param is None or indices.static:
            return
        looked_up = eqn.params["dimension_numbers"].start_index_map
        dims = sorted(range(len(table.param_dims)), key=lambda dim: dim not in looked_up)
        self._tables.setdefault(
            table.param, tuple(d for dim in dims if (d := table.param_dims[dim]) is not None)
        )

    def _scan(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        """Follow the body of a scan, once; what is stacked over the iterations loses its first
        dimension inside and has it back outside."""
        body = opened(eqn.params["jaxpr"])
        num_consts, num_carry = scan_arity(eqn)
        first_stacked = num_consts + num_carry
        stacked = [_shifted(value, -1) for value in inputs[first_stacked:]]
        results = self._loop(body, [*inputs[:first_stacked], *stacked], num_consts, num_carry)
        return [*results[:num_carry], *(_shifted(value, 1) for value in results[num_carry:])]

    def _loop(
        self, body: Jaxpr, inputs: list[_Value], num_consts: int, num_carry: int | None = None
    ) -> list[_Value]:
        """Follow the body of a loop; a carry stays sharded only if it leaves the body as it
        came."""
        stop = len(inputs) if num_carry is None else num_consts + num_carry
        carries = [value.as_activation() for value in inputs[num_consts:stop]]
        results = [
            value.as_activation()
            for value in self.run(body, [*inputs[:num_consts], *carries, *inputs[stop:]])
        ]
        kept = [
            out if out.dim == carry.dim else replace(out, dim=None)
            for carry, out in zip(carries, results, strict=False)
        ]
        return [*kept, *results[len(carries) :]]

    def _follow(self, eqn: JaxprEqn, inputs: list[_Value]) -> _Value:
        """Follow any other equation: the result is sharded where an operand is, and undecided
        parameters follow.

        A cut that the operation loses is no error here: it is noted, and taken back only where a
        product would need it. The result of an operation on one parameter alone is a view of it,
        so that a reshaped or transposed parameter can still be cut later.
        """
        result = _Value(
            static=all(value.static for value in inputs),
            lost=next((v.lost for v in inputs if v.lost is not None), None),
        )
        followed = [
            (value, dim_flow(eqn, operand, self.degree))
            for operand, value in enumerate(inputs)
            if value.dim is not None or value.param is not None
        ]
        for value, flow in followed:
            if value.dim is None:
                continue
            if flow[value.dim] is None:
                if not loss_is_cheap(eqn):
                    result = replace(result, lost=value.column)
            elif result.dim is None:
                result = replace(result, dim=flow[value.dim], column=value.column)
        views = [(value, flow) for value, flow in followed if value.param is not None]
        if result.dim is not None:
            for value, flow in views:
                if result.dim in flow:
                    self._cut(value, flow.index(result.dim))
        elif result.static and len({value.param for value, _ in views}) == 1:
            value, flow = max(views, key=lambda view: sum(target is not None for target in view[1]))
            dims = [
                next((value.param_dims[d] for d, target in enumerate(flow) if target == dim), None)
                for dim in range(_ndim(eqn.outvars[0]))
            ]
            return replace(result, param=value.param, param_dims=tuple(dims))
        return result


def _by_rule(rule: split_rule.SplitRule, inputs: Sequence[_Value]) -> list[_Value]:
    """Return the results of an operation that says itself what may be split."""
    columns: dict[str, int | None] = {}
    lost = next((value.lost for value in inputs if value.lost is not None), None)
    for value, factors in zip(inputs, rule.operands, strict=True):
        if value.dim is not None and (factor := factors[value.dim]) is not None:
            columns.setdefault(factor, value.column)
        elif value.dim is not None:
            lost = value.column
    results = []
    for factors in rule.results:
        dim = next((dim for dim, factor in enumerate(factors) if factor in columns), None)
        results.append(
            _Value(lost=lost)
            if dim is None
            else _Value(dim=dim, column=columns[str(factors[dim])], lost=lost)
        )
    return results


def _names(entry: object, axis: str | None) -> bool:
    return axis in several(entry)


def _ndim(atom: Any) -> int:
    return len(atom.aval.shape)


def product_dim(eqn: JaxprEqn, side: int, dim: int) -> int:
    """Return where an operand's dimension that is not contracted stands in the result of a product,
    whose dimensions are: batch, left, right."""
    (contract, batch) = ((dims[0], dims[1]) for dims in eqn.params["dimension_numbers"])
    if dim in batch[side]:
        return tuple(batch[side]).index(dim)
    free = [
        [d for d in range(_ndim(eqn.invars[s])) if d not in contract[s] and d not in batch[s]]
        for s in (0, 1)
    ]
    return len(batch[side]) + (len(free[0]) if side == 1 else 0) + free[side].index(dim)


def _shifted(value: _Value, by: int) -> _Value:
    """Return the value with its first dimension taken away (-1) or a new one put before it (1)."""
    dim = None if value.dim is None or value.dim + by < 0 else value.dim + by
    dims = value.param_dims[1:] if by < 0 else (None, *value.param_dims)
    return replace(value, dim=dim, param_dims=dims if value.param is not None else ())
