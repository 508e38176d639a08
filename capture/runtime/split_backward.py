"""The backward pass of a stage in two programs: the gradients of its inputs, which the stage before
waits for, and those of its weights, which nobody waits for.

Both are cut out of the one backward pass. What the gradients of the inputs depend on is computed in
the first program, everything else in the second, so no product runs twice. What the second reads of
the first is handed over (``deferred``), but for what follows by cheap operations from what the
second has anyway: that is computed again. Of what the forward pass kept, the second holds what it
reads itself.

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), which splits per layer; here the split is
one of data flow, for any model. A loop (``scan``) is one operation: if both gradients need it, it
is in the first program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import jax

from capture.compiler.executable import Executable
from capture.measured.stage_cost import SplitCost
from capture.runtime.layout import shard_bytes
from capture.runtime.origins import buffer_of
from capture.runtime.programs import StagePrograms
from capture.step.attribution import StageBuffers
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import in_groups, is_variable
from capture.tracing.recompute import recompute_bytes


class BackwardSplit:
    """The cut of a backward pass in two: which values are computed, held and handed over.

    Args:
        flow: The backward pass.
        num_input_gradients: Its first outputs; the others are the gradients of weights.
        free: Inputs that the second program has in any case: parameters and accumulators.

    Attributes:
        inputs, weights: The gradients.
        deferred: Values that the first program hands to the second.
        read: Inputs that the second reads, beside the free ones.
    """

    def __init__(self, flow: DataFlow, num_input_gradients: int, free: Iterable[Any]):
        self._flow, self._inputs, self._free = flow, set(flow.inputs), set(free)
        self.inputs = flow.outputs[:num_input_gradients]
        self.weights = flow.outputs[num_input_gradients:]
        made = {v for equation in flow.needed(self.inputs) for v in equation.outvars}
        equations = flow.needed(self.weights, made)
        atoms = [*self.weights, *(v for equation in equations for v in equation.invars)]
        given = made | (self._inputs - self._free)
        read = {v for v in atoms if is_variable(v) and v in given}
        for v in sorted(read & made, key=flow.order, reverse=True):
            sources = self._sources(v, read)
            if sources is not None and sum(map(_nbytes, sources)) < _nbytes(v):
                read = (read - {v}) | sources
        self.deferred = sorted(read & made, key=flow.order)
        self.read = read - made

    def _sources(self, v: Any, read: set[Any]) -> set[Any] | None:
        """Return what else must be there for a value to follow by cheap operations; None where it
        does not."""
        sources, seen, waiting = set[Any](), {v}, [v]
        while waiting:
            one = waiting.pop()
            equation = self._flow.maker(one)
            if one is not v and one in read:
                continue
            if equation is None:
                if one in self._inputs and one not in self._free:
                    sources.add(one)
            elif recompute_bytes(equation) is not None:
                new = [w for w in equation.invars if is_variable(w) and w not in seen]
                seen.update(new)
                waiting += new
            elif one is v:
                return None
            else:
                sources.add(one)
        return sources


def _nbytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


class SplitStagePrograms(StagePrograms):
    """The programs of a stage whose backward pass is split; arguments as of ``StagePrograms``.

    Its forward program returns (outputs, residuals that die with the first part, those that die
    with the second).
    """

    @cached_property
    def _flow(self) -> DataFlow:
        args = (
            self.param_structs(self.params),
            self.value_structs([self.layers.inputs[i] for i in self.residuals.inputs]),
            self.batch_structs([self.layers.batch[i] for i in self.residuals.batch]),
            self.value_structs([self.layers.outputs[i] for i in self.residuals.outputs]),
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.residuals.stored],
            self.value_structs(self.cotangents),
            self.param_structs(self.params),
        )
        self._counts = tuple(map(len, args))
        return DataFlow(jax.make_jaxpr(self._gradients)(*args), open_remats=True)

    @cached_property
    def _groups(self) -> Sequence[Sequence[Any]]:
        """The inputs of the flow as the backward pass takes them."""
        flow = self._flow  # whose arguments are counted
        return in_groups(flow.inputs, self._counts)

    @cached_property
    def split(self) -> BackwardSplit:
        flow = self._flow
        params, *_, accumulated = self._groups
        return BackwardSplit(flow, len(self.differentiable_inputs), [*params, *accumulated])

    def _held(self, group: int) -> tuple[int, ...]:
        """Return the positions in a group of inputs that the gradients of weights read."""
        return tuple(i for i, v in enumerate(self._groups[group]) if v in self.split.read)

    def _parts(self, groups: Iterable[int]) -> tuple[list[Any], list[Any]]:
        """Return the values of some groups of inputs: those that die with the first program, and
        those that are held."""
        values = [v for group in groups for v in self._groups[group]]
        held = self.split.read
        return [v for v in values if v not in held], [v for v in values if v in held]

    def _forward(self, params, inputs, batch):
        outputs, residuals = super()._forward(params, inputs, batch)
        held = set(self._held(4))
        return (
            outputs,
            [r for i, r in enumerate(residuals) if i not in held],
            [r for i, r in enumerate(residuals) if i in held],
        )

    def _backward_inputs(self, params, batch, gone, held):
        vars_gone, vars_held = self._parts((1, 3, 4, 5))
        env = dict(zip(self._groups[0], params, strict=True))
        env |= zip(self._groups[2], batch, strict=True)
        env |= zip(vars_gone, gone, strict=True)
        env |= zip(vars_held, held, strict=True)
        wanted = [*self.split.inputs, *self.split.deferred]
        values = self._flow.evaluate(env, wanted)
        count = len(self.split.inputs)
        return values[:count], values[count:]

    def _backward_weights(self, params, batch, held, deferred, accumulated):
        env = dict(zip(self._groups[0], params, strict=True))
        env |= zip([self._groups[2][i] for i in self._held(2)], batch, strict=True)
        env |= zip(self._parts((1, 3, 4, 5))[1], held, strict=True)
        env |= zip(self.split.deferred, deferred, strict=True)
        env |= zip(self._groups[6], accumulated, strict=True)
        return self._flow.evaluate(env, self.split.weights)

    @cached_property
    def forward(self) -> Executable:
        """The program (params, inputs, batch) -> (outputs, residuals, held residuals)."""
        held = set(self._held(4))
        gone, kept = (
            [each for i, each in enumerate(self._stored_shardings) if (i in held) == is_held]
            for is_held in (False, True)
        )
        out = ([self.value_sharding(v) for v in self.layers.outputs], gone, kept)
        return self._compile(self._forward, self.forward_args, (), out)

    @cached_property
    def _structs(self) -> tuple[list[Any], list[Any]]:
        """The shapes of what dies with the first program, and of what is held."""
        residuals = [*self.forward.outputs[1], *self.forward.outputs[2]]
        by_var = dict(zip((v for part in self._parts([4]) for v in part), residuals, strict=True))
        for group, ids in (
            (1, [self.layers.inputs[i] for i in self.residuals.inputs]),
            (3, [self.layers.outputs[i] for i in self.residuals.outputs]),
            (5, self.cotangents),
        ):
            by_var |= zip(self._groups[group], self.value_structs(ids), strict=True)
        gone, held = self._parts((1, 3, 4, 5))
        return [by_var[v] for v in gone], [by_var[v] for v in held]

    def _batch_structs(self, positions: Iterable[int]) -> list[Any]:
        kept = self.residuals.batch
        return self.batch_structs([self.layers.batch[kept[i]] for i in positions])

    @cached_property
    def backward_inputs(self) -> Executable:
        """The program (params, kept batch, what dies, what is held) -> (input gradients,
        deferred)."""
        gone, held = self._structs
        batch = self._batch_structs(range(self._counts[2]))
        args = (self.param_structs(self.params), batch, gone, held)
        out = ([self.value_sharding(v) for v in self.differentiable_inputs], None)
        return self._compile(self._backward_inputs, args, (2,), out)

    @cached_property
    def backward_weights(self) -> Executable:
        """The program (params, held batch, what is held, deferred, accumulated) -> accumulated."""
        accumulated = self.param_structs(self.params)
        args = (
            self.param_structs(self.params),
            self._batch_structs(self._held(2)),
            self._structs[1],
            self.backward_inputs.outputs[1],
            accumulated,
        )
        out = [g.sharding for g in accumulated]
        return self._compile(self._backward_weights, args, (2, 3, 4), out)

    @cached_property
    def split_cost(self) -> SplitCost:
        """The memory and work of the two backward programs as the compiler reports them."""
        inputs, weights = self.backward_inputs, self.backward_weights
        kept = [self.residuals.inputs, self.residuals.outputs, self.residuals.batch]
        return SplitCost(
            inputs_bytes=inputs.transient_bytes,
            weights_bytes=weights.transient_bytes,
            residual_bytes=sum(map(shard_bytes, self.forward.outputs[2])),
            deferred_bytes=sum(map(shard_bytes, inputs.outputs[1])),
            kept_inputs=tuple(kept[0][i] for i in self._held(1)),
            kept_outputs=tuple(kept[1][i] for i in self._held(3)),
            kept_batch=tuple(kept[2][i] for i in self._held(2)),
            cotangents=self._held(5),
            inputs_work=inputs.work,
            weights_work=weights.work,
        )

    def _backward_cost(self) -> dict[str, Any]:
        """Return the cost of the two programs; the backward pass is never compiled whole."""
        return {"backward_bytes": 0, "split": self.split_cost}

    @property
    def buffers(self) -> StageBuffers:
        """The buffers of the stage's programs, two of them for backward: compiles them all."""
        programs = {
            "forward": self.forward,
            "backward_inputs": self.backward_inputs,
            "backward_weights": self.backward_weights,
            "summarize": self.summarize,
            "update": self.update,
        }
        stored = dict(zip(self._groups[4], self.residuals.stored, strict=True))
        gone, held = (
            tuple(
                buffer_of(self._saving_all, stored[v], shard_bytes(struct))
                for v, struct in zip(values, structs, strict=True)
            )
            for values, structs in zip(self._parts([4]), self.forward.outputs[1:], strict=True)
        )
        deferred = tuple(
            buffer_of(self._flow, v, shard_bytes(struct))
            for v, struct in zip(self.split.deferred, self.backward_inputs.outputs[1], strict=True)
        )
        return StageBuffers(
            self.state_buffers(),
            gone,
            {name: each.buffers for name, each in programs.items() if each is not None},
            held,
            deferred,
        )
