"""Searches for the plan with the least peak memory. Pure NumPy: never loads JAX."""

from recommender.problem import NEVER, InFlightCost, SearchProblem
from recommender.result import Infeasible, PlacedStage, SearchResult
from recommender.search import search

__all__ = [
    "NEVER",
    "InFlightCost",
    "Infeasible",
    "PlacedStage",
    "SearchProblem",
    "SearchResult",
    "search",
]
