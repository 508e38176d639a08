"""Alpha and beta of a link from measured collectives, and how much of a step's communication was
hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from capture.errors import TargetError
from capture.machine.links import ring_steps
from capture.machine.target import Link, Sourced


@dataclass(frozen=True)
class MeasuredCollective:
    """One timing.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter`` or ``all-reduce``.
        group_size: Devices n that took part.
        nbytes: Size of the whole array.
        seconds: Measured.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    group_size: int
    nbytes: int
    seconds: float

    @property
    def num_steps(self) -> int:
        """Messages that each device sends, one after the other, in the ring."""
        return ring_steps(self.kind, self.group_size)


@dataclass(frozen=True)
class FittedLink:
    """A link, and how well it explains the measurements (fractions of the measured seconds)."""

    link: Link
    mean_error_fraction: float
    max_error_fraction: float


def fit_link(measured: Sequence[MeasuredCollective], source: str) -> FittedLink:
    """Least squares of the relative errors of  steps x (alpha + beta bytes / n), with alpha >= 0.

    Args:
        measured: Collectives over one link, of two sizes or more.
        source: What was measured, for the numbers' record.

    Raises:
        TargetError: ``fit-too-few`` if the sizes do not tell alpha from beta, ``fit-no-bandwidth``
            if time does not grow with the bytes.

    Example:
        >>> planted = Link(Sourced(1e-5, ""), Sourced(4e9, ""))
        >>> rows = [
        ...     MeasuredCollective("all-gather", 8, size, 7 * planted.seconds(size / 8))
        ...     for size in (10**5, 10**7)
        ... ]
        >>> found = fit_link(rows, "planted").link
        >>> latency, rate = found.latency_seconds.value, found.bytes_per_second.value
        >>> round(latency * 1e6, 3), round(rate / 1e9, 3)
        (10.0, 4.0)

    Source: OSDP, 3.1: the (alpha, beta, gamma) model of Hockney 1994.
    """
    if len({row.nbytes / row.group_size for row in measured if row.num_steps}) < 2:
        raise TargetError.of(
            f"{len(measured)} measurements do not tell latency from bandwidth; "
            "give collectives of two devices or more, at two sizes or more.",
            "fit-too-few",
        )
    used = [row for row in measured if row.num_steps]
    seconds = np.array([row.seconds for row in used])
    columns = np.array(
        [[row.num_steps, row.num_steps * row.nbytes / row.group_size] for row in used]
    )
    relative, ones = columns / seconds[:, None], np.ones(len(used))
    alpha, beta = np.linalg.lstsq(relative, ones, rcond=None)[0]
    if alpha < 0:  # noise below the resolution of the sizes: the best fit on the boundary
        alpha, beta = 0.0, np.linalg.lstsq(relative[:, 1:], ones, rcond=None)[0][0]
    if beta <= 0:
        raise TargetError.of(
            "the measured times do not grow with the bytes, so no bandwidth follows from them; "
            "measure larger arrays.",
            "fit-no-bandwidth",
        )
    errors = np.abs(relative @ [alpha, beta] - 1)
    link = Link(Sourced(float(alpha), source), Sourced(float(1 / beta), source))
    return FittedLink(link, float(errors.mean()), float(errors.max()))


def fit_overlap(
    compute_seconds: Sequence[float], sent_seconds: Sequence[float], step_seconds: Sequence[float]
) -> float:
    """The fraction of  min(compute, communication)  that steps hid, kept in [0, 1]: least squares
    of  compute + sent - fraction x min.

    Example:
        >>> fit_overlap([4.0, 2.0], [3.0, 5.0], [7.0 - 1.5, 7.0 - 1.0])
        0.5
    """
    compute, sent, step = (
        np.asarray(column, float) for column in (compute_seconds, sent_seconds, step_seconds)
    )
    most = np.minimum(compute, sent)
    return float(np.clip(most @ (compute + sent - step) / (most @ most), 0, 1))
