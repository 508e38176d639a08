"""Estimate what training a model needs, in seconds: parameters, gradients, optimizer state,
activations with and without recomputation, FLOPs, and on how few devices of each target that can be
held. Nothing is compiled and no device is needed.

Numbers of devices are lower bounds: no plan of that kind has fewer. Whether a plan fits, and which,
says ``capture plan``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from capture import environment
from capture.cli import options as shared
from capture.cli.output import emit, table
from capture.machine.target import Target, target_names
from capture.model.workload import WorkloadSpec
from capture.options import Option, add, at_least
from capture.quantities import counted, format_bytes, format_flops
from profiling_runs.collect import split_warnings
from profiling_runs.estimate import TRAINING_PASSES, TrainingNeed, training_need
from recommender.capture.least_state import fewest_stages

#: What is kept of a forward pass, in words.
_KEPT = {"none": "all kept", "cheap": "selective recomputation", "full": "full recomputation"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser)
    add(
        parser,
        Option(
            "target",
            "device kind, or a target file (.json) (default: all that have a memory)",
            metavar="NAME",
        ),
        Option(
            "microbatch_size",
            "examples that the loss is traced with (default: %(default)s)",
            shared.DEFAULT_MICROBATCH_SIZE,
            at_least(1),
            metavar="B",
        ),
        shared.NUM_LAYERS,
    )


def main(options: argparse.Namespace) -> int:
    targets = [
        target
        for target in map(Target.load, [options.target] if options.target else target_names())
        if target.memory is not None or options.target
    ]
    environment.prepare(num_devices=1)
    workload = WorkloadSpec.parse(options.workload).load()
    need = training_need(workload, options.microbatch_size, options.num_layers)
    fewest = [FewestDevices.of(need, target) for target in targets if target.memory is not None]
    warnings = split_warnings(workload, options.microbatch_size)
    report = EstimateReport.of(options.workload, need, fewest, warnings)
    emit(options, report, *as_text(report))
    return 0


@dataclass(frozen=True)
class FewestDevices:
    """The fewest devices of a target that can hold a model; None where no number of them is enough.

    Attributes:
        target: Name of the target.
        usable_bytes: Memory that programs may need at their peak, per device.
        any_plan: Lower bound, with all state spread evenly.
        pipeline_stages: Lower bound, with whole layers on each device and nothing sharded.
        zero3: Lower bound, a power of two, with all state sharded over replicas.
        zero3_with_activations: Estimate of the same, where each also has the activations of one
            example with full recomputation, and the parameters of a layer while it runs.
    """

    target: str
    usable_bytes: int
    any_plan: int
    pipeline_stages: int | None
    zero3: int | None
    zero3_with_activations: int | None

    @classmethod
    def of(cls, need: TrainingNeed, target: Target) -> FewestDevices:
        """Count the fewest devices of a target that says how much memory it has."""
        assert target.memory is not None, "others are left out"
        usable = target.memory.usable_bytes
        params = [tensor.nbytes for tensor in need.graph.params]
        beside = (need.activation_bytes["full"] + need.largest_layer_bytes) // (
            need.graph.microbatch_size
        )
        return cls(
            target.name,
            usable,
            -(-need.state_bytes // usable),
            fewest_stages(need.graph, params, need.optimizer_bytes, usable),
            next((n for n in _degrees(need, usable, 0)), None),
            next((n for n in _degrees(need, usable, beside)), None),
        )


def _degrees(need: TrainingNeed, usable_bytes: int, beside_bytes: int) -> Iterator[int]:
    """Yield the numbers of devices whose shards of the state fit beside so many other bytes."""
    for n in need.zero3_param_bytes:
        gathered = need.largest_layer_param_bytes if beside_bytes and n > 1 else 0
        if need.zero3_state_bytes(n) + gathered + beside_bytes <= usable_bytes:
            yield n


@dataclass(frozen=True, kw_only=True)
class EstimateReport:
    """The document of ``capture estimate``: what training a model needs, unsharded, and on how few
    devices.

    Attributes:
        workload: The model.
        num_layers, num_parameters: Sizes of the model.
        auto_layers: Whether it was cut automatically.
        parameter_bytes, gradient_bytes, optimizer_bytes: Exact.
        microbatch_size: Examples that the loss was traced with.
        activation_bytes_per_example: Bytes that are kept for the backward pass, by remat; an
            estimate.
        forward_flops_per_example: Floating-point operations of a forward pass.
        step_flops_per_example: Floating-point operations of a forward and a backward pass.
        targets: The fewest devices of each target that says how much memory it has.
        warnings: Properties of the loss that make its step another than that of one device.
    """

    workload: str
    num_layers: int
    num_parameters: int
    auto_layers: bool
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    microbatch_size: int
    activation_bytes_per_example: Mapping[str, int]
    forward_flops_per_example: int
    step_flops_per_example: int
    targets: Sequence[FewestDevices] = ()
    warnings: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        workload: str,
        need: TrainingNeed,
        fewest: Sequence[FewestDevices] = (),
        warnings: Sequence[str] = (),
    ) -> EstimateReport:
        """Return the report of a training's needs, per example where a micro-batch has several."""
        graph, size = need.graph, need.graph.microbatch_size
        return cls(
            workload=workload,
            num_layers=graph.num_layers,
            num_parameters=graph.num_parameters,
            auto_layers=need.auto_layers,
            parameter_bytes=need.param_bytes,
            gradient_bytes=need.param_bytes,
            optimizer_bytes=sum(need.optimizer_bytes),
            microbatch_size=size,
            activation_bytes_per_example={
                remat: nbytes // size for remat, nbytes in need.activation_bytes.items()
            },
            forward_flops_per_example=need.forward_flops // size,
            step_flops_per_example=TRAINING_PASSES * need.forward_flops // size,
            targets=fewest,
            warnings=warnings,
        )


def as_text(report: EstimateReport) -> Iterator[str]:
    """Yield tables of what the training needs, and of the fewest devices."""
    yield (
        f"{counted(report.num_layers, 'layer')}{' of nearly equal work' * report.auto_layers}, "
        f"{report.num_parameters:,} parameters; traced with "
        f"{counted(report.microbatch_size, 'example')}, nothing compiled"
    )
    passes = f"{TRAINING_PASSES} x forward"
    activations = [
        [f"activations, {_KEPT[way]} (--remat {way})", f"{format_bytes(n)}/example", "estimate"]
        for way, n in report.activation_bytes_per_example.items()
    ]
    rows = [
        ["parameters", format_bytes(report.parameter_bytes), "exact"],
        ["gradients", format_bytes(report.gradient_bytes), "exact"],
        ["optimizer state", format_bytes(report.optimizer_bytes), "exact"],
        *activations,
        ["forward pass", _flops(report.forward_flops_per_example), "from shapes"],
        ["forward and backward pass", _flops(report.step_flops_per_example), passes],
    ]
    yield table(["unsharded", "needs", "is"], rows)
    if not report.targets:
        yield "the target does not say how much memory it has, so no devices are counted"
        return
    yield ""
    yield table(
        ["devices", "usable", "any plan", "pipeline", "FSDP/ZeRO-3", "with activations"],
        [
            [
                each.target,
                format_bytes(each.usable_bytes),
                f">= {each.any_plan}",
                _bound(each.pipeline_stages),
                _bound(each.zero3),
                "-" if each.zero3_with_activations is None else f"~ {each.zero3_with_activations}",
            ]
            for each in report.targets
        ],
    )
    yield (
        ">= is a lower bound, of parameters, gradients and optimizer state alone: a pipeline\n"
        "stage has whole layers, FSDP a power of two devices"
    )
    yield (
        "~ is an estimate: FSDP, and one example on each device with full recomputation;\n"
        "capture plan says what fits"
    )
    if any(None in vars(each).values() for each in report.targets):
        yield "- is no number of devices: what one of them must hold at once is too large"


def _flops(flops: float) -> str:
    return f"{format_flops(flops)}/example"


def _bound(count: int | None) -> str:
    return "-" if count is None else f">= {count}"
