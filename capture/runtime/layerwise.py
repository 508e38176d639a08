"""The optimizer of an array of models, cut by the layers that own the parameters, and those
parameters that all models share, which it leaves alone."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from capture.errors import PlanError, Violation, WorkloadError, users_file
from capture.model.workload import WorkloadProtocol
from capture.plan.array import Member, Shared
from capture.quantities import nearest
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer, StageUpdate, TracedOptimizer
from capture.step.interface import owned_and_borrowed
from capture.tracing import TracedModel
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable, sub_jaxprs

#: Of ``optax.inject_hyperparams``, in the path of a leaf of its state: values, and what the
#: schedules keep that some of them come from.
_INJECTED, _SCHEDULED = "hyperparams", "hyperparams_states"
#: The dtype of keys with which every model of an array draws what it would alone.
KEYS = ("key<fry>",)
#: Operations that make zeros of zeros, and of a value the same value.
_FILLS = ("broadcast_in_dim", "reshape")
_COPIES = ("convert_element_type", "copy", "copy_p")


class LayerwiseOptimizer:
    """The optimizer of a model of an array, cut by the layers that own the parameters.

    Args:
        shared: Parameters that all models share.

    Attributes:
        stages: Its parts, by layer.
        hyperparameters: Leaf of the optimizer's state, by the name of the hyperparameter that it
            is.
        scheduled: Names of those that every update computes from a schedule.

    Raises:
        WorkloadError: ``array-shared-updated`` for an optimizer that would update a shared
            parameter, and those of ``traced_optimizer``.
    """

    def __init__(
        self,
        workload: WorkloadProtocol,
        traced: TracedModel,
        shared: frozenset[int] = frozenset(),
    ):
        graph = traced.graph
        owned = [
            [p for p in owned_and_borrowed(graph, n, n + 1)[0] if p not in shared]
            for n in range(graph.num_layers)
        ]
        # What the loss does not read has a gradient of zero, and is updated all the same.
        unread = [p for p in graph.unread_params if p not in shared]
        owned[0] += unread
        update = traced_optimizer(workload.optimizer, traced, unread)
        WorkloadError.check(_updated(update, shared))
        # The shared ones are a part of their own, which never runs.
        self.sliced = SlicedOptimizer(update, [*owned, sorted(shared)] if shared else owned)
        self.stages: tuple[StageUpdate, ...] = self.sliced.stages[: graph.num_layers]
        self.shared, self.workload = shared, workload
        paths = jax.tree_util.tree_leaves_with_path(self.sliced.state_struct)
        self.scheduled = frozenset(name for path, _ in paths if (name := _scheduled_name(path)))
        self.hyperparameters = {
            name: leaf for leaf, (path, _) in enumerate(paths) if (name := _injected_name(path))
        }

    def with_hyperparameters(self, state: object, values: Mapping[str, float]) -> Any:
        """Return an optimizer state with other hyperparameters."""

        def replaced(path: Any, leaf: Any) -> Any:
            value = values.get(_injected_name(path))
            return leaf if value is None else np.full_like(leaf, value)

        return jax.tree_util.tree_map_with_path(replaced, state)


def shared_params(traced: TracedModel, shared: Shared) -> frozenset[int]:
    """Return the parameters of the layer graph that all models of an array share.

    Args:
        shared: Patterns of paths such as ``"base/*"``, where ``*`` is any text, ``/`` too; or a
            predicate on paths.

    Raises:
        PlanError: ``array-shared`` for what names nothing, or everything.
    """
    paths = param_paths(traced)
    if callable(shared):
        found = {path for path in paths if shared(path)}
        wrong = [] if found else [_matches_nothing("the predicate of shared=", paths)]
    else:
        by_pattern = [{path for path in paths if fnmatchcase(path, one)} for one in shared]
        found = set().union(*by_pattern)
        wrong = [
            _matches_nothing(f"shared={pattern!r}", paths)
            for pattern, own in zip(shared, by_pattern, strict=True)
            if not own
        ]
    if found and found == set(paths):
        wrong.append(
            Violation(
                f"shared={'a predicate' if callable(shared) else list(shared)} names all "
                f"{len(found)} parameters, so nothing is left to train; name those that all models "
                "have alike, such as 'base/*'.",
                "array-shared",
            )
        )
    PlanError.check(wrong)
    return frozenset(n for n, path in enumerate(paths) if path in found)


def param_paths(traced: TracedModel) -> list[str]:
    """Return the path of the user's leaf that each parameter of the layer graph is (a part of)."""
    leaves = [path for path, _ in jax.tree.leaves_with_path(traced.params_struct)]
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path in leaves]
    return [path for path, rows in zip(paths, traced.rows, strict=True) for _ in rows]


def _matches_nothing(what: str, paths: Sequence[str]) -> Violation:
    known = list(dict.fromkeys(paths))
    shown = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
    return Violation(
        f"{what} matches no parameter; the {len(known)} paths are {shown}.", "array-shared"
    )


def _updated(update: TracedOptimizer, shared: Collection[int]) -> Iterator[Violation]:
    """Yield a violation for shared parameters that the optimizer would change, keeps state for, or
    whose gradients it reads for others. They would have one value per model."""
    program, (params, _, gradients) = update.update, update.groups
    held = {p for owners in update.params_of_state for p in owners}
    results = [program.outputs[p] for p in range(len(params)) if p not in shared]
    results += update.new_state
    read = {v for e in program.needed(results) for v in e.invars if is_variable(v)}
    wrong = []
    for p in sorted(shared):
        kept = _is_same(program, program.outputs[p], params[p])
        if not kept or p in held or gradients[p] in read or params[p] in read:
            wrong.append(update.param_names[p])
    if wrong:
        named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        yield Violation(
            f"the optimizer updates {len(wrong)} of the shared parameters ({named}), or keeps "
            "state for them, or reads their gradients, and there is one value of each for all "
            "models; keep them from it: optax.multi_transform({'own': optimizer, 'shared': "
            "optax.set_to_zero()}, labels), with 'shared' as the label of these.",
            "array-shared-updated",
        )


def _is_same(program: DataFlow, atom: Any, param: Any) -> bool:
    """Return whether a value is the old one of a parameter, plus zeros."""
    if atom is param:
        return True
    made = program.maker(atom) if is_variable(atom) else None
    if made is None:
        return False
    name, operands = made.primitive.name, made.invars
    if name in _COPIES:
        return atom.aval.dtype == param.aval.dtype and _is_same(program, operands[0], param)
    pairs = (operands, operands[::-1]) if name in ("add", "add_any") else ()
    return any(_is_same(program, a, param) and _is_zero(program, b) for a, b in pairs)


def _is_zero(program: DataFlow, atom: Any) -> bool:
    if not is_variable(atom):
        return not np.any(np.asarray(atom.val))
    made = program.maker(atom)
    return (
        made is not None
        and made.primitive.name in (*_FILLS, *_COPIES)
        and _is_zero(program, made.invars[0])
    )


def _injected_name(path: Sequence[object]) -> str:
    """Return the hyperparameter that a leaf of an optimizer's state is; empty if it is none."""
    injected = len(path) > 1 and getattr(path[-2], "name", None) == _INJECTED
    return _key_of(path[-1]) if injected else ""


def _scheduled_name(path: Sequence[object]) -> str:
    """Return the hyperparameter whose schedule keeps a leaf of an optimizer's state; else empty."""
    names = [getattr(key, "name", None) for key in path]
    at = names.index(_SCHEDULED) + 1 if _SCHEDULED in names else len(path)
    return _key_of(path[at]) if at < len(path) else ""


def _key_of(key: object) -> str:
    """Return the key of a dictionary in a path; empty for other steps."""
    return key.key if isinstance(key, jax.tree_util.DictKey) else ""


def key_violations(jaxpr: object) -> Iterator[Violation]:
    """Yield a violation for random numbers that are others under ``jax.vmap``: its rule for XLA's
    own generator draws with the first key of a batch for all of them."""
    drawn = set(_generators(jaxpr)) - {*KEYS}
    if drawn:
        yield Violation(
            f"the loss draws with {', '.join(sorted(drawn))}, with which models that are one "
            "program do not draw what each draws alone; take keys of threefry, "
            "jax.random.key(seed, impl='threefry2x32'), and leave jax_default_prng_impl alone.",
            "array-key",
        )


def _generators(jaxpr: Any) -> Iterator[str]:
    """Yield the kinds of random keys, and generators that know none."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "rng_bit_generator":
            yield equation.primitive.name
        for value in equation.invars:
            dtype = str(getattr(value.aval, "dtype", ""))
            if dtype.startswith("key<"):
                yield dtype
        for inner in sub_jaxprs(equation.params):
            yield from _generators(inner)


def hyperparameter_violations(
    optimizer: LayerwiseOptimizer, models: Sequence[Member]
) -> Iterator[Violation]:
    """Yield a violation for each hyperparameter that models set and the optimizer does not take."""
    known = optimizer.hyperparameters
    wanted = dict.fromkeys(name for member in models for name in member.hyperparameters)
    for name in wanted:
        if name not in known:
            meant = nearest(name, (*known, "seed"))
            change = "" if meant else f"; {_injecting_line(optimizer.workload, name)}"
            yield Violation(
                f"the models set {name!r}, and the optimizer injects "
                f"{', '.join(sorted(known)) or 'nothing'}{change}.{meant}",
                "array-hyperparameter",
            )
        elif name in optimizer.scheduled:
            yield Violation(
                f"the models set {name!r}, which the optimizer computes from a schedule at every "
                "update, so all would train alike; give the optimizer a number for it.",
                "array-hyperparameter",
            )


def _injecting_line(workload: WorkloadProtocol, name: str) -> str:
    """Return what to write where, so that an optimizer injects a hyperparameter. It is the line
    with a call of optax that takes it, in the file of the loss; without such a line, an example."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(workload.loss_fn)) or ""
        text = Path(source).read_text(encoding="utf-8")
        calls = list(_calls(ast.parse(text), name))
    except (OSError, TypeError, ValueError, SyntaxError):
        calls = []
    if len(calls) != 1:
        return f"make it with optax.inject_hyperparams(optax.adam)({name}=...)"
    [call] = calls
    made = ast.get_source_segment(text, call) or ""
    factory = ast.get_source_segment(text, call.func) or ""
    injected = f"optax.inject_hyperparams({factory}){made.removeprefix(factory)}"
    where = users_file(source) or Path(source).name
    return f"write {' '.join(injected.split())} in line {call.lineno} of {where}"


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield calls such as ``optax.adam(...)`` whose function has a parameter of the name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="optax"), attr=attribute)):
                if name in _parameters(getattr(optax, attribute, None)):
                    yield node


def _parameters(factory: object) -> Iterator[str]:
    yield from inspect.signature(factory).parameters if callable(factory) else ()
