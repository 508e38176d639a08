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

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import jax

from capture.compiler.executable import Executable
from capture.measured.stage_cost import SplitCost
from capture.runtime.layout import shard_bytes
from capture.runtime.origins import buffers_of
from capture.runtime.programs import StagePrograms
from capture.step.attribution import StageBuffers
from capture.step.holds import KeptPart
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import in_groups, is_variable
from capture.tracing.recompute import recompute_bytes


class BackwardSplit:
    """The cut of a backward pass in two: which values are computed, held and handed over.

    Args:
        groups: Its inputs, as ``StagePrograms.backward_args`` are grouped. The second program has
            parameters and accumulators in any case.
        num_input_gradients: Its first outputs; the others are the gradients of weights.

    Attributes:
        inputs, weights: The gradients.
        deferred: Values that the first program hands to the second.
        read: Inputs that the second reads, beside parameters and accumulators.
        first, second: The arguments of the two programs, in groups.
    """

    def __init__(
        self, flow: DataFlow, groups: Sequence[Sequence[object]], num_input_gradients: int
    ):
        params, inputs, batch, outputs, stored, cotangents, accumulated = groups
        self.flow, self._groups = flow, groups
        self._inputs, self._free = set(flow.inputs), {*params, *accumulated}
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
        values = [*inputs, *outputs, *stored, *cotangents]
        gone, held = ([v for v in values if (v in read) == late] for late in (False, True))
        self.first = [params, batch, gone, held]
        held_batch = [v for v in batch if v in read]
        self.second = [params, held_batch, held, self.deferred, accumulated]

    def held(self, group: int) -> tuple[int, ...]:
        """Return the positions in a group of inputs that the gradients of weights read."""
        return tuple(i for i, v in enumerate(self._groups[group]) if v in self.read)

    def _sources(self, v: object, read: set[object]) -> set[Any] | None:
        """Return what else a value follows from by cheap operations; None where it does not."""
        sources, seen, waiting = set[Any](), {v}, [v]
        while waiting:
            one = waiting.pop()
            equation = self.flow.maker(one)
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

    backward_names = ("backward_inputs", "backward_weights")

    @cached_property
    def split(self) -> BackwardSplit:
        stored = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.residuals.stored]
        args = self.backward_args_with(stored)
        flow = DataFlow(jax.make_jaxpr(self._gradients)(*args), open_remats=True)
        return BackwardSplit(flow, in_groups(flow.inputs, map(len, args)), len(self.segment.inputs))

    @cached_property
    def _stored(self) -> Sequence[Sequence[Any]]:
        held, stored = self.split.held(4), self.residuals.stored
        gone = [v for i, v in enumerate(stored) if i not in held]
        return gone, [stored[i] for i in held]

    def _backward_inputs(self, params, batch, gone, held):
        made = self.split.inputs, self.split.deferred
        return tuple(self.split.flow.part(self.split.first, made)(params, batch, gone, held))

    def _backward_weights(self, params, batch, held, deferred, accumulated):
        part = self.split.flow.part(self.split.second, [self.split.weights])
        return part(params, batch, held, deferred, accumulated)[0]

    @cached_property
    def _structs(self) -> dict[Any, jax.ShapeDtypeStruct]:
        """The structure of each input of the backward pass, as the forward program leaves it."""
        made: dict[Any, Any] = {}
        for values, structs in zip(self._stored, self.forward.outputs[1:], strict=True):
            made |= zip(values, structs, strict=True)
        args = self.backward_args_with([made[v] for v in self.residuals.stored])
        return dict(zip(self.split.flow.inputs, chain(*args), strict=True))

    def structs(self, holds: object) -> Sequence[Any]:
        if holds == KeptPart("deferred"):
            return self.backward_inputs.outputs[1]
        return super().structs(holds)

    @cached_property
    def backward_inputs(self) -> Executable:
        """The program (params, kept batch, gone, held) -> (input gradients, deferred)."""
        args = [[self._structs[v] for v in group] for group in self.split.first]
        out = ([self.value_sharding(v) for v in self.segment.inputs], None)
        return self._compile(self._backward_inputs, args, (2,), out)

    @cached_property
    def backward_weights(self) -> Executable:
        """The program (params, held batch, what is held, deferred, accumulated) -> accumulated."""
        handed = zip(self.split.deferred, self.backward_inputs.outputs[1], strict=True)
        known = {**self._structs, **dict(handed)}
        args = [[known[v] for v in group] for group in self.split.second]
        out = [g.sharding for g in args[-1]]
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
            kept_inputs=tuple(kept[0][i] for i in self.split.held(1)),
            kept_outputs=tuple(kept[1][i] for i in self.split.held(3)),
            kept_batch=tuple(kept[2][i] for i in self.split.held(2)),
            cotangents=self.split.held(5),
            inputs_work=inputs.work,
            weights_work=weights.work,
        )

    def _backward_cost(self) -> dict[str, Any]:
        """Return the cost of the two programs; the backward pass is never compiled whole."""
        return {"backward_bytes": 0, "split": self.split_cost}

    @property
    def buffers(self) -> StageBuffers:
        """The buffers of the stage's programs, two of them for backward: compiles them all."""
        deferred = buffers_of(self.split.flow, self.split.deferred, self.backward_inputs.outputs[1])
        return replace(super().buffers, deferred=deferred)
