"""Where the checkpoints of a training are, and which of them are complete. Loads no JAX."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capture.errors import CaptureError, ExecutionError

#: The file of a checkpoint that is renamed into place last.
MARKER = "checkpoint.json"


def complete_steps(directory: Path | str) -> list[int]:
    """Return the steps of complete checkpoints, in order."""
    return [step for step in all_steps(directory) if is_complete(Path(directory) / str(step))]


def all_steps(directory: Path | str) -> list[int]:
    """Return the steps of all checkpoints, complete or not, in order."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete. A single process of an earlier version has written
    metadata in the place of the marker, and renamed the whole."""
    return (checkpoint / MARKER).is_file() or (checkpoint / "metadata").is_dir()


def metadata_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return what a complete checkpoint says that it holds, or None if that cannot be read."""
    marker = checkpoint / MARKER
    file = marker if marker.is_file() else checkpoint / "metadata" / "metadata"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def latest(directory: Path | str) -> tuple[int, dict[str, Any]] | None:
    """Return step and metadata of the last complete checkpoint whose metadata can be read."""
    for step in reversed(complete_steps(directory)):
        if (metadata := metadata_of(Path(directory) / str(step))) is not None:
            return step, metadata
    return None


def candidates(directory: Path, num_steps: int | None = None) -> list[int]:
    """Return the steps of complete checkpoints that may be read, the last first.

    Args:
        num_steps: The one that is wanted; None for any.

    Raises:
        ExecutionError: ``checkpoint-missing``.
    """
    if not directory.is_dir():
        raise ExecutionError.of(
            f"checkpoint directory {str(directory)!r} does not exist.", "checkpoint-missing"
        )
    found = complete_steps(directory)
    if num_steps is None and found:
        return found[::-1]
    if num_steps in found:
        return [num_steps]
    wanted = "no complete checkpoint" if num_steps is None else f"no checkpoint of step {num_steps}"
    there = ", ".join(map(str, found)) or "none"
    raise ExecutionError.of(
        f"{str(directory)!r} holds {wanted}; complete ones: {there}.", "checkpoint-missing"
    )


def check_folders(
    save: Path | None,
    restore: Path | None,
    num_steps: int,
    *,
    often: bool = False,
    until: int | None = None,
    num_models: int = 1,
) -> None:
    """Refuse folders that a training cannot save in or go on from, before anything is compiled.

    Args:
        save: Where it saves its state; None for nowhere.
        restore: Where it goes on from; None from its beginning.
        often: Whether it saves before its end, too.
        until: The step after which it ends, instead of after ``num_steps`` more.

    Raises:
        ExecutionError: ``checkpoint-missing``, ``checkpoint-exists``, ``checkpoint-models``.
    """
    begin = 0
    if restore is not None:
        candidates(restore)
        if (found := latest(restore)) is not None:
            begin, metadata = found
            check_models(metadata.get("num_models"), num_models)
    if save is None or (restore is not None and restore.resolve() == save.resolve()):
        return
    there, end = complete_steps(save), begin + num_steps if until is None else until
    if there and (often or there[-1] >= end):
        raise ExecutionError.of(
            f"{str(save)!r} holds checkpoints of another training, of steps "
            f"{', '.join(map(str, there))}; give an empty directory, or go on with that "
            "training by --restore.",
            "checkpoint-exists",
        )


def exists(directory: Path, latest: int, num_steps: int) -> CaptureError:
    """Return the refusal to write a checkpoint before one that is there."""
    return ExecutionError.of(
        f"{str(directory)!r} holds a checkpoint of step {latest}, and this state is at step "
        f"{num_steps}; save it into another directory, or restore from this one first.",
        "checkpoint-exists",
    )


def check_models(
    count: int | None, wanted: int, models: Sequence[int] | None = None
) -> Sequence[int] | None:
    """Return which models of a checkpoint go on; None for one that is of a single model.

    Args:
        count: Of the checkpoint's array; None for a single model.
        models: Those that are asked for; None for all.

    Raises:
        ExecutionError: ``checkpoint-models`` if they are not as many as the training has.
    """
    if count is None and models is None and wanted == 1:
        return None
    there = count or 0
    chosen = range(there) if models is None else models
    if len(chosen) == wanted and all(0 <= model < there for model in chosen):
        return chosen
    asked = "all of them" if models is None else f"models={list(models)}"
    if count is None and wanted > 1:
        raise ExecutionError.of(
            f"the checkpoint is of one model, and the training is of {wanted}: each would get the "
            "same parameters and hyperparameters. Restore a checkpoint of an array, or begin "
            "without one; in Python, init_from takes parameters for each model.",
            "checkpoint-models",
        )
    raise ExecutionError.of(
        f"the checkpoint is of one model, which has no number; leave {asked} out."
        if count is None
        else f"the checkpoint is of an array of {there} models, and {asked} cannot go on in a "
        f"training of {wanted}; name {wanted} of models 0 to {there - 1} with models=[...].",
        "checkpoint-models",
    )


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its marker first: half of it is never taken for a whole."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint / "metadata", ignore_errors=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def set_aside(directory: Path, step: int) -> None:
    """Rename the checkpoints after a step from which a training goes on again: they could not be
    read, and that training writes others in their place."""
    for later in all_steps(directory):
        if later > step:
            name = f"{later}.unreadable"
            shutil.rmtree(directory / name, ignore_errors=True)
            (directory / str(later)).rename(directory / name)
