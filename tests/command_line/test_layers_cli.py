"""``--system harmony`` from a workload: its layers are profiled, planned, run and compiled; what
does not fit is a result, and what is wrong is said before anything is measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from processes import user_model

from capture.cli.main import main
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.model.workload import WorkloadSpec
from capture.plan.kinds import load_plan
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs
from capture.runtime.streamed import streamed
from capture.step.pack_order import begins_without_copies, passes_by
from capture.step.program import Run

CPU_LIKE = Path(__file__).parents[1] / "recorded" / "files" / "cpu_like.json"
ASKED = ("--system", "harmony", "--target", "cpu_like.json", "--global-batch", "4", "--stride", "4")
HERE = ("--store", "store.sqlite", "--workers", "0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(user_model("tiny"))
    shutil.copy(CPU_LIKE, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def test_a_workload_is_profiled_planned_run_and_compiled(folder, capsys):
    made = ["tiny.py:model?layers=4", *ASKED, *HERE, "-o", "layers.json"]
    code, found = answer(capsys, "profile", *made, "--events", "events.jsonl")
    assert code == 0 and found["layers"]["trials"] == {"forward": [1, 2, 4], "backward": [1, 2, 4]}
    assert set(found["layers"]["held_out_errors"]["forward"]["time"]) == {"mean", "largest"}
    events = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert [e["state"] for e in events if e["event"] == "profile"] == ["started", "done"]

    asked = ["plan", *ASKED, *HERE, "--cluster", "1x2", "--memory", "8KB", "--host-memory", "1MB"]
    code, document = answer(capsys, *asked, "tiny.py:model?layers=4")
    plan = load_plan("plan.json")
    assert code == 0 and isinstance(plan, PacksPlan) and plan.model_hash
    assert plan.compiled and max(plan.prediction.step.device_peak_bytes) <= 8000
    assert plan.order and plan.step_estimate[0] == plan.prediction.compiled.step_seconds
    assert (
        document["needs"]["headroom"]["verdict"] == "fits" and "uncompiled" not in document["why"]
    )
    said = {name: number["source"] for name, number in document["plan"]["machine"].items()
            if isinstance(number, dict)}  # fmt: skip
    assert said["host_memory_bytes"] == "given" and all(said.values())
    assert set(document["assumed"]) == {"message_bytes_per_second", "delete_seconds"}
    # From the file that was written before, without the workload.
    from_file = ["plan", *ASKED[:-2], "--layers", "layers.json", "--cluster", "1x2"]
    answer(capsys, *from_file, "--memory", "8KB", "--host-memory", "1MB", "-o", "other.json")
    assert load_plan("other.json") == plan

    code, ran = answer(capsys, "run", "plan.json", "--steps", "2", "--check")
    assert code == 0 and ran["max_relative_loss_error"] < 1e-6
    measured = ran["measured_peak_bytes_per_device"]
    assert ran["predicted_peak_bytes_per_device"] == measured
    predicted = plan.prediction.step.device_peak_bytes
    assert all(p >= m for p, m in zip(predicted, measured, strict=True))
    kept = Path("store.sqlite").read_bytes()
    code, compiled = answer(capsys, "verify", "plan.json", *HERE, "-o", "verified.json")
    assert (code, compiled["status"]) == (0, "ok")
    assert load_plan("verified.json").prediction.compiled == plan.prediction.compiled
    # The plan's own peaks are compiled; those of layers alone are said beside them.
    assert set(compiled["prediction_error_fraction_per_device"]) <= {0.0, None}
    assert compiled["layers_alone_peak_bytes"] == max(predicted) > max(measured)
    assert compiled["peak_bytes_per_device"] == ran["replayed_peak_bytes_per_device"][:2]
    assert Path("store.sqlite").read_bytes() == kept, "nothing is compiled again"
    code, compiled = answer(capsys, "verify", "plan.json", "--memory", "4KB", *HERE)
    assert (code, compiled["status"]) == (1, "infeasible")

    code, document = answer(capsys, *asked, "tiny.py:model?layers=4", "--no-verify")
    assert (code, document["why"]["uncompiled"]) == (0, "--no-verify")
    assert not load_plan("plan.json").compiled
    assert document["needs"]["headroom"]["verdict"] == "fits by extrapolation"

    # All layers in one pack: the second device has nothing to do.
    one = replace(plan.configuration.backward, packs=((0, plan.num_layers),))
    forward = replace(plan.configuration.forward, packs=())
    packs = replace(plan.configuration, forward=forward, backward=one)
    alone = replace(plan, configuration=packs, order=())
    roomy = replace(plan.machine, usable_bytes=replace(plan.machine.usable_bytes, value=10**6))
    replace(alone, machine=roomy).save("one.json")
    code, compiled = answer(capsys, "verify", "one.json", "--memory", "1MB", *HERE)
    assert code == 0 and compiled["peak_bytes_per_device"][1] == 0
    assert compiled["prediction_error_fraction_per_device"][1] is None


def test_packs_compete_where_nothing_else_fits(folder, capsys):
    asked = ["plan", "tiny.py:model?layers=4", "--target", "cpu_like.json", "--cluster", "1x2"]
    asked += ["--global-batch", "4", *HERE]
    # A stage needs 8,192 bytes for its state alone.
    code, document = answer(capsys, *asked, "--memory", "8KB", "--host-memory", "1MB")
    plan = load_plan("plan.json")
    assert (code, document["kind"], document["status"]) == (0, "packs", "ok")
    assert isinstance(plan, PacksPlan) and plan.compiled and plan.known_peak_bytes <= 8000
    assert "none fits: Every plan needs at least 8,192 bytes" in plan.why.summary
    assert document["cheapest_change"] is None and "system" not in plan.asked
    # Updates on the device take time, which layers alone do not say.
    assert plan.step_estimate[0] > plan.prediction.step.step_seconds
    # It is the fastest of all ways to stream, so not slower than any of them alone.
    for more in ((), ("--without", "offload"), ("--mode", "dp", "--shard-swaps")):
        limits = ("--memory", "8KB", "--host-memory", "1MB")
        named = ["--system", "harmony", *more, *limits, "-o", "named.json"]
        assert main([*asked, *named, "--quiet"]) == 0
        other = load_plan("named.json").prediction.step.step_seconds
        assert plan.prediction.step.step_seconds <= other * (1 + 1e-9)
    capsys.readouterr()
    code, ran = answer(capsys, "run", "plan.json", "--steps", "2", "--check")
    assert code == 0 and ran["max_relative_loss_error"] < 1e-6
    # Asked again, it is the same question.
    code, again = answer(capsys, "plan", "plan.json", *HERE, "-o", "again.json")
    assert code == 0 and load_plan("again.json") == plan and again["kind"] == "packs"

    # One way to stream is estimated to fit and does not compile so; others do.
    code, document = answer(capsys, *asked, "--memory", "8300", "--host-memory", "1MB")
    assert code == 0 and document["kind"] == "packs"
    assert document["needs"]["headroom"]["memory_limit_bytes"] == 8300
    # What a step costs is said of packs, too.
    priced = ["--memory", "8KB", "--host-memory", "1MB", "--price", "2.5"]
    code, document = answer(capsys, *asked, *priced)
    assert code == 0 and document["account"]["dollars_per_step"] > 0
    # The host's memory is not known; what is missing of it is said.
    code, document = answer(capsys, *asked, "--memory", "8KB", "-o", "none.json")
    assert code == 1 and "say --host-memory" in document["why"]["summary"]
    code, document = answer(capsys, *asked, "--memory", "8KB", "--host-memory", "9KB")
    assert code == 1 and "the host holds" in document["why"]["summary"]
    code, document = answer(capsys, *asked, "--memory", "8KB", "--host-memory", "0")
    assert code == 2 and "--host-memory 0 is no memory" in json.dumps(document)


def test_passes_are_issued_in_the_order_of_the_plan(folder):
    packs = Packs(1, ((0, 1), (1, 2))), Packs(1, ((0, 1), (1, 2), (2, 4)))
    server = Server.of(Cluster.parse("1x2", "cpu_like.json")).with_(host_memory_bytes=10**6)
    plan = PacksPlan(server, 4, 4, "pp", Configuration(*packs))
    workload = WorkloadSpec.parse("tiny.py:model?layers=4").load()
    graph = plan.tasks()
    found = []
    for seconds in (1.0, 100.0):  # of passes on the second device
        begins = begins_without_copies(graph, lambda task, _, s=seconds: s if task.rank else 1.0)
        order = tuple(task.id for task, _ in passes_by(graph, begins))
        step = streamed(workload, replace(plan, order=order)).program
        calls = [step.programs[i.program].call for i in step.instructions if isinstance(i, Run)]
        found.append([(call.kind, call.span) for call in calls if call.kind != "update"])
        kinds = {"backward": ("backward", "accumulate"), "forward": ("forward",)}
        for task, (kind, span) in zip(
            (graph.tasks[n] for n in order if graph.tasks[n].kind != "update"),
            found[-1],
            strict=True,
        ):
            assert kind in kinds[task.kind] and span == (task.first, task.stop)
    assert found[0] != found[1]


@pytest.mark.exhaustive
def test_a_workload_is_streamed_as_casts(folder, capsys):
    (folder / "mixed.py").write_text(user_model("mixed"))
    asked = ["plan", *ASKED, *HERE, "--cluster", "1x2", "--memory", "8KB", "--host-memory", "1MB"]
    asked.append("mixed.py:model")
    _, document = answer(capsys, *asked, "-o", "whole.json")
    assert document["layers"]["casts"] == {"bfloat16": (3 * 16 * 16 + 2 * 16) * 2}
    code, document = answer(capsys, *asked, "--stream", "bfloat16", "--baselines")
    assert code == 0 and "streamed as bfloat16" in document["why"]["summary"]
    assert load_plan("plan.json").swaps.stream == "bfloat16"
    _, document = answer(capsys, "diff", "whole.json", "plan.json")
    rows = {row["name"]: (row["first"], row["second"]) for row in document["differences"]}
    assert rows["streamed as"] == ("they are", "bfloat16")
    assert main(["explain", "plan.json", "--quiet"]) == 0
    assert "read as bfloat16 alone" in capsys.readouterr().out
    code, ran = answer(capsys, "run", "plan.json", "--steps", "1", "--check")
    # One device computes in bfloat16, too, and adds in another order.
    assert code == 0 and ran["max_relative_loss_error"] < 2**-8
    measured = ran["measured_peak_bytes_per_device"]
    assert measured == ran["replayed_peak_bytes_per_device"]
    predicted = ran["predicted_peak_bytes_per_device"]
    assert all(p >= m for p, m in zip(predicted, measured, strict=True))
    # In worker processes.
    code, compiled = answer(capsys, "verify", "plan.json", "--store", "other.sqlite")
    assert (code, compiled["peak_bytes_per_device"]) == (0, measured[:2])
    assert compiled["headroom"]["memory_limit_bytes"] == 8000 and "limit_bytes" not in compiled
    assert [row["devices"] for row in compiled["peaks"]] == [[0], [1]]


def test_a_layer_above_the_limit_is_a_result(folder, capsys):
    asked = [*ASKED, *HERE, "--cluster", "1x2", "--memory", "1KB"]
    code, document = answer(capsys, "plan", "tiny.py:model?layers=2", *asked)
    assert (code, document["why"]["code"]) == (1, "packs-layer")
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (("profile", "tiny.py:model", *ASKED, "--schedule", "gpipe", "--neighbours", "3"),
         ["profile-system", "profile-system"]),
        (("profile", "tiny.py:model", *ASKED, "--remat", "cheap"), ["layers-remat"]),
        (("profile", "tiny.py:model", "--stride", "2"), ["profile-system"]),
        (("profile", "tiny.py:model", "--system", "harmony"), ["layers-target", "layers-limit"]),
        (("plan", "tiny.py:model", *ASKED, "--layers", "layers.json"), ["plan-system"]),
        (("plan", *ASKED[:-2], "--layers", "x.json", "--workers", "1"), ["plan-system"]),
        (("plan", "tiny.py:model", *ASKED, "--mode", "dp", "--without", "x", "--packing", "y"),
         ["packs-packing", "packs-switch"]),
        (("plan", "tiny.py:model", *ASKED, "--stream", "float32"), ["packs-stream"]),
        (("plan", "tiny.py:model", *ASKED, "--stream", "bfloat16", "--without", "offload"),
         ["packs-stream"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_measured(arguments, codes, folder, capsys):
    code, document = answer(capsys, *arguments)
    assert (code, [error["code"] for error in document["errors"]]) == (2, codes)
    assert not Path("store.sqlite").exists()
