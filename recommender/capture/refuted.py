"""Bounds that a compiled stage refutes: errors of this program, which are said and relied upon no
longer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from capture.measured.profile import REFUSED_BYTES, Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.measured.work import ProgramWork
from capture.predictor import AdditivePredictor

#: The fields of a cost that a bound has, by what a message calls them.
_FIELDS = {
    "kept": "residual_bytes",
    "forward": "forward_bytes",
    "backward": "backward_bytes",
    "update": "update_bytes",
    "optimizer": "optimizer_bytes",
    "summarize": "summarize_bytes",
}


@dataclass(frozen=True)
class Refuted:
    """A lower bound of a stage that the compiler is below.

    Attributes:
        config: The stage.
        part: What is bounded: ``kept``, ``forward``, ``backward``, ``update``,
            ``optimizer``, ``summarize`` in bytes, or ``seconds``.
        least: The bound.
        compiled: What the compiler says.
    """

    config: StageConfig
    part: str
    least: float
    compiled: float

    def __str__(self) -> str:
        config, unit = self.config, " s" if self.part == "seconds" else " bytes"
        least, compiled = (
            f"{each:.3g}" if self.part == "seconds" else f"{each:,}"
            for each in (self.least, self.compiled)
        )
        return (
            f"a lower bound is wrong: layers {config.first} to {config.stop - 1} ({config.choice}, "
            f"micro-batches of {config.microbatch_size}) were to need at least {least}{unit} "
            f"({self.part}), and compile to {compiled}{unit}. This is an error of capture: please "
            f"report it. No bound of this kind ({self.part}) was used from there on."
        )


def refuted(
    bounds: AdditivePredictor, compiled: Mapping[StageConfig, StageCost]
) -> Iterable[Refuted]:
    """Yield the bounds that compiled stages are below.

    Args:
        bounds: Of a profile of lower bounds, without compiled stages.
        compiled: Costs as a profile has them of compiled stages.
    """
    for config, cost in compiled.items():
        if cost.forward_bytes >= REFUSED_BYTES:
            continue
        memory = bounds.memory(config.choice, config.microbatch_size)
        for part, field in _FIELDS.items():
            least = int(getattr(memory, part)[config.first, config.stop])
            if least > getattr(cost, field):
                yield Refuted(config, part, least, getattr(cost, field))


def without_bounds(profile: Profile, parts: Collection[str]) -> Profile:
    """Return a profile in which the lower bounds of some kinds are 0."""
    return replace(
        profile,
        measurements={c: _without(cost, parts) for c, cost in profile.measurements.items()},
    )


def _without(cost: StageCost, parts: Collection[str]) -> StageCost:
    changes: dict[str, Any] = {field: 0 for p, field in _FIELDS.items() if p in parts}
    cost = cost.keeping(0) if "kept" in parts else cost
    if "seconds" in parts:
        for name in ("forward_work", "backward_work", "update_work"):
            work = getattr(cost, name)
            changes[name] = work and ProgramWork(0, work.dtype, 0, 0, kernels=())
    return replace(cost, **changes)
