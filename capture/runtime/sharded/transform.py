"""The user's loss, with an all-gather of every sharded parameter where an operation reads it.

The loss stays the user's: it is traced where it is called, with whatever batch, and evaluated
operation by operation. One that reads a parameter of the plan is run by ``run_gathered``; all
others as they are. Arrays are global (``jax.jit`` with shardings), so the meaning of the loss does
not depend on the number of devices. The model's own ``jax.checkpoint`` regions stay what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax

from capture.errors import WorkloadError
from capture.model.workload import PyTree
from capture.plan.sharding import ShardingPlan
from capture.runtime.sharded.all_gather import awaited, run_gathered, with_token
from capture.runtime.sharded.operation import is_stored, pieces_of, plain, stored
from capture.runtime.sharded.placement import LeafPlacement
from capture.tracing.cut import flatten_loss, product_cuts
from capture.tracing.fusion import MULTIPLY
from capture.tracing.jaxprs import is_variable
from capture.tracing.layers import LayerOps, assign_layers
from capture.tracing.leaf_uses import LAYOUT
from capture.tracing.model import TracedModel
from capture.tracing.program import LossProgram, Op, is_value
from capture.tracing.slices import Region, run_op, run_steps, steps_of

_TOKEN = -1  # where an environment holds the token of ``run_gathered``; values are numbered from 0


def gathered_loss(
    loss_fn: Callable[..., object],
    has_aux: bool,
    plan: ShardingPlan,
    leaves: Sequence[LeafPlacement],
    traced: TracedModel,
) -> Callable[..., Any]:
    """Return the loss of parameters stored as ``leaves`` says; see ``Sharded.transform``."""
    tree: Any = jax.tree.structure(traced.params_struct)

    def run(params: PyTree, *arguments: Any) -> Any:
        closed, result = jax.make_jaxpr(loss_fn, return_shape=True)(
            traced.params_struct, *arguments
        )
        _check_results(result, has_aux)
        flat = flatten_loss(closed, len(leaves), sys.maxsize)
        program = flat.program
        if flat.stacked != traced.stacked:
            raise WorkloadError.of(
                "the loss scans over other parameters than the one that the plan was made for; "
                "transform the same computation.",
                "osdp-loss",
            )
        params, token = with_token(params)
        rows = [
            value
            for leaf, array in zip(leaves, tree.flatten_up_to(params), strict=True)
            for value in stored(leaf, array)
        ]
        env = (
            dict(zip(program.params, rows, strict=True))
            | dict(zip(program.batch, jax.tree.leaves(arguments), strict=True))
            | program.consts
            | {_TOKEN: token}
        )
        found = _evaluate(program, env, plan.remat, plan.look_ahead and not plan.remat)
        return jax.tree.unflatten(jax.tree.structure(result), found)

    return run


def _evaluate(program: LossProgram, env: dict[int, Any], remat: bool, prefetch: bool) -> list[Any]:
    layers = assign_layers(program, product_cuts(program) if remat else [0, len(program.ops)])
    for layer in layers:
        run: Callable[..., Any] = partial(_run_layer, layer, program, prefetch)
        inputs = {v: env[v] for v in (*layer.params, *layer.batch, *layer.inputs, _TOKEN)}
        if layer is not layers[-1]:  # what goes backwards at once is not computed again
            run = jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
        if remat:
            small = [v for v in layer.params if not is_stored(env[v])]
            values, inputs[_TOKEN] = awaited([env[v] for v in small], env[_TOKEN])
            inputs.update(zip(small, values, strict=True))
        env |= run(inputs)
    if prefetch:  # of a token that nobody reads, XLA would drop all that was tied to it
        dtype = program.avals[program.loss].dtype
        env[program.loss] += lax.stop_gradient(env[_TOKEN]).astype(dtype)
    return [plain(env[v]) for v in (program.loss, *program.aux)]


def _run_layer(
    layer: LayerOps, program: LossProgram, prefetch: bool, inputs: dict[int, object]
) -> dict[int, Any]:
    differentiated = [op for op in layer.ops if not program.toward_loss.isdisjoint(op.outputs)]
    run = _Runner(frozenset(differentiated), _read_again(layer.params, differentiated), prefetch)
    env = {**{v: program.consts[v] for v in layer.consts}, **inputs}
    for step in steps_of(layer):
        if isinstance(step, Region):
            _await_small(step, env, layer.params)
        run_steps([step], env, program.consts, run, (_TOKEN,))
    return {v: env[v] for v in (*layer.outputs, _TOKEN)}


def _await_small(region: Region, env: dict[int, object], params: Sequence[int]) -> None:
    """Let the backward pass wait, before a region, for the gradients of its small parameters: XLA
    may else keep what it has computed again for them until the end of the step."""
    small = [v for v in region.inputs if v in params and not is_stored(env[v])]
    values, env[_TOKEN] = awaited([env[v] for v in small], env[_TOKEN])
    env.update(zip(small, values, strict=True))


@dataclass(frozen=True)
class _Runner:
    """A runner of a layer's operations, where parameters may be stored.

    Attributes:
        differentiated: Those that a gradient of the loss goes through.
        prefetch: Whether an all-gather may start with the operation before; not in the model's
            remat regions.
    """

    differentiated: frozenset[Op]
    read_again: frozenset[Op]
    prefetch: bool

    def __call__(self, op: Op, inputs: Sequence[Any], env: dict[int, Any]) -> Sequence[Any]:
        sharded = [i for i, value in enumerate(inputs) if is_stored(value)]
        if not sharded:
            return run_op(op, inputs)
        if op.primitive.name in LAYOUT:
            return [replace(inputs[0], chain=(*inputs[0].chain, op))]
        others = [i for i, v in enumerate(op.inputs) if i not in sharded and is_variable(v)]
        if not others:  # of parameters alone, such as a penalty on their size: nothing to gather
            return run_op(op, [plain(value) for value in inputs])
        arrays, given, token = (
            [array for i in sharded for array in inputs[i].arrays],
            [inputs[i] for i in others],
            env[_TOKEN],
        )
        # Or the token would take it backwards, with gradients of 0.
        if op not in self.differentiated:
            arrays, given, token = lax.stop_gradient((arrays, given, token))
        results, token, first = run_gathered(
            [source for i in sharded for source in inputs[i].sources],
            pieces_of(op, inputs, sharded, others),
            arrays,
            given,
            token,
            keep_results=op.primitive.name not in MULTIPLY,
            hand_on=op in self.read_again,
            prefetch=self.prefetch and op in self.differentiated and not op.regions,
        )
        if op in self.differentiated:
            env[_TOKEN] = token
        operand = op.inputs[others[0]]
        if op in self.read_again and is_value(operand):
            env[operand] = first
        return results


def _read_again(params: Sequence[int], ops: Sequence[Op]) -> frozenset[Op]:
    """Return the operations with a parameter whose first other operand a later one reads with
    another: queries, keys and values, for example."""
    from_params, found = set(params), set()
    last: dict[Any, Op] = {}
    for op in ops:
        params = [v for v in op.reads if v in from_params]
        others = [v for v in op.reads if v not in from_params]
        if params and not others:
            from_params.update(op.outputs)
        elif params:
            key = others[0], op.regions
            if key in last:
                found.add(last[key])
            last[key] = op
    return frozenset(found)


def _check_results(result: Any, has_aux: bool) -> None:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise WorkloadError.of(
            f"has_aux=True, but the loss returns {_described(result)}; return (loss, aux).",
            "osdp-loss",
        )
    loss = result[0] if has_aux else result
    if [leaf.shape for leaf in jax.tree.leaves(loss)] != [()]:
        raise WorkloadError.of(
            f"the loss {'is' if has_aux else 'returns'} {_described(loss)}; return one scalar"
            + ("." if has_aux else ", or (scalar, aux), and pass has_aux=True to transform."),
            "osdp-loss",
        )


def _described(result: object) -> str:
    shapes = [str(leaf.shape) for leaf in jax.tree.leaves(result)]
    return (
        f"1 array of shape {shapes[0]}"
        if len(shapes) == 1
        else f"{len(shapes)} arrays of shapes {', '.join(shapes)}"
    )
