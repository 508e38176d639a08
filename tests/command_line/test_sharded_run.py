"""Sharding plans from question to training on the command line: losses that take a random key, and
what ``run --check`` finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capture import load_plan
from capture.cli.main import main
from capture.runtime.sharded.training import Sharded

FILES = Path(__file__).parents[1] / "recorded" / "files"
MODEL = """
import jax, jax.numpy as jnp, optax
from capture import Workload


def dropout(width=64):
    def init(key):
        return {"up": jax.random.normal(key, (width, width)), "down": jnp.ones((width, 8))}

    def batch(key, size):
        return jax.random.normal(key, (size, width))

    def loss_fn(params, batch, key):
        h = jnp.tanh(batch @ params["up"])
        h = h * jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.mean((h @ params["down"]) ** 2)

    return Workload(loss_fn, init, batch, optax.adam(1e-2))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    return tmp_path


def said(capsys, *arguments: str) -> tuple[int, str]:
    code = main([*arguments])
    out, err = capsys.readouterr()
    return code, out if "--json" in arguments else out + err


@pytest.mark.slow
def test_a_loss_with_a_key_is_planned_and_trained_as_on_one_device(folder, capsys, monkeypatch):
    code, text = said(
        capsys, "osdp", "model.py:dropout", "--cluster", "1x4", "--target", "h100", "--no-verify", "--memory",
        "1MB", "--batch", "2", "--smallest", "1KiB", "--overlap", "1", "-o", "plan.json",
    )  # fmt: skip
    assert code == 0, text
    run = ("run", "plan.json", "--steps", "2", "--check", "--json")
    code, text = said(capsys, *run)
    found = json.loads(text)
    assert code == 0 and found["max_relative_gradient_error"] < 1e-5
    assert found["max_relative_loss_error"] < 1e-5 and found["worst_gradient"] in ("up", "down")
    assert found["losses"][0] != found["losses"][1]
    measured = found["measured_peak_bytes_per_device"]
    assert found["replayed_peak_bytes_per_device"] == measured and found["ledger_checks"] == 5

    whole = Sharded.loss_and_gradients

    def wrong(self, params, *arguments):
        loss, gradients = whole(self, params, *arguments)
        return loss, {**gradients, "down": 1.5 * gradients["down"]}

    monkeypatch.setattr(Sharded, "loss_and_gradients", wrong)
    code, text = said(capsys, *run[:-1])
    assert "gradients 5.0e-01 (down)" in text


@pytest.mark.parametrize(
    ("options", "code", "found"),
    [
        ("--target h100", 0, (4, (4,))),  # 16 examples on one node of four
        ("--target h100 --cluster 1x8", 0, (2, (8,))),
        ("--target h100 --batch 3", 0, (3, (4,))),
        ("--target h100 --cluster 1x3", 2, "--global-batch 16: 3 devices cannot share"),
        ("", 2, "[devices-no-rates]"),
    ],
)
def test_a_plan_of_stages_is_asked_again(folder, capsys, options, code, found):
    """Its workload, devices and examples per step, unless others are named."""
    of_plan = (str(FILES / "two.plan.json"), "--workload", "model.py:dropout", *options.split())
    done, text = said(capsys, "osdp", *of_plan, "--no-verify", "-o", "plan.json")
    assert done == code
    if code:
        assert found in text
        return
    plan = load_plan("plan.json")
    assert (plan.batch_size, plan.cluster.nodes) == found
    again = ("osdp", "plan.json", "--no-verify", "-o", "again.json")
    assert said(capsys, *again)[0] == 0 and load_plan("again.json") == plan


def test_a_workload_needs_devices_and_is_named_once(folder, capsys):
    code, text = said(capsys, "osdp", "model.py:dropout")
    assert code == 2 and "for one device (--cluster 1x1)" in text and "[devices-no-rates]" in text
    code, text = said(capsys, "osdp", "model.py:dropout", "--workload", "model.py:other")
    assert code == 2 and "[question-workload]" in text


def test_plan_asks_osdp_as_its_own_verb_does(folder, capsys):
    asked = ("model.py:dropout", "--cluster", "1x4", "--target", "h100", "--no-verify")
    more = ("--remat", "full", "--global-batch", "16", "--slices", "1,2", "-o", "plan.json")
    code, text = said(capsys, "plan", *asked, "--system", "osdp", *more)
    assert code == 0, text
    own = ("--remat", "full", "--batch", "4", "--slices", "1,2", "-o", "own.json")
    assert said(capsys, "osdp", *asked, *own)[0] == 0
    assert load_plan("plan.json") == load_plan("own.json")
    assert load_plan("plan.json").remat


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--system osdp --remat cheap", "osdp-remat", "every operator or none"),
        ("--system osdp --global-batch 6", "osdp-plan-batch", "4 devices cannot share them"),
        ("--system osdp --global-batch 8 --batch 2", "osdp-plan-batch", "give one of them"),
        ("--system osdp --microbatches 2", "plan-system", "--microbatches is not of --system osdp"),
        ("--partly", "plan-system", "--partly is not of --system capture"),
    ],
)
def test_options_that_osdp_does_not_take_in_plan(folder, capsys, options, code, message):
    asked = ("model.py:dropout", "--cluster", "1x4", "--target", "h100", *options.split())
    done, text = said(capsys, "plan", *asked)
    assert done == 2 and message in text and f"[{code}]" in text
