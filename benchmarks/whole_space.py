"""Whether random plans of the whole space compile to no less than is said, and to no more.

    python -m benchmarks.whole_space -o benchmarks/results/2026-01-31-whole-space.json
    python -m benchmarks.whole_space --plans 20 --models gpt moe -o RESULT.json

Plans of what `capture plan` searches where no option says anything: any number of micro-batches,
number of stages, cuts, and per stage degrees, remat and its mixtures, ZeRO and sequence
parallelism, each drawn uniformly. Their stages are compiled, and held against

    bounds      bytes and seconds of every stage (the warnings of `capture plan`), the peak of every
                device, and a step by the bound that proves (`least_step`)
    floors      of every stage the sum over its layers of what a part's floor counts of them; of the
                step, the floor of all plans with as many micro-batches
    interval    what `capture plan --quick` says of a plan: most of its peaks were to be in it

An interrupted run goes on with what OUTPUT has. The exit code is 1 if a bound or a floor is above.
"""

from __future__ import annotations

import itertools
import json
import operator
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.documents import arguments
from capture import environment
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice, by_degree, num_full_layers
from capture.plan.sampling import random_plans
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor.step_time import predicted_timeline
from capture.step.times import Resource, StageTimes, TimeModel
from profiling_runs.bounds import ModelBounds
from profiling_runs.measurements import open_measurements
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify, with_verified
from recommender.capture.least_step import LeastStep
from recommender.capture.parts import OpenPart
from recommender.capture.posed import search_problem
from recommender.capture.recommendation import plan_of, predict_plan
from recommender.capture.speed import Timed
from recommender.whole import WholeQuestion

NUM_DEVICES = 8
#: Of sums of the same numbers in another order.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    workload: str
    cluster: str
    target: str
    global_batch: int


#: By name.
CASES = {
    "gpt": Case("models/gpt.py:gpt?size=125M&dtype=bfloat16", "1x4", "h100", 64),
    "gpt tiny": Case("models/gpt.py:gpt?size=tiny", "2x4", "h100", 32),
    "gpt tiny, v5e": Case("models/gpt.py:gpt?size=tiny&dtype=bfloat16", "1x8", "v5e", 32),
    "gpt2": Case("models/gpt2.py:gpt2?size=small&dtype=bfloat16", "1x4", "h100", 32),
    "bert": Case("models/bert.py:bert?size=base&dtype=bfloat16", "2x4", "h100", 64),
    "llama tiny": Case("models/llama.py:llama?size=tiny&dtype=bfloat16", "1x8", "h100", 32),
    "moe": Case("models/moe.py:moe?size=380M&dtype=bfloat16", "1x4", "h100", 32),
    "moe tiny": Case("models/moe.py:moe?size=tiny", "2x4", "h100", 32),
    "moe tiny, v5e": Case("models/moe.py:moe?size=tiny", "1x4", "v5e", 32),
    "mingpt": Case("models/mingpt.py:mingpt?size=tiny", "1x4", "h100", 16),
    "vit": Case("models/vit.py:vit?size=tiny", "1x8", "h100", 32),
    "wide_resnet": Case("models/wide_resnet.py:wide_resnet?size=250M", "1x4", "h100", 64),
    "resnet": Case("models/resnet.py:resnet?size=tiny", "2x4", "h100", 64),
    "resnet, v5e": Case("models/resnet.py:resnet?size=tiny", "1x4", "v5e", 32),
    "vgg": Case("models/vgg.py:vgg?size=tiny", "1x4", "h100", 32),
    "mobilenet": Case("models/mobilenet.py:mobilenet?size=tiny", "1x4", "h100", 32),
    "unet": Case("models/unet.py:unet?size=31M", "1x4", "h100", 16),
    "recommender": Case("models/deep_recommender.py:deep_recommender?size=20M", "2x4", "h100", 256),
    "tied": Case("tests/user_models/mixed.py:model", "1x4", "h100", 32),
    "recurrent": Case("tests/kit/recurrent.py:gated_recurrent", "1x8", "h100", 32),
}


class Space:
    """The plans of a case, and what is said of them."""

    def __init__(self, case: Case, store: Path | None):
        cluster = Cluster.parse(case.cluster, case.target)
        asked = ProfileQuestion(WorkloadSpec.parse(case.workload), cluster, case.global_batch)
        self.measurements = open_measurements(asked, store=Store(store), where=Where(0))
        whole = WholeQuestion(cluster, case.global_batch)
        self.whole = whole.of_sizes(self.measurements.backend.takes)
        sizes = [case.global_batch // count for count in self.whole.microbatches]
        examples = {
            size // choice.data_parallel for size in sizes for choice in self.whole.choices(size)
        }
        self.known = ModelBounds(self.measurements, examples, cluster.num_devices)
        self._parts: dict[int, OpenPart] = {}
        rates = Target.load(case.target).rates
        assert rates is not None, "its work is counted"
        self.model = TimeModel(rates, cluster.layout)

    def part(self, count: int) -> OpenPart:
        """The plans of a number of micro-batches."""
        if count not in self._parts:
            question = self.whole.question(count)
            choices = self.whole.choices(question.microbatch_size)
            bounds = self.known.at(choices, question.microbatch_size)
            self._parts[count] = OpenPart(question, bounds)
        return self._parts[count]

    def drawn(self, generator: np.random.Generator) -> tuple[OpenPart, Plan]:
        """A plan. One mixture of as many layers as is drawn is there beside the names of remat."""
        part = self.part(int(generator.choice(self.whole.microbatches)))
        num_layers = part.known.graph.num_layers
        choices = self.whole.choices(part.size)
        mixture = f"full:{generator.integers(1, max(num_layers, 2))}"
        choices += [replace(each, remat=mixture) for each in choices if each.remat == "full"]
        asked = part.question
        stages = next(
            random_plans(asked.cluster, num_layers, by_degree(choices), generator, asked.space)
        )
        return part, plan_of(part.known, asked, stages)

    @cached_property
    def _unlaunched(self) -> TimeModel:
        rates = self.model.rates
        launch = replace(rates.kernel_seconds, value=0.0)
        return replace(self.model, rates=replace(rates, kernel_seconds=launch))

    def floors(self, config: StageConfig) -> tuple[int, float]:
        """Bytes and seconds of a stage as a floor counts its layers."""
        nbytes, facts = 0, self.known.facts
        seconds: dict[Resource, float] = {"computing": 0.0, "sending": 0.0}
        for layer in range(config.first, config.stop):
            window, choice = (layer, layer + 1), _of_layer(config, layer)
            between = facts.bounds(window, choice, config.microbatch_size)
            nbytes += facts.least_held(window, choice, config.microbatch_size)
            for counts in seconds:
                times = replace(self._unlaunched, counts=counts).stage_times(between.least)
                seconds[counts] += times.microbatch_seconds if times is not None else 0.0
        return nbytes, max(seconds.values())

    def least_step(self, part: OpenPart, limit: int | None) -> float:
        """The same by its stages."""
        known = replace(part.known, verified={})
        problem = search_problem(known, part.question, with_times=True, least=True)
        return LeastStep(problem).within(limit)[0]

    def floor(self, part: OpenPart, limit: int | None) -> float:
        """Seconds of a step that no plan of a part is below, by its floor."""
        choices, cluster = self.whole.choices(part.size), part.question.cluster
        least, _ = self.known.seconds(choices, part.size, cluster, limit)
        return part.question.num_microbatches * least


def _of_layer(config: StageConfig, layer: int) -> StageChoice:
    """What a layer of a stage does: of a mixture the first ones recompute everything."""
    count = num_full_layers(config.choice.remat)
    if not count:
        return config.choice
    return replace(config.choice, remat="full" if layer - config.first < count else "cheap")


def least_step(times: Iterable[StageTimes], num_microbatches: int) -> float:
    """The bound of `recommender.capture.least_step` for one plan."""
    way, least, updates = 0.0, 0.0, []
    for each in times:
        least = max(least, way + num_microbatches * each.microbatch_seconds)
        way += each.microbatch_seconds
        updates.append(each.update_seconds)
    return least + updates[0]


def compared(space: Space, part: OpenPart, plan: Plan) -> dict[str, Any]:
    """What is said of a plan, and what compiles."""
    found = verify(plan, space.measurements)
    timeline, configs = found.timeline(), list(map(part_config(part), plan.stages))
    assert timeline is not None, "the target has rates"
    peaks, limit = found.peak_bytes_per_device, part.question.limit_bytes
    known = with_verified(part.bounds.profile, plan, space.measurements)
    said = predict_plan(part.most, plan)
    fits = limit is None or max(peaks) <= limit
    row = {
        "stages": [
            stage_row(space, part, config, cost, peaks[stage.devices[0]])
            for stage, config, cost in zip(plan.stages, configs, found.costs, strict=True)
        ],
        "fits": fits,
        "peak_bytes": list(peaks),
        "least_peak_bytes": list(predict_plan(part.bounds.profile, plan).peak_bytes_per_device),
        "said_bytes": list(said.peak_bytes_per_device),
        "interval_bytes": [list(each) for each in said.interval_bytes_per_device],
        "step_seconds": float(timeline.step_seconds),
        "estimated_seconds": float(predicted_timeline(plan, part.most).step_seconds),
        "least_seconds": {
            "of the plan": least_step(map(bounded(part), configs), plan.num_microbatches),
            "of the part": space.least_step(part, limit if fits else None),
            "floor": space.floor(part, limit if fits else None),
        },
    }
    refuted = map(str, Timed().refuted_by(part, known.verified))
    return {**row, "above": [*dict.fromkeys(refuted), *above(row)]}


def part_config(part: OpenPart) -> Callable[[Stage], StageConfig]:
    return lambda stage: StageConfig.of(stage, part.size)


def bounded(part: OpenPart) -> Callable[[StageConfig], StageTimes]:
    """The least seconds of a stage."""
    return lambda each: part.bounded.table(each.choice, part.size).at(each.first, each.stop)


def stage_row(
    space: Space, part: OpenPart, config: StageConfig, cost: StageCost, peak_bytes: int
) -> dict[str, Any]:
    """What is said of a stage, and what compiles."""
    times = space.model.stage_times(cost)
    assert times is not None, "the target has rates"
    held, seconds = space.floors(config)
    return {
        "layers": [config.first, config.stop - 1],
        "choice": str(config.choice),
        "peak_bytes": peak_bytes,
        "held_bytes": held,
        "seconds": times.microbatch_seconds,
        "least_seconds": bounded(part)(config).microbatch_seconds,
        "floor_seconds": seconds,
    }


def above(row: Mapping[str, Any]) -> Iterator[str]:
    """What is said to be below what compiles, and is not."""
    for stage in row["stages"]:
        where = f"layers {stage['layers']} ({stage['choice']})"
        if stage["held_bytes"] > stage["peak_bytes"]:
            yield f"{where}: a floor of {stage['held_bytes']:,} bytes"
        if stage["floor_seconds"] > stage["seconds"] * (1 + ROUNDING):
            yield f"{where}: a floor of {stage['floor_seconds']:.3g} s"
    if any(map(operator.gt, row["least_peak_bytes"], row["peak_bytes"])):
        yield "a lower bound of a peak"
    for name, seconds in row["least_seconds"].items():
        if seconds > row["step_seconds"] * (1 + ROUNDING):
            yield f"a step, {name}: {seconds:.3g} s"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many plans are above what is said of them, and by how much."""
    plans = [row for row in rows if "stages" in row]
    stages = [stage for row in plans for stage in row["stages"]]
    over = [peak_over(row, [high for _, high in row["interval_bytes"]]) for row in plans]
    under = [min(map(operator.truediv, row["peak_bytes"], lows(row))) for row in plans]
    return {
        "num_plans": len(plans),
        "num_stages": len(stages),
        "num_refused": len(rows) - len(plans),
        "num_above": sum(map(len, (row["above"] for row in plans))),
        "num_above_interval": sum(each > 1 for each in over),
        "num_below_interval": sum(each < 1 for each in under),
        "worst_of_interval": max(over, default=None),
        "bound_over_peak": spread(1 / peak_over(row, row["least_peak_bytes"]) for row in plans),
        "said_over_peak": spread(1 / peak_over(row, row["said_bytes"]) for row in plans),
        "estimate_over_step": spread(
            row["estimated_seconds"] / row["step_seconds"] for row in plans
        ),
        "bound_over_seconds": spread(each["least_seconds"] / each["seconds"] for each in stages),
        **{
            f"step_{name}": spread(
                row["least_seconds"][name] / row["step_seconds"] for row in plans
            )
            for name in ("of the plan", "of the part", "floor")
        },
    }


def lows(row: Mapping[str, Any]) -> list[int]:
    return [low for low, _ in row["interval_bytes"]]


def peak_over(row: Mapping[str, Any], said: Sequence[int]) -> float:
    """The largest part of what was said that a device needs."""
    return max(map(operator.truediv, row["peak_bytes"], said))


def spread(values: Iterable[float]) -> dict[str, float]:
    known = sorted(values)
    if not known:
        return {}
    return {
        "least": round(known[0], 3),
        "median": round(statistics.median(known), 3),
        "most": round(known[-1], 3),
    }


def rows_of(space: Space, name: str, number: int) -> dict[str, Any]:
    """The row of a plan; of one that does not compile, why."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), number])
    part, plan = space.drawn(generator)
    row = {
        "model": name,
        "number": number,
        "microbatches": plan.num_microbatches,
        "plan": [f"{s.first}-{s.stop - 1}: {s.choice}" for s in plan.stages],
    }
    try:
        return {**row, **compared(space, part, plan)}
    except CaptureError as error:
        return {**row, "refused": str(error)}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--plans", type=int, default=200, help="of all models together")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    environment.prepare(num_devices=NUM_DEVICES, platform="cuda")
    document: dict[str, Any] = {"benchmark": "whole_space", "rows": []}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    rows = document["rows"]
    done = {(row["model"], row["number"]) for row in rows}
    turns = ((name, n) for n in itertools.count() for name in options.models)
    spaces: dict[str, Space] = {}
    for name, number in itertools.islice(turns, options.plans):
        if (name, number) in done:
            continue
        start = time.perf_counter()
        if name not in spaces:
            spaces[name] = Space(CASES[name], options.store)
        rows.append(rows_of(spaces[name], name, number))
        said = rows[-1].get("above", rows[-1].get("refused"))
        took = time.perf_counter() - start
        print(f"{name} {number}: {took:.1f} s {said}", file=sys.stderr, flush=True)
        document |= {
            "date": date.today().isoformat(),
            "versions": {p: environment.versions(p) for p in ("cuda", "tpu")},
            "models": {name: asdict(case) for name, case in CASES.items()},
            "summary": summary(rows),
        }
        if options.output is not None:
            options.output.write_text(json.dumps(document) + "\n")
    print(json.dumps(document.get("summary"), indent=1))
    return int(bool(document["summary"]["num_above"]))


if __name__ == "__main__":
    sys.exit(main())
