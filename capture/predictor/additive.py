"""The default predictor: every part of a stage's memory from measured statistics, put together as
the schedule does.

What the layer graph knows exactly (parameters, gradients, batch leaves, tensors between stages) is
computed; what only the compiler knows (kept activations, running programs, optimizer state) is M_i
plus the sum of M_a of that component. In-flight micro-batches, stage position, shared parameters
and receive buffers enter through the formula, not through the statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from capture.errors import ProfileError
from capture.machine.target import same_target
from capture.measured.profile import Calibration, StageConfig
from capture.measured.size_errors import octaves_away
from capture.measured.stage_cost import SplitCost, StageCost
from capture.memo import memo
from capture.plan.choices import ParamSplit, StageChoice
from capture.plan.kinds import of_stages
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.schedule import SCHEDULES, Occupancy
from capture.plan.stages import Plan
from capture.predictor.alike import Kinds
from capture.predictor.formula import StageMemory, peaks_by_position
from capture.predictor.group_peaks import group_peaks
from capture.predictor.mixture import Mixed
from capture.predictor.same_stages import stage_signature
from capture.predictor.stage_sums import largest_sum, once_per_stage
from capture.predictor.tables import ComponentTables
from capture.step.interface import StageInterface, plan_interfaces

INTERVAL_COVERAGE = 0.98
#: Of a stage that was not compiled, the temporaries may be so much more than the sum over its
#: layers, whatever calibration saw: most stages are predicted to the byte, and the few that are not
#: are not alike. The most that was seen is 24.8 % (Wide-ResNet 1B of ``prediction_error.py``).
UNSEEN_TEMPORARIES_FRACTION = 0.25


class AdditivePredictor(ComponentTables):
    """The predictor of stages and plans of a profiled model.

    Args:
        profile: Measured windows of layers.
        allow_extrapolation: Predict degrees that were not profiled by ``a + b / k``; refused
            otherwise.
    """

    name = "additive"

    # ---- stages ----------------------------------------------------------------------------------

    @memo
    def memory(self, choice: StageChoice, microbatch_size: int) -> StageMemory:
        """Compute the parts of the memory of every stage [first, stop): int64 arrays (L, L + 1),
        bytes per device; meaningless where stop <= first.

        Parts that depend on the other stages of a plan are left out: ``arriving`` is 0, and
        ``summaries`` is the stage's own alone.
        """
        compiled = self._looked_up(choice, microbatch_size)
        table = self.table(choice, microbatch_size)
        if compiled:
            table = table.copy()
        for (first, stop), known in compiled.items():
            # Where it was not compiled with a split backward pass, that is predicted.
            table[:, first, stop] = np.where(np.isnan(known), table[:, first, stop], known)
        parts = dict(zip(self.components, map(_whole_bytes, table), strict=True))
        if self.profile.is_lower_bound and (0, len(table[0])) not in compiled:
            # A stage of the whole model has no others that need anything of it.
            for name in ("summarize", "summary"):
                parts[name][0, -1] = 0
        exact = self._exact(choice, microbatch_size)
        return StageMemory(**exact, summaries=parts.pop("summary"), **parts)

    def _looked_up(
        self, choice: StageChoice, microbatch_size: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """Return the components of the stages that were compiled, by (first, stop). Stages that are
        the same program as one of them get its passes."""
        graph, sizes = self.graph(microbatch_size), self.param_bytes(choice.param_split).tolist()
        at_size = {
            c: cost
            for c, cost in self.profile.verified.items()
            if (c.choice, c.microbatch_size) == (choice, microbatch_size)
        }
        known = {
            (c.first, c.stop): self._components(c.first, c.stop, choice, microbatch_size, cost)
            for c, cost in at_size.items()
        }
        found = dict(known)
        for length in {stop - first for first, stop in known}:
            starts = range(graph.num_layers - length + 1)
            signatures = {
                (first, first + length): stage_signature(
                    graph, first, first + length, sizes, choice.value_split
                )
                for first in starts
            }
            parts_of = {
                signatures[stage]: parts for stage, parts in known.items() if stage in signatures
            }
            for stage, signature in signatures.items():
                if stage not in known and signature in parts_of:
                    table = self.table(choice, microbatch_size)
                    found[stage] = table[:, stage[0], stage[1]].copy()
                    passes = parts_of[signature][: self.num_passes]
                    found[stage][: self.num_passes] = passes
        return found

    def stage_cost(
        self, first: int, stop: int, choice: StageChoice, microbatch_size: int
    ) -> StageCost:
        """Predict the ``StageCost`` that compiling layers [first, stop) would measure, for the
        simulator and the replay.

        All kept bytes are named residuals, because which inputs are among them is not predicted;
        all bytes kept for the gradients of weights are named deferred.
        """
        memory = self.memory(choice, microbatch_size)

        def of(part: np.ndarray) -> int:
            return int(part[first, stop])

        return StageCost(
            residual_bytes=of(memory.kept),
            forward_bytes=of(memory.forward),
            backward_bytes=of(memory.backward),
            update_bytes=of(memory.update),
            optimizer_bytes=of(memory.optimizer),
            kept_inputs=(),
            kept_outputs=(),
            kept_batch=(),
            summarize_bytes=of(memory.summarize),
            summary_bytes=of(memory.summaries),
            split=SplitCost(
                inputs_bytes=of(memory.backward_inputs),
                weights_bytes=of(memory.backward_weights),
                residual_bytes=0,
                deferred_bytes=of(memory.deferred),
            )
            if self.profile.splits_backward
            else None,
        )

    def interfaces(self, plan: Plan) -> list[StageInterface]:
        """Predict the interfaces of a plan's stages, what each holds and hands over in bytes, for
        replays and simulations of its step.

        Raises:
            ProfileError: ``profile-split`` if the plan splits backward passes and the profile was
                made without.
        """
        self.check_split(plan.schedule)
        size = plan.microbatch_size
        costs = [
            self.stage_cost(stage.first, stage.stop, stage.choice, size) for stage in plan.stages
        ]
        splits = {stage.choice.param_split for stage in plan.stages}
        param_bytes = {split: self.param_bytes(split).tolist() for split in splits}
        return plan_interfaces(plan, self.graph(size), param_bytes, costs)

    def check_split(self, schedule: str) -> None:
        """Refuse a schedule that needs measurements which the profile lacks.

        Raises:
            ProfileError: ``profile-split`` if it splits backward passes and the profile was made
                without.
        """
        if SCHEDULES[schedule].splits_backward and not self.profile.splits_backward:
            raise ProfileError.of(
                f"schedule={schedule!r} splits backward passes, which the profile knows nothing "
                f"about; profile with --schedule {schedule}.",
                "profile-split",
            )

    def _exact(self, choice: StageChoice, microbatch_size: int) -> dict[str, np.ndarray]:
        """Return the parts of every stage that the layer graph alone determines: state, gradients,
        received values, batch and losses, in bytes per device."""
        params = self._stage_params(choice.param_split)
        passed_on = self._passed_on(choice.value_split, microbatch_size)
        return {"params": params, "gradients": params, **passed_on}

    @memo
    def _passed_on(
        self, value_split: tuple[int, int], microbatch_size: int
    ) -> dict[str, np.ndarray]:
        """Return the bytes per device of received values, gradients from the next stage, batch
        leaves and losses, each an array (L, L + 1)."""
        graph = self.graph(microbatch_size)
        shape = (graph.num_layers, graph.num_layers + 1)
        sizes = [graph.value_bytes(v, value_split) for v in range(len(graph.values))]
        crossing = [graph.crossing(cut) for cut in range(graph.num_layers + 1)]
        received = np.array([sum(sizes[v] for v in values) for values in crossing])
        returned = np.array(
            [sum(sizes[v] for v in values if graph.values[v].differentiable) for values in crossing]
        )
        leaves = np.array([leaf.shard_bytes(value_split[0]) for leaf in graph.batch])
        losses = np.zeros(shape, np.int64)
        losses[:, -1] = sum(sizes[v] for v in graph.layers[-1].outputs)
        return {
            "received": np.broadcast_to(received[:-1, None], shape),
            "gradients_in": np.broadcast_to(returned[None, :], shape),
            "batch": once_per_stage([layer.batch for layer in graph.layers], leaves),
            "losses": losses,
        }

    @memo
    def _arriving(self, split: ParamSplit, most: int) -> np.ndarray:
        """Return the bytes of gradients of shared parameters that reach every stage at the end of a
        step from at most ``most`` later stages, (L, L + 1)."""
        graph, sizes = self.profile.graph, self.param_bytes(split)
        total = np.zeros((graph.num_layers, graph.num_layers + 1), np.int64)
        cuts = np.arange(graph.num_layers + 1)
        for p in range(len(graph.params)):
            owner, *others = graph.param_readers(p) or (0,)
            if others:
                later = (np.array(others)[:, None] >= cuts).sum(axis=0)
                nbytes = sizes[p] * np.minimum(later, most)
                total[: owner + 1, owner + 1 :] += nbytes[owner + 1 :]
        return total

    @memo
    def _stage_params(self, split: ParamSplit) -> np.ndarray:
        """Return the parameter bytes per device of every stage, (L, L + 1); shared parameters count
        once."""
        params = [layer.params for layer in self.profile.graph.layers]
        return once_per_stage(params, self.param_bytes(split))

    def peaks(
        self,
        choice: StageChoice,
        microbatch_size: int,
        positions: Sequence[Sequence[Occupancy]],
        max_stages: int,
        *,
        least: bool = False,
        kinds: Kinds | None = None,
        mixed: Mixed | None = None,
        optimizer_rests: bool = False,
    ) -> np.ndarray:
        """Compute the peak bytes of every stage at every position: int64 (K, L, L + 1). Row j - 1
        is for j stages to the end; the last row is for K or more.

        How many stages share a parameter that three or more layers read, and the sum of all
        stages' summaries, depend on the cuts behind a stage: they count as in the worst of plans.

        Args:
            choice, microbatch_size: What all stages share.
            positions: What is in flight (``occupancy_by_position``).
            max_stages: Most stages that a plan may have.
            least: Count them as in the best of plans instead.
            kinds: Which stages are alike; those that differ in their parts are split. Each is
                computed once then: (K, S).
            mixed: Mixtures of the choices that this one is measured with, a stage of every kind:
                the result is (K, n, S). None of them is compiled, and ``look_at_parts`` was called.
            optimizer_rests: Whether a host holds optimizer state between updates.
        """
        # Most stages behind one at a position.
        behind = [*range(len(positions) - 1), max_stages - 1]
        ends = [min(n, 1) if least else n for n in behind]
        arriving = {most: self._arriving(choice.param_split, most) for most in set(ends)}
        if kinds is not None:
            kinds.look(*arriving.values(), kept=True)
        memory = self._of_kinds(choice, microbatch_size, least, kinds, mixed)
        if kinds is not None:
            arriving = {most: kinds.once(nbytes) for most, nbytes in arriving.items()}
        gradients = [arriving[n] for n in ends]
        return peaks_by_position(memory, positions, gradients, optimizer_rests)

    def resting_bytes(
        self, choice: StageChoice, microbatch_size: int, kinds: Kinds, mixed: Mixed | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of every stage that may rest on a host, per device: optimizer state, and
        what a micro-batch keeps. Arguments and shapes as of ``peaks``, without positions."""
        memory = self._of_kinds(choice, microbatch_size, True, kinds, mixed)
        return memory.optimizer, memory.kept

    def _of_kinds(
        self,
        choice: StageChoice,
        microbatch_size: int,
        least: bool,
        kinds: Kinds | None,
        mixed: Mixed | None,
    ) -> StageMemory:
        """Return the parts of the memory of every stage; arguments as of ``peaks``."""
        memory = self.memory(choice.measured[-1] if mixed else choice, microbatch_size)
        if not least:
            memory = replace(memory, summaries=largest_sum(memory.summaries))
        if kinds is not None:
            parts = {name: part for name, part in vars(memory).items() if np.ndim(part)}
            kinds.look(*parts.values(), kept=True)
            memory = replace(memory, **{name: kinds.once(part) for name, part in parts.items()})
        if mixed is not None:
            table = map(_whole_bytes, self._mixed(choice, microbatch_size, mixed))
            parts = dict(zip(self.components, table, strict=True))
            own = parts.pop("summary")
            memory = replace(memory, **parts, summaries=own if least else memory.summaries)
        return memory

    def depends_on_cuts_behind(self, choice: StageChoice, microbatch_size: int) -> bool:
        """Tell whether ``peaks`` may be above the best of plans, because they depend on how the
        layers behind a stage are cut."""
        readers = (
            self.profile.graph.param_readers(p) for p in range(len(self.profile.graph.params))
        )
        return any(len(found) > 2 for found in readers) or bool(
            self.memory(choice, microbatch_size).summaries.any()
        )

    # ---- plans -----------------------------------------------------------------------------------

    def predict(self, plan: Plan) -> Prediction:
        """Predict the peak bytes of a plan per stage and per device, with their parts and
        intervals.

        Raises:
            ProfileError: ``profile-other-model`` if the plan is of another model,
                ``profile-target`` if it is for another target than the profile, and the codes of
                ``table``.
        """
        of_stages(plan)
        self._check_model(plan)
        schedule, interfaces = plan.schedule_table, self.interfaces(plan)
        peaks = group_peaks(interfaces, schedule)
        most = group_peaks(self._at_most(plan, interfaces), schedule)
        of_groups = [
            self._of_group(plan, group, sum(sum(own.values()) for own in parts), *peak)
            for group, (_, parts), peak in zip(schedule.stages, most, peaks, strict=True)
        ]
        stages = [
            of_groups[group][schedule.stages[group].index(s)]
            for s, group in enumerate(schedule.placement)
        ]
        per_device = {d: s for s, stage in enumerate(plan.stages) for d in stage.devices}
        order = [stages[per_device[d]] for d in range(plan.cluster.num_devices)]
        return Prediction(
            tuple(stages),
            tuple(stage.peak_bytes for stage in order),
            tuple(stage.interval_bytes for stage in order),
            1.0 if all(stage.verified for stage in stages) else self._coverage(),
            source={**self.profile.provenance, "predictor": self.name},
        )

    def _at_most(self, plan: Plan, interfaces: Sequence[StageInterface]) -> list[StageInterface]:
        """Return the stages of a plan as they are if the programs of those that were not compiled
        need the most that they were seen to."""
        found = []
        for of_plan, stage in zip(plan.stages, interfaces, strict=True):
            config, needs = StageConfig.of(of_plan, plan.microbatch_size), stage.transient_bytes
            if config not in self.profile.measurements and config not in self.profile.verified:
                unsure = self.unsure_bytes(config)
                needs = {
                    name: nbytes
                    if name == "summarize" or not nbytes
                    else ceil(nbytes * (1 + UNSEEN_TEMPORARIES_FRACTION))
                    + unsure * (name in ("backward", "backward_weights"))
                    for name, nbytes in needs.items()
                }
            found.append(replace(stage, transient_bytes=needs))
        return found

    def _of_group(
        self,
        plan: Plan,
        group: Sequence[int],
        most: int,
        instant: str,
        parts: Sequence[Mapping[str, int]],
    ) -> list[StagePrediction]:
        """Predict the stages that share some devices, from the parts of each. Their interval is the
        widest of any of these stages."""
        total: Counter[str] = Counter()
        for own in parts:
            total.update(own)
        peak, size = total.total(), plan.microbatch_size
        configs = [StageConfig.of(plan.stages[s], size) for s in group]
        splits = plan.schedule_table.splits_backward
        verified = all(
            (cost := self.profile.verified.get(config)) is not None
            and (not splits or cost.split is not None)
            for config in configs
        )
        extrapolated = not verified and any(self.is_extrapolated(c.choice, size) for c in configs)
        low = high = 1.0
        if not verified:
            ends = [self._interval(config, extrapolated) for config in configs]
            low, high = min(end for end, _ in ends), max(end for _, end in ends)
            high = max(high, most / max(peak, 1))
        return [
            StagePrediction(
                peak,
                (int(peak * low), int(np.ceil(peak * high))),
                instant,
                dict(total),
                tuple(self._layer_parts(config, own, instant)),
                extrapolated,
                verified,
            )
            for config, own in zip(configs, parts, strict=True)
        ]

    def _check_model(self, plan: Plan) -> None:
        if not same_target(plan.cluster.target, self.profile.target):
            raise ProfileError.of(
                f"the plan is for target={plan.cluster.target!r} and the profile of "
                f"{self.profile.target!r}: what one compiler reports "
                "says little about another's. Profile with --target of the plan.",
                "profile-target",
            )
        known = self.profile.model_hashes.get(plan.microbatch_size, "")
        if plan.num_layers != self.profile.graph.num_layers or (
            plan.model_hash and known and plan.model_hash != known
        ):
            raise ProfileError.of(
                f"the plan is of a model with num_layers={plan.num_layers}, "
                f"model_hash={plan.model_hash or 'unknown'}; the profile is of "
                f"num_layers={self.profile.graph.num_layers}, model_hash={known or 'unknown'}. "
                "Profile the plan's own model.",
                "profile-other-model",
            )

    def _coverage(self) -> float | None:
        known = self.profile.calibration
        return None if known is None else known.coverage(INTERVAL_COVERAGE)

    def _interval(self, config: StageConfig, extrapolated: bool) -> tuple[float, float]:
        calibration = self.profile.calibration or Calibration((), 0, 0)
        num_layers = self.profile.graph.num_layers
        size_known = extrapolated or config in self.profile.measurements
        without_long_windows = not (
            size_known or self.has_long_windows(config.choice, config.microbatch_size)
        )
        if not extrapolated and not without_long_windows:
            return calibration.interval(config, num_layers)
        octaves = octaves_away(config.microbatch_size, self.profile.microbatch_sizes)
        low, high = (
            calibration.interval_off_sizes(config, num_layers, octaves)
            if octaves or without_long_windows
            else calibration.interval(config, num_layers)
        )
        # A degree that was not profiled: a + b / k was seen to miss 8 % at 8 ways and 17 % at 16
        # where a temporary hits a floor.
        known = set(self._known(config.choice)) <= set(self.profile.choices)
        width = 0 if known else 0.17
        return max(0.0, low - width), high + width

    def _layer_parts(
        self, config: StageConfig, parts: Mapping[str, int], instant: str
    ) -> list[dict[str, int]]:
        """Split the parts of a stage over its layers by how the statistics grow as layers are
        added."""
        first, stop = config.first, config.stop
        memory = self.memory(config.choice, config.microbatch_size)
        growth = {
            "parameters": memory.params,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.kept,
            "batch": memory.batch,
            "temporaries": getattr(memory, instant),
        }
        layers: list[dict[str, int]] = [{} for _ in range(first, stop)]
        for category, total in parts.items():
            # What passes between stages belongs to the layer at the border.
            if category not in growth:
                layers[0 if category == "received activations" else -1][category] = total
                continue
            row = growth[category][first, first + 1 : stop + 1]
            shares = np.maximum(np.diff(row, prepend=0), 0)
            for i, share in enumerate(_shared_out(total, shares)):
                if share:
                    layers[i][category] = share
        return layers


def _whole_bytes(nbytes: np.ndarray) -> np.ndarray:
    """Round bytes up to integers; negative or unknown (NaN) bytes become 0."""
    return np.ceil(np.fmax(nbytes, 0)).astype(np.int64)


def _shared_out(total: int, weights: Sequence[int] | np.ndarray) -> list[int]:
    """Divide a total into integers in proportion to the weights; they sum to the total."""
    bounds = np.concatenate([[0], np.cumsum(np.asarray(weights, np.float64))])
    if bounds[-1] <= 0:
        return [total, *[0] * (len(weights) - 1)]
    ends = np.round(total * bounds / bounds[-1]).astype(np.int64)
    return np.diff(ends).tolist()
