"""Runs in Alpa's own environment (``make alpa``): the library is imported from this repository,
with nothing of its own installed."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import shims  # noqa: E402  # isort: skip
import jax  # noqa: E402
import pytest  # noqa: E402
from alpa.pipeline_parallel import layer_construction  # noqa: E402

from capture.papers.alpa import worker  # noqa: E402

assert shims


@pytest.fixture
def as_worker(monkeypatch):
    """What the worker changes in JAX and Alpa before it loads a workload; undone after the test."""
    for module, name in (
        (jax.ad_checkpoint, "checkpoint_name"),
        (layer_construction, "add_pipeline_marks_for_sliced_eqns"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    worker.mark_layers()
    worker.let_scalars_cross()
