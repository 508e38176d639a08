"""Transfers, residency and waits, each by itself on steps of packs, and transfers on those of
pipelines: what it guarantees, and that its own check refuses faults that are planted into what it
makes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.errors import ExecutionError
from capture.plan.schedule import Schedule, make_schedule
from capture.plan.task_graph import Configuration, Packs, Switches, TaskGraph
from capture.step.interface import StageInterface
from capture.step.pack_order import as_the_first, begins_without_copies
from capture.step.pack_sizes import PackSizes, ProfileSizes
from capture.step.pack_state import PackState
from capture.step.packs import lower
from capture.step.passes.frees import free
from capture.step.passes.residency import reside
from capture.step.passes.transfers import transfer
from capture.step.passes.waits import wait
from capture.step.pipeline import Pipeline
from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait, replay
from capture.step.room import Room
from capture.step.tasks import Block, Blocks, Round, Send, Value
from tests.property import test_step, test_step_tables
from tests.property.test_streamed_arrays import problems, swapped_problems
from tests.property.test_streamed_step import profile_of
from tests.synthetic_graphs import chain

drawn = st.one_of(problems(), swapped_problems())


class Lowered:
    """The rounds of packs, and their turns."""

    def __init__(self, graph: TaskGraph, sizes: PackSizes):
        begins = begins_without_copies(graph, lambda task, size: len(task.layers) * size)
        state = PackState(graph, sizes, 10**12)
        self.kept, self.step = state.kept, Step(state.places)
        self.rounds = list(lower(state, as_the_first(graph, begins)))
        self.turns = transfer(self.step, self.rounds, self.kept)

    def resided(self, limit: float, *, ahead: bool = True, behind: bool = True) -> Step:
        step = replace(self.step, instructions=[])
        reside(step, self.turns, limit, ahead=ahead, behind=behind)
        return step

    def peak(self, limit: float, **early: bool) -> int:
        return max(replay(finished(self.resided(limit, **early))).peak_bytes_per_device)


def finished(step: Step) -> Step:
    step = replace(step, instructions=[*step.instructions])
    free(step)
    wait(step)
    return step


@cache
def example(*off: str, mode: str = "pp") -> Lowered:
    """Four layers on two devices, of which one has two packs in either direction."""
    configuration = Configuration(Packs(2, ((0, 1), (1, 3))), Packs(2, ((0, 2), (2, 3), (3, 4))))
    graph = TaskGraph.of(configuration, mode, 2, 8, Switches.without(off))
    return Lowered(graph, ProfileSizes(profile_of([50, 60, 70, 80], [1] * 4)))


EXAMPLES = [(), ("offload",), ("p2p",), ("grouping", "jit")]


def blocks_of(turns: Sequence[Blocks]) -> list[Block]:
    found = {id(block): block for turn in turns for block in (*turn.arrivals, *turn.body)}
    return list(found.values())


# ---- transfers -----------------------------------------------------------------------------------


def check_transfers(step: Step, rounds: Sequence[Round], turns: Sequence[Blocks]) -> None:
    """Programs read, at their places, what the lowering says, each value from one slot until it
    goes to rest; what rests is copied; and every copy is of use."""
    known: dict[Value, object] = {}
    there: dict[int, object] = {slot: name for name, slot in step.persistent.items()}
    at: dict[tuple[Value, object], int] = {}
    run_of = {
        id(block): task
        for one, turn in zip(rounds, turns, strict=True)
        for task, block in zip(one.tasks, turn.body, strict=True)
    }
    for one, turn in zip(rounds, turns, strict=True):
        groups = [group for group in one.arrivals or () if group]
        for group, block in zip(groups, turn.arrivals, strict=True):
            if not isinstance(group, tuple):
                run_of[id(block)] = group

    def of(value: Value) -> object:
        if value not in known:
            known[value] = value.name
            if value.fed is not None:
                known[value] = value.fed
            elif value.source is not None and value.home is None:
                known[value] = copy_of(value)
        return known[value]

    def copy_of(value: Value) -> object:
        assert value.source is not None
        source = of(value.source)
        return source if value.index is None else (value.index, source)

    blocks = blocks_of(turns)
    used = Counter(slot for block in blocks for each in block for slot in {*each.used})
    resting, gone = set[int](), set[int]()
    for block in blocks:
        task = run_of.get(id(block))
        sent = task if isinstance(task, Send) else None
        if sent is not None:
            resting |= check_sent(step, sent, block)
            known |= {sent.value: copy_of(sent.value)} if sent.value.home else {}
            for key in [key for key in at if sent.rests and key[0] is sent.value]:
                gone.add(at.pop(key))
            task = None
        for each in block:
            if isinstance(each, Feed):
                there[each.slot] = (each.microbatch, each.batch)
            elif isinstance(each, Copy):
                content = there[each.source]
                there[each.target] = content if each.index is None else (each.index, content)
                if task is not None:
                    resting.add(each.target)
                assert sent is None or there[each.target] == of(sent.value)
            elif isinstance(each, Run):
                assert task is not None and each.program == task.name
                for group, slots in zip(task.reads, each.inputs, strict=True):
                    for value, slot in zip(group, slots, strict=True):
                        assert step.slots[slot].place is task.where(value)
                        assert there[slot] == of(value) and step.slots[slot].holds == value.holds
                        assert at.setdefault((value, task.where(value)), slot) == slot
                        assert slot not in gone, f"{value} has gone to rest"
                for i, (value, slot) in enumerate(zip(task.makes, each.outputs, strict=True)):
                    there[slot] = known[value] = (each.program, i, each.inputs)
                    at[value, task.where(value)] = slot
        for value, place in task.rests if task is not None else ():
            targets = [each.target for each in block if isinstance(each, Copy)]
            slots = [slot for slot in targets if there[slot] == of(value)]
            assert place in [step.slots[slot].place for slot in slots], f"{value} does not rest"
            for key in [key for key in at if key[0] is value]:
                gone.add(at.pop(key))
        if task is not None and task.ends:
            freed = block[-1].slots if isinstance(block[-1], Free) else ()
            assert [of(value) for value in task.ends] == [there[slot] for slot in freed]
            gone.update(freed)
    copied = [each.target for block in blocks for each in block if isinstance(each, Copy)]
    idle = [slot for slot in copied if used[slot] == 1 and slot not in resting]
    assert not idle, "nothing reads a copy"
    assert len(copied) == len({*copied}), "a slot is written twice"


def check_sent(step: Step, send: Send, block: Block) -> set[int]:
    """What a send makes: nothing else, at its place. Returns what is state, and so of use if nobody
    reads it."""
    if send.rests and send.value.fed is not None:  # it is fed again
        assert not block
        return set()
    assert block, "nothing is sent"
    *before, made = block
    slot = made.slot if isinstance(made, Feed) else made.target if isinstance(made, Copy) else -1
    assert step.slots[slot].place is send.place and step.slots[slot].holds == send.value.holds
    is_state = slot in step.persistent.values()
    assert before == ([Free((slot,))] if is_state else [])
    if isinstance(made, Copy):
        source, index = step.slots[made.source], made.index
        sent = source.nbytes if index is None else send.nbytes
        assert made.nbytes == max(send.value.nbytes, sent)
    return {slot} if is_state else set()


@settings(max_examples=60)
@given(drawn)
def test_every_value_is_where_it_is_read(problem):
    graph, sizes, _ = problem
    lowered = Lowered(graph, sizes)
    check_transfers(lowered.step, lowered.rounds, lowered.turns)


class LoweredStages:
    """The rounds of a pipeline, and their turns."""

    def __init__(self, stages: list[StageInterface], schedule: Schedule):
        pipeline = Pipeline(stages, schedule)
        self.rounds = [*pipeline.passes(), Round([*pipeline.updates()])]
        self.step = Step(pipeline.places, pipeline.programs)
        self.turns = transfer(self.step, self.rounds, pipeline.kept)


@settings(max_examples=60)
@given(st.one_of(test_step.steps(), test_step_tables.steps()))
def test_every_value_of_a_pipeline_is_where_it_is_read(made):
    lowered = LoweredStages(*made)
    check_transfers(lowered.step, lowered.rounds, lowered.turns)


def three_stages() -> LoweredStages:
    """Three stages, of which the second passes a value on that the last reads; they share a
    parameter, which the last splits and the first does not, and need summaries."""
    cost = replace(test_step.NOTHING, summary_bytes=4, summarize_bytes=4)
    stages = test_step.interfaces(chain(4, skips=[(0, 3)], shared=[(0, 3)]), [1, 3], cost)
    stages[1] = replace(stages[1], kept_inputs=(0,), residual_bytes=10)
    halves = {p: nbytes // 2 for p, nbytes in stages[2].param_bytes.items()}
    stages[2] = replace(stages[2], param_bytes=halves)
    return LoweredStages(stages, make_schedule("1f1b", 3, 3))


def without_each(block: Block) -> Iterator[Block]:
    for i, each in enumerate(block):
        if isinstance(each, Copy | Feed):
            yield [*block[:i], *block[i + 1 :]]


def twice_each(block: Block) -> Iterator[Block]:
    for i, each in enumerate(block):
        if isinstance(each, Copy):
            yield [*block[: i + 1], each, *block[i + 1 :]]


def of_another(block: Block) -> Iterator[Block]:
    """A copy of what its target is, as if that had not changed or moved."""
    copies = [i for i, each in enumerate(block) if isinstance(each, Copy)]
    for i, j in pairwise(copies):
        one, other = block[i], block[j]
        if isinstance(one, Copy) and isinstance(other, Copy):
            yield [*block[:i], replace(one, source=other.source), *block[i + 1 :]]


@pytest.mark.parametrize("fault", [without_each, twice_each, of_another])
def test_faults_of_transfers_are_seen(fault: Callable[[Block], Iterator[Block]]):
    count = 0
    stages = three_stages()
    check_transfers(stages.step, stages.rounds, stages.turns)
    for lowered in [*(example(*off) for off in EXAMPLES), stages]:
        for block in blocks_of(lowered.turns):
            for wrong in fault(block):
                turns = [
                    turn._replace(
                        arrivals=[wrong if each is block else each for each in turn.arrivals],
                        body=[wrong if each is block else each for each in turn.body],
                    )
                    for turn in lowered.turns
                ]
                count += 1
                with pytest.raises((AssertionError, KeyError)):
                    check_transfers(lowered.step, lowered.rounds, turns)
    assert count > 20


# ---- residency -----------------------------------------------------------------------------------


def check_residency(step: Step, turns: Sequence[Blocks]) -> None:
    """Nothing is added or left out but for ends of what goes out, which come with the next pass at
    the latest; devices run their programs in order, and arrivals come one pass early at most."""
    issued, given = step.instructions, [each for block in blocks_of(turns) for each in block]
    number = {id(each): n for n, each in enumerate(issued)}
    assert len(number) == len(issued) and all(id(each) in number for each in given)
    out = defaultdict[int, list[int]](list)
    for each in given:
        if isinstance(each, Copy):
            source, target = (step.slots[slot].place.host for slot in (each.source, each.target))
            if target and not source:
                out[each.source].append(number[id(each)])
    ours = {id(each) for each in given}
    ends = {
        s: n
        for n, e in enumerate(issued)
        if id(e) not in ours and isinstance(e, Free)
        for s in e.slots
    }
    assert len(issued) == len(given) + len(ends) and ends.keys() == out.keys()
    lanes = defaultdict[int, list[tuple[int, int, Blocks]]](
        list
    )  # first and last program of passes
    readers = defaultdict[int, list[Blocks]](list)
    for turn in turns:
        for block in turn.arrivals:
            readers[id(block)].append(turn)
    for turn in turns:
        runs = [number[id(e)] for block in turn.body for e in block if isinstance(e, Run)]
        if turn.of.arrivals is not None and turn.of.lane is not None:
            lanes[turn.of.lane].append((runs[0], runs[-1], turn))
    for device in range(step.num_devices):
        runs = [
            number[id(each)]
            for each in given
            if isinstance(each, Run) and device in step.programs[each.program].place.memories
        ]
        assert runs == sorted(runs), "programs in another order"
        passes = lanes[device]
        for (_, last, _), (_, _, turn) in zip(passes, passes[2:], strict=False):
            for block in turn.arrivals:
                if readers[id(block)][0] is turn and {t.of.lane for t in readers[id(block)]} == {
                    device
                }:
                    assert number[id(block[0])] > last, "it comes two passes early"
    for slot, copies in out.items():
        starts = [first for first, _, _ in lanes[step.slots[slot].place.devices[0]]]
        behind = [n for n, first in enumerate(starts) if first > max(copies)]
        assert ends[slot] > max(copies)
        assert len(behind) < 2 or ends[slot] < starts[behind[1]], "it stays for two passes"


@settings(max_examples=60)
@given(drawn, st.booleans(), st.booleans())
def test_arrivals_come_early_and_what_goes_out_ends_late_where_there_is_room(
    problem, ahead, behind
):
    graph, sizes, limit = problem
    lowered = Lowered(graph, sizes)
    early = {"ahead": ahead, "behind": behind}
    check_residency(lowered.resided(limit, **early), lowered.turns)
    least = lowered.peak(limit, ahead=False, behind=False)
    assert lowered.peak(limit, **early) <= max(limit, least)


@pytest.mark.parametrize("off", EXAMPLES)
def test_faults_of_residency_are_seen(off):
    lowered = example(*off)
    step, count = lowered.resided(10**6), 0
    check_residency(step, lowered.turns)

    def refused(instructions: list[Instruction]) -> None:
        nonlocal count
        count += 1
        with pytest.raises((AssertionError, ValueError)):
            check_residency(replace(step, instructions=instructions), lowered.turns)

    issued, arriving = step.instructions, {id(b[0]) for t in lowered.turns for b in t.arrivals}
    runs = [n for n, each in enumerate(issued) if isinstance(each, Run)]
    for n, each in enumerate(issued):
        rest = [*issued[:n], *issued[n + 1 :]]
        refused(rest)  # forgotten
        ends = isinstance(each, Free) and step.slots[each.slots[0]].place.host is None
        if ends and n < runs[4]:  # too late
            refused([*rest, each])
        if id(each) in arriving and n > runs[8]:  # too early
            refused([each, *rest])
    assert count > len(issued)


@pytest.mark.parametrize("off", EXAMPLES[:3])
def test_a_room_that_is_not_counted_is_seen(off, monkeypatch):
    lowered = example(*off)
    least, most = (lowered.peak(limit) for limit in (1, 10**6))
    assert least < most
    limit = (least + most) // 2
    assert lowered.peak(limit) <= limit
    for name, wrong in (
        ("has", lambda *_: True),
        ("most", lambda *_: (0, 0)),
        ("most_of", lambda *_: 0),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Room, name, wrong)
            assert max(lowered.peak(at) - at for at in range(least, most)) > 0, name


# ---- waits ---------------------------------------------------------------------------------------


def check_waits(step: Step) -> None:
    """What copies use ends behind waits, none of which is needless, or comes before it has to."""
    replay(step)
    instructions, source = step.instructions, dict[int, int]()
    for n, each in enumerate(instructions):
        if isinstance(each, Copy):
            source[each.target] = each.source
        if isinstance(each, Wait):
            with pytest.raises(ExecutionError, match="may still use it"):
                replay(replace(step, instructions=[*instructions[:n], *instructions[n + 1 :]]))
            behind = next(e for e in instructions[n:] if not isinstance(e, Wait))
            gone = behind.slots if isinstance(behind, Free) else getattr(behind, "donated", ())
            ended = {each.slot, source.get(each.slot)} & {*gone}
            assert ended, "it comes before it has to"
            places = {step.slots[slot].place for slot in {*ended, source.get(each.slot, each.slot)}}
            assert each.place in places, "it holds up what has nothing to do with it"


@settings(max_examples=30)
@given(drawn, st.booleans())
def test_every_wait_is_needed_where_it_is(problem, behind):
    graph, sizes, limit = problem
    check_waits(finished(Lowered(graph, sizes).resided(limit, behind=behind)))


FAULTS = ("forgotten", "late", "early", "needless", "of the whole host", "of another place")


@pytest.mark.parametrize("off", EXAMPLES)
def test_faults_of_waits_are_seen(off):
    step, count = finished(example(*off).resided(10**6)), Counter[str]()
    issued = step.instructions
    for n, each in enumerate(issued):
        faults: dict[str, list[Instruction]] = {}
        if isinstance(each, Wait):
            faults["forgotten"] = [*issued[:n], *issued[n + 1 :]]
            if not isinstance(issued[n + 1], Wait) and not isinstance(issued[n - 1], Wait):
                faults["late"] = [*issued[:n], issued[n + 1], each, *issued[n + 2 :]]
                faults["early"] = [*issued[: n - 1], each, issued[n - 1], *issued[n + 1 :]]
        elif isinstance(each, Copy):
            faults["needless"] = [*issued[: n + 1], Wait(each.target), *issued[n + 1 :]]
        if isinstance(each, Wait):
            faults["of the whole host"] = [*issued[:n], Wait(each.slot), *issued[n + 1 :]]
            others = (
                place for place in step.places if not {*place.memories} & {*each.place.memories}
            )
            faults["of another place"] = [
                *issued[:n],
                Wait(each.slot, next(others)),
                *issued[n + 1 :],
            ]
        for name, instructions in faults.items():
            count[name] += 1
            with pytest.raises((AssertionError, ExecutionError, pytest.fail.Exception)):
                check_waits(replace(step, instructions=instructions))
    assert all(count[name] for name in FAULTS)
