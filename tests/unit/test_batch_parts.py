"""What a process of several reads of a global batch, and what it is given instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from capture.errors import ExecutionError
from capture.model.graph import LayerGraph, Tensor
from capture.runtime.batch_parts import Need, needs_of
from capture.runtime.microbatches import split_examples

#: Two rows of x belong to an example; of y one; the table holds none.
TENSORS = (
    Tensor("x", (8, 3), "float32", 0),
    Tensor("y", (5, 4), "int32", 1),
    Tensor("table", (2,), "float32"),
)
GRAPH = LayerGraph("hash", 4, (), (), (), TENSORS)
NUM_MICROBATCHES = 2
BATCH = {
    "x": np.arange(48, dtype=np.float32).reshape(16, 3),
    "y": np.arange(40, dtype=np.int32).reshape(5, 8),
    "table": np.ones(2, np.float32),
}


class Stage:
    """Reads leaves, of which devices of this process hold these rows.

    Args:
        rows: Per leaf, per device.
    """

    def __init__(self, rows: dict[int, list[slice]]):
        self.layers, self._rows = SimpleNamespace(batch=tuple(rows)), rows

    def batch_structs(self, leaves) -> list[Any]:
        (b,) = leaves
        dim = TENSORS[b].batch_dim
        whole = (slice(None),) * len(TENSORS[b].shape)
        indices = {
            device: whole if dim is None else (*whole[:dim], rows, *whole[dim + 1 :])
            for device, rows in enumerate(self._rows[b])
        }
        sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: indices)
        return [SimpleNamespace(shape=TENSORS[b].shape, sharding=sharding)]


#: Of two replicas on each of two hosts, the second's.
SECOND_HOST = Stage(
    {0: [slice(4, 6), slice(6, 8)], 1: [slice(2, 3), slice(3, 4)], 2: [slice(0, 2)]}
)


def split(batch: Any, needs: list[Need]) -> list[list[Any]]:
    traced: Any = SimpleNamespace(
        graph=GRAPH, batch_leaves=lambda host, key: [host[tensor.name] for tensor in TENSORS]
    )
    return split_examples(
        traced, [traced.graph.microbatch_size] * NUM_MICROBATCHES, batch, None, needs
    )


def test_a_host_with_some_of_the_replicas_reads_their_examples_of_every_microbatch():
    x, y, table = needs_of(GRAPH, NUM_MICROBATCHES, [SECOND_HOST])
    assert x.examples == y.examples == (range(2, 4), range(6, 8))
    np.testing.assert_array_equal(x.part(BATCH["x"]), BATCH["x"][[4, 5, 6, 7, 12, 13, 14, 15]])
    np.testing.assert_array_equal(y.part(BATCH["y"]), BATCH["y"][:, [2, 3, 6, 7]])
    assert table.is_read and table.part(BATCH["table"]) is BATCH["table"]


def test_what_no_stage_of_a_host_reads_is_not_needed():
    labels = Stage({1: [slice(None)]})
    x, y, table = needs_of(GRAPH, NUM_MICROBATCHES, [labels])
    assert not x.is_read and x.part(BATCH["x"]) is None and not table.is_read
    assert y.examples == (range(8),)
    np.testing.assert_array_equal(y.part(BATCH["y"]), BATCH["y"])


def test_devices_take_of_a_part_what_they_take_of_the_whole():
    needs = needs_of(GRAPH, NUM_MICROBATCHES, [SECOND_HOST])
    part = {need.name: need.part(BATCH[need.name]) for need in needs}
    for given, whole in zip(split(part, needs), split(BATCH, needs), strict=True):
        for rows in (slice(4, 6), slice(6, 8)):
            index = rows, slice(None)
            np.testing.assert_array_equal(given[0][index], whole[0][index])
        index = slice(None), slice(3, 4)
        np.testing.assert_array_equal(given[1][index], whole[1][index])


def test_a_part_that_is_not_what_is_needed_is_refused():
    needs = needs_of(GRAPH, NUM_MICROBATCHES, [SECOND_HOST])
    with pytest.raises(ExecutionError) as refused:
        split({"x": BATCH["x"][:6], "y": None, "table": np.ones(3, np.float32)}, needs)
    assert str(refused.value) == (
        "x has shape (6, 3) float32; the whole is (16, 3) float32, of which this process reads "
        "(8, 3): examples 2 to 3, 6 to 7: give the whole or what step.needs() names. "
        "[run-batch-part]\n"
        "y is None; the whole is (5, 8) int32, of which this process reads (5, 4): examples 2 to "
        "3, 6 to 7: give the whole or what step.needs() names. [run-batch-part]\n"
        "table has shape (3,) float32; the plan was made for (2,) float32 (2 micro-batches). "
        "[run-batch]"
    )
    assert split({"x": None, "y": BATCH["y"], "table": None}, needs_of(GRAPH, 2, []))[1][0] is None
