"""The question of a layer profile (Harmony)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from capture.errors import ProfileError, TargetError, Violation
from capture.machine.target import Target
from capture.model.workload import OfWorkload, WorkloadProtocol, WorkloadSpec
from capture.options import Asked
from capture.plan.choices import Remat, layer_remat_violations

#: Sizes that are profiled up to the largest of interest, where no stride is asked for.
DEFAULT_SIZES = 16


@dataclass(frozen=True)
class LayersQuestion(OfWorkload):
    """The question of a layer profile: whose layers are measured one by one, and for what device.

    Attributes:
        workload: The task, or its name; by name it is measured in worker processes.
        target: Kind of device.
        backend: compile compiles every layer for the target and runs nothing, and estimates
            seconds by its rates; run executes every layer on the devices of the workers. In Python
            ``"compile:TARGET"`` names another target.
        num_layers: Into how many layers a model without marks is cut (default: as many as are
            sensible).
        most: Examples of a step: no larger micro-batch size is profiled (default: until memory
            ends).
        stride: Between the micro-batch sizes that are profiled (default: about 16 up to
            --global-batch; without it every size).
        memory_limit_bytes: Limit per device (default: what the target can use, or, of runs, what
            there is).
        remat: What the backward pass of every layer recomputes: full, dots, or a policy of an
            installed package (default: none of what its own forward pass makes).
        update_bytes_per_second: Bytes per second at which the host updates, such as 100GB, where
            nothing is executed (default: 20GB).

    Raises:
        TargetError: ``target-unknown`` for another backend;
        ProfileError: ``layers-question`` for numbers that are too small, ``layers-remat`` for an
            unknown policy, ``layers-target`` for a target without rates, ``layers-limit`` where
            nothing would end the search for the largest size; all at once.
    """

    workload: WorkloadProtocol | WorkloadSpec
    target: str = "cpu"
    backend: Annotated[str, Asked(choices=("compile", "run"))] = "compile"
    num_layers: Annotated[int | None, Asked(metavar="L")] = None
    most: Annotated[int | None, Asked("global_batch", "B")] = None
    stride: Annotated[int | None, Asked(metavar="U", least=1)] = None
    memory_limit_bytes: Annotated[int | None, Asked("memory")] = None
    update_bytes_per_second: Annotated[float | None, Asked("update_rate")] = None
    remat: Annotated[Remat | None, Asked(metavar="MODE")] = None

    def __post_init__(self) -> None:
        kind, _, target = self.backend.partition(":")
        if kind == "compile" and target:
            object.__setattr__(self, "backend", kind)
            object.__setattr__(self, "target", target)
        if self.backend not in ("compile", "run"):
            raise TargetError.of(
                f"backend={self.backend!r} measures no layers alone; choose compile, "
                "compile:TARGET or run.",
                "target-unknown",
            )
        ProfileError.check(self._violations())

    def _violations(self) -> Iterator[Violation]:
        target = Target.load(self.target)
        yield from layer_remat_violations(self.remat, "layers-remat")
        for name in ("num_layers", "most", "stride", "memory_limit_bytes"):
            given = getattr(self, name)
            if given is not None and given < 1:
                yield Violation(f"{name}={given} must be at least 1.", "layers-question")
        rate = self.update_bytes_per_second
        if rate is not None and not 0 < rate < float("inf"):
            yield Violation(
                f"update_bytes_per_second={rate} is no rate; give bytes per second above 0.",
                "layers-question",
            )
        if self.executes and rate is not None:
            yield Violation(
                "update_bytes_per_second is assumed where nothing is executed; backend='run' "
                "measures updates: leave it out.",
                "layers-question",
            )
        if not self.executes and target.rates is None:
            yield Violation(
                f"target={self.target!r} has no rates to estimate seconds from; name another, such "
                "as h100, or use backend='run'.",
                "layers-target",
            )
        if target.platform == "cpu" and self.limit_bytes is None and self.most is None:
            yield Violation(
                f"target={self.target!r} has no limit, so no micro-batch size is the largest; give "
                "memory_limit_bytes (--memory) or most (--global-batch).",
                "layers-limit",
            )

    @property
    def executes(self) -> bool:
        return self.backend == "run"

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit of one device; None where only the device's allocator knows it."""
        if self.memory_limit_bytes is not None or self.executes:
            return self.memory_limit_bytes
        memory = Target.load(self.target).memory
        return None if memory is None else memory.usable_bytes

    @property
    def step_size(self) -> int:
        """The stride between profiled micro-batch sizes, as asked or by default."""
        return self.stride or max(1, (self.most or 1) // DEFAULT_SIZES)

    @property
    def target_name(self) -> str:
        """The target that the layers are profiled for, by name."""
        return self.target

    @property
    def process_needs(self) -> tuple[int, str]:
        """The devices of a process that measures, and their platform."""
        return 1, "cpu" if self.executes else Target.load(self.target).platform
