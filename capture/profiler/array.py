"""What a search must know of an array of models on a target: its segments, compiled for devices
that need not be there, or executed on those that are, with their memory and seconds.

A program is executed with no more on the device than itself needs: what it reads comes from the
host before each execution, and all that it read and made is freed after it. So an array of any size
can be measured wherever each of its programs fits alone, which is what the paper's profiler asks
for, too.

Source: Purandare et al. 2023 (mu-TWO), 4.1 and Algorithm A; 1 execution that does not count, and
the median of 3 (3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from glob import escape
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import jax

from capture import environment
from capture.compiler.executable import HOST_MEMORY, Compiler
from capture.compiler.target_compiler import TargetCompiler
from capture.documents import read, write
from capture.errors import PlanError
from capture.machine.cluster import Cluster, Machine
from capture.machine.link_fit import fit_host_link
from capture.machine.links import Layout
from capture.machine.rates import HostLink, Rates
from capture.machine.target import Target
from capture.measured.store import Store
from capture.memo import memo
from capture.model.graph import content_hash
from capture.model.workload import WorkloadProtocol
from capture.profiler.asked import ArrayCall, ArrayShape, HostCopy, ProgramCost
from capture.profiler.executing import ExecutingMachine
from capture.profiler.program_backend import ProgramBackend
from capture.profiler.timing import (
    COPY_BYTES,
    copies_of,
    copy_seconds,
    filled,
    rows_of,
)
from capture.runtime.array_programs import ArrayPrograms, program_name
from capture.runtime.fused import FusedArray, Fuser
from capture.runtime.layerwise import param_paths
from capture.step.program import Place
from capture.step.sub_array import Call, ProgramFacts, SubArray, Uses
from capture.step.times import TimeModel

#: What traces joint steps: an outline that other code made is not theirs.
_CODE = (
    "tracing/*.py",
    "step/interface.py",
    *(
        f"runtime/{name}.py"
        for name in ("fused", "layerwise", "leaf_parts", "optimizer", "segment")
    ),
)
Progress = Callable[[str, int, int], None]
What = ArrayCall | HostCopy
#: Has measured, given a kind of programs and these by key, what is not in the store, and tells how
#: far it is.
Measure = Callable[[str, Mapping[str, What], Progress], Mapping[str, ProgramCost]]

#: Programs that are asked for while choices are weighed.
MORE = "more programs"
_DEVICE = Place("device", (0,))


def _silent(kind: str, done: int, total: int) -> None:
    """Tell nobody how far measurements are."""


def _code() -> str:
    """Return the hash of the source files that trace joint steps."""
    root = Path(__file__).parents[1]
    files = sorted(path for pattern in _CODE for path in root.glob(pattern))
    assert len(files) >= len(_CODE), "every file is there"
    return content_hash([path.read_text(encoding="utf-8") for path in files])


class ArrayBackend(ProgramBackend):
    """The backend that measures programs of an array of models.

    Args:
        workload: The task of every model.
        shape: Settings of the array.
        store, target, machine: As for ``ProgramBackend``.
    """

    version: ClassVar[Mapping[str, int]] = {"array_version": 2}
    num_executions = 3

    def __init__(
        self,
        workload: WorkloadProtocol,
        shape: ArrayShape,
        store: Store | None = None,
        *,
        target: Target | None = None,
        machine: ExecutingMachine | None = None,
    ):
        super().__init__(store, target=target, machine=machine)
        self._workload, self._shape = workload, shape

    @cached_property
    def fuser(self) -> Fuser:
        shape = self._shape
        return Fuser(
            self._workload,
            shape.batch_size,
            shape.num_layers,
            shared=shape.shared,
            shared_batches=shape.shared_batches,
            bundle_bytes=shape.bundle_bytes,
            remat=shape.remat,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make the same backend in another process."""
        return {"shape": self._shape}

    @memo
    def sub_array(self, num_models: int) -> FusedArray:
        """Return a sub-array of ``num_models`` fused models, which cannot run: from its outline in
        the store, or traced and then stored."""
        facts = {"backend": "trace", "versions": environment.versions(), "code": _code()}
        key = content_hash([facts, self.fuser.key(num_models)])
        known = {**facts, "kind": "outline"}  # of no job
        document = self.store.kept(key, lambda: self.fuser.of(num_models).outline, known)
        return FusedArray(self.fuser, num_models, document)

    def key(self, what: What) -> str:
        """Return the content hash of everything that can change a measurement."""
        if isinstance(what, HostCopy):
            return content_hash([self.provenance, "copy", what.direction, what.nbytes])
        return self.key_of(program_name(self.fuser.of(what.num_models), what.call))

    def key_of(self, name: str) -> str:
        """Return the store key of the program with this name."""
        return content_hash([self.provenance, name])

    @cached_property
    def _programs(self) -> ArrayPrograms:
        if self.target is None:
            return ArrayPrograms(jax.devices()[0], Compiler())
        compiler = TargetCompiler(self.target, count_work=True)
        (device,) = compiler.devices(1)
        return ArrayPrograms(device, compiler.compiler())

    def measure(self, what: What) -> ProgramCost:
        """Compile a program and, where this backend executes, time it; of a host copy, time the
        copy."""
        if isinstance(what, HostCopy):
            return ProgramCost(seconds=copy_seconds(what, self.num_executions, self.clock))
        array, programs = self.fuser.of(what.num_models), self._programs
        name = program_name(array, what.call)
        executable = programs.executable(array, what.call, name)
        nbytes = executable.transient_bytes
        if self.machine is None:
            return ProgramCost(nbytes, work=executable.work)
        try:
            timed = partial(self._timed, array, what.call, executable.call)
            seconds, failure = self.executed(timed)
            return ProgramCost(nbytes, seconds, failure=failure)
        finally:
            programs.executables.pop(name)

    def measured(
        self, kind: str, wanted: Mapping[str, What], progress: Progress
    ) -> dict[str, ProgramCost]:
        """Measure programs and copies one by one, and store each as soon as it is done
        (``Measure``); return the measurements by key."""
        found, facts = dict[str, ProgramCost](), {**self.provenance, "kind": "array program"}
        progress(kind, 0, len(wanted))
        for key, what in wanted.items():
            made = partial(lambda each: write(self.measure(each)), what)
            found[key] = read(self.store.kept(key, made, facts), ProgramCost)
            progress(kind, len(found), len(wanted))
        return found

    def _timed(self, array: FusedArray, call: Call, run: Callable[..., object]) -> float:
        here = self._programs.sharding(_DEVICE)
        there = here.with_memory_kind(HOST_MEMORY)
        with jax.default_device(jax.devices("cpu")[0]):  # no device ever holds all of it
            operands = [
                [jax.device_put(filled(s), there) for s in self._programs.structs(array, n, here)]
                for n in call.inputs
            ]

        def swap_in() -> tuple[Any, ...]:
            return tuple(jax.device_put(own, here, may_alias=False) for own in operands)

        def end(used: object) -> None:
            for each in jax.tree.leaves(used):
                each.delete()

        return self.median_seconds(run, swap_in, end)


@dataclass(frozen=True)
class ArrayProfile:
    """The programs of sub-arrays of any size, measured when they are asked for (``Programs``), or
    from the store.

    Attributes:
        workload: The task of every model.
        cluster: One device of a target, with rates where nothing is executed.
        shape: Settings of the array.
        progress: Function that is told (kind, done, total) of what is measured.
        executes: Whether programs and copies are executed on the devices here, for their seconds.
        store: Store of measurements.
        here: Machine that executes, by default this process.
        measure: Has measured what is not in the store; None: by this process, one by one.
        rates: Rates that the seconds of compiled programs come from; None: the target's.
    """

    workload: WorkloadProtocol
    cluster: Cluster
    shape: ArrayShape
    progress: Progress = field(default=lambda kind, done, total: None, compare=False)
    executes: bool = False
    store: Store | None = field(default=None, compare=False)
    here: ExecutingMachine | None = None
    measure: Measure | None = field(default=None, compare=False)
    rates: Rates | None = None
    _needs: dict[str, ProgramCost] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    #: Keys of what was measured beside what was prepared.
    _more: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    @cached_property
    def machine(self) -> Machine:
        """The target as a machine, with its rates and memory.

        Raises:
            TargetError: ``devices-no-rates``.
        """
        return Machine.of(self.cluster)

    @cached_property
    def target(self) -> Target:
        return Target.load(self.cluster.target)

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of the target's memory that programs may use; None if unknown."""
        return None if self.target.memory is None else self.target.memory.usable_bytes

    @cached_property
    def backend(self) -> ArrayBackend:
        """The backend that compiles the array's programs for the target, or executes them here.

        Raises:
            PlanError: ``array-devices`` where what would be executed is not on the target.
        """
        backend = ArrayBackend(
            self.workload,
            self.shape,
            self.store,
            target=None if self.executes else self.target,
            machine=self.here,
        )
        if backend.machine is not None:
            there = backend.machine.platform
            if (there == "cpu") != (self.target.platform == "cpu"):
                raise PlanError.of(
                    f"backend='run' executes on the devices here, which are {there}, and target="
                    f"{self.target.name!r} is of platform {self.target.platform}; name the target "
                    "of these devices, or leave out --backend, which compiles for any.",
                    "array-devices",
                )
        return backend

    @property
    def fuser(self) -> Fuser:
        return self.backend.fuser

    @cached_property
    def host(self) -> HostLink:
        """The link between the device and its host: the target's, or one fitted to copies that were
        timed.

        Raises:
            TargetError: ``fit-no-bandwidth``.
        """
        if not self.executes:
            return self.machine.rates.host
        wanted = copies_of(COPY_BYTES)
        keys = {what: self.backend.key(what) for what in wanted}
        self._require("copies", {key: what for what, key in keys.items()})
        rows = rows_of({what: self._seconds(self._needs[key]) for what, key in keys.items()})
        return fit_host_link(rows, self.source).link

    @property
    def source(self) -> str:
        """The origin of the seconds, in words for people."""
        machine = self.backend.machine
        if machine is None:
            return f"the rates of {Path(self.target.name).name}"
        return f"executions on {machine.device_kind} (median of {self.backend.num_executions})"

    @property
    def shared_patterns(self) -> tuple[str, ...]:
        """The patterns of shared parameters as a plan holds them; for a predicate, the paths that
        it chose."""
        if not callable(self.shape.shared):
            return tuple(self.shape.shared)
        paths, shared = param_paths(self.fuser.traced), self.fuser.optimizer.shared
        return tuple(dict.fromkeys(escape(paths[p]) for p in sorted(shared)))

    @property
    def model_hash(self) -> str:
        return self.fuser.traced.graph.model_hash

    def sub_array(self, num_models: int) -> SubArray:
        """Return a sub-array of ``num_models`` fused models, which cannot run."""
        return self.backend.sub_array(num_models)

    @memo
    def _named(self, num_models: int, call: Call) -> tuple[str, str]:
        """Return the name and the store key of a program."""
        name = program_name(self.backend.sub_array(num_models), call)
        return name, self.backend.key_of(name)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Measure the segments of sub-arrays of some sizes, which every search asks for first."""
        wanted: dict[str, What] = {}
        for num_models in sorted(set(sizes)):
            for issued in Uses(self.backend.sub_array(num_models)).issued:
                _, key = self._named(num_models, issued.call)
                wanted[key] = ArrayCall(num_models, issued.call)
        self._require("segments", wanted)

    def facts(self, sub_array: Any, call: Call) -> ProgramFacts:
        """Return the name, temporary bytes and seconds of a program (see ``Programs``)."""
        return self._facts(sub_array.num_models, call)

    @memo
    def _facts(self, num_models: int, call: Call) -> ProgramFacts:
        needs, (name, _) = self.needs(num_models, call), self._named(num_models, call)
        return ProgramFacts(name, needs.transient_bytes, self._seconds(needs))

    def needs(self, num_models: int, call: Call) -> ProgramCost:
        """Return the measurement of a program, made now if neither this object nor the store has
        it."""
        _, key = self._named(num_models, call)
        self._require(MORE, {key: ArrayCall(num_models, call)})
        return self._needs[key]

    @cached_property
    def times(self) -> TimeModel:
        """The model that gives the seconds of compiled programs."""
        return TimeModel(self.rates or self.machine.rates, Layout(1))

    def seconds_of(self, num_models: int) -> float:
        """Return the seconds of all programs of ``num_models`` fused models, executed one after the
        other."""
        array = self.backend.sub_array(num_models)
        return sum(self.facts(array, issued.call).seconds for issued in Uses(array).issued)

    def end(self) -> None:
        """Tell ``progress`` that nothing more will be asked for."""
        if self._more:
            self.progress(MORE, len(self._more), len(self._more))

    def _require(self, kind: str, wanted: Mapping[str, What]) -> None:
        """Measure what neither this object nor the store has."""
        missing = {key: what for key, what in wanted.items() if key not in self._needs}
        for key, value in self.backend.store.get(missing).items():
            self._needs[key] = read(value, ProgramCost)
            del missing[key]
        if not missing:
            return
        measure, is_more = self.measure or self.backend.measured, kind == MORE
        self._needs.update(measure(kind, missing, _silent if is_more else self.progress))
        if is_more:  # how many more there will be nobody knows
            self._more.extend(missing)
            self.progress(kind, len(self._more), len(self._more) + 1)

    def _seconds(self, needs: ProgramCost) -> float:
        """Return the seconds of a program; infinite where it does not fit the device, even
        alone."""
        if needs.work is not None:
            return self.times.program_seconds(needs.work)
        return inf if needs.seconds is None else needs.seconds
