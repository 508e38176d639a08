"""The paper's predictor, as printed: peaks only, a straight line over the batch, a logarithm over
the degree, no schedule.

    M_p(l, l + n) = M_i(l) + sum of M_a(k), k = l + 1 .. l + n                    (III-B1)
    straight line through the two profiled batch sizes, at the target batch         (Description 2)
    logarithm through 2- and 4-way, at higher degrees                               (III-B3)

Kept to be compared with. Its known errors (READINGS.md, C-h and C-w): no adjustment for 1F1B, and a
logarithm that turns negative at high degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from capture.errors import ProfileError, Violation
from capture.measured.profile import Profile
from capture.memo import memo
from capture.papers.capture.profile import PaperStatistics
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.stages import Plan
from capture.predictor.fit import fit_degree, fit_line, inverse
from recommender.capture.problem import NEVER

MAX_PROFILED_DEGREE = 4

#: Factors on a prediction. Not calibrated: the straight line over micro-batches was seen to predict
#: 2.0 times what a stage needs under 1F1B, and the logarithm through 2- and 4-way to miss 8-way by
#: 51 %.
INTERVAL_FACTORS = (0.25, 2.0)

#: The category of a peak whose parts no run tells.
NOT_ITEMISED = "not itemised"


def predictor_of(profile: Profile) -> PaperPredictor:
    """Return the paper's predictor over the runs that a profile holds.

    Raises:
        ProfileError: ``profile-paper`` if it has none.
    """
    if profile.paper is None:
        raise ProfileError.of(
            "the profile has no runs of the paper's kind; make it with capture profile --mode "
            "paper.",
            "profile-paper",
        )
    return PaperPredictor(PaperStatistics.from_json(profile.paper))


class PaperPredictor:
    """The predictor of stages' peaks from the statistics of the paper's runs.

    Args:
        statistics: Of the runs.
        fit: ``"log"`` as printed, ``"inverse"`` for a + b / k in its place.
    """

    name = "paper"

    def __init__(self, statistics: PaperStatistics, fit: str = "log"):
        self._statistics, self._transform = statistics, np.log if fit == "log" else inverse

    @memo
    def peaks(self, choice: StageChoice, num_microbatches: int) -> np.ndarray:
        """Return predicted peaks of every stage: float64 (L, L + 1), NaN where a statistic is
        missing or stop <= first.

        Raises:
            ProfileError: ``profile-choice`` for data and tensor parallelism together, or a degree
                that cannot be fitted.
        """
        known: Mapping[StageChoice, Any] = self._statistics.statistics
        if choice in known:
            sizes = sorted(known[choice])
            tables = [_sums(known[choice][m].isolated, known[choice][m].added) for m in sizes]
            return fit_line(sizes, tables, num_microbatches)
        degree = choice.num_devices
        profiled = _fitted_from(choice)
        if (
            min(choice.data_parallel, choice.tensor_parallel) > 1
            or degree <= MAX_PROFILED_DEGREE
            or any(c not in known for c in profiled)
        ):
            raise ProfileError.of(
                f"the paper's profile has no runs for data_parallel={choice.data_parallel} x "
                f"tensor_parallel={choice.tensor_parallel} with "
                f"remat={choice.remat!r}: it predicts data or tensor parallelism alone, 1-, 2- "
                "and 4-way and higher powers of two.",
                "profile-choice",
            )
        return fit_degree(
            [2, 4], [self.peaks(c, num_microbatches) for c in profiled], degree, self._transform
        )

    def rows(self, num_microbatches: int) -> Callable[[StageChoice], np.ndarray]:
        """Return the bytes that a search looks at, by choice: shape (1, L, L + 1)."""

        def of(choice: StageChoice) -> np.ndarray:
            peaks = self.peaks(choice, num_microbatches)
            whole = np.where(np.isnan(peaks), NEVER, np.ceil(np.nan_to_num(peaks)))
            return whole.astype(np.int64)[None]

        return of

    def choices(self, degrees: Iterable[int]) -> tuple[StageChoice, ...]:
        """Return the choices on these numbers of devices that can be predicted."""
        known = self._statistics.statistics
        kinds = {(choice.remat, choice.shard_optimizer) for choice in known}
        pure = {(d, 1) for d in degrees} | {(1, d) for d in degrees}
        every = sorted(StageChoice(dp, tp, *kind) for dp, tp in pure for kind in kinds)
        return tuple(
            c
            for c in every
            if c in known
            or (c.num_devices > MAX_PROFILED_DEGREE and all(of in known for of in _fitted_from(c)))
        )

    def prediction(self, plan: Plan, provenance: Mapping[str, object]) -> Prediction:
        """Return the peaks of a plan as a prediction: a peak per stage, without its parts.

        Args:
            plan: To predict.
            provenance: Where the profile's measurements are from.

        Raises:
            ProfileError: ``profile-missing`` naming the stages that lack a statistic, and the codes
                of ``peaks``.
        """
        peaks = [
            float(self.peaks(stage.choice, plan.num_microbatches)[stage.first, stage.stop])
            for stage in plan.stages
        ]
        ProfileError.check(
            Violation(
                f"stage {s} (layers {stage.first} to {stage.stop - 1}) lacks M_i or M_a of the "
                "paper's runs; see which runs failed, and "
                "profile again.",
                "profile-missing",
            )
            for s, (stage, peak) in enumerate(zip(plan.stages, peaks, strict=True))
            if np.isnan(peak)
        )
        low, high = INTERVAL_FACTORS
        stages = tuple(
            StagePrediction(
                peak,
                (int(peak * low), int(np.ceil(peak * high))),
                "unknown",
                {NOT_ITEMISED: peak},
                ({},) * stage.num_layers,
                stage.choice not in self._statistics.statistics,
            )
            for stage, peak in zip(plan.stages, (int(np.ceil(peak)) for peak in peaks), strict=True)
        )
        of_device = {
            d: predicted
            for stage, predicted in zip(plan.stages, stages, strict=True)
            for d in stage.devices
        }
        order = [of_device[d] for d in range(plan.cluster.num_devices)]
        return Prediction(
            stages,
            tuple(stage.peak_bytes for stage in order),
            tuple(stage.interval_bytes for stage in order),
            source={**provenance, "predictor": self.name},
        )

    def predict(self, plan: Plan) -> tuple[float, ...]:
        """Return the peak per device in node-major order; NaN where a statistic is missing."""
        peaks = {}
        for stage in plan.stages:
            for device in stage.devices:
                peaks[device] = float(
                    self.peaks(stage.choice, plan.num_microbatches)[stage.first, stage.stop]
                )
        return tuple(peaks[d] for d in range(plan.cluster.num_devices))


def _fitted_from(choice: StageChoice) -> list[StageChoice]:
    """Return the 2- and 4-way choices of the same kind, through which higher degrees are fitted."""
    return [
        StageChoice(
            *((k, 1) if choice.data_parallel > 1 else (1, k)), choice.remat, choice.shard_optimizer
        )
        for k in (2, 4)
    ]


def _sums(isolated: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Return M_i(first) + the sum of M_a up to stop, for every stage."""
    num_layers = len(isolated)
    table = np.full((num_layers, num_layers + 1), np.nan)
    for first in range(num_layers):
        table[first, first + 1 :] = isolated[first] + np.concatenate(
            [[0.0], np.cumsum(added[first + 1 :])]
        )
    return table
