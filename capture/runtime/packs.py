"""The decomposer: the programs of packs of layers, of any traced loss, at any size of the
micro-batch.

    forward     weights, pieces of the input, of the batch -> pieces of the output
    backward    the same, pieces of the cotangent, sums of gradients -> pieces of the input's
                gradient, the loss of the last pack, sums; it computes the forward pass again
    update      weights, optimizer state, gradients of every device and pack -> weights, state

What passes between two layers is all that later ones read: what a layer does not touch goes
through it as a copy. Pieces are put together and cut by the programs themselves, in the order of
the examples. Packs that do the same on other parameters are compiled once per device.

Source: Li et al. 2022 (Harmony), 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import HOST_MEMORY, AnyCompiler, Compiler, Executable
from capture.model.graph import LayerGraph, Tensor
from capture.plan.task_graph import Span
from capture.runtime.dispatch import Call
from capture.runtime.fast_paths import flat_call
from capture.runtime.optimizer import SlicedOptimizer, TracedOptimizer
from capture.runtime.pack_updates import PackUpdate, Reduction, cut
from capture.runtime.programs import shard_bytes
from capture.step.interface import owned_and_borrowed
from capture.step.pack_sizes import PackPass
from capture.step.program import Place, Run, Slot
from capture.step.streamed import StreamedBuilder
from capture.step.streamed_state import parts_of_name
from capture.tracing import TracedModel
from capture.tracing.slices import struct_of

Arrays = Sequence[Any]


@dataclass(frozen=True)
class TracedSizes:
    """Bytes of the packs of a traced loss (``capture.step.pack_sizes``).

    Attributes:
        graph: At any micro-batch size.
        optimizer: Cut by backward packs.
        packs: Those.
        compiled: What programs were found to need, by pass, pack and size.
    """

    graph: LayerGraph
    optimizer: SlicedOptimizer
    packs: tuple[Span, ...]
    compiled: dict[tuple[str, Span, int], int] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.graph.num_layers

    def weight_bytes(self, span: Span) -> int:
        return sum(map(self.param_bytes, self.owned(span)))

    def state_bytes(self, pack: Span) -> int:
        stage = self.optimizer.stages[self.packs.index(pack)]
        return _nbytes([stage.state_structs[k] for k in stage.state])

    def summary_bytes(self, pack: Span) -> int:
        return _nbytes(self.optimizer.stages[self.packs.index(pack)].summary)

    def owned(self, span: Span) -> tuple[int, ...]:
        return owned_and_borrowed(self.graph, *span)[0]

    def shared(self, pack: Span) -> tuple[int, ...]:
        return owned_and_borrowed(self.graph, *pack)[1]

    def owner(self, param: int) -> int:
        return self.graph.param_owner(param)

    def param_bytes(self, param: int) -> int:
        return self.graph.params[param].nbytes

    def values(self, layer: int) -> tuple[int, ...]:
        return self.graph.crossing(layer)

    def value_bytes(self, layer: int, examples: int, values: tuple[int, ...] | None = None) -> int:
        which = self.values(layer) if values is None else values
        return sum(self._bytes(self.graph.values[v], examples) for v in which)

    def gradient_bytes(self, layer: int, examples: int) -> int:
        values = [self.graph.values[v] for v in differentiable(self.graph, layer)]
        return sum(self._bytes(value, examples) for value in values)

    def batch(self, span: Span) -> tuple[int, ...]:
        return self.graph.stage_batch(*span)

    def batch_bytes(self, span: Span, examples: int) -> int:
        leaves = [self.graph.batch[b] for b in self.batch(span)]
        return sum(self._bytes(leaf, examples) for leaf in leaves)

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """Until it is compiled, no more than its results."""
        if (known := self.compiled.get((which, pack, size))) is not None:
            return known
        return output_bytes + (self.weight_bytes(pack) if which in ("forward", "backward") else 0)

    def _bytes(self, tensor: Tensor, examples: int) -> int:
        if tensor.batch_dim is None:
            return tensor.nbytes
        return tensor.nbytes // self.graph.microbatch_size * examples


def differentiable(graph: LayerGraph, layer: int) -> list[int]:
    """Values that enter a layer and have gradients."""
    return [v for v in graph.crossing(layer) if graph.values[v].differentiable]


class PackPrograms:
    """The programs and arrays of a step of packs.

    Args:
        traced: The loss, by micro-batch size.
        builder: Of the step, which it has built.
        optimizer: The update of the whole model, and cut by backward packs.
        minibatch_size: The loss of a micro-batch counts as many of these as it has examples.
        devices: By device id of the step.
        compiler: Compiles.
        host: A processor for whose memory everything on the hosts is compiled, where devices are
            not there: those of CUDA then know no memory of a host, so that XLA would count what an
            update makes beside what it writes over. None: each device's own.
    """

    def __init__(
        self,
        traced: Mapping[int, TracedModel],
        builder: StreamedBuilder,
        optimizer: tuple[TracedOptimizer, SlicedOptimizer],
        minibatch_size: int,
        devices: Sequence[Any],
        compiler: AnyCompiler,
        host: Any = None,
    ):
        self._host = host
        self._traced, self._builder, self._step = traced, builder, builder.step
        self._graph = next(iter(traced.values())).graph
        self._update_of, self._optimizer = optimizer
        self._minibatch_size, self._devices, self._compiler = minibatch_size, devices, compiler
        self._shardings: dict[Place, NamedSharding] = {}
        self._compiled: dict[Any, Executable] = {}

    def of(self, builder: StreamedBuilder) -> PackPrograms:
        """Those of another step of the same plan: what is compiled, is."""
        other = PackPrograms(
            self._traced,
            builder,
            (self._update_of, self._optimizer),
            self._minibatch_size,
            self._devices,
            self._compiler,
            self._host,
        )
        other._compiled = self._compiled
        return other

    @cached_property
    def executables(self) -> dict[str, Executable]:
        """By name; compiles them."""
        runs = [each for each in self._step.instructions if isinstance(each, Run)]
        return {name: self._executable(run) for name, run in {r.program: r for r in runs}.items()}

    @property
    def num_compiled(self) -> int:
        """Of all programs, those that are not the same as another."""
        return len(self._compiled)

    # ---- arrays ----------------------------------------------------------------------------------

    def sharding(self, place: Place) -> NamedSharding:
        """Whole on the device of a place, or in the memory of its host."""
        if place not in self._shardings:
            (device,) = place.devices
            one = self._host if self._stands_in(place) else self._devices[device]
            mesh = Mesh(np.asarray([one]), ("device",))
            kind = None if place.host is None else HOST_MEMORY
            self._shardings[place] = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return self._shardings[place]

    def _stands_in(self, place: Place) -> bool:
        """Whether what is there is compiled for another host."""
        return place.host is not None and self._host is not None

    def layout(self, slot: Slot) -> list[jax.ShapeDtypeStruct]:
        """The arrays of a slot."""
        return self._layout[self._numbers[slot.name]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {slot.name: number for number, slot in enumerate(self._step.slots)}

    @cached_property
    def _layout(self) -> list[list[jax.ShapeDtypeStruct]]:
        return [self._structs(number) for number in range(len(self._step.slots))]

    def _structs(self, number: int) -> list[jax.ShapeDtypeStruct]:
        slot, graph = self._step.slots[number], self._graph
        match slot.what:
            case "weights" | "gradients":
                owned = owned_and_borrowed(graph, *self._builder.spans[number])[0]
                structs = [struct_of(graph.params[p]) for p in owned]
            case "shared" | "shared gradient":
                assert slot.key is not None, slot
                structs = [struct_of(graph.params[slot.key])]
            case "state":
                stage = self._stage(self._builder.spans[number])
                structs = [stage.state_structs[k] for k in stage.state]
            case "summary":
                structs = list(self._stage(self._builder.spans[number]).summary)
            case "loss":
                structs = [struct_of(graph.values[graph.layers[-1].outputs[-1]])]
            case _:
                layer, (first, stop) = self._builder.rows[number]
                structs = [
                    self._rows_of(tensor, stop - first) for tensor in self._tensors(number, layer)
                ]
        sharding = self.sharding(slot.place)
        structs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in structs]
        nbytes = sum(map(shard_bytes, structs))
        assert nbytes == slot.nbytes, f"{slot} is booked and has {nbytes} bytes"
        return structs

    def _tensors(self, number: int, layer: int) -> list[Tensor]:
        graph, what = self._graph, self._step.slots[number].what
        if what == "batch":
            return [graph.batch[b] for b in graph.stage_batch(*self._builder.spans[number])]
        gradient = what == "gradient"
        values: Sequence[int] = differentiable(graph, layer) if gradient else graph.crossing(layer)
        values = self._builder.values.get(number, values)
        return [graph.values[v] for v in values]

    def _rows_of(self, tensor: Tensor, examples: int) -> jax.ShapeDtypeStruct:
        struct, dim = struct_of(tensor), tensor.batch_dim
        if dim is None:
            return struct
        shape = list(tensor.shape)
        shape[dim] = shape[dim] // self._graph.microbatch_size * examples
        return jax.ShapeDtypeStruct(tuple(shape), struct.dtype)

    def _stage(self, pack: Span) -> Any:
        """Its slice of the optimizer."""
        owned = owned_and_borrowed(self._graph, *pack)[0]
        return next(stage for stage in self._optimizer.stages if stage.params == owned)

    # ---- programs --------------------------------------------------------------------------------

    def call(self, run: Run) -> Call:
        """The program of an instruction, on the arrays of its slots."""
        call = flat_call(self.executables[run.program].call)
        if parts_of_name(run.program)[0] == "reduce":
            return self._reduction(run).call(call)
        sizes = [len(self._layout[slot]) for slot in run.outputs]
        return lambda flat: cut(call(flat), sizes)

    def _reduction(self, run: Run) -> Reduction:
        shardings = [self.sharding(self._step.slots[slot].place) for slot in run.outputs]
        return Reduction(self._layout[run.inputs[0][0]], shardings)

    def _executable(self, run: Run) -> Executable:
        kind = parts_of_name(run.program)[0]
        if kind == "reduce":
            reduction = self._reduction(run)
            if reduction.key not in self._compiled:
                self._compiled[reduction.key] = reduction.compiled(self._compiler)
            return self._compiled[reduction.key]
        if kind in ("update", "summarize"):
            function, key = self._update(run, kind)
        else:
            function, key = self._pass(run)
        slots = [slot for group in run.inputs for slot in group]
        args = [self._layout[slot] for slot in slots]
        out = [[struct.sharding for struct in self._layout[slot]] for slot in run.outputs]
        donated = tuple(i for i, slot in enumerate(slots) if slot in run.donated)
        place = self._step.programs[run.program].place
        shapes = tuple(tuple((s.shape, str(s.dtype)) for s in arg) for arg in args)
        whole = (kind, place.name, key, shapes, donated)
        if whole not in self._compiled:
            compiler = Compiler() if self._stands_in(place) else self._compiler
            self._compiled[whole] = compiler(function, args, donate=donated, out_shardings=out)
        return self._compiled[whole]

    def _pass(self, run: Run) -> tuple[Callable[..., Any], Any]:
        """A forward or backward pass, and what tells it from others of the same arguments."""
        kind, first, stop, size, _ = parts_of_name(run.program)
        # A part of a forward pack gets what the whole pack reads of the batch.
        read = [self._builder.spans[slot] for slot in run.inputs[2][:1]]
        leaves = self._graph.stage_batch(*read[0]) if read else ()
        pack = PackFunctions(
            self._traced[size], (first, stop), self._weights_at(run), self._pieces(run), leaves
        )
        groups = [len(group) for group in run.inputs]
        if kind == "forward":
            return lambda *slots: pack.forward(*cut(slots, groups)), pack.key
        share = size / self._minibatch_size
        owned = owned_and_borrowed(self._graph, first, stop)[0]

        def backward(*slots: Arrays) -> list[Any]:
            outputs, gradients = pack.backward(*cut(slots, groups[:4]), share=share)
            own = [gradients.pop(p) for p in owned]
            sums = [own, *([gradient] for gradient in gradients.values())]
            if before := slots[sum(groups[:4]) :]:
                sums = jax.tree.map(jnp.add, list(map(list, before)), sums)
            return [*outputs, *sums]

        return backward, (pack.key, share, tuple(pack.where[p] for p in owned))

    def _weights_at(self, run: Run) -> dict[int, tuple[int, int]]:
        """By parameter, which of the first arguments has it, and where."""
        found = {}
        for i, slot in enumerate(run.inputs[0]):
            given = self._step.slots[slot]
            if given.what == "shared":
                assert given.key is not None, given
                found[given.key] = (i, 0)
                continue
            owned = owned_and_borrowed(self._graph, *self._builder.spans[slot])[0]
            found |= {param: (i, j) for j, param in enumerate(owned)}
        return found

    def _pieces(self, run: Run) -> tuple[int, ...]:
        """Examples of each piece of a micro-batch."""
        rows = [
            [self._builder.rows[slot][1] for slot in group if slot in self._builder.rows]
            for group in (*run.inputs[1:4], run.outputs)
        ]
        size = parts_of_name(run.program)[3]
        known = next((group for group in rows if group), [])
        return tuple(stop - first for first, stop in dict.fromkeys(known)) or (size,)

    def _update(self, run: Run, kind: str) -> tuple[Callable[..., Any], Any]:
        span = parts_of_name(run.program)[1:3]
        whats = [self._step.slots[slot] for slot in run.inputs[2]]
        arrays_of = [len(self._layout[slot]) for slot in run.inputs[0]]
        update = PackUpdate(
            self._stage(span),
            arrays_of,
            [None if slot.what == "gradients" else slot.key or 0 for slot in whats],
            [len(group) for group in run.inputs],
        )
        function = update.update if kind == "update" else update.summarize
        key = update.key(self._update_of)
        if self._step.programs[run.program].place.host is None:
            return function, key
        return compute_on("device_host")(jax.jit(function)), key


class PackFunctions:
    """Layers at a micro-batch size, as functions of slots.

    Args:
        traced: The loss at that size.
        span: Layers.
        where: By parameter, which slot of weights has it, and where.
        pieces: Examples of each piece of the micro-batch.
        leaves: Of the batch, those of each slot of it.
    """

    def __init__(
        self,
        traced: TracedModel,
        span: Span,
        where: Mapping[int, tuple[int, int]],
        pieces: tuple[int, ...],
        leaves: tuple[int, ...],
    ):
        graph = self._graph = traced.graph
        self._layers, self.where, self._pieces = traced.slice(*span), where, pieces
        self._leaves = leaves
        self._entering, self._leaving = graph.crossing(span[0]), graph.crossing(span[1])
        self._is_last = span[1] == graph.num_layers

    @property
    def key(self) -> Any:
        """What the pack computes, and which arguments it reads."""
        layers, graph = self._layers, self._graph
        ids = {v: i for i, v in enumerate((*self._entering, *layers.outputs))}
        flows = [bool(graph.values[v].differentiable) for v in (*self._entering, *self._leaving)]
        return (
            layers.key,
            self._pieces,
            tuple(self.where[p] for p in layers.params),
            tuple(ids[v] for v in layers.inputs),
            tuple(ids[v] for v in self._leaving),
            tuple(self._leaves.index(b) for b in layers.batch),
            tuple(flows),
        )

    def forward(
        self, weights: Sequence[Arrays], inputs: Sequence[Arrays], batch: Sequence[Arrays]
    ) -> list[list[Any]]:
        """Pieces of what leaves the pack; of the last one, the loss."""
        params = [weights[i][j] for i, j in (self.where[p] for p in self._layers.params)]
        entering = self._joined(self._entering, inputs)
        made = dict(zip(self._layers.outputs, self._run(params, entering, batch), strict=True))
        if self._is_last:
            return [[made[self._layers.outputs[-1]]]]
        return self._split(
            {v: made[v] if v in made else jnp.copy(entering[v]) for v in self._leaving}
        )

    def backward(
        self,
        weights: Sequence[Arrays],
        inputs: Sequence[Arrays],
        batch: Sequence[Arrays],
        cotangents: Sequence[Arrays],
        *,
        share: float,
    ) -> tuple[list[list[Any]], dict[int, Any]]:
        """Pieces of the gradient of what enters, and the loss of the last pack; the gradient of
        every parameter, in the order of the layers."""
        graph, layers = self._graph, self._layers
        params = [weights[i][j] for i, j in (self.where[p] for p in layers.params)]
        entering = self._joined(self._entering, inputs)
        flowing = [v for v in self._entering if graph.values[v].differentiable]
        outputs = [v for v in layers.outputs if graph.values[v].differentiable]

        def apply(params: Arrays, values: Mapping[int, Any]) -> list[Any]:
            made = self._run(params, {**entering, **values}, batch)
            by_value = dict(zip(layers.outputs, made, strict=True))
            return [by_value[v] for v in outputs]

        made, vjp = jax.vjp(apply, params, {v: entering[v] for v in flowing})
        leaving = [v for v in self._leaving if graph.values[v].differentiable]
        arrived = {} if self._is_last else self._joined(leaving, cotangents)
        seeds = [
            jnp.full_like(array, share) if self._is_last else arrived[v]
            for v, array in zip(outputs, made, strict=True)
        ]
        of_params, of_values = vjp(seeds)
        for v in flowing:
            if v in arrived:
                of_values[v] = of_values[v] + arrived[v]
        results = self._split(of_values) if self._entering else []
        return [*results, *([made] if self._is_last else ())], dict(
            zip(layers.params, of_params, strict=True)
        )

    def _run(self, params: Arrays, values: Mapping[int, Any], batch: Sequence[Arrays]) -> list[Any]:
        tensors = [self._graph.batch[b] for b in self._leaves]
        leaves = dict(zip(self._leaves, self._together(tensors, batch), strict=True))
        layers = self._layers
        return layers(params, [values[v] for v in layers.inputs], [leaves[b] for b in layers.batch])

    def _joined(self, values: Sequence[int], pieces: Sequence[Arrays]) -> dict[int, Any]:
        tensors, count = [self._graph.values[v] for v in values], len(self._pieces)
        if len(pieces) > count:  # what was kept at several layers, those before first
            pieces = [
                [array for slot in pieces[piece::count] for array in slot] for piece in range(count)
            ]
        return dict(zip(values, self._together(tensors, pieces), strict=True))

    @staticmethod
    def _together(tensors: Sequence[Tensor], pieces: Sequence[Arrays]) -> list[Any]:
        return [
            pieces[0][i]
            if len(pieces) == 1 or tensor.batch_dim is None
            else jnp.concatenate([piece[i] for piece in pieces], tensor.batch_dim)
            for i, tensor in enumerate(tensors)
        ]

    def _split(self, values: Mapping[int, Any]) -> list[list[Any]]:
        if len(self._pieces) == 1:
            return [list(values.values())]
        found, start = [], 0
        for size in self._pieces:
            cut = []
            for v, array in values.items():
                tensor = self._graph.values[v]
                dim = tensor.batch_dim
                assert dim is not None, f"{tensor.name} was found to have no rows"
                rows = tensor.shape[dim] // self._graph.microbatch_size
                first, stop = start * rows, (start + size) * rows
                cut.append(jax.lax.slice_in_dim(array, first, stop, axis=dim))
            found.append(cut)
            start += size
        return found


def _nbytes(structs: Sequence[Any]) -> int:
    return sum(int(np.prod(s.shape, dtype=np.int64)) * s.dtype.itemsize for s in structs)
