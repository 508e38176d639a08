"""What Alpa's compiled stages hold and hand over, as the library's replay wants to know it: bytes per device, without temporaries."""

from __future__ import annotations

from typing import Any

from harness import Compiled, shard_bytes

from capture.step import StageInterface


def interfaces(compiled: Compiled) -> list[StageInterface]:
    """One per mesh, for a model whose stages hand on to the next one only."""
    return [_interface(compiled, m) for m in range(len(compiled.executable.mesh_group.meshes))]


def _interface(compiled: Compiled, m: int) -> StageInterface:
    forward, backward, update = compiled.stages_of_mesh(m)
    num_meshes = len(compiled.executable.mesh_group.meshes)
    ids = {v: i for i, v in enumerate(v for stage in compiled.config.xla_stages for v in (*stage.invars, *stage.outvars))}
    size: dict[Any, int] = {}
    for stage in (update, backward, forward):  # the layout in which it is kept is that of the forward pass
        size.update({v: shard_bytes(v, s) for v, s in zip(stage.invars, stage.input_sharding_specs, strict=True)})
        size.update({v: shard_bytes(v, s) for v, s in zip(stage.outvars, stage.output_sharding_specs, strict=True)})
    given = set(compiled.global_invars)
    batch = [v for v in dict.fromkeys((*forward.invars, *backward.invars)) if v in given and v in compiled.batch]
    params = [v for v in dict.fromkeys((*forward.invars, *backward.invars)) if v in given and v not in compiled.batch]
    state = [v for v in update.invars if v in given and v not in params]
    accumulators = [v for v, donated in zip(backward.invars, backward.donated_invars, strict=True) if donated]
    assert sum(size[v] for v in accumulators) == sum(size[v] for v in params), "every parameter is trained"

    before = [] if m == 0 else compiled.stages_of_mesh(m - 1)[0].outvars
    after = [] if m + 1 == num_meshes else [v for stage in compiled.stages_of_mesh(m + 1)[:2] for v in stage.invars]
    received = [v for v in dict.fromkeys((*forward.invars, *backward.invars)) if v in before]
    sent = [v for v in forward.outvars if v in after]
    kept = set(backward.invars)
    residuals = [v for v in forward.outvars if v in kept and v not in sent]
    values = {ids[v]: size[v] for v in (*received, *sent)}
    return StageInterface(
        devices=tuple(range(len(compiled.devices_of_mesh(m)))),
        received=tuple(ids[v] for v in received),
        used=tuple(ids[v] for v in received),
        outputs=tuple(ids[v] for v in sent),
        sent=tuple(ids[v] for v in sent),
        kept_inputs=tuple(ids[v] for v in received if v in kept),
        kept_outputs=tuple(ids[v] for v in sent if v in kept),
        kept_batch=tuple(i for i, v in enumerate(batch) if v in kept),
        batch=tuple(range(len(batch))),
        owned=tuple(range(len(params))),
        borrowed=(),
        differentiable=frozenset(values),
        value_bytes=values,
        batch_bytes={i: size[v] for i, v in enumerate(batch)},
        param_bytes={i: size[v] for i, v in enumerate(params)},
        optimizer_bytes=sum(size[v] for v in state),
        residual_bytes=sum(size[v] for v in residuals),
        # Results, which are there before what they were made from is freed; accumulators and state are replaced in place.
        transient_bytes={
            "forward": sum(size[v] for v in (*sent, *residuals)),
            "backward": sum(size[v] for v in backward.outvars) - sum(size[v] for v in accumulators),
            "update": 0,
        },
    )
