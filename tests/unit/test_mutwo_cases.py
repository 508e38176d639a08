"""mu-TWO's algorithms, case by case, on the graph of the paper's Figure 2; its Figure 6 as a whole."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from merged_graphs import figure_six, layers, random_graph, random_schedule, shown

import capture
from capture.papers.mutwo.engine import Engine
from capture.papers.mutwo.graph import GraphValue, Operation, Pair, Slice, TrainingGraph
from capture.papers.mutwo.lineage import Lineage
from capture.papers.mutwo.memory import memory_of
from capture.papers.mutwo.overhead import swap_overhead, update_swap_prompts
from capture.papers.mutwo.policy import SwapPolicy, schedule_cycle
from capture.papers.mutwo.readings import CORRECTED, PAPER, Readings
from capture.papers.mutwo.schedule import PairSchedule, Prompt

LIMIT = 18
Z1, Z2, Z3, Z4 = range(4)


def stalled(schedule: PairSchedule) -> float:
    return Engine(schedule.readings).run(schedule.graph, schedule.merged()).stall_seconds


# ---- the whole of Figure 6 -----------------------------------------------------------------------

FIGURE_6 = """\
Z1 2a 0  dZ5 dW5 dZ4 dW4 dZ3 dW3 dZ2 +Z1 (Z1) (Z2) dW2 dZ1 dW1 (Z3) (Z4) (Z5)  40
Z2 2b 0  dZ5 dW5 dZ4 dW4 +Z2 dZ3 (Z1) dW3 dZ2 +Z1 (Z2) (Z3) dW2 dZ1 dW1 (Z4) (Z5)  30
Z3 3 1  dZ5 dW5 +Z3 dZ4 dW4 +Z2 dZ3 (Z1) dW3 dZ2 +Z1 (Z2) (Z3) dW2 dZ1 dW1 (Z4) (Z5)  20
Z4 1a 2  dZ5 +Z4 dW5 +Z3 dZ4 dW4 +Z2 dZ3 (Z1) dW3 dZ2 +Z1 (Z2) (Z3) dW2 dZ1 dW1 (Z4) (Z5)  18
"""


def test_figure_6():
    """Z1 behind two forward operations; Z2 behind the first of these and dZ3, while Z1 is served by
    those that follow; Z3 behind dZ4 alone, as dW5 is in the peak interval; Z4 behind nothing."""
    policy = SwapPolicy(PairSchedule(figure_six(), CORRECTED), LIMIT)
    assert not policy.fits and memory_of(policy.schedule).peak_bytes == 50
    lines = []
    while not policy.fits:
        choice = policy.decide()
        assert choice.what == "swap"
        name = policy.schedule.graph.values[choice.tensor].name
        peak = memory_of(policy.schedule).peak_bytes
        lines.append(f"{name} {choice.case} {choice.seconds:g}  {shown(policy.schedule)}  {peak}\n")
    assert "".join(lines) == FIGURE_6
    # What the algorithm says of stalls is what happens.
    execution = Engine(CORRECTED).run(policy.schedule.graph, policy.schedule.merged())
    assert execution.stall_seconds == 3.0 == sum(policy.schedule.now.stalls.values())
    assert execution.seconds == 15 + 3 and execution.seconds_of("in") == 4 * 2
    assert execution.overlapped_in_seconds == 4 * 2 - 3


def test_figure_6_with_a_recomputation_that_is_cheaper_than_the_stall():
    policy = SwapPolicy(
        PairSchedule(figure_six({Z3: Slice(frozenset(), 0.5, 10)}), CORRECTED), LIMIT
    )
    assert policy.run()
    assert [(one.what, one.seconds) for one in policy.choices] == [
        ("swap", 0.0), ("swap", 0.0), ("recompute", 0.5), ("swap", 2.0)
    ]  # fmt: skip
    assert shown(policy.schedule).startswith("dZ5 +Z4 dW5 dZ4 *Z3 dW4 +Z2 dZ3 (Z1) dW3")
    assert stalled(policy.schedule) == 2.0


def test_figure_6_as_printed_does_not_fit():
    """Forward operations are taken as long as the peak falls, and then hold memory themselves."""
    policy = SwapPolicy(PairSchedule(figure_six(), PAPER), LIMIT)
    assert not policy.run()
    assert [one.case for one in policy.choices] == ["2a", "2a", "3", "1b"]


# ---- static analysis (M6, M11) -------------------------------------------------------------------


def test_accesses_of_figure_2():
    graph = layers("one", 10)
    assert graph.intermediates == (Z1, Z2, Z3, Z4)
    assert graph.last_fw_access == {Z1: 1, Z2: 2, Z3: 3, Z4: 4}
    assert graph.first_bw_access == graph.last_bw_access == {Z1: 7, Z2: 5, Z3: 3, Z4: 1}
    assert graph.last_fw_uses == ((), (Z1,), (Z2,), (Z3,), (Z4,))
    assert graph.first_bw_uses[7] == (Z1,) and graph.first_bw_uses[6] == ()
    assert graph.inactive_seconds == {Z1: 10, Z2: 7, Z3: 4, Z4: 1}
    assert graph.idle_seconds(Z4, less_swaps=True) == 1 - 2 * 2
    # Z2 beside Z1, then alone; dZ5 in its workspace; dZ4 beside dZ5.
    assert graph.active_bytes[1] == 20 and graph.rest_bytes[1] == 10
    assert figure_six().backward_of.peak_bytes[5:8] == (10, 12, 4)


# ---- Algorithm C: the six cases (M16 to M20) -----------------------------------------------------


def test_case_1a_in_the_peak_interval_nothing_hides_a_swap():
    schedule = PairSchedule(figure_six(), CORRECTED)
    quote = swap_overhead(schedule, Z4, LIMIT)
    assert (quote.case, quote.seconds, quote.prompt) == ("1a", 2.0, Prompt(1))


def test_case_1b_a_swap_waits_for_the_one_on_the_link():
    """Z2 comes from 2 s to 8 s; dW4 could run at 3 s and waits 5 s for it, and 6 s for Z3."""
    graph = layers("one", 10, swap_seconds=6.0)
    schedule = PairSchedule(Pair(graph, layers("two", 100)), CORRECTED)
    schedule.swap(Z2, Prompt(2), 0.0, [])
    quote = swap_overhead(schedule, Z3, 9)
    assert (quote.case, quote.seconds, quote.prompt) == ("1b", 5.0 + 6.0, Prompt(3))
    schedule.swap(Z3, quote.prompt, quote.seconds, [])
    events = Engine(CORRECTED).run(graph, schedule.merged()).events
    assert next(one.start for one in events if one.label == "one dW4") == 3.0 + quote.seconds


def test_case_2a_forward_operations_alone():
    quote = swap_overhead(PairSchedule(figure_six(), CORRECTED), Z1, LIMIT)
    assert (quote.case, quote.seconds, quote.prompt) == ("2a", 0.0, Prompt(7, at_forward=True))


def test_case_2b_backward_operations_alone():
    """Forward operations are too large to stand before dW2."""
    schedule = PairSchedule(Pair(layers("one", 10), layers("two", 100)), CORRECTED)
    quote = swap_overhead(schedule, Z1, 100)
    assert (quote.case, quote.seconds, quote.prompt) == ("2b", 0.0, Prompt(5))
    assert not schedule.now.shares


def test_case_2b_a_mix_and_case_3_a_rest():
    policy = SwapPolicy(PairSchedule(figure_six(), CORRECTED), LIMIT)
    policy.decide()
    mixed = policy.decide()
    assert (mixed.case, mixed.seconds) == ("2b", 0.0)
    assert policy.schedule.now.shares[Z2].num == 1 and policy.schedule.now.swaps[Z2] == Prompt(4)
    rest = policy.decide()
    assert (rest.case, rest.seconds) == ("3", 1.0)


# ---- M22 to M26 ----------------------------------------------------------------------------------


def test_a_forward_operation_that_moves_ahead_is_replaced_by_the_next():
    schedule = PairSchedule(figure_six(), CORRECTED)
    assert schedule.add_forward(Z1, 7, 1.0) and schedule.add_forward(Z1, 7, 2.0)
    assert "dZ2 (Z1) (Z2) dW2" in shown(schedule)
    assert schedule.add_forward(Z2, 5, 1.0)
    assert "(Z1) dW3 dZ2 (Z2) (Z3) dW2" in shown(schedule)
    # Two more, and nothing is left for Z1.
    assert schedule.add_forward(Z2, 5, 2.0) and schedule.add_forward(Z2, 5, 3.0)
    assert not schedule.add_forward(Z2, 5, 4.0)


def test_an_unsafe_forward_operation_changes_nothing_unless_as_printed():
    pair = Pair(layers("one", 10), layers("two", 100))
    for readings, kept in ((CORRECTED, 0), (replace(CORRECTED, rollback=False), 1)):
        schedule = PairSchedule(pair, readings)
        swap_overhead(schedule, Z1, 100)
        assert sum(share.num for share in schedule.now.shares.values()) == kept


def test_the_peak_interval_is_what_exceeds_the_limit():
    use = memory_of(PairSchedule(figure_six(), CORRECTED))
    above = {rank for what, rank in use.above(LIMIT) if what == "backward"}
    # Three tensors at dZ4 and dW4, two at dZ3 and dW3.
    assert above == {0, 1, 2, 3, 4, 5}


def test_copies_in_never_overlap_and_prompts_move_back():
    for seed in range(60):
        schedule = random_schedule(seed)
        events = Engine(CORRECTED).run(schedule.graph, schedule.merged()).events
        for stream in ("compute", "in", "out"):
            own = [one for one in events if one.stream == stream]
            assert all(a.end <= b.start for a, b in pairwise(own))
    schedule = PairSchedule(figure_six(), CORRECTED)
    schedule.swap(Z4, Prompt(1), 0.0, [])
    schedule.swap(Z1, Prompt(7), 0.0, [])
    assert schedule.now.last_prompt == Prompt(1)
    printed = PairSchedule(figure_six(), PAPER)
    printed.swap(Z4, Prompt(1), 0.0, [])
    printed.swap(Z1, Prompt(7), 0.0, [])
    assert printed.now.last_prompt == Prompt(7)


@pytest.mark.parametrize("again, left", [(0.5, 1.5), (1.5, 0.5), (5.0, 0.0)])
def test_a_recomputation_hides_as_much_of_a_swap_as_it_takes(again, left):
    """Z4 and another tensor at dW5, of which the other one is recomputed there."""
    graph = layers("one", 10, loss_bytes=8)
    values = (*graph.values, GraphValue("Y", 10))
    operations = list(graph.operations)
    operations[0] = replace(operations[0], writes=(Z1, 10))
    operations[6] = replace(operations[6], reads=(*operations[6].reads, 10))
    slices = {10: Slice(frozenset(), again, 10)}
    graph = TrainingGraph("one", values, tuple(operations), 5, slices)
    for readings in (CORRECTED, PAPER):
        schedule = PairSchedule(Pair(graph, layers("two", 2)), readings)
        schedule.recompute(10, [])
        quote = swap_overhead(schedule, Z4, LIMIT)
        assert quote.seconds == (left if readings is CORRECTED else 2 - again)
    # A recomputation that is decided later does the same.
    schedule = PairSchedule(Pair(graph, layers("two", 2)), CORRECTED)
    quote = swap_overhead(schedule, Z4, LIMIT)
    schedule.swap(Z4, quote.prompt, quote.seconds, [])
    schedule.recompute(10, [])
    update_swap_prompts(schedule, 10, LIMIT)
    assert schedule.now.stalls == {Z4: left} and stalled(schedule) == left


# ---- Algorithms D, E and F (M26 to M30) ----------------------------------------------------------


def chain(residents: bool = False) -> TrainingGraph:
    """a -> b -> c, of 1, 2 and 4 s, each read once, backward: c, b, a; or b also when c is."""
    values = tuple(GraphValue(name, 8) for name in "abc")
    reads = [(2, 1) if residents else (2,), (1,), (0,)]
    operations = tuple(
        [Operation(f"F{n}", (n - 1,) if n else (), (n,), 2.0**n) for n in range(3)]
        + [Operation(f"B{n}", of, (), 1.0) for n, of in enumerate(reads)]
    )
    return TrainingGraph("chain", values, operations, 3)


def test_initial_sources_are_the_nearest_tensors_that_are_there():
    graph = chain()
    assert graph.slices == {
        0: Slice(frozenset(), 1.0, 8), 1: Slice(frozenset({0}), 2.0, 8),
        2: Slice(frozenset({1}), 4.0, 8),
    }  # fmt: skip
    # A diamond: what is on two ways is made once (M-s).
    values = tuple(GraphValue(name, 8) for name in ("x", "y", "z", "t"))
    ways = [((), 0), ((0,), 1), ((0,), 2), ((1, 2), 3)]
    forward = [Operation(f"F{v}", reads, (v,), 1.0) for reads, v in ways]
    diamond = TrainingGraph("", values, (*forward, Operation("B", (3,), (), 1.0)), 4)
    assert diamond.intermediates == (3,) and diamond.slices[3].seconds == 4.0


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_chain_costs_the_same_in_whatever_order_it_is_chosen(order):
    """Of c all three, of b two, of a itself: 7 + 3 + 1 s; a total counts what each is made for."""
    lineage, left, chosen = Lineage(chain(), CORRECTED), list(order), []
    while left:
        v = left.pop(0)
        count = lineage.existing(v, chosen)
        chosen.append(v)
        lineage.remaining(v, count, left, chosen)
    assert [lineage.costs[v].seconds for v in range(3)] == [1.0, 3.0, 7.0]
    assert all(lineage.costs[v].sources == frozenset() for v in range(3))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_source_that_is_in_memory_stays_one(order):
    """b is there when c is made again: c costs its own seconds, in whatever order (M-ba)."""
    found = {}
    for readings in (CORRECTED, PAPER):
        lineage, left, chosen = Lineage(chain(residents=True), readings), list(order), []
        while left:
            v = left.pop(0)
            lineage.remaining(v, lineage.existing(v, chosen), left, [*chosen, v])
            chosen.append(v)
        found[readings] = lineage.costs[2].seconds
    assert found[CORRECTED] == 4.0
    assert found[PAPER] == (4.0 if order.index(1) < order.index(2) else 7.0)


def test_the_branches_of_algorithm_f():
    # (a) the chosen one was a source: its sources and seconds are taken over.
    lineage = Lineage(chain(), CORRECTED)
    lineage.remaining(1, 1, [0, 2], [1])
    assert lineage.costs[2].sources == {0} and lineage.costs[2].total_seconds == 6.0
    # (b) and of it a source, that would be made for itself and for the chosen one.
    assert lineage.overhead(0) == 2 * 1.0
    assert lineage.ratio(0) == 8 / 2.0
    printed = Lineage(chain(), PAPER)
    printed.remaining(1, 1, [0, 2], [1])
    assert printed.overhead(0) == 1 * 1.0
    # Skipped: the chosen one is in memory when the candidate is needed.
    lineage = Lineage(chain(residents=True), CORRECTED)
    lineage.remaining(1, 1, [0, 2], [1])
    assert lineage.costs[2].sources == {1} and lineage.overhead(2) == 4.0


def test_a_swapped_source_is_gone_unless_it_is_in_memory():
    for residents, sources in ((False, {0}), (True, {1})):
        schedule = PairSchedule(Pair(chain(residents), chain()), CORRECTED)
        schedule.swap(1, Prompt(0), 0.0, [0, 2])
        assert schedule.lineage.costs[2].sources == sources


def test_a_source_that_is_swapped_later_arrives_before_the_recomputation():
    """c is made from b at B0; b itself is read at B1."""
    schedule = PairSchedule(Pair(chain(), chain()), CORRECTED)
    schedule.recompute(2, [0, 1])
    assert schedule.access(1) == 0
    schedule.swap(1, Prompt(1), 0.0, [0])
    update_swap_prompts(schedule, None, 100)
    assert schedule.now.swaps[1] == Prompt(0)
    # Printed, Algorithm E runs for swaps, too, and makes it anew instead (M-d).
    printed = PairSchedule(Pair(chain(), chain()), PAPER)
    printed.recompute(2, [0, 1])
    printed.swap(1, Prompt(1), 0.0, [0])
    assert printed.lineage.costs[2].sources == {0} and printed.access(1) == 1


# ---- Algorithm B (M14, M15) ----------------------------------------------------------------------


def test_what_fits_is_left_alone_and_what_cannot_fit_is_infeasible():
    assert SwapPolicy(PairSchedule(figure_six(), CORRECTED), 50).run()
    policy = SwapPolicy(PairSchedule(figure_six(), CORRECTED), 50)
    assert policy.run() and not policy.choices
    printed = SwapPolicy(PairSchedule(figure_six(), PAPER), 50)
    assert printed.run() and len(printed.choices) == 1
    assert not SwapPolicy(PairSchedule(figure_six(), CORRECTED), 5).run()


def test_candidates_come_in_falling_inactive_time_and_ratio():
    slices = {v: Slice(frozenset(), seconds, 10) for v, seconds in enumerate((0.4, 0.1, 0.2, 0.3))}
    schedule = PairSchedule(Pair(layers("one", 10, slices=slices), layers("two", 100)), CORRECTED)
    policy = SwapPolicy(schedule, 1)
    # Limits that nothing fits: every swap stalls, and recomputation is cheaper.
    policy.run()
    assert [one.tensor for one in policy.choices] == [Z2, Z3, Z4, Z1]
    assert {one.what for one in policy.choices} == {"recompute"}
    never = PairSchedule(Pair(layers("one", 10), layers("two", 100)), CORRECTED)
    swaps = SwapPolicy(never, 1)
    swaps.run()
    assert [one.tensor for one in swaps.choices] == [Z1, Z2, Z3, Z4]


# ---- readings ------------------------------------------------------------------------------------


def test_every_reading_has_a_row_and_can_be_chosen_alone():
    rows = (Path(capture.__file__).parent / "READINGS.md").read_text()
    for field in fields(Readings):
        assert f"`{field.name}`" in rows, field.name
        assert not getattr(PAPER, field.name) and getattr(CORRECTED, field.name)


#: A random problem on which it matters, alone against all others corrected; those of the second
#: row, as printed.
MATTERS = {
    "both_graphs": 6, "copies_awaited": 0, "credit_that_runs": 1, "idle_less_swaps": 0,
    "last_counted_prompt": 0, "nothing_above_limit": 0, "offload_when_made": 0,
    "peak_asked_anew": 14, "prompts_move_back": 0, "sources_in_memory": 5, "rollback": 0,
    "swaps_stay_sources": 1, "weights_once": 0, "workspace": 0, "prompts_anywhere": 6,
    "totals_of_all": 2,
}  # fmt: skip
MATTERS_PRINTED = {"limit_first": 13, "nodes_follow": 94}


def test_each_reading_makes_a_difference():
    for table, base in ((MATTERS, CORRECTED), (MATTERS_PRINTED, PAPER)):
        for field, seed in table.items():
            other = replace(base, **{field: not getattr(base, field)})
            assert _answer(seed, base) != _answer(seed, other), field
    # Of what is chosen already no total is asked: only the report shows it.
    tables = {*MATTERS, *MATTERS_PRINTED, "totals_of_existing"}
    assert tables == {field.name for field in fields(Readings)}
    for readings, total in ((CORRECTED, 6.0), (replace(CORRECTED, totals_of_existing=False), 4.0)):
        lineage = Lineage(chain(), readings)
        lineage.existing(1, [2])
        assert lineage.costs[2].total_seconds == total


def _answer(seed: int, readings: Readings):
    draw = random.Random(seed)
    one, two = random_graph(draw, "one"), random_graph(draw, "two")
    limit = int(0.6 * schedule_cycle([one, two], 10**9, CORRECTED, 20).peak_bytes)
    found = schedule_cycle([one, two], limit, readings, 20)
    chosen = [(policy.choices, policy.schedule.now.swaps) for policy in found.policies]
    return chosen, [use.held for use in found.uses], found.execute().events
