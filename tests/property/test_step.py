"""The step program by its rules, and the replay against a count that knows no slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.alpa.step import build_alpa_step
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.schedule import Occupancy, Schedule, make_schedule
from capture.predictor.formula import of_interfaces, peak_parts, peaks_by_position
from capture.step.holds import Params
from capture.step.interface import StageInterface, stage_interface
from capture.step.pipeline import build_step
from capture.step.program import Copy, Feed, Run, Step, replay
from tests.recorded.access import step_lines
from tests.step_judge import check_lifetimes
from tests.synthetic_graphs import LOSS_BYTES, chain, layer_graphs, stage_interfaces

schedules = st.sampled_from(["gpipe", "1f1b"])
microbatches = st.integers(1, 6)


@st.composite
def steps(draw) -> tuple[list[StageInterface], Schedule]:
    stages = draw(stage_interfaces(draw(layer_graphs())))
    return stages, make_schedule(draw(schedules), len(stages), draw(microbatches))


# ---- the count -----------------------------------------------------------------------------------


class StageBytes:
    """What one stage holds: the terms of the closed form, in bytes per device."""

    def __init__(self, stages: list[StageInterface], s: int):
        stage = self.stage = stages[s]
        values, self.is_last = stage.value_bytes, s == len(stages) - 1
        self.params = sum(stage.param_bytes.values())
        self.state = self.params + stage.optimizer_bytes
        self.received = sum(values[v] for v in stage.received)
        self.gradient_in = sum(values[v] for v in stage.sent if v in stage.differentiable)
        self.gradient_out = sum(values[v] for v in stage.received if v in stage.differentiable)
        self.batch = sum(stage.batch_bytes[b] for b in stage.batch)
        self.made = sum(values[v] for v in stage.outputs) + stage.residual_bytes
        self.kept = stage.residual_bytes + sum(
            values[v] for v in (*stage.kept_inputs, *stage.kept_outputs)
        )
        self.kept += sum(stage.batch_bytes[b] for b in stage.kept_batch)
        self.arrived = sum(
            stage.param_bytes[p] * sum(p in other.borrowed for other in stages) for p in stage.owned
        )
        self.summaries = sum(other.summary_bytes for other in stages)
        self.has_summaries = any(other.summary_bytes for other in stages)

    def held(self, o: Occupancy) -> int:
        waiting = o.num_waiting_inputs * self.received + o.num_waiting_gradients * self.gradient_in
        gradients = self.params if o.accumulates else 0
        return self.state + gradients + o.num_kept * self.kept + waiting

    def running(self, o: Occupancy) -> int:
        """While the program of a task runs, losses aside."""
        transient = self.stage.transient_bytes[o.kind]
        if o.kind == "forward":
            return self.held(o) + self.received + self.batch + transient
        return self.held(o) + self.gradient_in + transient

    def losses(self, num_forward: int) -> int:
        return num_forward * LOSS_BYTES if self.is_last else 0

    def updating(self, num_microbatches: int) -> int:
        transient, base = (
            self.stage.transient_bytes,
            self.state + self.params + self.losses(num_microbatches) + self.arrived,
        )
        return max(
            base + self.summaries + transient["update"],
            base + transient["summarize"] if self.has_summaries else 0,
        )


def counted_peaks(stages: list[StageInterface], schedule: Schedule) -> list[int]:
    """Peak per stage, from the number of passes done at every clock."""
    bytes_of = [StageBytes(stages, s) for s in range(len(stages))]
    peaks = [stage.updating(schedule.num_microbatches) for stage in bytes_of]
    forward, backward = [0] * len(stages), [0] * len(stages)
    for clock in schedule.clocks:
        for task in clock:
            s, own = task.stage_id, task.kind == "forward"
            inputs = forward[s - 1] - forward[s] - own if s else 0
            gradients = backward[s + 1] - backward[s] - (not own) if s + 1 < len(stages) else 0
            accumulates = not own or backward[s] > 0
            o = Occupancy(
                task.kind,
                forward[s] - backward[s],
                inputs,
                gradients,
                accumulates=accumulates,
            )
            peaks[s] = max(peaks[s], bytes_of[s].running(o) + bytes_of[s].losses(forward[s]))
        for task in clock:
            (forward if task.kind == "forward" else backward)[task.stage_id] += 1
    return peaks


def predicted_peak(
    stage: StageBytes, occupancies: tuple[Occupancy, ...], num_microbatches: int
) -> int:
    """The closed form over the undominated occupancies of a stage."""
    peak = stage.updating(num_microbatches)
    for o in occupancies:
        peak = max(
            peak,
            stage.running(replace(o, num_waiting_inputs=0))
            + stage.losses(num_microbatches - (o.kind == "forward")),
        )
        # the last stage has an input waiting only during its first backward pass, so it has one
        # loss
        if o.num_waiting_inputs:
            peak = max(peak, stage.running(o) + stage.losses(o.num_kept))
    return peak


def replayed_peaks(stages: list[StageInterface], schedule: Schedule) -> list[int]:
    ledger = replay(build_step(stages, schedule))
    for peak in ledger.peaks:
        assert sum(peak.parts.values()) == peak.peak_bytes
    per_stage = [{ledger.peak_bytes_per_device[d] for d in stage.devices} for stage in stages]
    assert all(len(peaks) == 1 for peaks in per_stage)
    return [peaks.pop() for peaks in per_stage]


@given(steps())
def test_replay_equals_the_count_byte_for_byte(step):
    assert replayed_peaks(*step) == counted_peaks(*step)


@given(steps())
def test_the_closed_form_over_occupancies_equals_the_replay_byte_for_byte(step):
    """What arrives between two programs never shows: the next program finds it waiting."""
    stages, schedule = step
    expected = [
        predicted_peak(StageBytes(stages, s), schedule.occupancies[s], schedule.num_microbatches)
        for s in range(len(stages))
    ]
    assert replayed_peaks(stages, schedule) == expected


# ---- the rules of the list -----------------------------------------------------------------------


@given(steps(), st.sampled_from([build_step, build_alpa_step]))
def test_every_slot_is_written_before_it_is_read_and_freed_once(step, build):
    program = build(*step)
    check_lifetimes(program)
    ledger = replay(program)
    state = [StageBytes(step[0], s).state for s, stage in enumerate(step[0]) for _ in stage.devices]
    assert [ledger.live_bytes[device] for device in range(ledger.num_devices)] == state


def check_shared(stages: list[StageInterface], schedule: Schedule) -> None:
    """Gradients go to the owner, new values back, each those of one parameter."""
    program = build_step(stages, schedule)
    slots, places = program.slots, program.places
    gradients, values = [], []
    for copy in program.instructions[program.num_passes :]:
        if isinstance(copy, Copy) and slots[copy.target].what != "summary":
            source, target = slots[copy.source], slots[copy.target]
            owner, reader = places.index(source.place), places.index(target.place)
            if target.what == "param":
                assert target.holds == Params((source.holds.ids[copy.index],), "sent")
                values.append((*target.holds.ids, owner, reader))
            else:
                assert source.what == target.what == "gradient" and source.holds == target.holds
                gradients.append((*target.holds.ids, reader, owner))
    expected = [
        (p, s, t)
        for s, stage in enumerate(stages)
        for t, other in enumerate(stages)
        for p in stage.owned
        if p in other.borrowed
    ]
    assert sorted(gradients) == sorted(values) == sorted(expected)


@settings(max_examples=40)
@given(steps())
def test_what_stages_share_goes_between_an_owner_and_its_readers(step):
    check_shared(*step)


def test_a_stage_may_own_what_it_shares_and_borrow_something_else():
    graph = chain(3, shared=[(0, 1), (1, 2), (0, 2), (1, 2)])
    check_shared(interfaces(graph, [1, 2]), make_schedule("1f1b", 3, 2))


@settings(max_examples=40)
@given(steps())
def test_outputs_are_counted_as_what_they_are_for(step):
    stages, schedule = step
    program = build_step(stages, schedule)
    for slot in program.slots:
        if slot.what == "output":
            s = program.places.index(slot.place)
            sent = (
                "activations" if slot.holds.ids[0] in stages[s].kept_outputs else "sent activations"
            )
            assert slot.category == ("loss" if s == len(stages) - 1 else sent)


def hops_of(stages: list[StageInterface], program: Step) -> Counter:
    """How often each (value, from stage, to stage) is moved."""
    hops: Counter = Counter()
    for copy in program.instructions[: program.num_passes]:
        if isinstance(copy, Copy):
            source, target = program.slots[copy.source], program.slots[copy.target]
            s, t = (program.places.index(slot.place) for slot in (source, target))
            assert source.holds == target.holds and copy.index is None
            (value,) = target.holds.ids
            assert target.nbytes == stages[t].value_bytes[value] <= copy.nbytes
            hops[value, s, t] += 1
    return hops


@given(steps())
def test_values_travel_to_the_next_stage_and_gradients_back(step):
    stages, schedule = step
    hops = hops_of(stages, build_step(stages, schedule))
    expected = {(v, s, s + 1) for s, stage in enumerate(stages) for v in stage.sent}
    expected |= {
        (v, s, s - 1)
        for s, stage in enumerate(stages)
        for v in stage.received
        if v in stage.differentiable
    }
    assert hops == dict.fromkeys(expected, schedule.num_microbatches)


@given(steps())
def test_in_alpas_runtime_values_travel_from_their_maker_to_each_reader_and_gradients_from_reader_to_reader(
    step,
):
    stages, schedule = step
    expected = set()
    for maker, stage in enumerate(stages[:-1]):
        for v in stage.outputs:
            readers = [s for s, other in enumerate(stages) if v in other.used]
            expected |= {(v, maker, reader) for reader in readers}
            if v in stage.differentiable:
                expected |= {(v, after, before) for before, after in pairwise([maker, *readers])}
    hops = hops_of(stages, build_alpa_step(stages, schedule))
    assert hops == dict.fromkeys(expected, schedule.num_microbatches)


def scaled(stages: list[StageInterface], factor: int) -> list[StageInterface]:
    """The stages at a micro-batch ``factor`` times as large; parameters and their updates stay."""
    return [
        replace(
            stage,
            value_bytes={v: factor * n for v, n in stage.value_bytes.items()},
            batch_bytes={b: factor * n for b, n in stage.batch_bytes.items()},
            residual_bytes=factor * stage.residual_bytes,
            transient_bytes={
                k: n if k in ("update", "summarize") else factor * n
                for k, n in stage.transient_bytes.items()
            },
        )
        for stage in stages
    ]


@given(steps(), st.integers(2, 3))
def test_peak_never_falls_when_a_microbatch_grows(step, factor):
    stages, schedule = step
    pairs = zip(
        replayed_peaks(stages, schedule),
        replayed_peaks(scaled(stages, factor), schedule),
        strict=True,
    )
    assert all(small <= large for small, large in pairs)


@given(steps())
def test_peak_never_falls_with_another_microbatch(step):
    stages, schedule = step
    more = make_schedule(schedule.name, len(stages), schedule.num_microbatches + 1)
    assert all(
        few <= many
        for few, many in zip(
            replayed_peaks(stages, schedule), replayed_peaks(stages, more), strict=True
        )
    )


@given(stage_interfaces(chain(4, skips=[(0, 3)], shared=[(0, 2)])), microbatches)
def test_1f1b_never_needs_more_than_gpipe_but_for_what_waits(stages, num_microbatches):
    gpipe, one = (
        replayed_peaks(stages, make_schedule(name, len(stages), num_microbatches))
        for name in ("gpipe", "1f1b")
    )
    for s, (every, few) in enumerate(zip(gpipe, one, strict=True)):
        stage = StageBytes(stages, s)
        # An input may wait, and another arrive while gradients leave; forward passes are executed
        # beside the gradients of earlier micro-batches.
        assert few <= every + 2 * stage.received + stage.params


# ---- by hand -------------------------------------------------------------------------------------

NOTHING = StageCost(0, 0, 0, 0, 0, (), (), ())


def interfaces(graph, cuts, cost=NOTHING):
    bounds = [0, *cuts, graph.num_layers]
    param_bytes = [p.nbytes for p in graph.params]
    return [
        stage_interface(graph, first, stop, [s], StageChoice(), param_bytes, cost)
        for s, (first, stop) in enumerate(pairwise(bounds))
    ]


def as_text(program: Step) -> str:
    """One line per instruction."""
    return "\n".join(step_lines(program))


GOLDEN_STEP = """\
feed batch0.0@0
forward(params@0 |  | batch0.0@0) -> output0.0@0 residuals0.0@0
free batch0.0@0
output0.0@0 => input0.0@1
free output0.0@0
forward(params@1 | input0.0@1 | ) -> output2.0@1 residuals0.0@1
input0.0@1 => input0.0@2
output2.0@1 => input2.0@2
free output2.0@1
feed batch0.0@2
forward(params@2 param4@2 | input0.0@2 input2.0@2 | batch0.0@2) -> output3.0@2 residuals0.0@2
free input0.0@2
zero_gradients() -> gradients@2 gradient4@2
backward(params@2 param4@2 | input2.0@2 | batch0.0@2 |  | residuals0.0@2 |  | gradients@2 gradient4@2) \
-> input gradient0.0@2 input gradient2.0@2 gradients@2 gradient4@2
free batch0.0@2
input gradient0.0@2 => cotangent0.0@1
free input gradient0.0@2
input gradient2.0@2 => cotangent2.0@1
free input gradient2.0@2
zero_gradients() -> gradients@1
backward(params@1 | input0.0@1 |  |  | residuals0.0@1 | cotangent0.0@1 cotangent2.0@1 | gradients@1) -> input gradient0.0@1 gradients@1
input gradient0.0@1 => cotangent0.0@0
free input gradient0.0@1
zero_gradients() -> gradients@0
backward(params@0 |  |  |  | residuals0.0@0 | cotangent0.0@0 | gradients@0) -> gradients@0
gradient4@2 => gradient4 of 2@0
update(params@0 | optimizer@0 | gradients@0 | gradient4 of 2@0 | ) -> params@0 optimizer@0
free gradient4 of 2@0
update(params@1 | optimizer@1 | gradients@1 |  | ) -> params@1 optimizer@1
update(params@2 | optimizer@2 | gradients@2 |  | ) -> params@2 optimizer@2
free gradient4@2
free param4@2
params@0[1] => param4@2
free output3.0@2"""


def test_instructions_of_a_skip_and_a_shared_parameter():
    """Value 0 is read by the middle stage and passes through it; the middle keeps it, the last
    keeps value 2 and the batch."""
    first, middle, last = interfaces(chain(4, skips=[(0, 3)], shared=[(0, 3)]), [1, 3])
    stages = [
        first,
        replace(middle, kept_inputs=(0,)),
        replace(last, kept_inputs=(2,), kept_batch=(0,)),
    ]
    assert as_text(build_step(stages, make_schedule("gpipe", 3, 1))) == GOLDEN_STEP


def test_gradients_of_shared_parameters_arrive_in_the_order_of_the_owners_parameters():
    graph = chain(3, shared=[(0, 1, 2), (0, 1, 2)])
    program = build_step(interfaces(graph, [1, 2]), make_schedule("1f1b", 3, 1))
    (update,) = (i for i in program.instructions if isinstance(i, Run) and i.program == "update@0")
    assert [program.slots[slot].name for slot in update.inputs[3]] == [
        "gradient3 of 1@0",
        "gradient3 of 2@0",
        "gradient4 of 1@0",
        "gradient4 of 2@0",
    ]


def test_an_update_takes_the_summaries_of_all_other_stages():
    stages = interfaces(chain(3), [1, 2], replace(NOTHING, summary_bytes=4, summarize_bytes=4))
    program = build_step(stages, make_schedule("1f1b", 3, 1))
    check_lifetimes(program)
    updates = {
        program.places.index(program.programs[i.program].place): i.inputs[-1]
        for i in program.instructions
        if isinstance(i, Run) and program.programs[i.program].kind == "update"
    }
    assert {s: [program.slots[slot].name for slot in others] for s, others in updates.items()} == {
        0: ["summary of 1@0", "summary of 2@0"],
        1: ["summary of 0@1", "summary of 2@1"],
        2: ["summary of 0@2", "summary of 1@2"],
    }


def test_alpas_runtime_has_every_batch_before_the_first_pass():
    program = build_alpa_step(interfaces(chain(3), [1, 2]), make_schedule("1f1b", 3, 2))
    fed = [i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Feed)]
    # Behind the zeros of three stages, two micro-batches of the first and of the last stage.
    assert fed == [3, 4, 5, 6]


def test_the_parts_of_a_peak_have_the_names_of_slots_if_asked():
    program = build_step(interfaces(chain(2), [1]), make_schedule("gpipe", 2, 1))
    by_category, by_slot = (
        replay(program, by_slot=named).peaks[1].parts for named in (False, True)
    )
    assert (
        by_category["parameters"] == by_slot["params@1"] > 0
        and "params@1" not in by_category
        and "parameters" not in by_slot
    )


def test_a_stage_hands_on_before_it_receives():
    """Without temporaries, the middle stage of a GPipe pipeline never holds the input of two
    micro-batches."""
    graph = chain(3)
    stages = interfaces(graph, [1, 2])
    (middle,) = [stage for stage in stages if stage.devices == (1,)]
    params = graph.params[1].nbytes
    assert replayed_peaks(stages, make_schedule("gpipe", 3, 4))[1] == params + max(
        middle.value_bytes[0] + middle.value_bytes[1],
        params + middle.value_bytes[1],  # the gradient that arrives
    )


def test_a_loss_is_not_kept_for_the_backward_pass():
    stages = interfaces(chain(2), [1])
    stages[1] = replace(stages[1], kept_outputs=stages[1].outputs)
    with pytest.raises(AssertionError, match="the loss outlives the backward pass"):
        build_step(stages, make_schedule("gpipe", 2, 1))


@given(steps())
def test_the_predictors_formula_equals_the_replay_byte_for_byte(step):
    """With losses, summaries and parameters of any size that any number of stages share."""
    stages, schedule = step
    found = zip(
        of_interfaces(stages), schedule.moments, replayed_peaks(stages, schedule), strict=True
    )
    for memory, moments, replayed in found:
        instant, parts = peak_parts([memory], moments)
        assert sum(parts[0].values()) == replayed
        assert instant in ("forward", "backward", "update", "summarize")


occupancies = st.builds(
    Occupancy,
    st.sampled_from(["forward", "backward"]),
    *[st.integers(0, most) for most in (3, 2, 2, 3)],
    accumulates=st.booleans(),
)


@given(
    stage_interfaces(chain(4, skips=[(0, 3)], shared=[(0, 2, 3)])),
    st.lists(occupancies, min_size=1, max_size=3).map(tuple),
)
def test_the_predictors_formula_counts_what_waits_whatever_the_schedule(stages, listed):
    """No schedule of today lets gradients wait; one that does is counted in both forms of the
    formula."""
    num_losses = max(o.num_losses for o in listed)
    for s, memory in enumerate(of_interfaces(stages)):
        counted = StageBytes(stages, s)
        peak = max(
            counted.updating(num_losses),
            *(counted.running(o) + counted.losses(o.num_losses) for o in listed),
        )
        arrays = replace(
            memory, **{part.name: np.array([getattr(memory, part.name)]) for part in fields(memory)}
        )
        assert peak == peaks_by_position(arrays, [listed], [arrays.arriving])[0, 0]
        assert sum(peak_parts([memory], [(o,) for o in listed])[1][0].values()) == peak
