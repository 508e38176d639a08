"""Targets: the shipped ones are whole and sourced, a user's file is read strictly, and capacity is
what its terms say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_profiles import Planted

from capture.errors import TargetError
from capture.machine.cluster import Cluster
from capture.machine.links import Layout, Links
from capture.machine.rates import DeviceMemory, Fabric, Sourced
from capture.machine.target import Target, target_names
from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.headroom import Headroom, Peaks
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.profiler.compile import target_provenance

ACCELERATORS = [name for name in target_names() if name != "cpu"]


def a_file(tmp_path, **changes) -> str:
    path = tmp_path / "mine.json"
    document = json.loads(json.dumps(_document("h100"))) | changes
    path.write_text(json.dumps(document))
    return str(path)


def test_a_file_is_found_from_where_the_plan_and_the_profile_are(tmp_path, monkeypatch):
    name = a_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    plan = Plan(Cluster((1,), "mine.json"), 1, (Stage(0, 1, [0]),), 2, 1)
    plan.save("plans/plan.json")
    replace(Planted(2).profile([StageChoice()]), provenance={"target": "mine.json"}).save(
        "plans/profile.json"
    )
    monkeypatch.chdir(tmp_path / "plans")
    assert (
        Plan.load("plan.json").cluster.target
        == "../mine.json"
        == Profile.load("profile.json").target
    )
    assert Target.load(Plan.load("plan.json").cluster.target).memory == Target.load(name).memory


def _document(name: str) -> dict:
    from capture.machine.target import TARGETS_FOLDER

    return json.loads((TARGETS_FOLDER / f"{name}.json").read_text())


def with_links(**changes) -> dict:
    return {"links": _document("h100")["links"] | changes}


def with_fabric(target: str, **changes) -> dict:
    links = _document(target)["links"]
    return {"links": links | {"fabric": links["fabric"] | changes}}


FREE = {"value": 0, "source": "test"}


def message(call) -> str:
    with pytest.raises(TargetError) as error:
        call()
    return str(error.value)


def sourced(document) -> list[str]:
    """The sources of all numbers of a document."""
    if isinstance(document, dict):
        if set(document) == {"value", "source"}:
            return [document["source"]]
        return [source for value in document.values() for source in sourced(value)]
    return []


def test_the_promised_targets_are_shipped():
    promised = {
        "a100-40g",
        "a100-80g",
        "h100",
        "h200",
        "b200",
        "gh200",
        "gb300",
        "v100-32g",
        "v4",
        "v5e",
        "v5p",
        "v6e",
        "tpu7x",
        "cpu",
    }
    assert promised <= set(target_names())


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_number_has_a_source_and_the_rates_are_plausible(name):
    target = Target.load(name)
    found = sourced(_document(name))
    assert len(found) >= 12 and all(len(source) > 8 for source in found)
    assert target.rates.rate_of("bfloat16").value >= target.rates.rate_of("float32").value
    assert target.rates.rate_of("int7").value == target.rates.rate_of("float32").value, (
        "an unlisted type counts as float32"
    )
    assert (
        0.5 < target.rates.compute_efficiency.value <= 1
        and 0.5 < target.rates.memory_efficiency.value <= 1
    )
    assert (
        target.rates.intra_node.bytes_per_second.value
        >= target.rates.inter_node.bytes_per_second.value
    )
    host = target.rates.host
    assert len(host.duplex_source) > 8 and all(
        link.bytes_per_second.value <= target.rates.intra_node.bytes_per_second.value
        for link in (host.to_device, host.to_host)
    )
    assert (
        0.8 * target.memory.capacity_bytes.value
        < target.memory.usable_bytes
        <= target.memory.capacity_bytes.value
    )


def test_usable_memory_is_capacity_times_fraction_less_the_reserved_parts():
    memory = DeviceMemory(*(Sourced(value, "test") for value in (1000, 0.9, 100, 50)))
    assert memory.usable_bytes == 750
    assert str(memory) == "750 B usable: 1 kB x 0.9 - 100 B context - 50 B collectives"
    assert memory.to_json()["context_bytes"] == {"value": 100, "source": "test"}


def test_the_key_of_measurements_leaves_out_what_no_compiler_sees():
    key = Target.load("h100").key
    assert "source" not in key["compiler"] and "memory" not in key
    assert key != Target.load("h200").key


def _with_option(folder: Path, value: object) -> str:
    return a_file(
        folder, compiler=_document("tpu7x")["compiler"] | {"options": {"xla_tpu_a": value}}
    )


@pytest.mark.parametrize("value", [True, 98304, "ENABLED"])
def test_an_option_of_the_compiler_is_a_number_a_truth_or_a_state(tmp_path, value):
    assert Target.load(_with_option(tmp_path, value)).compiler_options == {"xla_tpu_a": value}


def test_an_option_of_the_compiler_is_no_path(tmp_path):
    with pytest.raises(TargetError, match="ENABLED, DISABLED, AUTO"):
        Target.load(_with_option(tmp_path, "a/folder"))


def test_what_the_user_says_of_an_option_of_runs_counts(tmp_path, monkeypatch):
    compiler = _document("tpu7x")["compiler"] | {"run_options": {"xla_tpu_a": True, "xla_b": 1}}
    target = Target.load(a_file(tmp_path, compiler=compiler))
    assert target.compiler_options == target.run_options == {"xla_tpu_a": True, "xla_b": 1}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=false")
    assert target.compiler_options == target.run_options == {"xla_b": 1}


def test_flags_of_libtpu_are_facts_of_what_is_compiled_for_tpus(monkeypatch):
    before = {name: target_provenance(Target.load(name)) for name in ("v5e", "h100")}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_jf_spmd_threshold_for_windowed_einsum_mib=9")
    assert target_provenance(Target.load("v5e")) != before["v5e"]
    assert target_provenance(Target.load("h100")) == before["h100"]


def test_a_file_of_a_user(tmp_path):
    target = Target.load(a_file(tmp_path, description="mine"))
    assert (target.description, target.memory) == ("mine", Target.load("h100").memory)


def test_a_level_is_of_computing_and_of_memory_and_of_no_link(tmp_path):
    fitted = {"value": 0.5, "source": "fitted on made-up runs"}
    rates, half = (Target.load(name).rates for name in ("h100", a_file(tmp_path, level=fitted)))
    assert half.level.value == 0.5 and "made-up" in half.level.source
    for name in ("float32", "bfloat16"):
        reached = half.reached_flops_per_second(name)
        assert reached == 0.5 * rates.reached_flops_per_second(name)
    assert half.reached_bytes_per_second == 0.5 * rates.reached_bytes_per_second
    assert (half.intra_node, half.host) == (rates.intra_node, rates.host)


def test_a_host_link_without_directions_has_the_same_in_both_which_share_it(tmp_path):
    """As files were before the directions."""
    link = _document("a100-40g")["links"]["intra_node"]
    target = Target.load(a_file(tmp_path, **with_links(host=link)))
    host = target.rates.host
    assert host.to_device == host.to_host == Target.load("a100-40g").rates.intra_node
    assert not host.duplex and Target.load("h100").rates.host.duplex


def test_links_of_files_from_before_the_fabric_keep_their_meaning(tmp_path):
    """One ring inside a node and between nodes, at the file's own numbers."""
    links = _document("h100")["links"]
    del links["fabric"]
    links["intra_node"]["bytes_per_second"]["value"] = 450e9
    rates = Target.load(a_file(tmp_path, links=links)).rates
    assert rates.fabric == Fabric()
    found = Links(rates, Layout(8))
    assert set(found.costs("all-reduce", 16)) == {"ring"}
    expected = 7 * 3.4e-6 + 7 / 8 * 1e9 / 450e9
    assert found.seconds("reduce-scatter", 1e9, 8) == pytest.approx(expected)
    assert found.seconds("all-gather", 1e9, 8) == pytest.approx(expected)


def a_host(bytes_per_second: float = 5e10, **changes) -> dict:
    link = {
        "latency_seconds": {"value": 1e-5, "source": "test"},
        "bytes_per_second": {"value": bytes_per_second, "source": "test"},
    }
    duplex = {"value": True, "source": "test"}
    return {"to_device": link, "to_host": link, "duplex": duplex} | changes


@pytest.mark.parametrize(
    ("changes", "wrong", "code"),
    [
        (
            with_links(host=a_host(to_host={})),
            "links.host.to_host.latency_seconds is missing",
            "target-corrupt",
        ),
        (
            with_links(host=a_host(duplex={"value": 1, "source": "test"})),
            "links.host.duplex.value is 1 and must be true or false",
            "target-corrupt",
        ),
        (
            with_links(host=a_host(0)),
            "links.host.to_device has latency_seconds 1e-05 and bytes_per_second 0; the first must",
            "target-corrupt",
        ),
        (
            with_fabric("h100", oversubscription={"value": 0.5, "source": "test"}),
            "links.fabric.oversubscription is 0.5 and must be at least 1",
            "target-corrupt",
        ),
        (
            with_fabric("h100", tree_efficiency={"value": 92, "source": "test"}),
            "links.fabric.tree_efficiency is 92 and must be at least 0.01 and at most 1",
            "target-corrupt",
        ),
        (
            with_fabric("h100", switch_sums=a_host()["to_host"] | {"bytes_per_second": FREE}),
            "links.fabric.switch_sums has latency_seconds 1e-05 and bytes_per_second 0; the first",
            "target-corrupt",
        ),
        (
            with_fabric("h100", oversubscripton={"value": 2, "source": "test"}),
            "links.fabric.oversubscripton is no field",
            "target-corrupt",
        ),
        (
            with_fabric("v5p", torus=_document("v5p")["links"]["fabric"]["torus"] | {"host": [4]}),
            "links.fabric.torus has host (4,) and devices_per_chip 1; a host has chips on two axes",
            "target-corrupt",
        ),
        (
            with_fabric(
                "v5p", torus=_document("v5p")["links"]["fabric"]["torus"] | {"wraps_at": 1}
            ),
            "links.fabric.torus.wraps_at must be 2 or more",
            "target-corrupt",
        ),
        (
            {"schema_version": 2},
            "has schema_version=2; this version of capture reads 1",
            "target-schema",
        ),
        (
            {"platform": "npu"},
            "platform is 'npu' and must be one of cpu, cuda, tpu",
            "target-corrupt",
        ),
        ({"memory": {}}, "memory.capacity_bytes is missing", "target-corrupt"),
        (
            {"level": {"value": 0, "source": "fitted"}},
            "level is 0 and must be above 0",
            "target-corrupt",
        ),
        (
            {"compute": {"flops_per_second": {}, "efficiency": {"value": 1, "source": ""}}},
            "compute.flops_per_second.float32 is missing",
            "target-corrupt",
        ),
        (
            {"memory_rate": {"bytes_per_second": 3}},
            "memory_rate.bytes_per_second is 3 and must be an object",
            "target-corrupt",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path, changes, wrong, code):
    text = message(lambda: Target.load(a_file(tmp_path, **changes)))
    assert wrong in text and text.endswith(f"[{code}]")


def test_unknown_names_and_files(tmp_path):
    assert message(lambda: Target.load("h900")).startswith(
        "target='h900' is unknown; choose one of a100-40g, a100-80g, b200, cpu, "
    )
    assert message(lambda: Target.load(str(tmp_path / "no.json"))).endswith(
        "does not exist. [target-file]"
    )
    (tmp_path / "broken.json").write_text("{")
    assert message(lambda: Target.load(str(tmp_path / "broken.json"))).endswith("[target-file]")


@pytest.mark.parametrize(
    ("peak", "high", "verdict", "text"),
    [
        (600, 700, "fits", "fits: 150 B of 750 B left, 50 B at worst (interval 98%)"),
        (700, 800, "may not fit", "may not fit: 50 B of 750 B left, -50 B at worst (interval 98%)"),
        (
            760,
            770,
            "does not fit",
            "does not fit: -10 B of 750 B left, -20 B at worst (interval 98%)",
        ),
    ],
)
def test_headroom_says_how_much_and_how_sure(peak, high, verdict, text):
    memory = DeviceMemory(*(Sourced(value, "test") for value in (1000, 0.9, 100, 50)))
    headroom = Headroom.of(
        Peaks((10, peak), [(5, 20), (500, high)], "predicted", 0.98), None, memory
    )
    assert (headroom.verdict, str(headroom)) == (verdict, text)
    assert headroom.to_json()["headroom_bytes"] == 750 - peak and headroom.limit_bytes == 750


def test_headroom_of_a_given_limit_and_of_none():
    room = Headroom.of(Peaks.compiled(5), 8)
    assert room.to_json()["limit_source"] == "given"
    assert str(room) == "fits: 3 B of 8 B left, 3 B at worst (compiled)"
    assert Headroom.of(Peaks.compiled(5), None) is None


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("H100", "h100"),
        ("A100-80GB", "a100-80g"),
        ("NVIDIA A100 40GB", "a100-40g"),
        ("tpu-v5e", "v5e"),
        ("CPU", "cpu"),
    ],
)
def test_a_target_is_known_by_other_spellings_of_its_name(given, name):
    """Everywhere: a plan, a profile and a key hold one name."""
    assert Target.load(given) is Target.load(name)
    assert (
        Cluster.parse("1x2", given) == Cluster((2,), name) and Cluster((2,), given).target == name
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            "a100",
            " Did you mean a100-40g or a100-80g?",
        ),  # not decided for the user: half the memory, or twice
        ("v100", " Did you mean v100-32g?"),
        ("H100-80GB", " Did you mean h100?"),
        ("v5ee", " Did you mean v5e?"),
        ("cpu:8", " Did you mean --target cpu --cluster 1x8?"),
        ("mine", ""),
    ],
)
def test_the_nearest_targets_are_offered(given, meant):
    assert message(lambda: Target.load(given)).endswith(
        f"or give the path of a target file (.json).{meant} [target-unknown]"
    )
