"""The step of a pipeline in Alpa's runtime, in our instructions.

From the start of the step on there are zeros for gradients and all micro-batches. A tensor stays
with the stage that made it until the one that reads it is about to, and goes there past the stages
between.

Source: Alpa 0.2.3, its emitted instructions (``tests/alpa_conformance`` replays them beside this).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from capture.plan.schedule import Schedule, StagePass
from capture.step.interface import StageInterface
from capture.step.pipeline import Pipeline, built
from capture.step.program import Step
from capture.step.tasks import Round, Send, Task


def build_alpa_step(stages: Sequence[StageInterface], schedule: Schedule) -> Step:
    """Return the step of a pipeline as Alpa's runtime executes it, in our instructions."""
    return built(_AlpaPipeline(stages, schedule))


class _AlpaPipeline(Pipeline):
    """A pipeline whose values go from maker to each reader, gradients from reader to reader."""

    def passes(self) -> Iterator[Round]:
        """Yield the tasks of each clock, after a round of all inputs. A value is sent in the clock
        of the pass that reads it, to the first stage first."""
        tasks: list[Task | Send] = []
        for s in range(len(self.stages)):
            tasks += self.accumulators(s)
        for s, place in enumerate(self.places):
            for m in range(self.schedule.num_microbatches):
                tasks += [Send(v, place, "start of the step") for v in self.batch(s, m)]
        yield Round(tasks)
        stage_of = {place.name: s for s, place in enumerate(self.places)}
        waiting: defaultdict[StagePass, list[Send]] = defaultdict(list)
        for clock in self.schedule.clocks:
            tasks = []
            for one in sorted(clock, key=lambda one: one.stage_id):
                tasks += waiting.pop(one, ())
            for one in clock:
                tasks += self.run(one)
                for send in self.sends(one):
                    reader = StagePass(stage_of[send.place.name], one.kind, one.microbatch)
                    waiting[reader].append(send)
            yield Round(tasks)

    def received(self, s: int) -> tuple[int, ...]:
        return self.stages[s].used

    def receivers(self, s: int, v: int) -> Iterable[int]:
        readers = (t for t in range(s + 1, len(self.stages)) if v in self.stages[t].used)
        return readers if v in self.stages[s].outputs else ()

    def sender(self, s: int, v: int) -> int:
        return next(
            t for t in reversed(range(s)) if v in (*self.stages[t].used, *self.stages[t].outputs)
        )
