"""Where the checkpoints of a training are, and which of them are complete. Loads no JAX."""

from __future__ import annotations

import shutil
from pathlib import Path

#: Of a checkpoint that processes have written together; it is renamed into place last.
MARKER = "checkpoint.json"


def complete_steps(directory: Path | str) -> list[int]:
    """The steps of complete checkpoints, in order."""
    return [step for step in all_steps(directory) if is_complete(Path(directory) / str(step))]


def all_steps(directory: Path | str) -> list[int]:
    """Those of checkpoints that are complete or not."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def is_complete(checkpoint: Path) -> bool:
    """Whether it was written to its end: Orbax renames the whole of what one process writes."""
    return (checkpoint / MARKER).is_file() or (checkpoint / "metadata").is_dir()


def remove(checkpoint: Path) -> None:
    """Half of it is never taken for a whole."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint / "metadata", ignore_errors=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def set_aside(directory: Path, step: int) -> None:
    """Checkpoints after a step from which a training goes on again: they could not be read, and
    that training writes others in their place."""
    for later in all_steps(directory):
        if later > step:
            name = f"{later}.unreadable"
            shutil.rmtree(directory / name, ignore_errors=True)
            (directory / str(later)).rename(directory / name)
