"""The library's autostaging and Alpa's own, on the same tables: the same step time, to the
precision of Alpa's search (float32)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from alpa import AutoStageOption, ManualLayerOption, PipeshardParallel
from alpa.pipeline_parallel.stage_construction import get_submesh_choices, training_dp
from harness import autostaging_tables, compile_method, mesh
from steps import chain

from capture.machine.cluster import Cluster
from capture.papers.alpa.autostage import AutostagingTables, search_tables, submesh_choices
from capture.plan.choices import StageChoice

DATA = Path(__file__).parent / "data"
REMAT = ("none", "dots", "full")  # configurations must differ, in whatever


def random_tables(
    hosts: int, devices: int, num_layers: int, num_configs: int, seed: int, most: int = 8
) -> AutostagingTables:
    submeshes = submesh_choices(Cluster((devices,) * hosts))
    choices = tuple(
        tuple(StageChoice(h * d, 1, REMAT[k], False) for k in range(num_configs))
        for h, d in submeshes
    )
    random = np.random.default_rng(seed)
    shape = num_layers, num_layers, len(submeshes), num_configs
    seconds, successors = random.uniform(0.1, 3, shape), random.integers(-1, most, shape)
    empty = np.tri(num_layers, num_layers, -1, dtype=bool)
    seconds[empty], successors[empty] = np.inf, -1
    return AutostagingTables(submeshes, choices, seconds, successors)


def value(tables: AutostagingTables, stages, num_microbatches: int) -> float:
    """Alpa's objective, of (layers, submesh, configuration) triples."""
    times = [tables.seconds[ids[0], ids[-1], s, c] for ids, s, c in stages]
    return sum(times) + (num_microbatches - 1) * max(times)


@pytest.mark.parametrize(("hosts", "devices"), [(1, 4), (2, 4), (4, 4), (8, 8), (4, 1)])
def test_the_space_of_submeshes_is_alpas(hosts, devices):
    assert submesh_choices(Cluster((devices,) * hosts)) == tuple(
        get_submesh_choices(hosts, devices, "power_of_two")
    )


CASES = [(1, 4, 5, 2, 4), (2, 4, 6, 3, 8), (4, 4, 8, 2, 16), (2, 4, 10, 2, 32), (1, 8, 12, 1, 1)]


@pytest.mark.parametrize(("case", "seed"), itertools.product(CASES, range(4)))
def test_the_least_step_time_is_that_of_alpas_search(case, seed):
    hosts, devices, num_layers, num_configs, num_microbatches = case
    tables = random_tables(hosts, devices, num_layers, num_configs, seed)
    found = search_tables(tables, hosts * devices, num_microbatches)
    best, _ = training_dp(
        num_layers,
        hosts * devices,
        num_microbatches,
        tables.submeshes,
        num_configs,
        tables.seconds,
        tables.max_successors,
    )
    assert found.optimal and found.step_seconds == pytest.approx(best, rel=1e-5)


def test_no_plan_of_either_where_memory_has_room_for_none():
    tables = random_tables(1, 4, 5, 2, seed=0, most=0)
    assert search_tables(tables, 4, 4).status == "infeasible"
    assert not np.isfinite(
        training_dp(5, 4, 4, tables.submeshes, 2, tables.seconds, tables.max_successors)[0]
    )


def test_alpas_whole_path_from_layers_to_stages_chooses_as_well():
    """Its search space, its dynamic programme and its assembly of stages, with our tables in the
    place of its profiler."""
    tables, num_microbatches = random_tables(2, 4, 6, 3, seed=7), 8
    method = PipeshardParallel(
        devices=mesh(2, 4),
        num_micro_batches=num_microbatches,
        layer_option=ManualLayerOption(),
        stage_option=AutoStageOption(submesh_logical_shape_space="same_as_physical"),
    )
    one = AutostagingTables(
        tables.submeshes,
        tuple(choices[:1] for choices in tables.choices),
        tables.seconds[..., :1],
        tables.max_successors[..., :1],
    )
    with autostaging_tables(one.seconds, one.max_successors) as asked:
        option = compile_method(*chain(6), method).stage_option
    assert tuple(map(tuple, asked["submeshes"])) == tables.submeshes
    theirs = [
        (ids, tables.submeshes.index(tuple(shape)), 0)
        for ids, shape in zip(
            option.forward_stage_layer_ids, option.submesh_physical_shapes, strict=True
        )
    ]
    found = search_tables(one, 8, num_microbatches)
    assert value(one, theirs, num_microbatches) == pytest.approx(found.step_seconds, rel=1e-5)


FAMILIES = sorted(DATA.glob("autostaging-*.npz"))


def test_there_are_tables_of_three_families():
    assert len(FAMILIES) == 3


@pytest.mark.parametrize("file", FAMILIES, ids=lambda file: file.stem)
def test_on_the_tables_of_a_paper_model_the_step_time_is_that_of_alpas_search(file):
    """Of 16 A100 GPUs, by the profile of the model
    (``benchmarks/papers/capture/autostaging_tables.py``)."""
    data = np.load(file)
    submeshes = tuple((int(hosts), int(devices)) for hosts, devices in data["submeshes"])
    choices = tuple(
        tuple(StageChoice(int(dp), int(tp), "full", True) for dp, tp in here if dp)
        for here in data["degrees"]
    )
    tables = AutostagingTables(
        submeshes,
        choices,
        data["seconds"].astype(np.float64),
        data["max_successors"].astype(np.int64),
    )
    num_layers, num_configs, num_microbatches = (
        tables.seconds.shape[0],
        tables.seconds.shape[3],
        int(data["num_microbatches"]),
    )
    found = search_tables(tables, 16, num_microbatches)
    best, stages = training_dp(
        num_layers,
        16,
        num_microbatches,
        submeshes,
        num_configs,
        tables.seconds,
        tables.max_successors,
    )
    assert found.status == "ok" and found.step_seconds == pytest.approx(best, rel=1e-5)
    theirs = [(range(*layers), submesh, config) for layers, submesh, config in stages]
    assert value(tables, theirs, num_microbatches) == pytest.approx(found.step_seconds, rel=1e-5)
