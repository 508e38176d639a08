"""Bounds that grow by a line with the examples on a device: a few numbers of examples are traced,
and what is between them follows.

Whatever a program computes, reads and keeps is a constant and a part of every example
(``capture.runtime.traced_work``), as long as no product becomes large and no other cut smaller.
Where the bounds of two numbers of examples are known, those of one between them are traced as well:

    on the line in every number     so is all between the two
    else                            either side is looked at in the same way

Nor is a number of examples on the line with which a result has as many bytes as an argument whose
memory it may have, and else has not.

On the line means exactly, but for the bytes that programs are expected to take: the largest of
several sums, which a line may be a little above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import log, sqrt
from typing import Any, NamedTuple

from capture.documents import mapped, read, write
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageBounds

#: Of the expected cost, what may be more on the line, by this part.
_PEAKS, _MORE = ("forward_bytes", "backward_bytes"), 0.05


class _Numbers(NamedTuple):
    """The numbers of bounds as lists, and the document without them."""

    form: Any
    exact: list[int]
    peaks: list[int]
    sizes: list[list[int]]

    @property
    def equal(self) -> set[tuple[int, int, int]]:
        """The arguments that have as many bytes as a result, as (program, argument, result)."""
        programs = zip(self.sizes[::2], self.sizes[1::2], strict=True)
        return {
            (at, i, j)
            for at, (given, made) in enumerate(programs)
            for i, one in enumerate(given)
            for j, other in enumerate(made)
            if one == other
        }


class Line:
    """The bounds of the same passes as a function of the examples on a device.

    Args:
        configs: Stage configs by the number of examples on a device; they differ in size and
            replicas alone.
        trace: Bounds one of them.
    """

    def __init__(
        self, configs: Mapping[int, StageConfig], trace: Callable[[StageConfig], StageBounds]
    ):
        self._configs, self._traced = configs, trace
        self._numbers = cache(self._numbers_of)
        #: Of those that are not traced, the two that are known to be on a line with them.
        self._ends: dict[int, tuple[int, int]] = {}
        examples = sorted(configs)
        self._trace(*{examples[0], examples[-1]})
        self._look_between(examples[0], examples[-1], {configs[examples[0]].microbatch_size})

    def follows(self, examples: int) -> bool:
        """Tell whether bounds with ``examples`` on a device lie on a line between others and were
        not traced."""
        return examples in self._ends

    def at(self, examples: int) -> StageBounds:
        """Return the bounds of the passes with ``examples`` on a device."""
        found = None
        if examples in self._ends:
            found = self._on_line(examples, *self._ends[examples])
        return self._traced(self._configs[examples]) if found is None else _bounds(found)

    def _look_between(self, low: int, high: int, sizes: set[int]) -> None:
        inside = [each for each in sorted(self._configs) if low < each < high]
        if not inside:
            return
        sizes.add(self._configs[high].microbatch_size)
        if len(inside) == 1:  # nothing can follow from it
            sizes.add(self._configs[inside[0]].microbatch_size)
            return self._trace(*inside)

        def rank(each: int) -> tuple[bool, float]:
            """Return a key by which sizes that are traced already, and thus are quick, come
            first."""
            is_new = self._configs[each].microbatch_size not in sizes
            return is_new, abs(log(each / sqrt(low * high)))

        on_line = [each for each in inside if self._on_line(each, low, high) is not None]
        middle = min(on_line or inside, key=rank)
        sizes.add(self._configs[middle].microbatch_size)
        if _agree(self._on_line(middle, low, high), self._numbers(middle)):
            self._ends |= dict.fromkeys((each for each in on_line if each != middle), (low, high))
            self._trace(*{*inside} - {*on_line})
        else:
            self._look_between(low, middle, sizes)
            self._look_between(middle, high, sizes)

    def _trace(self, *examples: int) -> None:
        for each in examples:
            self._traced(self._configs[each])

    def _on_line(self, examples: int, low: int, high: int) -> _Numbers | None:
        return _between(self._numbers(low), self._numbers(high), (examples - low, high - low))

    def _numbers_of(self, examples: int) -> _Numbers:
        config = self._configs[examples]
        return _numbers(self._traced(config), config.choice.tensor_parallel)


def lines_of(
    configs: Iterable[StageConfig], trace: Callable[[StageConfig], StageBounds]
) -> Iterator[tuple[Line, Mapping[int, StageConfig]]]:
    """Yield, per group of passes, a line and its configs by the number of examples on a device.
    Groups have the same layers, remat and tensor parallelism, and one or several replicas. What
    lines need is traced here."""
    found = defaultdict[Any, dict[int, StageConfig]](dict)
    for config in configs:
        choice = config.choice
        kind = choice.remat, choice.tensor_parallel, choice.data_parallel == 1
        examples = config.microbatch_size // choice.data_parallel
        found[config.first, config.stop, *kind][examples] = config
    for each in found.values():
        yield Line(each, trace), each


def _numbers(bounds: StageBounds, tensor_parallel: int) -> _Numbers:
    """Return the numbers of bounds, which are the same for any number of replicas."""
    document = write(bounds)
    sizes = document.pop("sizes")
    for cost in (document["least"], document["most"]):
        for name in ("forward_work", "backward_work"):
            for sent in (cost.get(name) or {}).get("collectives", ()):
                if sent["stride"] == tensor_parallel and sent["group_size"] > 1:
                    sent["group_size"] = 2
    peaks = [document["most"].pop(name) for name in _PEAKS]
    exact: list[int] = []
    return _Numbers(_form(document, exact), exact, peaks, sizes)


def _form(document: object, numbers: list[int]) -> Any:
    """Return the document with its integers taken out and appended to ``numbers``."""

    def taken(value: object) -> Any:
        if type(value) is not int:  # a truth is one of another kind
            return value
        numbers.append(value)
        return int

    return mapped(document, taken)


def _filled(form: object, numbers: Iterator[int]) -> Any:
    """Return a form with its integers put back."""
    return mapped(form, lambda value: next(numbers) if value is int else value)


def _between(low: _Numbers, high: _Numbers, part: tuple[int, int]) -> _Numbers | None:
    """Return the numbers on the line between two bounds at a fraction ``part``; None where there is
    no line or they are not integers."""
    if low.form != high.form or [*map(len, low.sizes)] != [*map(len, high.sizes)]:
        return None
    exact = _part(low.exact, high.exact, part)
    sizes = [_part(*each, part) for each in zip(low.sizes, high.sizes, strict=True)]
    if exact is None or None in sizes:
        return None
    done, total = part
    peaks = [a - ((a - b) * done) // total for a, b in zip(low.peaks, high.peaks, strict=True)]
    found = _Numbers(low.form, exact, peaks, sizes)  # type: ignore[arg-type]
    by_chance = found.equal - (low.equal & high.equal)
    return None if by_chance else found


def _part(low: Sequence[int], high: Sequence[int], part: tuple[int, int]) -> list[int] | None:
    """Return the integers on the lines from ``low`` to ``high`` at a fraction ``part``; None where
    one is not whole."""
    done, total = part
    found = [divmod((b - a) * done, total) for a, b in zip(low, high, strict=True)]
    if any(rest for _, rest in found):
        return None
    return [a + more for a, (more, _) in zip(low, found, strict=True)]


def _agree(found: _Numbers | None, traced: _Numbers) -> bool:
    if found is None or found[:2] != traced[:2] or found.sizes != traced.sizes:
        return False
    pairs = zip(found.peaks, traced.peaks, strict=True)
    return all(-1 <= line - peak <= 1 + _MORE * peak for line, peak in pairs)


def _bounds(numbers: _Numbers) -> StageBounds:
    document = _filled(numbers.form, iter(numbers.exact))
    document["most"] |= dict(zip(_PEAKS, numbers.peaks, strict=True))
    return read(document | {"sizes": numbers.sizes}, StageBounds)
