"""Whole questions that are small enough to compile every plan: unlike layers on four devices, with
what tracing says of their stages and what a compiler does, all drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from capture.machine.cluster import Cluster
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.bounds import Bounds
from capture.measured.profile import Profile, StageConfig, rescaled
from capture.measured.stage_cost import StageCost
from capture.measured.work import ProgramWork
from capture.model.graph import LayerGraph
from capture.plan.choices import StageChoice, measured_choices, remat_of_layers
from capture.plan.prediction import Verified
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.times import TimePredictor
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step, plan_timeline
from capture.step.program import replay
from capture.step.times import TimeModel
from recommender.capture.posed import plan_of, search_problem
from recommender.capture.problem import SearchProblem
from recommender.question import PlanQuestion
from recommender.whole import WholeQuestion
from tests.search_kit import every_plan
from tests.synthetic_graphs import chain

TARGET = "a100-40g"
BATCH = 16
#: Together in a space: one way to recompute, two, or two with their mixtures.
REMATS = (("none",), ("none", "full"), ("cheap", "full"))
#: Bytes of a cost, by the part of ``StageMemory`` that bounds them.
_BYTES = ("forward", "backward", "update", "optimizer")
#: Of the stages of a space of which some do not compile.
REFUSED = 0.05


@dataclass(frozen=True)
class Compiled:
    """A plan of a question, with what the compiler says of it."""

    question: PlanQuestion
    stages: tuple[Stage, ...]
    peak_bytes: int
    seconds: float


class SmallSpace:
    """A whole question of three or four layers.

    Attributes:
        whole: The question, without a limit of memory.
        spread: How far stages may be above their bounds.
        every: All plans of stages that compile, none twice under two names.
    """

    def __init__(self, seed: int):
        self._seed, self._draw = seed, np.random.default_rng(seed)
        draw = self._draw
        self.spread = float(draw.choice([0.0, 0.2, 1.0]))
        self.graph = self._graph()
        counts = sorted(draw.choice([1, 2, 4, 8], int(draw.integers(2, 4)), replace=False).tolist())
        cluster = Cluster([(4,), (2, 2)][draw.integers(2)], TARGET)
        self.whole = WholeQuestion(cluster, BATCH, counts=tuple(counts))
        remats = REMATS[draw.integers(len(REMATS))]
        self._degrees = self._some(remats)
        self._refused = REFUSED * (seed % 3 == 0)
        self._costs: dict[StageConfig, StageCost | None] = {}

    def _graph(self) -> LayerGraph:
        draw, num_layers = self._draw, int(self._draw.integers(3, 5))
        skips = [(0, num_layers - 1)] if draw.random() < 0.3 else []
        shared = [(0, num_layers - 1)] if draw.random() < 0.3 else []
        graph = rescaled(chain(num_layers, skips=skips, shared=shared), BATCH)
        width = int(draw.choice([1, 2_000, 100_000]))
        values = tuple(
            replace(v, shape=(v.shape[0], int(draw.integers(1, width + 1))))
            if len(v.shape) > 1
            else v
            for v in graph.values
        )
        params = tuple(replace(p, shape=(4 * int(draw.integers(1, 50_000)),)) for p in graph.params)
        return replace(graph, values=values, params=params)

    def _some(self, remats: Sequence[str]) -> tuple[StageChoice, ...]:
        """A few choices of every degree, each with all that is recomputed."""
        every = {replace(c, remat="") for c in replace(self.whole, remat="none").choices(BATCH)}
        kept = []
        for d, most in ((1, 1), (2, 1 + (len(remats) < 2)), (4, 2)):
            found = sorted(c for c in every if c.num_devices == d)
            picked = self._draw.permutation(len(found))[:most]
            kept += [replace(found[i], remat=remat) for i in picked for remat in remats]
        return tuple(kept)

    # ---- what tracing says ----------------------------------------------------------------------

    def choices(self, microbatch_size: int) -> tuple[StageChoice, ...]:
        return tuple(c for c in self._degrees if microbatch_size % c.data_parallel == 0)

    @cached_property
    def bounds(self) -> Mapping[int, Bounds]:
        """By micro-batch size."""
        return {size: self._bounds(size) for size in self.sizes}

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(BATCH // m for m in self.whole.microbatches)

    def _bounds(self, size: int) -> Bounds:
        least, most, draw = {}, {}, np.random.default_rng([self._seed, size])
        alone = np.random.default_rng(self._seed).integers(1000, 400_000, (5, 4))
        flops = np.random.default_rng(self._seed + 1).integers(10**10, 10**12, 4)
        num_layers = self.graph.num_layers
        for choice in measured_choices(self.choices(size)):
            share = size / choice.num_devices
            kept = {"none": 1.0, "cheap": 0.5, "full": 0.1}[choice.remat] * draw.uniform(0.5, 1)
            time = {"none": 1.0, "cheap": 1.1, "full": 1.33}[choice.remat] * draw.uniform(1, 1.3)
            state = choice.data_parallel if choice.shard_optimizer or choice.shard_params else 1
            for first in range(num_layers):
                for stop in range(first + 1, min(first + 2, num_layers) + 1):
                    layers = slice(first, stop)
                    forward, backward = alone[0, layers].max(), alone[1, layers].max()
                    cost = StageCost(
                        residual_bytes=int(kept * share * alone[2, layers].sum()),
                        forward_bytes=int(share * forward),
                        backward_bytes=int(share * backward),
                        update_bytes=int(alone[3, layers].max() / state),
                        optimizer_bytes=int(8 * alone[4, layers].sum() / state),
                        kept_inputs=(),
                        kept_outputs=(),
                        kept_batch=(),
                        forward_work=_work(time * share * flops[layers].sum()),
                        backward_work=_work(2 * time * share * flops[layers].sum()),
                        update_work=_work(1e9 / state),
                    )
                    config = StageConfig(first, stop, choice, size)
                    least[config] = cost
                    most[config] = _times(cost, 1 + self.spread * draw.uniform(), 1.0)
        return Bounds(self._profile("least", size, least), self._profile("most", size, most))

    def _profile(self, name: str, size: int, costs: Mapping[StageConfig, StageCost]) -> Profile:
        splits = {choice.param_split for choice in self._degrees}
        params = self.graph.params
        return Profile(
            graph=rescaled(self.graph, size, f"hash{size}"),
            measurements=costs,
            param_bytes={
                (tp, dp): tuple(-(-p.nbytes // (tp * dp)) for p in params) for tp, dp in splits
            },
            provenance={"backend": "planted", "target": TARGET, "bounds": name},
            microbatch_sizes=(size,),
            model_hashes={size: f"hash{size}"},
        )

    # ---- what the compiler says -----------------------------------------------------------------

    def cost(self, config: StageConfig) -> StageCost | None:
        """At or above its bound in everything; None of a stage that does not compile."""
        config = replace(config, choice=_as_compiled(config.choice, config.num_layers))
        if config not in self._costs:
            self._costs[config] = self._cost(config)
        return self._costs[config]

    def _cost(self, config: StageConfig) -> StageCost | None:
        choice, at = config.choice, (config.first, config.stop)
        named = [self._seed, *map(ord, str(choice))]
        slowness = 1 + self.spread * np.random.default_rng(named).uniform()
        draw = np.random.default_rng([*named, *at, config.microbatch_size])
        if draw.random() < self._refused:
            return None
        memory = self._bytes[config.microbatch_size].memory(choice, config.microbatch_size)
        times = self._seconds[config.microbatch_size].table(choice, config.microbatch_size)
        named = [self._seed, *map(ord, str(choice))]
        slowness = 1 + self.spread * np.random.default_rng(named).uniform()
        draw = np.random.default_rng([*named, *at, config.microbatch_size])

        graph = self.bounds[config.microbatch_size].least.graph
        #: What a program makes for the stages beside it.
        made = {"forward": graph.crossing(config.stop), "backward": graph.crossing(config.first)}

        def grown(part: str) -> int:
            factor = 1 + self.spread * max(0, draw.uniform(-1, 1))
            outputs = (graph.value_bytes(v, choice.value_split) for v in made.get(part, ()))
            return max(int(getattr(memory, part)[at] * factor), sum(outputs))

        def work(part: str) -> ProgramWork:
            noise = 1 + 0.2 * self.spread * max(0, draw.uniform(-1, 1))
            return _work(getattr(times, part)[at] * slowness * noise / _SECONDS)

        return StageCost(
            residual_bytes=grown("kept"),
            **{f"{part}_bytes": grown(part) for part in _BYTES},
            kept_inputs=(),
            kept_outputs=(),
            kept_batch=(),
            **{f"{part}_work": work(part) for part in ("forward", "backward", "update")},
        )

    @cached_property
    def _bytes(self) -> Mapping[int, AdditivePredictor]:
        return {size: AdditivePredictor(each.least) for size, each in self.bounds.items()}

    @cached_property
    def _seconds(self) -> Mapping[int, TimePredictor]:
        per_node = max(self.whole.cluster.nodes)
        return {
            size: TimePredictor(each.least, Layout(per_node)) for size, each in self.bounds.items()
        }

    def step(self, plan: Plan) -> tuple[tuple[int, ...], float, int] | None:
        """Peaks, seconds and the most that a host holds of a step, replayed and simulated from what
        the compiler says; None of a plan with a stage that does not compile."""
        size, least = plan.microbatch_size, self.bounds[plan.microbatch_size].least
        costs = [self.cost(StageConfig.of(stage, size)) for stage in plan.stages]
        if None in costs:
            return None
        interfaces = plan_interfaces(plan, least.graph_at(size), least.param_bytes, costs)
        step = build_step(interfaces, plan.schedule_table)
        times = [_MODEL.stage_times(cost) for cost in costs]
        timeline = plan_timeline(step, plan.cluster, times, _MODEL.rates)
        ledger = replay(step)
        held = max(
            (ledger.peak_of(p.host.name).peak_bytes for p in step.places if p.host), default=0
        )
        return tuple(ledger.peak_bytes_per_device), float(timeline.step_seconds), held

    # ---- the question, and all plans -------------------------------------------------------------

    @cached_property
    def every(self) -> list[Compiled]:
        return self.plans([*map(self.whole.question, self.whole.microbatches)])

    def plans(self, questions: Sequence[PlanQuestion]) -> list[Compiled]:
        """All plans of questions whose stages compile, and whose hosts have enough memory."""
        found = list[Compiled]()
        for asked in questions:
            known = self.bounds[asked.microbatch_size].least
            problem = search_problem(known, asked, with_times=True)
            for stages in dict.fromkeys(map(_compiled, _stages(problem))):
                said, host = self.step(plan_of(known, asked, stages)), asked.host_memory_bytes
                if said is not None and (host is None or said[2] <= host):
                    found.append(Compiled(asked, stages, max(said[0]), said[1]))
        return found


def _as_compiled(choice: StageChoice, num_layers: int) -> StageChoice:
    """A mixture of no more layers is another name of ``full``."""
    return replace(choice, remat=remat_of_layers(choice.remat, num_layers))


def _compiled(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(replace(s, choice=_as_compiled(s.choice, s.num_layers)) for s in stages)


def _stages(problem: SearchProblem) -> Iterator[tuple[Stage, ...]]:
    for cuts in every_plan(problem):
        devices = np.cumsum([0, *(d for *_, d in cuts)]).tolist()
        for choices in product(*(problem.choices[d] for *_, d in cuts)):
            yield tuple(
                Stage.at(device, first, stop, choice)
                for device, (first, stop, _), choice in zip(devices, cuts, choices, strict=False)
            )


_MODEL = TimeModel(Target.load(TARGET).rates, Layout(4))


def _work(flops: float) -> ProgramWork:
    return ProgramWork(int(np.ceil(flops)), "bfloat16", 0, 0)


#: Of a FLOP.
_SECONDS = _MODEL.program_seconds(_work(1e15)) / 1e15


def _times(cost: StageCost, in_bytes: float, in_seconds: float) -> StageCost:
    names = ("residual_bytes", *(f"{part}_bytes" for part in _BYTES))
    return replace(cost, **{name: int(in_bytes * getattr(cost, name)) for name in names})


class Compiler:
    """A ``StageCompiler`` of a space."""

    def __init__(self, space: SmallSpace):
        self._space, self._compiled = space, set[StageConfig]()

    def attempt(self, plan: Plan, known: Profile) -> tuple[Verified | None, Profile]:
        configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
        num_new, known = self.probe(configs, known)
        said = self._space.step(plan)
        return said and Verified(said[0], num_stages_compiled=num_new), known

    def begin(self, configs: Sequence[StageConfig]) -> None:
        """Nothing is compiled beside anything."""

    def probe(self, configs: Sequence[StageConfig], known: Profile) -> tuple[int, Profile]:
        num_new = len({*configs} - self._compiled)
        self._compiled |= {*configs}
        costs = {config: self._space.cost(config) for config in configs}
        compiled = {config: cost for config, cost in costs.items() if cost is not None}
        known = replace(known, verified={**known.verified, **compiled})
        return num_new, known.without_stages(dict.fromkeys(costs.keys() - compiled, "it is odd"))
