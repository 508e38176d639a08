"""A plan of two stages, and what a refusal of one says."""

from __future__ import annotations

import pytest

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan


def two_stages(**changes) -> Plan:
    stages = (
        Stage(0, 2, (0, 1), StageChoice(data_parallel=2)),
        Stage(2, 3, (2, 3), StageChoice(tensor_parallel=2)),
    )
    return Plan(
        **{
            "cluster": Cluster((4,)),
            "num_layers": 3,
            "stages": stages,
            "global_batch_size": 16,
            "num_microbatches": 4,
        }
        | changes
    )


def messages(call) -> list[str]:
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value).splitlines()
