"""Checkpoints that the processes of a training write together, while it goes on: each stage is an
item, written where its arrays are. A single process writes all in one item, and waits for it.

    directory/<num_steps>/stage_<s>         by Orbax (``capture.runtime.hosts.items``)
    directory/<num_steps>/state             likewise, of a single process
    directory/<num_steps>/checkpoint.json   the marker, renamed into place when all else is written

The marker says what the checkpoint holds: schema version, number of steps, shapes and dtypes of
parameters and optimizer state by path, of an array ``num_models``; in which item what is, and the
sums of all files. What has none is not complete, and is never read.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from capture import environment
from capture.errors import CaptureError, ExecutionError, Violation
from capture.runtime.checkpoint_models import (
    CHECKPOINT,
    PARTS,
    Models,
    State,
    Trained,
    by_path,
    described,
)
from capture.runtime.hosts.items import Shards, files_of, write_item
from capture.runtime.hosts.saved import MARKER, all_steps, complete_steps, exists, remove
from capture.runtime.state import PipelineState
from capture.tracing.keys import is_key, words

if TYPE_CHECKING:
    from capture.runtime.multihost import Hosts
    from capture.runtime.pipeline import PipelinedStep

#: Until a file that host 0 made is there for the others, on an idle network.
_SECONDS_TO_BE_SEEN = 10.0

#: By name, the processes that write an item, and its arrays by part and path.
Items = Mapping[str, tuple[frozenset[int], Mapping[str, Mapping[str, Shards]]]]


class Saver:
    """A writer of a training's checkpoints, one at a time. All its processes make the same calls.

    Args:
        directory: Of the training's checkpoints; made if it does not exist.
        keep: Complete ones to leave there, at least 1.

    Raises:
        ExecutionError: ``checkpoint-not-shared`` if a process does not see what another one writes.
    """

    def __init__(self, step: Trained, directory: Path, keep: int = 2):
        self._step: Any = step
        self._directory, self._keep = directory, keep
        self._hosts: Hosts | None = getattr(step, "hosts", None)
        self._thread: threading.Thread | None = None
        self._failed: CaptureError | None = None
        if self._hosts is not None:
            self._check_shared(self._hosts)

    @property
    def _is_first(self) -> bool:
        return self._hosts is None or self._hosts.process == 0

    def save(self, state: State) -> Path:
        """Copy a state to the hosts and write it, of several processes while the training goes on.

        Args:
            state: Not consumed.

        Raises:
            ExecutionError: ``checkpoint-exists``; ``checkpoint-write`` of the save before it.
        """
        self.finish()
        path = self._directory / str(state.num_steps)
        if self._hosts is None:
            self._run(path, *_alone(self._step, state), 0)
            self.check()
            return path
        assert isinstance(state, PipelineState), "the state of one model"
        items, marker = _items(self._step, state), marker_of(self._step, state.num_steps)
        arguments = (path, items, marker, self._hosts.reserve(1))
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()
        return path

    def _check_shared(self, hosts: Hosts) -> None:
        """Check that all processes see a file that host 0 makes in the directory."""
        name, *_ = hosts.exchange("probe", f".host-0-{uuid.uuid4().hex}")
        probe = self._directory / name
        if self._is_first:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
        hosts.exchange("probe made", None)
        end = time.monotonic() + environment.patience(_SECONDS_TO_BE_SEEN)
        while not (seen := probe.is_file()) and time.monotonic() < end:
            time.sleep(0.1)
        try:
            hosts.check_alike(f"a file that host 0 made in {str(self._directory)!r}", seen)
        finally:
            if self._is_first:
                probe.unlink()

    def check(self) -> None:
        """Raise the error of a save that has failed, without waiting for one that goes on.

        Raises:
            ExecutionError: ``checkpoint-write`` if what is written has failed.
        """
        if self._failed is not None:
            raise self._failed

    def finish(self) -> None:
        """Wait until what was saved is complete.

        Raises:
            ExecutionError: ``checkpoint-write``.
        """
        if self._thread is not None and self._hosts is not None:
            self._thread.join(self._hosts.limit_seconds)
            if self._thread.is_alive():
                raise ExecutionError.of(
                    f"a checkpoint in {str(self._directory)!r} is not complete after "
                    f"{self._hosts.limit_seconds:.0f} s; look at its disk or network.",
                    "checkpoint-write",
                )
            self._thread = None
        self.check()

    def _run(self, path: Path, items: Items, marker: dict[str, Any], number: int) -> None:
        try:
            self._agreed(f"cleared {number}", lambda: self._clear(path))
            files = self._agreed(f"written {number}", lambda: self._write(path, items))
            marker["files"] = {name: each for found in files for name, each in found.items()}
            self._agreed(f"complete {number}", lambda: self._complete(path, marker))
        except ExecutionError as error:
            self._failed = error

    def _agreed(self, what: str, call: Callable[[], object]) -> list[Any]:
        """Call a function in every process; return what each got, once all have called it."""
        mine: dict[str, Any] = {"made": None, "broken": []}
        try:
            mine["made"] = call()
        except ExecutionError as error:
            mine["broken"] = [(each.message, each.code) for each in error.violations]
        except Exception as error:
            why = f"could not write into {str(self._directory)!r}: {type(error).__name__}: {error}"
            name = "the process" if self._hosts is None else f"host {self._hosts.process}"
            mine["broken"] = [(f"{name} {why}.", "checkpoint-write")]
        found = [mine] if self._hosts is None else self._hosts.meet(f"checkpoint {what}", mine)
        ExecutionError.check(Violation(*broken) for each in found for broken in each["broken"])
        return [each["made"] for each in found]

    def _clear(self, path: Path) -> None:
        """Remove what an interrupted save has left at the path, and make the folder anew."""
        if self._is_first:
            latest = max(complete_steps(self._directory), default=-1)
            if latest >= int(path.name):
                raise exists(self._directory, latest, int(path.name))
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)

    def _write(self, path: Path, items: Items) -> dict[str, list[int]]:
        """Write this process's items; return file sums of those that it is the first to write."""
        found: dict[str, list[int]] = {}
        for name, (writers, item) in items.items():
            if not any(item.values()):
                continue
            write_item(path / name, item, writers)
            if jax.process_index() == min(writers):
                found |= files_of(path / name)
        return found

    def _complete(self, path: Path, marker: Mapping[str, object]) -> None:
        """Rename the marker into place, and remove what is old or was interrupted."""
        if not self._is_first:
            return
        unfinished = path / f"{MARKER}.tmp"
        with unfinished.open("w") as file:
            json.dump(marker, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path / MARKER)
        kept = complete_steps(self._directory)[-self._keep :]
        for step in set(all_steps(self._directory)).difference(kept):
            remove(self._directory / str(step))


def item_name(stage: int) -> str:
    return f"stage_{stage}"


def writers_of(step: PipelinedStep, stage: int) -> frozenset[int]:
    """Return the processes that hold a stage."""
    devices = step.stages[stage].mesh.devices.flat
    return frozenset(device.process_index for device in devices)


def state_paths(step: PipelinedStep) -> list[str]:
    """Return the paths of the leaves of the optimizer's state, in their order."""
    return list(by_path(step.optimizer.state_struct))


def stacked_paths(step: PipelinedStep) -> dict[str, int]:
    """Return, by path, the layers' dimension of parameters that the graph has layer by layer."""
    paths = list(by_path(step.traced.params_struct))
    return {paths[leaf]: dim for leaf, dim in step.traced.stacked.items()}


def _alone(step: Trained, state: State) -> tuple[Items, dict[str, Any]]:
    """Return what a single process writes, and the content of the marker."""
    models, alone = Models(step), jax.process_index()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = dict(zip(PARTS, models.leaves(state), strict=True))
    item = {  # Orbax refuses arrays without elements
        part: {
            path: Shards.of_host(np.asarray(words(leaf)), sharding, writes=True)
            for path, leaf in of_part.items()
            if 0 not in leaf.shape
        }
        for part, of_part in leaves.items()
    }
    items = {"state": {part: list(of_part) for part, of_part in item.items()}}
    marker = _marker(state.num_steps, leaves, {}, items)
    if models.count is not None:
        marker["num_models"] = models.count
    return {"state": (frozenset({alone}), item)}, marker


def marker_of(step: PipelinedStep, num_steps: int) -> dict[str, Any]:
    """Return the content of a checkpoint's marker, but for the sums of the files."""
    trees = zip(PARTS, (step.traced.params_struct, step.optimizer.state_struct), strict=True)
    leaves = {part: by_path(tree) for part, tree in trees}
    return _marker(num_steps, leaves, stacked_paths(step), items_of(step))


def _marker(num_steps: int, leaves: Mapping[str, Any], stacked: object, items: object) -> Any:
    return {
        "schema_version": CHECKPOINT.versions[-1],
        "num_steps": num_steps,
        **{part: described(of_part) for part, of_part in leaves.items()},
        "stacked": stacked,
        "items": items,
    }


def items_of(step: PipelinedStep) -> dict[str, dict[str, list[str]]]:
    """Return the paths of the leaves in each item. Whatever is in none is zero."""
    params, optimizer = step.optimizer.traced.param_names, state_paths(step)
    return {
        item_name(s): {
            "params": [params[p] for p in _params_in(step, s)],
            "optimizer": [optimizer[k] for k in _state_in(step, s)],
        }
        for s in range(len(step.stages))
    }


def _params_in(step: PipelinedStep, s: int) -> list[int]:
    """Return the graph's parameters that are written with a stage: its own, and with the first what
    no stage has."""
    unused, params = step.unused if s == 0 else (), step.traced.graph.params
    return [p for p in (*step.stages[s].owned, *unused) if 0 not in params[p].shape]


def _state_in(step: PipelinedStep, s: int) -> list[int]:
    """Return the leaves of optimizer state written with a stage: shared ones with the first."""
    before = {k for stage in step.stages[:s] for k in stage.optimizer.state}
    structs = step.optimizer.state_structs
    return [k for k in step.stages[s].optimizer.state if k not in before and structs[k].size]


def _items(step: PipelinedStep, state: PipelineState) -> Items:
    """Copy what this process writes to its host, and return it by item, part and path."""
    params, optimizer = step.optimizer.traced.param_names, state_paths(step)
    arrays: dict[int, dict[str, dict[str, Any]]] = {}
    for s, stage in step.own_stages:
        owned = dict(zip(stage.owned, step.owned(state, "parameters", s), strict=True))
        held = dict(zip(stage.optimizer.state, step.owned(state, "optimizer", s), strict=True))
        arrays[s] = {
            "params": {params[p]: owned.get(p) for p in _params_in(step, s)},
            "optimizer": {optimizer[k]: held[k] for k in _state_in(step, s)},
        }
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            if not shard.replica_id and not is_key(array):
                shard.data.copy_to_host_async()
    unused = {params[p]: leaf for p, leaf in state.unused.items()}

    def copied(s: int, path: str, array: jax.Array | None) -> Shards:
        if array is not None:
            return Shards(array)
        writes = jax.process_index() == min(writers_of(step, s))
        return Shards.of_host(unused[path], step.stages[s].replicated, writes=writes)

    return {
        item_name(s): (
            writers_of(step, s),
            {
                part: {path: copied(s, path, array) for path, array in leaves.items()}
                for part, leaves in item.items()
                if leaves
            },
        )
        for s, item in arrays.items()
    }
