"""Steps of schedules whose stages share devices or whose backward passes are split: the rules of the
list, and the predictor's formula against the replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES, Schedule, make_schedule
from capture.predictor.formula import of_interfaces, peak_parts
from capture.step.interface import StageInterface
from capture.step.pipeline import build_step
from capture.step.program import Copy, Free, Run, replay
from tests.step_judge import check_lifetimes
from tests.synthetic_graphs import layer_graphs, stage_interfaces

TABLES = [name for name in SCHEDULES if name not in PLAIN_SCHEDULES]


@st.composite
def steps(draw, names: Sequence[str] = TABLES) -> tuple[list[StageInterface], Schedule]:
    name, num_groups = draw(st.sampled_from(names)), draw(st.integers(1, 3))
    kind = SCHEDULES[name]
    least = max(1, kind.least_per_group * num_groups)
    num_microbatches = draw(st.integers(least, least + 4))
    if kind.multiple:
        num_microbatches = num_groups * draw(st.integers(1, 3))
    schedule = make_schedule(name, num_groups, num_microbatches)
    count = schedule.num_stages
    stages = stage_interfaces(
        draw(layer_graphs(count + 2, count)),
        placement=schedule.placement,
        split=kind.splits_backward,
    )
    return draw(stages), schedule


@given(steps())
def test_every_pass_is_run_once_and_every_slot_written_before_it_is_read_and_freed_once(step):
    stages, schedule = step
    program = build_step(stages, schedule)
    check_lifetimes(program)
    runs = Counter(
        program.programs[each.program].kind
        for each in program.instructions[: program.num_passes]
        if isinstance(each, Run)
    )
    assert runs.pop("zero_gradients") == len(stages)
    assert runs == Counter(task.kind for order in schedule.orders for task in order)
    state: Counter[int] = Counter()
    for stage in stages:
        for device in stage.devices:
            state[device] += sum(stage.param_bytes.values()) + stage.optimizer_bytes
    live = replay(program).live_bytes
    assert all(live[device] == state[device] for device in (*live, *state))


@given(steps())
def test_the_predictors_formula_equals_the_replay_byte_for_byte(step):
    stages, schedule = step
    ledger, memories = replay(build_step(stages, schedule)), of_interfaces(stages)
    for group, moments in zip(schedule.stages, schedule.moments, strict=True):
        here = [memories[s] for s in group]
        instant, parts = peak_parts(here, moments)
        devices, peak = stages[group[0]].devices, sum(sum(of.values()) for of in parts)
        assert {ledger.peak_bytes_per_device[d] for d in devices} == {peak}
        assert all(nbytes >= 0 for of in parts for nbytes in of.values())
        assert sum("temporaries" in of for of in parts) <= 1 and hasattr(here[0], instant)


@given(steps())
def test_stages_on_the_same_devices_hand_over_without_a_copy_what_they_do_not_keep(step):
    """Where they copy, what the pass no longer needs is freed before: room is made before it is
    taken."""
    stages, schedule = step
    program = build_step(stages, schedule)
    owner = {place.name: s for s, place in enumerate(program.places)}
    copied: set[str] = set()  # micro-batch and stage of passes, since the last program
    for copy in program.instructions[: program.num_passes]:
        if isinstance(copy, Run):
            copied.clear()
        elif isinstance(copy, Free):
            freed = [program.slots[slot] for slot in copy.slots]
            own = [slot for slot in freed if slot.what in ("input", "output", "batch")]
            assert copied.isdisjoint(slot.name.partition(".")[2] for slot in own)
        elif isinstance(copy, Copy):
            source, target = (program.slots[slot] for slot in (copy.source, copy.target))
            if source.place.devices == target.place.devices:
                copied.add(source.name.partition(".")[2])
                # Of what came to the stage that kept it, whichever made it.
                keepers = [s for s in stages if s.devices == source.place.devices]
                assert target.what == "input" and any(
                    target.holds.ids[0] in (*s.kept_inputs, *s.kept_outputs) for s in keepers
                )
                assert owner[target.place.name] > 0
