"""Workloads by name and by object: every wrong name is one sentence with its code."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import user_model

from capture import extras
from capture.errors import WorkloadError
from capture.extras import install_command
from capture.model.workload import WorkloadProtocol, WorkloadSpec, check_workload, takes_key

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-1000, 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["tiny", "2.6B", "a=b", "x-y", ""]),
)
specs = st.builds(
    WorkloadSpec,
    st.sampled_from(["models/gpt.py", "/abs/gpt.py", "package.module", "../up/m.py"]),
    NAMES,
    st.dictionaries(NAMES, VALUES, max_size=3),
)


@pytest.fixture
def model_file(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "net.py").write_text(user_model("beside_neighbour"))
    (folder / "neighbour.py").write_text("SCALE = 3\n")
    monkeypatch.chdir(tmp_path)
    return folder / "net.py"


def message(call) -> str:
    with pytest.raises(WorkloadError) as caught:
        call()
    return str(caught.value)


@given(specs)
def test_the_text_of_a_workload_is_read_back_with_the_types_of_its_arguments(spec):
    again = WorkloadSpec.parse(str(spec))
    assert again == spec
    assert [type(value) for value in again.arguments.values()] == [
        type(value) for value in spec.arguments.values()
    ]


@pytest.mark.parametrize(
    "text",
    [
        "models/gpt.py",
        "gpt",
        ":gpt",
        "gpt.py:",
        "gpt.py:two words",
        "gpt.py:gpt?size",
        "gpt.py:gpt?=3",
        "a:b?x y=1",
    ],
)
def test_a_name_that_is_none(text):
    assert message(lambda: WorkloadSpec.parse(text)) == (
        f"workload={text!r} is no workload name; write "
        "path/to/file.py:function?key=value&key=value or module:function. [workload-name]"
    )


def test_values_are_read_as_what_they_look_like():
    arguments = WorkloadSpec.parse("m:f?a=True&b=-3&c=1e-3&d=2.6B&e=false&f=&g=x=y&&").arguments
    assert arguments == {
        "a": True,
        "b": -3,
        "c": 0.001,
        "d": "2.6B",
        "e": False,
        "f": "",
        "g": "x=y",
    }


def test_the_text_writes_booleans_as_the_command_line_does():
    assert (
        str(WorkloadSpec("m.py", "f", {"tied": True, "depth": 3, "size": "tiny"}))
        == "m.py:f?tied=true&depth=3&size=tiny"
    )


def test_a_file_is_loaded_with_its_neighbours_and_its_arguments(model_file):
    model = WorkloadSpec.parse("zoo/net.py:model?depth=5&size=big").load()
    assert (model.depth, model.size, model.scale) == (5, "big", 3)
    assert isinstance(model, WorkloadProtocol)


def test_files_of_the_same_name_are_different_modules(model_file, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "net.py").write_text(
        user_model("beside_neighbour").replace("from neighbour import SCALE", "SCALE = 4")
    )
    assert WorkloadSpec("other/net.py", "model").load().scale == 4
    assert WorkloadSpec("zoo/net.py", "model").load().scale == 3


def test_a_file_that_fails_is_not_remembered_as_loaded(model_file):
    model_file.write_text("raise RuntimeError('half way')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half way"):
            WorkloadSpec("zoo/net.py", "model").load()


def test_a_module_is_loaded_by_name():
    # math.prod is callable but takes other arguments, which shows that the module was found
    assert "prod" in message(lambda: WorkloadSpec("math", "prod", {"size": 1}).load())


def test_what_does_not_exist(model_file, tmp_path):
    assert message(WorkloadSpec("zoo/nix.py", "model").load) == (
        f"workload file 'zoo/nix.py' does not exist (looked in {str(tmp_path)!r}); a plan "
        "remembers the path relative to its own file, "
        "and --workload names another. [workload-file]"
    )
    assert message(WorkloadSpec("no_such.module", "f").load) == (
        "workload module 'no_such.module' cannot be imported: No module named 'no_such'. "
        "[workload-module]"
    )
    assert message(WorkloadSpec("./zoo/net", "model").load) == (
        "workload module './zoo/net' cannot be imported: a module name does not begin with a dot; "
        "a path ends in .py. [workload-module]"
    )
    assert message(WorkloadSpec("zoo/net.py", "gpt").load) == (
        "zoo/net.py has no function 'gpt'; it has model, broken, no_optimizer. [workload-function]"
    )
    assert message(WorkloadSpec("zoo/net.py", "model", {"width": 3}).load) == (
        "model(size='tiny', depth=2) does not take {'width': 3}: got an unexpected keyword "
        "argument 'width'. [workload-arguments]"
    )


def test_all_missing_members_are_named_at_once(model_file):
    assert message(WorkloadSpec("zoo/net.py", "broken").load) == "\n".join(
        f"zoo/net.py:broken returned SimpleNamespace without {name!r}; a workload has loss_fn, "
        "init, batch and optimizer. "
        "[workload-members]"
        for name in ("init", "batch")
    )
    assert message(WorkloadSpec("zoo/net.py", "no_optimizer").load) == (
        "zoo/net.py:no_optimizer has optimizer='adam'; give an optax transformation, which has "
        "init and update. [workload-optimizer]"
    )


def test_any_object_with_the_four_members_is_a_workload():
    task = SimpleNamespace(
        loss_fn=None, init=None, batch=None, optimizer=SimpleNamespace(init=None, update=None)
    )
    assert check_workload(task, "it") is task


def test_paths_are_stored_relative_to_a_directory_and_found_again_from_elsewhere(
    model_file, tmp_path, monkeypatch
):
    plans = tmp_path / "plans" / "deep"
    plans.mkdir(parents=True)
    stored = WorkloadSpec("zoo/net.py", "model", {"depth": 3}).relative_to(plans)
    assert stored == WorkloadSpec("../../zoo/net.py", "model", {"depth": 3})
    assert WorkloadSpec(str(model_file), "model").relative_to(plans).location == "../../zoo/net.py"
    monkeypatch.chdir(plans.parent)
    assert stored.resolved_from(plans).location == "../zoo/net.py"
    assert stored.resolved_from(Path("deep")).load().depth == 3


def test_modules_and_absolute_paths_stay(tmp_path):
    module, absolute = WorkloadSpec("package.module", "f"), WorkloadSpec("/zoo/net.py", "f")
    assert module.relative_to(tmp_path) is module and module.resolved_from(tmp_path) is module
    assert absolute.resolved_from(tmp_path) is absolute


def test_arguments_survive_json():
    spec = WorkloadSpec.parse("m.py:f?a=true&b=3&c=0.5&d=x")
    assert json.loads(json.dumps(dict(spec.arguments))) == spec.arguments


def test_a_loss_takes_a_key_if_it_has_a_third_positional_parameter():
    def three(params, batch, key): ...
    def two(params, batch): ...
    def option(params, batch, scale=1.0): ...
    def keyword(params, batch, *, key=None): ...

    losses = (three, two, option, keyword, functools.partial(three, key=0), functools.partial(two))
    tasks = [
        SimpleNamespace(loss_fn=loss, init=None, batch=None, optimizer=None) for loss in losses
    ]
    assert [takes_key(task) for task in tasks] == [True, False, False, False, False, False]


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    """Also where the file imports it only when the function is called, and where the name is that
    of a module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "flax", None)
    (tmp_path / "early_flax.py").write_text("import flax.linen\n\ndef model():\n    pass\n")
    (tmp_path / "late_flax.py").write_text("def model():\n    import flax\n")
    for location in (f"{tmp_path}/early_flax.py", f"{tmp_path}/late_flax.py", "early_flax"):
        said = message(WorkloadSpec(location, "model").load)
        assert said == (
            f"workload '{location}:model' cannot be loaded: 'flax' is not installed; it comes "
            f"with an extra: {install_command('models')}. "
            "[workload-extra]"
        )
    (tmp_path / "other.py").write_text("import no_such_module_here\n")
    with pytest.raises(ModuleNotFoundError):  # the user's own affair
        WorkloadSpec(f"{tmp_path}/other.py", "model").load()


def test_the_command_is_that_of_a_checkout_or_of_an_installed_package(tmp_path, monkeypatch):
    checkout = Path(extras.__file__).resolve().parent.parent
    monkeypatch.chdir(checkout)
    assert install_command("models") == "pip install -e '.[models]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("models") == f"pip install -e {shlex.quote(f'{checkout}[models]')}"
    monkeypatch.setattr(
        extras, "__file__", str(tmp_path / "site-packages" / "capture" / "extras.py")
    )
    assert install_command("ray") == "pip install 'capture-jax[ray]'"
