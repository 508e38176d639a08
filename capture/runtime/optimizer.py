"""Any optax transformation, cut by stage: the update of the whole model is traced once and sliced
by what it reads.

Slicing the traced update, instead of calling the transformation once per stage, keeps its meaning:
masks and labels by parameter path still see the whole tree, and values that need every gradient (a
global norm) are found by data flow. Such values travel between stages as small summaries; an update
that would need a large tensor of another stage is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from capture.errors import WorkloadError
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable

#: Larger values do not travel between stages at the end of a step.
_MAX_SUMMARY_ELEMENTS = 256
_NOBODY = -1  # owner of what is shared by all


@dataclass(frozen=True)
class StageUpdate:
    """The slice of the optimizer that updates the parameters of one stage.

    Attributes:
        params: Parameters it updates, indices into the layer graph.
        state: Leaves of the whole optimizer state that the stage holds; leaves of no parameter (a
            step count) are in every stage.
        summary: Avals of the small values that updates of other stages need from this stage's
            gradients.
    """

    optimizer: SlicedOptimizer
    stage_id: int
    params: tuple[int, ...]
    state: tuple[int, ...]
    summary: tuple[Any, ...]

    @property
    def siblings(self) -> tuple[StageUpdate, ...]:
        """The updates of all stages, in stage order."""
        return self.optimizer.stages

    @property
    def state_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of all leaves of the whole optimizer state."""
        return self.optimizer.state_structs

    @property
    def param_of_state(self) -> dict[int, int]:
        """The parameter of each state leaf that belongs to a single one."""
        return self.optimizer.param_of_state

    def init(self, params: Sequence[Any]) -> list[Any]:
        """Return the stage's leaves of the initial optimizer state; traceable."""
        return self.optimizer._init(self, params)

    def summarize(
        self, params: Sequence[Any], state: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        """Return the stage's summary values; traceable."""
        return self.optimizer._summarize(self, params, state, grads)

    def update(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        grads: Sequence[Any],
        summaries: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[Any]]:
        """Return new parameters and new state of the stage; traceable.

        Args:
            params, state, grads: Those that this stage owns.
            summaries: Those of all other stages, in stage order.
        """
        return self.optimizer._update(self, params, state, grads, summaries)


class TracedOptimizer:
    """The traced ``init`` and ``update`` of a transformation over the whole model.

    Args:
        optimizer: An optax transformation.
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
        for params, state in zip(self.params_of_state, self._new_state, strict=True):
            for p in params:
                outputs[p].append(state)
        return [self.update.key_of(*each) for each in outputs]

    @cached_property
    def shared_key(self) -> str:
        """A hash of the update of the state that belongs to no parameter, which every stage has."""
        owned = zip(self.params_of_state, self._new_state, strict=True)
        return self.update.key_of(*(state for params, state in owned if not params))

    @property
    def _new_state(self) -> Sequence[Any]:
        return self.update.outputs[len(self.params) :]

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
        variables, n, num_state = program.inputs, len(self.params), len(self.state)
        of_params = {
            v: frozenset([p])
            for own in (variables[:n], variables[n + num_state :])
            for p, v in enumerate(own)
        }
        return of_params | dict(zip(variables[n : n + num_state], params_of_state, strict=True))


class SlicedOptimizer:
    """Slices of a traced optimizer for given stages.

    Args:
        traced: The update of the whole model.
        stages: Per stage, the indices of the parameters it updates; together they are all
            parameters.

    Raises:
        WorkloadError: ``optimizer-cross-stage`` if the update of one stage needs a large tensor of
            another.
    """

    def __init__(self, traced: TracedOptimizer, stages: Sequence[Sequence[int]]):
        self._num_params = len(traced.params)
        self._state_leaves, self._state_tree = traced.state, traced.state_tree
        self._update_program, self._init_program, self._param_names = (
            traced.update,
            traced.init,
            traced.param_names,
        )
        self._stage_of_param = {p: s for s, params in enumerate(stages) for p in params}
        assert len(self._stage_of_param) == self._num_params, (
            "every parameter belongs to exactly one stage"
        )
        self._num_stages = len(stages)
        self._state_params = traced.params_of_state
        self._stages_of = {
            v: frozenset(self._stage_of_param[p] for p in params)
            for v, params in traced.params_of_value.items()
        }
        self.stages = tuple(self._stage(s, tuple(params)) for s, params in enumerate(stages))

    @property
    def num_state_leaves(self) -> int:
        return len(self._state_leaves)

    @property
    def state_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of all leaves of the optimizer state, in ``jax.tree`` order."""
        return self._state_leaves

    @property
    def key(self) -> str:
        """A hash that is equal for equal updates of equal parameters."""
        return self._update_program.key

    @property
    def state_struct(self) -> Any:
        """The shapes of the optimizer state, as optax would hold it."""
        return self.unflatten_state(self._state_leaves)

    def unflatten_state(self, leaves: Sequence[Any]) -> Any:
        """Return the optimizer state as optax would hold it."""
        return jax.tree.unflatten(self._state_tree, leaves)

    @cached_property
    def param_of_state(self) -> dict[int, int]:
        """The parameter of each state leaf that belongs to a single one."""
        return {
            k: next(iter(params)) for k, params in enumerate(self._state_params) if len(params) == 1
        }

    def _stage(self, stage_id: int, params: tuple[int, ...]) -> StageUpdate:
        state = []
        for k, owners in enumerate(self._state_params):
            stages = {self._stage_of_param[p] for p in owners}
            if len(stages) > 1:
                self._refuse(self._state_leaves[k].shape, owners)
            if not stages or stages == {stage_id}:
                state.append(k)
        summary = tuple(
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._exports(stage_id)
        )
        return StageUpdate(self, stage_id, params, tuple(state), summary)

    def _exports(self, stage_id: int) -> list[Any]:
        """Return the values of one stage that the updates of others need, in program order."""
        return [v for v in self._exchanged if self._stages_of[v] == {stage_id}]

    @cached_property
    def _exchanged(self) -> list[Any]:
        """The values that depend on a single stage and that the update of another stage needs."""
        found: dict[Any, None] = {}
        # Also of stages without parameters, which hold the leaves that are of no parameter.
        for stage_id in range(self._num_stages):
            foreign = {
                v
                for v, stages in self._stages_of.items()
                if len(stages) == 1 and stage_id not in stages
            }
            wanted = self._wanted(stage_id)
            needed = self._update_program.needed(wanted, foreign)
            read = [*wanted, *(v for equation in needed for v in equation.invars)]
            found |= {v: None for v in read if is_variable(v) and v in foreign}
        for v in found:
            if math.prod(v.aval.shape) > _MAX_SUMMARY_ELEMENTS:
                stage = next(iter(self._stages_of[v]))
                self._refuse(
                    v.aval.shape, [p for p, s in self._stage_of_param.items() if s == stage]
                )
        return sorted(found, key=self._update_program.order)

    def _wanted(self, stage_id: int) -> list[Any]:
        outputs, n = self._update_program.outputs, self._num_params
        params = [outputs[p] for p, s in self._stage_of_param.items() if s == stage_id]
        state = [
            outputs[n + k]
            for k, owners in enumerate(self._state_params)
            if all(self._stage_of_param[p] == stage_id for p in owners)
        ]
        return params + state

    def _refuse(self, shape: tuple[int, ...], params: Any) -> None:
        names = ", ".join(self._param_names[p] for p in sorted(params)[:3])
        raise WorkloadError.of(
            f"the optimizer needs a tensor of shape {shape} made from gradients of several "
            f"pipeline stages (of {names}, ...); only values "
            f"of up to {_MAX_SUMMARY_ELEMENTS} elements, such as a global norm, travel between "
            "stages. Use a transformation that treats "
            "parameters separately, or a single stage.",
            "optimizer-cross-stage",
        )

    def _inputs(self, stage: StageUpdate, params, state, grads) -> dict[Any, Any]:
        variables, n = self._update_program.inputs, self._num_params
        env = {variables[p]: value for p, value in zip(stage.params, params, strict=True)}
        env |= {variables[n + k]: value for k, value in zip(stage.state, state, strict=True)}
        env |= {
            variables[n + self.num_state_leaves + p]: value
            for p, value in zip(stage.params, grads, strict=True)
        }
        return env

    def _init(self, stage: StageUpdate, params: Sequence[Any]) -> list[Any]:
        env = {
            self._init_program.inputs[p]: value
            for p, value in zip(stage.params, params, strict=True)
        }
        return self._init_program.evaluate(
            env, [self._init_program.outputs[k] for k in stage.state]
        )

    def _summarize(self, stage: StageUpdate, params, state, grads) -> list[Any]:
        return self._update_program.evaluate(
            self._inputs(stage, params, state, grads), self._exports(stage.stage_id)
        )

    def _update(
        self, stage: StageUpdate, params, state, grads, summaries
    ) -> tuple[list[Any], list[Any]]:
        env = self._inputs(stage, params, state, grads)
        others = [s for s in range(len(self.stages)) if s != stage.stage_id]
        if summaries:
            for s, values in zip(others, summaries, strict=True):
                env |= dict(zip(self._exports(s), values, strict=True))
        n = self._num_params
        wanted = [self._update_program.outputs[p] for p in stage.params]
        wanted += [self._update_program.outputs[n + k] for k in stage.state]
        results = self._update_program.evaluate(env, wanted)
        return results[: len(stage.params)], results[len(stage.params) :]


def owner_of_result(owners: frozenset[int], size: int) -> frozenset[int]:
    """Return the owners of a result. A small value made from several owners (a norm over all
    gradients) belongs to nobody, and so does a scalar made from such a value; a gradient scaled by
    it still belongs to its parameter."""
    params = owners - {_NOBODY}
    shared = len(params) > 1 and size <= _MAX_SUMMARY_ELEMENTS
    if shared or (_NOBODY in owners and (size == 1 or not params)):
        return frozenset([_NOBODY])
    return params
