"""Profiles with planted statistics: every component of a stage's memory is M_i + the sum of M_a,
affine in the examples per device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain as concatenated

import numpy as np
from synthetic_graphs import chain

from capture.machine.cluster import Cluster
from capture.measured.profile import Calibration, Profile, StageConfig, StageError, rescaled
from capture.measured.stage_cost import StageCost
from capture.model.graph import LayerGraph
from capture.papers.capture.choices import hybrid_choices
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.profiler.windows import window_configs
from capture.step.interface import stage_values

COMPONENTS = (
    "residual_bytes",
    "forward_bytes",
    "backward_bytes",
    "update_bytes",
    "optimizer_bytes",
    "summarize_bytes",
    "summary_bytes",
)
MICROBATCH_SIZE = 16
SIZES = (8, 16)


class Planted:
    """What the measurements of a model come from.

    Attributes:
        graph: A chain of layers at ``MICROBATCH_SIZE``; value and parameter tensors of a few bytes.
        fixed: int64 (components, 2, L): bytes of [isolated, added] layers that no degree and no
            micro-batch changes.
        per_example: The same per example and device; multiples of 16, so that they stay whole at
            every degree.

    Optimizers need nothing of other stages, unless ``summarizes`` is called.
    """

    def __init__(
        self,
        num_layers: int,
        seed: int = 0,
        *,
        largest: int = 1000,
        skips: Sequence[tuple[int, int]] = (),
        shared: Sequence[Sequence[int]] = (),
    ):
        generator = np.random.default_rng(seed)
        self.graph: LayerGraph = rescaled(
            chain(num_layers, skips=skips, shared=shared), MICROBATCH_SIZE, f"hash{MICROBATCH_SIZE}"
        )
        self.fixed = np.zeros((len(COMPONENTS), 2, num_layers), np.int64)
        self.fixed[:5] = generator.integers(0, largest, (5, 2, num_layers))
        self.per_example = np.zeros_like(self.fixed)
        # The update sees no examples.
        self.per_example[:3] = 16 * generator.integers(0, largest // 16, (3, 2, num_layers))

    def summarizes(self, seed: int) -> Planted:
        """As with a global norm."""
        self.fixed[5:] = np.random.default_rng(seed).integers(
            1, [[[1000]], [[20]]], (2, 2, self.graph.num_layers)
        )
        return self

    def components(self, config: StageConfig) -> np.ndarray:
        """Bytes per device: int64 (components,)."""
        layers, first = np.arange(config.first + 1, config.stop), config.first
        fixed, per = (
            t[:, 0, first] + t[:, 1, layers].sum(axis=1) for t in (self.fixed, self.per_example)
        )
        return fixed + per * config.microbatch_size // config.choice.num_devices

    def cost(self, config: StageConfig) -> StageCost:
        """What a compiler would report: an inner stage keeps its input, a model of its own cost
        keeps its batch."""
        used, _ = stage_values(self.graph, config.first, config.stop)
        keeps_batch = config.first == 0
        numbers = dict(zip(COMPONENTS, self.components(config).tolist(), strict=True))
        return StageCost(
            **numbers,
            kept_inputs=tuple(range(len(used))),
            kept_outputs=(),
            kept_batch=(0,) if keeps_batch else (),
        )

    def profile(
        self,
        choices: Iterable[StageChoice],
        *,
        sizes: Sequence[int] = SIZES,
        num_neighbours: int = 1,
        errors: Sequence[float] | None = None,
    ) -> Profile:
        """Measurements of all windows, as ``profiling_runs.profile`` makes them."""
        choices = list(choices)
        configs = window_configs(self.graph.num_layers, choices, sizes, num_neighbours)
        degrees = {choice.tensor_parallel for choice in choices}
        return Profile(
            graph=rescaled(self.graph, max(sizes), f"hash{max(sizes)}"),
            measurements={config: self.cost(config) for config in configs},
            param_bytes={(tp, 1): tuple(p.nbytes for p in self.graph.params) for tp in degrees},
            provenance={"backend": "planted", "target": "cpu"},
            microbatch_sizes=tuple(sizes),
            model_hashes={size: f"hash{size}" for size in sizes},
            calibration=None if errors is None else self._calibration(errors, choices),
        )

    def _calibration(self, errors: Sequence[float], choices: Sequence[StageChoice]) -> Calibration:
        """Error i is of a stage of its own."""
        num_layers = self.graph.num_layers
        stages = [
            StageConfig(a, b, c, MICROBATCH_SIZE)
            for b in range(1, num_layers + 1)
            for a in range(b)
            for c in choices
        ]
        return Calibration(tuple(map(StageError, stages, errors)), 1, len(errors))


def hybrid(max_devices: int) -> list[StageChoice]:
    """All pairs of degrees up to a number of devices, in powers of two."""
    return list(concatenated.from_iterable(hybrid_choices(max_devices).values()))


def make_plan(
    layers: Sequence[int],
    choices: Sequence[StageChoice],
    *,
    schedule: str = "1f1b",
    num_microbatches: int = 4,
    size: int = MICROBATCH_SIZE,
) -> Plan:
    """A plan by the number of layers and the choice of its stages, on one node."""
    stages, first, device = [], 0, 0
    for count, choice in zip(layers, choices, strict=True):
        stages.append(Stage.at(device, first, first + count, choice))
        first, device = first + count, device + choice.num_devices
    return Plan(
        Cluster((device,)),
        first,
        tuple(stages),
        size * num_microbatches,
        num_microbatches,
        schedule,
    )


def configs_of(plan: Plan) -> list[StageConfig]:
    """The stage config of every stage."""
    return [StageConfig.of(s, plan.microbatch_size) for s in plan.stages]
