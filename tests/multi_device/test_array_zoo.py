"""Models of mu-TWO's evaluation, as small as they are, train in an array as they do alone."""

from __future__ import annotations

import pytest
from array_models import array_plan, checked
from zoo_models import MODELS

from capture.model.workload import WorkloadSpec
from capture.plan.array import Decision, Member
from capture.runtime.multiplexed import train_array

#: Of BatchNorm the statistics are those of the batch, also where several models are one program.
NAMES = {
    "deep_recommender.py:deep_recommender": pytest.mark.slow,
    "vit.py:vit?num_layers=2": pytest.mark.exhaustive,
    "mobilenet.py:mobilenet": pytest.mark.exhaustive,
    "resnet.py:resnet?injected=true": pytest.mark.exhaustive,
    "bert.py:bert?num_layers=2&injected=true": pytest.mark.exhaustive,
    "gpt2.py:gpt2?num_layers=2&injected=true": pytest.mark.exhaustive,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in NAMES.items()])
def test_a_model_of_the_evaluation_trains_in_an_array_as_it_does_alone(name):
    """Two fused beside one, multiplexed, with some feature maps swapped and others made again."""
    workload = WorkloadSpec.parse(f"{MODELS}/{name}").load()
    members = tuple(Member(seed, {"learning_rate": 1e-3 / (1 + seed)}) for seed in range(3))
    plan = array_plan(batch_size=2, models=members, partition=((0, 2), (1,)))
    array = train_array(workload, plan, fast_compile=True).arrays[0]
    bundles, layers = array.bundles, array.num_layers
    maps = [one for one in bundles if " maps " in one.name]
    own = [one.name for one in maps if one.readers[0] >= layers]
    decisions = [Decision(one.name, "swap") for one in maps if one.name not in own[1::2]]
    decisions += [Decision(one, "recompute") for one in own[1::2]]
    plan = array_plan(
        batch_size=2, models=members, partition=((0, 2), (1,)), decisions=(tuple(decisions), ())
    )
    found = checked(train_array(workload, plan, fast_compile=True))
    assert found["max_relative_loss_error"] < 1e-5
    assert found["measured_peak_bytes_per_device"] == found["replayed_peak_bytes_per_device"]
    assert found["moved_bytes"]["to_host"] > 0
