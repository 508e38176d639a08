"""The programs of a stage between bounds, traced once for all stages that are the same but for
their degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from capture.compiler.executable import Executable
from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS
from capture.runtime.bounds import Bounder
from capture.runtime.programs import StagePrograms
from capture.runtime.residuals import SavedPass
from capture.runtime.traced_program import TracedProgram


@dataclass
class StageTraces:
    """The traces of a stage's programs so far, which do not depend on its degrees.

    Attributes:
        programs: By name, and by what is kept of the forward pass.
        ends: Programs of the end of a step, by name, which depend on parameters alone; and their
            bounds, by name and how the parameters are split.
    """

    saved: SavedPass | None = None
    programs: dict[Any, TracedProgram] = field(default_factory=dict)
    ends: dict[Any, Any] = field(default_factory=dict)


class TracedStage(StagePrograms):
    """The programs of a stage, traced and bounded by a ``Bounder`` instead of compiled.

    Attributes:
        traces: Of this stage, and of others with the same layers whose forward passes are saved
            alike: none of them may name its mesh in its programs, or they are its own alone.
    """

    _compiler: Bounder
    traces: StageTraces

    @cached_property
    def _saved(self) -> SavedPass:
        if self.traces.saved is None:
            self.traces.saved = SavedPass(self._forward_and_vjp, self.forward_args)
        return self.traces.saved

    def _forward(self, params, inputs, batch):
        return self._made(params, inputs, batch)

    def _backward(self, *groups):
        # A bound holds for any order, and operations that only keep an order would hide what
        # depends on what.
        return self._gradients(*groups)

    def _compile(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        donate: Sequence[int],
        out_shardings: object,
    ) -> Executable:
        if not any(args):
            return super()._compile(function, args, donate, out_shardings)
        if function.__name__ in _ENDS:
            return self._end(function, args, donate, out_shardings)
        kept = self.residuals
        key = (function.__name__, kept.inputs, kept.batch, kept.outputs, *kept.stored)
        if key not in self.traces.programs:
            is_forward = function.__name__ == "_forward"
            self.traces.programs[key] = (
                self._traced_forward if is_forward else TracedProgram.of(function, args)
            )
        return self._compiler.bounds(self.traces.programs[key], args, donate, out_shardings)

    @property
    def _traced_forward(self) -> TracedProgram:
        """The forward pass as it was saved, with what is kept of it as its results."""
        flow, num_outputs = self._saved.flow, len(self.layers.outputs)
        groups = flow.outputs[:num_outputs], self.residuals.stored
        closed = flow.returning([v for group in groups for v in group])
        shapes = [
            [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in group] for group in groups
        ]
        return TracedProgram(closed, tuple(shapes), self._saved.spread)

    def _end(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        donate: Sequence[int],
        out_shardings: object,
    ) -> Executable:
        """Return the bounds of a program of the end of a step. Without products, they are the same
        for any number of replicas that do all the same."""
        ends, name = self.traces.ends, function.__name__
        if name not in ends:
            ends[name] = TracedProgram.of(function, args)
        splits = [
            (str(each.sharding.spec), each.sharding.shard_shape(each.shape))
            for each in jax.tree.leaves(tuple(args))
        ]
        # Neighbours of a replica are as far apart as it has devices.
        is_split = DATA_AXIS in str(splits)
        stride = self.mesh.shape[MODEL_AXIS] * is_split
        key = (name, *splits, self.mesh.size * bool(ends[name].products.candidates), stride)
        if key not in ends:
            ends[key] = self._compiler.bounds(ends[name], args, donate, out_shardings)
        return ends[key]


#: The functions of these programs.
_ENDS = ("_update", "_summarize")
