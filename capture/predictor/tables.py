"""Tables of what the compiler alone knows of stages: M_i plus the sum of M_a of every component,
for every choice and micro-batch size; those of mixtures from the tables of their parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from capture.errors import ProfileError, plain
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.memo import memo
from capture.model.graph import LayerGraph
from capture.plan.choices import ParamSplit, StageChoice, num_full_layers
from capture.predictor.alike import Kinds
from capture.predictor.fit import fit_degrees, fit_line
from capture.predictor.formula import kept_bytes, split_bytes
from capture.predictor.held_gradients import Windows, added_bytes, held_beyond, held_gradients
from capture.predictor.mixture import Mixed, kept, least_kept, least_running, running
from capture.predictor.stage_sums import kept_twice, largest_part, passed
from capture.predictor.statistics import extend_split, extend_windows

#: Rows of a statistics table that depend on the layers alone and grow with the examples; those of a
#: split backward pass, where it was measured; and those that belong to parameters and optimizer.
PASSES = ("kept", "forward", "backward")
SPLIT_PASSES = ("deferred", "backward_inputs", "backward_weights")
UPDATES = ("update", "optimizer", "summarize", "summary")
_TEMPORARIES = ("forward", "backward", "backward_inputs", "backward_weights")


class ComponentTables:
    """The tables of a profiled model: bytes of every component of every stage, per choice and
    micro-batch size.

    Args:
        profile: Measured windows of layers.
        allow_extrapolation: Predict degrees that were not profiled by ``a + b / k``; refused
            otherwise.

    Attributes:
        components: Rows of a table.
        num_passes: The first of them, which grow with the examples.
    """

    def __init__(self, profile: Profile, *, allow_extrapolation: bool = False):
        self.profile, self._extrapolates = profile, allow_extrapolation
        passes = PASSES + SPLIT_PASSES * profile.splits_backward
        self.components, self.num_passes = (*passes, *UPDATES), len(passes)

    @memo
    def _windows(self, choice: StageChoice, microbatch_size: int) -> Windows:
        """Return the components of measured windows, by (first, stop)."""
        return {
            window: self._components(*window, choice, microbatch_size, cost)
            for window, cost in self.profile.windows[choice, microbatch_size].items()
        }

    @cached_property
    def _sizes(self) -> Mapping[StageChoice, Sequence[int]]:
        """The micro-batch sizes at which each choice was measured, ascending."""
        found: dict[StageChoice, list[int]] = {}
        for choice, size in sorted(self.profile.windows, key=lambda key: key[1]):
            found.setdefault(choice, []).append(size)
        return found

    @memo
    def graph(self, microbatch_size: int) -> LayerGraph:
        return self.profile.graph_at(microbatch_size)

    def _components(
        self, first: int, stop: int, choice: StageChoice, microbatch_size: int, cost: StageCost
    ) -> np.ndarray:
        graph, split = self.graph(microbatch_size), cost.split
        kept = kept_bytes(graph, first, stop, choice, cost)
        found: list[float] = [kept, cost.forward_bytes, cost.backward_bytes]
        if self.profile.splits_backward and split is not None:
            deferred = split_bytes(graph, first, stop, choice, cost)
            found += [deferred, split.inputs_bytes, split.weights_bytes]
        elif self.profile.splits_backward:
            found += [np.nan] * 3
        found += [cost.update_bytes, cost.optimizer_bytes, cost.summarize_bytes, cost.summary_bytes]
        return np.array(found, np.float64)

    def _measured_table(
        self,
        choice: StageChoice,
        microbatch_size: int,
        only: Collection[tuple[int, int]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        windows = self._windows(choice, microbatch_size)
        if only is not None:
            windows = {window: parts for window, parts in windows.items() if window in only}
        try:
            table, drift = self._extend(windows)
        except KeyError as error:
            first, stop = error.args[0]
            failed = "\n".join(f"failed: {plain(failure)}" for failure in self.profile.failures)
            resume = ". Run capture profile again: it resumes and names what fails."
            said = f":\n{failed}" if failed else resume
            raise ProfileError.of(
                f"the profile lacks {StageConfig(first, stop, choice, microbatch_size)}, which "
                f"predictions are built from{said}",
                "profile-missing",
            ) from None
        if self.profile.is_lower_bound:
            self._bound_parts(table, drift, windows, choice, microbatch_size)
        return table, drift

    def _extend(self, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
        graph = self.profile.graph
        keys = [layer.key for layer in graph.layers]
        if not self.profile.splits_backward:
            return extend_windows(windows, graph.num_layers, keys)
        kept, _, backward, deferred, inputs, weights = range(self.num_passes)
        like = {deferred: kept, weights: backward}
        return extend_split(windows, graph.num_layers, keys, inputs=inputs, like=like)

    @memo
    def _most_held(self, split: ParamSplit) -> np.ndarray:
        """Return the most bytes per device that gradients of shared parameters wait in, per stage,
        (L, L + 1)."""
        return held_gradients(self.profile.graph, self._gradient_bytes(split))

    @memo
    def _gradient_bytes(self, split: ParamSplit) -> list[int]:
        """Return, per parameter, the bytes per device of its gradient, which is whole until
        replicas have added theirs."""
        pairs = zip(self.param_bytes(split), self.profile.graph.params, strict=True)
        return [min(split[1] * int(nbytes), param.nbytes) for nbytes, param in pairs]

    def _held(self, choice: StageChoice, microbatch_size: int) -> dict[int, np.ndarray]:
        """Return the bytes of waiting gradients of shared parameters that measured windows do not
        show, (L, L + 1), by row of the backward passes that add them. Empty for a choice that was
        not measured."""
        sizes = self._sizes.get(choice, ())
        if not sizes:
            return {}
        nearest = min(sizes, key=lambda size: (size < microbatch_size, abs(size - microbatch_size)))
        return self._held_beside(self._windows(choice, nearest), choice.param_split)

    def _held_beside(self, windows: Windows, split: ParamSplit) -> dict[int, np.ndarray]:
        """Return the bytes of waiting gradients of shared parameters that the given windows do not
        show; empty for a profile of lower bounds.

        On CPU what layers add to each other stays, gradients too. On accelerators a stage needs
        what its hungriest layers do, whatever the others add (``capture.runtime.layer_order``).
        """
        if self.profile.is_lower_bound or not self._most_held(split).any():
            return {}
        graph, stays = self.profile.graph, self.profile.target == "cpu"
        added = {row: added_bytes(windows, graph.num_layers, row) for row in self._adding}
        return {
            row: held_gradients(graph, self._gradient_bytes(split), known if stays else None)
            for row, known in added.items()
        }

    @property
    def _adding(self) -> list[int]:
        """The rows of the backward passes that make gradients of parameters."""
        names = ("backward", "backward_weights")
        return [row for row, name in enumerate(self.components) if name in names]

    def _add_held(
        self, table: np.ndarray, windows: Windows, held: Mapping[int, np.ndarray]
    ) -> np.ndarray:
        for row, nbytes in held.items():
            table[row] += held_beyond(self._extend, windows, nbytes, row)
        return table

    def unsure_bytes(self, config: StageConfig) -> int:
        """Return the bytes that gradients of shared parameters may wait in beyond what is
        predicted: what a layer adds to its neighbours may be its gradient or something else, and
        an accelerator may keep those of several layers until replicas have added theirs."""
        choice, stage = config.choice, (config.first, config.stop)
        most = self._most_held(choice.param_split)[stage]
        if self.profile.is_lower_bound or not most:
            return 0
        if self.profile.target != "cpu":
            return int(most) * (choice.data_parallel > 1)
        held = self._held(choice.measured[-1], config.microbatch_size)
        return int(most - min((found[stage] for found in held.values()), default=0))

    def param_bytes(self, split: ParamSplit) -> np.ndarray:
        """Return the bytes per device of every parameter under a split, int64; fitted if it was not
        profiled."""
        if split in self.profile.param_bytes:
            return np.array(self.profile.param_bytes[split], np.int64)
        return _fit_sizes(self.profile.param_bytes, split)

    def _bound_parts(
        self,
        table: np.ndarray,
        drift: np.ndarray,
        windows: Mapping[tuple[int, int], np.ndarray],
        choice: StageChoice,
        microbatch_size: int,
    ) -> None:
        """Take sums over windows down to what no stage can be below, where these are lower bounds:
        what a layer adds to the largest product before it says nothing of the next one."""
        graph, measured = self.graph(microbatch_size), _measured(table, windows)
        crossing = self._passed(choice.value_split, microbatch_size)
        for row, component in enumerate(self.components):
            known = measured[row]
            if component in ("forward", "backward"):
                # What a part takes and gives may never be in memory in a stage that goes on there.
                begins = known - crossing * (component == "forward")
                ends = known - crossing[:-1, None]
                inner = begins - crossing[:-1, None]
                least = np.fmax(np.fmax.accumulate(begins, axis=1), largest_part(inner))
                if component == "forward":
                    least = np.fmax(least, np.fmax.accumulate(ends[::-1])[::-1])
            elif component in ("update", "summarize"):
                least = largest_part(known)
            else:
                continue
            table[row], drift[row] = np.where(np.isnan(known), least, known), 0
        longest = max(stop - first for first, stop in windows)
        row = self.components.index("kept")
        table[row] -= kept_twice(graph, longest, choice.value_split)
        if choice.tensor_parallel > 1:
            least = self._kept_of_parts(choice, microbatch_size, measured[row])
            table[row] = np.where(np.isnan(measured[row]), np.fmin(table[row], least), table[row])

    def _kept_of_parts(
        self, choice: StageChoice, microbatch_size: int, known: np.ndarray
    ) -> np.ndarray:
        """Return the least bytes that stages keep where tensors are split: an even part of what
        they keep unsplit. A value that a window is given whole may be split where its maker is in
        the stage, so sums over windows say too much. Without that choice, the largest part counts
        so."""
        whole = replace(choice, tensor_parallel=1, sequence_parallel=False)
        if (whole, microbatch_size) not in self.profile.windows:
            return largest_part(known) / choice.tensor_parallel
        return self._kept_whole(whole, microbatch_size) / choice.tensor_parallel

    @memo
    def _kept_whole(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        table, _ = self._measured_table(choice, microbatch_size)
        return table[self.components.index("kept")]

    @memo
    def table(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        """Return the components of every stage: float64 (len(components), L, L + 1), bytes per
        device.

        Raises:
            ProfileError: ``profile-choice`` if the choice was not profiled and extrapolation is not
                allowed, ``profile-missing``.
        """
        sizes = self._sizes.get(choice, ())
        if microbatch_size in sizes:
            windows = self._windows(choice, microbatch_size)
            total, drift = self._measured_table(choice, microbatch_size)
            drift = self._add_held(drift, windows, self._held(choice, microbatch_size))
            return self._drifted(total, drift, windows)
        if sizes:
            return self._table_off_sizes(choice, sizes, microbatch_size)
        if len(choice.measured) > 1:
            return self._mixed_table(choice, microbatch_size)
        return self._extrapolated_table(choice, microbatch_size)

    def _mixed_table(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        num_layers, num_full = self.profile.graph.num_layers, num_full_layers(choice.remat)
        mixed = Mixed.every(num_layers, num_full)
        return np.stack(list(self._mixed(choice, microbatch_size, mixed)))

    def _mixed(
        self, choice: StageChoice, microbatch_size: int, mixed: Mixed
    ) -> Iterator[np.ndarray]:
        """Yield the components of some stages of a mixture; those that belong to parameters and
        optimizer do not depend on the border."""
        full, cheap = (self.table(part, microbatch_size) for part in choice.measured)
        of_temporaries, of_others = running, kept
        if self.profile.is_lower_bound:
            between = self._passed(choice.value_split, microbatch_size)
            of_temporaries = partial(least_running, passed=between)
            of_others = partial(least_kept, passed=between)
        of_full, of_cheap = (self._held(part, microbatch_size) for part in choice.measured)
        for row, component in enumerate(self.components[: self.num_passes]):
            of = of_temporaries if component in _TEMPORARIES else of_others
            found = of(full[row], cheap[row], mixed)
            if row in of_full:
                # Of a parameter that layers on both sides of the border read.
                apart = (full[row] - of_full[row], cheap[row] - of_cheap[row])
                of_both = running(*apart, mixed) + of_cheap[row][mixed.first, mixed.stop]
                found = np.fmax(found, of_both)
            yield found
        yield from cheap[self.num_passes :, mixed.first, mixed.stop]

    @memo
    def _passed(self, value_split: tuple[int, int], microbatch_size: int) -> np.ndarray:
        return passed(self.graph(microbatch_size), value_split)

    def look_at_parts(self, choice: StageChoice, microbatch_size: int, kinds: Kinds) -> None:
        """Split kinds whose stages differ in anything that mixtures of a choice are made of."""
        for part in choice.measured:
            kinds.look(self.table(part, microbatch_size), kept=True)
            kinds.look(*self._held(part, microbatch_size).values())
        between = self._passed(choice.value_split, microbatch_size)
        kinds.look(np.broadcast_to(between, kinds.of.shape))

    def _drifted(
        self, total: np.ndarray, drift: np.ndarray, windows: Mapping[tuple[int, int], np.ndarray]
    ) -> np.ndarray:
        """Return the sum over windows with its drift, kept from falling below the temporaries of a
        measured part of the stage.

        The drift is a line between two anchors: it falls before the layers come for which the sum
        was too high. On a GPU the sum itself may be too low: passes go layer by layer
        (``capture.runtime.layer_order``), so a stage needs what its hungriest layers do, and what
        is added to those may be less than nothing.
        """
        measured, table = _measured(total, windows), total + drift
        if self.profile.is_lower_bound:  # parts may need more alone: ``_bound_parts``
            return table
        may_be_low = any("cuda" in name for name in self.profile.provenance.get("versions", ()))
        for row, component in enumerate(self.components):
            if component in _TEMPORARIES:
                known = measured[row]
                least = largest_part(known)
                if not may_be_low:
                    least = np.fmin(total[row], least)
                table[row] = np.where(np.isnan(known), np.fmax(table[row], least), known)
        return table

    def _table_off_sizes(
        self, choice: StageChoice, sizes: Sequence[int], microbatch_size: int
    ) -> np.ndarray:
        """Return the table at a micro-batch size that was not profiled: that of the nearest size
        above, times what a stage grows by.

        It grows as the line through the two nearest sizes, of windows that both have, because sums
        of others are not comparable. A program's temporaries are those of its hungriest layers,
        which may be other layers at another size: a stage counts as much as any part of it. What
        belongs to parameters stays as it is.
        """
        above = next((i for i, size in enumerate(sizes) if size > microbatch_size), len(sizes))
        near = sizes[max(0, min(above - 1, len(sizes) - 2)) :][:2]
        base, alike = near[-1], [self._windows(choice, size) for size in near]
        common = {window for window in alike[0] if all(window in windows for windows in alike)}
        alike = [{window: windows[window] for window in common} for windows in alike]
        held = self._held_beside(alike[-1], choice.param_split)
        lines = [
            self._add_held(np.add(*self._measured_table(choice, size, common)), windows, held)
            for size, windows in zip(near, alike, strict=True)
        ]
        line = fit_line(near, lines, microbatch_size)
        table = np.add(*self._measured_table(choice, base))
        table = self._add_held(table, self._windows(choice, base), self._held(choice, base))
        growth = np.where(
            lines[-1] > 0, line / np.where(lines[-1] > 0, lines[-1], 1), microbatch_size / base
        )
        growth = np.maximum(growth, 1) if microbatch_size > base else np.clip(growth, 0, 1)
        table[: self.num_passes] *= growth[: self.num_passes]
        for row, component in enumerate(self.components):
            if component in _TEMPORARIES:
                table[row] = largest_part(table[row])
        return table

    def can_predict(self, choice: StageChoice, microbatch_size: int) -> bool:
        """Tell whether the profile holds all windows that predictions of a choice are built
        from."""
        try:
            self.table(choice, microbatch_size)
        except ProfileError:
            return False
        return True

    def _extrapolated_table(self, choice: StageChoice, microbatch_size: int) -> np.ndarray:
        without_degrees = partial(replace, data_parallel=1, tensor_parallel=1)
        alike = {
            (known.data_parallel, known.tensor_parallel): known
            for known in self.profile.choices
            if without_degrees(known) == without_degrees(choice)
        }
        if not self._extrapolates or not alike:
            profiled = ", ".join(f"{dp}x{tp}" for dp, tp in sorted(alike))
            degrees = f"profiled degrees: {profiled}" if alike else "no degrees were profiled so"
            raise ProfileError.of(
                f"data_parallel={choice.data_parallel} x tensor_parallel={choice.tensor_parallel} "
                f"with remat={choice.remat!r}, "
                f"shard_optimizer={choice.shard_optimizer}, shard_params={choice.shard_params}, "
                f"sequence_parallel={choice.sequence_parallel} was not profiled ({degrees}); "
                f"profile it{', or allow extrapolation' if alike else ''}.",
                "profile-choice",
            )
        tables = {degrees: self.table(known, microbatch_size) for degrees, known in alike.items()}
        return fit_degrees(tables, (choice.data_parallel, choice.tensor_parallel))

    def has_long_windows(self, choice: StageChoice, microbatch_size: int) -> bool:
        """Tell whether every window that was measured at the largest micro-batch size was also
        measured at this one."""
        if self.is_extrapolated(choice, microbatch_size):
            return False
        for part in self._known(choice):
            largest = max(size for known, size in self.profile.windows if known == part)
            own = self._windows(part, microbatch_size)
            if not own.keys() >= self._windows(part, largest).keys():
                return False
        return True

    def is_extrapolated(self, choice: StageChoice, microbatch_size: int) -> bool:
        return any(
            (part, microbatch_size) not in self.profile.windows for part in self._known(choice)
        )

    def _known(self, choice: StageChoice) -> tuple[StageChoice, ...]:
        """Return the choices whose windows a choice is predicted from: itself, or the parts of a
        mixture."""
        return (choice,) if choice in self.profile.choices else choice.measured


def _measured(like: np.ndarray, windows: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Return the components of the stages that were measured; NaN for all others."""
    measured = np.full_like(like, np.nan)
    for (first, stop), parts in windows.items():
        measured[:, first, stop] = parts
    return measured


def _fit_sizes(param_bytes: Mapping[ParamSplit, Sequence[int]], split: ParamSplit) -> np.ndarray:
    known = sorted(tp for tp, shared in param_bytes if shared == 1)
    whole, most = (np.array(param_bytes[tp, 1], np.float64) for tp in (known[0], known[-1]))
    # A parameter that is split at the largest known degree is split at this one too, and nearly all
    # are even over replicas.
    part = np.where(most < whole, whole * known[0] / split[0], whole)
    return np.ceil(part / split[1]).astype(np.int64)
