"""The compiled programs of one stage, forward, zeros for gradients, backward, summarize and update,
and what each needs while it runs.

The forward program returns, beside its outputs, the values that are kept for the backward pass and
that exist nowhere else (``residuals.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from capture.compiler.executable import AnyCompiler, Compiler, Executable
from capture.compiler.work import NO_LOCAL_FLOPS
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost, UpdateCost
from capture.measured.work import ProgramWork
from capture.partition.local_calls import localize
from capture.partition.sequence import SplitRun
from capture.partition.sharding import ModelSharding
from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS
from capture.plan.choices import is_cut, num_full_layers, remat_of_layers
from capture.runtime.layer_order import layer_by_layer, parameters_in_turn
from capture.runtime.layout import StageLayout, kept_bytes, shard_bytes, split_dim
from capture.runtime.optimizer import StageUpdate
from capture.runtime.origins import buffers_of, layer_of
from capture.runtime.residuals import Residuals, SavedPass, ValueSplit
from capture.step.attribution import StageBuffers
from capture.step.holds import KeptPart, Leaves, Params, State, Summary, Values
from capture.step.interface import owned_and_borrowed
from capture.tracing import TracedModel
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable
from capture.tracing.keys import is_key
from capture.tracing.segment import Segment
from capture.tracing.source import layer_of_scope
from capture.tracing.split_rule import may_hold_split_rule

#: An argument of a compiled program, by group and number.
_ARGUMENT = re.compile(r"(\w+)\[(\d+)\]")
#: Marks what passes between layers, with its number behind it.
_BETWEEN_LAYERS = "between layers "


class StagePrograms(StageLayout):
    """The programs of layers [first, stop) on a mesh.

    Args:
        traced: The model, at the plan's micro-batch size.
        devices: ``data_parallel * tensor_parallel`` devices, replicas first.
        update: The stage's slice of the optimizer, for the parameters that it owns.
        num_arriving: Per owned parameter that later stages borrow, how many do.
        num_microbatches: The loss of a micro-batch counts 1 / num_microbatches.
        compiler: Compiles; and may name buffers, for ``buffers``.
    """

    #: The programs of the backward pass.
    backward_names: tuple[str, ...] = ("backward",)

    def __init__(
        self,
        traced: TracedModel,
        config: StageConfig,
        devices: Sequence[jax.Device],
        sharding: ModelSharding,
        update: StageUpdate,
        *,
        num_arriving: Mapping[int, int] = MappingProxyType({}),
        num_microbatches: int = 1,
        compiler: AnyCompiler = Compiler(),
    ):
        choice, layers = config.choice, traced.slice(config.first, config.stop)
        self._sharding, graph = sharding, sharding.graph([choice])
        specs = sharding.specs(choice.tensor_parallel)
        super().__init__(graph, choice, devices, specs, update)
        self.layers, self.num_microbatches, self._compiler = layers, num_microbatches, compiler
        self._remat = remat_of_layers(choice.remat, config.num_layers)
        self.owned, self.borrowed = owned_and_borrowed(graph, layers.first, layers.stop)
        assert update.params == self.owned, "the optimizer's slice is that of the stage"
        self.arriving = tuple(p for p in self.owned for _ in range(num_arriving.get(p, 0)))
        self.segment = Segment(graph, layers)

    @property
    def params(self) -> tuple[int, ...]:
        """The parameters in the order in which the programs take them: owned, then borrowed."""
        return self.owned + self.borrowed

    # ---- programs --------------------------------------------------------------------------------

    def _run(self, batch: Sequence[Any], params: Sequence[Any], values: Mapping[int, Any]):
        """Return the outputs of the layers."""
        by_id = dict(zip(self.params, params, strict=True))
        given = (
            [by_id[p] for p in self.layers.params],
            [values[v] for v in self.layers.inputs],
            batch,
        )
        # Of all that is saved without remat, a cut chooses what is kept.
        only_cut = is_cut(self._remat) and not num_full_layers(self._remat)
        remat = "none" if only_cut else self._remat
        results = self.layers(*given, remat=remat, pin=self._pinned, runs=self._split_runs)
        return [
            jax.lax.with_sharding_constraint(array, self.value_sharding(v))
            if v in self._split_values and not self._passes_split(v)
            else array
            for v, array in zip(self.layers.outputs, results, strict=True)
        ]

    def _pinned(self, value: int, array: jax.Array) -> Any:
        """Mark an array that passes between two layers of the stage, and say how it is to lie.

        Layers that are computed again as a whole keep it, so it is marked. (Where more is kept,
        what it was made by may keep it as well, and the mark would make two of one.) In the middle
        of a long stage the partitioner would else keep parameters split over replicas, and send
        activations instead."""
        if not is_key(array) and (self._remat == "full" or num_full_layers(self._remat)):
            array = checkpoint_name(array, f"{_BETWEEN_LAYERS}{value}")
        if not self.choice.shard_params:
            return array
        lies = self.split_sharding(value, self._split_values.get(value))
        return jax.lax.with_sharding_constraint(array, lies)

    @property
    def _stored(self) -> Sequence[Sequence[Any]]:
        """The values that the forward program returns beside its outputs, by when they die."""
        return [self.residuals.stored]

    def _stored_sharding(self, kept: object) -> Any:
        """Return the sharding of what is kept of the forward pass. What is marked lies as the
        partition walk says, so that it is known without a compiler; the rest as the compiler has
        it (None)."""
        equation = self._saving_all.maker(kept)
        if equation is None or equation.primitive.name != "name":
            return None
        name = equation.params["name"]
        if not name.startswith(_BETWEEN_LAYERS):
            return None
        if int(name.removeprefix(_BETWEEN_LAYERS)) in self._split_values:
            return None
        return NamedSharding(self.mesh, self.residuals.spec(kept))

    @cached_property
    def _split_runs(self) -> list[SplitRun | None]:
        """The runs of layers' operations on values split along the sequence; empty if none are."""
        if not self.choice.sequence_parallel:
            return []
        splits = self._sharding.layer_splits(self.choice.tensor_parallel)
        arrives_split = {v for v in self.layers.inputs if self._passes_split(v)}
        again = len(splits) if self._remat == "full" else num_full_layers(self._remat)
        return [
            None if split is None else SplitRun(call, split, self.mesh, arrives_split, i < again)
            for i, (call, split) in enumerate(splits[self.layers.first : self.layers.stop])
        ]

    def _passes_split(self, value: int) -> bool:
        return self.graph.value_dim(value, self.choice.value_split) is not None

    @cached_property
    def _split_values(self) -> dict[int, int]:
        """The values that leave their layer split along the sequence, and that dimension."""
        return {
            v: dim
            for call, run in zip(self.layers.calls, self._split_runs, strict=False)
            if run is not None
            for v, dim in zip(call.outputs, run.outputs, strict=True)
            if dim is not None
        }

    def _forward_and_vjp(self, params, inputs, batch):
        values = dict(zip(self.layers.inputs, inputs, strict=True))
        made, vjp = self.segment.forward(partial(self._run, batch), params, values)
        return [made[v] for v in self.layers.outputs], vjp

    def _forward(self, params, inputs, batch):
        groups = params, inputs, batch
        return parameters_in_turn(self._made, groups) if self._in_turn else self._made(*groups)

    @cached_property
    def _in_turn(self) -> bool:
        """Whether the program says that parameters in parts are gathered in their layer's turn.
        XLA's scheduler for TPUs, which devices of CPUs stand for, does it unasked and copies what
        is told to wait; that for CPUs orders nothing."""
        several = self.layers.stop - self.layers.first > 1
        platform = self.mesh.devices.flat[0].platform
        return self.choice.shard_params and several and platform in ("gpu", "cuda")

    def _made(self, params, inputs, batch):
        """Return the outputs and what is kept beside them."""
        # The traced pass is replayed, not traced again: differentiating a long stage is what takes
        # the time.
        flow, given = self._saving_all, [*params, *inputs, *batch]
        wanted = [flow.outputs[: len(self.layers.outputs)], *self._stored]
        returned = {v: i for i, v in enumerate(flow.outputs) if is_variable(v)}
        if returned.keys() >= set(self.residuals.stored):
            results = jax.extend.core.jaxpr_as_fun(self._saved.traced)(*given)
            outputs = results[: len(self.layers.outputs)]
            return outputs, *([results[returned[v]] for v in group] for group in self._stored)
        # What is kept is made inside the calls that the flow has opened.
        return tuple(flow.part([flow.inputs], wanted, whole=True)(given))

    @cached_property
    def _saved(self) -> SavedPass:
        return SavedPass(self._forward_and_vjp, self.forward_args)

    @property
    def _saving_all(self) -> DataFlow:
        return self._saved.flow

    @cached_property
    def residuals(self) -> Residuals:
        """The values that one micro-batch keeps for the backward pass."""
        # Parameters that are split over replicas are gathered where they are read.
        specs = [self.specs[p] for p in self.params]
        specs += [data.sharding.spec for group in self.forward_args[1:] for data in group]
        split = ValueSplit(
            self._saving_all,
            [
                (axis, self.mesh.shape[axis], [split_dim(spec, axis) for spec in specs])
                for axis in (DATA_AXIS, MODEL_AXIS)
            ],
            spread=self._saved.spread,
        )
        return Residuals(
            self._saving_all,
            len(self.params),
            len(self.layers.inputs),
            len(self.layers.outputs),
            # The loss outlives the backward pass, which is given what it reads to free.
            returns_outputs=not self.segment.is_last,
            remat=self._remat,
            split=split,
        )

    def _backward(self, *groups):
        if self.layers.stop - self.layers.first == 1:
            return self._gradients(*groups)
        return layer_by_layer(
            self._gradients,
            groups,
            given=(6,) if self._in_turn else (0, 6),
            awaited=1,
            # Sums over replicas may go on while the next layer is computed.
            lag=int(self.choice.data_parallel > 1),
            lying=[self.param_sharding(p) for p in self.params] if self._in_turn else (),
        )

    def _gradients(self, params, inputs, batch, outputs, residuals, cotangents, accumulated):
        read = self.residuals.read_again(params, inputs, batch, outputs, residuals)
        vjp = self._saved.vjp(read)
        if self.segment.is_last:
            losses = [self.graph.values[v] for v in self.segment.outputs]
            share = 1 / self.num_microbatches
            cotangents = [jnp.full(loss.shape, share, loss.dtype) for loss in losses]
        param_gradients, input_gradients = self.segment.gradients(vjp, cotangents)
        return input_gradients, [
            a + g.astype(a.dtype) for a, g in zip(accumulated, param_gradients, strict=True)
        ]

    def _summarize(self, params, state, gradients, arrived):
        total = self.optimizer.total(gradients, zip(self.arriving, arrived, strict=True))
        return self.optimizer.summarize(params, state, total)

    def _update(self, params, state, gradients, arrived, summaries):
        total = self.optimizer.total(gradients, zip(self.arriving, arrived, strict=True))
        return self.optimizer.update(params, state, total, summaries)

    def _zero_gradients(self):
        return [jnp.zeros(struct.shape, struct.dtype) for struct in self.param_structs(self.params)]

    def _compile(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        donate: Sequence[int],
        out_shardings: object,
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
        """The program (params, inputs, batch) -> (outputs, residuals)."""
        stored = ([*map(self._stored_sharding, group)] for group in self._stored)
        out = ([self.value_sharding(v) for v in self.layers.outputs], *stored)
        return self._compile(self._forward, self.forward_args, (), out)

    @property
    def backward_args(self) -> tuple[list[Any], ...]:
        return self.backward_args_with(self.forward.outputs[1])

    def backward_args_with(self, residuals: list[Any]) -> tuple[list[Any], ...]:
        """Return the arguments of the backward pass, given the structures of ``residuals``."""
        kept = self.residuals
        return (
            self.param_structs(self.params),
            self.value_structs([self.layers.inputs[i] for i in kept.inputs]),
            self.batch_structs([self.layers.batch[i] for i in kept.batch]),
            self.value_structs([self.layers.outputs[i] for i in kept.outputs]),
            residuals,
            self.value_structs(self.segment.cotangents),
            self.param_structs(self.params),
        )

    @cached_property
    def backward(self) -> Executable:
        """The program (params, kept inputs, kept batch, kept outputs, residuals, cotangents,
        accumulated) -> (input gradients, accumulated)."""
        args = self.backward_args
        out = (
            [self.value_sharding(v) for v in self.segment.inputs],
            [g.sharding for g in args[-1]],
        )
        return self._compile(self._backward, args, (1, 3, 4, 5, 6), out)

    @cached_property
    def _own(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.param_structs(self.owned), self.state_structs(), self.param_structs(self.owned)

    def structs(self, holds: object) -> Sequence[Any]:
        """Return the structures of the arrays of a slot, by the record of what it holds; compiles
        what makes it, if they are not known else."""
        match holds:
            case Params(ids):
                return self.param_structs(ids)
            case State():
                return self.state_structs()
            case Leaves(ids):
                return self.batch_structs(ids)
            case Values(ids):
                return self.value_structs(ids)
            case Summary(int(stage)):
                return self.summary_structs(self.optimizer.whole.stages[stage].summary)
            case KeptPart(part):
                return self.forward.outputs[1 if part == "residuals" else 2]
        raise AssertionError(f"{holds} is nothing that a stage has")

    def summary_structs(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self.replicated) for v in values]

    @cached_property
    def summarize(self) -> Executable | None:
        """The program (params, state, gradients, arrived) -> summary; None where the optimizer
        needs nothing of other stages."""
        if not self.optimizer.whole.exchanges:
            return None
        arriving = self.param_structs(self.arriving)
        out = [self.replicated] * len(self.optimizer.summary)
        return self._compile(self._summarize, (*self._own, arriving), (), out)

    @cached_property
    def update(self) -> Executable:
        """The program (params, state, gradients, arrived, summaries) -> (params, state)."""
        others = self.optimizer.others if self.summarize else []
        summaries = [self.summary_structs(stage.summary) for stage in others]
        args = (*self._own, self.param_structs(self.arriving), summaries)
        out = tuple([struct.sharding for struct in group] for group in self._own[:2])
        return self._compile(self._update, args, (0, 1), out)

    @cached_property
    def zero_gradients(self) -> Executable:
        """The program () -> zeros, to which backward passes add the gradients of ``params``."""
        out = [struct.sharding for struct in self.param_structs(self.params)]
        return self._compile(self._zero_gradients, (), (), out)

    @cached_property
    def cost(self) -> StageCost:
        """The compiler's figures for the stage, bytes and work: compiles every program."""
        return self.cost_given_update(self.update_cost)

    @cached_property
    def update_cost(self) -> UpdateCost:
        """The compiler's figures for the end of a step, which do not depend on the micro-batch."""
        update, summarize = self.update, self.summarize
        return UpdateCost(
            update_bytes=update.transient_bytes,
            optimizer_bytes=sum(map(shard_bytes, self._own[1])),
            summarize_bytes=summarize.transient_bytes if summarize else 0,
            summary_bytes=sum(map(shard_bytes, summarize.outputs)) if summarize else 0,
            update_work=self.with_zeros(update.work),
        )

    def with_zeros(self, update: ProgramWork | None) -> ProgramWork | None:
        """Return the work of a step's end: the update, and zeros written, with a kernel for each
        gradient, which is known without compiling them; None where the update is not known."""
        sizes = Counter(map(shard_bytes, self.param_structs(self.params)))
        return None if update is None else update.writing(sizes)

    def cost_given_update(self, update: UpdateCost) -> StageCost:
        """Return the stage's cost, given that of its update: compiles forward and backward."""
        forward = self.forward
        return StageCost(
            residual_bytes=kept_bytes(forward),
            forward_bytes=forward.transient_bytes,
            kept_inputs=self.residuals.inputs,
            kept_outputs=self.residuals.outputs,
            kept_batch=self.residuals.batch,
            optimizer_bytes=update.optimizer_bytes,
            update_bytes=update.update_bytes,
            summarize_bytes=update.summarize_bytes,
            summary_bytes=update.summary_bytes,
            forward_work=forward.work,
            update_work=update.update_work,
            **self._backward_cost(),
        )

    def _backward_cost(self) -> dict[str, Any]:
        """Return the fields of ``StageCost`` that tell of the backward pass."""
        backward = self.backward
        return {"backward_bytes": backward.transient_bytes, "backward_work": backward.work}

    @property
    def buffers(self) -> StageBuffers:
        """The buffers that the bytes of ``cost`` consist of: compiles every program, which must
        have been asked to name them."""
        compiled = {
            name: getattr(self, name)
            for name in ("forward", *self.backward_names, "summarize", "update")
        }
        named = {name: program.buffers for name, program in compiled.items() if program is not None}
        stored, *held = map(
            partial(buffers_of, self._saving_all), self._stored, self.forward.outputs[1:]
        )
        return StageBuffers(self.state_buffers(), stored, named, *held)

    def _layer_of(self, name: str) -> int | None:
        """Return the layer that an operation in a scope, or a program's argument, belongs to."""
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
                param = self.params_of_state[index]
                return None if param is None else self.graph.param_owner(param)
            case "residuals":
                return layer_of(self._saving_all, self.residuals.stored[index])
            case "inputs" | "batch":
                return self.layers.first
            case "outputs" | "cotangents":
                return self.layers.stop - 1
            case _:
                return None
