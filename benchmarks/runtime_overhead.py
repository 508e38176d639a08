"""What the native runtime costs beside the work it dispatches, on virtual CPU devices.

Four questions, each answered by medians of one run of this script on the same cores:

* step: a pipelined step against one jitted single-device step that accumulates the same
  micro-batches and updates once. All virtual devices share the cores, so a pipeline can at best be
  as fast; the ratio is the cost of cutting the program and of dispatching it.
* dispatch: how long the host thread is busy per task (one forward pass and the transfer of its
  outputs), with the devices idle, against the bare compiled call and the bare reshard.
* dispatching thread: processor time of the calling thread for a step of the smallest programs, four
  stages and eight micro-batches, by JAX's private parts (``capture.runtime.fast_paths``) and by its
  public ones, beside that inside of the executables alone.
* run-ahead: a step whose host waits where devices would hold more than is booked (as on CPU by
  default) against one whose host never waits, and one that waits for every instruction; seconds,
  and what malloc gives out against what is booked.

``--quick`` takes fewer steps and the small model only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from capture import environment
from capture.errors import CaptureError

NUM_DEVICES = 8
CaptureError.check(environment.prepare(num_devices=NUM_DEVICES))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from capture.machine.cluster import Cluster  # noqa: E402
from capture.model.workload import WorkloadProtocol, WorkloadSpec  # noqa: E402
from capture.plan.choices import StageChoice  # noqa: E402
from capture.plan.stages import Plan, Stage  # noqa: E402
from capture.runtime import fast_paths  # noqa: E402
from capture.runtime.heap import measure_heap  # noqa: E402
from capture.runtime.pipeline import PipelinedStep, pipeshard  # noqa: E402
from capture.runtime.reshard import plan_reshard  # noqa: E402
from capture.step.pipeline import StageCall  # noqa: E402
from capture.step.program import Copy, Feed, Run  # noqa: E402

#: Steps of it are nothing but dispatch.
MICRO = (
    str(Path(__file__).parent / "plain_gpt.py")
    + ":gpt?num_blocks=8&width=32&num_heads=4&seq_len=8&vocab_size=100"
)
GPT = str(Path(__file__).parents[1] / "models" / "gpt.py") + ":gpt?size=tiny"
WORKLOADS = {"gpt tiny": GPT, "gpt tiny, sequence 256": GPT + "&seq_len=256"}
#: (data, tensor) parallel degrees of the stages.
PLANS = {
    "one device": ((1, 1),),
    "four one-device stages": ((1, 1),) * 4,
    "1 / 1 / DP2 / DP2xTP2": ((1, 1), (1, 1), (2, 1), (2, 2)),
    "DP2 / DP4": ((2, 1), (4, 1)),
    "TP2 / DP2xTP2": ((1, 2), (2, 2)),
}
GLOBAL_BATCH_SIZE, NUM_MICROBATCHES = 16, 4


def make_plan(degrees: tuple[tuple[int, int], ...], num_layers: int) -> Plan:
    """Equal stages on consecutive devices, 1F1B."""
    cuts = [num_layers * s // len(degrees) for s in range(len(degrees) + 1)]
    stages, device = [], 0
    for s, (data, tensor) in enumerate(degrees):
        stages.append(
            Stage(
                cuts[s],
                cuts[s + 1],
                tuple(range(device, device + data * tensor)),
                StageChoice(data, tensor),
            )
        )
        device += data * tensor
    return Plan(Cluster((device,)), num_layers, tuple(stages), GLOBAL_BATCH_SIZE, NUM_MICROBATCHES)


def single_device_step(workload: WorkloadProtocol) -> Callable[..., Any]:
    """One jitted program: a scan over the micro-batches, then the update."""

    def step(params, state, batch):
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(NUM_MICROBATCHES, -1, *leaf.shape[1:]), batch
        )

        def add(total, part):
            loss, grads = jax.value_and_grad(workload.loss_fn)(params, part)
            return jax.tree.map(lambda t, g: t + g / NUM_MICROBATCHES, total, grads), loss

        grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        updates, state = workload.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, losses.mean()

    return jax.jit(step, donate_argnums=(0, 1))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_steps(name: str, num_steps: int) -> list[dict[str, Any]]:
    """Pipelined and single-device steps in turn, so that both meet the same load of the machine."""
    workload = WorkloadSpec.parse(WORKLOADS[name]).load()
    batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), GLOBAL_BATCH_SIZE))
    params = jax.tree.map(np.asarray, workload.init(jax.random.key(0)))
    single, carried = single_device_step(workload), []
    carried = [jax.tree.map(jnp.array, params), workload.optimizer.init(params)]

    def run_single():
        carried[0], carried[1], loss = single(*carried, batch)
        jax.block_until_ready((carried, loss))

    run_single()
    rows = []
    for plan_name in ("one device", "four one-device stages", "1 / 1 / DP2 / DP2xTP2"):
        log(f"{name}, {plan_name}: compiling")
        step = pipeshard(workload, make_plan(PLANS[plan_name], 8))
        held = [step.init_from(params)]

        def run_pipelined(step=step, held=held):
            held[0], metrics = step(held[0], batch)
            jax.block_until_ready((held[0], metrics.losses))

        run_pipelined()
        pairs = [(seconds(run_pipelined), seconds(run_single)) for _ in range(num_steps)]
        pipelined, alone = (median(times) for times in zip(*pairs, strict=True))
        rows.append(
            {
                "workload": name,
                "plan": plan_name,
                "num_instructions": len(step.program.instructions),
                "pipelined_step_seconds": pipelined,
                "single_device_step_seconds": alone,
                "ratio": pipelined / alone,
                "num_steps": num_steps,
            }
        )
    return rows


class DispatchTimer:
    """An observer: seconds from handing an instruction to the runtime until it comes back, the
    devices idle before each."""

    def __init__(self) -> None:
        self.seconds: dict[Any, list[float]] = {}
        self._current: Any = None
        self._start = 0.0

    def __call__(self, instruction: Any, slots: list[Any]) -> None:
        elapsed = time.perf_counter() - self._start
        if self._current is not None:
            self.seconds.setdefault(self._current, []).append(elapsed)
        jax.block_until_ready(slots)
        self._current, self._start = instruction, time.perf_counter()

    def median(self, instructions: list[Any]) -> float:
        """Over all instructions and steps."""
        return median(t for instruction in instructions for t in self.seconds[instruction])


def measure_dispatch(plan_name: str, num_steps: int) -> list[dict[str, Any]]:
    """Host time of the forward tasks of every stage but the last, in the runtime and bare."""
    workload = WorkloadSpec.parse(GPT).load()
    log(f"dispatch, {plan_name}: compiling")
    step = pipeshard(workload, make_plan(PLANS[plan_name], 8))
    batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), GLOBAL_BATCH_SIZE))
    state, timer, bare = step.init(jax.random.key(0)), DispatchTimer(), BareCalls(step)
    for _ in range(2):
        state, _ = step(state, batch)
    for _ in range(num_steps):  # in turn, so that both meet the same load of the machine
        state, _ = step(state, batch, observer=timer)
        state, _ = step(state, batch, observer=bare)
    rows = []
    for s in range(step.plan.num_stages - 1):
        runs = [
            i
            for i in step.program.instructions
            if isinstance(i, Run) and i.program == StageCall("forward", s).name
        ]
        moves = [i for i in step.program.instructions if isinstance(i, Copy) and _sends(step, i, s)]
        feeds = [
            i
            for i in step.program.instructions
            if isinstance(i, Feed) and _stage(step, i.slot) == s
        ]
        run_seconds, move_seconds = timer.median(runs), timer.median(moves)
        degrees = [
            f"DP{stage.choice.data_parallel}xTP{stage.choice.tensor_parallel}"
            for stage in step.plan.stages[s : s + 2]
        ]
        rows.append(
            {
                "plan": plan_name,
                "pair": " -> ".join(degrees),
                "num_leaves": sum(len(group) for group in _group_sizes(step, runs[0])),
                "bare_call_seconds": bare.call(s),
                "bare_reshard_seconds": bare.reshard(s),
                "program_seconds": run_seconds,
                "transfer_seconds": move_seconds,
                "feed_seconds": timer.median(feeds) if feeds else None,
                "task_seconds": run_seconds + move_seconds,
                "ratio": (run_seconds + move_seconds) / (bare.call(s) + bare.reshard(s)),
            }
        )
    return rows


class BareCalls:
    """An observer that makes every forward call and transfer once more without the runtime, just
    before the runtime does.

    It finds the processor's caches and the allocator as the runtime finds them: between two calls
    of a program the others of the step have run, and what a forward pass made is held until its
    backward pass.
    """

    def __init__(self, step: PipelinedStep):
        self._step = step
        self._calls: dict[int, list[float]] = {}
        self._reshards: dict[int, list[float]] = {}
        self._held: dict[int, list[Any]] = {}
        self._moves: dict[Any, Callable[[jax.Array], jax.Array]] = {}

    def __call__(self, instruction: Any, slots: list[Any]) -> None:
        jax.block_until_ready(slots)
        program, s = "", 0
        if isinstance(instruction, Run):
            program = self._step.program.programs[instruction.program].kind
            s = _stage(self._step, instruction.outputs[0])
        if isinstance(instruction, Run) and program == "forward":
            args = [
                [array for slot in group for array in slots[slot]] for group in instruction.inputs
            ]
            call = self._step.executable(instruction).call
            self._held.setdefault(s, []).append(self._timed(self._calls, s, lambda: call(*args)))
        if program == "backward":
            self._held[s].pop(0)
        if isinstance(instruction, Copy):
            s = _stage(self._step, instruction.source)
            if _sends(self._step, instruction, s):
                (key,) = self._step.program.slots[instruction.target].holds.ids
                (array,) = slots[instruction.source]
                if key not in self._moves:
                    target = self._step.stages[s + 1].value_sharding(key)
                    self._moves[key] = plan_reshard(
                        array.shape, array.dtype, array.sharding, target
                    )
                self._timed(self._reshards, s, lambda: self._moves[key](array))

    def _timed(self, times: dict[int, list[float]], stage_id: int, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.setdefault(stage_id, []).append(time.perf_counter() - start)
        return jax.block_until_ready(result)

    def call(self, stage_id: int) -> float:
        """Median seconds of the stage's forward call."""
        return median(self._calls[stage_id])

    def reshard(self, stage_id: int) -> float:
        """Median seconds of the transfer of its output."""
        return median(self._reshards[stage_id])


def _stage(step: PipelinedStep, slot: int) -> int:
    return step.program.places.index(step.program.slots[slot].place)


def _sends(step: PipelinedStep, copy: Copy, stage_id: int) -> bool:
    """Whether it takes an activation from this stage to the next."""
    source, target = (_stage(step, slot) for slot in (copy.source, copy.target))
    is_value = step.program.slots[copy.target].what == "input"
    return is_value and (source, target) == (stage_id, stage_id + 1)


def _group_sizes(step: PipelinedStep, run: Run) -> list[tuple[int, ...]]:
    stage = step.stages[_stage(step, run.outputs[0])]
    return [stage.params, *run.inputs[1:]]


def measure_dispatching_thread(num_steps: int) -> list[dict[str, Any]]:
    """The ways in turn, so that they meet the same load of the machine; beside them what the
    executables take of the private one, below which no interpreter of these programs gets."""
    workload = WorkloadSpec.parse(MICRO).load()
    log("dispatching thread: compiling")
    plan = replace(make_plan(PLANS["four one-device stages"], 8), num_microbatches=8)
    batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), GLOBAL_BATCH_SIZE))
    clock, private = CallClock(), pipeshard(workload, plan)
    ways = {
        "private": private,
        "public": pipeshard(workload, plan),
        "executables": pipeshard(workload, plan),
    }
    bound: dict[str, Callable[[], Any]] = {
        "private": nullcontext,
        "public": public_parts_only,
        "executables": clock.bound,
    }
    states = {way: step.init(jax.random.key(0)) for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for count in range(num_steps + 2):
        for way, step in ways.items():
            clock.seconds = 0.0
            with bound[way]() if not count else nullcontext():
                states[way], metrics = step(states[way], batch)
            jax.block_until_ready((states[way], metrics.losses))
            if count > 1:  # the first calls are checked
                timed = clock.seconds if way == "executables" else metrics.dispatch_seconds
                times[way].append(timed)
    seconds = {way: median(found) for way, found in times.items()}
    return [
        {
            "plan": "four one-device stages",
            "num_microbatches": plan.num_microbatches,
            "num_instructions": len(private.program.instructions),
            "num_steps": num_steps,
            **{f"{way}_seconds": found for way, found in seconds.items()},
            **{f"{way}_seconds_least": min(found) for way, found in times.items()},
            "ratio": seconds["private"] / seconds["public"],
            "ratio_to_executables": seconds["private"] / seconds["executables"],
        }
    ]


class CallClock:
    """Processor time of the calling thread inside of executables that were bound with it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def bound(self) -> Iterator[None]:
        found = fast_paths._fast_call

        def timed(compiled: Any) -> fast_paths.FlatCall | None:
            fast = found(compiled)
            if fast is None:
                return None

            def call(flat: list[jax.Array]) -> list[jax.Array]:
                start = time.thread_time()
                results = fast(flat)
                self.seconds += time.thread_time() - start
                return results

            return call

        fast_paths._fast_call = timed
        try:
            yield
        finally:
            fast_paths._fast_call = found


@contextmanager
def public_parts_only() -> Iterator[None]:
    """What is bound meanwhile calls JAX's public parts."""
    found = fast_paths._fast_call, fast_paths._batched_device_put
    fast_paths._fast_call, fast_paths._batched_device_put = lambda compiled: None, None
    try:
        yield
    finally:
        fast_paths._fast_call, fast_paths._batched_device_put = found


#: What the host waits for before an instruction: (``step.bound_run_ahead``, whether an observer
#: waits for all that came before).
RUN_AHEAD = {
    "bounded": (True, False),
    "unbounded": (False, False),
    "every instruction awaited": (False, True),
}
RUN_AHEAD_MICROBATCHES = 16


def await_all(instruction: Any, slots: list[Any]) -> None:
    """An observer."""
    jax.block_until_ready(slots)


def measure_run_ahead(name: str, num_steps: int) -> list[dict[str, Any]]:
    """The three ways in turn, so that they meet the same load of the machine; steps that are timed
    are not watched by a meter."""
    workload = WorkloadSpec.parse(WORKLOADS[name]).load()
    params = jax.tree.map(np.asarray, workload.init(jax.random.key(0)))
    rows = []
    for plan_name in ("one device", "four one-device stages", "1 / 1 / DP2 / DP2xTP2"):
        log(f"run-ahead, {name}, {plan_name}: compiling")
        num_microbatches = RUN_AHEAD_MICROBATCHES
        plan = replace(
            make_plan(PLANS[plan_name], 8),
            num_microbatches=num_microbatches,
            global_batch_size=4 * num_microbatches,
        )
        batch = jax.tree.map(np.asarray, workload.batch(jax.random.key(1), plan.global_batch_size))
        step = pipeshard(workload, plan)
        states = {way: step.init_from(params) for way in RUN_AHEAD}
        times: dict[str, list[float]] = {way: [] for way in RUN_AHEAD}
        heaps: dict[str, list[float]] = {way: [] for way in RUN_AHEAD}

        def run(way: str, step=step, states=states, batch=batch) -> None:
            states[way], metrics = step(
                states[way], batch, observer=await_all if RUN_AHEAD[way][1] else None
            )
            jax.block_until_ready((states[way], metrics.losses))

        for count in range(num_steps + 1):
            for way, (bound, awaited) in RUN_AHEAD.items():
                step.bound_run_ahead = bound
                elapsed = seconds(lambda way=way: run(way))
                states[way], _, heap = measure_heap(
                    step, states[way], batch, observer=await_all if awaited else None
                )
                if count:  # the first step makes what lasts
                    times[way].append(elapsed)
                    heaps[way] += [] if heap is None else [heap.step_bytes / heap.booked_bytes]
        row = {
            "workload": name,
            "plan": plan_name,
            "num_microbatches": RUN_AHEAD_MICROBATCHES,
            "num_steps": num_steps,
        }
        for way in RUN_AHEAD:
            key = way.replace(" ", "_")
            row |= {
                f"{key}_seconds": median(times[way]),
                f"{key}_malloc_of_booked": median(heaps[way]) if heaps[way] else None,
            }
        row["ratio_to_unbounded"] = row["bounded_seconds"] / row["unbounded_seconds"]
        row["ratio_to_every_instruction_awaited"] = (
            row["bounded_seconds"] / row["every_instruction_awaited_seconds"]
        )
        rows.append(row)
    return rows


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(document: dict[str, Any]) -> None:
    log(f"\n{'workload':24} {'plan':24} {'pipelined':>10} {'single':>10} {'ratio':>6}")
    for row in document["steps"]:
        times = (
            f"{row['pipelined_step_seconds'] * 1e3:7.1f} ms "
            f"{row['single_device_step_seconds'] * 1e3:7.1f} ms"
        )
        log(f"{row['workload']:24} {row['plan']:24} {times} {row['ratio']:6.2f}")
    for row in document["dispatching_thread"]:
        log(
            f"\ndispatching thread, {row['plan']}, {row['num_microbatches']} micro-batches: "
            f"{row['private_seconds'] * 1e3:.1f} ms a step, "
            f"{row['public_seconds'] * 1e3:.1f} ms by public parts, ratio {row['ratio']:.2f}"
        )
    log(
        f"\nrun-ahead: seconds, and malloc of booked\n{'workload':24} {'plan':24}"
        + "".join(f" {way:>26}" for way in RUN_AHEAD)
    )
    for row in document["run_ahead"]:
        keys = [way.replace(" ", "_") for way in RUN_AHEAD]
        held = [
            (
                f"{row[f'{key}_seconds'] * 1e3:17.1f} ms "
                f"{row[f'{key}_malloc_of_booked'] or float('nan'):5.2f}"
            )
            for key in keys
        ]
        log(f"{row['workload']:24} {row['plan']:24} {' '.join(held)}")
    log(
        f"\n{'pair':22} {'leaves':>6} {'call':>8} {'reshard':>8} {'bare':>8} {'program':>8} "
        f"{'transfer':>8} {'task':>8} {'ratio':>6}"
    )
    for row in document["dispatch"]:
        bare = row["bare_call_seconds"] + row["bare_reshard_seconds"]
        parts = [
            row["bare_call_seconds"],
            row["bare_reshard_seconds"],
            bare,
            row["program_seconds"],
            row["transfer_seconds"],
        ]
        cells = " ".join(f"{part * 1e6:5.0f} us" for part in [*parts, row["task_seconds"]])
        log(f"{row['pair']:22} {row['num_leaves']:6} {cells} {row['ratio']:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the small model and fewer steps")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    num_steps = 5 if args.quick else 20
    names = list(WORKLOADS)[: 1 if args.quick else None]
    load_before = os.getloadavg()
    document = {
        "benchmark": "runtime_overhead",
        "date": datetime.date.today().isoformat(),
        "hardware": {
            "platform": f"{platform.system()} {platform.machine()}",
            "num_cores": len(os.sched_getaffinity(0)),
            "devices": f"{NUM_DEVICES} virtual CPU devices; the cores are shared by all of them",
        },
        "versions": environment.versions(),
        "xla_flags": list(environment.active_flags()),
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "steps": [row for name in names for row in measure_steps(name, num_steps)],
        "dispatching_thread": measure_dispatching_thread(5 * num_steps),
        "run_ahead": [row for name in names for row in measure_run_ahead(name, num_steps)],
        "dispatch": [row for name in list(PLANS)[1:] for row in measure_dispatch(name, num_steps)],
    }
    # Above the number of cores before the start, other work shared the machine: seconds are
    # inflated then, ratios less so.
    document["hardware"] |= {
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
    }
    print_table(document)
    if args.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
