"""The compiled programs of one stage: forward, backward, summarize, update; and what each needs
while it runs.

The forward program returns, beside its outputs, exactly the values that ``jax.vjp`` saved for the
backward pass and that exist nowhere else: residuals that *are* a parameter, an input, a batch leaf,
an output or a constant are recognised by identity and are not returned, and those that depend on
parameters and constants alone (casts of weights, masks) are made again in the backward pass, so
that neither is stored once per micro-batch. ``jax.checkpoint`` around each layer is the only knob
of what is saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from capture.compiler.executable import AnyCompiler, Compiler, Executable
from capture.compiler.work import NO_LOCAL_FLOPS
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost, UpdateCost
from capture.partition.local_calls import localize
from capture.runtime.layout import StageLayout
from capture.runtime.optimizer import StageUpdate
from capture.runtime.origins import buffer_of, layer_of
from capture.step.attribution import Buffer, StageBuffers
from capture.step.interface import owned_and_borrowed
from capture.tracing import TracedModel
from capture.tracing.dataflow import DataFlow
from capture.tracing.source import layer_of_scope
from capture.tracing.split_rule import may_hold_split_rule

#: An argument of a compiled program, by group and number.
_ARGUMENT = re.compile(r"(\w+)\[(\d+)\]")


@dataclass(frozen=True)
class _Saved:
    """Where the backward pass finds one value that ``jax.vjp`` saved."""

    source: str  # "param", "input", "batch", "output", "residual" or "constant"
    index: int


class StagePrograms(StageLayout):
    """The programs of layers [first, stop) on a mesh.

    Args:
        traced: The model, at the plan's micro-batch size.
        config: The stage.
        devices: ``data_parallel * tensor_parallel`` devices, replicas first.
        specs: Per parameter of the graph, how it is split over the mesh axis ``"model"`` (``()`` if
            not).
        update: The stage's slice of the optimizer, for the parameters that it owns.
        num_arriving: Per owned parameter that later stages borrow, how many do.
        num_microbatches: The loss of a micro-batch counts 1 / num_microbatches.
        compiler: Compiles; and may name buffers, for ``buffers``.
    """

    def __init__(
        self,
        traced: TracedModel,
        config: StageConfig,
        devices: Sequence[Any],
        specs: Sequence[PartitionSpec],
        update: StageUpdate,
        *,
        num_arriving: Mapping[int, int] = MappingProxyType({}),
        num_microbatches: int = 1,
        compiler: AnyCompiler = Compiler(),
    ):
        graph, layers = traced.graph, traced.slice(config.first, config.stop)
        super().__init__(graph, config.choice, devices, specs, update)
        self.layers, self.num_microbatches, self._compiler = layers, num_microbatches, compiler
        self.owned, self.borrowed = owned_and_borrowed(graph, layers.first, layers.stop)
        assert update.params == self.owned, "the optimizer's slice is that of the stage"
        self.arriving = tuple(p for p in self.owned for _ in range(num_arriving.get(p, 0)))
        sent = graph.crossing(layers.stop)
        self.differentiable_inputs = tuple(
            v for v in layers.inputs if graph.values[v].differentiable
        )
        self.differentiable_outputs = tuple(
            v for v in layers.outputs if graph.values[v].differentiable
        )
        self.is_last = layers.stop == graph.num_layers
        # Gradients that arrive: of outputs, and of inputs that pass through to later stages as
        # well.
        self.cotangents = tuple(
            v
            for v in sent
            if graph.values[v].differentiable and (v in layers.outputs or v in layers.inputs)
        )
        self._saved: list[_Saved] = []
        self._constants: list[Any] = []
        self._vjp_tree: Any = None

    @property
    def params(self) -> tuple[int, ...]:
        """Parameters in the order in which the programs take them: owned, then borrowed."""
        return self.owned + self.borrowed

    # ---- programs --------------------------------------------------------------------------------

    def _apply(
        self,
        params: Sequence[Any],
        differentiable: Sequence[Any],
        inputs: Sequence[Any],
        batch: Sequence[Any],
    ):
        """(differentiable outputs, other outputs) of the layers."""
        by_id = dict(zip(self.params, params, strict=True))
        values = dict(zip(self.layers.inputs, inputs, strict=True)) | dict(
            zip(self.differentiable_inputs, differentiable, strict=True)
        )
        given = (
            [by_id[p] for p in self.layers.params],
            [values[v] for v in self.layers.inputs],
            batch,
        )
        results = self.layers(*given, remat=self.choice.remat, pin=self._pinned)
        by_value = dict(zip(self.layers.outputs, results, strict=True))
        rest = [v for v in self.layers.outputs if v not in self.differentiable_outputs]
        return [by_value[v] for v in self.differentiable_outputs], [by_value[v] for v in rest]

    def _pinned(self, value: int, array: Any) -> Any:
        """In the middle of a long stage the partitioner would else keep parameters split over
        replicas, and send activations instead."""
        return (
            jax.lax.with_sharding_constraint(array, self.value_sharding(value))
            if self.choice.shard_params
            else array
        )

    def _forward_saving_all(self, params, inputs, batch):
        differentiable = [inputs[self.layers.inputs.index(v)] for v in self.differentiable_inputs]
        made, vjp, rest = jax.vjp(
            lambda p, x: self._apply(p, x, inputs, batch), params, differentiable, has_aux=True
        )
        others = [v for v in self.layers.outputs if v not in self.differentiable_outputs]
        by_value = dict(zip(self.differentiable_outputs, made, strict=True)) | dict(
            zip(others, rest, strict=True)
        )
        outputs = [by_value[v] for v in self.layers.outputs]
        saved, self._vjp_tree = jax.tree.flatten(vjp)
        # The loss outlives the backward pass, which is given what it reads to free.
        returned = [] if self.is_last else outputs
        known = {
            id(array): _Saved(source, i)
            for source, group in (
                ("output", returned),
                ("batch", batch),
                ("input", inputs),
                ("param", params),
            )
            for i, array in enumerate(group)
        }
        residuals: list[Any] = []
        self._saved, self._constants = [], []
        for array in saved:
            if not isinstance(array, jax.core.Tracer):
                known[id(array)] = _Saved("constant", len(self._constants))
                self._constants.append(array)
            elif id(array) not in known:
                known[id(array)] = _Saved("residual", len(residuals))
                residuals.append(array)
            self._saved.append(known[id(array)])
        return outputs, residuals

    def _forward(self, params, inputs, batch):
        # The traced pass is replayed, not traced again: differentiating a long stage is what takes
        # the time.
        results = jax.extend.core.jaxpr_as_fun(self._traced_forward)(*params, *inputs, *batch)
        num_outputs = len(self.layers.outputs)
        return results[:num_outputs], [results[num_outputs + i] for i in self._stored]

    @cached_property
    def _traced_forward(self) -> Any:
        """The forward pass with everything that ``jax.vjp`` saves; its last outputs are the
        residuals."""
        return jax.make_jaxpr(self._forward_saving_all)(*self.forward_args)

    @cached_property
    def _saving_all(self) -> DataFlow:
        return DataFlow(self._traced_forward)

    @cached_property
    def _stored(self) -> list[int]:
        """Residuals that depend on data. Others (masks, casts of parameters) are made again in the
        backward pass."""
        flow, num_params = self._saving_all, len(self.params)
        reached = flow.propagate({v: frozenset([0]) for v in flow.inputs[num_params:]})
        residuals = flow.outputs[len(self.layers.outputs) :]
        return [
            i
            for i, v in enumerate(residuals)
            if not isinstance(v, jax.extend.core.Literal) and reached.get(v)
        ]

    def _made_again(self, params) -> dict[int, Any]:
        flow = self._saving_all
        residuals = flow.outputs[len(self.layers.outputs) :]
        others = [i for i in range(len(residuals)) if i not in set(self._stored)]
        values = flow.evaluate(
            dict(zip(flow.inputs, params, strict=False)), [residuals[i] for i in others]
        )
        return dict(zip(others, values, strict=True))

    def _kept(self, source: str) -> tuple[int, ...]:
        """Positions that the backward pass reads among the inputs, outputs or batch leaves."""
        assert self._vjp_tree is not None, "the forward program is traced first"
        return tuple(sorted({saved.index for saved in self._saved if saved.source == source}))

    def _backward(self, params, inputs, batch, outputs, residuals, cotangents, accumulated):
        groups = {
            "param": params,
            "residual": self._made_again(params) | dict(zip(self._stored, residuals, strict=True)),
            "constant": self._constants,
            "input": dict(zip(self._kept("input"), inputs, strict=True)),
            "batch": dict(zip(self._kept("batch"), batch, strict=True)),
            "output": dict(zip(self._kept("output"), outputs, strict=True)),
        }
        vjp = jax.tree.unflatten(
            self._vjp_tree, [groups[saved.source][saved.index] for saved in self._saved]
        )
        arrived = dict(zip(self.cotangents, cotangents, strict=True))
        seeds = []
        for v in self.differentiable_outputs:
            tensor = self.graph.values[v]
            seeds.append(
                jnp.full(tensor.shape, 1 / self.num_microbatches, tensor.dtype)
                if self.is_last
                else arrived[v]
            )
        param_gradients, input_gradients = vjp(seeds)
        for i, v in enumerate(self.differentiable_inputs):
            if v in arrived:
                input_gradients[i] = input_gradients[i] + arrived[v]
        return input_gradients, [
            a + g.astype(a.dtype) for a, g in zip(accumulated, param_gradients, strict=True)
        ]

    def _summarize(self, params, state, gradients, arrived):
        return self.optimizer.summarize(params, state, self._add_arrived(gradients, arrived))

    def _update(self, params, state, gradients, borrowed, arrived, summaries):
        params, state = self.optimizer.update(
            params, state, self._add_arrived(gradients, arrived), summaries
        )
        return (
            (params, state)
            if self._compiler.clears_apart
            else (params, state, *self._clear(gradients, borrowed))
        )

    @staticmethod
    def _clear(*groups):
        # Formally they are read: an argument that is not would be left out, and with it the memory
        # that its zeros take over.
        return tuple([jnp.where(False, g, jnp.zeros_like(g)) for g in group] for group in groups)

    def _add_arrived(self, gradients, arrived):
        total = dict(zip(self.owned, gradients, strict=True))
        for p, gradient in zip(self.arriving, arrived, strict=True):
            total[p] = total[p] + gradient
        return list(total.values())

    def _compile(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate: Sequence[int],
        out_shardings: Any,
    ) -> Executable:
        flops = NO_LOCAL_FLOPS
        if self._has_local_calls:
            function, flops = localize(function, args, self.mesh)
        return self._compiler(
            function,
            args,
            donate=donate,
            out_shardings=out_shardings,
            layer_of=self._layer_of,
            local_flops=flops,
        )

    @cached_property
    def _has_local_calls(self) -> bool:
        return any(
            may_hold_split_rule(op) for call in self.layers.calls for op in call.function.ops
        )

    @cached_property
    def forward_args(self) -> tuple[list[Any], list[Any], list[Any]]:
        return (
            self.param_structs(self.params),
            self.value_structs(self.layers.inputs),
            self.batch_structs(self.layers.batch),
        )

    @cached_property
    def forward(self) -> Executable:
        """(params, inputs, batch) -> (outputs, residuals)."""
        out = ([self.value_sharding(v) for v in self.layers.outputs], None)
        return self._compile(self._forward, self.forward_args, (), out)

    @cached_property
    def backward_args(self) -> tuple[list[Any], ...]:
        residuals = self.forward.outputs[1]  # tells what is kept
        return (
            self.param_structs(self.params),
            self.value_structs([self.layers.inputs[i] for i in self._kept("input")]),
            self.batch_structs([self.layers.batch[i] for i in self._kept("batch")]),
            self.value_structs([self.layers.outputs[i] for i in self._kept("output")]),
            residuals,
            self.value_structs(self.cotangents),
            self.param_structs(self.params),
        )

    @cached_property
    def backward(self) -> Executable:
        """(params, kept inputs, kept batch, kept outputs, residuals, cotangents, accumulated) ->
        (input gradients, accumulated)."""
        args = self.backward_args
        out = (
            [self.value_sharding(v) for v in self.differentiable_inputs],
            [g.sharding for g in args[-1]],
        )
        return self._compile(self._backward, args, (1, 3, 4, 5, 6), out)

    @cached_property
    def _own(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.param_structs(self.owned), self.state_structs(), self.param_structs(self.owned)

    def summary_structs(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.replicated) for v in values]

    @cached_property
    def summarize(self) -> Executable | None:
        """(params, state, gradients, arrived) -> summary; None where the optimizer needs nothing of
        other stages."""
        if not any(stage.summary for stage in self.optimizer.siblings):
            return None
        arriving = self.param_structs(self.arriving)
        out = [self.replicated] * len(self.optimizer.summary)
        return self._compile(self._summarize, (*self._own, arriving), (), out)

    @cached_property
    def update(self) -> Executable:
        """(params, state, gradients, borrowed gradients, arrived, summaries) -> (params, state,
        cleared gradients, cleared borrowed), the latter two unless ``clear`` makes them."""
        borrowed = self.param_structs(self.borrowed)
        others = [s for s in self.optimizer.siblings if s is not self.optimizer]
        summaries = [self.summary_structs(s.summary) for s in others] if self.summarize else []
        args = (*self._own, borrowed, self.param_structs(self.arriving), summaries)
        groups = (*self._own, borrowed)
        out = tuple([struct.sharding for struct in group] for group in groups)
        if not self._compiler.clears_apart:
            return self._compile(self._update, args, (0, 1, 2, 3), out)
        return self._compile(self._update, args, (0, 1), out[:2])

    @cached_property
    def clear(self) -> Executable | None:
        """(gradients, borrowed gradients) -> zeros, where the update leaves them as they are."""
        if not self._compiler.clears_apart:
            return None
        groups = (self.param_structs(self.owned), self.param_structs(self.borrowed))
        out = tuple([struct.sharding for struct in group] for group in groups)
        return self._compile(self._clear, groups, (0, 1), out)

    @cached_property
    def cost(self) -> StageCost:
        """What the compiler says of the stage: compiles every program."""
        return self.cost_given_update(self.update_cost)

    @cached_property
    def update_cost(self) -> UpdateCost:
        """What the compiler says of the end of a step, which does not depend on the micro-batch."""
        update, clear, summarize = self.update, self.clear, self.summarize
        cleared_bytes = 0 if clear is None else clear.transient_bytes
        return UpdateCost(
            update_bytes=max(update.transient_bytes, cleared_bytes),
            optimizer_bytes=sum(map(shard_bytes, self.state_structs())),
            summarize_bytes=summarize.transient_bytes if summarize else 0,
            summary_bytes=sum(map(shard_bytes, summarize.outputs)) if summarize else 0,
            update_work=update.work,
        )

    def cost_given_update(self, update: UpdateCost) -> StageCost:
        """The cost of the stage where that of its update is known already: compiles forward and
        backward."""
        forward, backward = self.forward, self.backward
        return StageCost(
            residual_bytes=self._residual_bytes(forward),
            forward_bytes=forward.transient_bytes,
            backward_bytes=backward.transient_bytes,
            kept_inputs=self._kept("input"),
            kept_outputs=self._kept("output"),
            kept_batch=self._kept("batch"),
            optimizer_bytes=update.optimizer_bytes,
            update_bytes=update.update_bytes,
            summarize_bytes=update.summarize_bytes,
            summary_bytes=update.summary_bytes,
            forward_work=forward.work,
            backward_work=backward.work,
            update_work=update.update_work,
        )

    @property
    def buffers(self) -> StageBuffers:
        """What the bytes of ``cost`` consist of: compiles every program, which must have been asked
        to name their buffers."""
        compiled = {
            "forward": self.forward,
            "backward": self.backward,
            "summarize": self.summarize,
            "update": self.update,
        }
        kept, outputs = (
            self.forward.outputs[1],
            self._saving_all.outputs[len(self.layers.outputs) :],
        )
        residuals = [
            buffer_of(self._saving_all, outputs[i], shard_bytes(struct))
            for i, struct in zip(self._stored, kept, strict=True)
        ]
        optimizer = [
            self._of_state(leaf, struct)
            for leaf, struct in zip(self.optimizer.state, self.state_structs(), strict=True)
        ]
        named = {name: program.buffers for name, program in compiled.items() if program is not None}
        return StageBuffers(tuple(optimizer), tuple(residuals), named)

    def _of_state(self, leaf: int, struct: jax.ShapeDtypeStruct) -> Buffer:
        param = self.optimizer.param_of_state.get(leaf)
        layer = None if param is None else self.graph.param_owner(param)
        return Buffer(
            shard_bytes(struct),
            "optimizer",
            layer,
            "state" if param is None else f"state of {self.graph.params[param].name}",
        )

    def _layer_of(self, name: str) -> int | None:
        """The layer that an operation in a scope, or an argument of a program, belongs to."""
        layer, argument = layer_of_scope(name), _ARGUMENT.fullmatch(name)
        if layer is not None or argument is None:
            return layer
        group, index = argument[1], int(argument[2])
        match group:
            case "params" | "accumulated":
                return self.graph.param_owner(self.params[index])
            case "gradients":
                return self.graph.param_owner(self.owned[index])
            case "state":
                param = self.optimizer.param_of_state.get(self.optimizer.state[index])
                return None if param is None else self.graph.param_owner(param)
            case "residuals":
                made = self._saving_all.outputs[len(self.layers.outputs) + self._stored[index]]
                return layer_of(self._saving_all, made)
            case "inputs" | "batch":
                return self.layers.first
            case "outputs" | "cotangents":
                return self.layers.stop - 1
            case _:
                return None

    @staticmethod
    def _residual_bytes(forward: Executable) -> int:
        """As allocated where the compiler says so: padding is counted with what is kept, which has
        the odd shapes."""
        outputs, residuals = forward.outputs
        if forward.output_bytes is None:
            return sum(map(shard_bytes, residuals))
        return max(0, forward.output_bytes - sum(map(shard_bytes, outputs)))


def shard_bytes(array: Any) -> int:
    """Bytes that an array, or the structure of one with its sharding, takes on each of its
    devices."""
    elements = int(np.prod(array.sharding.shard_shape(array.shape), dtype=np.int64))
    return elements * (
        8 if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array.dtype.itemsize
    )
