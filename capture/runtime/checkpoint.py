"""Save a training and continue it, under the same plan or another plan of the same model.

A checkpoint holds the whole model's parameters and optimizer state, as no plan splits them, so
stage cuts, degrees, schedule and ``shard_optimizer`` may all differ when it is read. Orbax writes
to a temporary directory and renames it when it is complete: a save that is interrupted leaves the
checkpoints before it as they were.

    directory/<num_steps>/state        params: by path in the parameters; optimizer: by path in the
                                       optax state
    directory/<num_steps>/metadata     JSON: schema version, number of steps, shapes and dtypes by
                                       path
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
from capture.runtime.meter import AnyStep
from capture.runtime.pipeline import PipelinedStep
from capture.runtime.state import PipelineState

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts

CHECKPOINT = documents.Format(
    "checkpoint", ExecutionError, "checkpoint", "save it again with this version"
)

_KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def save(step: AnyStep, state: PipelineState, directory: Path | str, *, keep: int = 2) -> Path:
    """Write a checkpoint and wait until it is complete.

    Several processes save together: host 0 writes what it gathers.

    Args:
        step: Whose state it is.
        state: Not consumed.
        directory: Where the training's checkpoints are; made if it does not exist.
        keep: Complete checkpoints to leave there, this one included; older ones are removed after
            it is complete. At least 1.

    Returns:
        The directory of this checkpoint.

    Raises:
        ExecutionError: ``checkpoint-exists`` if the directory holds one of the same or a later
            step.
    """
    params, optimizer = _by_path(step.params(state)), _by_path(step.optimizer_state(state))
    directory, hosts = Path(directory), _hosts_of(step)
    if hosts is None:
        _write(directory, keep, state.num_steps, params, optimizer)
    else:
        hosts.first_does(
            "checkpoint", lambda: _write(directory, keep, state.num_steps, params, optimizer)
        )
    return directory / str(state.num_steps)


def restore(step: AnyStep, directory: Path | str, num_steps: int | None = None) -> PipelineState:
    """Read a checkpoint into a step of any plan of the same model.

    Args:
        step: To go on with.
        directory: That ``save`` was given; of several processes, each reads it.
        num_steps: Which checkpoint; by default the latest.

    Raises:
        ExecutionError: ``checkpoint-missing`` if there is none, ``checkpoint-schema`` for an
            unknown version, ``checkpoint-other-model`` or ``checkpoint-other-optimizer`` naming
            every leaf that differs from the model's.
    """
    params, optimizer = _by_path(step.traced.params_struct), _by_path(step.optimizer.state_struct)
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
        hosts = _hosts_of(step)
        if hosts is not None:
            hosts.compare({"checkpoint": chosen})
        _check(metadata, directory / str(chosen), _described(params), _described(optimizer))
        wanted_leaves = {"params": _stored(params), "optimizer": _stored(optimizer)}
        read = manager.restore(
            chosen, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted_leaves))
        )["state"]
    return step.restore(
        _filled(step.traced.params_struct, read["params"]),
        _filled(step.optimizer.state_struct, read["optimizer"]),
        metadata["num_steps"],
    )


def _write(
    directory: Path,
    keep: int,
    num_steps: int,
    params: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> None:
    """Leaves by path.

    Raises:
        ExecutionError: ``checkpoint-exists``.
    """
    with _manager(directory, keep) as manager:
        latest = manager.latest_step()
        if latest is not None and latest >= num_steps:
            raise ExecutionError.of(
                f"{str(directory)!r} holds a checkpoint of step {latest}, and this state is at "
                f"step {num_steps}; save it into "
                "another directory, or restore from this one first.",
                "checkpoint-exists",
            )
        metadata = {
            "schema_version": CHECKPOINT.versions[-1],
            "num_steps": num_steps,
            "params": _described(params),
            "optimizer": _described(optimizer),
        }
        stored = {"params": _stored(params), "optimizer": _stored(optimizer)}
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


def _hosts_of(step: AnyStep) -> Hosts | None:
    """The processes that share it."""
    return step.hosts if isinstance(step, PipelinedStep) else None


def _by_path(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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


def _check(
    metadata: Any, path: Path, params: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> None:
    replace(CHECKPOINT, name=f"checkpoint {str(path)!r}").check(metadata)
    ExecutionError.check(
        [
            *_differences("the model", params, metadata["params"], "checkpoint-other-model"),
            *_differences(
                "the model's optimizer state",
                optimizer,
                metadata["optimizer"],
                "checkpoint-other-optimizer",
            ),
        ]
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
