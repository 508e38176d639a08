"""Plans of least peak memory: from a profile to a recommendation, and the searches behind it. Never loads JAX."""

from recommender.problem import NEVER, InFlightCost, SearchProblem
from recommender.recommendation import Recommendation, baseline_plan, recommend
from recommender.result import Infeasible, PlacedStage, SearchResult
from recommender.search import search

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
