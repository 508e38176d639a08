"""Plans of lowest peak memory: from a profile to an answer, and the searches behind it. Never loads
JAX.

The public names load their module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recommender.answer import Answer
    from recommender.capture.extent import cheapest_cluster
    from recommender.capture.problem import NEVER, SearchProblem
    from recommender.capture.recommendation import baseline_plan, recommend
    from recommender.capture.result import PlacedStage, SearchResult
    from recommender.capture.search import search
    from recommender.money import Accountant, Terms
    from recommender.question import PlanQuestion
    from recommender.saving import Saving

__all__ = [
    "NEVER",
    "Accountant",
    "Answer",
    "PlacedStage",
    "PlanQuestion",
    "Saving",
    "SearchProblem",
    "SearchResult",
    "Terms",
    "baseline_plan",
    "cheapest_cluster",
    "recommend",
    "search",
]

_MODULE_OF = {
    "Accountant": "recommender.money",
    "Answer": "recommender.answer",
    "NEVER": "recommender.capture.problem",
    "PlacedStage": "recommender.capture.result",
    "PlanQuestion": "recommender.question",
    "Saving": "recommender.saving",
    "SearchProblem": "recommender.capture.problem",
    "SearchResult": "recommender.capture.result",
    "Terms": "recommender.money",
    "baseline_plan": "recommender.capture.recommendation",
    "cheapest_cluster": "recommender.capture.extent",
    "recommend": "recommender.capture.recommendation",
    "search": "recommender.capture.search",
}


def __getattr__(name: str) -> Any:
    """Return a public name, from the module that defines it (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
