"""Optimizers of parameters that a scan stacks over layers.

A stage holds the layers of such a leaf one by one, so a transformation is given another tree than
the model's own. That changes nothing where every element is updated by itself, in the same way in
both trees. It does where the transformation asks for the leaf as a whole (a norm per leaf, Muon's
orthogonal matrix, the rows of Adafactor) or for its number of dimensions (a decay of matrices
alone): the training would be another one, and is refused. What one ``lax.cond`` does to all
parameters at once (``optax.apply_if_finite``) is not looked into.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax.extend import core as jex_core

from capture.errors import WorkloadError
from capture.model.graph import content_hash
from capture.runtime.optimizer import TracedOptimizer, owner_of_result
from capture.tracing.model import TracedModel

#: Operations whose results follow element by element from operands of one shape, or scalars.
_ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        "abs add add_any and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp "
        "exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
        "nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square "
        "stop_gradient sub tanh xor",
    )
)


def traced_optimizer(
    optimizer: Any, traced: TracedModel, unread: tuple[int, ...] = ()
) -> TracedOptimizer:
    """The update of a traced model, over parameters as stages hold them.

    Args:
        optimizer: An optax transformation.
        traced: The model.
        unread: Parameters of its layer graph that the loss does not read.

    Raises:
        WorkloadError: ``optimizer-stacked`` if it would train the layers of a stacked leaf in
            another way than the leaf.
    """
    split = TracedOptimizer(optimizer, traced.split_struct, unread)
    if traced.stacked:
        _check(TracedOptimizer(optimizer, traced.params_struct), split, traced.stacked)
    return split


def _check(whole: TracedOptimizer, split: TracedOptimizer, stacked: Mapping[int, int]) -> None:
    of_whole, of_split, part = _Updates(whole), _Updates(split), 0
    for leaf, struct in enumerate(whole.params):
        num_parts = struct.shape[stacked[leaf]] if leaf in stacked else 1
        parts = [p for p in range(part, part + num_parts) if p not in split.unread]
        part += num_parts
        wanted = of_whole.key(leaf) if leaf in stacked and parts else None
        if leaf in stacked and any(wanted is None or of_split.key(p) != wanted for p in parts):
            raise WorkloadError.of(
                f"the optimizer updates {whole.param_names[leaf]} of shape {struct.shape}, which a "
                f"scan stacks over {num_parts} layers, in another way than the layers one by one, "
                "as stages hold them: it asks for a whole leaf (a norm, a matrix) or for its "
                "number of dimensions. Use one that updates each element by itself, or keep the "
                "parameters of the layers in a list and apply the layers in a Python loop.",
                "optimizer-stacked",
            )


class _Updates:
    """What a traced update computes of each parameter."""

    def __init__(self, optimizer: TracedOptimizer):
        self._program, self._num_params = optimizer.update, len(optimizer.params)
        self._params_of_state = optimizer.params_of_state
        self._owners = self._program.propagate(
            optimizer.sources_of(optimizer.params_of_state), owner_of_result
        )
        roles = ["parameter"] * len(optimizer.params) + ["state"] * len(optimizer.state)
        roles += ["gradient"] * len(optimizer.params)
        self._roles = dict(zip(self._program.inputs, roles, strict=True))

    def key(self, param: int) -> str | None:
        """A hash of the operations that make the new parameter and its state of itself, its
        gradient and scalars, shapes aside; None if one of them is not element by element."""
        mine = frozenset([param])
        states = [k for k, owners in enumerate(self._params_of_state) if owners == mine]
        outputs = self._program.outputs
        wanted = [outputs[param], *(outputs[self._num_params + k] for k in states)]
        keys: dict[Any, str] = {}

        def key_of(atom: Any) -> str:
            if isinstance(atom, jex_core.Literal):
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

    def __init__(self, owners: Mapping[Any, frozenset[int]], mine: frozenset[int]):
        self._owners, self._mine = owners, mine

    def __contains__(self, value: Any) -> bool:
        owners = self._owners.get(value, frozenset())
        return bool(owners) and owners != self._mine


def _settings(equation: Any) -> str:
    """The parameters of an operation that are not shapes."""
    return str(
        {
            name: str(equation.params[name])
            for name in ("new_dtype", "y", "exponent_bits", "mantissa_bits")
            if name in equation.params
        }
    )
