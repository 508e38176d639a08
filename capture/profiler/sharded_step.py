"""The train step of a sharding plan, compiled for a target: what a device holds at its peak, by the
compiler's own report. Nothing is allocated, nothing is run."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh

from capture.compiler.executable import Executable
from capture.compiler.target_compiler import TargetCompiler
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import WorkloadProtocol
from capture.plan.sharding import ShardingPlan
from capture.runtime.sharded import Sharded
from capture.runtime.sharded.mesh import mesh_axes
from capture.runtime.sharded.step import ShardedStep
from capture.runtime.sharded.training import shard_as_planned

#: What JAX calls the platforms of targets.
_JAX_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


class StepCompiler:
    """The compiler of the train steps of sharding plans.

    Devices of the target in this process are compiled for as they are; where there are none, the
    target's compiler is asked for absent ones.

    Args:
        target: Target to compile for.
        where: The mesh, or the cluster, that plans are for.
        count_work: Also find out what programs compute, read and send.

    Raises:
        TargetError: Those of ``devices_of``.
    """

    def __init__(self, target: Target, where: Mesh | Cluster, count_work: bool = False):
        self.target = target
        shape, names = mesh_axes(where)
        own = [] if isinstance(where, Cluster) else list(where.devices.flat)
        are_there = (
            bool(own)
            and own[0] in jax.devices()
            and own[0].platform == _JAX_PLATFORMS[target.platform]
        )
        self._compiler = TargetCompiler(target, count_work, are_there)
        devices = own if are_there else self._compiler.devices(math.prod(shape))
        self.mesh = Mesh(np.array(devices).reshape(shape), names)

    def step(self, sharded: Sharded) -> ShardedStep:
        """Return the compiled training step of a workload with a plan on ``mesh``.

        Raises:
            TargetError: ``target-refused`` if the compiler does not take the step,
                ``target-report``.
        """
        step = ShardedStep(sharded, self._compiler.compiler())
        with self._compiler.refusing("the step"):
            step.compile()
        return step

    def measure(self, sharded: Sharded) -> tuple[int, Executable]:
        """Return the bytes of a device at the peak of the compiled step, and its program."""
        step = self.step(sharded)
        return step.replay().peak_bytes_per_device[0], step.executable(step.program.runs[0])


def compiled_step(plan: ShardingPlan, workload: WorkloadProtocol) -> ShardedStep:
    """Compile the whole train step for the plan's target; nothing is allocated, nothing runs.

    Raises:
        PlanError: ``plan-cluster`` for a plan of an earlier version, ``plan-other-model``.
        TargetError: ``target-refused``, and as ``devices_of``.
    """
    cluster = plan.known_cluster
    compiler = StepCompiler(Target.load(cluster.target), cluster)
    return compiler.step(shard_as_planned(workload, plan, compiler.mesh))
