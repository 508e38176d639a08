"""Any optax transformation, cut by stage: the update of the whole model is traced once and sliced
by what it reads.

Slicing the traced update, instead of calling the transformation once per stage, keeps its meaning:
masks and labels by parameter path still see the whole tree, and values that need every gradient (a
global norm) are found by data flow. Such values travel between stages as small summaries; an update
that would need a large tensor of another stage is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from capture.errors import WorkloadError
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import in_groups, is_variable

#: Larger values do not travel between stages at the end of a step.
_MAX_SUMMARY_ELEMENTS = 256
_NOBODY = -1  # owner of what is shared by all


@dataclass(frozen=True)
class StageUpdate:
    """The slice of the optimizer that updates a stage's parameters; its functions can be traced.

    Attributes:
        params: Parameters it updates, indices into the layer graph.
        state: Leaves of the whole optimizer state that the stage holds; leaves of no parameter (a
            step count) are in every stage.
        exports: The small values that updates of other stages need from this stage's gradients, as
            variables of the traced update.
    """

    whole: SlicedOptimizer
    stage_id: int
    params: tuple[int, ...]
    state: tuple[int, ...]
    exports: tuple[Any, ...]

    @property
    def summary(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of ``exports``."""
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.exports)

    @property
    def others(self) -> list[StageUpdate]:
        """The updates of all other stages, in stage order."""
        return [stage for stage in self.whole.stages if stage.stage_id != self.stage_id]

    @property
    def state_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the leaves that the stage holds."""
        return [self.whole.state_structs[k] for k in self.state]

    def init(self, params: Sequence[object]) -> list[Any]:
        """Return the stage's leaves of the initial optimizer state."""
        flow = self.whole.traced.init
        wanted = [flow.outputs[k] for k in self.state]
        return flow.part([[flow.inputs[p] for p in self.params]], [wanted])(params)[0]

    def total(self, grads: Sequence[jax.Array], arrived: Iterable[tuple[int, Any]]) -> list[Any]:
        """Return the gradients of the stage's parameters, with those of other stages added."""
        found = dict(zip(self.params, grads, strict=True))
        for param, gradient in arrived:
            found[param] = found[param] + gradient
        return list(found.values())

    def summarize(
        self, params: Sequence[object], state: Sequence[object], grads: Sequence[jax.Array]
    ) -> list[Any]:
        """Return the stage's summary values."""
        flow, read = self.whole.traced.update, self._read
        return flow.part(read, [self.exports])(params, state, grads)[0]

    def update(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        grads: Sequence[jax.Array],
        summaries: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Return new parameters and new state of the stage.

        Args:
            summaries: Those of all other stages, in stage order; none where nobody needs any.
        """
        traced, others = self.whole.traced, self.others if summaries else []
        read = [*self._read, *(stage.exports for stage in others)]
        new = [traced.update.outputs[p] for p in self.params]
        wanted = new, [traced.new_state[k] for k in self.state]
        params, state = traced.update.part(read, wanted)(params, state, grads, *summaries)
        return params, state

    @property
    def _read(self) -> list[list[Any]]:
        """The inputs of the whole update that are the stage's parameters, state and gradients."""
        params, state, grads = self.whole.traced.groups
        held = (params, self.params), (state, self.state), (grads, self.params)
        return [[variables[i] for i in own] for variables, own in held]


class TracedOptimizer:
    """The traced ``init`` and ``update`` of a transformation over the whole model.

    Args:
        params_struct: The parameters as a pytree of ``ShapeDtypeStruct``; leaf order is that of the
            layer graph.
        unread: Parameters that the loss does not read: their gradient is the constant 0, so that no
            stage waits for it.
    """

    def __init__(self, optimizer: Any, params_struct: Any, unread: Collection[int] = ()):
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params_struct)
        self.unread = frozenset(unread)
        self.params = jax.tree.leaves(structs)
        self.param_names = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(params_struct)
        ]
        init, state_struct = jax.make_jaxpr(optimizer.init, return_shape=True)(structs)
        self.init = DataFlow(init)
        self.state, self.state_tree = jax.tree.flatten(state_struct)

        def step(params, state, grads):
            leaves, tree = jax.tree.flatten(grads)
            grads = jax.tree.unflatten(
                tree, [jnp.zeros_like(g) if p in unread else g for p, g in enumerate(leaves)]
            )
            updates, state = optimizer.update(grads, state, params)
            new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
            return jax.tree.leaves(new), jax.tree.leaves(state)

        self.update = DataFlow(jax.make_jaxpr(step)(structs, state_struct, structs))

    @cached_property
    def param_keys(self) -> list[str]:
        """A hash, per parameter, of its update and that of its state: equal keys mean the same
        operations, hence the same memory, for another parameter."""
        outputs = [[self.update.outputs[p]] for p in range(len(self.params))]
        for params, state in zip(self.params_of_state, self.new_state, strict=True):
            for p in params:
                outputs[p].append(state)
        return [self.update.key_of(*each) for each in outputs]

    @cached_property
    def shared_key(self) -> str:
        """A hash of the update of the state that belongs to no parameter, which every stage has."""
        owned = zip(self.params_of_state, self.new_state, strict=True)
        return self.update.key_of(*(state for params, state in owned if not params))

    @property
    def new_state(self) -> Sequence[Any]:
        """The results of the update that are the new state."""
        return self.update.outputs[len(self.params) :]

    @property
    def groups(self) -> list[list[Any]]:
        """The inputs of the update: parameters, state and gradients."""
        return self.groups_of(self.update)

    def groups_of(self, program: DataFlow) -> list[list[Any]]:
        """Return the inputs of the update's like: parameters, state and gradients."""
        sizes = len(self.params), len(self.state), len(self.params)
        return in_groups(program.inputs, sizes)

    @cached_property
    def param_of_state(self) -> dict[int, int]:
        """The parameter of each state leaf that belongs to a single one."""
        owned = enumerate(self.params_of_state)
        return {k: next(iter(params)) for k, params in owned if len(params) == 1}

    @cached_property
    def params_of_state(self) -> list[frozenset[int]]:
        """The parameters that each state leaf belongs to: those its first or its new value depends
        on, other than through small shared values."""
        return self.owners_of_state(self.update)

    def owners_of_state(self, program: DataFlow) -> list[frozenset[int]]:
        """Return each state leaf's parameters, by a program with the update's arguments."""
        state_out = program.outputs[len(self.params) :]
        owned = self._owners_at_first
        while True:  # a leaf may feed another, so iterate to the fixed point
            flow = program.propagate(self.sources_of(owned, program), owner_of_result)
            found = [
                old | (flow.get(out, frozenset()) - {_NOBODY} if is_variable(out) else frozenset())
                for old, out in zip(owned, state_out, strict=True)
            ]
            if found == owned:
                return owned
            owned = found

    @cached_property
    def params_of_value(self) -> dict[Any, frozenset[int]]:
        """The parameters that each value of the update depends on."""
        return self.update.propagate(self.sources_of(self.params_of_state, self.update))

    @cached_property
    def _owners_at_first(self) -> list[frozenset[int]]:
        """The parameters that each leaf of the initial state is made from: a copy of one that no
        update changes belongs to it."""
        sources = {v: frozenset([p]) for p, v in enumerate(self.init.inputs)}
        flow = self.init.propagate(sources, owner_of_result)
        return [
            flow.get(out, frozenset()) - {_NOBODY} if is_variable(out) else frozenset()
            for out in self.init.outputs
        ]

    def sources_of(
        self, params_of_state: Sequence[frozenset[int]], program: DataFlow
    ) -> dict[Any, frozenset[int]]:
        """Return the parameters that each input of the update, or of its like, belongs to."""
        params, state, grads = self.groups_of(program)
        of_params = {v: frozenset([p]) for own in (params, grads) for p, v in enumerate(own)}
        return of_params | dict(zip(state, params_of_state, strict=True))


class SlicedOptimizer:
    """Slices of a traced optimizer for given stages.

    Args:
        stages: Per stage, the indices of the parameters it updates; together they are all
            parameters.

    Raises:
        WorkloadError: ``optimizer-cross-stage`` if the update of one stage needs a large tensor of
            another.
    """

    def __init__(self, traced: TracedOptimizer, stages: Sequence[Sequence[int]]):
        self.traced = traced
        self._stage_of_param = {p: s for s, params in enumerate(stages) for p in params}
        assert len(self._stage_of_param) == len(traced.params), (
            "every parameter belongs to exactly one stage"
        )
        self._stages_of = {
            v: frozenset(self._stage_of_param[p] for p in params)
            for v, params in traced.params_of_value.items()
        }
        held = [self._held(s) for s in range(len(stages))]
        exchanged = self._exchanged(stages, held)
        self.stages = tuple(
            StageUpdate(
                self,
                s,
                tuple(params),
                state,
                tuple(v for v in exchanged if self._stages_of[v] == {s}),
            )
            for s, (params, state) in enumerate(zip(stages, held, strict=True))
        )

    def of(self, params: tuple[int, ...]) -> StageUpdate:
        """Return the slice that updates these parameters."""
        return next(stage for stage in self.stages if stage.params == params)

    @property
    def exchanges(self) -> bool:
        """Whether the update of a stage needs values of another."""
        return any(stage.exports for stage in self.stages)

    @property
    def state_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of all leaves of the optimizer state, in ``jax.tree`` order."""
        return self.traced.state

    @property
    def state_struct(self) -> Any:
        """The shapes of the optimizer state, as optax would hold it."""
        return self.unflatten_state(self.state_structs)

    def unflatten_state(self, leaves: Sequence[object]) -> Any:
        """Return the optimizer state as optax would hold it."""
        return jax.tree.unflatten(self.traced.state_tree, leaves)

    def _held(self, stage_id: int) -> tuple[int, ...]:
        """Return the leaves of the state that a stage holds."""
        found = []
        for k, owners in enumerate(self.traced.params_of_state):
            stages = {self._stage_of_param[p] for p in owners}
            if len(stages) > 1:
                self._refuse(self.state_structs[k].shape, owners)
            if not stages or stages == {stage_id}:
                found.append(k)
        return tuple(found)

    def _exchanged(
        self, stages: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Return the values of one stage that another stage's update needs, in program order."""
        found: dict[Any, None] = {}
        program, new_state = self.traced.update, self.traced.new_state
        # Also of stages without parameters, which hold the leaves that are of no parameter.
        for stage_id, (params, state) in enumerate(zip(stages, held, strict=True)):
            foreign = {
                v for v, of in self._stages_of.items() if len(of) == 1 and stage_id not in of
            }
            wanted = [*(program.outputs[p] for p in params), *(new_state[k] for k in state)]
            needed = program.needed(wanted, foreign)
            read = [*wanted, *(v for equation in needed for v in equation.invars)]
            found |= {v: None for v in read if is_variable(v) and v in foreign}
        for v in found:
            if math.prod(v.aval.shape) > _MAX_SUMMARY_ELEMENTS:
                (stage,) = self._stages_of[v]
                self._refuse(v.aval.shape, stages[stage])
        return sorted(found, key=program.order)

    def _refuse(self, shape: tuple[int, ...], params: Collection[int]) -> None:
        names = ", ".join(self.traced.param_names[p] for p in sorted(params)[:3])
        raise WorkloadError.of(
            f"the optimizer needs a tensor of shape {shape} made from gradients of several "
            f"pipeline stages (of {names}, ...); only values "
            f"of up to {_MAX_SUMMARY_ELEMENTS} elements, such as a global norm, travel between "
            "stages. Use a transformation that treats "
            "parameters separately, or a single stage.",
            "optimizer-cross-stage",
        )


def owner_of_result(owners: frozenset[int], size: int) -> frozenset[int]:
    """Return the owners of a result. A small value made from several owners (a norm over all
    gradients) belongs to nobody, and so does a scalar made from such a value; a gradient scaled by
    it still belongs to its parameter."""
    params = owners - {_NOBODY}
    shared = len(params) > 1 and size <= _MAX_SUMMARY_ELEMENTS
    if shared or (_NOBODY in owners and (size == 1 or not params)):
        return frozenset([_NOBODY])
    return params
