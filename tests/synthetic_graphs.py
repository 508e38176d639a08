"""Layer graphs and stage costs drawn by Hypothesis: skip connections, shared parameters, values
without a gradient, odd sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from capture.measured.stage_cost import SplitCost, StageCost
from capture.model.graph import Layer, LayerGraph, Tensor
from capture.plan.choices import StageChoice
from capture.step.interface import StageInterface, stage_interface, stage_values

MICROBATCH_SIZE = 4
LOSS_BYTES = 4


def tensor(
    name: str, size: int, *, batch_dim: int | None = None, differentiable: bool = True
) -> Tensor:
    """``size`` elements of four bytes, per example where there is a batch dimension."""
    shape = (size,) if batch_dim is None else (MICROBATCH_SIZE, size)
    return Tensor(name, shape, "float32", batch_dim, differentiable)


def chain(
    num_layers: int, *, skips: Sequence[tuple[int, int]] = (), shared: Sequence[Sequence[int]] = ()
) -> LayerGraph:
    """Layer i reads parameter i and the output of layer i - 1, value i is the output of layer i,
    the last value is the loss.

    Args:
        num_layers: L.
        skips: Pairs (producer, reader) beyond the chain.
        shared: Per additional parameter, the layers that read it.
    """
    readers = {(i, i + 1) for i in range(num_layers - 1)} | set(skips)
    layers = tuple(
        Layer(
            layer_id=i,
            name=f"layer_{i}",
            params=(i, *(num_layers + n for n, users in enumerate(shared) if i in users)),
            inputs=tuple(sorted(producer for producer, reader in readers if reader == i)),
            outputs=(i,),
            batch=(0,) if i in (0, num_layers - 1) else (),
            flops=10,
            key=f"key{i}",
        )
        for i in range(num_layers)
    )
    values = [tensor(f"value{i}", i + 1, batch_dim=0) for i in range(num_layers - 1)]
    return LayerGraph(
        model_hash="0123",
        microbatch_size=MICROBATCH_SIZE,
        layers=layers,
        params=tuple(tensor(f"param{p}", p + 1) for p in range(num_layers + len(shared))),
        values=(*values, tensor("loss", 1)),
        batch=(tensor("x", 3, batch_dim=0),),
    )


@st.composite
def layer_graphs(draw, max_layers: int = 6, min_layers: int = 1) -> LayerGraph:
    """Any graph that the tracer may make, up to renaming."""
    num_layers = draw(st.integers(min_layers, max_layers))
    sizes = st.integers(1, 40)
    producers = [i for i in range(num_layers - 1) for _ in range(draw(st.integers(1, 2)))]
    readers = [
        {
            draw(st.integers(i + 1, num_layers - 1)),
            *draw(st.sets(st.integers(i + 1, num_layers - 1))),
        }
        for i in producers
    ]
    users = [{i} for i in range(num_layers)] + draw(
        st.lists(
            st.sets(st.integers(0, num_layers - 1), min_size=2) if num_layers > 1 else st.nothing(),
            max_size=2,
        )
        if num_layers > 1
        else st.just([])
    )
    fed = [
        draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
        for _ in range(draw(st.integers(1, 2)))
    ]
    values = [
        tensor(
            f"value{v}",
            draw(sizes),
            batch_dim=draw(st.sampled_from([None, 0])),
            differentiable=draw(st.integers(0, 3)) > 0,
        )
        for v in range(len(producers))
    ]
    layers = tuple(
        Layer(
            layer_id=i,
            name=f"layer_{i}",
            params=tuple(p for p, who in enumerate(users) if i in who),
            inputs=tuple(v for v, who in enumerate(readers) if i in who),
            outputs=tuple(v for v, producer in enumerate(producers) if producer == i)
            if i < num_layers - 1
            else (len(producers),),
            batch=tuple(b for b, who in enumerate(fed) if i in who),
            flops=draw(st.integers(0, 10**15)),
            key=draw(st.sampled_from(["a", "b"])),
        )
        for i in range(num_layers)
    )
    return LayerGraph(
        model_hash=draw(st.text("0123456789abcdef", max_size=4)),
        microbatch_size=MICROBATCH_SIZE,
        layers=layers,
        params=tuple(tensor(f"['p{p}']", draw(sizes)) for p in range(len(users))),
        values=(*values, tensor("loss", LOSS_BYTES // 4)),
        batch=tuple(
            tensor(f"['b{b}']", draw(sizes), batch_dim=draw(st.sampled_from([None, 0])))
            for b in range(len(fed))
        ),
    )


@st.composite
def stage_interfaces(
    draw,
    graph: LayerGraph,
    *,
    summaries: bool | None = None,
    placement: Sequence[int] | None = None,
    split: bool = False,
) -> list[StageInterface]:
    """Stages of a graph, with costs as a compiler could report them: an output takes room unless it
    aliases a donated input.

    Args:
        graph: At least as many layers as stages.
        summaries: Whether updates need those of other stages.
        placement: Per stage, its group of devices, all of one degree; None: any stages, each on its
            own.
        split: With what a split backward pass holds, too.
    """
    inside = st.integers(1, max(1, graph.num_layers - 1))
    if placement is not None:
        count = len(placement) - 1
        cuts = sorted(draw(st.sets(inside, min_size=count, max_size=count)) if count else ())
        degree = draw(st.sampled_from([1, 2]))
    else:
        cuts = sorted(draw(st.sets(inside)) if graph.num_layers > 1 else ())
    summaries = draw(st.booleans()) if summaries is None else summaries
    sizes, few = st.integers(0, 300), st.integers(0, 20)
    stages, first_device = [], 0
    for s, (first, stop) in enumerate(pairwise([0, *cuts, graph.num_layers])):
        used, outputs = stage_values(graph, first, stop)
        # The loss outlives the backward pass.
        num_outputs = 0 if stop == graph.num_layers else len(outputs)
        if placement is None:
            degree = draw(st.sampled_from([1, 2, 4]))
        else:
            first_device = degree * placement[s]

        def positions(count: int) -> tuple[int, ...]:
            return tuple(sorted(draw(st.sets(st.integers(0, count - 1))))) if count else ()

        residual_bytes = draw(sizes)
        output_bytes = sum(graph.values[v].shard_bytes(degree) for v in outputs)
        gradient_bytes = sum(
            graph.values[v].shard_bytes(degree) for v in used if graph.values[v].differentiable
        )
        kept_inputs = positions(len(used))
        # Donated to the gradients.
        aliasable_bytes = sum(graph.values[used[i]].shard_bytes(degree) for i in kept_inputs)
        cost = StageCost(
            residual_bytes=residual_bytes,
            forward_bytes=output_bytes + residual_bytes + draw(sizes),
            backward_bytes=gradient_bytes
            + draw(sizes)
            - draw(st.integers(0, min(gradient_bytes, aliasable_bytes))),
            update_bytes=draw(sizes),
            optimizer_bytes=draw(sizes),
            kept_inputs=kept_inputs,
            kept_outputs=positions(num_outputs),
            kept_batch=positions(len(graph.stage_batch(first, stop))),
            summarize_bytes=draw(sizes) if summaries else 0,
            summary_bytes=draw(few) if summaries else 0,
        )
        param_bytes = [p.nbytes for p in graph.params]
        devices, choice = range(first_device, first_device + degree), StageChoice(degree)
        first_device += degree
        stage = stage_interface(graph, first, stop, devices, choice, param_bytes, cost)
        if split:
            stage = stage_interface(
                graph, first, stop, devices, choice, param_bytes, _split(draw, stage, cost)
            )
        stages.append(stage)
    return stages


def _split(draw, stage: StageInterface, cost: StageCost) -> StageCost:
    def some(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in positions if draw(st.booleans()))

    sizes, deferred = st.integers(0, 300), draw(st.integers(0, 300))
    made = sum(stage.value_bytes[v] for v in stage.input_gradients) + deferred
    return replace(
        cost,
        backward_bytes=0,
        split=SplitCost(
            inputs_bytes=made + draw(sizes),
            weights_bytes=draw(sizes),
            residual_bytes=draw(st.integers(0, cost.residual_bytes)),
            deferred_bytes=deferred,
            kept_inputs=some(cost.kept_inputs),
            kept_outputs=some(cost.kept_outputs),
            kept_batch=some(cost.kept_batch),
            cotangents=some(range(len(stage.cotangents))),
        ),
    )
