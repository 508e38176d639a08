"""Plans of least peak memory: from a profile to a recommendation, and the searches behind it. Never
loads JAX."""

from recommender.capture.problem import NEVER, InFlightCost, SearchProblem
from recommender.capture.recommendation import Recommendation, baseline_plan, recommend
from recommender.capture.result import Infeasible, PlacedStage, SearchResult
from recommender.capture.search import search

__all__ = [
    "NEVER",
    "InFlightCost",
    "Infeasible",
    "PlacedStage",
    "Recommendation",
    "SearchProblem",
    "SearchResult",
    "baseline_plan",
    "recommend",
    "search",
]
