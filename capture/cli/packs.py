"""Plans of packs (Harmony): what ``capture plan --system harmony`` and ``capture explain`` do with
them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from capture.cli import asked, layers
from capture.cli import options as shared
from capture.cli.diff import compared
from capture.cli.options import Asks
from capture.cli.output import SearchEnd, outcome_of, parts_text, table
from capture.cli.question_file import noted
from capture.cli.report import shown
from capture.cli.whole import close
from capture.errors import PlanError, Violation
from capture.machine.server import Server, server_names
from capture.measured.layer_profile import UNMEASURED, LayerProfile
from capture.options import Option, options_of, taken
from capture.plan.headroom import Headroom, Peaks
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import AS_THEY_ARE, Swaps
from capture.predictor.pack_step import step_bytes
from capture.quantities import counted, format_bytes, format_rate, format_seconds
from capture.registered import REGISTERED
from capture.report.documents import ExplainReport, PageReport, PeakRow, PlanNeeds, VerifyReport
from capture.report.packs import HEADER, page, rows
from profiling_runs.collect import split_warnings
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import profile_layers, with_model_hash
from profiling_runs.packs import PackCompiler
from profiling_runs.profile_report import LayersReport
from recommender.harmony import PacksQuestion, harmony
from recommender.harmony.recommendation import (
    PacksAnswer,
    every_way,
    not_compiled,
    step_seconds_of,
)
from recommender.harmony.result import Baseline

#: Of a workload; of layers alone nothing can be compiled.
_OF_A_WORKLOAD = (
    *(option for option in layers.OPTIONS if option.name not in ("global_batch", "memory")),
    shared.NO_VERIFY,
    *shared.STORE,
)
#: What it reads.
OPTIONS = (
    shared.CLUSTER,
    shared.TARGET,
    *options_of(PacksQuestion, Swaps, LayersQuestion),
    shared.NO_VERIFY,
    *shared.STORE,
    Option(
        "layers",
        "layer profile (.json) to plan from, without a model",
        read=Path,
        metavar="FILE",
    ),
    Option(
        "machine",
        f"the server: {', '.join(server_names())}, or a file (.json); or --cluster 1xG and "
        "--target",
        metavar="NAME",
    ),
    shared.HOST_MEMORY,
    Option("baselines", "what other systems need, beside the plan", False),
)


def plan(options: argparse.Namespace) -> SearchEnd:
    """Search packs of layers.

    Raises:
        PlanError: ``plan-system`` without layers and workload, or with both; ``packs-batch``.
    """
    _check_source(options)
    question, measured = _question(options)
    return _outcome(options, question, measured, _answer(options, question, measured))


def rival(options: argparse.Namespace, seconds: float) -> SearchEnd:
    """Search packs in every way that weights may travel, beside a plan of stages.

    Args:
        options: As of ``plan``.
        seconds: Of a step of that plan. Packs that are estimated to be slower are not compiled.
    """
    question, measured = _question(options)
    ways, tried = every_way(question), list[tuple[PacksQuestion, PacksAnswer]]()
    for way, estimate in ways:
        found = [step_seconds_of(each) for _, each in tried if each.fits]
        may_win = step_seconds_of(estimate) < min([seconds, *found]) if estimate.fits else not found
        if may_win:
            tried.append((way, _answer(options, way, measured)))
    if not tried:
        way, estimate = ways[0]
        tried = [(way, not_compiled(estimate, "by estimates it is slower"))]
    way, answer = min(tried, key=lambda way: (not way[1].fits, step_seconds_of(way[1])))
    return _outcome(options, way, measured, answer)


def _question(options: argparse.Namespace) -> tuple[PacksQuestion, LayersQuestion | None]:
    """Return the question, with layers that are measured for it, and what was measured."""
    close(options, OPTIONS)
    if options.global_batch is None:
        raise PlanError.of("--system harmony needs --global-batch B.", "packs-batch")
    question = PacksQuestion(
        UNMEASURED if options.layers is None else LayerProfile.load(options.layers),
        _server(options),
        cluster=None if options.machine else asked.read_cluster(vars(options)),
        swaps=Swaps(**taken(Swaps, vars(options))),
        **taken(PacksQuestion, vars(options)),
    )
    if options.layers is not None:
        return question, None
    measured = layers.layers_question(vars(options))
    asked.prepare(measured, *filter(None, [question.cluster]))
    return replace(question, profile=profile_layers(measured, **asked.told(options))), measured


def _outcome(
    options: argparse.Namespace,
    question: PacksQuestion,
    measured: LayersQuestion | None,
    answer: PacksAnswer,
) -> SearchEnd:
    answer = noted(options, answer)
    lines, beside = _answer_lines(question, answer), dict[str, object]()
    if measured is not None:
        made = LayersReport.of(question.profile)
        lines[:0] = layers.as_text(made)
        beside["layers"], beside["failures"] = made, question.profile.made["failures"]
        beside["warnings"] = split_warnings(measured.task, _largest(answer.plan))
    if options.baselines:
        mode = answer.plan.mode if answer.plan is not None else question.modes[0]
        configuration = answer.plan.configuration if answer.plan is not None else None
        alone = replace(question, swaps=AS_THEY_ARE).problem(mode)
        beside["baselines"] = found = REGISTERED["baselines"]["packs"](alone, configuration)
        lines.append(baseline_table(found))
    took, beside["assumed"] = (
        counted(len(answer.proof.points), "simulation"),
        question.server.assumed,
    )
    found = outcome_of("packs", answer, lines, took, **beside)
    return replace(found, step_seconds=step_seconds_of(answer))


def _answer(
    options: argparse.Namespace, question: PacksQuestion, measured: LayersQuestion | None
) -> PacksAnswer:
    """Search packs; from a workload, with packs that are compiled for the target."""
    if measured is None:
        return harmony(question)
    uncompiled = "--no-verify" if options.no_verify else None
    if question.cluster is None:
        uncompiled = f"--machine {options.machine} says nothing of how to compile for it"
    compiled = None
    if not uncompiled:
        compiled = PackCompiler(measured.workload, question.profile, **asked.told(options))
    answer = harmony(question, compiled)
    if uncompiled:
        answer = not_compiled(answer, uncompiled)
    if answer.plan is not None:
        answer = replace(answer, plan=with_model_hash(answer.plan, measured))
    return answer


def _largest(plan: PacksPlan | None) -> int:
    """Return the examples of the largest micro-batches of a plan, or one."""
    if plan is None:
        return 1
    packs = plan.configuration.forward, plan.configuration.backward
    return max(each.microbatch_size for each in packs)


def explain(options: argparse.Namespace, plan: PacksPlan) -> tuple[ExplainReport, list[str]]:
    """Explain a plan of packs: its tasks in the order of issue, and what is predicted."""
    asked.refuse_unread(options, "packs")
    tasks, shown_tasks = [], []
    for task in plan.tasks().tasks:
        by = (task.source, task.gradient, task.sink)
        ways = [None if way is None else str(way.medium) for way in by]
        on_host = task.kind == "update" and plan.switches.offload
        tasks.append(
            {
                "task_id": task.id,
                "kind": task.kind,
                "layers": [task.first, task.stop - 1],
                "rank": task.rank,
                "on_host": on_host,
                "microbatch_sizes": list(task.sizes),
                **dict(zip(("input_by", "gradient_by", "output_by"), ways, strict=True)),
            }
        )
        sizes = (f"{size} x {task.sizes.count(size)}" for size in dict.fromkeys(task.sizes))
        where = f"{'host' if on_host else 'device'} {task.rank}"
        about = [task.id, task.kind, f"{task.first}-{task.stop - 1}", where]
        if task.source is None and task.stashes:
            ways[0] = "kept"
        shown_tasks.append([*about, " ".join(sizes) or "-", *(way or "-" for way in ways)])
    header = ["task", "kind", "layers", "on", "examples", "input by", "gradient by", "output by"]
    report = ExplainReport(kind="packs", needs=PlanNeeds.of(plan), tasks=tasks)
    return report, [table(header, shown_tasks), *prediction_lines(plan)]


def verify(options: argparse.Namespace, plan: PacksPlan) -> tuple[VerifyReport, PacksPlan]:
    """Compile the plan's packs for its target, and replay the step.

    Raises:
        PlanError: ``packs-page`` for a file to keep it in where nothing is predicted,
            ``packs-target``, ``plan-workload``, and those of ``streamed``.
    """
    if options.output is not None and plan.prediction is None:
        raise PlanError.of(
            "the plan has no prediction, with which its file would keep what is compiled; leave "
            "out -o.",
            "packs-page",
        )
    read = ("workload", "memory", "output", *(option.name for option in shared.STORE))
    asked.refuse_unread(options, "packs", *read)
    spec = asked.workload_of(options, plan)
    if plan.cluster is not None:
        asked.prepare(plan.cluster)
    ledger = PackCompiler(spec, **asked.told(options)).ledger(plan)
    rows = [PeakRow.of([d], peak) for d, peak in enumerate(ledger.peaks[: plan.machine.devices])]
    found = tuple(row.peak_bytes for row in rows)
    limit = options.memory or int(plan.machine.usable_bytes.value)
    predicted = plan.predicted_bytes_per_device
    alone = None if plan.prediction is None else plan.prediction.step
    if plan.prediction is not None:
        known = plan.prediction.compiled
        compiled = step_bytes(ledger, None if known is None else known.step_seconds)
        plan = replace(plan, prediction=replace(plan.prediction, compiled=compiled))
    report = VerifyReport(
        "packs",
        plan.known_cluster.target,
        found,
        None if predicted is None else tuple(predicted),
        tuple(rows),
        Headroom.of(Peaks.compiled(*found), limit),
        ledger.peak_of("host").peak_bytes,
        warnings=split_warnings(spec.load(), _largest(plan)),
        layers_alone_peak_bytes=None if alone is None else max(alone.device_peak_bytes),
    )
    return report, plan


def report(options: argparse.Namespace, plan: PacksPlan) -> tuple[PageReport, list[str]]:
    """Report what is predicted of a plan of packs: as a table, or as the page; with the layer
    profile also the trace of its step.

    Raises:
        PlanError: ``packs-model`` for a layer profile of another model or none for a trace.
    """
    read = ("memory", "output", "trace", *(["profile"] if options.trace else []))
    asked.refuse_unread(options, "packs", *read)
    from capture.predictor.pack_step import packs_timeline

    needs, lines = PlanNeeds.of(plan, options.memory), prediction_lines(plan)
    return shown(
        options,
        "packs",
        page(plan, lines),
        needs,
        lambda: packs_timeline(plan.tasks(), _profile_of(options, plan), plan.machine),
    )


def _check_source(options: argparse.Namespace) -> None:
    """Refuse a workload and a layer profile together, or neither of them, and options of the
    other."""
    if (options.layers is None) == (options.workload is None):
        raise PlanError.of(
            "--system harmony plans for a workload, or from its layer profile: give WORKLOAD or "
            "--layers FILE, one of them.",
            "plan-system",
        )
    given = shared.given(options)
    PlanError.check(
        Violation(
            f"{option.flag} is of a workload that is profiled, and --layers {options.layers} "
            "is a profile; leave it out.",
            "plan-system",
        )
        for option in (_OF_A_WORKLOAD if options.layers is not None else ())
        if option.name in given
    )


def _answer_lines(question: PacksQuestion, answer: PacksAnswer) -> list[str]:
    """Return the lines of an answer: what was assumed, and the plan with what it needs."""
    lines = [f"assumed {name} {said}" for name, said in question.server.assumed.items()]
    lines.append(f"{answer.status}: {answer.why.summary}")
    if answer.why.uncompiled:
        lines.append(f"not compiled: {answer.why.uncompiled}")
    if answer.plan is None:
        return lines
    if answer.status != "ok":
        lines.append("the nearest plan, which is not saved:")
    lines += [table(HEADER, rows(answer.plan)), *prediction_lines(answer.plan)]
    if answer.plan.switches.offload:
        streamed = question.profile.as_streamed(question.swaps.stream)
        updates = format_seconds(streamed.update_seconds(0, streamed.num_layers))
        shared_by = counted(question.server.devices, "device")
        lines.append(f"updates take {updates} of one host process, shared by {shared_by}")
    return [*lines, *([f"a device: {answer.headroom}"] if answer.headroom else [])]


def baseline_table(found: Sequence[Baseline]) -> str:
    """Return a table of baselines, one line per system."""
    lines = [
        [
            row.name,
            "-" if row.seconds is None else format_seconds(row.seconds),
            "-" if row.seconds is None else format_bytes(row.swap_bytes),
            format_bytes(row.device_bytes) if row.device_bytes else "-",
            format_bytes(row.host_bytes) if row.host_bytes else "-",
            row.reason or "-",
        ]
        for row in found
    ]
    return table(["beside it", "a step", "swapped", "device", "host", "cannot run because"], lines)


def prediction_lines(plan: PacksPlan) -> list[str]:
    """Return the lines of both estimates of a step, the paper's and that of our instructions."""
    if plan.prediction is None:
        return []
    paper, dtype = plan.prediction.paper, plan.swaps.stream
    return [
        *([f"parameters that layers read as {dtype} alone are streamed so"] if dtype else []),
        *(["every device swaps its share of weights and gradients"] if plan.swaps.sharded else []),
        f"by the paper's rules: {format_seconds(paper.step_seconds)} a step, "
        f"{format_rate(plan.minibatch_size / paper.step_seconds)} examples/s, tasks of "
        f"{format_bytes(max(paper.task_bytes))} at most, devices compute nothing for "
        f"{min(paper.gap_fractions):.0%} to {max(paper.gap_fractions):.0%} of it",
        *_step_lines(plan),
    ]


def _step_lines(plan: PacksPlan) -> list[str]:
    step = plan.prediction and plan.prediction.step
    if not step:
        return []
    moved = ", ".join(f"{name} {format_bytes(n)}" for name, n in step.volumes_bytes.items() if n)
    rate, idle = plan.machine.swap_bytes_per_second.value, step.idle_fractions
    ways = {
        way: sum(n for name, n in step.volumes_bytes.items() if name.endswith(f" {way}")) / rate
        for way in ("in", "out")
    }
    least, most = (format_seconds(of(idle) * step.step_seconds) for of in (min, max))
    assert plan.step_estimate is not None, "predicted"
    seconds, _ = plan.step_estimate
    how = "" if seconds == step.step_seconds else "compiled "
    from_layers = f"; {format_seconds(step.step_seconds)} from layers alone" * bool(how)
    return [
        f"as {how}instructions: {format_seconds(seconds)} a step, "
        f"{format_rate(plan.minibatch_size / seconds)} examples/s{from_layers}",
        f"not hidden: devices compute nothing for {least} to {most} of it, beside "
        f"{format_seconds(ways['in'])} of copies in and {format_seconds(ways['out'])} out",
        *_memory_lines(plan),
        f"moved in a step: {moved}",
    ]


def _memory_lines(plan: PacksPlan) -> list[str]:
    """Return what a device and the host hold at their peaks, and by what that is known."""
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    alone, memory = plan.prediction.step, plan.prediction.compiled or plan.prediction.step
    known = "from layers alone: an upper bound; capture verify compiles the packs"
    if plan.compiled:
        target = plan.cluster.target if plan.cluster else plan.machine.name
        known = (
            f"as compiled for {Path(target).stem}; {format_bytes(max(alone.device_peak_bytes))} "
            "from layers alone"
        )
    fullest, host = (parts_text(of) for of in (memory.device_parts_bytes, memory.host_parts_bytes))
    return [
        f"device: {format_bytes(max(memory.device_peak_bytes))} at its peak ({fullest}), {known}",
        f"host: {format_bytes(memory.host_peak_bytes)} at its peak ({host})",
    ]


def _profile_of(options: argparse.Namespace, plan: PacksPlan) -> LayerProfile:
    if options.profile is None:
        raise PlanError.of(
            f"a trace needs the times of the layers; give --profile, the layer profile of "
            f"{plan.model!r}.",
            "packs-model",
        )
    profile = LayerProfile.load(options.profile)
    if (profile.name, profile.num_layers) != (plan.model, plan.num_layers):
        raise PlanError.of(
            f"the layer profile is of {profile.name!r} with {profile.num_layers} layers, the plan "
            f"for {plan.model!r} with {plan.num_layers}; give the plan's.",
            "packs-model",
        )
    return profile


def _decided(plan: PacksPlan) -> dict[str, str]:
    forward, backward = plan.configuration.forward, plan.configuration.backward
    return {
        "model": plan.model,
        "machine": plan.machine.name,
        "minibatch": str(plan.minibatch_size),
        "mode": plan.mode,
        "examples forward, backward": f"{forward.microbatch_size}, {backward.microbatch_size}",
        "forward packs": " ".join(map(str, forward.lengths)),
        "backward packs": " ".join(map(str, backward.lengths)),
        "remat": plan.remat or "none",
        "off": ", ".join(plan.switches.off) or "-",
        "streamed as": plan.swaps.stream or "they are",
        "swapped": "in shares" if plan.swaps.sharded else "whole",
    }


def _needs(plan: PacksPlan, memory_limit_bytes: int | None) -> PlanNeeds:
    paper = None if plan.prediction is None else plan.prediction.paper.step_seconds
    return replace(PlanNeeds.of(plan, memory_limit_bytes), paper_step_seconds=paper)


#: What two plans decide differently, and what each needs.
diff = partial(compared, "packs", _decided, needs=_needs)


def _server(options: argparse.Namespace) -> Server:
    """Return the server that is named, or that of a target."""
    if options.machine is not None:
        for name in ("cluster", "target"):
            if getattr(options, name) not in (None, shared.TARGET.default):
                raise PlanError.of(
                    f"--machine {options.machine} says what --{name} does; leave out one of them.",
                    "plan-system",
                )
        server = Server.load(options.machine)
    else:
        server = Server.of(asked.read_cluster(vars(options)))
    return server.with_(usable_bytes=options.memory, host_memory_bytes=options.host_memory)


ASKS = Asks(
    "Packs (--system harmony)",
    "packs of layers streamed from the host",
    OPTIONS,
    plan,
    needs_workload=False,
    rival=rival,
)
