"""Bound stage configs by tracing their programs: what the compiler would say, without one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from capture.compiler.target_devices import devices_of
from capture.documents import read, write
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageBounds
from capture.model.graph import content_hash
from capture.profiler.compile import CompileBackend
from capture.runtime.bounds import BoundedProgram, Bounder
from capture.runtime.traced_stage import StageTraces, TracedStage

#: Bump when the bounds of the same programs change.
BOUNDS_VERSION = 12
#: What XLA gives every product of cuBLAS to work in: 4 MiB, on some devices more.
_CUBLAS_BYTES = 4 * 2**20


class BoundsBackend:
    """The bounds of stage configs that a backend would compile, kept in its store.

    Args:
        backend: Knows the model, the target and the store. Programs are traced for virtual CPU
            devices, of which this process needs as many as a stage has.
    """

    def __init__(self, backend: CompileBackend):
        self._backend = backend
        target = backend.target
        # Of Triton's products nothing is known.
        uses_cublas = target.compiler_options.get("xla_gpu_enable_triton_gemm") is False
        self._bounder = Bounder(
            target.platform == "cpu",
            keeps_products=uses_cublas,
            product_scratch_bytes=_CUBLAS_BYTES * uses_cublas,
            counts_work=target.rates is not None,
        )
        self._traces: tuple[Any, StageTraces] = None, StageTraces()

    def key(self, config: StageConfig) -> str:
        """Content hash of everything that can change the bounds."""
        return content_hash([self._backend.key(config), "bounds", BOUNDS_VERSION])

    def knows(self, config: StageConfig) -> bool:
        """Say whether the store has the bounds of a stage config."""
        return bool(self._backend.store.get([self.key(config)]))

    def measure(self, config: StageConfig) -> StageBounds:
        """The bounds of a stage config, from the store or traced.

        Raises:
            TargetError: ``target-devices`` if this process has too few virtual CPU devices.
        """
        key, store = self.key(config), self._backend.store
        found = store.get([key])
        if key not in found:
            start = time.perf_counter()
            found[key] = write(self._traced(config))
            seconds = time.perf_counter() - start
            facts = {**self._backend.provenance, "kind": "bounds"}  # of no job
            store.put(key, found[key], provenance=facts, seconds=seconds)
        return read(found[key], StageBounds)

    def _traced(self, config: StageConfig) -> StageBounds:
        devices = devices_of(Target.load("cpu"), config.choice.num_devices)
        programs = self._backend.programs(
            config, devices=devices, compiler=self._bounder, kind=TracedStage
        )
        assert isinstance(programs, TracedStage), "it was asked for"
        programs.traces = self._traces_of(config)
        most, summarize = programs.cost, programs.summarize
        num_stored = len(programs.residuals.stored)
        least = replace(
            most,
            residual_bytes=sum(_traced(programs.forward).least_outputs[-num_stored:])
            if num_stored
            else 0,
            forward_bytes=_traced(programs.forward).least_bytes,
            backward_bytes=_traced(programs.backward).least_bytes,
            update_bytes=_traced(programs.update).least_bytes,
            summarize_bytes=_traced(summarize).least_bytes if summarize else 0,
        )
        return StageBounds(least, most)

    def _traces_of(self, config: StageConfig) -> StageTraces:
        """Those of the stage before where only its degrees were others, and of the same layers the
        end of a step: stages are asked for in that order, and what is traced of a stage is too
        large to be held for all."""
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


def _traced(program: object) -> BoundedProgram:
    assert isinstance(program, BoundedProgram), "it was traced"
    return program
