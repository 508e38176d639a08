"""The problem of the searches for packs: the sizes and packings of a question, as points in the
order of Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from capture.machine.server import Server
from capture.measured.layer_passes import Pass
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import (
    ALL_ON,
    AS_THEY_ARE,
    Configuration,
    Mode,
    Packs,
    Swaps,
    Switches,
    TaskGraph,
    shares,
)
from capture.predictor.pack_step import PackEstimate, by_the_paper
from recommender.harmony.packing import EXPERT, PACKINGS, REUSE, constant, reused


@dataclass(frozen=True)
class PackedConfiguration:
    """A configuration and the names of the packings that it is from; the forward name is empty
    where there are no forward packs."""

    configuration: Configuration
    forward_packing: str
    backward_packing: str

    @property
    def single(self) -> bool:
        """Whether one pack holds the whole model, so that one device could train it resident."""
        return len(self.configuration.backward.packs) == 1


@dataclass(frozen=True, eq=False)
class PacksProblem:
    """The problem that a search for packs solves: layers, a server and a minibatch.

    Attributes:
        profile: Of the layers.
        server: Its ``usable_bytes`` are the limit on C of a pack.
        mode: ``"pp"`` or ``"dp"``.
        minibatch_size: D.
        forward_packings, backward_packings: Names, in the order of ties; ``reuse`` is for forward
            packs alone, and ``expert`` for both or none.
        switches: What of Harmony's optimizations is off.
        equal_passes: Equi-FB: the same sizes and packs in both directions.
        single_first: Whether what holds the model in one pack ranks first: the released scheduler's
            default, which the authors' own scripts turn off.
        swaps: How weights and gradients travel.
    """

    profile: LayerProfile
    server: Server
    mode: Mode
    minibatch_size: int
    forward_packings: tuple[str, ...] = ("balanced_time", REUSE)
    backward_packings: tuple[str, ...] = ("balanced_time",)
    switches: Switches = ALL_ON
    equal_passes: bool = False
    single_first: bool = False
    swaps: Swaps = AS_THEY_ARE

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", self.profile.as_streamed(self.swaps.stream))

    @property
    def equal_sizes(self) -> bool:
        """Whether both directions have micro-batches of one size: at another, the loss would be
        another function."""
        return self.equal_passes or bool(self.profile.coupled)

    @property
    def limit_bytes(self) -> float:
        return self.server.usable_bytes.value

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """The examples of every rank in a step; in a pipeline one entry, as every rank has all."""
        if self.mode == "pp":
            return (self.minibatch_size,)
        return shares(self.minibatch_size, self.server.devices)

    def all_sizes(self, which: Pass) -> list[int]:
        """Return the profiled range of micro-batch sizes, up to the smallest share of a rank."""
        most = min(self.profile.largest(which), *self.shares[-1:])
        return list(range(self.profile.smallest(which), most + 1))

    def sizes(self, which: Pass) -> list[int]:
        """Return the micro-batch sizes that divide every rank's share, as released (H-c); packed by
        hand, only powers of two (H-u)."""
        by_hand = EXPERT in self.backward_packings
        return [
            u
            for u in self.all_sizes(which)
            if not any(share % u for share in self.shares) and not (by_hand and u & (u - 1))
        ]

    def choices(self) -> Iterator[PackedConfiguration]:
        """Yield every configuration of Algorithm 1, in the order of U_B, U_F and packings."""
        if EXPERT in self.backward_packings:
            yield from self._expert()
            return
        forward_sizes = self.sizes("forward")
        for u_b in self.sizes("backward"):
            layers = self.profile.at("backward", u_b)
            for name in self.backward_packings:
                packs = PACKINGS[name](layers, self.profile.num_layers, self.limit_bytes)
                if packs is None:
                    continue
                backward = Packs(u_b, packs)
                if len(packs) == 1:
                    yield PackedConfiguration(Configuration(Packs(u_b, ()), backward), "", name)
                    continue
                for u_f in forward_sizes:
                    if u_f >= u_b and (u_f == u_b or not self.equal_sizes):
                        yield from self._forward(u_f, backward, name)

    def _forward(
        self, u_f: int, backward: Packs, backward_packing: str
    ) -> Iterator[PackedConfiguration]:
        layers, num_layers = self.profile.at("forward", u_f), backward.packs[-1][0]
        for name in (REUSE,) if self.equal_passes else self.forward_packings:
            if name == REUSE:
                packs = reused(backward.packs, layers, self.limit_bytes)
            else:
                packs = PACKINGS[name](layers, num_layers, self.limit_bytes)
            if packs is not None:
                yield PackedConfiguration(
                    Configuration(Packs(u_f, packs), backward), name, backward_packing
                )

    def _expert(self) -> Iterator[PackedConfiguration]:
        """Yield the one configuration that an expert sets by hand (H-u): the largest power of two
        at which every layer fits, with the largest constant packs that fit, the same both ways."""
        for u in reversed(self.sizes("backward")):
            layers = self.profile.at("backward", u)
            packs = constant(layers, self.profile.num_layers, self.limit_bytes)
            if packs is not None:
                forward = Packs(u, packs[:-1])
                yield PackedConfiguration(Configuration(forward, Packs(u, packs)), EXPERT, EXPERT)
                return

    def graph(self, configuration: Configuration, num_ranks: int | None = 1) -> TaskGraph:
        """Return the tasks of a configuration; in data parallelism, of the first ranks."""
        return TaskGraph.of(
            configuration,
            self.mode,
            self.server.devices,
            self.minibatch_size,
            self.switches,
            swaps=self.swaps,
            num_ranks=num_ranks,
        )

    def estimate(self, configuration: Configuration) -> PackEstimate:
        """Return the seconds and bytes of a step as the paper's estimator counts them."""
        return by_the_paper(self.graph(configuration), self.profile, self.server)
