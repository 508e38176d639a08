"""Plans of model arrays (mu-TWO): which models are fused, which multiplexed, and what becomes of
their feature maps. ``mutwo`` answers a question of models, and ``search`` solves one problem."""

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
