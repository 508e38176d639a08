"""The programs of a stage between bounds, traced once for all stages that are the same but for
their degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from capture.compiler.executable import Executable
from capture.runtime.bounds import Bounder
from capture.runtime.programs import StagePrograms
from capture.runtime.saved_pass import SavedPass
from capture.runtime.traced_program import TracedProgram


@dataclass
class StageTraces:
    """What was traced of a stage so far, whatever its degrees.

    Attributes:
        saved: The forward pass.
        programs: By name, and by what is kept of the forward pass.
    """

    saved: SavedPass | None = None
    programs: dict[Any, TracedProgram] = field(default_factory=dict)


class TracedStage(StagePrograms):
    """As ``StagePrograms``, compiled by a ``Bounder``.

    Attributes:
        traces: Of this stage, and of others with the same layers and remat: none of them may name
            its mesh in its programs, or they are its own alone.
    """

    _compiler: Bounder
    traces: StageTraces

    @cached_property
    def _saved(self) -> SavedPass:
        if self.traces.saved is None:
            self.traces.saved = SavedPass(self._forward_and_vjp, self.forward_args)
        return self.traces.saved

    def _compile(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate: Sequence[int],
        out_shardings: Any,
    ) -> Executable:
        if self._has_local_calls or not any(args):  # what is local depends on the mesh
            return super()._compile(function, args, donate, out_shardings)
        kept = self.residuals
        key = (function.__name__, kept.inputs, kept.batch, kept.outputs, *kept.stored)
        if key not in self.traces.programs:
            self.traces.programs[key] = TracedProgram(function, args)
        return self._compiler.bounds(self.traces.programs[key], args, donate, out_shardings)
