"""Which workloads this user has named on a command line of this machine.

A workload is code, and plans, profiles and questions name workloads. A file may name one that its
reader has named before, and no other (``WorkloadSpec.admitted``). What was named is remembered in
one file of the user's own cache folder, a line of JSON per function: no plan, profile or store is
ever read into it, so that none of them can vouch for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from capture import environment


def remember(location: str, function: str) -> None:
    """Remember that the user has named a function, unless its module is not found.

    A cache folder that cannot be written remembers nothing: files that name the function are
    refused, as they were.

    Args:
        location: A path that ends in ``.py``, seen from the working directory, or a module.
        function: Its name.
    """
    if (identity := _identity(location)) is None or is_remembered(location, function):
        return
    path = environment.named_workloads_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a short line at the end: commands that end together do not mix theirs.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, (json.dumps([*identity, function]) + "\n").encode())
        finally:
            os.close(file)


def is_remembered(location: str, function: str) -> bool:
    """Return whether the user has named the function of this very file, wherever it is seen
    from."""
    identity = _identity(location)
    return identity is not None and [*identity, function] in _lines()


def _lines() -> Iterator[object]:
    try:
        lines = environment.named_workloads_path().read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _identity(location: str) -> tuple[str, str] | None:
    """Return the module name (empty for a file) and the file; None for a module without one.

    A module counts by its file too: in another working directory another one may have its name.
    """
    try:
        if location.endswith(".py"):
            return "", os.path.realpath(location)
        file = _file_of(location)
        return None if file is None else (location, os.path.abspath(file))
    except ValueError:  # a NUL is in no name of a file
        return None


def _file_of(name: str) -> str | None:
    """Return the file of a module, found without importing it or a package that it is in."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    folders: Sequence[str] | None = None
    file = None
    parts = name.split(".")
    for depth, part in enumerate(parts):
        spec = _found(".".join(parts[: depth + 1]), folders)
        if spec is not None and spec.has_location:
            file, folders = spec.origin, spec.submodule_search_locations or []
            continue
        # A folder without __init__.py, or nothing; what is built in has no file, and no folders.
        paths = [Path(folder) / part for folder in (sys.path if folders is None else folders)]
        file, folders = None, [str(path) for path in paths if path.is_dir()]
    return file


def _found(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        with contextlib.suppress(KeyError):  # folders without __init__.py look for their parents
            if (find := getattr(finder, "find_spec", None)) and (spec := find(name, folders)):
                return spec
    return None
