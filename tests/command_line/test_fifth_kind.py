"""A fifth kind of plan in this file alone: plain data parallelism, whose replicas add up the
gradients of several micro-batches. It registers one ``Kind``, as an installed package does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from cells import ASKED, CELLS, STORE, WORKLOAD, Case, installed

from capture import documents
from capture.cli import asked, options
from capture.cli.diff import compared
from capture.cli.output import outcome_of, table
from capture.cli.question_file import noted
from capture.cli.report import shown
from capture.cli.whole import close
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.files import PlanFile
from capture.plan.headroom import Peaks
from capture.plan.kinds import KINDS, Kind, load_plan
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import Why
from capture.quantities import counted, format_bytes
from capture.registered import Registered
from capture.report.documents import ExplainReport, PageReport, PeakRow, PlanNeeds, VerifyReport
from recommender.answer import Answer

HERE, HEADER = "test_fifth_kind", ["at the peak", "bytes"]


@dataclass(frozen=True, kw_only=True)
class ReplicasPlan(PlanFile):
    """Every device has the whole model, and an update the gradients of ``accumulated`` passes."""

    FORMAT = documents.Format(
        "plan of replicas", PlanError, "replicas-plan", f"see {HERE}", kind="replicas", strict=True
    )
    cluster: Cluster
    examples: int
    accumulated: int
    model_hash: str = ""
    workload: WorkloadSpec | None = None
    parts_bytes: dict[str, int] = field(default_factory=dict, compare=False)
    asked: dict = field(default_factory=dict, compare=False)

    @property
    def one_stage(self) -> Plan:
        """The same step as a pipeline of one stage of one layer."""
        count = self.cluster.num_devices
        stage = Stage.at(0, 0, 1, StageChoice(data_parallel=count))
        sizes = {"global_batch_size": self.examples, "num_microbatches": self.accumulated}
        known = {"model_hash": self.model_hash, "workload": self.workload, "auto_layers": True}
        return Plan(cluster=self.cluster, num_layers=1, stages=(stage,), **sizes, **known)

    @property
    def peaks(self) -> Peaks | None:
        peak = sum(self.parts_bytes.values())
        return Peaks.compiled(*[peak] * self.cluster.num_devices) if peak else None

    step_estimate = None
    step_examples = property(lambda self: self.examples)


@dataclass(frozen=True)
class Tried:
    """Numbers of passes that were compiled, the fewest first: fewer are never slower."""

    tried: list[int]
    seconds: float = 0.0
    algorithm: str = "fewest that fit"
    optimal: bool = True

    def to_json(self):
        return {"algorithm": self.algorithm, "tried": self.tried}


def compiled(given, plan: ReplicasPlan, spec) -> tuple:
    from profiling_runs.question import ProfileQuestion
    from profiling_runs.verify import verify as verified

    measurements = asked.open_measurements(given, ProfileQuestion.of_plan(plan.one_stage, spec))
    found = verified(plan.one_stage, measurements)
    return found, replace(
        plan, parts_bytes=dict(found.ledger.peaks[0].parts), model_hash=found.graph.model_hash
    )


def answer(given):
    close(given, OPTIONS)
    spec, cluster = asked.spec_of(vars(given)), asked.read_cluster(vars(given))
    count, examples = cluster.num_devices, given.global_batch
    ways = [n for n in range(1, examples + 1) if examples % (n * count) == 0]
    if not ways:
        raise PlanError.of(f"{count} devices cannot share {examples} examples.", "replicas-batch")
    tried = []
    for passes in ways:
        tried.append(passes)
        plan = ReplicasPlan(cluster=cluster, examples=examples, accumulated=passes, workload=spec)
        plan = compiled(given, plan, spec)[1]
        room = plan.headroom(given.memory)
        if room is None or room.verdict == "fits":
            break
    status = "ok" if room is None or room.verdict == "fits" else "infeasible"
    why = Why(f"{counted(len(tried), 'number')} of passes compiled")
    found = noted(given, Answer(status, plan, Tried(tried), why, room))
    return outcome_of("replicas", found, [f"{status}: {why.summary}"])


def verify(given, plan: ReplicasPlan) -> tuple[VerifyReport, ReplicasPlan]:
    found, verified = compiled(given, plan, asked.workload_of(given, plan))
    peaks, room = found.peak_bytes_per_device, verified.headroom(given.memory)
    rows = (PeakRow.of(range(len(peaks)), found.ledger.peaks[0]),)
    before = plan.predicted_bytes_per_device
    report = VerifyReport("replicas", plan.cluster.target, peaks, before, rows, room)
    return replace(report, num_compiled=found.num_compiled), verified


def explain(given, plan: ReplicasPlan) -> tuple[ExplainReport, list[str]]:
    report = ExplainReport(kind="replicas", needs=PlanNeeds.of(plan))
    return report, [table(HEADER, rows(plan))]


def rows(plan: ReplicasPlan) -> list[list[str]]:
    return [[name, format_bytes(nbytes)] for name, nbytes in plan.parts_bytes.items()]


def report(given, plan: ReplicasPlan) -> tuple[PageReport, list[str]]:
    from capture.report.page import Page

    said, needs = "; ".join(map(": ".join, decided(plan).items())), PlanNeeds.of(plan, given.memory)
    return shown(
        given, "replicas", Page("Replicas", HEADER, rows(plan), [said], "Compiled."), needs
    )


def decided(plan: ReplicasPlan) -> dict[str, str]:
    where, passes = f"{plan.workload} on {plan.cluster}", str(plan.accumulated)
    return {"where": where, "passes of an update": passes}


def train(workload, plan: ReplicasPlan, **others):
    from capture.runtime.pipeline import pipeshard

    return pipeshard(workload, plan.one_stage, **others)


diff = partial(compared, "replicas", decided)
OPTIONS = (options.CLUSTER, options.TARGET, options.GLOBAL_BATCH, options.MEMORY, *options.STORE)
ASKS = options.Asks("Replicas (--system replicas)", "the model on every device", OPTIONS, answer)
VERBS = {name: Registered(f"{HERE}:{name}") for name in ("verify", "explain", "report", "diff")}
LACKS = {"evaluate": "its search compiles every answer"}
NAMES = ("replicas", "replicas", ReplicasPlan, Registered(f"{HERE}:ASKS"), VERBS)
KIND = Kind(*NAMES, f"{HERE}.train", Registered(f"{HERE}:train"), LACKS)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    installed(tmp_path, monkeypatch, "kinds", f"replicas = {HERE}:KIND")
    return tmp_path


def test_it_is_in_every_column(folder, capsys):
    """Of it, too, two hosts have the bits of one process, and go on from what they saved."""
    case = Case(KINDS["replicas"], capsys)
    for check in CELLS.values():
        check(case)
    file = json.loads(Path(case.path).read_text())
    assert type(load_plan(case.path)) is ReplicasPlan and file["kind"] == "replicas"


def test_it_accumulates_as_many_passes_as_its_limit_asks_for(folder, capsys):
    case = Case(KINDS["replicas"], capsys)
    peak, path = load_plan(case.path).known_peak_bytes, "less.json"
    asked = [*case.given(ASKED | STORE), "--memory", f"{peak - 1}B", "-o", path]
    made = case("plan", WORKLOAD, "--system", "replicas", *asked)
    assert made["search"]["tried"] == [1, 2] and made["needs"]["peak_bytes"] < peak
    different = case("diff", case.path, path)["differences"]
    assert [each["name"] for each in different] == ["passes of an update"]
    assert case("verify", path, *case.given(STORE))["num_compiled"] == 0, "the store has it"
