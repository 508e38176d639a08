"""The stages of a model between two bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost, StageCost


@dataclass(frozen=True)
class Bounds:
    """The stages of a model between two bounds, at one micro-batch size.

    Attributes:
        least: Profile of lower bounds: no compiled stage of a plan needs less.
        most: Profile of expected costs: as much as compilers were seen to need.
    """

    least: Profile
    most: Profile

    @cached_property
    def split(self) -> Bounds:
        """The bounds with split backward passes, for which nothing measured bounds what the two
        programs need."""
        return Bounds(_with_split(self.least, _NOTHING), _with_split(self.most, None))


_NOTHING = SplitCost(0, 0, 0, 0)


def _with_split(profile: Profile, split: SplitCost | None) -> Profile:
    """Return a profile whose costs have a split backward pass: the given one, or the expected one.
    Costs that were the same object still are."""
    found: dict[tuple[int, bool], StageCost] = {}

    def cost_of(config: StageConfig, cost: StageCost) -> StageCost:
        key = (id(cost), config.first == 0)
        if key not in found:
            found[key] = replace(cost, split=split or _expected(cost, config.first == 0))
        return found[key]

    costs = {config: cost_of(config, cost) for config, cost in profile.measurements.items()}
    return replace(profile, measurements=costs)


def _expected(cost: StageCost, is_first: bool) -> SplitCost:
    """Return the expected cost of a split backward pass: each program needs what the whole pass
    does, and all that is kept waits for the gradients of weights. The first layers have no
    gradients of inputs."""
    return SplitCost(
        0 if is_first else cost.backward_bytes,
        cost.backward_bytes,
        cost.residual_bytes,
        0,
        cost.kept_inputs,
        cost.kept_outputs,
        cost.kept_batch,
    )
