"""The decomposer: the programs of packs of layers, of any traced loss, at any size of the
micro-batch.

    forward     weights, pieces of the input, of the batch -> pieces of the output
    backward    the same, pieces of the cotangent, sums of gradients -> pieces of the input's
                gradient, the loss of the last pack, sums; it computes the forward pass again
    widen       gradients of casts -> of parameters
    update      weights, optimizer state, gradients of every device and pack -> weights, state
    cast        weights, casts of those before -> casts

What passes between two layers is all that later ones read: what a layer does not touch goes
through it as a copy. Pieces are put together and cut by the programs themselves, in the order of
the examples. Packs that do the same on other parameters are compiled once per device.

Source: Li et al. 2022 (Harmony), 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import HOST_MEMORY, AnyCompiler, Compiler, Executable
from capture.memo import memo
from capture.model.graph import LayerGraph, Tensor
from capture.plan.task_graph import Span
from capture.runtime.exchange import Exchange, share_struct
from capture.runtime.fast_paths import flat_call
from capture.runtime.frame import Call
from capture.runtime.layout import shard_bytes
from capture.runtime.optimizer import SlicedOptimizer, TracedOptimizer
from capture.runtime.pack_functions import PackFunctions
from capture.runtime.pack_updates import PackUpdate
from capture.step.holds import Leaves, Loss, Params, State, Summary, Values
from capture.step.pack_sizes import PackLayers, PackPass
from capture.step.pack_state import PackCall
from capture.step.program import Place, Run, Slot, Step
from capture.tracing import TracedModel
from capture.tracing.jaxprs import in_groups
from capture.tracing.leaf_uses import Cast
from capture.tracing.slices import struct_of

Arrays = Sequence[Any]
#: Programs of all devices.
EXCHANGES = ("reduce", "gather", "scatter")


@dataclass(frozen=True)
class TracedSizes:
    """The bytes of the packs of a traced loss (``capture.step.pack_sizes``).

    Attributes:
        graph: At any micro-batch size.
        optimizer: Cut by backward packs.
        casts: By parameter that devices get as a cast, to what.
        num_shares: Into how many weights are cut.
        compiled: What programs were found to need, by pass, pack and size.
    """

    graph: LayerGraph
    optimizer: SlicedOptimizer
    casts: Mapping[int, Cast] = field(default_factory=dict)
    num_shares: int = 1
    compiled: dict[tuple[str, Span, int], int] = field(default_factory=dict)

    @cached_property
    def layers(self) -> PackLayers:
        return PackLayers.of(self.graph, self.casts)

    def param(self, param: int) -> jax.ShapeDtypeStruct:
        return struct_of(self.graph.params[param])

    def streamed(self, param: int) -> jax.ShapeDtypeStruct:
        """Return the shape of a parameter as devices get it."""
        struct, cast = self.param(param), self.casts.get(param)
        return struct if cast is None else jax.ShapeDtypeStruct(struct.shape, cast.dtype)

    def alone(self, param: int) -> jax.ShapeDtypeStruct:
        """Return the shape of a single pass's gradient: of a cast, where that is as good."""
        cast = self.casts.get(param)
        return self.streamed(param) if cast and cast.once else self.param(param)

    def structs(self, holds: object) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays that a slot has."""
        share, whole = getattr(holds, "share", None), self._whole(holds)
        if share is None:
            return list(whole)
        return [share_struct(struct, self.num_shares) for struct in whole]

    def nbytes(self, holds: object) -> int:
        structs = self.structs(holds)
        return sum(int(np.prod(s.shape, dtype=np.int64)) * s.dtype.itemsize for s in structs)

    def _whole(self, holds: object) -> Iterable[jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays of which a slot has all, or a share of each."""
        graph = self.graph
        match holds:
            case Params(ids, form):
                made = {"whole": self.param, "sent": self.streamed, "alone": self.alone}[form]
                return map(made, ids)
            case State(params):
                return self.optimizer.of(params).state_structs
            case Summary(tuple(params)):
                return self.optimizer.of(params).summary
            case Loss():
                return [struct_of(graph.values[graph.layers[-1].outputs[-1]])]
            case Leaves(ids, (first, stop)):
                return (self._rows_of(graph.batch[b], stop - first) for b in ids)
            case Values(ids, (first, stop), gradients):
                values = (graph.values[v] for v in ids)
                flowing = (v for v in values if v.differentiable or not gradients)
                return (self._rows_of(v, stop - first) for v in flowing)
        raise AssertionError(f"{holds} is nothing that packs have")

    def _rows_of(self, tensor: Tensor, examples: int) -> jax.ShapeDtypeStruct:
        struct, dim = struct_of(tensor), tensor.batch_dim
        if dim is None:
            return struct
        shape = list(tensor.shape)
        shape[dim] = shape[dim] // self.graph.microbatch_size * examples
        return jax.ShapeDtypeStruct(tuple(shape), struct.dtype)

    def transient_bytes(self, which: PackPass, pack: Span, size: int, output_bytes: int) -> int:
        """Return what a compiled program needs; before, its results and a pass's weights."""
        if (known := self.compiled.get((which, pack, size))) is not None:
            return known
        weights = (
            Params(self.layers.owned(pack)) if which in ("forward", "backward") else Params(())
        )
        return output_bytes + self.nbytes(weights)


@dataclass(frozen=True, eq=False)
class PackPrograms:
    """The programs and arrays of a step of packs.

    Args:
        traced: The loss, by micro-batch size.
        minibatch_size: The loss of a micro-batch counts as many of these as it has examples.
        devices: By device id of the step.
        host: A processor for whose memory everything on the hosts is compiled, where devices are
            not there: those of CUDA then know no memory of a host, so that XLA would count what an
            update makes beside what it writes over. None: each device's own.
    """

    _traced: Mapping[int, TracedModel]
    _step: Step
    _sizes: TracedSizes
    _update_of: TracedOptimizer
    _minibatch_size: int
    _devices: Sequence[jax.Device]
    _compiler: AnyCompiler
    _host: object
    _compiled: dict[Any, Executable] = field(default_factory=dict)

    def of(self, step: Step) -> PackPrograms:
        """Return the programs of another step of the same plan: what is compiled, is."""
        return replace(self, _step=step)

    @cached_property
    def runs(self) -> dict[str, Run]:
        """One instruction that runs each program, by the program's name."""
        return {each.program: each for each in self._step.runs}

    @cached_property
    def executables(self) -> dict[str, Executable]:
        """The compiled programs by name, compiled when they are first asked for."""
        return {name: self.executable(name) for name in self.runs}

    def executable(self, name: str) -> Executable:
        """Return a program, compiled once for each place where it runs."""
        place, (key, compiled) = self._step.programs[name].place, self._program(self.runs[name])
        if (whole := (place.name, key)) not in self._compiled:
            self._compiled[whole] = compiled(
                Compiler() if self._stands_in(place) else self._compiler
            )
        return self._compiled[whole]

    def key(self, name: str) -> Any:
        """Return what tells a program from others, on whatever device, in plain data."""
        on_host = self._step.programs[name].place.host is not None
        return "host" if on_host else "device", self._program(self.runs[name])[0]

    @property
    def num_compiled(self) -> int:
        """The number of programs that were compiled, equal ones once."""
        return len(self._compiled)

    # ---- arrays ----------------------------------------------------------------------------------

    @memo
    def sharding(self, place: Place) -> NamedSharding:
        """Return the sharding of a place: whole on its device, or in the memory of its host."""
        (device,) = place.devices
        one = self._host if self._stands_in(place) else self._devices[device]
        mesh = Mesh(np.asarray([one]), ("device",))
        kind = None if place.host is None else HOST_MEMORY
        return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)

    def _stands_in(self, place: Place) -> bool:
        """Return whether what is there is compiled for another host."""
        return place.host is not None and self._host is not None

    @memo
    def layout(self, slot: Slot) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of the arrays of a slot."""
        sharding, structs = self.sharding(slot.place), self._sizes.structs(slot.holds)
        structs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in structs]
        nbytes = sum(map(shard_bytes, structs))
        assert nbytes == slot.nbytes, f"{slot} is booked and has {nbytes} bytes"
        return structs

    def _of(self, slots: Sequence[int]) -> list[list[jax.ShapeDtypeStruct]]:
        return [self.layout(self._step.slots[slot]) for slot in slots]

    def _holds(self, slots: Sequence[int]) -> list[Any]:
        return [self._step.slots[slot].holds for slot in slots]

    # ---- programs --------------------------------------------------------------------------------

    def exchanges(self) -> dict[str, Call]:
        """Return the programs of all devices, as calls on the arrays of the slots of each."""
        found = {}
        for name, run in self.runs.items():
            if self._call_of(run).kind in EXCHANGES:
                call = flat_call(self.executables[name].call)
                sizes = list(map(len, self._of(run.outputs[: len(run.outputs) // len(run.inputs)])))
                found[name] = self._exchange(run).call(call, sizes)
        return found

    def _call_of(self, run: Run) -> PackCall:
        return self._step.programs[run.program].call

    def _exchange(self, run: Run) -> Exchange:
        """Return the exchange that a run makes between devices with a group of slots each."""
        count = len(run.outputs) // len(run.inputs)
        given, made = (
            [struct for structs in self._of(slots) for struct in structs]
            for slots in (run.inputs[0], run.outputs[:count])
        )
        shardings = [self.sharding(self._step.slots[slot].place) for slot in run.outputs[::count]]
        return Exchange(self._call_of(run).kind, given, made, shardings)

    def _program(self, run: Run) -> tuple[Any, Callable[[AnyCompiler], Executable]]:
        """Return what tells a run's program from others, and a function that compiles it."""
        kind = self._call_of(run).kind
        if kind in EXCHANGES:
            exchange = self._exchange(run)
            return exchange.key, exchange.compiled
        if kind in ("update", "summarize"):
            function, key = self._update(run, kind)
        elif kind in ("cast", "widen"):
            function, key = self._conversion(run)
        else:
            function, key = self._pass(run)
        slots = run.read
        args, results = self._of(slots), self._of(run.outputs)
        out = [[struct.sharding for struct in structs] for structs in results]
        donated = tuple(i for i, slot in enumerate(slots) if slot in run.donated)
        shapes = tuple(tuple((s.shape, str(s.dtype)) for s in arg) for arg in args)
        made = tuple(tuple(str(s.dtype) for s in structs) for structs in results)
        groups = tuple(map(len, run.inputs))

        def compiled(compiler: AnyCompiler) -> Executable:
            return compiler(function, args, donate=donated, out_shardings=out)

        return (kind, key, shapes, donated, made, groups), compiled

    def _pass(self, run: Run) -> tuple[Callable[..., Any], Any]:
        """Return a forward or backward pass, and what tells it from others with its arguments."""
        kind, span, size, _, pieces = self._call_of(run)
        # A part of a forward pack gets what the whole pack reads of the batch.
        leaves = next((of.ids for of in self._holds(run.inputs[2])), ())
        where = {
            param: (i, j)
            for i, of in enumerate(self._holds(run.inputs[0]))
            for j, param in enumerate(of.ids)
        }
        pack = PackFunctions(self._traced[size], span, where, pieces or (size,), leaves)
        groups = [len(group) for group in run.inputs]
        if kind == "forward":
            return lambda *slots: pack.forward_pieces(*in_groups(slots, groups)), pack.key
        share, owned = size / self._minibatch_size, self._sizes.layers.owned(span)
        made = self._of(run.outputs)

        def backward(*slots: Arrays) -> list[Any]:
            outputs, gradients = pack.backward_pieces(*in_groups(slots, groups[:4]), share=share)
            own = [gradients.pop(p) for p in owned]
            sums = [own, *([gradient] for gradient in gradients.values())]
            sums = [
                [array.astype(struct.dtype) for array, struct in zip(arrays, structs, strict=True)]
                for arrays, structs in zip(sums, made[len(outputs) :], strict=True)
            ]
            if before := slots[sum(groups[:4]) :]:
                sums = jax.tree.map(jnp.add, list(map(list, before)), sums)
            return [*outputs, *sums]

        once = tuple(p in pack.once for p in pack.where)
        return backward, (pack.key, share, tuple(pack.where[p] for p in owned), once)

    def _update(self, run: Run, kind: str) -> tuple[Callable[..., Any], Any]:
        stage = self._sizes.optimizer.of(self._sizes.layers.owned(self._call_of(run).span))
        whats = [self._step.slots[slot] for slot in run.inputs[2]]
        update = PackUpdate(
            stage,
            list(map(len, self._of(run.inputs[0]))),
            [None if slot.what == "gradients" else slot.holds.ids[0] for slot in whats],
            [len(group) for group in run.inputs],
            [self._sizes.param(param) for param in stage.params],
            self._sizes.num_shares,
        )
        function = update.update if kind == "update" else update.summarize
        key = update.key(self._update_of)
        if self._step.programs[run.program].place.host is None:
            return function, key
        return _on_host(function), key

    def _conversion(self, run: Run) -> tuple[Callable[..., Any], Any]:
        """Return a function on the host that casts the arrays of a slot to what the result holds,
        and its key. The result takes the place of what was there before, if that is given."""
        given, target = (of.ids for of in self._holds((run.inputs[0][0], *run.outputs)))
        dtypes = [struct.dtype for structs in self._of(run.outputs) for struct in structs]
        at = [given.index(param) for param in target]

        def convert(arrays: Arrays, *before: Arrays) -> list[list[Any]]:
            made = [arrays[i].astype(dtype) for i, dtype in zip(at, dtypes, strict=True)]
            return [jax.lax.optimization_barrier((made, *before))[0]]

        return _on_host(convert), tuple(at)


def _on_host(function: Callable[..., object]) -> Callable[..., Any]:
    """Return the function for the processors of a device's host, on arrays in its memory."""
    # Until jax 0.10 the second name is that of a context.
    place: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return place(
        jax.jit(function), compute_type="device_host", out_memory_spaces=jax.memory.Space.Host
    )
