"""The zoo's models of Harmony's evaluation have the layers and the bytes of its authors' profiles,
but for what is explained. Full sizes: ``benchmarks/harmony_paper/models.py``."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from zoo_models import import_model, load

from benchmarks.harmony_paper.models import differences, input_bytes, parameter_bytes
from benchmarks.harmony_paper.settings import profile_of
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


def test_differences_are_told_by_runs():
    assert list(differences([1, 2, 2, 3], [1, 4, 4, 4])) == [
        {"layers": [1, 2], "ours": 2, "authors": 4},
        {"layers": [3, 3], "ours": 3, "authors": 4},
    ]
