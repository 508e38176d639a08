"""The loss of a plan of packs at every size of its micro-batches: the same layers, which pass the
same values on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from capture.errors import PlanError
from capture.model.graph import LayerGraph
from capture.model.workload import WorkloadProtocol
from capture.plan.files import traced_for
from capture.plan.packs import PacksPlan
from capture.tracing import TracedModel, trace
from capture.tracing.coupling import coupled_examples


def traced_at(
    workload: WorkloadProtocol, plan: PacksPlan, sizes: Collection[int]
) -> dict[int, TracedModel]:
    """Return, by size, the traced loss of so many examples.

    Raises:
        PlanError: ``plan-other-model``, ``packs-sizes``, ``packs-coupled``.
    """
    configuration = plan.configuration
    traces = traced_for(
        plan,
        workload,
        lambda: {
            size: trace(workload, size, unmarked_layers=plan.num_layers).recomputing(plan.remat)
            for size in sizes
        },
        lambda traces: traces[configuration.backward.microbatch_size].graph,
    )
    sized = traces[configuration.backward.microbatch_size].graph
    for size, traced in traces.items():
        if _wiring(traced.graph) != _wiring(sized):
            raise PlanError.of(
                f"at micro-batch size {size} the loss is cut into other layers than at "
                f"{sized.microbatch_size}; mark the layers in the model, or choose sizes that "
                "divide the minibatch.",
                "packs-sizes",
            )
    packs = (*configuration.forward.packs, *configuration.backward.packs)
    passed = {v for first, _ in packs for v in sized.crossing(first)}
    traces = _with_rows({size: traces[size] for size in sorted(traces)}, passed)
    one, two = configuration.forward.microbatch_size, configuration.backward.microbatch_size
    last = configuration.backward.packs[-1][0]
    if one != two and last:
        met = coupled_examples(traces[one], traces[two], last)
        if met:
            raise PlanError.of(
                f"the plan runs micro-batches of {one} examples forward and {two} backward, and "
                f"{met}: computed again at another size it is another function. Give both "
                "directions the same microbatch_size.",
                "packs-coupled",
            )
    return traces


def _wiring(graph: LayerGraph) -> list[tuple[tuple[int, ...], ...]]:
    return [(layer.params, layer.inputs, layer.outputs, layer.batch) for layer in graph.layers]


def _with_rows(traces: Mapping[int, TracedModel], passed: Iterable[int]) -> dict[int, TracedModel]:
    """Return the traces with the dimension of the examples of every value that any of them knows.

    JAX leaves out a broadcast over one example, so that the program of one is not that of two, and
    which dimensions grow is not known there.

    Raises:
        PlanError: ``packs-sizes`` for a value that packs pass on which does not grow with the
            examples in that dimension alone.
    """
    graphs = [traced.graph for traced in traces.values()]
    dims = [
        next((value.batch_dim for value in reversed(values) if value.batch_dim is not None), None)
        for values in zip(*(graph.values for graph in graphs), strict=True)
    ]
    for v in sorted(passed):
        shapes = [graph.values[v].shape for graph in graphs]
        apart = [
            _per_example(shape, dims[v], size) for shape, size in zip(shapes, traces, strict=True)
        ]
        if any(rows != apart[0] for rows in apart):
            raise PlanError.of(
                f"{graphs[0].values[v].name}, which one pack passes on to another, has the shapes "
                f"{', '.join(map(str, shapes))} at micro-batch sizes "
                f"{', '.join(map(str, traces))}: it cannot be put together of rows of the "
                "examples. Choose sizes that divide the minibatch, or packs that keep it inside.",
                "packs-sizes",
            )
    return {
        size: replace(
            traced,
            graph=replace(
                traced.graph,
                values=tuple(
                    replace(value, batch_dim=dim)
                    for value, dim in zip(traced.graph.values, dims, strict=True)
                ),
            ),
        )
        for size, traced in traces.items()
    }


def _per_example(shape: Sequence[int], dim: int | None, size: int) -> tuple[float, ...]:
    return tuple(length / size if d == dim else length for d, length in enumerate(shape))
