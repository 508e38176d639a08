"""Tests of seconds in which collectives hide behind kernels."""

import random
from dataclasses import replace

import pytest

from capture.compiler.work import work_of_text
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.stage_cost import SplitCost, StageCost
from capture.measured.work import Collective, Kernel, ProgramWork
from capture.plan.prediction import StepTime
from capture.predictor.step_time import describe_time
from capture.step.overlap import ProgramSeconds, overlapped
from capture.step.times import TimeModel, exposed_seconds
from tests.overlap_events import Events


def test_a_transfer_hides_behind_what_runs_before_its_end():
    assert overlapped("+0 0 -0 1", [2.0, 1.0], [1.5]) == ProgramSeconds(3.0, 1.5, 0.0)


def test_what_is_waited_for_at_once_is_exposed():
    assert overlapped("0 =0 1", [2.0, 1.0], [1.5]) == ProgramSeconds(3.0, 1.5, 1.5)


def test_transfers_have_the_link_one_after_the_other():
    """The second begins when the first has ended: of four seconds two are hidden."""
    assert overlapped("+0 +0 0 -0 -1", [2.0], [2.0]) == ProgramSeconds(2.0, 4.0, 2.0)


def test_what_ends_after_the_last_kernel_is_exposed():
    """A transfer that goes on in the next turn of a loop is waited for there, and in the end."""
    assert overlapped("3( -0 0 +0 )", [1.0], [0.5]) == ProgramSeconds(3.0, 1.5, 1.5)
    assert overlapped("3( -0 +0 0 )", [1.0], [1.5]) == ProgramSeconds(3.0, 4.5, 1.5)


def test_loops_run_as_often_as_they_do():
    inner = "2( 0 2( 1 ) )"
    assert overlapped(inner, [1.0, 10.0], []).computing == 2 * (1 + 2 * 10)
    sent = overlapped("2( 0 2( +0 1 -0 ) )", [1.0, 10.0], [12.0])
    assert (sent.computing, sent.sending, sent.exposed) == (42.0, 48.0, 8.0)


def _drawn(generator, depth=0):
    words = []
    for _ in range(generator.randint(1, 6)):
        kind = generator.random()
        if kind < 0.2 and depth < 2:
            times = generator.randint(1, 3)
            words += [f"{times}(", *_drawn(generator, depth + 1), ")"]
        elif kind < 0.45:
            words.append(f"+{generator.randint(0, 2)}")
        elif kind < 0.55:
            words.append(f"={generator.randint(0, 2)}")
        elif kind < 0.75:
            words.append("-")
        else:
            words.append(str(generator.randint(0, 2)))
    return words


@pytest.mark.parametrize("seed", range(60))
def test_orders_take_as_long_as_by_events(seed):
    """Of random programs, loops in loops and waits in other turns among them."""
    generator = random.Random(seed)
    words = _drawn(generator)
    count = sum(word[0] == "+" for word in words)
    order = " ".join(
        f"-{generator.randrange(count)}" if word == "-" else word
        for word in words
        if word != "-" or count
    )
    kernels, sent = ([generator.choice([0.5, 1.0, 2.25, 4.0]) for _ in "abc"] for _ in "12")
    found = overlapped(order, kernels, sent)
    assert found.total == pytest.approx(Events(order, kernels, sent).seconds(), rel=1e-12)
    assert found.total >= max(found.computing, found.sending) - 1e-12


PROGRAM = """HloModule m, is_scheduled=true, num_partitions=2

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %s = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %y = f32[1024]{0} multiply(%x, %x)
  %d = f32[2048]{0} all-gather-done(%s)
  %z = f32[1024]{0} slice(%d), slice={[0:1024]}
  %w = f32[1024]{0} add(%y, %z)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[1024]{0}) tuple(%next, %w)
}

%condition (q: (s32[], f32[1024])) -> pred[] {
  %q = (s32[], f32[1024]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(7)
  ROOT %l = pred[] compare(%j, %n), direction=LT
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (v: f32[1024]) -> f32[1024] {
  %v = f32[1024]{0} parameter(0)
  %k = s32[] constant(0)
  %r = f32[1024]{0} all-reduce-start(%v), replica_groups={}, to_apply=%sum
  %e = f32[1024]{0} exponential(%v)
  %a = f32[1024]{0} all-reduce-done(%r)
  %u = f32[1024]{0} all-reduce-start(%e), replica_groups={}, to_apply=%sum, backend_config={"is_sync":true}
  %f = f32[1024]{0} all-reduce-done(%u)
  %g = f32[1024]{0} add(%a, %f)
  %o = (s32[], f32[1024]{0}) tuple(%k, %g)
  %h = (s32[], f32[1024]{0}) while(%o), condition=%condition, body=%body
  ROOT %m = f32[1024]{0} get-tuple-element(%h), index=1
}
"""


def test_the_order_of_a_scheduled_program_is_read():
    """A transfer that is begun and waited for, one that is waited for at once, and one in a loop
    whose length its condition tells."""
    work = work_of_text(PROGRAM)
    gather, reduce = 0, 1
    assert [one.kind for one in work.collectives] == ["all-gather", "all-reduce"]
    assert [one.count for one in work.collectives] == [7, 2]
    shape = [word for word in work.order.split() if not word.isdigit()]
    assert shape == [f"+{reduce}", "-0", f"={reduce}", "7(", f"+{gather}", "-1", ")"]
    counted = sum(one.count for one in work.kernels)
    assert counted == 2 + 7 * 5, "of the loop: multiply, slice, two sums and the condition"


@pytest.mark.parametrize(
    "changed, times",
    [
        (("constant(1)", "constant(2)"), 4),
        (("constant(1)", "constant(7)"), 1),
        (("direction=LT", "direction=GT"), 1),
        (("tuple(%next", "tuple(%i"), 7),
        (("constant(7)", "constant(0)"), 0),
    ],
)
def test_a_loop_runs_until_its_counter_has_come_to_its_end(changed, times):
    """In the steps of its body; where that is not known, as if it counted one by one, and once where
    nothing is known."""
    order = work_of_text(PROGRAM.replace(*changed)).order
    assert [word for word in order.split() if word.endswith("(")] == [f"{times}("]


@pytest.mark.parametrize("wrapper", ["async", "call"])
def test_a_collective_in_a_computation_of_its_own_is_begun(wrapper):
    """As on the sparse cores of TPUs, and where a kind has no operation that begins it."""
    called = "calls" if wrapper == "async" else "to_apply"
    work = work_of_text(f"""HloModule m, is_scheduled=true, num_partitions=2

%sent (p: f32[1024]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0)
  ROOT %a = f32[1024]{{0}} all-to-all(%p), replica_groups={{{{0,1}}}}, dimensions={{0}}
}}

ENTRY %main (v: f32[1024]) -> f32[1024] {{
  %v = f32[1024]{{0}} parameter(0)
  %s = ((f32[1024]{{0}}), f32[1024]{{0}}) {wrapper}-start(%v), {called}=%sent
  %e = f32[1024]{{0}} exponential(%v)
  %d = f32[1024]{{0}} {wrapper}-done(%s)
  ROOT %g = f32[1024]{{0}} add(%d, %e)
}}
""")
    assert [(one.kind, one.nbytes) for one in work.collectives] == [("all-to-all", 4096)]
    assert work.order.split()[0] == "+0" and work.order.split()[2] == "-0"


def test_a_program_without_a_schedule_has_no_order():
    assert work_of_text(PROGRAM.replace("is_scheduled=true, ", "")).order is None


def test_kernels_that_only_write_come_last():
    work = work_of_text(PROGRAM)
    more = work.writing({4096: 3})
    model = TimeModel(Target.load("h100").rates, Layout(8))
    written = 3 * model.kernel_seconds(Kernel(4096))
    assert model.program_seconds(more) == pytest.approx(model.program_seconds(work) + written)


def test_a_stage_exposes_what_its_passes_do_in_every_micro_batch():
    """And its update once; of a backward pass in two programs these two."""
    model = TimeModel(Target.load("h100").rates, Layout(8))
    sent = Collective("all-reduce", 2**28, 8, 1)
    exposed = model.collective_seconds(sent)
    work = ProgramWork(0, "float32", 0, 0, (sent,), kernels=(Kernel(8),), order="0 =0")
    hidden = replace(work, kernels=(Kernel(2**40),), order="+0 0 -0")
    cost = StageCost(
        *([0] * 5),
        *([()] * 3),
        forward_work=work,
        backward_work=hidden,
        update_work=work,
        split=SplitCost(0, 0, 0, 0, inputs_work=work, weights_work=work),
    )
    assert exposed_seconds(model, cost, 3, False) == pytest.approx(4 * exposed)
    assert exposed_seconds(model, cost, 3, True) == pytest.approx((3 * 3 + 1) * exposed)


def test_a_line_says_what_nothing_hides():
    time = StepTime(2.0, 1.0, 1e12, (0.1, 0.2), exposed_seconds_per_stage=(0.5, 0.0))
    assert describe_time(time).endswith("; communication that nothing hides: 25% 0%")
    without = replace(time, exposed_seconds_per_stage=())
    assert describe_time(without).endswith("per stage: 10% 20%")


RATES = Target.load("h100").rates
LARGE = Collective("all-gather", 2**32, 8, 1, over_replicas=True)


def _work(seconds, *sent):
    nbytes = int(seconds * RATES.reached_bytes_per_second)
    return ProgramWork(0, "float32", 0, nbytes, sent, kernels=(Kernel(nbytes),))


def test_without_an_order_a_share_is_hidden_and_no_more_than_kernels_take():
    model = TimeModel(RATES, Layout(8))
    link = model.collective_seconds(LARGE)
    hidden = RATES.hidden["all-gather"].value
    assert 0 < hidden < 1
    enough, short = (model.seconds_of(_work(share * link, LARGE)) for share in (2, 0.1))
    assert enough.exposed == pytest.approx((1 - hidden) * link)
    assert short.exposed == pytest.approx(0.9 * link, rel=1e-6)
    along = replace(LARGE, over_replicas=False)
    assert model.seconds_of(_work(2 * link, along)).exposed == pytest.approx(link)


def test_bounds_count_the_resources_apart():
    """Both add up over layers, which the longer of them does not."""
    work = _work(1.0, LARGE)
    all_of, computing, sending = (
        TimeModel(RATES, Layout(8), counts).program_seconds(work)
        for counts in ("all", "computing", "sending")
    )
    assert max(computing, sending) <= all_of <= computing + sending
    assert computing == pytest.approx(1.0) and sending > 0
    ordered = replace(work, order="=0 0")
    whole = TimeModel(RATES, Layout(8)).program_seconds(ordered)
    assert whole == pytest.approx(computing + sending)
    assert TimeModel(RATES, Layout(8), "sending").program_seconds(ordered) == whole, "as compiled"


def test_among_other_layers_all_that_replicas_send_may_hide():
    """Of a layer alone: what tensor parallelism sends stays exposed, and the link is still shared."""
    model = TimeModel(RATES, Layout(8))
    replicas, tensors = Collective("all-gather", 2**30, 4, 2), Collective("all-reduce", 2**28, 2, 1)
    kernels = (Kernel(2**36),)
    work = ProgramWork(0, "float32", 0, 0, (replicas, tensors), kernels=kernels, order="=0 0 =1 0")
    seconds = [model.collective_seconds(each) for each in (replicas, tensors)]
    alone, among = model.seconds_of(work), model.hiding_replicas(2).seconds_of(work)
    assert alone.exposed == pytest.approx(sum(seconds))
    assert among.exposed == pytest.approx(seconds[1])
    short = replace(work, kernels=(Kernel(8),))
    assert model.hiding_replicas(2).program_seconds(short) == pytest.approx(sum(seconds))
    assert model.hiding_replicas(1).seconds_of(work).exposed == pytest.approx(0, abs=1e-9)
    expected = _work(100.0, replace(replicas, over_replicas=True))
    assert (
        model.hiding_replicas(2).seconds_of(expected).exposed
        == 0
        < model.seconds_of(expected).exposed
    )
