"""What a step comes to: prices, failures, saves, and the cheapest part of a cluster; against numbers
that are worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf, sqrt
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_graphs import chain

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.graph import Tensor
from capture.options import options_of, taken
from capture.plan.why import Bracket, Proven, Why
from recommender import Accountant, Saving, Terms, cheapest_cluster
from recommender.answer import Answer
from recommender.capture.extent import Attempt
from recommender.plan_report import TargetAnswer
from recommender.question import PlanQuestion
from recommender.saving import daly_interval, goodput, young_interval

NODES = Cluster((4, 4), "h100")
POSITIVE = st.floats(1e-3, 1e6)


def graph(tokens=True):
    """Return a chain of layers with some FLOPs, of ids of sequences of 16, or of numbers."""
    given = chain(2)
    size = given.microbatch_size
    layers = tuple(replace(layer, flops=10**12) for layer in given.layers)
    leaf = Tensor("x", (size, 16), "int32" if tokens else "float32", 0)
    return replace(given, layers=layers, batch=(leaf,))


def accountant(tokens=True, state_bytes=36 * 10**9, **terms):
    of = graph(tokens)
    return Accountant(Terms(**terms), of, (None,) * len(of.params), state_bytes)


def answer(seconds, num_devices=4, status="ok", least=None):
    """Return an answer on devices of one node, with a step that no plan is faster than."""
    plan = SimpleNamespace(cluster=Cluster((num_devices,), "h100"), global_batch_size=8)
    proven = Proven(0.0, (Bracket(1.0, 1, 1, 1, True, least, seconds),))
    proof = SimpleNamespace(step_seconds=seconds, to_json=dict)
    return Answer(status, plan, proof, Why(proven=proven))


# ---- saves


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_interval_is_that_of_the_published_examples(hours, minutes):
    """Daly 2006, figures 3 to 5: saves of 5 minutes."""
    assert daly_interval(300, 3600 * hours) / 60 == pytest.approx(minutes, abs=0.5)


def test_saves_that_take_longer_than_failures_leave_are_as_far_apart_as_these():
    assert daly_interval(200, 100) == daly_interval(10**6, 100) == 100
    assert daly_interval(199.999999, 100) == pytest.approx(2 * 100 * (13 / 9) - 200, rel=1e-6)


@given(POSITIVE, POSITIVE, st.floats(0.01, 100))
def test_no_interval_wastes_less_than_youngs(save, mtbf, factor):
    def waste(interval):
        return save / interval + interval / (2 * mtbf)

    best = young_interval(save, mtbf)
    assert best == pytest.approx(sqrt(2 * save * mtbf))
    assert waste(best) <= waste(best * factor) * (1 + 1e-12)


@given(POSITIVE, st.floats(1e-4, 0.5), st.floats(0.2, 5))
def test_hardly_more_is_kept_than_with_dalys_interval(mtbf, part, factor):
    save = part * mtbf
    best = daly_interval(save, mtbf)
    kept = goodput(best, save, save, mtbf)
    assert 0 < kept < 1
    assert goodput(best * factor, save, save, mtbf) <= kept * (1 + 1e-3)
    assert goodput(best, save, 2 * save, mtbf) < kept, "what takes longer to read leaves less"


def test_goodput_is_that_of_a_training_with_random_failures():
    """Segments of training and save are repeated until one has no failure; each failure costs a
    restart, in which others may happen."""
    interval, save, restart, mtbf = 60.0, 10.0, 20.0, 100.0
    draw, clock, done = random.Random(0), 0.0, 0
    while done < 20_000:
        failure, needed = draw.expovariate(1 / mtbf), interval + save
        while failure < needed:
            clock += failure
            failure, needed = draw.expovariate(1 / mtbf), restart + interval + save
        clock, done = clock + needed, done + 1
    assert goodput(interval, save, restart, mtbf) == pytest.approx(
        done * interval / clock, rel=0.03
    )


def test_what_is_never_done_keeps_nothing():
    assert goodput(1.0, 1e6, 1e6, 1.0) == 0.0
    account = accountant(price="1", mtbf="1e-6h", disk_rate="1").of(NODES, 8, 1.0)
    assert account.dollars_per_million == inf and account.saving.goodput_fraction == 0


def test_every_node_saves_its_part_and_every_device_may_fail():
    terms = {"mtbf": "8h", "disk_rate": "1GB/s"}
    account = accountant(**terms).of(NODES, 8, step_seconds=2.0)
    saving = account.saving
    assert saving.mtbf_seconds == 3600.0, "8 hours, 8 devices"
    assert saving.save_seconds == 18.0, "36 GB, 2 nodes of 1 GB/s"
    part = 18 / 7200
    interval = 360 * (1 + sqrt(part) / 3 + part / 9) - 18
    assert saving.interval_seconds == pytest.approx(interval)
    assert account.save_every_steps == round(interval / 2)
    kept = interval / (3600 * exp(18 / 3600) * (exp((interval + 18) / 3600) - 1))
    assert saving.goodput_fraction == pytest.approx(kept)
    assert saving == Saving.of(3600.0, 36 * 10**9, 2 * 10**9)


# ---- prices


def test_a_step_costs_all_devices_for_its_seconds():
    priced = accountant(price="2.5/h")
    account = priced.of(NODES, 8, step_seconds=0.36, least_seconds=0.18)
    assert account.dollars_per_step == pytest.approx(2.5 * 8 * 0.36 / 3600)  # 0.002
    assert account.per == "tokens"
    assert account.dollars_per_million == pytest.approx(0.002 / (8 * 16) * 1e6)
    assert account.least_dollars_per_million == pytest.approx(0.001 / (8 * 16) * 1e6)
    assert account.tokens_per_second == pytest.approx(8 * 16 / 0.36)
    rate = Target.load("h100").rates.flops_per_second["tf32"].value
    flops = 3 * 2 * 10**12 * 8 / graph().microbatch_size
    assert account.model_flops_utilization == pytest.approx(flops / rate / 8 / 0.36)
    assert [*account.lines()] == [
        "$0.002 per step, $15.6 per million tokens (8 devices; no plan on these costs less than "
        "$7.81)"
    ]


def test_without_tokens_examples_are_counted_and_without_prices_nothing():
    account = accountant(False, price="2.5").of(NODES, 8, 0.36)
    assert account.dollars_per_million == pytest.approx(0.002 / 8 * 1e6)
    assert (account.tokens_per_second, account.per) == (None, "examples")
    assert list(account.cells()) == ["MFU", "$/M examples"]
    account = accountant().of(NODES, 8, 0.36)
    assert account.dollars_per_step is None and not [*account.lines()]
    assert list(account.cells()) == ["tokens/s", "MFU"]


def test_tokens_that_failures_lose_are_paid_for():
    terms = {"mtbf": "8h", "disk_rate": "1GB/s"}
    account = accountant(price="2.5", **terms).of(NODES, 8, 0.36, 0.18)
    kept = account.saving.goodput_fraction
    assert account.dollars_per_step == pytest.approx(0.002)
    assert account.dollars_per_million == pytest.approx(0.002 / (8 * 16) * 1e6 / kept)
    assert account.least_dollars_per_million == pytest.approx(account.dollars_per_million / 2)
    priced, saved = account.lines()
    assert "per million tokens, failures included" in priced
    assert saved.startswith("a failure every 1 h, 36 GB of state saved in 18 s: save every 348 s")
    assert saved.endswith("(--save-every 967)")


@given(POSITIVE, st.floats(1.001, 100), st.sampled_from([None, "1h", "1000000h"]))
def test_cost_grows_with_the_price_and_nothing_else_does(price, factor, mtbf):
    terms = {} if mtbf is None else {"mtbf": mtbf, "disk_rate": "1GB/s"}
    low, high = (
        accountant(price=repr(each), **terms).of(NODES, 8, 0.36, 0.2)
        for each in (price, price * factor)
    )
    for name in ("dollars_per_step", "dollars_per_million", "least_dollars_per_million"):
        assert getattr(high, name) == pytest.approx(factor * getattr(low, name))
    assert low.least_dollars_per_million < low.dollars_per_million
    assert (low.saving, low.cells()["MFU"]) == (high.saving, high.cells()["MFU"])


def test_prices_by_target_and_for_the_others():
    terms = Terms("2/h, H100=2.5,v6e=2.7/h")
    assert [terms.price_of(name) for name in ("h100", "v6e", "h200")] == [2.5, 2.7, 2.0]
    assert Terms("h100=2").price_of("h200") is None


def test_what_options_say_is_read_again_from_a_file():
    given = {"price": "2.5/h,v6e=3", "mtbf": "50000h", "disk_rate": "2GB/s"}
    options = {option.name: option for option in options_of(Terms)}
    values = {name: options[name].value(text) for name, text in given.items()}
    terms = Terms(**taken(Terms, values))
    assert (terms.mtbf_seconds, terms.disk_bytes_per_second) == (50000 * 3600, 2e9)
    written = {name: options[name].written(value) for name, value in values.items()}
    assert {name: options[name].value(text) for name, text in written.items()} == values
    assert options["price"].value(2.5) == "2.5", "a number in a file"


PRICE = "write dollars per device and hour, a number above 0, such as 2.5/h or 2.5; there is no"
HOURS = "write hours, a number above 0, such as 2.5h or 2.5; there is no other unit than h"
RATE = "write bytes per second above 0, such as 2GB/s, with KB, .*; there is no other unit of time"


@pytest.mark.parametrize(
    ("terms", "says", "code"),
    [
        *(
            ({"price": text}, PRICE, "money-number")
            for text in ("0", "-1/h", "nan", "inf", "x", "", "2/s", "2/day")
        ),
        ({"price": "h100="}, PRICE, "money-number"),
        ({"price": "1,2"}, "two prices of every target", "money-price"),
        ({"price": "h100=1,H100=2"}, "two prices of h100", "money-price"),
        *(({"mtbf": text}, HOURS, "money-number") for text in ("0h", "5 years", "5days", "-5h")),
        *(({"disk_rate": text}, RATE, "money-number") for text in ("0", "fast", "2GB/h")),
    ],
)
def test_terms_that_mean_nothing_are_refused_with_the_unit_that_there_is(terms, says, code):
    with pytest.raises(PlanError, match=says) as raised:
        Terms(**terms)
    assert raised.value.codes == (code,)


def test_the_price_of_a_target_that_is_misspelt_is_one_error_with_the_right_name():
    with pytest.raises(PlanError) as raised:
        Terms("h101=1").check(["h100"], None)
    [said] = raised.value.violations
    assert said.message.endswith("asked about is h100. Did you mean h100?")


@pytest.mark.parametrize(
    ("terms", "targets", "objective", "codes"),
    [
        ({}, ["h100"], "cost", ["money-price"]),
        ({"price": "h200=1"}, ["h100"], None, ["money-price"] * 2),
        ({"price": "h100=1"}, ["H100", "v6e"], None, ["money-price"]),
        ({"price": "1"}, ["cpu"], None, ["money-terms"]),
        ({"mtbf": "5h"}, ["h100"], None, ["money-terms"]),
        ({"disk_rate": "5GB/s"}, ["h100"], "cost", ["money-terms", "money-price"]),
    ],
)
def test_terms_that_do_not_go_with_the_question_are_refused(terms, targets, objective, codes):
    with pytest.raises(PlanError) as raised:
        Terms(**terms).check(targets, objective)
    assert [*raised.value.codes] == codes


def test_terms_that_go_with_the_question_are_taken():
    Terms("1", mtbf="5h", disk_rate="1GB/s").check(["h100", "v6e"], "cost")
    Terms().check(["cpu"], "memory")


# ---- the cheapest part of a cluster


def steps(of, status="ok"):
    """Return what answers a question by its number of devices: seconds of the step; no plan fits
    on a number that is not there."""

    def ask(question):
        num = question.cluster.num_devices
        return answer(of.get(num, 1.0), num, status if num in of else "infeasible")

    return ask


@pytest.mark.parametrize(
    ("of", "chosen"),
    [
        ({1: 8.0, 2: 4.1, 4: 2.2, 8: 1.2}, 1),
        ({2: 4.1, 4: 1.9, 8: 1.2}, 4),  # less is computed again
        ({1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}, 1),
    ],
)
def test_the_cheapest_part_is_chosen_and_all_are_considered(of, chosen):
    question = PlanQuestion(NODES, 8, 1, objective="cost")
    best, attempts = cheapest_cluster(steps(of), question, accountant(price="2").rank)
    assert best.question.cluster.num_devices == chosen
    assert [each.question.cluster.num_devices for each in attempts] == [1, 2, 4, 8]


def test_more_devices_fail_more_often_so_that_fewer_may_be_cheaper():
    seconds = {1: 8.0, 2: 3.99}
    fails = {"mtbf": "1h", "disk_rate": "100MB/s"}
    question = PlanQuestion(Cluster((2,), "h100"), 8, 1, objective="cost")
    for terms, chosen in (({}, 2), (fails, 1)):
        rank = accountant(price="2", **terms).rank
        best, _ = cheapest_cluster(steps(seconds), question, rank)
        assert best.question.cluster.num_devices == chosen


def test_nothing_fits_on_any_part():
    best, attempts = cheapest_cluster(steps({}), PlanQuestion(NODES, 8, 1), accountant().rank)
    assert best is None and len(attempts) == 4


def test_accounts_take_the_proven_bound_and_the_simulated_step():
    priced = accountant(price="1")
    found = priced.account(answer(2.0, least=1.0))
    assert found.least_dollars_per_million == pytest.approx(found.dollars_per_million / 2)
    simulated = priced.account(answer(2.0, least=1.0), SimpleNamespace(step_seconds=4.0))
    assert simulated.dollars_per_million == pytest.approx(2 * found.dollars_per_million)
    assert priced.account(answer(2.0)).least_dollars_per_million is None
    assert priced.account(answer(None)) is None
    assert priced.account(replace(answer(2.0), plan=None)) is None


# ---- several targets


def test_a_target_has_an_account_where_a_plan_fits():
    def attempt(num_devices, status="ok"):
        found = accountant(price="1").of(NODES, 8, 2.0)
        question = PlanQuestion(Cluster((num_devices,), "h100"), 8, 1)
        return Attempt(question, answer(2.0, status=status), found)

    both = TargetAnswer(target="h100", smallest=attempt(1), asked=attempt(8))
    assert both.attempts == [both.smallest, both.asked] and both.account is both.asked.account
    alone = TargetAnswer(target="h100", smallest=attempt(8), asked=attempt(8))
    assert alone.attempts == [alone.asked]
    none = TargetAnswer(target="h100", asked=attempt(8, "infeasible"))
    assert none.account is None and none.attempts == [none.asked]
    assert TargetAnswer(target="v6e", failure="no compiler").attempts == []
