"""Set-up of every test process, the workers of pytest-xdist included: eight virtual CPU devices,
and the same examples each time."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from processes import QUICK_CODE, REPOSITORY

from capture import environment
from capture.errors import CaptureError

if (
    "jax" in sys.modules
    # a plugin imported it: the devices can no longer be set, and the multi-device tests would
    # fail one
    # by one
):
    raise RuntimeError(
        "jax was imported before tests/conftest.py; disable the pytest plugin that does so."
    )
os.environ.setdefault("XLA_FLAGS", QUICK_CODE)
# Processes that tests start read the bytecode that the first of them wrote, and a program is
# compiled once for all of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
COMPILED = REPOSITORY / ".pytest_cache/compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
CaptureError.check(environment.prepare(num_devices=8))

MOST_COMPILED_BYTES = 2**29

# What is imported and collected lives as long as the process: nothing is garbage before the tests,
# and looking through all of it again and again takes a part of their time.
gc.disable()

#: What other processes run, and models as users write them: nothing to import here.
#: A folder's own conftest.py takes this one's name.
collect_ignore = ["programs", "user_models", "conftest.py"]

settings.register_profile("repeatable", derandomize=True, deadline=None)
# For mutants (benchmarks/mutation.py), where the first failure is all that counts.
settings.register_profile(
    "unshrunk", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("repeatable")

#: Files that take long, the longest first; they are given out in this order, so that the processes
#: of pytest-xdist end together.
_LONG = [
    f"test_{name}.py"
    for name in [
        "cli",
        "recorded",
        "pipeline",
        "target_compile",
        "every_cell",
        "array",
        "stages_on_hosts",
        "hosts_cli",
        "bounds_of_kept",
        "layer_facts",
        "model_sizes",
        "bounds_first",
        "flash_attention",
        "hosts",
        "hosts_resume",
        "examples",
        "hosts_strangers",
        "streamed_swaps",
        "model_kit",
        "peers",
        "every_schedule",
        "streamed_training",
        "packs",
        "batch_split",
        "bounds",
        "tracing",
        "throughput",
        "refine",
        "profiling",
        "optimizer",
        "osdp_shardings",
        "odd_losses",
        "models",
        "whole_question",
        "osdp_verified",
        "grouped",
        "step",
        "sequence_parallel",
        "run_backend",
        "osdp_sharded",
        "fix",
        "timeline",
        "residuals",
        "run_ahead",
        "traced_work",
        "sharded_run",
        "array_zoo",
        "osdp_target",
        "meter",
        "array_training",
        "layers_alone",
        "readme",
        "report_page",
        "layer_order",
        "estimate",
        "search",
        "mutwo_search",
        "simulator_memory",
        "osdp_search",
        "untrusted_files",
        "harmony_results",
        "layers_cli",
    ]
]


@pytest.fixture(autouse=True)
def nothing_is_remembered(request, monkeypatch, tmp_path_factory):
    """What other tests, and whoever runs them, have named on command lines is not trusted: unless a
    test has a cache folder of its own, it begins with nothing."""
    theirs, path_of = os.environ.get("XDG_CACHE_HOME"), environment.named_workloads_path
    own = tmp_path_factory.getbasetemp() / f"workloads-{abs(hash(request.node.nodeid))}.jsonl"

    def path() -> Path:
        return own if os.environ.get("XDG_CACHE_HOME") == theirs else path_of()

    monkeypatch.setattr(environment, "named_workloads_path", path)


def pytest_sessionstart(session):
    """Programs that other versions of the code needed do not pile up."""
    if "PYTEST_XDIST_WORKER" not in os.environ and COMPILED.exists():
        kept = [path.stat().st_size for path in COMPILED.iterdir()]
        if sum(kept) > MOST_COMPILED_BYTES:
            shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_collection_finish():
    """From here on garbage is looked for among what tests make, and not so often as by default."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
