"""Several models as one program: the joint step of a sub-array, its segments and its bundles.

One function makes a whole update of one model: every layer's ``jax.vjp``, and right after a layer's
gradients the update of what it owns; all updates at the end, where one needs a value made from all
gradients, such as their norm. ``jax.vmap`` over the models makes of it that of all. The vjp
is inside the vmap: the other way round, every product has a batch dimension by the time that remat
policies see it. The joint step is traced from shapes alone, flattened as a loss is, and cut where
layers end.

Source: Purandare et al. 2023 (mu-TWO), 3.1 (operator fusion as HFTA's) and 4.1 (the joint graph).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from capture.errors import WorkloadError
from capture.memo import memo
from capture.model.graph import content_hash, item_bytes
from capture.model.workload import WorkloadProtocol
from capture.plan.array import BUNDLE_BYTES, Member, Shared
from capture.plan.choices import Remat
from capture.runtime.layerwise import KEYS, LayerwiseOptimizer, key_violations, shared_params
from capture.step.sub_array import Bundle, StepSegment
from capture.tracing import trace
from capture.tracing.flatten import LAYER_BOUNDARY, flatten
from capture.tracing.hashing import ProgramHasher
from capture.tracing.jaxprs import in_groups
from capture.tracing.layers import LayerOps, assign_layers
from capture.tracing.outline import outline, outlined
from capture.tracing.program import LossProgram
from capture.tracing.segment import Segment
from capture.tracing.slices import struct_of

#: The categories of parameters that all models have alike, and of what all read of a batch.
SHARED, SHARED_BATCH = "shared parameters", "shared batch"


class Fuser:
    """A maker of joint steps of as many models as one likes, all of one task.

    Args:
        batch_size: Examples of one model in a step.
        num_layers: Of a loss without marks; 0 to choose.
        shared: Patterns of paths of parameters that all models share, or a predicate on paths.

    Raises:
        PlanError, WorkloadError, TracingError: Those of ``shared_params``, ``LayerwiseOptimizer``
            and ``trace``.
    """

    def __init__(
        self,
        workload: WorkloadProtocol,
        batch_size: int,
        num_layers: int = 0,
        *,
        shared: Shared = (),
        shared_batches: bool = False,
        bundle_bytes: int = BUNDLE_BYTES,
        remat: Remat | None = None,
    ):
        self.workload = workload
        traced = trace(workload, batch_size, unmarked_layers=num_layers or None)
        self.traced = traced.recomputing(remat)
        own = shared_params(self.traced, shared) if shared else frozenset()
        self.optimizer = LayerwiseOptimizer(workload, self.traced, own)
        self.shared_batches, self.bundle_bytes = shared_batches, bundle_bytes

    @memo
    def of(self, num_models: int) -> FusedArray:
        """Return the joint step of so many models."""
        return FusedArray(self, num_models)

    def begun(
        self, member: Member, params: Sequence[object]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return by index the parameters of the layer graph with which a model begins, and the
        leaves of its optimizer's state, hyperparameters set."""
        tree: Any = jax.tree.structure(self.traced.split_struct)  # JAX's stubs leave it out
        state = self._init(tree.unflatten(params))
        state = self.optimizer.with_hyperparameters(state, member.hyperparameters)
        return dict(enumerate(params)), dict(enumerate(jax.tree.leaves(state)))

    @cached_property
    def _init(self) -> Callable[[Any], Any]:
        return jax.jit(self.workload.optimizer.init)

    def sharing(self, params: Sequence[np.ndarray], first: Mapping[int, object]) -> list[Any]:
        """Return a model's parameters, with those of the first model that all share."""
        return [first[p] if p in self.optimizer.shared else own for p, own in enumerate(params)]

    def key(self, num_models: int) -> str:
        """Return the hash of all that their joint step is traced from."""
        return content_hash([self._key, num_models])

    @cached_property
    def _key(self) -> str:
        optimizer, model_hash = self.optimizer, self.traced.graph.model_hash
        update, shared = optimizer.sliced.traced.update.key, sorted(optimizer.shared)
        facts = [model_hash, update, shared, self.shared_batches]
        remat = self.traced.remat
        return content_hash([*facts, *([] if remat == "none" else [remat])])


class FusedArray:
    """The joint step of several models that differ in values alone (``SubArray``).

    Args:
        document: Its outline, in the place of tracing it: what plans need of it, and nothing that
            could run.

    Attributes:
        layers: By segment, its operations.
        values: By bundle, the values of the program that it holds.
        renewed: By bundle of state, their new values; empty where nothing replaces them.
        params, state: Values of the parameters, in the order of the layer graph, and by layer those
            of its optimizer's state.

    Raises:
        WorkloadError: ``array-key`` for a loss that draws with keys of another kind than threefry.
    """

    def __init__(self, fuser: Fuser, num_models: int, document: Mapping[str, object] | None = None):
        graph, optimizer = fuser.traced.graph, fuser.optimizer
        self.num_models, self.num_layers = num_models, graph.num_layers
        self.num_leaves = len(graph.batch)
        self._traced, self._stages = fuser.traced, optimizer.stages
        self._bundle_bytes, self._shared = fuser.bundle_bytes, optimizer.shared
        self._late = optimizer.sliced.exchanges
        self._batch_axes = [
            None if fuser.shared_batches and tensor.dtype not in KEYS else 0
            for tensor in graph.batch
        ]
        if document is None:
            self.program = self._traced_program()
            self.hasher = ProgramHasher(self.program)
        else:
            self.program, self.hasher = outlined(document)
        self.params = self.program.params
        sizes = [len(stage.state) for stage in self._stages]
        *self.state, self._batch = in_groups(self.program.batch, [*sizes, self.num_leaves])
        marks = [mark.position for mark in self.program.marks]
        assert len(marks) == 2 * self.num_layers - 1, f"{len(marks)} marks in a joint step"
        self.layers = assign_layers(self.program, [0, *marks, len(self.program.ops)])
        self.bundles: list[Bundle] = []
        self.values: list[tuple[int, ...]] = []
        self.renewed: list[tuple[int, ...]] = []
        self._bundle()
        self.segments = [self._segment(ops) for ops in self.layers]

    @property
    def outline(self) -> dict[str, Any]:
        """The program as data."""
        return outline(self.program, self.hasher)

    # ---- tracing ---------------------------------------------------------------------------------

    def _traced_program(self) -> LossProgram:
        graph = self._traced.graph

        def stacked(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.num_models, *struct.shape), struct.dtype)

        params = [
            struct_of(tensor) if p in self._shared else stacked(struct_of(tensor))
            for p, tensor in enumerate(graph.params)
        ]
        state = [list(map(stacked, stage.state_structs)) for stage in self._stages]
        batch = [
            struct_of(tensor) if axis is None else stacked(struct_of(tensor))
            for tensor, axis in zip(graph.batch, self._batch_axes, strict=True)
        ]
        axes = [None if p in self._shared else 0 for p in range(len(params))]
        joint = jax.vmap(
            self._update,
            in_axes=(axes, 0, self._batch_axes),
            out_axes=(0, axes, 0),
        )
        closed = jax.make_jaxpr(joint)(params, state, batch)
        WorkloadError.check(key_violations(closed.jaxpr))
        return flatten(closed, len(params), None, {}).program

    def _update(
        self, params: Sequence[Any], state: Sequence[Sequence[Any]], batch: Sequence[object]
    ) -> tuple[Any, list[Any], list[list[Any]]]:
        """Update one model: return its loss, new parameters and new optimizer state."""
        values, passes = dict[int, Any](), list[tuple[Segment, Any]]()
        for layer in range(self.num_layers):
            passes.append(self._forward(layer, params, values, batch))
        (loss_value,) = passes[-1][0].layers.outputs
        loss = values[loss_value]
        cotangents = {loss_value: jnp.ones_like(loss)}
        gradients: dict[int, Any] = {}
        new_params, new_state = list(params), [list(own) for own in state]
        waiting: dict[int, tuple[list[Any], Sequence[Any], list[Any]]] = {}
        summaries: list[list[Any]] = [[] for _ in self._stages[0].whole.stages]
        for layer in reversed(range(self.num_layers)):
            segment, pull = passes[layer]
            of_params, of_inputs = pull([cotangents.pop(v) for v in segment.outputs])
            _add(cotangents, segment.inputs, of_inputs)
            _add(gradients, self._trained(segment.layers.params), of_params)
            stage = self._stages[layer]
            own = [params[p] for p in stage.params]
            arrived = [gradients.pop(p, jnp.zeros_like(params[p])) for p in stage.params]
            waiting[layer] = own, state[layer], arrived
            if self._late:
                summaries[layer] = stage.summarize(*waiting[layer])
            # Where one layer's update reads all gradients, every layer waits for the last of them.
            ready = [layer] if not self._late else [] if layer else list(waiting)
            for n in ready:
                others = [made for m, made in enumerate(summaries) if m != n] if self._late else []
                updated, new_state[n] = self._stages[n].update(*waiting.pop(n), others)
                for param, array in zip(self._stages[n].params, updated, strict=True):
                    new_params[param] = array
            if layer:  # a mark stands where the layer ends, on whatever there is
                loss = checkpoint_name(loss, LAYER_BOUNDARY)
        return loss, new_params, new_state

    def _forward(
        self,
        layer: int,
        params: Sequence[object],
        values: dict[int, object],
        batch: Sequence[object],
    ) -> tuple[Segment, Any]:
        """Add what a layer makes to the values, and return the layer with its pullback."""
        part = self._traced.slice(layer, layer + 1)
        trained = self._trained(part.params)

        def run(own: Sequence[object], given: Mapping[int, object]) -> list[Any]:
            weights = {**dict(enumerate(params)), **dict(zip(trained, own, strict=True))}
            return part(
                [weights[p] for p in part.params],
                [given[v] for v in part.inputs],
                [batch[b] for b in part.batch],
            )

        segment = Segment(self._traced.graph, part)
        made, pull = segment.forward(run, [params[p] for p in trained], values)
        first = part.outputs[0]
        values |= {**made, first: checkpoint_name(made[first], LAYER_BOUNDARY)}
        return segment, pull

    def _trained(self, params: Sequence[int]) -> list[int]:
        """Return those with gradients: floating-point parameters of a model's own."""
        own = self._traced.graph.params
        return [p for p in params if p not in self._shared and own[p].differentiable]

    # ---- bundles ---------------------------------------------------------------------------------

    def nbytes(self, value: int) -> int:
        aval = self.program.avals[value]
        return math.prod(aval.shape) * item_bytes(str(aval.dtype))

    def struct(self, value: int) -> Any:
        """Return shape and dtype of a value."""
        return self.program.avals[value]

    @cached_property
    def _readers(self) -> dict[int, tuple[int, ...]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for segment, ops in enumerate(self.layers):
            for value in (*ops.params, *ops.batch, *ops.inputs):
                found[value].append(segment)
        return {value: tuple(segments) for value, segments in found.items()}

    def _bundle(self) -> None:
        """Group the values that pass between segments, and state, by lifetime."""
        writer = {value: n for n, ops in enumerate(self.layers) for value in ops.outputs}
        kinds = [SHARED if p in self._shared else "parameters" for p in range(len(self.params))]
        state = [*self.params, *(value for own in self.state for value in own)]
        kinds += ["optimizer state"] * (len(state) - len(kinds))
        #: By kind, writer, readers and updater: values, their new values, leaves that feed them.
        groups = defaultdict[tuple[Any, ...], list[tuple[int, int | None, int | None]]](list)
        replaced: set[int] = set()
        for kind, before, after in zip(kinds, state, self.program.aux, strict=True):
            updater, readers = writer.get(after), self._readers.get(before, ())
            if updater is not None:
                assert max(readers, default=0) <= updater, "state is read after its update"
                assert after not in replaced, "one value is the new one of two leaves"
                replaced.add(after)
            new = None if updater is None else after
            groups[kind, None, readers, updater].append((before, new, None))
        for leaf, value in enumerate(self._batch):
            if value in self._readers:
                kind = "batch" if self._batch_axes[leaf] == 0 else SHARED_BATCH
                groups[kind, None, self._readers[value], None].append((value, None, leaf))
        loss, last = self.program.loss, self.num_layers
        for value, segment in writer.items():
            if value not in replaced and value != loss:
                readers = self._readers.get(value, ())
                kind = "activations" if segment < last else "cotangents"
                if segment < last and any(reader >= last for reader in readers):
                    kind = "maps"
                groups[kind, segment, readers, None].append((value, None, None))
        groups["loss", writer[loss], (), None].append((loss, None, None))
        for lifetime, members in groups.items():
            for part in self._parts(members) if lifetime[0] == "maps" else [members]:
                self._add(*lifetime, *zip(*part, strict=True))
        self.loss = len(self.bundles) - 1

    def _parts(
        self, members: Sequence[tuple[int, object, object]]
    ) -> list[list[tuple[int, Any, Any]]]:
        """Return the values in bundles of at least ``bundle_bytes``, but for the last."""
        parts: list[list[tuple[int, Any, Any]]] = [[]]
        for member in members:
            if sum(self.nbytes(value) for value, *_ in parts[-1]) >= self._bundle_bytes:
                parts.append([])
            parts[-1].append(member)
        return parts

    def _add(
        self,
        kind: str,
        writer: int | None,
        readers: tuple[int, ...],
        updater: int | None,
        values: tuple[int, ...],
        renewed: Iterable[int | None],
        feed: Iterable[int | None],
    ) -> None:
        at = updater if writer is None else writer
        layer = 0 if at is None else at if at < self.num_layers else 2 * self.num_layers - 1 - at
        stem = f"{kind} " if at is None else f"layer {layer} {kind} "
        count = sum(bundle.name.startswith(stem) for bundle in self.bundles)
        category = "activations" if kind == "maps" else kind
        nbytes = sum(map(self.nbytes, values))
        name, shared = f"{stem}{count}", kind in (SHARED, SHARED_BATCH)
        leaves = tuple(leaf for leaf in feed if leaf is not None)
        self.bundles.append(
            Bundle(name, category, nbytes, writer, readers, updater, leaves, shared)
        )
        self.values.append(values)
        self.renewed.append(tuple(value for value in renewed if value is not None))

    @cached_property
    def _bundle_of(self) -> dict[int, int]:
        """The bundle of each value of the program, be it an old or a new one of state."""
        return {
            value: number
            for number, (values, renewed) in enumerate(zip(self.values, self.renewed, strict=True))
            for value in (*values, *renewed)
        }

    def _segment(self, ops: LayerOps) -> StepSegment:
        reads = (*ops.params, *ops.batch, *ops.inputs)
        return StepSegment(self._bundles(reads), self._bundles(ops.outputs))

    def _bundles(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._bundle_of[value] for value in values))

    # ---- slices ----------------------------------------------------------------------------------

    def sources(self, targets: Sequence[int], available: frozenset[int]) -> tuple[int, ...]:
        """Return the bundles that a recomputation of these targets reads; see ``SubArray``."""
        ops = self.slice(targets, available)
        return self._bundles((*ops.params, *ops.batch, *ops.inputs))

    def slice(self, targets: Sequence[int], available: frozenset[int]) -> LayerOps:
        """Return the operations of a segment that make bundles of it, from those that are there."""
        program = self.program
        there = {value for number in available for value in self.values[number]}
        outputs = {value for number in targets for value in self.values[number]}
        needed, pending = set[int](), list(outputs)
        while pending:
            value = pending.pop()
            at = None if value in there else program.producer.get(value)
            if at is not None and at not in needed:
                needed.add(at)
                pending += program.ops[at].reads
        return LayerOps.of(program, needed, outputs)


def _add(sums: dict[int, Any], keys: Sequence[int], terms: Sequence[Any]) -> None:
    for key, term in zip(keys, terms, strict=True):
        sums[key] = sums[key] + term if key in sums else term
