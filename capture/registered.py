"""The searches, baselines and modes of papers, and what installed packages add, by name; each is
imported when it is first called.

The library imports nothing of ``capture.papers`` (an import contract): the table below is the only
place that knows where a paper's part is, and the verbs ask it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Registered:
    """A function or class that is imported when it is called.

    Attributes:
        path: ``module:name``.
    """

    path: str

    def load(self) -> Any:
        """Import the registered object and return it."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.load()(*values, **named)


#: What a paper's part does -> its name among the options of a verb -> where it is.
_PATHS = {
    "search of model arrays": {
        "paper": "capture.papers.mutwo.choices:as_printed",
        "corrected": "capture.papers.mutwo.choices:corrected",
    },
    "search of stages": {
        "enumerate": "capture.papers.capture.enumerate:enumerate_plans",
        "mcap": "capture.papers.capture.mcap:mcap",
        "mcap-bf": "capture.papers.capture.mcap:mcap_brute_force",
        "autostage": "capture.papers.alpa.autostage:autostage",
    },
    "search of shardings": {"depth-first": "capture.papers.osdp.depth_first:depth_first"},
    "profiling runs": {
        "run": "capture.papers.capture.run:RunBackend",
        "alpa": "capture.papers.alpa.backend:AlpaBackend",
    },
    "profile of the paper": {
        "compiled": "capture.papers.capture.executions:compiled_profile",
        "executed": "capture.papers.capture.executions:executed_profile",
        "configs": "capture.papers.capture.executions:configs",
        "most devices": "capture.papers.capture.profile:most_run_devices",
    },
    "layer merger": {"paper": "capture.papers.capture.profile:merged_bounds"},
    "estimates of packs": {"released": "capture.papers.harmony.estimate:estimate"},
    "predictor of stages": {"paper": "capture.papers.capture.predictor:predictor_of"},
    "baselines": {
        "stages": "capture.papers.capture.baselines:baseline_plan",
        "model arrays": "capture.papers.mutwo.baselines:all_baselines",
        "packs": "capture.papers.harmony.baselines:all_baselines",
    },
}
REGISTERED: Mapping[str, Mapping[str, Registered]] = MappingProxyType(
    {
        part: MappingProxyType({name: Registered(path) for name, path in paths.items()})
        for part, paths in _PATHS.items()
    }
)


def installed(group: str) -> Mapping[str, Registered]:
    """Return what installed packages add to a group, by name: their entry points of the group
    ``capture.kinds`` or ``capture.remats``.

    A process that this one starts knows them, too, as it finds modules on the same path.
    """
    return _installed(f"capture.{group}", tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> Mapping[str, Registered]:
    from importlib.metadata import entry_points  # takes as long to import as all of this package

    return {point.name: Registered(point.value) for point in entry_points(group=group)}
