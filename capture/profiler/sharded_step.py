"""The train step of a sharding plan, compiled for a target: what a device holds at its peak, by the
compiler's own report.

The step is ``Sharded.update``: value_and_grad of the transformed loss, then the optimizer, with
parameters and state donated, parameters, state and batch sharded as the plan says. Nothing is
allocated, nothing is run.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import Executable
from capture.compiler.target_compiler import TargetCompiler
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.model.workload import takes_key
from capture.runtime.sharded import Sharded
from capture.runtime.sharded.mesh import mesh_axes

#: What JAX calls the platforms of targets.
_JAX_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


class StepCompiler:
    """Compiles train steps of sharding plans.

    Devices of the target in this process are compiled for as they are; where there are none, the
    target's compiler is asked for absent ones.

    Args:
        target: To compile for.
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

    def measure(self, sharded: Sharded) -> tuple[int, Executable]:
        """Bytes of a device at the peak of a step, arguments included, and the compiled program.

        Args:
            sharded: A workload with a plan on ``mesh``.

        Raises:
            TargetError: ``target-refused`` if the compiler does not take the step,
                ``target-report``.
        """
        workload, num_examples = sharded.workload, sharded.plan.batch_size * self.mesh.size
        params = jax.eval_shape(sharded.split, jax.eval_shape(workload.init, jax.random.key(0)))
        state = jax.eval_shape(workload.optimizer.init, params)
        key = jax.eval_shape(lambda: jax.random.key(0))
        batch = jax.eval_shape(lambda key: workload.batch(key, num_examples), key)
        given = (batch, key) if takes_key(workload) else (batch,)
        trees = (params, state, given)
        whole = NamedSharding(self.mesh, PartitionSpec())
        placed = (
            sharded.shardings(),
            sharded.opt_state_shardings,
            jax.tree.map(lambda x: whole if x is key else sharded.batch_sharding, given),
        )

        def step(*leaves):  # a program that is exported has no trees of optax
            params, state, given = (
                jax.tree.unflatten(jax.tree.structure(t), own)
                for t, own in zip(trees, leaves, strict=True)
            )
            params, state, loss = sharded.update(params, state, *given)
            return jax.tree.leaves(params), jax.tree.leaves(state), loss

        shardings = [jax.tree.leaves(tree) for tree in placed]
        arguments = tuple(
            [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
                for x, s in zip(jax.tree.leaves(tree), own, strict=True)
            ]
            for tree, own in zip(trees, shardings, strict=True)
        )
        results = (shardings[0], shardings[1], whole)
        with self._compiler.refusing("the step"):
            compile_it = self._compiler.compiler()
            program = compile_it(step, arguments, donate=(0, 1), out_shardings=results)
        held = sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(arguments)
        )
        return held + program.transient_bytes, program
