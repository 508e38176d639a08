"""What an array of models costs the host: the thread that dispatches, for every program of a step.

    python -m benchmarks.mutwo_dispatch [--steps N] (--json | -o RESULT.json)

The smallest programs: a GPT of 8 blocks of width 32, four models on a virtual CPU device, as one
program, in two sub-arrays in turn, and multiplexed with all feature maps swapped. Of every program,
copy and the like the processor time of the calling thread, from when the runtime is handed an
instruction until it comes back, with the device idle; so other work on the machine does not count.
Programs as small as these run on the calling thread, inside of their call: ``executable`` is the
time there, and ``around`` what the runtime adds. ``arrays`` are those that a program reads and
makes, or a copy moves.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.runtime_overhead import MICRO, CallClock

import jax  # isort: skip  # the environment is prepared by then
import numpy as np  # isort: skip

from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.array import ArrayPlan, Decision, Member
from capture.runtime.fused import Fuser
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.step.program import Copy, Run
from capture.step.sub_array import movable

NUM_MODELS, BATCH_SIZE = 4, 2
#: What a dispatch may take: of every program, and of every array that it reads or makes.
PROGRAM_SECONDS, ARRAY_SECONDS = 60e-6, 3e-6
WAYS = {
    "one program": (((0, 1, 2, 3),), "in turn", False),
    "2+2 in turn": (((0, 1), (2, 3)), "in turn", False),
    "2+2 multiplexed, swapped": (((0, 1), (2, 3)), "multiplexed", True),
}


@dataclass
class Clock:
    """An observer: by number of the instruction, what the thread took of it and, inside of that,
    of its executable."""

    inside: CallClock
    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _at: int = -1
    _start: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        self._at = -1

    def __call__(self, instruction: Any, slots: list[Any]) -> None:
        if self._at >= 0:
            ended = time.thread_time(), self.inside.seconds
            took, within = (now - then for now, then in zip(ended, self._start, strict=True))
            self.seconds[self._at].append((took, within))
        jax.block_until_ready(slots)
        self._at += 1
        self._start = time.thread_time(), self.inside.seconds

    def median(self, number: int) -> tuple[float, float]:
        took, within = zip(*self.seconds[number], strict=True)
        return median(took), median(within)


def training_of(name: str, workload: Any) -> ArrayTraining:
    partition, order, swaps = WAYS[name]
    decisions = ()
    if swaps:
        fuser = Fuser(workload, BATCH_SIZE)
        decisions = tuple(
            tuple(Decision(array.bundles[n].name, "swap", 1) for n in movable(array))
            for array in (fuser.of(len(group)) for group in partition)
        )
    plan = ArrayPlan(
        cluster=Cluster((1,), "cpu"),
        batch_size=BATCH_SIZE,
        models=tuple(map(Member, range(NUM_MODELS))),
        partition=partition,
        order=order,
        **({"decisions": decisions} if swaps else {}),
    )
    return train_array(workload, plan)


def rows_of(name: str, num_steps: int) -> Iterator[dict[str, Any]]:
    """By what is done and how many arrays it reads and makes."""
    workload = WorkloadSpec.parse(MICRO).load()
    inside = CallClock()
    clock = Clock(inside)
    train = training_of(name, workload)
    keys = jax.random.split(jax.random.key(1), NUM_MODELS)
    batch = [jax.tree.map(np.asarray, workload.batch(key, BATCH_SIZE)) for key in keys]
    state = train.init()
    with inside.bound():  # programs are bound by the first steps
        for _ in range(3):
            state, _ = train.advance(state, batch)
    for _ in range(num_steps):
        clock.begin()
        state, _ = train.advance(state, batch, observer=clock)
        jax.block_until_ready(state.slots)
    step = train.step_of(state)
    arrays = [len(train.arrays[a].values[n]) for a, n in (slot.holds for slot in step.slots)]
    groups: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for number, each in enumerate(step.instructions[:-1]):
        what, used = type(each).__name__.lower(), tuple[int, ...]()
        if isinstance(each, Run):
            what = step.programs[each.program].kind
            used = *(slot for group in each.inputs for slot in group), *each.outputs
        elif isinstance(each, Copy):
            used = (each.source,)
        groups[what, sum(arrays[slot] for slot in used)].append(clock.median(number))
    for (what, count), own in sorted(groups.items()):
        took, within = (median(values) for values in zip(*own, strict=True))
        yield {
            "way": name,
            "what": what,
            "arrays": count,
            "of_a_step": len(own),
            "seconds": took,
            "executable_seconds": within,
            "around_seconds": took - within,
        }


def claims_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of programs: a line through their seconds, and how many are within the target."""
    runs = [row for row in rows if row["what"] in ("forward", "backward", "recompute")]
    weights = np.sqrt([row["of_a_step"] for row in runs])
    found: dict[str, Any] = {}
    for name in ("seconds", "around_seconds"):
        sides = np.array([[1.0, row["arrays"]] for row in runs]) * weights[:, None]
        values = np.array([row[name] for row in runs]) * weights
        (each, of_array), *_ = np.linalg.lstsq(sides, values, rcond=None)
        targets = [PROGRAM_SECONDS + ARRAY_SECONDS * row["arrays"] for row in runs]
        found[name] = {
            "of_a_program": float(each),
            "of_an_array": float(of_array),
            "most_of_target": max(
                row[name] / most for row, most in zip(runs, targets, strict=True)
            ),
        }
    return {**found, "target": {"of_a_program": PROGRAM_SECONDS, "of_an_array": ARRAY_SECONDS}}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="that are timed")
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    options = parser.parse_args()
    if not (options.json or options.output):
        parser.error("give --json, or -o FILE")
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        rows += rows_of(name, options.steps)
        print(f"{name}: {claims_of(rows)}", file=sys.stderr, flush=True)
    return finish("mutwo_dispatch", rows, options, claims=claims_of(rows))


if __name__ == "__main__":
    sys.exit(main())
