"""The jobs that collect profiles: what is asked, what to run for it, where to run it.

The public names load their module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiling_runs.collect import profile
    from profiling_runs.layer_question import LayersQuestion
    from profiling_runs.layers import profile_layers
    from profiling_runs.pools.where import Where
    from profiling_runs.question import ProfileQuestion

__all__ = ["LayersQuestion", "ProfileQuestion", "Where", "profile", "profile_layers"]

_MODULE_OF = {
    "LayersQuestion": "profiling_runs.layer_question",
    "ProfileQuestion": "profiling_runs.question",
    "Where": "profiling_runs.pools.where",
    "profile": "profiling_runs.collect",
    "profile_layers": "profiling_runs.layers",
}


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that defines it (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
