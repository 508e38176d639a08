"""Which dimension of every parameter is cut over the mesh axis ``model``, for any layer function.

The answer is either worked out by one walk over the traced function (``capture.partition.walk``:
Megatron-LM's columns and rows, experts, alternating convolutions, without a rule per layer type),
or the largest dimension, or what the user says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
from jax.sharding import PartitionSpec

from capture.errors import PlanError, Violation
from capture.partition.walk import MIN_SHARDED_SIZE, cut_parameters

DATA_AXIS, MODEL_AXIS = "data", "model"

Rule = Literal["auto", "largest"] | Mapping[str, PartitionSpec]


def parameter_specs(
    fn: Callable[[list[object], list[object]], object],
    params: Sequence[jax.ShapeDtypeStruct],
    args: Sequence[jax.ShapeDtypeStruct],
    degree: int,
    rule: Rule = "auto",
    names: Sequence[str] | None = None,
) -> list[PartitionSpec]:
    """Decide how to shard the parameters of a function over the mesh axis ``model``.

    **Assumes** the arguments are whole along ``model``; XLA's propagation does the rest, with
    nothing annotated inside ``fn``.

    Args:
        fn: ``fn(params, args)``; traced, never run.
        params: Shapes of the parameters.
        args: Shapes of the other inputs.
        degree: Devices along ``model``.
        rule: ``"auto"``, the walk; ``"largest"``, the largest divisible dimension of every
            parameter of at least ``MIN_SHARDED_SIZE`` elements (more traffic, less memory); or
            specs by regular expression, searched in the names of the parameters: the first match
            decides (``PartitionSpec()`` keeps it whole), and the walk decides the others, following
            these.
        names: The parameters' paths, in the same order; needed for specs by name.

    Returns:
        One spec per parameter; every dimension it cuts divides by ``degree``.

    Raises:
        PlanError: ``tensor-parallel-rule`` if a spec by name does not fit its parameter or has no
            names to search, or the rule is unknown.

    Example:
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")
        >>> mlp = lambda p, a: jax.nn.relu(a[0] @ p[0] + p[1]) @ p[2]
        >>> params = [shape(64, 256), shape(256), shape(256, 64)]
        >>> specs = parameter_specs(mlp, params, [shape(8, 64)], degree=4)
        >>> [tuple(spec) for spec in specs]
        [(None, 'model'), ('model',), ('model', None)]

    Source: Shoeybi et al., Megatron-LM, section 3 (columns and rows); Lepikhin et al., GShard,
    section 3 (experts).
    """
    if isinstance(rule, str) and rule not in ("auto", "largest"):
        message = (
            f"tensor-parallel rule {rule!r} is unknown; use 'auto', 'largest', or specs by "
            "regular expression."
        )
        raise PlanError.of(message, "tensor-parallel-rule")
    if degree == 1:
        return [PartitionSpec()] * len(params)
    shapes = [tuple(p.shape) for p in params]
    if rule == "largest":
        return [_spec(shape, _largest_dim(shape, degree)) for shape in shapes]
    fixed = {} if isinstance(rule, str) else _specs_by_name(rule, names, shapes, degree)
    closed = jax.make_jaxpr(fn)(list(params), list(args))
    cuts = cut_parameters(
        closed.jaxpr, shapes, degree, {index: cut_dim(spec) for index, spec in fixed.items()}
    )
    return [fixed.get(index, _spec(shape, cuts.get(index))) for index, shape in enumerate(shapes)]


def _spec(shape: tuple[int, ...], dim: int | None) -> PartitionSpec:
    return (
        PartitionSpec()
        if dim is None
        else PartitionSpec(*(MODEL_AXIS if d == dim else None for d in range(len(shape))))
    )


def cut_dim(spec: PartitionSpec) -> int | None:
    """Return the dimension that a spec of one axis names, or None."""
    return next((dim for dim, entry in enumerate(spec) if entry is not None), None)


def _largest_dim(shape: tuple[int, ...], degree: int) -> int | None:
    dims = [dim for dim, size in enumerate(shape) if size % degree == 0]
    return (
        max(dims, key=lambda dim: shape[dim], default=None)
        if math.prod(shape) >= MIN_SHARDED_SIZE
        else None
    )


def _specs_by_name(
    rule: Mapping[str, PartitionSpec],
    names: Sequence[str] | None,
    shapes: Sequence[tuple[int, ...]],
    degree: int,
) -> dict[int, PartitionSpec]:
    """Return the specs that the user gave, by parameter, after checking that they fit."""
    if names is None or len(names) != len(shapes):
        given = "no names" if names is None else f"{len(names)} names"
        message = (
            f"specs by name came with {given} for {len(shapes)} parameters; give one name per "
            "parameter."
        )
        raise PlanError.of(message, "tensor-parallel-rule")
    fixed: dict[int, PartitionSpec] = {}
    violations = []
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        spec = next((spec for pattern, spec in rule.items() if re.search(pattern, name)), None)
        if spec is None:
            continue
        fixed[index] = spec
        cut = [dim for dim, entry in enumerate(spec) if entry is not None]
        entries = {spec[dim] for dim in cut}
        if (
            len(spec) > len(shape)
            or len(cut) > 1
            or not entries <= {MODEL_AXIS}
            or any(shape[dim] % degree for dim in cut)
        ):
            violations.append(
                Violation(
                    f"{spec} does not fit parameter {name!r} of shape {shape} at "
                    f"tensor_parallel={degree}; a spec names {MODEL_AXIS!r} "
                    "at most once, in a dimension that the degree divides.",
                    "tensor-parallel-rule",
                )
            )
    PlanError.check(violations)
    return fixed
