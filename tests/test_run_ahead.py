"""The host waits just where devices would else hold more than the step books: by a model of the worst devices, and by what malloc gives out."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from pipeline_models import mark, pipeline

from capture.run_ahead import waits
from capture.runtime.pipeline import pipeshard
from capture.schedule import make_schedule
from capture.step import Feed, Free, Move, Run, StepProgram, build_step, replay
from capture.workload import Workload
from tests.synthetic_graphs import chain, stage_interfaces
from tests.test_step import steps


class LazyDevices:
    """Devices that finish nothing before somebody waits for it, take memory at once, and free a slot when all have finished that used it."""

    def __init__(self, program: StepProgram):
        self.program = program
        self.held = [0] * len(program.stages)
        self.most = [0] * len(program.stages)
        self.maker: dict[int, int] = {}  # of slots that are alive
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        self.needs: dict[int, set[int]] = {}
        self.unfinished: set[int] = set()
        self.releases: list[tuple[set[int], int, int]] = []  # once all of these have finished, on this stage so many bytes
        self.num_issued = 0
        for slot in program.persistent.values():
            self.held[program.slots[slot].stage_id] += program.slots[slot].nbytes
            self.maker[slot] = -1

    def wait(self, slot: int) -> None:
        """Needs an array, which a slot without bytes may lack."""
        assert self.program.slots[slot].nbytes
        found = [self.maker[slot]]
        while found:
            one = found.pop()
            if one in self.unfinished:
                self.unfinished.remove(one)
                found += self.needs[one]
        for release in [r for r in self.releases if not r[0] & self.unfinished]:
            self.releases.remove(release)
            self.held[release[1]] -= release[2]

    def issue(self, instruction: Feed | Run | Move | Free) -> None:
        slots, number = self.program.slots, self.num_issued
        self.num_issued += 1
        match instruction:
            case Free():
                for slot in instruction.slots:
                    self.releases.append((self._end(slot), slots[slot].stage_id, slots[slot].nbytes))
                return
            case Feed():
                read, donated, made, stage_id, takes = [], (), (instruction.slot,), slots[instruction.slot].stage_id, 0
            case Move():
                read, donated, made, stage_id, takes = [instruction.source], (), (instruction.target,), slots[instruction.target].stage_id, 0
            case Run(stage_id=stage_id, donated=donated, outputs=made):
                read = [slot for group in instruction.inputs for slot in group]
                takes = self.program.stages[stage_id].transient_bytes[instruction.program]
        self.needs[number] = {self.maker[slot] for slot in read}
        for slot in read:
            self.users[slot].add(number)
        change = sum(slots[slot].nbytes for slot in made) - sum(slots[slot].nbytes for slot in donated)
        takes = max(takes, change)
        self.releases.append(({number}.union(*(self._end(slot) for slot in donated)), stage_id, takes - change))
        for slot in made:
            self.maker[slot] = number
            self.users[slot].add(number)
        self.unfinished.add(number)
        self.held[stage_id] += takes
        self.most[stage_id] = max(self.most[stage_id], self.held[stage_id])

    def _end(self, slot: int) -> set[int]:
        del self.maker[slot]
        return self.users.pop(slot, set())


def most_held(program: StepProgram, waiting: list[tuple[int, ...]]) -> list[int]:
    """Per stage, over two steps of which the second is issued while the first is running."""
    devices = LazyDevices(program)
    for _ in range(2):
        for slots, instruction in zip(waiting, program.instructions, strict=True):
            for slot in slots:
                devices.wait(slot)
            devices.issue(instruction)
    return devices.most


def booked(program: StepProgram) -> tuple[int, ...]:
    return replay(program, sum(len(stage.devices) for stage in program.stages)).peak_bytes_per_device


@given(steps())
def test_the_laziest_devices_hold_no_more_than_the_replay_books(step):
    program = build_step(*step)
    budget = booked(program)
    most = most_held(program, waits(program, budget))
    assert all(held <= budget[stage.devices[0]] for held, stage in zip(most, program.stages, strict=True))
