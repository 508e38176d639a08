"""Runs in Alpa's own environment (``make alpa``): the library is imported from this repository, with nothing of its own installed."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import shims  # noqa: E402

assert shims
