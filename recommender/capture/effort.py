"""The compiler of stages that a search asks, and when a search may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from capture.measured.profile import Profile, StageConfig
from capture.options import Asked, percent
from capture.plan.prediction import Verified
from capture.plan.stages import Plan


class StageCompiler(Protocol):
    """A compiler of stages that knows them from then on; of one that is refused, that no memory
    suffices for it."""

    def attempt(self, plan: Plan, known: Profile) -> tuple[Verified | None, Profile]:
        """Compile a plan's stages; return what the compiler says (None if it refuses one) and the
        profile that knows it now."""
        ...

    def probe(self, configs: Sequence[StageConfig], known: Profile) -> tuple[int, Profile]:
        """Compile stages; return how many were not known, and the profile that knows them now."""
        ...

    def begin(self, configs: Sequence[StageConfig]) -> bool:
        """Begin to compile stages, these and those begun before, where workers are idle, without
        waiting for any. Return whether all are done."""
        ...


@dataclass(frozen=True)
class Effort:
    """The conditions on which a search may end before it has proven the best plan.

    Attributes:
        within_fraction: End once no plan is better than the best compiled one by more (default on
            the command line: 5%; 0%: prove the best of all).
        compiles: Compile the stages of no further plan after so many stages; 0 compiles nothing.
        seconds: Compile the stages of no further plan once this process and its workers on this
            machine have computed for so long, however busy it is (without /proc: this process
            alone).
        below_bytes: Once no plan needs less than so much.
        any_that_fits: Once a compiled plan fits.
        at_once: Stages that are compiled side by side: as many as there are workers.
    """

    within_fraction: Annotated[float, Asked("within", "PART", read=percent)] = 0.0
    compiles: Annotated[int | None, Asked(metavar="N", least=0)] = None
    seconds: Annotated[float | None, Asked(metavar="S", least=1)] = None
    below_bytes: int | None = None
    any_that_fits: bool = False
    at_once: int = 2
