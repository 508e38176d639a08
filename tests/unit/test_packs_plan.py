"""Plans of packs: what they refuse, all at once, and their file."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from capture.errors import PlanError
from capture.machine.server import Server
from capture.plan.kinds import load_plan
from capture.plan.packs import PacksPlan, PacksPrediction, PaperTimes
from capture.plan.task_graph import Configuration, Packs, Swaps, Switches

SERVER = Server.load("gtx1080ti-x4")


def plan(forward=((0, 2), (2, 4)), backward=((0, 3), (3, 4), (4, 6)), **changes) -> PacksPlan:
    sizes = changes.pop("sizes", (4, 2))
    asked = {"mode": "pp", "minibatch_size": 8, "num_layers": 6} | changes
    configuration = Configuration(Packs(sizes[0], forward), Packs(sizes[1], backward))
    return PacksPlan(SERVER, configuration=configuration, **asked)


def test_the_file_goes_in_and_out(tmp_path):
    paper = PaperTimes(1.5, (1.5, 1.0), (0.0, 0.3), (0.1, 0.4), (10, 20), {"WB in": 3})
    swaps = Swaps("bfloat16")
    written = plan(
        switches=Switches(p2p=False), swaps=swaps, prediction=PacksPrediction(paper), model="toy"
    )
    assert "order" not in written.to_json()
    tasks = written.tasks().tasks
    order = tuple(task.id for task in tasks for _ in range(max(1, len(task.sizes))))
    written = replace(written, order=order)
    written.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read == written and read.prediction == written.prediction
    assert written.to_json()["backward"]["packs"] == [[0, 2], [3, 3], [4, 5]]
    assert read.swaps == read.tasks().swaps == swaps
    assert written.known_peak_bytes == 20
    assert written.headroom().verdict == "fits by extrapolation"
    assert written.headroom(19).verdict == "does not fit"


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"backward": ((0, 3), (4, 6))}, ["packs-layers"]),
        ({"order": (0, 1, 2)}, ["packs-order"]),
        ({"backward": ((0, 3), (2, 4), (4, 6))}, ["packs-layers"]),
        ({"backward": ((3, 4), (0, 3), (4, 6))}, ["packs-layers"]),
        ({"backward": ((0, 3), (3, 3), (3, 4), (4, 6))}, ["packs-layers"]),
        ({"backward": ((0, 3), (3, 4), (4, 5))}, ["packs-layers"]),
        ({"backward": (), "forward": ()}, ["packs-layers"]),
        ({"forward": ((0, 2), (2, 6))}, ["packs-last"]),
        ({"forward": ((0, 2), (2, 3))}, ["packs-last"]),
        ({"forward": ((0, 1), (2, 4))}, ["packs-layers"]),
        ({"forward": ()}, ["packs-layers"]),
        ({"sizes": (0, 9)}, ["packs-size", "packs-size"]),
        ({"mode": "dp", "sizes": (2, 3)}, ["packs-size"]),
        ({"mode": "dp", "minibatch_size": 3, "sizes": (1, 1)}, ["packs-batch"]),
        ({"mode": "mp", "minibatch_size": 0}, ["packs-mode", "packs-batch"]),
        ({"swaps": Swaps("float32")}, ["packs-stream"]),
        ({"swaps": Swaps("float32", sharded=True)}, ["packs-shard", "packs-stream"]),
        (
            {
                "swaps": Swaps(sharded=True),
                "mode": "dp",
                "sizes": (2, 2),
                "switches": Switches(p2p=False),
            },
            ["packs-shard"],
        ),
        ({"swaps": Swaps("bfloat16"), "switches": Switches(offload=False)}, ["packs-stream"]),
    ],
)
def test_every_broken_rule_is_said(changes, codes):
    with pytest.raises(PlanError) as error:
        plan(**changes)
    assert list(error.value.codes) == codes


def test_a_single_pack_needs_no_forward_packs():
    assert plan(forward=(), backward=((0, 6),)).tasks().tasks[0].criterion


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d.update(schema_version=9), "packs-plan-schema"),
        (lambda d: d.pop("forward"), "packs-plan-corrupt"),
        (lambda d: d["switches"].update(magic=True), "packs-plan-corrupt"),
        (lambda d: d.update(kind="sharding"), "packs-plan-kind"),
        (lambda d: d["backward"].update(packs=[[0, 2], [4, 5]]), "packs-layers"),
    ],
)
def test_files_that_are_wrong(change, code):
    document = copy.deepcopy(plan().to_json())
    change(document)
    with pytest.raises(PlanError) as error:
        PacksPlan.from_json(document)
    assert error.value.codes == (code,)


def test_unknown_switches_are_named():
    with pytest.raises(PlanError, match="choose of grouping, prefetch, jit, offload, p2p"):
        Switches.without(["magic"])
