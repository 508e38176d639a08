"""Where in the user's model an operation comes from: kept when it is bound again, so that
compilers, profilers and errors name it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

import capture
from capture.errors import users_file

_LAYER = re.compile(r"layer\[(\d+)\]")
_TRANSFORMATION = re.compile(
    r"(jit|pjit|jvp|transpose|vmap|remat\d*|checkpoint|rematted_computation)\b"
)
_PACKAGE = str(Path(capture.__file__).parent)


def layer_scope(layer: int) -> AbstractContextManager[Any]:
    """Return the name scope of a layer's operations; ``layer_of_scope`` reads it."""
    return jax.named_scope(f"layer[{layer}]")


def at_source(traceback: Any, scope: Any) -> AbstractContextManager[Any]:
    """Return a context in which operations are bound with the line of a traceback and its name
    scopes, beneath the current ones.

    Args:
        traceback: ``equation.source_info.traceback``.
        scope: ``equation.source_info.name_stack``, or a name.
    """
    inner = source_info_util.new_name_stack(scope) if isinstance(scope, str) else scope
    return source_info_util.user_context(
        traceback, name_stack=source_info_util.current_name_stack() + inner
    )


def layer_of_scope(op_name: str) -> int | None:
    """Return the layer in whose scope an operation stands, or None.

    Example:
        >>> layer_of_scope("jit(_backward)/transpose(jvp(layer[3]))/dot_general")
        3
    """
    found = _LAYER.search(op_name)
    return int(found[1]) if found else None


def goes_backwards(op_name: str) -> bool:
    """Tell whether an operation computes gradients.

    Example:
        >>> goes_backwards("jit(_backward)/transpose(jvp(layer[3]))/dot_general")
        True
    """
    return "transpose(" in op_name


def operation_name(op_name: str) -> str:
    """Return the scopes and name of an operation without those that JAX and this package add.

    Example:
        >>> operation_name("jit(_backward)/transpose(jvp(layer[3]))/Gpt/head/dot_general")
        'Gpt/head/dot_general'
    """
    own = [
        part
        for part in op_name.split("/")
        if not _TRANSFORMATION.match(part) and not _LAYER.fullmatch(part)
    ]
    return "/".join(own) or op_name


def model_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return ``file:line`` of the innermost frame that is of no library; empty if this package
    calls the libraries itself.

    Args:
        frames: (file, line), innermost first.
    """
    for file, line in frames:
        if file.startswith(_PACKAGE):
            return ""
        if name := users_file(file):
            return f"{name}:{line}"
    return ""


def line_of(traceback: Any) -> str:
    """Return the ``model_line`` of a traceback of JAX; empty if it has none."""
    return (
        ""
        if traceback is None
        else model_line((frame.file_name, frame.line_num) for frame in traceback.frames)
    )


def traceback_of(equation: JaxprEqn, caller: object) -> Any:
    """Return the traceback of an equation; for a body that JAX keeps traced, and no line of the
    model calls, that of the call around it, ``caller``."""
    own = equation.source_info.traceback
    return own if caller is None or line_of(own) else caller
