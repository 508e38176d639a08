"""Sharding plans (OSDP): which operators to shard, and for which batch size. ``osdp`` plans a
training task, and ``search`` solves one problem."""

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
