"""Checkpoints, read by any number of processes: of a plan whose parameters are cut alike, what each
needs, else all of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from capture.runtime.checkpoint_models import PARTS, filled_leaf
from capture.runtime.hosts.items import damage, read_item
from capture.runtime.hosts.saved import MARKER
from capture.runtime.hosts.saving import stacked_paths, state_paths

if TYPE_CHECKING:
    from capture.runtime.pipeline import PipelinedStep

#: Arrays by part and path.
Leaves = Mapping[str, Mapping[str, Any]]


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """Return the document in the marker of a checkpoint, or one made of the metadata that a single
    process of an earlier version wrote in its place."""
    if (checkpoint / MARKER).is_file():
        return json.loads((checkpoint / MARKER).read_text())
    found = json.loads((checkpoint / "metadata" / "metadata").read_text())
    state = {part: [p for p, (shape, _) in found[part].items() if 0 not in shape] for part in PARTS}
    return found | {"stacked": {}, "items": {"state": state}, "files": {}}


def own_leaves(
    step: PipelinedStep, checkpoint: Path, marker: Mapping[str, object]
) -> tuple[list[Any], list[Any]] | None:
    """Return the leaves that this process needs, None for the others: by parameter of the layer
    graph, and by leaf of the optimizer's state. None at all if the checkpoint has layers in one
    array where the step has them one by one, or the other way round.

    Raises:
        ValueError: If a file is damaged.
    """
    if marker["stacked"] != stacked_paths(step):
        return None
    params = {p for _, stage in step.own_stages for p in stage.params} | set(step.unused)
    state = {k for _, stage in step.own_stages for k in stage.optimizer.state}
    paths = (step.optimizer.traced.param_names, state_paths(step))
    structs = (jax.tree.leaves(step.traced.split_struct), step.optimizer.state_structs)
    wanted = {
        part: {of_part[i] for i in numbers}
        for part, of_part, numbers in zip(PARTS, paths, (params, state), strict=True)
    }
    read = _read(checkpoint, marker, wanted)
    own, of_state = (
        [
            filled_leaf(struct, read[part].get(path)) if path in wanted[part] else None
            for path, struct in zip(of_part, of_structs, strict=True)
        ]
        for part, of_part, of_structs in zip(PARTS, paths, structs, strict=True)
    )
    return own, of_state


def joined_leaves(checkpoint: Path, marker: Mapping[str, Any]) -> Leaves:
    """Return all leaves of a checkpoint as one process writes them: layers of a stack together.

    Raises:
        ValueError: If a file is damaged.
    """
    everything = {
        part: {path for item in marker["items"].values() for path in item[part]} for part in PARTS
    }
    read = _read(checkpoint, marker, everything)
    params = dict(read["params"])
    for path, dim in marker["stacked"].items():
        shape, _ = marker["params"][path]
        if 0 not in shape:
            layers = [params.pop(f"{path}[{layer}]") for layer in range(shape[dim])]
            params[path] = np.stack(layers, dim)
    return {"params": params, "optimizer": read["optimizer"]}


def _read(
    checkpoint: Path, marker: Mapping[str, Any], wanted: Mapping[str, Collection[str]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {part: {} for part in wanted}
    for name, item in marker["items"].items():
        there = {part: sorted(set(item[part]).intersection(wanted[part])) for part in wanted}
        if not any(there.values()):
            continue
        files = {f: sums for f, sums in marker["files"].items() if f.partition("/")[0] == name}
        if wrong := next(damage(checkpoint, files), None):
            raise ValueError(wrong)
        for part, leaves in read_item(checkpoint / name, there).items():
            found[part] |= leaves
    return found
