"""The forward passes of a pipeline alone: the rules of the list, and what it holds beside a step of
training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from capture.plan.schedule import make_schedule
from capture.step.evaluation import build_evaluation
from capture.step.interface import StageInterface
from capture.step.pipeline import build_step
from capture.step.program import Run, replay
from tests.property import test_step, test_step_tables
from tests.step_judge import check_lifetimes

steps = st.one_of(test_step.steps(), test_step_tables.steps())


def waiting(stages: Sequence[StageInterface], device: int) -> int:
    """Where stages share a device, it may receive the input of one while the other runs, as in
    training, but not always the same device."""
    here = [stage for stage in stages if device in stage.devices]
    inputs = (sum(stage.value_bytes[v] for v in stage.received) for stage in here)
    return max(inputs) if len(here) > 1 else 0


@settings(max_examples=40)
@given(steps)
def test_every_forward_pass_is_run_once_in_no_more_than_training_takes(step):
    stages, schedule = step
    program = build_evaluation(stages, schedule)
    check_lifetimes(program)
    runs = Counter(each.program for each in program.instructions if isinstance(each, Run))
    assert runs == {f"forward@{s}": schedule.num_microbatches for s in range(len(stages))}
    assert len(program.reported) == schedule.num_microbatches
    training = replay(build_step(stages, schedule)).peak_bytes_per_device
    peaks = replay(program).peak_bytes_per_device
    for device, (here, there) in enumerate(zip(peaks, training, strict=True)):
        assert here <= there + waiting(stages, device)


def clocks(name: str, num_groups: int, num_microbatches: int) -> list[str]:
    schedule = make_schedule(name, num_groups, num_microbatches)
    return [" ".join(map(str, tasks)) for tasks in schedule.forward_clocks]


def test_no_microbatch_waits_behind_another():
    assert clocks("1f1b", 3, 2) == ["F0@0", "F0@1 F1@0", "F0@2 F1@1", "F1@2"]
    # Stage 3 of the first is on the devices of stage 0, and stage 2 on those of stage 1.
    assert clocks("zb-v", 2, 4)[:5] == ["F0@0", "F0@1", "F0@2 F1@0", "F0@3 F1@1", "F1@2 F2@0"]
