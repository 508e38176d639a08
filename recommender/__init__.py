"""Plans of lowest peak memory: from a profile to an answer, and the searches behind it. Never loads
JAX.

The public names load their module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recommender.answer import Answer
    from recommender.capture.problem import NEVER, SearchProblem
    from recommender.capture.recommendation import baseline_plan, recommend
    from recommender.capture.result import Infeasible, PlacedStage, SearchResult
    from recommender.capture.search import search
    from recommender.question import PlanQuestion

__all__ = [
    "NEVER",
    "Answer",
    "Infeasible",
    "PlacedStage",
    "PlanQuestion",
    "SearchProblem",
    "SearchResult",
    "baseline_plan",
    "recommend",
    "search",
]

_MODULE_OF = {
    "Answer": "recommender.answer",
    "Infeasible": "recommender.capture.result",
    "NEVER": "recommender.capture.problem",
    "PlacedStage": "recommender.capture.result",
    "PlanQuestion": "recommender.question",
    "SearchProblem": "recommender.capture.problem",
    "SearchResult": "recommender.capture.result",
    "baseline_plan": "recommender.capture.recommendation",
    "recommend": "recommender.capture.recommendation",
    "search": "recommender.capture.search",
}


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that defines it (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
