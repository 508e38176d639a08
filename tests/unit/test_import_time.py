"""Planning starts fast and runs anywhere: what needs no framework loads none."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from timeouts import TIMEOUT_SECONDS

import capture

FRAMEWORKS = ("jax", "jaxlib", "flax", "optax", "orbax", "ray", "sklearn")
ROOT = Path(__file__).parents[2]
#: What may load a framework, from the import contract that names it.
MAY_LOAD = tuple(
    line.split(" -> ")[0].removesuffix(".**")
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    if contract["id"] in ("framework-free", "one-regression", "no-model-framework")
    for line in contract["ignore_imports"]
)
#: These import such a module on purpose when they are imported.
LOAD_THROUGH_ANOTHER = (
    "capture.papers.alpa.backend",
    "capture.profiler.facts",
)


#: They start and hear processes that execute, among modules that do.
DRIVERS = tuple(
    f"capture.runtime.hosts.{name}"
    for name in ("documents", "driver", "process", "ray_hosts", "restarts", "saved", "watching")
)


def framework_free() -> list[str]:
    """All modules of the library but those that are named."""
    named = (*MAY_LOAD, *LOAD_THROUGH_ANOTHER)
    packages = [import_module(name) for name in ("capture", "recommender", "profiling_runs")]
    found = [
        module.name
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [
        *(package.__name__ for package in packages),
        *(name for name in found if not name.startswith(named) and name != "capture.__main__"),
        *DRIVERS,
    ]


def loaded_by(modules: list[str], frameworks: tuple[str, ...] = FRAMEWORKS) -> set[str]:
    """The frameworks that are loaded in a fresh process once it has imported the modules."""
    code = (
        f"import sys, {', '.join(modules)}\nprint(*(name for name in {frameworks} if name in "
        "sys.modules))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    return set(process.stdout.split())


def test_what_needs_no_framework_loads_none():
    modules = framework_free()
    assert len(modules) > 90
    if loaded_by(modules):
        assert {module: found for module in modules if (found := loaded_by([module]))} == {}


def test_help_loads_no_verb_and_a_verb_no_other():
    """Starting is fast because what a command does not need is not there."""
    modules = ("capture.cli.plan", "capture.cli.array", "capture.cli.report", "numpy")
    for words, expected in ((["--help"], set()), (["report", "--help"], {*modules[2:]})):
        said = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys\nfrom capture.cli.main import main\ntry: main(sys.argv[1:])\n"
                f"except SystemExit: print(*({set(modules)} & sys.modules.keys()), file=sys.stderr)",
                *words,
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert set(said.stderr.split()) == expected, words


def test_the_check_sees_a_loaded_framework():
    assert loaded_by(["optax"]) == {"jax", "jaxlib", "optax"}


@pytest.mark.parametrize("name", capture.__all__)
def test_every_public_name_loads(name):
    assert getattr(capture, name) is not None
    assert name in dir(capture)


def test_no_public_name_is_hidden_by_a_submodule():
    submodules = {found.name for found in pkgutil.iter_modules(capture.__path__)}
    assert not submodules & set(capture.__all__)


def test_an_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(
        AttributeError,
        match=r"^module 'capture' has no attribute 'Clusters'; its public names are "
        r"AdditivePredictor, AlpaOptions, ",
    ):
        capture.Clusters  # noqa: B018
