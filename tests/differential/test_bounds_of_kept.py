"""What long stages keep is bounded by sums over parts: never more than the whole stage keeps."""

from __future__ import annotations

from itertools import product

import pytest
from processes import REPOSITORY

from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.formula import kept_bytes
from capture.profiler.bounds import BoundsBackend
from profiling_runs.bounds import bounds
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion

SIZE = 8


def test_long_stages_keep_no_less_than_their_bound_however_tensors_are_split():
    """A transformer without marks, cut inside its blocks: values that are split where they are made
    cross several layers."""
    spec = WorkloadSpec.parse(f"{REPOSITORY / 'tests' / 'user_models' / 'vit_nnx.py'}:vit?depth=3")
    choices = tuple(StageChoice(1, *each) for each in product((1, 2), ("cheap", "full")))
    question = ProfileQuestion(spec, Cluster((4,)), SIZE, choices=choices, calibration_plans=0)
    measurements = open_measurements(question, store=Store(None))
    predictor = AdditivePredictor(bounds(question, measurements).least)
    backend, num_layers = BoundsBackend(measurements.backend), predictor.profile.graph.num_layers
    for choice in choices:
        graph = measurements.backend.sharding(SIZE).graph([choice])
        for first, stop in ((0, num_layers // 2), (1, num_layers - 1), (0, num_layers)):
            cost = backend.measure(StageConfig(first, stop, choice, SIZE)).least
            kept = kept_bytes(graph, first, stop, choice, cost)
            bound = int(predictor.memory(choice, SIZE).kept[first, stop])
            assert 0 < bound <= kept, (choice, first, stop)


@pytest.mark.parametrize(
    ("model", "remats"),
    [
        pytest.param("wide_resnet", ("cheap",), marks=pytest.mark.slow),
        pytest.param("resnet", ("none", "cheap"), marks=pytest.mark.exhaustive),
        pytest.param("wide_resnet", ("none", "cheap"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_where_parameters_are_split_so_may_be_what_replicas_have_in_common(model, remats):
    """Statistics of a batch, per channel: for H100 they are split as the scales that follow."""
    spec = WorkloadSpec.parse(f"{REPOSITORY / 'models' / model}.py:{model}?size=tiny")
    choices = tuple(StageChoice(4, 1, remat, True, True) for remat in remats)
    cluster, size = Cluster((4,), "h100"), 4 * SIZE
    question = ProfileQuestion(spec, cluster, size, choices=choices, calibration_plans=0)
    measurements = open_measurements(question, store=Store(None))
    predictor = AdditivePredictor(bounds(question, measurements).least)
    graph = measurements.backend.sharding(size).graph(choices)
    asked = [*product(choices, [(0, 1), (1, 2)])]
    if len(choices) > 1:  # compiling a whole model takes longest, so one choice has it
        asked.append((choices[1], (0, graph.num_layers)))
    for choice, window in asked:
        cost = measurements.backend.measure(StageConfig(*window, choice, size))
        kept = kept_bytes(graph, *window, choice, cost)
        bound = int(predictor.memory(choice, size).kept[window])
        assert 0.9 * kept < bound <= kept, (choice, window)
