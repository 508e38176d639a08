"""The setting of the paper's evaluation, which the scripts beside this one share: models, cluster,
profiles, and the two planners.

Everything is for 4 nodes of 4 A100 40 GB, compiled here for that GPU; nothing runs on one. "Alpa"
is Alpa's algorithm on our cost model: for hybrid parallelism its autostaging
(``capture.papers.alpa.autostage``), for pipelining alone 16 stages of equal FLOPs, one per GPU.
"Ours" is what ``capture plan --verify 5`` recommends in the same space. The stages of both plans
are compiled, and their steps simulated alike.

Each plan's memory is counted as its runtime needs it, from the same compiled stages: ours by this
library's, Alpa's by Alpa's (``capture.alpa.memory``: its placement, its lifetimes of buffers, and
for GPT-3 and MoE parameters and gradients in 16 bits with a float32 master copy that replicas
split). That is how Alpa's own search counts as well. What our plan would need in Alpa's runtime is
recorded too.

What differs from the paper: the compiler's report in the place of an allocator's; simulated
seconds; jax of today in the place of 0.3.22; bfloat16 in the place of float16 (GPT-3, MoE); one
layer per transformer or residual block, so 16 for Wide-ResNet where Table I says 32 (pipelining
alone cuts it into 32 automatically); every layer is recomputed in the backward pass and replicas
share the optimizer state, as in Alpa's own suites, of which the paper says nothing.

Source: CAPTURE IV, Table I. The paper's figure has five configurations of three models, and its
text does not say which stands in which panel. Here 1F1B has those of Table II; GPipe, which needs
more, has the smaller GPT-3 and Wide-ResNet (Figures 7 and 9 have GPipe with that one), and MoE
7.1B, as the text says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from capture import environment
from capture.alpa.memory import AlpaMemory, alpa_memory, alpa_replay
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.papers.alpa.autostage import LABEL, autostage
from capture.plan.choices import StageChoice
from capture.plan.prediction import Verified
from capture.plan.space import StageSpace
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import predicted_timeline
from profiling_runs.collect import profile
from profiling_runs.measurements import Measurements, open_measurements
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import Verification, verify, with_verified
from recommender import PlanQuestion, recommend
from recommender.answer import Answer
from recommender.capture.knowledge import recommend_verified
from recommender.capture.recommendation import baseline_plan

TARGET = "a100-40g"
CLUSTER = Cluster((4, 4, 4, 4), TARGET)
SCHEDULES = ("1f1b", "gpipe")
#: Plans that are compiled before the best of them is recommended.
MAX_VERIFIED = 5
#: Of Alpa's throughput, that a plan must keep to be named beside the one of least memory.
KEPT_THROUGHPUT = 0.9

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A row of the paper's Table I.

    Attributes:
        name: As there.
        family: Of the three.
        workload: Of the zoo.
        global_batch, num_microbatches: Of a step.
        num_layers: Cut automatically; None cuts at the model's marks.
        max_stage_devices: What is profiled; 1 for pipelining alone.
    """

    name: str
    family: str
    workload: str
    global_batch: int
    num_microbatches: int
    num_layers: int | None = None
    max_stage_devices: int = 16

    @property
    def master_copy(self) -> bool:
        """Whether Alpa's suite trains it in 16 bits, with a float32 copy of the parameters."""
        return "dtype=bfloat16" in self.workload

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "-").replace(",", "")


_GPT, _MOE, _WRN = "models/gpt.py:gpt", "models/moe.py:moe", "models/wide_resnet.py:wide_resnet"
MODELS = {
    model.name: model
    for model in (
        Model("GPT-3 2.6B", "GPT-3", f"{_GPT}?size=2.6B&dtype=bfloat16", 1024, 64),
        Model("GPT-3 6.7B", "GPT-3", f"{_GPT}?size=6.7B&dtype=bfloat16", 1024, 32),
        Model("MoE 2.4B", "MoE", f"{_MOE}?size=2.4B&dtype=bfloat16", 1024, 32),
        Model("MoE 7.1B", "MoE", f"{_MOE}?size=7.1B&dtype=bfloat16", 1024, 32),
        Model("Wide-ResNet 1B", "Wide-ResNet", f"{_WRN}?size=1B", 768, 24),
        Model("Wide-ResNet 2B", "Wide-ResNet", f"{_WRN}?size=2B", 1536, 24),
    )
}
#: The three largest, of Table II.
LARGEST = ("GPT-3 6.7B", "MoE 7.1B", "Wide-ResNet 2B")


# ---- profiles ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profiled:
    """A model with its profile and what compiles its plans.

    Attributes:
        seconds: That the profile took with an empty store. Of one that was made in parts, those of
            its measurements, shared out evenly over the processes.
        is_whole: Whether it was made in one go.
    """

    model: Model
    profile: Profile
    measurements: Measurements
    seconds: float
    is_whole: bool


def stage_choices(microbatch_size: int, max_devices: int) -> list[StageChoice]:
    """The space of both planners: Alpa's default, tensor parallelism inside nodes and data
    parallelism across them."""
    space = StageSpace(whole_nodes=True)
    return [
        choice
        for choice in space.choices(CLUSTER, microbatch_size, ("full",), shard_optimizer=True)
        if choice.tensor_parallel <= CLUSTER.nodes[0] and choice.num_devices <= max_devices
    ]


def profiled(model: Model, options: argparse.Namespace) -> Profiled:
    """The model's profile, made at the first time; interrupted, it resumes."""
    folder = options.folder / model.slug
    file, told = folder / "profile.json", folder / "profile_seconds.json"
    is_cold = not (folder / "store.sqlite").exists()
    measurements = measurements_of(model, options)
    if not file.exists():
        start = time.perf_counter()
        microbatch_size = model.global_batch // model.num_microbatches
        made = profile(
            ProfileQuestion(
                WorkloadSpec.parse(model.workload),
                CLUSTER,
                microbatch_size=microbatch_size,
                choices=stage_choices(microbatch_size, model.max_stage_devices),
                space=StageSpace(whole_nodes=True),
                calibration_plans=0,
            ),
            measurements=measurements,
        )
        with closing(sqlite3.connect(folder / "store.sqlite")) as store:
            (measuring,) = store.execute("SELECT SUM(seconds) FROM measurements").fetchone()
        seconds = time.perf_counter() - start if is_cold else measuring / options.workers
        told.write_text(json.dumps({"seconds": seconds, "is_whole": is_cold}))
        made.save(file)
    return Profiled(model, Profile.load(file), measurements, **json.loads(told.read_text()))


def measurements_of(model: Model, options: argparse.Namespace) -> Measurements:
    """What compiles the model's stages, and remembers them."""
    folder = options.folder / model.slug
    folder.mkdir(parents=True, exist_ok=True)
    return open_measurements(
        ProfileQuestion(
            WorkloadSpec.parse(model.workload),
            Cluster((CLUSTER.num_devices,), TARGET),
            8,
            num_layers=model.num_layers,
        ),
        store=Store(folder / "store.sqlite"),
        where=Where(options.workers),
        progress=partial(say, model.name),
    )


def say(name: str, what: str, done: int, total: int) -> None:
    """Progress on standard error: a line that is written over."""
    if total:
        print(
            f"\r{name}: {what} {done}/{total} ",
            end="" if done < total else "\n",
            file=sys.stderr,
            flush=True,
        )


# ---- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A panel of Figure 6.

    Attributes:
        panel: Its letter.
        model: Of Table I.
        schedule: Of the pipeline.
        is_hybrid: Data and tensor parallelism in stages; else pipelining alone.
        paper_gain: Fraction of the peak that the paper saves; None where its text does not say it.
    """

    panel: str
    model: Model
    schedule: str
    is_hybrid: bool
    paper_gain: float | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.model.name}, {'hybrid' if self.is_hybrid else 'pipelining only'}, "
            f"{SCHEDULE_NAMES[self.schedule]}"
        )


SCHEDULE_NAMES = {"1f1b": "1F1B", "gpipe": "GPipe"}


def pipelining_model(model: Model) -> Model:
    """The model that pipelining alone cuts: Wide-ResNet needs more than its 16 blocks to leave a
    choice."""
    if model.family != "Wide-ResNet":
        return model
    return replace(model, name=f"{model.name}, 32 layers", num_layers=32, max_stage_devices=1)


SCENARIOS = tuple(
    Scenario(panel, model if is_hybrid else pipelining_model(model), schedule, is_hybrid, gain)
    for panel, schedule, is_hybrid, model, gain in (
        ("a", "1f1b", True, MODELS["GPT-3 6.7B"], None),
        ("b", "1f1b", True, MODELS["MoE 7.1B"], None),
        ("c", "1f1b", True, MODELS["Wide-ResNet 2B"], None),
        ("d", "gpipe", True, MODELS["GPT-3 2.6B"], 0.203),
        ("e", "gpipe", True, MODELS["MoE 7.1B"], 0.0564),
        ("f", "gpipe", True, MODELS["Wide-ResNet 1B"], None),
        ("g", "1f1b", False, MODELS["GPT-3 6.7B"], None),
        ("h", "1f1b", False, MODELS["MoE 7.1B"], 0.0),
        ("i", "1f1b", False, MODELS["Wide-ResNet 2B"], None),
        ("j", "gpipe", False, MODELS["GPT-3 2.6B"], 0.0),
        ("k", "gpipe", False, MODELS["MoE 7.1B"], 0.0),
        ("l", "gpipe", False, MODELS["Wide-ResNet 1B"], 0.1253),
    )
)
#: What the paper says of the gains of a row of Figure 6: smallest and largest, as fractions.
PAPER_GAINS = {
    ("1f1b", True): (0.1836, 0.4392),
    ("gpipe", True): (0.0564, 0.2138),
    ("1f1b", False): (0.1938, 0.2526),  # GPT-3 and Wide-ResNet
    ("gpipe", False): (0.0, 0.1253),
}


@dataclass(frozen=True)
class Planned:
    """A plan, compiled.

    Attributes:
        plan: That was chosen.
        verification: Its stages, compiled, and their step in our runtime.
        in_alpa: Its step in Alpa's; None where Alpa cannot place the stages.
        is_alpas: Whether Alpa chose it: its memory is then that of its own runtime.
        predicted_bytes: Per device, from what was known when it was chosen; None if that was not
            kept.
    """

    plan: Plan
    verification: Verification
    in_alpa: AlpaMemory | None
    is_alpas: bool
    predicted_bytes: Sequence[int] | None

    @property
    def peak_bytes_per_device(self) -> Sequence[int]:
        if not self.is_alpas:
            return self.verification.peak_bytes_per_device
        assert self.in_alpa is not None, "Alpa places what it chooses"
        return self.in_alpa.peak_bytes_per_device

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_bytes_per_device)

    @property
    def step_seconds(self) -> float:
        timeline = self.verification.timeline()
        assert timeline is not None, f"{TARGET} has rates"
        return float(timeline.step_seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": [stage.to_json() for stage in self.plan.stages],
            "counted_as": "alpa" if self.is_alpas else "ours",
            "peak_bytes_per_device": list(self.peak_bytes_per_device),
            "predicted_peak_bytes_per_device": None
            if self.predicted_bytes is None
            else list(self.predicted_bytes),
            "peak_bytes": self.peak_bytes,
            "total_bytes": sum(self.peak_bytes_per_device),
            "our_runtime_peak_bytes": max(self.verification.peak_bytes_per_device),
            "alpa_runtime_peak_bytes": None
            if self.in_alpa is None
            else max(self.in_alpa.peak_bytes_per_device),
            "fits": self.peak_bytes <= usable_bytes(),
            "step_seconds": self.step_seconds,
            "examples_per_second": self.plan.global_batch_size / self.step_seconds,
        }


def usable_bytes() -> int:
    memory = Target.load(TARGET).memory
    assert memory is not None, f"{TARGET} has memory"
    return memory.usable_bytes


class Planner:
    """Both planners for one scenario. Compiled stages join the profile, so that each is predicted
    as it is from then on."""

    def __init__(self, found: Profiled, scenario: Scenario, cluster: Cluster = CLUSTER):
        self.scenario, self.cluster, self.measurements = scenario, cluster, found.measurements
        self.profile = found.profile if scenario.is_hybrid else _of_one_device(found.profile)
        model = scenario.model
        self.question = PlanQuestion(
            cluster,
            model.global_batch,
            model.num_microbatches,
            scenario.schedule,
            space=StageSpace(whole_nodes=scenario.is_hybrid),
        )

    def alpa(self, **options: Any) -> Planned | None:
        """Alpa's plan; None if it finds none.

        Args:
            **options: Of the question.
        """
        if self.scenario.is_hybrid:
            plan = autostage(
                self.profile,
                replace(self.question, **options),
                master_copy=self.scenario.model.master_copy,
            ).plan
        else:
            plan = baseline_plan(self.profile, self.question, weigh="flops")
        return None if plan is None else self.compiled(plan, is_alpas=True)

    def ours(self) -> tuple[Planned, Answer]:
        """The plan of least peak memory, and how it was found."""

        def compiled(plan: Plan, known: Profile) -> tuple[Verified, Profile]:
            found = verify(plan, self.measurements)
            self.profile = with_verified(known, plan, self.measurements)
            return found.verified, self.profile

        result = recommend_verified(self.profile, self.question, compiled, MAX_VERIFIED)
        assert result.plan is not None, (
            "every cluster here has a plan, if only one that does not fit"
        )
        return self.compiled(result.plan), result

    def least_bytes(self) -> tuple[int, bool]:
        """Least predicted peak when stages may stand anywhere, since Alpa packs them after it
        chose; and whether that is proven."""
        row = Cluster((self.cluster.num_devices,), TARGET)
        found = recommend(self.profile, replace(self.question, cluster=row))
        return found.proof.peak_bytes, found.proof.optimal

    def fast_enough(self, alpa: Planned) -> Planned | None:
        """The plan of least memory on the front that keeps 90 % of Alpa's throughput; None if none
        of those compiled does."""
        found = recommend(self.profile, replace(self.question, objective="pareto"))
        longest = alpa.step_seconds / KEPT_THROUGHPUT
        for point in found.why.front.points if found.why.front else ():
            assert found.plan is not None, "a front has plans"
            plan = self._predicted(found.plan.with_(stages=point.stages))
            # The prediction may be a little off.
            if float(predicted_timeline(plan, self.profile).step_seconds) > 1.02 * longest:
                continue
            planned = self.compiled(plan)
            if planned.step_seconds <= longest:
                return planned
        return None

    def compiled(self, plan: Plan, *, is_alpas: bool = False) -> Planned:
        if is_alpas:
            predicted = alpa_memory(
                plan, self.profile, master_copy=self.scenario.model.master_copy
            ).peak_bytes_per_device
        else:
            assert plan.prediction is not None, "our planners predict"
            predicted = plan.prediction.peak_bytes_per_device
        planned = counted(plan, self.scenario.model, self.measurements, predicted, is_alpas)
        self.profile = with_verified(self.profile, plan, self.measurements)
        return planned

    def _predicted(self, plan: Plan) -> Plan:
        return plan.with_(prediction=AdditivePredictor(self.profile).predict(plan))


def counted(
    plan: Plan,
    model: Model,
    measurements: Measurements,
    predicted_bytes: Sequence[int] | None,
    is_alpas: bool,
) -> Planned:
    """Compile the stages of a plan and count what a step needs, in our runtime and in Alpa's."""
    found = verify(plan, measurements)
    try:
        in_alpa = alpa_replay(plan, found.stages, master_copy=model.master_copy)
    except PlanError:
        in_alpa = None
    return Planned(plan, found, in_alpa, is_alpas, predicted_bytes)


def _of_one_device(whole: Profile) -> Profile:
    """What the profile knows of stages of one device."""
    measurements = {
        config: cost
        for config, cost in whole.measurements.items()
        if config.choice.num_devices == 1
    }
    return replace(whole, measurements=measurements)


# ---- command lines and documents -----------------------------------------------------------------


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home() / ".cache" / "capture" / "paper",
        help=(
            "of profiles and compiled stages, which the scripts share; interrupted, they resume "
            "there (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--only",
        nargs="+",
        type=part_of_name,
        default=[""],
        metavar="TEXT",
        help="of the models those whose name contains one of these",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that compile (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the document here, and its figure beside it as .svg",
    )
    return parser


def part_of_name(text: str) -> str:
    """A text that is part of a model's name."""
    if not any(text in name for name in MODELS):
        raise argparse.ArgumentTypeError(f"{text!r} is in no name of {', '.join(MODELS)}")
    return text


def prepare() -> None:
    """Make this process one that compiles for the GPUs."""
    environment.prepare(num_devices=CLUSTER.num_devices, platform=Target.load(TARGET).platform)


def is_chosen(model: Model, options: argparse.Namespace) -> bool:
    return any(text in model.name for text in options.only)


def finish(
    name: str,
    rows: list[dict[str, Any]],
    options: argparse.Namespace,
    text: str,
    svg: str | None,
    **more: Any,
) -> int:
    """Write and print the document of a script."""
    document: Mapping[str, Any] = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "cluster": str(CLUSTER),
        "target": TARGET,
        "simulated": True,
        "baseline": LABEL,
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": environment.versions("cuda"),
        **more,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
        if svg is not None:
            options.output.with_suffix(".svg").write_text(svg)
    print(json.dumps(document, indent=2) if options.json else text)
    return 0


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
