"""The question of a plan of packs (Harmony)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from capture.errors import PlanError, ProfileError, Violation
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.measured.layer_profile import UNMEASURED, LayerProfile
from capture.options import Asked
from capture.plan.packs import question_violations
from capture.plan.task_graph import AS_THEY_ARE, MODES, Mode, Swaps, Switches
from capture.quantities import nearest
from recommender.harmony.packing import EXPERT, PACKING_NAMES, REUSE
from recommender.harmony.problem import PacksProblem
from recommender.harmony.search import ALGORITHMS

BOTH = "both"
#: Forward packs may reuse backward ones, as released.
DEFAULT_PACKINGS = ("balanced_time", REUSE)
#: What ``without`` may name beside the switches of a plan: the search, which then is the expert's
#: choice.
SEARCH = "search"


@dataclass(frozen=True, eq=False)
class PacksQuestion:
    """The question of a plan of packs (Harmony): layers, a server, a minibatch, and what to search.

    Attributes:
        profile: Layers.
        server: Devices, their host, and bandwidths; ``usable_bytes`` limit a pack.
        minibatch_size: Examples in a step.
        mode: pp (wrap-around pipeline), dp (data parallel), or both: the faster that the host
            holds.
        algorithm: bounded, paper (the same answer, every point simulated), judged (the fastest as
            instructions) or wide (more packs and sizes, judged).
        packings: Packings, in the order of ties, of balanced_time, balanced_memory, greedy,
            greedy_reverse, constant, expert, and reuse, for forward packs alone.
        without: Optimizations that are off: grouping, prefetch, jit, offload, p2p, and search,
            which packs as expert.
        equal_passes: The same packs and sizes forward and backward (Equi-FB).
        single_first: Rank what holds the whole model in one pack first, however slow.
        cluster: That the server is made of (``Server.of``), for the plan; None if of none.
        swaps: How weights and gradients travel.

    Raises:
        PlanError: ``packs-mode``, ``packs-batch``, ``packs-packing``, ``packs-switch``,
            ``packs-stream``, ``packs-shard``, ``search-algorithm``; all at once.
    """

    profile: LayerProfile
    server: Server
    minibatch_size: Annotated[int, Asked("global_batch", "B")]
    mode: Annotated[str, Asked(choices=(*MODES, BOTH))] = "pp"
    algorithm: Annotated[str, Asked(choices=tuple(ALGORITHMS))] = "bounded"
    packings: Annotated[tuple[str, ...], Asked("packing")] = DEFAULT_PACKINGS
    without: Annotated[tuple[str, ...], Asked()] = ()
    equal_passes: Annotated[bool, Asked("equi_fb")] = False
    single_first: Annotated[bool, Asked()] = False
    cluster: Cluster | None = None
    swaps: Swaps = AS_THEY_ARE

    def __post_init__(self) -> None:
        PlanError.check(self._violations())

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to choose from: ``"pp"``, ``"dp"`` or both."""
        return tuple(mode for mode in MODES if self.mode in (mode, BOTH))

    @property
    def limit_bytes(self) -> int:
        """The memory of one device that packs may use, in bytes."""
        return int(self.server.usable_bytes.value)

    @property
    def switches(self) -> Switches:
        return Switches.without(name for name in self.without if name != SEARCH)

    def problem(self, mode: Mode) -> PacksProblem:
        """Return the problem that a search solves in one mode."""
        packings = (EXPERT,) if SEARCH in self.without else self.packings
        backward = tuple(name for name in packings if name != REUSE)
        return PacksProblem(
            self.profile,
            self.server,
            mode,
            self.minibatch_size,
            packings,
            backward or DEFAULT_PACKINGS[:1],
            self.switches,
            self.equal_passes,
            self.single_first,
            self.swaps,
        )

    def _violations(self) -> Iterator[Violation]:
        for mode in self.modes or (self.mode,):
            yield from question_violations(mode, self.minibatch_size, self.server.devices)
        for name in self.packings:
            if name not in PACKING_NAMES:
                yield Violation(
                    f"packing={name!r} is unknown; choose of {', '.join(PACKING_NAMES)}."
                    f"{nearest(name, PACKING_NAMES)}",
                    "packs-packing",
                )
        if not self.packings or (EXPERT in self.packings and len(self.packings) > 1):
            yield Violation(
                f"packings={list(self.packings)}; give some, and {EXPERT!r} alone.",
                "packs-packing",
            )
        if self.algorithm not in ALGORITHMS:
            yield Violation(
                f"algorithm={self.algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}.",
                "search-algorithm",
            )
        own = self.packings != DEFAULT_PACKINGS or self.equal_passes or SEARCH in self.without
        if self.algorithm == "wide" and own:
            yield Violation(
                "algorithm='wide' has packs of its own; leave out packings, equal_passes and "
                "without search, or take 'bounded'.",
                "search-algorithm",
            )
        try:
            modes = self.modes or (self.mode,)
            wrong = [each for mode in modes for each in self.swaps.violations(mode, self.switches)]
            yield from dict.fromkeys(wrong)
            if not wrong and self.profile is not UNMEASURED:
                self.profile.as_streamed(self.swaps.stream)
        except (PlanError, ProfileError) as error:
            yield from error.violations
