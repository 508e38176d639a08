"""Seconds from what programs compute, read and send: a roofline per program, alpha-beta per
collective; and of a pipeline's step from those of its stages.

    program    = kernels + collectives that are exposed
    kernels    = sum of max(floor, products, bytes / B)
    products   = FLOPs / F; of a library's product on a GPU, by its tiles (capture.machine.tiles)
    F, B       = specified rates of the target, each times the fraction of it that is reached in
               practice
    floor      = least seconds of a kernel, its launch included

Kernels run one after the other, and small ones take as long as their launch: a sum over all bytes
of a program cannot see them. Of programs that were measured before kernels were counted only totals
are known, which is a lower bound of the sum:

    kernels    = max(FLOPs of products / F, bytes of products / B) + other bytes / B

F is the rate of what products compute in, which is not always what they read: at default precision,
float32 is TF32 on NVIDIA GPUs since Ampere and bfloat16 on TPUs (``Rates.computed_in``).

Collectives are those of ``capture.machine.links``, and hide behind kernels as the compiler
scheduled them (``capture.step.overlap``). Where the order is not known, they are expected to hide
as far as compilers hide their kind (``Rates.hidden``), and what kernels cannot hide is exposed:

    exposed    = max(collectives - kernels, sum of (1 - hidden) x collective)

Source: Williams, Waterman, Patterson 2009 (roofline).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from capture.machine.links import Layout, Links
from capture.machine.rates import Rates
from capture.machine.tiles import padded_flops, tiled_seconds
from capture.measured.stage_cost import StageCost
from capture.measured.work import Collective, Kernel, ProgramWork
from capture.memo import memo
from capture.plan.orders import TaskKind
from capture.plan.schedule import Schedule
from capture.step.overlap import ProgramSeconds, overlapped

#: What is counted of a program.
Resource = Literal["all", "computing", "sending"]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one execution of each program of a stage, its collectives included; of one
    micro-batch where it has one. Those of the update count the zeros that gradients are added
    to."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    summarize_seconds: float = 0
    backward_inputs_seconds: float = 0
    backward_weights_seconds: float = 0

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of a micro-batch, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def least_microbatch_seconds(self) -> float:
        """The seconds of a micro-batch, forward and backward, with the backward pass whole or in
        two programs, whichever is faster; whole where that alone is known."""
        split = self.backward_inputs_seconds + self.backward_weights_seconds
        return self.forward_seconds + min(self.backward_seconds, split or self.backward_seconds)

    def of(self, program: str) -> float:
        """Return the seconds of the program that a ``Run`` names."""
        return 0.0 if program == "zero_gradients" else getattr(self, f"{program}_seconds")


@dataclass(frozen=True)
class TimeModel:
    """The model of programs' times on a target, from its rates and links.

    Attributes:
        layout: Where the devices stand that collectives join.
        counts: What of a program whose order is not known: all seconds, or those of one resource,
            which are a lower bound and add up over layers.
        hides_stride: The distance of replicas, if all that they send is to be hidden where kernels
            take long enough; 0 to hide what is hidden.
    """

    rates: Rates
    layout: Layout
    counts: Resource = "all"
    hides_stride: int = 0

    @cached_property
    def links(self) -> Links:
        return Links(self.rates, self.layout)

    def program_seconds(self, work: ProgramWork) -> float:
        """Return the seconds of one execution of a program on every device of a stage."""
        found = self.seconds_of(work)
        if self.counts == "all" or work.order is not None:
            return found.total
        return found.computing if self.counts == "computing" else found.sending

    @memo
    def hiding_replicas(self, tensor_parallel: int) -> TimeModel:
        """Return the model of what layers take among many others, as far as it is known of them
        alone: behind these, all that their replicas send may hide."""
        return replace(self, hides_stride=tensor_parallel)

    def seconds_of(self, work: ProgramWork) -> ProgramSeconds:
        """Return the seconds of one execution of a program, computing and sending apart."""
        if work.order is not None and work.kernels is not None:
            return self._overlapped(work)
        computing = self._computing(work)
        seconds = [*map(self.collective_seconds, work.collectives)]
        exposed = sum(
            (1 - self._hidden(one)) * each
            for one, each in zip(work.collectives, seconds, strict=True)
        )
        sending = sum(seconds)
        return ProgramSeconds(computing, sending, max(sending - computing, exposed))

    def _hidden(self, sent: Collective) -> float:
        """Return the share of a collective that is hidden, if kernels take long enough."""
        if self.hides_stride:
            return float(sent.over_replicas)
        known = self.rates.hidden.get(sent.kind) if sent.over_replicas else None
        return known.value if known else 0.0

    def _is_of_replicas(self, sent: Collective) -> bool:
        return sent.stride == self.hides_stride or self.hides_stride == 1

    def _overlapped(self, work: ProgramWork) -> ProgramSeconds:
        if id(work) not in self._known:
            assert work.order is not None and work.kernels is not None, "its order is known"
            kernels = [*map(self.kernel_seconds, work.kernels)]
            sent = [self.collective_seconds(replace(one, count=1)) for one in work.collectives]
            found = overlapped(work.order, kernels, sent)
            if self.hides_stride:
                seen = [
                    0.0 if self._is_of_replicas(one) else seconds
                    for one, seconds in zip(work.collectives, sent, strict=True)
                ]
                least = max(overlapped(work.order, kernels, seen).total, found.sending)
                found = replace(found, exposed=least - found.computing)
            self._known[id(work)] = work, found
        return self._known[id(work)][1]

    @cached_property
    def _known(self) -> dict[int, tuple[ProgramWork, ProgramSeconds]]:
        """The seconds of programs by ``id``, with the programs, so that the id stays valid."""
        return {}

    def _computing(self, work: ProgramWork) -> float:
        if work.kernels is not None:
            return self._all_kernels(work.kernels)
        flops_per_second = self.rates.reached_flops_per_second(work.dtype, work.precision)
        bytes_per_second = self.rates.reached_bytes_per_second
        products = max(work.flops / flops_per_second, work.product_bytes / bytes_per_second)
        return products + work.other_bytes / bytes_per_second

    def collective_seconds(self, sent: Collective) -> float:
        """Return the seconds of all ``count`` of these collectives, one after the other."""
        of = self.links.least_added_seconds if sent.is_part else self.links.seconds
        return sent.count * of(sent.kind, sent.nbytes, sent.group_size, sent.stride)

    def _all_kernels(self, kernels: tuple[Kernel, ...]) -> float:
        """Return the seconds of a program's kernels, one after the other. Programs that differ in
        what they send often have the same ones, as one object."""
        if id(kernels) not in self._sums:
            seconds = sum(one.count * self.kernel_seconds(one) for one in kernels)
            self._sums[id(kernels)] = kernels, seconds
        return self._sums[id(kernels)][1]

    @cached_property
    def _sums(self) -> dict[int, tuple[tuple[Kernel, ...], float]]:
        """The seconds of kernels by ``id``, with the kernels, so that the id stays valid."""
        return {}

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel, alone on its device."""
        least, bytes_per_second = self._least_kernel
        moved = kernel.nbytes / bytes_per_second
        if kernel.flops:
            moved = max(moved, self._product_seconds(kernel))
        return max(least, moved)

    @cached_property
    def _least_kernel(self) -> tuple[float, float]:
        """The seconds of the smallest kernel, and bytes per second of the others."""
        return self.rates.kernel_seconds.value, self.rates.reached_bytes_per_second

    @memo  # stages that differ in what they split have most in common
    def _product_seconds(self, kernel: Kernel) -> float:
        rates = self.rates
        cores, width = int(rates.cores.value), int(rates.array_width.value)
        reached = rates.reached_flops_per_second(kernel.dtype, kernel.precision)
        if kernel.shape and cores:
            tiled = tiled_seconds(
                kernel.shape,
                kernel.flops,
                cores,
                reached,
                rates.needed_reuse(kernel.dtype, kernel.precision),
                rates.reached_bytes_per_second,
            )
        elif kernel.shape and width:
            tiled = padded_flops(kernel.shape, kernel.flops, width) / reached
        else:
            return kernel.flops / reached
        # A few rows or columns are not padded, but computed by ordinary cores.
        untiled = min(reached, rates.reached_flops_per_second("float32"))
        return min(tiled, kernel.flops / untiled)

    def stage_times(self, cost: StageCost) -> StageTimes | None:
        """Return the seconds of a measured stage's programs; None if its work was not counted."""
        if cost.forward_work is None or cost.backward_work is None or cost.update_work is None:
            return None
        times = StageTimes(
            *map(self.program_seconds, (cost.forward_work, cost.backward_work, cost.update_work))
        )
        split = cost.split
        if split is None or split.inputs_work is None or split.weights_work is None:
            return times
        return replace(
            times,
            backward_inputs_seconds=self.program_seconds(split.inputs_work),
            backward_weights_seconds=self.program_seconds(split.weights_work),
        )


def exposed_seconds(
    model: TimeModel, cost: StageCost, num_microbatches: int, splits_backward: bool
) -> float:
    """Return the seconds of a step in which the devices of a compiled stage only send to each
    other, its micro-batches and its update together.

    Args:
        splits_backward: Whether its backward pass runs as two programs.
    """
    passes = [cost.forward_work, cost.backward_work]
    if splits_backward and cost.split is not None:
        passes[1:] = [cost.split.inputs_work, cost.split.weights_work]
    counted = [(work, num_microbatches) for work in passes] + [(cost.update_work, 1)]
    return sum(
        count * model.seconds_of(work).exposed for work, count in counted if work is not None
    )


def pipeline_seconds(
    microbatch: Sequence[float], once: Sequence[float], num_microbatches: int
) -> float:
    """Return the seconds of a step by Alpa's closed form: ``sum t_s + (M - 1) max t_s + max u_s``.

    **Assumes** 1F1B or GPipe with transfers that overlap computation.

    Args:
        microbatch: t_s, forward and backward of one micro-batch in every stage.
        once: u_s, what every stage does once per step, its update.
        num_microbatches: M.

    Source: Alpa (OSDI 2022), equation 2; GPipe (NeurIPS 2019) for the bubble.
    """
    return math.fsum(microbatch) + (num_microbatches - 1) * max(microbatch) + max(once)


class TableTimes:
    """The times of steps by the table of a schedule: every group executes its tasks in their order,
    each as soon as what it needs has arrived, and then the updates of its stages."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        tasks = [task for clock in schedule.clocks for task in clock]
        number = {task: i for i, task in enumerate(tasks)}
        #: Per task its group, stage and kind, and the task that it needs with the stage before the
        #: border between them and the link; -1 for none.
        self._tasks: list[tuple[int, int, TaskKind, int, int, int]] = []
        links: dict[tuple[int, int], int] = {}
        for task in tasks:
            needed = schedule.requirement(task)
            before = -1 if needed is None else number[needed]
            group, border, link = schedule.placement[task.stage_id], -1, -1
            if needed is not None and needed.stage_id != task.stage_id:
                border = min(needed.stage_id, task.stage_id)
                pair = (schedule.placement[needed.stage_id], group)
                link = links.setdefault(pair, len(links))
            self._tasks.append((group, task.stage_id, task.kind, before, border, link))
        self._num_links = len(links)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def seconds(self, times: Sequence[StageTimes], sends: Sequence[float]) -> float:
        """Return the seconds of a step with these times of stages and sends.

        Args:
            sends: Per stage but the last, seconds of what it sends to the next, or gets back from
                it: one after the other in each direction.
        """
        free, end = [0.0] * self._schedule.num_groups, list[float]()
        busy = [0.0] * self._num_links
        of = [{kind: each.of(kind) for kind in _PASSES} for each in times]
        for group, stage, kind, before, border, link in self._tasks:
            start = free[group]
            if before >= 0:
                arrives = end[before]
                if border >= 0:
                    arrives = busy[link] = max(arrives, busy[link]) + sends[border]
                start = max(start, arrives)
            free[group] = start + of[stage][kind]
            end.append(free[group])
        updates = (sum(times[s].update_seconds for s in group) for group in self._schedule.stages)
        return max(map(sum, zip(free, updates, strict=True)))


_PASSES: tuple[TaskKind, ...] = ("forward", "backward", "backward_inputs", "backward_weights")
