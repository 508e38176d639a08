"""The bounds that tracing alone gives of every stage that a plan may have: two profiles, a lower
and an upper one, for which no compiler is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from capture import environment
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.bounds import Bounds
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.memo import memo
from capture.plan.choices import StageChoice, measured_choices
from capture.step.times import TimeModel
from profiling_runs.batch import Progress
from profiling_runs.measurements import Measurements
from profiling_runs.question import ProfileQuestion

if TYPE_CHECKING:
    from capture.profiler.facts import LayerFacts, Window

BOUNDS = "bounds from tracing"


class ModelBounds:
    """The stages of a model between two bounds, at any micro-batch size, from a few traces of its
    distinct layers (``capture.profiler.facts``).

    Args:
        measurements: Of the workload, of which nothing is compiled; the store keeps the bounds.
        examples: On a device, as many as will be asked for.
        num_devices: Most of a stage.
        progress: Told how far tracing is.
        begin: Called before anything is traced.
        floors: Micro-batch sizes at which ``seconds`` will be asked for, and the choices there:
            what they need is traced together.
    """

    def __init__(
        self,
        measurements: Measurements,
        examples: Iterable[int],
        num_devices: int,
        progress: Progress = lambda kind, done, total: None,
        begin: Callable[[], None] = lambda: None,
        floors: Mapping[int, Sequence[StageChoice]] = MappingProxyType({}),
    ):
        self._measurements, self._progress, self._begin = measurements, progress, begin
        self._examples, self._num_devices = tuple(examples), num_devices
        self._floors = floors

    @cached_property
    def facts(self) -> LayerFacts:
        """The facts of the model's distinct layers, from tracing alone, made when first used."""
        from capture.profiler.facts import LayerFacts

        self._begin()
        shared = self._measurements.shared
        return LayerFacts(self._measurements.backend, self._examples, self._num_devices, shared)

    def _learn(self, asked: Iterable[tuple[StageChoice, int]], **longest: int) -> None:
        def told(done: int, total: int) -> None:
            self._progress(BOUNDS, done, total)

        self.facts.learn(asked, told, **longest)

    @memo
    def _learn_floors(self) -> None:
        """Trace all that ``seconds`` needs, once."""
        asked = [(c, n) for n, choices in self._floors.items() for c in measured_choices(choices)]
        self._learn(asked, longest=2 if self.facts.needs_pairs else 1)

    def at(self, choices: Sequence[StageChoice], microbatch_size: int) -> Bounds:
        """Return lower and upper bounds of all stages with these choices, at a micro-batch size."""
        facts, measured = self.facts, measured_choices(choices)
        with environment.without_collecting():
            self._learn([(choice, microbatch_size) for choice in measured])
            found = {
                StageConfig(*window, choice, microbatch_size): facts.bounds(
                    window, choice, microbatch_size
                )
                for choice in measured
                for window in facts.windows
            }
        backend = self._measurements.backend
        splits = sorted({choice.param_split for choice in choices})

        def profile(name: str) -> Profile:
            return Profile(
                graph=facts.graph_of(choices),
                measurements={config: getattr(each, name) for config, each in found.items()},
                param_bytes={split: facts.param_bytes(split) for split in splits},
                provenance={**backend.provenance, "created": environment.now(), "bounds": name},
                workload=self._measurements.spec,
                auto_layers=backend.num_layers is not None,
                tensor_parallel_rule=self._measurements.rule,
                microbatch_sizes=(microbatch_size,),
                model_hashes=backend.model_hashes,
            )

        return Bounds(profile("least"), profile("most"))

    @environment.without_collecting()
    def seconds(
        self,
        choices: Sequence[StageChoice],
        microbatch_size: int,
        cluster: Cluster,
        limit_bytes: int | None,
        num_devices: int | None = None,
    ) -> tuple[float, float]:
        """Return a lower bound of the seconds of one micro-batch, forward and backward, and the
        same computed from expected seconds. Both are device seconds over the number of devices,
        whatever the stages, the schedule and the cuts.

        At one moment every layer keeps what its backward pass reads of the same micro-batch, on
        each device of its stage. So the device seconds of all layers, each with a choice of its
        own, are at least, for any price of a byte,

            sum over layers of min over choices of d (seconds + price bytes) - price D limit

        The least seconds of a layer are without launches of kernels: those of neighbours may be
        one.

        Args:
            choices: Of stages, no mixtures: layers of one stage may differ here.
            microbatch_size: Over all replicas.
            cluster: With D devices.
            limit_bytes: Of a device.
            num_devices: Of every stage, where it is known; no choice has so many: infinite.

        Source: Lagrangian relaxation of the memory of all devices together.
        """
        if Target.load(cluster.target).rates is None:
            return 0.0, 0.0
        count, costs = self._layer_costs(tuple(choices), microbatch_size, cluster)
        if num_devices is not None:
            costs = costs[:, :, [choice.num_devices == num_devices for choice in choices]]
        if not costs.size:
            return np.inf, np.inf
        limit = cluster.num_devices * (limit_bytes or 0)
        *seconds, held = costs
        computing, sending, expected = (
            max(
                float(count @ (each + price * held).min(axis=1)) - price * limit
                for price in _prices(each, held, limit)
            )
            / cluster.num_devices
            for each in seconds
        )
        return max(computing, sending), expected

    @memo
    def _time_models(self, cluster: Cluster) -> tuple[TimeModel, TimeModel, TimeModel]:
        """Return three time models of a cluster: of what is computed at least, without the time to
        launch kernels; of what is sent at least; and of what is expected."""
        rates, layout = Target.load(cluster.target).rates, cluster.layout
        assert rates is not None, "times are known"
        unlaunched = replace(rates, kernel_seconds=replace(rates.kernel_seconds, value=0.0))
        return (
            TimeModel(unlaunched, layout, "computing"),
            TimeModel(rates, layout, "sending"),
            TimeModel(rates, layout),
        )

    @memo
    def _layer_costs(
        self, choices: tuple[StageChoice, ...], microbatch_size: int, cluster: Cluster
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how many layers are of each distinct kind, (K,), and (4, K, choices) of all
        devices of a stage: least seconds computing and sending, expected ones, and least bytes
        held."""
        self._learn_floors()
        facts = self.facts
        *least_models, model = self._time_models(cluster)
        num_alike = Counter(
            alike for window, alike in facts.windows.items() if window[1] - window[0] == 1
        )
        costs = np.zeros((4, len(num_alike), len(choices)))
        for (i, window), (j, choice) in product(enumerate(num_alike), enumerate(choices)):

            def least(of: TimeModel, window: Window, choice: StageChoice = choice) -> float:
                return _seconds(of, facts.bounds(window, choice, microbatch_size).least)

            expected = _seconds(model, facts.bounds(window, choice, microbatch_size).most)
            held = facts.least_held(window, choice, microbatch_size)
            added = (facts.least_added(window, partial(least, of)) for of in least_models)
            each = *added, expected, held
            costs[:, i, j] = choice.num_devices * np.array(each)
        return np.array(list(num_alike.values())), costs


def _seconds(model: TimeModel, cost: StageCost) -> float:
    times = model.stage_times(cost)
    return 0.0 if times is None else times.microbatch_seconds


def _prices(seconds: np.ndarray, nbytes: np.ndarray, limit: int) -> list[float]:
    """Return the prices of a byte to try, in seconds: 0, and where there is a limit 61 more, up to
    the most seconds of a layer over the fewest bytes."""
    most = float(seconds.max()) / max(float(nbytes[nbytes > 0].min(initial=1.0)), 1.0)
    return [0.0, *(most * np.geomspace(1e-6, 1, 61))] if limit else [0.0]


def bounds(
    question: ProfileQuestion,
    measurements: Measurements,
    progress: Progress = lambda kind, done, total: None,
    begin: Callable[[], None] = lambda: None,
) -> Bounds:
    """Return the bounds of stages at a question's micro-batch size; arguments as of
    ``ModelBounds``.

    Raises:
        ProfileError: ``profile-remat``, as ``ModelBounds.at``.
    """
    size = question.microbatch_size
    choices = [each for each in question.stage_choices if size % each.data_parallel == 0]
    examples = (size // choice.data_parallel for choice in choices)
    known = ModelBounds(measurements, examples, question.cluster.num_devices, progress, begin)
    return known.at(choices, size)
