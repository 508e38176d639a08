"""Find where a user's file makes an optimizer, to say which line to change."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optax

from capture.errors import users_file
from capture.model.workload import WorkloadProtocol


def injecting_line(workload: WorkloadProtocol, name: str) -> str:
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


def _parameters(factory: Any) -> Iterator[str]:
    yield from inspect.signature(factory).parameters if callable(factory) else ()
