"""A fifth kind of plan in this file alone: plain data parallelism, whose replicas add up the
gradients of several micro-batches. It registers one ``Kind``, as an installed package does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from commands import run_json
from processes import user_model

from capture import documents
from capture.cli import asked, options
from capture.cli.diff import compared
from capture.cli.output import emit, saved, table, write_files
from capture.cli.question_file import noted
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
from recommender.plan_report import PlanReport

HERE = "test_fifth_kind"
HEADER = ["at the peak", "bytes"]


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


def answer(given) -> int:
    close(given, OPTIONS)
    spec, cluster = asked.spec_of(vars(given)), asked.read_cluster(vars(given))
    count, examples = cluster.num_devices, given.global_batch
    ways = [n for n in range(1, examples + 1) if examples % (n * count) == 0]
    if not ways:
        raise PlanError.of(f"{count} devices cannot share {examples} examples.", "replicas-batch")
    for tried, passes in enumerate(ways, 1):
        plan = ReplicasPlan(cluster=cluster, examples=examples, accumulated=passes, workload=spec)
        plan = compiled(given, plan, spec)[1]
        room = plan.headroom(given.memory)
        if room is None or room.verdict == "fits":
            break
    status = "ok" if room is None or room.verdict == "fits" else "infeasible"
    why = Why(f"{counted(tried, 'number')} of passes compiled")
    found = noted(given, Answer(status, plan, Tried(ways[:tried]), why, room))
    emit(given, PlanReport.of("replicas", found), saved(given, found))
    return 0 if status == "ok" else 1


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
    from capture.report.page import html_table, render

    said, needs = "; ".join(map(": ".join, decided(plan).items())), PlanNeeds.of(plan, given.memory)
    parts = html_table(HEADER, rows(plan))
    page = partial(render, "Replicas", said, needs.headroom, parts, [], "Compiled.")
    written = write_files(given, page)
    found = PageReport(
        kind="replicas", title="Replicas", summary=said, needs=needs, written=written
    )
    return found, [said]


def decided(plan: ReplicasPlan) -> dict[str, str]:
    return {"devices": str(plan.cluster), "passes of an update": str(plan.accumulated)}


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
    """A folder with a model, beside which a package is installed that adds the kind."""
    info = tmp_path / "installed" / "replicas-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: replicas\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[capture.kinds]\nreplicas = {HERE}:KIND\n")
    (tmp_path / "tiny.py").write_text(user_model("tiny"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_does_what_the_others_do(folder, capsys):
    asks = "plan tiny.py:model --system replicas --cluster 2x1 --global-batch 8"
    verbs = partial(run_json, capsys)
    limit = verbs(*asks.split(), "-o", "all.json")[1]["needs"]["peak_bytes"] - 1
    code, made, _ = verbs(*asks.split(), "-o", "plan.json", "--memory", f"{limit}B")
    plan, file = load_plan("plan.json"), json.loads(Path("plan.json").read_text())
    assert code == 0 and KINDS["replicas"].plan is type(plan) and file["kind"] == "replicas"
    assert made["search"]["tried"] == [1, plan.accumulated] and made["needs"]["peak_bytes"] <= limit
    again = verbs("verify", "plan.json", "-o", "again.json")[1]
    assert again["peak_bytes_per_device"] == [plan.known_peak_bytes] * 2
    assert again["num_compiled"] == 0, "the store has it"
    assert verbs("explain", "plan.json")[1]["needs"]["peak_is"] == "compiled"
    assert verbs("report", "plan.json", "-o", "page.html")[0] == 0
    assert "<td>gradients</td>" in Path("page.html").read_text()
    different = verbs("diff", "all.json", "again.json")[1]["differences"]
    assert [each["name"] for each in different] == ["passes of an update"]
    run = ["run", "plan.json", "--steps", "2"]
    whole = verbs(*run, "--check", "--save", "one")[1]
    assert whole["max_relative_gradient_error"] < 1e-5 and whole["ledger_checks"] > 0
    assert whole["measured_peak_bytes_per_device"] == again["peak_bytes_per_device"]
    assert len(whole["losses"]) == 2
    begun = verbs("run", "plan.json", "--hosts", "local", "--steps", "1", "--save", "two")[1]
    ended = verbs(*run[:2], "--hosts", "local", "--steps", "1", "--restore", "two")[1]
    assert len(begun["hosts"]) == 2 and begun["losses"] + ended["losses"] == whole["losses"]
    assert verbs(*run[:2], "--restore", "one", "--steps", "1")[1]["num_steps"] == 3
