"""Layers shared out over a given number of stages as equally as they can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capture.errors import PlanError


def equal_cuts(weights: Sequence[float], num_stages: int) -> list[int]:
    """Return boundaries of the contiguous stages whose largest total weight is least; of those, the
    least sum of squares.

    Args:
        weights: Per layer, not negative: 1 for equal layers, or parameters, or FLOPs.
        num_stages: Between 1 and the number of layers.

    Returns:
        ``num_stages + 1`` ascending layer ids from 0 to L.

    Raises:
        PlanError: ``baseline-stages`` if there are fewer layers than stages.

    Example:
        >>> equal_cuts([1] * 10, 4)
        [0, 2, 4, 7, 10]
    """
    num_layers = len(weights)
    if not 1 <= num_stages <= num_layers:
        raise PlanError.of(
            f"num_stages={num_stages} cannot share num_layers={num_layers}: each needs a layer; "
            f"use between 1 and {num_layers} stages.",
            "baseline-stages",
        )
    before = np.concatenate([[0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    total = before - before[:, None]  # [first, stop]
    total[np.tri(num_layers + 1, dtype=bool)] = np.inf
    worst = np.concatenate([[-np.inf], np.full(num_layers, np.inf)])
    for _ in range(num_stages):
        worst = np.maximum(worst[:, None], total).min(axis=0)
    # Prefix sums make equal totals differ in their last bits, so the limit carries their rounding.
    squares = np.where(total <= worst[-1] + 1e-9 * before[-1], total**2, np.inf)
    least, origins = np.concatenate([[0.0], np.full(num_layers, np.inf)]), []
    for _ in range(num_stages):
        candidates = least[:, None] + squares
        origins.append(candidates.argmin(axis=0))
        least = candidates.min(axis=0)
    cuts = [num_layers]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    return cuts[::-1]
