"""Which operators to shard, and for which batch size: the searches of OSDP, and the strategies that it is compared with."""

from capture.osdp.plan import ShardingPlan
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.result import ShardingResult
from recommender.osdp.search import search

__all__ = ["ShardingPlan", "ShardingProblem", "ShardingResult", "search"]
