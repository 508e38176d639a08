"""Times of every stage from the measured windows of layers: seconds are added up as bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from capture.errors import ProfileError
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.memo import memo
from capture.plan.choices import StageChoice, num_full_layers
from capture.plan.stages import Plan
from capture.predictor import mixture
from capture.predictor.alike import Kinds
from capture.predictor.fit import fit_line
from capture.predictor.mixture import Mixed
from capture.predictor.statistics import extend_split, extend_windows
from capture.step.times import Resource, StageTimes, TimeModel


@dataclass(frozen=True)
class StageTable:
    """The seconds of every stage [first, stop): float64 arrays (L, L + 1), meaningless where stop
    <= first. Those of a split backward pass are 0 where it was not measured."""

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    backward_inputs: np.ndarray
    backward_weights: np.ndarray

    def at(self, *place: int) -> StageTimes:
        return StageTimes(
            **{
                f"{field.name}_seconds": float(getattr(self, field.name)[place])
                for field in fields(self)
            }
        )


def _possible(table: np.ndarray) -> np.ndarray:
    return np.fmax(table, 0)


def _row(seconds: StageTimes) -> np.ndarray:
    return np.array([seconds.of(field.name) for field in fields(StageTable)])


class TimePredictor:
    """A predictor of how long stages take on the profile's target.

    Args:
        profile: A profile whose windows have counted work: of an accelerator, not of virtual CPU
            devices.
        layout: Where the cluster's devices stand (``Cluster.layout``).
        least: Whether windows have lower bounds: a stage then takes at least what all that its
            layers compute takes, and what all that they send does, as one may hide the other.

    Raises:
        ProfileError: ``profile-no-times`` if the target has no rates or the profile was made
            without counting work.
    """

    def __init__(self, profile: Profile, layout: Layout, least: bool = False):
        rates = Target.load(profile.target).rates
        if rates is None or not any(cost.forward_work for cost in profile.measurements.values()):
            raise ProfileError.of(
                f"the profile of target={profile.target!r} says nothing about time; profile for "
                "an accelerator, such as --target a100-40g.",
                "profile-no-times",
            )
        self.profile, self.model = profile, TimeModel(rates, layout)
        counted: tuple[Resource, ...] = ("computing", "sending") if least else ("all",)
        self._models = {each: replace(self.model, counts=each) for each in counted}

    @memo
    def table(self, choice: StageChoice, microbatch_size: int) -> StageTable:
        """Return the seconds of every stage under a choice; compiled stages as they were compiled.

        Raises:
            ProfileError: ``profile-choice`` if the choice was not profiled.
        """
        table = self._most(self._summed(choice, microbatch_size, each) for each in self._models)
        for config, cost in self.profile.verified.items():
            if (config.choice, config.microbatch_size) != (choice, microbatch_size):
                continue
            if (seconds := self.model.stage_times(cost)) is not None:
                row = _row(seconds)
                if self.profile.splits_backward and cost.split is None:
                    row[3:] = table[3:, config.first, config.stop]
                table[:, config.first, config.stop] = row
        return StageTable(*_possible(table))

    @staticmethod
    def _most(tables: Iterable[np.ndarray]) -> np.ndarray:
        """Return a new table of the most seconds of each stage."""
        return np.max([*tables], axis=0)

    @memo
    def _summed(self, choice: StageChoice, microbatch_size: int, counted: Resource) -> np.ndarray:
        """Return the seconds of every stage as one array, with compiled stages summed like others.
        Mixtures are made of such tables: a sum of what layers take is none where some of it is
        known better."""
        if self._rows(choice, microbatch_size, counted):
            return self._extended(choice, microbatch_size, counted)
        known = (each for each in self.profile.windows if each[0] == choice)
        sizes = sorted(size for _, size in known if self._rows(choice, size, counted))
        if sizes:
            lines = [self._extended(choice, size, counted) for size in sizes]
            return fit_line(sizes, lines, microbatch_size)
        if len(choice.measured) > 1:
            num_layers = self.profile.graph.num_layers
            mixed = Mixed.every(num_layers, num_full_layers(choice.remat))
            return self._mixed(choice, microbatch_size, mixed, counted)
        raise ProfileError.of(
            f"{choice} was not profiled, so its time is unknown; profile it.", "profile-choice"
        )

    def _mixed(
        self, choice: StageChoice, microbatch_size: int, mixed: Mixed, counted: Resource
    ) -> np.ndarray:
        full, cheap = (
            _possible(self._summed(part, microbatch_size, counted)) for part in choice.measured
        )
        return mixture.seconds(full, cheap, mixed)

    def look_at_parts(self, choice: StageChoice, microbatch_size: int, kinds: Kinds) -> None:
        """Split kinds whose stages differ in anything that mixtures of a choice are made of."""
        for each in self._models:
            parts = (self._summed(part, microbatch_size, each) for part in choice.measured)
            kinds.look(*parts, kept=True)

    def mixtures(self, choice: StageChoice, microbatch_size: int, mixed: Mixed) -> StageTable:
        """Return the seconds of mixed stages, (n, S). No compiled stage is used, and
        ``look_at_parts`` was called before."""
        tables = (self._mixed(choice, microbatch_size, mixed, each) for each in self._models)
        return StageTable(*_possible(self._most(tables)))

    @memo
    def _rows(
        self, choice: StageChoice, microbatch_size: int, counted: Resource
    ) -> dict[tuple[int, int], np.ndarray]:
        """Return the seconds of measured windows whose work was counted."""
        windows: dict[tuple[int, int], np.ndarray] = {}
        model = self._models[counted]
        rows: dict[int, np.ndarray] = {}  # windows that are alike often have the same object
        for window, cost in self.profile.windows.get((choice, microbatch_size), {}).items():
            if id(cost) not in rows and (seconds := model.stage_times(cost)) is not None:
                rows[id(cost)] = _row(seconds)
            if id(cost) in rows:
                windows[window] = rows[id(cost)]
        return windows

    def _extended(self, choice: StageChoice, microbatch_size: int, counted: Resource) -> np.ndarray:
        windows = self._rows(choice, microbatch_size, counted)
        num_layers = self.profile.graph.num_layers
        if self.profile.splits_backward:
            names = [field.name for field in fields(StageTable)]
            inputs, weights = names.index("backward_inputs"), names.index("backward_weights")
            like = {weights: names.index("backward")}
            table, drift = extend_split(windows, num_layers, None, inputs=inputs, like=like)
        else:
            table, drift = extend_windows(windows, num_layers)
        return table + drift

    def microbatch_seconds(self, config: StageConfig) -> float:
        """Return the seconds of a micro-batch on a stage, forward and backward."""
        table = self.table(config.choice, config.microbatch_size)
        return table.at(config.first, config.stop).microbatch_seconds

    def stage_times(self, plan: Plan) -> tuple[StageTimes, ...]:
        """Return the seconds of the programs of every stage of a plan, in pipeline order."""
        return tuple(
            self.table(stage.choice, plan.microbatch_size).at(stage.first, stage.stop)
            for stage in plan.stages
        )
