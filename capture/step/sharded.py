"""The peak of a plan over the course of a step, where what is held changes: activations go as
gradients come.

A cost model for searches adds up: all that any operator holds through the step, and the largest
transient. While operator i goes backwards, though, the activations of later operators are gone, and
the gradients of earlier ones are not there yet:

    peak = sum of (parameters, optimizer state)
           + max over i of  (activations of operators <= i) + (gradients of operators > i)
                            + the larger of  what operator i needs before its product,  what the product needs + gradient of i

Forwards there are no gradients yet, unless the operator is rematerialised; and at the end all of
them are there, which the optimizer may need together. That is never more than the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capture.model.operators import Operator
from capture.plan.sharding import Mode
from capture.step.operator_cost import StepCost


def peak_bytes(
    cost: StepCost, operators: Sequence[Operator], modes: Sequence[Mode], batch_size: int
) -> int:
    """Of one device.

    Args:
        cost: What operators hold in a mode.
        operators: In program order.
        modes: Of each.
        batch_size: Examples per device.
    """
    pairs = list(zip(operators, modes, strict=True))
    numbers = {pair: _bytes_of(cost, *pair, batch_size) for pair in set(pairs)}
    held, states, forwards, before, at = np.array([numbers[pair] for pair in pairs], float).T
    gradients = states / cost.model.state_bytes_per_parameter_byte
    activations, later = np.cumsum(held), gradients.sum() - np.cumsum(gradients)
    peaks = activations + np.array(
        [forwards + (later if cost.remat else 0), before + later, at + later + gradients]
    )
    return int(np.ceil((states - gradients).sum() + max(peaks.max(), gradients.sum())))


def _bytes_of(cost: StepCost, operator: Operator, mode: Mode, batch_size: int) -> tuple[float, ...]:
    """Of one operator: what is held for the backward pass, parameters with their gradients and
    state, and the transients."""
    held = batch_size * cost.held_bytes(operator, mode)
    return (
        held,
        cost.cost(operator, mode, batch_size).resident_bytes - held,
        *cost.transients(operator, mode, batch_size),
    )
