"""What objects keep of their methods."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace

from capture.memo import forget, memo


@dataclass(frozen=True)
class Squares:
    """Of numbers, times a factor."""

    factor: int
    asked: list

    @memo
    def of(self, number, power=2):
        self.asked.append((number, power))
        return self.factor * number**power


class Shifted(Squares):
    @memo
    def of(self, number, power=2):
        return super().of(number, power) + 1


def test_each_object_works_out_each_answer_once():
    one, other = Squares(1, []), Squares(2, [])
    assert [one.of(3), one.of(3), other.of(3), one.of(3, power=3)] == [9, 9, 18, 27]
    assert one.asked == [(3, 2), (3, 3)] and other.asked == [(3, 2)]


def test_what_a_subclass_makes_of_an_answer_is_kept_apart():
    shifted = Shifted(1, [])
    assert shifted.of(3) == shifted.of(3) == 10 and super(Shifted, shifted).of(3, 2) == 9


def test_a_changed_copy_works_out_its_own_and_equality_does_not_see_what_is_kept():
    one = Squares(1, [])
    assert one.of(3) == 9 and replace(one, factor=2).of(3) == 18 and one == Squares(1, one.asked)


def test_what_is_kept_ends_with_the_object():
    one = Squares(1, [])
    one.of(3)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_what_is_kept_can_be_forgotten():
    one = Squares(1, [])
    assert one.of(3) == 9
    forget(one)
    assert one.of(3) == 9 and one.asked == [(3, 2), (3, 2)] and one.factor == 1
