"""Layers and stages as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from capture.errors import TracingError
from capture.model.graph import Tensor
from capture.plan.choices import is_of_each_layer, num_full_layers
from capture.registered import installed
from capture.tracing.flops import KERNEL, holds
from capture.tracing.hashing import function_key
from capture.tracing.jaxprs import value_of
from capture.tracing.layers import LayerOps
from capture.tracing.program import Op
from capture.tracing.source import at_source, layer_scope, line_of
from capture.tracing.split_rule import PRIMITIVE

#: What a stage may keep of each layer for the backward pass, by the name of the mode; "none"
#: recomputes nothing.
REMAT_POLICIES: Mapping[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def policy_of(remat: str) -> Callable[..., Any]:
    """Return the policy of ``jax.checkpoint`` with which each layer is recomputed.

    Raises:
        TracingError: ``trace-remat`` for another mode.
    """
    if not is_of_each_layer(remat):
        raise TracingError.of(
            f"remat={remat!r} is no remat mode; give 'none', 'full' or 'dots'.", "trace-remat"
        )
    policy: Callable[..., Any] = REMAT_POLICIES.get(remat) or installed("remats")[remat].load()
    return policy


def policy_key(remat: str) -> tuple[str, ...]:
    """Return, for keys, the code of a policy of an installed package; empty for other modes, which
    their names tell."""
    return (function_key(policy_of(remat)),) if remat in installed("remats") else ()


#: Runs an operation on its operands; may read and add values of the environment.
RunOp = Callable[[Op, Sequence[Any], dict[Any, Any]], Sequence[Any]]


class LayerRun(Protocol):
    """The way in which one layer is run."""

    def enter(self, inputs: Sequence[object]) -> list[Any]:
        """Return the layer's inputs as it reads them, and as remat keeps them."""

    def __call__(self, op: Op, arguments: Sequence[Any], env: dict[Any, Any]) -> Sequence[Any]:
        """Run one operation of the layer: a ``RunOp``."""


@dataclass(frozen=True, eq=False)
class Region:
    """A remat region of the model, or the part of it that falls into one layer."""

    policy: Callable[..., Any] | None
    prevent_cse: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Op | Region, ...]


class LayerFunction:
    """One layer as a function: ``(params, inputs, batch) -> outputs``, lists in the order of its
    ``LayerOps``."""

    def __init__(self, layer: LayerOps, consts: Mapping[int, object]):
        self._layer = layer
        self._consts = {v: consts[v] for v in layer.consts}
        self._steps = steps_of(layer)

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(self._layer.ops)

    @cached_property
    def num_kernels(self) -> tuple[int, int]:
        """The number of operations with a kernel of Pallas, and of those that are no
        ``custom_partitioning`` operations."""
        bare = sum(holds(op, KERNEL, outside=PRIMITIVE) for op in self.ops)
        return sum(holds(op, KERNEL) for op in self.ops), bare

    @property
    def inputs(self) -> tuple[int, ...]:
        """The program's values that the layer reads from earlier layers, by number."""
        return self._layer.inputs

    @property
    def outputs(self) -> tuple[int, ...]:
        return self._layer.outputs

    @property
    def without_remat(self) -> LayerFunction:
        """The layer without the model's remat regions."""
        return LayerFunction(
            replace(self._layer, ops=tuple(replace(op, regions=()) for op in self._layer.ops)),
            self._consts,
        )

    def __call__(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        run: RunOp | None = None,
    ) -> list[Any]:
        layer, env = self._layer, dict[int, Any]()
        for values, arrays in (
            (layer.params, params),
            (layer.inputs, inputs),
            (layer.batch, batch),
        ):
            env.update(zip(values, arrays, strict=True))
        self.add_to(env, run)
        return [env[v] for v in layer.outputs]

    def add_to(self, values: dict[int, Any], run: RunOp | None = None) -> None:
        """Add what the layer makes to the program's values, by number, which hold what it reads."""
        values |= self._consts
        run_steps(self._steps, values, self._consts, run or _run_alone)


def steps_of(layer: LayerOps) -> tuple[Op | Region, ...]:
    """Return the operations of a layer, with those of a remat region grouped together."""
    last_read = {v: i for i, op in enumerate(layer.ops) for v in op.reads}
    last_read.update(dict.fromkeys(layer.outputs, len(layer.ops)))
    return _nest(list(enumerate(layer.ops)), last_read, frozenset(layer.consts), depth=0)


def _nest(
    ops: Sequence[tuple[int, Op]], last_read: Mapping[int, int], consts: frozenset[int], depth: int
) -> tuple[Op | Region, ...]:
    """Group consecutive ops of the same remat region; ops come with their index in the layer."""
    steps: list[Op | Region] = []
    for region, group in groupby(
        ops, key=lambda item: item[1].regions[depth] if len(item[1].regions) > depth else None
    ):
        members = list(group)
        if region is None:
            steps += [op for _, op in members]
            continue
        made = [v for _, op in members for v in op.outputs]
        read = {v for _, op in members for v in op.reads}
        steps.append(
            Region(
                policy=region.policy,
                prevent_cse=region.prevent_cse,
                inputs=tuple(sorted(read.difference(made, consts))),
                outputs=tuple(v for v in made if last_read.get(v, -1) > members[-1][0]),
                steps=_nest(members, last_read, consts, depth + 1),
            )
        )
    return tuple(steps)


def run_op(op: Op, arguments: Sequence[object]) -> Sequence[Any]:
    """Run one operation, in its own scope and at its own line, and return its results."""
    with at_source(op.traceback, op.scope), op.context.manager:
        result = op.primitive.bind(*arguments, **op.primitive.get_bind_params(op.params))
    return result if op.primitive.multiple_results else [result]


def _run_alone(op: Op, arguments: Sequence[object], env: dict[object, object]) -> Sequence[Any]:
    return run_op(op, arguments)


def run_steps(
    steps: Iterable[Op | Region],
    env: dict[Any, Any],
    consts: Mapping[int, Any],
    run: RunOp = _run_alone,
    carried: tuple[int, ...] = (),
) -> None:
    """Run operations, and remat regions as ``jax.checkpoint``; add results to the environment.

    Args:
        consts: Constants that regions read without their being arguments.
        run: How an operation is run; it may change the carried values of the environment.
        carried: Values that go into every region and come out of it.
    """
    for step in steps:
        if isinstance(step, Region):
            region = jax.checkpoint(
                partial(_run_region, step, consts, run, carried),
                policy=step.policy,
                prevent_cse=step.prevent_cse,
            )
            made = region([env[v] for v in (*step.inputs, *carried)])
            env.update(zip((*step.outputs, *carried), made, strict=True))
            continue
        arguments = [value_of(v, env) for v in step.inputs]
        env.update(zip(step.outputs, run(step, arguments, env), strict=True))


def _run_region(
    region: Region,
    consts: Mapping[int, Any],
    run: Any,
    carried: tuple[int, ...],
    inputs: Sequence[Any],
) -> list[Any]:
    env = {**consts, **dict(zip((*region.inputs, *carried), inputs, strict=True))}
    run_steps(region.steps, env, consts, run, carried)
    return [env[v] for v in (*region.outputs, *carried)]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A layer function and the graph indices of its arguments and results."""

    function: LayerFunction
    params: tuple[int, ...]
    inputs: tuple[int, ...]
    batch: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageSlice:
    """The layers [first, stop) of a model as one pure function, differentiable with ``jax.vjp``.

    Attributes:
        params: Indices into ``graph.params``: what the parameter list holds; equals
            ``graph.stage_params(first, stop)``.
        batch: Indices into ``graph.batch``; equals ``graph.stage_batch(first, stop)``.
        inputs: Indices into ``graph.values`` of what earlier layers made and these read. Values
            that only pass through are not here.
        outputs: Indices into ``graph.values`` of what these layers make and later ones read; of the
            last slice, the loss.
        key: Content hash: equal keys mean the same program on other parameters, so one compile
            serves all.
        remat: What the backward pass recomputes where a call says nothing else.
    """

    first: int
    stop: int
    params: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    key: str
    calls: tuple[LayerCall, ...]
    remat: str = "none"

    @property
    def without_remat(self) -> StageSlice:
        """The slice without the model's remat regions. It has the same key, so it is to be traced
        and not to be measured."""
        return replace(
            self,
            calls=tuple(replace(call, function=call.function.without_remat) for call in self.calls),
        )

    @property
    def sources(self) -> list[tuple[str, str]]:
        """The name scopes and model line of every operation; they are no part of ``key``."""
        return [
            (op.scope, line_of(op.traceback)) for call in self.calls for op in call.function.ops
        ]

    def __call__(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
        *,
        remat: str | None = None,
        pin: Callable[[int, Any], Any] = lambda value, array: array,
        runs: Sequence[LayerRun | None] = (),
    ) -> list[Any]:
        """Run the layers.

        Args:
            params: One array per ``self.params``.
            inputs: One per ``self.inputs``.
            batch: One per ``self.batch``.
            remat: ``"none"``; ``"full"``: of each layer only its inputs are kept for the backward
                pass; ``"dots"``: also the results of matrix products without batch dimensions
                (those with parameters, in a Transformer); ``"full:3"``: as ``"full"`` of the
                first three layers; or a policy of an installed package. None: as the slice says.
            pin: Given what passes from layer to layer inside the slice, by index into
                ``graph.values``; returns it, marked or with a sharding.
            runs: Per layer, how it is run; None, or none given: as it stands.

        Returns:
            One array per ``self.outputs``.

        Raises:
            TracingError: ``trace-remat`` for another mode.
        """
        remat = self.remat if remat is None else remat
        num_full = num_full_layers(remat)
        remat = "full" if num_full else remat
        policy = None if remat == "none" else policy_of(remat)
        stop_remat = self.first + num_full if num_full else self.stop
        of_param = dict(zip(self.params, params, strict=True))
        of_batch = dict(zip(self.batch, batch, strict=True))
        values = dict(zip(self.inputs, inputs, strict=True))
        for layer, call in enumerate(self.calls, start=self.first):
            own = runs[layer - self.first] if runs else None
            function = call.function if own is None else partial(call.function, run=own)
            given = [values[v] for v in call.inputs]
            run = (
                function
                if policy is None or layer >= stop_remat
                else jax.checkpoint(jax.jit(function), policy=policy)
            )
            with layer_scope(layer):
                made = run(
                    [of_param[p] for p in call.params],
                    given if own is None else own.enter(given),
                    [of_batch[b] for b in call.batch],
                )
            if layer + 1 < self.stop:
                made = [pin(v, array) for v, array in zip(call.outputs, made, strict=True)]
            values.update(zip(call.outputs, made, strict=True))
        return [values[v] for v in self.outputs]


def struct_of(
    tensor: Tensor, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return a tensor of the layer graph as JAX's structure."""
    dtype = (
        jax.eval_shape(lambda: jax.random.key(0)).dtype
        if tensor.dtype.startswith("key<")
        else jnp.dtype(tensor.dtype)
    )
    return jax.ShapeDtypeStruct(tensor.shape, dtype, sharding=sharding)
