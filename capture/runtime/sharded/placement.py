"""Where a sharding plan puts every parameter leaf: whole on all devices, sharded, or some rows of
it each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.errors import PlanError, Violation
from capture.plan.sharding import Mode, ParameterLeaf, ShardingPlan
from capture.runtime.leaf_parts import check_rows
from capture.runtime.sharded.mesh import group_axes
from capture.runtime.sharded.slices import LeafRows
from capture.tracing.model import TracedModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitLeaf:
    """The two arrays in place of a leaf of the user's tree, of whose g slices k are sharded.

    Attributes:
        replicated: The rows that every device has.
        sharded: The rows that are sharded.
    """

    replicated: Any
    sharded: Any


@dataclass(frozen=True)
class LeafPlacement:
    """The way in which one leaf of the user's tree is stored.

    Attributes:
        parts: One for each step of the scan that a leaf is stacked over.
        slice_dim: Dimension that parts and slices are along; of a step's part of the leaf.
        stacked: Dimension of the steps; None of an ordinary leaf.
        is_small: Whether operations read it as any other array: what a barrier would cost is more
            than what it saves.
    """

    name: str
    parts: tuple[LeafRows, ...]
    slice_dim: int | None
    stacked: int | None
    is_small: bool

    @property
    def shardings(self) -> list[NamedSharding]:
        """Sharding of the user's array, or of the two of a ``SplitLeaf``."""
        if self.stacked is None:
            return [part.stored for part in self.parts]
        (part,) = self.parts
        axes = list(part.stored.spec)
        axes = [*axes, *[None] * (self.stacked - len(axes))]
        spec = PartitionSpec(*axes[: self.stacked], None, *axes[self.stacked :])
        return [NamedSharding(part.stored.mesh, spec)]

    @property
    def node(self) -> Any:
        """The shardings in the form of the leaf."""
        return SplitLeaf(*self.shardings) if len(self.shardings) > 1 else self.shardings[0]

    def split(self, leaf: Any) -> Any:
        if self.slice_dim is None or len(self.parts) == 1:
            return leaf
        return SplitLeaf(
            *(
                lax.slice_in_dim(leaf, part.first, part.stop, axis=self.slice_dim)
                for part in self.parts
            )
        )

    def join(self, node: Any) -> Any:
        """Return the leaf of what ``split`` made of it."""
        first, *rest = jax.tree.leaves(node)
        return jnp.concatenate([first, *rest], self.slice_dim) if rest else first


def check_partly(
    optimizer: object, traced: TracedModel, num_devices: int, smallest_bytes: int
) -> None:
    """Refuse an optimizer that asks for any leaf as a whole of which a part may be sharded.

    Raises:
        WorkloadError: ``optimizer-rows``.
    """
    found, counts = list(jax.tree.leaves(traced.params_struct)), {}
    for i, (struct, (first, *_)) in enumerate(zip(found, traced.rows, strict=True)):
        leaf = traced.leaves[first]
        if i in traced.stacked or leaf.split_dim is None or leaf.shape[leaf.split_dim] < 2:
            continue
        if leaf.can_shard(num_devices, smallest_bytes):
            found[i], counts[i] = SplitLeaf(*_halves(struct, leaf.split_dim)), 2
    halved = jax.tree.unflatten(jax.tree.structure(traced.params_struct), found)
    check_rows(optimizer, traced.params_struct, halved, counts)


def _halves(struct: jax.ShapeDtypeStruct, dim: int) -> list[jax.ShapeDtypeStruct]:
    size = struct.shape[dim]
    return [
        jax.ShapeDtypeStruct((*struct.shape[:dim], rows, *struct.shape[dim + 1 :]), struct.dtype)
        for rows in (size // 2, size - size // 2)
    ]


def place_leaves(plan: ShardingPlan, mesh: Mesh, traced: TracedModel) -> list[LeafPlacement]:
    """Return the placement of each leaf of the user's tree, in order.

    Args:
        plan: With the names of its operators' parameters.
        mesh: All of its axes are data-parallel; groups are the devices along the last of them.

    Raises:
        PlanError: ``osdp-mesh`` if groups do not follow the mesh's axes, ``osdp-scan`` if operators
            that share a scanned leaf have several modes, or have a part of it sharded.
    """
    PlanError.check(_group_violations(plan, mesh))
    return list(_placed(plan, mesh, traced))


def _placed(plan: ShardingPlan, mesh: Mesh, traced: TracedModel) -> Iterator[LeafPlacement]:
    modes = plan.mode_of_param
    for i, rows in enumerate(traced.rows):
        stacked, own = traced.stacked.get(i), [traced.leaves[p] for p in rows]
        name = own[0].name if stacked is None else own[0].name.rpartition("[")[0]
        found = {modes[leaf.name] for leaf in own}
        can_shard = own[0].can_shard(mesh.size, plan.smallest_bytes)
        is_partly = any(0 < mode.num_sharded < mode.num_slices for mode in found)
        if stacked is not None and can_shard and (len(found) > 1 or is_partly):
            raise PlanError.of(
                f"the steps of a scan share the parameter {name!r}, but the plan has "
                f"{', '.join(sorted(map(str, found)))} for it; "
                "give them one mode that shards all slices or none.",
                "osdp-scan",
            )
        mode = found.pop() if can_shard else Mode()
        is_small = own[0].nbytes < plan.smallest_bytes
        yield LeafPlacement(name, _parts(own[0], mode, mesh), own[0].split_dim, stacked, is_small)


def _parts(leaf: ParameterLeaf, mode: Mode, mesh: Mesh) -> tuple[LeafRows, ...]:
    def along(dim: int, axes: tuple[object, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))

    whole = NamedSharding(mesh, PartitionSpec())
    size = 0 if leaf.split_dim is None else leaf.shape[leaf.split_dim]
    if not mode.num_sharded:
        return (LeafRows(0, size, whole, (whole,)),)
    if leaf.split_dim is None:  # what an operator has beside its product is not split with it
        mode = replace(mode, num_slices=1, num_sharded=1)
    dim = leaf.shard_dim(mesh.size)
    assert dim is not None, "a leaf that can be sharded has a dimension for it"
    stored = along(dim, group_axes(mesh, mode.group_size))
    # Shared by a group, gradients go to all devices first, as a reduce-scatter, and are then
    # gathered between groups.
    reduced = (stored,) if mode.group_size is None else (along(dim, mesh.axis_names), stored)
    first, num_blocks = size * (mode.num_slices - mode.num_sharded) // mode.num_slices, 1
    if dim == leaf.split_dim:
        first, num_blocks = first - first % mesh.size, mode.group_size or mesh.size
    sharded = LeafRows(first, size, stored, reduced, mode.num_sharded, num_blocks)
    return (sharded,) if not first else (LeafRows(0, first, whole, (whole,)), sharded)


def _group_violations(plan: ShardingPlan, mesh: Mesh) -> Iterator[Violation]:
    for group in sorted({mode.group_size for mode in plan.modes if mode.group_size is not None}):
        if not group_axes(mesh, group):
            yield Violation(
                f"the plan shares parameters among groups of {group} devices, and no last axes of "
                f"the mesh {dict(mesh.shape)} have so "
                f"many; give a mesh with the axes (nodes, {group}).",
                "osdp-mesh",
            )
