"""The train step of a sharding plan, compiled for a target: what a device holds at its peak, by the
compiler's own report.

The step is ``Sharded.update``: value_and_grad of the transformed loss, then the optimizer, with
parameters and state donated, parameters, state and batch sharded as the plan says. Nothing is
allocated, nothing is run.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture import environment
from capture.compiler.assembler import write_assembler
from capture.compiler.executable import Compiler, Executable
from capture.compiler.report_compiler import ReportCompiler
from capture.compiler.target_devices import devices_of
from capture.errors import TargetError
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
        self.target, self._count_work = target, count_work
        shape, names = mesh_axes(where)
        own = [] if isinstance(where, Cluster) else list(where.devices.flat)
        self._are_there = (
            bool(own)
            and own[0] in jax.devices()
            and own[0].platform == _JAX_PLATFORMS[target.platform]
        )
        # A compiler that is stopped at its report is given programs for virtual CPU devices, which
        # stand for the target's.
        self._stops_at_report = bool(target.compiler.get("stop_at_report")) and not self._are_there
        devices = (
            own
            if self._are_there
            else devices_of(
                Target.load("cpu") if self._stops_at_report else target, math.prod(shape)
            )
        )
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
        try:
            program = self._compile(step, arguments, results)
        except RuntimeError as error:  # JAX's, where it lowers for a device, and XLA's
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TargetError.of(
                f"the step cannot be compiled for target={self.target.name!r}: {said}",
                "target-refused",
            ) from error
        held = sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(arguments)
        )
        return held + program.transient_bytes, program

    def _compile(self, step: Any, arguments: Sequence[Any], results: Any) -> Executable:
        if self._stops_at_report:
            return ReportCompiler(self.target)(
                step, arguments, donate=(0, 1), out_shardings=results
            )
        options: dict[str, Any] = {}
        if not self._are_there:
            options = self.target.compiler_options
            if self.target.platform == "cuda":
                scratch = Path(self._scratch.name)
                options |= {
                    "xla_gpu_cuda_data_dir": str(self._toolkit),
                    **environment.kernel_cache_options(scratch / "kernels"),
                }
        compiler = Compiler(fast_compile=True, count_work=self._count_work, options=options)
        return compiler(step, arguments, donate=(0, 1), out_shardings=results)

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="capture-step-")

    @cached_property
    def _toolkit(self) -> Path:
        return write_assembler(Path(self._scratch.name))
