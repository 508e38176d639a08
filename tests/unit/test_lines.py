"""Bounds that follow from those of other numbers of examples on a device."""

from dataclasses import replace

import pytest

from capture.measured.profile import StageConfig
from capture.measured.stage_cost import NO_COST, StageBounds
from capture.measured.work import Collective, Kernel, ProgramWork
from capture.plan.choices import StageChoice
from capture.profiler.lines import lines_of

EXAMPLES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1536]
DEGREE = 4


def configs(examples=EXAMPLES):
    """Two to a micro-batch, which are two replicas."""
    choice = StageChoice(2, DEGREE, "cheap")
    return [StageConfig(1, 2, choice, 2 * n) for n in examples]


def bounds(n, kept, peak, replicas=2, kernels=1, sizes=()):
    """What a program with n examples on a device keeps, and is expected to need."""
    work = ProgramWork(
        5 * n,
        "bfloat16",
        7 * n + 100,
        3 * n,
        (Collective("all-reduce", 64, replicas, DEGREE), Collective("all-gather", 2 * n, 4, 1)),
        kernels=(Kernel(7 * n + 100, 5 * n, "bfloat16", "default", 1, (n, 8, 16)),) * kernels,
    )
    least = replace(NO_COST, residual_bytes=kept, forward_bytes=n, forward_work=work)
    return StageBounds(least, replace(least, backward_bytes=peak), sizes)


def asked(truth, examples=EXAMPLES):
    """What is said of every number of examples, and which were traced."""
    traced = {}

    def trace(config):
        n = config.microbatch_size // 2
        return traced.setdefault(n, truth(n))

    ((line, of),) = lines_of(configs(examples), trace)
    assert of == dict(zip(examples, configs(examples), strict=True))
    num_traced = len(traced)
    found = {n: line.at(n) for n in examples}
    return found, num_traced


def test_of_what_grows_by_a_line_three_are_traced():
    """Replicas differ in number, which says nothing."""
    found, num_traced = asked(lambda n: bounds(n, 40 * n + 8, 90 * n, replicas=1536 // n + 1))
    assert num_traced == 3
    for n, each in found.items():
        sent = each.least.forward_work.collectives
        assert sent[0].group_size > 1 and sent[1].nbytes == 2 * n
        assert each == bounds(n, 40 * n + 8, 90 * n, sent[0].group_size)


BENT = {
    "another cut": lambda n: min(40 * n, 20 * n + 700),
    "a product that is large": lambda n: 40 * n + 4096 * (n >= 24),
    "two bends": lambda n: max(3000, min(40 * n, 9000)),
    "padded": lambda n: 40 * (n + 7 & ~7),
}


@pytest.mark.parametrize("kept", BENT.values(), ids=BENT)
def test_what_bends_is_never_said_to_be_on_a_line(kept):
    found, num_traced = asked(lambda n: bounds(n, kept(n), 90 * n))
    assert {n: each.least for n, each in found.items()} == {
        n: bounds(n, kept(n), 90 * n).least for n in EXAMPLES
    }
    assert 3 < num_traced <= len(EXAMPLES)


def test_programs_with_other_kernels_are_on_no_line():
    def truth(n):
        return bounds(n, 40 * n, 90 * n, kernels=1 + (n > 100))

    found, _ = asked(truth)
    assert found == {n: truth(n) for n in EXAMPLES}


def test_a_result_that_has_the_size_of_an_argument_by_chance_is_on_no_line():
    """It may be written there, and the program needs less."""

    def truth(n):
        sizes = ((), (), (4096, 4096), (64 * n, 4096 + 128 * n))
        return bounds(n, 40 * n + 4096 * (64 * n != 4096), 90 * n, sizes=sizes)

    found, num_traced = asked(truth)
    assert found == {n: truth(n) for n in EXAMPLES} and num_traced == 4


def test_programs_with_other_results_are_on_no_line():
    def truth(n):
        return bounds(n, 40 * n, 90 * n, sizes=((1,), (2,) * (1 + (n > 100))))

    assert asked(truth)[0] == {n: truth(n) for n in EXAMPLES}


def test_expected_peaks_may_be_a_little_more_and_no_less():
    def peak(n):
        return max(90 * n + 2000, 100 * n)

    found, num_traced = asked(lambda n: bounds(n, 40 * n, peak(n)))
    assert num_traced < 8
    assert all(peak(n) <= each.most.backward_bytes <= 1.1 * peak(n) for n, each in found.items())
    found, _ = asked(lambda n: bounds(n, 40 * n, min(90 * n, 45 * n + 2000)))  # a line is below
    assert found == {n: bounds(n, 40 * n, min(90 * n, 45 * n + 2000)) for n in EXAMPLES}


def test_parts_of_numbers_are_on_no_line():
    """Halfway between the ends there is none of the odd ones."""
    found, _ = asked(lambda n: bounds(n, n // 2, 90 * n), [1, 2, 3, 4, 7])
    assert [found[n].least.residual_bytes for n in (1, 2, 3, 4, 7)] == [0, 1, 1, 2, 3]


def test_one_replica_and_other_degrees_are_lines_of_their_own():
    others = [StageConfig(1, 2, StageChoice(1, DEGREE, "cheap"), 8)]
    others += [StageConfig(1, 2, StageChoice(2, 1, "cheap"), 8)]
    found = lines_of([*configs([1, 4]), *others], lambda config: bounds(1, 1, 1))
    assert [len(of) for _, of in found] == [2, 1, 1]
