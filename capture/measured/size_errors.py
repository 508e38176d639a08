"""How far predictions are off at micro-batch sizes that were not profiled: errors at a few of them,
and the interval that they support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

#: Never narrower than this: nobody saw where the compiler changes its mind.
FLOOR_FRACTION = 0.05
#: Per octave, where no size was held out.
UNCALIBRATED_FRACTION = 0.17


@dataclass(frozen=True)
class SizeError:
    """The error of one stage, compiled at a micro-batch size that was not profiled.

    Attributes:
        error: measured / predicted - 1 of its peak; above 0 the prediction was too low.
        octaves: How far the size is from the nearest profiled one (``octaves_away``).
    """

    error: float
    octaves: float


def octaves_away(microbatch_size: int, profiled: Sequence[int]) -> float:
    """Return the distance to the nearest profiled size: the absolute logarithm of their ratio, to
    base 2.

    Example:
        >>> [octaves_away(size, (4, 8)) for size in (1, 2, 8, 32)]
        [2.0, 1.0, 0.0, 2.0]
    """
    return min(abs(log2(microbatch_size / size)) for size in profiled)


def extrapolation_width(
    errors: Sequence[SizeError], octaves: float, coverage: float = 0.98
) -> tuple[float, float]:
    """Return half the width of the interval of a prediction so far from the profiled sizes, as a
    fraction of it, and the coverage that is claimed.

    Split conformal over |error| / octaves: an error is taken to grow with the number of octaves,
    and counts as one octave's at least, because between profiled sizes, too, the compiler may
    change its algorithm. With few errors it is the largest and half of itself, and the coverage is
    n / (n + 1).

    Args:
        errors: Errors at held-out sizes, at least one.
        octaves: Distance of the predicted size from the nearest profiled one.
        coverage: Wanted.

    Example:
        >>> errors = [SizeError(0.1, 1.0), SizeError(-0.3, 2.0)]
        >>> tuple(round(x, 2) for x in extrapolation_width(errors, octaves=2.0))
        (0.45, 0.67)
    """
    ranked = sorted(abs(e.error) / max(1.0, e.octaves) for e in errors)
    rank = int(-(-(len(ranked) + 1) * coverage // 1))
    width = ranked[rank - 1] if rank <= len(ranked) else 1.5 * ranked[-1]
    return max(1.0, octaves) * max(width, FLOOR_FRACTION), min(
        coverage, len(ranked) / (len(ranked) + 1)
    )
