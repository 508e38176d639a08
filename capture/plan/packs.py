"""What a search for packs decides, in plain data: which layers a device holds at a time, streamed
from the memory of its host, and for how many examples.

Its JSON has the fields of the classes below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from capture import documents
from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.plan.choices import Remat, layer_remat_violations
from capture.plan.files import PlanFile
from capture.plan.headroom import Peaks
from capture.plan.task_graph import (
    ALL_ON,
    AS_THEY_ARE,
    MODES,
    Configuration,
    Mode,
    Packs,
    Span,
    Swaps,
    Switches,
    TaskGraph,
    shares,
)
from capture.plan.why import Why

PACKS_PLAN = documents.Format(
    "plan of packs",
    PlanError,
    "packs-plan",
    "see capture/plan/packs.py, which says what it holds",
    kind="packs",
    not_json="file",
    strict=True,
)


@dataclass(frozen=True)
class PaperTimes:
    """The time and bytes of a step by the released scheduler's rules.

    Attributes:
        step_seconds: Seconds until the last rank ends.
        rank_end_seconds: Seconds until each simulated rank ends; in data parallelism the first.
        idle_fractions: Per rank, the part of the step after its end.
        gap_fractions: Per rank, the part of the step in which it computes nothing.
        task_bytes: Bytes of each rank's largest task.
        volumes_bytes: Bytes moved by all devices, by tensor and direction.
    """

    step_seconds: float
    rank_end_seconds: tuple[float, ...]
    idle_fractions: tuple[float, ...]
    gap_fractions: tuple[float, ...]
    task_bytes: tuple[int, ...]
    volumes_bytes: Mapping[str, int]


@dataclass(frozen=True)
class StepBytes:
    """The peak memory of devices and host in a step of the plan's own instructions, replayed.

    Attributes:
        device_peak_bytes: Peak memory of each device.
        device_parts_bytes: Parts of the fullest device's peak, by category.
        host_peak_bytes: Peak memory of the host.
        host_parts_bytes: Parts of the host's peak, by category.
        step_seconds: Seconds of the step, simulated on the server's links; None if unknown.
    """

    device_peak_bytes: tuple[int, ...]
    device_parts_bytes: Mapping[str, int]
    host_peak_bytes: int
    host_parts_bytes: Mapping[str, int]
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepTimes(StepBytes):
    """The seconds and bytes of a step of packs, simulated from measurements of layers alone.

    Attributes:
        step_seconds: Seconds of the step.
        idle_fractions: Per device, the part of the step in which it computes nothing.
        volumes_bytes: Bytes copied between the places, by tensor and direction.
    """

    step_seconds: float
    idle_fractions: tuple[float, ...]
    volumes_bytes: Mapping[str, int]


@dataclass(frozen=True)
class PacksPrediction:
    """The estimates of a plan of packs, by where they come from.

    Attributes:
        paper: Times and bytes by the released scheduler's rules.
        step: Times and bytes of the plan's own instructions, from layers alone.
        compiled: Bytes of those instructions, and seconds where layers tell those of the host, with
            the packs' programs compiled for the target; None where they were not compiled.
    """

    paper: PaperTimes
    step: StepTimes | None = None
    compiled: StepBytes | None = None

    @property
    def memory(self) -> StepBytes | None:
        """The best that is known of memory: compiled, or else from layers; None without either."""
        return self.compiled or self.step

    @property
    def step_seconds(self) -> float | None:
        """The best that is known of the seconds of the plan's own instructions; None if nothing."""
        found = [each.step_seconds for each in (self.compiled, self.step) if each is not None]
        return next((seconds for seconds in found if seconds is not None), None)

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the device that needs most."""
        return max(self.memory.device_peak_bytes if self.memory else self.paper.task_bytes)


@dataclass(frozen=True)
class _Packs:
    """The packs of one direction as files have them.

    Attributes:
        microbatch_size: Examples that go through a pack at once.
        packs: First and last layer of each.
    """

    microbatch_size: int
    packs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, packs: Packs) -> _Packs:
        return cls(packs.microbatch_size, tuple((a, b - 1) for a, b in packs.packs))

    @property
    def read(self) -> Packs:
        return Packs(self.microbatch_size, tuple((a, b + 1) for a, b in self.packs))


@dataclass(frozen=True)
class PacksPlan(PlanFile):
    """Packs of layers on the devices of a server.

    Attributes:
        machine: The server (``capture/machine/server.py``).
        num_layers: Layers of the model.
        minibatch_size: D, examples of a step, of all devices together.
        mode: ``"pp"``, a wrap-around pipeline, or ``"dp"``.
        configuration: (U_F, P_F, U_B, P_B); in files ``forward`` and ``backward``.
        switches: Harmony's optimizations, true for those that are on.
        swaps: How weights and gradients travel.
        remat: What a backward pass recomputes of each layer beside its pack's forward pass
            (``"full"``, ``"dots"``, or a policy of an installed package); None keeps all of a
            pack's, and is left out.
        order: By ids of tasks, which pass is issued when; each task's in turn. Left out, passes are
            issued as if copies took no time.
        model: Name of the layer profile.
        workload: The workload by name; None if no more than a layer profile is known.
        cluster: Cluster of the workload's target; None likewise.
        prediction: What a step is estimated to need.
        why, points: What the search says of its choice, and the best that it evaluated.

    Raises:
        PlanError: every rule that is broken, with its code: ``packs-mode``, ``packs-batch``,
            ``packs-layers`` for packs that leave, repeat or reorder layers, ``packs-last`` where
            the directions disagree on the last pack, ``packs-size`` for a micro-batch size of 0 or
            above the share of a device, ``packs-remat``, ``packs-order`` for an order that leaves
            out or repeats a pass, or has one before what it reads, and those of ``Swaps``.
    """

    FORMAT = PACKS_PLAN
    LEFT_OUT = ("remat", "asked", "order")
    IN_FILES: ClassVar[Mapping[str, Any]] = {
        "mode": str,  # checked by the class
        "forward": _Packs,
        "backward": _Packs,
        "configuration": None,
    }

    machine: Server
    num_layers: int
    minibatch_size: int
    mode: Mode
    configuration: Configuration
    switches: Switches = ALL_ON
    model: str = ""
    cluster: Cluster | None = field(default=None, kw_only=True)
    prediction: PacksPrediction | None = field(default=None, compare=False)
    why: Why | None = field(default=None, compare=False)
    points: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    swaps: Swaps = AS_THEY_ARE
    remat: Remat | None = None
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        PlanError.check(self._violations())

    @property
    def num_devices(self) -> int:
        return self.machine.devices

    @property
    def made_from(self) -> str:
        """A phrase that says from which layer profile the plan was made without a workload."""
        return f"the layer profile of {self.model!r}" if self.model else super().made_from

    @property
    def memory_fraction(self) -> float:
        """The part of a device's memory that the plan counts on, at least what JAX takes itself."""
        return max(0.75, self.machine.usable_bytes.value / self.machine.memory_bytes.value)

    @property
    def host_memory_bytes(self) -> int:
        return int(self.machine.host_memory_bytes.value)

    @property
    def peaks(self) -> Peaks | None:
        """The peak of every device: compiled, or else predicted, which nothing calibrates."""
        found = self.prediction
        if found is None:
            return None
        peaks = tuple(found.memory.device_peak_bytes) if found.memory else (found.peak_bytes,)
        if found.compiled is not None:
            return Peaks.compiled(*peaks)
        return Peaks(peaks, [(peak, peak) for peak in peaks], "predicted", None, extrapolated=True)

    @property
    def predicted_bytes_per_device(self) -> Sequence[int] | None:
        """The peak bytes per device of the plan's own instructions."""
        known = None if self.prediction is None else self.prediction.memory
        return None if known is None else known.device_peak_bytes

    @property
    def target_name(self) -> str:
        """The name of the server that the plan is for."""
        return self.machine.name

    @property
    def host_peak_bytes(self) -> int | None:
        """The peak memory of the host, of the same instructions."""
        known = None if self.prediction is None else self.prediction.memory
        return None if known is None else known.host_peak_bytes

    @property
    def own_limit_bytes(self) -> int:
        """The limit per device that the packs were planned for, in bytes."""
        return int(self.machine.usable_bytes.value)

    @property
    def step_estimate(self) -> tuple[float, str] | None:
        """The simulated seconds of a step of the plan's own instructions, and ``"simulated"``."""
        seconds = None if self.prediction is None else self.prediction.step_seconds
        return None if seconds is None else (seconds, "simulated")

    def tasks(self) -> TaskGraph:
        """Return the tasks of all ranks."""
        about = self.configuration, self.mode, self.machine.devices, self.minibatch_size
        return TaskGraph.of(*about, self.switches, swaps=self.swaps)

    @property
    def step_examples(self) -> int:
        return self.minibatch_size

    def in_files(self) -> dict[str, Any]:
        forward, backward = self.configuration.forward, self.configuration.backward
        return {"forward": _Packs.of(forward), "backward": _Packs.of(backward)}

    @classmethod
    def out_of_file(cls, written: dict[str, Any]) -> PacksPlan:
        directions = (written.pop(name).read for name in ("forward", "backward"))
        return cls(configuration=Configuration(*directions), **written)

    def _violations(self) -> Iterator[Violation]:
        yield from question_violations(self.mode, self.minibatch_size, self.machine.devices)
        yield from self.swaps.violations(self.mode, self.switches)
        yield from layer_remat_violations(self.remat, "packs-remat")
        forward, backward = self.configuration.forward, self.configuration.backward
        yield from _covered("backward", backward.packs, self.num_layers)
        if not backward.packs:
            return
        last = backward.packs[-1][0] if self.num_layers else 0
        if forward.packs and forward.packs[-1][1] != last:
            yield Violation(
                f"forward packs end before layer {forward.packs[-1][1]}, and the last backward "
                f"pack, which computes its own forward pass, begins at layer {last}; let them "
                "meet.",
                "packs-last",
            )
        else:
            yield from _covered("forward", forward.packs, last)
        if self.mode not in MODES or self.minibatch_size < 1:
            return
        share = self.minibatch_size
        if self.mode == "dp":
            share = min(shares(self.minibatch_size, self.machine.devices))
        sizes = {"forward": forward.microbatch_size, "backward": backward.microbatch_size}
        wrong_sizes = [name for name, size in sizes.items() if not 1 <= size <= max(1, share)]
        for name in wrong_sizes:
            yield Violation(
                f"{name} microbatch_size={sizes[name]}; a device has {share} examples of the "
                f"minibatch of {self.minibatch_size}: give 1 to {max(1, share)}.",
                "packs-size",
            )
        if self.order and not wrong_sizes and (why := self.tasks().wrong_order(self.order)):
            yield Violation(f"order: {why}; leave the order out, or plan again.", "packs-order")


def question_violations(mode: str, minibatch_size: int, num_devices: int) -> Iterator[Violation]:
    """Yield a violation for an unknown mode, and for a batch that is too small."""
    if mode not in MODES:
        yield Violation(f"mode={mode!r} is unknown; choose pp or dp.", "packs-mode")
    if minibatch_size < 1:
        yield Violation(
            f"minibatch_size={minibatch_size}; a step has one example at least.", "packs-batch"
        )
    elif mode == "dp" and minibatch_size < num_devices:
        yield Violation(
            f"minibatch_size={minibatch_size} leaves some of num_devices={num_devices} without an "
            "example; give more, use fewer devices, or mode='pp'.",
            "packs-batch",
        )


def _covered(name: str, packs: Sequence[Span], num_layers: int) -> Iterator[Violation]:
    """Yield a violation unless packs cover layers 0 to ``num_layers``, each once and in order."""
    empty = [pack for pack in packs if pack[0] >= pack[1]]
    ends = (0, *(end for pack in packs for end in pack), num_layers)
    apart = any(one != other for one, other in list(pairwise(ends))[::2])
    if empty or apart:
        written = [[first, stop - 1] for first, stop in packs]
        yield Violation(
            f"{name} packs {written} do not cover layers 0 to {num_layers - 1} once and in "
            "order, some layers each; write [first, last] of each.",
            "packs-layers",
        )
