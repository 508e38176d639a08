"""Models of 7 to 120 billion parameters on one to eight of today's GPUs: whether they can be
trained with packs from the memory of the host, how fast, and with how many bytes there; beside
resident training, ZeRO-Infinity with the same packs, and offload of activations alone.

    python -m benchmarks.harmony_models -o RESULT.json [--target h100] [NAME[=FILE] ...]

Everything is compiled or estimated; nothing runs. A model's profile is that of its first, one of
its middle and its last block, compiled for the target, with as many middle blocks as it has: they
are one program. A layer profile (of ``capture profile --system harmony``) after the name is taken
instead of compiling. bfloat16 computes, parameters and Adam's state are float32; a step has 64
sequences, in the faster of the modes that the host holds. One search serves all host memories: they
limit only which mode may be taken.

How fast a host updates is assumed: 20 GB/s, as the paper's authors measured, and ten times that. As
instructions, one host updates for all GPUs; by the paper's rules, and for ZeRO-Infinity, every GPU
has a process that updates as fast. So the latter two compare with each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.papers.harmony.settings import bars, deeper
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.model.workload import WorkloadSpec
from capture.papers.harmony.baselines import resident, zero_infinity
from capture.plan.packs import PacksPlan
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import profile_layers
from recommender.harmony import PacksQuestion, harmony

ZOO = Path(__file__).parents[1] / "models"
MINIBATCH = 64
GPUS = (1, 2, 4, 8)
HOST_BYTES = tuple(gb * 10**9 for gb in (128, 256, 512, 1000, 2000))
#: Of weights, gradients and state that updates read and write.
UPDATE_RATES = (20e9, 200e9)
#: So many blocks are profiled.
PROFILED_BLOCKS = 3


@dataclass(frozen=True)
class Model:
    """A size of the zoo.

    Attributes:
        workload: Text with ``{blocks}``, so that few may be profiled.
        num_blocks: Layers of the whole model.
        seq_len: Tokens of an example.
    """

    workload: str
    num_blocks: int
    seq_len: int


_LLAMA = "llama.py:llama?size={size}&num_layers={{blocks}}&dtype=bfloat16"
_GPT = "gpt.py:gpt?size={size}&num_layers={{blocks}}&dtype=bfloat16"
_WIDE = "mingpt.py:mingpt?size={{blocks}}x{width}&seq_len=2048&dtype=bfloat16"
MODELS = {
    "GPT 6.9B": Model(_GPT.format(size="6.7B"), 32, 1024),
    "LLaMA 8B": Model(_LLAMA.format(size="8B"), 32, 2048),
    "GPT 15.6B": Model(_GPT.format(size="15B"), 48, 1024),
    "GPT 39.5B": Model(_GPT.format(size="39B"), 48, 1024),
    "LLaMA 70B": Model(_LLAMA.format(size="70B"), 80, 2048),
    "GPT 121B": Model(_WIDE.format(width=10240), 96, 2048),
}


def profile_of(model: Model, target: str, file: Path | None) -> LayerProfile:
    """Of all layers of a model on a target, from those of a few blocks."""
    if file is not None:
        few = LayerProfile.load(file)
    else:
        name = model.workload.format(blocks=PROFILED_BLOCKS)
        asked = LayersQuestion(WorkloadSpec.parse(f"{ZOO}/{name}"), target=target, most=4, stride=3)
        few = profile_layers(asked)
    return deeper(few, 1, model.num_blocks - few.num_layers)


def updated_at(profile: LayerProfile, rate: float) -> LayerProfile:
    """The same on a host that reads gradients, and reads and writes weights and state, so fast."""
    nbytes = zip(profile.w_bytes, profile.k_bytes, strict=True)
    return replace(profile, update_cpu_time=tuple((3 * w + 2 * k) / rate for w, k in nbytes))


def plans_of(profile: LayerProfile, server: Server) -> dict[str, PacksPlan]:
    """The best of each mode, by mode, whatever host memory it takes; none where a layer does not
    fit."""
    found = {}
    for mode in ("pp", "dp"):
        answer = harmony(PacksQuestion(profile, server, MINIBATCH, mode))
        if answer.plan is not None:
            found[mode] = answer.plan
    return found


def host_bytes(plan: PacksPlan) -> int:
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    return plan.prediction.step.host_peak_bytes


def seconds(plan: PacksPlan) -> float:
    """As instructions."""
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    return plan.prediction.step.step_seconds


def rows_of(name: str, model: Model, profile: LayerProfile, server: Server) -> list[dict[str, Any]]:
    """A model on a server, by host memory."""
    tokens = MINIBATCH * model.seq_len
    plans, rows = plans_of(profile, server), []
    for have in HOST_BYTES:
        row: dict[str, Any] = {
            "model": name,
            "gpus": server.devices,
            "host_memory_bytes": have,
            "num_parameters": sum(profile.w_bytes) // 4,
            "beside": beside(profile, server.with_(host_memory_bytes=have), plans, tokens),
        }
        held = {mode: plan for mode, plan in plans.items() if host_bytes(plan) <= have}
        if not held:
            row |= {"feasible": False, "host_bytes_needed": _least(plans)}
        else:
            mode = min(held, key=lambda mode: seconds(held[mode]))
            row |= {"feasible": True, "mode": mode, **facts(held[mode], tokens)}
        rows.append(row)
    return rows


def _least(plans: Mapping[str, PacksPlan]) -> int | None:
    return min(map(host_bytes, plans.values()), default=None)


def facts(plan: PacksPlan, tokens: int) -> dict[str, Any]:
    """What a table says of a plan."""
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    step, forward, backward = (
        plan.prediction.step,
        plan.configuration.forward,
        plan.configuration.backward,
    )
    return {
        "step_seconds": step.step_seconds,
        "tokens_per_second": tokens / step.step_seconds,
        "device_bytes": max(step.device_peak_bytes),
        "host_bytes": step.host_peak_bytes,
        "configuration": [
            forward.microbatch_size,
            len(forward.packs),
            backward.microbatch_size,
            len(backward.packs),
        ],
        "paper_tokens_per_second": tokens / plan.prediction.paper.step_seconds,
    }


def beside(
    profile: LayerProfile, server: Server, plans: Mapping[str, PacksPlan], tokens: int
) -> dict[str, Any]:
    """Other systems on the same server."""
    problem = PacksQuestion(profile, server, MINIBATCH).problem("dp")
    found = [resident(problem), resident(problem, offload_activations=True)]
    if plans:
        plan = plans.get("pp") or plans["dp"]
        found.append(zero_infinity(problem, plan.configuration))
    return {
        one.name: {
            "tokens_per_second": tokens / one.seconds if one.seconds else None,
            "host_bytes": one.host_bytes,
            "device_bytes": one.device_bytes,
            "reason": one.reason,
        }
        for one in found
    }


def gpus_of(row: Mapping[str, Any]) -> str:
    return f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--target", default="h100", help="kind of GPU (default: %(default)s)")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    options = parser.parse_args()
    rows = []
    for name, _, file in (one.partition("=") for one in options.names or MODELS):
        profile = profile_of(MODELS[name], options.target, Path(file) if file else None)
        for gpus, rate in product(GPUS, UPDATE_RATES):
            server = Server.of(Cluster.parse(f"1x{gpus}", options.target))
            found = rows_of(name, MODELS[name], updated_at(profile, rate), server)
            rows += [{**row, "update_bytes_per_second": rate} for row in found]
    claims: dict[str, dict[str, str]] = {}
    for row in rows:
        key = (
            f"{gpus_of(row)}, {row['host_memory_bytes'] // 10**9} GB, updates at "
            f"{row['update_bytes_per_second'] / 1e9:.0f} GB/s"
        )
        said = f"{row['tokens_per_second']:.0f} tokens/s" if row["feasible"] else "does not fit"
        claims.setdefault(row["model"], {})[key] = said
    largest = [row for row in rows if row["host_memory_bytes"] == HOST_BYTES[-1]]
    panels = {
        f"updates at {rate / 1e9:.0f} GB/s": (
            "tokens / s",
            [
                (
                    name,
                    {
                        gpus_of(row): row.get("tokens_per_second", "host too small")
                        for row in largest
                        if (row["model"], row["update_bytes_per_second"]) == (name, rate)
                    },
                )
                for name in claims
            ],
        )
        for rate in UPDATE_RATES
    }
    svg = bars(
        "Models that no GPU holds, streamed from 2 TB of host memory",
        f"Compiled for {options.target} and estimated; {MINIBATCH} sequences a step.",
        panels,
    )
    return finish("harmony_models", rows, options, svg, claims=claims, target=options.target)


if __name__ == "__main__":
    sys.exit(main())
