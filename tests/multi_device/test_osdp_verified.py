"""Sharding plans that were compiled before they were promised: the compiler's number is within the
limit where the estimate's is not."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import jax
import optax
import pytest

from capture.cli.main import main
from capture.extras import install_command
from capture.machine.cluster import Cluster
from capture.machine.target import TARGETS_FOLDER, Target
from capture.model.workload import Workload, WorkloadSpec
from capture.plan.sharding import DP, ZDP, ShardingPlan
from capture.profiler.sharded_step import StepCompiler
from capture.quantities import format_bytes
from capture.runtime.sharded import shard
from recommender.osdp import ShardingQuestion, osdp
from recommender.osdp.over_step import OverStep, interval_of
from recommender.osdp.recommendation import costs_of
from recommender.osdp.result import ShardingResult
from recommender.osdp.verified import fastest_compiled

GPT = "benchmarks/plain_gpt.py:gpt?activation=erf_gelu&num_blocks=1&width=64&num_heads=4&seq_len=32&vocab_size=128"


def cpu_target(folder: Path) -> str:
    """The path of a target with the rates of an H100 whose compiler is the CPU's."""
    document = json.loads((TARGETS_FOLDER / "h100.json").read_text())
    path = folder / "cpu-like.json"
    path.write_text(json.dumps({**document, "platform": "cpu", "compiler": {}}))
    return str(path)


def test_the_answer_compiles_within_the_limit_where_the_estimate_is_above_it(tmp_path):
    cluster = Cluster((8,), cpu_target(tmp_path))
    workload, options = WorkloadSpec.parse(GPT).load(), {"batch_size": 4, "smallest_bytes": 1024}
    everything = osdp(ShardingQuestion(workload, cluster, 1e9, **options), verify=False)
    # The estimate promises it with what is left to the compiler.
    limit = 1.07 * everything.plan.peak_bytes
    estimated = osdp(ShardingQuestion(workload, cluster, limit, **options), verify=False)
    assert estimated.plan.modes == everything.plan.modes
    low, high = estimated.plan.interval_bytes
    assert not estimated.compiled and low < estimated.plan.peak_bytes < high
    said = f"(estimated, not compiled: {format_bytes(low)} to {format_bytes(high)}, by what other"
    assert said in str(estimated) and str(estimated).endswith("verify=False)")
    assert estimated.headroom.high_bytes == high and estimated.headroom.coverage is None

    said: list[str] = []
    found = osdp(ShardingQuestion(workload, cluster, limit, **options), watch=said.append)
    assert found.compiled and found.peak_bytes <= limit and found.plan.interval_bytes is None
    # What is compiled lies where the estimate of the plan would have said.
    low, high = interval_of(found.plan.peak_bytes, "cpu", "float32")
    assert low <= found.peak_bytes <= high
    assert found.plan.sharded_fraction > 0 and found.plan.peak_bytes > 0
    assert f"as compiled for {cluster.target} (estimated: " in str(found)
    assert (
        said[0].startswith("compiling the train step of a plan for 4 examples per device")
        and "above the limit" in said[1]
    )
    assert found.peak_bytes == of_the_users_loop(workload, found.plan, 4)


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("", 0.06),
        ("&remat=True", 0.22),
        ("&dtype=bfloat16", 0.2),
        ("&remat=True&dtype=bfloat16", 0.22),
    ],
)
def test_an_estimate_leaves_what_the_compiler_was_seen_to_need(how, left):
    """More where a block is computed again, and then it says so."""
    workload, cluster = WorkloadSpec.parse(GPT + how).load(), Cluster((8,), "h100")

    def answer(limit: float):
        return osdp(ShardingQuestion(workload, cluster, limit, batch_size=4), verify=False)

    most = answer(1e9).plan.peak_bytes
    assert answer(1.001 * most / (1 - left)).plan.peak_bytes == most
    less = answer(0.999 * most / (1 - left)).plan
    assert less is None or less.peak_bytes < most
    assert ("steps with jax.checkpoint were seen" in str(answer(1e9))) == ("remat" in how)


def test_where_no_estimate_fits_the_least_is_said_and_compiled():
    """Of operators replicated, sharded, and in slices: the least limit that can be planned with."""
    workload, cluster = WorkloadSpec.parse(GPT).load(), Cluster((8,), "h100")
    options = {"batch_size": 4, "smallest_bytes": 1024}
    nothing = osdp(ShardingQuestion(workload, cluster, 1000, **options), verify=False)
    least = int(re.search(r"per device: ([\d,]+) bytes", nothing.why.summary)[1].replace(",", ""))
    operators, cost = costs_of(ShardingQuestion(workload, cluster, 1000, **options))
    search = OverStep(cost, operators, 1024, 4)
    assert search.least().peak_bytes == least
    for limit, status in ((least, "ok"), (least - 1, "infeasible")):
        assert search.fastest(limit).status == status


@pytest.mark.slow
def test_the_answer_for_an_absent_gpu_compiles_within_the_limit():
    """Large enough for the workspace of cuBLAS, 4 MB whatever the step, to be small."""
    if not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        pytest.skip(
            "the compiler of cuda targets is not installed: pip install 'capture-jax[cuda-targets]'"
        )
    size = "activation=erf_gelu&num_blocks=1&width=256&num_heads=4&seq_len=256&vocab_size=1024"
    workload, cluster = (
        WorkloadSpec.parse(f"benchmarks/plain_gpt.py:gpt?{size}").load(),
        Cluster((8,), "h100"),
    )
    limit = 200e6  # replicated, the step compiles to 205 MB
    found = osdp(ShardingQuestion(workload, cluster, limit, batch_size=16, smallest_bytes=1024))
    assert found.compiled and found.peak_bytes <= limit
    assert found.plan.sharded_fraction > 0 and "as compiled for h100 (estimated: " in str(found)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", marks=pytest.mark.exhaustive),
    ],
)
def test_what_blocks_compute_again_is_gone_before_the_next_one(dtype):
    """The gradients of biases and scales, which devices hold whole, are not left for the end."""
    if not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        pytest.skip(
            "the compiler of cuda targets is not installed: pip install 'capture-jax[cuda-targets]'"
        )
    workload = WorkloadSpec.parse(
        f"benchmarks/plain_gpt.py:gpt?activation=tanh_gelu&num_blocks=3&remat=True&dtype={dtype}"
    ).load()
    question = ShardingQuestion(workload, Cluster((8,), "h100"), 1e9, batch_size=8)
    plan = osdp(question, verify=False).plan
    compiler = StepCompiler(Target.load("h100"), question.where)
    compiled, _ = compiler.measure(shard(workload, plan, compiler.mesh))
    assert plan.peak_bytes < compiled < 1.12 * plan.peak_bytes


def test_a_step_far_above_its_estimate_is_an_answer_too(tmp_path, monkeypatch):
    """It leaves less than nothing as a budget for another plan, and the search ends all the
    same."""
    monkeypatch.setattr(StepCompiler, "measure", lambda self, sharded: (10**9, None))
    cluster, workload = Cluster((8,), cpu_target(tmp_path)), WorkloadSpec.parse(GPT).load()
    found = osdp(ShardingQuestion(workload, cluster, 3e6, batch_size=4, smallest_bytes=1024))
    assert found.status == "infeasible" and "compiles to 1,000,000,000 bytes" in str(found)


def of_the_users_loop(workload: Workload, plan: ShardingPlan, batch_size: int) -> int:
    """Bytes of the step as the README has it, by ``memory_analysis``."""
    sharded = shard(workload, plan, Cluster((8,), "cpu"))
    loss_fn = sharded.transform(workload.loss_fn)

    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = workload.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def placed(struct, sharding):
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    params = jax.tree.map(
        placed, jax.eval_shape(workload.init, jax.random.key(0)), sharded.shardings()
    )
    state = jax.tree.map(
        placed, jax.eval_shape(workload.optimizer.init, params), sharded.opt_state_shardings
    )
    batch = jax.eval_shape(lambda key: workload.batch(key, 8 * batch_size), jax.random.key(0))
    batch = jax.tree.map(lambda struct: placed(struct, sharded.batch_sharding), batch)
    out = (sharded.shardings(), sharded.opt_state_shardings, None)
    memory = (
        jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
        .lower(params, state, batch)
        .compile()
        .memory_analysis()
    )
    sizes = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return int(sizes)


def test_a_target_whose_compiler_is_missing_gives_an_estimate_and_says_so(monkeypatch):
    monkeypatch.setattr("capture.machine.target.find_spec", lambda name: None)
    found = osdp(
        ShardingQuestion(WorkloadSpec.parse(GPT).load(), Cluster((8,), "h100"), "1GB", batch_size=1)
    )
    assert found.status == "ok" and not found.compiled
    assert install_command(
        "cuda-targets"
    ) in found.why.uncompiled and "estimated, not compiled: " in str(found)


def test_the_command_compiles_unless_told_not_to(tmp_path, capsys):
    command = [
        "osdp",
        GPT,
        "--cluster",
        "1x8",
        "--target",
        cpu_target(tmp_path),
        "--batch",
        "1",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    assert main([*command, "--json"]) == 0
    done = capsys.readouterr()
    document = json.loads(done.out)
    assert (
        document["compiled"]
        and document["needs"]["peak_bytes"] == document["plan"]["compiled_peak_bytes"] > 0
    )
    assert document["plan"]["peak_bytes"] > 0 and "compiling the train step" in done.err
    assert (
        ShardingPlan.load(tmp_path / "plan.json").compiled_peak_bytes
        == document["needs"]["peak_bytes"]
    )
    assert main([*command, "--json", "--no-verify"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        not document["compiled"]
        and document["needs"]["peak_is"].startswith("estimated")
        and "compiled_peak_bytes" not in document["plan"]
        and document["why"]["uncompiled"] == "--no-verify"
    )


#: Estimates of plans, slower ones with less memory; the last is the one that needs least.
PLANS = [
    ShardingPlan(1, (ZDP,) * i + (DP,) * (4 - i), 1.0 + i, estimate, 1 / (1 + i))
    for i, estimate in enumerate((100, 90, 80, 70, 60))
]


def answer(limit: float, compiled) -> tuple[ShardingResult, list[int]]:
    """The answer where a plan compiles to ``compiled(estimate)`` bytes, and the estimates of what
    was compiled."""
    asked: list[int] = []

    def question(budget: float) -> ShardingResult:
        plan = next((plan for plan in PLANS if plan.peak_bytes <= budget), None)
        return ShardingResult(
            "ok" if plan else "infeasible", plan, "", False, 0, 0, why=None if plan else "estimated"
        )

    def measure(plan: ShardingPlan) -> int:
        asked.append(plan.peak_bytes)
        return compiled(plan.peak_bytes)

    found = fastest_compiled(question, lambda: PLANS[-1], measure, limit, lambda text: None)
    return found, asked


@pytest.mark.parametrize(
    ("limit", "compiled", "chosen", "asked"),
    [
        (102, lambda n: n, 100, [100]),
        (107, lambda n: n + 25, 80, [100, 80]),  # too low by as many bytes
        (107, lambda n: 5 * n // 4, 80, [100, 80]),  # too low by as large a part
        (100, lambda n: n - 15, 100, [90, 100]),  # too high: what is left is used
        (
            100,
            lambda n: n - 15 if n <= 90 else n + 5,
            90,
            [90, 100],
        ),  # and what does not fit is not
        (102, lambda n: n - 20 if n <= 60 else n + 60, 60, [100, 60, 90]),
        (55, lambda n: n - 10, 60, [60]),  # the estimate of none fits
    ],
)
def test_budgets_follow_what_was_compiled(limit, compiled, chosen, asked):
    found, tried = answer(limit, compiled)
    assert found.status == "ok" and found.plan.peak_bytes == chosen and tried == asked
    assert found.plan.compiled_peak_bytes == compiled(chosen) <= limit


def test_infeasible_is_said_with_the_compilers_number():
    found, tried = answer(102, lambda n: 2 * n)
    assert found.status == "infeasible" and found.plan is None and tried == [100, 60]
    assert "compiles to 120 bytes (estimated 60), 18 above the limit of 102." in found.why
    found, tried = answer(30, lambda n: n)
    assert found.status == "infeasible" and found.why == "estimated" and tried == [], (
        "an estimate of twice the limit is not compiled"
    )
