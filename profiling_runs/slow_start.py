"""The largest micro-batch size that does not run out of memory, found as TCP finds how much a link
carries: doubled until the first failure, halved, then added to until the next.

Source: Li et al. 2022 (Harmony), 4.2; Jacobson 1988 (slow start, ssthresh).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class SlowStart:
    """The result of ``slow_start``: the largest micro-batch size that fits, and the sizes tried.

    Attributes:
        largest: Size that fits; 0 if none does.
        trials: Sizes that were tried, in order.
    """

    largest: int
    trials: tuple[int, ...]


def slow_start(most: int | None = None, stride: int = 1) -> Generator[int, bool, SlowStart]:
    """Yield micro-batch sizes to try, and be sent whether each fits.

    What fitted before the first failure is the threshold (ssthresh, half of what failed): from
    there on ``stride`` is added. What failed is not tried again.

    Args:
        most: No larger size is of interest.
        stride: Added after the first failure; the result is that much below the largest at most.
    """
    trials: list[int] = []
    size, failed = 0, None
    while failed is None and (most is None or size < most):
        trials.append(min(max(1, 2 * size), most or 2 * size + 1))
        if (yield trials[-1]):
            size = trials[-1]
        else:
            failed = trials[-1]
    while size and failed is not None and size + stride < failed:
        trials.append(size + stride)
        if not (yield trials[-1]):
            break
        size = trials[-1]
    return SlowStart(size, tuple(trials))
