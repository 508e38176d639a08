"""Work for the simulator, drawn or written down."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import strategies as st

from capture.step.simulator import Allocation, Work

DEVICES = (0, 1, "host")


def buffer(name: str, nbytes: int, category: str = "activations", devices=(0,)) -> Allocation:
    return Allocation(name, devices, nbytes, category)


BUFFERS = st.builds(
    Allocation,
    st.just(""),
    st.sampled_from([(0,), (1,), (0, 1), ("host",)]),
    st.integers(0, 9),
    st.sampled_from("ab"),
)


PARTS = st.lists(
    st.tuples(st.sampled_from(["allocates", "temporaries", "produces"]), BUFFERS), max_size=3
)


SECONDS = st.sampled_from([0, 1, 2, 5, Fraction(1, 3)])


@st.composite
def works(draw) -> list[Work]:
    """Items on three streams; who frees a buffer waits for who made it."""
    work: list[Work] = []
    live: dict[str, int] = {}
    for i in range(draw(st.integers(0, 8))):
        parts = [(part, replace(b, name=f"{i}.{n}")) for n, (part, b) in enumerate(draw(PARTS))]
        made = {
            part: tuple(b for where, b in parts if where == part)
            for part in ("allocates", "temporaries", "produces")
        }
        freed = draw(st.sets(st.sampled_from(sorted(live)), max_size=2)) if live else set()
        after = {draw(st.integers(0, i - 1))} if i and draw(st.booleans()) else set()
        after |= {live.pop(name) for name in freed}
        streams = draw(st.sets(st.sampled_from("xyz"), max_size=2))
        work.append(
            Work(
                f"item {i}", tuple(streams), draw(SECONDS), tuple(after), **made, frees=tuple(freed)
            )
        )
        live |= {b.name: i for part, b in parts if part != "temporaries"}
    return work
