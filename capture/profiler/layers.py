"""Measure layers one by one, compiled for a target that need not be there, or executed on the
devices of this process. A measurement is content-addressed, so equal layers are measured once.

Source: Li et al. 2022 (Harmony), 4.2.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import AnyCompiler, Compiler
from capture.errors import TargetError
from capture.machine.target import Target
from capture.measured.layer_profile import Casts
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.memo import memo
from capture.model.graph import LayerGraph, Tensor, content_hash, item_bytes
from capture.model.workload import WorkloadProtocol
from capture.plan.choices import Remat, StageChoice
from capture.profiler.asked import LayerNeeds, LayerPass
from capture.profiler.compile import KERNELS_VERSION, CompileBackend
from capture.profiler.executing import ExecutingMachine
from capture.profiler.program_backend import ProgramBackend
from capture.profiler.timing import filled, out_of_memory
from capture.quantities import format_bytes
from capture.runtime.decomposer import Decomposed, LayerProgram
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer, StageUpdate, TracedOptimizer
from capture.step.interface import owned_and_borrowed
from capture.tracing import TracedModel
from capture.tracing.coupling import coupled_examples
from capture.tracing.slices import struct_of

#: At which parameters and their update are looked at: a loss may trace otherwise at one example.
REFERENCE_SIZE = 2


class LayerBackend(ProgramBackend):
    """The backend that measures the layers of a model one by one.

    Args:
        workload: The task.
        num_layers: Number of layers of a model without marks; None: as many as are sensible.
        store, target, machine: As for ``ProgramBackend``.
        memory_limit_bytes: Where layers are executed, one of several examples that needs more is
            not tried.
        remat: What backward passes recompute; None: nothing of what they make themselves.
    """

    version: ClassVar[Mapping[str, int]] = {"layer_version": 1}

    def __init__(
        self,
        workload: WorkloadProtocol,
        num_layers: int | None = None,
        store: Store | None = None,
        *,
        target: Target | None = None,
        machine: ExecutingMachine | None = None,
        memory_limit_bytes: int | None = None,
        remat: Remat | None = None,
    ):
        self._remat = remat
        self.compiler = CompileBackend(
            workload, store=store, target=target, unmarked_layers=num_layers
        )
        super().__init__(self.compiler.store, target=target, machine=machine)
        self.compiler.traced(REFERENCE_SIZE)  # which decides how a model without marks is cut
        self.workload, self._memory_limit_bytes = workload, memory_limit_bytes

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make the same backend in another process."""
        num_layers = self.graph().num_layers
        limit = self._memory_limit_bytes
        return {"num_layers": num_layers, "memory_limit_bytes": limit, "remat": self._remat}

    @memo
    def layers(self, microbatch_size: int) -> Decomposed:
        """Return the model at a micro-batch size as programs of single layers."""
        return Decomposed(self.compiler.traced(microbatch_size).recomputing(self._remat))

    def graph(self, microbatch_size: int = REFERENCE_SIZE) -> LayerGraph:
        """Return the layer graph of the model at a micro-batch size."""
        return self.layers(microbatch_size).traced.graph

    # ---- what needs no measurement ---------------------------------------------------------------

    def state_bytes(self) -> list[int]:
        """Return the bytes of optimizer state of every layer. State that belongs to no parameter,
        such as a count, is in each."""
        return [sum(map(_struct_bytes, stage.state_structs)) for stage in self._updates]

    def shared(self) -> tuple[tuple[int, ...], ...]:
        """Return, per parameter that several layers read, its bytes followed by the indices of
        these layers."""
        graph = self.graph()
        return tuple(
            (graph.params[p].nbytes, *graph.param_readers(p)) for p in shared_params(graph)
        )

    def batch(self) -> tuple[tuple[int, ...], ...]:
        """Return, per leaf of the batch that is read, its bytes per example followed by the layers
        that read it."""
        graph = self.graph()
        readers = [
            [layer.layer_id for layer in graph.layers if b in layer.batch]
            for b in range(len(graph.batch))
        ]
        return tuple(
            (_per_example(leaf, graph.microbatch_size), *layers)
            for leaf, layers in zip(graph.batch, readers, strict=True)
            if layers
        )

    def summary_bytes(self) -> int:
        """Return the most bytes that the update of a layer needs of the gradients of other layers;
        0 if it needs none."""
        stages = self._update[1].stages
        return max((sum(map(_struct_bytes, stage.summary)) for stage in stages), default=0)

    def coupled(self, one: int, other: int) -> str:
        """Describe what lets the examples of a micro-batch influence each other; empty if nothing
        does."""
        a, b = (self.layers(size).traced for size in (one, other))
        return coupled_examples(a, b, self.graph(one).num_layers - 1) or ""

    @cached_property
    def _update(self) -> tuple[TracedOptimizer, SlicedOptimizer]:
        """The traced optimizer of the whole model, and the same cut by layers that own
        parameters."""
        traced, graph = self.layers(REFERENCE_SIZE).traced, self.graph()
        owned = [owned_and_borrowed(graph, i, i + 1)[0] for i in range(graph.num_layers)]
        update = traced_optimizer(self.workload.optimizer, traced, graph.unread_params)
        parts = [own for own in (*owned, graph.unread_params) if own]
        return update, SlicedOptimizer(update, parts)

    @cached_property
    def _updates(self) -> list[StageUpdate]:
        """The optimizer's slice of every layer; an empty one for layers that own no parameter."""
        graph, sliced = self.graph(), self._update[1]
        by_params = {stage.params: stage for stage in sliced.stages}
        nothing = StageUpdate(sliced, -1, (), (), ())
        owned = (owned_and_borrowed(graph, i, i + 1)[0] for i in range(graph.num_layers))
        return [by_params.get(tuple(own), nothing) for own in owned]

    # ---- measurements ----------------------------------------------------------------------------

    @memo
    def key(self, what: LayerPass) -> str:
        """Return the content hash of everything that can change a measurement."""
        facts: list[Any] = [self.provenance, what.direction]
        if what.direction == "add":
            structs = self._gradients(what.layer)
            return content_hash([*facts, [[list(s.shape), str(s.dtype)] for s in structs]])
        if what.direction == "update":
            stage, params = self._updates[what.layer], self.graph().params
            structs = [struct_of(params[p]) for p in stage.params]
            structs += stage.state_structs
            keys = [self._update[0].param_keys[p] for p in stage.params]
            return content_hash([*facts, keys, [[list(s.shape), str(s.dtype)] for s in structs]])
        more: list[Any] = []
        if self.machine is not None:
            more = [self._memory_limit_bytes]
        else:
            [call] = (
                self.layers(what.microbatch_size).traced.slice(what.layer, what.layer + 1).calls
            )
            more = [KERNELS_VERSION] * bool(call.function.num_kernels[0])
        return content_hash([*facts, self._program(what).key, *more])

    def measure(self, what: LayerPass) -> LayerNeeds:
        """Compile a pass of a layer and, where this backend executes, time it. Updates and sums of
        gradients are timed only.

        Raises:
            TargetError: ``target-refused`` if the compiler does not take the layer.
        """
        if what.direction == "update":
            return self._measured_update(what.layer)
        if what.direction == "add":
            return self._measured_add(what.layer)
        program, size = self._program(what), what.microbatch_size
        compiler: AnyCompiler = Compiler()
        device, absent = jax.devices()[0], self.compiler.compiles
        if self.machine is None:
            config = StageConfig(what.layer, what.layer + 1, StageChoice(), size)
            compiler, [device] = self.compiler.compiler_of(config), absent.devices(1)
        sharding = NamedSharding(Mesh(np.asarray([device]), ("device",)), PartitionSpec())
        arguments = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), program.arguments
        )
        try:
            with absent.refusing(f"layer {what.layer}"):
                executable = compiler(program.function, arguments)
        except TargetError as error:
            if said := out_of_memory(error.__cause__):
                return LayerNeeds(failure=said)
            raise
        others = (*program.weights, *program.batch, *program.gradient)
        if what.layer == 0:  # its input is the batch
            others = program.weights + program.gradient
        nbytes = sum(tensor.nbytes for tensor in others) + executable.transient_bytes
        if self.machine is None:
            return LayerNeeds(nbytes, work=executable.work)
        whole = nbytes + sum(t.nbytes for t in (program.input or program.batch))
        limit = self._memory_limit_bytes
        if limit is not None and whole > limit and size > 1:
            return LayerNeeds(
                nbytes,
                failure=f"needs {format_bytes(whole)}, above the limit of {format_bytes(limit)}",
            )

        def timed() -> float:
            arrays = jax.tree.map(lambda s: jax.device_put(filled(s), s.sharding), arguments)
            return self.median_seconds(lambda: executable.call(*arrays))

        seconds, failure = self.executed(timed)
        return LayerNeeds(nbytes, seconds, failure=failure)

    def _program(self, what: LayerPass) -> LayerProgram:
        layers = self.layers(what.microbatch_size)
        assert what.direction in ("forward", "backward"), "updates and sums are no passes"
        return layers.program(what.direction, what.layer)

    def _measured_update(self, layer: int) -> LayerNeeds:
        """Time the update of a layer's parameters on the host of this process."""
        stage, params = self._updates[layer], self.graph().params
        with jax.default_device(jax.devices("cpu")[0]):
            others = [
                [jnp.zeros(aval.shape, aval.dtype) for aval in other.summary]
                for other in stage.others
            ]
            update = jax.jit(lambda p, s, g: stage.update(p, s, g, others), donate_argnums=(0, 1))
            grads, own = ([filled(struct_of(params[p])) for p in stage.params] for _ in range(2))
            held = own, jax.jit(stage.init)(own)

            def call() -> Any:
                nonlocal held
                held = update(*held, grads)
                return held

            return LayerNeeds(seconds=self.median_seconds(call))

    def _gradients(self, layer: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the gradients of all parameters that a layer reads."""
        graph = self.graph()
        return [struct_of(graph.params[p]) for p in graph.layers[layer].params]

    def _measured_add(self, layer: int) -> LayerNeeds:
        more, held = ([filled(struct) for struct in self._gradients(layer)] for _ in range(2))
        add = jax.jit(lambda one, other: jax.tree.map(jnp.add, one, other), donate_argnums=0)

        def call() -> Any:
            nonlocal held
            held = add(held, more)
            return held

        return LayerNeeds(seconds=self.median_seconds(call))


def input_bytes(graph: LayerGraph) -> list[int]:
    """Return the bytes per example that enter every layer; for the first layer those of the batch.
    Values without an example dimension count in full."""

    def per_example(tensors: Sequence[Tensor]) -> int:
        return sum(_per_example(tensor, graph.microbatch_size) for tensor in tensors)

    entering = [[graph.values[v] for v in graph.crossing(i)] for i in range(1, graph.num_layers)]
    return [per_example(graph.batch), *map(per_example, entering)]


def _per_example(tensor: Tensor, microbatch_size: int) -> int:
    return tensor.nbytes if tensor.batch_dim is None else tensor.nbytes // microbatch_size


def weight_bytes(graph: LayerGraph) -> tuple[list[int], list[int]]:
    """Return, per layer, the bytes of the parameters that it owns and of those of earlier layers
    that it reads."""
    parts = [owned_and_borrowed(graph, i, i + 1) for i in range(graph.num_layers)]
    own, others = (
        [sum(graph.params[p].nbytes for p in part[i]) for part in parts] for i in range(2)
    )
    return own, others


def shared_params(graph: LayerGraph) -> list[int]:
    """Return the indices of the parameters that several layers read."""
    return [p for p in range(len(graph.params)) if len(graph.param_readers(p)) > 1]


def cast_bytes(traced: TracedModel) -> dict[str, Casts]:
    """Return the bytes of cast parameters, by the dtype to which some are cast wherever they are
    read."""
    graph = traced.graph
    parts = [owned_and_borrowed(graph, i, i + 1) for i in range(graph.num_layers)]

    def of(dtype: str) -> Casts:
        chosen = {p: cast for p, cast in enumerate(traced.casts) if cast and cast.dtype == dtype}

        def nbytes(param: int, among: Container[int] = chosen) -> int:
            tensor = graph.params[param]
            return tensor.size * item_bytes(dtype) if param in among else tensor.nbytes

        once = {p for p, cast in chosen.items() if cast.once}
        return Casts(
            tuple(sum(map(nbytes, own)) for own, _ in parts),
            tuple(sum(map(nbytes, others)) for _, others in parts),
            tuple(sum(nbytes(p) for p in own if p in chosen) for own, _ in parts),
            tuple(sum(nbytes(p, once) for p in own) for own, _ in parts),
            tuple(map(nbytes, shared_params(graph))),
        )

    return {dtype: of(dtype) for dtype in sorted({cast.dtype for cast in traced.casts if cast})}


def _struct_bytes(struct: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(struct.shape, dtype=np.int64)) * struct.dtype.itemsize
