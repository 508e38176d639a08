"""Save a training and continue it, under the same plan or another plan of the same model.

A checkpoint holds the whole model's parameters and optimizer state, as no plan splits them, so
stage cuts, degrees, schedule and ``shard_optimizer`` may all differ when it is read. Its marker is
renamed into place when all else is written: a save that is interrupted leaves the checkpoints
before it as they were.

That of an array holds all its models, each as it would be alone, and once what they share: any of
them may go on in an array of another partition, or by itself.

``capture.runtime.hosts.saving`` says what is in its folder. Several processes write stage by stage,
each where its arrays are. Whoever wrote it, a checkpoint is read by any plan of the model in any
number of processes. One that was not written to its end, or has been damaged since, is passed over
for the one before it.

Paths of an array begin with the number of the model (``capture.runtime.checkpoint_models``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from capture.errors import CaptureError, ExecutionError, Violation
from capture.model.workload import WorkloadProtocol
from capture.runtime.checkpoint_models import (
    CHECKPOINT,
    PARTS,
    Models,
    Sources,
    State,
    Trained,
    described,
    filled,
)
from capture.runtime.hosts.reading import Leaves, joined_leaves, own_leaves, read_marker
from capture.runtime.hosts.saved import all_steps, candidates, complete_steps, latest
from capture.runtime.hosts.saving import Saver
from capture.runtime.pipeline import PipelinedStep

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts


def save(step: Trained, state: State, directory: Path | str, *, keep: int = 2) -> Path:
    """Write a checkpoint and wait until it is complete.

    Several processes save together, each what it has (``capture.runtime.hosts.saving.Saver`` does
    so while the training goes on).

    Args:
        step: Whose state it is; of an array its training.
        state: Not consumed. The batch by which that of an array is ahead is not stored.
        directory: Where the training's checkpoints are; made if it does not exist.
        keep: Complete checkpoints to leave there, this one included; older ones are removed after
            it is complete. At least 1.

    Returns:
        The directory of this checkpoint.

    Raises:
        ExecutionError: ``checkpoint-exists`` if the directory holds one of the same or a later
            step, ``checkpoint-write``.
    """
    saver = Saver(step, Path(directory), keep)
    path = saver.save(state)
    saver.finish()
    return path


def restore(
    step: Trained,
    directory: Path | str,
    num_steps: int | None = None,
    *,
    models: Sequence[int] | None = None,
    report: Callable[[str], None] = warnings.warn,
) -> Any:
    """Read a checkpoint into a step of any plan of the same model.

    Args:
        step: To go on with; of an array its training.
        directory: That ``save`` was given; of several processes, each reads what it needs.
        num_steps: Which checkpoint; by default the latest that is complete and undamaged.
        models: Of a checkpoint of an array, the models that go on: as many as the array of ``step``
            has, or one. None for all of them.
        report: Takes a line for each that is passed over.

    Returns:
        The state of the step.

    Raises:
        ExecutionError: ``checkpoint-missing`` if there is none, ``checkpoint-damaged`` if none can
            be read, ``checkpoint-not-shared`` if the processes see different ones,
            ``checkpoint-schema`` for an
            unknown version, ``checkpoint-models`` for models that it has not, or more or less
            than the step has, ``checkpoint-other-model`` or ``checkpoint-other-optimizer`` naming
            every leaf that differs from the model's.
    """
    directory, together = Path(directory), shared(step)
    hosts = None if together is None else together.hosts
    steps = _candidates(directory, num_steps, hosts)
    for number in reversed(all_steps(directory)):
        if num_steps is None and number > steps[0]:
            report(
                f"the checkpoint of step {number} in {str(directory)!r} was not written to its "
                f"end; going on from that of step {steps[0]}"
            )
    for chosen, before in zip(steps, [*steps[1:], None], strict=True):
        made, wrong = _read(step, directory / str(chosen), models)
        wrongs = [wrong] if hosts is None else hosts.exchange("damage", wrong)
        if not any(wrongs):
            assert made is not None
            return made()
        said = next(filter(None, wrongs))
        if before is None:
            raise ExecutionError.of(
                f"the checkpoint of step {chosen} in {str(directory)!r} is damaged: {said}; there "
                "is none before it to go on from.",
                "checkpoint-damaged",
            )
        report(
            f"the checkpoint of step {chosen} in {str(directory)!r} is damaged: {said}; going on "
            f"from that of step {before}"
        )
    raise AssertionError("there is at least one candidate")


def check_restorable(
    directory: Path,
    workloads: Sequence[WorkloadProtocol],
    hosts: Hosts | None = None,
    *,
    of_array: bool = False,
) -> None:
    """Refuse a folder that a training cannot go on from, before its step is traced.

    Args:
        workloads: Of each model, of which only the shapes are found.
        of_array: Whether it trains an array, whose optimizer states are compared by ``restore``
            alone.

    Raises:
        ExecutionError: ``checkpoint-missing``, ``checkpoint-not-shared``, ``checkpoint-schema``,
            ``checkpoint-models``, ``checkpoint-other-model``, ``checkpoint-other-optimizer``.
    """
    _candidates(directory, None, hosts)
    if (found := latest(directory)) is None:
        return  # ``restore`` says what is damaged
    step, metadata = found
    replace(CHECKPOINT, name=f"checkpoint {str(directory / str(step))!r}").check(metadata)
    trees = [jax.eval_shape(each.init, jax.random.key(0)) for each in workloads]
    params = [
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        for tree in trees
    ]
    states = params
    if not of_array:
        pairs = zip(workloads, params, strict=True)
        states = [jax.eval_shape(each.optimizer.init, structs) for each, structs in pairs]
    sources, known = Sources((params, states), metadata), 1 if of_array else 2
    _check_alike(sources.expected[:known], sources.saved[:known])


def _candidates(directory: Path, num_steps: int | None, hosts: Hosts | None) -> list[int]:
    """Return the steps of complete checkpoints that may be read, the best first."""
    if hosts is not None:
        hosts.check_alike(f"checkpoints in {str(directory)!r}", complete_steps(directory))
    return candidates(directory, num_steps)


def _read(
    step: Trained, path: Path, models: Sequence[int] | None
) -> tuple[Callable[[], Any] | None, str]:
    """Return a function that makes a checkpoint's state, or why that cannot be read."""
    try:
        marker, together = read_marker(path), shared(step)
        sources, own = _checked(step, marker, models, path), None
        if together is not None and "num_models" not in marker:
            own = own_leaves(together, path, marker)
        if together is not None and own is not None:
            return partial(together.state_from, *own, marker["num_steps"]), ""
        return _whole(step, joined_leaves(path, marker), sources, marker), ""
    except CaptureError:
        raise
    except Exception as error:  # whatever Orbax and JSON make of it
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _whole(
    step: Trained, read: Leaves, sources: Sources, metadata: Mapping[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes a state from all leaves of a checkpoint."""
    trained = Models(step)
    params, optimizer = (
        [
            filled(struct, {path: read[part].get(source) for path, source in own.items()})
            for struct, own in zip(structs, by_model, strict=True)
        ]
        for structs, part, by_model in zip(trained.structs, PARTS, sources.paths, strict=True)
    )
    return partial(trained.restored, params, optimizer, metadata["num_steps"])


def shared(step: Trained) -> PipelinedStep | None:
    """Return a step that several processes share; None for one of a single process."""
    return step if isinstance(step, PipelinedStep) and step.hosts is not None else None


def _checked(
    step: Trained, metadata: Mapping[str, object], models: Sequence[int] | None, path: Path
) -> Sources:
    """Return where the step's leaves are in a checkpoint, once that is known to have them all."""
    replace(CHECKPOINT, name=f"checkpoint {str(path)!r}").check(metadata)
    trained = Models(step)
    sources = Sources(trained.structs, metadata, models, trained.shared)
    _check_alike(sources.expected, sources.saved)
    return sources


def _check_alike(
    expected: Sequence[Mapping[str, object]], saved: Sequence[Mapping[str, object]]
) -> None:
    """Refuse parameters and optimizer state of other shapes."""
    names = (
        ("the model", "checkpoint-other-model"),
        ("the model's optimizer state", "checkpoint-other-optimizer"),
    )
    ExecutionError.check(
        violation
        for (what, code), wanted, there in zip(names, expected, saved, strict=False)
        for violation in _differences(what, described(wanted), there, code)
    )


def _differences(
    what: str, expected: Mapping[str, Any], saved: Mapping[str, Any], code: str
) -> Iterator[Violation]:
    for path in sorted({*expected, *saved}):
        if expected.get(path) != saved.get(path):
            yield Violation(
                f"the checkpoint has {_text(path, saved)} and {what} {_text(path, expected)}.", code
            )


def _text(path: str, described: Mapping[str, Sequence[Any]]) -> str:
    if path not in described:
        return f"no {path}"
    shape, dtype = described[path]
    return f"{path} {dtype}{list(shape)}"
