"""The models of docs/examples, one per framework, planned for two devices and trained beside one.

What Equinox and Transformers bring is optional: without them their examples are skipped.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
from commands import run_json
from processes import REPOSITORY

from capture.cli.main import main
from capture.extras import EXTRA_OF, install_command

FOLDER = REPOSITORY / "docs/examples"
#: Its function, small, and the module that an example needs.
EXAMPLES = {
    "plain_jax.py": ("language_model?depth=1", "jax"),
    "flax_nnx.py": ("classifier?depth=1", "flax"),
    "flax_linen.py": ("mixer?depth=1", "flax"),
    "equinox_mlp.py": ("regression?depth=1", "equinox"),
    "hugging_face.py": ("gpt2?layers=1", "transformers"),
}


#: The others are slow.
MARKS = {"plain_jax.py": (), "flax_linen.py": pytest.mark.exhaustive}


def test_every_example_is_trained_and_shown():
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES)
    page = (REPOSITORY / "docs/your-model.md").read_text()
    assert set(re.findall(r"\(examples/(\w+\.py)\)", page)) == set(EXAMPLES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in EXAMPLES],
)
def test_an_example_trains_on_two_devices_as_on_one(name, tmp_path, monkeypatch, capsys):
    function, module = EXAMPLES[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {install_command(EXTRA_OF[module])}")
    monkeypatch.chdir(tmp_path)
    workload = f"{FOLDER / name}:{function}"
    asked = ["--cluster", "1x2", "--num-layers", "2", "--global-batch", "8", "--microbatches", "2"]
    made = ["--algorithm", "bounds-first", "--within", "50%", "--workers", "0", "--quiet"]
    made += ["--store", "store.sqlite"]
    assert main(["plan", workload, *asked, *made]) == 0
    capsys.readouterr()
    code, ran, _ = run_json(capsys, "run", "plan.json", "--steps", "2", "--check", "--quiet")
    assert code == 0
    assert ran["max_relative_loss_error"] < 1e-6
    assert ran["max_relative_gradient_error"] < 1e-4, ran
