"""Alpha and beta of a link from measured collectives, or from copies between a device and its host,
and how much of a step's communication was hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from capture.errors import TargetError
from capture.machine.links import ring_steps
from capture.machine.rates import HostLink, Link, Sourced


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective and the seconds that it took.

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
    """A link, and its errors on the measurements it was fitted to (fractions of their seconds)."""

    link: Link
    mean_error_fraction: float
    max_error_fraction: float


def fit_link(measured: Sequence[MeasuredCollective], source: str) -> FittedLink:
    """Fit a link to collectives: least squares of the relative errors of  steps x (alpha + beta
    bytes / n), with alpha >= 0.

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
    steps = [(row.num_steps, row.num_steps * row.nbytes / row.group_size) for row in used]
    return _fitted(steps, [row.seconds for row in used], source)


def _fitted(
    columns: Sequence[tuple[float, float]], seconds: Sequence[float], source: str
) -> FittedLink:
    """Fit alpha and beta to seconds, from rows of (messages one after the other, bytes sent)."""
    measured = np.asarray(seconds)
    relative, ones = np.asarray(columns) / measured[:, None], np.ones(len(measured))
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


#: Of what the quicker direction takes, the part that has to run beside the other one for both to
#: count as independent: of a link that shares a little, no copy is said to be quicker than it is.
DUPLEX_FRACTION = 0.9


@dataclass(frozen=True)
class MeasuredCopies:
    """Seconds of copies of one size between a device and its host.

    Attributes:
        nbytes: In each direction.
        to_device, to_host: Of each, alone.
        both: Until both have ended, begun together.
    """

    nbytes: int
    to_device: float
    to_host: float
    both: float


@dataclass(frozen=True)
class FittedHostLink:
    """A host's link, and the errors with which it explains the copies in each direction.

    Attributes:
        link: Fitted.
        to_device, to_host: Each direction.
        hidden_fraction: Of the shorter of two copies, what ran beside the other.
    """

    link: HostLink
    to_device: FittedLink
    to_host: FittedLink
    hidden_fraction: float


def fit_host_link(measured: Sequence[MeasuredCopies], source: str) -> FittedHostLink:
    """Fit each direction of a host's link as ``fit_link`` does, with one message per copy. It is
    duplex if copies in both directions hide each other.

    Args:
        measured: Of two sizes or more.
        source: What was measured, for the numbers' record.

    Raises:
        TargetError: ``fit-too-few``, ``fit-no-bandwidth``.

    Example:
        >>> rows = [MeasuredCopies(n, 1e-5 + n / 4e9, 1e-5 + n / 2e9, n / 1e9) for n in (1e6, 1e8)]
        >>> found = fit_host_link(rows, "planted").link
        >>> round(found.to_host.seconds(10**8), 6), found.duplex
        (0.05001, False)
    """
    if len({row.nbytes for row in measured}) < 2:
        raise TargetError.of(
            f"{len(measured)} copies do not tell latency from bandwidth; measure two sizes or "
            "more.",
            "fit-too-few",
        )
    sizes = [(1.0, float(row.nbytes)) for row in measured]
    to_device = _fitted(sizes, [row.to_device for row in measured], source)
    to_host = _fitted(sizes, [row.to_host for row in measured], source)
    hidden = fit_overlap(
        [row.to_device for row in measured],
        [row.to_host for row in measured],
        [row.both for row in measured],
    )
    said = f"{source}: {hidden:.0%} of the shorter of two copies ran beside the other"
    link = HostLink(to_device.link, to_host.link, hidden >= DUPLEX_FRACTION, said)
    return FittedHostLink(link, to_device, to_host, hidden)


def fit_overlap(
    compute_seconds: Sequence[float], sent_seconds: Sequence[float], step_seconds: Sequence[float]
) -> float:
    """Return the fraction of  min(compute, communication)  that steps hid, kept in [0, 1]: least
    squares of  compute + sent - fraction x min.

    Example:
        >>> fit_overlap([4.0, 2.0], [3.0, 5.0], [7.0 - 1.5, 7.0 - 1.0])
        0.5
    """
    compute, sent, step = (
        np.asarray(column, float) for column in (compute_seconds, sent_seconds, step_seconds)
    )
    most = np.minimum(compute, sent)
    return float(np.clip(most @ (compute + sent - step) / (most @ most), 0, 1))
