"""A plan in words: the paragraph of the page, and a table short enough to paste into an issue."""

from __future__ import annotations

from capture.plan.strategy import strategy
from capture.quantities import counted, format_bytes, format_rate, format_seconds
from capture.report.data import Clock, ReportFacts

#: What every simulated thing says of its times.
CLOCKS: dict[Clock, str] = {
    "seconds": "Simulated on the rates and links of the target.",
    "units": (
        "Simulated in unit times: every program takes one unit, transfers take none. The profile "
        "says nothing about time."
    ),
    "saved": (
        "Simulated when the plan was made; drawn are its passes and what stages send to each "
        "other. A profile (--profile) shows memory over time, too."
    ),
    "clocks": (
        "The schedule's own table in unit times: every pass takes one unit, transfers take none. "
        "A profile (--profile) says more."
    ),
}


def title(facts: ReportFacts) -> str:
    """Return the question that the plan answers, in words."""
    plan = facts.plan
    model = "a model without a name" if plan.workload is None else str(plan.workload)
    how = f"{plan.schedule}, {counted(plan.num_microbatches, 'micro-batch', 'micro-batches')}"
    if plan.num_stages == 1:
        how = strategy(plan.stages, plan.schedule, plan.num_microbatches)
    return f"{model} on {plan.cluster} {plan.cluster.target}, {how} of {plan.microbatch_size}"


def paragraph(facts: ReportFacts) -> str:
    """Describe a plan of stages: whether it fits, how much memory is left and how sure that is, and
    what limits memory and time."""
    said = (_fit(facts), _sure(facts), _memory(facts), _time(facts), *_found(facts))
    return " ".join(filter(None, said))


def _fit(facts: ReportFacts) -> str:
    peak, room = format_bytes(facts.fullest.peak_bytes), facts.headroom
    how = "by the compiler of the target" if facts.verified else "predicted"
    need = f"The fullest device needs {peak} at its peak ({how})"
    if room is None:
        return (
            f"{need}. Nobody says how much memory a device of {facts.plan.cluster.target} has, so "
            "nothing is said of what is left (--memory does)."
        )
    spare = room.spare_bytes
    left = f"{format_bytes(abs(spare))} are {'left' if spare >= 0 else 'missing'}"
    source = "the limit that was given" if room.source == "given" else "what the target can use"
    of = f"of {format_bytes(room.limit_bytes)}, {source}, {left}"
    return f"The plan {room.verdict}. {need}; {of}."


def _sure(facts: ReportFacts) -> str:
    if facts.verified:
        errors = [s.predicted.peak_bytes / s.peak_bytes - 1 for s in facts.stages if s.peak_bytes]
        error = max(map(abs, errors), default=0.0)
        off = f"; the prediction was off by at most {error:.2%}" * (error >= 5e-5)
        return f"Every stage was compiled, so the peaks are exact{off}."
    end = f"The upper end of the intervals is {format_bytes(facts.high_bytes)}"
    if facts.headroom is not None:
        spare = facts.headroom.limit_bytes - facts.high_bytes
        size = format_bytes(abs(spare))
        end += f", which leaves {size}" if spare >= 0 else f", {size} too much"
    if facts.prediction.extrapolated:
        return (
            f"{end}; degrees or the micro-batch size were not profiled: verify the plan to be "
            "sure (capture verify)."
        )
    if (coverage := facts.prediction.interval_coverage) is None:
        return (
            f"{end}; the intervals are not calibrated. Verify the plan to be sure (capture verify)."
        )
    within = "a device stays within its interval with a calibrated probability of"
    return f"{end}; {within} {coverage:.0%}."


def _memory(facts: ReportFacts) -> str:
    stage = facts.fullest
    passes = {"forward": "forward pass", "backward": "backward pass", "update": "update"}
    parts = stage.predicted.parts_bytes
    largest, when = max(parts, key=parts.__getitem__), passes.get(stage.predicted.instant, "")
    when = when and f" during the {when}"
    if largest == "activations":
        batches = counted(stage.max_in_flight, "micro-batch", "micro-batches")
        when += f", of {batches} in flight"
    return (
        f"The bottleneck of memory is stage {stage.stage_id} (layers {stage.layers_text}): "
        f"{format_bytes(parts[largest])} "
        f"{'of the predicted peak' if facts.verified else 'of it'} are {largest}{when}."
    )


def _time(facts: ReportFacts) -> str:
    is_alone = len(facts.stages) == 1
    waits, step = facts.schedule.waits_fraction, facts.schedule.step_seconds
    if step is None:
        idle = (
            "Were all passes equally long, the pipeline bubble would be "
            f"{facts.mean_waits:.0%} of a step on average. How long a step takes is not known."
        )
        return "" if is_alone else idle
    rate = format_rate(facts.plan.global_batch_size / step)
    takes = f"A step takes {format_seconds(step)} (simulated), {rate} examples/s."
    bottleneck = (
        f" The bottleneck of time is stage {facts.busiest}, which computes for "
        f"{1 - waits[facts.busiest]:.0%} of the step; "
        f"the pipeline bubble is {facts.mean_waits:.0%} of it on average."
    )
    return takes if is_alone else takes + bottleneck


def _found(facts: ReportFacts) -> list[str]:
    found = facts.plan.why.found if facts.plan.why else ""
    return [f"How it was found: {found}"] if found else []


HEADER = (
    "stage",
    "layers",
    "devices",
    "dp x tp",
    "remat",
    "predicted",
    "verified",
    "headroom",
    "bubble",
)


def rows(facts: ReportFacts) -> list[tuple[str, ...]]:
    """Return the table under ``HEADER``, a row per stage; a dash where nothing is known."""
    limit = facts.limit_bytes
    return [
        (
            str(stage.stage_id),
            stage.layers_text,
            stage.devices_text,
            f"{stage.stage.choice.replicas_text} x {stage.stage.choice.tensor_parallel}",
            stage.stage.remat_text,
            format_bytes(stage.predicted.peak_bytes),
            "-" if stage.verified_bytes is None else format_bytes(stage.verified_bytes),
            "-" if limit is None else format_bytes(limit - stage.peak_bytes),
            f"{waits:.0%}",
        )
        for stage, waits in zip(facts.stages, facts.schedule.waits_fraction, strict=True)
    ]


def last_lines(facts: ReportFacts) -> list[str]:
    """Return the lines below the table: the peak, the headroom, and the time of a step."""
    step, known = facts.schedule.step_seconds, facts.plan.step_estimate
    time = "step time not known (bubble: unit times)"
    if step is not None:
        time = f"step {format_seconds(step)} (simulated)"
    elif known is not None:
        time = f"step {format_seconds(known[0])} ({known[1]}; bubble: unit times)"
    return [
        f"peak {format_bytes(facts.fullest.peak_bytes)} per device",
        *([str(facts.headroom)] if facts.headroom else []),
        time,
        *_found(facts),
    ]
