"""Which operators to shard, and for which batch size: the searches of OSDP, and the strategies that it is compared with."""

from recommender.osdp.problem import ShardingProblem
from recommender.osdp.result import ShardingPlan, ShardingResult
from recommender.osdp.search import search

__all__ = ["ShardingPlan", "ShardingProblem", "ShardingResult", "search"]
