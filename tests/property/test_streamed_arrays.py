"""Steps of packs, followed array by array: every pass reads the rows, values and parameters that
its layers read, each gradient is summed once, and every slot is as large as what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from capture.plan.task_graph import Configuration, Packs, Swaps, Switches, TaskGraph
from capture.step.pack_order import as_the_first, begins_without_copies
from capture.step.packs import build_step
from capture.step.program import replay
from tests.followed_arrays import Followed, GraphSizes
from tests.property.test_streamed_step import SERVER, task_graphs
from tests.synthetic_graphs import layer_graphs, tensor


@st.composite
def problems(draw) -> tuple[TaskGraph, GraphSizes, int]:
    graph = draw(layer_graphs(6, 2))
    first, *rest = graph.layers
    batch = tuple(sorted({*first.batch, 0}))  # by which the rows of its passes are known
    values = graph.values
    if draw(st.booleans()):
        values = tuple(tensor(v.name, v.size, batch_dim=0) for v in values[:-1]) + values[-1:]
    graph = replace(graph, layers=(replace(first, batch=batch), *rest), values=values)
    limit = draw(st.sampled_from([1, 3000, 4000, 10**6]))
    tasks, summary = draw(task_graphs(graph.num_layers)), draw(st.sampled_from([0, 0, 4]))
    packs = frozenset((t.first, t.stop) for t in tasks.tasks if t.kind == "update")
    return tasks, GraphSizes(graph, summary, packs), limit


def layers_forward(graph: TaskGraph, num_layers: int) -> Iterator[int]:
    """All but the last pack, which goes forward with its backward pass."""
    last = max(task.first for task in graph.tasks if task.kind == "update")
    return iter(range(last if graph.switches.jit else num_layers))


@st.composite
def swapped_problems(draw) -> tuple[TaskGraph, GraphSizes, int]:
    """Devices get some parameters as casts, or shares of all."""
    graph, sizes, limit = draw(problems())
    params = [p for p, param in enumerate(sizes.graph.params) if param.nbytes > 1]
    casts = frozenset(p for p in params if draw(st.booleans()))
    off = {*graph.switches.off} - {"offload"}
    sharded = graph.mode == "dp" and draw(st.booleans())
    swaps = Swaps("bfloat16" if casts else "", sharded)
    off -= {"grouping", "p2p"} if sharded else set()
    configuration = configuration_of(graph)
    graph = TaskGraph.of(
        configuration,
        graph.mode,
        graph.num_devices,
        graph.minibatch_size,
        Switches.without(off),
        swaps=swaps,
    )
    return graph, replace(sizes, casts=casts, num_shares=graph.num_shares), limit


def configuration_of(graph: TaskGraph) -> Configuration:
    """That a graph was made of."""
    backward = tuple(sorted((t.first, t.stop) for t in graph.tasks if t.kind == "update"))
    packs = {
        task.station: (task.first, task.stop) for task in graph.tasks if task.kind == "forward"
    }
    forward = tuple(pack for _, pack in sorted(packs.items()) if pack != backward[-1])
    sizes = [row[0] for row in graph.sizes]
    return Configuration(Packs(sizes[0], forward), Packs(sizes[1], tuple(dict.fromkeys(backward))))


@settings(max_examples=40)
@given(swapped_problems())
def test_swapped_otherwise_passes_read_the_same(problem):
    check(*problem)


@settings(max_examples=60)
@given(problems())
def test_passes_read_what_their_layers_read_and_every_gradient_counts_once(problem):
    check(*problem)


def check(graph: TaskGraph, sizes: GraphSizes, limit: int) -> None:
    server = SERVER.with_(num_devices=graph.num_devices, usable_bytes=limit)
    begins = begins_without_copies(graph, lambda task, size: (task.stop - task.first) * size)
    if graph.num_shares > 1:
        begins = as_the_first(graph, begins)
    step = build_step(graph, sizes, server, begins)
    replay(step)  # no copy is under way when what it uses is freed
    followed = Followed(graph, sizes, step)
    assert set(followed.there) == set(step.persistent.values())
    for slot, arrays in followed.there.items():
        assert arrays == followed.persistent(slot, 1), "not updated"
    everything = sorted(followed.examples)
    assert len(everything) == graph.minibatch_size
    for kind, layers in (
        ("forward", layers_forward(graph, len(sizes.layers))),
        ("backward", range(len(sizes.layers))),
    ):
        for layer in layers:
            assert sorted(followed.passed.pop((kind, layer))) == everything
    assert not followed.passed
