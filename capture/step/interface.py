"""What a stage holds and hands over, from the layer graph and the measured or predicted cost of its
programs.

The replay of a plan and the prediction of it differ only in where the ``StageCost`` comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from capture.measured.stage_cost import SplitCost, StageCost
from capture.model.graph import LayerGraph
from capture.plan.choices import ParamSplit, StageChoice
from capture.plan.stage import Offload
from capture.plan.stages import Plan


@dataclass(frozen=True)
class SplitBackward:
    """The arrays that a stage holds, per micro-batch, between the two parts of a split backward
    pass: gradients of its inputs first, of its weights later.

    Attributes:
        inputs, outputs, batch, cotangents: Ids in the layer graph of those that the gradients of
            weights read, among what the backward pass reads.
        residual_bytes: Bytes of the residuals that they read.
        deferred_bytes: Bytes that the program of the inputs makes for them.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: tuple[int, ...]
    cotangents: tuple[int, ...]
    residual_bytes: int
    deferred_bytes: int


@dataclass(frozen=True)
class StageInterface:
    """The tensors that a stage reads and writes, in ids of the layer graph, and the bytes per
    device of each group of them.

    Attributes:
        devices: Device ids of the stage.
        received: Values that cross the cut before the stage; those it does not use pass through.
        used: Values of ``received`` that the stage's program reads.
        outputs: Values that the program makes and later stages read, or the loss.
        sent: Values that cross the cut after the stage; empty for the last.
        kept_inputs, kept_outputs, kept_batch: Values and batch leaves that the backward pass reads
            besides residuals.
        batch: All batch leaves that the forward pass reads.
        owned: Parameters that this stage updates: those that no earlier stage reads.
        borrowed: Parameters that an earlier stage owns and updates.
        differentiable: Values among received, outputs and sent that carry a gradient back.
        value_bytes: Bytes per device of each value on this stage.
        batch_bytes: Bytes per device of each batch leaf.
        param_bytes: Bytes per device of each parameter, owned or borrowed; its gradient takes as
            much, from zeros that need nothing else to be made.
        optimizer_bytes: State of the optimizer for the owned parameters.
        residual_bytes: Activations that one micro-batch keeps for its backward pass, kept inputs,
            outputs and batch leaves not included.
        transient_bytes: Temporaries + outputs - aliased inputs of each program (``forward``,
            ``backward``, ``update``, ``summarize``; ``backward_inputs``, ``backward_weights`` where
            the backward pass is split).
        summary_bytes: Small values that the update of other stages needs (a global norm); 0 if
            updates are independent.
        split: What is held between the parts of the backward pass, where it is split.
        offload: Groups that rest in the memory of its host between their uses (offloading).
        host: The name of that memory.
    """

    devices: tuple[int, ...]
    received: tuple[int, ...]
    used: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: tuple[int, ...]
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    kept_batch: tuple[int, ...]
    batch: tuple[int, ...]
    owned: tuple[int, ...]
    borrowed: tuple[int, ...]
    differentiable: frozenset[int]
    value_bytes: Mapping[int, int]
    batch_bytes: Mapping[int, int]
    param_bytes: Mapping[int, int]
    optimizer_bytes: int
    residual_bytes: int
    transient_bytes: Mapping[str, int]
    summary_bytes: int
    split: SplitBackward | None = None
    offload: tuple[Offload, ...] = ()
    host: str = "host"

    @property
    def params_bytes(self) -> int:
        """Bytes of the owned parameters."""
        return sum(self.param_bytes[p] for p in self.owned)

    @property
    def cotangents(self) -> tuple[int, ...]:
        """Values whose gradient the backward program takes: outputs, and inputs passed on."""
        return tuple(
            v
            for v in self.sent
            if v in self.differentiable and (v in self.outputs or v in self.used)
        )

    @property
    def input_gradients(self) -> tuple[int, ...]:
        """The received values whose gradient the backward program makes."""
        return tuple(v for v in self.used if v in self.differentiable)


def owned_and_borrowed(
    graph: LayerGraph, first: int, stop: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the parameters that layers [first, stop) update, and those that earlier ones do."""
    params = graph.stage_params(first, stop)
    owned = tuple(p for p in params if graph.param_owner(p) >= first)
    return owned, tuple(p for p in params if p not in owned)


def shared_onwards(graph: LayerGraph, first: int, stop: int) -> tuple[int, ...]:
    """Return the parameters that layers [first, stop) update and layers behind them read too: their
    gradients arrive from there."""
    owned, _ = owned_and_borrowed(graph, first, stop)
    return tuple(p for p in owned if graph.param_readers(p)[-1] >= stop)


def stage_values(
    graph: LayerGraph, first: int, stop: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the values that layers [first, stop) read from earlier layers, and those that they
    make for later ones (or the loss)."""
    layers = graph.layers[first:stop]
    used = {v for layer in layers for v in layer.inputs} & set(graph.crossing(first))
    if stop == graph.num_layers:
        outputs = set(graph.layers[-1].outputs)
    else:
        outputs = {v for layer in layers for v in layer.outputs} & set(graph.crossing(stop))
    return tuple(sorted(used)), tuple(sorted(outputs))


def stage_interface(
    graph: LayerGraph,
    first: int,
    stop: int,
    devices: Sequence[int],
    choice: StageChoice,
    param_bytes: Sequence[int],
    cost: StageCost,
) -> StageInterface:
    """Return the interface of a stage.

    Args:
        graph: At the micro-batch size of the plan.
        param_bytes: Per parameter of the graph, bytes per device as the stage splits them.
    """
    used, outputs = stage_values(graph, first, stop)
    received, sent = graph.crossing(first), graph.crossing(stop)
    batch = graph.stage_batch(first, stop)
    owned, borrowed = owned_and_borrowed(graph, first, stop)
    values = {*received, *outputs, *sent}
    transient_bytes = {
        "forward": cost.forward_bytes,
        "backward": cost.backward_bytes,
        "update": cost.update_bytes,
        "summarize": cost.summarize_bytes,
    }
    if cost.split is not None:
        transient_bytes["backward_inputs"] = cost.split.inputs_bytes
        transient_bytes["backward_weights"] = cost.split.weights_bytes
    stage = StageInterface(
        devices=tuple(devices),
        received=received,
        used=used,
        outputs=outputs,
        sent=sent,
        kept_inputs=tuple(used[i] for i in cost.kept_inputs),
        kept_outputs=tuple(outputs[i] for i in cost.kept_outputs),
        kept_batch=tuple(batch[i] for i in cost.kept_batch),
        batch=batch,
        owned=owned,
        borrowed=borrowed,
        differentiable=frozenset(v for v in values if graph.values[v].differentiable),
        value_bytes={v: graph.value_bytes(v, choice.value_split) for v in values},
        batch_bytes={b: graph.batch[b].shard_bytes(choice.data_parallel) for b in batch},
        param_bytes={p: param_bytes[p] for p in (*owned, *borrowed)},
        optimizer_bytes=cost.optimizer_bytes,
        residual_bytes=cost.residual_bytes,
        transient_bytes=transient_bytes,
        summary_bytes=cost.summary_bytes,
    )
    return stage if cost.split is None else replace(stage, split=_split(stage, batch, cost.split))


def _split(stage: StageInterface, batch: Sequence[int], cost: SplitCost) -> SplitBackward:
    return SplitBackward(
        tuple(stage.used[i] for i in cost.kept_inputs),
        tuple(stage.outputs[i] for i in cost.kept_outputs),
        tuple(batch[i] for i in cost.kept_batch),
        tuple(stage.cotangents[i] for i in cost.cotangents),
        cost.residual_bytes,
        cost.deferred_bytes,
    )


def plan_interfaces(
    plan: Plan,
    graph: LayerGraph,
    param_bytes: Mapping[ParamSplit, Sequence[int]],
    costs: Sequence[StageCost],
) -> list[StageInterface]:
    """Return the interfaces of all stages of a plan.

    Args:
        graph: At the plan's micro-batch size.
        param_bytes: Per way to split parameters, per parameter.
    """
    found = []
    for stage, cost in zip(plan.stages, costs, strict=True):
        where, choice = (stage.first, stage.stop, stage.devices), stage.choice
        one = stage_interface(graph, *where, choice, param_bytes[choice.param_split], cost)
        found.append(replace(one, offload=stage.offload, host=plan.host_of(stage)))
    return found
