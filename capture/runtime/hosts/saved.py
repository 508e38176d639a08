"""Where the checkpoints of a training are, and which of them are complete. Loads no JAX."""

from __future__ import annotations

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
