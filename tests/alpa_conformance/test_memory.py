"""The library's replay of a step in Alpa's runtime, against the instruction lists that real Alpa makes: byte for byte, per mesh."""

from __future__ import annotations

import pytest
from facts import interfaces
from harness import compile_method, mesh, replay
from steps import chain
from test_plans import BATCH_SIZE, GOOD, NUM_LAYERS, name

from capture.alpa import to_alpa
from capture.alpa.memory import alpa_replay

#: A single micro-batch is accumulated into nothing.
ACCUMULATING = [plan for plan in GOOD if plan.num_microbatches > 1]


@pytest.mark.parametrize("plan", ACCUMULATING[1 :: max(1, len(ACCUMULATING) // 24)], ids=name)
def test_live_bytes_are_those_of_alpas_instructions(plan):
    step, args = chain(NUM_LAYERS, BATCH_SIZE)
    compiled = compile_method(step, args, to_alpa(plan).build(mesh(len(plan.cluster.nodes), plan.cluster.nodes[0])))
    expected = [max(nbytes for _, nbytes in timeline) for timeline in replay(compiled)]
    assert [peak.peak_bytes for peak in alpa_replay(plan, interfaces(compiled)).stages] == expected
