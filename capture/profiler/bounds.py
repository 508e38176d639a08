"""Bound stage configs by tracing their programs: what the compiler would say, without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from capture.documents import read, write
from capture.environment import without_collecting
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageBounds, UpdateCost
from capture.measured.work import Collective, ProgramWork
from capture.model.graph import content_hash
from capture.partition.tensor_parallel import DATA_AXIS
from capture.profiler import other_splits
from capture.profiler.bounded_passes import BoundedPasses
from capture.profiler.compile import CompileBackend
from capture.profiler.lines import lines_of
from capture.runtime import least_traffic
from capture.runtime.bounds import BoundedProgram, Bounder
from capture.runtime.traced_stage import StageTraces, TracedStage

#: Bump when the bounds of the same programs change.
BOUNDS_VERSION = 21
#: Bytes of a collective over replicas above which every layer has one; smaller ones are of a mean.
_LEAST_OF_A_LAYER = 2**10
#: What XLA gives every product of cuBLAS to work in: 4 MiB, on some devices more.
_CUBLAS_BYTES = 4 * 2**20


@dataclass(frozen=True)
class EndBounds:
    """The least and the most that the end of a step is expected to cost (``StageBounds`` are of a
    stage)."""

    least: UpdateCost
    most: UpdateCost


#: Of passes alone.
NO_END = EndBounds(UpdateCost(0, 0), UpdateCost(0, 0))

B = TypeVar("B", StageBounds, EndBounds)


class BoundsBackend:
    """The backend that bounds stage configs instead of compiling them, and keeps the bounds in the
    store.

    Args:
        backend: Knows the model, the target and the store. Programs are traced for no devices.
        for_devices: See ``Bounder``.
    """

    def __init__(self, backend: CompileBackend, for_devices: int = 1):
        self._backend = backend
        target = backend.target
        # Of Triton's products nothing is known.
        uses_cublas = target.compiler_options.get("xla_gpu_enable_triton_gemm") is False
        self._bounder = Bounder(
            target.platform == "cpu",
            keeps_products=uses_cublas,
            product_scratch_bytes=_CUBLAS_BYTES * uses_cublas,
            counts_work=target.rates is not None,
            for_devices=for_devices,
            gathers_alone=target.platform == "tpu",
        )
        self._traces: tuple[Any, StageTraces] = None, StageTraces()

    def measure(self, config: StageConfig) -> StageBounds:
        """Return the bounds of a stage config, its passes and the end of its step."""
        found = self.of_passes(config, self.of_ends(config))
        return replace(found, least=other_splits.together(found.least))

    def of_ends(self, config: StageConfig, traces: StageTraces | None = None) -> EndBounds:
        """Return the bounds of the end of a step alone, from the store or traced. They depend on
        parameters and optimizer only.

        Args:
            config: The stage.
            traces: Traces of the stage so far; None for those of the stage before.
        """
        return self._stored(
            EndBounds,
            [self._backend.update_key(config)],
            lambda: self._traced_ends(config, traces),
        )

    def of_passes(
        self, config: StageConfig, ends: EndBounds, traces: StageTraces | None = None
    ) -> StageBounds:
        """Return the bounds of a stage from those of the end of its step; other arguments as for
        ``of_ends``."""
        return self._stored(
            StageBounds,
            [self._backend.key(config), write(ends)],
            lambda: self._traced_passes(config, ends, traces),
        )

    def keep_passes(self, config: StageConfig, document: object) -> StageBounds:
        """Store the bounds of passes without an end of a step that another process made with
        ``of_passes``, and return them."""
        facts = [self._backend.key(config), write(NO_END)]
        return self._stored(StageBounds, facts, lambda: read(document, StageBounds))

    def _stored(self, kind: type[B], facts: list[object], trace: Callable[[], B]) -> B:
        """Return the bounds in the store under a content hash of everything that can change them;
        else trace and store them."""
        key = content_hash(["bounds", BOUNDS_VERSION, self._bounder.for_devices, *facts])
        provenance = {**self._backend.provenance, "kind": "bounds"}  # of no job
        return read(self._backend.store.kept(key, lambda: write(trace()), provenance), kind)

    def _traced_ends(self, config: StageConfig, traces: StageTraces | None) -> EndBounds:
        programs = self._programs(config, traces)
        most, summarize = programs.update_cost, programs.summarize
        least = replace(
            most,
            update_bytes=_traced(programs.update).least_bytes,
            summarize_bytes=_traced(summarize).least_bytes if summarize else 0,
            update_work=programs.with_zeros(
                least_traffic.together(_traced(programs.update).least_work)
            ),
        )
        return EndBounds(least, most)

    def _traced_passes(
        self, config: StageConfig, ends: EndBounds, traces: StageTraces | None
    ) -> StageBounds:
        programs = self._programs(config, traces)
        forward, backward = _traced(programs.forward), _traced(programs.backward)
        most, stored = programs.cost_given_update(ends.most), programs.residuals.stored
        most = replace(
            most,
            forward_work=_of_each_layer(most.forward_work, config),
            backward_work=_of_each_layer(most.backward_work, config),
        )
        kept = forward.least_outputs[len(forward.least_outputs) - len(stored) :]
        common = sum(
            nbytes
            for value, nbytes in zip(stored, kept, strict=True)
            if DATA_AXIS not in programs.residuals.spec(value)
        )
        least = replace(
            most,
            residual_bytes=sum(kept),
            forward_bytes=forward.least_bytes,
            backward_bytes=backward.least_bytes,
            update_bytes=ends.least.update_bytes,
            summarize_bytes=ends.least.summarize_bytes,
            forward_work=forward.least_work,
            backward_work=backward.least_work,
            update_work=ends.least.update_work,
        )
        found = StageBounds(least, most, (*forward.sizes, *backward.sizes), common)
        return other_splits.of_split_params(found, config.choice)

    def _programs(self, config: StageConfig, traces: StageTraces | None) -> TracedStage:
        programs = self._backend.programs(
            config, devices=(), compiler=self._bounder, kind=TracedStage
        )
        assert isinstance(programs, TracedStage), "it was asked for"
        programs.traces = self._traces_of(config) if traces is None else traces
        return programs

    def _traces_of(self, config: StageConfig) -> StageTraces:
        """Return the traces that a stage can share: those of the stage before where only its
        degrees differ. Of the same layers the end of a step is shared. Stages are asked for in that
        order, and the traces of a stage are too large to be held for all."""
        choice, remat = config.choice, config.choice.remat
        # Constraints in programs name the mesh.
        has_own = choice.shard_params or choice.sequence_parallel
        layers = (config.first, config.stop, config.microbatch_size)
        key = (*layers, choice if has_own else remat)
        last, traces = self._traces
        if last != key:
            shares_ends = last is not None and last[:3] == layers
            self._traces = key, StageTraces(ends=traces.ends if shares_ends else {})
        return self._traces[1]


@without_collecting()
def bounded(backend: CompileBackend, asked: BoundedPasses) -> list[StageBounds | None]:
    """Return the bounds of each of the passes; None for those that follow from the others
    (``lines_of``)."""
    bounds = BoundsBackend(backend, asked.num_devices)
    traces = defaultdict[int, StageTraces](StageTraces)
    found: dict[StageConfig, StageBounds] = {}

    def trace(config: StageConfig) -> StageBounds:
        if config not in found:
            found[config] = bounds.of_passes(config, NO_END, traces[config.microbatch_size])
        return found[config]

    if asked.by_example:
        all(lines_of(asked.configs, trace))
    else:
        all(map(trace, asked.configs))
    return [*map(found.get, asked.configs)]


def _of_each_layer(work: ProgramWork | None, config: StageConfig) -> ProgramWork | None:
    """Return the expected work whose large collectives over replicas are of one layer each, as
    compilers put together hardly more."""
    if work is None:
        return None
    count, stride = config.num_layers, config.choice.tensor_parallel

    def of_layer(each: Collective) -> Collective:
        is_of_replicas = each.stride == stride and each.group_size > 1
        if each.count > 1 or not is_of_replicas or each.nbytes < count * _LEAST_OF_A_LAYER:
            return each
        return replace(each, nbytes=each.nbytes // count, count=count)

    return work.sending(map(of_layer, work.collectives))


def _traced(program: object) -> BoundedProgram:
    assert isinstance(program, BoundedProgram), "it was traced"
    return program
