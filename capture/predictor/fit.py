"""Least squares over measurements at a few sizes, of all stages and components at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_line(sizes: Sequence[float], tables: Sequence[np.ndarray], at: float) -> np.ndarray:
    """Return a straight line over the (micro-)batch size; in proportion if a single size is known.

    Source: CAPTURE III-B2, Description 2.
    """
    if len(sizes) == 1:
        return tables[0] * (at / sizes[0])
    return regress(sizes, tables, at)


def regress(known: Sequence[float], tables: Sequence[np.ndarray], at: float) -> np.ndarray:
    """Return least squares with an intercept, sampled at one point; NaN stays NaN.

    Args:
        known: Where values are known, at least two points.
        tables: The values at each, of one shape.
        at: The point.

    Example:
        >>> regress([2, 4], [np.array([6.0, 1.0]), np.array([8.0, 1.0])], 8).round(6).tolist()
        [12.0, 1.0]
    """
    points, values = np.asarray(known, np.float64)[:, None], np.stack(tables)
    flat = values.reshape(len(points), -1)
    middle, means = points.mean(axis=0), flat.mean(axis=0)
    valid = ~np.isnan(means)
    result = np.full(flat.shape[1], np.nan)
    slopes, *_ = np.linalg.lstsq(points - middle, (flat - means)[:, valid], rcond=None)
    result[valid] = (np.array([[at]]) @ slopes + (means[valid] - middle @ slopes))[0]
    return result.reshape(values.shape[1:])
