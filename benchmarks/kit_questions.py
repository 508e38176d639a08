"""What the model kit is asked: models of ``tests/kit`` drawn at random, predictions of random plans
of theirs beside compiled truth, and a step of theirs beside one device.

``model_kit.py`` asks and records; tests ask a sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay
from profiling_runs.question import ProfileQuestion

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "kit"
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lion", "adafactor", "clipped_adamw", "muon")
#: Models whose parameters a scan stacks over layers, and what those that ask for a whole leaf
#: (``optimizer-stacked``) are drawn as.
STACKED = {"recurrent:scanned_layers", "recurrent:scanned_groups", "recurrent:checkpointed_scan"}
ONE_BY_ONE = {"adafactor": "adam", "muon": "adam"}

Pick = Callable[[Sequence[Any]], Any]

_WIDTHS, _DEPTHS, _VOCABULARIES = (16, 32, 48, 64), (7, 8, 10), (64, 500, 2000, 8000)

#: By file and function, the values that each argument is drawn from; every model also takes any
#: optimizer.
KIT: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "dense:uneven": {"seed": range(20), "depth": _DEPTHS, "largest": (64, 256)},
    "dense:alternating": {"narrow": (16, 24), "wide": (96, 192, 256), "depth": _DEPTHS},
    "dense:pyramid": {"width": (8, 16, 24), "depth": _DEPTHS},
    "dense:one_huge": {"position": range(7), "width": (16, 24, 48), "huge": (512, 2048)},
    "dense:without_parameters": {"width": _WIDTHS, "depth": (3, 4)},
    "dense:shared_norm": {"width": _WIDTHS, "hidden": (64, 128), "depth": _DEPTHS},
    "dense:one_matrix": {"width": (64, 128, 256), "depth": _DEPTHS},
    "dense:two_towers": {"left": (32, 64), "right": _WIDTHS, "depth": (3, 4)},
    "dense:autoencoder": {"width": (64, 128, 256), "code": (4, 8), "depth": (3, 4)},
    "dense:gated": {"width": _WIDTHS, "hidden": (64, 128), "depth": _DEPTHS},
    "dense:tables": {"fields": (3, 5), "rows": (200, 4000), "width": (16, 32), "depth": (3, 4)},
    "dense:low_rank": {"width": (48, 96, 192), "rank": (2, 8), "depth": _DEPTHS},
    "dense:routed": {"width": _WIDTHS, "experts": (2, 4), "depth": _DEPTHS},
    "dense:masked": {"width": _WIDTHS, "depth": _DEPTHS},
    "dense:deep_supervision": {"width": _WIDTHS, "classes": (50, 500), "depth": _DEPTHS},
    "dense:branches": {"width": _WIDTHS, "depth": (5, 6, 7)},
    "dense:noisy": {"width": _WIDTHS, "hidden": (96, 160), "depth": _DEPTHS},
    "dense:hypernetwork": {"width": (8, 16), "code": (16, 32), "depth": _DEPTHS},
    "dense:half_precision": {"width": _WIDTHS, "hidden": (96, 192), "depth": _DEPTHS},
    "sequences:language_model": {
        "width": (16, 32),
        "depth": _DEPTHS,
        "vocab": _VOCABULARIES,
        "length": (8, 16),
        "tied": (True, False),
    },
    "sequences:apart": {
        "width": (16, 24, 48),
        "depth": (4, 5, 6),
        "vocab": _VOCABULARIES,
        "tied": (True, False),
    },
    "sequences:three_readers": {"width": (16, 32), "depth": _DEPTHS, "vocab": _VOCABULARIES},
    "sequences:every_reader": {"width": (16, 32), "depth": _DEPTHS, "vocab": _VOCABULARIES},
    "sequences:shared_blocks": {
        "width": (16, 32),
        "depth": _DEPTHS,
        "period": (1, 2, 3),
        "vocab": (64, 500),
    },
    "sequences:read_again": {
        "width": (16, 32),
        "depth": (9, 10),
        "vocab": (500, 4000),
        "readers": ((0, 4), (1, 2, 7), (0, 3, 6)),
        "kind": ("rows", "product", "both"),
        "second": ((), (2, 8)),
    },
    "sequences:encoder_decoder": {
        "width": (16, 32),
        "depth": (3, 4),
        "vocab": _VOCABULARIES,
        "tied": (True, False),
    },
    "sequences:with_keys": {
        "width": (16, 32),
        "depth": _DEPTHS,
        "vocab": (64, 500),
        "rate": (0.1, 0.5),
    },
    "sequences:relative_bias": {"width": (16, 32), "depth": _DEPTHS, "vocab": (64, 500)},
    "sequences:padded_classifier": {
        "width": (16, 32),
        "depth": _DEPTHS,
        "vocab": (64, 500),
        "length": (12, 24),
    },
    "sequences:experts": {
        "width": (16, 32),
        "num_experts": (2, 4),
        "depth": _DEPTHS,
        "vocab": (64, 500),
    },
    "sequences:linear_attention": {"width": _WIDTHS, "depth": _DEPTHS, "length": (16, 64)},
    "sequences:narrowing": {"width": (16, 32), "depth": (3, 4), "vocab": (64, 500)},
    "sequences:text_convolution": {"width": _WIDTHS, "depth": _DEPTHS, "vocab": _VOCABULARIES},
    "sequences:patches": {"width": (16, 48), "depth": _DEPTHS},
    "images:vgg": {"channels": (4, 8, 16), "levels": (2, 3), "hidden": (32, 256)},
    "images:skips": {"channels": (4, 8), "levels": (2, 3)},
    "images:depthwise": {"channels": (8, 16, 32), "depth": _DEPTHS, "size": (8, 16)},
    "images:residual": {"channels": (4, 8, 16), "levels": (3, 4)},
    "images:connected": {"growth": (4, 8), "depth": _DEPTHS, "size": (8, 16)},
    "images:dilated": {"channels": (8, 16, 32), "depth": _DEPTHS, "length": (32, 96)},
    "images:image_autoencoder": {"channels": (4, 8, 16), "levels": (3, 4)},
    "recurrent:gated_recurrent": {"width": (16, 32), "depth": _DEPTHS, "length": (6, 12)},
    "recurrent:recurrent_language_model": {
        "width": (16, 32),
        "depth": (5, 7),
        "vocab": _VOCABULARIES,
    },
    "recurrent:translator": {
        "width": (16, 32),
        "depth": (3, 4),
        "vocab": (64, 500, 2000),
        "tied": (True, False),
    },
    "recurrent:state_space": {"width": (16, 32), "depth": (6, 7), "length": (8, 16)},
    "recurrent:scanned_layers": {"width": (16, 32), "depth": _DEPTHS, "vocab": (64, 2000)},
    "recurrent:scanned_groups": {"width": _WIDTHS, "groups": (2, 3), "per_group": (3,)},
    "recurrent:checkpointed_scan": {"width": _WIDTHS, "depth": _DEPTHS},
    "recurrent:repeated_inside": {"width": _WIDTHS, "depth": _DEPTHS, "times": (2, 4)},
}


def workload_of(model: str, **arguments: Any) -> WorkloadSpec:
    """A model of the kit by name, with arguments of its function."""
    file, function = model.split(":")
    return WorkloadSpec(os.path.relpath(FOLDER / f"{file}.py"), function, arguments)


@dataclass(frozen=True)
class Question:
    """What is profiled, and what plans of it are asked about.

    Attributes:
        num_layers: Cut automatically; None at the model's marks.
        degrees: Data- and tensor-parallel degrees that stages may have.
        num_microbatches: Every plan is asked with each.
        seed: Of the plans.
    """

    model: str
    workload: WorkloadSpec
    num_layers: int | None
    cluster: Cluster
    degrees: tuple[tuple[int, int], ...]
    remat: str
    shard_optimizer: bool
    microbatch_size: int
    num_microbatches: tuple[int, ...]
    seed: int

    @classmethod
    def draw(cls, model: str, pick: Pick) -> Question:
        """Of a model; ``pick`` chooses one of several values."""
        arguments = {name: pick(values) for name, values in KIT[model].items()}
        optimizer = pick(("", *OPTIMIZERS))  # the model's own, or any
        optimizer = ONE_BY_ONE.get(optimizer, optimizer) if model in STACKED else optimizer
        degrees = pick(
            (((1, 1),), ((1, 1),), ((1, 1), (2, 1)), ((1, 1), (1, 2)), ((1, 1), (2, 1), (1, 2)))
        )
        replicated = (2, 1) in degrees
        # Where half a micro-batch cannot be split over the replicas, or is none, one size is
        # profiled, at half the cost.
        sizes = (6, 10, 8) if replicated else (5, 7, 8)
        return cls(
            model,
            workload_of(model, **arguments, **({"optimizer": optimizer} if optimizer else {})),
            pick((None, None, None, None, 7)),
            Cluster.parse(pick(("1x2", "1x3", "1x3", "1x4", "2x2"))),
            degrees,
            pick(("none", "none", "dots", "full")),
            replicated and pick((False, True)),
            pick(sizes),
            pick(((1, 2, 4, 8), (1, 3, 5, 6), (2, 3, 4, 7))),
            pick(range(1000)),
        )

    @property
    def choices(self) -> tuple[StageChoice, ...]:
        return tuple(
            StageChoice(dp, tp, self.remat, self.shard_optimizer) for dp, tp in self.degrees
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "workload": str(self.workload), "cluster": str(self.cluster)}

    def __str__(self) -> str:
        """As arguments of ``capture evaluate``, but for the degrees, of which that takes all."""
        text = (
            f"{self.workload} --cluster {self.cluster} --remat {self.remat} --microbatches "
            f"{self.num_microbatches[-1]} "
        )
        text += f"--global-batch {self.num_microbatches[-1] * self.microbatch_size}"
        text += f" --num-layers {self.num_layers}" if self.num_layers else ""
        return text + (" --shard-optimizer" if self.shard_optimizer else "")


@dataclass(frozen=True)
class Predicted:
    """One stage of one plan.

    Attributes:
        stages: Layers and degrees of all stages of the plan, as text.
        stage: Of them.
        fresh: Whether the stage's programs were compiled neither for the profile nor for the
            calibration.
        extrapolated: As the prediction says.
        predicted, low, high, truth: In bytes per device.
        coverage: That the interval claims; None if it was not calibrated.
        predicted_instant, truth_instant: What runs at the peak.
        cause: Of a truth above the prediction; empty otherwise.
    """

    stages: str
    stage: int
    schedule: str
    num_microbatches: int
    fresh: bool
    extrapolated: bool
    predicted: int
    low: int
    high: int
    truth: int
    coverage: float | None
    predicted_instant: str
    truth_instant: str
    cause: str

    @property
    def error(self) -> float:
        """Truth over prediction, less 1: positive is too low."""
        return self.truth / self.predicted - 1 if self.predicted else float(self.truth > 0)

    @property
    def beyond(self) -> float:
        """Of the truth above the interval, as a fraction of the prediction; 0 inside or below."""
        return (
            max(0, self.truth - self.high) / self.predicted
            if self.predicted
            else float(self.truth > 0)
        )

    def __str__(self) -> str:
        return (
            f"stage {self.stage} of {self.stages}, {self.schedule}, {self.num_microbatches} "
            f"micro-batches: predicted {self.predicted:,} "
            f"(at most {self.high:,}) at {self.predicted_instant}, needs {self.truth:,} at "
            f"{self.truth_instant!r}, {self.error:+.1%}; "
            f"{'fresh' if self.fresh else 'compiled before'}"
            f"{', extrapolated' if self.extrapolated else ''}; "
            f"cause: {self.cause}"
        )


def ask(
    question: Question,
    *,
    num_plans: int,
    calibration_plans: int = 6,
    store: Store | None = None,
    predictor: Callable[[Profile], AdditivePredictor] = AdditivePredictor,
) -> list[Predicted]:
    """Profile a model in this process, predict random plans, and replay them over their compiled
    stages.

    Raises:
        CaptureError: whatever stands in the way; ``profile-missing`` if a window or a stage does
            not compile.
    """
    from profiling_runs.collect import profile
    from profiling_runs.measurements import open_measurements

    task, cluster, size = question.workload.load(), question.cluster, question.microbatch_size
    measurements = open_measurements(
        ProfileQuestion(task, cluster, 8, num_layers=question.num_layers), store=store
    )
    result = profile(
        ProfileQuestion(
            task,
            cluster,
            microbatch_size=size,
            num_layers=question.num_layers,
            choices=question.choices,
            calibration_plans=calibration_plans,
        ),
        measurements=measurements,
    )
    known = {measurements.key(config) for config in measurements.costs}
    mine = predictor(result)
    plans = list(drawn_plans(question, result, num_plans))
    measurements.require(
        {"stages of the plans": [StageConfig.of(s, size) for plan in plans for s in plan.stages]}
    )
    if measurements.failures:
        (config, error), *_ = measurements.failures.items()
        raise CaptureError.of(
            f"layers {config.first} to {config.stop - 1} as {config.choice}: {error}",
            "profile-missing",
        )
    graph, found = measurements.backend.traced(size).graph, {}
    for plan in plans:
        configs = [StageConfig.of(stage, size) for stage in plan.stages]
        costs = [measurements.costs[config] for config in configs]
        truth = replay(
            build_step(plan_interfaces(plan, graph, result.param_bytes, costs), plan.schedule_table)
        )
        of_parts = replay(build_step(mine.interfaces(plan), plan.schedule_table))
        prediction = mine.predict(plan)
        layout = ", ".join(
            f"{s.first}-{s.stop - 1}:{s.choice.data_parallel}x{s.choice.tensor_parallel}"
            for s in plan.stages
        )
        for s, (stage, config) in enumerate(zip(plan.stages, configs, strict=True)):
            device, told = stage.devices[0], prediction.stages[s]
            peak = truth.peaks[device]
            cause = ""
            if peak.peak_bytes > told.peak_bytes:
                parts = mine.stage_cost(stage.first, stage.stop, config.choice, size)
                explains = of_parts.peak_bytes_per_device[device] >= min(
                    peak.peak_bytes, told.interval_bytes[1] + 1
                )
                cause = (
                    "formula"
                    if explains
                    else _lowest_part(parts, costs[s], of_parts.peaks[device].parts, peak)
                )
            row = Predicted(
                layout,
                s,
                plan.schedule,
                plan.num_microbatches,
                measurements.key(config) not in known,
                told.extrapolated,
                told.peak_bytes,
                *told.interval_bytes,
                peak.peak_bytes,
                prediction.interval_coverage,
                told.instant,
                peak.instant,
                cause,
            )
            found[
                measurements.key(config),
                plan.schedule,
                plan.num_microbatches,
                plan.num_stages - s,
                row.predicted,
                row.truth,
            ] = row
    return list(found.values())


def drawn_plans(question: Question, result: Profile, num_plans: int) -> Iterable[Plan]:
    """Random plans of a question, each under all schedules and numbers of micro-batches."""
    by_degree: dict[int, tuple[StageChoice, ...]] = {}
    for choice in question.choices:
        by_degree[choice.num_devices] = (*by_degree.get(choice.num_devices, ()), choice)
    draws = random_plans(
        question.cluster,
        result.graph.num_layers,
        by_degree,
        np.random.default_rng([question.seed, 2]),
    )
    for stages in islice(draws, num_plans):
        for schedule in PLAIN_SCHEDULES:
            for count in question.num_microbatches:
                yield result.plan(
                    question.cluster,
                    stages,
                    global_batch_size=count * question.microbatch_size,
                    num_microbatches=count,
                    schedule=schedule,
                )


def _lowest_part(
    predicted: StageCost, compiled: StageCost, held: Mapping[str, int], peak: Any
) -> str:
    """The part that is most too low where the truth has its peak."""
    program = peak.instant.split()[0]
    program = program if program in ("forward", "backward", "update") else "exchange"
    running = (
        0
        if program == "exchange"
        else getattr(compiled, f"{program}_bytes") - getattr(predicted, f"{program}_bytes")
    )
    lows = {
        program: running,
        "kept": peak.parts.get("activations", 0) - held.get("activations", 0),
        "state": compiled.optimizer_bytes - predicted.optimizer_bytes,
    }
    return max(lows, key=lambda name: lows[name])


# ---- one step, run -------------------------------------------------------------------------------


def errors_of_a_step(
    model: str, microbatch_size: int = 4, num_microbatches: int = 2, optimizer: str = ""
) -> tuple[float, float, float]:
    """Relative errors of loss, gradients and updated parameters of a step on two stages, compared
    with one device.

    Raises:
        ExecutionError: ``run-ledger-mismatch`` if live arrays are not what the ledger books.
    """
    import jax

    from capture.runtime.meter import LiveArrayMeter
    from capture.runtime.pipeline import pipeshard
    from capture.runtime.reference import ReferenceStep, max_relative_error
    from capture.tracing import trace

    workload = workload_of(model, **({"optimizer": optimizer} if optimizer else {})).load()
    num_layers = trace(workload, microbatch_size).graph.num_layers
    half = num_layers // 2
    stages = (Stage(0, half, (0,)), Stage(half, num_layers, (1,)))
    plan = Plan(
        Cluster((2,)),
        num_layers,
        stages,
        microbatch_size * num_microbatches,
        num_microbatches,
        "1f1b",
    )
    step = pipeshard(workload, plan, fast_compile=True)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (
            (leaf.ndim < 2) + (0.1 * random.normal(size=leaf.shape)).astype(leaf.dtype)
        ),  # compiling init takes longer
        jax.eval_shape(workload.init, jax.random.key(0)),
    )
    batch, key = workload.batch(jax.random.key(1), plan.global_batch_size), jax.random.key(2)
    reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
    expected, state = reference.init(params)
    loss, gradients = reference.loss_and_gradients(expected, batch, key)
    accumulated, metrics = step.accumulate(step.init_from(params), batch, key)
    gradient_error = max_relative_error(accumulated, gradients, 1e-3)
    loss_error = abs(metrics.loss / loss - 1)
    del accumulated, gradients
    mine = jax.block_until_ready(step.init_from(params))
    meter = LiveArrayMeter.of(step, strict=True)
    updated, metrics = step(mine, batch, key, observer=meter)
    del mine, metrics  # its losses are live, and booked as released
    meter.finish()
    assert meter.peak_bytes_per_device == step.replay().peak_bytes_per_device
    expected, _, _ = reference(expected, state, batch, key)
    return (
        loss_error,
        gradient_error,
        max_relative_error(step.params(updated), expected),
    )
