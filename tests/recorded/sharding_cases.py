"""The recorded cases of sharded data parallelism, operator by operator."""

from __future__ import annotations

from typing import Any

from tests.recorded import access
from tests.recorded.access import command, workload_name
from tests.recorded.bench import FILES, Bench, case


@case("osdp search")
def sharding_searches(bench: Bench) -> dict[str, Any]:
    found = {
        name: access.sharding_searched(problem, "exact")
        for name, problem in access.sharding_problems().items()
    }
    small = {
        f"{algorithm} {seed}": access.sharding_searched(
            access.small_sharding_problem(seed), algorithm
        )
        for seed in range(12)
        for algorithm in ("exact", "depth-first")
    }
    return found | small


@case("osdp strategies", sample=False)
def sharding_strategies(bench: Bench) -> dict[str, Any]:
    return {
        f"{model} {limit} {nodes}": access.strategies(model, limit, nodes)
        for model, limit, nodes in (("W&S", 16, 1), ("I&C", 8, 2))
    }


#: What is asked of ``osdp`` for one block of the plain GPT on eight devices; a mixture of modes
#: wherever less than all fits.
GPT = "plain_gpt?activation=erf_gelu&num_blocks=1&width=64&num_heads=4&seq_len=32&vocab_size=128"
LITTLE = {"smallest_bytes": 1024, "verify": False}
ONE = {**LITTLE, "batch_size": 1}
REMAT = {**ONE, "remat": True, "overlap_fraction": 0.5}
SHARDED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "replicated": (GPT, "1x8 h100", "1GB", {**LITTLE, "batch_size": 2}),
    "mixed": (GPT, "1x8 h100", "1.05MB", ONE),
    "remat and overlap": (GPT, "1x8 h100", "1.0MB", REMAT),
    "over two nodes": (GPT, "2x4 a100-40g", "1.05MB", ONE),
    "partly sliced": (GPT, "1x8 h100", "1.0MB", {**ONE, "partly": True, "granularities": (4,)}),
    "sliced": (GPT, "1x8 h100", "0.95MB", {**ONE, "granularities": (2,)}),
    "infeasible": (GPT, "1x8 v5e", "50kB", LITTLE),
    "tied": ("three_readers?depth=3&vocab=64", "1x8 v5e", "150kB", {**ONE, "smallest_bytes": 0}),
}
for _name, _arguments in SHARDED.items():
    case(f"osdp {_name}", compiles=True, timed=True)(
        lambda bench, asked=_arguments: access.sharded(*asked[:3], **asked[3])
    )


@case("osdp compiled", compiles=True, timed=True, sample=False)
def sharding_compiled(bench: Bench) -> dict[str, Any]:
    """For a target file of schema 1 with the CPU's compiler."""
    return access.sharded(
        GPT, "1x8 cpu_like.json", "1GB", emit=False, batch_size=1, smallest_bytes=1024
    )


@case("osdp command", compiles=True, timed=True)
def sharding_command(bench: Bench) -> dict[str, Any]:
    output = bench.folder / "sharding.json"
    question = f"--cluster 1x8 --target h100 --batch 2 --no-verify -o {output}"
    asked = ("osdp", workload_name("gpt?size=tiny&num_layers=1"), *question.split())
    more = "--memory 1GB --overlap 0.5 --slices 1,2"
    code, document = command(*asked, *more.split())
    refused, why = command(*asked, "--memory", "1kB")
    return {
        "answer": [
            code,
            *access.of(document, "status compiled"),
            document["plan"]["peak_bytes"],
            document["why"].get("uncompiled"),
        ],
        "refused": [refused, why["status"], why["why"]["summary"]],
        "plan": access.sharding_document_facts(document["plan"]),
        "written": access.sharding_file_facts(output),
        "old file": access.sharding_file_facts(FILES / "sharding.plan.json"),
    }


@case("h100 osdp", compiles=True, timed=True, apart=True, sample=False)
def sharding_for_h100(bench: Bench) -> dict[str, Any]:
    return access.sharded(GPT, "1x8 h100", "5.2MB", emit=False, batch_size=1, smallest_bytes=1024)
