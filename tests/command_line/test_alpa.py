"""Plans for Alpa, without Alpa: options, placement, the file, reading plans back. What real Alpa
says of them: ``make alpa``."""

from __future__ import annotations

import ast
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import codes_of
from report_plans import planted_profile
from synthetic_profiles import Planted, make_plan

from capture.alpa import alpa_placement, plan_from_alpa, to_alpa
from capture.alpa.memory import alpa_memory, alpa_replay
from capture.alpa.nearest import nearest
from capture.cli.main import main
from capture.errors import ExecutionError, PlanError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.papers.alpa.autostage import (
    LABEL,
    MOST_SUCCESSORS,
    AutostagingTables,
    autostage,
    autostaging_tables,
    search_tables,
)
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.schedule import SCHEDULES
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from recommender.question import PlanQuestion

# Made by real Alpa from ``PLAN``.
PICKLED = Path(__file__).parents[1] / "data" / "alpa_parallel_plan.pickle"


PLAN = Plan(
    Cluster((4, 4)),
    6,
    (
        Stage(0, 2, range(4), StageChoice(4, 1, "full", True)),
        Stage(2, 5, (4, 5), StageChoice(1, 2, "full")),
        Stage(5, 6, (6, 7), StageChoice(2, 1, "full", True)),
    ),
    64,
    8,
    "gpipe",
)


def test_options_say_what_the_plan_says():
    options = to_alpa(PLAN)
    assert (
        options.num_hosts,
        options.num_devices_per_host,
        options.num_micro_batches,
        options.pipeline_schedule,
    ) == (2, 4, 8, "gpipe")
    assert options.layer_option == ("ManualLayerOption", {"remat_layer": True})
    assert options.forward_stage_layer_ids == [[0, 1], [2, 3, 4], [5]]
    assert options.submesh_physical_shapes == [(1, 4), (1, 2), (1, 2)]
    assert options.submesh_logical_shapes == [(4, 1), (1, 2), (2, 1)]
    assert options.submesh_autosharding_option_dicts == [{"force_batch_dim_to_mesh_dim": 0}] * 3
    assert options.default_auto_sharding_option == {"prefer_reduce_scatter": True}
    assert options.placement == [(0, 1, 2, 3), (6, 7), (4, 5)], (
        "of equal stages the later one comes first"
    )


def test_a_stage_that_keeps_its_optimizer_whole_says_so():
    stages = (*PLAN.stages[:2], Stage(5, 6, (6, 7), StageChoice(2, 1, "full")))
    options = to_alpa(PLAN.with_(stages=stages))
    assert options.default_auto_sharding_option == {"prefer_reduce_scatter": False}
    assert [d.get("prefer_reduce_scatter") for d in options.submesh_autosharding_option_dicts] == [
        True,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("nodes", "sizes", "code"),
    [
        ((4, 2), (4, 2), "alpa-cluster"),
        ((4, 4), (6, 2), "alpa-submesh"),
        ((4, 4), (3, 3, 2), "alpa-packing"),
        ((4, 4), (4, 2), "alpa-packing"),
    ],
)
def test_what_alpa_cannot_place(nodes, sizes, code):
    assert codes_of(lambda: alpa_placement(Cluster(nodes), sizes)) == (code,)


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        (StageChoice(2, 1, shard_optimizer=True, shard_params=True), "alpa-shard-params"),
        (StageChoice(1, 2, sequence_parallel=True), "alpa-sequence-parallel"),
    ],
)
def test_what_alpa_does_not_split(choice, code):
    plan = Plan(Cluster((2,)), 2, (Stage(0, 2, [0, 1], choice),), 4, 2)
    assert codes_of(lambda: to_alpa(plan)) == (code,)


@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if n not in ("gpipe", "1f1b")])
def test_alpa_has_no_stages_that_share_devices_and_no_split_backward_passes(
    schedule, tmp_path, capsys
):
    groups = SCHEDULES[schedule].placement(2)
    stages = tuple(Stage(s, s + 1, [d], StageChoice()) for s, d in enumerate(groups))
    plan = Plan(Cluster((2,)), len(stages), stages, 8, 8, schedule)
    assert codes_of(lambda: to_alpa(plan)) == ("alpa-schedule",)
    assert codes_of(lambda: alpa_replay(plan, [])) == ("alpa-schedule",)
    plan.save(tmp_path / "plan.json")
    written = tmp_path / "method.py"
    assert main(["export", str(tmp_path / "plan.json"), "--to", "alpa", "-o", str(written)]) == 2
    assert "[alpa-schedule]" in capsys.readouterr().err and not written.exists()


@pytest.mark.parametrize("modes", [("none", "full"), ("dots", "dots"), ("cheap", "cheap")])
def test_remat_is_one_for_all_layers(modes):
    stages = tuple(Stage(s, s + 1, [s], StageChoice(1, 1, mode)) for s, mode in enumerate(modes))
    plan = Plan(Cluster((2,)), 2, stages, 4, 2)
    assert codes_of(lambda: to_alpa(plan)) == ("alpa-remat",)
    planted = Planted(2)
    profile = planted.profile([stage.choice for stage in stages], sizes=(2,))
    assert codes_of(lambda: alpa_memory(plan, profile)) == ("alpa-remat",)


@pytest.mark.parametrize(
    ("choices", "schedule", "changed"),
    [
        ((StageChoice(2, 1, "cheap"), StageChoice(2, 1)), "1f1b", {"remat"}),
        ((StageChoice(2, 1, "dots"), StageChoice(1, 2, "full")), "zb-h1", {"remat", "schedule"}),
        (
            (
                StageChoice(2, 1, shard_optimizer=True, shard_params=True),
                StageChoice(1, 2, sequence_parallel=True),
            ),
            "gpipe",
            {"shard_params", "sequence_parallel"},
        ),
    ],
)
def test_the_nearest_plan_of_alpas_is_exported_with_what_changed(
    choices, schedule, changed, tmp_path, capsys
):
    stages = tuple(
        Stage(2 * s, 2 * s + 2, [2 * s, 2 * s + 1], choice) for s, choice in enumerate(choices)
    )
    plan = Plan(Cluster((4,)), 4, stages, 16, 4, schedule)
    planted = Planted(4)
    plain = [
        replace(c, shard_params=False, sequence_parallel=False, remat=remat)
        for c in choices
        for remat in ("none", "full")
    ]
    profile = planted.profile(sorted(set(plain)), sizes=(4,))
    plan = plan.with_(prediction=planted_prediction(plan, 3_000_000))
    plan.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    command = ["export", str(tmp_path / "plan.json"), "--to", "alpa"]
    assert main(command) == 2
    assert "--nearest" in capsys.readouterr().err or schedule == "zb-h1"
    written = tmp_path / "method.py"
    command += ["--nearest", "-o", str(written), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)["nearest"]
    names = {each["name"].rpartition(".")[2] for each in document["changes"]}
    assert names >= changed and document["peak_bytes"] is None
    found = Plan.load(tmp_path / "method.json")
    assert to_alpa(found).source() and written.exists()
    assert {stage.choice.remat for stage in found.stages} <= {"none", "full"}
    planned, exported = document["state_bytes"]
    assert planned == 3_000_000 and exported == (
        5_000_000 if "shard_params" in changed else planned
    )
    assert main([*command, "--profile", str(tmp_path / "profile.json")]) == 0
    document = json.loads(capsys.readouterr().out)["nearest"]
    assert document["peak_bytes"][0] == plan.known_peak_bytes
    assert document["peak_bytes"][1] == AdditivePredictor(profile).predict(found).peak_bytes


def planted_prediction(plan: Plan, state: int) -> Prediction:
    """Parameters, gradients and optimizer state of a third each, and as many activations."""
    parts = dict.fromkeys(("parameters", "gradients", "optimizer"), state // 3)
    parts["activations"] = state
    stage = StagePrediction(2 * state, (2 * state, 2 * state), "backward", parts, (parts, {}))
    per_device = (2 * state,) * plan.cluster.num_devices
    ends = ((2 * state, 2 * state),) * plan.cluster.num_devices
    return Prediction((stage,) * plan.num_stages, per_device, ends, source={})


def test_what_rests_on_hosts_stays_on_devices_in_the_nearest_plan():
    stages = [replace(stage, offload=("activations",)) for stage in PLAN.stages]
    plan = PLAN.with_(stages=stages, schedule="gpipe")
    assert codes_of(lambda: to_alpa(plan)) == ("alpa-offload",) * len(stages)
    found = nearest(plan).plan
    assert found.schedule == "gpipe" and not any(stage.offload for stage in found.stages)
    assert to_alpa(found).source()


def test_stages_that_share_devices_have_no_nearest_plan(tmp_path, capsys):
    groups = SCHEDULES["interleaved"].placement(2)
    stages = tuple(Stage(s, s + 1, [d], StageChoice()) for s, d in enumerate(groups))
    Plan(Cluster((2,)), len(stages), stages, 8, 8, "interleaved").save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "alpa", "--nearest"]) == 2
    assert "[alpa-schedule]" in capsys.readouterr().err


def test_the_file_is_python_that_imports_alpa_alone():
    tree = ast.parse(to_alpa(PLAN).source("About."), feature_version=(3, 8))
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert imported == ["alpa"] and not [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    assert ast.get_docstring(tree).startswith("About.") and "5 times" in ast.get_docstring(tree)


def test_without_alpa_it_says_how_to_get_there():
    with pytest.raises(
        ExecutionError, match=r"capture export PLAN --to alpa -o method\.py.* \[alpa-missing\]$"
    ):
        to_alpa(PLAN).build()


@pytest.mark.parametrize(
    "source", [PICKLED, str(PICKLED), PICKLED.read_bytes()], ids=["path", "text", "bytes"]
)
def test_alpas_pickled_plan_is_read_without_alpa(source):
    found = plan_from_alpa(source, global_batch_size=64, target="a100-40g")
    assert found.cluster == Cluster((4, 4), "a100-40g")
    assert to_alpa(found) == to_alpa(PLAN)
    assert [stage.devices for stage in found.stages] == to_alpa(PLAN).placement


def test_a_pickle_runs_nothing(tmp_path):
    class Harmful:
        def __reduce__(self):
            return open, (str(tmp_path / "made"), "w")

    assert codes_of(lambda: plan_from_alpa(pickle.dumps(Harmful()), global_batch_size=4)) == (
        "alpa-plan",
    )
    assert not (tmp_path / "made").exists()


OPTIONS = {
    "forward_stage_layer_ids": [[0, 1], [2]],
    "submesh_physical_shapes": [(1, 2), (1, 2)],
    "submesh_logical_shapes": [(2, 1), (1, 2)],
}


MANUAL = {
    "global_batch_size": 8,
    "cluster": Cluster((4,)),
    "num_micro_batches": 2,
    "pipeline_schedule": "1f1b",
}


def test_manual_options_are_read():
    dicts = [{"force_data_parallel": True}, {"force_batch_dim_to_mesh_dim": 0}]
    found = plan_from_alpa({**OPTIONS, "submesh_autosharding_option_dicts": dicts}, **MANUAL)
    assert [
        (s.first, s.stop, s.choice.data_parallel, s.choice.tensor_parallel, s.devices)
        for s in found.stages
    ] == [
        (0, 2, 2, 1, (2, 3)),
        (2, 3, 1, 2, (0, 1)),
    ]


def test_a_choice_that_is_left_to_alpas_solver_is_not_guessed():
    assert codes_of(lambda: plan_from_alpa(OPTIONS, **MANUAL)) == ("alpa-undecided",)
    assert codes_of(lambda: plan_from_alpa(OPTIONS, **MANUAL, undecided="zebra")) == (
        "alpa-undecided",
    )
    found = plan_from_alpa(OPTIONS, **MANUAL, undecided="tensor_parallel")
    assert [(s.choice.data_parallel, s.choice.tensor_parallel) for s in found.stages] == [
        (1, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    "source", [b"no pickle", {"forward_stage_layer_ids": [[0]]}, "no/such/file", pickle.dumps(3)]
)
def test_what_is_no_plan_of_alpas(source):
    assert codes_of(lambda: plan_from_alpa(source, **MANUAL)) == ("alpa-plan",)


@pytest.mark.parametrize(
    "changes", [{"forward_stage_layer_ids": [[0, 1, 2], []]}, {"submesh_logical_shapes": [(1, 2)]}]
)
def test_a_stage_without_layers_or_shape_is_no_plan(changes):
    assert codes_of(
        lambda: plan_from_alpa({**OPTIONS, **changes}, **MANUAL, undecided="data_parallel")
    ) == ("alpa-plan",)


def test_memory_in_alpas_runtime_stands_where_alpa_places_stages():
    profile = planted_profile(6, max_devices=4)
    plan = make_plan(
        [2, 2, 2], [StageChoice(1, 1), StageChoice(2, 1), StageChoice(1, 1)], num_microbatches=4
    )
    plan = plan.with_(cluster=Cluster((4,), profile.target))
    memory = alpa_memory(plan, profile)
    assert memory.placement == ((3,), (0, 1), (2,))
    native = AdditivePredictor(profile).predict(plan)
    for stage, peak in enumerate(memory.stages):
        assert (
            memory.peak_bytes_per_device[memory.placement[stage][0]]
            == peak.peak_bytes
            == sum(peak.parts.values())
        )
        assert peak.peak_bytes >= native.stages[stage].parts_bytes["parameters"]


def splitting_profile() -> Profile:
    """Its choices also with an optimizer's state that replicas split; as large as if they did
    not."""
    profile = planted_profile(8, max_devices=4)
    split = {
        replace(config, choice=replace(config.choice, shard_optimizer=True)): cost
        for config, cost in profile.measurements.items()
    }
    return replace(profile, measurements=profile.measurements | split)


def test_replicas_split_the_master_copy_and_not_the_gradients():
    """Parameters and gradients lose half each; one replica holds the float32 copy, and several
    split it if they split the state."""
    profile = splitting_profile()
    choices = [
        StageChoice(1, 1),
        StageChoice(2, 1, shard_optimizer=True),
        StageChoice(1, 1),
        StageChoice(4, 1, shard_optimizer=True),
    ]
    choices += [StageChoice(2, 2), StageChoice(2, 2, shard_optimizer=True)]
    plan = make_plan([1, 1, 2, 2, 1, 1], choices, num_microbatches=4).with_(
        cluster=Cluster((16,), profile.target)
    )
    whole, narrow = (alpa_memory(plan, profile, master_copy=on).stages for on in (False, True))
    for before, after, choice in zip(whole, narrow, choices, strict=True):
        params, split = (
            before.parts["parameters"],
            choice.data_parallel if choice.shard_optimizer else 1,
        )
        assert (
            after.parts["parameters"]
            == after.parts["gradients"]
            == before.parts["gradients"] // 2
            == params // 2
        )
        assert after.parts["optimizer"] - before.parts["optimizer"] == params // split
        assert before.peak_bytes - after.peak_bytes == params - params // split


def test_master_copies_are_of_float32_parameters():
    profile = planted_profile(4)
    first, *others = profile.graph.params
    narrow = replace(
        profile, graph=replace(profile.graph, params=(replace(first, dtype="bfloat16"), *others))
    )
    plan = make_plan([2, 2], [StageChoice(1, 1)] * 2).with_(cluster=Cluster((2,), profile.target))
    assert codes_of(lambda: alpa_memory(plan, narrow, master_copy=True)) == ("alpa-master-copy",)
    asked = {"microbatch_size": 16, "master_copy": True}
    assert codes_of(lambda: autostaging_tables(narrow, plan.cluster, **asked)) == (
        "alpa-master-copy",
    )


def test_alpas_search_counts_master_copies_as_its_runtime_does():
    """Its limit, ``floor((available - peak - initial) / intermediate - 1)``, for one stage by hand;
    only behind replicas do more fit."""
    profile, limit = splitting_profile(), 16 * 10**9
    asked = {"microbatch_size": 16, "memory_limit_bytes": limit}
    cluster = Cluster((4, 4), profile.target)
    whole, narrow = (
        autostaging_tables(profile, cluster, master_copy=on, **asked) for on in (False, True)
    )
    for s, choices in enumerate(whole.choices):
        for c, choice in enumerate(choices):
            before, after = whole.max_successors[:, :, s, c], narrow.max_successors[:, :, s, c]
            if choice.shard_optimizer and choice.data_parallel > 1:
                assert (after >= before).all() and (after > before).any()
            else:
                assert (after == before).all()
    choice = StageChoice(4, 1, shard_optimizer=True)
    c = narrow.choices[narrow.submeshes.index((1, 4))].index(choice)
    memory = AdditivePredictor(profile).memory(choice, 16)
    params, optimizer, kept = (
        int(part[2, 5]) for part in (memory.params, memory.optimizer, memory.kept)
    )
    forward = int((memory.received + memory.batch + memory.forward)[2, 5])
    backward = int((memory.gradients_in + memory.backward)[2, 5])
    resident = 2 * (params // 2) + optimizer + params // 4
    expected = (limit - resident - kept - max(forward, backward)) // kept - 1
    assert narrow.max_successors[2, 4, narrow.submeshes.index((1, 4)), c] == expected


def test_the_command_writes_the_file_and_shows_the_placement(tmp_path, capsys):
    PLAN.save(tmp_path / "plan.json")
    assert (
        main(
            [
                "export",
                str(tmp_path / "plan.json"),
                "--to",
                "alpa",
                "-o",
                str(tmp_path / "method.py"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "0:0-3" in said and "1:2-3" in said and "method.py" in said
    compile((tmp_path / "method.py").read_text(), "method.py", "exec")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "alpa", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        document["alpa"]["submesh_logical_shapes"] == [[4, 1], [1, 2], [2, 1]]
        and document["alpa"]["alpa_version"] == "0.2.3"
    )


def test_autostaging_is_labelled_and_stands_where_alpa_places_stages():
    profile = planted_profile(8, max_devices=4)
    found = autostage(
        profile,
        PlanQuestion(Cluster((4, 4), profile.target), global_batch_size=64, num_microbatches=4),
    )
    assert found.status == "ok" and LABEL in found.proof.algorithm and LABEL in found.why.summary
    sizes = [stage.num_devices for stage in found.plan.stages]
    assert [stage.devices for stage in found.plan.stages] == list(
        alpa_placement(Cluster((4, 4)), sizes)
    )
    with pytest.raises(PlanError, match=r"\[alpa-cluster\]"):
        autostage(
            profile,
            PlanQuestion(Cluster((4, 2), profile.target), global_batch_size=64, num_microbatches=4),
        )


def test_alpas_check_of_memory_may_take_a_plan_that_does_not_fit():
    """Its formula counts micro-batches in flight as under 1F1B, and no update; what is predicted
    decides whether the answer is a plan."""
    profile = planted_profile(8, max_devices=4)
    batch = {"global_batch_size": 64, "num_microbatches": 4, "schedule": "gpipe"}
    cluster = Cluster((4, 4), profile.target)
    peak = autostage(profile, PlanQuestion(cluster, **batch)).prediction.peak_bytes
    refused = [
        found
        for percent in range(50, 100, 4)
        if (
            found := autostage(
                profile, PlanQuestion(cluster, **batch, memory_limit_bytes=peak * percent // 100)
            )
        ).plan
        and found.status != "ok"
    ]
    assert refused and all(found.headroom.verdict == "does not fit" for found in refused)
    assert refused[0].why.code == "autostaging" and "are predicted" in refused[0].why.summary
    nothing = autostage(profile, PlanQuestion(cluster, **batch, memory_limit_bytes=1))
    least = int(nothing.why.summary.rpartition(" is ")[2].rstrip(".").replace(",", ""))
    assert (
        nothing.plan is None
        and autostage(profile, PlanQuestion(cluster, **batch, memory_limit_bytes=least)).plan
        is not None
    )
    assert (
        autostage(
            profile, PlanQuestion(cluster, **batch, memory_limit_bytes=least * 98 // 100)
        ).plan
        is None
    )


def test_optimizer_state_leaves_less_room_for_what_micro_batches_keep():
    """As much more state as memory changes nothing; the same state in the same memory does."""
    profile, cluster, more = planted_profile(8, max_devices=4), Cluster((4, 4), "a100-40g"), 10**9

    def most_behind(profile, limit):
        return autostaging_tables(
            profile, cluster, microbatch_size=16, memory_limit_bytes=limit
        ).max_successors.tolist()

    heavy = {
        config: replace(cost, optimizer_bytes=cost.optimizer_bytes + more)
        for config, cost in profile.measurements.items()
    }
    heavier = replace(profile, measurements=heavy)
    assert (
        most_behind(heavier, 8 * 10**9 + more)
        == most_behind(profile, 8 * 10**9)
        != most_behind(heavier, 8 * 10**9)
    )


def test_the_command_plans_as_alpa_would(tmp_path, capsys):
    profile = planted_profile(8, max_devices=4)
    profile.save(tmp_path / "profile.json")
    asked = [
        "plan",
        "model.py:model",
        "--cluster",
        "2x4",
        "--target",
        profile.target,
        "--profile",
        str(tmp_path / "profile.json"),
    ]
    asked += [
        "--global-batch",
        "64",
        "--microbatches",
        "4",
        "-o",
        str(tmp_path / "plan.json"),
        "--json",
        "--no-compile",
    ]
    assert main([*asked, "--algorithm", "autostage"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert LABEL in document["search"]["algorithm"] and LABEL in document["why"]["summary"]
    expected = autostage(
        profile,
        PlanQuestion(Cluster((4, 4), profile.target), global_batch_size=64, num_microbatches=4),
    )
    assert Plan.load(tmp_path / "plan.json").stages == expected.plan.stages
    assert main([*asked, "--algorithm", "autostage", "--memory", "1B"]) == 1


@pytest.mark.parametrize(
    ("space", "degrees"),
    [
        ("all", {(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)}),
        ("single_node_model_parallel", {(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)}),
        ("same_as_physical", {(1, 1), (1, 2), (2, 2)}),
    ],
)
def test_logical_shapes_are_those_of_alpas_spaces(space, degrees):
    profile = planted_profile(8, max_devices=4)
    tables = autostaging_tables(
        profile, Cluster((2, 2), profile.target), microbatch_size=16, logical_shapes=space
    )
    assert {
        (c.data_parallel, c.tensor_parallel) for choices in tables.choices for c in choices
    } == degrees


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[1] / "alpa_conformance" / "data").glob("*.npz")),
    ids=lambda file: file.stem,
)
def test_memory_does_not_bind_alpas_choice_for_the_papers_models(file):
    """So another account of memory leaves the recorded plans what they are
    (``benchmarks/papers/capture/count_again.py``)."""
    data = np.load(file)
    submeshes = tuple((int(hosts), int(devices)) for hosts, devices in data["submeshes"])
    choices = tuple(
        tuple(StageChoice(int(dp), int(tp), "full", True) for dp, tp in here if dp)
        for here in data["degrees"]
    )
    limited = AutostagingTables(
        submeshes,
        choices,
        data["seconds"].astype(np.float64),
        data["max_successors"].astype(np.int64),
    )
    free = replace(
        limited, max_successors=np.where(np.isfinite(limited.seconds), MOST_SUCCESSORS, -1)
    )
    assert (free.max_successors > limited.max_successors).any()
    with_limit, without = (
        search_tables(tables, 16, int(data["num_microbatches"])) for tables in (limited, free)
    )
    assert with_limit.status == "ok" and with_limit.step_seconds == without.step_seconds
