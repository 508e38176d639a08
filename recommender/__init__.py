"""Plans of lowest peak memory: from a profile to an answer, and the searches behind it. Never loads
JAX."""

from recommender.answer import Answer
from recommender.capture.problem import NEVER, InFlightCost, SearchProblem
from recommender.capture.recommendation import baseline_plan, recommend
from recommender.capture.result import Infeasible, PlacedStage, SearchResult
from recommender.capture.search import search
from recommender.question import PlanQuestion

__all__ = [
    "NEVER",
    "Answer",
    "InFlightCost",
    "Infeasible",
    "PlacedStage",
    "PlanQuestion",
    "SearchProblem",
    "SearchResult",
    "baseline_plan",
    "recommend",
    "search",
]
