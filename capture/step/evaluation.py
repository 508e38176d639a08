"""The loss of a pipeline's parameters as instructions: the forward passes of its step alone, on the
same stages and by the same programs.

What a program keeps for a backward pass, which nothing reads, is freed at once. Micro-batches
follow one another so that none waits (``Schedule.forward_clocks``). The optimizer's state is there
all the time; there are no gradients and no activations of other micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from capture.plan.schedule import Schedule
from capture.step.interface import StageInterface
from capture.step.pipeline import Pipeline, built
from capture.step.program import Step
from capture.step.tasks import Round, Send, Task


def build_evaluation(stages: Sequence[StageInterface], schedule: Schedule) -> Step:
    """Return the step that computes a loss by forward passes; arguments as ``build_step``'s."""
    nothing_kept = [
        replace(stage, kept_inputs=(), kept_outputs=(), kept_batch=()) for stage in stages
    ]
    return built(_Evaluation(nothing_kept, schedule))


class _Evaluation(Pipeline):
    """A pipeline of forward passes alone, each followed by what it sends."""

    def passes(self) -> Iterator[Round]:
        for clock in self.schedule.forward_clocks:
            for one in clock:
                yield Round([*self.run(one), *self.sends(one)])

    def updates(self) -> Iterator[Task | Send]:
        return iter(())
