"""What a layer profile is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from capture.errors import ProfileError, TargetError, Violation
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol, WorkloadSpec

#: Sizes that are profiled up to the largest of interest, where no stride is asked for.
DEFAULT_SIZES = 16


@dataclass(frozen=True)
class LayersQuestion:
    """What a layer profile is asked for.

    Attributes:
        workload: The task, or its name; by name it is measured in worker processes.
        target: Kind of device.
        backend: ``"compile"`` compiles every layer for the target and runs nothing, and estimates
            seconds by its rates; ``"compile:TARGET"`` names another. ``"run"`` executes every layer
            on the devices of the workers.
        num_layers: Into how many layers a model without marks is cut; None: as many as are
            sensible.
        most: No larger micro-batch size is profiled, as of the examples of a step; None: until
            memory ends.
        stride: Between the sizes that are profiled; None: so that there are about 16 up to
            ``most``, or every size.
        memory_limit_bytes: Of a device; None: what the target's can use, or, of runs, what there
            is.
        update_bytes_per_second: At which the host updates, where nothing is executed.

    Raises:
        TargetError: ``target-unknown`` for another backend;
        ProfileError: ``layers-question`` for numbers that are too small, ``layers-target`` for a
            target without rates, ``layers-limit`` where nothing would end the search for the
            largest size; all at once.
    """

    workload: WorkloadProtocol | WorkloadSpec
    target: str = "cpu"
    backend: str = "compile"
    num_layers: int | None = None
    most: int | None = None
    stride: int | None = None
    memory_limit_bytes: int | None = None
    update_bytes_per_second: float | None = None

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
        """Of a device; None where only its allocator knows."""
        if self.memory_limit_bytes is not None or self.executes:
            return self.memory_limit_bytes
        memory = Target.load(self.target).memory
        return None if memory is None else memory.usable_bytes

    @property
    def step_size(self) -> int:
        """The stride, or the usual one."""
        return self.stride or max(1, (self.most or 1) // DEFAULT_SIZES)

    @property
    def spec(self) -> WorkloadSpec | None:
        """The workload by name; None for one made from Python objects."""
        return self.workload if isinstance(self.workload, WorkloadSpec) else None

    @cached_property
    def task(self) -> WorkloadProtocol:
        """The workload, loaded."""
        return self.workload.load() if isinstance(self.workload, WorkloadSpec) else self.workload
