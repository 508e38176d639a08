"""The zoo's models of Harmony's evaluation have the layers and the bytes of its authors' profiles,
but for what is explained. Full sizes: ``benchmarks/papers/harmony/models.py``."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from zoo_models import import_model, load

from benchmarks import harmony_models
from benchmarks.harmony_models import Model
from benchmarks.papers.harmony.models import differences, input_bytes, parameter_bytes
from benchmarks.papers.harmony.settings import deeper, profile_of
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.measured.layer_profile import Casts
from capture.tracing.model import trace

TRANSFORMERS = {
    "bert_large": ("bert", "large"),
    "bert_96": ("bert", "96L"),
    "gpt2_xl": ("gpt2", "xl"),
    "gpt2_10b": ("gpt2", "10B"),
    "gpt2_20b": ("gpt2", "20B"),
    "gpt2_30b": ("gpt2", "30B"),
    "gpt2_40b": ("gpt2", "40B"),
}
CNNS = {"vgg416": ("vgg", "416L"), "resnet1026": ("resnet", "1026L")}


def runs(values) -> list[int]:
    """One of every run of equal layers: what is left of the differences between depths."""
    return [value for value, _ in groupby(values)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_have_the_layers_of_the_profiles(name, monkeypatch):
    (model, size), profile = TRANSFORMERS[name], profile_of(name)
    config = import_model(model, monkeypatch).SIZES[size]
    assert config.num_layers + 4 == profile.num_layers
    if name not in ("bert_large", "gpt2_xl", "gpt2_10b"):  # others have the same layers
        return
    graph = trace(load(model, f"size={size}&num_layers=2"), 1).graph
    ours = parameter_bytes(graph)
    ours[1:3] = [nbytes + 4 * config.width for nbytes in ours[1:3]]  # keys have no bias
    assert runs(ours) == runs(profile.w_bytes)
    # Of tokens and masks only the former pass between layers, in half the bytes.
    assert runs(input_bytes(graph))[-2:] == runs(profile.x_bytes_per_sample)[-2:]
    # Adam's moments, and the count of its steps.
    assert sum(profile.k_bytes) == 2 * sum(profile.w_bytes)


@pytest.mark.parametrize("name", CNNS)
def test_cnns_have_the_layers_of_the_profiles(name, monkeypatch):
    (model, size), profile = CNNS[name], profile_of(name)
    module, zoo = import_model(model, monkeypatch), import_model("zoo", monkeypatch)
    config = module.SIZES[size]
    # Convolutions and three products, or the stem, blocks and the head; and the loss.
    assert sum(config.groups) + (4 if name == "vgg416" else 3) == profile.num_layers
    network = getattr(module, "Vgg" if name == "vgg416" else "ResNet")
    shallow = network(replace(config, groups=tuple(2 for _ in config.groups)))
    workload = zoo.image_workload(shallow, config.image_size, config.num_classes, 0.1)
    graph = trace(workload, 1).graph
    assert runs(parameter_bytes(graph)) == runs(profile.w_bytes)
    assert runs(input_bytes(graph)) == runs(profile.x_bytes_per_sample)
    assert profile.k_bytes == profile.w_bytes  # momentum


def test_a_derived_profile_is_the_one_of_the_deeper_model():
    """The authors' profile of 40 billion parameters is that of 10 billion with more blocks, too."""
    derived, shipped = deeper(profile_of("gpt2_10b"), 25, 150), profile_of("gpt2_40b")
    assert derived.source.startswith("derived: gpt2_10b with 150 more of layer 25.")
    same = {"name": derived.name, "source": derived.source}
    assert derived.to_json() == shipped.to_json() | same
    eighty = profile_of("gpt2_80b")
    assert eighty.num_layers == 404 and sum(eighty.w_bytes) // 4 == 80_967_843_840
    toy = profile_of("toy6")
    half = tuple(w // 2 for w in toy.w_bytes)
    read = {"b_bytes": (0, 0, 0, 0, 0, 8), "shared": ((8, 0, 5),)}
    casts = {"bfloat16": Casts(half, (0, 0, 0, 0, 0, 4), half, half, (4,))}
    found = deeper(replace(toy, casts=casts, **read), 2, 3)
    assert found.shared == ((8, 0, 8),), "layers behind it move"
    assert found.casts["bfloat16"].w_bytes == (*half[:3], *[half[2]] * 3, *half[3:])


def test_large_models_fit_hosts_that_hold_their_plans():
    """By host memory: below what the plan needs nothing fits, and the need is said."""
    profile, server = profile_of("gpt2_20b"), Server.of(Cluster.parse("1x2", "h100"))
    rows = harmony_models.rows_of("GPT2 20B", Model("", 100, 1024), profile, server)
    fits = [row["feasible"] for row in rows]
    assert fits == sorted(fits) and not fits[0] and fits[-1]
    for row in rows:
        if row["feasible"]:
            assert row["host_bytes"] <= row["host_memory_bytes"]
            assert row["device_bytes"] <= server.usable_bytes.value
            assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(64 * 1024)
        else:
            assert row["host_bytes_needed"] > row["host_memory_bytes"]
        assert row["beside"]["resident"]["reason"]
    # 12 bytes per parameter, and what is kept.
    assert 12 * rows[0]["num_parameters"] < rows[-1]["host_bytes"]


def test_updates_read_and_write_28_bytes_per_parameter_of_adam():
    profile = harmony_models.updated_at(profile_of("gpt2_xl"), 1e9)
    assert profile.update_cpu_time[1] == pytest.approx(28 * profile.w_bytes[1] / 4 / 1e9)


def test_differences_are_told_by_runs():
    assert list(differences([1, 2, 2, 3], [1, 4, 4, 4])) == [
        {"layers": [1, 2], "ours": 2, "authors": 4},
        {"layers": [3, 3], "ours": 3, "authors": 4},
    ]
