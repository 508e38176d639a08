"""Which operators to shard, and for which batch size: ``osdp`` for a training task, the searches,
and strategies to compare with."""

from capture.plan.sharding import ShardingPlan
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.question import ShardingQuestion
from recommender.osdp.recommendation import osdp
from recommender.osdp.result import ShardingResult
from recommender.osdp.search import search

__all__ = [
    "ShardingPlan",
    "ShardingProblem",
    "ShardingQuestion",
    "ShardingResult",
    "osdp",
    "search",
]
