"""Save a training and continue it, under the same plan or another plan of the same model.

A checkpoint holds the whole model's parameters and optimizer state, as no plan splits them, so
stage cuts, degrees, schedule and ``shard_optimizer`` may all differ when it is read. Orbax writes
to a temporary directory and renames it when it is complete: a save that is interrupted leaves the
checkpoints before it as they were.

That of an array holds all its models, each as it would be alone, and once what they share: any of
them may go on in an array of another partition, or by itself.

    directory/<num_steps>/state        params: by path in the parameters; optimizer: by path in the
                                       optax state
    directory/<num_steps>/metadata     JSON: schema version, number of steps, shapes and dtypes by
                                       path; of an array num_models

Paths of an array begin with the number of the model (``capture.runtime.checkpoint_models``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from capture import documents
from capture.errors import ExecutionError, Violation
from capture.runtime.array_state import ArrayState
from capture.runtime.checkpoint_models import (
    PARTS,
    Sources,
    State,
    Trained,
    stored_leaves,
    structs_of,
)
from capture.runtime.multiplexed import ArrayTraining
from capture.runtime.pipeline import PipelinedStep

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts

CHECKPOINT = documents.Format(
    "checkpoint", ExecutionError, "checkpoint", "save it again with this version"
)

_KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def save(step: Trained, state: State, directory: Path | str, *, keep: int = 2) -> Path:
    """Write a checkpoint and wait until it is complete.

    Several processes save together: host 0 writes what it gathers.

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
            step.
    """
    params, optimizer = stored_leaves(step, state)
    metadata = {
        "schema_version": CHECKPOINT.versions[-1],
        "num_steps": state.num_steps,
        "params": _described(params),
        "optimizer": _described(optimizer),
    }
    if isinstance(state, ArrayState):
        metadata["num_models"] = len(state.plan.models)
    stored = {"params": _stored(params), "optimizer": _stored(optimizer)}
    directory, hosts = Path(directory), _hosts_of(step)
    if hosts is None:
        _write(directory, keep, metadata, stored)
    else:
        hosts.first_does("checkpoint", lambda: _write(directory, keep, metadata, stored))
    return directory / str(state.num_steps)


def restore(
    step: Trained,
    directory: Path | str,
    num_steps: int | None = None,
    *,
    models: Sequence[int] | None = None,
) -> Any:
    """Read a checkpoint into a step of any plan of the same model.

    Args:
        step: To go on with; of an array its training.
        directory: That ``save`` was given; of several processes, each reads it.
        num_steps: Which checkpoint; by default the latest.
        models: Of a checkpoint of an array, the models that go on: as many as the array of ``step``
            has, or one. None for all of them.

    Returns:
        The state of the step.

    Raises:
        ExecutionError: ``checkpoint-missing`` if there is none, ``checkpoint-schema`` for an
            unknown version, ``checkpoint-models`` for models that it has not, or more or less
            than the step has, ``checkpoint-other-model`` or ``checkpoint-other-optimizer`` naming
            every leaf that differs from the model's.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ExecutionError.of(
            f"checkpoint directory {str(directory)!r} does not exist.", "checkpoint-missing"
        )
    with _manager(directory, None) as manager:
        chosen = manager.latest_step() if num_steps is None else num_steps
        if chosen not in manager.all_steps():
            wanted = (
                "no complete checkpoint"
                if num_steps is None
                else f"no checkpoint of step {num_steps}"
            )
            found = ", ".join(map(str, sorted(manager.all_steps()))) or "none"
            raise ExecutionError.of(
                f"{str(directory)!r} holds {wanted}; complete ones: {found}.", "checkpoint-missing"
            )
        metadata = manager.restore(
            chosen, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())
        )["metadata"]
        replace(CHECKPOINT, name=f"checkpoint {str(directory / str(chosen))!r}").check(metadata)
        if (hosts := _hosts_of(step)) is not None:
            hosts.compare({"checkpoint": chosen})
        sources = Sources(step, metadata, models)
        _check(sources)
        # Orbax reads the whole or nothing.
        leaves = {
            part: _stored(_structs(metadata[part]) | expected)
            for part, expected in zip(PARTS, sources.expected, strict=True)
        }
        read = manager.restore(
            chosen, args=ocp.args.Composite(state=ocp.args.StandardRestore(leaves))
        )["state"]
    params, optimizer = (
        [
            _filled(struct, {path: read[part].get(source) for path, source in own.items()})
            for own in by_model
        ]
        for struct, part, by_model in zip(structs_of(step), PARTS, sources.paths, strict=True)
    )
    if isinstance(step, ArrayTraining):
        return step.restore(params, optimizer, metadata["num_steps"])
    return step.restore(params[0], optimizer[0], metadata["num_steps"])


def _write(
    directory: Path, keep: int, metadata: Mapping[str, Any], stored: Mapping[str, Any]
) -> None:
    """What stands in the two parts of a checkpoint.

    Raises:
        ExecutionError: ``checkpoint-exists``.
    """
    num_steps = metadata["num_steps"]
    with _manager(directory, keep) as manager:
        latest = manager.latest_step()
        if latest is not None and latest >= num_steps:
            raise ExecutionError.of(
                f"{str(directory)!r} holds a checkpoint of step {latest}, and this state is at "
                f"step {num_steps}; save it into "
                "another directory, or restore from this one first.",
                "checkpoint-exists",
            )
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(stored), metadata=ocp.args.JsonSave(metadata)
        )
        manager.save(num_steps, args=parts)
        manager.wait_until_finished()


def _manager(directory: Path, keep: int | None) -> ocp.CheckpointManager:
    """To write, keeping so many; None to read only."""
    if keep is not None:
        directory.mkdir(parents=True, exist_ok=True)
    # Orbax would wait for all processes; this one reads or writes alone.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"host{jax.process_index()}",
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=False,
        multiprocessing_options=alone,
    )
    return ocp.CheckpointManager(
        directory.resolve(), options=options, item_names=("state", "metadata")
    )


def _hosts_of(step: Trained) -> Hosts | None:
    """The processes that share it."""
    return step.hosts if isinstance(step, PipelinedStep) else None


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _described(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()}


def _stored(leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """As Orbax stores them: typed random keys as their data, and nothing for arrays without
    elements, which it refuses.

    Of structures instead of arrays, empty arrays to be read into.
    """

    def stored(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            struct = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
            return np.empty(struct.shape, struct.dtype)
        return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)

    return {path: stored(leaf) for path, leaf in leaves.items() if math.prod(leaf.shape)}


def _filled(struct: Any, read: Mapping[str, np.ndarray]) -> Any:
    """The arrays that were read, in the tree and with the keys of ``struct``."""

    def filled(path: Any, expected: Any) -> Any:
        array = read.get(jax.tree_util.keystr(path))
        if array is None:
            return np.empty(expected.shape, expected.dtype)
        return (
            jax.random.wrap_key_data(jnp.asarray(array), impl=_KEY_IMPLS[str(expected.dtype)])
            if _is_key(expected)
            else array
        )

    return jax.tree_util.tree_map_with_path(filled, struct)


def _structs(described: Mapping[str, Sequence[Any]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Of what a checkpoint holds."""
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    return {
        path: jax.ShapeDtypeStruct(shape, key if dtype in _KEY_IMPLS else dtype)
        for path, (shape, dtype) in described.items()
    }


def _check(sources: Sources) -> None:
    names = (
        ("the model", "checkpoint-other-model"),
        ("the model's optimizer state", "checkpoint-other-optimizer"),
    )
    found = zip(names, sources.expected, sources.saved, strict=True)
    ExecutionError.check(
        violation
        for (what, code), expected, saved in found
        for violation in _differences(what, _described(expected), saved, code)
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
