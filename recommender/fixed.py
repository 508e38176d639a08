"""The decisions of a known plan that are not searched again (``capture plan --fix``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from capture.plan.choices import StageChoice, num_full_layers
from capture.plan.stage import Stage

#: Decisions of a choice.
_OF_CHOICES = ("degrees", "remat", "sharding", "sequence")
#: Every decision of a plan.
DECISIONS = ("microbatches", "schedule", "stages", *_OF_CHOICES)


@dataclass(frozen=True)
class FixedPlan:
    """The stages of a known plan and the decisions of it that stay; where stages are searched, each
    decides the rest as one of these does.

    Attributes:
        stages: The plan's.
        decisions: Some of ``DECISIONS``: micro-batches and schedule, which are for others to keep;
            the layers and the number of devices of every stage, its degrees, what it recomputes,
            what its replicas split, and sequence parallelism.
    """

    stages: tuple[Stage, ...]
    decisions: tuple[str, ...]

    def without(self, decision: str) -> FixedPlan:
        """Return a copy in which one more decision is searched."""
        return replace(self, decisions=tuple(n for n in self.decisions if n != decision))

    def allows(self, choice: StageChoice, first: int, stop: int) -> bool:
        """Return whether a plan may have a stage of these layers with this choice."""
        return any(
            self._is_alike(choice, stage.choice)
            for stage in self.stages
            if "stages" not in self.decisions
            or (stage.first, stage.stop, stage.num_devices) == (first, stop, choice.num_devices)
        )

    def allowed(self, choice: StageChoice, num_layers: int) -> np.ndarray:
        """Return which stages of a model a plan may have with this choice, bool (L, L + 1)."""
        if "stages" not in self.decisions:
            return np.full((num_layers, num_layers + 1), self.allows(choice, 0, num_layers))
        found = np.zeros((num_layers, num_layers + 1), dtype=bool)
        for stage in self.stages:
            found[stage.first, stage.stop] = self.allows(choice, stage.first, stage.stop)
        return found

    def mixtures(self, measured: Sequence[StageChoice]) -> list[StageChoice]:
        """Return the mixed choices of the plan's stages whose parts are measured."""
        remats = {
            stage.choice.remat for stage in self.stages if num_full_layers(stage.choice.remat)
        }
        found = (replace(choice, remat=remat) for choice in measured for remat in sorted(remats))
        return [each for each in dict.fromkeys(found) if {*each.measured} <= {*measured}]

    def is_measured_for(self, measured: StageChoice) -> bool:
        """Return whether a choice is one of a stage's, or part of a stage's mixture."""
        return any(
            self._is_alike(measured, part)
            for stage in self.stages
            for part in stage.choice.measured
        )

    def _is_alike(self, choice: StageChoice, of_plan: StageChoice) -> bool:
        return all(
            _decided(choice, name) == _decided(of_plan, name)
            for name in {*self.decisions} & {*_OF_CHOICES}
            if _decides(choice, name) and _decides(of_plan, name)
        )


def _decides(choice: StageChoice, name: str) -> bool:
    """Return whether a stage makes this decision: one without replicas splits nothing over them."""
    needed = {"sharding": choice.data_parallel, "sequence": choice.tensor_parallel}
    return needed.get(name, 2) > 1


def _decided(choice: StageChoice, name: str) -> Any:
    if name == "degrees":
        return choice.data_parallel, choice.tensor_parallel
    if name == "sharding":
        return choice.shard_optimizer, choice.shard_params
    return choice.remat if name == "remat" else choice.sequence_parallel
