"""How long a step of packs takes as our own instructions, and what every memory holds: the second
estimate of a plan, beside that by the paper's rules (``capture.papers.harmony.estimate``)."""

from __future__ import annotations

from typing import Protocol

from capture.machine.server import ENDLESS_BYTES, Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.packs import PaperTimes, StepBytes, StepTimes
from capture.plan.task_graph import TaskGraph
from capture.registered import REGISTERED
from capture.step.ledger import Ledger
from capture.step.pack_order import as_the_first
from capture.step.pack_sizes import ProfileSizes
from capture.step.pack_times import packs_seconds, volumes_bytes
from capture.step.packs import build_step
from capture.step.program import Step
from capture.step.timeline import StepTimeline, simulate_step


class PackEstimate(Protocol):
    """The estimate of a step by the paper's rules: see ``capture.papers.harmony.estimate``."""

    seconds: float

    @property
    def peak_bytes(self) -> int: ...

    @property
    def idle_fractions(self) -> tuple[float, ...]: ...

    @property
    def begins(self) -> dict[tuple[int, int], float]: ...

    @property
    def times(self) -> PaperTimes: ...


def by_the_paper(graph: TaskGraph, profile: LayerProfile, server: Server) -> PackEstimate:
    """Return the step as the released scheduler estimates it."""
    return REGISTERED["estimates of packs"]["released"](graph, profile, server)


def packs_step(graph: TaskGraph, profile: LayerProfile, server: Server) -> Step:
    """Build the instructions of a step of a plan of packs.

    Args:
        graph: Tasks of all ranks.
        profile: Seconds and bytes of the layers.
        server: Bandwidths, and memory of the host.
    """
    profile = profile.as_streamed(graph.swaps.stream)
    # The order of the paper's estimate, in which passes are issued.
    begins = as_the_first(graph, by_the_paper(graph, profile, server).begins)
    sizes = ProfileSizes(profile, graph.num_shares)
    return build_step(graph, sizes, server, begins)


def packs_timeline(graph: TaskGraph, profile: LayerProfile, server: Server) -> StepTimeline:
    """Simulate the step of a plan of packs. A host with too little memory is simulated as if it had
    enough."""
    server = server.with_(host_memory_bytes=ENDLESS_BYTES)
    profile = profile.as_streamed(graph.swaps.stream)
    step = packs_step(graph, profile, server)
    return simulate_step(step, packs_seconds(step, graph, profile, server))


def step_times(graph: TaskGraph, profile: LayerProfile, server: Server) -> StepTimes:
    """Simulate a step of packs and return what a plan keeps of its timeline: seconds, idle
    fractions, bytes moved and peaks."""
    timeline = packs_timeline(graph, profile, server)
    return StepTimes(
        **vars(step_bytes(timeline.program_order, timeline.step_seconds)),
        idle_fractions=timeline.bubble_fraction[: graph.num_devices],
        volumes_bytes=volumes_bytes(timeline.step),
    )


def step_bytes(ledger: Ledger, seconds: float | None = None) -> StepBytes:
    """Return what a plan keeps of a replay, whose step takes so many seconds: peak bytes per device
    and of the host, with their parts."""
    fullest, host = max(ledger.peaks, key=lambda peak: peak.peak_bytes), ledger.peak_of("host")
    peaks = ledger.peak_bytes_per_device, fullest.parts, host.peak_bytes, host.parts
    return StepBytes(*peaks, seconds)
