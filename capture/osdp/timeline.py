"""The peak of a plan over the course of a step, where what is held changes: activations go as gradients come.

A cost model for searches adds up: all that any operator holds through the step, and the largest transient. While operator i goes backwards,
though, the activations of later operators are gone, and the gradients of earlier ones are not there yet:

    peak = sum of (parameters, optimizer state)
           + max over i of  (activations of operators <= i) + (gradients of operators > i)
                            + the larger of  what operator i needs before its product,  what the product needs + gradient of i

and at the end all gradients are there, which the optimizer may need together. That is never more than the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capture.osdp.cost import Mode, StepCost
from capture.osdp.operators import Operator


def peak_bytes(cost: StepCost, operators: Sequence[Operator], modes: Sequence[Mode], batch_size: int) -> int:
    """Of one device.

    Args:
        cost: What operators hold in a mode.
        operators: In program order.
        modes: Of each.
        batch_size: Examples per device.
    """
    found = [cost.cost(operator, mode, batch_size) for operator, mode in zip(operators, modes, strict=True)]
    held = np.array([batch_size * cost.held_bytes(operator, mode) for operator, mode in zip(operators, modes, strict=True)], float)
    states = np.array([c.resident_bytes for c in found], float) - held
    gradients = states / cost.model.state_bytes_per_parameter_byte
    phases = [cost.transients(operator, mode, batch_size) for operator, mode in zip(operators, modes, strict=True)]
    before, at = np.array(phases, float).T
    backwards = np.cumsum(held) + np.cumsum(gradients[::-1])[::-1] + np.maximum(before - gradients, at)
    return int(np.ceil((states - gradients).sum() + max(backwards.max(), gradients.sum())))
