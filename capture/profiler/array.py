"""What a search must know of an array of models on a target: its segments, compiled for devices
that need not be there, with their memory and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape

from capture.compiler.target_compiler import TargetCompiler
from capture.errors import PlanError
from capture.machine.cluster import Cluster, Machine
from capture.model.workload import WorkloadProtocol
from capture.plan.array import BUNDLE_BYTES, Member, Shared
from capture.runtime.array_programs import ArrayPrograms
from capture.runtime.fused import Fuser
from capture.runtime.layerwise import hyperparameter_violations, param_paths
from capture.step.sub_array import Call, ProgramFacts, SubArray, Uses

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ArrayProfile:
    """The programs of sub-arrays of any size, compiled when they are asked for (``Programs``).

    Attributes:
        workload: The task of every model.
        cluster: One device of a target with rates.
        batch_size: Examples of one model in a step.
        num_layers: Of a loss without marks; 0 to choose.
        shared, shared_batches, bundle_bytes: As in the plan; what is shared may be a predicate.
        progress: Told (kind, done, total) of what is compiled.
    """

    workload: WorkloadProtocol
    cluster: Cluster
    batch_size: int
    num_layers: int = 0
    shared: Shared = ()
    shared_batches: bool = False
    bundle_bytes: int = BUNDLE_BYTES
    progress: Progress = field(default=lambda kind, done, total: None, compare=False)
    _prepared: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    @cached_property
    def machine(self) -> Machine:
        """The target, with its rates and memory.

        Raises:
            TargetError: ``devices-no-rates``.
        """
        return Machine.of(self.cluster)

    @cached_property
    def fuser(self) -> Fuser:
        return Fuser(
            self.workload,
            self.batch_size,
            self.num_layers,
            shared=self.shared,
            shared_batches=self.shared_batches,
            bundle_bytes=self.bundle_bytes,
        )

    @cached_property
    def programs(self) -> ArrayPrograms:
        compiler = TargetCompiler(self.machine.target, count_work=True)
        (device,) = compiler.devices(1)
        return ArrayPrograms(device, compiler, self.machine.rates)

    @property
    def shared_patterns(self) -> tuple[str, ...]:
        """As a plan has them: of a predicate, the paths that it chose."""
        if not callable(self.shared):
            return tuple(self.shared)
        paths, shared = param_paths(self.fuser.traced), self.fuser.optimizer.shared
        return tuple(dict.fromkeys(escape(paths[p]) for p in sorted(shared)))

    @property
    def model_hash(self) -> str:
        return self.fuser.traced.graph.model_hash

    def check(self, models: tuple[Member, ...]) -> None:
        """Refuse models that the optimizer cannot have.

        Raises:
            PlanError: ``array-hyperparameter``.
        """
        PlanError.check(hyperparameter_violations(self.fuser.optimizer, models))

    def sub_array(self, num_models: int) -> SubArray:
        """So many models, fused."""
        return self.fuser.of(num_models)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Compile the segments of sub-arrays of some sizes: what every search asks for first."""
        wanted = {
            self.programs.name_of(array, issued.call): (array, issued.call)
            for array in map(self.fuser.of, sorted(set(sizes)))
            for issued in Uses(array).issued
        }
        for done, (array, call) in enumerate(wanted.values()):
            self.progress("segments", done, len(wanted))
            self.programs.facts(array, call)
        self.progress("segments", len(wanted), len(wanted))
        self._prepared.update(wanted)

    def facts(self, sub_array: SubArray, call: Call) -> ProgramFacts:
        """See ``Programs``."""
        before = len(self.programs.executables)
        found = self.programs.facts(sub_array, call)
        if len(self.programs.executables) > before:
            # How many more there will be nobody knows.
            self.progress("more programs", self._num_more, self._num_more + 1)
        return found

    def end(self) -> None:
        """Nothing more will be asked for."""
        if self._num_more:
            self.progress("more programs", self._num_more, self._num_more)

    @property
    def _num_more(self) -> int:
        return len(self.programs.executables) - len(self._prepared)

    @property
    def counts(self) -> Mapping[str, int]:
        """Of what was compiled."""
        return {"num_programs": len(self.programs.executables)}
