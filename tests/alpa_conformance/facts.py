"""What Alpa's compiled stages hold and hand over, as the library's replay wants to know it: bytes
per device, without temporaries."""

from __future__ import annotations

from typing import Any

from harness import Compiled, shard_bytes

from capture.step.interface import StageInterface


def interfaces(compiled: Compiled) -> list[StageInterface]:
    """One per mesh, of a step with more than one micro-batch (a single one is accumulated into
    nothing)."""
    return [_interface(compiled, m) for m in range(len(compiled.executable.mesh_group.meshes))]


def _interface(compiled: Compiled, m: int) -> StageInterface:
    meshes = [compiled.stages_of_mesh(k) for k in range(len(compiled.executable.mesh_group.meshes))]
    forward, backward, update = meshes[m]
    ids = {
        v: i
        for i, v in enumerate(
            dict.fromkeys(
                v for stage in compiled.config.xla_stages for v in (*stage.invars, *stage.outvars)
            )
        )
    }
    size: dict[Any, int] = {}
    # The layout in which it is kept is that of the forward pass.
    for stage in (
        update,
        backward,
        forward,
    ):
        size.update(
            {
                v: shard_bytes(v, s)
                for v, s in zip(stage.invars, stage.input_sharding_specs, strict=True)
            }
        )
        size.update(
            {
                v: shard_bytes(v, s)
                for v, s in zip(stage.outvars, stage.output_sharding_specs, strict=True)
            }
        )
    given, read = (
        set(compiled.global_invars),
        tuple(dict.fromkeys((*forward.invars, *backward.invars))),
    )
    batch = [v for v in read if v in given and v in compiled.batch]
    params = [v for v in read if v in given and v not in compiled.batch]
    gradients = [
        v for v, donated in zip(backward.invars, backward.donated_invars, strict=True) if donated
    ]
    losses = [
        v for v, donated in zip(forward.invars, forward.donated_invars, strict=True) if donated
    ]
    assert sum(size[v] for v in gradients) == sum(size[v] for v in params), (
        "every parameter is trained, or a gradient has another layout"
    )
    # The sum of the losses lives as long as the optimizer's state.
    state = [*losses, *(v for v in update.invars if v in given and v not in params)]

    used = [v for v in read if any(v in earlier.outvars for earlier, _, _ in meshes[:m])]
    later = {v for stages in meshes[m + 1 :] for stage in stages[:2] for v in stage.invars}
    made = [v for v in forward.outvars if v in later]
    sent = [*made, *(v for v in used if v in later)]
    received = [v for k in range(m) for v in meshes[k][0].outvars if v in {*used, *sent}]
    gradients_sent = [
        v for v in backward.outvars if any(v in stages[1].invars for stages in meshes[:m])
    ]
    kept = set(backward.invars)
    residuals = [v for v in forward.outvars if v in kept and v not in made]
    values = {ids[v]: size[v] for v in (*used, *made)}
    results = {"forward": [*made, *residuals], "backward": gradients_sent}
    return StageInterface(
        devices=tuple(range(len(compiled.devices_of_mesh(m)))),
        received=tuple(ids[v] for v in received),
        used=tuple(ids[v] for v in used),
        outputs=tuple(ids[v] for v in made),
        sent=tuple(ids[v] for v in sent),
        kept_inputs=tuple(ids[v] for v in used if v in kept),
        kept_outputs=tuple(ids[v] for v in made if v in kept),
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
        # Results, which are there before what they were made from is freed; accumulators and state
        # are replaced in place.
        transient_bytes={
            **{name: sum(size[v] for v in made) for name, made in results.items()},
            "update": 0,
        },
        summary_bytes=0,
    )


def of_parameters_bytes(compiled: Compiled, m: int) -> int:
    """What a mesh keeps of each micro-batch for its backward pass although it depends on parameters
    alone: casts of weights, masks."""
    forward, backward, _ = compiled.stages_of_mesh(m)
    made = zip(forward.outvars, forward.output_sharding_specs, strict=True)
    return sum(
        shard_bytes(v, spec)
        for v, spec in made
        if v in backward.invars and v not in compiled.from_batch
    )
