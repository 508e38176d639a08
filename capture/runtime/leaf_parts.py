"""Optimizers of parameters that are held in parts: the layers of a leaf that a scan stacks, one by
one, in a stage; the replicated and the sharded rows of a leaf, in a sharding plan.

A transformation is then given another tree than the model's own. That changes nothing where every
element is updated by itself, in the same way in both trees. It does where the transformation asks
for the leaf as a whole (a norm per leaf, Muon's orthogonal matrix, the rows of Adafactor) or for
its number of dimensions (a decay of matrices alone): the training would be another one, and is
refused. Branches of a ``lax.cond`` are looked into (``optax.MultiSteps``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jax.extend.core import JaxprEqn

from capture.errors import WorkloadError
from capture.model.graph import content_hash
from capture.runtime.optimizer import TracedOptimizer, owner_of_result
from capture.tracing.jaxprs import is_variable, primitives, variables
from capture.tracing.model import TracedModel

#: Operations whose results follow element by element from operands of one shape, or scalars.
_ELEMENTWISE = primitives("""
    abs add add_any and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2
    expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square
    stop_gradient sub tanh xor""")


def traced_optimizer(
    optimizer: object, traced: TracedModel, unread: Collection[int] = ()
) -> TracedOptimizer:
    """Return the update of a traced model, over parameters as stages hold them.

    Args:
        unread: Parameters of the model's layer graph that the loss does not read.

    Raises:
        WorkloadError: ``optimizer-stacked`` if it would train the layers of a stacked leaf in
            another way than the leaf.
    """
    layers = TracedOptimizer(optimizer, traced.split_struct, unread)
    counts = {leaf: len(traced.rows[leaf]) for leaf in traced.stacked}
    for leaf, name in _updated_otherwise(optimizer, traced.params_struct, layers, counts):
        raise WorkloadError.of(
            f"the optimizer updates {name}, which a scan stacks over {counts[leaf]} layers, in "
            "another way than the layers one by one, as stages hold them: it asks for a whole leaf "
            "(a norm, a matrix) or for its number of dimensions. Use one that updates each element "
            "by itself, or keep the parameters of the layers in a list and apply the layers in a "
            "Python loop.",
            "optimizer-stacked",
        )
    return layers


def check_rows(optimizer: object, whole: object, parts: object, counts: Mapping[int, int]) -> None:
    """Refuse an optimizer that would train the rows of a leaf in another way than the leaf.

    Args:
        whole: Shapes of the parameters.
        parts: The same tree, where leaves are held in parts with these in their place.
        counts: Parts of each such leaf.

    Raises:
        WorkloadError: ``optimizer-rows``.
    """
    if not counts:
        return
    rows = TracedOptimizer(optimizer, parts)
    for _, name in _updated_otherwise(optimizer, whole, rows, counts):
        raise WorkloadError.of(
            f"the optimizer updates {name} in another way than the rows of which every device has "
            "all and those that are sharded, which the plan keeps apart: it asks for a whole leaf "
            "(a norm, a matrix). Use one that updates each element by itself, or plan without "
            "--partly.",
            "optimizer-rows",
        )


def _updated_otherwise(
    optimizer: object, whole_struct: object, held: TracedOptimizer, counts: Mapping[int, int]
) -> Iterator[tuple[int, str]]:
    """Yield the leaves that are updated in another way than their parts, and what people call them;
    ``counts`` are those of leaves that are held in parts."""
    if not counts:
        return
    whole, part = TracedOptimizer(optimizer, whole_struct), 0
    of_whole, of_parts = _Updates(whole), _Updates(held)
    for leaf, struct in enumerate(whole.params):
        stop = part + counts.get(leaf, 1)
        parts = [p for p in range(part, stop) if p not in held.unread]
        part = stop
        wanted = of_whole.key(leaf) if leaf in counts and parts else None
        if leaf in counts and any(wanted is None or of_parts.key(p) != wanted for p in parts):
            yield leaf, f"{whole.param_names[leaf]} of shape {struct.shape}"


class _Updates:
    """The operations of a traced update, which say what it computes of each parameter."""

    def __init__(self, optimizer: TracedOptimizer):
        self._program, self._num_params = optimizer.update.opened, len(optimizer.params)
        self._params_of_state = optimizer.owners_of_state(self._program)
        self._owners = self._program.propagate(
            optimizer.sources_of(self._params_of_state, self._program), owner_of_result
        )
        found = optimizer.groups_of(self._program)
        groups, self._state = zip(found, ("parameter", "state", "gradient"), strict=True), found[1]
        self._roles = {v: role for own, role in groups for v in own}
        #: State that is not among it changes no training, such as what ``optax.zero_nans`` found.
        self._read = {v for each in self._program.jaxpr.eqns for v in variables(each.invars)}
        pairs = zip(self._program.outputs, self._program.inputs, strict=False)
        self._read |= {*variables(new for new, old in pairs if new is not old)}

    def key(self, param: int) -> str | None:
        """Return a hash, shapes aside, of the operations that make the new parameter and its state
        of itself, its gradient and scalars. None if one of them is not element by element, or reads
        another parameter."""
        mine = frozenset([param])
        of_state = zip(self._state, self._params_of_state, strict=True)
        states = [k for k, (v, of) in enumerate(of_state) if of == mine and v in self._read]
        outputs = self._program.outputs
        wanted = [outputs[param], *(outputs[self._num_params + k] for k in states)]
        made = outputs[param]
        if is_variable(made) and not self._owners.get(made, mine) <= mine:
            return None
        keys: dict[Any, str] = {}

        def key_of(atom: Any) -> str:
            if not is_variable(atom):
                return str(atom.val)
            role = self._roles.get(atom, "shared") if self._owners.get(atom) == mine else "shared"
            return keys.get(atom, role)

        for equation in self._program.needed(wanted, _Shared(self._owners, mine)):
            name, operands = equation.primitive.name, list(map(key_of, equation.invars))
            owned = any(self._owners.get(v) == mine for v in equation.outvars)
            if owned and name not in _ELEMENTWISE:
                return None
            is_fill = name == "broadcast_in_dim"
            made = operands[0] if is_fill else content_hash([name, _settings(equation), *operands])
            keys |= dict.fromkeys(equation.outvars, made)
        return content_hash(list(map(key_of, wanted)))


class _Shared:
    """The values of an update that are not made of one parameter, nor scalars of none."""

    def __init__(self, owners: Mapping[object, frozenset[int]], mine: frozenset[int]):
        self._owners, self._mine = owners, mine

    def __contains__(self, value: object) -> bool:
        owners = self._owners.get(value, frozenset())
        return bool(owners) and owners != self._mine


def _settings(equation: JaxprEqn) -> str:
    """Return the parameters of an operation that are not shapes."""
    return str(
        {
            name: str(equation.params[name])
            for name in ("new_dtype", "y", "exponent_bits", "mantissa_bits")
            if name in equation.params
        }
    )
