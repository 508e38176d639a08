"""The default predictor: every part of a stage's memory from measured statistics, put together as
the schedule does.

What the layer graph knows exactly (parameters, gradients, batch leaves, tensors between stages) is
computed; what only the compiler knows (kept activations, running programs, optimizer state) is M_i
plus the sum of M_a of that component. In-flight micro-batches, stage position, shared parameters
and receive buffers enter through the formula, not through the statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from capture.errors import ProfileError, plain
from capture.machine.target import same_target
from capture.measured.profile import Calibration, Profile, StageConfig
from capture.measured.size_errors import octaves_away
from capture.measured.stage_cost import StageCost
from capture.model.graph import LayerGraph
from capture.plan.choices import ParamSplit, StageChoice
from capture.plan.kinds import of_stages
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.schedule import make_schedule, occupancy_by_position
from capture.plan.stages import Plan
from capture.predictor.fit import fit_degrees, fit_line
from capture.predictor.formula import (
    StageMemory,
    kept_bytes,
    of_interfaces,
    peak_parts,
    peaks_by_position,
)
from capture.predictor.same_stages import stage_signature
from capture.predictor.statistics import extend_windows
from capture.step.interface import StageInterface, plan_interfaces

#: Rows of a statistics table.
COMPONENTS = ("kept", "forward", "backward", "update", "optimizer", "summarize", "summary")
#: The first of them, which depend on the layers alone and grow with the examples; the others belong
#: to parameters and optimizer.
_PASSES = 3
_TEMPORARIES = ("forward", "backward")
INTERVAL_COVERAGE = 0.98
#: Of a stage that was not compiled, the temporaries may be so much more than the sum over its
#: layers, whatever calibration saw: most stages are predicted to the byte, and the few that are not
#: are not alike (``benchmarks/model_kit.py``).
UNSEEN_TEMPORARIES_FRACTION = 0.15


class AdditivePredictor:
    """Predicts stages and plans of a profiled model.

    Args:
        profile: Measured windows of layers.
        allow_extrapolation: Predict degrees that were not profiled by ``a + b / k``; refused
            otherwise.

    Example:
        See ``capture.predictor`` in the README.
    """

    name = "additive"

    def __init__(self, profile: Profile, *, allow_extrapolation: bool = False):
        self.profile, self._extrapolates = profile, allow_extrapolation
        self._graphs: dict[int, LayerGraph] = {}
        self._tables: dict[tuple[StageChoice, int], np.ndarray] = {}
        self._params: dict[ParamSplit, np.ndarray] = {}
        self._memories: dict[tuple[StageChoice, int], StageMemory] = {}
        self._windows: dict[tuple[StageChoice, int], dict[tuple[int, int], np.ndarray]] = {}
        for config, cost in profile.measurements.items():
            windows = self._windows.setdefault((config.choice, config.microbatch_size), {})
            windows[config.first, config.stop] = self._components(
                config.first, config.stop, config.choice, config.microbatch_size, cost
            )

    # ---- statistics
    # ----------------------------------------------------------------------------------------------

    def graph(self, microbatch_size: int) -> LayerGraph:
        if microbatch_size not in self._graphs:
            self._graphs[microbatch_size] = self.profile.graph_at(microbatch_size)
        return self._graphs[microbatch_size]

    def _components(
        self, first: int, stop: int, choice: StageChoice, microbatch_size: int, cost: StageCost
    ) -> np.ndarray:
        kept = kept_bytes(self.graph(microbatch_size), first, stop, choice.data_parallel, cost)
        of_update = (
            cost.update_bytes,
            cost.optimizer_bytes,
            cost.summarize_bytes,
            cost.summary_bytes,
        )
        return np.array([kept, cost.forward_bytes, cost.backward_bytes, *of_update], np.float64)

    def _measured_table(
        self,
        choice: StageChoice,
        microbatch_size: int,
        only: Collection[tuple[int, int]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        windows = self._windows[choice, microbatch_size]
        if only is not None:
            windows = {window: parts for window, parts in windows.items() if window in only}
        try:
            graph = self.profile.graph
            return extend_windows(windows, graph.num_layers, [layer.key for layer in graph.layers])
        except KeyError as error:
            first, stop = error.args[0]
            failed = "\n".join(f"failed: {plain(failure)}" for failure in self.profile.failures)
            raise ProfileError.of(
                (
                    f"the profile lacks {StageConfig(first, stop, choice, microbatch_size)}, which "
                    "predictions are built from"
                )
                + (
                    f":\n{failed}"
                    if failed
                    else ". Run capture profile again: it resumes and names what fails."
                ),
                "profile-missing",
            ) from None

    def table(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        """Components of every stage: float64 (len(COMPONENTS), L, L + 1), bytes per device.

        Raises:
            ProfileError: ``profile-choice`` if the choice was not profiled and extrapolation is not
                allowed, ``profile-missing``.
        """
        key = (choice, microbatch_size)
        if key not in self._tables:
            sizes = sorted(size for known, size in self._windows if known == choice)
            if microbatch_size in sizes:
                table, drift = self._measured_table(choice, microbatch_size)
                self._tables[key] = table + drift
            elif sizes:
                self._tables[key] = self._table_off_sizes(choice, sizes, microbatch_size)
            else:
                self._tables[key] = self._extrapolated_table(choice, microbatch_size)
        return self._tables[key]

    def _table_off_sizes(
        self, choice: StageChoice, sizes: Sequence[int], microbatch_size: int
    ) -> np.ndarray:
        """The table at a size that was not profiled: that of the nearest size above, times what a
        stage grows by.

        It grows as the line through the two nearest sizes, of windows that both have, because sums
        of others are not comparable. A program's temporaries are those of its hungriest layers,
        which may be other layers at another size: a stage counts as much as any part of it. What
        belongs to parameters stays as it is.
        """
        above = next((i for i, size in enumerate(sizes) if size > microbatch_size), len(sizes))
        near = sizes[max(0, min(above - 1, len(sizes) - 2)) :][:2]
        base, alike = near[-1], [self._windows[choice, size] for size in near]
        common = {window for window in alike[0] if all(window in windows for windows in alike)}
        lines = [np.add(*self._measured_table(choice, size, common)) for size in near]
        line = fit_line(near, lines, microbatch_size)
        table = np.add(*self._measured_table(choice, base))
        growth = np.where(
            lines[-1] > 0, line / np.where(lines[-1] > 0, lines[-1], 1), microbatch_size / base
        )
        growth = np.maximum(growth, 1) if microbatch_size > base else np.clip(growth, 0, 1)
        for row, component in enumerate(COMPONENTS):
            if row < _PASSES:
                table[row] *= growth[row]
            if component in _TEMPORARIES:
                table[row] = _largest_part(table[row])
        return table

    def can_predict(self, choice: StageChoice, microbatch_size: int) -> bool:
        """Whether the profile holds all that predictions of a choice are built from."""
        try:
            self.table(choice, microbatch_size)
        except ProfileError:
            return False
        return True

    def _extrapolated_table(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        alike = {
            (known.data_parallel, known.tensor_parallel): known
            for known in self.profile.choices
            if _kind(known) == _kind(choice)
        }
        if not self._extrapolates or not alike:
            profiled = ", ".join(f"{dp}x{tp}" for dp, tp in sorted(alike)) or "none"
            raise ProfileError.of(
                f"data_parallel={choice.data_parallel} x tensor_parallel={choice.tensor_parallel} "
                f"with remat={choice.remat!r}, "
                f"shard_optimizer={choice.shard_optimizer}, shard_params={choice.shard_params} "
                "was not profiled (profiled degrees: "
                f"{profiled}); profile it, or allow extrapolation.",
                "profile-choice",
            )
        tables = {degrees: self.table(known, microbatch_size) for degrees, known in alike.items()}
        return fit_degrees(tables, (choice.data_parallel, choice.tensor_parallel))

    def is_extrapolated(self, choice: StageChoice, microbatch_size: int) -> bool:
        return (choice, microbatch_size) not in self._windows

    # ---- stages
    # ----------------------------------------------------------------------------------------------

    def memory(self, choice: StageChoice, microbatch_size: int) -> StageMemory:
        """The parts of every stage [first, stop) at once: int64 arrays (L, L + 1); nonsense where
        stop <= first.

        But for what depends on the other stages of a plan: ``arriving`` is 0, and ``summaries`` is
        the stage's own alone.
        """
        key = (choice, microbatch_size)
        if key not in self._memories:
            table = np.nan_to_num(self.table(choice, microbatch_size))
            for (first, stop), known in self._looked_up(choice, microbatch_size).items():
                table[:, first, stop] = known
            parts = dict(
                zip(COMPONENTS, np.ceil(np.maximum(table, 0)).astype(np.int64), strict=True)
            )
            self._memories[key] = StageMemory(
                **self._exact(choice, microbatch_size), summaries=parts.pop("summary"), **parts
            )
        return self._memories[key]

    def _looked_up(
        self, choice: StageChoice, microbatch_size: int
    ) -> dict[tuple[int, int], np.ndarray]:
        """Components of the stages that were compiled as they are; what the passes need, also of
        those that are the same program."""
        graph, sizes = self.graph(microbatch_size), self._param_bytes(choice.param_split).tolist()
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
                (first, first + length): stage_signature(graph, first, first + length, sizes)
                for first in starts
            }
            parts_of = {
                signatures[stage]: parts for stage, parts in known.items() if stage in signatures
            }
            for stage, signature in signatures.items():
                if stage not in known and signature in parts_of:
                    found[stage] = self._tables[choice, microbatch_size][
                        :, stage[0], stage[1]
                    ].copy()
                    found[stage][:_PASSES] = parts_of[signature][:_PASSES]
        return found

    def stage_cost(
        self, first: int, stop: int, choice: StageChoice, microbatch_size: int
    ) -> StageCost:
        """What the compiler is predicted to say of layers [first, stop): for the simulator, which
        wants the cost of a stage.

        What is kept is all named residuals, because which inputs are among it is not predicted.
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
        )

    def interfaces(self, plan: Plan) -> list[StageInterface]:
        """What the stages of a plan are predicted to hold and hand over: for replays and
        simulations of its step."""
        size = plan.microbatch_size
        costs = [
            self.stage_cost(stage.first, stage.stop, stage.choice, size) for stage in plan.stages
        ]
        splits = {stage.choice.param_split for stage in plan.stages}
        param_bytes = {split: self._param_bytes(split).tolist() for split in splits}
        return plan_interfaces(plan, self.graph(size), param_bytes, costs)

    def _param_bytes(self, split: ParamSplit) -> np.ndarray:
        if split in self.profile.param_bytes:
            return np.array(self.profile.param_bytes[split], np.int64)
        return _fit_sizes(self.profile.param_bytes, split)

    def _exact(self, choice: StageChoice, microbatch_size: int) -> dict[str, np.ndarray]:
        """What the layer graph knows of every stage."""
        graph, dp = self.graph(microbatch_size), choice.data_parallel
        shape = (graph.num_layers, graph.num_layers + 1)
        crossing = [
            [graph.values[v] for v in graph.crossing(cut)] for cut in range(graph.num_layers + 1)
        ]
        received = np.array([sum(v.shard_bytes(dp) for v in values) for values in crossing])
        returned = np.array(
            [sum(v.shard_bytes(dp) for v in values if v.differentiable) for values in crossing]
        )
        params = self._stage_params(choice.param_split)
        leaves = np.array([leaf.shard_bytes(dp) for leaf in graph.batch])
        losses = np.zeros(shape, np.int64)
        losses[:, -1] = sum(graph.values[v].shard_bytes(dp) for v in graph.layers[-1].outputs)
        return {
            "params": params,
            "gradients": params,
            "received": np.broadcast_to(received[:-1, None], shape),
            "gradients_in": np.broadcast_to(returned[None, :], shape),
            "batch": once_per_stage([layer.batch for layer in graph.layers], leaves),
            "losses": losses,
        }

    def _arriving(self, split: ParamSplit, most: int) -> np.ndarray:
        """Gradients of shared parameters that reach every stage at the end of a step, from at most
        so many later ones."""
        graph, sizes = self.profile.graph, self._param_bytes(split)
        total = np.zeros((graph.num_layers, graph.num_layers + 1), np.int64)
        for p in range(len(graph.params)):
            owner, *others = graph.param_readers(p) or (0,)
            if others:
                later = (np.array(others)[:, None] >= np.arange(graph.num_layers + 1)).sum(axis=0)
                total[: owner + 1, owner + 1 :] += sizes[p] * np.minimum(later, most)[owner + 1 :]
        return total

    def _stage_params(self, split: ParamSplit) -> np.ndarray:
        """Parameter bytes of every stage, shared ones counted once."""
        if split not in self._params:
            self._params[split] = once_per_stage(
                [layer.params for layer in self.profile.graph.layers], self._param_bytes(split)
            )
        return self._params[split]

    def peaks(
        self,
        choice: StageChoice,
        microbatch_size: int,
        schedule: str,
        num_microbatches: int,
        max_stages: int,
        *,
        least: bool = False,
    ) -> np.ndarray:
        """Peaks of every stage at every position: int64 (K, L, L + 1), row j - 1 with j stages to
        the end (the last row: K or more).

        Two things depend on how the layers behind a stage are cut: how many stages share a
        parameter that three or more layers read, and the sum of all stages' summaries. They count
        as in the worst of plans.

        Args:
            choice, microbatch_size, schedule, num_microbatches: Of the stages.
            max_stages: Of a plan.
            least: Count them as in the best of plans instead.
        """
        memory = self.memory(choice, microbatch_size)
        positions = occupancy_by_position(schedule, num_microbatches, max_stages)
        behind = [
            *range(len(positions) - 1),
            max_stages - 1,
        ]  # most stages behind one at a position
        arriving = {
            most: self._arriving(choice.param_split, most)
            for most in {min(n, 1) if least else n for n in behind}
        }
        if not least:
            memory = replace(memory, summaries=_largest_sum(memory.summaries))
        return peaks_by_position(
            memory, positions, [arriving[min(n, 1) if least else n] for n in behind]
        )

    def depends_on_cuts_behind(self, choice: StageChoice, microbatch_size: int) -> bool:
        """Whether ``peaks`` says more than the best of plans need."""
        readers = (
            self.profile.graph.param_readers(p) for p in range(len(self.profile.graph.params))
        )
        return any(len(found) > 2 for found in readers) or bool(
            self.memory(choice, microbatch_size).summaries.any()
        )

    # ---- plans
    # ----------------------------------------------------------------------------------------------

    def predict(self, plan: Plan) -> Prediction:
        """Peaks of a plan with their parts and intervals.

        Raises:
            ProfileError: ``profile-other-model`` if the plan is of another model,
                ``profile-target`` if it is for another target than the profile, and the codes of
                ``table``.
        """
        of_stages(plan, "Its estimate is in the plan.")
        self._check_model(plan)
        schedule = make_schedule(plan.schedule, plan.num_stages, plan.num_microbatches)
        stages = []
        for s, (stage, memory) in enumerate(
            zip(plan.stages, of_interfaces(self.interfaces(plan)), strict=True)
        ):
            choice = stage.choice
            instant, parts = peak_parts(memory, schedule.occupancies[s])
            peak = sum(parts.values())
            config = StageConfig.of(stage, plan.microbatch_size)
            verified = config in self.profile.verified
            extrapolated = not verified and self.is_extrapolated(choice, plan.microbatch_size)
            low, high = (1.0, 1.0) if verified else self._interval(config, extrapolated)
            if not verified and config not in self.profile.measurements:
                high = max(
                    high,
                    1 + UNSEEN_TEMPORARIES_FRACTION * parts.get("temporaries", 0) / max(peak, 1),
                )
            stages.append(
                StagePrediction(
                    peak,
                    (int(peak * low), int(np.ceil(peak * high))),
                    instant,
                    parts,
                    tuple(
                        self._layer_parts(
                            stage.first, stage.stop, choice, plan.microbatch_size, parts, instant
                        )
                    ),
                    extrapolated,
                    verified,
                )
            )
        per_device = {d: s for s, stage in enumerate(plan.stages) for d in stage.devices}
        order = [stages[per_device[d]] for d in range(plan.cluster.num_devices)]
        return Prediction(
            tuple(stages),
            tuple(stage.peak_bytes for stage in order),
            tuple(stage.interval_bytes for stage in order),
            {**self.profile.provenance, "predictor": self.name},
            1.0 if all(stage.verified for stage in stages) else self._coverage(),
        )

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
        return (
            self.profile.calibration.coverage(INTERVAL_COVERAGE)
            if self.profile.calibration
            else None
        )

    def _interval(self, config: StageConfig, extrapolated: bool) -> tuple[float, float]:
        calibration, num_layers = (
            self.profile.calibration or Calibration((), 0, 0),
            self.profile.graph.num_layers,
        )
        if not extrapolated:
            return calibration.interval(config, num_layers)
        octaves = octaves_away(config.microbatch_size, self.profile.microbatch_sizes)
        low, high = (
            calibration.interval_off_sizes(config, num_layers, octaves)
            if octaves
            else calibration.interval(config, num_layers)
        )
        # A degree that was not profiled: a + b / k was seen to miss 8 % at 8 ways and 17 % at 16
        # where a temporary hits a floor.
        width = 0 if config.choice in self.profile.choices else 0.17
        return max(0.0, low - width), high + width

    def _layer_parts(
        self,
        first: int,
        stop: int,
        choice: StageChoice,
        microbatch_size: int,
        parts: Mapping[str, int],
        instant: str,
    ) -> list[dict[str, int]]:
        """Split the parts of a stage over its layers by how the statistics grow as layers are
        added."""
        memory = self.memory(choice, microbatch_size)
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
            if (
                category not in growth
            ):  # what passes between stages belongs to the layer at the border
                layers[0 if category == "received activations" else -1][category] = total
                continue
            row = growth[category][first, first + 1 : stop + 1]
            shares = np.maximum(np.diff(row, prepend=0), 0)
            for i, share in enumerate(_shared_out(total, shares)):
                if share:
                    layers[i][category] = share
        return layers


def _largest_part(of_stage: np.ndarray) -> np.ndarray:
    """Per stage [first, stop), the most of any stage within it; NaN where stop <= first."""
    most = np.where(np.isnan(of_stage), -np.inf, of_stage)
    most = np.maximum.accumulate(most[::-1], axis=0)[::-1]
    most = np.maximum.accumulate(most, axis=1)
    return np.where(np.isnan(of_stage), np.nan, most)


def _shared_out(total: int, weights: Sequence[int] | np.ndarray) -> list[int]:
    """Integers in proportion to the weights that sum to the total."""
    bounds = np.concatenate([[0], np.cumsum(np.asarray(weights, np.float64))])
    if bounds[-1] <= 0:
        return [total, *[0] * (len(weights) - 1)]
    ends = np.round(total * bounds / bounds[-1]).astype(np.int64)
    return np.diff(ends).tolist()


def once_per_stage(items_of_layer: Sequence[Sequence[int]], sizes: np.ndarray) -> np.ndarray:
    """Per stage [first, stop), the total size of the items that its layers read, each counted once.

    An item counts in stages that begin after its previous reader and reach its next one.
    """
    num_layers = len(items_of_layer)
    new = np.zeros(
        (num_layers, num_layers), np.int64
    )  # [first, layer]: items of the layer that no layer since first has read
    last_reader: dict[int, int] = {}
    for layer, items in enumerate(items_of_layer):
        for item in dict.fromkeys(items):
            new[last_reader.get(item, -1) + 1 : layer + 1, layer] += sizes[item]
            last_reader[item] = layer
    return np.concatenate([np.zeros((num_layers, 1), np.int64), np.cumsum(new, axis=1)], axis=1)


def _largest_sum(of_stage: np.ndarray) -> int:
    """Over all ways to cut the layers, the largest sum over the stages; ``of_stage`` is indexed
    [first, stop)."""
    best = np.zeros(of_stage.shape[1], np.int64)
    for stop in range(1, len(best)):
        best[stop] = (best[:stop] + of_stage[:stop, stop]).max()
    return int(best[-1])


def _fit_sizes(param_bytes: Mapping[ParamSplit, Sequence[int]], split: ParamSplit) -> np.ndarray:
    (tensor_parallel, replicas), known = (
        split,
        sorted(tp for tp, shared in param_bytes if shared == 1),
    )
    whole, most = (
        np.array(param_bytes[known[0], 1], np.float64),
        np.array(param_bytes[known[-1], 1], np.float64),
    )
    # A parameter that is split at the largest known degree is split at this one too, and nearly all
    # are even over replicas.
    return np.ceil(
        np.where(most < whole, whole * known[0] / tensor_parallel, whole) / replicas
    ).astype(np.int64)


def _kind(choice: StageChoice) -> StageChoice:
    """What choices of other degrees have in common with this one."""
    return replace(choice, data_parallel=1, tensor_parallel=1)
