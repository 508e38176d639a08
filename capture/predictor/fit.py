"""The regressions: a straight line over the micro-batch, a + b / k over the degree, and the paper's
logarithm.

Each fits all stages and components at once (scikit-learn's multi-output least squares).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np


def _regress(
    features: Sequence[Sequence[float]], targets: Sequence[np.ndarray], at: Sequence[float]
) -> np.ndarray:
    """Fit by least squares with an intercept and return the value at one point, in the shape of a
    target. NaN stays NaN."""
    # A second to import, and most plans need no fit.
    from sklearn.linear_model import LinearRegression

    shape = targets[0].shape
    flat = np.stack([np.asarray(t, np.float64).ravel() for t in targets])
    valid = ~np.isnan(flat).any(axis=0)
    result = np.full(flat.shape[1], np.nan)
    if not valid.any():
        return result.reshape(shape)
    model = LinearRegression().fit(np.asarray(features, np.float64), flat[:, valid])
    result[valid] = model.predict(np.asarray([at], np.float64))[0]
    return result.reshape(shape)


def fit_line(sizes: Sequence[float], tables: Sequence[np.ndarray], at: float) -> np.ndarray:
    """Fit a straight line over the (micro-)batch size and return its value at ``at``; in proportion
    to the size if a single one is known.

    Source: CAPTURE III-B2, Description 2.
    """
    if len(sizes) == 1:
        return tables[0] * (at / sizes[0])
    return _regress([[size] for size in sizes], tables, [at])


def fit_degree(
    degrees: Sequence[float],
    values: Sequence[np.ndarray],
    at: float,
    transform: Callable[[float], float],
) -> np.ndarray:
    """Fit a + b * transform(k) through values at some degrees k and return its value at another
    degree.

    Args:
        degrees: k; at least two.
        values: One array per degree.
        at: The degree to predict.
        transform: ``inverse`` (a + b / k) or ``np.log`` (the paper's).

    Source: CAPTURE III-B3; READINGS.md, C-h: its own analytic models are a + b / k.

    Example:
        >>> float(fit_degree([2, 4], [np.array(6.0), np.array(4.0)], 8, inverse).round(6))
        3.0
    """
    return _regress([[transform(k)] for k in degrees], values, [transform(at)])


def inverse(k: float) -> float:
    """Return 1 / k."""
    return 1 / k


def fit_degrees(tables: Mapping[tuple[int, int], np.ndarray], at: tuple[int, int]) -> np.ndarray:
    """Return a table for a (data, tensor) degree pair that was not profiled, fitted to those that
    were.

    The fit is along one axis where two degrees of at least 2 are known on it (a single device is
    not on the curve: it has no buffer for the sum of gradients); else over both axes with a product
    term.
    """
    for axis in (0, 1):
        line = {
            k[axis]: t for k, t in tables.items() if k[1 - axis] == at[1 - axis] and k[axis] >= 2
        }
        if len(line) >= 2:
            return fit_degree(list(line), list(line.values()), at[axis], inverse)
    if len(tables) == 1:
        return next(iter(tables.values()))

    def features(degrees: tuple[int, int]) -> list[float]:
        dp, tp = degrees
        return [1 / dp, 1 / tp, 1 / (dp * tp)]

    return _regress([features(k) for k in tables], list(tables.values()), features(at))
