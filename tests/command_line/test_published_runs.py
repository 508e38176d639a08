"""The benchmark that holds simulated seconds against published runs: which rows it can express,
and what it says of many rows together."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks import published_rows, published_runs_2025, published_summary
from benchmarks.recipe_options import recipe_options
from capture.machine.target import Target
from capture.measured.stage_cost import NO_COST
from capture.measured.store import Store
from capture.measured.work import Collective, Kernel, ProgramWork
from capture.model.workload import WorkloadSpec

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = REPOSITORY / "benchmarks" / "published_runs_sample.json"
ROWS = json.loads(SAMPLE.read_text())["rows"]


def changed(**parts):
    """A row that can be expressed, with fields of some of its parts changed."""
    row = copy.deepcopy(ROWS[0])
    for name, value in parts.items():
        row[name] = {**row[name], **value} if isinstance(value, dict) else value
    return row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_rows_of_the_sample_are_plans(row):
    found = published_rows.express(row)
    hardware, parallel = row["hardware"], row["parallelism"]
    assert sum(found.nodes) == hardware["devices"] == found.choice.num_devices
    assert found.choice.data_parallel == parallel["dp"] * parallel["fsdp"]
    assert found.choice.shard_params and found.choice.remat == "none", "the model keeps by name"
    options = WorkloadSpec.parse(found.workload).arguments
    assert options["saved"] == "query_proj+key_proj+value_proj"
    assert (options["width"], options["vocab_size"]) == (8192, row["model"]["vocab"])
    assert bool(found.differs) == (parallel["dp"] > 1), "groups of replicas have no plan"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"complete": False}, "not complete"),
        ({"task": "sft"}, "the task is sft"),
        ({"model": {"experts": 64}}, "64 experts"),
        ({"dtype": {"quantization": "int8"}}, "quantised (int8)"),
        ({"dtype": {"compute": "fp8"}}, "computes in fp8"),
        ({"parallelism": {"cp": 8}}, "context parallelism of degree 8"),
        ({"parallelism": {"vpp": 5}}, "virtual pipeline stages of degree 5"),
        ({"parallelism": {"pp": 4}}, "a pipeline of 4 stages"),
        ({"model": {"sliding_window": 1024}}, "windows of 1024"),
        ({"model": {"glu_mats": 2}}, "no gated feed-forward"),
        ({"model": {"ffn": None}}, "shape is not all known"),
        ({"hardware": {"kind": "mi300x"}}, "no target describes mi300x"),
        ({"remat": {"policy": "some list"}}, "not known: some list"),
        ({"remat": {"policy": "full", "method": "block"}}, "not known: full"),
        ({"global_batch": 100}, "128 replicas do not divide a batch of 100"),
        ({"global_batch": None}, "the global batch is None"),
    ],
)
def test_what_cannot_be_expressed_is_said(parts, said):
    (reason,) = published_rows.express(changed(**parts))
    assert said in reason


def test_all_reasons_are_said_at_once():
    row = changed(complete=False, model={"experts": 8}, parallelism={"pp": 2})
    assert len(published_rows.express(row)) == 3


@pytest.mark.parametrize(
    ("remat", "kept", "plan"),
    [
        ({"policy": "nothing_saveable, scan over layers"}, None, "full"),
        ({"policy": "none"}, None, "none"),
        (
            {"policy": "save_dot_with_context_except_mlp"},
            "query_proj+key_proj+value_proj+context+out_proj",
            "none",
        ),
        (
            {"policy": "custom", "tensors": {"qkv_proj": "device", "mlpwo": "remat"}},
            "query_proj+key_proj+value_proj",
            "none",
        ),
        ({"policy": "custom", "tensors": {"decoder_layer_input": "device"}}, None, "full"),
        ({"policy": "custom: out_proj to host, rest recomputed"}, "out_proj", "none"),
    ],
)
def test_what_a_policy_keeps(remat, kept, plan):
    found = published_rows.express(changed(remat=remat))
    assert WorkloadSpec.parse(found.workload).arguments.get("saved") == kept
    assert found.choice.remat == plan


def test_what_a_plan_does_otherwise_is_said():
    row = changed(
        remat={"policy": "custom", "tensors": {"query_proj": "offload"}},
        parallelism={"dp": 2, "fsdp": 32, "tp": 2},
        optimizer={"mu_dtype": "bfloat16"},
        flags={"loss": "fused blockwise"},
        framework="torchtitan (PyTorch)",
    )
    said = " ".join(published_rows.express(row).differs)
    for words in ("groups", "offloads", "along the sequence", "first moment", "fused", "by XLA"):
        assert words in said
    assert published_rows.express(ROWS[0]).differs == ()


def answer(name, published, at_one, family="v6e, trainer, model", is_of_jax=True):
    """A row of a result whose seconds are ``at_one`` / level."""
    seconds = {f"{level:.2f}": at_one / level for level in published_summary.LEVELS}
    return {
        "id": name,
        "family": family,
        "is_of_jax": is_of_jax,
        "published": {"seconds": published, "peak_bytes": None},
        "configuration": {
            "workload": "m.py:f?seq_len=10",
            "global_batch": 8,
            "nodes": [4],
            "target": "v6e",
        },
        "simulated": {
            "seconds": at_one,
            "link_seconds": 0.0,
            "exposed_seconds": 0.0,
            "peak_bytes": 1e9,
        },
        "whole": None,
        "seconds_by_level": seconds,
        "error_fraction": at_one / published - 1,
        "unfitted_error_fraction": at_one / published - 1,
    }


def test_a_level_is_fitted_on_some_families_and_judged_on_others():
    rows = [
        answer("a", 1.0, 0.8),
        answer("b", 2.0, 1.6),
        answer("c", 1.0, 0.4, "tpu7x, other, model"),
        answer("d", 1.0, 0.1, "h100, torch, model", is_of_jax=False),
    ]
    found = published_summary.fitted(rows, ["trainer"])
    assert found["level"] == 0.8 and found["fitted_on"] == ["v6e, trainer, model"]
    assert found["errors"]["mean_abs_error_fraction"] == pytest.approx(0)
    assert found["unfitted_errors"]["mean_error_fraction"] == pytest.approx(-0.2)
    assert list(found["left_out"]) == ["tpu7x, other, model"], "those of PyTorch are no judge"
    assert found["all_left_out"]["mean_error_fraction"] == pytest.approx(-0.5)
    assert "no family" in published_summary.fitted(rows, ["gpu"])["because"]


def test_pairs_that_differ_clearly_are_put_in_order():
    """Of a and b 30 %, in the right order; of a and c 30 %, in the wrong one; b and c 0 %."""
    rows = [answer("a", 1.0, 1.0), answer("b", 1.3, 1.1), answer("c", 1.3, 0.9)]
    assert published_summary.right_order(rows) == {"num_pairs": 2, "num_right": 1}
    rows[1]["family"] = "v6e, trainer, another"
    assert published_summary.right_order(rows)["num_pairs"] == 1, "of one model only"


def test_families_and_frameworks_stand_apart(capsys):
    rows = [
        answer("a", 1.0, 0.8),
        answer("b", 1.0, 1.3, "h100, torch, model", is_of_jax=False),
        {"id": "c", "family": "x", "is_of_jax": True, "reasons": ["64 experts", "int8"]},
    ]
    found = {each["family"]: each for each in published_summary.families(rows)}
    assert found["all whose program XLA scheduled"]["max_abs_error_fraction"] == pytest.approx(0.2)
    assert found["all of PyTorch"]["mean_error_fraction"] == pytest.approx(0.3)
    text = published_summary.as_text(rows)
    assert "c: 64 experts; int8" in text and "-20.0%" in text
    picture = ElementTree.fromstring(published_summary.picture(rows))
    titles = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert "a: -20.0%" in titles and "b: +30.0%" in titles


@pytest.mark.slow
def test_windows_of_layers_give_the_seconds_of_the_whole(tmp_path):
    """A small model on two devices that are not there: compiled with 2 and with 4 layers, and
    whole; and the row is taken from the result where nothing changed."""
    row = changed(
        id="small",
        hardware={"devices": 2, "nodes": 1, "devices_per_node": 2},
        model={"layers": 8, "d_model": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512}
        | {"vocab": 512},
        sequence_length=256,
        global_batch=4,
        parallelism={"fsdp": 2},
        measured={"seconds_per_step": 1.0},
    )
    options = published_runs_2025.Options((2, 4), Store(tmp_path / "store.db"), 0, tmp_path)
    found = published_runs_2025.answered(row, {}, options, whole=True)
    by_windows, whole = found["simulated"], found["whole"]
    assert by_windows["seconds"] == pytest.approx(whole["seconds"], rel=0.01)
    assert by_windows["peak_bytes"] == pytest.approx(whole["peak_bytes"], rel=0.1)
    parts = by_windows["computing_seconds"] + by_windows["exposed_seconds"]
    assert by_windows["seconds"] == pytest.approx(parts, rel=0.02)
    assert found["error_fraction"] == pytest.approx(by_windows["seconds"] - 1.0)
    marked = {"small": {**found, "date": "then"}}
    again = published_runs_2025.answered(row, marked, options, whole=True)
    assert again["date"] == "then", "nothing is compiled again"
    row["global_batch"] = 8
    assert published_runs_2025.answered(row, marked, options, whole=False)["date"] != "then"


@pytest.mark.parametrize(
    ("flags", "some", "unknown"),
    [
        ({}, {}, ()),
        ({"xla_flags": ["--xla_a=true", "--xla_b=7"]}, {"xla_a": True, "xla_b": 7}, ()),
        ({"scoped_vmem_kib": 98304}, {"xla_tpu_scoped_vmem_limit_kib": 98304}, ()),
        (
            {"xla_flag_groups": ["DISABLE_COLLECTIVE_MATMUL", "NEW_GROUP"]},
            {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000},
            ("NEW_GROUP",),
        ),
        (
            {"xla_flags": ["reduce-scatter and all-reduce on SparseCore"]},
            {
                "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
                "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
            },
            (),
        ),
        ({"xla_flags": ["see the script"]}, {}, ("see the script",)),
    ],
)
def test_options_of_recipes_are_read(flags, some, unknown):
    found, left = recipe_options(flags)
    assert found.items() >= some.items() and left == unknown
    assert bool(found) == bool(some)


def test_a_row_of_a_tpu_is_compiled_with_its_own_options_alone(tmp_path):
    options = published_runs_2025.Options((2, 4), Store(), 0, tmp_path)
    row = changed(hardware={"kind": "v6e"}, flags={"xla_flags": ["--xla_tpu_a=true"]})
    own = Target.load(options.target_of(published_rows.express(row)))
    assert own.run_options == {"xla_tpu_a": True}
    assert own.rates == Target.load("v6e").rates
    none = changed(hardware={"kind": "v6e"}, flags={})
    assert Target.load(options.target_of(published_rows.express(none))).run_options == {}
    assert (
        options.target_of(published_rows.express(ROWS[0])) == published_rows.express(ROWS[0]).target
    )


def compiled(num_layers, flops, nbytes):
    """Windows of a plan whose programs compute and send so much in every layer."""

    def work(times):
        kernel = Kernel(0, times * flops, "bfloat16", "default", count=num_layers)
        sent = Collective("all-gather", times * nbytes, 8, 1, count=num_layers)
        return ProgramWork(0, "bfloat16", 0, 0, (sent,), kernels=(kernel,))

    cost = replace(NO_COST, forward_work=work(1), backward_work=work(2))
    return SimpleNamespace(
        plan=SimpleNamespace(num_layers=num_layers, microbatch_size=256), costs=[cost]
    )


def test_work_that_is_not_read_is_said():
    """By hand, of LLaMA 70B on 128 replicas with two examples each: 855,638,016 weights a layer."""
    configuration = published_rows.express(ROWS[0])
    weights = 8192 * (8192 + 1024) * 2 + 3 * 8192 * 28672
    flops, nbytes = 2 * weights * 2 * 8192, 2 * weights
    for fewer_flops, fewer_bytes, said in (
        (1.0, 1.0, None),
        (0.96, 0.6, None),
        (0.9, 1.0, "FLOPs a layer forward"),
        (1.0, 0.4, "bytes sent a layer backward"),
    ):
        windows = [
            compiled(layers, int(fewer_flops * flops), int(fewer_bytes * nbytes))
            for layers in (2, 4)
        ]
        found = published_runs_2025.unread(configuration, *windows)
        assert (said is None and found is None) or said in found
    rows = [answer("a", 1.0, 0.8), {**answer("b", 1.0, 0.1), "unread": "not all work was read"}]
    assert published_summary.errors_of(published_summary.compared(rows))["num_rows"] == 1
