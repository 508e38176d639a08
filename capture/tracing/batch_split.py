"""Whether a loss splits over micro-batches: the loss of a batch is the mean of the losses of its
parts.

Pipelines and gradient accumulation rely on it. Batch normalisation on the statistics of the
micro-batch, a weighted mean ``sum(w * l) / sum(w)``, a sum over the examples or a contrastive loss
do not split: the step then depends on the number of micro-batches.

A small model is run. Of a larger one the program is read for what every mean has: a number that
depends on the number of examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from capture.model.workload import WorkloadProtocol, takes_key
from capture.tracing.flops import equation_flops
from capture.tracing.jaxprs import consts_of, is_variable, opened, sub_jaxprs
from capture.tracing.model import TracedLoss

#: Relative difference of losses that rounding does not explain, ...
TOLERANCE = 1e-4
#: ... unless there are 16-bit values, or choices that a last bit decides (routing to experts):
#: between the two nothing is decided.
ROUNDING_TOLERANCE = 2e-2
_NUMERIC_LIMIT_FLOPS = 2e9
_NUMERIC_LIMIT_BATCH_ELEMENTS = 2**22
#: Compiling takes longer than running once.
_QUICK_COMPILE: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True)
class SplitCheck:
    """The answer whether a loss splits over micro-batches, and how it was found.

    Attributes:
        splits: None if it was not decided.
        method: ``"numeric"`` compared losses, ``"read"`` read the traced program.
        reason: A sentence; empty where a loss is not run and nothing speaks against its split.
        loss: The value with the parameters that ``init`` makes, where it was run and is no number,
            or infinite; else None.
        scales: Whether a backward pass that begins with half as much makes half the gradients, as
            micro-batches need it; None where that was not looked at.
    """

    splits: bool | None
    method: Literal["numeric", "read"]
    reason: str
    loss: float | None = None
    scales: bool | None = None


def check_split(
    workload: WorkloadProtocol, microbatch_size: int, *, numeric_limit_parameters: int = 5_000_000
) -> SplitCheck:
    """Decide whether ``loss(batch) == mean(loss(part) for part in halves(batch))``.

    A small model is run on the CPU, on its own ``batch`` and with random parameters: initial ones
    may be zero, and hide what follows them. A larger one, or one whose loss takes a random key, is
    traced for n and for 2 n examples: if no number of the program depends on n, the loss is a sum
    or a weighted mean; else nothing is known. Of what is run, gradients are looked at where a
    ``jax.custom_vjp`` makes some.

    Args:
        microbatch_size: Examples of a micro-batch; a model may refuse others.
        numeric_limit_parameters: Parameters below which the loss is run; 0 never runs it.

    Example:
        >>> import optax
        >>> from capture.model.workload import Workload
        >>> loss, init = lambda w, x: ((x @ w) ** 2).sum(), lambda key: jnp.ones(3)
        >>> task = Workload(loss, init, lambda key, n: jnp.ones((n, 3)), optax.sgd(0.1))
        >>> check_split(task, 4).reason
        'The loss is a sum over the examples, not a mean.'
        >>> check_split(task, 4, numeric_limit_parameters=0).splits
        False
    """
    params = jax.eval_shape(workload.init, jax.eval_shape(lambda: jax.random.key(0)))
    small = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(params)
    ) < numeric_limit_parameters and not takes_key(workload)
    last = max(2, microbatch_size)
    powers = (2**i for i in range(1, last.bit_length()) if 2**i < last and small)
    traced, error = None, ""
    for size in dict.fromkeys([*powers, last, microbatch_size]):
        try:
            traced = TracedLoss.of(workload, size, params)
            traced.doubled  # noqa: B018  # traced here, and kept
            break
        except Exception as refused:  # a model may refuse a batch in any way
            traced = None
            error = error or f"{type(refused).__name__}: {refused}"
    if traced is None:
        return SplitCheck(
            None,
            "read",
            f"The loss cannot be traced for {last} and {2 * last} examples: {error}",
        )
    if small and _can_run(traced) and (found := _compare(traced)) is not None:
        return replace(found, scales=_scales(traced))
    if _numbers(traced.closed) != _numbers(traced.doubled):
        return SplitCheck(None, "read", "")
    return SplitCheck(
        False,
        "read",
        "No number in the program of the loss depends on how many examples there are: it is a sum "
        "over them or a weighted mean, not their mean.",
    )


def _numbers(body: object) -> Counter[Any]:
    """Count the numbers that a program has: literals, constants, and sums of literals, such as the
    number of ones in an array."""

    def all_of(body: object) -> Iterator[Any]:
        for const in consts_of(body):
            yield np.shape(const), np.asarray(const).tobytes() if np.size(const) == 1 else ""
        filled = {}
        for equation in opened(body).eqns:
            yield from (float(v.val) for v in equation.invars if _is_number(v))
            if equation.primitive.name == "broadcast_in_dim" and _is_number(equation.invars[0]):
                filled[equation.outvars[0]] = equation.params["shape"]
            elif equation.primitive.name == "reduce_sum" and is_variable(equation.invars[0]):
                yield filled.get(equation.invars[0])
            for sub in sub_jaxprs(equation.params):
                yield from all_of(sub)

    return Counter(all_of(body))


def _is_number(atom: Any) -> bool:
    return not is_variable(atom) and np.size(atom.val) == 1 and np.isrealobj(atom.val)


def split_warning(check: SplitCheck, parts: str = "micro-batches") -> str | None:
    """Return the warning for a loss that does not split over micro-batches; None if it splits.

    Args:
        parts: Name of the parts whose number a plan chooses.
    """
    if check.splits or not check.reason:
        return None
    if check.splits is None:
        return (
            f"Whether the loss splits over micro-batches was not decided: {check.reason} "
            "[workload-split]"
        )
    return (
        "The loss of a batch is not the mean of the losses of its micro-batches, so a step "
        f"depends on the number of {parts}: {check.reason} [workload-split]"
    )


def loss_warnings(check: SplitCheck, parts: str = "micro-batches") -> tuple[str, ...]:
    """Return all warnings on a loss before training; arguments as for ``split_warning``."""
    warnings = [split_warning(check, parts)]
    if check.loss is not None:
        warnings.append(
            f"The loss is {check.loss} with the parameters of init and the examples of batch, so "
            "nothing can be learned. [workload-loss]"
        )
    if check.scales is False and parts == "micro-batches":
        warnings.append(
            "A jax.custom_vjp of the model returns gradients that are not proportional to the one "
            "that it is given. A backward pass begins with a micro-batch's part of the batch, so "
            "several micro-batches train another function than one. Scale what the rule adds by "
            "the gradient that it is given. [workload-gradient]"
        )
    return tuple(warning for warning in warnings if warning is not None)


def _can_run(traced: TracedLoss) -> bool:
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(traced.params)):
        return False  # integers, keys: only ``init`` knows what they may be
    batch = traced.doubled.jaxpr.invars[traced.num_params :]
    elements = sum(math.prod(v.aval.shape) for v in batch)
    flops = sum(map(equation_flops, traced.doubled.jaxpr.eqns))
    return elements < _NUMERIC_LIMIT_BATCH_ELEMENTS and flops < _NUMERIC_LIMIT_FLOPS


def _compare(traced: TracedLoss) -> SplitCheck | None:
    """Run the loss on a batch and on its halves and compare; None where it cannot be run, or
    rounding may explain the difference."""
    leaves = jax.tree.leaves(traced.params)
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            random = np.random.default_rng(0)
            params = [_random_leaf(leaf, random) for leaf in leaves]
            whole, first, second = _losses(traced, params)
            if not math.isfinite(whole):  # as random parameters may make it
                begun = jax.tree.leaves(_quickly(traced.workload.init, jax.random.key(0)))
                loss = _losses(traced, begun)[0]
                return None if math.isfinite(loss) else SplitCheck(None, "numeric", "", loss)
    # no CPU backend in this process, a kernel for another device, ...: what was traced is what is
    # known
    except Exception:
        return None
    n, mean = traced.microbatch_size, (first + second) / 2

    def far(other: float) -> float:
        return abs(whole - other) / max(abs(whole), abs(other), 1e-30)

    difference = far(mean)
    if difference <= TOLERANCE:
        said = f"The loss of {2 * n} examples is {whole:.6g}, and so is the mean over its halves."
        return SplitCheck(True, "numeric", said)
    if not difference >= ROUNDING_TOLERANCE:
        return SplitCheck(None, "numeric", "")
    said = (
        "The loss is a sum over the examples, not a mean."
        if far(2 * mean) <= TOLERANCE
        else f"The loss of {2 * n} examples is {whole:.6g}, and the mean over its halves "
        f"{mean:.6g}."
    )
    return SplitCheck(False, "numeric", said)


def _scales(traced: TracedLoss) -> bool | None:
    """Run the backward pass from 1 and from 1/2 and compare; None without a rule of the model's own
    (``jax.custom_vjp``), or where it cannot be run."""
    if not _has_rule(traced.closed):
        return None
    loss, (struct,) = jex_core.jaxpr_as_fun(traced.closed), traced.closed.out_avals
    random = np.random.default_rng(0)
    params = [_random_leaf(leaf, random) for leaf in jax.tree.leaves(traced.params)]

    def backward(params: Any, batch: Any, begin: Any) -> Any:
        return jax.vjp(lambda own: loss(*own, *batch)[0], params)[1](begin)[0]

    try:
        with jax.default_device(jax.devices("cpu")[0]):
            batch, one = _batch(traced, 1), np.ones((), struct.dtype)
            run = _compiled(backward, params, batch, one)
            whole, half = (run(params, batch, begin) for begin in (one, one / 2))
    except Exception:  # as of ``_compare``
        return None
    pairs = ((np.float64(a), 2 * np.float64(b)) for a, b in zip(whole, half, strict=True))
    return all(
        np.allclose(a, b, TOLERANCE, TOLERANCE * np.abs(a).max(initial=0), equal_nan=True)
        for a, b in pairs
    )


def _has_rule(body: object) -> bool:
    return any(
        each.primitive.name == "custom_vjp_call" or any(map(_has_rule, sub_jaxprs(each.params)))
        for each in opened(body).eqns
    )


def _batch(traced: TracedLoss, times: int) -> list[Any]:
    """Return the leaves of a batch of so many times the examples that were traced."""
    workload, size = traced.workload, times * traced.microbatch_size
    return jax.tree.leaves(_quickly(lambda key: workload.batch(key, size), jax.random.key(0)))


def _losses(traced: TracedLoss, params: Sequence[Any]) -> tuple[float, float, float]:
    """Return the losses of 2 n random examples and of their two halves."""
    batch = _batch(traced, 2)
    halves = [
        [
            leaf if dim is None else np.split(np.asarray(leaf), 2, axis=dim)[i]
            for leaf, dim in zip(batch, traced.batch_dims, strict=True)
        ]
        for i in (0, 1)
    ]
    (whole,) = _quickly(jex_core.jaxpr_as_fun(traced.doubled), *params, *batch)
    half_loss = _compiled(jex_core.jaxpr_as_fun(traced.closed), *params, *halves[0])
    return float(whole), *(float(half_loss(*params, *half)[0]) for half in halves)  # type: ignore[return-value]


def _random_leaf(leaf: jax.ShapeDtypeStruct, random: np.random.Generator) -> np.ndarray:
    """Return a random parameter: near 1 for scales and biases, else small enough that products keep
    the size of their inputs."""
    if len(leaf.shape) < 2:
        return random.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
    return (
        random.standard_normal(leaf.shape, np.float32) / math.sqrt(math.prod(leaf.shape[:-1]))
    ).astype(leaf.dtype)


def _compiled(function: Callable[..., object], *arguments: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*arguments).compile(compiler_options=_QUICK_COMPILE)


def _quickly(function: Callable[..., object], *arguments: Any) -> Any:
    return _compiled(function, *arguments)(*arguments)
