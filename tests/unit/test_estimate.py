"""What a model needs is counted from tracing: state exactly, devices never too many to be a lower
bound, activations as the compiler keeps them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import optax
import pytest
from commands import run_here, run_json
from pipeline_models import bare, mlp, tied
from synthetic_profiles import Planted, hybrid

from capture.cli.estimate import EstimateReport, FewestDevices, as_text
from capture.compiler.executable import Compiler
from capture.machine.cluster import Cluster
from capture.machine.rates import Sourced
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend
from profiling_runs.estimate import REMATS, training_need
from recommender.capture.least_state import fewest_stages, least_state


def with_memory(nbytes: int) -> Target:
    """A target with so many usable bytes."""
    of = Target.load("h100")
    terms = dict.fromkeys(("context_bytes", "collective_bytes"), Sourced(0, ""))
    memory = replace(
        of.memory, capacity_bytes=Sourced(nbytes, ""), allocator_fraction=Sourced(1, ""), **terms
    )
    return replace(of, memory=memory)


def test_the_state_is_that_of_the_shapes():
    need = training_need(mlp(optax.adam(0.1)), 2)
    block = 4 * (16 * 64 + 64 * 16 + 64)
    assert need.param_bytes == 4 * block
    assert need.state_bytes == 4 * 4 * block
    assert need.zero3_state_bytes(2) == 4 * 4 * block // 2
    assert need.zero3_state_bytes(128) == 4 * 4 * block  # no dimension has so many parts
    assert need.forward_flops >= 4 * 2 * 2 * (16 * 64 + 64 * 16)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_sharded_state_is_that_of_plans(num_devices):
    need, backend = training_need(mlp(optax.adam(0.1)), 2), CompileBackend(mlp(optax.adam(0.1)))
    graph, choice = backend.traced(2).graph, StageChoice(num_devices, 1, shard_params=True)
    param_bytes = {choice.param_split: backend.sharding(2).param_bytes(choice.param_split)}
    cluster, state = Cluster((num_devices,)), backend.state_bytes(2)
    found = least_state(graph, param_bytes, state, [choice], cluster)
    assert need.zero3_state_bytes(num_devices) == found.peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_no_pipeline_has_fewer_stages(seed):
    """Against the search for the least state, which knows every cut."""
    profile = Planted(6, seed).profile(hybrid(4))
    graph, held = profile.graph, profile.param_bytes[1, 1]
    optimizer = np.random.default_rng(seed).integers(0, 3 * max(held), len(held)).tolist()

    def least(num_stages: int) -> int:
        cluster, choices = Cluster((1,) * num_stages), [StageChoice()]
        return least_state(graph, {(1, 1): held}, optimizer, choices, cluster).peak_bytes

    peaks = [least(n) for n in range(1, graph.num_layers + 1)]
    for limit in sorted({*peaks, *(peak - 1 for peak in peaks)}):
        enough = [n for n, peak in enumerate(peaks, start=1) if peak <= limit]
        assert fewest_stages(graph, held, optimizer, limit) == min(enough, default=None)


def test_the_fewest_devices_of_a_target():
    need = training_need(mlp(optax.adam(0.1)), 2)
    quarter = need.state_bytes // 4
    found = FewestDevices.of(need, with_memory(quarter))
    assert (found.any_plan, found.pipeline_stages, found.zero3) == (4, 4, 4)
    assert found.zero3_with_activations == 8
    beside = (need.activation_bytes["full"] + need.largest_layer_bytes) // 2
    two = need.zero3_state_bytes(2) + beside + need.largest_layer_param_bytes
    assert FewestDevices.of(need, with_memory(two)).zero3_with_activations == 2
    assert FewestDevices.of(need, with_memory(two - 1)).zero3_with_activations == 4
    found = FewestDevices.of(need, with_memory(quarter - 1))
    assert (found.any_plan, found.pipeline_stages, found.zero3) == (5, None, 8)
    found = FewestDevices.of(need, with_memory(2 * quarter))
    assert (found.any_plan, found.pipeline_stages, found.zero3) == (2, 2, 2)
    found = FewestDevices.of(need, with_memory(100))
    assert (found.pipeline_stages, found.zero3, found.zero3_with_activations) == (None, None, None)
    twice = training_need(tied(optax.adam(0.1)), 2)  # held by two stages, and counted once
    assert sum(twice.optimizer_bytes) == 2 * twice.param_bytes


@pytest.mark.parametrize("model", [mlp, bare, tied])
def test_activations_are_what_compiled_programs_keep(model):
    """Against all layers as one compiled stage, whose cut with ``cheap`` may keep less."""
    need, backend = training_need(model(), 8), CompileBackend(model())
    batch, num_layers = backend.traced(8).graph.batch, need.graph.num_layers
    for remat in REMATS:
        cost = backend.measure(StageConfig(0, num_layers, StageChoice(remat=remat), 8))
        kept = cost.residual_bytes + sum(batch[b].nbytes for b in cost.kept_batch)
        assert need.activation_bytes[remat] >= kept > 0
        assert need.activation_bytes[remat] == kept or remat == "cheap"
    if model is mlp:
        found = [need.activation_bytes[remat] for remat in REMATS]
        assert found[0] > found[1] > found[2] == 4 * 8 * 16 * 4, "the inputs of four layers"
        assert found[0] > 3 * need.largest_layer_bytes


def test_the_verb_compiles_nothing_and_says_what_is_a_bound(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Compiler, "__call__", lambda *args, **options: pytest.fail("compiled"))
    monkeypatch.chdir(tmp_path)
    code, found, _ = run_json(capsys, "estimate", "capture.cli.tiny_gpt:gpt?num_blocks=1")
    assert code == 0 and json.dumps(found)
    assert found["optimizer_bytes"] == 2 * found["parameter_bytes"] == 2 * found["gradient_bytes"]
    assert found["step_flops_per_example"] == 3 * found["forward_flops_per_example"]
    names = [each["target"] for each in found["targets"]]
    assert "h100" in names and "cpu" not in names
    code, text, _ = run_here(
        capsys, "estimate", "capture.cli.tiny_gpt:gpt?num_blocks=1", "--target", "h100"
    )
    assert code == 0 and max(map(len, text.splitlines())) <= 100
    assert (
        "h100" in text
        and ">= 1" in text
        and "v5e" not in text
        and "fits" not in text.split(">= is")[0]
    )
    report = EstimateReport.of("mlp", training_need(mlp(), 2))
    assert "no devices are counted" in [*as_text(report)][-1]
