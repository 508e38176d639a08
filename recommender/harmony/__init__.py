"""Plans of packs (Harmony): which layers a device holds at a time, and for how many examples.
``harmony`` answers a question of layers and a server, and ``search`` solves one problem."""

from capture.plan.packs import PacksPlan
from recommender.harmony.problem import PacksProblem
from recommender.harmony.question import PacksQuestion
from recommender.harmony.recommendation import harmony
from recommender.harmony.result import PacksResult
from recommender.harmony.search import search

__all__ = [
    "PacksPlan",
    "PacksProblem",
    "PacksQuestion",
    "PacksResult",
    "harmony",
    "search",
]
