"""One training with batches of several shapes, such as sequences in buckets of lengths or a smaller
last batch: a compiled step for each shape, as many as are asked for, on one state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from capture.errors import ExecutionError, Violation
from capture.model.workload import PyTree, Workload, WorkloadProtocol
from capture.partition.tensor_parallel import Rule
from capture.plan.stages import Plan
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.state import PipelineState
from capture.runtime.train_step import StepMetrics

Shapes = tuple[tuple[int, ...], ...]
"""Of the leaves of a global batch, in the order of ``jax.tree.leaves``."""


class BatchShapes:
    """A training step for batches of more shapes than the plan's.

    The plan's stages stay where they are, so that one state serves all shapes; what was predicted
    holds for the plan's own shape. Each further shape is traced and compiled when its first batch
    comes, with the plan's number of micro-batches.

    Args:
        workload, plan, devices, rule, fast_compile: As for ``pipeshard``.
        max_shapes: Compiled steps that are kept beside that of the plan's own shape, at least 1;
            the one that was used longest ago makes room, and is compiled again when its shape
            returns.

    Example::

        train = BatchShapes(workload, plan, max_shapes=3)
        state = train.init(jax.random.key(0))
        for batch in batches:  # 128, 256 or 512 tokens each
            state, metrics = train(state, batch)
        train.peak_bytes_per_device()  # {((64, 128),): (81920, ...), ((64, 256),): ...}
    """

    def __init__(
        self,
        workload: WorkloadProtocol,
        plan: Plan,
        devices: Sequence[jax.Device] | None = None,
        rule: Rule | None = None,
        *,
        max_shapes: int,
        fast_compile: bool = False,
    ):
        if max_shapes < 1:
            raise ExecutionError.of(
                f"max_shapes={max_shapes} keeps no step for another shape; give at least 1.",
                "run-max-shapes",
            )
        self.max_shapes = max_shapes
        self._devices, self._rule, self._fast_compile = devices, rule, fast_compile
        #: Of the plan's own shape; it stays.
        self.planned = pipeshard(workload, plan, devices, rule, fast_compile=fast_compile)
        key = jax.eval_shape(lambda: jax.random.key(0))
        struct = jax.eval_shape(lambda k: workload.batch(k, plan.global_batch_size), key)
        self._tree: Any = jax.tree.structure(struct)  # JAX's stubs leave its methods out
        self._planned_shapes = _shapes_of(struct)
        self._steps: OrderedDict[Shapes, PipelinedStep] = OrderedDict()

    def init(self, key: jax.Array) -> PipelineState:
        """Return the state to begin with; ``planned`` has the other ways to make and read one."""
        return self.planned.init(key)

    def __call__(
        self, state: PipelineState, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[PipelineState, StepMetrics]:
        """Make one update; arguments and results are those of a ``PipelinedStep``.

        Raises:
            ExecutionError: ``run-batch`` if the batch has another structure, other dtypes, other
                numbers of dimensions, or examples that the micro-batches don't divide;
                ``run-shape-layers`` if the loss is another program for this shape.
        """
        return self.step_of(batch)(state, batch, key)

    def step_of(self, batch: PyTree) -> PipelinedStep:
        """Return the step for batches of this shape, compiled if it is not there."""
        if jax.tree.structure(batch) != self._tree:
            raise ExecutionError.of(
                f"the batch is {jax.tree.structure(batch)} and the plan's {self._tree}; only the "
                "sizes of dimensions may differ.",
                "run-batch",
            )
        shapes = _shapes_of(batch)
        if shapes == self._planned_shapes:
            return self.planned
        if shapes not in self._steps:
            self._steps[shapes] = self._make(batch, shapes)
            if len(self._steps) > self.max_shapes:
                self._steps.popitem(last=False)
        self._steps.move_to_end(shapes)
        return self._steps[shapes]

    def peak_bytes_per_device(self) -> dict[Shapes, tuple[int, ...]]:
        """Return the replayed peaks of the steps that are kept, the plan's first, without what the
        steps of other shapes hold, which is nothing between steps but their code."""
        steps = {self._planned_shapes: self.planned, **self._steps}
        return {shapes: step.replay().peak_bytes_per_device for shapes, step in steps.items()}

    def _make(self, batch: PyTree, shapes: Shapes) -> PipelinedStep:
        workload, plan = self.planned.workload, self.planned.plan
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        num_examples = self._num_examples(shapes)
        tensors = self.planned.traced.graph.batch

        def rows(_: Any, n: int) -> PyTree:
            """Return examples of the batch itself, from the first again where it has too few."""
            found = []
            for leaf, tensor in zip(leaves, tensors, strict=False):
                dim = tensor.batch_dim
                if dim is not None:
                    size = n * leaf.shape[dim] // num_examples
                    leaf = np.take(leaf, range(size), axis=dim, mode="wrap")
                found.append(leaf)
            return self._tree.unflatten(found)

        other: Any = Workload(workload.loss_fn, workload.init, rows, workload.optimizer)
        changed = plan.with_(
            global_batch_size=num_examples, model_hash=None, prediction=None, verification=None
        )
        step = pipeshard(other, changed, self._devices, self._rule, fast_compile=self._fast_compile)
        planned, own = ([each.owned for each in one.stages] for one in (self.planned, step))
        if planned != own or step.traced.split_struct != self.planned.traced.split_struct:
            raise ExecutionError.of(
                f"for batches of {_text(shapes)} the loss is cut into other layers than for "
                f"{_text(self._planned_shapes)}, so that stages own other parameters; mark the "
                "layers in the model, or plan this shape apart.",
                "run-shape-layers",
            )
        return step

    def _num_examples(self, shapes: Shapes) -> int:
        """Return the number of examples in a global batch of these shapes."""
        plan, found, violations = self.planned.plan, set(), []
        tensors = self.planned.traced.graph.batch
        for shape, expected, tensor in zip(shapes, self._planned_shapes, tensors, strict=False):
            dim = tensor.batch_dim
            if len(shape) != len(expected):
                violations.append(
                    f"{tensor.name} has shape {shape} and the plan's {expected}; only the sizes of "
                    "dimensions may differ."
                )
            elif dim is not None:
                examples, rest = divmod(shape[dim] * plan.global_batch_size, expected[dim])
                found.add(examples)
                if rest or not examples or examples % plan.num_microbatches:
                    violations.append(
                        f"{tensor.name} has {shape[dim]} rows; give a multiple of "
                        f"{plan.num_microbatches} examples, one part per micro-batch."
                    )
        if not violations and len(found) > 1:
            violations.append(
                f"the leaves of the batch hold {sorted(found)} examples; give as many of each."
            )
        ExecutionError.check([Violation(text, "run-batch") for text in violations])
        return found.pop()


def _shapes_of(batch: PyTree) -> Shapes:
    return tuple(tuple(np.shape(leaf)) for leaf in jax.tree.leaves(batch))


def _text(shapes: Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
