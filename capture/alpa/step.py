"""The step of a pipeline in Alpa's runtime, in our instructions.

From the start of the step on there are zeros for gradients and all micro-batches. A tensor stays
with the stage that made it until the one that reads it is about to, and goes there past the stages
between.

Source: Alpa 0.2.3, its emitted instructions (``tests/alpa_conformance`` replays them beside this).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from capture.plan.schedule import Schedule, Task
from capture.step.interface import StageInterface
from capture.step.pipeline import PipelineBuilder
from capture.step.program import Copy, Instruction, Step


def build_alpa_step(stages: Sequence[StageInterface], schedule: Schedule) -> Step:
    """As ``capture.step.pipeline.build_step``."""
    return _AlpaBuilder(stages, schedule).build()


class _AlpaBuilder(PipelineBuilder):
    """Values go from their maker to each reader, gradients back from reader to reader."""

    def order(self) -> Iterator[Instruction]:
        """What a program makes is sent in the clock of the program that reads it, to the first
        stage first."""
        for s in range(len(self.stages)):
            yield from self.accumulators(s)
        for s in range(len(self.stages)):
            for m in range(self.schedule.num_microbatches):
                yield from self.feed(s, m, "start of the step")
        stage_of = {place.name: s for s, place in enumerate(self.places)}
        waiting: defaultdict[Task, list[Copy]] = defaultdict(list)
        for clock in self.schedule.clocks:
            for task in sorted(clock, key=lambda task: task.stage_id):
                yield from waiting.pop(task, ())
            for task in clock:
                transfers: list[Copy] = []
                yield from self.run(task, transfers)
                for copy in transfers:
                    reader = stage_of[self.step.slots[copy.target].place.name]
                    waiting[Task(reader, task.kind, task.microbatch)].append(copy)

    def received(self, s: int) -> tuple[int, ...]:
        return self.stages[s].used

    def receivers(self, s: int, v: int) -> Iterable[int]:
        readers = (t for t in range(s + 1, len(self.stages)) if v in self.stages[t].used)
        return readers if v in self.stages[s].outputs else ()

    def sender(self, s: int, v: int) -> int:
        return next(
            t for t in reversed(range(s)) if v in (*self.stages[t].used, *self.stages[t].outputs)
        )
