"""How often to save a training whose devices fail, and how much of its time is not lost.

Failures are independent of each other and of time, on average M seconds apart. A save takes d
seconds, in which nothing is trained; after a failure the last save is read, which takes R seconds.
With t seconds of training between two saves:

    waste, first order   d / t + t / (2 M), least at t = sqrt(2 d M)                  (Young)
    best t               sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d; M from d = 2 M on
    goodput              t / (M exp(R / M) (exp((t + d) / M) - 1))

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM, 1974;
J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
Generation Computer Systems 22, 2006: the second and third line.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from capture.quantities import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class Saving:
    """The saves of a training whose devices fail.

    Attributes:
        mtbf_seconds: Mean time between failures of all devices together.
        state_bytes: Bytes of a save: parameters and optimizer state of the model, each once.
        save_seconds: Seconds of a save, and of reading it.
        interval_seconds: Seconds of training between two saves (Daly).
        goodput_fraction: The part of the time that is expected to go into training that is kept.

    Example:
        >>> saving = Saving.of(24 * 3600, state_bytes=300 * 10**9, bytes_per_second=10**9)
        >>> print(saving)
        a failure every 24 h, 300 GB of state saved in 300 s: save every 1.94 h, goodput 91.58%
    """

    mtbf_seconds: float
    state_bytes: int
    save_seconds: float
    interval_seconds: float
    goodput_fraction: float

    @classmethod
    def of(cls, mtbf_seconds: float, state_bytes: int, bytes_per_second: float) -> Saving:
        """Return the saves whose interval is best.

        Args:
            mtbf_seconds: Mean time between failures of all devices together.
            state_bytes: Bytes of a save.
            bytes_per_second: The rate at which all nodes together write and read them.
        """
        save = state_bytes / bytes_per_second
        interval = daly_interval(save, mtbf_seconds)
        fraction = goodput(interval, save, save, mtbf_seconds)
        return cls(mtbf_seconds, state_bytes, save, interval, fraction)

    def __str__(self) -> str:
        return (
            f"a failure every {_long(self.mtbf_seconds)}, {format_bytes(self.state_bytes)} of "
            f"state saved in {format_seconds(self.save_seconds)}: save every "
            f"{_long(self.interval_seconds)}, goodput {self.goodput_fraction:.2%}"
        )


def _long(seconds: float) -> str:
    """Write a duration, in hours from one hour on."""
    return f"{format_rate(seconds / 3600)} h" if seconds >= 3600 else format_seconds(seconds)


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between two saves that waste least, to first order (Young)."""
    return sqrt(2 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between two saves that waste least (Daly)."""
    part = save_seconds / (2 * mtbf_seconds)
    if part >= 1:
        return mtbf_seconds
    higher = 1 + sqrt(part) / 3 + part / 9
    return young_interval(save_seconds, mtbf_seconds) * higher - save_seconds


def goodput(
    interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Return the part of the time that is expected to go into training that is kept (Daly).

    Args:
        interval_seconds: Training between two saves.
        save_seconds: Seconds of a save.
        restart_seconds: Seconds from a failure until training goes on from the last save.
        mtbf_seconds: Mean time between failures of all devices together.
    """
    both = (interval_seconds + save_seconds) / mtbf_seconds
    # exp(both) itself may be too large for a float.
    kept = exp(-both - restart_seconds / mtbf_seconds) / -expm1(-both)
    return interval_seconds / mtbf_seconds * kept
