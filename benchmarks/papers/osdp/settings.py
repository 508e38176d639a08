"""What the scripts of OSDP's evaluation share: models of Table 1's families, the two machines, and
how results are written.

The machine of eight RTX TITAN is what the authors' own measurements say (``measured_layers.json``,
from their released code): alpha and beta are fitted to the seconds of a data-parallel layer at a
batch of next to nothing, the FLOP rate to its growth with the batch, the hidden fraction of
communication to layers in ZDP mode. All throughput here is simulated from these numbers; nothing
was run.

The paper prints its throughputs as bars without numbers, and Table 1 as ranges; so models are
chosen within the ranges, and what can be compared are the statistics of its text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import documents
from benchmarks.drawing import COLORS, draw, grouped_bars
from capture.machine.cluster import Cluster, Machine
from capture.machine.link_fit import FittedLink, MeasuredCollective, fit_link, fit_overlap
from capture.machine.rates import HostLink, Link, Rates, Sourced
from capture.machine.target import Target
from capture.model.operators import OperatorModel
from capture.papers.osdp.transformer import transformer
from capture.plan.sharding import ShardingPlan
from capture.step.operator_cost import PAPER_GRANULARITY, StepCost
from recommender.osdp.exact import cheapest
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.result import plan_of

MIB, GIB = 2**20, 2**30
FOLDER = Path(__file__).parent
#: Tokens of an example: 4 of them make the activations and the FLOPs of a row of the measurements
#: (``measured_layers.json``).
SEQ_LEN, EXAMPLES_PER_ROW = 128, 4
VOCAB_SIZE = 50257  # of GPT-2, as in minGPT
LIMITS_GIB = (8, 16)


@dataclass(frozen=True)
class Setting:
    """A model of a family: (number of layers, width) in order."""

    family: str
    layers: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return "+".join(f"{count}x{width}" for count, width in self.layers)

    @property
    def model(self) -> OperatorModel:
        return transformer(
            f"{self.family} {self.name}", self.layers, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE
        )


#: Within Table 1: N&D 48-96 layers of 1024-1536, W&S 2-4 of 6144-12288, I&C 24-96 of 1024-4096.
SETTINGS = (
    Setting("N&D", ((96, 1024),)),
    Setting("N&D", ((48, 1536),)),
    Setting("N&D", ((72, 1280),)),
    Setting("N&D", ((96, 1536),)),
    Setting("W&S", ((3, 6144),)),
    Setting("W&S", ((2, 8192),)),
    Setting("W&S", ((3, 8192),)),
    Setting("W&S", ((2, 12288),)),
    Setting("I&C", ((12, 1024), (12, 2048))),
    Setting("I&C", ((24, 1024), (12, 2048), (4, 4096))),
    Setting("I&C", ((48, 1024), (24, 1536), (8, 2048))),
    Setting("I&C", ((8, 1024), (8, 2048), (8, 4096))),
)


@cache
def measured() -> Mapping[str, Any]:
    """The authors' seconds and MB per layer, [hidden size][batch row][strategy], and the answers of
    their released search."""
    return json.loads((FOLDER / "measured_layers.json").read_text())


@cache
def fitted_link() -> FittedLink:
    """Alpha and beta of the eight RTX TITAN, from data-parallel layers without a batch: one
    all-reduce of 12 h^2 parameters."""
    rows = [
        MeasuredCollective("all-reduce", measured()["devices"], 12 * h * h * 4, seconds[0][0])
        for h, seconds in zip(measured()["hidden_sizes"], measured()["seconds"], strict=True)
    ]
    return fit_link(rows, "fitted to the authors' measured layers (DP, batch row 0)")


def layer_flops(width: int) -> int:
    """Forward FLOPs of one example in one layer."""
    return sum(
        operator.flops
        for operator in transformer("", [(1, width)], seq_len=SEQ_LEN, vocab_size=1).operators[1:3]
    )


@cache
def fitted_flops_per_second() -> float:
    """Median over hidden sizes of what a data-parallel layer computes per second more for two
    further rows."""
    found = []
    for h, seconds in zip(measured()["hidden_sizes"], measured()["seconds"], strict=True):
        if h >= 1024:
            found.append(
                3 * layer_flops(h) * EXAMPLES_PER_ROW * 2 / (seconds[3][0] - seconds[1][0])
            )
    return float(np.median(found))


@cache
def fitted_overlap() -> float:
    """Fraction that layers in ZDP mode hid, over hidden sizes from 1024 on and rows 1 to 4."""
    link, n = fitted_link().link, measured()["devices"]
    compute, sent, step = [], [], []
    for h, seconds in zip(measured()["hidden_sizes"], measured()["seconds"], strict=True):
        for row in range(1, 5) if h >= 1024 else ():
            compute.append(3 * layer_flops(h) * EXAMPLES_PER_ROW * row / fitted_flops_per_second())
            sent.append(3 * (n - 1) * link.seconds(12 * h * h * 4 / n))
            step.append(seconds[row][3])
    return fit_overlap(compute, sent, step)


def limit_bytes(limit_gib: float) -> float:
    """A limit of the paper, less the overhead that the released code takes off it (800 MB)."""
    return limit_gib * GIB - measured()["overhead_MB"] * MIB


@cache
def rtx_titan() -> Target:
    """The paper's device, in a server with PCIe 3."""
    fitted, link = "fitted to the authors' measured layers", fitted_link().link
    host = Link(Sourced(1e-5, "order of one launch"), Sourced(12e9, "from the PCIe generation: 3"))
    rates = Rates(
        {"float32": Sourced(fitted_flops_per_second(), fitted)},
        Sourced(1.0, f"{fitted}: what was reached"),
        Sourced(672e9, "NVIDIA TITAN RTX datasheet"),
        Sourced(0.8, "assumed to be reached"),
        link,
        link,
        HostLink(host, host, True, "from the PCIe generation"),
    )
    return Target("rtx-titan", "NVIDIA TITAN RTX 24 GB; PCIe 3", "cuda", rates=rates)


def titan(limit_gib: float) -> Machine:
    """One server of eight RTX TITAN."""
    return Machine(Cluster((8,), "rtx-titan"), rtx_titan(), limit_bytes(limit_gib))


def servers(limit_gib: float) -> Machine:
    """Two servers of eight A100 joined by 100 Gb/s, which eight GPUs share."""
    # PyTorch has no TF32 in products unless asked.
    found = Machine.of(Cluster((8, 8), "a100-40g"), precision="highest")
    network = Link(
        found.rates.inter_node.latency_seconds,
        Sourced(100e9 / 8 / 8, "paper 4.1: 100 Gb/s between the servers, over eight GPUs"),
    )
    rates = replace(found.rates, inter_node=network)
    return replace(found, target=replace(found.target, rates=rates)).with_limit(
        limit_bytes(limit_gib)
    )


def costs(setting: Setting, machine: Machine, **options: Any) -> StepCost:
    """Our cost model with the paper's granularity and the measured overlap, unless other options
    are given."""
    return StepCost(
        setting.model,
        machine,
        **{
            "granularities": (1, PAPER_GRANULARITY),
            "overlap_fraction": fitted_overlap(),
            **options,
        },
    )


def chosen(options: argparse.Namespace) -> Iterator[tuple[Setting, int]]:
    """Models and limits that the command line asks for."""
    for setting in SETTINGS:
        for limit in LIMITS_GIB:
            if not options.only or options.only in f"{setting.family} {setting.name}":
                yield setting, limit


def throughput_picture(
    title: str,
    note: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    series: Sequence[str],
    width: int = 1250,
    height: int = 310,
) -> str:
    """A panel per memory limit: examples per second of every model by what ``row[key]`` has
    outcomes of, or why there are none."""
    panels = []
    for limit in LIMITS_GIB:
        groups = []
        for row in rows:
            if row["limit_gib"] == limit:
                bars = {
                    name: o["examples_per_second"] if o["status"] == "ok" else o["status"].upper()
                    for name, o in row[key].items()
                }
                groups.append((f"{row['family']}\n" + row["model"].replace("+", "\n"), bars))
        panels.append(grouped_bars(f"{limit} GB", "examples / s", groups, width, height))
    return draw(title, note, panels, 1, list(zip(COLORS, series, strict=False)))


def gain_statistics(gains: Sequence[float | None]) -> dict[str, Any]:
    """Mean, median and maximum over the grid, settings where one of the two does not fit left out
    (O-p)."""
    found = [gain for gain in gains if gain is not None]
    if not found:
        return {"settings": 0}
    return {
        "mean": float(np.mean(found)),
        "median": float(np.median(found)),
        "max": max(found),
        "settings": len(found),
    }


def gain(ours: float, theirs: float) -> float | None:
    """By what fraction one throughput is above another; None where either is 0."""
    return ours / theirs - 1 if ours and theirs else None


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = documents.arguments(doc)
    parser.add_argument(
        "--only", metavar="TEXT", help="of the models those whose family and name contain this"
    )
    return parser


def finish(
    name: str,
    rows: list[dict[str, Any]],
    options: argparse.Namespace,
    svg: str | None = None,
    **more: Any,
) -> int:
    """Write the document of a script, or print it."""
    fitted = {
        "alpha_seconds": fitted_link().link.latency_seconds.value,
        "bytes_per_second": fitted_link().link.bytes_per_second.value,
        "mean_error_fraction": fitted_link().mean_error_fraction,
        "flops_per_second": fitted_flops_per_second(),
        "overlap_fraction": fitted_overlap(),
    }
    return documents.finish(name, rows, options, svg, simulated=True, fitted=fitted, **more)


def fastest_at(problem: ShardingProblem, batch_size: int) -> ShardingPlan | None:
    """The fastest plan at one batch size, proven: a candidate of Algorithm 1; None if nothing
    fits."""
    options = problem.options(batch_size)
    chosen = cheapest(options, problem.memory_limit_bytes).chosen
    return None if chosen is None else plan_of(problem, batch_size, options, chosen)
