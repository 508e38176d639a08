"""A recompute policy in this file alone, as an installed package adds one."""

from pathlib import Path

import pytest
from cells import ASKED, STORE, WORKLOAD, Case, installed
from numpy import ravel

from capture.plan.kinds import KINDS, load_plan
from capture.tracing.slices import policy_key

SMALL = {"cluster": "1x1", "global_batch": "64", "microbatches": "1", "memory": "1MB"}


def products(primitive, *_, **__) -> bool:
    """Tell whether a result is kept: products are."""
    return primitive.name == "dot_general"


@pytest.mark.parametrize("name", ["stages", "packs", "array"])
def test_it_is_planned_verified_and_run(name, tmp_path, monkeypatch, capsys):
    installed(tmp_path, monkeypatch, "remats", "products = test_new_policy:products")
    Path("tiny.py").write_text(Path("tiny.py").read_text().replace("jnp.tanh", "jax.nn.gelu"))
    case, peaks, losses = Case(KINDS[name], capsys), {}, []
    for remat in ("none", "products"):
        asked = case.given(ASKED | STORE | SMALL | {"remat": remat})
        case("plan", WORKLOAD, "--system", case.kind.system, *asked, "-o", case.file)
        (peaks[remat], *_) = case("verify", case.file, *case.given(STORE))["peak_bytes_per_device"]
        ran = case.run("--check")
        assert ran["measured_peak_bytes_per_device"][0] == peaks[remat]
        assert load_plan(case.file).known_peak_bytes == peaks[remat]
        losses.append(ravel(ran["losses"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert peaks["products"] < 0.9 * peaks["none"]


def test_the_store_knows_it_by_its_code(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "remats", "products = test_new_policy:products")
    before = policy_key("products")
    assert len(before) == 1 and policy_key("full") == ()
    monkeypatch.setattr("test_new_policy.products", lambda primitive, *_, **__: True)
    assert policy_key("products") != before
