"""Predicted step time and peak memory against published runs of Alpa on AWS p3.16xlarge (eight V100
16 GB per node, 25 Gb/s between nodes).

    python benchmarks/published_runs.py -o benchmarks/results/2026-01-31-published-runs.json

Every case whose configuration is on record (model, batch, micro-batches, stages, degrees) is built
as a plan, every stage is compiled for the V100 target, and one step is simulated from the compiled
programs' work with the sourced rates and efficiencies of the target file; replicas sum their
gradients after the last micro-batch, as Alpa's do (``summed_once``). Nothing is fitted to these
runs, and no case is left out.

Peaks are what the compiled stages need in Alpa's runtime (``capture.alpa.memory``): GPT and the
mixture of experts have parameters and gradients in float16 and a float32 master copy that replicas
split. The runs on one stage ("intra-op only", those with published peaks) were of
``ShardParallel``, which runs the forward and the backward pass of a micro-batch as one program: so
it is compiled here (``one_program_bytes``). Layers are recomputed as in the runs: in all but
Wide-ResNet on one stage, whose script has an option for it that it does not use. What the same
plans need in the native runtime, where the backward pass is a program of its own, stands beside it.

Published: throughput in TFLOPS per GPU (OSDI'22 artifact of Alpa, reference results), peak memory
in GiB, largest over GPUs (same file). TFLOPS are turned into seconds with the formulas of Alpa's
benchmark (``alpa/util.py``), which count the recomputation of activations.

What differs: today's XLA instead of that of 2022; no Alpa auto-sharding, which chose itself what
the stages in ``Case.undecided`` split: here they split the batch, or tensors, as is written below;
where they split the batch and that needs more than the 16 GB of the GPUs, the run did something
else, and the peak with all tensors split instead is there too. Alpa rematerialises per layer of its
own (several blocks), we per block; for the mixture of experts Alpa splits experts over the devices
that split the batch, ours both follow the tensor-parallel degree, so that activations are summed
and every device computes all that is no product: up to a third too slow; Alpa's times were
measured, ours are sums over kernels in which nothing overlaps, as XLA of 2022 scheduled GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from capture import environment

if TYPE_CHECKING:
    from capture.measured.stage_cost import StageCost
    from capture.plan.choices import Remat
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan
    from profiling_runs.measurements import Measurements
    from profiling_runs.verify import Verification

TARGET = "v100-32g"
GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Case:
    """One published run.

    Attributes:
        model, size: Of the zoo.
        num_blocks: Residual or transformer blocks, one layer each.
        stages: Alpa layers per stage.
        degrees: (data, tensor) parallel per stage.
        global_batch, num_microbatches: Of a step.
        tflops_per_gpu: Published; None if only the peak is.
        peak_gib: Published; None if only the throughput is.
        kind: The column of the published table.
        remat: Of all stages.
        undecided: Stages of several devices for which the run left Alpa's solver to choose what to
            split.
    """

    model: str
    size: str
    num_blocks: int
    stages: tuple[int, ...]
    degrees: tuple[tuple[int, int], ...]
    global_batch: int
    num_microbatches: int
    tflops_per_gpu: float | None
    peak_gib: float | None
    kind: str
    remat: Remat = "full"
    undecided: tuple[int, ...] = ()

    @property
    def master_copy(self) -> bool:
        """Whether Alpa's suite trains it in 16 bits."""
        return self.model != "wide_resnet"

    @property
    def num_gpus(self) -> int:
        return sum(dp * tp for dp, tp in self.degrees)

    @property
    def name(self) -> str:
        return f"{self.model} {self.size}, {self.num_gpus} GPUs, {self.kind}"


def _gpt(
    size: str,
    blocks: int,
    stages: tuple[int, ...],
    degrees: Any,
    microbatches: int,
    tflops: float,
    peak: float | None,
    kind: str,
    **more: Any,
) -> Case:
    return Case(
        "gpt", size, blocks, stages, tuple(degrees), 1024, microbatches, tflops, peak, kind, **more
    )


CASES = (
    # One stage over all GPUs ("intra-op only"): throughput and peak are both published.
    _gpt("350M", 24, (1,), [(1, 1)], 64, 46.2, 11.51, "intra-op only"),
    _gpt("760M", 24, (1,), [(2, 1)], 64, 59.5, 9.46, "intra-op only"),
    _gpt("1.3B", 24, (1,), [(4, 1)], 64, 58.4, 11.04, "intra-op only"),
    _gpt("2.6B", 32, (1,), [(4, 2)], 32, 50.8, 12.30, "intra-op only"),
    _gpt("6.7B", 32, (1,), [(2, 8)], 64, 48.4, 11.18, "intra-op only"),
    # Plans of Alpa's search.
    _gpt("760M", 24, (3, 3), [(1, 1)] * 2, 128, 57.9, None, "Alpa"),
    _gpt("1.3B", 24, (3, 3), [(2, 1)] * 2, 128, 58.2, None, "Alpa"),
    _gpt(
        "2.6B", 32, (2, 2, 4), [(2, 1), (2, 1), (4, 1)], 128, 61.6, None, "Alpa", undecided=(1, 2)
    ),
    _gpt("6.7B", 32, (4, 4), [(2, 4)] * 2, 64, 60.0, None, "Alpa"),
    _gpt("15B", 48, (4,) * 4, [(2, 4)] * 4, 128, 59.9, None, "Alpa"),
    _gpt("39B", 48, (1,) * 16, [(1, 4)] * 16, 1024, 57.0, None, "Alpa"),
    Case("moe", "1.3B", 16, (4, 4), ((1, 2),) * 2, 1024, 32, 39.9, None, "Alpa"),
    Case("moe", "2.4B", 16, (4, 4), ((1, 4),) * 2, 1024, 32, 45.8, None, "Alpa"),
    Case("moe", "10B", 16, (4, 4), ((1, 8),) * 2, 1024, 16, 45.4, None, "Alpa", undecided=(0, 1)),
    Case(
        "moe",
        "27B",
        16,
        (1,) * 8,
        ((1, 4),) * 8,
        1024,
        128,
        38.8,
        None,
        "Alpa",
        undecided=tuple(range(8)),
    ),
    Case(
        "wide_resnet", "250M", 16, (16,), ((1, 1),), 1536, 48, 8.30, 11.94, "intra-op only", "none"
    ),
    Case(
        "wide_resnet",
        "500M",
        16,
        (16,),
        ((2, 1),),
        1536,
        32,
        None,
        12.83,
        "intra-op only",
        "none",
        (0,),
    ),
    Case("wide_resnet", "1B", 16, (16,), ((1, 4),), 1536, 24, 8.16, None, "Alpa", undecided=(0,)),
    Case(
        "wide_resnet",
        "2B",
        16,
        (8, 8),
        ((4, 1), (1, 4)),
        1536,
        24,
        8.04,
        None,
        "Alpa",
        undecided=(0,),
    ),
    Case(
        "wide_resnet",
        "4B",
        16,
        (5, 4, 7),
        ((4, 1), (4, 1), (8, 1)),
        1536,
        32,
        6.76,
        None,
        "Alpa",
        undecided=(2,),
    ),
    Case(
        "wide_resnet",
        "6.8B",
        16,
        (5, 4, 4, 3),
        ((8, 1),) * 4,
        1536,
        32,
        6.60,
        None,
        "Alpa",
        undecided=(1, 2, 3),
    ),
)


def gpt_flops(case: Case, width: int, seq_len: int, vocab_size: int) -> float:
    """Of a step, as ``alpa.util.compute_gpt_tflops`` counts them: 4 x forward where activations are
    made again, the head apart."""
    tokens = case.global_batch * seq_len
    return (
        96 * tokens * case.num_blocks * width**2 * (1 + seq_len / (6 * width))
        + 6 * tokens * width * vocab_size
    )


def moe_flops(
    case: Case, width: int, seq_len: int, vocab_size: int, num_experts: int, group: int, ratio: int
) -> float:
    """Of a step, as ``alpa.util.compute_moe_tflops``: half of the blocks have experts."""
    tokens = case.global_batch * seq_len
    attention = 8 * tokens * width**2 + 4 * tokens * seq_len * width
    dense = attention + 4 * ratio * tokens * width**2
    routed = (
        attention
        + 4 * ratio * tokens * width**2
        + 2 * tokens * width * num_experts
        + 4 * tokens * group
        + 8 * tokens * width * group
    )
    return 4 * case.num_blocks / 2 * (dense + routed) + 6 * tokens * width * vocab_size


def plan_of(case: Case) -> Plan:
    """The published configuration as a plan."""
    from capture.machine.cluster import Cluster
    from capture.model.workload import WorkloadSpec
    from capture.plan.choices import StageChoice
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan

    per_node = min(case.num_gpus, GPUS_PER_NODE)
    cluster = Cluster((per_node,) * (case.num_gpus // per_node), TARGET)
    dtype = "" if case.model == "wide_resnet" else "&dtype=float16"
    workload = WorkloadSpec.parse(f"models/{case.model}.py:{case.model}?size={case.size}{dtype}")
    blocks_per_layer, stages, first, device = case.num_blocks // sum(case.stages), [], 0, 0
    for layers, (dp, tp) in zip(case.stages, case.degrees, strict=True):
        stop = first + layers * blocks_per_layer
        stages.append(
            Stage(
                first,
                stop,
                tuple(range(device, device + dp * tp)),
                StageChoice(dp, tp, case.remat, dp > 1),
            )
        )
        first, device = stop, device + dp * tp
    return Plan(
        cluster,
        first,
        tuple(stages),
        case.global_batch,
        case.num_microbatches,
        "1f1b",
        workload=workload,
    )


def measure(
    case: Case, store: Any, workers: int, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Compile the case, simulate a step, and put both beside what was published."""
    from capture.machine.cluster import Cluster
    from profiling_runs.measurements import open_measurements
    from profiling_runs.pools.where import Where
    from profiling_runs.question import ProfileQuestion
    from profiling_runs.verify import verify

    plan = plan_of(case)
    largest = max(stage.num_devices for stage in plan.stages)
    measurements = open_measurements(
        ProfileQuestion(plan.workload, Cluster((largest,), TARGET), 8),
        store=store,
        where=Where(workers),
        progress=progress,
    )
    found = verify(plan, measurements)
    by_tensors = with_tensors_split(plan, case.undecided)
    peak_by_tensors = None
    if by_tensors != plan:
        peak_by_tensors = peak_gib(case, verify(by_tensors, measurements), measurements)
    timeline = replace(found, costs=summed_once(plan, found.costs)).timeline()
    assert timeline is not None, f"{TARGET} has rates"
    seconds = float(timeline.step_seconds)
    flops = published_flops(case, found)
    predicted = flops / seconds / case.num_gpus / 1e12
    peak = peak_gib(case, found, measurements)
    return {
        **asdict(case),
        "date": date.today().isoformat(),
        "name": case.name,
        "num_gpus": case.num_gpus,
        "predicted_step_seconds": seconds,
        "published_step_seconds": None
        if case.tflops_per_gpu is None
        else flops / case.tflops_per_gpu / 1e12 / case.num_gpus,
        "predicted_tflops_per_gpu": predicted,
        "step_time_error_fraction": None
        if case.tflops_per_gpu is None
        else case.tflops_per_gpu / predicted - 1,
        "predicted_peak_gib": peak,
        "predicted_peak_gib_if_tensors_are_split": peak_by_tensors,
        "our_runtime_peak_gib": max(found.peak_bytes_per_device) / GIB,
        "peak_error_fraction": None if case.peak_gib is None else peak / case.peak_gib - 1,
        "bubble_fraction_per_stage": [float(fraction) for fraction in timeline.bubble_fraction],
    }


def summed_once(plan: Plan, costs: Sequence[StageCost]) -> list[StageCost]:
    """The costs of stages whose replicas sum their gradients after the last micro-batch, as Alpa's
    do (``grad_acc_rewrite``), and not in every backward pass. Nothing hides what they send: the
    order in which today's compiler begins it is left out."""
    found = []
    for stage, cost in zip(plan.stages, costs, strict=True):
        replicas = stage.choice.data_parallel, stage.choice.tensor_parallel
        forward, backward, update = cost.forward_work, cost.backward_work, cost.update_work
        sums = tuple(
            one
            for one in backward.collectives
            if replicas[0] > 1 and (one.group_size, one.stride) == replicas
        )
        others = tuple(one for one in backward.collectives if one not in sums)
        found.append(
            replace(
                cost,
                forward_work=forward.sending(forward.collectives),
                backward_work=backward.sending(others),
                update_work=update.sending(update.collectives + sums),
            )
        )
    return found


def with_tensors_split(plan: Plan, stages: Sequence[int]) -> Plan:
    """The plan with tensor parallelism alone in some of its stages."""

    def split(stage: Stage) -> Stage:
        return replace(
            stage,
            choice=replace(
                stage.choice,
                data_parallel=1,
                tensor_parallel=stage.num_devices,
                shard_optimizer=False,
            ),
        )

    return plan.with_(
        stages=tuple(split(stage) if s in stages else stage for s, stage in enumerate(plan.stages))
    )


def peak_gib(case: Case, found: Verification, measurements: Measurements) -> float:
    """The largest over devices, in Alpa's runtime."""
    from capture.alpa.memory import alpa_replay

    if len(found.plan.stages) == 1:
        return one_program_bytes(case, found.plan, found, measurements) / GIB
    return (
        max(
            alpa_replay(
                found.plan, found.stages, master_copy=case.master_copy
            ).peak_bytes_per_device
        )
        / GIB
    )


def one_program_bytes(
    case: Case, plan: Plan, found: Verification, measurements: Measurements
) -> int:
    """Per device, of a plan of one stage as Alpa's ``ShardParallel`` runs it.

    What stays is there from the start of the step: parameters, gradients, state, and all
    micro-batches' inputs. Beside it the larger of what the program of both passes and what the
    update needs: temporaries and results. Every replica accumulates its own gradients in place, and
    they are summed there after the last micro-batch (Alpa's ``grad_acc_rewrite``): so a replica is
    compiled alone. Temporaries are those of the zoo's model, which has float32 parameters and
    computes its loss and attention weights in float32; Alpa's do not.
    """
    import jax

    from capture.alpa.memory import with_master_copy
    from capture.measured.profile import StageConfig
    from capture.plan.choices import StageChoice

    whole = StageConfig.of(plan.stages[0], plan.microbatch_size)
    replica = StageChoice(1, whole.choice.tensor_parallel, whole.choice.remat)
    config = replace(
        whole, choice=replica, microbatch_size=plan.microbatch_size // whole.choice.data_parallel
    )
    programs = measurements.backend.programs(config)
    params, batch = (
        programs.param_structs(programs.params),
        programs.batch_structs(programs.layers.batch),
    )

    def accumulate(params: Any, batch: Any, accumulated: Any) -> Any:
        def loss_of(params: Any) -> Any:
            (loss,) = programs.layers(params, [], batch, remat=case.remat)
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return loss, [
            total + gradient for total, gradient in zip(accumulated, gradients, strict=True)
        ]

    shardings = (programs.replicated, [p.sharding for p in params])
    both = measurements.backend.compiler_of(config)(
        accumulate, (params, batch, params), donate=(2,), out_shardings=shardings
    )
    stage = found.stages[0]
    held, state = stage.params_bytes, stage.optimizer_bytes
    if case.master_copy:
        held, state = with_master_copy(held, state, whole.choice)
    inputs = plan.num_microbatches * sum(stage.batch_bytes.values())
    return 2 * held + state + max(inputs + both.transient_bytes, stage.transient_bytes["update"])


def published_flops(case: Case, found: Any) -> float:
    """FLOPs of a step by the formula behind the published TFLOPS; of Wide-ResNet those of the
    compiled programs."""
    graph = found.graph
    if case.model == "wide_resnet":
        works = [
            (cost.forward_work.flops + cost.backward_work.flops) * dp * tp
            for cost, (dp, tp) in zip(found.costs, case.degrees, strict=True)
        ]
        return case.num_microbatches * float(sum(works))
    (vocab_size, width), seq_len = _largest_embedding(graph), graph.batch[0].shape[1]
    if case.model == "gpt":
        return gpt_flops(case, width, seq_len, vocab_size)
    experts = max(
        param.shape[0] for param in graph.params if len(param.shape) == 3 and "expert" in param.name
    )
    return moe_flops(case, width, seq_len, vocab_size, experts, group=2048, ratio=8)


def _largest_embedding(graph: Any) -> tuple[int, int]:
    return next(param.shape for param in graph.params if "token_embedding" in param.name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only those whose names contain one of these"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="a document that has the rows of the other cases",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    environment.prepare(num_devices=GPUS_PER_NODE, platform="cuda")
    from capture.measured.store import Store

    store = Store(options.store)
    rows = (
        {row["name"]: row for row in json.loads(options.record.read_text())["rows"]}
        if options.record
        else {}
    )
    chosen = [
        case
        for case in CASES
        if not options.cases or any(text in case.name for text in options.cases)
    ]
    for number, case in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {case.name}", file=sys.stderr)
        rows[case.name] = measure(case, store, options.workers, lambda what, done, total: None)
    ordered = [rows[case.name] for case in CASES if case.name in rows]
    document = {
        "benchmark": "published_runs",
        "date": date.today().isoformat(),
        "target": TARGET,
        "simulated": True,
        "versions": environment.versions("cuda"),
        "rows": ordered,
        "step_time": summary([row["step_time_error_fraction"] for row in ordered]),
        "peak": summary([row["peak_error_fraction"] for row in ordered]),
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2) if options.json else as_text(document))
    return 0


def summary(errors: list[float | None]) -> dict[str, Any]:
    """Mean and largest absolute error of those that have a published value."""
    known = [abs(error) for error in errors if error is not None]
    return {
        "num_cases": len(known),
        "mean_abs_error_fraction": mean(known) if known else None,
        "max_abs_error_fraction": max(known) if known else None,
    }


def as_text(document: dict[str, Any]) -> str:
    from capture.cli.output import table

    rows = [
        [
            row["name"],
            "-"
            if row["published_step_seconds"] is None
            else f"{row['published_step_seconds']:.3g}",
            f"{row['predicted_step_seconds']:.3g}",
            "-"
            if row["step_time_error_fraction"] is None
            else f"{row['step_time_error_fraction']:+.0%}",
            "-" if row["peak_gib"] is None else row["peak_gib"],
            "-" if row["predicted_peak_gib"] is None else f"{row['predicted_peak_gib']:.2f}",
            "-" if row["peak_error_fraction"] is None else f"{row['peak_error_fraction']:+.0%}",
        ]
        for row in document["rows"]
    ]
    lines = [
        table(
            [
                "case",
                "published s",
                "simulated s",
                "off by",
                "published GiB",
                "compiled GiB",
                "off by",
            ],
            rows,
        )
    ]
    for what in ("step_time", "peak"):
        found = document[what]
        if found["num_cases"]:
            lines.append(
                f"{what.replace('_', ' ')}: mean |error| {found['mean_abs_error_fraction']:.0%}, "
                f"max {found['max_abs_error_fraction']:.0%} "
                f"of {found['num_cases']} cases"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
