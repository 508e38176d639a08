"""Planning starts fast and runs anywhere: what needs no framework loads none."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from timeouts import TIMEOUT_SECONDS

import capture

FRAMEWORKS = ("jax", "jaxlib", "flax", "optax", "orbax", "ray", "sklearn")
#: Modules (a package stands for all in it) that may never load a framework. Those not written yet are passed over.
FRAMEWORK_FREE = (
    "capture",
    "capture.plan.choices",
    "capture.cli.job_file",
    "capture.cli.jobs",
    "capture.cli.main",
    "capture.cli.progress",
    "capture.cli.store",
    "capture.machine.cluster",
    "capture.environment",
    "capture.errors",
    "capture.model.graph",
    "capture.step.interface",
    "capture.step.ledger",
    "capture.osdp",
    "capture.plan.stages",
    "capture.predictor",
    "capture.measured.profile",
    "capture.measured.merge",
    "capture.profiler.paper",
    "capture.profiler.partitionings",
    "capture.profiler.execution",
    "capture.profiler.windows",
    "capture.quantities",
    "capture.plan.sampling",
    "capture.plan.schedule",
    "capture.step.simulator",
    "capture.step.program",
    "capture.measured.store",
    "capture.model.workload",
    "profiling_runs",
    "recommender",
)


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent does not exist
        return False


def with_submodules(module: str) -> list[str]:
    paths = find_spec(module).submodule_search_locations
    if module == "capture" or not paths:
        return [module]
    return [module, *(found.name for found in pkgutil.walk_packages(paths, f"{module}."))]


def loaded_by(modules: list[str], frameworks: tuple[str, ...] = FRAMEWORKS) -> set[str]:
    """The frameworks that are loaded in a fresh process once it has imported the modules."""
    code = f"import sys, {', '.join(modules)}\nprint(*(name for name in {frameworks} if name in sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS)
    return set(process.stdout.split())


def test_what_needs_no_framework_loads_none():
    modules = [name for module in FRAMEWORK_FREE if exists(module) for name in with_submodules(module)]
    if loaded_by(modules):
        assert {module: found for module in modules if (found := loaded_by([module]))} == {}


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
        AttributeError, match=r"^module 'capture' has no attribute 'Clusters'; its public names are AdditivePredictor, AlpaOptions, "
    ):
        capture.Clusters  # noqa: B018
