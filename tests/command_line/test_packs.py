"""``capture plan --system harmony``: from a layer profile to a plan without JAX, what is infeasible,
and all that is wrong at once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from capture.cli.main import main
from capture.plan.kinds import load_plan
from capture.plan.packs import PacksPlan

PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"


def asked(name: str, *more: str) -> list[str]:
    return [
        *("plan", "--system", "harmony", "--layers", str(PROFILES / f"{name}.json")),
        *("--machine", "gtx1080ti-x4", "--global-batch", "64", *more),
    ]


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def test_a_row_of_table_1_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, document = answer(
        capsys, *asked("gpt2_xl", "--algorithm", "paper", "--without", "prefetch")
    )
    assert (code, document["status"], document["search"]["num_simulated"]) == (0, "ok", 17)
    written = json.loads(Path("plan.json").read_text())
    asked_for = written.pop("asked"), document["plan"].pop("asked")
    assert written == document["plan"]
    named = [Path(each.pop("layers")).resolve() for each in asked_for]  # as seen from the file
    assert named == [PROFILES / "gpt2_xl.json"] * 2 and asked_for[0] == asked_for[1]
    assert [written[way]["microbatch_size"] for way in ("forward", "backward")] == [4, 4]
    assert [len(written[way]["packs"]) for way in ("forward", "backward")] == [10, 17]
    assert written["prediction"]["paper"]["step_seconds"] == pytest.approx(45.281, abs=5e-4)
    assert written["switches"]["prefetch"] is False
    plan = load_plan("plan.json")
    assert isinstance(plan, PacksPlan) and replace(plan, asked={}).to_json() == written
    code, explained = answer(capsys, "explain", "plan.json")
    assert code == 0 and len(explained["tasks"]) == 10 + 2 * 17
    assert explained["tasks"][0]["microbatch_sizes"] == [4] * 16
    assert explained["tasks"][0]["layers"] == written["forward"]["packs"][0]


def test_baselines_beside_the_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = asked("toy6", "--memory", "2.2GB", "--baselines")
    _, document = answer(capsys, *arguments)
    rows = {row["name"]: row for row in document["baselines"]}
    assert len(rows) == 8 and rows["DP Swap"]["step_seconds"] > 0
    assert (
        rows["resident"]["step_seconds"] is None
        and rows["resident"]["why"]
        and not rows["resident"]["fits"]
    )
    assert main(arguments) == 0
    assert "cannot run because" in capsys.readouterr().out


def test_planning_from_layers_loads_no_framework(tmp_path):
    code = (
        "import sys\nfrom capture.cli.main import main\n"
        f"assert main({asked('toy6', '-o', str(tmp_path / 'p.json'), '--memory', '2.2GB')!r}) == 0\n"
        "assert not {'jax', 'jaxlib', 'optax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_faster_of_both_modes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {
        mode: answer(capsys, *asked("bert_96", "--mode", mode))[1]["plan"]
        for mode in ("pp", "dp", "both")
    }
    seconds = {mode: plan["prediction"]["paper"]["step_seconds"] for mode, plan in found.items()}
    assert seconds["both"] == min(seconds["pp"], seconds["dp"])
    assert found["dp"]["mode"] == "dp"


def test_a_target_is_a_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "plan",
        "--system",
        "harmony",
        "--layers",
        str(PROFILES / "gpt2_10b.json"),
        "--cluster",
        "1x4",
        "--target",
        "h100",
        "--host-memory",
        "1TB",
        "--global-batch",
        "32",
    ]
    code, document = answer(capsys, *arguments)
    assert code == 0 and document["plan"]["machine"]["name"] == "h100-x4"
    assert document["plan"]["machine"]["host_memory_bytes"] == {"value": 10**12, "source": "given"}


def test_a_layer_that_is_too_large_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    batch = ("--global-batch", "8")
    code, document = answer(capsys, *asked("transformer15", "--memory", "200MB", *batch))
    assert (code, document["status"], document["plan"]) == (1, "infeasible", None)
    why = document["why"]
    assert why["code"] == "packs-layer"
    assert why["least_peak_bytes"] > why["memory_limit_bytes"] == 200_000_000
    assert not Path("plan.json").exists()
    code, document = answer(
        capsys, *asked("transformer15", "--memory", str(why["least_peak_bytes"]), *batch)
    )
    assert code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--update-rate 10GB", "is a profile; leave it out. [plan-system]"),
        ("--num-layers 4", "--num-layers is of a workload that is profiled, and --layers "),
        (
            "--schedule gpipe",
            "--schedule is not of --system harmony, but of capture; leave it out.",
        ),
        ("--without jot", "Did you mean jit? [packs-switch]"),
        ("--packing balanced_tim", "Did you mean balanced_time? [packs-packing]"),
    ],
)
def test_options_that_mean_nothing_here_say_why(capsys, more, message):
    assert main(asked("toy6", *more.split())) == 2
    assert message in capsys.readouterr().err


def test_a_plan_from_layers_says_so_where_a_workload_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(asked("toy6", "--memory", "2.2GB")) == 0
    assert main(["run", "plan.json"]) == 2
    said = "the plan was made from the layer profile of 'toy6' and names no workload; give --work"
    assert said in capsys.readouterr().err


def test_a_profile_without_casts_is_refused(capsys):
    code, document = answer(capsys, *asked("toy6", "--stream", "bfloat16"))
    assert (code, [error["code"] for error in document["errors"]]) == (2, ["packs-stream"])


def test_swaps_in_shares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dp = asked("toy6", "--memory", "2.2GB", "--mode", "dp")
    _, whole = answer(capsys, *dp, "-o", "whole.json")
    code, document = answer(capsys, *dp, "--shard-swaps")
    assert code == 0 and "swapped in shares" in document["why"]["summary"]
    assert document["plan"]["swaps"] == {"stream": "", "sharded": True}
    one, other = (each["plan"]["prediction"]["step"]["volumes_bytes"] for each in (whole, document))
    assert other["gradients out"] * 4 == one["gradients out"]
    _, document = answer(capsys, "diff", "whole.json", "plan.json")
    assert {"name": "swapped", "first": "whole", "second": "in shares"} in document["differences"]
    assert main(["explain", "plan.json", "--quiet"]) == 0
    assert "every device swaps its share" in capsys.readouterr().out
    for mode in ("pp", "both"):
        code, document = answer(capsys, *asked("toy6", "--mode", mode, "--shard-swaps"))
        assert (code, [error["code"] for error in document["errors"]]) == (2, ["packs-shard"])


def test_the_least_limit_is_that_of_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wide = ("--algorithm", "wide", "--global-batch", "8")
    _, document = answer(capsys, *asked("transformer15", "--memory", "200MB", *wide))
    least = document["why"]["least_peak_bytes"]
    for limit, status in ((least, "ok"), (least - 10**6, "infeasible")):
        _, document = answer(capsys, *asked("transformer15", "--memory", str(limit), *wide))
        assert document["status"] == status
    # Every layer alone is below it, and its task is not.
    assert document["why"]["code"] == "packs-none" and document["why"]["least_peak_bytes"] == least
    assert "or --algorithm paper" in document["why"]["summary"]
    papers = ("--algorithm", "paper", "--global-batch", "8")
    code, _ = answer(capsys, *asked("transformer15", "--memory", str(limit), *papers))
    assert code == 0


def test_no_power_of_two_to_set_by_hand_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layers = json.loads((PROFILES / "toy6.json").read_text())
    for way in ("fwd", "bwd"):
        layers[way] = {key: rows[1:3] for key, rows in layers[way].items()}  # 5 and 10 examples
    (tmp_path / "of_five.json").write_text(json.dumps(layers))
    by_hand = asked("toy6", "--global-batch", "10", "--without", "search")
    by_hand[by_hand.index("--layers") + 1] = "of_five.json"
    code, document = answer(capsys, *by_hand)
    assert (code, document["why"]["code"]) == (1, "packs-sizes")
    assert "power of two" in document["why"]["summary"]


def test_of_both_modes_the_host_may_hold_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    both = asked("toy6", "--memory", "9GB", "--global-batch", "40", "--mode", "both")
    faster, other = (answer(capsys, *both, *more)[1] for more in ((), ("--host-memory", "5.5GB")))
    assert [document["plan"]["mode"] for document in (faster, other)] == ["dp", "pp"]
    assert (faster["status"], other["status"]) == ("ok", "ok")


def test_state_above_the_host_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, document = answer(capsys, *asked("bert_96", "--host-memory", "10GB"))
    why = document["why"]
    assert (code, document["status"], why["code"]) == (1, "infeasible", "packs-host")
    assert why["least_state_bytes"] == 4968288264 + 9936576528 < why["least_peak_bytes"]
    code, document = answer(
        capsys, *asked("bert_96", "--host-memory", str(why["least_peak_bytes"]))
    )
    assert code == 0


def test_what_fits_one_device_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, document = answer(capsys, *asked("toy6", "--memory", "9GB", "--algorithm", "paper"))
    assert "Harmony is not needed" in document["why"]["summary"]
    _, document = answer(capsys, *asked("toy6", "--memory", "9GB", "--single-first"))
    assert document["plan"]["forward"]["packs"] == []


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        (
            ("--global-batch", "0", "--packing", "best,greedy", "--without", "magic"),
            ["packs-batch", "packs-packing", "packs-switch"],
        ),
        (("--global-batch", "3", "--mode", "dp"), ["packs-batch"]),
        (("--packing", "expert,greedy"), ["packs-packing"]),
        (("--algorithm", "wide", "--equi-fb"), ["search-algorithm"]),
        (("--machine", "gtx"), ["server-unknown"]),
        (("--algorithm", "minmax"), ["search-algorithm"]),
        (("--schedule", "1f1b", "--try-schedules"), ["plan-system", "plan-system"]),
        (("--remat", "full"), ["plan-system"]),
        (("--cluster", "1x2"), ["plan-system"]),
        (("--no-verify",), ["plan-system"]),
        (("--mode", "paper"), ["packs-mode"]),
    ],
)
def test_all_that_is_wrong_is_said_at_once(more, codes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, document = answer(capsys, *asked("toy6", *more))
    assert (code, [error["code"] for error in document["errors"]]) == (2, codes)


def test_options_of_packs_are_not_of_stages(capsys):
    code, document = answer(
        capsys, "plan", "models/gpt.py:gpt", "--layers", "x.json", "--without", "p2p"
    )
    assert code == 2
    assert [error["code"] for error in document["errors"]] == ["plan-system", "plan-system"]


@pytest.mark.parametrize(
    ("verb", "refusal"), [("run", "plan-workload"), ("verify", "plan-workload")]
)
def test_a_plan_that_knows_layers_alone_is_not_run(verb, refusal, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(asked("toy6", "--memory", "2.2GB"))
    capsys.readouterr()
    code, document = answer(capsys, verb, "plan.json")
    assert code == 2 and [error["code"] for error in document["errors"]] == [refusal]


def test_the_trace_of_a_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(asked("toy6", "--memory", "2.2GB"))
    capsys.readouterr()
    layers = str(PROFILES / "toy6.json")
    code, document = answer(capsys, "report", "plan.json", "--profile", layers, "--trace", "t.json")
    assert code == 0 and document["written"] == {"trace": "t.json"}
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    threads = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {
        "device 0 host",
        "device 3 -> host",
        "device 0 -> device 1",
        "device 1 compute",
    } <= threads
    for more, expected in (
        (["--trace", "t.json"], "packs-model"),
        (["--trace", "t.json", "--profile", str(PROFILES / "gpt2_10b.json")], "packs-model"),
    ):
        code, document = answer(capsys, "report", "plan.json", *more)
        assert (code, document["errors"][0]["code"]) == (2, expected)


def test_a_file_keeps_what_is_compiled_beside_a_prediction_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(asked("toy6", "--memory", "2.2GB"))
    replace(load_plan("plan.json"), prediction=None).save("bare.json")
    capsys.readouterr()
    code, document = answer(capsys, "verify", "bare.json", "-o", "verified.json")
    assert (code, document["errors"][0]["code"]) == (2, "packs-page")
    assert not Path("verified.json").exists()


def test_two_plans_differ(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(asked("toy6", "--memory", "2.2GB"))
    main(asked("toy6", "--memory", "2.2GB", "--without", "p2p", "-o", "other.json"))
    capsys.readouterr()
    code, document = answer(capsys, "diff", "plan.json", "other.json")
    rows = {row["name"]: (row["first"], row["second"]) for row in document["differences"]}
    assert code == 0 and rows["off"] == ("-", "p2p") and "mode" not in rows
    same = answer(capsys, "diff", "plan.json", "plan.json")[1]
    assert same["same_decision"] and same["differences"] == []


@pytest.mark.parametrize("more", [[], ["--algorithm", "wide"]], ids=["bounded", "wide"])
def test_a_limit_that_is_given_holds_for_instructions_and_so_does_the_one_that_is_named(
    tmp_path, monkeypatch, capsys, more
):
    """Packs of layers alone fit 948 MB; what runs takes 956 MB."""
    monkeypatch.chdir(tmp_path)
    small = asked("toy6", "--global-batch", "20", *more)
    for limit in (1000, 900_000_000, 947_912_736):
        code, document = answer(capsys, *small, "--memory", str(limit))
        if code == 0:
            assert document["plan"]["prediction"]["step"]["device_peak_bytes"][0] <= limit
            continue
        assert not Path("plan.json").exists()
        least = document["why"]["least_peak_bytes"]
        code, document = answer(capsys, *small, "--memory", str(least))
        assert (code, document["needs"]["headroom"]["verdict"]) == (0, "fits by extrapolation")
        assert main(["report", "plan.json", "--quiet"]) == 0
        assert "fits" in capsys.readouterr().out
        Path("plan.json").unlink()
