"""Which models of an array are fused, which multiplexed, and what becomes of their feature maps:
``mutwo`` for a task, models and a limit, and the search."""

from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.recommendation import ArrayAnswer, ArrayQuestion, mutwo, plan_array
from recommender.mutwo.search import ArrayResult, search

__all__ = [
    "ArrayAnswer",
    "ArrayProblem",
    "ArrayQuestion",
    "ArrayResult",
    "mutwo",
    "plan_array",
    "search",
]
